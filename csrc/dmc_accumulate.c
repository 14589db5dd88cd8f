/* DMC's partial averages with a full history: a scan over the tokens of a row, forward and backward.
 *
 * A long row is cut into segments where there are few rows: each one's end is computed as if nothing lay before it, the
 * ends are joined from segment to segment, and then all segments run with the right state. Mostly few tokens count for
 * an end, because what lies before them has faded.
 */
#include "dmc_accumulate.h"

#include <string.h>

enum {
    CHUNK = KVC_DMC_CHUNK,
    FEWEST_ITEMS = 32, /* rows times segments, for several threads */
    SEGMENT_CHUNKS = 4 /* fewest chunks of a segment */
};
_Static_assert((int)CHUNK <= (int)KVC_SCAN_TOKENS, "a chunk is one call of scan_backward");

static const float faded = 0x1p-40f; /* of the weight: below the rounding of what is there */

typedef struct {
    const kvc_dmc_accumulate_args *args;
    const kvc_dmc_accumulate_backward_args *backward; /* or NULL */
    const kvc_simd *simd;
    int64_t chunks, segments, span; /* span: chunks of a segment */
    float *dbeta;                   /* [R, T] */
    float *carries;                 /* [R, segments, 2, D]: what comes into a segment from behind */
} scan_job;

static scan_job job_of(const kvc_dmc_accumulate_args *args) {
    scan_job job = {.args = args, .simd = kvc_simd_table(), .chunks = ceil_div(args->T, CHUNK)};
    const int64_t wanted = ceil_div(FEWEST_ITEMS, args->B * args->Hkv);
    job.span = ceil_div(job.chunks, min_of(wanted, ceil_div(job.chunks, SEGMENT_CHUNKS)));
    job.segments = ceil_div(job.chunks, job.span);
    return job;
}

static int64_t first_token(const scan_job *job, int64_t segment) {
    return min_of(segment * job->span * CHUNK, job->args->T);
}

static float *state_at(const scan_job *job, int64_t row, int64_t chunk) {
    return job->args->states + (row * job->chunks + chunk) * 2 * job->args->D;
}

static float *carry_at(const scan_job *job, int64_t row, int64_t segment) {
    return job->carries + (row * job->segments + segment) * 2 * job->args->D;
}

static float kept_share(const dmc_row *row, int64_t t) {
    return dmc_share(dmc_alpha(row, t), dmc_before(row, t), row->z[t]);
}

/* What tokens [t, t + n) keep of the average before them, and w / z, the share of the token itself. */
static void shares_of(const dmc_row *row, int64_t t, int64_t n, float *restrict keep, float *restrict add) {
    const float *z = row->z + t, *omega = row->omega + t;
    dmc_alphas(row, t, n, keep);
    keep[0] = dmc_share(keep[0], dmc_before(row, t), z[0]);
    for (int64_t i = 1; i < n; i++) keep[i] = dmc_share(keep[i], z[i - 1], z[i]);
    for (int64_t i = 0; i < n; i++) add[i] = omega[i] / z[i];
}

/* Walks from the last of tokens [begin, end) towards the first while they count for what lies behind end - 1; returns
 * the first that does, and in *share what is left of the state before it, 0 if that has faded. */
static int64_t first_that_counts(const dmc_row *row, int64_t begin, int64_t end, float *share) {
    float keep[CHUNK], add[CHUNK];
    int64_t t = end;
    *share = 1.0f;
    while (t > begin && *share >= faded) {
        const int64_t n = min_of(CHUNK, t - begin);
        shares_of(row, t - n, n, keep, add);
        for (int64_t i = n - 1; i >= 0 && *share >= faded; i--, t--) *share *= keep[i];
    }
    if (!(*share >= faded)) *share = 0.0f; /* also a NaN: the tokens behind it are NaN anyway */
    return t;
}

/* ---- forward ---- */

