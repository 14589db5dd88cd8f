/* The inner loops for AVX2 with FMA and F16C; compiled with those flags, reached only on a CPU that has them. The last
 * n % 8 elements go through the same vector code in a small buffer, so that one formula serves all. */
#if defined(__x86_64__)
#include "simd.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

/* The first n of 8 lanes. */
static inline __m256i lanes(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n > 8 ? 8 : (int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static void load_f32(float *dst, const void *src, int64_t n) {
    if (n > 0) memcpy(dst, src, (size_t)n * sizeof(float));
}

static void store_f32(void *dst, const float *src, int64_t n) {
    if (n > 0) memcpy(dst, src, (size_t)n * sizeof(float));
}

static inline __m256 float_of_bf16(__m128i half) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

/* In the low halves of the lanes. */
static inline __m256i bf16_bits(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value), top = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), quiet, nan);
}

static inline __m128i bf16_of_float(__m256 value) {
    const __m256i result = bf16_bits(value);
    return _mm_packus_epi32(_mm256_castsi256_si128(result), _mm256_extracti128_si256(result, 1));
}

static void load_bf16(float *dst, const void *src, int64_t n) {
    const uint16_t *half = src;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, float_of_bf16(_mm_loadu_si128((const __m128i *)(half + i))));
    if (i < n) {
        uint16_t rest[8] = {0};
        memcpy(rest, half + i, (size_t)(n - i) * sizeof *rest);
        _mm256_maskstore_ps(dst + i, lanes(n - i), float_of_bf16(_mm_loadu_si128((const __m128i *)rest)));
    }
}

static void store_bf16(void *dst, const float *src, int64_t n) {
    uint16_t *half = dst;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm_storeu_si128((__m128i *)(half + i), bf16_of_float(_mm256_loadu_ps(src + i)));
    if (i < n) {
        uint16_t rest[8];
        _mm_storeu_si128((__m128i *)rest, bf16_of_float(_mm256_maskload_ps(src + i, lanes(n - i))));
        memcpy(half + i, rest, (size_t)(n - i) * sizeof *rest);
    }
}

static void load_f16(float *dst, const void *src, int64_t n) {
    const uint16_t *half = src;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(half + i))));
    if (i < n) {
        uint16_t rest[8] = {0};
        memcpy(rest, half + i, (size_t)(n - i) * sizeof *rest);
        _mm256_maskstore_ps(dst + i, lanes(n - i), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)rest)));
    }
}

static void store_f16(void *dst, const float *src, int64_t n) {
    uint16_t *half = dst;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm_storeu_si128((__m128i *)(half + i), _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
    }
    if (i < n) {
        uint16_t rest[8];
        const __m256 value = _mm256_maskload_ps(src + i, lanes(n - i));
        _mm_storeu_si128((__m128i *)rest, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
        memcpy(half + i, rest, (size_t)(n - i) * sizeof *rest);
    }
}

/* 8 keys x 8 dims: within 128-bit lanes, then the lanes. */
static inline void transpose_block(float *dst, const float *src, int64_t stride) {
    __m256 row[8], pair[8], quad[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) row[i] = _mm256_loadu_ps(src + i * stride);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
        pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        quad[i] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0x44);
        quad[i + 1] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0xee);
        quad[i + 2] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0x44);
        quad[i + 3] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(dst + i * KVC_TILE, _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x20));
        _mm256_storeu_ps(dst + (i + 4) * KVC_TILE, _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x31));
    }
}

static void transpose(float *dst, const float *src, int64_t stride, int64_t keys, int64_t depth) {
    const int64_t blocked = keys == KVC_TILE ? depth / 8 * 8 : 0;
    for (int64_t d = 0; d < blocked; d += 8) {
        for (int64_t j = 0; j < KVC_TILE; j += 8) transpose_block(dst + d * KVC_TILE + j, src + j * stride + d, stride);
    }
    kvc_portable_transpose(dst + blocked * KVC_TILE, src + blocked, stride, keys, depth - blocked);
}

/* exp(x) for x <= 0 and NaN (maxps returns its second operand when one is NaN); 2^k in two factors, so that subnormal
 * results come out. */
