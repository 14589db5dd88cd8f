/* Contract of the kernels: every function that csrc/ offers, its shapes, units, scratch and errors (those of DMC are in
 * kvc_dmc.h, those of whole decoded steps in kvc_step.h, that of IMDC's plan in kvc_plan.h; this file includes all).
 *
 * No Torch, no Python, no allocation, no printing. A kernel is a function of its arguments; the one piece of state is
 * the table of inner loops (simd.h), chosen once from the CPU's features.
 *
 * Dims: B sequences, Hq query heads, Hkv key-value heads, G = Hq/Hkv (query head h reads KV head h/G), S queries,
 * T keys, D head dim, W observation window, R rows (one row: keys or values of one KV head of a sequence), P page size.
 * Sizes and strides are int64_t, strides in elements; the last dimension (D) is always contiguous.
 * Logits: l = scale*<q, k>, scale finite; with a softcap c > 0 (finite; 0: none) they become c*tanh(l/c), before a bias
 * and before what is not seen is left out. sink_logits (float32 [Hq] or NULL): one more column in the softmax of every
 * query of a head, of a key without a value: it adds exp(sink) to the sum and nothing to out, is not scaled and not
 * capped; finite, or -inf: none. KVC_BAD_SIZE for a scale or softcap that is not finite and for a negative softcap.
 * Sums are in float32. Of queries and values of one 16-bit type the CUDA kernels of attention and decode round the weights
 * (exp(x - m), m a maximum so far; backward p and ds) to that type before a product, and nothing else before the result.
 * Arrays with several leading dimensions are described by kvc_view. Indices and lengths in arrays are int32_t.
 * A count of 0 in any dimension is valid unless the function says otherwise: nothing is read, and nothing written unless
 * it says so.
 */
#ifndef KVC_H
#define KVC_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    KVC_OK = 0,
    KVC_NULL_POINTER,      /* an array that must be there is NULL */
    KVC_BAD_SIZE,          /* a size is negative, too large or does not fit the others */
    KVC_BAD_DTYPE,         /* element type is none of kvc_dtype */
    KVC_BAD_INDEX,         /* an index or length in an array is out of range */
    KVC_TOO_FEW_SCORES,    /* a row has fewer candidates that are not NaN than places */
    KVC_BAD_SCHEDULE,      /* there is no such memory schedule */
    KVC_BAD_SIMD,          /* no such table of inner loops, or the CPU cannot run it */
    KVC_POOL_FULL,         /* the free list holds fewer pages than the call needs */
    KVC_BAD_FORMAT         /* the format of stored keys and values is none of kvc_format, or one that the function does not read */
} kvc_status;

/* One English sentence for each status; never NULL. */
const char *kvc_status_message(kvc_status status);

enum { KVC_MAX_HEAD_DIM = 512 }; /* of attention and decode, whose D is at least 1 */

typedef enum { KVC_F32 = 0, KVC_BF16 = 1, KVC_F16 = 2 } kvc_dtype;

/* Bytes per element, 0 for an unknown type. */
int64_t kvc_dtype_bytes(kvc_dtype dtype);

/* Work on [begin, end); called from several threads at once on disjoint ranges. */
typedef void (*kvc_range_fn)(int64_t begin, int64_t end, void *context);

/* How the caller runs ranges in parallel; NULL runs them on the calling thread. Results never depend on how the work is
 * cut: reductions across work items have a fixed order. */
typedef void (*kvc_parallel_for)(int64_t count, int64_t grain, kvc_range_fn fn, void *context);

/* A [B, H, T, D] array of any dtype: element (b, h, t, d) is at data + b*stride_b + h*stride_h + t*stride_t + d. */
typedef struct {
    void *data;
    kvc_dtype dtype;
    int64_t stride_b, stride_h, stride_t;
} kvc_view;

/* What numbers are stored as beside a scale: x = scale * code. */
typedef enum {
    KVC_INT8 = 0, /* -127..127, a byte each */
    KVC_INT4 = 1  /* -7..7: of D codes byte i < D/2 holds code i in its low half, code i + D/2 in its high half; D even */
} kvc_codes;

