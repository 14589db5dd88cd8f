/* Running averages over rows, written once over the vector type of simd_blocks.h, which comes before it.
 *
 * A stripe of columns keeps its state in registers over all rows. Beyond what simd_blocks.h uses, a table's file defines
 * vec_put(dst, i, n, dtype, x), the first n lanes rounded to elements i.. of dst; vec_put_two(dst, i, dtype, x, y), two
 * whole ones; and vec_if(flag, x), x or 0.
 */
#ifndef KVC_SIMD_SCAN_H
#define KVC_SIMD_SCAN_H
#include "simd_blocks.h"

enum { SCAN_COLUMNS = 2 * VEC_COLUMNS };

typedef enum { SCAN_STATES, SCAN_END, SCAN_DIFFERENCES } scan_output;

/* Columns of vecs, in pairs where they are whole. */
BLOCKS_INLINE void put_columns(void *dst, int64_t d, const int columns, int64_t last, const kvc_dtype dtype,
                               const vec *sums) {
#pragma GCC unroll 4
    for (int j = 0; j + 2 <= columns; j += 2) vec_put_two(dst, d + j * VEC_WIDTH, dtype, sums[j], sums[j + 1]);
    if (columns % 2) vec_put(dst, d + (columns - 1) * VEC_WIDTH, last, dtype, sums[columns - 1]);
}

/* Asks for row t of what will be read next (NULL: unknown). */
BLOCKS_INLINE void fetch_row(const char *next, int64_t step, int64_t t, int64_t bytes) {
    for (int64_t i = 0; next && i < bytes; i += LINE) __builtin_prefetch(next + t * step + i, 0, 2);
}

BLOCKS_INLINE void scan_stripe(void *dst, int64_t dst_stride, const char *src, int64_t src_step, const float *keep,
                               const float *add, float *state, int64_t n, const char *next, int64_t next_step,
                               int64_t bytes, int64_t d, const int columns, int64_t last, const scan_output output,
                               const kvc_dtype dtype) {
    vec sums[SCAN_COLUMNS];
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++) {
        sums[j] = last == VEC_WIDTH ? vec_load(state + d + j * VEC_WIDTH) : vec_part(state + d, last);
    }
    char *to = dst;
    const int64_t dst_step = dst_stride * (output == SCAN_DIFFERENCES || dtype == KVC_F32 ? 4 : 2);
    for (int64_t t = 0; t < n; t++, src += src_step) {
        if (d == 0) fetch_row(next, next_step, t, bytes);
        const vec old = vec_set(keep[t]), new = vec_set(add[t]);
        const int kept = keep[t] != 0.0f;
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++) {
            const int64_t i = d + j * VEC_WIDTH;
            const vec x = vec_typed(src, i, last, dtype);
            if (output == SCAN_DIFFERENCES) vec_put(to, i, last, KVC_F32, vec_sub(sums[j], x));
            sums[j] = vec_fma(old, vec_if(kept, sums[j]), vec_mul(new, x));
        }
        if (output == SCAN_STATES) put_columns(to, d, columns, last, dtype, sums);
        if (output != SCAN_END) to += dst_step;
    }
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++) {
        if (last == VEC_WIDTH) vec_store(state + d + j * VEC_WIDTH, sums[j]);
        else vec_store_part(state + d, last, sums[j]);
    }
}

BLOCKS_INLINE void scan_of(void *dst, int64_t dst_stride, const void *src, int64_t src_stride, const float *keep,
                           const float *add, float *state, int64_t n, int64_t D, const void *next,
                           int64_t next_stride, const scan_output output, const kvc_dtype dtype) {
    const int64_t size = dtype == KVC_F32 ? 4 : 2, step = src_stride * size, ahead = next_stride * size;
    int64_t d = 0;
    for (; d + SCAN_COLUMNS * VEC_WIDTH <= D; d += SCAN_COLUMNS * VEC_WIDTH) {
        scan_stripe(dst, dst_stride, src, step, keep, add, state, n, next, ahead, D * size, d, SCAN_COLUMNS, VEC_WIDTH,
                    output, dtype);
    }
    for (; d + VEC_COLUMNS * VEC_WIDTH <= D; d += VEC_COLUMNS * VEC_WIDTH) {
        scan_stripe(dst, dst_stride, src, step, keep, add, state, n, next, ahead, D * size, d, VEC_COLUMNS, VEC_WIDTH,
                    output, dtype);
    }
    for (; d + VEC_WIDTH <= D; d += VEC_WIDTH) {
        scan_stripe(dst, dst_stride, src, step, keep, add, state, n, next, ahead, D * size, d, 1, VEC_WIDTH,
                    output, dtype);
    }
    if (d < D) scan_stripe(dst, dst_stride, src, step, keep, add, state, n, next, ahead, D * size, d, 1, D - d,
                    output, dtype);
}

/* sums: float [n, VEC_WIDTH], the lanes of dots, to be added up by scan_backward_of. */
BLOCKS_INLINE void scan_backward_stripe(char *dst, int64_t dst_step, const char *src, int64_t src_step,
                                        const float *keep, const float *add, const float *with, float *dots,
                                        float *state, int64_t n, int64_t D, const char *next, int64_t next_step,
                                        int64_t bytes, int64_t d, const int columns, int64_t last,
                                        const kvc_dtype dtype) {
    vec sums[SCAN_COLUMNS];
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++) {
        sums[j] = last == VEC_WIDTH ? vec_load(state + d + j * VEC_WIDTH) : vec_part(state + d, last);
    }
    for (int64_t t = n - 1; t >= 0; t--) {
        if (d == 0) fetch_row(next, next_step, n - 1 - t, bytes);
        const vec old = vec_set(keep[t]), new = vec_set(add[t]);
        const int kept = keep[t] != 0.0f;
        vec total[2] = {vec_load(dots + t * VEC_WIDTH), vec_set(0.0f)}; /* two chains of additions side by side */
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++) {
            const int64_t i = d + j * VEC_WIDTH;
            const vec other = last == VEC_WIDTH ? vec_load(with + t * D + i) : vec_part(with + t * D + i, last);
            sums[j] = vec_fma(old, vec_if(kept, sums[j]), vec_typed(src + t * src_step, i, last, dtype));
            total[j % 2] = vec_fma(sums[j], other, total[j % 2]);
        }
        vec scaled[SCAN_COLUMNS]; /* stored behind all loads: their addresses may end alike */
