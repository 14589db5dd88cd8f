/* Column scores of a window of queries over the keys: SnapKV, CGE, H2O and TOVA are settings of it.
 *
 * One KV head at a time, all threads on its key tiles; each logit is computed and exponentiated once. Phase 1, per
 * tile: logits of all G*W rows, e = exp(logit - the tile's own maximum of that row), the maximum and the sum of e.
 * Then, per row: the maximum m and normaliser Z over all tiles. Phase 2, per tile: the column sums of
 * e*exp(tile maximum - m)/Z. Every tile and every row is reduced in a fixed order by one thread, so threads change no
 * bit.
 *
 * Rows go in passes whose e's fit the second-level caches, for long sequences a share of the last-level one: e is written
 * once and read once, and main memory would be slower than the products; each pass transposes the keys anew, so few rows
 * are not worth one. Columns add up by groups of GROUP rows in order, the groups in double (H2O sums
 * over thousands of rows), and a pass is whole groups, so the cut into passes changes no bit either.
 */
#include "kernel.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

enum {
    PASS_FLOATS = 1 << 19, /* 2 MiB of e per pass, */
    FEW_ROWS = 144,        /* unless those are fewer rows than this: then as many, */
    MOST_FLOATS = 1 << 21, /* but no more than 8 MiB */
    GROUP = 12,            /* rows summed before they join a column: one long sum would round too often */
    MERGE_ROWS = 32        /* rows of maxima and sums that one work item joins */
};

/* Arrays in scratch. rows: of a pass at most; tiles: of the longest sequence. */
typedef struct {
    float *e;                    /* [tiles, rows, KVC_TILE] */
    float *tile_max, *tile_sum;  /* [tiles, rows]; tile_max later holds the tile's weights */
    float *row_max, *row_norm;   /* [rows]; row_norm = 1/Z */
    float *queries;              /* [G*W, D], packed */
    double *columns;             /* [tiles*KVC_TILE], before pooling */
} score_scratch;

typedef struct {
    const kvc_window_scores_args *args;
    const kvc_simd *simd;
    score_scratch scratch;
    int64_t b, head;            /* sequence, KV head */
    int64_t length, tiles;      /* keys of this sequence */
    int64_t first, rows;        /* rows of this pass, of G*W */
    int64_t tile_begin, tile_end; /* tiles that some row of this pass sees */
    int bad;                    /* a row has no normaliser: NaN or infinite logits */
} score_job;

/* End of the keys that a query sees; it sees those from mask_first on. */
static int64_t seen_end(const score_job *job, int64_t query) {
    return min_of(job->length - job->args->W + query + 1, job->length - job->args->mask_last);
}

/* Rows per pass for a sequence of that many tiles: whole groups, or all. */
static int64_t pass_rows(int64_t all_rows, int64_t tiles) {
    const int64_t keys = tiles * KVC_TILE, most = min_of(FEW_ROWS, MOST_FLOATS / keys);
    return min_of(all_rows, max_of(max_of(PASS_FLOATS / keys, most) / GROUP * GROUP, GROUP));
}

/* Takes `count` floats, rounded up to whole cache lines, from *next on; with *next NULL it only counts *bytes. */
static float *take(char **next, int64_t *bytes, int64_t count) {
    const int64_t size = ceil_div(count, 16) * 64;
    float *array = (float *)(void *)*next;
    if (*next) *next += size;
    *bytes += size;
    return array;
}