/* What keys and values are stored as: numbers of a kvc_dtype, which has the same value, or codes. */
typedef enum {
    KVC_FORMAT_F32 = KVC_F32,
    KVC_FORMAT_BF16 = KVC_BF16,
    KVC_FORMAT_F16 = KVC_F16,
    KVC_FORMAT_INT8 = 3, /* keys and values KVC_INT8 */
    KVC_FORMAT_K8V4 = 4  /* keys KVC_INT8, values KVC_INT4 */
} kvc_format;

/* Bytes of one stored key or value of D elements; 0 for an unknown format. */
int64_t kvc_key_bytes(kvc_format format, int64_t D);
int64_t kvc_value_bytes(kvc_format format, int64_t D);

/* Stored keys and values: the one name by which a kernel meets them. keys, values [pages, P, bytes of one], contiguous; of
 * codes each slot has a float16 scale, key_scales, value_scales [pages, P]; NULL of numbers, where they are not read. How
 * many pages there are, of how many slots, and whose they are is said beside. */
typedef struct {
    void *keys, *values;
    void *key_scales, *value_scales;
    kvc_format format;
} kvc_rows;

/* ---- inner loops ------------------------------------------------------------------------------------------------ */

/* Name of the table in use: "portable", "avx2", "avx512" or "avx512_bf16". The first call chooses: the variable KVC_SIMD
 * if it names a table that the CPU can run, else the widest. */
const char *kvc_simd_name(void);

/* Switches the table (tests compare them); KVC_BAD_SIMD leaves it as it was. Not while a kernel runs. */
kvc_status kvc_simd_select(const char *name);

/* ---- rope.c ----------------------------------------------------------------------------------------------------- */

/* out[b,h,t] = x[b,h,t] rotated by the angles of table row p = positions[b*T + t] (NULL: p = t), halves paired as
 * transformers' rotate_half does: for i < rotary_dim/2, with c = cos[p,i], s = sin[p,i] (s = -sin[p,i] if inverse)
 *     out[i] = x[i]*c - x[i + rotary_dim/2]*s        out[i + rotary_dim/2] = x[i + rotary_dim/2]*c + x[i]*s
 * and out[d] = x[d] for d >= rotary_dim. Computed in float32, rounded once. R(a)R(b) = R(a+b): re-rotation from one
 * position to another is a call with the tables of the difference.
 * x, out [B, H, T, D] of one dtype, out may be x itself; cos, sin float32 [table_rows, rotary_dim/2];
 * positions int32 [B, T] or NULL (then T <= table_rows). rotary_dim even, 0..D.
 * KVC_BAD_INDEX if a position is outside the tables (nothing is written then).
 * Source: RoFormer, eq 34; half pairing as in transformers.
 */
typedef struct {
    kvc_view out, x;
    const float *cos, *sin;
    const int32_t *positions;
    int64_t B, H, T, D, rotary_dim, table_rows;
    int inverse;
} kvc_rope_args;
kvc_status kvc_rope(const kvc_rope_args *args, kvc_parallel_for parallel_for);

/* ---- quantize.c ------------------------------------------------------------------------------------------------- */

/* One scale for each vector x[b,h,t] of D elements, and its codes, with m = 127 (KVC_INT8) or 7 (KVC_INT4):
 *     scale = max_d |x_d| / m rounded to float16, and up where m*scale would not reach max_d |x_d|
 *     code_d = x_d / scale rounded to nearest even, within -m..m; 0 where the scale is 0
 * so that |scale*code_d - x_d| <= scale/2. For KVC_INT4 x is turned first, by Hadamard's matrix over the root of its
 * size, in blocks of the largest power of two that divides D: H, its own inverse. A vector with a NaN, an infinity or a
 * maximum that no float16 scale reaches (65504*m) gets the scale NaN and codes 0: what reads it becomes NaN, rather than
 * wrong.
 * x [B, H, T, D] any dtype and strides; codes [B, H, T, bytes of D codes] contiguous, scales float16 [B, H, T] contiguous.
 * The same bits from every table of inner loops. KVC_BAD_SIZE for D < 1 or D > KVC_MAX_HEAD_DIM, odd with KVC_INT4.
 */
typedef struct {
    void *codes, *scales;
    kvc_view x;
    int64_t B, H, T, D;
    kvc_codes kind;
} kvc_quantize_args;
kvc_status kvc_quantize(const kvc_quantize_args *args, kvc_parallel_for parallel_for);

