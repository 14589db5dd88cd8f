/* One decoded step of a cache whose newest tokens lie in rings: rotate, write and attend in one call. */
#include "formats.h"
#include "page_table.h"
#include "step.h"

#include <string.h>

typedef struct { /* parts of the scratch; those of a kind of cache that it is not are empty */
    int32_t *positions, *far_positions, *zeros; /* [B] each */
    int32_t *begin, *end, *far, *stays, *notes; /* [R] each; notes [R + 1] */
    float *alpha, *unused;                      /* [R]; what else decisions give, [2, R] */
    void *q, *k, *far_q, *far_k;                /* rotated */
    void *left_k, *left_v;                      /* [R, D], what leaves the ring */
    kvc_new_codes codes, ring_codes, far_codes; /* of it; of the new token in its ring, and of its far copy */
    void *out, *lse;                            /* of the further keys */
    void *decode, *decode_far;
    int64_t bytes;
} step_scratch;

typedef struct {
    int64_t slot, end, far; /* of a token, as in kvc.h */
} ring_span;

static ring_span span_of(const kvc_ring_step_args *args, int64_t t) {
    const int64_t sinks = args->sinks, full = sinks + args->window;
    ring_span span = {.slot = t < sinks ? t : sinks + (t - sinks) % args->window, .end = min_of(t + 1, full), .far = 0};
    if (args->chunked) span.end = t % args->window + 1;
    if (sinks && !args->far.keys) span.far = t >= full ? sinks : 0;
    if (sinks && args->far.keys) span.far = min_of(max_of(t + 1 - args->window, 0), sinks);
    return span;
}

static kvc_decode_args near_of(const kvc_ring_step_args *args) {
    return (kvc_decode_args){
        .out = args->out, .lse = args->lse, .rows = args->ring,
        .q = {.dtype = args->q.dtype}, .B = args->B, .Hq = args->Hq, .Hkv = args->Hkv,
        .S = 1, .D = args->D, .P = args->capacity, .pages = args->B * args->Hkv, .scale = args->scale,
        .softcap = args->softcap, .sink_logits = args->sink_logits,
    };
}

/* Attention to the further keys. */
static kvc_decode_args far_of(const kvc_ring_step_args *args) {
    kvc_decode_args decode = near_of(args);
    decode.sink_logits = NULL;
    if (args->table.R) {
        decode.rows = args->rows;
        decode.block_table = args->table.block_table, decode.end = args->table.lengths;
        decode.P = args->table.P, decode.pages = args->table.pages, decode.blocks = args->table.blocks;
    } else if (args->far.keys) {
        decode.rows = args->far, decode.P = args->sinks;
    }
    return decode;
}

static int has_far(const kvc_ring_step_args *args) {
    return args->sinks || args->table.R;
}

static step_scratch scratch_of(const kvc_ring_step_args *args) {
    const kvc_decode_args near = near_of(args), far = far_of(args);
    const int64_t R = args->B * args->Hkv, paged = args->table.R != 0, word = (int64_t)sizeof(int32_t);
    const int64_t q = args->B * args->Hq * args->D * kvc_dtype_bytes(args->q.dtype);
    const int64_t k = R * args->D * kvc_dtype_bytes(args->k.dtype);
    step_scratch scratch = {0};
    int64_t *bytes = &scratch.bytes;
    scratch.positions = kvc_part_of(args->scratch, bytes, args->B * word);
    scratch.far_positions = kvc_part_of(args->scratch, bytes, args->B * word);
    scratch.zeros = kvc_part_of(args->scratch, bytes, args->B * word);
    scratch.begin = kvc_part_of(args->scratch, bytes, R * word);
    scratch.end = kvc_part_of(args->scratch, bytes, R * word);
    scratch.far = kvc_part_of(args->scratch, bytes, R * word);
    scratch.stays = kvc_part_of(args->scratch, bytes, paged ? R * word : 0);
    scratch.notes = kvc_part_of(args->scratch, bytes, paged ? (R + 1) * word : 0);
    scratch.alpha = kvc_part_of(args->scratch, bytes, args->marks ? R * word : 0);
    scratch.unused = kvc_part_of(args->scratch, bytes, args->marks ? 2 * R * word : 0);
    scratch.q = kvc_part_of(args->scratch, bytes, q);
    scratch.k = kvc_part_of(args->scratch, bytes, k);
    scratch.far_q = kvc_part_of(args->scratch, bytes, args->sinks ? q : 0);
    scratch.far_k = kvc_part_of(args->scratch, bytes, args->far.keys ? k : 0);
    scratch.left_k = kvc_part_of(args->scratch, bytes, paged ? k : 0);
    scratch.left_v = kvc_part_of(args->scratch, bytes, paged ? k : 0);
    if (paged) scratch.codes = kvc_new_codes_of(args->scratch, bytes, &args->rows, R, args->D);
    scratch.ring_codes = kvc_new_codes_of(args->scratch, bytes, &args->ring, R, args->D);
    if (args->far.keys) scratch.far_codes = kvc_new_codes_of(args->scratch, bytes, &args->far, R, args->D);
    scratch.decode = kvc_part_of(args->scratch, bytes, kvc_decode_scratch_bytes(&near));
    if (has_far(args)) {
        scratch.out = kvc_part_of(args->scratch, bytes, q);
        scratch.lse = kvc_part_of(args->scratch, bytes, args->B * args->Hq * word);
        scratch.decode_far = kvc_part_of(args->scratch, bytes, kvc_decode_scratch_bytes(&far));
    }
    return scratch;
}