/* Places the arrays in args->scratch; returns the bytes needed, 0 if there is nothing to compute. */
static int64_t lay_out(const kvc_window_scores_args *args, score_scratch *scratch) {
    if (!args->B || !args->Hq || !args->Hkv || !args->W || !args->T) return 0;
    const int64_t all_rows = args->Hq / args->Hkv * args->W, tiles = ceil_div(args->T, KVC_TILE);
    /* shorter sequences have more rows per pass, but never more e's than this */
    const int64_t keys = tiles * KVC_TILE, smallest = min_of(all_rows, GROUP) * keys;
    const int64_t pass = max_of(PASS_FLOATS, min_of(FEW_ROWS * keys, MOST_FLOATS));
    const int64_t floats = min_of(all_rows * keys, max_of(pass, smallest));
    char *next = args->scratch;
    int64_t bytes = 0;
    scratch->e = take(&next, &bytes, floats);
    scratch->tile_max = take(&next, &bytes, floats / KVC_TILE);
    scratch->tile_sum = take(&next, &bytes, floats / KVC_TILE);
    scratch->row_max = take(&next, &bytes, all_rows);
    scratch->row_norm = take(&next, &bytes, all_rows);
    scratch->queries = take(&next, &bytes, all_rows * args->D);
    scratch->columns = (double *)(void *)take(&next, &bytes, 2 * tiles * KVC_TILE);
    return bytes;
}

static int sizes_are_good(const kvc_window_scores_args *args) {
    if (args->B < 0 || args->Hq < 0 || args->Hkv < 0 || args->W < 0 || args->T < 0 || args->D < 0) return 0;
    if (args->skip_last < 0 || args->mask_first < 0 || args->mask_last < 0) return 0;
    if (args->T > INT32_MAX || args->kernel_size < 1 || args->kernel_size % 2 == 0) return 0;
    if (!scale_is_good(args->scale, args->softcap)) return 0;
    return args->Hkv ? args->Hq % args->Hkv == 0 : args->Hq == 0;
}

int64_t kvc_window_scores_scratch_bytes(const kvc_window_scores_args *args) {
    score_scratch scratch;
    if (!args || !sizes_are_good(args)) return 0;
    kvc_window_scores_args sizes = *args;
    sizes.scratch = NULL;
    return lay_out(&sizes, &scratch);
}

static void pack_range(int64_t begin, int64_t end, void *context) {
    const score_job *job = context;
    const kvc_window_scores_args *args = job->args;
    const int64_t group = args->Hq / args->Hkv, first = begin * KVC_TILE_ROWS;
    const int64_t rows = min_of(end * KVC_TILE_ROWS, group * args->W) - first;
    kvc_tile_pack_queries(job->scratch.queries + first * args->D, &args->q, job->b, job->head * group, args->W, args->D,
                          first, rows);
}

/* Phase 1 for one block of rows of one tile, its logits already in e. */
static void exponentiate(const score_job *job, int64_t tile, int64_t block, int64_t rows) {
    const int64_t W = job->args->W, at = tile * job->rows + block, t0 = tile * KVC_TILE;
    const int64_t masked = max_of(job->args->mask_first - t0, 0);
    const int64_t first = (job->first + block) % W, earliest = first + rows > W ? 0 : first;
    float scale = job->args->scale;
    if (job->args->softcap > 0.0f) {
        job->simd->softcap(job->scratch.e + at * KVC_TILE, rows * KVC_TILE, scale, job->args->softcap, NULL);
        scale = 1.0f;
    } else if (masked > 0) { /* -inf times a scale of 0 or below would be no mask */
        float *logits = job->scratch.e + at * KVC_TILE;
        for (int64_t i = 0; i < rows * KVC_TILE; i++) logits[i] *= scale;
        scale = 1.0f;
    }
    const int together = masked == 0 && t0 + KVC_TILE <= seen_end(job, earliest); /* every query sees the whole tile */
    for (int64_t i = 0; i < rows; i += together ? rows : 1) {
        float *e = job->scratch.e + (at + i) * KVC_TILE;
        const int64_t seen = together ? KVC_TILE : seen_end(job, (first + i) % W) - t0;
        const int none = masked >= min_of(seen, KVC_TILE);
        /* before the exponentials: a masked logit must not be the maximum */
        for (int64_t t = 0; t < masked && !none; t++) e[t] = -INFINITY;
        job->simd->softmax(e, together ? rows : 1, KVC_TILE, none ? 0 : min_of(seen, KVC_TILE), KVC_TILE,
                           scale, job->scratch.tile_max + at + i, job->scratch.tile_sum + at + i);
    }
}