/* x[n] = scales[n] * codes[n], of KVC_INT4 turned back, H (scales[n] * codes[n]); n < N vectors of D elements, rounded
 * once to dtype; x [N, D] contiguous, codes and scales as above. KVC_BAD_SIZE for D < 1 or D > KVC_MAX_HEAD_DIM, odd with KVC_INT4.
 */
typedef struct {
    void *x;
    const void *codes, *scales;
    kvc_dtype dtype;
    int64_t N, D;
    kvc_codes kind;
} kvc_dequantize_args;
kvc_status kvc_dequantize(const kvc_dequantize_args *args, kvc_parallel_for parallel_for);

/* ---- score.c ---------------------------------------------------------------------------------------------------- */

typedef enum { KVC_REDUCE_MEAN = 0, KVC_REDUCE_SUM = 1, KVC_REDUCE_MAX = 2 } kvc_reduce;
typedef enum { KVC_POOL_AVG = 0, KVC_POOL_MAX = 1 } kvc_pool;

/* Attention that the last W queries pay to each key.
 *     N(w)       = { t : mask_first <= t <= T_b - W + w, t < T_b - mask_last }    the keys in the softmax
 *     p[b,h,w,t] = softmax over t in N(w), and the sink of head h, of the logits; 0 for t outside, and where N(w) is empty
 *     s[b,g,t]   = reduce of p over the G query heads of KV head g and the W queries, t < T_b - skip_last
 *     scores     = s pooled over kernel_size neighbours, same length; average: zeros count at the edges (sum /
 *                  kernel_size); maximum: only neighbours that exist. kernel_size odd, 1 = none.
 * T_b = lengths[b] (NULL: T); W <= T_b <= T, skip_last <= T_b, skip_last < T. scores[b,g,t] = 0 for t >= T_b - skip_last.
 * q [B, Hq, W, D] and k [B, Hkv, T, D] rotated, any dtype; scores float32 [B, Hkv, T - skip_last] contiguous.
 * scratch: kvc_window_scores_scratch_bytes bytes, 64-byte aligned: the probabilities of ONE KV head, not of all
 * (on CUDA kvc_cuda_window_scores_scratch_bytes: statistics of rows).
 * A NaN logit makes the scores of its KV head NaN. No query (W or Hq 0): scores 0.
 * Source: SnapKV section 4 (mean, average pooling, skip_last = W); IntelLLM Algorithm 1 (masks, sum); H2O (all queries,
 * sum, skip_last = 0); TOVA (W = 1, skip_last = 0); guided reading (maximum, maximum pooling) is ours.
 */
typedef struct {
    float *scores;
    kvc_view q, k;
    const int32_t *lengths;
    void *scratch;
    int64_t B, Hq, Hkv, W, T, D;
    float scale;
    kvc_reduce reduce;
    kvc_pool pool;
    int64_t kernel_size, skip_last, mask_first, mask_last;
    float softcap;
    const float *sink_logits;
} kvc_window_scores_args;
int64_t kvc_window_scores_scratch_bytes(const kvc_window_scores_args *args);
kvc_status kvc_window_scores(const kvc_window_scores_args *args, kvc_parallel_for parallel_for);

/* ---- similarity.c ----------------------------------------------------------------------------------------------- */

/* How differently layers attend: for the last S queries of one sequence, each over the keys that it sees
 *     N(s)         = { t : sinks <= t <= T - S + s - recent }      (sinks = recent = 0: all up to the query itself)
 *     p[l,h,s,t]   = softmax over t in N(s) of the logits of q[l,h,s] and k[l,h/G,t]
 *     sums[h,a,b]  = sum over s of JS(p[a,h,s], p[b,h,s]),
 *     JS(p, r)     = 1/2 sum_t p*log2(2p/(p+r)) + r*log2(2r/(p+r)), in bits, 0..1, 0 for equal rows
 * Queries with an empty N(s) add nothing: max(0, min(S, T - sinks - recent)) of them count. Sums of several sequences
 * add up. The views' B is L, the layers: q [L, Hq, S, D], k [L, Hkv, T, D] rotated, any dtypes; S <= T; scale >= 0.
 * sums double [Hq, L, L] contiguous, symmetric, 0 on the diagonal.
 * scratch: kvc_layer_similarity_scratch_bytes bytes, 64-byte aligned: row statistics per tile of keys, and the
 * probabilities of a few tiles of one KV head's layers; never those of all keys.
 * A NaN logit makes the sums of its head's pairs with its layer NaN.
 * Source: PoD, section 2.2; base 2, and the divergence itself, not its root.
 */
