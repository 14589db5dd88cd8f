/* The gates of DMC: decisions, importance, and the bias that hides overwritten keys. */
#include "philox.h"
#include "kernel.h"

#include <math.h>

enum { GATES = 256, GRAIN = 8 }; /* tokens of a work item; items worth a thread */

static const float omega_floor = 0x1p-40f;

/* Without overflow: exp of a number <= 0 only. */
static float sigmoid(float x) {
    const float e = expf(-fabsf(x)), large = 1.0f / (1.0f + e);
    return x < 0.0f ? e * large : large; /* a NaN passes */
}

/* n elements of [B, H, T] from (b, h, t) on. */
static void load_gates(float *to, const kvc_view *x, int64_t b, int64_t h, int64_t t, int64_t n) {
    const kvc_simd *simd = kvc_simd_table();
    if (x->stride_t == 1) {
        simd->load[x->dtype](to, view_at(x, b, h, t, 0), n);
    } else {
        for (int64_t i = 0; i < n; i++) simd->load[x->dtype](to + i, view_at(x, b, h, t + i, 0), 1);
    }
}

/* ---- decisions ---- */

static void decide_range(int64_t begin, int64_t end, void *context) {
    const kvc_dmc_decisions_args *args = context;
    const int64_t blocks = ceil_div(args->T, GATES);
    for (int64_t item = begin; item < end; item++) {
        const int64_t row = item / blocks, t = item % blocks * GATES, n = min_of(GATES, args->T - t);
        const int64_t b = row / args->H, h = row % args->H, at = row * args->T + t;
        float x[GATES];
        load_gates(x, &args->x, b, h, t, n);
        for (int64_t i = 0; i < n; i++) {
            float y = kvc_add(kvc_mul(args->scale, x[i]), -args->shift);
            if (args->drawn) {
                y = kvc_add(y, kvc_logistic(kvc_counter(args->token, t + i), kvc_counter(args->stream, h),
                                            kvc_counter(args->sample, b), args->offset, args->seed));
            } else if (args->noise) {
                y = kvc_add(y, args->noise[at + i]);
            }
            const int merges = y > args->margin;
            const float tempered = args->only_hard ? (merges ? INFINITY : -INFINITY) : y / args->temperature;
            args->tempered[at + i] = tempered;
            args->alpha[at + i] = sigmoid(tempered);
            args->hard[at + i] = (float)merges;
        }
    }
}

kvc_status kvc_dmc_decisions(const kvc_dmc_decisions_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    if (args->B < 0 || args->H < 0 || args->T < 0 || (args->drawn && args->noise)) return KVC_BAD_SIZE;
    if (!dtype_known(args->x.dtype)) return KVC_BAD_DTYPE;
    if (!args->B || !args->H || !args->T) return KVC_OK;
    if (!args->x.data || !args->alpha || !args->hard || !args->tempered) return KVC_NULL_POINTER;
    run_parallel(parallel_for, args->B * args->H * ceil_div(args->T, GATES), GRAIN, decide_range,
                 (void *)(uintptr_t)args);
    return KVC_OK;
}

/* ---- importance ---- */

static void importance_range(int64_t begin, int64_t end, void *context) {
    const kvc_dmc_importance_args *args = context;
    const int64_t blocks = ceil_div(args->T, GATES), G = args->Hq / args->Hkv;
    const int64_t heads = args->reduce == KVC_FIRST_HEAD ? 1 : G;
    for (int64_t item = begin; item < end; item++) {
        const int64_t row = item / blocks, t = item % blocks * GATES, n = min_of(GATES, args->T - t);
        const int64_t b = row / args->Hkv, h = row % args->Hkv;
        float x[GATES], sum[GATES] = {0};
        for (int64_t g = 0; g < heads; g++) {
            load_gates(x, &args->x, b, h * G + g, t, n);
            for (int64_t i = 0; i < n; i++) {
                sum[i] += args->reduce == KVC_MEAN_SIGMOID ? sigmoid(x[i] + args->shift) : x[i];
            }
        }
        for (int64_t i = 0; i < n; i++) {
            const float mean = sum[i] / (float)heads;
            const float y = args->reduce == KVC_MEAN_SIGMOID ? mean : sigmoid(mean + args->shift);
            args->omega[row * args->T + t + i] = (y < omega_floor ? omega_floor : y) + args->eps;
        }
    }
}

kvc_status kvc_dmc_importance(const kvc_dmc_importance_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    if (args->B < 0 || args->Hq < 0 || args->Hkv < 0 || args->T < 0) return KVC_BAD_SIZE;
    if (args->Hkv ? args->Hq % args->Hkv != 0 || args->Hq == 0 : args->Hq != 0) return KVC_BAD_SIZE;
    if (args->reduce != KVC_MEAN_LOGIT && args->reduce != KVC_MEAN_SIGMOID && args->reduce != KVC_FIRST_HEAD) {
        return KVC_BAD_SIZE;
    }
    if (!dtype_known(args->x.dtype)) return KVC_BAD_DTYPE;
    if (!args->B || !args->Hkv || !args->T) return KVC_OK;
    if (!args->x.data || !args->omega) return KVC_NULL_POINTER;
    run_parallel(parallel_for, args->B * args->Hkv * ceil_div(args->T, GATES), GRAIN, importance_range,
                 (void *)(uintptr_t)args);
    return KVC_OK;
}

/* ---- mask ---- */

/* ln(1 - sigmoid(x)), which an alpha rounded to 1 no longer tells. */
static float hiding(float x) {
    return -(fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
}

static void mask_range(int64_t begin, int64_t end, void *context) {
    const kvc_dmc_mask_args *args = context;
    for (int64_t row = begin; row < end; row++) {
        const float *next = args->tempered + row * args->T + 1;
        float *bias = args->bias + row * args->T;
        for (int64_t t = 0; t < args->T; t++) bias[t] = t + 1 < args->T ? hiding(next[t]) : 0.0f;
    }
}

kvc_status kvc_dmc_mask(const kvc_dmc_mask_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    if (args->B < 0 || args->H < 0 || args->T < 0) return KVC_BAD_SIZE;
    if (!args->B || !args->H || !args->T) return KVC_OK;
    if (!args->bias || !args->tempered) return KVC_NULL_POINTER;
    run_parallel(parallel_for, args->B * args->H, 1, mask_range, (void *)(uintptr_t)args);
    return KVC_OK;
}