static void weights_range(int64_t begin, int64_t end, void *context) {
    const kvc_dmc_accumulate_args *args = ((const scan_job *)context)->args;
    for (int64_t r = begin; r < end; r++) {
        const dmc_row row = dmc_row_of(args, r);
        float z = row.initial_z, alpha[CHUNK];
        for (int64_t t = 0; t < args->T; t += CHUNK) {
            const int64_t n = min_of(CHUNK, args->T - t);
            dmc_alphas(&row, t, n, alpha);
            for (int64_t i = 0; i < n; i++) args->z[r * args->T + t + i] = z = dmc_kept(alpha[i], z) + row.omega[t + i];
        }
    }
}

/* The end of segment s, as the state before segment s + 1. */
static void ends_range(int64_t begin, int64_t end, void *context) {
    const scan_job *job = context;
    const kvc_dmc_accumulate_args *args = job->args;
    for (int64_t item = begin; item < end; item++) {
        const int64_t r = item / (job->segments - 1), s = item % (job->segments - 1);
        const int64_t b = r / args->Hkv, h = r % args->Hkv, last = first_token(job, s + 1);
        const dmc_row row = dmc_row_of(args, r);
        float share, keep[CHUNK], add[CHUNK], *state = state_at(job, r, (s + 1) * job->span);
        memset(state, 0, (size_t)(2 * args->D) * sizeof(float));
        int64_t n;
        for (int64_t t = first_that_counts(&row, first_token(job, s), last, &share); t < last; t += n) {
            n = min_of(CHUNK, last - t);
            shares_of(&row, t, n, keep, add);
            job->simd->scan[args->k.dtype](NULL, 0, view_at(&args->k, b, h, t, 0), args->k.stride_t, keep, add, state, n,
                                           args->D, view_at(&args->v, b, h, t, 0), args->v.stride_t);
            job->simd->scan[args->v.dtype](NULL, 0, view_at(&args->v, b, h, t, 0), args->v.stride_t, keep, add,
                                           state + args->D, n, args->D, NULL, 0);
        }
        if (args->neuron >= 0) state[args->neuron] = 0.0f;
    }
}

static void join_range(int64_t begin, int64_t end, void *context) {
    const scan_job *job = context;
    for (int64_t r = begin; r < end; r++) {
        const dmc_row row = dmc_row_of(job->args, r);
        for (int64_t s = 0; s + 1 < job->segments; s++) {
            float share, *next = state_at(job, r, (s + 1) * job->span);
            const float *state = state_at(job, r, s * job->span);
            first_that_counts(&row, first_token(job, s), first_token(job, s + 1), &share);
            for (int64_t d = 0; share != 0.0f && d < 2 * job->args->D; d++) next[d] += share * state[d];
        }
    }
}

static void forward_range(int64_t begin, int64_t end, void *context) {
    const scan_job *job = context;
    const kvc_dmc_accumulate_args *args = job->args;
    const int64_t D = args->D;
    for (int64_t item = begin; item < end; item++) {
        const int64_t r = item / job->segments, s = item % job->segments, b = r / args->Hkv, h = r % args->Hkv;
        const dmc_row row = dmc_row_of(args, r);
        float state[2 * KVC_MAX_HEAD_DIM], keep[CHUNK], add[CHUNK];
        const int64_t last = min_of((s + 1) * job->span, job->chunks);
        memcpy(state, state_at(job, r, s * job->span), (size_t)(2 * D) * sizeof(float));
        for (int64_t chunk = s * job->span; chunk < last; chunk++) {
            const int64_t t = chunk * CHUNK, n = min_of(CHUNK, args->T - t);
            const char *k = view_at(&args->k, b, h, t, 0), *v = view_at(&args->v, b, h, t, 0);
            const char *next = t + 2 * CHUNK <= args->T ? view_at(&args->k, b, h, t + CHUNK, 0) : NULL;
            memcpy(state_at(job, r, chunk), state, (size_t)(2 * D) * sizeof(float));
            shares_of(&row, t, n, keep, add);
            job->simd->scan[args->k.dtype](view_at(&args->out_k, b, h, t, 0), args->out_k.stride_t, k, args->k.stride_t,
                                           keep, add, state, n, D, v, args->v.stride_t);
            job->simd->scan[args->v.dtype](view_at(&args->out_v, b, h, t, 0), args->out_v.stride_t, v, args->v.stride_t,
                                           keep, add, state + D, n, D, next, args->k.stride_t);
            dmc_clear_neuron(&args->out_k, b, h, t, n, args->neuron);
            if (args->neuron >= 0) state[args->neuron] = 0.0f;
        }
    }
}

