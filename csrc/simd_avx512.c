/* The inner loops for AVX-512 (F, BW, VL, DQ); compiled with those flags, reached only on a CPU that has them. */
#if defined(__x86_64__)
#include "simd.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

/* The first n of 16 lanes; none for n <= 0, all for n >= 16. */
static inline __mmask16 lanes(int64_t n) {
    const unsigned bits = n >= 16 ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1u;
    return (__mmask16)bits;
}

static void load_f32(float *dst, const void *src, int64_t n) {
    const float *from = src;
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = lanes(n - i);
        _mm512_mask_storeu_ps(dst + i, mask, _mm512_maskz_loadu_ps(mask, from + i));
    }
}

static void store_f32(void *dst, const float *src, int64_t n) {
    load_f32(dst, src, n);
}

static void load_bf16(float *dst, const void *src, int64_t n) {
    const uint16_t *half = src;
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = lanes(n - i);
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, half + i));
        _mm512_mask_storeu_epi32(dst + i, mask, _mm512_slli_epi32(wide, 16));
    }
}

/* In the high halves of the lanes. */
static inline __m512i bf16_bits(__m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    const __m512i half = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_mask_add_epi32(half, odd, half, _mm512_set1_epi32(1));
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
}

static inline __m256i bf16_of_float(__m512 value) {
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bf16_bits(value), 16));
}

static void store_bf16(void *dst, const float *src, int64_t n) {
    uint16_t *half = dst;
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = lanes(n - i);
        _mm256_mask_storeu_epi16(half + i, mask, bf16_of_float(_mm512_maskz_loadu_ps(mask, src + i)));
    }
}

static void load_f16(float *dst, const void *src, int64_t n) {
    const uint16_t *half = src;
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = lanes(n - i);
        _mm512_mask_storeu_ps(dst + i, mask, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, half + i)));
    }
}

static void store_f16(void *dst, const float *src, int64_t n) {
    uint16_t *half = dst;
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = lanes(n - i);
        const __m512 value = _mm512_maskz_loadu_ps(mask, src + i);
        _mm256_mask_storeu_epi16(half + i, mask, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
    }
}

/* 16 keys x 16 dims. Rows are loaded as four 4x4 blocks side by side, transposed within 128-bit lanes, then the lanes
 * themselves are transposed. */
static inline void transpose_block(float *dst, const float *src, int64_t stride) {
    __m512 row[16], pair[16], quad[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) row[i] = _mm512_loadu_ps(src + i * stride);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        pair[i] = _mm512_unpacklo_ps(row[i], row[i + 1]);
        pair[i + 1] = _mm512_unpackhi_ps(row[i], row[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        const __m512d a = _mm512_castps_pd(pair[i]), b = _mm512_castps_pd(pair[i + 1]);
        const __m512d c = _mm512_castps_pd(pair[i + 2]), d = _mm512_castps_pd(pair[i + 3]);
        quad[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
        quad[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
        quad[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
        quad[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512 a = _mm512_shuffle_f32x4(quad[i], quad[i + 4], 0x88);
        const __m512 b = _mm512_shuffle_f32x4(quad[i], quad[i + 4], 0xdd);
        const __m512 c = _mm512_shuffle_f32x4(quad[i + 8], quad[i + 12], 0x88);
        const __m512 d = _mm512_shuffle_f32x4(quad[i + 8], quad[i + 12], 0xdd);
        _mm512_storeu_ps(dst + i * KVC_TILE, _mm512_shuffle_f32x4(a, c, 0x88));
        _mm512_storeu_ps(dst + (i + 4) * KVC_TILE, _mm512_shuffle_f32x4(b, d, 0x88));
        _mm512_storeu_ps(dst + (i + 8) * KVC_TILE, _mm512_shuffle_f32x4(a, c, 0xdd));
        _mm512_storeu_ps(dst + (i + 12) * KVC_TILE, _mm512_shuffle_f32x4(b, d, 0xdd));
    }
}

static void transpose(float *dst, const float *src, int64_t stride, int64_t keys, int64_t depth) {
    const int64_t blocked = keys == KVC_TILE ? depth / 16 * 16 : 0;
    for (int64_t d = 0; d < blocked; d += 16) {
        for (int64_t j = 0; j < KVC_TILE; j += 16) {
            transpose_block(dst + d * KVC_TILE + j, src + j * stride + d, stride);
        }
    }
    kvc_portable_transpose(dst + blocked * KVC_TILE, src + blocked, stride, keys, depth - blocked);
}

/* exp(x) for x <= 0 and NaN (maxps returns its second operand when one is NaN); scalef makes the subnormals. */
static inline __m512 exp_of(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(KVC_EXP_LOWEST), x);
    const __m512 k = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(KVC_LOG2E)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(k, _mm512_set1_ps(KVC_LN2_HI), x);
    r = _mm512_fnmadd_ps(k, _mm512_set1_ps(KVC_LN2_LO), r);
    __m512 p = _mm512_set1_ps(KVC_EXP_P0);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVC_EXP_P1));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVC_EXP_P2));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVC_EXP_P3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVC_EXP_P4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVC_EXP_P5));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, k);
}

