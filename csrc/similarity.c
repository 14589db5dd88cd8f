/* How differently layers attend: Jensen-Shannon divergence of the attention rows of all pairs of layers.
 *
 * One KV head at a time. Phase 1, per layer and tile of keys: the logits of all G*S rows, their maximum and the sum of
 * their exponentials; then the normaliser of each row. Phase 2, per slab of tiles: the probabilities of all layers side
 * by side, [tiles, rows, L, KVC_TILE], and, one row per work item, the divergence of every pair. The tile sums are in
 * float, everything across tiles in double; each row is reduced by one thread in the order of the tiles, so neither
 * threads nor the slabs change a bit.
 */
#include "kernel.h"

#include <math.h>
#include <string.h>

enum { SLAB_FLOATS = 1 << 21 /* 8 MiB of probabilities */ };

/* Arrays in scratch; rows = G*S. */
typedef struct {
    float *e;                   /* [slab tiles, rows, L, KVC_TILE] */
    float *tile_max, *tile_sum; /* [L, tiles, rows]; tile_max later holds the tile's weights */
    float *queries;             /* [L, rows*D], packed */
    double *sums;               /* [rows, L, L], b < a */
} similarity_scratch;

typedef struct {
    const kvc_layer_similarity_args *args;
    const kvc_simd *simd;
    similarity_scratch scratch;
    int64_t head, rows;
    int64_t first_tile, tiles; /* those that some row sees */
    int64_t slab_first, slab_tiles;
    int again; /* exponentials are made a second time: tile_max holds weights already */
} similarity_job;

/* Counted from first_tile. */
static int64_t tiles_of(const kvc_layer_similarity_args *args) {
    return max_of(ceil_div(max_of(args->T - args->recent, 0), KVC_TILE) - args->sinks / KVC_TILE, 0);
}

static int64_t tiles_per_slab(const kvc_layer_similarity_args *args) {
    const int64_t rows = args->Hq / args->Hkv * args->S;
    return max_of(min_of(tiles_of(args), SLAB_FLOATS / (rows * args->L * KVC_TILE)), 1);
}

static int64_t seen_end(const similarity_job *job, int64_t row) {
    const kvc_layer_similarity_args *args = job->args;
    return args->T - args->S + row % args->S + 1 - args->recent;
}

/* Takes `bytes`, rounded up to whole cache lines, from *next on; with *next NULL it only counts *all. */
static void *take(char **next, int64_t *all, int64_t bytes) {
    const int64_t size = ceil_div(bytes, 64) * 64;
    void *array = *next;
    if (*next) *next += size;
    *all += size;
    return array;
}

static int64_t lay_out(const kvc_layer_similarity_args *args, similarity_scratch *scratch) {
    if (!args->L || !args->Hq || !args->S) return 0;
    const int64_t rows = args->Hq / args->Hkv * args->S, statistics = args->L * tiles_of(args) * rows * 4;
    char *next = args->scratch;
    int64_t bytes = 0;
    scratch->e = take(&next, &bytes, tiles_per_slab(args) * rows * args->L * KVC_TILE * 4);
    scratch->tile_max = take(&next, &bytes, statistics);
    scratch->tile_sum = take(&next, &bytes, statistics);
    scratch->queries = take(&next, &bytes, args->L * rows * args->D * 4);
    scratch->sums = take(&next, &bytes, rows * args->L * args->L * 8);
    return bytes;
}

static int sizes_are_good(const kvc_layer_similarity_args *args) {
    if (args->L < 0 || args->Hq < 0 || args->Hkv < 0 || args->S < 0 || args->T < 0 || args->D < 0) return 0;
    if (args->sinks < 0 || args->recent < 0 || args->S > args->T || args->T > INT32_MAX) return 0;
    if (args->sinks > INT32_MAX || args->recent > INT32_MAX || args->scale < 0.0f) return 0;
    if (!scale_is_good(args->scale, args->softcap)) return 0;
    return args->Hkv ? args->Hq % args->Hkv == 0 : args->Hq == 0;
}

int64_t kvc_layer_similarity_scratch_bytes(const kvc_layer_similarity_args *args) {
    similarity_scratch scratch;
    if (!args || !sizes_are_good(args)) return 0;
    kvc_layer_similarity_args sizes = *args;
    sizes.scratch = NULL;
    return lay_out(&sizes, &scratch);
}

