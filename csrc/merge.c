/* Joining attention over two disjoint sets of keys. */
#include "kernel.h"

#include <math.h>
#include <string.h>

enum { PIECE = 128 }; /* elements of a row converted at a time */

/* out[d0, d0 + n) of one row. A side of weight 0 is not read into the sum: 0 times its NaN or infinity would count. */
static void merge_piece(const kvc_merge_states_args *args, const kvc_simd *simd, int64_t start, int64_t n, float a,
                        float b) {
    const int64_t bytes = kvc_dtype_bytes(args->dtype);
    float x[PIECE], y[PIECE];
    simd->load[args->dtype](x, (const char *)args->out_a + start * bytes, n);
    simd->load[args->dtype](y, (const char *)args->out_b + start * bytes, n);
    for (int64_t d = 0; d < n; d++) x[d] = (a == 0.0f ? 0.0f : a * x[d]) + (b == 0.0f ? 0.0f : b * y[d]);
    simd->store[args->dtype]((char *)args->out + start * bytes, x, n);
}

static void merge_range(int64_t begin, int64_t end, void *context) {
    const kvc_merge_states_args *args = context;
    const kvc_simd *simd = kvc_simd_table();
    const size_t row_bytes = (size_t)(args->D * kvc_dtype_bytes(args->dtype));
    for (int64_t i = begin; i < end; i++) {
        const float a = args->lse_a[i], b = args->lse_b[i];
        const int alone = a == -INFINITY || b == -INFINITY;
        if (alone && a != b) { /* the other side's bits as they are */
            const void *from = b == -INFINITY ? args->out_a : args->out_b;
            if (row_bytes && from != args->out) {
                const size_t start = (size_t)i * row_bytes;
                memcpy((char *)args->out + start, (const char *)from + start, row_bytes);
            }
            args->lse[i] = b == -INFINITY ? a : b;
            continue;
        }
        const float most = a > b ? a : b, base = alone ? 0.0f : most;
        const float wa = expf(a - base), wb = expf(b - base), sum = wa + wb;
        for (int64_t d = 0; d < args->D; d += PIECE) {
            merge_piece(args, simd, i * args->D + d, min_of(PIECE, args->D - d), sum == 0.0f ? 0.0f : wa / sum,
                        sum == 0.0f ? 0.0f : wb / sum);
        }
        args->lse[i] = alone ? -INFINITY : most + logf(sum);
    }
}

kvc_status kvc_merge_states(const kvc_merge_states_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    if (args->N < 0 || args->D < 0) return KVC_BAD_SIZE;
    if (!dtype_known(args->dtype)) return KVC_BAD_DTYPE;
    if (!args->N) return KVC_OK;
    if (!args->lse || !args->lse_a || !args->lse_b) return KVC_NULL_POINTER;
    if (args->D && (!args->out || !args->out_a || !args->out_b)) return KVC_NULL_POINTER;
    run_parallel(parallel_for, args->N, 64, merge_range, (void *)(uintptr_t)args);
    return KVC_OK;
}
