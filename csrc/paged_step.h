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

/* The first parts of args->scratch; *bytes: as kvc_part_of. */
kvc_placing kvc_placing_of(const kvc_paged_step_args *args, int64_t *bytes);

/* Sizes, dtypes and pointers; KVC_OK for empty work too. */
kvc_status kvc_paged_step_check(const kvc_paged_step_args *args);

/* Rotates and appends; *turned: the rotated queries. Work that is not empty. */
kvc_status kvc_paged_step_place(const kvc_paged_step_args *args, const kvc_placing *placing, kvc_view *turned,
                                kvc_parallel_for parallel_for);
#endif