static void pack_range(int64_t begin, int64_t end, void *context) {
    const similarity_job *job = context;
    const kvc_layer_similarity_args *args = job->args;
    for (int64_t layer = begin; layer < end; layer++) {
        kvc_tile_pack_queries(job->scratch.queries + layer * job->rows * args->D, &args->q, layer,
                              job->head * (args->Hq / args->Hkv), args->S, args->D, 0, job->rows);
    }
}

/* Exponentials of a block of rows of one layer and tile, their logits already in e; rows stride floats apart. */
static void exponentiate(const similarity_job *job, float *e, int64_t stride, int64_t layer, int64_t tile, int64_t block,
                         int64_t rows) {
    const kvc_layer_similarity_args *args = job->args;
    const int64_t at = (layer * job->tiles + tile) * job->rows + block, t0 = (job->first_tile + tile) * KVC_TILE;
    const int64_t masked = max_of(args->sinks - t0, 0);
    for (int64_t i = 0; i < rows; i++, e += stride) {
        float scale = args->scale;
        if (args->softcap > 0.0f) {
            job->simd->softcap(e, KVC_TILE, scale, args->softcap, NULL);
            scale = 1.0f;
        } else if (masked > 0) { /* -inf times a scale of 0 would be no mask */
            for (int64_t t = 0; t < KVC_TILE; t++) e[t] *= scale;
            scale = 1.0f;
        }
        const int64_t seen = max_of(min_of(seen_end(job, block + i) - t0, KVC_TILE), 0);
        for (int64_t t = 0; t < masked; t++) e[t] = -INFINITY; /* a masked logit must not be the maximum */
        float max, sum;
        job->simd->softmax(e, 1, stride, masked >= seen ? 0 : seen, KVC_TILE, scale, &max, &sum);
        if (job->again) continue;
        job->scratch.tile_max[at + i] = max;
        job->scratch.tile_sum[at + i] = sum;
    }
}

/* Work item: layer and tile of the slab. */
static void logits_range(int64_t begin, int64_t end, void *context) {
    const similarity_job *job = context;
    const kvc_layer_similarity_args *args = job->args;
    _Alignas(64) float packed[KVC_TILE * KVC_TILE_DEPTH], buffer[KVC_TILE * KVC_TILE_DEPTH];
    const int64_t stride = args->L * KVC_TILE;
    for (int64_t item = begin; item < end; item++) {
        const int64_t layer = item / job->slab_tiles, place = item % job->slab_tiles, tile = job->slab_first + place;
        const int64_t t0 = (job->first_tile + tile) * KVC_TILE, keys = min_of(KVC_TILE, args->T - t0);
        float *e = job->scratch.e + place * job->rows * stride + layer * KVC_TILE;
        int64_t d0 = 0;
        do { /* once for D = 0 too, where every logit is 0 */
            const int64_t depth = min_of(KVC_TILE_DEPTH, args->D - d0);
            kvc_tile_pack_keys(packed, buffer, view_at(&args->k, layer, job->head, t0, d0), args->k.dtype,
                               args->k.stride_t, keys, depth);
            for (int64_t block = 0; block < job->rows; block += KVC_TILE_ROWS) {
                const int64_t rows = block_rows(block, job->rows);
                const float *queries = job->scratch.queries + (layer * job->rows + block) * args->D + d0 * rows;
                job->simd->gemm(e + block * stride, stride, queries, 1, rows, packed, KVC_TILE, rows, KVC_TILE, depth,
                                d0 > 0);
                if (d0 + depth == args->D) exponentiate(job, e + block * stride, stride, layer, tile, block, rows);
            }
            d0 += depth;
        } while (d0 < args->D);
    }
}

/* Work item: a row of a layer. Leaves exp(tile_max - row maximum)/Z in tile_max. */
static void weights_range(int64_t begin, int64_t end, void *context) {
    const similarity_job *job = context;
    for (int64_t item = begin; item < end; item++) {
        const int64_t first = item / job->rows * job->tiles * job->rows + item % job->rows;
        float *tile_max = job->scratch.tile_max + first, most = -INFINITY;
        const float *tile_sum = job->scratch.tile_sum + first;
        double norm = 0.0;
        for (int64_t t = 0; t < job->tiles; t++) most = fmaxf(most, tile_max[t * job->rows]);
        if (most == -INFINITY) most = 0.0f; /* its weights are then exp(-inf) = 0 */
        for (int64_t t = 0; t < job->tiles; t++) {
            float *weight = tile_max + t * job->rows;
            *weight = expf(*weight - most);
            norm += (double)*weight * (double)tile_sum[t * job->rows];
        }
        const int sees_nothing = seen_end(job, item % job->rows) <= job->args->sinks;
        const float inverse = norm > 0.0 && norm < (double)INFINITY ? (float)(1.0 / norm) : sees_nothing ? 0.0f : NAN;
        for (int64_t t = 0; t < job->tiles; t++) tile_max[t * job->rows] *= inverse;
    }
}

