/* CUDA launchers: the kernels of kvc.h for arrays in device memory.
 *
 * The argument structs and what is computed are those of kvc.h; the struct lies on the host, every array it points to
 * on the device of the stream. A launcher only enqueues work: no allocation, no synchronisation, no host copy. It
 * returns cudaSuccess at once if there is nothing to do, cudaErrorInvalidValue for sizes, dtypes or NULL pointers that
 * kvc.h does not allow (or D > KVC_CUDA_MAX_HEAD_DIM), and otherwise what cudaGetLastError says after the launch.
 *
 * What lies in device arrays cannot be checked without waiting for the device. Where kvc.h returns KVC_BAD_INDEX or
 * KVC_TOO_FEW_SCORES, nothing is ever read or written out of bounds, and:
 *   rope           a position outside the tables gives NaN in the rotated part of its token
 *   window_scores  lengths are clamped to [0, T]; a sequence no longer than W scores 0
 *   select_topk    missing places are -1; lengths are clamped to [0, T]
 *   append_tokens  a call that does not fit, or a count or length out of range: nothing is changed, free_count[1] grows
 *   truncate_rows  lengths are clamped to what the rows hold
 *   compact_pages  as append_tokens where pages run out; a place whose index is no slot of its row is not written
 *   decode         ranges are clamped to the row's capacity; keys on a page outside [0, pages) are not seen, their
 *                  probability is 0; of a row with more keys than columns the first probabilities are written
 *   decode_shared  ranges are clamped to the row's capacity and to columns; values on a page outside [0, pages) count
 *                  nothing
 *   attention      lengths are clamped to [0, T]
 *   dmc_append     as append_tokens; a position outside the tables gives NaN in the rotated part of its key
 * With 16-bit types, decode may let a value that is not finite reach queries of its row that do not see it (0*inf; only
 * with causal), as attention does.
 */
#ifndef KVC_CUDA_H
#define KVC_CUDA_H
#include <cuda_runtime.h>

