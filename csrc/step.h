/* What the functions that decode a whole step of a layer share: parts of their scratch and views of what lies there. */
#ifndef KVC_STEP_H
#define KVC_STEP_H
#include "kvc.h"

#include <stddef.h>

#ifdef __cplusplus
#define KVC_EMPTY {}
#else
#define KVC_EMPTY {0}
#endif

/* The next part of a caller's scratch, of so many bytes, on a cache line of its own; *bytes: of all parts so far. */
static inline void *kvc_part_of(void *scratch, int64_t *bytes, int64_t size) {
    char *part = scratch ? (char *)scratch + *bytes : NULL;
    *bytes += (size + 63) / 64 * 64;
    return part;
}

/* Rows of numbers. */
static inline kvc_rows kvc_plain_rows(const void *keys, const void *values, kvc_dtype dtype) {
    const kvc_rows rows = {(void *)(uintptr_t)keys, (void *)(uintptr_t)values, NULL, NULL, (kvc_format)dtype};
    return rows;
}

/* A contiguous [B, H, T, D] array. */
static inline kvc_view kvc_dense_view(void *data, kvc_dtype dtype, int64_t H, int64_t T, int64_t D) {
    const kvc_view view = {data, dtype, H * T * D, T * D, D};
    return view;
}

/* The array of pages that the tokens of a view are appended to. */
static inline kvc_slot_array kvc_slots_of(void *pages, const kvc_view *tokens, int64_t D) {
    const int64_t bytes = tokens->dtype == KVC_F32 ? 4 : 2;
    const kvc_slot_array slots = {pages, tokens->data, D * bytes, tokens->stride_b * bytes, tokens->stride_h * bytes,
                                  tokens->stride_t * bytes};
    return slots;
}
#endif
