// DMC's partial averages over a window of the last N <= 64 tokens: see kvc_dmc_accumulate in kvc.h.
//
// Must move: what the full history moves, and with gradients 4*N bytes per gate in and out of the scratch twice. Each
// token sums its window anew: N rows per token, from cache but for the first time; a warp takes a few neighbouring
// tokens so that their windows overlap in the first-level cache.
#include <initializer_list>

#include "dmc.cuh"

namespace {

constexpr int TILE = 8;  // tokens of a warp
constexpr int HALVES = KVC_DMC_MAX_WINDOW / 32;

// The window of a token: lane l holds what is l and what is l + 32 tokens away from it.
struct window_of_token {
    int seen;                // tokens within the window
    float product[HALVES];   // of the decisions between the two, those of the later of them included
};

// step -1: the tokens before t, as t's average sees them. step 1: those behind t, in whose averages t is.
__device__ inline window_of_token window_at(const kvc_dmc_accumulate_args& a, const dmc_row& row, int64_t t, int step) {
    const int lane = threadIdx.x % 32;
    window_of_token w = {static_cast<int>(a.window), {}};
    float before = 1.0f;
    KVC_UNROLL
    for (int half = 0; half < HALVES; half++) {
        // decision number l lies between the tokens l and l + 1 away from t
        const int64_t at = step < 0 ? t - half * 32 - lane : t + 1 + half * 32 + lane;
        const bool border = at < 0 || at >= a.T || starts(row, at);
        const unsigned borders = __ballot_sync(FULL_WARP, border);
        const int nearest = half * 32 + __popc((borders & (0u - borders)) - 1u);
        if (borders && nearest + 1 < w.seen) w.seen = nearest + 1;
        float through = border ? 0.0f : row.alpha[at];
        KVC_UNROLL
        for (int distance = 1; distance < 32; distance *= 2) {
            const float below = __shfl_up_sync(FULL_WARP, through, distance);
            if (lane >= distance) through *= below;
        }
        const float nearer = __shfl_up_sync(FULL_WARP, through, 1);
        w.product[half] = lane == 0 ? before : before * nearer;
        before *= __shfl_sync(FULL_WARP, through, 31);
    }
    return w;
}

// Shares of the tokens before t in its average, 0 where there is none; z: their sum before the division.
__device__ inline window_of_token open_window(const kvc_dmc_accumulate_args& a, const dmc_row& row, int64_t t,
                                              float (&share)[HALVES], float* z) {
    const int lane = threadIdx.x % 32;
    const window_of_token w = window_at(a, row, t, -1);
    float sum = 0.0f;
    KVC_UNROLL
    for (int half = 0; half < HALVES; half++) {
        const int away = half * 32 + lane;
        share[half] = away < w.seen ? kept(w.product[half], row.omega[t - away]) : 0.0f;
        sum += share[half];
    }
    *z = warp_sum(sum);
    KVC_UNROLL
    for (int half = 0; half < HALVES; half++) share[half] = share[half] / *z;
    return w;
}

// What lane `away` % 32 holds for the token that far away.
__device__ inline float held_for(const float (&held)[HALVES], int away) {
    const float low = __shfl_sync(FULL_WARP, held[0], away), high = __shfl_sync(FULL_WARP, held[1], away);
    return away < 32 ? low : high;
}

static_assert(HALVES == 2, "held_for tells two halves apart");

template <bool WHOLE, class X>
__global__ __launch_bounds__(WARPS * 32, RESIDENT) void forward_kernel(const kvc_dmc_accumulate_args a, int64_t rows, int64_t tiles) {
    const int lane = threadIdx.x % 32;
    for (int64_t i = first_warp(); i < rows * tiles; i += warps_between()) {
        const int64_t r = i / tiles;
        const dmc_row row = row_of(a, r);
        for (int64_t t = i % tiles * TILE; t < (i % tiles + 1) * TILE && t < a.T; t++) {
            float share[HALVES], z;
            const window_of_token w = open_window(a, row, t, share, &z);
            if (lane == 0) a.z[r * a.T + t] = z;
            for (int which = 0; which < 2; which++) {
                for (int64_t d = lane * COLUMNS; d < a.D + lane * COLUMNS; d += SLAB) {
                    float sum[COLUMNS] = {}, x[COLUMNS];
                    for (int away = w.seen - 1; away >= 0; away--) {
                        const float part = held_for(share, away);
                        if (part == 0.0f) continue;
                        load_columns<WHOLE>(x, token_at<const X>(which ? a.v : a.k, a, r, t - away), d, a.D,
                                            which ? -1 : a.neuron);
                        advance(sum, 1.0f, part, x);
                    }
                    store_columns<WHOLE>(token_at<X>(which ? a.out_v : a.out_k, a, r, t), sum, d, a.D);
                }
            }
        }
    }
}

// ---- backward ----

// u[t, l] = <g[t], x[t - l] - out[t]> / z[t] over keys and values: the gradient of the weight of token t - l in out[t].
template <bool WHOLE, class X>
__global__ __launch_bounds__(WARPS * 32, RESIDENT) void weights_kernel(const kvc_dmc_accumulate_backward_args args, int64_t rows, int64_t tiles) {
    const kvc_dmc_accumulate_args& a = args.forward;
    const int lane = threadIdx.x % 32;
    for (int64_t i = first_warp(); i < rows * tiles; i += warps_between()) {
        const int64_t r = i / tiles;
        const dmc_row row = row_of(a, r);
        for (int64_t t = i % tiles * TILE; t < (i % tiles + 1) * TILE && t < a.T; t++) {
            float share[HALVES], dots[HALVES] = {}, z;
            const window_of_token w = open_window(a, row, t, share, &z);
            for (int which = 0; which < 2; which++) {
                const int64_t neuron = which ? -1 : a.neuron;
                for (int64_t d = lane * COLUMNS; d < a.D + lane * COLUMNS; d += SLAB) {
                    float g[COLUMNS], x[COLUMNS];
                    load_columns<WHOLE>(g, token_at<const X>(which ? args.dout_v : args.dout_k, a, r, t), d, a.D, neuron);
                    for (int away = 0; away < w.seen; away++) {
                        load_columns<WHOLE>(x, token_at<const X>(which ? a.v : a.k, a, r, t - away), d, a.D, neuron);
                        float dot = 0.0f;
                        KVC_UNROLL
                        for (int e = 0; e < COLUMNS; e++) dot = fmaf(g[e], x[e], dot);
                        dot = warp_sum(dot);
                        KVC_UNROLL
                        for (int half = 0; half < HALVES; half++)
                            if (half * 32 + lane == away) dots[half] += dot;
                    }
                }
            }
            float mean = 0.0f;
            KVC_UNROLL
            for (int half = 0; half < HALVES; half++) mean = fmaf(share[half], dots[half], mean);
            mean = warp_sum(mean);
            float* u = static_cast<float*>(args.scratch) + (r * a.T + t) * a.window;
            KVC_UNROLL
            for (int half = 0; half < HALVES; half++)
                if (half * 32 + lane < a.window)
                    u[half * 32 + lane] = half * 32 + lane < w.seen ? (dots[half] - mean) / z : 0.0f;
        }
    }
}

// dx[j] from the averages that token j is in.
template <bool WHOLE, class X>
__global__ __launch_bounds__(WARPS * 32, RESIDENT) void backward_kernel(const kvc_dmc_accumulate_backward_args args, int64_t rows, int64_t tiles) {
    const kvc_dmc_accumulate_args& a = args.forward;
    const int lane = threadIdx.x % 32;
    for (int64_t i = first_warp(); i < rows * tiles; i += warps_between()) {
        const int64_t r = i / tiles;
        const dmc_row row = row_of(a, r);
        for (int64_t t = i % tiles * TILE; t < (i % tiles + 1) * TILE && t < a.T; t++) {
            const window_of_token w = window_at(a, row, t, 1);
            float share[HALVES];
            KVC_UNROLL
            for (int half = 0; half < HALVES; half++) {
                const int away = half * 32 + lane;
                const bool counts = away < w.seen && w.product[half] != 0.0f;
                share[half] = counts ? w.product[half] * row.omega[t] / row.z[t + away] : 0.0f;
            }
            for (int which = 0; which < 2; which++) {
                const int64_t neuron = which ? -1 : a.neuron;
                for (int64_t d = lane * COLUMNS; d < a.D + lane * COLUMNS; d += SLAB) {
                    float sum[COLUMNS] = {}, g[COLUMNS];
                    for (int away = w.seen - 1; away >= 0; away--) {
                        const float part = held_for(share, away);
                        if (part == 0.0f) continue;
                        load_columns<WHOLE>(g, token_at<const X>(which ? args.dout_v : args.dout_k, a, r, t + away), d, a.D,
                                            neuron);
                        advance(sum, 1.0f, part, g);
                    }
                    store_columns<WHOLE>(token_at<X>(which ? args.dv : args.dk, a, r, t), sum, d, a.D);
                }
            }
        }
    }
}

// A thread per token t: what its average gives to the weight of each token of its window, in place of u, and to each
// decision in it, behind all of u.
__global__ __launch_bounds__(WARPS * 32) void spread_kernel(const kvc_dmc_accumulate_backward_args args, int64_t tokens) {
    const kvc_dmc_accumulate_args& a = args.forward;
    const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
    if (i >= tokens) return;
    const int64_t t = i % a.T;
    const dmc_row row = row_of(a, i / a.T);
    float *u = static_cast<float*>(args.scratch) + i * a.window, *decisions = u + tokens * a.window;
    int64_t first = t;
    while (first > 0 && t - first + 1 < a.window && !starts(row, first)) first--;
    // from the last token, as product needs it, and then from the first, as `before` does
    float product = 1.0f;
    for (int64_t j = t; j >= first; j--) {
        decisions[t - j] = product;
        product *= j > first ? row.alpha[j] : 1.0f;
    }
    float before = 0.0f;  // gradient of the product of all decisions up to token j, through what lies before j
    for (int64_t j = first; j <= t; j++) {
        const float weight = u[t - j], through = decisions[t - j];
        u[t - j] = through * weight;
        decisions[t - j] = j > first ? through * before : 0.0f;
        before = (j > first ? row.alpha[j] * before : 0.0f) + row.omega[j] * weight;
    }
    for (int64_t away = t - first + 1; away < a.window; away++) u[away] = decisions[away] = 0.0f;
}

// A thread per token: the sums over the averages that it is in.
__global__ __launch_bounds__(WARPS * 32) void gather_kernel(const kvc_dmc_accumulate_backward_args args, int64_t tokens) {
    const kvc_dmc_accumulate_args& a = args.forward;
    const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
    if (i >= tokens) return;
    const float *weights = static_cast<const float*>(args.scratch), *decisions = weights + tokens * a.window;
    const dmc_row row = row_of(a, i / a.T);
    float dalpha = 0.0f, domega = 0.0f;
    for (int64_t away = 0; away < a.window && i % a.T + away < a.T; away++) {
        if (away > 0 && starts(row, i % a.T + away)) break;
        domega += weights[(i + away) * a.window + away];
        dalpha += decisions[(i + away) * a.window + away];
    }
    args.dalpha[i] = dalpha;
    args.domega[i] = domega;
}

bool whole_rows(const kvc_dmc_accumulate_args& a, std::initializer_list<const kvc_view*> views) {
    bool whole = a.D % COLUMNS == 0 && aligned_16(a.k) && aligned_16(a.v);
    for (const kvc_view* view : views) whole = whole && aligned_16(*view);
    return whole;
}

}  // namespace

