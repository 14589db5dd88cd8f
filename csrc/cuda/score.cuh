// What both ways of computing window_scores share: which keys a query sees, softmax statistics, sums of columns.
#pragma once
#include "kvc_cuda.h"
#include "types.cuh"

__device__ inline int64_t keys_of(const kvc_window_scores_args& a, int64_t b) {
    const int64_t length = a.lengths ? a.lengths[b] : a.T;
    return length < 0 ? 0 : length > a.T ? a.T : length;
}

// End of the keys that a query sees; it sees those from mask_first on.
__host__ __device__ inline int64_t seen_end(const kvc_window_scores_args& a, int64_t length, int64_t query) {
    const int64_t causal = length - a.W + query + 1, unmasked = length - a.mask_last;
    return causal < unmasked ? causal : unmasked;
}

// The last query among the rows [n0, end) of a KV head, of which row n is query n % W of its head n / W.
__host__ __device__ inline int64_t latest_query(const kvc_window_scores_args& a, int64_t n0, int64_t end) {
    return (end - 1) / a.W > n0 / a.W ? a.W - 1 : (end - 1) % a.W;
}

__device__ inline float logit_of(const kvc_window_scores_args& a, float product) {
    const float logit = product * a.scale;
    return a.softcap > 0.0f ? a.softcap * tanh_of_logit(logit, a.softcap) : logit;
}

// (m, l) of a softmax, maximum and sum, joined with another; m = -inf: nothing seen, or only logits of -inf.
__device__ inline void join(float& m, float& l, float other_m, float other_l) {
    const float top = fmaxf(m, other_m), shift = top == -INFINITY ? 0.0f : top;
    l = l * expf(m - shift) + other_l * expf(other_m - shift);
    m = top;
}

__device__ inline float reduce(float x, float y, bool maximum) {
    return !maximum ? x + y : x > y || x != x ? x : y;  // fmaxf would lose NaN
}

// scores = columns [B, Hkv, T - skip_last] pooled; nothing to do for a kernel_size of 1.
cudaError_t pool_columns(const kvc_window_scores_args& a, const float* columns, cudaStream_t stream);

// Bytes of the columns before pooling.
inline int64_t column_bytes(const kvc_window_scores_args& a) {
    return a.kernel_size > 1 ? ceil_div(a.B * a.Hkv * (a.T - a.skip_last) * static_cast<int64_t>(sizeof(float)), 64) * 64
                             : 0;
}

// ---- score_mma.cu: for valid arguments that are not empty ----

// Whether the products go to tensor cores: queries and keys of one 16-bit type.
bool suits_mma(const kvc_window_scores_args& a);
int64_t mma_scratch_bytes(const kvc_window_scores_args& a);
cudaError_t score_by_mma(const kvc_window_scores_args& a, cudaStream_t stream);
