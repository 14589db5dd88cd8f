/* The inner loops that are the same for every instruction set, written once over a vector type.
 *
 * A table's file defines, before it includes this: `vec`, VEC_WIDTH floats; VEC_COLUMNS, how many vec make a stripe of a
 * product (KVC_TILE_ROWS * VEC_COLUMNS accumulators stay in registers); and the functions on vec used below, of which
 * vec_part(p, n) loads n < VEC_WIDTH floats and zeros, vec_sums(x) is the vec of the sums of VEC_WIDTH vecs,
 * vec_hide(x, t, near, begin, end) is x where t < near or begin <= t < end, -inf elsewhere, vec_add_unless(x, y, t, own)
 * is x where t == own, x + y elsewhere, vec_less(a, b, x, y) is x where a < b, y elsewhere,
 * vec_most(a, b) is the larger of a and |b| with NaN above all, vec_largest(x) the largest of such lanes, vec_words(p, n, x)
 * stores the first n lanes (all for n >= VEC_WIDTH) rounded to nearest even as int16,
 * vec_ints(p) is VEC_WIDTH int32 as floats, and vec_typed(src, i, n, dtype) loads n elements of a kvc_dtype.
 */
#ifndef KVC_SIMD_BLOCKS_H
#define KVC_SIMD_BLOCKS_H
#include "simd.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#define BLOCKS_INLINE static inline __attribute__((always_inline))
enum { STRIPE = VEC_WIDTH * VEC_COLUMNS };

/* ---- products ---- */

/* rows x (columns of vecs); the last vec has `last` columns. rows, columns and whole are constants once inlined.
 * c is added to the finished sum: a sum that runs on from call to call would round once per product of all of them. */
BLOCKS_INLINE void gemm_block(float *c, int64_t ldc, const float *a, int64_t a_row, int64_t a_col, const float *b,
                              int64_t ldb, int64_t depth, const int rows, const int columns, const int whole,
                              int64_t last, int accumulate) {
    vec sums[KVC_TILE_ROWS][VEC_COLUMNS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) {
            sums[i][j] = vec_set(0.0f);
        }
    }
    for (int64_t d = 0; d < depth; d++, a += a_col, b += ldb) {
        vec right[VEC_COLUMNS];
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) {
            right[j] = whole || j + 1 < columns ? vec_load(b + j * VEC_WIDTH) : vec_part(b + j * VEC_WIDTH, last);
        }
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            const vec left = vec_set(a[i * a_row]);
#pragma GCC unroll 4
            for (int j = 0; j < columns; j++) sums[i][j] = vec_fma(left, right[j], sums[i][j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) {
            float *at = c + i * ldc + j * VEC_WIDTH;
            const int all = whole || j + 1 < columns;
            if (accumulate) sums[i][j] = vec_add(all ? vec_load(at) : vec_part(at, last), sums[i][j]);
            if (all) vec_store(at, sums[i][j]);
            else vec_store_part(at, last, sums[i][j]);
        }
    }
}

/* One stripe of columns, all rows. */
BLOCKS_INLINE void gemm_stripe(float *c, int64_t ldc, const float *a, int64_t a_row, int64_t a_col, const float *b,
                               int64_t ldb, int64_t rows, int64_t depth, const int columns, const int whole,
                               int64_t last, int accumulate) {
    int64_t i = 0;
    for (; i + KVC_TILE_ROWS <= rows; i += KVC_TILE_ROWS) {
        gemm_block(c + i * ldc, ldc, a + i * a_row, a_row, a_col, b, ldb, depth, KVC_TILE_ROWS, columns, whole, last,
                   accumulate);
    }
    c += i * ldc;
    a += i * a_row;
    switch (rows - i) {
        case 1: gemm_block(c, ldc, a, a_row, a_col, b, ldb, depth, 1, columns, whole, last, accumulate); break;
        case 2: gemm_block(c, ldc, a, a_row, a_col, b, ldb, depth, 2, columns, whole, last, accumulate); break;
        case 3: gemm_block(c, ldc, a, a_row, a_col, b, ldb, depth, 3, columns, whole, last, accumulate); break;
        case 4: gemm_block(c, ldc, a, a_row, a_col, b, ldb, depth, 4, columns, whole, last, accumulate); break;
        case 5: gemm_block(c, ldc, a, a_row, a_col, b, ldb, depth, 5, columns, whole, last, accumulate); break;
        default: break;
    }
}

