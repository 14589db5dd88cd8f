/* The inner loops of the kernels, one table per instruction set.
 *
 * simd_portable.c is complete and is the reference; the others compute the same formulas with fused multiply-add, so
 * sums differ in the last bits. Conversions give the same bits in every table.
 * A function here touches only the elements that its comment names; n = 0 touches none. Arrays need not be aligned.
 */
#ifndef KVC_SIMD_H
#define KVC_SIMD_H
#include "kvc.h"

enum { KVC_MOST_WORD = 127 * 256 + 127 }; /* of a query: two signed bytes */
enum { KVC_AHEAD = 8192 }; /* bytes between what is read and what is fetched from memory meanwhile */

enum {
    KVC_TILE = 64,      /* keys or queries per tile: one row of logits is four AVX-512 registers */
    KVC_TILE_ROWS = 6,  /* rows of logits in registers at once: 6*4 accumulators + 4 of keys + 1 query of 32 */
    KVC_TILE_DEPTH = 128, /* head dims per packed key tile: 32 KiB, so that it stays in the first-level cache */
    KVC_SCAN_TOKENS = 64 /* most tokens of one call of scan_backward */
};

/* KVC_TILE queries side by side, and the keys that each sees: t < near, or begin <= t < end. own: its own key. */
typedef struct {
    int32_t near[KVC_TILE], begin[KVC_TILE], end[KVC_TILE], own[KVC_TILE];
} kvc_lanes;