typedef struct {
    double *sums;
    kvc_view q, k;
    void *scratch;
    int64_t L, Hq, Hkv, S, T, D;
    float scale;
    int64_t sinks, recent;
    float softcap;
} kvc_layer_similarity_args;
int64_t kvc_layer_similarity_scratch_bytes(const kvc_layer_similarity_args *args);
kvc_status kvc_layer_similarity(const kvc_layer_similarity_args *args, kvc_parallel_for parallel_for);

/* ---- select.c --------------------------------------------------------------------------------------------------- */

/* indices[r, 0..k) = places of the k largest of scores[r, 0..length_r), in rising order; ties go to the lower index;
 * NaN is never chosen; +inf and -inf are ordinary values. length_r = lengths[r] (NULL: T), k <= length_r <= T.
 * scores float32 [R, T] contiguous; indices int32 [R, k] contiguous.
 * KVC_TOO_FEW_SCORES if some row has fewer than k values that are not NaN; the indices of the missing places are then
 * -1 (on CUDA, where no status comes back, the -1 is the only sign).
 */
typedef struct {
    int32_t *indices;
    const float *scores;
    const int32_t *lengths;
    int64_t R, T, k;
} kvc_select_topk_args;
kvc_status kvc_select_topk(const kvc_select_topk_args *args, kvc_parallel_for parallel_for);

/* ---- pages.c ---------------------------------------------------------------------------------------------------- */

/* Rows of slots in pages that may be shared. Row r holds the slots t < lengths[r]; slot t lies in page
 * block_table[r*blocks + t/P], place t%P; entries past a row's last page mean nothing. Several rows, of one table or of
 * many over the same pages, may name a page: page_refs[page] counts them. A page that nobody names has 0 and is one of
 * free_pages[0 .. free_count[0]), a stack: pages are taken from its end.
 *     A page with page_refs above 1 when a call begins is never written by it: a row that would write takes a fresh page
 *     and gives up its share of the old one; a page that nobody names any more goes to the free list.
 * All arrays int32: block_table [R, blocks], lengths [R], page_refs [pages], free_pages [pages], free_count [2].
 * free_count[1]: on CUDA, how many calls were refused whole for want of pages or of columns in the table, or because a page
 * that a row would write to, or that is to be taken, does not exist; the CPU returns KVC_POOL_FULL or KVC_BAD_INDEX instead
 * and leaves it alone.
 */
typedef struct {
    int32_t *block_table, *lengths, *page_refs, *free_pages, *free_count;
    int64_t R, blocks, P, pages;
} kvc_page_table;

enum { KVC_MAX_SLOT_ARRAYS = 8 };

/* What a slot holds: one array for keys, one for values, one for anything else that moves with them (positions, scores).
 * pages [pages, P, slot_bytes] contiguous. tokens (read by kvc_append_tokens only): token s of row r = b*heads + h is
 * slot_bytes bytes at tokens + b*stride_b + h*stride_h + s*stride_s, strides in bytes. */
typedef struct {
    void *pages;
    const void *tokens;
    int64_t slot_bytes, stride_b, stride_h, stride_s;
} kvc_slot_array;

/* Appends to every row r its last n_r = counts[r] (0..S; NULL: S) of S new tokens:
 *     slot lengths[r] + i of row r = token S - n_r + i, i < n_r, in every array; then lengths[r] += n_r
 * Pages are taken for the rows in order: a copy of the last page if it is shared and partly filled (its slots are copied
 * in every array), then new ones. tokens alias no page. R a multiple of heads. scratch int32 [R + 1].
 * KVC_POOL_FULL if pages run out, KVC_BAD_INDEX if a count, length or page is out of range or a row outgrows
 * blocks*P; nothing is changed then.
 */
typedef struct {
    kvc_page_table table;
    kvc_slot_array arrays[KVC_MAX_SLOT_ARRAYS];
    const int32_t *counts;
    int32_t *scratch;
    int64_t array_count, heads, S;
} kvc_append_tokens_args;
kvc_status kvc_append_tokens(const kvc_append_tokens_args *args, kvc_parallel_for parallel_for);

