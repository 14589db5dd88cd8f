/* The inner loops in plain C: complete, and the reference of the other tables. */
#include "simd.h"

#include <math.h>
#include <string.h>

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void load_f32(float *dst, const void *src, int64_t n) {
    if (n > 0) memcpy(dst, src, (size_t)n * sizeof(float));
}

static void store_f32(void *dst, const float *src, int64_t n) {
    if (n > 0) memcpy(dst, src, (size_t)n * sizeof(float));
}

static void load_bf16(float *dst, const void *src, int64_t n) {
    const uint16_t *half = src;
    for (int64_t i = 0; i < n; i++) dst[i] = float_of((uint32_t)half[i] << 16);
}

static void store_bf16(void *dst, const float *src, int64_t n) {
    uint16_t *half = dst;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = bits_of(src[i]);
        const int nan = (bits & 0x7fffffffu) > 0x7f800000u;
        const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
        half[i] = (uint16_t)(nan ? (bits >> 16) | 0x40u : rounded >> 16);
    }
}

static float float_of_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 31u, mantissa = half & 1023u;
    if (exponent == 31) return float_of(sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
    if (exponent == 0) {
        const float value = (float)mantissa * 0x1p-24f;
        return float_of(sign | bits_of(value));
    }
    return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

static uint16_t half_of_float(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 1023u));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above round to infinity */
    if (magnitude < 0x38800000u) {
        /* subnormal: adding 0.5 leaves the last mantissa bit at 2^-24, so that the addition itself rounds */
        return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

static void load_f16(float *dst, const void *src, int64_t n) {
    const uint16_t *half = src;
    for (int64_t i = 0; i < n; i++) dst[i] = float_of_half(half[i]);
}

static void store_f16(void *dst, const float *src, int64_t n) {
    uint16_t *half = dst;
    for (int64_t i = 0; i < n; i++) half[i] = half_of_float(src[i]);
}

void kvc_portable_transpose(float *restrict dst, const float *restrict src, int64_t stride, int64_t keys,
                            int64_t depth) {
    for (int64_t d = 0; d < depth; d++) {
        for (int64_t j = 0; j < keys; j++) dst[d * KVC_TILE + j] = src[j * stride + d];
        for (int64_t j = keys; j < KVC_TILE; j++) dst[d * KVC_TILE + j] = 0.0f;
    }
}

/* exp(x) for x <= 0 and NaN. Rounding by adding 1.5*2^23, whose low bits then are the integer; 2^k in two factors, so
 * that subnormal results come out. All of it is defined for NaN too, whose bits only make some unused k. */
static inline float exp_of(float x) {
    const float magic = 12582912.0f;
    const float clamped = x < KVC_EXP_LOWEST ? KVC_EXP_LOWEST : x;
    const float shifted = clamped * KVC_LOG2E + magic;
    const float k = shifted - magic;
    const float r = clamped - k * KVC_LN2_HI - k * KVC_LN2_LO;
    float p = KVC_EXP_P0;
    p = p * r + KVC_EXP_P1;
    p = p * r + KVC_EXP_P2;
    p = p * r + KVC_EXP_P3;
    p = p * r + KVC_EXP_P4;
    p = p * r + KVC_EXP_P5;
    p = p * r * r + r + 1.0f;
    const int32_t exponent = (int32_t)(bits_of(shifted) & 0x7fffffu) - 0x400000;
    const int32_t first = exponent / 2, second = exponent - first;
    return p * float_of((uint32_t)(first + 127) << 23) * float_of((uint32_t)(second + 127) << 23);
}

static void softmax_row(float *x, int64_t n, int64_t width, float scale, float *max, float *sum) {
    float largest = -INFINITY, total = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        x[i] *= scale;
        largest = x[i] > largest ? x[i] : largest;
    }
    const float base = largest == -INFINITY ? 0.0f : largest;
    for (int64_t i = 0; i < n; i++) x[i] = exp_of(x[i] - base);
    for (int64_t i = 0; i < n; i++) total += x[i];
    for (int64_t i = n; i < width; i++) x[i] = 0.0f;
    *max = largest;
    *sum = total;
}

static void softmax(float *x, int64_t rows, int64_t stride, int64_t n, int64_t width, float scale, float *max,
                    float *sum) {
    for (int64_t r = 0; r < rows; r++) softmax_row(x + r * stride, n, width, scale, max + r, sum + r);
}