/* Work item: a row, all pairs of layers. */
static void divergence_range(int64_t begin, int64_t end, void *context) {
    const similarity_job *job = context;
    const int64_t L = job->args->L;
    for (int64_t row = begin; row < end; row++) {
        if (seen_end(job, row) <= job->args->sinks) continue;
        double *sums = job->scratch.sums + row * L * L;
        for (int64_t place = 0; place < job->slab_tiles; place++) {
            float *p = job->scratch.e + (place * job->rows + row) * L * KVC_TILE;
            for (int64_t layer = 0; layer < L; layer++) {
                const int64_t at = (layer * job->tiles + job->slab_first + place) * job->rows + row;
                const float weight = job->scratch.tile_max[at];
                for (int64_t t = 0; t < KVC_TILE; t++) p[layer * KVC_TILE + t] *= weight;
                job->simd->divergence(sums + layer * L, p + layer * KVC_TILE, p, layer);
            }
        }
    }
}

/* Adds the rows of each query head up. */
static void write_sums(const similarity_job *job) {
    const int64_t L = job->args->L, S = job->args->S, group = job->rows / S;
    for (int64_t g = 0; g < group; g++) {
        double *out = job->args->sums + (job->head * group + g) * L * L;
        for (int64_t a = 0; a < L; a++) {
            out[a * L + a] = 0.0;
            for (int64_t b = 0; b < a; b++) {
                double sum = 0.0;
                for (int64_t s = 0; s < S; s++) {
                    const double js = job->scratch.sums[((g * S + s) * L + a) * L + b];
                    sum += js < 0.0 ? 0.0 : js > 1.0 ? 1.0 : js; /* rounding; NaN stays */
                }
                out[a * L + b] = out[b * L + a] = sum;
            }
        }
    }
}

static void compare_head(similarity_job *job, kvc_parallel_for parallel_for) {
    const int64_t L = job->args->L, slab = tiles_per_slab(job->args);
    run_parallel(parallel_for, L, 1, pack_range, job);
    memset(job->scratch.sums, 0, (size_t)(job->rows * L * L) * sizeof(double));
    for (int phase = 1; phase <= 2; phase++) {
        job->again = phase == 2;
        for (job->slab_first = 0; job->slab_first < job->tiles; job->slab_first += slab) {
            job->slab_tiles = min_of(slab, job->tiles - job->slab_first);
            /* one slab holds all: its exponentials are still there */
            if (phase == 1 || slab < job->tiles) run_parallel(parallel_for, L * job->slab_tiles, 1, logits_range, job);
            if (phase == 2) run_parallel(parallel_for, job->rows, 1, divergence_range, job);
        }
        if (phase == 1) run_parallel(parallel_for, L * job->rows, 16, weights_range, job);
    }
    write_sums(job);
}

kvc_status kvc_layer_similarity(const kvc_layer_similarity_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    if (!sizes_are_good(args)) return KVC_BAD_SIZE;
    if (!dtype_known(args->q.dtype) || !dtype_known(args->k.dtype)) return KVC_BAD_DTYPE;
    if (!args->L || !args->Hq) return KVC_OK;
    if (!args->sums) return KVC_NULL_POINTER;
    if (!args->S) {
        memset(args->sums, 0, (size_t)(args->Hq * args->L * args->L) * sizeof(double));
        return KVC_OK;
    }
    if (!args->scratch || (args->D && (!args->q.data || !args->k.data))) return KVC_NULL_POINTER;
    similarity_job job = {.args = args, .simd = kvc_simd_table(), .rows = args->Hq / args->Hkv * args->S};
    lay_out(args, &job.scratch);
    job.first_tile = args->sinks / KVC_TILE;
    job.tiles = tiles_of(args);
    for (job.head = 0; job.head < args->Hkv; job.head++) compare_head(&job, parallel_for);
    return KVC_OK;
}