/* lengths[r] = new_lengths[r], 0..lengths[r]; pages past it are given up. new_lengths int32 [R].
 * KVC_BAD_INDEX if a length or page is out of range; nothing is changed then.
 */
typedef struct {
    kvc_page_table table;
    const int32_t *new_lengths;
} kvc_truncate_rows_args;
kvc_status kvc_truncate_rows(const kvc_truncate_rows_args *args);

/* Keeps the chosen slots of every row, in every array, and gives up the pages that become empty:
 *     slot j of row r = slot indices[r*K + j], j < kept[r] (NULL: K); then lengths[r] = kept[r]
 * Each row's indices rise strictly within [0, lengths[r]). kept[r] < 0 leaves row r as it is. Pages in which nothing
 * moves stay shared. indices int32 [R, K], kept int32 [R]; scratch int32 [R*blocks + 1].
 * KVC_POOL_FULL if the copies of shared pages do not fit, KVC_BAD_INDEX if an index, length or page is out of range;
 * nothing is changed then.
 */
typedef struct {
    kvc_page_table table;
    kvc_slot_array arrays[KVC_MAX_SLOT_ARRAYS];
    const int32_t *indices, *kept;
    int32_t *scratch;
    int64_t array_count, K;
} kvc_compact_pages_args;
kvc_status kvc_compact_pages(const kvc_compact_pages_args *args, kvc_parallel_for parallel_for);

/* ---- decode.c --------------------------------------------------------------------------------------------------- */

enum { KVC_MIXED = 128 }; /* keys whose weights are integers of one unit */

/* Attention of S queries over rows of pages. Row r = b*Hkv + g holds the keys of KV head g of sequence b: its key
 * t lies at pages[block_table[r*blocks + t/P], t%P]; block_table NULL: at pages[r, t] (contiguous rows, P = capacity).
 * Its value t lies there too, or, with a value_table, in page value_table[r*value_blocks + t/P] of the values.
 * Query s sees keys t in [begin_r, end_r) (causal = 0) or [begin_r, end_r - (S-1-s)) (causal = 1: the row's last S keys
 * are the S new tokens), and of those before begin_r the first `sinks`, t < min(sinks, begin_r). begin NULL: 0.
 *     out[b,h,s] = sum_t softmax_t(x) v_t          lse[b,h,s] = ln sum_t exp(x), x_t the logits and the head's sink
 * A query that sees no key gets out 0, lse -inf (with a sink: lse = sink); so does one whose logits are all -inf. Of
 * segments that are merged one has the sink_logits.
 * q [B, Hq, S, D] any dtype; out [B, Hq, S, D] contiguous, dtype of q; lse float32 [B, Hq, S] contiguous;
 * rows of `pages` pages of P slots, in any format; P a power of two unless block_table is NULL;
 * block_table int32 [R, blocks] (NULL: blocks is not read, pages >= R); begin, end int32 [R]; value_table int32
 * [R, value_blocks], only with a block_table, the values then have value_pages pages (NULL: neither number is read).
 * probabilities (NULL: not wanted; S = 1 alone): float32 [B, Hq, columns], column j of a row's query head becomes
 *     exp(x_t - lse), t = begin_r + j < end_r          columns behind keep what they had
 * scratch: kvc_decode_scratch_bytes bytes (on CUDA kvc_cuda_decode_scratch_bytes), 64-byte aligned: the partial results
 * of the pieces that long rows are cut into, and the list of pieces. Its size depends on the sizes only, not on the
 * arrays' contents. One query's bits depend on its own row only, not on B.
 * Of codes, up to 8 queries of a row (G*S, or all with probabilities) multiply as integers, a key's scale in its logit and
 * a value's in its weight. A query becomes multiples of max_d |q_d| / 32639, so that a logit before softcap is off by
 *     |scale| * max_d |q_d| / 65278 * sum_d |k_d|
 * at most beside the roundings of float32; of KVC_MIXED keys the weights exp(x_t - lse) * value scale become multiples of
 * 1/32767 of the largest w of them (2^-100 at least), which leaves KVC_MIXED * w * m / 65534 at most of out (m = 127 or 7 as
 * in kvc_quantize): 0.2 % of the largest of their values' shares. More queries multiply float32 numbers. On CUDA codes are
 * numbers, and queries of 16 bits have weights times value scales of 8 bits: off by 1/256 of each at most. A scale that is
 * NaN makes NaN of the queries that see its key.
 * KVC_BAD_SIZE for D < 1 or D > KVC_MAX_HEAD_DIM, odd with KVC_FORMAT_K8V4, sinks < 0, or probabilities with S > 1 or sinks;
 * KVC_BAD_INDEX if a row's range leaves [0, blocks*P] or [0, value_blocks*P], a page that it needs is outside [0, pages) or
 * [0, value_pages), or it has more keys than columns.
 */
