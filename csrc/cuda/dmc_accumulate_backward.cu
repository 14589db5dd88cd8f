// Gradients of DMC's partial averages with a full history: see kvc_dmc_accumulate_backward in kvc.h.
//
// Must move: keys, values and the gradients of both averages in, the gradients of keys and values out, 3*2*R*T*D*(bytes
// of an element), 20 bytes per gate, and 8*D bytes of states per chunk of 64. Keys and values of a chunk are read a
// second time from cache, and of the gradients of averages again what reaches a segment from behind. Six multiply-adds
// per element: the ceiling is memory bandwidth.
#include <initializer_list>

#include "dmc.cuh"
#include "recurrence.cuh"

namespace {

constexpr int GROUP = 8;  // tokens whose states a lane holds in registers
constexpr int CHUNK = KVC_DMC_CHUNK;

// The parts of the caller's scratch.
struct workspace {
    float* dbeta;    // [2 * slabs, R, T]: what each slab of keys and of values adds to it
    float* carries;  // [R, segments, 2, D]: what comes into a segment from behind
    float* shares;   // [R, segments]: how much of what comes into the next one goes on to it
};

workspace workspace_of(const kvc_dmc_accumulate_args& a, const dmc_cut& cut, void* scratch) {
    workspace w;
    w.dbeta = static_cast<float*>(scratch);
    w.carries = w.dbeta + 2 * cut.slabs * cut.rows * a.T;
    w.shares = w.carries + cut.rows * cut.segments * 2 * a.D;
    return w;
}

// Sums of GROUP values over the warp: lane l gets that of value l / 4. The two halves of the warp divide the values between
// them, then the quarters: 9 shuffles in place of 40.
__device__ inline float warp_sums(float (&x)[GROUP]) {
    static_assert(GROUP == 8, "three halvings leave one value per lane");
    const int lane = threadIdx.x % 32;
    KVC_UNROLL
    for (int half = 4; half > 0; half /= 2) {
        const bool upper = lane & 4 * half;
        KVC_UNROLL
        for (int i = 0; i < half; i++) {
            const float own = upper ? x[half + i] : x[i], other = upper ? x[i] : x[half + i];
            x[i] = own + __shfl_xor_sync(FULL_WARP, other, 4 * half);
        }
    }
    const float sum = x[0] + __shfl_xor_sync(FULL_WARP, x[0], 2);
    return sum + __shfl_xor_sync(FULL_WARP, sum, 1);
}

// What of the gradient of token t + 1 reaches token t; 0 at the end of the row.
__device__ inline float share_of_next(const dmc_row& row, int64_t t, int64_t T) {
    return t + 1 < T ? share_of(row, t + 1) : 0.0f;
}

// G[t] of the first token of segment s + 1, as if nothing lay behind that segment.
template <bool WHOLE, class X>
__global__ __launch_bounds__(WARPS * 32, RESIDENT) void starts_kernel(const kvc_dmc_accumulate_backward_args args, const dmc_cut cut, const workspace w) {
    const kvc_dmc_accumulate_args& a = args.forward;
    constexpr int AHEAD = lane_columns<WHOLE, X>::AHEAD;
    const int lane = threadIdx.x % 32;
    for (int64_t i = first_warp(); i < cut.rows * (cut.segments - 1) * 2 * cut.slabs; i += warps_between()) {
        const dmc_item item = item_of(cut, i, cut.segments - 1);
        const dmc_row row = row_of(a, item.row);
        const lane_columns<WHOLE, X> dout(item.which ? args.dout_v : args.dout_k, a, item, item.which ? -1 : a.neuron);
        const int64_t first = first_token(cut, item.segment + 1, a.T), after = first_token(cut, item.segment + 2, a.T);
        // tokens whose gradient still counts at the first one; share: of the one behind them
        int64_t end = first;
        float share = 1.0f;
        while (end < after && share >= FADED) {
            share *= warp_product(end + lane < after ? share_of_next(row, end + lane, a.T) : 1.0f);
            end = end + 32 < after ? end + 32 : after;
        }
        float G[COLUMNS] = {};
        for (int64_t group = (end - 1 - first) / 32 * 32 + first; group >= first; group -= 32) {
            const float next = group + lane + 1 < end ? share_of(row, group + lane + 1) : 0.0f;
            // Tokens behind the last one leave in G what its share, 0, drops
            for (int begin = 32 - AHEAD; begin >= 0; begin -= AHEAD) {
                if (group + begin >= end) continue;
                typename lane_columns<WHOLE, X>::raw x[AHEAD];
                KVC_UNROLL
                for (int j = 0; j < AHEAD; j++) x[j] = dout.load(group + begin + j);
                KVC_UNROLL
                for (int j = AHEAD - 1; j >= 0; j--) {
                    float g[COLUMNS];
                    dout.unpack(g, x[j]);
                    advance(G, __shfl_sync(FULL_WARP, next, begin + j), 1.0f, g);
                }
            }
        }
        store_columns<false>(w.carries + ((item.row * cut.segments + item.segment) * 2 + item.which) * a.D, G, item.d, a.D);
        if (item.which == 0 && item.d == 0) w.shares[item.row * cut.segments + item.segment] = share >= FADED ? share : 0.0f;
    }
}

// A thread per column of the keys and values of a row, from its last segment.
__global__ __launch_bounds__(WARPS * 32) void join_back_kernel(const kvc_dmc_accumulate_args a, const dmc_cut cut, const workspace w) {
    const int64_t place = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x, r = place / (2 * a.D);
    if (r >= cut.rows) return;
    float* carry = w.carries + r * cut.segments * 2 * a.D + place % (2 * a.D);
    float later = carry[(cut.segments - 2) * 2 * a.D];
    for (int64_t s = cut.segments - 3; s >= 0; s--) {
        later = carry[s * 2 * a.D] + kept(w.shares[r * cut.segments + s], later);
        carry[s * 2 * a.D] = later;
    }
}

template <bool WHOLE, class X>
__global__ __launch_bounds__(WARPS * 32, WHOLE ? RESIDENT - 1 : RESIDENT - 2) void backward_kernel(const kvc_dmc_accumulate_backward_args args, const dmc_cut cut, const workspace w) {
    __shared__ float starts_of_groups[WARPS][CHUNK / GROUP][SLAB];  // each lane reads what it wrote
    const kvc_dmc_accumulate_args& a = args.forward;
    const int lane = threadIdx.x % 32;
    for (int64_t i = first_warp(); i < cut.rows * cut.segments * 2 * cut.slabs; i += warps_between()) {
        const dmc_item item = item_of(cut, i, cut.segments);
        const dmc_row row = row_of(a, item.row);
        const int64_t neuron = item.which ? -1 : a.neuron, first = item.segment * cut.span;
        const lane_columns<WHOLE, X> tokens(item.which ? a.v : a.k, a, item, neuron);
        const lane_columns<WHOLE, X> dtokens(item.which ? args.dv : args.dk, a, item, neuron);
        const lane_columns<WHOLE, X> douts(item.which ? args.dout_v : args.dout_k, a, item, neuron);
        const int64_t last = first + cut.span < cut.chunks ? first + cut.span : cut.chunks;
        float* dbeta = w.dbeta + ((item.d / SLAB * 2 + item.which) * cut.rows + item.row) * a.T;
        float G[COLUMNS] = {};
        if (item.segment + 1 < cut.segments)
            load_columns<false>(G, w.carries + ((item.row * cut.segments + item.segment) * 2 + item.which) * a.D, item.d,
                                a.D, -1);
        for (int64_t chunk = last - 1; chunk >= first; chunk--) {
            const int64_t t0 = chunk * CHUNK;
            float state[COLUMNS];
            load_columns<false>(state, a.states + ((item.row * cut.chunks + chunk) * 2 + item.which) * a.D, item.d, a.D, -1);
            // the states before each group
            for (int64_t half = t0; half < t0 + CHUNK && half < a.T; half += 32) {
                const float keep = half + lane < a.T ? share_of(row, half + lane) : 0.0f;
                const float add = half + lane < a.T ? row.omega[half + lane] / row.z[half + lane] : 0.0f;
                for (int group = 0; group < 32 && half + group < a.T; group += GROUP) {
                    float* start = starts_of_groups[threadIdx.x / 32][(half - t0 + group) / GROUP] + lane * COLUMNS;
                    KVC_UNROLL
                    for (int e = 0; e < COLUMNS; e++) start[e] = state[e];
                    typename lane_columns<WHOLE, X>::raw from[GROUP];
                    KVC_UNROLL
                    for (int j = 0; j < GROUP; j++) from[j] = tokens.load(half + group + j);
                    KVC_UNROLL
                    for (int j = 0; j < GROUP; j++) {
                        float x[COLUMNS];
                        tokens.unpack(x, from[j]);
                        advance(state, __shfl_sync(FULL_WARP, keep, group + j), __shfl_sync(FULL_WARP, add, group + j), x);
                    }
                }
            }
            for (int64_t half = t0 + CHUNK - 32; half >= t0; half -= 32) {
                if (half >= a.T) continue;
                const bool there = half + lane < a.T;
                const float keep = there ? share_of(row, half + lane) : 0.0f;
                const float add = there ? row.omega[half + lane] / row.z[half + lane] : 0.0f;
                const float next = there ? share_of_next(row, half + lane, a.T) : 0.0f;
                float sum = 0.0f;  // dbeta of token half + lane
                for (int group = 32 - GROUP; group >= 0; group -= GROUP) {
                    if (half + group >= a.T) continue;
                    const float* start = starts_of_groups[threadIdx.x / 32][(half - t0 + group) / GROUP] + lane * COLUMNS;
                    KVC_UNROLL
                    for (int e = 0; e < COLUMNS; e++) state[e] = start[e];
                    typename lane_columns<WHOLE, X>::raw x[GROUP], g[GROUP];
                    KVC_UNROLL
                    for (int j = 0; j < GROUP; j++) x[j] = tokens.load(half + group + j);
                    KVC_UNROLL
                    for (int j = 0; j < GROUP; j++) g[j] = douts.load(half + group + j);
                    float difference[GROUP][COLUMNS], dots[GROUP] = {};
                    KVC_UNROLL
                    for (int j = 0; j < GROUP; j++) {
                        float token[COLUMNS];
                        tokens.unpack(token, x[j]);
                        KVC_UNROLL
                        for (int e = 0; e < COLUMNS; e++) difference[j][e] = state[e] - token[e];
                        advance(state, __shfl_sync(FULL_WARP, keep, group + j), __shfl_sync(FULL_WARP, add, group + j), token);
                    }
                    // Tokens behind the last one leave in G what its share, 0, drops
                    KVC_UNROLL
                    for (int j = GROUP - 1; j >= 0; j--) {
                        float dout[COLUMNS], dx[COLUMNS];
                        douts.unpack(dout, g[j]);
                        advance(G, __shfl_sync(FULL_WARP, next, group + j), 1.0f, dout);
                        const float share = __shfl_sync(FULL_WARP, add, group + j);
                        KVC_UNROLL
                        for (int e = 0; e < COLUMNS; e++) {
                            dots[j] = fmaf(G[e], difference[j][e], dots[j]);
                            dx[e] = item.d + e == neuron ? 0.0f : share * G[e];
                        }
                        if (half + group + j < a.T) dtokens.store(half + group + j, dx);
                    }
                    const float dot = __shfl_sync(FULL_WARP, warp_sums(dots), 4 * (lane - group));
                    if (lane >= group && lane < group + GROUP) sum = dot;
                }
                if (there) dbeta[half + lane] = sum;
            }
        }
    }
}

// A block per row, from its last token: the gradient of z[t] through the tokens behind t, and from it dalpha and domega.
__global__ __launch_bounds__(MOST_THREADS) void gates_kernel(const kvc_dmc_accumulate_backward_args args, const dmc_cut cut, const workspace w) {
    const kvc_dmc_accumulate_args& a = args.forward;
    const int64_t r = blockIdx.x;
    const dmc_row row = row_of(a, r);
    const auto dbeta_of = [&](int64_t t) {
        float sum = 0.0f;
        for (int64_t part = 0; part < 2 * cut.slabs; part++) sum += w.dbeta[(part * cut.rows + r) * a.T + t];
        return sum;
    };
    // through the share that is kept: gradient of a z[t-1]; z*z might underflow
    const auto old_of = [&](int64_t t) { return dbeta_of(t) * (row.omega[t] / row.z[t] / row.z[t]); };
    run_recurrence(
        a.T, 0.0f,
        [&](int64_t i) {
            const int64_t t = a.T - 1 - i;
            const float alpha = alpha_of(row, t);
            return alpha == 0.0f ? affine{0.0f, 0.0f} : affine{alpha, alpha * old_of(t)};
        },
        [&](int64_t i, float later, float) {
            const int64_t t = a.T - 1 - i;
            const bool start = starts(row, t);
            const float alpha = start ? 0.0f : row.alpha[t];
            args.dalpha[r * a.T + t] = start ? 0.0f : z_before(row, t) * (later + old_of(t));
            const float own = alpha == 0.0f ? 0.0f : alpha * z_before(row, t) / row.z[t] / row.z[t];
            args.domega[r * a.T + t] = start ? later : later - dbeta_of(t) * own;
        });
}

bool valid(const kvc_dmc_accumulate_backward_args& args) {
    const kvc_dtype dtype = args.forward.k.dtype;
    if (!valid_dmc_inputs(args.forward)) return false;
    if (args.dout_k.dtype != dtype || args.dout_v.dtype != dtype || args.dk.dtype != dtype || args.dv.dtype != dtype)
        return false;
    if (dmc_nothing_to_do(args.forward)) return true;
    return args.dout_k.data && args.dout_v.data && args.dk.data && args.dv.data && args.dalpha && args.domega && args.scratch;
}

}  // namespace