/* Whether no row of a block sees any key of a tile: in the last tiles, which a causal mask cuts, half of the blocks. */
static int tile_is_hidden(const score_job *job, int64_t tile, int64_t block, int64_t rows) {
    const int64_t W = job->args->W, first = (job->first + block) % W;
    return seen_end(job, first + rows > W ? W - 1 : first + rows - 1) <= tile * KVC_TILE;
}

/* What a tile holds for rows that see none of it. */
static void hide_tile(const score_job *job, int64_t tile, int64_t block, int64_t rows) {
    const int64_t at = tile * job->rows + block;
    memset(job->scratch.e + at * KVC_TILE, 0, (size_t)(rows * KVC_TILE) * sizeof(float));
    memset(job->scratch.tile_sum + at, 0, (size_t)rows * sizeof(float));
    for (int64_t i = 0; i < rows; i++) job->scratch.tile_max[at + i] = -INFINITY;
}

/* Asks for a share of the next tile's keys while a block of this tile's rows is multiplied: a key tile is used once per
 * pass, and waiting for it would cost as much as transposing it many times. */
static void prefetch_keys(const score_job *job, int64_t tile, int64_t block, int64_t rows) {
    const kvc_view *k = &job->args->k;
    const int64_t t0 = (tile + 1) * KVC_TILE, bytes = job->args->D * kvc_dtype_bytes(k->dtype);
    const int64_t end = min_of(t0 + (block + rows) * KVC_TILE / job->rows, job->length);
    for (int64_t t = t0 + block * KVC_TILE / job->rows; t < end; t++) {
        const char *key = view_at(k, job->b, job->head, t, 0);
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(key + i);
    }
}

static void logits_range(int64_t begin, int64_t end, void *context) {
    const score_job *job = context;
    const kvc_window_scores_args *args = job->args;
    _Alignas(64) float packed[KVC_TILE * KVC_TILE_DEPTH], buffer[KVC_TILE * KVC_TILE_DEPTH];
    for (int64_t tile = job->tile_begin + begin; tile < job->tile_begin + end; tile++) {
        const int64_t t0 = tile * KVC_TILE, keys = min_of(KVC_TILE, job->length - t0);
        float *e = job->scratch.e + tile * job->rows * KVC_TILE;
        int64_t d0 = 0;
        do { /* once for D = 0 too, where every logit is 0 */
            const int64_t depth = min_of(KVC_TILE_DEPTH, args->D - d0);
            kvc_tile_pack_keys(packed, buffer, view_at(&args->k, job->b, job->head, t0, d0), args->k.dtype,
                               args->k.stride_t, keys, depth);
            for (int64_t block = 0; block < job->rows; block += KVC_TILE_ROWS) {
                const int64_t rows = block_rows(block, job->rows);
                if (tile_is_hidden(job, tile, block, rows)) {
                    if (d0 + depth == args->D) hide_tile(job, tile, block, rows);
                    continue;
                }
                const float *queries = job->scratch.queries + (job->first + block) * args->D + d0 * rows;
                job->simd->gemm(e + block * KVC_TILE, KVC_TILE, queries, 1, rows, packed, KVC_TILE, rows, KVC_TILE, depth,
                                d0 > 0);
                if (d0 + depth < args->D) continue;
                exponentiate(job, tile, block, rows);
                prefetch_keys(job, tile, block, rows);
            }
            d0 += depth;
        } while (d0 < args->D);
    }
}

static int sees_nothing(const score_job *job, int64_t row) {
    return seen_end(job, (job->first + row) % job->args->W) <= job->args->mask_first;
}

static float sink_of_row(const score_job *job, int64_t row) {
    const kvc_window_scores_args *args = job->args;
    return sink_of(args->sink_logits, job->head * (args->Hq / args->Hkv) + (job->first + row) / args->W);
}