static void gemm(float *c, int64_t ldc, const float *a, int64_t a_row, int64_t a_col, const float *b, int64_t ldb,
                 int64_t rows, int64_t columns, int64_t depth, int accumulate) {
    int64_t j = 0;
    for (; j + STRIPE <= columns; j += STRIPE) {
        gemm_stripe(c + j, ldc, a, a_row, a_col, b + j, ldb, rows, depth, VEC_COLUMNS, 1, 0, accumulate);
    }
    for (; j + VEC_WIDTH <= columns; j += VEC_WIDTH) {
        gemm_stripe(c + j, ldc, a, a_row, a_col, b + j, ldb, rows, depth, 1, 1, 0, accumulate);
    }
    if (j < columns) gemm_stripe(c + j, ldc, a, a_row, a_col, b + j, ldb, rows, depth, 1, 0, columns - j, accumulate);
}

/* ---- a few queries against typed rows ---- */

/* Rows stream through once, several of them side by side, which the CPU's own prefetcher follows badly: ask for what lies
 * KVC_AHEAD bytes further on, or as far into `next` where the rows end before. Into the second level of cache: the first
 * can wait for few lines at a time, which the loads themselves need where pages lie anywhere. */
enum { LINE = 64 };

/* What is KVC_AHEAD behind `bytes` at place `at` of rows of `size` bytes; NULL where nothing is, or not all in one place. */
BLOCKS_INLINE const char *ahead_of(const char *rows, int64_t size, int64_t at, int64_t bytes, const char *next) {
    const int64_t first = at + KVC_AHEAD;
    if (first + bytes <= size) return rows + first;
    if (!next || first < size) return NULL;
    return next + (size <= KVC_AHEAD ? at : first - size);
}

BLOCKS_INLINE void fetch_ahead(const char *rows, int64_t size, int64_t at, int64_t bytes, const char *next) {
    const char *ahead = ahead_of(rows, size, at, bytes, next);
    for (int64_t i = 0; ahead && i < bytes; i += LINE) __builtin_prefetch(ahead + i, 0, 2);
}

/* VEC_WIDTH / queries keys against 1, 2 or 4 queries: VEC_WIDTH accumulators, summed across lanes together. */
BLOCKS_INLINE void dots_block(float *c, int64_t ldc, const float *q, int64_t D, const char *k, int64_t step, int64_t keys,
                              const int queries, const kvc_dtype dtype) {
    const int width = VEC_WIDTH / queries;
    const char *row[VEC_WIDTH];
    vec sums[VEC_WIDTH];
#pragma GCC unroll 16
    for (int j = 0; j < width; j++) row[j] = k + (j < keys ? j : keys - 1) * step; /* a short block reads its last twice */
#pragma GCC unroll 16
    for (int i = 0; i < VEC_WIDTH; i++) sums[i] = vec_set(0.0f);
    int64_t d = 0;
    for (; d + VEC_WIDTH <= D; d += VEC_WIDTH) {
        vec query[VEC_WIDTH];
#pragma GCC unroll 4
        for (int i = 0; i < queries; i++) query[i] = vec_load(q + i * D + d);
#pragma GCC unroll 16
        for (int j = 0; j < width; j++) {
            const vec key = vec_typed(row[j], d, VEC_WIDTH, dtype);
#pragma GCC unroll 4
            for (int i = 0; i < queries; i++) sums[i * width + j] = vec_fma(query[i], key, sums[i * width + j]);
        }
    }
    if (d < D) {
        for (int j = 0; j < width; j++) {
            const vec key = vec_typed(row[j], d, D - d, dtype);
            for (int i = 0; i < queries; i++) {
                sums[i * width + j] = vec_fma(vec_part(q + i * D + d, D - d), key, sums[i * width + j]);
            }
        }
    }
    float total[VEC_WIDTH];
    vec_store(total, vec_sums(sums));
#pragma GCC unroll 4
    for (int i = 0; i < queries; i++) {
        if (keys >= width) memcpy(c + i * ldc, total + i * width, (size_t)width * sizeof(float));
        else for (int j = 0; j < keys; j++) c[i * ldc + j] = total[i * width + j];
    }
}

