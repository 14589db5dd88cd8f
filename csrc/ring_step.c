/* One decoded step of a cache whose newest tokens lie in rings: rotate, write and attend in one call. */
#include "formats.h"
#include "page_table.h"
#include "ring_step.h"

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

static step_scratch scratch_of(const kvc_ring_step_args *args) {
    const kvc_step *step = &args->step;
    const kvc_decode_args near = kvc_ring_near(args, NULL), far = kvc_ring_far(args, NULL);
    const int64_t R = step->B * step->Hkv, D = step->D, word = (int64_t)sizeof(float);
    const int64_t q = kvc_step_query_bytes(step), k = kvc_step_key_bytes(step);
    const int paged = step->table.R != 0, marked = args->marks != NULL, apart = args->far.keys != NULL;
    step_scratch scratch = {0};
    void *all = step->scratch;
    int64_t *bytes = &scratch.bytes;
    scratch.positions = kvc_ints_of(all, bytes, step->B);
    scratch.far_positions = kvc_ints_of(all, bytes, step->B);
    scratch.zeros = kvc_ints_of(all, bytes, step->B);
    scratch.begin = kvc_ints_of(all, bytes, R);
    scratch.end = kvc_ints_of(all, bytes, R);
    scratch.far = kvc_ints_of(all, bytes, R);
    scratch.stays = kvc_ints_of(all, bytes, paged * R);
    scratch.notes = kvc_ints_of(all, bytes, paged * (R + 1));
    scratch.alpha = kvc_part_of(all, bytes, marked * R * word);
    scratch.unused = kvc_part_of(all, bytes, marked * 2 * R * word);
    scratch.q = kvc_part_of(all, bytes, q);
    scratch.k = kvc_part_of(all, bytes, k);
    scratch.far_q = kvc_part_of(all, bytes, args->sinks ? q : 0);
    scratch.far_k = kvc_part_of(all, bytes, apart * k);
    scratch.left_k = kvc_part_of(all, bytes, paged * k);
    scratch.left_v = kvc_part_of(all, bytes, paged * k);
    if (paged) scratch.codes = kvc_new_codes_of(all, bytes, &step->rows, R, D);
    scratch.ring_codes = kvc_new_codes_of(all, bytes, &args->ring, R, D);
    if (apart) scratch.far_codes = kvc_new_codes_of(all, bytes, &args->far, R, D);
    scratch.decode = kvc_part_of(all, bytes, kvc_decode_scratch_bytes(&near));
    if (!kvc_ring_has_far(args)) return scratch;
    scratch.out = kvc_part_of(all, bytes, q);
    scratch.lse = kvc_part_of(all, bytes, step->B * step->Hq * word);
    scratch.decode_far = kvc_part_of(all, bytes, kvc_decode_scratch_bytes(&far));
    return scratch;
}

int64_t kvc_ring_step_scratch_bytes(const kvc_ring_step_args *args) {
    return args && kvc_step_is_sized(&args->step, kvc_ring_check(args)) ? scratch_of(args).bytes : 0;
}

/* Where the tokens of all sequences stand and lie; KVC_BAD_INDEX for one that has no slot. */
static kvc_status place(const kvc_ring_step_args *args, const step_scratch *scratch) {
    const kvc_status status = kvc_step_positions(&args->step, args->places, args->base, -1, scratch->positions);
    for (int64_t b = 0; status == KVC_OK && b < args->step.B; b++) {
        const ring_span span = span_of(args, args->places[b]);
        if (span.end > args->capacity) return KVC_BAD_INDEX;
        scratch->far_positions[b] = (int32_t)(args->far.keys ? args->window : args->sinks + args->window - 1);
        scratch->zeros[b] = 0;
        for (int64_t r = b * args->step.Hkv; r < (b + 1) * args->step.Hkv; r++) {
            scratch->begin[r] = scratch->far[r] = (int32_t)span.far;
            scratch->end[r] = (int32_t)span.end;
        }
    }
    return status;
}

static kvc_status decide(const kvc_ring_step_args *args, const step_scratch *scratch, kvc_parallel_for parallel_for) {
    const int64_t R = args->step.B * args->step.Hkv;
    if (args->alpha) {
        memcpy(scratch->alpha, args->alpha, (size_t)R * sizeof(float));
        return KVC_OK;
    }
    const kvc_dmc_decisions_args decisions = {
        .alpha = scratch->unused, .hard = scratch->alpha, .tempered = scratch->unused + R,
        .x = kvc_neuron_of(&args->step.k, args->neuron), .B = args->step.B, .H = args->step.Hkv, .T = 1,
        .shift = args->decision_shift, .temperature = 1.0f, .scale = args->decision_scale,
        .margin = args->decision_margin, .only_hard = 1,
    };
    return kvc_dmc_decisions(&decisions, parallel_for);
}