/* Row maxima and normalisers over the tiles; leaves exp(tile_max - row_max) in tile_max. */
static void merge_range(int64_t begin, int64_t end, void *context) {
    const score_job *job = context;
    for (int64_t item = begin; item < end; item++) {
        const int64_t first = item * MERGE_ROWS, rows = min_of(MERGE_ROWS, job->rows - first);
        float *row_max = job->scratch.row_max + first, *row_norm = job->scratch.row_norm + first;
        double sums[MERGE_ROWS] = {0};
        for (int64_t i = 0; i < rows; i++) row_max[i] = -INFINITY;
        for (int64_t tile = job->tile_begin; tile < job->tile_end; tile++) {
            const float *tile_max = job->scratch.tile_max + tile * job->rows + first;
            for (int64_t i = 0; i < rows; i++) row_max[i] = tile_max[i] > row_max[i] ? tile_max[i] : row_max[i];
        }
        for (int64_t i = 0; i < rows; i++) {
            const float sink = sink_of_row(job, first + i);
            if (sees_nothing(job, first + i)) row_max[i] = 0.0f; /* its weights are then exp(-inf) = 0 */
            else if (!(sink <= row_max[i])) row_max[i] = sink;
        }
        for (int64_t tile = job->tile_begin; tile < job->tile_end; tile++) {
            float *tile_max = job->scratch.tile_max + tile * job->rows + first;
            const float *tile_sum = job->scratch.tile_sum + tile * job->rows + first;
            job->simd->exp_difference(tile_max, tile_max, row_max, rows);
            for (int64_t i = 0; i < rows; i++) sums[i] += (double)tile_sum[i] * (double)tile_max[i];
        }
        for (int64_t i = 0; i < rows; i++) {
            const float sink = sink_of_row(job, first + i);
            if (sink != -INFINITY) sums[i] += (double)expf(sink - row_max[i]);
            if (sees_nothing(job, first + i)) row_norm[i] = 0.0f;
            else row_norm[i] = sums[i] > 0.0 && sums[i] < (double)INFINITY ? (float)(1.0 / sums[i]) : NAN;
        }
    }
}

static void columns_range(int64_t begin, int64_t end, void *context) {
    const score_job *job = context;
    for (int64_t tile = job->tile_begin + begin; tile < job->tile_begin + end; tile++) {
        const float *e = job->scratch.e + tile * job->rows * KVC_TILE;
        double *columns = job->scratch.columns + tile * KVC_TILE;
        float *weights = job->scratch.tile_max + tile * job->rows;
        for (int64_t i = 0; i < job->rows; i++) weights[i] *= job->scratch.row_norm[i];
        if (job->args->reduce == KVC_REDUCE_MAX) {
            float maxima[KVC_TILE] = {0};
            job->simd->weighted_max(maxima, weights, e, KVC_TILE, job->rows, KVC_TILE);
            for (int64_t j = 0; j < KVC_TILE; j++) {
                if ((double)maxima[j] > columns[j]) columns[j] = (double)maxima[j];
            }
            continue;
        }
        for (int64_t i = 0; i < job->rows; i += GROUP) {
            float sums[KVC_TILE] = {0};
            const int64_t some = min_of(GROUP, job->rows - i);
            job->simd->weighted_sum(sums, weights + i, e + i * KVC_TILE, KVC_TILE, some, KVC_TILE);
            for (int64_t j = 0; j < KVC_TILE; j++) columns[j] += (double)sums[j];
        }
    }
}

/* Pools columns [begin, end) of `count` into scores. The middle has all its neighbours, so its loop has no tests. */
static void pool_range(int64_t begin, int64_t end, void *context) {
    const score_job *job = context;
    const kvc_window_scores_args *args = job->args;
    const int64_t half = args->kernel_size / 2, count = job->length - args->skip_last;
    const int64_t width = args->T - args->skip_last;
    const double *columns = job->scratch.columns;
    float *scores = args->scores + (job->b * args->Hkv + job->head) * width;
    const double rows = (double)(args->Hq / args->Hkv * args->W);
    const double divisor = (args->pool == KVC_POOL_AVG ? (double)args->kernel_size : 1.0) *
                           (args->reduce == KVC_REDUCE_MEAN ? rows : 1.0);
    for (int64_t t = begin; t < end; t++) {
        if (t >= count || job->bad) {
            scores[t] = t < count ? NAN : 0.0f;
            continue;
        }
        const int64_t from = max_of(t - half, 0), to = min_of(t + half, count - 1);
        double pooled = columns[from];
        for (int64_t i = from + 1; i <= to; i++) {
            if (args->pool == KVC_POOL_AVG) pooled += columns[i];
            else if (columns[i] > pooled) pooled = columns[i];
        }
        scores[t] = (float)(pooled / divisor);
    }
}