#pragma GCC unroll 8
        for (int j = 0; j < columns; j++) scaled[j] = vec_mul(new, sums[j]);
        put_columns(dst + t * dst_step, d, columns, last, dtype, scaled);
        vec_store(dots + t * VEC_WIDTH, vec_add(total[0], total[1]));
    }
#pragma GCC unroll 8
    for (int j = 0; j < columns; j++) {
        if (last == VEC_WIDTH) vec_store(state + d + j * VEC_WIDTH, sums[j]);
        else vec_store_part(state + d, last, sums[j]);
    }
}

BLOCKS_INLINE void scan_backward_of(void *dst, int64_t dst_stride, const void *src, int64_t src_stride,
                                    const float *keep, const float *add, const float *with, float *dots, float *state,
                                    int64_t n, int64_t D, const void *next, int64_t next_stride,
                                    const kvc_dtype dtype) {
    const int64_t size = dtype == KVC_F32 ? 4 : 2, to_step = dst_stride * size, step = src_stride * size;
    const int64_t ahead = next_stride * size;
    float lanes_of_dots[KVC_SCAN_TOKENS * VEC_WIDTH] = {0};
    int64_t d = 0;
    for (; d + SCAN_COLUMNS * VEC_WIDTH <= D; d += SCAN_COLUMNS * VEC_WIDTH) {
        scan_backward_stripe(dst, to_step, src, step, keep, add, with, lanes_of_dots, state, n, D, next, ahead, D * size,
                             d, SCAN_COLUMNS, VEC_WIDTH, dtype);
    }
    for (; d + VEC_COLUMNS * VEC_WIDTH <= D; d += VEC_COLUMNS * VEC_WIDTH) {
        scan_backward_stripe(dst, to_step, src, step, keep, add, with, lanes_of_dots, state, n, D, next, ahead, D * size,
                             d, VEC_COLUMNS, VEC_WIDTH, dtype);
    }
    for (; d + VEC_WIDTH <= D; d += VEC_WIDTH) {
        scan_backward_stripe(dst, to_step, src, step, keep, add, with, lanes_of_dots, state, n, D, next, ahead, D * size,
                             d, 1, VEC_WIDTH, dtype);
    }
    if (d < D) {
        scan_backward_stripe(dst, to_step, src, step, keep, add, with, lanes_of_dots, state, n, D, next, ahead, D * size,
                             d, 1, D - d, dtype);
    }
    for (int64_t t = 0; t < n; t += VEC_WIDTH) { /* KVC_SCAN_TOKENS is a multiple of VEC_WIDTH */
        vec sums[VEC_WIDTH];
        float found[VEC_WIDTH];
        for (int i = 0; i < VEC_WIDTH; i++) sums[i] = vec_load(lanes_of_dots + (t + i) * VEC_WIDTH);
        vec_store(found, vec_sums(sums));
        for (int64_t i = 0; i < VEC_WIDTH && t + i < n; i++) dots[t + i] += found[i];
    }
}

#define SCAN_FUNCTIONS(name, dtype)                                                                                   \
    static void scan_##name(void *dst, int64_t dst_stride, const void *src, int64_t src_stride, const float *keep,    \
                            const float *add, float *state, int64_t n, int64_t D, const void *next,                   \
                            int64_t next_stride) {                                                                    \
        if (dst) {                                                                                                    \
            scan_of(dst, dst_stride, src, src_stride, keep, add, state, n, D, next, next_stride, SCAN_STATES, dtype); \
        } else {                                                                                                      \
            scan_of(NULL, 0, src, src_stride, keep, add, state, n, D, next, next_stride, SCAN_END, dtype);            \
        }                                                                                                             \
    }                                                                                                                 \
    static void scan_differences_##name(float *dst, const void *src, int64_t src_stride, const float *keep,           \
                                        const float *add, float *state, int64_t n, int64_t D, const void *next,       \
                                        int64_t next_stride) {                                                        \
        scan_of(dst, D, src, src_stride, keep, add, state, n, D, next, next_stride, SCAN_DIFFERENCES, dtype);         \
    }                                                                                                                 \
    static void scan_backward_##name(void *dst, int64_t dst_stride, const void *src, int64_t src_stride,              \
                                     const float *keep, const float *add, const float *with, float *dots,             \
                                     float *state, int64_t n, int64_t D, const void *next, int64_t next_stride) {     \
        scan_backward_of(dst, dst_stride, src, src_stride, keep, add, with, dots, state, n, D, next, next_stride,     \
                         dtype);                                                                                      \
    }
SCAN_FUNCTIONS(f32, KVC_F32)
SCAN_FUNCTIONS(bf16, KVC_BF16)
SCAN_FUNCTIONS(f16, KVC_F16)

#define KVC_SIMD_SCAN                                                                                \
    .scan = {scan_f32, scan_bf16, scan_f16},                                                         \
    .scan_differences = {scan_differences_f32, scan_differences_bf16, scan_differences_f16},         \
    .scan_backward = {scan_backward_f32, scan_backward_bf16, scan_backward_f16}
#endif
