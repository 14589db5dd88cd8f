/* One decoded step of a layer of PoD: rotate, append to two tables, attend to near and to distant tokens in one call. */
#include "formats.h"
#include "page_table.h"
#include "pod_step.h"

#include <string.h>

static kvc_pod_parts parts_of(const kvc_pod_step_args *args) {
    const kvc_pod_parts none = kvc_pod_parts_of(args, 0, 0);
    const kvc_decode_args near = kvc_pod_near(args, &none), far = kvc_pod_far(args, &none);
    const kvc_decode_shared_args shared = kvc_pod_shared(args, &none);
    int64_t far_bytes = 0;
    if (args->far == KVC_FAR_SHARED) far_bytes = kvc_decode_shared_scratch_bytes(&shared);
    else if (args->far != KVC_FAR_NONE) far_bytes = kvc_decode_scratch_bytes(&far);
    /* the near table is there where it matters: sizes do not depend on it */
    return kvc_pod_parts_of(args, kvc_decode_scratch_bytes(&near), far_bytes);
}

int64_t kvc_pod_step_scratch_bytes(const kvc_pod_step_args *args) {
    if (!args || !kvc_step_is_sized(&args->step, kvc_pod_check(args))) return 0;
    kvc_pod_parts parts = parts_of(args);
    kvc_new_codes_of(NULL, &parts.bytes, &args->step.rows, args->step.table.R, args->step.D);
    return parts.bytes;
}

/* The arrays of both tables' appends: keys and values, of codes their scales too. */
static kvc_status lay_ready(const kvc_pod_step_args *args, kvc_pod_parts *parts, const kvc_view *k,
                            kvc_append_tokens_args *keys, kvc_append_tokens_args *values, kvc_parallel_for parallel_for) {
    const kvc_step *step = &args->step;
    const kvc_new_codes codes = kvc_new_codes_of(step->scratch, &parts->bytes, &step->rows, step->table.R, step->D);
    kvc_append_tokens_args both = {.heads = step->Hkv, .S = 1};
    const kvc_status status = kvc_tokens_to_append(&both, &step->rows, k, &step->v, &codes, step->B, step->D, parallel_for);
    keys->array_count = values->array_count = both.array_count / 2;
    for (int64_t i = 0; i < both.array_count; i++) (i % 2 ? values : keys)->arrays[i / 2] = both.arrays[i];
    return status;
}

/* Where near and distant tokens lie once every row has its new one. */
static void find_ranges(const kvc_pod_step_args *args, const kvc_pod_parts *parts) {
    for (int64_t r = 0; r < args->step.table.R; r++) {
        const int64_t held = args->step.table.lengths[r] + (int64_t)1, all = args->values.lengths[r] + (int64_t)1;
        const int64_t begin = min_of(args->sinks, all);
        parts->begin[r] = (int32_t)max_of(held - args->recent, 0);
        parts->far_begin[r] = (int32_t)begin;
        parts->far_end[r] = (int32_t)max_of(all - args->recent, begin);
    }
}

/* The page of the row of values in which the values of page i of row r of keys lie. */
static int64_t place_of(const kvc_pod_step_args *args, int64_t r, int64_t i) {
    return i < args->first || !args->moved ? i : i + args->moved[r];
}

/* Whether the values of near keys [begin, end) of row r lie in pages that the row of values has with its new token. */
static int near_values_exist(const kvc_pod_step_args *args, int64_t r, int64_t begin, int64_t end) {
    const int64_t blocks = blocks_of(&args->values, args->values.lengths[r] + (int64_t)1);
    for (int64_t i = begin / args->step.table.P; begin < end && i <= (end - 1) / args->step.table.P; i++) {
        const int64_t place = place_of(args, r, i);
        if (place < 0 || place >= blocks) return 0;
    }
    return 1;
}

/* The same of what is read for the distant values, whose own pages are there. */
static int far_exists(const kvc_pod_step_args *args, const kvc_pod_parts *parts, int64_t r) {
    const int64_t begin = parts->far_begin[r], end = parts->far_end[r], P = args->values.P;
    const int counted = args->far == KVC_FAR_SHARED || (args->far == KVC_FAR_OWN && args->probabilities);
    if (counted && end - begin > args->columns) return 0;
    if (args->far == KVC_FAR_OWN) return end <= args->step.table.lengths[r] + (int64_t)1;
    if (args->far != KVC_FAR_LED) return 1;
    if (end > min_of(args->lead_blocks, args->values.blocks) * P) return 0;
    for (int64_t i = begin / P; begin < end && i <= (end - 1) / P; i++) {
        const int32_t page = args->lead_table[r * args->lead_blocks + i];
        if (page < 0 || page >= args->lead_pages) return 0;
    }
    return 1;
}

