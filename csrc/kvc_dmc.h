/* Contract of the kernels of DMC (Dynamic Memory Compression) and DMS; part of kvc.h, which is to be included. */
#ifndef KVC_DMC_CONTRACT_H
#define KVC_DMC_CONTRACT_H
#include "kvc.h"
#ifdef __cplusplus
extern "C" {
#endif

/* ---- dmc_gates.c ------------------------------------------------------------------------------------------------ */

/* Decisions of DMC (Dynamic Memory Compression): does a token merge into the entry before it?
 *     y = scale*x - shift + g    tempered = y / temperature    alpha = 1 / (1 + exp(-tempered))    hard = y > margin
 * g = 0; or noise[b,h,t]; or drawn: logistic, with counter (token + t, stream + h, sample + b, offset), each mod 2^32,
 * and key seed (low word first), w the first word of Philox 4x32-10:
 *     g = ln(m) - ln(2^24 - m), m = 2*(w >> 9) + 1 (|g| < 16.7)
 * The same counter gives the same bits of g and of hard on every CPU and on CUDA; stream (layer*heads + first head),
 * sample and token are counted over all devices, so that a shard draws what the whole would.
 * only_hard: tempered = hard ? inf : -inf, alpha = hard. A NaN gives hard 0.
 * x [B, H, T] as a view with D = 1, any strides, any dtype; alpha, hard, tempered, noise float32 [B, H, T] contiguous;
 * noise NULL unless given, and not with drawn.
 * Source: DMC, section 3 and appendix; the logistic noise is the difference of its two Gumbel draws.
 */
typedef struct {
    float *alpha, *hard, *tempered;
    kvc_view x;
    const float *noise;
    int64_t B, H, T, seed, offset, stream, sample, token;
    float shift, temperature, scale, margin;
    int drawn, only_hard;
} kvc_dmc_decisions_args;
kvc_status kvc_dmc_decisions(const kvc_dmc_decisions_args *args, kvc_parallel_for parallel_for);

typedef enum { KVC_MEAN_LOGIT = 0, KVC_MEAN_SIGMOID = 1, KVC_FIRST_HEAD = 2 } kvc_importance;

/* Weight of a token in the average that forms an entry, from the G query heads of its KV head:
 *     omega[b,h,t] = max(y, 2^-40) + eps
 *     MEAN_LOGIT y = sigmoid(mean_g x + shift)    MEAN_SIGMOID y = mean_g sigmoid(x + shift)
 *     FIRST_HEAD y = sigmoid(x of head h*G + shift)
 * x [B, Hq, T] as a view with D = 1, any strides, any dtype; omega float32 [B, Hkv, T] contiguous.
 * Source: DMC, section 3; the floor keeps sums of weights above 0.
 */
typedef struct {
    float *omega;
    kvc_view x;
    int64_t B, Hq, Hkv, T;
    float shift, eps;
    kvc_importance reduce;
} kvc_dmc_importance_args;
kvc_status kvc_dmc_importance(const kvc_dmc_importance_args *args, kvc_parallel_for parallel_for);

/* Bias of key t in DMC's training attention: bias[b,h,t] = ln(1 - alpha[t+1]) = -ln(1 + exp(tempered[b,h,t+1])); 0 for
 * the last token.
 * bias, tempered float32 [B, H, T] contiguous, apart from each other. Source: DMC, appendix H (whose sign is a misprint).
 */
typedef struct {
    float *bias;
    const float *tempered;
    int64_t B, H, T;
} kvc_dmc_mask_args;
kvc_status kvc_dmc_mask(const kvc_dmc_mask_args *args, kvc_parallel_for parallel_for);

/* ---- dmc_accumulate.c, dmc_window.c ----------------------------------------------------------------------------- */

enum {
    KVC_DMC_CHUNK = 64,      /* tokens from one saved state of the scan to the next */
    KVC_DMC_MAX_WINDOW = 64 /* largest window, but for those of T or more, which is no window */
};

/* Partial averages of keys and values, x either of them, with a = alpha, w = omega, per KV head:
 *     z[t] = a[t] z[t-1] + w[t]        out[t] = (a[t] z[t-1] out[t-1] + w[t] x[t]) / z[t]
 * a counts as 0 at token 0 (unless there is an initial state): the token is then out[t]. Coordinate `neuron` of the keys, initial_k included, counts as 0 (-1:
 * none).
 *     window N > 0: out[t] = sum over j = t-N+1 .. t of (a[j+1] ... a[t]) w[j] x[j] / z[t], z[t] the same sum without x
 * k, v, out_k, out_v [B, Hkv, T, D] of one dtype, out may not alias; alpha, omega, z float32 [B, Hkv, T] contiguous,
 * omega > 0. initial_k, initial_v float32 [B, Hkv, D], initial_z [B, Hkv]:
 * out and z before token 0, all three or none; z 0: nothing there. Computed in float32, rounded once.
 * states float32 [B, Hkv, kvc_dmc_chunks(T, window), 2, D]: the state (keys, values) before each chunk, for the
 * backward pass; may be NULL if that count is 0. States older than 2^-40 of the weight may be left out where a long row
 * is cut for several threads; how it is cut depends on the sizes only. scratch: NULL on the CPU, on CUDA
 * kvc_cuda_dmc_accumulate_scratch_bytes.
 * KVC_BAD_SIZE for D < 1 or D > KVC_MAX_HEAD_DIM, a neuron outside -1..D-1, a window above KVC_DMC_MAX_WINDOW that is
 * less than T, or an initial state with a window.
 * Source: DMC, eq 9 (a full history unless window is given; the released models need 12).
 */
typedef struct {
    kvc_view out_k, out_v, k, v;
    float *z, *states;
    const float *alpha, *omega;
    const float *initial_k, *initial_v, *initial_z;
    void *scratch;
    int64_t B, Hkv, T, D, neuron, window;
} kvc_dmc_accumulate_args;
static inline int64_t kvc_dmc_chunks(int64_t T, int64_t window) {
    return T <= 0 || (window > 0 && window < T) ? 0 : (T + KVC_DMC_CHUNK - 1) / KVC_DMC_CHUNK;
}
kvc_status kvc_dmc_accumulate(const kvc_dmc_accumulate_args *args, kvc_parallel_for parallel_for);

/* Gradients of the above; g = gradient of out, over keys and values, b[t] = a[t] z[t-1] / z[t], from the last t:
 *     G[t] = g[t] + b[t+1] G[t+1]      dx[t] = w[t]/z[t] G[t]      db[t] = sum over D, keys and values of G[t] (out[t-1] - x[t])
 *     y[t] = a[t+1] y[t+1] + db[t+1] a[t+1] w[t+1] / z[t+1]^2
 *     dalpha[t] = z[t-1] (y[t] + db[t] w[t] / z[t]^2)      domega[t] = y[t] - db[t] b[t] / z[t]
 * dalpha is 0 where a counts as 0. With a window, and u[t,j] = <g[t], x[j] - out[t]> / z[t]:
 *     dx[j] = sum_t r[t,j] w[j] / z[t] g[t]      domega[j] = sum_t r[t,j] u[t,j]       r[t,j] = a[j+1] ... a[t]
 *     dalpha[m] = sum_t r[t,m] sum_{j<m} r[m-1,j] w[j] u[t,j]
 * forward: the arguments of the forward call, z and states filled by it; out_k, out_v, initial_k, initial_v and its
 * scratch are not read. dout_k, dout_v, dk, dv as k, any strides; dalpha, domega float32 [B, Hkv, T] contiguous. Every element is written; dk is 0 in the
 * neuron's coordinate. An initial state counts as constant.
 * scratch: kvc_dmc_accumulate_backward_scratch_bytes bytes, 64-byte aligned (on CUDA
 * kvc_cuda_dmc_accumulate_backward_scratch_bytes). Same bits for any number of threads.
 */
typedef struct {
    kvc_dmc_accumulate_args forward;
    kvc_view dout_k, dout_v, dk, dv;
    float *dalpha, *domega;
    void *scratch;
} kvc_dmc_accumulate_backward_args;
int64_t kvc_dmc_accumulate_backward_scratch_bytes(const kvc_dmc_accumulate_backward_args *args);
kvc_status kvc_dmc_accumulate_backward(const kvc_dmc_accumulate_backward_args *args, kvc_parallel_for parallel_for);

/* ---- dmc_append.c ----------------------------------------------------------------------------------------------- */

/* DMC's cache at inference: every row r = b*Hkv + h takes its last n_r = counts[r] (0..S; NULL: S) of S new tokens, one
 * after the other. A token whose alpha is above 1/2 joins the row's newest slot; any other (a NaN too), and the first of a
 * row whose length or tail_counts is 0, opens a slot: lengths[r] grows by one, and a page is taken where one begins.
 *     joins: z += w, mean = (z_old mean + w x) / z        opens: z = w, mean = x        x keys and values, w omega
 *     newest slot = (rotated mean of the keys, mean of the values), the keys at the row of the tables that positions
 *     [b*S + s] names for the token s (NULL: s), their coordinate `neuron` 0 before and after (-1: none)
 * Older slots never change. The means are those of kvc_dmc_accumulate with the same decisions.
 *     window N > 0: the mean is over the slot's last N tokens alone.
 * State of each row's newest slot, N = 1 without a window: tail_k, tail_v float32 [R, N, D] (un-rotated means; with a
 * window the last N tokens, token i of the slot at i % N), tail_w float32 [R, N] (z; with a window omega), tail_counts
 * int32 [R], tokens in the slot.
 * rows that store codes: those of the means themselves, as kvc_quantize has them. As a mean is kept in float32 beside the
 * rows, a slot that tokens join is never made of what was rounded before, and its last codes are of its exact mean.
 * k, v [B, Hkv, S, D] of one dtype, that of rows that store numbers; alpha, omega float32 [B, Hkv, S]
 * contiguous, omega > 0; cos, sin float32 [table_rows, rotary_dim/2], as for kvc_rope (rotary_dim 0: no rotation);
 * positions int32 [B, S]. R = B*Hkv. Pages are taken for the rows in order: a copy of the last page if the row writes to
 * it and it is shared, then new ones. scratch int32 [R * (3 + ceil(S / KVC_DMC_PIECE)) + 1].
 * KVC_POOL_FULL if pages run out, KVC_BAD_INDEX if a count, length, page or position is out of range or a row outgrows
 * blocks*P; nothing is changed then. KVC_BAD_SIZE as for kvc_dmc_accumulate; KVC_BAD_FORMAT for rows of numbers of another
 * dtype than k.
 * Source: DMC, algorithm 1, with means for its sums; the window is that of the released models (12).
 */
enum { KVC_DMC_PIECE = 256 }; /* new tokens of a row that the CUDA kernel takes at a time */

typedef struct {
    kvc_page_table table;
    kvc_rows rows;
    kvc_view k, v;
    float *tail_k, *tail_v, *tail_w;
    int32_t *tail_counts;
    const float *alpha, *omega, *cos, *sin;
    const int32_t *positions, *counts;
    int32_t *scratch;
    int64_t B, Hkv, S, D, rotary_dim, table_rows, neuron, window;
} kvc_dmc_append_args;
kvc_status kvc_dmc_append(const kvc_dmc_append_args *args, kvc_parallel_for parallel_for);

#ifdef __cplusplus
}
#endif
#endif