/* The largest (sum) of 16 lanes in every lane: no detour through a scalar, whose latency a short row would feel. */
static inline __m512 largest_of(__m512 x) {
    x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    x = _mm512_max_ps(x, _mm512_permute_ps(x, 0x4e));
    return _mm512_max_ps(x, _mm512_permute_ps(x, 0xb1));
}

static inline __m512 sum_of(__m512 x) {
    x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    x = _mm512_add_ps(x, _mm512_permute_ps(x, 0x4e));
    return _mm512_add_ps(x, _mm512_permute_ps(x, 0xb1));
}

/* What is subtracted from the logits: their maximum, 0 where that is -inf. */
static inline __m512 base_of(__m512 largest) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(largest, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ), largest);
}

/* Whole tile rows, a step at a time for all of them: one row's chain of dependent instructions from maximum to sum is
 * longer than what the core looks ahead. rows <= KVC_TILE_ROWS. */
static inline void softmax_tile(float *x, int64_t rows, int64_t stride, float scale, float *max, float *sum) {
    const __m512 scales = _mm512_set1_ps(scale);
    __m512 base[KVC_TILE_ROWS], total[KVC_TILE_ROWS];
    for (int64_t r = 0; r < rows; r++) {
        const float *row = x + r * stride;
        const __m512 a = _mm512_mul_ps(scales, _mm512_loadu_ps(row));
        const __m512 b = _mm512_mul_ps(scales, _mm512_loadu_ps(row + 16));
        const __m512 c = _mm512_mul_ps(scales, _mm512_loadu_ps(row + 32));
        const __m512 d = _mm512_mul_ps(scales, _mm512_loadu_ps(row + 48));
        const __m512 largest = largest_of(_mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, d)));
        max[r] = _mm512_cvtss_f32(largest);
        base[r] = base_of(largest);
    }
    for (int64_t r = 0; r < rows; r++) {
        __m512 e[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            float *part = x + r * stride + 16 * j;
            e[j] = exp_of(_mm512_sub_ps(_mm512_mul_ps(scales, _mm512_loadu_ps(part)), base[r]));
            _mm512_storeu_ps(part, e[j]);
        }
        total[r] = _mm512_add_ps(_mm512_add_ps(e[0], e[1]), _mm512_add_ps(e[2], e[3]));
    }
    for (int64_t r = 0; r < rows; r++) sum[r] = _mm512_cvtss_f32(sum_of(total[r]));
}

static void softmax_row(float *x, int64_t n, int64_t width, float scale, float *max, float *sum) {
    const __m512 scales = _mm512_set1_ps(scale);
    const int64_t whole = n / 16 * 16;
    const __mmask16 rest = lanes(n - whole);
    __m512 most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int64_t i = 0; i < whole; i += 16) most = _mm512_max_ps(most, _mm512_mul_ps(scales, _mm512_loadu_ps(x + i)));
    most = _mm512_mask_max_ps(most, rest, most, _mm512_mul_ps(scales, _mm512_maskz_loadu_ps(rest, x + whole)));
    const __m512 largest = largest_of(most), base = base_of(largest);
#pragma GCC unroll 4
    for (int64_t i = 0; i < whole; i += 16) {
        const __m512 e = exp_of(_mm512_sub_ps(_mm512_mul_ps(scales, _mm512_loadu_ps(x + i)), base));
        total = _mm512_add_ps(total, e);
        _mm512_storeu_ps(x + i, e);
    }
    for (int64_t i = whole; i < width; i += 16) {
        const __mmask16 mask = lanes(n - i);
        const __m512 value = _mm512_sub_ps(_mm512_mul_ps(scales, _mm512_maskz_loadu_ps(mask, x + i)), base);
        const __m512 e = _mm512_maskz_mov_ps(mask, exp_of(value));
        total = _mm512_add_ps(total, e);
        _mm512_mask_storeu_ps(x + i, lanes(width - i), e);
    }
    *max = _mm512_cvtss_f32(largest);
    *sum = _mm512_cvtss_f32(sum_of(total));
}

