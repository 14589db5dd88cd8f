/* Attention of a few queries over ragged rows of pages.
 *
 * Queries of one KV head (G*S of them) go in blocks of up to BLOCK, which share each key and value that is read. A
 * row's keys go in pieces, one work item each, so that a long row keeps every thread busy; inside a piece STEP keys at
 * a time with a running maximum. Pieces depend only on the row's own range and on G*S; they are joined in order.
 */
#include "tile.h"

#include <math.h>
#include <string.h>

enum {
    BLOCK = 24,     /* queries that share a read: 4 blocks of KVC_TILE_ROWS */
    STEP = 256,     /* keys between two rescalings of the accumulators: BLOCK*STEP logits are 24 KiB of stack */
    PIECE = 512,    /* keys per piece at least */
    MOST_PIECES = 16
};

typedef struct {
    const kvc_decode_args *args;
    const kvc_simd *simd;
    int64_t queries;  /* G*S per row */
    int64_t blocks;   /* query blocks per row */
    int64_t pieces;   /* pieces per row at most */
    int64_t capacity; /* keys that a row can hold */
} decode_job;

/* Scratch of one (row, query block, piece): packed queries [n, D], accumulators [n, D], maxima [n], sums [n]; an item
 * of fewer queries than BLOCK leaves the end unused only in the last block of a row. */
typedef struct {
    float *packed, *sums, *max, *norm;
} decode_state;

static decode_job job_of(const kvc_decode_args *args) {
    decode_job job = {.args = args, .simd = kvc_simd_table()};
    job.queries = args->Hkv ? args->Hq / args->Hkv * args->S : 0;
    job.blocks = ceil_div(job.queries, BLOCK);
    job.pieces = job.blocks ? max_of(MOST_PIECES / job.blocks, 1) : 0;
    job.capacity = args->block_table ? args->blocks * args->P : args->P;
    return job;
}

/* Floats per query and piece, a multiple of a cache line so that no two items share one. */
static int64_t state_floats(const kvc_decode_args *args) {
    return ceil_div(2 * args->D + 2, 16) * 16;
}

static decode_state state_at(const decode_job *job, int64_t row, int64_t block, int64_t piece) {
    const int64_t D = job->args->D, first = block * BLOCK, n = min_of(BLOCK, job->queries - first);
    const int64_t before = (row * job->queries + first) * job->pieces + piece * n;
    decode_state state;
    state.packed = (float *)job->args->scratch + before * state_floats(job->args);
    state.sums = state.packed + n * D;
    state.max = state.sums + n * D;
    state.norm = state.max + n;
    return state;
}

int64_t kvc_decode_scratch_bytes(const kvc_decode_args *args) {
    if (!args || args->B < 0 || args->Hq < 0 || args->Hkv < 0 || args->S < 0 || args->D < 0) return 0;
    const decode_job job = job_of(args);
    return args->B * args->Hkv * job.queries * job.pieces * state_floats(args) * (int64_t)sizeof(float);
}

/* One past the last key that query number i of a row sees; at most the row's end. */
static int64_t end_for(const decode_job *job, int64_t row, int64_t i) {
    const kvc_decode_args *args = job->args;
    return args->end[row] - (args->causal ? args->S - 1 - i % args->S : 0);
}

/* Address of key or value t of a row, and in *run how many follow it without a gap. */
static const char *page_at(const decode_job *job, const void *pages, int64_t row, int64_t t, int64_t *run) {
    const kvc_decode_args *args = job->args;
    const int64_t bytes = kvc_dtype_bytes(args->cache_dtype), offset = args->block_table ? t % args->P : t;
    const int64_t page = args->block_table ? args->block_table[row * args->blocks + t / args->P] : row;
    *run = args->P - offset;
    return (const char *)pages + (page * args->P + offset) * args->D * bytes;
}

/* Keys or values [t0, t0 + n) of a row, dims [d0, d0 + depth), as float32 [n, KVC_TILE_DEPTH]. */
static void gather(const decode_job *job, const void *pages, int64_t row, int64_t t0, int64_t n, int64_t d0,
                   int64_t depth, float *rows) {
    const kvc_dtype dtype = job->args->cache_dtype;
    const int64_t bytes = kvc_dtype_bytes(dtype), D = job->args->D;
    for (int64_t j = 0; j < n;) {
        int64_t run;
        const char *src = page_at(job, pages, row, t0 + j, &run) + d0 * bytes;
        for (run = min_of(run, n - j); run > 0; run--, j++, src += D * bytes) {
            job->simd->load[dtype](rows + j * KVC_TILE_DEPTH, src, depth);
        }
    }
}

