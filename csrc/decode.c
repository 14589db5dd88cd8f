/* Attention of a few queries over ragged rows of pages.
 *
 * Bytes: each key and value is read once for the G*S queries of its KV head; with few queries the ceiling is the read
 * bandwidth. A row's keys go in pieces of equal length, one work item each, so that threads get equal shares of the keys
 * however ragged the rows are; the pieces of a row are joined in order. Up to FEW queries multiply straight from the
 * pages; more of them lie in the lanes (lanes.h), where a converted key serves up to KVC_TILE queries.
 * Codes: half of bfloat16's bytes, 3/8 where values have 4 bits, and 4 for scales. FEW queries multiply as integers, so that
 * a code is widened and nothing else; in the lanes codes become float32 as other types do.
 */
#include "formats.h"
#include "lanes.h"
#include "page_rows.h"

#include <math.h>
#include <string.h>

enum {
    FEW = 8,
    LEAST = 512, /* keys per piece for FEW queries; more queries take longer pieces, so that partial results stay small */
    PIECE = 2048, /* at most: memory waits where pieces meet, so a row that has MANY gets longer ones */
    MANY = 16,
    BLOCKS = PIECE / KVC_MIXED
};

/* Scratch: first [R + 1], the pieces before each row; then for every piece and query max, norm and sums [D]. */
typedef struct {
    const kvc_decode_args *args;
    const kvc_simd *simd;
    page_rows keys, values;
    int64_t rows, queries; /* G*S queries per row */
    int64_t capacity;      /* keys that a row can hold */
    int64_t piece;         /* keys per piece of a short row */
    int64_t state_floats;  /* of one piece: a multiple of a cache line, so that no two items share one */
    int64_t *first;
    float *states;
} decode_job;

typedef struct {
    float *max, *norm, *sums;
} decode_state;

static decode_job job_of(const kvc_decode_args *args) {
    decode_job job = {.args = args, .simd = kvc_simd_table()};
    job.rows = args->B * args->Hkv;
    job.queries = args->Hkv ? args->Hq / args->Hkv * args->S : 0;
    const kvc_rows *rows = &args->rows;
    const int codes = format_of_codes(rows->format);
    job.keys = (page_rows){rows->keys, args->block_table, args->pages, args->blocks, args->P,
                           kvc_key_bytes(rows->format, args->D), codes ? rows->key_scales : NULL};
    job.values = job.keys;
    job.values.pages = rows->values, job.values.bytes = kvc_value_bytes(rows->format, args->D);
    job.values.scales = codes ? rows->value_scales : NULL;
    if (args->value_table) {
        job.values.table = args->value_table;
        job.values.count = args->value_pages, job.values.blocks = args->value_blocks;
    }
    job.capacity = args->block_table ? min_of(job.keys.blocks, job.values.blocks) * args->P : args->P;
    job.piece = args->probabilities ? LEAST : LEAST * max_of(ceil_div(job.queries, FEW), 1);
    job.state_floats = ceil_div(job.queries * (args->D + 2), 16) * 16;
    job.first = args->scratch;
    job.states = args->scratch ? (float *)args->scratch + ceil_div(2 * (job.rows + 1), 16) * 16 : NULL;
    return job;
}

static decode_state state_at(const decode_job *job, int64_t item) {
    decode_state state;
    state.max = job->states + item * job->state_floats;
    state.norm = state.max + job->queries;
    state.sums = state.norm + job->queries;
    return state;
}

static int sizes_are_good(const kvc_decode_args *args) {
    if (args->B < 0 || args->Hq < 0 || args->Hkv < 0 || args->S < 0 || args->D < 1) return 0;
    if (args->D > KVC_MAX_HEAD_DIM || args->P < 0 || args->pages < 0 || (args->block_table && args->blocks < 0)) return 0;
    if (args->sinks < 0 || (args->probabilities && (args->S != 1 || args->columns < 0 || args->sinks))) return 0;
    if (args->value_table && (!args->block_table || args->value_blocks < 0 || args->value_pages < 0)) return 0;
    if (args->Hkv ? args->Hq % args->Hkv != 0 : args->Hq != 0) return 0;
    if (!scale_is_good(args->scale, args->softcap)) return 0;
    if (args->rows.format == KVC_FORMAT_K8V4 && args->D % 2) return 0;
    if (args->block_table) return args->P > 0 && (args->P & (args->P - 1)) == 0;
    return args->pages >= args->B * args->Hkv;
}