typedef struct {
    void *out;
    float *lse;
    kvc_view q;
    kvc_rows rows;
    const int32_t *block_table, *begin, *end;
    void *scratch;
    int64_t B, Hq, Hkv, S, D, P, pages, blocks;
    float scale;
    int causal;
    const int32_t *value_table;
    int64_t value_pages, value_blocks;
    float *probabilities;
    int64_t columns, sinks;
    float softcap;
    const float *sink_logits;
} kvc_decode_args;
int64_t kvc_decode_scratch_bytes(const kvc_decode_args *args);
kvc_status kvc_decode(const kvc_decode_args *args, kvc_parallel_for parallel_for);

/* ---- decode_shared.c -------------------------------------------------------------------------------------------- */

/* Joins attention to near keys with attention to distant ones whose probabilities another layer has computed (kvc_decode,
 * probabilities), over the layer's own values. One query per head; row r = b*Hkv + g, head h of KV head g = h/G:
 *     far[h] = sum_j probabilities[b,h,j] * v_t, t = begin_r + j < end_r     gate = 1 / (1 + exp(far_lse - near_lse))
 *     out[b,h] = near[b,h] if skipped[b,h], else gate*near[b,h] + (1 - gate)*far[h]
 *     skipped[b,h] = begin_r < end_r and near_lse - far_lse >= threshold
 * Of a row whose query heads are all skipped no value is read. threshold +inf: none is skipped.
 * near_lse, far_lse -inf: that side is empty (both: out 0). A near side with sink_logits counts the sink as near.
 * near, out [B, Hq, D] contiguous, one dtype; near_lse, far_lse float32 [B, Hq]; probabilities float32,
 * those of head h at + b*stride_b + h*stride_h; skipped uint8 [B, Hq];
 * rows: values [pages, P] of any format, with codes their scales (the keys are not read); block_table int32 [R, blocks],
 * begin, end int32 [R], P a power of two. Codes of 4 bits: far is turned back once.
 * scratch: kvc_decode_shared_scratch_bytes bytes (on CUDA kvc_cuda_decode_shared_scratch_bytes), 64-byte aligned; of the
 * sizes alone. One query's bits depend on its own row only.
 * KVC_BAD_SIZE for D < 1 or D > KVC_MAX_HEAD_DIM, odd with values of 4 bits, or a NaN as threshold;
 * KVC_BAD_FORMAT for an unknown format; KVC_BAD_INDEX if a row's range leaves [0, blocks*P], has more values than columns, or needs a page outside [0, pages). Nothing is written then.
 * Source: PoD, section 2.3, equation 4.
 */
typedef struct {
    void *out;
    uint8_t *skipped;
    const void *near;
    const float *near_lse, *far_lse, *probabilities;
    int64_t stride_b, stride_h, columns;
    kvc_dtype dtype; /* of out and near */
    kvc_rows rows;
    const int32_t *block_table, *begin, *end;
    void *scratch;
    int64_t B, Hq, Hkv, D, P, pages, blocks;
    float threshold;
} kvc_decode_shared_args;
int64_t kvc_decode_shared_scratch_bytes(const kvc_decode_shared_args *args);
kvc_status kvc_decode_shared(const kvc_decode_shared_args *args, kvc_parallel_for parallel_for);

/* Joins attention over two disjoint sets of keys: with m = max(lse_a, lse_b), w_x = exp(lse_x - m),
 *     out = (w_a*out_a + w_b*out_b) / (w_a + w_b)      lse = m + ln(w_a + w_b)
 * A side whose lse is -inf changes nothing; both -inf: out 0, lse -inf.
 * out, out_a, out_b [N, D] contiguous, one dtype, out may be out_a; lse* float32 [N].
 */
