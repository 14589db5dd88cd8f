/* Attention of one query per head by probabilities that another layer has computed, over a layer's own values.
 *
 * Bytes: of a row, its values once (D*bytes each) and 4 bytes of probability per value and query head, half of what
 * decode.c reads; none where every query head of the row is skipped. Rows go in pieces, as there.
 */
#include "formats.h"
#include "page_rows.h"

#include <math.h>
#include <string.h>

enum { PIECE = 512, FEW = 32 /* codes that become float32 at a time */ };

/* Scratch: first [R + 1], the pieces before each row; then for every piece and query head sums [D]. */
typedef struct {
    const kvc_decode_shared_args *args;
    const kvc_simd *simd;
    page_rows values;
    int64_t rows, G;
    int64_t state_floats; /* of one piece: a multiple of a cache line, so that no two items share one */
    int64_t *first;
    float *states;
} shared_job;

static shared_job job_of(const kvc_decode_shared_args *args) {
    shared_job job = {.args = args, .simd = kvc_simd_table()};
    const kvc_rows *rows = &args->rows;
    job.values = (page_rows){rows->values, args->block_table, args->pages, args->blocks, args->P,
                             kvc_value_bytes(rows->format, args->D),
                             format_of_codes(rows->format) ? rows->value_scales : NULL};
    job.rows = args->B * args->Hkv;
    job.G = args->Hkv ? args->Hq / args->Hkv : 0;
    job.state_floats = ceil_div(job.G * args->D, 16) * 16;
    job.first = args->scratch;
    job.states = args->scratch ? (float *)args->scratch + ceil_div(2 * (job.rows + 1), 16) * 16 : NULL;
    return job;
}

static int sizes_are_good(const kvc_decode_shared_args *args) {
    if (args->B < 0 || args->Hq < 0 || args->Hkv < 0 || args->D < 1 || args->D > KVC_MAX_HEAD_DIM) return 0;
    if (args->Hkv ? args->Hq % args->Hkv != 0 : args->Hq != 0) return 0;
    if (args->P < 1 || (args->P & (args->P - 1)) != 0 || args->pages < 0 || args->blocks < 0) return 0;
    if (args->rows.format == KVC_FORMAT_K8V4 && args->D % 2) return 0;
    return args->columns >= 0 && !isnan(args->threshold);
}

int64_t kvc_decode_shared_scratch_bytes(const kvc_decode_shared_args *args) {
    if (!args || !sizes_are_good(args)) return 0;
    const shared_job job = job_of(args);
    const int64_t pieces = job.rows * ceil_div(args->blocks * args->P, PIECE);
    return (ceil_div(2 * (job.rows + 1), 16) * 16 + pieces * job.state_floats) * (int64_t)sizeof(float);
}

static int is_skipped(const shared_job *job, int64_t row, int64_t i) {
    const kvc_decode_shared_args *args = job->args;
    const int64_t head = row * job->G + i; /* rows are b*Hkv + g and heads g*G + i: [B, Hq] straight through */
    if (args->threshold == INFINITY || args->begin[row] >= args->end[row]) return 0;
    return args->near_lse[head] - args->far_lse[head] >= args->threshold;
}

/* The values of n slots; n <= FEW of codes, as float32 in `rows` [FEW, D]. */
static const void *values_at(const shared_job *job, int64_t slot, int64_t n, float *rows) {
    const page_rows *of = &job->values;
    const char *values = (const char *)of->pages + slot * of->bytes;
    if (!of->scales) return values;
    const kvc_codes kind = value_codes(job->args->rows.format);
    const int64_t D = job->args->D;
    float scales[FEW];
    job->simd->load[KVC_F16](scales, of->scales + slot, n);
    for (int64_t i = 0; i < n; i++) job->simd->dequantize[kind](rows + i * D, values + i * of->bytes, scales[i], D);
    return rows;
}

