/* Codes of 8 and 4 bits with AVX-512, and what simd_codes.h is written over; a part of simd_avx512.c. */
static float largest(const float *x, int64_t n) {
    __m512i most = _mm512_setzero_si512(); /* as integers: NaN has more bits than any number */
    for (int64_t i = 0; i < n; i += 16) {
        const __m512i bits = _mm512_maskz_loadu_epi32(lanes(n - i), x + i);
        most = _mm512_max_epi32(most, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    const int32_t found = _mm512_reduce_max_epi32(most);
    float value;
    memcpy(&value, &found, sizeof value);
    return value;
}

static void quantize(int16_t *codes, const float *x, float scale, float most, int64_t n) {
    const __m512 scales = _mm512_set1_ps(scale), high = _mm512_set1_ps(most), low = _mm512_set1_ps(-most);
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = lanes(n - i);
        const __m512 value = _mm512_div_ps(_mm512_maskz_loadu_ps(mask, x + i), scales);
        const __m512i code = _mm512_cvtps_epi32(_mm512_max_ps(_mm512_min_ps(value, high), low));
        _mm256_mask_storeu_epi16(codes + i, mask, _mm512_cvtepi32_epi16(code));
    }
}

static void dequantize_int8(float *dst, const void *codes, float scale, int64_t n) {
    const __m512 scales = _mm512_set1_ps(scale);
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = lanes(n - i);
        const __m512i wide = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, (const int8_t *)codes + i));
        _mm512_mask_storeu_ps(dst + i, mask, _mm512_mul_ps(scales, _mm512_cvtepi32_ps(wide)));
    }
}

static void dequantize_int4(float *dst, const void *codes, float scale, int64_t n) {
    const __m512 scales = _mm512_set1_ps(scale);
    for (int64_t i = 0; i < n / 2; i += 16) {
        const __mmask16 mask = lanes(n / 2 - i);
        const __m512i wide = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, (const int8_t *)codes + i));
        const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(wide, 28), 28), high = _mm512_srai_epi32(wide, 4);
        _mm512_mask_storeu_ps(dst + i, mask, _mm512_mul_ps(scales, _mm512_cvtepi32_ps(low)));
        _mm512_mask_storeu_ps(dst + n / 2 + i, mask, _mm512_mul_ps(scales, _mm512_cvtepi32_ps(high)));
    }
}

typedef __m512i ivec;
enum { CODE_WIDTH = 32 };

/* The first n of 32 lanes, 0 <= n <= 32. */
static inline __mmask32 words(int64_t n) { return n >= 32 ? 0xffffffffu : (1u << n) - 1u; }
static inline ivec ivec_zero(void) { return _mm512_setzero_si512(); }
static inline ivec ivec_set(int32_t x) { return _mm512_set1_epi32(x); }
static inline ivec ivec_bytes(const char *p, int64_t n) {
    const __m256i bytes = n == 32 ? _mm256_loadu_si256((const __m256i *)p) : _mm256_maskz_loadu_epi8(words(n), p);
    return _mm512_cvtepi8_epi16(bytes);
}
static inline ivec ivec_words(const int16_t *p, int64_t n) {
    return n == 32 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16(words(n), p);
}
static inline ivec ivec_low_nibbles(ivec x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 12), 12); }
static inline ivec ivec_high_nibbles(ivec x) { return _mm512_srai_epi16(x, 4); }
static inline ivec ivec_low(ivec a, ivec b) { return _mm512_unpacklo_epi16(a, b); }
static inline ivec ivec_high(ivec a, ivec b) { return _mm512_unpackhi_epi16(a, b); }
static inline void ivec_store(int32_t *p, ivec x) { _mm512_storeu_si512(p, x); }

/* As vec_sums. */
static inline ivec ivec_sums(const ivec *x) {
    __m512i pair[8], quad[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        pair[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]),
                                   _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        quad[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(pair[2 * i], pair[2 * i + 1]),
                                   _mm512_unpackhi_epi64(pair[2 * i], pair[2 * i + 1]));
    }
    const __m512i low = _mm512_add_epi32(_mm512_shuffle_i32x4(quad[0], quad[1], 0x88),
                                         _mm512_shuffle_i32x4(quad[0], quad[1], 0xdd));
    const __m512i high = _mm512_add_epi32(_mm512_shuffle_i32x4(quad[2], quad[3], 0x88),
                                          _mm512_shuffle_i32x4(quad[2], quad[3], 0xdd));
    return _mm512_add_epi32(_mm512_shuffle_i32x4(low, high, 0x88), _mm512_shuffle_i32x4(low, high, 0xdd));
}

static inline void ivec_add_to(int32_t *y, ivec low, ivec high, int64_t n) {
    const __m512i front = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), back = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    const __mmask16 first = lanes(n), second = lanes(n - 16);
    const __m512i a = _mm512_permutex2var_epi64(low, front, high), b = _mm512_permutex2var_epi64(low, back, high);
    _mm512_mask_storeu_epi32(y, first, _mm512_add_epi32(_mm512_maskz_loadu_epi32(first, y), a));
    if (n > 16) {
        _mm512_mask_storeu_epi32(y + 16, second, _mm512_add_epi32(_mm512_maskz_loadu_epi32(second, y + 16), b));
    }
}

#define CODES(name) name
#define CODES_TARGET
#define CODES_MADD(sums, a, b) _mm512_add_epi32(sums, _mm512_madd_epi16(a, b))
#include "simd_codes.h"
#undef CODES
#undef CODES_TARGET
#undef CODES_MADD

