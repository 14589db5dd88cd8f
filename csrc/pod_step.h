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
    const kvc_page_table *keys = &args->keys, *values = &args->values;
    kvc_decode_args near = KVC_EMPTY;
    near.out = args->far == KVC_FAR_NONE ? args->out : parts->near_out;
    near.lse = args->far == KVC_FAR_NONE ? args->lse : parts->near_lse;
    near.q = kvc_dense_view(args->turned, args->q.dtype, args->Hq, 1, args->D);
    near.rows = args->rows;
    near.block_table = keys->block_table, near.begin = parts->begin, near.end = keys->lengths;
    near.scratch = parts->near_decode;
    near.B = args->B, near.Hq = args->Hq, near.Hkv = args->Hkv, near.S = 1, near.D = args->D;
    near.P = keys->P, near.pages = keys->pages, near.blocks = keys->blocks;
    near.scale = args->scale, near.softcap = args->softcap, near.sink_logits = args->sink_logits;
    near.value_table = parts->near_table, near.value_pages = values->pages, near.value_blocks = keys->blocks;
    near.sinks = args->sinks;
    return near;
}

/* OWN and LED. */
static inline kvc_decode_args kvc_pod_far(const kvc_pod_step_args *args, const kvc_pod_parts *parts) {
    const int own = args->far == KVC_FAR_OWN;
    const kvc_page_table *values = &args->values;
    kvc_decode_args far = kvc_pod_near(args, parts);
    far.out = parts->far_out, far.lse = own ? args->far_lse : parts->own_lse;
    if (!own) {
        far.q = args->lead_q;
        far.rows.keys = (void *)(uintptr_t)args->lead_keys, far.rows.key_scales = (void *)(uintptr_t)args->lead_key_scales;
    }
    far.block_table = own ? args->keys.block_table : args->lead_table;
    far.pages = own ? args->keys.pages : args->lead_pages;
    far.blocks = own ? args->keys.blocks : args->lead_blocks;
    far.begin = parts->far_begin, far.end = parts->far_end, far.scratch = parts->far_decode;
    far.value_table = values->block_table, far.value_blocks = values->blocks;
    far.sinks = 0, far.sink_logits = NULL;
    far.probabilities = own ? args->probabilities : NULL, far.columns = own ? args->columns : 0;
    return far;
}

static inline kvc_decode_shared_args kvc_pod_shared(const kvc_pod_step_args *args, const kvc_pod_parts *parts) {
    const kvc_page_table *values = &args->values;
    kvc_decode_shared_args shared = KVC_EMPTY;
    shared.out = args->out, shared.skipped = args->skipped, shared.near = parts->near_out;
    shared.near_lse = parts->near_lse, shared.far_lse = args->far_lse, shared.probabilities = args->probabilities;
    shared.stride_b = args->stride_b, shared.stride_h = args->stride_h, shared.columns = args->columns;
    shared.dtype = args->q.dtype, shared.rows = args->rows;
    shared.block_table = values->block_table, shared.begin = parts->far_begin, shared.end = parts->far_end;
    shared.scratch = parts->far_decode;
    shared.B = args->B, shared.Hq = args->Hq, shared.Hkv = args->Hkv, shared.D = args->D;
    shared.P = values->P, shared.pages = values->pages, shared.blocks = values->blocks;
    shared.threshold = args->threshold;
    return shared;
}

static inline kvc_merge_states_args kvc_pod_merge(const kvc_pod_step_args *args, const kvc_pod_parts *parts) {
    kvc_merge_states_args merge = KVC_EMPTY;
    merge.out = args->out, merge.lse = args->lse, merge.out_a = parts->near_out, merge.out_b = parts->far_out;
    merge.lse_a = parts->near_lse, merge.lse_b = args->far == KVC_FAR_OWN ? args->far_lse : parts->own_lse;
    merge.dtype = args->q.dtype, merge.N = args->B * args->Hq, merge.D = args->D;
    return merge;
}

/* The append of the keys, or of the values; rows of numbers. */
static inline kvc_append_tokens_args kvc_pod_append(const kvc_pod_step_args *args, const kvc_pod_parts *parts, int values) {
    const kvc_view k = kvc_dense_view(parts->k, args->k.dtype, args->Hkv, 1, args->D);
    kvc_append_tokens_args append = KVC_EMPTY;
    append.table = values ? args->values : args->keys;
    append.arrays[0] = values ? kvc_slots_of(args->rows.values, &args->v, args->D) : kvc_slots_of(args->rows.keys, &k, args->D);
    append.scratch = parts->copied + (values ? append.table.R + 1 : 0), append.array_count = 1, append.heads = args->Hkv, append.S = 1;
    return append;
}