static void exp_difference(float *out, const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = exp_of(a[i] - b[i]);
}

static void weighted_sum(float *restrict y, const float *restrict weights, const float *restrict x, int64_t stride,
                         int64_t rows, int64_t n) {
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < n; c++) y[c] += weights[r] * x[r * stride + c];
    }
}

static void weighted_max(float *restrict y, const float *restrict weights, const float *restrict x, int64_t stride,
                         int64_t rows, int64_t n) {
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < n; c++) {
            const float value = weights[r] * x[r * stride + c];
            y[c] = value > y[c] ? value : y[c];
        }
    }
}

/* ---- what simd_blocks.h is written over ---- */

enum { VEC_WIDTH = 8, VEC_COLUMNS = 2 };
typedef struct {
    float x[VEC_WIDTH];
} vec;

#define EACH for (int i = 0; i < VEC_WIDTH; i++)
static inline vec vec_set(float x) { vec y; EACH y.x[i] = x; return y; }
static inline vec vec_load(const float *p) { vec y; memcpy(y.x, p, sizeof y.x); return y; }
static inline void vec_store(float *p, vec x) { memcpy(p, x.x, sizeof x.x); }
static inline void vec_store_part(float *p, int64_t n, vec x) { for (int64_t i = 0; i < n; i++) p[i] = x.x[i]; }
static inline vec vec_add(vec a, vec b) { EACH a.x[i] += b.x[i]; return a; }
static inline vec vec_sub(vec a, vec b) { EACH a.x[i] -= b.x[i]; return a; }
static inline vec vec_mul(vec a, vec b) { EACH a.x[i] *= b.x[i]; return a; }
static inline vec vec_fma(vec a, vec b, vec c) { EACH c.x[i] += a.x[i] * b.x[i]; return c; }
static inline vec vec_max(vec a, vec b) { EACH a.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i]; return a; }
static inline vec vec_div(vec a, vec b) { EACH a.x[i] /= b.x[i]; return a; }
static inline vec vec_less(vec a, vec b, vec x, vec y) { EACH y.x[i] = a.x[i] < b.x[i] ? x.x[i] : y.x[i]; return y; }
static inline vec vec_ints(const int32_t *p) { vec y; EACH y.x[i] = (float)p[i]; return y; }
static inline vec vec_most(vec a, vec b) {
    EACH a.x[i] = float_of(bits_of(a.x[i]) > (bits_of(b.x[i]) & 0x7fffffffu) ? bits_of(a.x[i]) : bits_of(b.x[i]) & 0x7fffffffu);
    return a;
}
static inline float vec_largest(vec x) {
    uint32_t most = 0; /* as integers: NaN has more bits than any number */
    EACH most = bits_of(x.x[i]) > most ? bits_of(x.x[i]) : most;
    return float_of(most);
}
/* Rounding as in exp_of: what is rounded is below 2^22. */
static inline void vec_words(int16_t *p, int64_t n, vec x) {
    const float magic = 12582912.0f;
    for (int64_t i = 0; i < n && i < VEC_WIDTH; i++) p[i] = (int16_t)((x.x[i] + magic) - magic);
}
static inline vec vec_exp(vec a) { EACH a.x[i] = exp_of(a.x[i]); return a; }
static inline vec vec_base(vec a) { EACH a.x[i] = a.x[i] == -INFINITY ? 0.0f : a.x[i]; return a; }

static inline vec vec_part(const float *p, int64_t n) {
    vec y = vec_set(0.0f);
    for (int64_t i = 0; i < n; i++) y.x[i] = p[i];
    return y;
}

static inline vec vec_typed(const void *src, int64_t first, int64_t n, kvc_dtype dtype) {
    vec y = vec_set(0.0f);
    if (dtype == KVC_F32) load_f32(y.x, (const float *)src + first, n);
    else if (dtype == KVC_BF16) load_bf16(y.x, (const uint16_t *)src + first, n);
    else load_f16(y.x, (const uint16_t *)src + first, n);
    return y;
}