typedef struct {
    const char *name;

    /* dst[i] = src[i] as float32, i < n; indexed by kvc_dtype. */
    void (*load[3])(float *dst, const void *src, int64_t n);

    /* dst[i] = src[i] rounded to nearest even, NaN kept, i < n; indexed by kvc_dtype. */
    void (*store[3])(void *dst, const float *src, int64_t n);

    /* (dst[i], dst[half + i]) = (x*c - y*s, y*c + x*s), i < half, where x, y = src[i], src[half + i], c = cosines[i],
     * s = sign*sines[i]; in float32, rounded once; dst may be src. Both of the dtype that indexes the table. */
    void (*rotate[3])(void *dst, const void *src, const float *cosines, const float *sines, float sign, int64_t half);

    /* dst[d*KVC_TILE + j] = src[j*stride + d] for j < keys, 0 for keys <= j < KVC_TILE; d < depth. */
    void (*transpose)(float *dst, const float *src, int64_t stride, int64_t keys, int64_t depth);

    /* c[i*ldc + j] = sum_d a[i*a_row + d*a_col] * b[d*ldb + j], i < rows, j < columns, d < depth in rising order; if
     * accumulate, that sum is made first and then added to c. c overlaps neither a nor b. */
    void (*gemm)(float *c, int64_t ldc, const float *a, int64_t a_row, int64_t a_col, const float *b, int64_t ldb,
                 int64_t rows, int64_t columns, int64_t depth, int accumulate);

    /* c[i*ldc + j] = sum_d q[i*D + d] * k[j*D + d], k of the dtype that indexes the table; i < queries, j < keys. A dot
     * product's bits depend on its query and key only. next: what will be read after k, or, where k is of less than
     * KVC_AHEAD bytes, so many after its first; NULL if unknown; a hint. */
    void (*dots[3])(float *c, int64_t ldc, const float *q, int64_t D, const void *k, int64_t keys, int64_t queries,
                    const void *next);

    /* y[i*D + d] += sum_j w[i*ldw + j] * v[j*D + d], v of the dtype that indexes the table, j in rising order; i <
     * queries, j < keys, d < D. */
    void (*mix[3])(float *y, int64_t D, const float *w, int64_t ldw, const void *v, int64_t keys, int64_t queries,
                   const void *next);

    /* Codes (kvc_codes), and integers of 16 bits in place of floats: the same bits in every table.
     * largest: the largest |x[i]|, i < n; NaN is above all. 0 for n = 0.
     * quantize: codes[i] = x[i] / scale rounded to nearest even, within -most..most, i < n; scale > 0 and finite, no NaN.
     * dequantize: dst[i] = scale * code i of n; indexed by kvc_codes.
     * code_dots: as dots of integers, k KVC_INT8; |q| <= KVC_MOST_WORD, D <= KVC_MAX_HEAD_DIM.
     * code_mix: as mix of integers, v indexed by kvc_codes; 0 <= w < 2^15, keys <= KVC_MIXED.
     * code_logits: x[i] = c[i] * scales[i], c what code_dots left where x is, i < n.
     * code_weights: of each KVC_MIXED of x[i] * scales[i] >= 0, i < n, a unit, 1/32767 of the largest or of 2^-100, NaN where
     *     one is not finite, and in words how many units each is, rounded to nearest even; words[i] = 0 for n <= i < width and
     *     up to a multiple of KVC_MIXED.
     * code_sums: y[i] += scale * x[i], i < n. */
    float (*largest)(const float *x, int64_t n);
    void (*quantize)(int16_t *codes, const float *x, float scale, float most, int64_t n);
    void (*dequantize[2])(float *dst, const void *codes, float scale, int64_t n);
    void (*code_dots)(int32_t *c, int64_t ldc, const int16_t *q, int64_t D, const void *k, int64_t keys, int64_t queries,
                      const void *next);
    void (*code_mix[2])(int32_t *y, int64_t D, const int16_t *w, int64_t ldw, const void *v, int64_t keys, int64_t queries,
                        const void *next);
    void (*code_logits)(void *x, const float *scales, int64_t n);
    void (*code_weights)(int16_t *words, float *units, const float *x, const float *scales, int64_t n, int64_t width);
    void (*code_sums)(float *y, const int32_t *x, float scale, int64_t n);

    /* Blocks [keys, KVC_TILE] whose columns are lanes, one query each: row i is key t + i.
     * hide: x = -inf where the lane does not see the key.   bias: x += bias[i] where the key is not the lane's own.
     * softmax: joins the logits x into the running maximum and norm of each lane: with m = the larger of max and the
     *     column's largest (0 instead of -inf), factor = exp(max - m), x = exp(x - m), norm = norm*factor + sum of x.
     * exp: x = exp(x - base), 0 where base is +inf.         gradient: y = p*(y - delta).
     * total: total[i] += sum of row i over the lanes whose own key it is not. */
    void (*lanes_hide)(float *x, int64_t keys, int32_t t, const kvc_lanes *lanes);
    void (*lanes_bias)(float *x, int64_t keys, int32_t t, const float *bias, const kvc_lanes *lanes);
    void (*lanes_softmax)(float *x, int64_t keys, float *max, float *norm, float *factor);
    void (*lanes_exp)(float *x, int64_t keys, const float *base);
    void (*lanes_gradient)(float *y, const float *p, int64_t keys, const float *delta);
    void (*lanes_total)(float *total, const float *x, int64_t keys, int32_t t, const kvc_lanes *lanes);

    /* x[i] = cap*tanh(scale*x[i] / cap), i < n, saturated for any size, NaN stays; slope[i] (NULL: not wanted) =
     * 1 - tanh^2, 0 for NaN. */
    void (*softcap)(float *x, int64_t n, float scale, float cap, float *slope);

    /* y[i] *= x[i], i < n. */
    void (*multiply)(float *y, const float *x, int64_t n);

    /* For each of `rows` rows x + r*stride: x[i] = exp(scale*x[i] - m) for i < n, 0 for n <= i < width; max[r] = m =
     * the largest scale*x[i] (-inf if none), sum[r] = sum of x. All -inf: x = 0. A NaN, or a +inf, gives sum NaN. */
    void (*softmax)(float *x, int64_t rows, int64_t stride, int64_t n, int64_t width, float scale, float *max,
                    float *sum);

    /* out[i] = exp(a[i] - b[i]) for a <= b, i < n; out may be a or b. */
    void (*exp_difference)(float *out, const float *a, const float *b, int64_t n);

    /* y[c] += sum_r weights[r] * x[r*stride + c], r < rows in rising order, c < n. */
    void (*weighted_sum)(float *y, const float *weights, const float *x, int64_t stride, int64_t rows, int64_t n);

    /* y[c] = max(y[c], max_r weights[r] * x[r*stride + c]), r < rows, c < n; no NaN among them. */
    void (*weighted_max)(float *y, const float *weights, const float *x, int64_t stride, int64_t rows, int64_t n);

    /* Rows of KVC_TILE probabilities over the same keys: sums[i] += Jensen-Shannon divergence of p and row r + i*KVC_TILE,
     * in bits, i < rows. Equal rows add 0 exactly. The same bits in every table. */
    void (*divergence)(double *sums, const float *p, const float *r, int64_t rows);

    /* Running averages over rows of D elements of the dtype that indexes the tables, strides in elements, d < D; a keep
     * of 0 drops the state whatever it holds.
     * scan: for t = 0..n-1: state[d] = keep[t]*state[d] + add[t]*src[t*src_stride + d], and that rounded is
     *     dst[t*dst_stride + d] (dst NULL: the state alone).
     * scan_differences: the same states; dst[t*D + d] = state before t - src[t*src_stride + d], not rounded.
     * scan_backward: for t = n-1..0, n <= KVC_SCAN_TOKENS: state[d] = keep[t]*state[d] + src[t*src_stride + d], rounded
     *     dst[t*dst_stride + d] = add[t]*state[d], dots[t] += sum_d state[d]*with[t*D + d].
     * next: rows next_stride apart that will be read after these, as many and of the same dtype; NULL if unknown. */
    void (*scan[3])(void *dst, int64_t dst_stride, const void *src, int64_t src_stride, const float *keep,
                    const float *add, float *state, int64_t n, int64_t D, const void *next, int64_t next_stride);
    void (*scan_differences[3])(float *dst, const void *src, int64_t src_stride, const float *keep, const float *add,
                                float *state, int64_t n, int64_t D, const void *next, int64_t next_stride);
    void (*scan_backward[3])(void *dst, int64_t dst_stride, const void *src, int64_t src_stride, const float *keep,
                             const float *add, const float *with, float *dots, float *state, int64_t n, int64_t D,
                             const void *next, int64_t next_stride);
} kvc_simd;

