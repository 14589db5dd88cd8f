/* What the kernels share: running ranges, addressing views, and packing queries and keys for simd.h's logits. */
#ifndef KVC_KERNEL_H
#define KVC_KERNEL_H
#include "checks.h"
#include "simd.h"

#include <math.h>
#include <stddef.h>

/* fn over [0, count), on the caller's threads if it has any. */
static inline void run_parallel(kvc_parallel_for parallel_for, int64_t count, int64_t grain, kvc_range_fn fn,
                                void *context) {
    if (count <= 0) return;
    if (parallel_for) {
        parallel_for(count, grain, fn, context);
    } else {
        fn(0, count, context);
    }
}

/* Least items of a thread, of `count` that do `work` multiply-adds altogether: what is done sooner than a second thread
 * has begun is not worth one. */
static inline int64_t grain_of(int64_t count, int64_t work) {
    enum { THREAD_WORK = 1 << 20 }; /* some 30 microseconds */
    const double least = work > 0 ? (double)count * THREAD_WORK / (double)work : (double)count;
    return least >= (double)count ? (count > 1 ? count : 1) : least > 1.0 ? (int64_t)least : 1;
}

static inline int64_t min_of(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static inline int64_t max_of(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* a / b rounded up, a >= 0, b > 0. */
static inline int64_t ceil_div(int64_t a, int64_t b) {
    return a / b + (a % b != 0);
}

/* Rows of the block of KVC_TILE_ROWS that starts at `first` of `rows`. */
static inline int64_t block_rows(int64_t first, int64_t rows) {
    return min_of(KVC_TILE_ROWS, rows - first);
}

/* Address of element (b, h, t, d); NULL of a view of nothing. */
static inline char *view_at(const kvc_view *view, int64_t b, int64_t h, int64_t t, int64_t d) {
    if (!view->data) return NULL;
    const int64_t element = b * view->stride_b + h * view->stride_h + t * view->stride_t + d;
    return (char *)view->data + element * kvc_dtype_bytes(view->dtype);
}

/* The sink of query head h, -inf: none. */
static inline float sink_of(const float *sink_logits, int64_t h) {
    return sink_logits ? sink_logits[h] : -INFINITY;
}

/* Joins a sink to a softmax of maximum *max and sum *norm; returns by what weights made with the old maximum shrink. */
static inline float join_sink(float sink, float *max, float *norm) {
    if (sink == -INFINITY) return 1.0f;
    const float most = *max > sink ? *max : sink, keep = expf(*max - most);
    *norm = *norm * keep + expf(sink - most);
    *max = most;
    return keep;
}

/* Queries first..first+rows of the flat list (h - head)*S + s as float32, in blocks of KVC_TILE_ROWS rows, each block
 * [D, rows of the block] as simd.h's logits reads it: the block that starts at row i begins at packed + i*D.
 * packed float32 [rows*D]; first counts from a block's start. */
void kvc_tile_pack_queries(float *packed, const kvc_view *q, int64_t b, int64_t head, int64_t S, int64_t D,
                           int64_t first, int64_t rows);

/* Keys as float32, transposed to [depth, KVC_TILE], zeros behind the last key; depth <= KVC_TILE_DEPTH.
 * Key j lies stride elements after key j-1, at src. buffer float32 [KVC_TILE*KVC_TILE_DEPTH] serves the conversion. */
void kvc_tile_pack_keys(float *packed, float *buffer, const char *src, kvc_dtype dtype, int64_t stride, int64_t keys,
                        int64_t depth);
#endif