static inline __m256 exp_of(__m256 x) {
    x = _mm256_max_ps(_mm256_set1_ps(KVC_EXP_LOWEST), x);
    const __m256 k = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(KVC_LOG2E)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(k, _mm256_set1_ps(KVC_LN2_HI), x);
    r = _mm256_fnmadd_ps(k, _mm256_set1_ps(KVC_LN2_LO), r);
    __m256 p = _mm256_set1_ps(KVC_EXP_P0);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVC_EXP_P1));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVC_EXP_P2));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVC_EXP_P3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVC_EXP_P4));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVC_EXP_P5));
    p = _mm256_fmadd_ps(_mm256_mul_ps(p, r), r, r);
    const __m256i whole = _mm256_cvtps_epi32(k), first = _mm256_srai_epi32(whole, 1);
    const __m256i second = _mm256_sub_epi32(whole, first), bias = _mm256_set1_epi32(127);
    const __m256 low = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23));
    const __m256 high = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(second, bias), 23));
    return _mm256_mul_ps(_mm256_mul_ps(_mm256_add_ps(p, _mm256_set1_ps(1.0f)), low), high);
}

static inline float largest_of(__m256 x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

static inline float sum_of(__m256 x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

static void softmax_row(float *x, int64_t n, int64_t width, float scale, float *max, float *sum) {
    const __m256 lowest = _mm256_set1_ps(-INFINITY), scales = _mm256_set1_ps(scale);
    __m256 most = lowest, total = _mm256_setzero_ps();
    for (int64_t i = 0; i < n; i += 8) {
        const __m256i mask = lanes(n - i);
        const __m256 value = _mm256_mul_ps(scales, _mm256_maskload_ps(x + i, mask));
        most = _mm256_max_ps(most, _mm256_blendv_ps(lowest, value, _mm256_castsi256_ps(mask)));
    }
    const float largest = largest_of(most);
    const __m256 base = _mm256_set1_ps(largest == -INFINITY ? 0.0f : largest);
    for (int64_t i = 0; i < width; i += 8) {
        const __m256i mask = lanes(n - i < 0 ? 0 : n - i);
        const __m256 value = _mm256_sub_ps(_mm256_mul_ps(scales, _mm256_maskload_ps(x + i, mask)), base);
        const __m256 e = _mm256_and_ps(exp_of(value), _mm256_castsi256_ps(mask));
        total = _mm256_add_ps(total, e);
        _mm256_maskstore_ps(x + i, lanes(width - i), e);
    }
    *max = largest;
    *sum = sum_of(total);
}

static void softmax(float *x, int64_t rows, int64_t stride, int64_t n, int64_t width, float scale, float *max,
                    float *sum) {
    for (int64_t r = 0; r < rows; r++) softmax_row(x + r * stride, n, width, scale, max + r, sum + r);
}

static void exp_difference(float *out, const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) {
        const __m256i mask = lanes(n - i);
        const __m256 x = _mm256_sub_ps(_mm256_maskload_ps(a + i, mask), _mm256_maskload_ps(b + i, mask));
        _mm256_maskstore_ps(out + i, mask, exp_of(x));
    }
}

static void weighted_sum(float *y, const float *weights, const float *x, int64_t stride, int64_t rows, int64_t n) {
    int64_t c = 0;
    for (; c + 32 <= n; c += 32) {
        __m256 sum0 = _mm256_loadu_ps(y + c), sum1 = _mm256_loadu_ps(y + c + 8);
        __m256 sum2 = _mm256_loadu_ps(y + c + 16), sum3 = _mm256_loadu_ps(y + c + 24);
        for (int64_t r = 0; r < rows; r++) {
            const float *row = x + r * stride + c;
            const __m256 weight = _mm256_set1_ps(weights[r]);
            sum0 = _mm256_fmadd_ps(weight, _mm256_loadu_ps(row), sum0);
            sum1 = _mm256_fmadd_ps(weight, _mm256_loadu_ps(row + 8), sum1);
            sum2 = _mm256_fmadd_ps(weight, _mm256_loadu_ps(row + 16), sum2);
            sum3 = _mm256_fmadd_ps(weight, _mm256_loadu_ps(row + 24), sum3);
        }
        _mm256_storeu_ps(y + c, sum0);
        _mm256_storeu_ps(y + c + 8, sum1);
        _mm256_storeu_ps(y + c + 16, sum2);
        _mm256_storeu_ps(y + c + 24, sum3);
    }
    for (; c < n; c += 8) {
        const __m256i mask = lanes(n - c);
        __m256 sum = _mm256_maskload_ps(y + c, mask);
        for (int64_t r = 0; r < rows; r++) {
            sum = _mm256_fmadd_ps(_mm256_set1_ps(weights[r]), _mm256_maskload_ps(x + r * stride + c, mask), sum);
        }
        _mm256_maskstore_ps(y + c, mask, sum);
    }
}

static void weighted_max(float *y, const float *weights, const float *x, int64_t stride, int64_t rows, int64_t n) {
    for (int64_t c = 0; c < n; c += 8) {
        const __m256i mask = lanes(n - c);
        __m256 most = _mm256_maskload_ps(y + c, mask);
        for (int64_t r = 0; r < rows; r++) {
            const __m256 value = _mm256_maskload_ps(x + r * stride + c, mask);
            most = _mm256_max_ps(most, _mm256_mul_ps(_mm256_set1_ps(weights[r]), value));
        }
        _mm256_maskstore_ps(y + c, mask, most);
    }
}

/* ---- what simd_blocks.h is written over ---- */

typedef __m256 vec;
enum { VEC_WIDTH = 8, VEC_COLUMNS = 2 };

static inline vec vec_set(float x) { return _mm256_set1_ps(x); }
static inline vec vec_load(const float *p) { return _mm256_loadu_ps(p); }
static inline vec vec_part(const float *p, int64_t n) { return _mm256_maskload_ps(p, lanes(n)); }
static inline void vec_store(float *p, vec x) { _mm256_storeu_ps(p, x); }
static inline void vec_store_part(float *p, int64_t n, vec x) { _mm256_maskstore_ps(p, lanes(n), x); }
static inline vec vec_add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec vec_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec vec_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec vec_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec vec_max(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec vec_div(vec a, vec b) { return _mm256_div_ps(a, b); }
static inline vec vec_less(vec a, vec b, vec x, vec y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
/* As integers: NaN has more bits than any number. */
static inline vec vec_most(vec a, vec b) {
    const __m256i size = _mm256_and_si256(_mm256_castps_si256(b), _mm256_set1_epi32(0x7fffffff));
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), size));
}
static inline float vec_largest(vec x) {
    const __m256i bits = _mm256_castps_si256(x);
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1))));
}
static inline void vec_words(int16_t *p, int64_t n, vec x) {
    const __m256i whole = _mm256_cvtps_epi32(x);
    const __m128i found = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    if (n >= 8) {
        _mm_storeu_si128((__m128i *)p, found);
    } else {
        int16_t rest[8];
        _mm_storeu_si128((__m128i *)rest, found);
        memcpy(p, rest, (size_t)n * sizeof *rest);
    }
}
static inline vec vec_ints(const int32_t *p) {
    return _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline vec vec_exp(vec x) { return exp_of(x); }

/* x, 0 where it is -inf. */
static inline vec vec_base(vec x) {
    return _mm256_and_ps(x, _mm256_cmp_ps(x, _mm256_set1_ps(-INFINITY), _CMP_NEQ_UQ));
}

static inline vec vec_typed(const void *src, int64_t i, int64_t n, kvc_dtype dtype) {
    if (dtype == KVC_F32) {
        const float *from = (const float *)src + i;
        return n == 8 ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, lanes(n));
    }
    const uint16_t *from = (const uint16_t *)src + i;
    __m128i half;
    if (n == 8) {
        half = _mm_loadu_si128((const __m128i *)from);
    } else {
        uint16_t rest[8] = {0};
        memcpy(rest, from, (size_t)n * sizeof *rest);
        half = _mm_loadu_si128((const __m128i *)rest);
    }
    return dtype == KVC_F16 ? _mm256_cvtph_ps(half) : float_of_bf16(half);
}

