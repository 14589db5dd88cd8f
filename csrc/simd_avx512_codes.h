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
