// Vectors as codes and one scale each, and back: see kvc_quantize in kvc.h.
//
// Must move: the vectors once and their codes once, 3 bytes an element of 16 bits; a warp has a vector, whose largest
// element and (of 4 bits) turning are shuffles. The bits are those of the CPU: the same sums in the same order.
#include "codes.cuh"
#include "kvc_cuda.h"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;

__global__ __launch_bounds__(THREADS) void quantize_kernel(const kvc_quantize_args a, int64_t count) {
    const int D = static_cast<int>(a.D), lane = threadIdx.x % 32, bits = a.kind == KVC_INT4 ? 4 : 8;
    const int64_t between = gridDim.x * static_cast<int64_t>(WARPS);
    for (int64_t n = blockIdx.x * static_cast<int64_t>(WARPS) + threadIdx.x / 32; n < count; n += between) {
        const int64_t all = quotient(n, a.T), t = n - all * a.T, b = quotient(all, a.H), h = all - b * a.H;
        const int64_t from = b * a.x.stride_b + h * a.x.stride_h + t * a.x.stride_t;
        with_elements(D, [&](auto& x) {
            KVC_UNROLL
            for (int i = 0; i < static_cast<int>(sizeof x / sizeof(float)); i++)
                if (32 * i + lane < D) x[i] = load_any(a.x.data, a.x.dtype, from + 32 * i + lane);
            quantize_vector(x, D, bits, static_cast<char*>(a.codes) + n * D * bits / 8, static_cast<f16*>(a.scales) + n);
        });
    }
}

__global__ __launch_bounds__(THREADS) void dequantize_kernel(const kvc_dequantize_args a) {
    const int D = static_cast<int>(a.D), lane = threadIdx.x % 32, bits = a.kind == KVC_INT4 ? 4 : 8;
    const int64_t between = gridDim.x * static_cast<int64_t>(WARPS);
    for (int64_t n = blockIdx.x * static_cast<int64_t>(WARPS) + threadIdx.x / 32; n < a.N; n += between) {
        const float scale = to_float(static_cast<const f16*>(a.scales)[n]);
        const char* codes = static_cast<const char*>(a.codes) + n * D * bits / 8;
        with_elements(D, [&](auto& x) {
            constexpr int EACH = static_cast<int>(sizeof x / sizeof(float));
            KVC_UNROLL
            for (int i = 0; i < EACH; i++)
                if (32 * i + lane < D) x[i] = scale * code_of(codes, bits, 32 * i + lane, D);
            if (bits == 4) turn_vector(x, D);
            KVC_UNROLL
            for (int i = 0; i < EACH; i++)
                if (32 * i + lane < D) store_any(a.x, a.dtype, n * D + 32 * i + lane, x[i]);
        });
    }
}

bool valid_kind(kvc_codes kind, int64_t D) {
    return D >= 1 && D <= KVC_CUDA_MAX_HEAD_DIM && (kind == KVC_INT8 || (kind == KVC_INT4 && D % 2 == 0));
}

unsigned blocks_for(int64_t vectors) {
    const int64_t blocks = ceil_div(vectors, WARPS);
    return static_cast<unsigned>(blocks < MAX_GRID_X ? blocks : MAX_GRID_X);
}

}  // namespace

extern "C" cudaError_t kvc_cuda_quantize(const kvc_quantize_args* args, cudaStream_t stream) {
    const kvc_quantize_args& a = *args;
    if (a.B < 0 || a.H < 0 || a.T < 0 || !valid_kind(a.kind, a.D) || !dtype_known(a.x.dtype)) return cudaErrorInvalidValue;
    const int64_t count = a.B * a.H * a.T;
    if (count == 0) return cudaSuccess;
    if (count > UINT32_MAX) return cudaErrorInvalidValue;  // they are counted in 32 bits
    if (!a.codes || !a.scales || !a.x.data) return cudaErrorInvalidValue;
    KVC_LAUNCH(quantize_kernel, blocks_for(count), THREADS, 0, stream, a, count);
    return cudaSuccess;
}

extern "C" cudaError_t kvc_cuda_dequantize(const kvc_dequantize_args* args, cudaStream_t stream) {
    const kvc_dequantize_args& a = *args;
    if (a.N < 0 || !valid_kind(a.kind, a.D) || !dtype_known(a.dtype)) return cudaErrorInvalidValue;
    if (a.N == 0) return cudaSuccess;
    if (!a.x || !a.codes || !a.scales) return cudaErrorInvalidValue;
    KVC_LAUNCH(dequantize_kernel, blocks_for(a.N), THREADS, 0, stream, a);
    return cudaSuccess;
}
