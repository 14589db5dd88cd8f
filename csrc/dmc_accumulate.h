/* What the accumulation of DMC with a full history and the one with a window share. */
#ifndef KVC_DMC_ACCUMULATE_H
#define KVC_DMC_ACCUMULATE_H
#include "kernel.h"

/* Whether the window leaves anything out. */
static inline int dmc_windowed(int64_t T, int64_t window) {
    return window > 0 && window < T;
}

/* Row b*Hkv + h of [B, Hkv, T] gates. */
typedef struct {
    const float *alpha, *omega, *z;
    float initial_z;
    int open; /* token 0 continues what was there before */
} dmc_row;

static inline dmc_row dmc_row_of(const kvc_dmc_accumulate_args *args, int64_t row) {
    const dmc_row found = {
        .alpha = args->alpha + row * args->T,
        .omega = args->omega + row * args->T,
        .z = args->z + row * args->T,
        .initial_z = args->initial_z ? args->initial_z[row] : 0.0f,
        .open = args->initial_z != NULL,
    };
    return found;
}

/* Whether token t never merges. */
static inline int dmc_starts(const dmc_row *row, int64_t t) {
    return t == 0 && !row->open;
}

static inline float dmc_alpha(const dmc_row *row, int64_t t) {
    return dmc_starts(row, t) ? 0.0f : row->alpha[t];
}

/* alpha of tokens [t, t + n), 0 where none may merge. */
static inline void dmc_alphas(const dmc_row *row, int64_t t, int64_t n, float *alpha) {
    for (int64_t i = 0; i < n; i++) alpha[i] = row->alpha[t + i];
    if (t == 0 && n) alpha[0] = dmc_alpha(row, 0);
}

/* What a decision keeps of the weight before it; nothing for 0, whatever lies there. */
static inline float dmc_kept(float alpha, float before) {
    return alpha == 0.0f ? 0.0f : alpha * before;
}

/* a z[t-1] / z[t], the share that out[t] keeps of out[t-1]; 0 where nothing is kept, whatever the weights are. */
static inline float dmc_share(float alpha, float before, float z) {
    return alpha == 0.0f ? 0.0f : alpha * before / z;
}

/* z of the token before t. */
static inline float dmc_before(const dmc_row *row, int64_t t) {
    return t ? row->z[t - 1] : row->initial_z;
}

/* Sets coordinate `neuron` of rows [n] of a view to 0. */
static inline void dmc_clear_neuron(const kvc_view *view, int64_t b, int64_t h, int64_t t, int64_t n, int64_t neuron) {
    const int64_t size = kvc_dtype_bytes(view->dtype);
    for (int64_t i = 0; neuron >= 0 && i < n; i++) {
        char *at = view_at(view, b, h, t + i, neuron);
        for (int64_t byte = 0; byte < size; byte++) at[byte] = 0; /* 0 is all bits 0 in every dtype */
    }
}

void dmc_window_forward(const kvc_dmc_accumulate_args *args, kvc_parallel_for parallel_for);
void dmc_window_backward(const kvc_dmc_accumulate_backward_args *args, kvc_parallel_for parallel_for);
#endif
