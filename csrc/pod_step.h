/* What one step of a layer of PoD is in terms of the functions that it stands for: their arguments and its scratch. The
 * same for the CPU and CUDA. */
#ifndef KVC_POD_STEP_H
#define KVC_POD_STEP_H
#include "step.h"

/* Parts of the scratch. copied int32 [2, R + 1], of keys and values; begin, far_begin, far_end int32 [R]; near_table int32
 * [R, blocks of the keys]. */
typedef struct {
    int32_t *positions, *copied, *begin, *far_begin, *far_end, *near_table;
    void *k, *far_out, *near_out, *near_decode, *far_decode;
    float *near_lse, *own_lse;
    int64_t bytes;
} kvc_pod_parts;

static inline kvc_decode_args kvc_pod_near(const kvc_pod_step_args *args, const kvc_pod_parts *parts) {
    const int alone = args->far == KVC_FAR_NONE;
    kvc_decode_args near = kvc_step_decode(&args->step, args->turned);
    near.out = alone ? args->step.out : parts->near_out, near.lse = alone ? args->step.lse : parts->near_lse;
    near.begin = parts->begin, near.scratch = parts->near_decode, near.sinks = args->sinks;
    near.value_table = parts->near_table, near.value_pages = args->values.pages, near.value_blocks = near.blocks;
    return near;
}

/* OWN and LED. */
static inline kvc_decode_args kvc_pod_far(const kvc_pod_step_args *args, const kvc_pod_parts *parts) {
    kvc_decode_args far = kvc_step_decode(&args->step, args->turned);
    far.out = parts->far_out, far.lse = parts->own_lse;
    if (args->far == KVC_FAR_OWN) {
        far.lse = args->far_lse, far.probabilities = args->probabilities, far.columns = args->columns;
    } else {
        far.q = args->lead_q, far.block_table = args->lead_table;
        far.rows.keys = (void *)(uintptr_t)args->lead_keys, far.rows.key_scales = (void *)(uintptr_t)args->lead_key_scales;
        far.pages = args->lead_pages, far.blocks = args->lead_blocks;
    }
    far.begin = parts->far_begin, far.end = parts->far_end, far.scratch = parts->far_decode, far.sink_logits = NULL;
    far.value_table = args->values.block_table, far.value_blocks = args->values.blocks, far.value_pages = args->values.pages;
    return far;
}

static inline kvc_decode_shared_args kvc_pod_shared(const kvc_pod_step_args *args, const kvc_pod_parts *parts) {
    const kvc_step *step = &args->step;
    const kvc_page_table *values = &args->values;
    kvc_decode_shared_args shared = KVC_EMPTY;
    shared.out = step->out, shared.skipped = args->skipped, shared.near = parts->near_out;
    shared.near_lse = parts->near_lse, shared.far_lse = args->far_lse, shared.probabilities = args->probabilities;
    shared.stride_b = args->stride_b, shared.stride_h = args->stride_h, shared.columns = args->columns;
    shared.dtype = step->q.dtype, shared.rows = step->rows;
    shared.block_table = values->block_table, shared.begin = parts->far_begin, shared.end = parts->far_end;
    shared.scratch = parts->far_decode;
    shared.B = step->B, shared.Hq = step->Hq, shared.Hkv = step->Hkv, shared.D = step->D;
    shared.P = values->P, shared.pages = values->pages, shared.blocks = values->blocks;
    shared.threshold = args->threshold;
    return shared;
}

static inline kvc_status kvc_pod_check(const kvc_pod_step_args *args) {
    const kvc_step *step = &args->step;
    if (args->sinks < 0 || args->recent < 1 || args->first < 0 || args->columns < 0 || step->S != 1) return KVC_BAD_SIZE;
    if (args->lead_blocks < 0 || args->lead_pages < 0 || args->threshold != args->threshold) return KVC_BAD_SIZE;
    if (args->far < KVC_FAR_NONE || args->far > KVC_FAR_SHARED) return KVC_BAD_SIZE;
    if (args->far == KVC_FAR_LED && !dtype_known(args->lead_q.dtype)) return KVC_BAD_DTYPE;
    const kvc_status status = kvc_step_check(step, &args->values);
    if (status != KVC_OK || kvc_step_is_empty(step)) return status;
    const int keys = !args->lead_pages || array_is_there(step->rows.format, args->lead_keys, args->lead_key_scales);
    int there = args->turned && args->places;
    if (args->far == KVC_FAR_LED) there = there && args->lead_q.data && args->lead_table && keys;
    if (args->far == KVC_FAR_OWN) there = there && args->far_lse;
    if (args->far == KVC_FAR_SHARED) there = there && args->far_lse && args->skipped && (!args->columns || args->probabilities);
    return there ? KVC_OK : KVC_NULL_POINTER;
}

/* near_bytes, far_bytes: scratch of kvc_decode for near keys, and of what serves the far ones. */
static inline kvc_pod_parts kvc_pod_parts_of(const kvc_pod_step_args *args, int64_t near_bytes, int64_t far_bytes) {
    const kvc_step *step = &args->step;
    const int64_t R = step->B * step->Hkv, q = kvc_step_query_bytes(step), lse = step->B * step->Hq * (int64_t)sizeof(float);
    kvc_pod_parts parts = KVC_EMPTY;
    void *all = step->scratch;
    parts.positions = kvc_ints_of(all, &parts.bytes, step->B);
    parts.copied = kvc_ints_of(all, &parts.bytes, 2 * (R + 1));
    parts.begin = kvc_ints_of(all, &parts.bytes, R);
    parts.far_begin = kvc_ints_of(all, &parts.bytes, R);
    parts.far_end = kvc_ints_of(all, &parts.bytes, R);
    parts.near_table = kvc_ints_of(all, &parts.bytes, R * step->table.blocks);
    parts.k = kvc_part_of(all, &parts.bytes, kvc_step_key_bytes(step));
    parts.near_out = kvc_part_of(all, &parts.bytes, q);
    parts.far_out = kvc_part_of(all, &parts.bytes, q);
    parts.near_lse = (float *)kvc_part_of(all, &parts.bytes, lse);
    parts.own_lse = (float *)kvc_part_of(all, &parts.bytes, lse);
    parts.near_decode = kvc_part_of(all, &parts.bytes, near_bytes);
    parts.far_decode = kvc_part_of(all, &parts.bytes, far_bytes);
    return parts;
}

/* The append of keys, or of values, to the tables; their arrays are left to the caller. */
static inline kvc_append_tokens_args kvc_pod_append(const kvc_pod_step_args *args, const kvc_pod_parts *parts, int values) {
    kvc_append_tokens_args append = KVC_EMPTY;
    append.table = values ? args->values : args->step.table, append.heads = args->step.Hkv, append.S = 1;
    append.scratch = parts->copied + (values ? append.table.R + 1 : 0);
    return append;
}
#endif