BLOCKS_INLINE void dots_of(float *c, int64_t ldc, const float *q, int64_t D, const void *k, int64_t keys, int64_t queries,
                           const void *next, const kvc_dtype dtype) {
    const int64_t step = D * (dtype == KVC_F32 ? 4 : 2);
    enum { MOST = VEC_WIDTH >= 16 ? 4 : 2, SPAN = VEC_WIDTH }; /* queries that leave enough registers */
    for (int64_t j = 0; j < keys; j += SPAN) { /* the keys of a span come from memory once */
        const int64_t span = keys - j < SPAN ? keys - j : SPAN;
        const char *rows = (const char *)k + j * step;
        int64_t i = 0;
        for (; i + MOST <= queries; i += MOST) {
            for (int64_t n = 0; n < span; n += VEC_WIDTH / MOST) {
                if (i == 0) fetch_ahead(k, keys * step, (j + n) * step, VEC_WIDTH / MOST * step, next);
                dots_block(c + i * ldc + j + n, ldc, q + i * D, D, rows + n * step, step, span - n, MOST, dtype);
            }
        }
        for (; i + 2 <= queries; i += 2) {
            for (int64_t n = 0; n < span; n += VEC_WIDTH / 2) {
                if (i == 0) fetch_ahead(k, keys * step, (j + n) * step, VEC_WIDTH / 2 * step, next);
                dots_block(c + i * ldc + j + n, ldc, q + i * D, D, rows + n * step, step, span - n, 2, dtype);
            }
        }
        if (i == 0) fetch_ahead(k, keys * step, j * step, SPAN * step, next);
        if (i < queries) dots_block(c + i * ldc + j, ldc, q + i * D, D, rows, step, span, 1, dtype);
    }
}

static void dots_f32(float *c, int64_t ldc, const float *q, int64_t D, const void *k, int64_t keys, int64_t queries,
                     const void *next) {
    dots_of(c, ldc, q, D, k, keys, queries, next, KVC_F32);
}
static void dots_bf16(float *c, int64_t ldc, const float *q, int64_t D, const void *k, int64_t keys, int64_t queries,
                     const void *next) {
    dots_of(c, ldc, q, D, k, keys, queries, next, KVC_BF16);
}
static void dots_f16(float *c, int64_t ldc, const float *q, int64_t D, const void *k, int64_t keys, int64_t queries,
                     const void *next) {
    dots_of(c, ldc, q, D, k, keys, queries, next, KVC_F16);
}

