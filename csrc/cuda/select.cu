// Top-k of each row of scores to sorted indices, by radix select (select.cuh): see kvc_select_topk in kvc.h.
//
// Must move: 4*R*T bytes once from memory (the passes after the first are served by L2 up to its size: a row is read 6
// times) and 4*R*k bytes of indices. One block per row: with fewer rows than SMs the ceiling is what one SM can read.
#include "kvc_cuda.h"
#include "select.cuh"

namespace {

__global__ __launch_bounds__(MOST_THREADS) void select_kernel(const kvc_select_topk_args a) {
    const int64_t row = blockIdx.x, length = a.lengths ? a.lengths[row] : a.T;
    int32_t* indices = a.indices + row * a.k;
    select_row(a.scores + row * a.T, length < 0 ? 0 : length > a.T ? a.T : length, a.k,
               [&](int64_t j, int64_t place) { indices[j] = static_cast<int32_t>(place); });
}

}  // namespace

extern "C" cudaError_t kvc_cuda_select_topk(const kvc_select_topk_args* args, cudaStream_t stream) {
    const kvc_select_topk_args& a = *args;
    if (a.R < 0 || a.T < 0 || a.T > INT32_MAX || a.k < 0 || a.k > a.T || a.R > MAX_GRID_X) return cudaErrorInvalidValue;
    if (a.R == 0 || a.k == 0) return cudaSuccess;
    if (!a.indices || !a.scores) return cudaErrorInvalidValue;
    KVC_LAUNCH(select_kernel, static_cast<unsigned>(a.R), select_threads(a.T), 0, stream, a);
    return cudaSuccess;
}
