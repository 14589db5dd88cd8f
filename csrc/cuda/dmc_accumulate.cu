// DMC's partial averages with a full history: see kvc_dmc_accumulate in kvc.h.
//
// Must move: keys and values in and out once, 2*R*T*D*(bytes of both), 12 bytes per gate, and 8*D bytes of states per
// chunk of 64. The end of a segment is computed first as if nothing lay before it, from the tokens that count for it:
// a few where entries are short, all of them (half as much again to read) where they are long. Two multiply-adds per
// element: the ceiling is memory bandwidth.
#include "dmc.cuh"
#include "recurrence.cuh"

namespace {

constexpr int JOINED = 8;  // segments whose ends a thread reads before it uses the first

__device__ inline float* states_at(const kvc_dmc_accumulate_args& a, const dmc_cut& cut, int64_t row, int64_t chunk) {
    return a.states + (row * cut.chunks + chunk) * 2 * a.D;
}

// A block per row.
__global__ __launch_bounds__(MOST_THREADS) void weights_kernel(const kvc_dmc_accumulate_args a) {
    const int64_t r = blockIdx.x;
    const dmc_row row = row_of(a, r);
    float* z = a.z + r * a.T;
    run_recurrence(
        a.T, row.initial_z, [&](int64_t t) { return affine{alpha_of(row, t), row.omega[t]}; },
        [&](int64_t t, float, float now) { z[t] = now; });
}

// The tokens that are averaged: keys without the neuron, or values.
template <bool WHOLE, class X>
__device__ inline lane_columns<WHOLE, X> averaged(const kvc_dmc_accumulate_args& a, const dmc_item& item) {
    return {item.which ? a.v : a.k, a, item, item.which ? -1 : a.neuron};
}

// Takes a warp's columns of tokens [begin, end) into state; STORED: `out` gets the state behind each of them.
template <bool STORED, bool WHOLE, class X>
__device__ inline void fold(const dmc_row& row, const lane_columns<WHOLE, X>& from, const lane_columns<WHOLE, X>& out,
                            int64_t begin, int64_t end, float (&state)[COLUMNS]) {
    constexpr int AHEAD = lane_columns<WHOLE, X>::AHEAD;
    const int64_t lane = threadIdx.x % 32;
    for (int64_t group = begin; group < end; group += 32) {
        const int n = static_cast<int>(end - group < 32 ? end - group : 32);
        const float keep = lane < n ? share_of(row, group + lane) : 0.0f;
        const float add = lane < n ? row.omega[group + lane] / row.z[group + lane] : 0.0f;
        for (int first = 0; first < n; first += AHEAD) {
            typename lane_columns<WHOLE, X>::raw x[AHEAD];
            KVC_UNROLL
            for (int i = 0; i < AHEAD; i++) x[i] = from.load(group + first + i);
            KVC_UNROLL
            for (int i = 0; i < AHEAD; i++) {  // behind the last token of a row the state is lost, but nobody asks for it
                float token[COLUMNS];
                from.unpack(token, x[i]);
                advance(state, __shfl_sync(FULL_WARP, keep, first + i), __shfl_sync(FULL_WARP, add, first + i), token);
                if (STORED && first + i < n) out.store(group + first + i, state);
            }
        }
    }
}

// The end of segment s, as the state before segment s + 1, and what it leaves of the state before it; 0 if that has
// faded: then the tokens before those that were read have too.
template <bool WHOLE, class X>
__global__ __launch_bounds__(WARPS * 32, RESIDENT) void ends_kernel(const kvc_dmc_accumulate_args a, const dmc_cut cut) {
    const int64_t lane = threadIdx.x % 32, items = cut.rows * (cut.segments - 1) * 2 * cut.slabs;
    float* shares = static_cast<float*>(a.scratch);
    for (int64_t i = first_warp(); i < items; i += warps_between()) {
        const dmc_item item = item_of(cut, i, cut.segments - 1);
        const dmc_row row = row_of(a, item.row);
        const int64_t first = first_token(cut, item.segment, a.T), end = first_token(cut, item.segment + 1, a.T);
        float share = 1.0f, state[COLUMNS] = {};
        int64_t begin = end;
        while (begin > first && share >= FADED) {  // a segment is a multiple of 32 tokens
            begin -= 32;
            share *= warp_product(share_of(row, begin + lane));
        }
        const lane_columns<WHOLE, X> from = averaged<WHOLE, X>(a, item);
        fold<false>(row, from, from, begin, end, state);
        float* to = states_at(a, cut, item.row, (item.segment + 1) * cut.span) + item.which * a.D;
        store_columns<false>(to, state, item.d, a.D);
        // also a NaN: the tokens behind it are NaN anyway
        if (item.which == 0 && item.d == 0) shares[item.row * (cut.segments - 1) + item.segment] = share >= FADED ? share : 0.0f;
    }
}

// A thread per column of the keys and values of a row: the states before all its segments.
__global__ __launch_bounds__(WARPS * 32) void join_kernel(const kvc_dmc_accumulate_args a, const dmc_cut cut) {
    const int64_t place = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x, r = place / (2 * a.D);
    if (r >= cut.rows) return;
    const int64_t column = place % (2 * a.D), d = column % a.D, joints = cut.segments - 1;
    const float* shares = static_cast<const float*>(a.scratch) + r * joints;
    float state = 0.0f;
    if (a.initial_z && column != a.neuron) state = (column < a.D ? a.initial_k : a.initial_v)[r * a.D + d];
    states_at(a, cut, r, 0)[column] = state;
    for (int64_t first = 0; first < joints; first += JOINED) {
        float share[JOINED], end[JOINED];
        KVC_UNROLL
        for (int i = 0; i < JOINED; i++) {
            if (first + i >= joints) continue;
            share[i] = shares[first + i];
            end[i] = states_at(a, cut, r, (first + i + 1) * cut.span)[column];
        }
        KVC_UNROLL
        for (int i = 0; i < JOINED; i++) {
            if (first + i >= joints) continue;
            state = end[i] + kept(share[i], state);
            states_at(a, cut, r, (first + i + 1) * cut.span)[column] = state;
        }
    }
}

template <bool WHOLE, class X>
__global__ __launch_bounds__(WARPS * 32, RESIDENT) void forward_kernel(const kvc_dmc_accumulate_args a, const dmc_cut cut) {
    const int64_t items = cut.rows * cut.segments * 2 * cut.slabs;
    for (int64_t i = first_warp(); i < items; i += warps_between()) {
        const dmc_item item = item_of(cut, i, cut.segments);
        const dmc_row row = row_of(a, item.row);
        const int64_t first = item.segment * cut.span;
        const int64_t last = first + cut.span < cut.chunks ? first + cut.span : cut.chunks;
        const lane_columns<WHOLE, X> from = averaged<WHOLE, X>(a, item), out(item.which ? a.out_v : a.out_k, a, item, -1);
        float state[COLUMNS];
        for (int64_t chunk = first; chunk < last; chunk++) {
            const int64_t t = chunk * KVC_DMC_CHUNK, end = t + KVC_DMC_CHUNK < a.T ? t + KVC_DMC_CHUNK : a.T;
            float* states = states_at(a, cut, item.row, chunk) + item.which * a.D;
            if (chunk == first)
                load_columns<false>(state, states, item.d, a.D, -1);
            else
                store_columns<false>(states, state, item.d, a.D);
            fold<true>(row, from, out, t, end, state);
        }
    }
}

}  // namespace

