/* Codes of 8 and 4 bits with AVX2, and what simd_codes.h is written over; a part of simd_avx2.c. */
/* 8 bytes, or the first n of them and zeros. */
static inline __m128i eight_bytes(const char *p, int64_t n) {
    if (n >= 8) return _mm_loadl_epi64((const __m128i *)p);
    int8_t rest[16] = {0};
    memcpy(rest, p, (size_t)n);
    return _mm_loadl_epi64((const __m128i *)rest);
}

static void dequantize_int8(float *dst, const void *codes, float scale, int64_t n) {
    const __m256 scales = _mm256_set1_ps(scale);
    for (int64_t i = 0; i < n; i += 8) {
        const __m256i wide = _mm256_cvtepi8_epi32(eight_bytes((const char *)codes + i, n - i));
        _mm256_maskstore_ps(dst + i, lanes(n - i), _mm256_mul_ps(scales, _mm256_cvtepi32_ps(wide)));
    }
}

static void dequantize_int4(float *dst, const void *codes, float scale, int64_t n) {
    const __m256 scales = _mm256_set1_ps(scale);
    for (int64_t i = 0; i < n / 2; i += 8) {
        const __m256i mask = lanes(n / 2 - i);
        const __m256i wide = _mm256_cvtepi8_epi32(eight_bytes((const char *)codes + i, n / 2 - i));
        const __m256i low = _mm256_srai_epi32(_mm256_slli_epi32(wide, 28), 28), high = _mm256_srai_epi32(wide, 4);
        _mm256_maskstore_ps(dst + i, mask, _mm256_mul_ps(scales, _mm256_cvtepi32_ps(low)));
        _mm256_maskstore_ps(dst + n / 2 + i, mask, _mm256_mul_ps(scales, _mm256_cvtepi32_ps(high)));
    }
}

typedef __m256i ivec;
enum { CODE_WIDTH = 16 };

static inline ivec ivec_zero(void) { return _mm256_setzero_si256(); }
static inline ivec ivec_set(int32_t x) { return _mm256_set1_epi32(x); }
static inline ivec ivec_bytes(const char *p, int64_t n) {
    if (n == 16) return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
    int8_t rest[16] = {0};
    memcpy(rest, p, (size_t)n);
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)rest));
}
static inline ivec ivec_words(const int16_t *p, int64_t n) {
    if (n == 16) return _mm256_loadu_si256((const __m256i *)p);
    int16_t rest[16] = {0};
    memcpy(rest, p, (size_t)n * sizeof *rest);
    return _mm256_loadu_si256((const __m256i *)rest);
}
static inline ivec ivec_low_nibbles(ivec x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 12), 12); }
static inline ivec ivec_high_nibbles(ivec x) { return _mm256_srai_epi16(x, 4); }
static inline ivec ivec_low(ivec a, ivec b) { return _mm256_unpacklo_epi16(a, b); }
static inline ivec ivec_high(ivec a, ivec b) { return _mm256_unpackhi_epi16(a, b); }
static inline void ivec_store(int32_t *p, ivec x) { _mm256_storeu_si256((__m256i *)p, x); }

/* As vec_sums. */
static inline ivec ivec_sums(const ivec *x) {
    __m256i pair[4], quad[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        pair[i] = _mm256_add_epi32(_mm256_unpacklo_epi32(x[2 * i], x[2 * i + 1]),
                                   _mm256_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        quad[i] = _mm256_add_epi32(_mm256_unpacklo_epi64(pair[2 * i], pair[2 * i + 1]),
                                   _mm256_unpackhi_epi64(pair[2 * i], pair[2 * i + 1]));
    }
    return _mm256_add_epi32(_mm256_permute2x128_si256(quad[0], quad[1], 0x20),
                            _mm256_permute2x128_si256(quad[0], quad[1], 0x31));
}

static inline void ivec_add_to(int32_t *y, ivec low, ivec high, int64_t n) {
    const __m256i parts[2] = {_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)};
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const __m256i mask = lanes(n - 8 * i);
        if (n <= 8 * i) break;
        _mm256_maskstore_epi32(y + 8 * i, mask, _mm256_add_epi32(_mm256_maskload_epi32(y + 8 * i, mask), parts[i]));
    }
}

#define CODES(name) name
#define CODES_TARGET
#define CODES_MADD(sums, a, b) _mm256_add_epi32(sums, _mm256_madd_epi16(a, b))
#include "simd_codes.h"
