/* Attention with queries along the lanes: the steps that attention.c and decode.c share. */
#include "lanes.h"

#include <math.h>
#include <string.h>

enum { DEPTH = 128 }; /* head dims per sum where there are many: a long one rounds too often */

void kvc_lanes_begin(kvc_lanes_state *state) {
    for (int64_t i = 0; i < KVC_TILE; i++) {
        state->max[i] = -INFINITY;
        state->norm[i] = 0.0f;
    }
    memset(state->sums, 0, (size_t)(state->queries * state->D) * sizeof(float));
}

void kvc_lanes_product(const kvc_simd *simd, float *x, const float *rows, int64_t stride, const float *columns, int64_t n,
                       int64_t D) {
    const int64_t most = D > 256 ? DEPTH : D;
    for (int64_t d = 0; d < D; d += most) {
        simd->gemm(x, KVC_TILE, rows + d, stride, 1, columns + d * KVC_TILE, KVC_TILE, n, KVC_TILE, min_of(most, D - d),
                   d > 0);
    }
}

void kvc_lanes_logits(const kvc_lanes_state *state, const kvc_lanes *lanes, const float *k, int64_t k_stride, int64_t t,
                      int64_t n, const float *bias, int hide, float *x) {
    kvc_lanes_product(state->simd, x, k, k_stride, state->q, n, state->D);
    if (state->softcap > 0.0f) state->simd->softcap(x, n * KVC_TILE, 1.0f, state->softcap, state->slope);
    if (bias) state->simd->lanes_bias(x, n, (int32_t)t, bias, lanes);
    if (hide) state->simd->lanes_hide(x, n, (int32_t)t, lanes);
}

void kvc_lanes_weigh(kvc_lanes_state *state, float *x, int64_t n) {
    float factor[KVC_TILE];
    state->simd->lanes_softmax(x, n, state->max, state->norm, factor);
    for (int64_t i = 0; i < state->queries; i++) {
        if (factor[i] == 1.0f) continue; /* the maximum stayed, as it mostly does */
        float *sums = state->sums + i * state->D;
        for (int64_t d = 0; d < state->D; d++) sums[d] *= factor[i];
    }
}

void kvc_lanes_add(const kvc_lanes_state *state, const float *x, const float *v, int64_t v_stride, int64_t n) {
    state->simd->gemm(state->sums, state->D, x, 1, KVC_TILE, v, v_stride, state->queries, state->D, n, 1);
}

const float *kvc_lanes_rows(const kvc_view *view, int64_t b, int64_t h, int64_t t, int64_t n, int64_t D, float *rows,
                            int64_t *stride) {
    const char *first = view_at(view, b, h, t, 0);
    if (view->dtype == KVC_F32) {
        *stride = view->stride_t;
        return (const float *)(const void *)first;
    }
    const kvc_simd *simd = kvc_simd_table();
    const int64_t step = view->stride_t * kvc_dtype_bytes(view->dtype);
    for (int64_t j = 0; j < n; j++) simd->load[view->dtype](rows + j * D, first + j * step, D);
    *stride = D;
    return rows;
}
