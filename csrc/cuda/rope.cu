// Rotary position embedding: see kvc_rope in kvc.h.
//
// Must move: x once in and out once out, 2*B*H*T*D*(bytes of a number); the tables, 4*rotary_dim bytes per token,
// come from cache because all H heads of a token read the same row. 6 flops per pair: the ceiling is memory bandwidth.
#include "kvc_cuda.h"
#include "types.cuh"

namespace {

constexpr int THREADS = 256;

// `lanes` neighbouring threads take one row (b, h, t); an item is VEC pairs, or VEC elements past rotary_dim.
template <class X, int VEC>
__global__ __launch_bounds__(THREADS) void rope_kernel(const kvc_rope_args a, int lanes) {
    const int64_t half = a.rotary_dim / 2, pairs = half / VEC, items = pairs + (a.D - a.rotary_dim) / VEC;
    const int64_t rows = a.B * a.H * a.T, step = gridDim.x * static_cast<int64_t>(THREADS / lanes);
    int64_t row = blockIdx.x * static_cast<int64_t>(THREADS / lanes) + threadIdx.x / lanes;
    for (; row < rows; row += step) {
        const int64_t t = row % a.T, h = row / a.T % a.H, b = row / a.T / a.H;
        const X* x = static_cast<const X*>(a.x.data) + b * a.x.stride_b + h * a.x.stride_h + t * a.x.stride_t;
        X* out = static_cast<X*>(a.out.data) + b * a.out.stride_b + h * a.out.stride_h + t * a.out.stride_t;
        const int64_t position = a.positions ? a.positions[b * a.T + t] : t;
        const bool inside = position >= 0 && position < a.table_rows;
        for (int64_t item = threadIdx.x % lanes; item < items; item += lanes) {
            float first[VEC];
            if (item >= pairs) {
                const int64_t d = a.rotary_dim + (item - pairs) * VEC;
                load<VEC>(first, x + d);
                store<VEC>(out + d, first);
                continue;
            }
            const int64_t i = item * VEC;
            float second[VEC], rotated_first[VEC], rotated_second[VEC];
            load<VEC>(first, x + i);
            load<VEC>(second, x + i + half);
            KVC_UNROLL
            for (int e = 0; e < VEC; e++) {
                const float c = inside ? a.cos[position * half + i + e] : NAN;
                const float sine = inside ? a.sin[position * half + i + e] : NAN, s = a.inverse ? -sine : sine;
                rotated_first[e] = first[e] * c - second[e] * s;
                rotated_second[e] = second[e] * c + first[e] * s;
            }
            // Both halves were read by this thread before either is written: out may be x
            store<VEC>(out + i, rotated_first);
            store<VEC>(out + i + half, rotated_second);
        }
    }
}

template <class X, int VEC>
cudaError_t launch(const kvc_rope_args& a, cudaStream_t stream) {
    const int lanes = lanes_for((a.D - a.rotary_dim / 2) / VEC);
    const int64_t blocks = ceil_div(a.B * a.H * a.T, THREADS / lanes);
    const unsigned grid = static_cast<unsigned>(blocks < MAX_GRID_X ? blocks : MAX_GRID_X);
    KVC_LAUNCH((rope_kernel<X, VEC>), grid, THREADS, 0, stream, a, lanes);
    return cudaSuccess;
}

}  // namespace

extern "C" cudaError_t kvc_cuda_rope(const kvc_rope_args* args, cudaStream_t stream) {
    const kvc_rope_args& a = *args;
    if (a.B < 0 || a.H < 0 || a.T < 0 || a.D < 0 || a.rotary_dim < 0 || a.rotary_dim > a.D || a.rotary_dim % 2 ||
        a.table_rows < 0 || !dtype_known(a.x.dtype) || a.out.dtype != a.x.dtype)
        return cudaErrorInvalidValue;
    if (a.B == 0 || a.H == 0 || a.T == 0 || a.D == 0) return cudaSuccess;
    if (!a.x.data || !a.out.data) return cudaErrorInvalidValue;
    if (a.rotary_dim > 0 && ((!a.positions && a.T > a.table_rows) || (a.table_rows > 0 && (!a.cos || !a.sin))))
        return cudaErrorInvalidValue;
    return with_dtype(a.x.dtype, [&](auto x) {
        using X = decltype(x);
        constexpr int VEC = PER_16_BYTES<X>;
        const bool fits = a.D % VEC == 0 && a.rotary_dim / 2 % VEC == 0 && aligned_16(a.x) && aligned_16(a.out);
        return fits ? launch<X, VEC>(a, stream) : launch<X, 1>(a, stream);
    });
}
