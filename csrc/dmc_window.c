/* DMC's partial averages over a window of the last tokens: no recursion, each token sums its window anew. */
#include "dmc_accumulate.h"

#include <string.h>

enum { TOKENS = 64, LINES = TOKENS + KVC_DMC_MAX_WINDOW - 1, GRAIN = 4 };

/* The window of token t: tokens first .. t, and for each the product of the decisions after it. */
typedef struct {
    int64_t first;
    float product[KVC_DMC_MAX_WINDOW]; /* of token first + i */
    float share[KVC_DMC_MAX_WINDOW];   /* product * omega / z */
    float z;
} window_of_token;

static void open_window(const kvc_dmc_accumulate_args *args, const dmc_row *row, int64_t t, window_of_token *window) {
    const int64_t edge = max_of(t - args->window + 1, 0);
    int64_t first = t;
    while (first > edge && !dmc_starts(row, first)) first--;
    float product = 1.0f, z = 0.0f;
    for (int64_t j = t; j >= first; j--) {
        window->product[j - first] = product;
        product *= dmc_alpha(row, j);
    }
    for (int64_t j = first; j <= t; j++) z += window->share[j - first] = window->product[j - first] * row->omega[j];
    for (int64_t j = first; j <= t; j++) window->share[j - first] /= z;
    window->first = first;
    window->z = z;
}

/* Tokens [t, t + n) as float32 [n, D], the neuron's coordinate 0. */
static void load_tokens(float *to, const kvc_view *view, int64_t b, int64_t h, int64_t t, int64_t n, int64_t D,
                        int64_t neuron) {
    for (int64_t i = 0; i < n; i++) {
        kvc_simd_table()->load[view->dtype](to + i * D, view_at(view, b, h, t + i, 0), D);
        if (neuron >= 0) to[i * D + neuron] = 0.0f;
    }
}

static void forward_range(int64_t begin, int64_t end, void *context) {
    const kvc_dmc_accumulate_args *args = context;
    const kvc_simd *simd = kvc_simd_table();
    const kvc_view *x[2] = {&args->k, &args->v}, *out[2] = {&args->out_k, &args->out_v};
    const int64_t D = args->D, blocks = ceil_div(args->T, TOKENS);
    _Alignas(64) float lines[LINES * KVC_MAX_HEAD_DIM], sum[KVC_MAX_HEAD_DIM];
    for (int64_t item = begin; item < end; item++) {
        const int64_t r = item / blocks, b = r / args->Hkv, h = r % args->Hkv, t0 = item % blocks * TOKENS;
        const int64_t t1 = min_of(t0 + TOKENS, args->T), base = max_of(t0 - args->window + 1, 0);
        const dmc_row row = dmc_row_of(args, r);
        for (int which = 0; which < 2; which++) {
            load_tokens(lines, x[which], b, h, base, t1 - base, D, which == 0 ? args->neuron : -1);
            for (int64_t t = t0; t < t1; t++) {
                window_of_token window;
                open_window(args, &row, t, &window);
                memset(sum, 0, (size_t)D * sizeof(float));
                simd->weighted_sum(sum, window.share, lines + (window.first - base) * D, D, t + 1 - window.first, D);
                simd->store[out[which]->dtype](view_at(out[which], b, h, t, 0), sum, D);
                args->z[r * args->T + t] = window.z;
            }
        }
    }
}

void dmc_window_forward(const kvc_dmc_accumulate_args *args, kvc_parallel_for parallel_for) {
    run_parallel(parallel_for, args->B * args->Hkv * ceil_div(args->T, TOKENS), GRAIN, forward_range,
                 (void *)(uintptr_t)args);
}

/* ---- backward ---- */

/* u[t, j - first]: gradient of the weight of token j in out[t], <g[t], x[j] - out[t]> / z[t] over keys and values. */
static float *weight_gradients(const kvc_dmc_accumulate_backward_args *args, int64_t r, int64_t t) {
    return (float *)args->scratch + (r * args->forward.T + t) * args->forward.window;
}

