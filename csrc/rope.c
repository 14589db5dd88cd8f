/* Rotary position embedding: rotate, rotate back, and (by tables of the difference) re-rotate. */
#include "kernel.h"

#include <stddef.h>
#include <string.h>

enum { PIECE = 128 }; /* elements of a row converted at a time */

/* One row [D] to out, pairs first, then the part that does not rotate. Both halves of a piece are read before either is
 * written, so that out may be x. */
static void rotate_row(const kvc_rope_args *args, const kvc_simd *simd, int64_t b, int64_t h, int64_t t) {
    const int64_t half = args->rotary_dim / 2, p = args->positions ? args->positions[b * args->T + t] : t;
    const float sign = args->inverse ? -1.0f : 1.0f;
    float low[PIECE], high[PIECE];
    for (int64_t i = 0; i < half; i += PIECE) {
        const int64_t n = min_of(PIECE, half - i);
        simd->load[args->x.dtype](low, view_at(&args->x, b, h, t, i), n);
        simd->load[args->x.dtype](high, view_at(&args->x, b, h, t, half + i), n);
        simd->rotate(low, high, args->cos + p * half + i, args->sin + p * half + i, sign, n);
        simd->store[args->out.dtype](view_at(&args->out, b, h, t, i), low, n);
        simd->store[args->out.dtype](view_at(&args->out, b, h, t, half + i), high, n);
    }
    if (args->out.data == args->x.data) return; /* in place: the rest is there already */
    for (int64_t d = args->rotary_dim; d < args->D; d += PIECE) {
        const int64_t n = min_of(PIECE, args->D - d);
        const char *from = view_at(&args->x, b, h, t, d);
        char *to = view_at(&args->out, b, h, t, d);
        if (args->x.dtype == args->out.dtype) {
            memcpy(to, from, (size_t)(n * kvc_dtype_bytes(args->x.dtype)));
        } else {
            simd->load[args->x.dtype](low, from, n);
            simd->store[args->out.dtype](to, low, n);
        }
    }
}

static void rotate_range(int64_t begin, int64_t end, void *context) {
    const kvc_rope_args *args = context;
    const kvc_simd *simd = kvc_simd_table();
    for (int64_t i = begin; i < end; i++) {
        rotate_row(args, simd, i / (args->H * args->T), i / args->T % args->H, i % args->T);
    }
}

kvc_status kvc_rope(const kvc_rope_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    if (args->B < 0 || args->H < 0 || args->T < 0 || args->D < 0 || args->table_rows < 0) return KVC_BAD_SIZE;
    if (args->rotary_dim < 0 || args->rotary_dim > args->D || args->rotary_dim % 2) return KVC_BAD_SIZE;
    if (!args->positions && args->T > args->table_rows) return KVC_BAD_SIZE;
    if (!dtype_known(args->x.dtype) || !dtype_known(args->out.dtype)) return KVC_BAD_DTYPE;
    /* in place only with one layout: otherwise a row could be overwritten before it is read */
    if (args->out.data && args->out.data == args->x.data &&
        (args->out.dtype != args->x.dtype || args->out.stride_b != args->x.stride_b ||
         args->out.stride_h != args->x.stride_h || args->out.stride_t != args->x.stride_t)) {
        return KVC_BAD_SIZE;
    }
    if (!args->B || !args->H || !args->T || !args->D) return KVC_OK;
    if (!args->x.data || !args->out.data) return KVC_NULL_POINTER;
    if (args->rotary_dim && (!args->cos || !args->sin)) return KVC_NULL_POINTER;
    for (int64_t i = 0; args->positions && i < args->B * args->T; i++) {
        if (args->positions[i] < 0 || args->positions[i] >= args->table_rows) return KVC_BAD_INDEX;
    }
    run_parallel(parallel_for, args->B * args->H * args->T, 64, rotate_range, (void *)(uintptr_t)args);
    return KVC_OK;
}
