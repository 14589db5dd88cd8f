/* One decoded step of a cache that keeps its tokens: rotate, append and attend in one call.
 *
 * The kernels of the three do the work; what this saves is two passes through the caller for each layer and token.
 */
#include "paged_step.h"

static kvc_decode_args decode_of(const kvc_paged_step_args *args) {
    kvc_decode_args decode = kvc_step_decode(&args->step, NULL);
    decode.begin = args->begin, decode.causal = 1;
    return decode;
}

kvc_placing kvc_placing_of(const kvc_step *step, int64_t *bytes) {
    kvc_placing placing = {0};
    placing.positions = kvc_ints_of(step->scratch, bytes, step->B * step->S);
    placing.copied = kvc_ints_of(step->scratch, bytes, step->table.R + 1);
    placing.q = kvc_part_of(step->scratch, bytes, kvc_step_query_bytes(step));
    placing.k = kvc_part_of(step->scratch, bytes, kvc_step_key_bytes(step));
    placing.codes = kvc_new_codes_of(step->scratch, bytes, &step->rows, step->table.R * step->S, step->D);
    return placing;
}

kvc_status kvc_place_tokens(const kvc_step *step, const int32_t *shift, const kvc_placing *placing, kvc_view *turned,
                            kvc_parallel_for parallel_for) {
    const int64_t S = step->S;
    for (int64_t i = 0; i < step->B * S && step->rotary_dim; i++) {
        const int64_t row = i / S * step->Hkv, place = step->table.lengths[row] + i % S;
        placing->positions[i] = (int32_t)min_of(max_of(place + (shift ? shift[row] : 0), -1), INT32_MAX);
    }
    kvc_view k;
    kvc_append_tokens_args append = {.table = step->table, .scratch = placing->copied, .heads = step->Hkv, .S = S};
    kvc_status status = kvc_step_turn(step, 0, -1, placing->positions, placing->q, turned, parallel_for);
    if (status == KVC_OK) status = kvc_step_turn(step, 1, -1, placing->positions, placing->k, &k, parallel_for);
    if (status != KVC_OK) return status;
    status = kvc_tokens_to_append(&append, &step->rows, &k, &step->v, &placing->codes, step->B, step->D, parallel_for);
    return status == KVC_OK ? kvc_append_tokens(&append, parallel_for) : status;
}

int64_t kvc_paged_step_scratch_bytes(const kvc_paged_step_args *args) {
    if (!args || !kvc_step_is_sized(&args->step, kvc_step_check(&args->step, &args->step.table))) return 0;
    const kvc_decode_args decode = decode_of(args);
    int64_t bytes = 0;
    kvc_placing_of(&args->step, &bytes);
    kvc_part_of(NULL, &bytes, kvc_decode_scratch_bytes(&decode));
    return bytes;
}

kvc_status kvc_paged_step(const kvc_paged_step_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    const kvc_step *step = &args->step;
    kvc_status status = kvc_step_check(step, &step->table);
    if (status != KVC_OK || kvc_step_is_empty(step)) return status;
    for (int64_t r = 0; args->begin && r < step->table.R; r++) {
        if (args->begin[r] < 0 || args->begin[r] > step->table.lengths[r] + step->S) return KVC_BAD_INDEX;
    }
    status = check_pages(&step->table, args->begin); /* what decode reads: it would refuse too late */
    if (status != KVC_OK) return status;
    int64_t bytes = 0;
    const kvc_placing placing = kvc_placing_of(step, &bytes);
    kvc_decode_args decode = decode_of(args);
    status = kvc_place_tokens(step, args->shift, &placing, &decode.q, parallel_for);
    if (status != KVC_OK) return status;
    decode.scratch = kvc_part_of(step->scratch, &bytes, kvc_decode_scratch_bytes(&decode));
    return kvc_decode(&decode, parallel_for);
}