static void backward_range(int64_t begin, int64_t end, void *context) {
    const kvc_dmc_accumulate_backward_args *args = context;
    const kvc_dmc_accumulate_args *forward = &args->forward;
    const kvc_simd *simd = kvc_simd_table();
    const kvc_view *x[2] = {&forward->k, &forward->v}, *dout[2] = {&args->dout_k, &args->dout_v};
    const kvc_view *dx[2] = {&args->dk, &args->dv};
    const int64_t D = forward->D, T = forward->T, N = forward->window, blocks = ceil_div(T, TOKENS);
    _Alignas(64) float lines[LINES * KVC_MAX_HEAD_DIM], g[KVC_MAX_HEAD_DIM], sums[TOKENS * KVC_MAX_HEAD_DIM];
    for (int64_t item = begin; item < end; item++) {
        const int64_t r = item / blocks, b = r / forward->Hkv, h = r % forward->Hkv, t0 = item % blocks * TOKENS;
        const int64_t t1 = min_of(t0 + TOKENS, T), base = max_of(t0 - N + 1, 0);
        const dmc_row row = dmc_row_of(forward, r);
        for (int which = 0; which < 2; which++) {
            const int64_t neuron = which == 0 ? forward->neuron : -1;
            memset(sums, 0, (size_t)((t1 - t0) * D) * sizeof(float));
            load_tokens(lines, x[which], b, h, base, t1 - base, D, neuron);
            /* tokens behind the block give to those in it whose window they see */
            for (int64_t t = t0; t < min_of(t1 + N - 1, T); t++) {
                window_of_token window;
                open_window(forward, &row, t, &window);
                load_tokens(g, dout[which], b, h, t, 1, D, neuron);
                for (int64_t j = max_of(window.first, t0); j <= min_of(t, t1 - 1); j++) {
                    simd->weighted_sum(sums + (j - t0) * D, window.share + (j - window.first), g, D, 1, D);
                }
                if (t >= t1) continue;
                const int64_t seen = t + 1 - window.first;
                float dots[KVC_DMC_MAX_WINDOW], mean = 0.0f, *u = weight_gradients(args, r, t);
                simd->dots[KVC_F32](dots, KVC_DMC_MAX_WINDOW, g, D, lines + (window.first - base) * D, seen, 1, NULL);
                for (int64_t i = 0; i < seen; i++) mean += window.share[i] * dots[i];
                for (int64_t i = 0; i < seen; i++) {
                    const float part = (dots[i] - mean) / window.z;
                    u[i] = which == 0 ? part : u[i] + part;
                }
            }
            for (int64_t t = t0; t < t1; t++) {
                simd->store[dx[which]->dtype](view_at(dx[which], b, h, t, 0), sums + (t - t0) * D, D);
            }
        }
    }
}

/* dalpha and domega of whole rows. */
static void gates_range(int64_t begin, int64_t end, void *context) {
    const kvc_dmc_accumulate_backward_args *args = context;
    const int64_t T = args->forward.T;
    for (int64_t r = begin; r < end; r++) {
        const dmc_row row = dmc_row_of(&args->forward, r);
        float *dalpha = args->dalpha + r * T, *domega = args->domega + r * T;
        memset(dalpha, 0, (size_t)T * sizeof(float));
        memset(domega, 0, (size_t)T * sizeof(float));
        for (int64_t t = 0; t < T; t++) {
            window_of_token window;
            open_window(&args->forward, &row, t, &window);
            const float *u = weight_gradients(args, r, t);
            float before = 0.0f; /* gradient of the product of all decisions up to token j, through what lies before j */
            for (int64_t j = window.first; j <= t; j++) {
                const int64_t i = j - window.first;
                if (i > 0) dalpha[j] += window.product[i] * before;
                before = row.alpha[j] * before + row.omega[j] * u[i];
                domega[j] += window.product[i] * u[i];
            }
        }
    }
}

void dmc_window_backward(const kvc_dmc_accumulate_backward_args *args, kvc_parallel_for parallel_for) {
    const kvc_dmc_accumulate_args *forward = &args->forward;
    const int64_t rows = forward->B * forward->Hkv;
    run_parallel(parallel_for, rows * ceil_div(forward->T, TOKENS), GRAIN, backward_range, (void *)(uintptr_t)args);
    run_parallel(parallel_for, rows, 1, gates_range, (void *)(uintptr_t)args);
}