static inline void vec_put(void *dst, int64_t i, int64_t n, kvc_dtype dtype, vec x) {
    if (dtype == KVC_F32) {
        if (n == 8) _mm256_storeu_ps((float *)dst + i, x);
        else _mm256_maskstore_ps((float *)dst + i, lanes(n), x);
        return;
    }
    uint16_t *to = (uint16_t *)dst + i;
    const __m128i half = dtype == KVC_F16 ? _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT) : bf16_of_float(x);
    if (n == 8) {
        _mm_storeu_si128((__m128i *)to, half);
    } else {
        uint16_t rest[8];
        _mm_storeu_si128((__m128i *)rest, half);
        memcpy(to, rest, (size_t)n * sizeof *rest);
    }
}

static inline void vec_put_two(void *dst, int64_t i, kvc_dtype dtype, vec x, vec y) {
    if (dtype == KVC_BF16) {
        const __m256i mixed = _mm256_packus_epi32(bf16_bits(x), bf16_bits(y)); /* quarters x0 y0 x1 y1 */
        _mm256_storeu_si256((__m256i *)((uint16_t *)dst + i), _mm256_permute4x64_epi64(mixed, 0xd8));
    } else {
        vec_put(dst, i, 8, dtype, x);
        vec_put(dst, i + 8, 8, dtype, y);
    }
}