/* logits [count, STEP] of a block's queries with keys [t0, t0 + n). */
static void logits_of(const decode_job *job, const decode_state *state, int64_t count, int64_t row, int64_t t0,
                      int64_t n, float *logits) {
    const int64_t D = job->args->D;
    _Alignas(64) float rows[KVC_TILE * KVC_TILE_DEPTH], packed[KVC_TILE * KVC_TILE_DEPTH];
    for (int64_t tile = 0; tile < n; tile += KVC_TILE) {
        const int64_t keys = min_of(KVC_TILE, n - tile);
        int64_t d0 = 0;
        do { /* once for D = 0 too, where every logit is 0 */
            const int64_t depth = min_of(KVC_TILE_DEPTH, D - d0);
            gather(job, job->args->k_pages, row, t0 + tile, keys, d0, depth, rows);
            job->simd->transpose(packed, rows, KVC_TILE_DEPTH, keys, depth);
            for (int64_t i = 0; i < count; i += KVC_TILE_ROWS) {
                const int64_t width = block_rows(i, count);
                job->simd->logits(logits + i * STEP + tile, STEP, state->packed + i * D + d0 * width, packed, depth,
                                  width, d0 > 0);
            }
            d0 += depth;
        } while (d0 < D);
    }
}

/* sums[i] += sum over the keys that query i sees of weights[i, key] * value. */
static void add_values(const decode_job *job, const decode_state *state, int64_t count, int64_t row, int64_t t0,
                       const int64_t *seen, int64_t n, const float *weights) {
    const int64_t D = job->args->D;
    _Alignas(64) float rows[KVC_TILE * KVC_TILE_DEPTH];
    for (int64_t tile = 0; tile < n; tile += KVC_TILE) {
        for (int64_t d0 = 0; d0 < D; d0 += KVC_TILE_DEPTH) {
            const int64_t depth = min_of(KVC_TILE_DEPTH, D - d0);
            gather(job, job->args->v_pages, row, t0 + tile, min_of(KVC_TILE, n - tile), d0, depth, rows);
            for (int64_t i = 0; i < count; i++) {
                /* a value that the query does not see may be infinite, and 0 * inf is NaN: leave it out */
                const int64_t keys = min_of(KVC_TILE, seen[i] - tile);
                job->simd->weighted_sum(state->sums + i * D + d0, weights + i * STEP + tile, rows, KVC_TILE_DEPTH,
                                        max_of(keys, 0), depth);
            }
        }
    }
}

/* Joins the softmax of one step, with maximum `max` and sum `sum`, into query i's state; returns the factor for the
 * step's weights. The base is finite even if every logit so far is -inf, so that no inf - inf arises. */
static float rescale(const decode_state *state, int64_t i, int64_t D, float max, float sum) {
    const float most = max > state->max[i] ? max : state->max[i], base = most == -INFINITY ? 0.0f : most;
    const float old = expf(state->max[i] - base), new = expf(max - base);
    for (int64_t d = 0; d < D; d++) state->sums[i * D + d] *= old;
    state->norm[i] = state->norm[i] * old + sum * new;
    state->max[i] = most;
    return new;
}

static void attend(const decode_job *job, int64_t row, int64_t block, int64_t piece) {
    const kvc_decode_args *args = job->args;
    const int64_t D = args->D, first = block * BLOCK, count = min_of(BLOCK, job->queries - first);
    const decode_state state = state_at(job, row, block, piece);
    for (int64_t i = 0; i < count; i++) {
        state.max[i] = -INFINITY;
        state.norm[i] = 0.0f;
        for (int64_t d = 0; d < D; d++) state.sums[i * D + d] = 0.0f;
    }
    const int64_t begin = args->begin ? args->begin[row] : 0, total = args->end[row] - begin;
    const int64_t length = max_of(PIECE, ceil_div(ceil_div(total, job->pieces), PIECE) * PIECE);
    const int64_t last = min_of(args->end[row], begin + (piece + 1) * length);
    int64_t t = begin + piece * length;
    if (t >= last) return;
    kvc_tile_pack_queries(state.packed, &args->q, row / args->Hkv, row % args->Hkv * (args->Hq / args->Hkv), args->S, D,
                          first, count);
    _Alignas(64) float weights[BLOCK * STEP];
    for (; t < last; t += STEP) {
        const int64_t n = min_of(STEP, last - t), width = ceil_div(n, KVC_TILE) * KVC_TILE;
        int64_t seen[BLOCK];
        logits_of(job, &state, count, row, t, n, weights);
        for (int64_t i = 0; i < count; i++) {
            float max, sum;
            seen[i] = min_of(max_of(end_for(job, row, first + i) - t, 0), n);
            job->simd->softmax(weights + i * STEP, 1, STEP, seen[i], width, args->scale, &max, &sum);
            const float factor = rescale(&state, i, D, max, sum);
            for (int64_t j = 0; j < seen[i]; j++) weights[i * STEP + j] *= factor;
        }
        add_values(job, &state, count, row, t, seen, n, weights);
    }
}

