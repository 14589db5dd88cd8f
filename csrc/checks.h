/* What sizes, dtypes and arrays can be: the same for the CPU and CUDA. */
#ifndef KVC_CHECKS_H
#define KVC_CHECKS_H
#include "kvc.h"

static inline int dtype_known(kvc_dtype dtype) {
    return dtype == KVC_F32 || dtype == KVC_BF16 || dtype == KVC_F16;
}

/* Whether logits of this scale and softcap (0: none) are defined. */
static inline int scale_is_good(float scale, float softcap) {
    return scale - scale == 0.0f && softcap - softcap == 0.0f && softcap >= 0.0f; /* finite */
}

/* Whether a format stores codes. */
static inline int format_of_codes(kvc_format format) {
    return format == KVC_FORMAT_INT8 || format == KVC_FORMAT_K8V4;
}

/* Whether rows of a format take new tokens of D elements of a dtype; those of codes take any. */
static inline kvc_status format_takes(kvc_format format, kvc_dtype dtype, int64_t D) {
    if (!format_of_codes(format)) return format == (kvc_format)dtype ? KVC_OK : KVC_BAD_FORMAT;
    return format == KVC_FORMAT_K8V4 && D % 2 ? KVC_BAD_SIZE : KVC_OK;
}

/* Whether there are arrays of keys, or values, of a format. */
static inline int array_is_there(kvc_format format, const void *numbers, const void *scales) {
    return numbers && (!format_of_codes(format) || scales);
}

/* Whether rows have the arrays of their format. */
static inline int rows_are_there(const kvc_rows *rows) {
    return array_is_there(rows->format, rows->keys, rows->key_scales) &&
           array_is_there(rows->format, rows->values, rows->value_scales);
}

/* Whether a table's own sizes are possible. */
static inline int table_sizes_are_good(const kvc_page_table *table) {
    if (table->R < 0 || table->blocks < 0 || table->P < 1 || table->P > INT32_MAX) return 0;
    return table->pages >= 0 && table->pages <= INT32_MAX && table->blocks <= INT32_MAX / table->P;
}

/* Whether it has the arrays of its sizes. */
static inline int table_is_there(const kvc_page_table *table) {
    if (!table->R) return 1;
    if (!table->lengths || !table->free_count || (table->blocks && !table->block_table)) return 0;
    return !table->pages || (table->page_refs && table->free_pages);
}
#endif
