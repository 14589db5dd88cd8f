// What the kernels of DMC's partial averages share: the gates of a row, the columns of a warp, how long rows are cut.
#pragma once
#include <type_traits>

#include "kvc_cuda.h"
#include "types.cuh"

constexpr int WARPS = 4;     // of a block whose warps work alone
constexpr int RESIDENT = 4;  // such blocks of a multiprocessor: 128 registers are there for what a lane reads ahead
constexpr int COLUMNS = 4;   // neighbouring columns of a lane
constexpr int SLAB = 32 * COLUMNS;
constexpr float FADED = 0x1p-40f;  // of the weight: below the rounding of what is there

// ---- gates ----

// Row b*Hkv + h of [B, Hkv, T] gates.
struct dmc_row {
    const float *alpha, *omega, *z;
    float initial_z;
    bool open;  // token 0 continues what was there before
};

__device__ inline dmc_row row_of(const kvc_dmc_accumulate_args& a, int64_t row) {
    return {a.alpha + row * a.T, a.omega + row * a.T, a.z + row * a.T,
            a.initial_z ? a.initial_z[row] : 0.0f, a.initial_z != nullptr};
}

// Whether token t never merges.
__device__ inline bool starts(const dmc_row& row, int64_t t) { return t == 0 && !row.open; }

__device__ inline float alpha_of(const dmc_row& row, int64_t t) { return starts(row, t) ? 0.0f : row.alpha[t]; }

__device__ inline float z_before(const dmc_row& row, int64_t t) { return t ? row.z[t - 1] : row.initial_z; }

// factor*x, and nothing for a factor of 0, whatever x is.
__device__ inline float kept(float factor, float x) { return factor == 0.0f ? 0.0f : factor * x; }

// a z[t-1] / z[t], the share that out[t] keeps of out[t-1].
__device__ inline float share_of(const dmc_row& row, int64_t t) {
    const float alpha = alpha_of(row, t);
    return alpha == 0.0f ? 0.0f : alpha * z_before(row, t) / row.z[t];
}

// ---- warps ----

__device__ inline float warp_sum(float x) {
    KVC_UNROLL
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}

__device__ inline float warp_product(float x) {
    KVC_UNROLL
    for (int step = 16; step > 0; step /= 2) x *= __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}

__device__ inline int64_t first_warp() { return blockIdx.x * static_cast<int64_t>(WARPS) + threadIdx.x / 32; }

__device__ inline int64_t warps_between() { return gridDim.x * static_cast<int64_t>(WARPS); }

// Columns d .. d + COLUMNS - 1 of a row of D; 0 past its end and at `neuron`. WHOLE: 16-byte rows, D a multiple.
template <bool WHOLE, class X>
__device__ inline void load_columns(float (&x)[COLUMNS], const X* row, int64_t d, int64_t D, int64_t neuron) {
    KVC_UNROLL
    for (int e = 0; e < COLUMNS; e++) {
        if constexpr (WHOLE) x[e] = 0.0f;
        else x[e] = d + e < D ? to_float(row[d + e]) : 0.0f;
    }
    if constexpr (WHOLE)
        if (d < D) load<COLUMNS>(x, row + d);
    KVC_UNROLL
    for (int e = 0; e < COLUMNS; e++)
        if (d + e == neuron) x[e] = 0.0f;
}

template <bool WHOLE, class X>
__device__ inline void store_columns(X* row, const float (&x)[COLUMNS], int64_t d, int64_t D) {
    if constexpr (WHOLE) {
        if (d < D) store<COLUMNS>(row + d, x);
    } else {
        KVC_UNROLL
        for (int e = 0; e < COLUMNS; e++)
            if (d + e < D) from_float(x[e], row[d + e]);
    }
}

// state = keep*state + add*x.
__device__ inline void advance(float (&state)[COLUMNS], float keep, float add, const float (&x)[COLUMNS]) {
    KVC_UNROLL
    for (int e = 0; e < COLUMNS; e++) state[e] = fmaf(add, x[e], kept(keep, state[e]));
}

template <class X>
__device__ inline X* token_at(const kvc_view& view, const kvc_dmc_accumulate_args& a, int64_t row, int64_t t) {
    const unsigned heads = static_cast<unsigned>(a.Hkv), r = static_cast<unsigned>(row);
    return static_cast<X*>(view.data) + r / heads * view.stride_b + r % heads * view.stride_h + t * view.stride_t;
}

// ---- how rows are cut ----

#ifdef KVC_CUDA_EMULATION
constexpr int64_t WARPS_WANTED = 32;  // so that rows of a test have segments of several chunks
#else
constexpr int64_t WARPS_WANTED = 4096;
#endif

// A row is cut into segments of `span` chunks, by sizes alone; a warp takes one slab of columns of the keys or of the
// values of a segment.
struct dmc_cut {
    int64_t rows, chunks, span, segments, slabs;
};

