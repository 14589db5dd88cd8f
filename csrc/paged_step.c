/* One decoded step of a cache that keeps its tokens: rotate, append and attend in one call.
 *
 * The kernels of the three do the work; what this saves is two passes through the caller for each layer and token.
 */
#include "paged_step.h"

static kvc_decode_args decode_of(const kvc_paged_step_args *args) {
    const kvc_page_table *table = &args->table;
    return (kvc_decode_args){
        .out = args->out, .lse = args->lse, .q = args->q, .rows = args->rows, .block_table = table->block_table,
        .begin = args->begin, .end = table->lengths,
        .B = args->B, .Hq = args->Hq, .Hkv = args->Hkv, .S = args->S, .D = args->D, .P = table->P,
        .pages = table->pages, .blocks = table->blocks, .scale = args->scale, .causal = 1,
        .softcap = args->softcap, .sink_logits = args->sink_logits,
    };
}

kvc_placing kvc_placing_of(const kvc_paged_step_args *args, int64_t *bytes) {
    const int64_t q = args->B * args->Hq * args->S * args->D * kvc_dtype_bytes(args->q.dtype);
    const int64_t k = args->B * args->Hkv * args->S * args->D * kvc_dtype_bytes(args->k.dtype);
    kvc_placing placing = {0};
    placing.positions = kvc_part_of(args->scratch, bytes, args->B * args->S * (int64_t)sizeof(int32_t));
    placing.copied = kvc_part_of(args->scratch, bytes, (args->table.R + 1) * (int64_t)sizeof(int32_t));
    placing.q = kvc_part_of(args->scratch, bytes, q);
    placing.k = kvc_part_of(args->scratch, bytes, k);
    placing.codes = kvc_new_codes_of(args->scratch, bytes, &args->rows, args->B * args->Hkv * args->S, args->D);
    return placing;
}

kvc_status kvc_paged_step_check(const kvc_paged_step_args *args) {
    const kvc_page_table *table = &args->table;
    if (args->B < 0 || args->Hq < 0 || args->Hkv < 0 || args->S < 0 || args->D < 1) return KVC_BAD_SIZE;
    if (args->D > KVC_MAX_HEAD_DIM || table->R != args->B * args->Hkv) return KVC_BAD_SIZE;
    if (!table_sizes_are_good(table) || args->table_rows < 0) return KVC_BAD_SIZE;
    if ((table->P & (table->P - 1)) != 0 || !scale_is_good(args->scale, args->softcap)) return KVC_BAD_SIZE;
    if (args->Hkv ? args->Hq % args->Hkv != 0 : args->Hq != 0) return KVC_BAD_SIZE;
    if (args->rotary_dim < 0 || args->rotary_dim > args->D || args->rotary_dim % 2) return KVC_BAD_SIZE;
    if (!dtype_known(args->q.dtype) || !dtype_known(args->k.dtype)) return KVC_BAD_DTYPE;
    if (args->v.dtype != args->k.dtype) return KVC_BAD_DTYPE;
    const kvc_status status = format_takes(args->rows.format, args->k.dtype, args->D);
    if (status != KVC_OK) return status;
    if (!table->R || !args->Hq || !args->S) return KVC_OK;
    if (!args->out || !args->lse || !args->q.data || !args->k.data || !args->v.data || !args->scratch ||
        !table->lengths || (table->pages && !rows_are_there(&args->rows))) {
        return KVC_NULL_POINTER;
    }
    return KVC_OK;
}

kvc_status kvc_paged_step_place(const kvc_paged_step_args *args, const kvc_placing *placing, kvc_view *turned,
                                kvc_parallel_for parallel_for) {
    const int64_t B = args->B, S = args->S, D = args->D, Hkv = args->Hkv;
    kvc_view k = args->k;
    *turned = args->q;
    if (args->rotary_dim) {
        for (int64_t i = 0; i < B * S; i++) {
            const int64_t row = i / S * Hkv, place = args->table.lengths[row] + i % S;
            const int64_t position = place + (args->shift ? args->shift[row] : 0);
            placing->positions[i] = (int32_t)min_of(max_of(position, -1), INT32_MAX);
        }
        kvc_rope_args rope = {.out = kvc_dense_view(placing->q, args->q.dtype, args->Hq, S, D), .x = args->q,
                              .cos = args->cos, .sin = args->sin, .positions = placing->positions, .B = B,
                              .H = args->Hq, .T = S, .D = D, .rotary_dim = args->rotary_dim,
                              .table_rows = args->table_rows};
        kvc_status status = kvc_rope(&rope, parallel_for);
        if (status != KVC_OK) return status;
        *turned = rope.out;
        rope.x = args->k;
        rope.H = Hkv;
        rope.out = kvc_dense_view(placing->k, args->k.dtype, Hkv, S, D);
        status = kvc_rope(&rope, parallel_for);
        if (status != KVC_OK) return status;
        k = rope.out;
    }
    kvc_append_tokens_args append = {.table = args->table, .scratch = placing->copied, .heads = Hkv, .S = S};
    const kvc_status status =
        kvc_tokens_to_append(&append, &args->rows, &k, &args->v, &placing->codes, B, D, parallel_for);
    if (status != KVC_OK) return status;
    return kvc_append_tokens(&append, parallel_for);
}

int64_t kvc_paged_step_scratch_bytes(const kvc_paged_step_args *args) {
    if (!args || kvc_paged_step_check(args) == KVC_BAD_SIZE) return 0;
    const kvc_decode_args decode = decode_of(args);
    int64_t bytes = 0;
    kvc_placing_of(args, &bytes);
    kvc_part_of(NULL, &bytes, kvc_decode_scratch_bytes(&decode));
    return bytes;
}

kvc_status kvc_paged_step(const kvc_paged_step_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    kvc_status status = kvc_paged_step_check(args);
    if (status != KVC_OK || !args->table.R || !args->Hq || !args->S) return status;
    for (int64_t r = 0; args->begin && r < args->table.R; r++) {
        if (args->begin[r] < 0 || args->begin[r] > args->table.lengths[r] + args->S) return KVC_BAD_INDEX;
    }
    status = check_pages(&args->table, args->begin); /* what decode reads: it would refuse too late */
    if (status != KVC_OK) return status;
    int64_t bytes = 0;
    const kvc_placing placing = kvc_placing_of(args, &bytes);
    kvc_decode_args decode = decode_of(args);
    status = kvc_paged_step_place(args, &placing, &decode.q, parallel_for);
    if (status != KVC_OK) return status;
    decode.scratch = kvc_part_of(args->scratch, &bytes, kvc_decode_scratch_bytes(&decode));
    return kvc_decode(&decode, parallel_for);
}