static inline vec vec_if(int flag, vec x) {
    return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(-flag)));
}

/* Sums of 8 vecs at once: each step adds neighbours and leaves half as many vecs. */
static inline vec vec_sums(const vec *x) {
    __m256 pair[4], quad[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        pair[i] = _mm256_add_ps(_mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const __m256d a = _mm256_castps_pd(pair[2 * i]), b = _mm256_castps_pd(pair[2 * i + 1]);
        quad[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
    }
    return _mm256_add_ps(_mm256_permute2f128_ps(quad[0], quad[1], 0x20), _mm256_permute2f128_ps(quad[0], quad[1], 0x31));
}

static inline vec vec_hide(vec x, int32_t t, const int32_t *near, const int32_t *begin, const int32_t *end) {
    const __m256i at = _mm256_set1_epi32(t);
    const __m256i sink = _mm256_cmpgt_epi32(_mm256_loadu_si256((const __m256i *)near), at);
    const __m256i before = _mm256_cmpgt_epi32(_mm256_loadu_si256((const __m256i *)begin), at);
    const __m256i within = _mm256_cmpgt_epi32(_mm256_loadu_si256((const __m256i *)end), at);
    const __m256i seen = _mm256_or_si256(sink, _mm256_andnot_si256(before, within));
    return _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), x, _mm256_castsi256_ps(seen));
}

static inline vec vec_add_unless(vec x, vec y, int32_t t, const int32_t *own) {
    const __m256i here = _mm256_cmpeq_epi32(_mm256_set1_epi32(t), _mm256_loadu_si256((const __m256i *)own));
    return _mm256_blendv_ps(_mm256_add_ps(x, y), x, _mm256_castsi256_ps(here));
}

#include "simd_blocks.h"
#include "simd_scan.h"
#include "simd_rotate.h"
#include "simd_divergence.h"
#include "simd_avx2_codes.h"

const kvc_simd kvc_simd_avx2 = {
    .name = "avx2",
    .load = {load_f32, load_bf16, load_f16},
    .store = {store_f32, store_bf16, store_f16},
    .transpose = transpose,
    .softmax = softmax,
    .exp_difference = exp_difference,
    .weighted_sum = weighted_sum,
    .weighted_max = weighted_max,
    .divergence = divergence,
    .dots = {dots_f32, dots_bf16, dots_f16},
    .dequantize = {dequantize_int8, dequantize_int4},
    .code_dots = code_dots,
    .code_mix = {code_mix_int8, code_mix_int4},
    KVC_SIMD_BLOCKS,
    KVC_SIMD_ROTATE,
    KVC_SIMD_SCAN,
};
#else
typedef int kvc_simd_avx2_is_empty; /* ISO C forbids an empty file */
#endif
