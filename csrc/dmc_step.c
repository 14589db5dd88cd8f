/* One decoded step of DMC's cache: decide, rotate, append or merge, and attend in one call. */
#include "dmc_step.h"
#include "page_table.h"

typedef struct { /* parts of the scratch */
    float *alpha, *omega, *unused; /* [R] each; unused: what else decisions give, [2, R] */
    int32_t *notes, *positions;    /* of kvc_dmc_append; [B] */
    void *q, *decode;              /* rotated queries */
    int64_t bytes;
} step_scratch;

static step_scratch scratch_of(const kvc_dmc_step_args *args) {
    const kvc_step *step = &args->step;
    const kvc_decode_args decode = kvc_step_decode(step, NULL);
    const int64_t R = step->table.R, gates = R * (int64_t)sizeof(float);
    step_scratch scratch = {0};
    scratch.alpha = kvc_part_of(step->scratch, &scratch.bytes, gates);
    scratch.omega = kvc_part_of(step->scratch, &scratch.bytes, gates);
    scratch.unused = kvc_part_of(step->scratch, &scratch.bytes, 2 * gates);
    scratch.notes = kvc_ints_of(step->scratch, &scratch.bytes, 4 * R + 1);
    scratch.positions = kvc_ints_of(step->scratch, &scratch.bytes, step->B);
    scratch.q = kvc_part_of(step->scratch, &scratch.bytes, kvc_step_query_bytes(step));
    scratch.decode = kvc_part_of(step->scratch, &scratch.bytes, kvc_decode_scratch_bytes(&decode));
    return scratch;
}

int64_t kvc_dmc_step_scratch_bytes(const kvc_dmc_step_args *args) {
    return args && kvc_step_is_sized(&args->step, kvc_dmc_step_check(args)) ? scratch_of(args).bytes : 0;
}

/* Which rows merge, and how much each token weighs, where the caller has not said so. */
static kvc_status decide(const kvc_dmc_step_args *args, const step_scratch *scratch, kvc_dmc_append_args *append,
                         kvc_parallel_for parallel_for) {
    const kvc_step *step = &args->step;
    kvc_status status = KVC_OK;
    if (!append->alpha) {
        const kvc_dmc_decisions_args decisions = {
            .alpha = scratch->unused, .hard = scratch->alpha, .tempered = scratch->unused + step->table.R,
            .x = kvc_neuron_of(&step->k, args->neuron), .B = step->B, .H = step->Hkv, .T = 1,
            .shift = args->decision_shift, .temperature = 1.0f, .scale = 1.0f, .margin = args->decision_margin, .only_hard = 1,
        };
        status = kvc_dmc_decisions(&decisions, parallel_for);
        append->alpha = scratch->alpha;
    }
    if (status == KVC_OK && !append->omega) {
        const kvc_dmc_importance_args importance = {
            .omega = scratch->omega, .x = kvc_neuron_of(&step->q, args->neuron), .B = step->B, .Hq = step->Hq,
            .Hkv = step->Hkv, .T = 1, .shift = args->omega_shift, .eps = args->omega_eps, .reduce = args->reduce,
        };
        status = kvc_dmc_importance(&importance, parallel_for);
        append->omega = scratch->omega;
    }
    return status;
}

kvc_status kvc_dmc_step(const kvc_dmc_step_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    const kvc_step *step = &args->step;
    kvc_status status = kvc_dmc_step_check(args);
    if (status != KVC_OK || kvc_step_is_empty(step)) return status;
    const step_scratch scratch = scratch_of(args);
    kvc_dmc_append_args append = kvc_dmc_step_append(args);
    append.positions = scratch.positions, append.scratch = scratch.notes;
    kvc_decode_args decode = kvc_step_decode(step, NULL);
    decode.scratch = scratch.decode;
    status = kvc_step_positions(step, args->places, args->offsets, 1, scratch.positions);
    if (status == KVC_OK) status = check_pages(&step->table, NULL); /* what decode reads: it would refuse too late */
    if (status == KVC_OK) status = decide(args, &scratch, &append, parallel_for);
    if (status == KVC_OK) {
        status = kvc_step_turn(step, 0, args->neuron, scratch.positions, scratch.q, &decode.q, parallel_for);
    }
    if (status == KVC_OK) status = kvc_dmc_append(&append, parallel_for);
    if (status != KVC_OK) return status;
    for (int64_t b = 0; b < step->B; b++) args->places[b]++;
    return kvc_decode(&decode, parallel_for);
}
