// x[t] = factor[t]*x[t-1] + term[t] of one row by one block, tile by tile: the same order of operations every time.
#pragma once
#include "types.cuh"

constexpr int RECURRENCE_ITEMS = 4;  // neighbouring steps of a thread

// x -> factor*x + term. A factor of 0 drops what comes before, whatever it is.
struct affine {
    float factor, term;
};

__device__ inline float apply(const affine& step, float x) {
    return step.factor == 0.0f ? step.term : fmaf(step.factor, x, step.term);
}

__device__ inline affine compose(const affine& first, const affine& second) {
    return {second.factor == 0.0f ? 0.0f : first.factor * second.factor, apply(second, first.term)};
}

// step_of(t): the affine of step t of T. use(t, before, after). x: what comes before step 0. Every thread of the block
// must call it; blockDim.x is a multiple of 32, at most 1024.
template <class StepOf, class Use>
__device__ inline void run_recurrence(int64_t T, float x, StepOf step_of, Use use) {
    __shared__ affine totals[32];
    __shared__ float carry;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int64_t tile = 0; tile < T; tile += blockDim.x * static_cast<int64_t>(RECURRENCE_ITEMS)) {
        const int64_t first = tile + threadIdx.x * static_cast<int64_t>(RECURRENCE_ITEMS);
        affine steps[RECURRENCE_ITEMS], through = {1.0f, 0.0f};
        KVC_UNROLL
        for (int i = 0; i < RECURRENCE_ITEMS; i++) {
            steps[i] = first + i < T ? step_of(first + i) : affine{1.0f, 0.0f};
            through = compose(through, steps[i]);
        }
        KVC_UNROLL
        for (int step = 1; step < 32; step *= 2) {
            const affine below = {__shfl_up_sync(FULL_WARP, through.factor, step),
                                  __shfl_up_sync(FULL_WARP, through.term, step)};
            if (lane >= step) through = compose(below, through);
        }
        if (lane == 31) totals[warp] = through;
        const affine before = {__shfl_up_sync(FULL_WARP, through.factor, 1), __shfl_up_sync(FULL_WARP, through.term, 1)};
        __syncthreads();
        float at = x;
        for (int i = 0; i < warp; i++) at = apply(totals[i], at);
        if (lane > 0) at = apply(before, at);
        KVC_UNROLL
        for (int i = 0; i < RECURRENCE_ITEMS; i++) {
            const float next = apply(steps[i], at);
            if (first + i < T) use(first + i, at, next);
            at = next;
        }
        if (lane == 31 && warp == warps - 1) carry = at;
        __syncthreads();
        x = carry;
    }
}

// Threads of a block for a row of T steps.
inline unsigned recurrence_threads(int64_t T) {
    const int64_t wanted = ceil_div(ceil_div(T, RECURRENCE_ITEMS), 32) * 32;
    return static_cast<unsigned>(wanted < 1024 ? wanted : 1024);
}