/* Queries, or keys, at their places. */
static inline kvc_rope_args kvc_pod_rope(const kvc_pod_step_args *args, const kvc_pod_parts *parts, int keys) {
    const int64_t H = keys ? args->Hkv : args->Hq;
    kvc_rope_args rope = KVC_EMPTY;
    rope.x = keys ? args->k : args->q;
    rope.out = kvc_dense_view(keys ? parts->k : args->turned, rope.x.dtype, H, 1, args->D);
    rope.cos = args->cos, rope.sin = args->sin, rope.positions = parts->positions;
    rope.B = args->B, rope.H = H, rope.T = 1, rope.D = args->D;
    rope.rotary_dim = args->rotary_dim, rope.table_rows = args->table_rows;
    return rope;
}

static inline int kvc_pod_sizes_are_good(const kvc_pod_step_args *args) {
    const kvc_page_table *keys = &args->keys, *values = &args->values;
    if (args->B < 0 || args->Hq < 0 || args->Hkv < 0 || args->D < 1 || args->D > KVC_MAX_HEAD_DIM) return 0;
    const int64_t R = args->B * args->Hkv;
    if (args->Hkv ? args->Hq % args->Hkv != 0 : args->Hq != 0) return 0;
    if (keys->R != R || values->R != R || keys->P < 1 || keys->P != values->P || (keys->P & (keys->P - 1)) != 0) return 0;
    if (args->rotary_dim < 0 || args->rotary_dim > args->D || args->rotary_dim % 2 || args->table_rows < 0) return 0;
    if (args->sinks < 0 || args->recent < 1 || args->first < 0 || args->columns < 0) return 0;
    if (args->lead_blocks < 0 || args->lead_pages < 0) return 0;
    if (args->far < KVC_FAR_NONE || args->far > KVC_FAR_SHARED || keys->blocks < 0 || values->blocks < 0) return 0;
    return args->threshold == args->threshold;
}

/* near_bytes, far_bytes: scratch of kvc_decode for near keys, and of what serves the far ones. */
static inline kvc_pod_parts kvc_pod_parts_of(const kvc_pod_step_args *args, int64_t near_bytes, int64_t far_bytes) {
    const int64_t R = args->B * args->Hkv, ints = (int64_t)sizeof(int32_t), heads = args->B * args->Hq;
    const int64_t element = args->q.dtype == KVC_F32 ? 4 : 2, cached = args->k.dtype == KVC_F32 ? 4 : 2;
    kvc_pod_parts parts = KVC_EMPTY;
    void *scratch = args->scratch;
    parts.positions = (int32_t *)kvc_part_of(scratch, &parts.bytes, args->B * ints);
    parts.copied = (int32_t *)kvc_part_of(scratch, &parts.bytes, 2 * (R + 1) * ints);
    parts.begin = (int32_t *)kvc_part_of(scratch, &parts.bytes, R * ints);
    parts.far_begin = (int32_t *)kvc_part_of(scratch, &parts.bytes, R * ints);
    parts.far_end = (int32_t *)kvc_part_of(scratch, &parts.bytes, R * ints);
    parts.near_table = (int32_t *)kvc_part_of(scratch, &parts.bytes, R * args->keys.blocks * ints);
    parts.k = kvc_part_of(scratch, &parts.bytes, R * args->D * cached);
    parts.near_out = kvc_part_of(scratch, &parts.bytes, heads * args->D * element);
    parts.far_out = kvc_part_of(scratch, &parts.bytes, heads * args->D * element);
    parts.near_lse = (float *)kvc_part_of(scratch, &parts.bytes, heads * (int64_t)sizeof(float));
    parts.own_lse = (float *)kvc_part_of(scratch, &parts.bytes, heads * (int64_t)sizeof(float));
    parts.near_decode = kvc_part_of(scratch, &parts.bytes, near_bytes);
    parts.far_decode = kvc_part_of(scratch, &parts.bytes, far_bytes);
    return parts;
}
#endif