/* queries x columns accumulators over the keys of a span. ahead: where what is to be fetched begins, NULL: nothing. */
BLOCKS_INLINE void mix_block(float *y, int64_t D, const float *w, int64_t ldw, const char *v, int64_t step, int64_t d,
                             int64_t keys, const char *ahead, const int queries, const int columns, int64_t last,
                             const kvc_dtype dtype) {
    const int64_t size = dtype == KVC_F32 ? 4 : 2;
    vec sums[4][2 * VEC_COLUMNS];
#pragma GCC unroll 4
    for (int i = 0; i < queries; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++) {
            const float *at = y + i * D + d + j * VEC_WIDTH;
            sums[i][j] = last == VEC_WIDTH ? vec_load(at) : vec_part(at, last);
        }
    }
    if (ahead) ahead += d * size;
    for (int64_t t = 0; t < keys; t++, v += step) {
        vec value[2 * VEC_COLUMNS];
        if (ahead) {
            for (int64_t i = 0; i < columns * VEC_WIDTH * size; i += LINE) __builtin_prefetch(ahead + i, 0, 2);
            ahead += step;
        }
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++) value[j] = vec_typed(v, d + j * VEC_WIDTH, last, dtype);
#pragma GCC unroll 4
        for (int i = 0; i < queries; i++) {
            const vec weight = vec_set(w[i * ldw + t]);
#pragma GCC unroll 8
            for (int j = 0; j < columns; j++) sums[i][j] = vec_fma(weight, value[j], sums[i][j]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < queries; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++) {
            float *at = y + i * D + d + j * VEC_WIDTH;
            if (last == VEC_WIDTH) vec_store(at, sums[i][j]);
            else vec_store_part(at, last, sums[i][j]);
        }
    }
}

/* All dims of `queries` (a constant) queries. */
BLOCKS_INLINE void mix_queries(float *y, int64_t D, const float *w, int64_t ldw, const char *v, int64_t step,
                               int64_t keys, const char *ahead, const int queries, const kvc_dtype dtype) {
    int64_t d = 0;
    for (; queries <= 2 && dtype == KVC_F32 && d + 2 * STRIPE <= D; d += 2 * STRIPE) {
        mix_block(y, D, w, ldw, v, step, d, keys, ahead, queries, 2 * VEC_COLUMNS, VEC_WIDTH, dtype);
    }
    for (; d + STRIPE <= D; d += STRIPE) {
        mix_block(y, D, w, ldw, v, step, d, keys, ahead, queries, VEC_COLUMNS, VEC_WIDTH, dtype);
    }
    for (; d + VEC_WIDTH <= D; d += VEC_WIDTH) {
        mix_block(y, D, w, ldw, v, step, d, keys, ahead, queries, 1, VEC_WIDTH, dtype);
    }
    if (d < D) mix_block(y, D, w, ldw, v, step, d, keys, ahead, queries, 1, D - d, dtype);
}

BLOCKS_INLINE void mix_of(float *y, int64_t D, const float *w, int64_t ldw, const void *v, int64_t keys, int64_t queries,
                          const void *next, const kvc_dtype dtype) {
    const int64_t step = D * (dtype == KVC_F32 ? 4 : 2), size = keys * step;
    /* values that come from memory once and then from the first-level cache; whole spans ahead, so that none is missed */
    const int64_t most = step * 2 > KVC_AHEAD ? 2 : KVC_AHEAD / step;
    for (int64_t t = 0; t < keys; t += most) {
        const int64_t span = keys - t < most ? keys - t : most;
        const char *rows = (const char *)v + t * step, *ahead = ahead_of(v, size, t * step, span * step, next);
        int64_t i = 0;
        /* two queries take twice the columns: long float32 rows are then read in one go, which memory likes better */
        for (; (dtype != KVC_F32 || D < 2 * STRIPE) && i + 4 <= queries; i += 4) {
            mix_queries(y + i * D, D, w + i * ldw + t, ldw, rows, step, span, i ? NULL : ahead, 4, dtype);
        }
        if ((dtype != KVC_F32 || D < 2 * STRIPE) && i + 3 == queries) {
            mix_queries(y + i * D, D, w + i * ldw + t, ldw, rows, step, span, i ? NULL : ahead, 3, dtype);
            i += 3;
        }
        for (; i + 2 <= queries; i += 2) {
            mix_queries(y + i * D, D, w + i * ldw + t, ldw, rows, step, span, i ? NULL : ahead, 2, dtype);
        }
        if (i < queries) mix_queries(y + i * D, D, w + i * ldw + t, ldw, rows, step, span, i ? NULL : ahead, 1, dtype);
    }
}

