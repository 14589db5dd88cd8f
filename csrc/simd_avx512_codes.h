/* Codes of 8 and 4 bits with AVX-512, and what simd_codes.h is written over; a part of simd_avx512.c. */
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

/* In one instruction: VNNI, which the CPUs with bfloat16 pairs have. Not as intrinsics, which gcc surrounds with copies. */
#define CODES_TARGET __attribute__((target("avx512vnni")))
CODES_TARGET static inline __attribute__((always_inline)) ivec word_madd(ivec sums, ivec a, ivec b) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    return sums;
}

/* sums + products of four unsigned bytes and four bytes. */
CODES_TARGET static inline __attribute__((always_inline)) ivec byte_madd(ivec sums, ivec a, ivec b) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    return sums;
}

#define CODES(name) name##_vnni
#define CODES_MADD(sums, a, b) word_madd(sums, a, b)
#include "simd_codes.h"

/* ---- several queries against 16 keys, a product of four bytes in one instruction ---- */

/* A query as bytes, q = 256 * high + low: four registers of each 64, number n of which holds in all of its 128 bits number j
 * the four bytes from 16 * j + 4 * n on. bias: 128 times its sum. */
typedef struct {
    __m512i high[KVC_MAX_HEAD_DIM / 16], low[KVC_MAX_HEAD_DIM / 16];
    int32_t bias;
} byte_query;

static inline void spread_words(__m512i *to, __m512i x) {
    to[0] = _mm512_shuffle_epi32(x, 0x00), to[1] = _mm512_shuffle_epi32(x, 0x55);
    to[2] = _mm512_shuffle_epi32(x, 0xaa), to[3] = _mm512_shuffle_epi32(x, 0xff);
}

static void split_query(byte_query *to, const int16_t *q, int64_t D) {
    __m512i sums = _mm512_setzero_si512();
    for (int64_t d = 0; d < D; d += 64) { /* zeros behind D, up to the next 64 */
        __m256i high[2], low[2];
        for (int n = 0; n < 2; n++) {
            const int64_t left = D - d - 32 * n;
            const __m512i x = left > 0 ? ivec_words(q + d + 32 * n, left < 32 ? left : 32) : ivec_zero();
            low[n] = _mm512_cvtepi16_epi8(x);
            high[n] = _mm512_cvtepi16_epi8(_mm512_srai_epi16(_mm512_sub_epi16(x, _mm512_cvtepi8_epi16(low[n])), 8));
            sums = _mm512_add_epi32(sums, _mm512_madd_epi16(x, _mm512_set1_epi16(1)));
        }
        spread_words(to->high + d / 16, _mm512_inserti64x4(_mm512_castsi256_si512(high[0]), high[1], 1));
        spread_words(to->low + d / 16, _mm512_inserti64x4(_mm512_castsi256_si512(low[0]), low[1], 1));
    }
    to->bias = 128 * _mm512_reduce_add_epi32(sums);
}

/* Four rows of 32-bit words become columns, in all of their 128 bits. */
static inline void transpose_words(__m512i *x) {
    const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    x[0] = _mm512_unpacklo_epi64(a, c), x[1] = _mm512_unpackhi_epi64(a, c);
    x[2] = _mm512_unpacklo_epi64(b, d), x[3] = _mm512_unpackhi_epi64(b, d);
}