int64_t kvc_decode_scratch_bytes(const kvc_decode_args *args) {
    if (!args || !sizes_are_good(args)) return 0;
    const decode_job job = job_of(args);
    const int64_t pieces = job.rows * (ceil_div(job.capacity, job.piece) + (args->sinks > 0));
    return (ceil_div(2 * (job.rows + 1), 16) * 16 + pieces * job.state_floats) * (int64_t)sizeof(float);
}

/* One past the last key that query number i of a row sees; at most the row's end. */
static int64_t end_for(const decode_job *job, int64_t row, int64_t i) {
    const kvc_decode_args *args = job->args;
    return args->end[row] - (args->causal ? args->S - 1 - i % args->S : 0);
}

static int64_t begin_of(const decode_job *job, int64_t row) {
    return job->args->begin ? job->args->begin[row] : 0;
}

/* Keys per piece of a row. */
static int64_t piece_of(const decode_job *job, int64_t row) {
    const int64_t most = ceil_div(job->args->end[row] - begin_of(job, row), MANY * job->piece);
    return job->piece * max_of(min_of(most, PIECE / LEAST), 1);
}

/* The first keys before begin that are seen: [0, front). */
static int64_t front_of(const decode_job *job, int64_t row) {
    return min_of(job->args->sinks, begin_of(job, row));
}

/* Where the range of keys that key t is of ends: the front's, or the rest's. */
static int64_t bound_of(const decode_job *job, int64_t row, int64_t t) {
    const int64_t front = front_of(job, row);
    return t < front ? front : job->args->end[row];
}

/* Where the probability of key t goes, of query i of a row; S = 1. */
static float *probabilities_at(const decode_job *job, int64_t row, int64_t i, int64_t t) {
    return job->args->probabilities + (row * job->queries + i) * job->args->columns + t - begin_of(job, row);
}

/* ---- few queries ---- */

/* sums += weights of values [t, t + n) for `count` queries; behind the last come keys again. */
static void add_values(const decode_job *job, int64_t row, int64_t t, int64_t n, const float *weights, int64_t count,
                       float *sums) {
    const int64_t bound = bound_of(job, row, t);
    int64_t run;
    for (int64_t done = 0; done < n; done += run) {
        const char *v = page_at(&job->values, row, t + done, n - done, &run);
        const int64_t far = done + far_of(&job->values, run);
        const char *next = next_at(far < n ? &job->values : &job->keys, row, t + far, PIECE, bound);
        job->simd->mix[job->args->rows.format](sums, job->args->D, weights + done, PIECE, v, run, count, next);
    }
}

/* Queries [first, first + count) of the row, count <= FEW. */
static void attend_few(const decode_job *job, int64_t row, int64_t t, int64_t n, int64_t first, int64_t count,
                       const decode_state *state) {
    const kvc_decode_args *args = job->args;
    const int64_t D = args->D, G = args->Hq / args->Hkv, bound = bound_of(job, row, t);
    _Alignas(64) float q[FEW * KVC_MAX_HEAD_DIM], weights[FEW * PIECE];
    float *max = state->max + first, *norm = state->norm + first, *sums = state->sums + first * D;
    for (int64_t i = 0; i < count; i++) {
        const int64_t h = row % args->Hkv * G + (first + i) / args->S;
        job->simd->load[args->q.dtype](q + i * D, view_at(&args->q, row / args->Hkv, h, (first + i) % args->S, 0), D);
    }
    int64_t run;
    for (int64_t done = 0; done < n; done += run) {
        const char *k = page_at(&job->keys, row, t + done, n - done, &run);
        const int64_t far = done + far_of(&job->keys, run);
        const char *next = far < n ? next_at(&job->keys, row, t + far, PIECE, bound)
                                   : next_at(&job->values, row, t + far - n, PIECE, bound); /* which come then */
        job->simd->dots[args->rows.format](weights + done, PIECE, q, D, k, run, count, next);
    }
    int64_t common = n; /* keys that every query sees */
    for (int64_t i = 0; i < count; i++) {
        const int64_t seen = min_of(max_of(end_for(job, row, first + i) - t, 0), n);
        const int capped = args->softcap > 0.0f;
        if (capped) job->simd->softcap(weights + i * PIECE, seen, args->scale, args->softcap, NULL);
        job->simd->softmax(weights + i * PIECE, 1, PIECE, seen, seen, capped ? 1.0f : args->scale, max + i, norm + i);
        common = min_of(common, seen);
    }
    if (args->probabilities) { /* of one query per head, which sees all of the piece; finish_range knows their sum */
        for (int64_t i = 0; i < count; i++) {
            memcpy(probabilities_at(job, row, first + i, t), weights + i * PIECE, (size_t)n * sizeof(float));
        }
    }
    memset(sums, 0, (size_t)(count * D) * sizeof(float));
    add_values(job, row, t, common, weights, count, sums);
    /* a value that a query does not see may be infinite, and 0 * inf is NaN: the rest goes query by query */
    for (int64_t i = 0; i < count && common < n; i++) {
        const int64_t seen = min_of(max_of(end_for(job, row, first + i) - t, 0), n);
        add_values(job, row, t + common, seen - common, weights + i * PIECE + common, 1, sums + i * D);
    }
}

