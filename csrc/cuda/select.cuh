// Top-k of a row of scores by a block: see kvc_select_topk in kvc.h.
//
// Radix select: floats become uint32 keys of the same order; four passes of 8 bits narrow down the k-th largest key;
// then everything above it, and the first few equal to it, are written in order of index.
#pragma once
#include "types.cuh"

namespace {

constexpr int BINS = 256;
constexpr int SELECT_WARPS = 32;  // most of a block
constexpr uint32_t NO_KEY = 0;  // of NaN; below the key of -inf, so that it is never above a threshold

__device__ inline uint32_t key_of(float x) {
    if (x != x) return NO_KEY;
    const uint32_t bits = float_bits(x == 0.0f ? 0.0f : x);  // -0 and +0 tie
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Adds the row's keys that agree with `prefix` above `shift` + 8 bits to the histogram of the next 8 bits.
__device__ inline void count_digits(int* bins, const float* scores, int64_t length, uint32_t prefix, int shift) {
    const auto add = [&](float score) {
        const uint32_t key = key_of(score);
        if (shift == 24 || key >> (shift + 8) == prefix >> (shift + 8)) atomicAdd(&bins[key >> shift & 255u], 1);
    };
    const bool wide = reinterpret_cast<uintptr_t>(scores) % 16 == 0;
    const int64_t quads = wide ? length / 4 : 0;
    for (int64_t i = threadIdx.x; i < quads; i += blockDim.x) {
        float four[4];
        load<4>(four, scores + 4 * i);
        KVC_UNROLL
        for (int e = 0; e < 4; e++) add(four[e]);
    }
    for (int64_t i = 4 * quads + threadIdx.x; i < length; i += blockDim.x) add(scores[i]);
}

// One warp: the highest digit at which the count from the top reaches `wanted`, and how many of that digit are wanted.
// Fewer keys than wanted: digit 0, which leads to NO_KEY as the threshold.
__device__ inline void find_digit(const int* bins, int wanted, int lane, int* digit, int* remaining) {
    constexpr int EACH = BINS / 32;
    const int top = BINS - 1 - lane * EACH;
    int own = 0;
    for (int i = 0; i < EACH; i++) own += bins[top - i];
    int through = own;
    KVC_UNROLL
    for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(FULL_WARP, through, step);
        if (lane >= step) through += below;
    }
    const int above = through - own;
    if (lane == 31 && through < wanted) {
        *digit = 0;
        *remaining = wanted - (through - bins[0]);
    }
    if (above < wanted && wanted <= through) {
        int counted = above, i = 0;
        while (counted + bins[top - i] < wanted) counted += bins[top - i++];
        *digit = top - i;
        *remaining = wanted - counted;
    }
}

// A whole block: the places of the k largest of `length` scores, in rising order; write(j, place) for each j < k, -1 for
// the missing ones.
template <class Write>
__device__ inline void select_row(const float* scores, int64_t length, int64_t k, Write write) {
    __shared__ int bins[BINS];
    __shared__ int found_digit, found_remaining;
    __shared__ int warp_above[SELECT_WARPS], warp_equal[SELECT_WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;

    uint32_t threshold = 0;
    int wanted = static_cast<int>(k);
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < BINS; i += blockDim.x) bins[i] = 0;
        __syncthreads();
        count_digits(bins, scores, length, threshold, shift);
        __syncthreads();
        if (warp == 0) find_digit(bins, wanted, lane, &found_digit, &found_remaining);
        __syncthreads();
        threshold |= static_cast<uint32_t>(found_digit) << shift;
        wanted = found_remaining;
    }
    const int ties = threshold == NO_KEY ? 0 : wanted;  // how many keys equal to the threshold are taken

    // Each warp owns one stretch of the row: count it, learn from the other warps where its output starts, write it.
    const int64_t stretch = ceil_div(ceil_div(length, 32), warps) * 32;
    const int64_t begin = warp * stretch < length ? warp * stretch : length;
    const int64_t end = begin + stretch < length ? begin + stretch : length;
    int above = 0, equal = 0;
    for (int64_t i = begin + lane; i < end; i += 32) {
        const uint32_t key = key_of(scores[i]);
        above += key > threshold;
        equal += key == threshold;
    }
    KVC_UNROLL
    for (int step = 16; step > 0; step /= 2) {
        above += __shfl_xor_sync(FULL_WARP, above, step);
        equal += __shfl_xor_sync(FULL_WARP, equal, step);
    }
    if (lane == 0) {
        warp_above[warp] = above;
        warp_equal[warp] = equal;
    }
    __syncthreads();
    above = equal = 0;
    for (int i = 0; i < warp; i++) {
        above += warp_above[i];
        equal += warp_equal[i];
    }
    const unsigned lower_lanes = (1u << lane) - 1;
    for (int64_t base = begin; base < end; base += 32) {
        const int64_t i = base + lane;
        const uint32_t key = i < end ? key_of(scores[i]) : NO_KEY;
        const bool is_above = i < end && key > threshold, is_equal = i < end && key == threshold;
        const unsigned all_above = __ballot_sync(FULL_WARP, is_above), all_equal = __ballot_sync(FULL_WARP, is_equal);
        const int above_here = above + __popc(all_above & lower_lanes);
        const int equal_here = equal + __popc(all_equal & lower_lanes);
        if (is_above || (is_equal && equal_here < ties))
            write(above_here + (equal_here < ties ? equal_here : ties), i);
        above += __popc(all_above);
        equal += __popc(all_equal);
    }
    // The last warp has counted everything before the end of the row
    if (warp == warps - 1)
        for (int64_t i = above + (equal < ties ? equal : ties) + lane; i < k; i += 32) write(i, -1);
}

// ---- host ----

// Threads of a block that selects from so many scores.
inline unsigned select_threads(int64_t scores) { return scores <= 2048 ? 128 : 1024; }

}  // namespace