static void softmax(float *x, int64_t rows, int64_t stride, int64_t n, int64_t width, float scale, float *max,
                    float *sum) {
    const int whole = n == KVC_TILE && width == KVC_TILE;
    for (int64_t r = 0; r < rows; r += whole ? KVC_TILE_ROWS : 1) {
        const int64_t some = rows - r < KVC_TILE_ROWS ? rows - r : KVC_TILE_ROWS;
        if (whole) softmax_tile(x + r * stride, some, stride, scale, max + r, sum + r);
        else softmax_row(x + r * stride, n, width, scale, max + r, sum + r);
    }
}

static void exp_difference(float *out, const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = lanes(n - i);
        const __m512 x = _mm512_sub_ps(_mm512_maskz_loadu_ps(mask, a + i), _mm512_maskz_loadu_ps(mask, b + i));
        _mm512_mask_storeu_ps(out + i, mask, exp_of(x));
    }
}

static void weighted_sum(float *y, const float *weights, const float *x, int64_t stride, int64_t rows, int64_t n) {
    int64_t c = 0;
    for (; c + 64 <= n; c += 64) {
        __m512 sum0 = _mm512_loadu_ps(y + c), sum1 = _mm512_loadu_ps(y + c + 16);
        __m512 sum2 = _mm512_loadu_ps(y + c + 32), sum3 = _mm512_loadu_ps(y + c + 48);
        for (int64_t r = 0; r < rows; r++) {
            const float *row = x + r * stride + c;
            const __m512 weight = _mm512_set1_ps(weights[r]);
            sum0 = _mm512_fmadd_ps(weight, _mm512_loadu_ps(row), sum0);
            sum1 = _mm512_fmadd_ps(weight, _mm512_loadu_ps(row + 16), sum1);
            sum2 = _mm512_fmadd_ps(weight, _mm512_loadu_ps(row + 32), sum2);
            sum3 = _mm512_fmadd_ps(weight, _mm512_loadu_ps(row + 48), sum3);
        }
        _mm512_storeu_ps(y + c, sum0);
        _mm512_storeu_ps(y + c + 16, sum1);
        _mm512_storeu_ps(y + c + 32, sum2);
        _mm512_storeu_ps(y + c + 48, sum3);
    }
    for (; c < n; c += 16) {
        const __mmask16 mask = lanes(n - c);
        __m512 sum = _mm512_maskz_loadu_ps(mask, y + c);
        for (int64_t r = 0; r < rows; r++) {
            sum = _mm512_fmadd_ps(_mm512_set1_ps(weights[r]), _mm512_maskz_loadu_ps(mask, x + r * stride + c), sum);
        }
        _mm512_mask_storeu_ps(y + c, mask, sum);
    }
}

static void weighted_max(float *y, const float *weights, const float *x, int64_t stride, int64_t rows, int64_t n) {
    for (int64_t c = 0; c < n; c += 16) {
        const __mmask16 mask = lanes(n - c);
        __m512 most = _mm512_maskz_loadu_ps(mask, y + c);
        for (int64_t r = 0; r < rows; r++) {
            const __m512 value = _mm512_maskz_loadu_ps(mask, x + r * stride + c);
            most = _mm512_max_ps(most, _mm512_mul_ps(_mm512_set1_ps(weights[r]), value));
        }
        _mm512_mask_storeu_ps(y + c, mask, most);
    }
}

/* ---- what simd_blocks.h is written over ---- */

typedef __m512 vec;
enum { VEC_WIDTH = 16, VEC_COLUMNS = 4 };