cudaError_t dmc_window_forward(const kvc_dmc_accumulate_args& a, cudaStream_t stream) {
    const int64_t rows = a.B * a.Hkv, tiles = ceil_div(a.T, TILE);
    const auto launch = [&](auto forward) {
        KVC_LAUNCH((forward), grid_of_warps(rows * tiles), WARPS * 32, 0, stream, a, rows, tiles);
        return cudaSuccess;
    };
    return with_dtype(a.k.dtype, [&](auto type) {
        using X = decltype(type);
        return whole_rows(a, {&a.out_k, &a.out_v}) ? launch(forward_kernel<true, X>) : launch(forward_kernel<false, X>);
    });
}

cudaError_t dmc_window_backward(const kvc_dmc_accumulate_backward_args& args, cudaStream_t stream) {
    const kvc_dmc_accumulate_args& a = args.forward;
    const int64_t rows = a.B * a.Hkv, tiles = ceil_div(a.T, TILE), tokens = rows * a.T, threads = 128;
    const int64_t blocks = ceil_div(tokens, threads);
    if (blocks > MAX_GRID_X) return cudaErrorInvalidValue;
    const bool whole = whole_rows(a, {&args.dout_k, &args.dout_v, &args.dk, &args.dv});
    const auto launch = [&](auto weights, auto backward) {
        KVC_LAUNCH((weights), grid_of_warps(rows * tiles), WARPS * 32, 0, stream, args, rows, tiles);
        KVC_LAUNCH((backward), grid_of_warps(rows * tiles), WARPS * 32, 0, stream, args, rows, tiles);
        KVC_LAUNCH(spread_kernel, static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, stream, args, tokens);
        KVC_LAUNCH(gather_kernel, static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, stream, args, tokens);
        return cudaSuccess;
    };
    return with_dtype(a.k.dtype, [&](auto type) {
        using X = decltype(type);
        return whole ? launch(weights_kernel<true, X>, backward_kernel<true, X>)
                     : launch(weights_kernel<false, X>, backward_kernel<false, X>);
    });
}
