/* What one step of DMC's cache is in terms of the frame of all steps. The same for the CPU and CUDA. */
#ifndef KVC_DMC_STEP_H
#define KVC_DMC_STEP_H
#include "step.h"

static inline kvc_status kvc_dmc_step_check(const kvc_dmc_step_args *args) {
    const kvc_step *step = &args->step;
    if (step->S != 1 || args->neuron < 0 || args->neuron >= step->D) return KVC_BAD_SIZE;
    if (args->window < 0 || args->window > KVC_DMC_MAX_WINDOW) return KVC_BAD_SIZE;
    const kvc_status status = kvc_step_check(step, &step->table);
    if (status != KVC_OK || kvc_step_is_empty(step)) return status;
    const int tail = args->tail_k && args->tail_v && args->tail_w && args->tail_counts;
    return tail && args->places ? KVC_OK : KVC_NULL_POINTER;
}

/* The append of the new tokens; its positions, its scratch and the gates that nobody gave are left to the caller. */
static inline kvc_dmc_append_args kvc_dmc_step_append(const kvc_dmc_step_args *args) {
    const kvc_step *step = &args->step;
    kvc_dmc_append_args append = KVC_EMPTY;
    append.table = step->table, append.rows = step->rows, append.k = step->k, append.v = step->v;
    append.tail_k = args->tail_k, append.tail_v = args->tail_v, append.tail_w = args->tail_w;
    append.tail_counts = args->tail_counts, append.alpha = args->alpha, append.omega = args->omega;
    append.cos = step->cos, append.sin = step->sin;
    append.B = step->B, append.Hkv = step->Hkv, append.S = 1, append.D = step->D;
    append.rotary_dim = step->rotary_dim, append.table_rows = step->table_rows;
    append.neuron = args->neuron, append.window = args->window;
    return append;
}
#endif
