// What the kernels share that begin a decoded step: a head rotated by a warp, and how the caller's scratch is divided.
#pragma once
#include <initializer_list>

#include "decode_pieces.cuh"
#include "page_table.cuh"
#include "../step.h"

namespace {

constexpr int STEP_WARPS = PLAN_THREADS / 32;  // of the block that begins a step, which lists pieces too

// One head [D] of a view's row to `to` + at of another array, by a warp: rotated to a row of the tables, NaN outside them;
// the neuron (-1: none) 0 before and after.
__device__ inline void rotate_head(const kvc_view& x, int64_t from, void* to, kvc_dtype dtype, int64_t at, int64_t D,
                                   int64_t rotary_dim, const float* cos, const float* sin, int64_t position,
                                   int64_t table_rows, int64_t neuron) {
    const int64_t half = rotary_dim / 2;
    const bool inside = position >= 0 && position < table_rows;
    for (int64_t i = threadIdx.x % 32; i < half; i += 32) {
        const float first = i == neuron ? 0.0f : load_any(x.data, x.dtype, from + i);
        const float second = i + half == neuron ? 0.0f : load_any(x.data, x.dtype, from + i + half);
        const float c = inside ? cos[position * half + i] : NAN, s = inside ? sin[position * half + i] : NAN;
        store_any(to, dtype, at + i, i == neuron ? 0.0f : first * c - second * s);
        store_any(to, dtype, at + i + half, i + half == neuron ? 0.0f : second * c + first * s);
    }
    for (int64_t d = rotary_dim + threadIdx.x % 32; d < D; d += 32)
        store_any(to, dtype, at + d, d == neuron ? 0.0f : load_any(x.data, x.dtype, from + d));
}

// Element (b, h, t, 0) of a view.
__device__ inline int64_t row_at(const kvc_view& x, int64_t b, int64_t h, int64_t t) {
    return b * x.stride_b + h * x.stride_h + t * x.stride_t;
}

// The first `slots` slots of a page to another page, by a warp: what a row keeps of a page that it shared.
__device__ inline void copy_slots(const kvc_page_table& table, int32_t from, int32_t to, int64_t slots, void* pages,
                                  kvc_dtype dtype, int64_t D) {
    const int64_t source = from * table.P * D, target = to * table.P * D;
    for (int64_t i = threadIdx.x % 32; page_exists(table, to) && i < slots * D; i += 32)
        store_any(pages, dtype, target + i, load_any(pages, dtype, source + i));
}

// D elements, by a warp.
__device__ inline void copy_head(const void* x, int64_t from, void* to, int64_t at, kvc_dtype dtype, int64_t D) {
    for (int64_t d = threadIdx.x % 32; d < D; d += 32) store_any(to, dtype, at + d, load_any(x, dtype, from + d));
}

}  // namespace
