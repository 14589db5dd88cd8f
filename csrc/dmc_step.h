/* What one step of DMC's cache is in terms of the frame of all steps. The same for the CPU and CUDA. */
#ifndef KVC_DMC_STEP_H
#define KVC_DMC_STEP_H
#include "step.h"

typedef struct { /* parts of the scratch */
    float *alpha, *omega, *unused; /* [R] each; unused: what else the CPU's decisions give, [2, R] */
    int32_t *notes, *positions;    /* of kvc_dmc_append; [B] */
    void *q, *decode;              /* rotated queries */
    int64_t bytes;
} kvc_dmc_parts;

static inline kvc_status kvc_dmc_step_check(const kvc_dmc_step_args *args) {
    const kvc_step *step = &args->step;
    if (step->S != 1 || args->neuron < 0 || args->neuron >= step->D) return KVC_BAD_SIZE;
    if (args->window < 0 || args->window > KVC_DMC_MAX_WINDOW) return KVC_BAD_SIZE;
    const kvc_status status = kvc_step_check(step, &step->table);
    if (status != KVC_OK || kvc_step_is_empty(step)) return status;
    const int tail = args->tail_k && args->tail_v && args->tail_w && args->tail_counts;
    return tail && args->places ? KVC_OK : KVC_NULL_POINTER;
}

/* decode_bytes: scratch of the attention. */
static inline kvc_dmc_parts kvc_dmc_parts_of(const kvc_step *step, int64_t decode_bytes) {
    const int64_t R = step->table.R, gates = R * (int64_t)sizeof(float);
    kvc_dmc_parts parts = KVC_EMPTY;
    parts.alpha = (float *)kvc_part_of(step->scratch, &parts.bytes, gates);
    parts.omega = (float *)kvc_part_of(step->scratch, &parts.bytes, gates);
    parts.unused = (float *)kvc_part_of(step->scratch, &parts.bytes, 2 * gates);
    parts.notes = kvc_ints_of(step->scratch, &parts.bytes, 4 * R + 1);
    parts.positions = kvc_ints_of(step->scratch, &parts.bytes, step->B);
    parts.q = kvc_part_of(step->scratch, &parts.bytes, kvc_step_query_bytes(step));
    parts.decode = kvc_part_of(step->scratch, &parts.bytes, decode_bytes);
    return parts;
}

/* The append of the new tokens; gates that nobody gave: those of the scratch. */
static inline kvc_dmc_append_args kvc_dmc_step_append(const kvc_dmc_step_args *args, const kvc_dmc_parts *parts) {
    const kvc_step *step = &args->step;
    kvc_dmc_append_args append = KVC_EMPTY;
    append.table = step->table, append.rows = step->rows, append.k = step->k, append.v = step->v;
    append.tail_k = args->tail_k, append.tail_v = args->tail_v, append.tail_w = args->tail_w;
    append.tail_counts = args->tail_counts;
    append.alpha = args->alpha ? args->alpha : parts->alpha, append.omega = args->omega ? args->omega : parts->omega;
    append.cos = step->cos, append.sin = step->sin, append.positions = parts->positions, append.scratch = parts->notes;
    append.B = step->B, append.Hkv = step->Hkv, append.S = 1, append.D = step->D;
    append.rotary_dim = step->rotary_dim, append.table_rows = step->table_rows;
    append.neuron = args->neuron, append.window = args->window;
    return append;
}
#endif