static inline void vec_put(void *dst, int64_t first, int64_t n, kvc_dtype dtype, vec x) {
    if (dtype == KVC_F32) store_f32((float *)dst + first, x.x, n);
    else if (dtype == KVC_BF16) store_bf16((uint16_t *)dst + first, x.x, n);
    else store_f16((uint16_t *)dst + first, x.x, n);
}

static inline void vec_put_two(void *dst, int64_t first, kvc_dtype dtype, vec x, vec y) {
    vec_put(dst, first, VEC_WIDTH, dtype, x);
    vec_put(dst, first + VEC_WIDTH, VEC_WIDTH, dtype, y);
}

static inline vec vec_if(int flag, vec x) {
    return flag ? x : vec_set(0.0f);
}

static inline vec vec_sums(const vec *x) {
    vec y = vec_set(0.0f);
    for (int j = 0; j < VEC_WIDTH; j++) EACH y.x[j] += x[j].x[i];
    return y;
}

static inline vec vec_hide(vec x, int32_t t, const int32_t *near, const int32_t *begin, const int32_t *end) {
    EACH x.x[i] = t < near[i] || (t >= begin[i] && t < end[i]) ? x.x[i] : -INFINITY;
    return x;
}

static inline vec vec_add_unless(vec x, vec y, int32_t t, const int32_t *own) {
    EACH x.x[i] = t == own[i] ? x.x[i] : x.x[i] + y.x[i];
    return x;
}
#undef EACH

#include "simd_blocks.h"
#include "simd_scan.h"
#include "simd_rotate.h"
#include "simd_divergence.h"

/* ---- codes ---- */

static void dequantize_int8(float *dst, const void *codes, float scale, int64_t n) {
    const int8_t *code = codes;
    for (int64_t i = 0; i < n; i++) dst[i] = scale * (float)code[i];
}

/* The two codes of a byte: flipping the sign bit of a half and taking it off again extends the sign. */
static inline int32_t low_nibble(uint8_t byte) { return ((byte & 15) ^ 8) - 8; }
static inline int32_t high_nibble(uint8_t byte) { return ((byte >> 4) ^ 8) - 8; }

static void dequantize_int4(float *dst, const void *codes, float scale, int64_t n) {
    const uint8_t *code = codes;
    for (int64_t i = 0; i < n / 2; i++) {
        dst[i] = scale * (float)low_nibble(code[i]);
        dst[n / 2 + i] = scale * (float)high_nibble(code[i]);
    }
}

static void code_dots(int32_t *c, int64_t ldc, const int16_t *q, int64_t D, const void *k, int64_t keys, int64_t queries,
                      const void *next) {
    (void)next;
    for (int64_t i = 0; i < queries; i++) {
        for (int64_t j = 0; j < keys; j++) {
            const int8_t *key = (const int8_t *)k + j * D;
            int32_t sum = 0;
            for (int64_t d = 0; d < D; d++) sum += q[i * D + d] * key[d];
            c[i * ldc + j] = sum;
        }
    }
}

static void code_mix_int8(int32_t *y, int64_t D, const int16_t *w, int64_t ldw, const void *v, int64_t keys,
                          int64_t queries, const void *next) {
    (void)next;
    for (int64_t i = 0; i < queries; i++) {
        for (int64_t j = 0; j < keys; j++) {
            const int8_t *value = (const int8_t *)v + j * D;
            const int32_t weight = w[i * ldw + j];
            for (int64_t d = 0; d < D; d++) y[i * D + d] += weight * value[d];
        }
    }
}

static void code_mix_int4(int32_t *y, int64_t D, const int16_t *w, int64_t ldw, const void *v, int64_t keys,
                          int64_t queries, const void *next) {
    (void)next;
    for (int64_t i = 0; i < queries; i++) {
        for (int64_t j = 0; j < keys; j++) {
            const uint8_t *value = (const uint8_t *)v + j * (D / 2);
            const int32_t weight = w[i * ldw + j];
            for (int64_t d = 0; d < D / 2; d++) {
                y[i * D + d] += weight * low_nibble(value[d]);
                y[i * D + D / 2 + d] += weight * high_nibble(value[d]);
            }
        }
    }
}

const kvc_simd kvc_simd_portable = {
    .name = "portable",
    .load = {load_f32, load_bf16, load_f16},
    .store = {store_f32, store_bf16, store_f16},
    .transpose = kvc_portable_transpose,
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