extern "C" int64_t kvc_cuda_dmc_accumulate_backward_scratch_bytes(const kvc_dmc_accumulate_backward_args* args) {
    const kvc_dmc_accumulate_args& a = args->forward;
    if (!valid_dmc_sizes(a) || dmc_nothing_to_do(a)) return 0;
    const dmc_cut cut = cut_of(a);
    const int64_t size = sizeof(float);
    if (dmc_windowed(a)) return 2 * cut.rows * a.T * a.window * size;
    return cut.rows * (2 * cut.slabs * a.T + cut.segments * (2 * a.D + 1)) * size;
}

extern "C" cudaError_t kvc_cuda_dmc_accumulate_backward(const kvc_dmc_accumulate_backward_args* args,
                                                        cudaStream_t stream) {
    const kvc_dmc_accumulate_args& a = args->forward;
    if (!valid(*args)) return cudaErrorInvalidValue;
    if (dmc_nothing_to_do(a)) return cudaSuccess;
    if (dmc_windowed(a)) return dmc_window_backward(*args, stream);
    const dmc_cut cut = cut_of(a);
    const workspace w = workspace_of(a, cut, args->scratch);
    bool whole = a.D % COLUMNS == 0;
    for (const kvc_view* view : {&a.k, &a.v, &args->dout_k, &args->dout_v, &args->dk, &args->dv})
        whole = whole && aligned_16(*view);
    const int64_t slabs = cut.rows * 2 * cut.slabs, threads = 128, blocks = ceil_div(cut.rows * 2 * a.D, threads);
    if (blocks > MAX_GRID_X) return cudaErrorInvalidValue;
    const auto launch = [&](auto from_behind, auto backward) {
        if (cut.segments > 1)
            KVC_LAUNCH((from_behind), grid_of_warps(slabs * (cut.segments - 1)), WARPS * 32, 0, stream, *args, cut, w);
        if (cut.segments > 2)
            KVC_LAUNCH(join_back_kernel, static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, stream, a, cut, w);
        KVC_LAUNCH((backward), grid_of_warps(slabs * cut.segments), WARPS * 32, 0, stream, *args, cut, w);
        KVC_LAUNCH(gates_kernel, static_cast<unsigned>(cut.rows), recurrence_threads(a.T), 0, stream, *args, cut, w);
        return cudaSuccess;
    };
    return with_dtype(a.k.dtype, [&](auto type) {
        using X = decltype(type);
        if (whole) return launch(starts_kernel<true, X>, backward_kernel<true, X>);
        return launch(starts_kernel<false, X>, backward_kernel<false, X>);
    });
}