typedef struct {
    void *out;
    float *lse;
    const void *out_a, *out_b;
    const float *lse_a, *lse_b;
    kvc_dtype dtype;
    int64_t N, D;
} kvc_merge_states_args;
kvc_status kvc_merge_states(const kvc_merge_states_args *args, kvc_parallel_for parallel_for);

/* ---- attention.c ------------------------------------------------------------------------------------------------ */

/* Flash attention: many queries over contiguous keys, forward and backward, memory linear in S and T.
 * T_b = lengths[b] (NULL: T) keys exist in sequence b; the queries are its last S tokens: query s stands at key position
 * i = T_b - S + s (below 0: a padding query, which sees nothing). It sees key t < T_b if
 *     causal = 0: always
 *     causal = 1, window 0: t <= i
 *     causal = 1, window > 0, complement 0: t <= i and (t < sinks or t > i - window)
 *     causal = 1, window > 0, complement 1: sinks <= t <= i - window: what the line above leaves out of the causal mask
 *     x = logit of q[b,h,s] and k[b,h/G,t] + (key_bias && t != i ? key_bias[b,h/G,t] : 0), or the sink of head h
 *     out[b,h,s] = sum_t softmax_t(x) v[b,h/G,t]          lse[b,h,s] = ln sum_t exp(x)
 * A query that sees no key, or only keys with bias -inf, gets out 0, lse -inf (with a sink: lse = sink; a padding query
 * has none). Where lse is -inf gradients are 0, and no other gradient depends on what q, dout and dlse hold there.
 * q, out [B, Hq, S, D]; k, v [B, Hkv, T, D]; all of one dtype, any strides; lse float32 [B, Hq, S] contiguous; key_bias
 * float32 [B, Hkv, T] contiguous or NULL, finite or -inf; lengths int32 [B], 0..T. S <= T. out aliases nothing.
 * A key or value that is not finite may reach queries that do not see it (0*inf) unless it lies at or past T_b.
 * KVC_BAD_SIZE for D < 1 or D > KVC_MAX_HEAD_DIM, S > T, a negative window or sinks, a window without causal, a complement
 * without a window.
 */
typedef struct {
    kvc_view out, q, k, v;
    float *lse;
    const float *key_bias;
    const int32_t *lengths;
    int64_t B, Hq, Hkv, S, T, D, window, sinks;
    float scale;
    int causal, complement;
    float softcap;
    const float *sink_logits;
} kvc_attention_args;
kvc_status kvc_attention(const kvc_attention_args *args, kvc_parallel_for parallel_for);

/* Gradients of the above. With p = exp(x - lse), dp = <dout, v_t>, delta = <dout, out> - dlse, ds = p*(dp - delta):
 *     dv_t = sum p*dout    dk_t = scale*sum dl*q    dq = scale*sum dl*k_t    dkey_bias_t = sum ds over s with i != t
 *     dl = ds, with a softcap ds*(1 - tanh^2(l/softcap))         dsink_logits[h] = sum over b, s of -exp(sink - lse)*delta
 * sums over the queries of a KV head's G query heads and over keys as above; every element is written.
 * forward: the arguments of the forward call, out and lse filled by it. dout as out; dlse float32 [B, Hq, S] contiguous
 * or NULL (0); dq as q, dk, dv as k (dtype of q, any strides); dkey_bias float32 [B, Hkv, T] contiguous or NULL;
 * dsink_logits float32 [Hq] or NULL, only with sink_logits.
 * scratch: kvc_attention_backward_scratch_bytes bytes (on CUDA kvc_cuda_attention_backward_scratch_bytes), 64-byte
 * aligned. Same bits for any number of threads: reductions have a fixed order.
 */
typedef struct {
    kvc_attention_args forward;
    kvc_view dout, dq, dk, dv;
    const float *dlse;
    float *dkey_bias;
    void *scratch;
    float *dsink_logits;
} kvc_attention_backward_args;
int64_t kvc_attention_backward_scratch_bytes(const kvc_attention_backward_args *args);
kvc_status kvc_attention_backward(const kvc_attention_backward_args *args, kvc_parallel_for parallel_for);

#ifdef __cplusplus
}
#endif
#include "kvc_dmc.h"
#include "kvc_plan.h"
#include "kvc_step.h"
#endif