/* ---- few queries, codes ---- */

/* Logits over scale*factors[i], but for the softcap, of keys [t, t + n), and in `scales` those of the values. */
static void code_logits(const decode_job *job, int64_t row, int64_t t, int64_t n, const int16_t *q, int64_t count,
                        float *logits, float *scales) {
    const int64_t D = job->args->D, bound = bound_of(job, row, t);
    float key_scales[PIECE];
    int64_t run;
    for (int64_t done = 0; done < n; done += run) {
        const int64_t slot = slot_of(&job->keys, row, t + done, n - done, &run);
        const char *k = (const char *)job->keys.pages + slot * job->keys.bytes;
        const int64_t far = done + far_of(&job->keys, run);
        const char *next = far < n ? next_at(&job->keys, row, t + far, PIECE, bound)
                                   : next_at(&job->values, row, t + far - n, PIECE, bound); /* which come then */
        job->simd->load[KVC_F16](key_scales + done, job->keys.scales + slot, run);
        job->simd->code_dots((int32_t *)(void *)(logits + done), PIECE, q, D, k, run, count, next);
    }
    for (int64_t i = 0; i < count; i++) job->simd->code_logits(logits + i * PIECE, key_scales, n);
    for (int64_t done = 0; done < n; done += run) {
        const int64_t slot = slot_of(&job->values, row, t + done, n - done, &run);
        job->simd->load[KVC_F16](scales + done, job->values.scales + slot, run);
    }
}

/* As add_values, of weights in words; units: of each KVC_MIXED of a query's. */
static void add_codes(const decode_job *job, int64_t row, int64_t t, int64_t n, const int16_t *words, const float *units,
                      int64_t count, float *sums) {
    const int64_t D = job->args->D, bound = bound_of(job, row, t);
    const kvc_codes kind = value_codes(job->args->rows.format);
    _Alignas(64) int32_t products[FEW * KVC_MAX_HEAD_DIM];
    for (int64_t first = 0; first < n; first += KVC_MIXED, units++) {
        const int64_t some = min_of(KVC_MIXED, n - first);
        memset(products, 0, (size_t)(count * D) * sizeof(int32_t));
        int64_t run;
        for (int64_t done = 0; done < some; done += run) {
            const char *v = page_at(&job->values, row, t + first + done, some - done, &run);
            const int64_t far = first + done + far_of(&job->values, run);
            /* of the piece's own values what the next call reads, which comes by soon */
            const char *next = far < n ? next_at(&job->values, row, t + far, KVC_MIXED, bound)
                                       : next_at(&job->keys, row, t + far, PIECE, bound);
            job->simd->code_mix[kind](products, D, words + first + done, PIECE, v, run, count, next);
        }
        for (int64_t i = 0; i < count; i++) job->simd->code_sums(sums + i * D, products + i * D, units[i * BLOCKS], D);
    }
}

/* Asks for values of a piece behind those that its keys' pass has asked for, number by number between the steps that make
 * weights, during which memory would wait; as many bytes at a time as it takes without making the steps wait. */
static void fetch_values(const decode_job *job, int64_t row, int64_t t, int64_t n, int64_t number) {
    enum { BYTES = 1024, LINE = 64 };
    const int64_t bytes = job->values.bytes, some = ceil_div(BYTES, bytes), first = KVC_AHEAD / bytes + number * some;
    int64_t run;
    for (int64_t i = first; i < min_of(first + some, n); i += run) {
        const char *values = page_at(&job->values, row, t + i, min_of(first + some, n) - i, &run);
        for (int64_t at = 0; at < run * bytes; at += LINE) __builtin_prefetch(values + at, 0, 2);
    }
}