static kvc_status check(const kvc_ring_step_args *args) {
    const kvc_page_table *table = &args->table;
    if (args->B < 0 || args->Hq < 0 || args->Hkv < 0 || args->D < 1 || args->D > KVC_MAX_HEAD_DIM) return KVC_BAD_SIZE;
    if (args->Hkv ? args->Hq % args->Hkv != 0 : args->Hq != 0) return KVC_BAD_SIZE;
    if (args->window < 1 || args->window > INT32_MAX || args->sinks < 0 || args->sinks > INT32_MAX) return KVC_BAD_SIZE;
    if (args->capacity < 0 || args->capacity > args->sinks + args->window) return KVC_BAD_SIZE;
    if (args->sinks + args->window > INT32_MAX) return KVC_BAD_SIZE;
    if ((args->sinks != 0) + (args->chunked != 0) + (table->R != 0) > 1) return KVC_BAD_SIZE;
    if (args->neuron < -1 || args->neuron >= args->D || (args->marks && !args->alpha && args->neuron < 0)) return KVC_BAD_SIZE;
    if (table->R && (table->R != args->B * args->Hkv || table->P < 1 || (table->P & (table->P - 1)) || !args->marks)) {
        return KVC_BAD_SIZE;
    }
    if (args->rotary_dim < 0 || args->rotary_dim > args->D || args->rotary_dim % 2) return KVC_BAD_SIZE;
    if (!scale_is_good(args->scale, args->softcap)) return KVC_BAD_SIZE;
    if (!dtype_known(args->q.dtype) || !dtype_known(args->k.dtype)) return KVC_BAD_DTYPE;
    if (args->v.dtype != args->k.dtype) return KVC_BAD_DTYPE;
    kvc_status status = format_takes(args->ring.format, args->k.dtype, args->D);
    if (status == KVC_OK && table->R) status = format_takes(args->rows.format, args->k.dtype, args->D);
    if (status != KVC_OK) return status;
    if (args->far.keys && args->far.format != args->ring.format) return KVC_BAD_FORMAT;
    if (format_of_codes(args->ring.format) && (table->R || args->neuron >= 0)) return KVC_BAD_FORMAT;
    if (!args->B || !args->Hq) return KVC_OK;
    if (!args->out || !args->lse || !args->q.data || !args->k.data || !args->v.data || !args->places || !args->scratch) {
        return KVC_NULL_POINTER;
    }
    if ((args->capacity && !rows_are_there(&args->ring)) || (args->far.keys && !rows_are_there(&args->far))) {
        return KVC_NULL_POINTER;
    }
    if (table->R && (!table->lengths || (table->pages && !rows_are_there(&args->rows)))) return KVC_NULL_POINTER;
    return KVC_OK;
}

int64_t kvc_ring_step_scratch_bytes(const kvc_ring_step_args *args) {
    return args && check(args) != KVC_BAD_SIZE ? scratch_of(args).bytes : 0;
}

