// What the kernels share that begin a decoded step: a head rotated by a warp, and how the caller's scratch is divided.
#pragma once
#include <initializer_list>

#include "decode_list.cuh"
#include "page_table.cuh"
#include "../step.h"

namespace {

constexpr int STEP_THREADS = MOST_THREADS;  // of the block that begins a step: what it waits for are loads
constexpr int STEP_WARPS = STEP_THREADS / 32, PLACE_WARPS = PLAN_THREADS / 32;
constexpr int64_t FEW_HEADS = 128;  // which that block serves itself, a warp at a time

// Whether neighbours at both addresses can be moved by one instruction.
template <class Pair>
__device__ inline bool on_whole(const void* a, const void* b) {
    return (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) % sizeof(Pair) == 0;
}

// One head [D] to `to`, by a warp: rotated by the row of the tables that cos and sin are (NULL: NaN); the neuron (-1:
// none) 0 before and after. Two neighbours a lane and turn, so that heads up to 128 wait for memory once.
template <class T>
__device__ inline void rotate_pairs(const T* from, T* to, int D, int half, const float* cos, const float* sin, int neuron) {
    using pair = packed<T, 2>;
    const int lane = threadIdx.x % 32;
    for (int i = 2 * lane; i < half; i += 64) {
        pair x = *reinterpret_cast<const pair*>(from + i), y = *reinterpret_cast<const pair*>(from + half + i);
        KVC_UNROLL
        for (int e = 0; e < 2; e++) {
            const bool first = i + e == neuron, second = i + e + half == neuron;
            const float a = first ? 0.0f : to_float(x.at[e]), b = second ? 0.0f : to_float(y.at[e]);
            const float c = cos ? cos[i + e] : NAN, s = sin ? sin[i + e] : NAN;
            from_float(first ? 0.0f : a * c - b * s, x.at[e]);
            from_float(second ? 0.0f : b * c + a * s, y.at[e]);
        }
        *reinterpret_cast<pair*>(to + i) = x;
        *reinterpret_cast<pair*>(to + half + i) = y;
    }
    for (int d = 2 * half + lane; d < D; d += 32) {
        if (d == neuron) from_float(0.0f, to[d]);
        else to[d] = from[d];
    }
}

// The same from a view's row to `to` + at of another array, of any types and sizes; NaN for a position outside the tables.
__device__ inline void rotate_head(const kvc_view& x, int64_t from, void* to, kvc_dtype dtype, int64_t at, int64_t D,
                                   int64_t rotary_dim, const float* cos, const float* sin, int64_t position,
                                   int64_t table_rows, int64_t neuron) {
    const int64_t half = rotary_dim / 2;
    const bool inside = position >= 0 && position < table_rows;
    if (x.dtype == dtype && half % 2 == 0) {
        const float *c = inside ? cos + position * half : nullptr, *s = inside ? sin + position * half : nullptr;
        const auto pairs = [&](auto type) {
            using T = decltype(type);
            const T* source = static_cast<const T*>(x.data) + from;
            T* target = static_cast<T*>(to) + at;
            if (!on_whole<packed<T, 2>>(source, target)) return false;
            rotate_pairs(source, target, static_cast<int>(D), static_cast<int>(half), c, s, static_cast<int>(neuron));
            return true;
        };
        if (dtype == KVC_F32 ? pairs(float{}) : dtype == KVC_BF16 ? pairs(bf16{}) : pairs(f16{})) return;
    }
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

// Vector `from` of a step's queries or keys to `to` + at, at its position.
__device__ inline void turn_head(const kvc_step& a, const kvc_view& x, int64_t from, void* to, int64_t at, int64_t position,
                                 int64_t neuron) {
    rotate_head(x, from, to, x.dtype, at, a.D, a.rotary_dim, a.cos, a.sin, position, a.table_rows, neuron);
}

// The first `slots` slots, of so many bytes, of a page to another page, by a warp: what a row keeps of a page that it shared.
__device__ inline void copy_slots(const kvc_page_table& table, int32_t from, int32_t to, int64_t slots, void* pages,
                                  int64_t slot_bytes) {
    if (!page_exists(table, to)) return;
    const auto copy = [&](auto unit) {
        using Unit = decltype(unit);
        const int64_t page = table.P * slot_bytes / static_cast<int64_t>(sizeof(Unit));
        const int64_t count = slots * slot_bytes / static_cast<int64_t>(sizeof(Unit));
        Unit* at = static_cast<Unit*>(pages);
        for (int64_t i = threadIdx.x % 32; i < count; i += 32) at[to * page + i] = at[from * page + i];
    };
    const uint64_t every = reinterpret_cast<uintptr_t>(pages) | static_cast<uint64_t>(slot_bytes);
    if (every % 4 == 0) copy(uint32_t{});
    else if (every % 2 == 0) copy(uint16_t{});
    else copy(uint8_t{});
}

// D elements, by a warp; four neighbours a lane where they lie so.
template <class T>
__device__ inline void copy_elements(const T* from, T* to, int D) {
    const int lane = threadIdx.x % 32;
    if (D % 4 == 0 && on_whole<packed<T, 4>>(from, to)) {
        for (int d = 4 * lane; d < D; d += 128)
            *reinterpret_cast<packed<T, 4>*>(to + d) = *reinterpret_cast<const packed<T, 4>*>(from + d);
        return;
    }
    for (int d = lane; d < D; d += 32) to[d] = from[d];
}

__device__ inline void copy_head(const void* x, int64_t from, void* to, int64_t at, kvc_dtype dtype, int64_t D) {
    const int columns = static_cast<int>(D);
    if (dtype == KVC_F32) copy_elements(static_cast<const float*>(x) + from, static_cast<float*>(to) + at, columns);
    else copy_elements(static_cast<const bf16*>(x) + from, static_cast<bf16*>(to) + at, columns);  // any 16 bits
}

// ---- host ----

// Heads that the block which begins a step serves itself: a few, and none whose codes want more registers than it has for
// `most` elements.
inline int64_t heads_alone(const kvc_step& a, int64_t heads, bool codes, int64_t most) {
    return heads <= FEW_HEADS && !(codes && a.D > most) ? heads : 0;
}

// Blocks of PLAN_THREADS that place so many heads.
inline unsigned place_blocks(int64_t heads) {
    const int64_t blocks = ceil_div(heads, PLACE_WARPS);
    return static_cast<unsigned>(blocks < MAX_GRID_X ? blocks : MAX_GRID_X);
}

// What a launcher says of what was checked and is not to be launched.
inline cudaError_t error_of(kvc_status checked) { return checked == KVC_OK ? cudaSuccess : cudaErrorInvalidValue; }

}  // namespace