static void attend_range(int64_t begin, int64_t end, void *context) {
    const decode_job *job = context;
    for (int64_t item = begin; item < end; item++) {
        const int64_t piece = item % job->pieces, block = item / job->pieces % job->blocks;
        attend(job, item / (job->pieces * job->blocks), block, piece);
    }
}

/* Joins a row's pieces for one block of queries, normalises, writes out and lse. */
static void finish_range(int64_t begin, int64_t end, void *context) {
    const decode_job *job = context;
    const kvc_decode_args *args = job->args;
    const int64_t D = args->D, bytes = kvc_dtype_bytes(args->q.dtype);
    for (int64_t item = begin; item < end; item++) {
        const int64_t row = item / job->blocks, block = item % job->blocks;
        const int64_t first = block * BLOCK, count = min_of(BLOCK, job->queries - first);
        const decode_state state = state_at(job, row, block, 0);
        for (int64_t i = 0; i < count; i++) {
            float *sums = state.sums + i * D;
            for (int64_t piece = 1; piece < job->pieces; piece++) {
                const decode_state other = state_at(job, row, block, piece);
                if (other.norm[i] == 0.0f) continue; /* an empty piece, or nothing but logits of -inf */
                const float factor = rescale(&state, i, D, other.max[i], other.norm[i]), *more = other.sums + i * D;
                for (int64_t d = 0; d < D; d++) sums[d] += factor * more[d];
            }
            const float norm = state.norm[i];
            for (int64_t d = 0; d < D; d++) sums[d] = norm == 0.0f ? 0.0f : sums[d] / norm;
            /* rows are b*Hkv + g and heads g*G + i, so (row, query of the row) counts [B, Hq, S] straight through */
            const int64_t place = row * job->queries + first + i;
            job->simd->store[args->q.dtype]((char *)args->out + place * D * bytes, sums, D);
            args->lse[place] = norm == 0.0f ? -INFINITY : state.max[i] + logf(norm);
        }
    }
}

static kvc_status check_rows(const decode_job *job) {
    const kvc_decode_args *args = job->args;
    for (int64_t row = 0; row < args->B * args->Hkv; row++) {
        const int64_t begin = args->begin ? args->begin[row] : 0, end = args->end[row];
        if (begin < 0 || begin > end || end > job->capacity) return KVC_BAD_INDEX;
        if (!args->block_table || begin == end) continue;
        for (int64_t i = begin / args->P; i <= (end - 1) / args->P; i++) {
            const int32_t page = args->block_table[row * args->blocks + i];
            if (page < 0 || page >= args->pages) return KVC_BAD_INDEX;
        }
    }
    return KVC_OK;
}

kvc_status kvc_decode(const kvc_decode_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    if (args->B < 0 || args->Hq < 0 || args->Hkv < 0 || args->S < 0 || args->D < 0) return KVC_BAD_SIZE;
    if (args->P < 0 || args->pages < 0 || (args->block_table && args->blocks < 0)) return KVC_BAD_SIZE;
    if (args->Hkv ? args->Hq % args->Hkv != 0 : args->Hq != 0) return KVC_BAD_SIZE;
    if (args->block_table && (args->P == 0 || (args->P & (args->P - 1)))) return KVC_BAD_SIZE;
    if (!args->block_table && args->pages < args->B * args->Hkv) return KVC_BAD_SIZE;
    if (!dtype_known(args->q.dtype) || !dtype_known(args->cache_dtype)) return KVC_BAD_DTYPE;
    if (!args->B || !args->Hq || !args->S) return KVC_OK;
    if (!args->lse || !args->end || !args->scratch) return KVC_NULL_POINTER;
    if (args->D && (!args->out || !args->q.data)) return KVC_NULL_POINTER;
    const decode_job job = job_of(args);
    if (args->D && args->pages && job.capacity && (!args->k_pages || !args->v_pages)) return KVC_NULL_POINTER;
    const kvc_status status = check_rows(&job);
    if (status != KVC_OK) return status;
    const int64_t blocks = args->B * args->Hkv * job.blocks;
    run_parallel(parallel_for, blocks * job.pieces, 1, attend_range, (void *)(uintptr_t)&job);
    run_parallel(parallel_for, blocks, 1, finish_range, (void *)(uintptr_t)&job);
    return KVC_OK;
}