/* As attend_few. */
static void attend_codes(const decode_job *job, int64_t row, int64_t t, int64_t n, int64_t first, int64_t count,
                         const decode_state *state) {
    const kvc_decode_args *args = job->args;
    const int64_t D = args->D, G = args->Hq / args->Hkv;
    _Alignas(64) int16_t q[FEW * KVC_MAX_HEAD_DIM], words[FEW * PIECE];
    _Alignas(64) float weights[FEW * PIECE];
    float *max = state->max + first, *norm = state->norm + first, *sums = state->sums + first * D;
    float factors[FEW], scales[PIECE], units[FEW * BLOCKS];
    for (int64_t i = 0; i < count; i++) {
        float query[KVC_MAX_HEAD_DIM];
        const int64_t h = row % args->Hkv * G + (first + i) / args->S;
        job->simd->load[args->q.dtype](query, view_at(&args->q, row / args->Hkv, h, (first + i) % args->S, 0), D);
        factors[i] = quantize_words(job->simd, q + i * D, query, KVC_MOST_WORD, D);
    }
    code_logits(job, row, t, n, q, count, weights, scales);
    for (int64_t i = 0; i < count; i++) {
        const int64_t seen = min_of(max_of(end_for(job, row, first + i) - t, 0), n);
        const float scale = args->scale * factors[i];
        float *x = weights + i * PIECE;
        const int capped = args->softcap > 0.0f;
        fetch_values(job, row, t, n, 2 * i);
        if (capped) job->simd->softcap(x, seen, scale, args->softcap, NULL);
        job->simd->softmax(x, 1, PIECE, seen, seen, capped ? 1.0f : scale, max + i, norm + i);
        fetch_values(job, row, t, n, 2 * i + 1);
        if (args->probabilities) memcpy(probabilities_at(job, row, first + i, t), x, (size_t)n * sizeof(float));
        /* a value that is not seen has weight 0, whatever its scale */
        job->simd->code_weights(words + i * PIECE, units + i * BLOCKS, x, scales, seen, n);
    }
    memset(sums, 0, (size_t)(count * D) * sizeof(float));
    add_codes(job, row, t, n, words, units, count, sums);
}

/* ---- many queries ---- */

/* Keys or values [t, t + n) as float32 [n, D]; the pages' own rows where they are float32 and lie together. kind: of codes. */
static const float *gather(const decode_job *job, const page_rows *of, kvc_codes kind, int64_t row, int64_t t, int64_t n,
                           float *rows) {
    const kvc_format format = job->args->rows.format;
    const int64_t D = job->args->D;
    int64_t run;
    for (int64_t done = 0; done < n; done += run) {
        const int64_t slot = slot_of(of, row, t + done, n - done, &run);
        const char *src = (const char *)of->pages + slot * of->bytes;
        if (run == n && format == KVC_FORMAT_F32) return (const float *)(const void *)src;
        if (!of->scales) {
            job->simd->load[format](rows + done * D, src, run * D);
            continue;
        }
        float scales[KVC_LANES_KEYS];
        job->simd->load[KVC_F16](scales, of->scales + slot, run);
        for (int64_t j = 0; j < run; j++) {
            job->simd->dequantize[kind](rows + (done + j) * D, src + j * of->bytes, scales[j], D);
        }
    }
    return rows;
}