static void mix_f32(float *y, int64_t D, const float *w, int64_t ldw, const void *v, int64_t keys, int64_t queries,
                     const void *next) {
    mix_of(y, D, w, ldw, v, keys, queries, next, KVC_F32);
}
static void mix_bf16(float *y, int64_t D, const float *w, int64_t ldw, const void *v, int64_t keys, int64_t queries,
                     const void *next) {
    mix_of(y, D, w, ldw, v, keys, queries, next, KVC_BF16);
}
static void mix_f16(float *y, int64_t D, const float *w, int64_t ldw, const void *v, int64_t keys, int64_t queries,
                     const void *next) {
    mix_of(y, D, w, ldw, v, keys, queries, next, KVC_F16);
}

/* ---- codes ---- */

static float largest(const float *x, int64_t n) {
    vec most = vec_set(0.0f);
    int64_t i = 0;
    for (; i + VEC_WIDTH <= n; i += VEC_WIDTH) most = vec_most(most, vec_load(x + i));
    if (i < n) most = vec_most(most, vec_part(x + i, n - i));
    return vec_largest(most);
}

static void quantize(int16_t *codes, const float *x, float scale, float most, int64_t n) {
    const vec high = vec_set(most), low = vec_set(-most);
    for (int64_t i = 0; i < n; i += VEC_WIDTH) {
        vec value = vec_div(n - i < VEC_WIDTH ? vec_part(x + i, n - i) : vec_load(x + i), vec_set(scale));
        value = vec_max(vec_less(value, high, value, high), low);
        vec_words(codes + i, n - i, value);
    }
}

static void code_logits(void *x, const float *scales, int64_t n) {
    float *logits = x;
    int64_t i = 0;
    for (; i + VEC_WIDTH <= n; i += VEC_WIDTH) {
        int32_t sums[VEC_WIDTH];
        memcpy(sums, logits + i, sizeof sums);
        vec_store(logits + i, vec_mul(vec_ints(sums), vec_load(scales + i)));
    }
    for (; i < n; i++) {
        int32_t sum;
        memcpy(&sum, logits + i, sizeof sum);
        logits[i] = (float)sum * scales[i];
    }
}

static void code_weights(int16_t *words, float *units, const float *weights, const float *scales, int64_t n, int64_t width) {
    for (int64_t t = 0; t < width; t += KVC_MIXED, words += KVC_MIXED, weights += KVC_MIXED, scales += KVC_MIXED) {
        float some[2][KVC_MIXED];
        const float *x[2] = {weights, scales};
        for (int i = 0; i < 2 && n - t < KVC_MIXED; i++) { /* the last of them, and zeros */
            memset(some[i], 0, sizeof some[i]);
            if (n > t) memcpy(some[i], x[i], (size_t)(n - t) * sizeof(float));
            x[i] = some[i];
        }
        vec products[KVC_MIXED / VEC_WIDTH], most = vec_set(0x1p-100f);
#pragma GCC unroll 8
        for (int i = 0; i < KVC_MIXED / VEC_WIDTH; i++) {
            products[i] = vec_mul(vec_load(x[0] + i * VEC_WIDTH), vec_load(x[1] + i * VEC_WIDTH));
            most = vec_most(most, products[i]);
        }
        const float largest = vec_largest(most);
        *units++ = largest / 32767.0f;
        if (!isfinite(largest)) {
            memset(words, 0, KVC_MIXED * sizeof *words);
            continue;
        }
        const vec factor = vec_set(32767.0f / largest);
#pragma GCC unroll 8
        for (int i = 0; i < KVC_MIXED / VEC_WIDTH; i++) {
            vec_words(words + i * VEC_WIDTH, VEC_WIDTH, vec_mul(products[i], factor));
        }
    }
}

static void code_sums(float *y, const int32_t *x, float scale, int64_t n) {
    int64_t i = 0;
    for (; i + VEC_WIDTH <= n; i += VEC_WIDTH) { /* two roundings in every table */
        vec_store(y + i, vec_add(vec_load(y + i), vec_mul(vec_set(scale), vec_ints(x + i))));
    }
    for (; i < n; i++) {
        const float term = scale * (float)x[i];
        y[i] += term;
    }
}

