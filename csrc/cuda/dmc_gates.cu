// The gates of DMC: see kvc_dmc_decisions, kvc_dmc_importance and kvc_dmc_mask in kvc.h.
//
// Must move: decisions 12 bytes per gate out and the logits in; importance 4 out and G logits in; mask 4 in and 4 out.
// The logits of a neuron lie D elements apart, so that a sector of 32 bytes is read for each: the ceiling is memory
// bandwidth over sectors. About 120 integer operations per gate that is drawn, hidden behind it.
#include "gates.cuh"

namespace {

constexpr int THREADS = 256;
__device__ inline int64_t first_item() { return blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; }

__device__ inline int64_t items_between() { return gridDim.x * static_cast<int64_t>(THREADS); }

__global__ __launch_bounds__(THREADS) void decisions_kernel(const kvc_dmc_decisions_args a) {
    for (int64_t i = first_item(); i < a.B * a.H * a.T; i += items_between()) {
        const int64_t t = i % a.T, h = i / a.T % a.H, b = i / a.T / a.H;
        float y = decision_at(gate_at(a.x, b, h, t), a.scale, a.shift);
        if (a.drawn)
            y = kvc_add(y, kvc_logistic(kvc_counter(a.token, t), kvc_counter(a.stream, h), kvc_counter(a.sample, b),
                                        a.offset, a.seed));
        else if (a.noise)
            y = kvc_add(y, a.noise[i]);
        const bool merges = y > a.margin;
        const float tempered = a.only_hard ? (merges ? INFINITY : -INFINITY) : y / a.temperature;
        a.tempered[i] = tempered;
        a.alpha[i] = sigmoid(tempered);
        a.hard[i] = merges ? 1.0f : 0.0f;
    }
}

__global__ __launch_bounds__(THREADS) void importance_kernel(const kvc_dmc_importance_args a) {
    for (int64_t i = first_item(); i < a.B * a.Hkv * a.T; i += items_between()) {
        const int64_t t = i % a.T, h = i / a.T % a.Hkv, b = i / a.T / a.Hkv;
        a.omega[i] = importance_at(a.x, b, h, t, a.Hq / a.Hkv, a.shift, a.eps, a.reduce);
    }
}

// ln(1 - sigmoid(x)), which an alpha rounded to 1 no longer tells; a NaN passes.
__device__ inline float hiding(float x) { return -((x < 0.0f ? 0.0f : x) + log1pf(expf(-fabsf(x)))); }

__global__ __launch_bounds__(THREADS) void mask_kernel(const kvc_dmc_mask_args a) {
    for (int64_t i = first_item(); i < a.B * a.H * a.T; i += items_between()) {
        a.bias[i] = i % a.T + 1 < a.T ? hiding(a.tempered[i + 1]) : 0.0f;
    }
}

unsigned grid_for(int64_t items) {
    const int64_t blocks = ceil_div(items, THREADS);
    return static_cast<unsigned>(blocks < MAX_GRID_X ? blocks : MAX_GRID_X);
}

}  // namespace

extern "C" cudaError_t kvc_cuda_dmc_decisions(const kvc_dmc_decisions_args* args, cudaStream_t stream) {
    const kvc_dmc_decisions_args& a = *args;
    if (a.B < 0 || a.H < 0 || a.T < 0 || (a.drawn && a.noise) || !dtype_known(a.x.dtype)) return cudaErrorInvalidValue;
    if (a.B == 0 || a.H == 0 || a.T == 0) return cudaSuccess;
    if (!a.x.data || !a.alpha || !a.hard || !a.tempered) return cudaErrorInvalidValue;
    KVC_LAUNCH(decisions_kernel, grid_for(a.B * a.H * a.T), THREADS, 0, stream, a);
    return cudaSuccess;
}

extern "C" cudaError_t kvc_cuda_dmc_importance(const kvc_dmc_importance_args* args, cudaStream_t stream) {
    const kvc_dmc_importance_args& a = *args;
    if (a.B < 0 || a.Hq < 0 || a.Hkv < 0 || a.T < 0 || !dtype_known(a.x.dtype)) return cudaErrorInvalidValue;
    if (a.Hkv ? a.Hq % a.Hkv != 0 || a.Hq == 0 : a.Hq != 0) return cudaErrorInvalidValue;
    if (a.reduce != KVC_MEAN_LOGIT && a.reduce != KVC_MEAN_SIGMOID && a.reduce != KVC_FIRST_HEAD)
        return cudaErrorInvalidValue;
    if (a.B == 0 || a.Hkv == 0 || a.T == 0) return cudaSuccess;
    if (!a.x.data || !a.omega) return cudaErrorInvalidValue;
    KVC_LAUNCH(importance_kernel, grid_for(a.B * a.Hkv * a.T), THREADS, 0, stream, a);
    return cudaSuccess;
}

extern "C" cudaError_t kvc_cuda_dmc_mask(const kvc_dmc_mask_args* args, cudaStream_t stream) {
    const kvc_dmc_mask_args& a = *args;
    if (a.B < 0 || a.H < 0 || a.T < 0) return cudaErrorInvalidValue;
    if (a.B == 0 || a.H == 0 || a.T == 0) return cudaSuccess;
    if (!a.bias || !a.tempered) return cudaErrorInvalidValue;
    KVC_LAUNCH(mask_kernel, grid_for(a.B * a.H * a.T), THREADS, 0, stream, a);
    return cudaSuccess;
}
