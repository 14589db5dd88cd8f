// Joining attention over two disjoint sets of keys: see kvc_merge_states in kvc.h.
//
// Must move: 3*N*D elements and 12*N bytes of lse. A few flops per element: the ceiling is memory bandwidth.
#include "kvc_cuda.h"
#include "types.cuh"

namespace {

constexpr int THREADS = 256;

template <class T, int VEC>
__global__ __launch_bounds__(THREADS) void merge_kernel(const kvc_merge_states_args a, int lanes) {
    const int64_t items = a.D / VEC, step = gridDim.x * static_cast<int64_t>(THREADS / lanes);
    const int64_t first = blockIdx.x * static_cast<int64_t>(THREADS / lanes) + threadIdx.x / lanes;
    const int lane = static_cast<int>(threadIdx.x) % lanes;
    // Every lane runs every round, so that the whole warp meets at __syncwarp
    for (int64_t round = 0; round * step < a.N; round++) {
        const int64_t row = first + round * step;
        const bool here = row < a.N;
        const float lse_a = here ? a.lse_a[row] : -INFINITY, lse_b = here ? a.lse_b[row] : -INFINITY;
        __syncwarp();  // lse may be lse_a: all lanes have read the row's value before one of them replaces it
        if (!here) continue;
        const bool no_a = lse_a == -INFINITY, no_b = lse_b == -INFINITY;
        const float m = fmaxf(lse_a, lse_b);
        // -inf - -inf is no number: an empty side is left out by name, also where its out holds NaN
        const float w_a = no_a ? 0.0f : expf(lse_a - m), w_b = no_b ? 0.0f : expf(lse_b - m), sum = w_a + w_b;
        for (int64_t item = lane; item < items; item += lanes) {
            const int64_t at = row * a.D + item * VEC;
            float x[VEC], y[VEC], merged[VEC];
            load<VEC>(x, static_cast<const T*>(a.out_a) + at);
            load<VEC>(y, static_cast<const T*>(a.out_b) + at);
            KVC_UNROLL
            for (int e = 0; e < VEC; e++) {
                const float both = (no_a ? 0.0f : w_a * x[e]) + (no_b ? 0.0f : w_b * y[e]);
                merged[e] = no_a && no_b ? 0.0f : both / sum;
            }
            store<VEC>(static_cast<T*>(a.out) + at, merged);
        }
        if (lane == 0) a.lse[row] = no_a && no_b ? -INFINITY : m + logf(sum);
    }
}

template <class T, int VEC>
cudaError_t launch(const kvc_merge_states_args& a, cudaStream_t stream) {
    const int lanes = lanes_for(a.D / VEC);
    const int64_t blocks = ceil_div(a.N, THREADS / lanes);
    const unsigned grid = static_cast<unsigned>(blocks < MAX_GRID_X ? blocks : MAX_GRID_X);
    KVC_LAUNCH((merge_kernel<T, VEC>), grid, THREADS, 0, stream, a, lanes);
    return cudaSuccess;
}

}  // namespace

extern "C" cudaError_t kvc_cuda_merge_states(const kvc_merge_states_args* args, cudaStream_t stream) {
    const kvc_merge_states_args& a = *args;
    if (a.N < 0 || a.D < 0 || !dtype_known(a.dtype)) return cudaErrorInvalidValue;
    if (a.N == 0 || a.D == 0) return cudaSuccess;
    if (!a.out || !a.lse || !a.out_a || !a.out_b || !a.lse_a || !a.lse_b) return cudaErrorInvalidValue;
    return with_dtype(a.dtype, [&](auto element) {
        using T = decltype(element);
        constexpr int VEC = PER_16_BYTES<T>;
        if (a.D % VEC == 0 && aligned_16(a.out) && aligned_16(a.out_a) && aligned_16(a.out_b))
            return launch<T, VEC>(a, stream);
        return launch<T, 1>(a, stream);
    });
}
