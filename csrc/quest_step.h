/* What one step that reads only some pages is in terms of the frame of all steps. The same for the CPU and CUDA. */
#ifndef KVC_QUEST_STEP_H
#define KVC_QUEST_STEP_H
#include "step.h"

static inline int64_t kvc_quest_width(const kvc_quest_step_args *args) {
    const int64_t blocks = args->step.table.blocks;
    return args->pages_read < blocks ? args->pages_read : blocks;
}

static inline kvc_status kvc_quest_check(const kvc_quest_step_args *args) {
    kvc_step step = args->step;
    if (step.S != 1 || args->pages_read < 1 || args->range_pages < step.table.blocks) return KVC_BAD_SIZE;
    if (args->held && step.rotary_dim) return KVC_BAD_SIZE;
    if (args->held) step.k.data = step.v.data = step.q.data; /* nobody looks there */
    const kvc_status status = kvc_step_check(&step, &step.table);
    if (status != KVC_OK || kvc_step_is_empty(&step)) return status;
    return step.table.blocks && (!args->ranges || !args->chosen) ? KVC_NULL_POINTER : KVC_OK;
}

/* Attention to the pages of `table` [R, width], slots before `end` [R] of them; NULL where scratch is only counted. */
static inline kvc_decode_args kvc_quest_decode(const kvc_quest_step_args *args, void *turned, const int32_t *table,
                                               const int32_t *end) {
    static const int32_t any = 0; /* without a table rows would be taken for contiguous ones */
    kvc_decode_args decode = kvc_step_decode(&args->step, turned);
    decode.block_table = table ? table : &any, decode.end = end, decode.blocks = kvc_quest_width(args);
    return decode;
}
#endif