/* In one instruction: VNNI, which the CPUs with bfloat16 pairs have. */
#define CODES(name) name##_vnni
#define CODES_TARGET __attribute__((target("avx512vnni")))
#define CODES_MADD(sums, a, b) _mm512_dpwssd_epi32(sums, a, b)
#include "simd_codes.h"

/* ---- several queries against 16 keys, a product of four bytes in one instruction ---- */

/* A query as bytes, q = 256 * high + low, and the sums of both. */
typedef struct {
    _Alignas(64) int8_t high[KVC_MAX_HEAD_DIM], low[KVC_MAX_HEAD_DIM];
    int32_t high_sum, low_sum;
} byte_query;

static void split_query(byte_query *to, const int16_t *q, int64_t D) {
    const __m512i one = _mm512_set1_epi16(1);
    __m512i high_sums = _mm512_setzero_si512(), low_sums = high_sums;
    for (int64_t d = 0; d < D; d += 32) { /* zeros behind D, up to the next 32 */
        const __m512i x = ivec_words(q + d, D - d);
        const __m512i low = _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), high = _mm512_srai_epi16(_mm512_sub_epi16(x, low), 8);
        _mm256_store_si256((__m256i *)(to->high + d), _mm512_cvtepi16_epi8(high));
        _mm256_store_si256((__m256i *)(to->low + d), _mm512_cvtepi16_epi8(low));
        high_sums = _mm512_add_epi32(high_sums, _mm512_madd_epi16(high, one));
        low_sums = _mm512_add_epi32(low_sums, _mm512_madd_epi16(low, one));
    }
    to->high_sum = _mm512_reduce_add_epi32(high_sums);
    to->low_sum = _mm512_reduce_add_epi32(low_sums);
}

/* 16 rows of 16 32-bit words become columns: word i of row j is word j of x[i]. */
static inline void transpose_words(__m512i *x) {
    __m512i a[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) { /* x[i + n]: column n of each 128 bits, of four rows */
        x[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) {
        const __m512i low = _mm512_shuffle_i32x4(x[n], x[4 + n], 0x88), high = _mm512_shuffle_i32x4(x[n], x[4 + n], 0xdd);
        const __m512i low2 = _mm512_shuffle_i32x4(x[8 + n], x[12 + n], 0x88);
        const __m512i high2 = _mm512_shuffle_i32x4(x[8 + n], x[12 + n], 0xdd);
        a[n] = _mm512_shuffle_i32x4(low, low2, 0x88), a[8 + n] = _mm512_shuffle_i32x4(low, low2, 0xdd);
        a[4 + n] = _mm512_shuffle_i32x4(high, high2, 0x88), a[12 + n] = _mm512_shuffle_i32x4(high, high2, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) x[i] = a[i];
}

/* sums[i] += four products of unsigned bytes x and those at q, in each of 16 lanes: with q in every lane as it is read, which
 * compilers do not make of _mm512_dpbusd_epi32. */
#define BYTE_MADD(sums, x, q) \
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(x), "m"(*(const int32_t *)(const void *)(q)))

/* 16 keys, or fewer, against 2 to 4 queries. One factor of a product of bytes must not be negative: 128 is added to keys. */
CODES_TARGET static inline __attribute__((always_inline)) void
byte_dots_block(int32_t *c, int64_t ldc, const byte_query *q, int64_t D, const char *k, int64_t keys, const int queries) {
    __m512i high[4], low[4];
    const __m512i offset = _mm512_set1_epi8((char)0x80);
#pragma GCC unroll 4
    for (int i = 0; i < queries; i++) {
        high[i] = _mm512_set1_epi32(-128 * q[i].high_sum);
        low[i] = _mm512_set1_epi32(-128 * q[i].low_sum);
    }
    for (int64_t d = 0; d < D; d += 64) {
        const int64_t bytes = D - d;
        const __mmask64 mask = bytes >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << bytes) - 1;
        __m512i x[16];
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) x[j] = _mm512_maskz_loadu_epi8(mask, k + (j < keys ? j : keys - 1) * D + d);
        transpose_words(x);
#pragma GCC unroll 16
        for (int n = 0; n < 16; n++) {
            if (4 * n >= bytes) break;
            const __m512i above = _mm512_xor_si512(x[n], offset);
#pragma GCC unroll 4
            for (int i = 0; i < queries; i++) {
                BYTE_MADD(high[i], above, q[i].high + d + 4 * n);
                BYTE_MADD(low[i], above, q[i].low + d + 4 * n);
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < queries; i++) {
        _mm512_mask_storeu_epi32(c + i * ldc, lanes(keys), _mm512_add_epi32(_mm512_slli_epi32(high[i], 8), low[i]));
    }
}

CODES_TARGET static void byte_dots(int32_t *c, int64_t ldc, const int16_t *q, int64_t D, const void *k, int64_t keys,
                                   int64_t queries, const void *next) {
    byte_query split[4];
    for (int64_t i = 0, some; i < queries; i += some) {
        some = queries - i < 4 ? queries - i : 4;
        if (some == 1) {
            code_dots_vnni(c + i * ldc, ldc, q + i * D, D, k, keys, 1, next);
            break;
        }
        for (int64_t n = 0; n < some; n++) split_query(split + n, q + (i + n) * D, D);
        for (int64_t j = 0; j < keys; j += 16) {
            const char *rows = (const char *)k + j * D;
            int32_t *to = c + i * ldc + j;
            const int64_t span = keys - j;
            if (i == 0) fetch_ahead(k, keys * D, j * D, 16 * D, next);
            if (some == 4) byte_dots_block(to, ldc, split, D, rows, span, 4);
            else if (some == 3) byte_dots_block(to, ldc, split, D, rows, span, 3);
            else byte_dots_block(to, ldc, split, D, rows, span, 2);
        }
    }
}