static void mix_range(int64_t begin, int64_t end, void *context) {
    const shared_job *job = context;
    const kvc_decode_shared_args *args = job->args;
    const int64_t D = args->D, most = job->values.scales ? FEW : PIECE;
    const kvc_dtype dtype = job->values.scales ? KVC_F32 : (kvc_dtype)args->rows.format;
    float rows[FEW * KVC_MAX_HEAD_DIM];
    int64_t row = 0, above = job->rows; /* the row of item `begin`: first[row] <= begin < first[row + 1] */
    while (above - row > 1) {
        const int64_t middle = row + (above - row) / 2;
        if (job->first[middle] <= begin) row = middle;
        else above = middle;
    }
    for (int64_t item = begin; item < end; item++) {
        while (job->first[row + 1] <= item) row++;
        const int64_t column = (item - job->first[row]) * PIECE, t = args->begin[row] + column;
        const int64_t n = min_of(PIECE, args->end[row] - t);
        const float *weights = args->probabilities + row / args->Hkv * args->stride_b + column;
        float *sums = job->states + item * job->state_floats;
        memset(sums, 0, (size_t)(job->G * D) * sizeof(float));
        for (int64_t i = 0, heads; i < job->G; i += heads + 1) { /* runs of query heads that are not skipped */
            for (heads = 0; i + heads < job->G && !is_skipped(job, row, i + heads); heads++) continue;
            int64_t run;
            for (int64_t done = 0; heads && done < n; done += run) {
                const int64_t slot = slot_of(&job->values, row, t + done, min_of(most, n - done), &run);
                const int64_t far = done + far_of(&job->values, run);
                const char *next = next_at(&job->values, row, t + far, PIECE, args->end[row]);
                const float *w = weights + (row % args->Hkv * job->G + i) * args->stride_h + done;
                const void *v = values_at(job, slot, run, rows);
                job->simd->mix[dtype](sums + i * D, D, w, args->stride_h, v, run, heads, next);
            }
        }
    }
}

/* Joins the pieces of query heads in order, and each with its near side. */
static void finish_range(int64_t begin, int64_t end, void *context) {
    const shared_job *job = context;
    const kvc_decode_shared_args *args = job->args;
    const int64_t D = args->D, bytes = kvc_dtype_bytes(args->dtype);
    for (int64_t head = begin; head < end; head++) {
        const int64_t row = head / job->G, i = head % job->G;
        const float near = args->near_lse[head], far = args->far_lse[head];
        const int skipped = is_skipped(job, row, i), no_near = near == -INFINITY;
        const int no_far = far == -INFINITY || args->begin[row] >= args->end[row];
        float sums[KVC_MAX_HEAD_DIM] = {0}, out[KVC_MAX_HEAD_DIM];
        args->skipped[head] = (uint8_t)skipped;
        job->simd->load[args->dtype](out, (const char *)args->near + head * D * bytes, D);
        if (!skipped && !no_far) {
            for (int64_t piece = job->first[row]; piece < job->first[row + 1]; piece++) {
                const float *of = job->states + piece * job->state_floats + i * D;
                for (int64_t d = 0; d < D; d++) sums[d] += of[d];
            }
            if (args->rows.format == KVC_FORMAT_K8V4) kvc_turn(sums, D); /* as the values were, of which sums are mixed */
            const float gate = no_near ? 0.0f : 1.0f / (1.0f + expf(far - near));
            for (int64_t d = 0; d < D; d++) out[d] = (no_near ? 0.0f : gate * out[d]) + (1.0f - gate) * sums[d];
        } else if (no_near) { /* and nothing distant, or it is skipped (threshold -inf) */
            memset(out, 0, sizeof out);
        }
        job->simd->store[args->dtype]((char *)args->out + head * D * bytes, out, D);
    }
}

kvc_status kvc_decode_shared(const kvc_decode_shared_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    if (!sizes_are_good(args)) return KVC_BAD_SIZE;
    if (!dtype_known(args->dtype)) return KVC_BAD_DTYPE;
    if (!format_known(args->rows.format)) return KVC_BAD_FORMAT;
    if (!args->B || !args->Hq) return KVC_OK;
    if (!args->out || !args->skipped || !args->near || !args->near_lse || !args->far_lse) return KVC_NULL_POINTER;
    if (!args->block_table || !args->begin || !args->end || !args->scratch) return KVC_NULL_POINTER;
    if ((args->columns && !args->probabilities) || (args->pages && !args->rows.values)) return KVC_NULL_POINTER;
    const shared_job job = job_of(args);
    if (args->pages && format_of_codes(args->rows.format) && !job.values.scales) return KVC_NULL_POINTER;
    int64_t slots = 0;
    job.first[0] = 0;
    for (int64_t row = 0; row < job.rows; row++) {
        const int64_t begin = args->begin[row], end = args->end[row];
        if (!rows_exist(&job.values, row, begin, end, args->blocks * args->P)) return KVC_BAD_INDEX;
        if (end - begin > args->columns) return KVC_BAD_INDEX;
        job.first[row + 1] = job.first[row] + ceil_div(end - begin, PIECE);
        slots += max_of(end - begin, 0);
    }
    const int64_t pieces = job.first[job.rows], heads = job.rows * job.G, numbers = job.G * args->D;
    run_parallel(parallel_for, pieces, grain_of(pieces, slots * numbers), mix_range, (void *)(uintptr_t)&job);
    run_parallel(parallel_for, heads, grain_of(heads, 8 * pieces * numbers), finish_range, (void *)(uintptr_t)&job);
    return KVC_OK;
}