static inline vec vec_set(float x) { return _mm512_set1_ps(x); }
static inline vec vec_load(const float *p) { return _mm512_loadu_ps(p); }
static inline vec vec_part(const float *p, int64_t n) { return _mm512_maskz_loadu_ps(lanes(n), p); }
static inline void vec_store(float *p, vec x) { _mm512_storeu_ps(p, x); }
static inline void vec_store_part(float *p, int64_t n, vec x) { _mm512_mask_storeu_ps(p, lanes(n), x); }
static inline vec vec_add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec vec_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec vec_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec vec_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec vec_max(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec vec_div(vec a, vec b) { return _mm512_div_ps(a, b); }
static inline vec vec_less(vec a, vec b, vec x, vec y) {
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x);
}
/* As integers: NaN has more bits than any number. */
static inline vec vec_most(vec a, vec b) {
    const __m512i size = _mm512_and_si512(_mm512_castps_si512(b), _mm512_set1_epi32(0x7fffffff));
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), size));
}
static inline float vec_largest(vec x) {
    return _mm512_cvtss_f32(_mm512_castsi512_ps(_mm512_set1_epi32(_mm512_reduce_max_epi32(_mm512_castps_si512(x)))));
}
static inline void vec_words(int16_t *p, int64_t n, vec x) {
    const __m256i found = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x));
    if (n >= 16) _mm256_storeu_si256((__m256i *)p, found);
    else _mm256_mask_storeu_epi16(p, lanes(n), found);
}
static inline vec vec_ints(const int32_t *p) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(p)); }
static inline vec vec_exp(vec x) { return exp_of(x); }
static inline vec vec_base(vec x) { return base_of(x); }