#include "kvc.h"
#ifdef __cplusplus
extern "C" {
#endif

#define KVC_CUDA_MAX_SIMILARITY_LAYERS 188 /* their rows of 64 keys fill 48 KiB of shared memory */
#define KVC_CUDA_MAX_HEAD_DIM 512 /* window_scores, layer_similarity, decode*, attention, dmc_*; others take any D */

cudaError_t kvc_cuda_rope(const kvc_rope_args *args, cudaStream_t stream);

/* Of queries and keys of one 16-bit type the products run on tensor cores; everything else is float32 arithmetic.
 * Scratch differs from the CPU's, and never holds logits or probabilities: statistics, 8 bytes per query row and split of
 * T (at most 257), and the scores before pooling, 4*B*Hkv*(T - skip_last) bytes, if kernel_size > 1. 64-byte aligned. 0
 * for sizes that the launcher rejects. Without queries nothing is written: scores are the caller's zeros. */
int64_t kvc_cuda_window_scores_scratch_bytes(const kvc_window_scores_args *args);
cudaError_t kvc_cuda_window_scores(const kvc_window_scores_args *args, cudaStream_t stream);

/* Scratch: the queries as float, two floats per row and a double per row and pair of layers; never the probabilities.
 * 64-byte aligned. 0 for sizes that the launcher rejects. */
int64_t kvc_cuda_layer_similarity_scratch_bytes(const kvc_layer_similarity_args *args);
cudaError_t kvc_cuda_layer_similarity(const kvc_layer_similarity_args *args, cudaStream_t stream);

/* The CPU's bits. */
cudaError_t kvc_cuda_quantize(const kvc_quantize_args *args, cudaStream_t stream);
cudaError_t kvc_cuda_dequantize(const kvc_dequantize_args *args, cudaStream_t stream);

cudaError_t kvc_cuda_select_topk(const kvc_select_topk_args *args, cudaStream_t stream);
/* The order of the free list is not fixed where several pages become free. */
cudaError_t kvc_cuda_append_tokens(const kvc_append_tokens_args *args, cudaStream_t stream);
cudaError_t kvc_cuda_truncate_rows(const kvc_truncate_rows_args *args, cudaStream_t stream);
cudaError_t kvc_cuda_compact_pages(const kvc_compact_pages_args *args, cudaStream_t stream);

/* The list of pieces that rows are cut into, and the partial results of as many positions, or of many queries as many
 * sequences, as 64 MiB hold, one at least; from sizes only. Many queries are those of 16-bit types with S > 1, G*S >= 64 and
 * D a multiple of 8 up to 256: their rows are cut by Hkv, G, S, D and capacity, with which last bits may change. 64-byte
 * aligned. 0 for sizes that the launcher rejects. Nothing waits for the host: a call can be captured in a CUDA graph. */
int64_t kvc_cuda_decode_scratch_bytes(const kvc_decode_args *args);
cudaError_t kvc_cuda_decode(const kvc_decode_args *args, cudaStream_t stream);

/* D floats per query head and piece that a row can have, its sums; from sizes only. 64-byte aligned. 0 for sizes that
 * the launcher rejects. Which rows are skipped is decided on the device: nothing waits for the host. */
int64_t kvc_cuda_decode_shared_scratch_bytes(const kvc_decode_shared_args *args);
cudaError_t kvc_cuda_decode_shared(const kvc_decode_shared_args *args, cudaStream_t stream);

/* The rotated queries, int32 [R + 1] and what kvc_cuda_decode takes; from sizes only. 64-byte aligned. 0 for sizes that the
 * launcher rejects. Three launches for a few sequences, four for many; nothing waits for the host. */
int64_t kvc_cuda_paged_step_scratch_bytes(const kvc_paged_step_args *args);
cudaError_t kvc_cuda_paged_step(const kvc_paged_step_args *args, cudaStream_t stream);

/* The same, a score and a number for every page of a row and every chosen one; from sizes only. 64-byte aligned. 0 for sizes
 * that the launcher rejects. Four launches where every page is read, one more to score them, one more for many sequences;
 * nothing waits for the host. */
int64_t kvc_cuda_quest_step_scratch_bytes(const kvc_quest_step_args *args);
cudaError_t kvc_cuda_quest_step(const kvc_quest_step_args *args, cudaStream_t stream);

/* As the CPU's, with the scratch of kvc_cuda_decode and kvc_cuda_decode_shared. 64-byte aligned. 0 for sizes that the
 * launcher rejects. Where one of the tables has no room it stays as it is, and places too; nothing waits for the host. Three
 * launches for a few sequences, four for many; three more with distant keys, four if their probabilities are written; two
 * more with shared probabilities. */
int64_t kvc_cuda_pod_step_scratch_bytes(const kvc_pod_step_args *args);
cudaError_t kvc_cuda_pod_step(const kvc_pod_step_args *args, cudaStream_t stream);
/* The rotated queries, a few numbers per row, and, with further keys, their state; what kvc_cuda_decode takes for each set of
 * keys; from sizes only. 64-byte aligned. 0 for sizes that the launcher rejects. Three launches for a few sequences, four
 * for many, three more with further keys; nothing waits for the host. */
int64_t kvc_cuda_ring_step_scratch_bytes(const kvc_ring_step_args *args);
cudaError_t kvc_cuda_ring_step(const kvc_ring_step_args *args, cudaStream_t stream);

cudaError_t kvc_cuda_merge_states(const kvc_merge_states_args *args, cudaStream_t stream);

cudaError_t kvc_cuda_attention(const kvc_attention_args *args, cudaStream_t stream);

/* One float per query and head: delta. 64-byte aligned. 0 for sizes that the launcher rejects. */
int64_t kvc_cuda_attention_backward_scratch_bytes(const kvc_attention_backward_args *args);
cudaError_t kvc_cuda_attention_backward(const kvc_attention_backward_args *args, cudaStream_t stream);

cudaError_t kvc_cuda_dmc_decisions(const kvc_dmc_decisions_args *args, cudaStream_t stream);
cudaError_t kvc_cuda_dmc_importance(const kvc_dmc_importance_args *args, cudaStream_t stream);
cudaError_t kvc_cuda_dmc_mask(const kvc_dmc_mask_args *args, cudaStream_t stream);

/* How rows are cut and the order of every sum follow from sizes alone: the same call gives the same bits. Scratch: one
 * float per segment of a row; of the backward pass also the sums of each slab of 128 columns, and with a window 2*window
 * floats per gate. 64-byte aligned. 0 for sizes that the launcher rejects. */
int64_t kvc_cuda_dmc_accumulate_scratch_bytes(const kvc_dmc_accumulate_args *args);
cudaError_t kvc_cuda_dmc_accumulate(const kvc_dmc_accumulate_args *args, cudaStream_t stream);
int64_t kvc_cuda_dmc_accumulate_backward_scratch_bytes(const kvc_dmc_accumulate_backward_args *args);
cudaError_t kvc_cuda_dmc_accumulate_backward(const kvc_dmc_accumulate_backward_args *args, cudaStream_t stream);

cudaError_t kvc_cuda_dmc_append(const kvc_dmc_append_args *args, cudaStream_t stream);

/* The rotated queries, gates, notes and what kvc_cuda_decode takes; from sizes only. 64-byte aligned. 0 for sizes that the
 * launcher rejects. Three launches for a few rows, four for many; nothing waits for the host. */
int64_t kvc_cuda_dmc_step_scratch_bytes(const kvc_dmc_step_args *args);
cudaError_t kvc_cuda_dmc_step(const kvc_dmc_step_args *args, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
