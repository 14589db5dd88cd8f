/* Contract of the kernels that decode a whole step of a layer; part of kvc.h, which is to be included. */
#ifndef KVC_STEP_CONTRACT_H
#define KVC_STEP_CONTRACT_H
#include "kvc.h"
#include "kvc_dmc.h"
#ifdef __cplusplus
extern "C" {
#endif

/* Of all of them: where a CUDA kernel finds that pages or columns run out, or that a page of a row does not exist, nothing is
 * changed, free_count[1] of each table grows by one, and attention is over the rows as they were, without the keys on pages
 * that are not there. Other indices it clamps; a position outside the tables gives NaN. */

/* What all of them have: S new tokens of every sequence are rotated, stored and attended from.
 * q [B, Hq, S, D], k, v [B, Hkv, S, D] un-rotated; q any dtype, k and v of one, that of rows that store numbers. Rows of
 * codes store kvc_quantize of the rotated keys and of the values. table: of rows, R = B*Hkv, P a power of two, as in
 * kvc_append_tokens. cos, sin float32 [table_rows, rotary_dim/2] (rotary_dim 0: no rotation), as in kvc_rope.
 * out, lse, scale, softcap, sink_logits as in kvc_decode.
 * scratch: kvc_<function>_scratch_bytes bytes (on CUDA kvc_cuda_<function>_scratch_bytes), 64-byte aligned.
 * The bits are those of the functions named, in turn. KVC_BAD_FORMAT for rows of numbers of another dtype than k;
 * KVC_BAD_INDEX for a position outside the tables or a page that does not exist of a row, and with KVC_POOL_FULL as in
 * kvc_append_tokens; nothing is changed then.
 * Of all but kvc_paged_step S = 1. places int32 [B], where they are: the tokens that each sequence has had, and therefore
 * where the new one stands; each grows by one. */
typedef struct {
    void *out;
    float *lse;
    kvc_view q, k, v;
    kvc_rows rows;
    kvc_page_table table;
    const float *cos, *sin;
    void *scratch;
    int64_t B, Hq, Hkv, S, D, rotary_dim, table_rows;
    float scale, softcap;
    const float *sink_logits;
} kvc_step;

/* ---- paged_step.c ------------------------------------------------------------------------------------------------ */

/* One step of a cache that keeps its tokens:
 *     p[b,s] = lengths[b*Hkv] + shift[b*Hkv] + s          position of token s (shift NULL: 0); lengths of before the call
 *     rows   = rows of before and the S keys, rotated to p as kvc_rope does, with their values, as kvc_append_tokens does
 *     out, lse = kvc_decode of q, rotated to p, over the rows, begin_r <= t (NULL: 0), causal
 * shift, begin int32 [R].
 * KVC_BAD_INDEX for a begin past its row too; pages before begin_r are not looked at.
 */
typedef struct {
    kvc_step step;
    const int32_t *shift, *begin;
} kvc_paged_step_args;
int64_t kvc_paged_step_scratch_bytes(const kvc_paged_step_args *args);
kvc_status kvc_paged_step(const kvc_paged_step_args *args, kvc_parallel_for parallel_for);

/* ---- quest_step.c ------------------------------------------------------------------------------------------------ */

/* One step of a cache that keeps its tokens, whose query reads only the pages that may matter to it. The token is rotated
 * and appended as kvc_paged_step does. Then, with n_r the length of row r and N_r = ceil(n_r/P) its pages:
 *     ranges[r, i] = (M, -m): the largest of page i's rotated keys, and of the negated ones, per dimension, as they are
 *         stored: of codes what kvc_dequantize makes of them in k's dtype. Those of page N_r - 1 are joined with the new
 *         key, which begins them in the page's first slot; the others are read
 *     score[r, i] = max over the row's query heads of sum_d max(q_d, 0)*M_d + max(-q_d, 0)*(-m_d), +inf instead of NaN
 *     chosen[r] = page N_r - 1 and the count - 1 others of highest score as kvc_select_topk has them, in rising order;
 *         count = min(pages_read, N_r); -1 behind them
 *     out, lse = kvc_decode of q over the slots of those pages
 * held: the new token is in the rows, and its key in the ranges; q is rotated, rotary_dim 0; of k and v the dtype is read
 * alone, that of the ranges.
 * ranges [R, range_pages, 2*D] contiguous in k's dtype, range_pages >= table.blocks; chosen int32 [R, width], width =
 * min(pages_read, table.blocks); pages_read >= 1. Scores are float32 sums of what is stored.
 * KVC_BAD_INDEX and KVC_POOL_FULL whichever pages are chosen.
 * Source: Quest, section 3.
 */
typedef struct {
    kvc_step step;
    void *ranges;
    int32_t *chosen;
    int64_t range_pages, pages_read;
    int held;
} kvc_quest_step_args;
int64_t kvc_quest_step_scratch_bytes(const kvc_quest_step_args *args);
kvc_status kvc_quest_step(const kvc_quest_step_args *args, kvc_parallel_for parallel_for);

/* ---- dmc_step.c ------------------------------------------------------------------------------------------------- */

/* One step of DMC's cache:
 *     alpha, omega: as given, or where they are NULL
 *         alpha = hard of kvc_dmc_decisions of k's neuron (decision_*)
 *         omega = kvc_dmc_importance of q's neuron (omega_*, reduce)
 *     kvc_dmc_append at the positions places[b] + offsets[b] (NULL: 0)
 *     out, lse = kvc_decode of q over the rows, q rotated to the same positions, its neuron 0 before and after
 * tail_*, alpha, omega, window as in kvc_dmc_append; neuron 0..D-1; offsets int32 [B].
 * KVC_POOL_FULL and KVC_BAD_INDEX as in kvc_dmc_append.
 */
typedef struct {
    kvc_step step;
    float *tail_k, *tail_v, *tail_w;
    int32_t *tail_counts, *places;
    const int32_t *offsets;
    const float *alpha, *omega;
    int64_t neuron, window;
    float decision_shift, decision_margin, omega_shift, omega_eps;
    kvc_importance reduce;
} kvc_dmc_step_args;
int64_t kvc_dmc_step_scratch_bytes(const kvc_dmc_step_args *args);
kvc_status kvc_dmc_step(const kvc_dmc_step_args *args, kvc_parallel_for parallel_for);

/* ---- pod_step.c -------------------------------------------------------------------------------------------------- */

typedef enum {
    KVC_FAR_NONE = 0, /* out and lse are those of near keys */
    KVC_FAR_OWN,      /* the layer leads: its own keys; probabilities, if not NULL, and far_lse are written for followers */
    KVC_FAR_LED,      /* the queries and keys of the layer that leads, the layer's own values */
    KVC_FAR_SHARED    /* probabilities and far_lse that the lead has written, the layer's own values */
} kvc_far;

/* One step of a layer of PoD. Keys and values have tables of their own over pages of P slots, `table` and `values`, row
 * r = b*Hkv + g of both. With n_k, n_v the rows' lengths once the token is there:
 *     turned = q and the key rotated to places[b], as kvc_rope does; both tables grow by one slot, as kvc_append_tokens does
 *     near = kvc_decode of turned over the keys max(n_k - recent, 0) <= t < n_k and the first `sinks` before those; the
 *         value of a key in page i of its row lies in page i of the values' row if i < first, else in page i + moved[r]
 *         (NULL: 0)
 *     the far range: min(sinks, n_v) <= t < max(n_v - recent, that), in the tables of the values and of the keys that are
 *         read
 *     OWN, LED: near joined with kvc_decode over the far range (kvc_merge_states; sink_logits count as near)
 *     SHARED: kvc_decode_shared of near and the far range's values; `skipped` is written, lse is not
 * rows: keys over the pages of `table`, values over those of `values`; lead_keys, lead_key_scales as rows has them; turned
 * [B, Hq, D] contiguous, dtype of q; far_lse float32 [B, Hq]; probabilities float32, those of head h at + b*stride_b +
 * h*stride_h (OWN: contiguous [B, Hq, columns]); lead_q [B, Hq, 1, D] rotated, dtype of q; lead_table int32
 * [R, lead_blocks]; moved int32 [R]; skipped uint8 [B, Hq]; the rest as in the functions named.
 * KVC_BAD_INDEX for a `moved` that leads out of the row of values, distant keys past the row or its lead's, and too few
 * columns too. The tables share nothing.
 * Source: PoD, sections 2.2 and 2.3.
 */
typedef struct {
    kvc_step step;
    void *turned;
    kvc_page_table values;
    int32_t *places;
    const int32_t *moved;
    int64_t sinks, recent, first;
    kvc_far far;
    float *probabilities, *far_lse;
    int64_t stride_b, stride_h, columns;
    kvc_view lead_q;
    const void *lead_keys, *lead_key_scales;
    const int32_t *lead_table;
    int64_t lead_pages, lead_blocks;
    uint8_t *skipped;
    float threshold;
} kvc_pod_step_args;
int64_t kvc_pod_step_scratch_bytes(const kvc_pod_step_args *args);
kvc_status kvc_pod_step(const kvc_pod_step_args *args, kvc_parallel_for parallel_for);

/* ---- ring_step.c ------------------------------------------------------------------------------------------------- */

/* One step of a cache whose newest tokens lie in rings. With t = places[b] and full = sinks + window:
 *     slot(t) = t < sinks ? t : sinks + (t - sinks) % window          where token t lies in its rows of ring
 *     p       = t - base[b] (base NULL: 0)                            position of its query and key
 *     ring [r, slot(t)] = key, rotated to p as kvc_rope does, and value
 *     out, lse = kvc_decode of q, rotated to p, over slots far_b <= j < end_b of the ring
 *         end_b = min(t + 1, full); chunked: t % window + 1 (a chunk begins in slot 0)
 * Further keys, whose attention is merged as kvc_merge_states does, and which do not count the sink_logits:
 *     sinks > 0, far.keys NULL: the ring's slots j < far_b; the query stands at full - 1; far_b = t >= full ? sinks : 0
 *     sinks > 0, with far (pages of `sinks` slots): slots j < far_b of these; the query stands at window; far_b =
 *         min(max(t + 1 - window, 0), sinks). Before, token t < sinks is written there at t, its key rotated to position 0
 *     table.R > 0 (sinks = 0): all slots of the row's pages, the query at p. Before, token t - window leaves the ring:
 *         where t >= window and its successor (own: it itself) is not marked, it is appended as kvc_append_tokens does;
 *         own: a sequence's first token never is
 * marks uint8 [R, capacity] (NULL: none; pages need them): marks[r, slot(t)] = alpha[r] > 1/2, alpha NULL: hard of
 * kvc_dmc_decisions of k's neuron (decision_*). neuron: coordinate of q and k that is 0 before and after rotation, -1: none.
 * All arrays that store numbers are of k's dtype; ring, far: page r, of `capacity` slots and of `sinks`, is row r of
 * R = B*Hkv, both of one format; end_b <= capacity <= full; base int32 [B]; alpha float32 [R]; table.R 0: no pages, rows and
 * the rest of table are not read. Codes of a token that leaves the ring for pages are made as those of a new one; a ring of
 * codes comes with neither pages nor a neuron.
 * KVC_BAD_SIZE for two of sinks, chunked and pages, pages without marks, marks without alpha or neuron; KVC_BAD_FORMAT for a
 * ring of codes with pages or a neuron too, or a far of another format; KVC_BAD_INDEX for a place that is negative or
 * INT32_MAX or has no slot too.
 * Source: StreamingLLM, section 3.2; LM-Infinite, section 4; DMS.
 */
typedef struct {
    kvc_step step;
    kvc_rows ring, far;
    int32_t *places;
    const int32_t *base;
    uint8_t *marks;
    const float *alpha;
    int64_t capacity, window, sinks, neuron;
    int chunked, own;
    float decision_scale, decision_shift, decision_margin;
} kvc_ring_step_args;
int64_t kvc_ring_step_scratch_bytes(const kvc_ring_step_args *args);
kvc_status kvc_ring_step(const kvc_ring_step_args *args, kvc_parallel_for parallel_for);

#ifdef __cplusplus
}
#endif
#endif
