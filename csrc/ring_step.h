/* What one step of rings is in terms of the frame of all steps and the functions that attend. The same for the CPU and CUDA. */
#ifndef KVC_RING_STEP_H
#define KVC_RING_STEP_H
#include "step.h"

static inline int kvc_ring_has_far(const kvc_ring_step_args *args) {
    return args->sinks || args->step.table.R;
}

/* Attention to the rings. */
static inline kvc_decode_args kvc_ring_near(const kvc_ring_step_args *args, void *turned) {
    kvc_decode_args near = kvc_step_decode(&args->step, turned);
    near.rows = args->ring, near.block_table = near.end = NULL;
    near.P = args->capacity, near.pages = near.B * near.Hkv, near.blocks = 0;
    return near;
}

/* To the further keys. */
static inline kvc_decode_args kvc_ring_far(const kvc_ring_step_args *args, void *turned) {
    const int pages = args->step.table.R != 0;
    kvc_decode_args far = pages ? kvc_step_decode(&args->step, turned) : kvc_ring_near(args, turned);
    if (!pages && args->far.keys) far.rows = args->far, far.P = args->sinks;
    far.sink_logits = NULL;
    return far;
}

static inline kvc_status kvc_ring_check(const kvc_ring_step_args *args) {
    const kvc_step *step = &args->step;
    const int64_t window = args->window, sinks = args->sinks;
    const int pages = step->table.R != 0, codes = format_of_codes(args->ring.format);
    if (window < 1 || window > INT32_MAX || sinks < 0 || sinks > INT32_MAX - window || step->S != 1) return KVC_BAD_SIZE;
    if (args->capacity < 0 || args->capacity > sinks + window) return KVC_BAD_SIZE;
    if ((sinks != 0) + (args->chunked != 0) + pages > 1 || (pages && !args->marks)) return KVC_BAD_SIZE;
    if (args->neuron < -1 || args->neuron >= step->D) return KVC_BAD_SIZE;
    if (args->marks && !args->alpha && args->neuron < 0) return KVC_BAD_SIZE;
    kvc_status status = format_takes(args->ring.format, step->k.dtype, step->D);
    if (status == KVC_OK) status = kvc_step_check(step, pages ? &step->table : NULL);
    if (status != KVC_OK && status != KVC_NULL_POINTER) return status;
    if ((args->far.keys && args->far.format != args->ring.format) || (codes && (pages || args->neuron >= 0))) {
        return KVC_BAD_FORMAT;
    }
    if (status != KVC_OK || kvc_step_is_empty(step)) return status;
    const int there = args->places && (!args->capacity || rows_are_there(&args->ring)) &&
                      (!args->far.keys || rows_are_there(&args->far));
    return there ? KVC_OK : KVC_NULL_POINTER;
}
#endif