static void begin_rows(const scan_job *job) {
    const kvc_dmc_accumulate_args *args = job->args;
    for (int64_t r = 0; r < args->B * args->Hkv; r++) {
        float *state = state_at(job, r, 0);
        const size_t size = (size_t)args->D * sizeof(float);
        if (args->initial_z) {
            memcpy(state, args->initial_k + r * args->D, size);
            memcpy(state + args->D, args->initial_v + r * args->D, size);
            if (args->neuron >= 0) state[args->neuron] = 0.0f;
        } else {
            memset(state, 0, 2 * size);
        }
    }
}

static int nothing_to_do(const kvc_dmc_accumulate_args *args) {
    return !args->B || !args->Hkv || !args->T;
}

static kvc_status check(const kvc_dmc_accumulate_args *args) {
    if (args->B < 0 || args->Hkv < 0 || args->T < 0 || args->T >= INT32_MAX) return KVC_BAD_SIZE;
    if (args->D < 1 || args->D > KVC_MAX_HEAD_DIM || args->neuron < -1 || args->neuron >= args->D) return KVC_BAD_SIZE;
    if (args->window < 0 || (args->window > KVC_DMC_MAX_WINDOW && args->window < args->T)) return KVC_BAD_SIZE;
    if (args->window && args->initial_z) return KVC_BAD_SIZE;
    const kvc_dtype dtype = args->k.dtype;
    if (!dtype_known(dtype) || args->v.dtype != dtype) return KVC_BAD_DTYPE;
    if (nothing_to_do(args)) return KVC_OK;
    if (!args->k.data || !args->v.data || !args->alpha || !args->omega || !args->z) return KVC_NULL_POINTER;
    if (kvc_dmc_chunks(args->T, args->window) && !args->states) return KVC_NULL_POINTER;
    return KVC_OK;
}

kvc_status kvc_dmc_accumulate(const kvc_dmc_accumulate_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    const kvc_status status = check(args);
    if (status != KVC_OK) return status;
    if (args->out_k.dtype != args->k.dtype || args->out_v.dtype != args->k.dtype) return KVC_BAD_DTYPE;
    if (nothing_to_do(args)) return KVC_OK;
    if (!args->out_k.data || !args->out_v.data) return KVC_NULL_POINTER;
    if (args->initial_z && (!args->initial_k || !args->initial_v)) return KVC_NULL_POINTER;
    if (dmc_windowed(args->T, args->window)) {
        dmc_window_forward(args, parallel_for);
        return KVC_OK;
    }
    scan_job job = job_of(args);
    const int64_t rows = args->B * args->Hkv;
    begin_rows(&job);
    run_parallel(parallel_for, rows, 1, weights_range, &job);
    run_parallel(parallel_for, rows * (job.segments - 1), 1, ends_range, &job);
    if (job.segments > 1) run_parallel(parallel_for, rows, 1, join_range, &job);
    run_parallel(parallel_for, rows * job.segments, 1, forward_range, &job);
    return KVC_OK;
}

/* ---- backward ---- */