/* ---- queries along the lanes ---- */

enum { SUMMED = 16 }; /* weights per partial sum, the partial sums of a call before the norm: long sums round too often */

static void lanes_hide(float *x, int64_t keys, int32_t t, const kvc_lanes *lanes) {
    for (int64_t j = 0; j < KVC_TILE; j += VEC_WIDTH) {
        float *column = x + j;
        for (int32_t i = 0; i < (int32_t)keys; i++, column += KVC_TILE) {
            vec_store(column, vec_hide(vec_load(column), t + i, lanes->near + j, lanes->begin + j, lanes->end + j));
        }
    }
}

static void lanes_bias(float *x, int64_t keys, int32_t t, const float *bias, const kvc_lanes *lanes) {
    for (int64_t j = 0; j < KVC_TILE; j += VEC_WIDTH) {
        float *column = x + j;
        for (int32_t i = 0; i < (int32_t)keys; i++, column += KVC_TILE) {
            vec_store(column, vec_add_unless(vec_load(column), vec_set(bias[i]), t + i, lanes->own + j));
        }
    }
}

static void lanes_softmax(float *x, int64_t keys, float *max, float *norm, float *factor) {
    for (int64_t j = 0; j < KVC_TILE; j += 2 * VEC_WIDTH) { /* two chains of dependent steps side by side */
        vec most[2], base[2], before[2], sum[2];
        for (int n = 0; n < 2; n++) most[n] = vec_load(max + j + n * VEC_WIDTH);
        for (int64_t i = 0; i < keys; i++) {
#pragma GCC unroll 2
            for (int n = 0; n < 2; n++) most[n] = vec_max(vec_load(x + i * KVC_TILE + j + n * VEC_WIDTH), most[n]);
        }
        for (int n = 0; n < 2; n++) {
            base[n] = vec_base(most[n]);
            const vec old = vec_exp(vec_sub(vec_load(max + j + n * VEC_WIDTH), base[n]));
            vec_store(factor + j + n * VEC_WIDTH, old);
            vec_store(max + j + n * VEC_WIDTH, most[n]);
            before[n] = vec_mul(old, vec_load(norm + j + n * VEC_WIDTH));
            sum[n] = vec_set(0.0f);
        }
        for (int64_t first = 0; first < keys; first += SUMMED) {
            const int64_t last = first + SUMMED < keys ? first + SUMMED : keys;
            vec part[2] = {vec_set(0.0f), vec_set(0.0f)};
            for (int64_t i = first; i < last; i++) {
#pragma GCC unroll 2
                for (int n = 0; n < 2; n++) {
                    float *at = x + i * KVC_TILE + j + n * VEC_WIDTH;
                    const vec e = vec_exp(vec_sub(vec_load(at), base[n]));
                    vec_store(at, e);
                    part[n] = vec_add(part[n], e);
                }
            }
            for (int n = 0; n < 2; n++) sum[n] = vec_add(sum[n], part[n]);
        }
        for (int n = 0; n < 2; n++) vec_store(norm + j + n * VEC_WIDTH, vec_add(before[n], sum[n]));
    }
}

static void lanes_exp(float *x, int64_t keys, const float *base) {
    for (int64_t j = 0; j < KVC_TILE; j += VEC_WIDTH) {
        const vec subtract = vec_load(base + j);
        float *column = x + j;
        for (int64_t i = 0; i < keys; i++, column += KVC_TILE) {
            vec_store(column, vec_exp(vec_sub(vec_load(column), subtract)));
        }
    }
}

static void lanes_gradient(float *y, const float *p, int64_t keys, const float *delta) {
    for (int64_t j = 0; j < KVC_TILE; j += VEC_WIDTH) {
        const vec subtract = vec_load(delta + j);
        for (int64_t i = 0; i < keys; i++) {
            float *at = y + i * KVC_TILE + j;
            vec_store(at, vec_mul(vec_load(p + i * KVC_TILE + j), vec_sub(vec_load(at), subtract)));
        }
    }
}