/* The tiles that the rows of this pass see. Their queries are in order, unless the pass reaches into the next head. */
static void set_tiles(score_job *job) {
    const int64_t W = job->args->W, last = job->first + job->rows - 1;
    const int64_t latest = last / W > job->first / W ? W - 1 : last % W;
    job->tile_begin = min_of(job->args->mask_first, job->length) / KVC_TILE;
    job->tile_end = max_of(ceil_div(max_of(seen_end(job, latest), 0), KVC_TILE), job->tile_begin);
}

/* All passes of one KV head of one sequence. */
static void score_head(score_job *job, kvc_parallel_for parallel_for) {
    const int64_t all_rows = job->args->Hq / job->args->Hkv * job->args->W, step = pass_rows(all_rows, job->tiles);
    run_parallel(parallel_for, ceil_div(all_rows, KVC_TILE_ROWS), 4, pack_range, job);
    job->bad = 0;
    memset(job->scratch.columns, 0, (size_t)(job->tiles * KVC_TILE) * sizeof(double));
    for (job->first = 0; job->first < all_rows && !job->bad; job->first += step) {
        job->rows = min_of(step, all_rows - job->first);
        set_tiles(job);
        run_parallel(parallel_for, job->tile_end - job->tile_begin, 1, logits_range, job);
        run_parallel(parallel_for, ceil_div(job->rows, MERGE_ROWS), 1, merge_range, job);
        for (int64_t i = 0; i < job->rows; i++) {
            if (isnan(job->scratch.row_norm[i])) job->bad = 1;
        }
        /* keys without a score need no column */
        const int64_t scored = ceil_div(job->length - job->args->skip_last, KVC_TILE);
        const int64_t tiles = max_of(min_of(job->tile_end, scored) - job->tile_begin, 0);
        if (!job->bad) run_parallel(parallel_for, tiles, 4, columns_range, job);
    }
    run_parallel(parallel_for, job->args->T - job->args->skip_last, 4096, pool_range, job);
}

kvc_status kvc_window_scores(const kvc_window_scores_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    if (!sizes_are_good(args)) return KVC_BAD_SIZE;
    if (args->reduce < KVC_REDUCE_MEAN || args->reduce > KVC_REDUCE_MAX) return KVC_BAD_SIZE;
    if (args->pool < KVC_POOL_AVG || args->pool > KVC_POOL_MAX) return KVC_BAD_SIZE;
    if (!dtype_known(args->q.dtype) || !dtype_known(args->k.dtype)) return KVC_BAD_DTYPE;
    if (!args->B || !args->Hkv || !args->T) return KVC_OK;
    if (args->W > args->T || args->skip_last >= args->T) return KVC_BAD_SIZE;
    if (!args->scores) return KVC_NULL_POINTER;
    if (!args->Hq || !args->W) { /* no query: no attention */
        memset(args->scores, 0, (size_t)(args->B * args->Hkv * (args->T - args->skip_last)) * sizeof(float));
        return KVC_OK;
    }
    if (!args->scratch || (args->D && (!args->q.data || !args->k.data))) return KVC_NULL_POINTER;
    for (int64_t b = 0; args->lengths && b < args->B; b++) {
        const int64_t length = args->lengths[b];
        if (length < args->W || length < args->skip_last || length > args->T) return KVC_BAD_INDEX;
    }
    score_job job = {.args = args, .simd = kvc_simd_table()};
    lay_out(args, &job.scratch);
    for (job.b = 0; job.b < args->B; job.b++) {
        job.length = args->lengths ? args->lengths[job.b] : args->T;
        job.tiles = ceil_div(job.length, KVC_TILE);
        for (job.head = 0; job.head < args->Hkv; job.head++) score_head(&job, parallel_for);
    }
    return KVC_OK;
}