/* Whether all that attention will read is there: of what it refuses itself, rows and places would have changed. */
static kvc_status check_reads(const kvc_pod_step_args *args, const kvc_pod_parts *parts) {
    for (int64_t r = 0; r < args->step.table.R; r++) {
        const int64_t begin = parts->begin[r], held = args->step.table.lengths[r] + (int64_t)1;
        if (!near_values_exist(args, r, 0, min_of(args->sinks, begin))) return KVC_BAD_INDEX;
        if (!near_values_exist(args, r, begin, held) || !far_exists(args, parts, r)) return KVC_BAD_INDEX;
    }
    return KVC_OK;
}

/* The pages of near keys' values, of rows that have grown. */
static void list_near_pages(const kvc_pod_step_args *args, const kvc_pod_parts *parts) {
    const kvc_page_table *keys = &args->step.table, *values = &args->values;
    for (int64_t r = 0; r < keys->R; r++) {
        for (int64_t i = 0; i < blocks_of(keys, keys->lengths[r]); i++) {
            const int64_t place = place_of(args, r, i);
            const int here = place >= 0 && place < values->blocks;
            parts->near_table[r * keys->blocks + i] = here ? *entry(values, r, place) : -1;
        }
    }
}

/* Queries and keys at their places; the queries where they are asked for. */
static kvc_status turn(const kvc_pod_step_args *args, const kvc_pod_parts *parts, kvc_view *k, kvc_parallel_for parallel_for) {
    const kvc_step *step = &args->step;
    const int64_t bytes = step->D * kvc_dtype_bytes(step->q.dtype);
    kvc_view q;
    kvc_status status = kvc_step_positions(step, args->places, NULL, 1, parts->positions);
    if (status == KVC_OK) status = kvc_step_turn(step, 0, -1, parts->positions, args->turned, &q, parallel_for);
    if (status == KVC_OK) status = kvc_step_turn(step, 1, -1, parts->positions, parts->k, k, parallel_for);
    for (int64_t i = 0; status == KVC_OK && !step->rotary_dim && i < step->B * step->Hq; i++) {
        memcpy((char *)args->turned + i * bytes, view_at(&q, i / step->Hq, i % step->Hq, 0, 0), (size_t)bytes);
    }
    return status;
}

kvc_status kvc_pod_step(const kvc_pod_step_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    const kvc_step *step = &args->step;
    kvc_status status = kvc_pod_check(args);
    if (status != KVC_OK || kvc_step_is_empty(step)) return status;
    kvc_pod_parts parts = parts_of(args);
    kvc_append_tokens_args new_keys = kvc_pod_append(args, &parts, 0), new_values = kvc_pod_append(args, &parts, 1);
    kvc_view k;
    status = turn(args, &parts, &k, parallel_for);
    if (status == KVC_OK) status = lay_ready(args, &parts, &k, &new_keys, &new_values, parallel_for);
    if (status == KVC_OK) status = check_pages(&step->table, NULL);
    if (status == KVC_OK) status = check_pages(&args->values, NULL);
    if (status == KVC_OK) status = kvc_append_tokens_check(&new_keys);
    if (status == KVC_OK) status = kvc_append_tokens_check(&new_values);
    if (status != KVC_OK) return status;
    find_ranges(args, &parts);
    status = check_reads(args, &parts);
    if (status == KVC_OK) status = kvc_append_tokens(&new_keys, parallel_for);
    if (status == KVC_OK) status = kvc_append_tokens(&new_values, parallel_for);
    if (status != KVC_OK) return status;
    for (int64_t b = 0; b < step->B; b++) args->places[b]++;
    list_near_pages(args, &parts);
    const kvc_decode_args near = kvc_pod_near(args, &parts);
    status = kvc_decode(&near, parallel_for);
    if (status != KVC_OK || args->far == KVC_FAR_NONE) return status;
    if (args->far == KVC_FAR_SHARED) {
        const kvc_decode_shared_args shared = kvc_pod_shared(args, &parts);
        return kvc_decode_shared(&shared, parallel_for);
    }
    const kvc_decode_args far = kvc_pod_far(args, &parts);
    const kvc_merge_states_args merge = kvc_step_merge(step, &near, &far);
    status = kvc_decode(&far, parallel_for);
    return status == KVC_OK ? kvc_merge_states(&merge, parallel_for) : status;
}
