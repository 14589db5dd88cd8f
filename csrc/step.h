/* What the functions that decode a whole step of a layer share: the check of their frame (kvc_step), what attends for them,
 * and how a scratch is divided. The same for the CPU and CUDA. */
#ifndef KVC_STEP_H
#define KVC_STEP_H
#include "checks.h"

#include <stddef.h>

#ifdef __cplusplus
#define KVC_EMPTY {}
#else
#define KVC_EMPTY {0}
#endif

/* The next part of a caller's scratch, of so many bytes, on a cache line of its own; *bytes: of all parts so far. */
static inline void *kvc_part_of(void *scratch, int64_t *bytes, int64_t size) {
    char *part = scratch ? (char *)scratch + *bytes : NULL;
    *bytes += (size + 63) / 64 * 64;
    return part;
}

/* The same of `count` int32. */
static inline int32_t *kvc_ints_of(void *scratch, int64_t *bytes, int64_t count) {
    return (int32_t *)kvc_part_of(scratch, bytes, count * (int64_t)sizeof(int32_t));
}

/* A contiguous [B, H, T, D] array. */
static inline kvc_view kvc_dense_view(void *data, kvc_dtype dtype, int64_t H, int64_t T, int64_t D) {
    const kvc_view view = {data, dtype, H * T * D, T * D, D};
    return view;
}

/* The coordinate `neuron` of a view's vectors, as vectors of D = 1. */
static inline kvc_view kvc_neuron_of(const kvc_view *x, int64_t neuron) {
    kvc_view view = *x;
    view.data = (char *)x->data + neuron * (x->dtype == KVC_F32 ? 4 : 2);
    return view;
}

/* The array of pages that the tokens of a view are appended to. */
static inline kvc_slot_array kvc_slots_of(void *pages, const kvc_view *tokens, int64_t D) {
    const int64_t bytes = tokens->dtype == KVC_F32 ? 4 : 2;
    const kvc_slot_array slots = {pages, tokens->data, D * bytes, tokens->stride_b * bytes, tokens->stride_h * bytes,
                                  tokens->stride_t * bytes};
    return slots;
}

/* ---- the frame ---- */

static inline int kvc_step_is_empty(const kvc_step *step) {
    return !step->B || !step->Hkv || !step->Hq || !step->S;
}

/* Bytes of all queries; of all new keys. */
static inline int64_t kvc_step_query_bytes(const kvc_step *step) {
    return step->B * step->Hq * step->S * step->D * (step->q.dtype == KVC_F32 ? 4 : 2);
}
static inline int64_t kvc_step_key_bytes(const kvc_step *step) {
    return step->B * step->Hkv * step->S * step->D * (step->k.dtype == KVC_F32 ? 4 : 2);
}

/* Sizes, dtypes, formats, then pointers; KVC_OK for empty work too. values: the table of the rows' values, which may be that
 * of their keys; NULL: there are no pages. */
static inline kvc_status kvc_step_check(const kvc_step *step, const kvc_page_table *values) {
    const kvc_page_table *keys = &step->table, *tables[2] = {keys, values};
    if (step->B < 0 || step->Hq < 0 || step->Hkv < 0 || step->S < 0 || step->D < 1) return KVC_BAD_SIZE;
    if (step->D > KVC_MAX_HEAD_DIM || (step->Hkv ? step->Hq % step->Hkv != 0 : step->Hq != 0)) return KVC_BAD_SIZE;
    if (step->rotary_dim < 0 || step->rotary_dim > step->D || step->rotary_dim % 2) return KVC_BAD_SIZE;
    if (step->table_rows < 0 || !scale_is_good(step->scale, step->softcap)) return KVC_BAD_SIZE;
    for (int i = 0; values && i < 2; i++) {
        if (!table_sizes_are_good(tables[i]) || tables[i]->R != step->B * step->Hkv) return KVC_BAD_SIZE;
        if (tables[i]->P != keys->P || (keys->P & (keys->P - 1)) != 0) return KVC_BAD_SIZE;
    }
    if (!dtype_known(step->q.dtype) || !dtype_known(step->k.dtype) || step->v.dtype != step->k.dtype) return KVC_BAD_DTYPE;
    const kvc_rows *rows = &step->rows;
    const kvc_status status = values ? format_takes(rows->format, step->k.dtype, step->D) : KVC_OK;
    if (status != KVC_OK || kvc_step_is_empty(step)) return status;
    if (!step->out || !step->lse || !step->q.data || !step->k.data || !step->v.data || !step->scratch) {
        return KVC_NULL_POINTER;
    }
    if (step->rotary_dim && step->table_rows && (!step->cos || !step->sin)) return KVC_NULL_POINTER;
    if (!values) return KVC_OK;
    if (!table_is_there(keys) || !table_is_there(values)) return KVC_NULL_POINTER;
    if (keys->pages && !array_is_there(rows->format, rows->keys, rows->key_scales)) return KVC_NULL_POINTER;
    if (values->pages && !array_is_there(rows->format, rows->values, rows->value_scales)) return KVC_NULL_POINTER;
    return KVC_OK;
}

/* Whether the scratch of what was checked can be counted: of all but pointers. */
static inline int kvc_step_is_sized(const kvc_step *step, kvc_status checked) {
    return (checked == KVC_OK && !kvc_step_is_empty(step)) || checked == KVC_NULL_POINTER;
}

/* Attention of the queries, which lie turned and contiguous there, to all that the rows hold. */
static inline kvc_decode_args kvc_step_decode(const kvc_step *step, void *turned) {
    const kvc_page_table *table = &step->table;
    kvc_decode_args decode = KVC_EMPTY;
    decode.out = step->out, decode.lse = step->lse, decode.rows = step->rows;
    decode.q = kvc_dense_view(turned, step->q.dtype, step->Hq, step->S, step->D);
    decode.block_table = table->block_table, decode.end = table->lengths;
    decode.B = step->B, decode.Hq = step->Hq, decode.Hkv = step->Hkv, decode.S = step->S, decode.D = step->D;
    decode.P = table->P, decode.pages = table->pages, decode.blocks = table->blocks;
    decode.scale = step->scale, decode.softcap = step->softcap, decode.sink_logits = step->sink_logits;
    return decode;
}

/* What two of them have found, joined to the step's own results. */
static inline kvc_merge_states_args kvc_step_merge(const kvc_step *step, const kvc_decode_args *a, const kvc_decode_args *b) {
    kvc_merge_states_args merge = KVC_EMPTY;
    merge.out = step->out, merge.out_a = a->out, merge.out_b = b->out;
    merge.lse = step->lse, merge.lse_a = a->lse, merge.lse_b = b->lse;
    merge.dtype = step->q.dtype, merge.N = step->B * step->Hq, merge.D = step->D;
    return merge;
}

/* ---- step.c: the CPU's ---- */

/* positions [B] = places + sign * offsets (NULL: 0), those outside int32 at its end or -1; KVC_BAD_INDEX for places that no
 * token can have. */
kvc_status kvc_step_positions(const kvc_step *step, const int32_t *places, const int32_t *offsets, int sign,
                              int32_t *positions);

/* Queries, or keys, at positions [B, S]: rotated to contiguous ones at `to`, coordinate `neuron` (-1: none) 0 before and
 * after. *turned: what they are then; they themselves where nothing turns. */
kvc_status kvc_step_turn(const kvc_step *step, int keys, int64_t neuron, const int32_t *positions, void *to,
                         kvc_view *turned, kvc_parallel_for parallel_for);
#endif