/* The gradient that comes into segment s from segment s + 1, as if nothing lay behind that. */
static void starts_range(int64_t begin, int64_t end, void *context) {
    const scan_job *job = context;
    const kvc_dmc_accumulate_args *args = job->args;
    const kvc_view *dout[2] = {&job->backward->dout_k, &job->backward->dout_v};
    for (int64_t item = begin; item < end; item++) {
        const int64_t r = item / (job->segments - 1), s = item % (job->segments - 1);
        const int64_t b = r / args->Hkv, h = r % args->Hkv, first = first_token(job, s + 1);
        const dmc_row row = dmc_row_of(args, r);
        float keep[CHUNK], one[CHUNK], *carry = carry_at(job, r, s);
        memset(carry, 0, (size_t)(2 * args->D) * sizeof(float));
        /* gradients of tokens first .. last reach token first through the shares of those after it */
        int64_t last = first;
        float share = 1.0f;
        while (last + 1 < first_token(job, s + 2) && share >= faded) share *= kept_share(&row, ++last);
        int64_t n;
        for (int64_t t = last; t >= first; t -= n) {
            n = min_of(CHUNK, t - first + 1);
            for (int64_t i = 0; i < n; i++) {
                keep[i] = t - i == last ? 0.0f : kept_share(&row, t - i + 1);
                one[i] = 1.0f;
            }
            for (int which = 0; which < 2; which++) {
                job->simd->scan[dout[which]->dtype](NULL, 0, view_at(dout[which], b, h, t, 0), -dout[which]->stride_t,
                                                    keep, one, carry + which * args->D, n, args->D, NULL, 0);
            }
        }
    }
}

static void join_back_range(int64_t begin, int64_t end, void *context) {
    const scan_job *job = context;
    for (int64_t r = begin; r < end; r++) {
        const dmc_row row = dmc_row_of(job->args, r);
        for (int64_t s = job->segments - 3; s >= 0; s--) {
            float share = 1.0f, *carry = carry_at(job, r, s);
            const float *next = carry_at(job, r, s + 1);
            const int64_t after = first_token(job, s + 2);
            for (int64_t t = first_token(job, s + 1); t < after && share >= faded;) share *= kept_share(&row, ++t);
            for (int64_t d = 0; share >= faded && d < 2 * job->args->D; d++) carry[d] += share * next[d];
        }
    }
}

static void backward_range(int64_t begin, int64_t end, void *context) {
    const scan_job *job = context;
    const kvc_dmc_accumulate_args *args = job->args;
    const kvc_view *x[2] = {&args->k, &args->v}, *dout[2] = {&job->backward->dout_k, &job->backward->dout_v};
    const kvc_view *dx[2] = {&job->backward->dk, &job->backward->dv};
    const int64_t D = args->D;
    _Alignas(64) float differences[CHUNK * KVC_MAX_HEAD_DIM];
    for (int64_t item = begin; item < end; item++) {
        const int64_t r = item / job->segments, s = item % job->segments, b = r / args->Hkv, h = r % args->Hkv;
        const dmc_row row = dmc_row_of(args, r);
        float gradient[2 * KVC_MAX_HEAD_DIM] = {0};
        if (s + 1 < job->segments) memcpy(gradient, carry_at(job, r, s), (size_t)(2 * D) * sizeof(float));
        for (int64_t chunk = min_of((s + 1) * job->span, job->chunks) - 1; chunk >= s * job->span; chunk--) {
            const int64_t t = chunk * CHUNK, n = min_of(CHUNK, args->T - t);
            float keep[CHUNK + 1], add[CHUNK], state[2 * KVC_MAX_HEAD_DIM], *dbeta = job->dbeta + r * args->T + t;
            shares_of(&row, t, n, keep, add);
            keep[n] = t + n < args->T ? kept_share(&row, t + n) : 0.0f;
            memcpy(state, state_at(job, r, chunk), (size_t)(2 * D) * sizeof(float));
            memset(dbeta, 0, (size_t)n * sizeof(float));
            for (int which = 0; which < 2; which++) {
                const int64_t neuron = which == 0 ? args->neuron : -1;
                const char *g = view_at(dout[which], b, h, t, 0), *next = NULL; /* values, then the keys before */
                if (which == 0) next = view_at(&args->v, b, h, t, 0);
                else if (chunk > 0) next = view_at(&args->k, b, h, t - CHUNK, 0);
                job->simd->scan_differences[x[which]->dtype](differences, view_at(x[which], b, h, t, 0),
                                                             x[which]->stride_t, keep, add, state + which * D, n, D, g,
                                                             dout[which]->stride_t);
                for (int64_t i = 0; neuron >= 0 && i < n; i++) differences[i * D + neuron] = 0.0f;
                job->simd->scan_backward[x[which]->dtype](view_at(dx[which], b, h, t, 0), dx[which]->stride_t, g,
                                                          dout[which]->stride_t, keep + 1, add, differences, dbeta,
                                                          gradient + which * D, n, D, next, x[1 - which]->stride_t);
                dmc_clear_neuron(dx[which], b, h, t, n, neuron);
            }
        }
    }
}