/* One head of every sequence to a dense array: rotated, the neuron 0 before and after. */
static kvc_status turn(const kvc_ring_step_args *args, const kvc_view *x, int64_t H, void *to, const int32_t *positions,
                       kvc_view *out, kvc_parallel_for parallel_for) {
    const int64_t bytes = kvc_dtype_bytes(x->dtype), D = args->D, at = args->neuron * bytes;
    *out = kvc_dense_view(to, x->dtype, H, 1, D);
    for (int64_t i = 0; i < args->B * H; i++) {
        char *head = (char *)to + i * D * bytes;
        memcpy(head, view_at(x, i / H, i % H, 0, 0), (size_t)(D * bytes));
        if (args->neuron >= 0) memset(head + at, 0, (size_t)bytes);
    }
    if (!args->rotary_dim) return KVC_OK;
    const kvc_rope_args rope = {.out = *out, .x = *out, .cos = args->cos, .sin = args->sin, .positions = positions,
                                .B = args->B, .H = H, .T = 1, .D = D, .rotary_dim = args->rotary_dim,
                                .table_rows = args->table_rows};
    const kvc_status status = kvc_rope(&rope, parallel_for);
    for (int64_t i = 0; i < args->B * H && args->neuron >= 0; i++) {
        memset((char *)to + i * D * bytes + at, 0, (size_t)bytes);
    }
    return status;
}

/* Where the tokens of all sequences stand and lie; KVC_BAD_INDEX for one that has no slot. */
static kvc_status place(const kvc_ring_step_args *args, const step_scratch *scratch) {
    for (int64_t b = 0; b < args->B; b++) {
        const int64_t t = args->places[b];
        if (t < 0 || t == INT32_MAX) return KVC_BAD_INDEX;
        const ring_span span = span_of(args, t);
        if (span.end > args->capacity) return KVC_BAD_INDEX;
        const int64_t position = t - (args->base ? args->base[b] : 0);
        scratch->positions[b] = (int32_t)min_of(max_of(position, -1), INT32_MAX);
        scratch->far_positions[b] = (int32_t)(args->far.keys ? args->window : args->sinks + args->window - 1);
        scratch->zeros[b] = 0;
        for (int64_t r = b * args->Hkv; r < (b + 1) * args->Hkv; r++) {
            scratch->begin[r] = scratch->far[r] = (int32_t)span.far;
            scratch->end[r] = (int32_t)span.end;
        }
    }
    return KVC_OK;
}

static kvc_status decide(const kvc_ring_step_args *args, const step_scratch *scratch, kvc_parallel_for parallel_for) {
    const int64_t R = args->B * args->Hkv;
    if (args->alpha) {
        memcpy(scratch->alpha, args->alpha, (size_t)R * sizeof(float));
        return KVC_OK;
    }
    kvc_view neuron = args->k;
    neuron.data = (char *)neuron.data + args->neuron * kvc_dtype_bytes(neuron.dtype);
    const kvc_dmc_decisions_args decisions = {
        .alpha = scratch->unused, .hard = scratch->alpha, .tempered = scratch->unused + R, .x = neuron, .B = args->B,
        .H = args->Hkv, .T = 1, .shift = args->decision_shift, .temperature = 1.0f, .scale = args->decision_scale,
        .margin = args->decision_margin, .only_hard = 1,
    };
    return kvc_dmc_decisions(&decisions, parallel_for);
}

/* Appends to the pages what leaves the ring for them. */
static kvc_status leave(const kvc_ring_step_args *args, const step_scratch *scratch, kvc_parallel_for parallel_for) {
    const int64_t D = args->D, token = D * kvc_dtype_bytes(args->k.dtype);
    for (int64_t r = 0; r < args->table.R; r++) {
        const int64_t t = args->places[r / args->Hkv], from = (r * args->capacity + t % args->window) * token;
        const int64_t says = r * args->capacity + (args->own ? t : t + 1) % args->window;
        scratch->stays[r] = 0;
        if (t < args->window) continue;
        scratch->stays[r] = !(args->window == 1 && !args->own ? scratch->alpha[r] > 0.5f : args->marks[says] != 0);
        memcpy((char *)scratch->left_k + r * token, (const char *)args->ring.keys + from, (size_t)token);
        memcpy((char *)scratch->left_v + r * token, (const char *)args->ring.values + from, (size_t)token);
    }
    const kvc_view k = kvc_dense_view(scratch->left_k, args->k.dtype, args->Hkv, 1, D);
    const kvc_view v = kvc_dense_view(scratch->left_v, args->k.dtype, args->Hkv, 1, D);
    kvc_append_tokens_args append = {
        .table = args->table, .counts = scratch->stays, .scratch = scratch->notes, .heads = args->Hkv, .S = 1,
    };
    const kvc_status status =
        kvc_tokens_to_append(&append, &args->rows, &k, &v, &scratch->codes, args->B, D, parallel_for);
    return status == KVC_OK ? kvc_append_tokens(&append, parallel_for) : status;
}