static void lanes_total(float *total, const float *x, int64_t keys, int32_t t, const kvc_lanes *lanes) {
    for (int64_t first = 0; first < keys; first += VEC_WIDTH) {
        const int64_t some = keys - first < VEC_WIDTH ? keys - first : VEC_WIDTH;
        vec sums[VEC_WIDTH];
        for (int64_t i = 0; i < VEC_WIDTH; i++) {
            sums[i] = vec_set(0.0f);
            for (int64_t j = 0; j < KVC_TILE && i < some; j += VEC_WIDTH) {
                const vec other = vec_load(x + (first + i) * KVC_TILE + j);
                const int32_t key = t + (int32_t)(first + i);
                sums[i] = vec_add(sums[i], vec_add_unless(vec_set(0.0f), other, key, lanes->own + j));
            }
        }
        float found[VEC_WIDTH];
        vec_store(found, vec_sums(sums));
        for (int64_t i = 0; i < some; i++) total[first + i] += found[i];
    }
}

/* ---- soft capping ---- */

BLOCKS_INLINE vec tanh_of(vec x) {
    const vec zero = vec_set(0.0f), one = vec_set(1.0f), size = vec_max(x, vec_sub(zero, x)), square = vec_mul(x, x);
    vec p = vec_set(KVC_TANH_P0);
    p = vec_fma(p, square, vec_set(KVC_TANH_P1));
    p = vec_fma(p, square, vec_set(KVC_TANH_P2));
    p = vec_fma(p, square, vec_set(KVC_TANH_P3));
    p = vec_fma(p, square, vec_set(KVC_TANH_P4));
    const vec small = vec_fma(vec_mul(p, square), x, x), e = vec_exp(vec_mul(vec_set(-2.0f), size));
    const vec large = vec_sub(one, vec_div(vec_add(e, e), vec_add(one, e)));
    return vec_less(size, vec_set(KVC_TANH_SMALL), small, vec_less(x, zero, vec_sub(zero, large), large));
}

static void softcap(float *x, int64_t n, float scale, float cap, float *slope) {
    const vec scales = vec_set(scale), caps = vec_set(cap);
    for (int64_t i = 0; i < n; i += VEC_WIDTH) {
        const int64_t some = n - i < VEC_WIDTH ? n - i : VEC_WIDTH;
        const int whole = some == VEC_WIDTH;
        const vec t = tanh_of(vec_div(vec_mul(scales, whole ? vec_load(x + i) : vec_part(x + i, some)), caps));
        const vec s = vec_max(vec_sub(vec_set(1.0f), vec_mul(t, t)), vec_set(0.0f));
        if (whole) vec_store(x + i, vec_mul(caps, t));
        else vec_store_part(x + i, some, vec_mul(caps, t));
        if (slope && whole) vec_store(slope + i, s);
        else if (slope) vec_store_part(slope + i, some, s);
    }
}

static void multiply(float *y, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + VEC_WIDTH <= n; i += VEC_WIDTH) vec_store(y + i, vec_mul(vec_load(y + i), vec_load(x + i)));
    for (; i < n; i++) y[i] *= x[i];
}

#define KVC_SIMD_BLOCKS                                                                                         \
    .gemm = gemm, .mix = {mix_f32, mix_bf16, mix_f16}, .softcap = softcap, .multiply = multiply,                \
    .largest = largest, .quantize = quantize, .code_logits = code_logits, .code_weights = code_weights,         \
    .code_sums = code_sums,                                                                                     \
    .lanes_hide = lanes_hide, .lanes_bias = lanes_bias, .lanes_softmax = lanes_softmax, .lanes_exp = lanes_exp, \
    .lanes_gradient = lanes_gradient, .lanes_total = lanes_total
#endif
