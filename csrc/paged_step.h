/* What begins a step of rows that keep their tokens: the new ones rotated and appended. */
#ifndef KVC_PAGED_STEP_H
#define KVC_PAGED_STEP_H
#include "formats.h"
#include "page_table.h"
#include "step.h"

/* Parts of the scratch. */
typedef struct {
    int32_t *positions, *copied; /* [B, S]; [R + 1] */
    void *q, *k;                 /* rotated */
    kvc_new_codes codes;         /* of the new tokens, [B, Hkv, S] */
} kvc_placing;

/* The first parts of the step's scratch; *bytes: as kvc_part_of. */
kvc_placing kvc_placing_of(const kvc_step *step, int64_t *bytes);

/* Rotates and appends; shift: of kvc_paged_step_args; *turned: the rotated queries. Work that is not empty. */
kvc_status kvc_place_tokens(const kvc_step *step, const int32_t *shift, const kvc_placing *placing, kvc_view *turned,
                            kvc_parallel_for parallel_for);
#endif