bool valid_dmc_sizes(const kvc_dmc_accumulate_args& a) {
    if (a.B < 0 || a.Hkv < 0 || a.T < 0 || a.T >= INT32_MAX || a.D < 1 || a.D > KVC_CUDA_MAX_HEAD_DIM) return false;
    if (a.neuron < -1 || a.neuron >= a.D || a.window < 0 || (a.window && a.initial_z)) return false;
    if (a.window > KVC_DMC_MAX_WINDOW && a.window < a.T) return false;
    if (dmc_nothing_to_do(a)) return true;
    return a.B <= MAX_GRID_X / a.Hkv / 4 / ceil_div(a.D, SLAB);  // items are counted in 32 bits
}

bool valid_dmc_inputs(const kvc_dmc_accumulate_args& a) {
    if (!valid_dmc_sizes(a) || !dtype_known(a.k.dtype) || a.v.dtype != a.k.dtype) return false;
    if (dmc_nothing_to_do(a)) return true;
    if (!a.k.data || !a.v.data || !a.alpha || !a.omega || !a.z) return false;
    return dmc_windowed(a) || a.states;
}

extern "C" int64_t kvc_cuda_dmc_accumulate_scratch_bytes(const kvc_dmc_accumulate_args* args) {
    if (!valid_dmc_sizes(*args) || dmc_nothing_to_do(*args) || dmc_windowed(*args)) return 0;
    const dmc_cut cut = cut_of(*args);
    return cut.rows * (cut.segments - 1) * static_cast<int64_t>(sizeof(float));
}

extern "C" cudaError_t kvc_cuda_dmc_accumulate(const kvc_dmc_accumulate_args* args, cudaStream_t stream) {
    const kvc_dmc_accumulate_args& a = *args;
    if (!valid_dmc_inputs(a) || a.out_k.dtype != a.k.dtype || a.out_v.dtype != a.k.dtype) return cudaErrorInvalidValue;
    if (dmc_nothing_to_do(a)) return cudaSuccess;
    if (!a.out_k.data || !a.out_v.data || (a.initial_z && (!a.initial_k || !a.initial_v))) return cudaErrorInvalidValue;
    if (dmc_windowed(a)) return dmc_window_forward(a, stream);
    const dmc_cut cut = cut_of(a);
    if (cut.segments > 1 && !a.scratch) return cudaErrorInvalidValue;
    const bool whole = a.D % COLUMNS == 0 && aligned_16(a.k) && aligned_16(a.v) && aligned_16(a.out_k) && aligned_16(a.out_v);
    KVC_LAUNCH(weights_kernel, static_cast<unsigned>(cut.rows), recurrence_threads(a.T), 0, stream, a);
    const auto launch = [&](auto ends, auto forward) {
        const int64_t slabs = cut.rows * 2 * cut.slabs;
        if (cut.segments > 1)
            KVC_LAUNCH((ends), grid_of_warps(slabs * (cut.segments - 1)), WARPS * 32, 0, stream, a, cut);
        const int64_t threads = 128, blocks = ceil_div(cut.rows * 2 * a.D, threads);
        if (blocks > MAX_GRID_X) return cudaErrorInvalidValue;
        KVC_LAUNCH(join_kernel, static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, stream, a, cut);
        KVC_LAUNCH((forward), grid_of_warps(slabs * cut.segments), WARPS * 32, 0, stream, a, cut);
        return cudaSuccess;
    };
    return with_dtype(a.k.dtype, [&](auto type) {
        using X = decltype(type);
        if (whole) return launch(ends_kernel<true, X>, forward_kernel<true, X>);
        return launch(ends_kernel<false, X>, forward_kernel<false, X>);
    });
}
