/* Rotary position embedding: rotate, rotate back, and (by tables of the difference) re-rotate. */
#include "kernel.h"

#include <string.h>

static void rotate_range(int64_t begin, int64_t end, void *context) {
    const kvc_rope_args *args = context;
    const int64_t half = args->rotary_dim / 2, bytes = kvc_dtype_bytes(args->x.dtype);
    const size_t rest = args->out.data == args->x.data ? 0 : (size_t)((args->D - args->rotary_dim) * bytes);
    const kvc_simd *simd = kvc_simd_table();
    int64_t t = begin % args->T, h = begin / args->T % args->H, b = begin / (args->T * args->H);
    for (int64_t i = begin; i < end; i++) {
        const int64_t p = args->positions ? args->positions[b * args->T + t] : t;
        const char *from = view_at(&args->x, b, h, t, 0);
        char *to = view_at(&args->out, b, h, t, 0);
        const float *cosines = args->cos + p * half, *sines = args->sin + p * half;
        if (half) simd->rotate[args->x.dtype](to, from, cosines, sines, args->inverse ? -1.0f : 1.0f, half);
        if (rest) memcpy(to + args->rotary_dim * bytes, from + args->rotary_dim * bytes, rest);
        if (++t < args->T) continue;
        t = 0;
        if (++h == args->H) b++, h = 0;
    }
}

kvc_status kvc_rope(const kvc_rope_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    if (args->B < 0 || args->H < 0 || args->T < 0 || args->D < 0 || args->table_rows < 0) return KVC_BAD_SIZE;
    if (args->rotary_dim < 0 || args->rotary_dim > args->D || args->rotary_dim % 2) return KVC_BAD_SIZE;
    if (!args->positions && args->T > args->table_rows) return KVC_BAD_SIZE;
    if (!dtype_known(args->x.dtype) || args->out.dtype != args->x.dtype) return KVC_BAD_DTYPE;
    /* in place only with one layout: otherwise a row could be overwritten before it is read */
    if (args->out.data && args->out.data == args->x.data &&
        (args->out.stride_b != args->x.stride_b || args->out.stride_h != args->x.stride_h ||
         args->out.stride_t != args->x.stride_t)) {
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