static inline vec vec_typed(const void *src, int64_t i, int64_t n, kvc_dtype dtype) {
    if (dtype == KVC_F32) {
        const float *from = (const float *)src + i;
        return n == 16 ? _mm512_loadu_ps(from) : _mm512_maskz_loadu_ps(lanes(n), from);
    }
    const uint16_t *from = (const uint16_t *)src + i;
    const __m256i half = n == 16 ? _mm256_loadu_si256((const __m256i *)from) : _mm256_maskz_loadu_epi16(lanes(n), from);
    if (dtype == KVC_F16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

static inline void vec_put(void *dst, int64_t i, int64_t n, kvc_dtype dtype, vec x) {
    if (dtype == KVC_F32) {
        if (n == 16) _mm512_storeu_ps((float *)dst + i, x);
        else _mm512_mask_storeu_ps((float *)dst + i, lanes(n), x);
        return;
    }
    uint16_t *to = (uint16_t *)dst + i;
    const __m256i half = dtype == KVC_F16 ? _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT) : bf16_of_float(x);
    if (n == 16) _mm256_storeu_si256((__m256i *)to, half);
    else _mm256_mask_storeu_epi16(to, lanes(n), half);
}

/* The high halves of the lanes of two registers. */
static const uint16_t high_halves[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                         33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};

static inline void vec_put_two(void *dst, int64_t i, kvc_dtype dtype, vec x, vec y) {
    if (dtype == KVC_BF16) {
        const __m512i places = _mm512_loadu_si512(high_halves);
        _mm512_storeu_si512((uint16_t *)dst + i, _mm512_permutex2var_epi16(bf16_bits(x), places, bf16_bits(y)));
    } else {
        vec_put(dst, i, 16, dtype, x);
        vec_put(dst, i + 16, 16, dtype, y);
    }
}

static inline vec vec_if(int flag, vec x) {
    return _mm512_maskz_mov_ps((__mmask16)(flag ? 0xffffu : 0u), x);
}

/* Sums of 16 vecs at once: each step adds neighbours and leaves half as many vecs. */
static inline vec vec_sums(const vec *x) {
    __m512 pair[8], quad[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        pair[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512d a = _mm512_castps_pd(pair[2 * i]), b = _mm512_castps_pd(pair[2 * i + 1]);
        quad[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(quad[0], quad[1], 0x88),
                                     _mm512_shuffle_f32x4(quad[0], quad[1], 0xdd));
    const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(quad[2], quad[3], 0x88),
                                      _mm512_shuffle_f32x4(quad[2], quad[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

static inline vec vec_hide(vec x, int32_t t, const int32_t *near, const int32_t *begin, const int32_t *end) {
    const __m512i at = _mm512_set1_epi32(t);
    const __mmask16 sink = _mm512_cmplt_epi32_mask(at, _mm512_loadu_si512(near));
    const __mmask16 after = _mm512_cmpge_epi32_mask(at, _mm512_loadu_si512(begin));
    const __mmask16 seen = _mm512_mask_cmplt_epi32_mask(after, at, _mm512_loadu_si512(end)) | sink;
    return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, x);
}

static inline vec vec_add_unless(vec x, vec y, int32_t t, const int32_t *own) {
    const __mmask16 other = _mm512_cmpneq_epi32_mask(_mm512_set1_epi32(t), _mm512_loadu_si512(own));
    return _mm512_mask_add_ps(x, other, x, y);
}

#include "simd_blocks.h"
#include "simd_scan.h"
#include "simd_rotate.h"
#include "simd_divergence.h"
#include "simd_avx512_codes.h"

/* ---- bfloat16 pairs: two products per lane and step, for queries that are bfloat16 too ---- */

#define WITH_BF16 __attribute__((target("avx512bf16")))
enum { PAIR_FLOATS = 8 * KVC_MAX_HEAD_DIM }; /* queries that are converted at once */

/* Writes q as bfloat16; 0 if that would round. count is a multiple of 16. */
static int as_bf16(uint16_t *half, const float *q, int64_t count) {
    __m512i lost = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += 16) {
        const __m512i bits = _mm512_loadu_si512(q + i);
        lost = _mm512_or_si512(lost, _mm512_slli_epi32(bits, 16));
        _mm256_storeu_si256((__m256i *)(half + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
    }
    return _mm512_test_epi32_mask(lost, lost) == 0;
}

WITH_BF16 static inline __attribute__((always_inline)) void pairs_block(float *c, int64_t ldc, const uint16_t *q, int64_t D,
                                                                        const char *k, int64_t keys, const int queries) {
    const int width = VEC_WIDTH / queries;
    vec sums[VEC_WIDTH];
#pragma GCC unroll 16
    for (int i = 0; i < VEC_WIDTH; i++) sums[i] = vec_set(0.0f);
    for (int64_t d = 0; d < D; d += 32) {
        __m512bh query[4];
#pragma GCC unroll 4
        for (int i = 0; i < queries; i++) query[i] = (__m512bh)_mm512_loadu_si512(q + i * D + d);
#pragma GCC unroll 16
        for (int j = 0; j < width; j++) {
            const int64_t row = j < keys ? j : keys - 1; /* a short block reads its last twice */
            const __m512bh key = (__m512bh)_mm512_loadu_si512(k + (row * D + d) * 2);
#pragma GCC unroll 4
            for (int i = 0; i < queries; i++) sums[i * width + j] = _mm512_dpbf16_ps(sums[i * width + j], query[i], key);
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

WITH_BF16 static void dots_pairs(float *c, int64_t ldc, const float *q, int64_t D, const void *k, int64_t keys,
                                 int64_t queries, const void *next) {
    _Alignas(64) uint16_t half[PAIR_FLOATS];
    if (D % 32 || queries * D > PAIR_FLOATS || !as_bf16(half, q, queries * D)) {
        dots_bf16(c, ldc, q, D, k, keys, queries, next);
        return;
    }
    const int64_t step = 2 * D;
    for (int64_t j = 0; j < keys; j += 4) {
        const char *rows = (const char *)k + j * step;
        fetch_ahead(k, keys * step, j * step, 4 * step, next);
        int64_t i = 0;
        for (; i + 4 <= queries; i += 4) pairs_block(c + i * ldc + j, ldc, half + i * D, D, rows, keys - j, 4);
        /* fewer queries take more keys at a time */
        for (; i + 2 <= queries; i += 2) {
            if (j % 8 == 0) pairs_block(c + i * ldc + j, ldc, half + i * D, D, rows, keys - j, 2);
        }
        if (i < queries && j % 16 == 0) {
            pairs_block(c + i * ldc + j, ldc, half + i * D, D, rows, keys - j, 1);
        }
    }
}

#define AVX512_COMMON                                                                                            \
    .load = {load_f32, load_bf16, load_f16}, .store = {store_f32, store_bf16, store_f16},                         \
    .transpose = transpose, .softmax = softmax, .exp_difference = exp_difference, .weighted_sum = weighted_sum, \
    .weighted_max = weighted_max, .divergence = divergence,                                                      \
    .dequantize = {dequantize_int8, dequantize_int4}, KVC_SIMD_BLOCKS,      \
    KVC_SIMD_ROTATE, KVC_SIMD_SCAN

const kvc_simd kvc_simd_avx512 = {
    .name = "avx512", .dots = {dots_f32, dots_bf16, dots_f16}, .code_dots = code_dots,
    .code_mix = {code_mix_int8, code_mix_int4}, AVX512_COMMON};

const kvc_simd kvc_simd_avx512_bf16 = {
    .name = "avx512_bf16", .dots = {dots_f32, dots_pairs, dots_f16}, .code_dots = byte_dots,
    .code_mix = {code_mix_int8_vnni, code_mix_int4_vnni}, AVX512_COMMON};
#else
typedef int kvc_simd_avx512_is_empty; /* ISO C forbids an empty file */
#endif