inline dmc_cut cut_of(const kvc_dmc_accumulate_args& a) {
    constexpr int64_t FEWEST_CHUNKS = 2;  // of a segment
    dmc_cut cut = {a.B * a.Hkv, ceil_div(a.T, KVC_DMC_CHUNK), 1, 1, ceil_div(a.D, SLAB)};
    const int64_t wanted = ceil_div(WARPS_WANTED, cut.rows * 2 * cut.slabs), most = ceil_div(cut.chunks, FEWEST_CHUNKS);
    cut.span = ceil_div(cut.chunks, wanted < most ? wanted : most);
    cut.segments = ceil_div(cut.chunks, cut.span);
    return cut;
}

__host__ __device__ inline int64_t first_token(const dmc_cut& cut, int64_t segment, int64_t T) {
    const int64_t t = segment * cut.span * KVC_DMC_CHUNK;
    return t < T ? t : T;
}

// What a warp works on.
struct dmc_item {
    int64_t row, segment, d;
    int which;  // 0: keys, 1: values
};

// In 32 bits, which valid_dmc_sizes sees to: a division of 64 bits is a call that costs registers.
__device__ inline dmc_item item_of(const dmc_cut& cut, int64_t index, int64_t count) {
    const unsigned item = static_cast<unsigned>(index), slabs = static_cast<unsigned>(cut.slabs);
    const unsigned segments = static_cast<unsigned>(count);
    dmc_item found;
    found.d = item % slabs * SLAB + threadIdx.x % 32 * COLUMNS;
    found.which = static_cast<int>(item / slabs % 2);
    found.segment = item / slabs / 2 % segments;
    found.row = item / slabs / 2 / segments;
    return found;
}

// ---- the columns of a lane, token by token ----

// Of one row of a view. A column past D reads column 0 and writes nothing, a token past the last one reads that: no branch
// stands between a load and the next one, so that those of AHEAD tokens are on their way at a time.
template <bool WHOLE, class X>
struct lane_columns {
    static constexpr int AHEAD = WHOLE && sizeof(X) == 2 ? 16 : 8;
    // As they lie in memory: 2 to 4 registers of a 16-byte or 8-byte load, or one element each
    using raw = std::conditional_t<WHOLE, std::conditional_t<sizeof(X) == 4, uint4, uint2>, packed<X, COLUMNS>>;

    X* token;  // 0; at the lane's first column if that is inside
    int64_t stride;
    int last;  // token
    bool inside[COLUMNS], counts[COLUMNS];  // not past D; nor the neuron

    __device__ lane_columns(const kvc_view& view, const kvc_dmc_accumulate_args& a, const dmc_item& item, int64_t neuron)
        : token(token_at<X>(view, a, item.row, 0) + (item.d < a.D ? item.d : 0)),
          stride(view.stride_t),
          last(static_cast<int>(a.T) - 1) {
        KVC_UNROLL
        for (int e = 0; e < COLUMNS; e++) {
            inside[e] = item.d + e < a.D;
            counts[e] = inside[e] && item.d + e != neuron;
        }
    }

    __device__ raw load(int64_t t) const {
        const int there = static_cast<int>(t);
        const X* from = token + (there < last ? there : last) * stride;
        if constexpr (WHOLE) {
            return *reinterpret_cast<const raw*>(from);
        } else {
            raw x;
            KVC_UNROLL
            for (int e = 0; e < COLUMNS; e++) x.at[e] = from[inside[e] ? e : 0];
            return x;
        }
    }

    __device__ void unpack(float (&x)[COLUMNS], const raw& from) const {
        packed<X, COLUMNS> elements;
        memcpy(&elements, &from, sizeof elements);
        KVC_UNROLL
        for (int e = 0; e < COLUMNS; e++) x[e] = counts[e] ? to_float(elements.at[e]) : 0.0f;
    }

    __device__ void store(int64_t t, const float (&x)[COLUMNS]) const {
        X* to = token + t * stride;
        if constexpr (WHOLE) {
            if (inside[0]) ::store<COLUMNS>(to, x);
        } else {
            KVC_UNROLL
            for (int e = 0; e < COLUMNS; e++)
                if (inside[e]) from_float(x[e], to[e]);
        }
    }
};

// ---- host ----

inline unsigned grid_of_warps(int64_t items) {
    const int64_t blocks = ceil_div(items, WARPS);
    return static_cast<unsigned>(blocks < MAX_GRID_X ? blocks : MAX_GRID_X);
}

inline bool dmc_windowed(const kvc_dmc_accumulate_args& a) { return a.window > 0 && a.window < a.T; }

inline bool dmc_nothing_to_do(const kvc_dmc_accumulate_args& a) { return a.B == 0 || a.Hkv == 0 || a.T == 0; }

bool valid_dmc_sizes(const kvc_dmc_accumulate_args& args);
bool valid_dmc_inputs(const kvc_dmc_accumulate_args& args);

cudaError_t dmc_window_forward(const kvc_dmc_accumulate_args& args, cudaStream_t stream);
cudaError_t dmc_window_backward(const kvc_dmc_accumulate_backward_args& args, cudaStream_t stream);