/* 128 bits number i: the sum of all 128 bits of x[i]. */
static inline __m512i quarter_sums(const __m512i *x) {
    const __m512i a = _mm512_add_epi32(_mm512_shuffle_i32x4(x[0], x[1], 0x88), _mm512_shuffle_i32x4(x[0], x[1], 0xdd));
    const __m512i b = _mm512_add_epi32(_mm512_shuffle_i32x4(x[2], x[3], 0x88), _mm512_shuffle_i32x4(x[2], x[3], 0xdd));
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

/* 16 keys, or fewer, against 2 to 4 queries; eight keys at a time, of which each register holds four. One factor of a product
 * of bytes must not be negative: 128 is added to keys. ahead: as in code_mix_block, of 16 keys, evenly too. whole: D is a
 * multiple of 64. */
CODES_TARGET static inline __attribute__((always_inline)) void
byte_dots_block(int32_t *c, int64_t ldc, const byte_query *q, int64_t D, const char *k, int64_t keys, const char *ahead,
                const int queries, const int whole) {
    __m512i sums[4][4];
#pragma GCC unroll 1
    for (int first = 0; first < 4; first += 2) {
        __m512i high[2][4], low[2][4];
#pragma GCC unroll 4
        for (int i = 0; i < queries; i++) high[0][i] = high[1][i] = low[0][i] = low[1][i] = ivec_zero();
        for (int64_t d = 0; d < D; d += 64) {
            const __mmask64 mask = ~(__mmask64)0 >> (D - d < 64 ? 64 - (D - d) : 0);
            __m512i x[2][4];
#pragma GCC unroll 2
            for (int g = 0; g < 2; g++) {
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    const int64_t t = 4 * (first + g) + j;
                    const char *at = k + (t < keys ? t : keys - 1) * D + d;
                    x[g][j] = whole ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi8(mask, at);
                    x[g][j] = _mm512_xor_si512(x[g][j], _mm512_set1_epi8((char)0x80));
                }
                transpose_words(x[g]);
            }
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) {
                __builtin_prefetch(ahead, 0, 2);
                __builtin_prefetch(ahead + LINE, 0, 2);
                ahead += 2 * LINE;
#pragma GCC unroll 4
                for (int i = 0; i < queries; i++) {
                    __m512i above = q[i].high[d / 16 + n], below = q[i].low[d / 16 + n];
                    __asm__("" : "+v"(above), "+v"(below)); /* are loaded once */
#pragma GCC unroll 2
                    for (int g = 0; g < 2; g++) {
                        high[g][i] = byte_madd(high[g][i], x[g][n], above);
                        low[g][i] = byte_madd(low[g][i], x[g][n], below);
                    }
                }
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < queries; i++) {
#pragma GCC unroll 2
            for (int g = 0; g < 2; g++) {
                sums[i][first + g] = _mm512_add_epi32(_mm512_slli_epi32(high[g][i], 8), low[g][i]);
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < queries; i++) {
        const __m512i found = _mm512_sub_epi32(quarter_sums(sums[i]), _mm512_set1_epi32(q[i].bias));
        _mm512_mask_storeu_epi32(c + i * ldc, lanes(keys), found);
    }
}

CODES_TARGET static inline __attribute__((always_inline)) void
byte_dots_of(int32_t *c, int64_t ldc, const byte_query *q, int64_t D, const char *k, int64_t keys, const char *ahead,
             const int queries) {
    if (D % 64) byte_dots_block(c, ldc, q, D, k, keys, ahead, queries, 0);
    else byte_dots_block(c, ldc, q, D, k, keys, ahead, queries, 1);
}

CODES_TARGET static void byte_dots(int32_t *c, int64_t ldc, const int16_t *q, int64_t D, const void *k, int64_t keys,
                                   int64_t queries, const void *next) {
    byte_query split[4];
    for (int64_t i = 0, some; i < queries; i += some) {
        some = queries - i < 4 ? queries - i : 4;
        if (some == 1) {
            code_dots_vnni(c + i * ldc, ldc, q + i * D, D, k, keys, 1, i ? NULL : next);
            break;
        }
        for (int64_t n = 0; n < some; n++) split_query(split + n, q + (i + n) * D, D);
        for (int64_t j = 0; j < keys; j += 16) {
            const char *rows = (const char *)k + j * D, *ahead = i ? NULL : ahead_of(k, keys * D, j * D, 16 * D, next);
            if (!ahead) ahead = rows; /* no branch among the products */
            int32_t *to = c + i * ldc + j;
            if (some == 4) byte_dots_of(to, ldc, split, D, rows, keys - j, ahead, 4);
            else if (some == 3) byte_dots_of(to, ldc, split, D, rows, keys - j, ahead, 3);
            else byte_dots_of(to, ldc, split, D, rows, keys - j, ahead, 2);
        }
    }
}