/* Queries [first, first + count) of the row, count <= KVC_TILE. */
static void attend_lanes(const decode_job *job, int64_t row, int64_t t, int64_t last, int64_t first, int64_t count,
                         const decode_state *state) {
    const kvc_decode_args *args = job->args;
    const int64_t D = args->D, G = args->Hq / args->Hkv;
    _Alignas(64) float q[KVC_TILE * KVC_MAX_HEAD_DIM], rows[KVC_LANES_FLOATS], x[KVC_LANES_KEYS * KVC_TILE];
    kvc_lanes_state lanes_state = {.simd = job->simd, .queries = count, .D = D, .q = q, .sums = state->sums + first * D,
                                   .softcap = args->softcap};
    const kvc_codes kind = value_codes(args->rows.format);
    kvc_lanes lanes;
    int64_t common = last; /* keys before it are seen by every query */
    memset(q, 0, (size_t)(KVC_TILE * D) * sizeof(float));
    for (int64_t i = 0; i < KVC_TILE; i++) {
        const int64_t end = i < count ? end_for(job, row, first + i) : 0;
        lanes.near[i] = (int32_t)max_of(end, 0);
        lanes.begin[i] = lanes.end[i] = 0;
        lanes.own[i] = -1;
        if (i >= count) continue;
        common = max_of(min_of(common, end), t);
        float query[KVC_MAX_HEAD_DIM];
        const int64_t h = row % args->Hkv * G + (first + i) / args->S;
        job->simd->load[args->q.dtype](query, view_at(&args->q, row / args->Hkv, h, (first + i) % args->S, 0), D);
        for (int64_t d = 0; d < D; d++) q[d * KVC_TILE + i] = query[d] * args->scale;
    }
    kvc_lanes_begin(&lanes_state);
    while (t < last) {
        /* the last few keys, which some queries do not see, are a step of their own */
        const int64_t n = min_of(kvc_lanes_keys(D), (t < common ? common : last) - t);
        const float *k = gather(job, &job->keys, KVC_INT8, row, t, n, rows);
        kvc_lanes_logits(&lanes_state, &lanes, k, D, t, n, NULL, t >= common, x);
        kvc_lanes_weigh(&lanes_state, x, n);
        const float *v = gather(job, &job->values, kind, row, t, n, rows);
        if (t < common) {
            kvc_lanes_add(&lanes_state, x, v, D, n);
        } else { /* a value that a query does not see may be infinite, and 0 * inf is NaN */
            for (int64_t i = 0; i < count; i++) {
                const int64_t seen = min_of(max_of(lanes.near[i] - t, 0), n);
                job->simd->gemm(lanes_state.sums + i * D, D, x + i, 1, KVC_TILE, v, D, 1, D, seen, 1);
            }
        }
        t += n;
    }
    memcpy(state->max + first, lanes_state.max, (size_t)count * sizeof(float));
    memcpy(state->norm + first, lanes_state.norm, (size_t)count * sizeof(float));
}

/* ---- all ---- */

static void attend_range(int64_t begin, int64_t end, void *context) {
    const decode_job *job = context;
    int64_t row = 0, above = job->rows; /* the row of item `begin`: first[row] <= begin < first[row + 1] */
    while (above - row > 1) {
        const int64_t middle = row + (above - row) / 2;
        if (job->first[middle] <= begin) row = middle;
        else above = middle;
    }
    for (int64_t item = begin; item < end; item++) {
        while (job->first[row + 1] <= item) row++;
        const int64_t piece = piece_of(job, row), front_pieces = ceil_div(front_of(job, row), piece);
        const int64_t number = item - job->first[row];
        const int64_t t = number < front_pieces ? number * piece : begin_of(job, row) + (number - front_pieces) * piece;
        const int64_t last = min_of(t + piece, bound_of(job, row, t));
        const decode_state state = state_at(job, item);
        if (job->queries <= FEW || job->args->probabilities) {
            for (int64_t i = 0; i < job->queries; i += FEW) {
                (job->keys.scales ? attend_codes : attend_few)(job, row, t, last - t, i, min_of(FEW, job->queries - i), &state);
            }
            continue;
        }
        for (int64_t i = 0; i < job->queries; i += KVC_TILE) {
            attend_lanes(job, row, t, last, i, min_of(KVC_TILE, job->queries - i), &state);
        }
    }
}

/* A query's weights, each relative to its piece's maximum, as probabilities. */
static void normalize(const decode_job *job, int64_t row, int64_t i, float max, float norm) {
    const int64_t end = job->args->end[row], length = piece_of(job, row);
    for (int64_t piece = job->first[row]; piece < job->first[row + 1]; piece++) {
        const int64_t t = begin_of(job, row) + (piece - job->first[row]) * length, n = min_of(length, end - t);
        const float own = state_at(job, piece).max[i], factor = own == -INFINITY ? 0.0f : expf(own - max) / norm;
        float *x = probabilities_at(job, row, i, t);
        for (int64_t j = 0; j < n; j++) x[j] *= factor;
    }
}

