/* Rotation of a row's pairs, written once over the vector type of simd_blocks.h and the stores of simd_scan.h, which come
 * before it. */
#ifndef KVC_SIMD_ROTATE_H
#define KVC_SIMD_ROTATE_H
#include "simd_scan.h"

BLOCKS_INLINE void rotate_of(void *dst, const void *src, const float *cosines, const float *sines, float sign, int64_t half,
                             const kvc_dtype dtype) {
    const vec signs = vec_set(sign), against = vec_set(-sign);
    int64_t i = 0;
    for (; i + VEC_WIDTH <= half; i += VEC_WIDTH) {
        const vec x = vec_typed(src, i, VEC_WIDTH, dtype), y = vec_typed(src, half + i, VEC_WIDTH, dtype);
        const vec c = vec_load(cosines + i), s = vec_load(sines + i);
        vec_put(dst, i, VEC_WIDTH, dtype, vec_fma(x, c, vec_mul(y, vec_mul(against, s))));
        vec_put(dst, half + i, VEC_WIDTH, dtype, vec_fma(y, c, vec_mul(x, vec_mul(signs, s))));
    }
    if (i < half) {
        const int64_t last = half - i;
        const vec x = vec_typed(src, i, last, dtype), y = vec_typed(src, half + i, last, dtype);
        const vec c = vec_part(cosines + i, last), s = vec_part(sines + i, last);
        vec_put(dst, i, last, dtype, vec_fma(x, c, vec_mul(y, vec_mul(against, s))));
        vec_put(dst, half + i, last, dtype, vec_fma(y, c, vec_mul(x, vec_mul(signs, s))));
    }
}

static void rotate_f32(void *dst, const void *src, const float *cosines, const float *sines, float sign, int64_t half) {
    rotate_of(dst, src, cosines, sines, sign, half, KVC_F32);
}
static void rotate_bf16(void *dst, const void *src, const float *cosines, const float *sines, float sign, int64_t half) {
    rotate_of(dst, src, cosines, sines, sign, half, KVC_BF16);
}
static void rotate_f16(void *dst, const void *src, const float *cosines, const float *sines, float sign, int64_t half) {
    rotate_of(dst, src, cosines, sines, sign, half, KVC_F16);
}

#define KVC_SIMD_ROTATE .rotate = {rotate_f32, rotate_bf16, rotate_f16}
#endif
