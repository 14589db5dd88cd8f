/* One decoded step of DMC's cache: decide, rotate, append or merge, and attend in one call. */
#include "dmc_step.h"
#include "page_table.h"

static kvc_dmc_parts parts_of(const kvc_step *step) {
    const kvc_decode_args decode = kvc_step_decode(step, NULL);
    return kvc_dmc_parts_of(step, kvc_decode_scratch_bytes(&decode));
}

int64_t kvc_dmc_step_scratch_bytes(const kvc_dmc_step_args *args) {
    return args && kvc_step_is_sized(&args->step, kvc_dmc_step_check(args)) ? parts_of(&args->step).bytes : 0;
}

/* Which rows merge, and how much each token weighs, where the caller has not said so. */
static kvc_status decide(const kvc_dmc_step_args *args, const kvc_dmc_parts *parts, kvc_parallel_for parallel_for) {
    const kvc_step *step = &args->step;
    const kvc_dmc_decisions_args decisions = {
        .alpha = parts->unused, .hard = parts->alpha, .tempered = parts->unused + step->table.R,
        .x = kvc_neuron_of(&step->k, args->neuron), .B = step->B, .H = step->Hkv, .T = 1,
        .shift = args->decision_shift, .margin = args->decision_margin, .temperature = 1.0f, .scale = 1.0f, .only_hard = 1,
    };
    const kvc_dmc_importance_args importance = {
        .omega = parts->omega, .x = kvc_neuron_of(&step->q, args->neuron), .B = step->B, .Hq = step->Hq,
        .Hkv = step->Hkv, .T = 1, .shift = args->omega_shift, .eps = args->omega_eps, .reduce = args->reduce,
    };
    const kvc_status status = args->alpha ? KVC_OK : kvc_dmc_decisions(&decisions, parallel_for);
    return status != KVC_OK || args->omega ? status : kvc_dmc_importance(&importance, parallel_for);
}

kvc_status kvc_dmc_step(const kvc_dmc_step_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    const kvc_step *step = &args->step;
    kvc_status status = kvc_dmc_step_check(args);
    if (status != KVC_OK || kvc_step_is_empty(step)) return status;
    const kvc_dmc_parts parts = parts_of(step);
    const kvc_dmc_append_args append = kvc_dmc_step_append(args, &parts);
    kvc_decode_args decode = kvc_step_decode(step, NULL);
    decode.scratch = parts.decode;
    status = kvc_step_positions(step, args->places, args->offsets, 1, parts.positions);
    if (status == KVC_OK) status = check_pages(&step->table, NULL); /* what decode reads: it would refuse too late */
    if (status == KVC_OK) status = decide(args, &parts, parallel_for);
    if (status == KVC_OK) status = kvc_step_turn(step, 0, args->neuron, parts.positions, parts.q, &decode.q, parallel_for);
    if (status == KVC_OK) status = kvc_dmc_append(&append, parallel_for);
    if (status != KVC_OK) return status;
    for (int64_t b = 0; b < step->B; b++) args->places[b]++;
    return kvc_decode(&decode, parallel_for);
}