/* Joins the pieces of (row, query) items in order. */
static void finish_range(int64_t begin, int64_t end, void *context) {
    const decode_job *job = context;
    const kvc_decode_args *args = job->args;
    const int64_t D = args->D, bytes = kvc_dtype_bytes(args->q.dtype);
    for (int64_t item = begin; item < end; item++) {
        const int64_t row = item / job->queries, i = item % job->queries;
        float sums[KVC_MAX_HEAD_DIM] = {0}, max = -INFINITY, norm = 0.0f;
        for (int64_t piece = job->first[row]; piece < job->first[row + 1]; piece++) {
            const float other = state_at(job, piece).max[i];
            max = other > max ? other : max;
        }
        for (int64_t piece = job->first[row]; piece < job->first[row + 1]; piece++) {
            const decode_state state = state_at(job, piece);
            if (state.norm[i] == 0.0f) continue; /* it saw nothing, or logits of -inf only */
            const float weight = expf(state.max[i] - (max == -INFINITY ? 0.0f : max));
            norm += state.norm[i] * weight;
            job->simd->weighted_sum(sums, &weight, state.sums + i * D, D, 1, D);
        }
        const float keep = join_sink(sink_of(args->sink_logits, item / args->S % args->Hq), &max, &norm);
        for (int64_t d = 0; d < D; d++) sums[d] = norm == 0.0f ? 0.0f : sums[d] * keep / norm;
        if (args->rows.format == KVC_FORMAT_K8V4) kvc_turn(sums, D); /* as the values were, of which sums are mixed */
        /* rows are b*Hkv + g and heads g*G + i, so (row, query of the row) counts [B, Hq, S] straight through */
        job->simd->store[args->q.dtype]((char *)args->out + item * D * bytes, sums, D);
        args->lse[item] = norm == 0.0f ? -INFINITY : max + logf(norm);
        if (args->probabilities && norm != 0.0f) normalize(job, row, i, max, norm);
    }
}

static kvc_status check_rows(const decode_job *job) {
    const kvc_decode_args *args = job->args;
    for (int64_t row = 0; row < job->rows; row++) {
        const int64_t begin = begin_of(job, row), end = args->end[row], front = front_of(job, row);
        for (int values = 0; values <= (args->value_table != NULL); values++) {
            const page_rows *of = values ? &job->values : &job->keys;
            if (!rows_exist(of, row, begin, end, job->capacity)) return KVC_BAD_INDEX;
            if (!rows_exist(of, row, 0, front, job->capacity)) return KVC_BAD_INDEX;
        }
        if (args->probabilities && end - begin > args->columns) return KVC_BAD_INDEX;
    }
    return KVC_OK;
}

kvc_status kvc_decode(const kvc_decode_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    if (!sizes_are_good(args)) return KVC_BAD_SIZE;
    if (!dtype_known(args->q.dtype)) return KVC_BAD_DTYPE;
    if (!format_known(args->rows.format)) return KVC_BAD_FORMAT;
    if (!args->B || !args->Hq || !args->S) return KVC_OK;
    if (!args->out || !args->lse || !args->q.data || !args->end || !args->scratch) return KVC_NULL_POINTER;
    const decode_job job = job_of(args);
    const int codes = format_of_codes(args->rows.format);
    if (job.capacity && job.keys.count && (!args->rows.keys || (codes && !job.keys.scales))) return KVC_NULL_POINTER;
    if (job.capacity && job.values.count && (!args->rows.values || (codes && !job.values.scales))) return KVC_NULL_POINTER;
    const kvc_status status = check_rows(&job);
    if (status != KVC_OK) return status;
    int64_t slots = 0;
    job.first[0] = 0;
    for (int64_t row = 0; row < job.rows; row++) {
        const int64_t front = front_of(&job, row), rest = max_of(args->end[row] - begin_of(&job, row), 0);
        const int64_t piece = piece_of(&job, row);
        job.first[row + 1] = job.first[row] + ceil_div(front, piece) + ceil_div(rest, piece);
        slots += front + rest;
    }
    const int64_t pieces = job.first[job.rows], results = job.rows * job.queries, numbers = job.queries * args->D;
    run_parallel(parallel_for, pieces, grain_of(pieces, 2 * slots * numbers), attend_range, (void *)(uintptr_t)&job);
    run_parallel(parallel_for, results, grain_of(results, 8 * pieces * numbers), finish_range, (void *)(uintptr_t)&job);
    return KVC_OK;
}