/* The table in use. */
const kvc_simd *kvc_simd_table(void);

extern const kvc_simd kvc_simd_portable;
#if defined(__x86_64__)
extern const kvc_simd kvc_simd_avx2;
extern const kvc_simd kvc_simd_avx512;
extern const kvc_simd kvc_simd_avx512_bf16; /* avx512 with products of pairs: bfloat16, and VNNI's int16 */
#endif

/* exp(x) = 2^k * exp(r), k = round(x / ln 2), |r| <= ln(2)/2; ln 2 split so that k*hi is exact; polynomial of Cephes'
 * expf, within 1 ulp or so. Below KVC_EXP_LOWEST the result rounds to 0. */
#define KVC_EXP_LOWEST (-104.0f)
#define KVC_LOG2E 1.44269504088896341f
#define KVC_LN2_HI 0.693359375f
#define KVC_LN2_LO (-2.12194440e-4f)
#define KVC_EXP_P0 1.9875691500e-4f
#define KVC_EXP_P1 1.3981999507e-3f
#define KVC_EXP_P2 8.3334519073e-3f
#define KVC_EXP_P3 4.1665795894e-2f
#define KVC_EXP_P4 1.6666665459e-1f
#define KVC_EXP_P5 5.0000001201e-1f

/* tanh(x) below KVC_TANH_SMALL: x + x^3 * polynomial of x^2, Cephes' tanhf; above it 1 - 2e/(1 + e), e = exp(-2|x|). */
#define KVC_TANH_SMALL 0.625f
#define KVC_TANH_P0 (-5.70498872745e-3f)
#define KVC_TANH_P1 2.06390887954e-2f
#define KVC_TANH_P2 (-5.37397155531e-2f)
#define KVC_TANH_P3 1.33314422036e-1f
#define KVC_TANH_P4 (-3.33332819422e-1f)

/* Defined once here, so that each instruction set's file can finish the last few elements with the reference. */
void kvc_portable_transpose(float *dst, const float *src, int64_t stride, int64_t keys, int64_t depth);
#endif