/* dalpha and domega of whole rows, from the last token. */
static void gates_range(int64_t begin, int64_t end, void *context) {
    const scan_job *job = context;
    const int64_t T = job->args->T;
    for (int64_t r = begin; r < end; r++) {
        const dmc_row row = dmc_row_of(job->args, r);
        float later = 0.0f; /* gradient of z[t] through the tokens behind t */
        for (int64_t t = (ceil_div(T, CHUNK) - 1) * CHUNK; t >= 0; t -= CHUNK) {
            const int64_t n = min_of(CHUNK, T - t);
            const float *z = row.z + t, *omega = row.omega + t, *dbeta = job->dbeta + r * T + t;
            float *dalpha = job->backward->dalpha + r * T + t, *domega = job->backward->domega + r * T + t;
            float alpha[CHUNK], before[CHUNK], old[CHUNK], new[CHUNK];
            dmc_alphas(&row, t, n, alpha);
            for (int64_t i = 0; i < n; i++) before[i] = i ? z[i - 1] : dmc_before(&row, t);
            /* through the shares: gradient of alpha * before, and of omega; z*z might underflow */
            for (int64_t i = 0; i < n; i++) {
                old[i] = dbeta[i] * (omega[i] / z[i] / z[i]);
                new[i] = dbeta[i] * (dmc_kept(alpha[i], before[i]) / z[i] / z[i]);
            }
            for (int64_t i = n - 1; i >= 0; i--) {
                const int starts = dmc_starts(&row, t + i);
                const float of_old = later + old[i];
                dalpha[i] = starts ? 0.0f : before[i] * of_old;
                domega[i] = starts ? later : later - new[i];
                later = starts ? 0.0f : alpha[i] * of_old;
            }
        }
    }
}

int64_t kvc_dmc_accumulate_backward_scratch_bytes(const kvc_dmc_accumulate_backward_args *args) {
    if (!args || check(&args->forward) != KVC_OK || nothing_to_do(&args->forward)) return 0;
    const kvc_dmc_accumulate_args *forward = &args->forward;
    const int64_t rows = forward->B * forward->Hkv, size = (int64_t)sizeof(float);
    if (dmc_windowed(forward->T, forward->window)) return rows * forward->T * forward->window * size;
    return rows * (forward->T + job_of(forward).segments * 2 * forward->D) * size;
}

kvc_status kvc_dmc_accumulate_backward(const kvc_dmc_accumulate_backward_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    const kvc_dmc_accumulate_args *forward = &args->forward;
    const kvc_status status = check(forward);
    if (status != KVC_OK) return status;
    const kvc_dtype dtype = forward->k.dtype;
    if (args->dout_k.dtype != dtype || args->dout_v.dtype != dtype || args->dk.dtype != dtype ||
        args->dv.dtype != dtype) {
        return KVC_BAD_DTYPE;
    }
    if (nothing_to_do(forward)) return KVC_OK;
    if (!args->dout_k.data || !args->dout_v.data || !args->dk.data || !args->dv.data || !args->dalpha ||
        !args->domega || !args->scratch) {
        return KVC_NULL_POINTER;
    }
    if (dmc_windowed(forward->T, forward->window)) {
        dmc_window_backward(args, parallel_for);
        return KVC_OK;
    }
    scan_job job = job_of(forward);
    const int64_t rows = forward->B * forward->Hkv;
    job.backward = args;
    job.dbeta = args->scratch;
    job.carries = job.dbeta + rows * forward->T;
    run_parallel(parallel_for, rows * (job.segments - 1), 1, starts_range, &job);
    if (job.segments > 2) run_parallel(parallel_for, rows, 1, join_back_range, &job);
    run_parallel(parallel_for, rows * job.segments, 1, backward_range, &job);
    run_parallel(parallel_for, rows, 1, gates_range, &job);
    return KVC_OK;
}