/* What becomes of tokens, one a row, in rows. */
static kvc_status tokens_of(kvc_append_tokens_args *tokens, const kvc_step *step, const kvc_rows *rows, const kvc_view *k,
                            const kvc_view *v, const kvc_new_codes *codes, kvc_parallel_for parallel_for) {
    *tokens = (kvc_append_tokens_args){.heads = step->Hkv, .S = 1};
    return kvc_tokens_to_append(tokens, rows, k, v, codes, step->B, step->D, parallel_for);
}

/* Appends to the pages what leaves the ring for them. */
static kvc_status leave(const kvc_ring_step_args *args, const step_scratch *scratch, kvc_parallel_for parallel_for) {
    const kvc_step *step = &args->step;
    const int64_t D = step->D, token = D * kvc_dtype_bytes(step->k.dtype);
    for (int64_t r = 0; r < step->table.R; r++) {
        const int64_t t = args->places[r / step->Hkv], from = (r * args->capacity + t % args->window) * token;
        const int64_t says = r * args->capacity + (args->own ? t : t + 1) % args->window;
        scratch->stays[r] = 0;
        if (t < args->window) continue;
        scratch->stays[r] = !(args->window == 1 && !args->own ? scratch->alpha[r] > 0.5f : args->marks[says] != 0);
        memcpy((char *)scratch->left_k + r * token, (const char *)args->ring.keys + from, (size_t)token);
        memcpy((char *)scratch->left_v + r * token, (const char *)args->ring.values + from, (size_t)token);
    }
    const kvc_view k = kvc_dense_view(scratch->left_k, step->k.dtype, step->Hkv, 1, D);
    const kvc_view v = kvc_dense_view(scratch->left_v, step->k.dtype, step->Hkv, 1, D);
    kvc_append_tokens_args append;
    const kvc_status status = tokens_of(&append, step, &step->rows, &k, &v, &scratch->codes, parallel_for);
    append.table = step->table, append.counts = scratch->stays, append.scratch = scratch->notes;
    return status == KVC_OK ? kvc_append_tokens(&append, parallel_for) : status;
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
    for (int64_t r = 0; r < args->step.B * args->step.Hkv; r++) {
        const int64_t t = args->places[r / args->step.Hkv], slot = r * args->capacity + span_of(args, t).slot;
        put(near, r, slot);
        if (args->marks) args->marks[slot] = scratch->alpha[r] > 0.5f && !(args->own && t == 0);
        if (args->far.keys && t < args->sinks) put(far, r, r * args->sinks + t);
    }
    for (int64_t b = 0; b < args->step.B; b++) args->places[b]++;
}

kvc_status kvc_ring_step(const kvc_ring_step_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    const kvc_step *step = &args->step;
    kvc_status status = kvc_ring_check(args);
    if (status != KVC_OK || kvc_step_is_empty(step)) return status;
    const step_scratch scratch = scratch_of(args);
    kvc_decode_args near = kvc_ring_near(args, NULL), far = kvc_ring_far(args, NULL);
    kvc_append_tokens_args near_tokens, far_tokens = {0};
    kvc_view key;
    const int64_t neuron = args->neuron;
    status = place(args, &scratch);
    if (status == KVC_OK) status = kvc_step_turn(step, 0, neuron, scratch.positions, scratch.q, &near.q, parallel_for);
    if (status == KVC_OK) status = kvc_step_turn(step, 1, neuron, scratch.positions, scratch.k, &key, parallel_for);
    far.q = near.q;
    if (status == KVC_OK && args->sinks) {
        status = kvc_step_turn(step, 0, neuron, scratch.far_positions, scratch.far_q, &far.q, parallel_for);
    }
    if (status == KVC_OK) {
        status = tokens_of(&near_tokens, step, &args->ring, &key, &step->v, &scratch.ring_codes, parallel_for);
    }
    if (status == KVC_OK && args->far.keys) {
        status = kvc_step_turn(step, 1, neuron, scratch.zeros, scratch.far_k, &key, parallel_for);
        if (status != KVC_OK) return status;
        status = tokens_of(&far_tokens, step, &args->far, &key, &step->v, &scratch.far_codes, parallel_for);
    }
    if (status == KVC_OK && args->marks) status = decide(args, &scratch, parallel_for);
    /* what decode reads: it would refuse too late */
    if (status == KVC_OK && step->table.R) status = check_pages(&step->table, NULL);
    if (status == KVC_OK && step->table.R) status = leave(args, &scratch, parallel_for);
    if (status != KVC_OK) return status;
    write(args, &scratch, &near_tokens, &far_tokens);
    near.begin = scratch.begin, near.end = scratch.end, near.scratch = scratch.decode;
    status = kvc_decode(&near, parallel_for);
    if (status != KVC_OK || !kvc_ring_has_far(args)) return status;
    if (!step->table.R) far.end = scratch.far;
    far.out = scratch.out, far.lse = scratch.lse, far.scratch = scratch.decode_far;
    status = kvc_decode(&far, parallel_for);
    const kvc_merge_states_args merge = kvc_step_merge(step, &near, &far);
    return status == KVC_OK ? kvc_merge_states(&merge, parallel_for) : status;
}