/* What becomes of the new tokens in rows, whose keys are rotated. */
static kvc_status tokens_of(kvc_append_tokens_args *tokens, const kvc_ring_step_args *args, const kvc_rows *rows, void *keys,
                            const kvc_new_codes *codes, kvc_parallel_for parallel_for) {
    const kvc_view k = kvc_dense_view(keys, args->k.dtype, args->Hkv, 1, args->D);
    *tokens = (kvc_append_tokens_args){.heads = args->Hkv, .S = 1};
    return kvc_tokens_to_append(tokens, rows, &k, &args->v, codes, args->B, args->D, parallel_for);
}

/* That of row r into a slot, counted from the first row's. */
static void put(const kvc_append_tokens_args *tokens, int64_t r, int64_t slot) {
    for (int64_t i = 0; i < tokens->array_count; i++) {
        const kvc_slot_array *x = &tokens->arrays[i];
        const int64_t from = r / tokens->heads * x->stride_b + r % tokens->heads * x->stride_h;
        memcpy((char *)x->pages + slot * x->slot_bytes, (const char *)x->tokens + from, (size_t)x->slot_bytes);
    }
}

/* New tokens into their slots; the sequences have one more then. */
static void write(const kvc_ring_step_args *args, const step_scratch *scratch, const kvc_append_tokens_args *near,
                  const kvc_append_tokens_args *far) {
    for (int64_t r = 0; r < args->B * args->Hkv; r++) {
        const int64_t t = args->places[r / args->Hkv], slot = r * args->capacity + span_of(args, t).slot;
        put(near, r, slot);
        if (args->marks) args->marks[slot] = scratch->alpha[r] > 0.5f && !(args->own && t == 0);
        if (args->far.keys && t < args->sinks) put(far, r, r * args->sinks + t);
    }
    for (int64_t b = 0; b < args->B; b++) args->places[b]++;
}

kvc_status kvc_ring_step(const kvc_ring_step_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    kvc_status status = check(args);
    if (status != KVC_OK || !args->B || !args->Hq) return status;
    const step_scratch scratch = scratch_of(args);
    kvc_decode_args near = near_of(args), far = far_of(args);
    kvc_append_tokens_args near_tokens, far_tokens = {0};
    kvc_view ignored;
    status = place(args, &scratch);
    if (status == KVC_OK) status = turn(args, &args->q, args->Hq, scratch.q, scratch.positions, &near.q, parallel_for);
    if (status == KVC_OK) status = turn(args, &args->k, args->Hkv, scratch.k, scratch.positions, &ignored, parallel_for);
    far.q = near.q;
    if (status == KVC_OK && args->sinks) {
        status = turn(args, &args->q, args->Hq, scratch.far_q, scratch.far_positions, &far.q, parallel_for);
    }
    if (status == KVC_OK) {
        status = tokens_of(&near_tokens, args, &args->ring, scratch.k, &scratch.ring_codes, parallel_for);
    }
    if (status == KVC_OK && args->far.keys) {
        status = turn(args, &args->k, args->Hkv, scratch.far_k, scratch.zeros, &ignored, parallel_for);
        if (status != KVC_OK) return status;
        status = tokens_of(&far_tokens, args, &args->far, scratch.far_k, &scratch.far_codes, parallel_for);
    }
    if (status == KVC_OK && args->marks) status = decide(args, &scratch, parallel_for);
    /* what decode reads: it would refuse too late */
    if (status == KVC_OK && args->table.R) status = check_pages(&args->table, NULL);
    if (status == KVC_OK && args->table.R) status = leave(args, &scratch, parallel_for);
    if (status != KVC_OK) return status;
    write(args, &scratch, &near_tokens, &far_tokens);
    near.begin = scratch.begin, near.end = scratch.end, near.scratch = scratch.decode;
    status = kvc_decode(&near, parallel_for);
    if (status != KVC_OK || !has_far(args)) return status;
    if (!args->table.R) far.end = scratch.far;
    far.out = scratch.out, far.lse = scratch.lse, far.scratch = scratch.decode_far;
    status = kvc_decode(&far, parallel_for);
    if (status != KVC_OK) return status;
    const kvc_merge_states_args merge = {.out = near.out, .lse = near.lse, .out_a = near.out, .out_b = far.out,
                                         .lse_a = near.lse, .lse_b = far.lse, .dtype = args->q.dtype,
                                         .N = args->B * args->Hq, .D = args->D};
    return kvc_merge_states(&merge, parallel_for);
}
