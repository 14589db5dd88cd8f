// Flash attention, backward: see kvc_attention_backward in kvc.h.
//
// Nothing of size [S, T] is stored: the probabilities are computed again from lse. Three kernels: delta (one float per
// query), the gradients of keys, values and bias (a block per tile of keys and KV head, over its G heads and their
// queries), the gradient of queries (a block per tile of queries, over keys). Every sum has one place and one order: no
// atomics, the same bits every time. The price is that logits and dp are computed twice: 14*D flops per query and key
// that see each other instead of 10*D. The ceiling is the rate of the products, as in attention.cu.
//
// At D = 128 in 16 bits a block's eight warps share 16 rows two by two: 169 registers in keys_kernel and 128 in
// queries_kernel. The former runs one block per multiprocessor on every device (two would leave 128 registers, which
// spill), so that only its own copies in advance hide the latency of L2: dout's behind the product of dk, q's behind
// nothing but the barrier. A second pair of tiles would hide both, but takes 35 KB that sm_86 does not have.
#include "attention.cuh"

namespace {

struct settings {
    mask_settings mask;
    int tiles;  // of queries, or of keys
    bool wide_q, wide_k, wide_v, wide_dout, wide_dq, wide_dk, wide_dv;
};

// Rows and columns of a tile of logits, and how the warps share it: GROUPS of 16 rows, each group's columns (of logits,
// then of the gradient) cut into PARTS, so that a lane's sums fit into its registers and the tiles into shared memory.
template <class T, int MAX_D>
struct shape {
    static constexpr int TILE = sizeof(T) == 2 ? 64 : 32;
    static constexpr int WARPS = sizeof(T) == 2 && MAX_D > 64 ? 8 : 4, THREADS = 32 * WARPS;
    static constexpr int GROUPS = TILE / 16, PARTS = WARPS / GROUPS;
    static constexpr int LOGITS = TILE / 8 / PARTS, SUMS = MAX_D / 8 / PARTS;  // tiles of 8 columns per warp
    static constexpr int PITCH = pitch_of<T>(MAX_D), P_PITCH = pitch_of<T>(TILE);
    // Blocks of queries_kernel at a time: two where 128 registers do, so that one computes while the other waits
    static constexpr int RESIDENT = sizeof(T) == 2 && MAX_D == 128 ? 2 : 1;
};

// ---- delta = <dout, out> - dlse ----

constexpr int DELTA_THREADS = 128;

__global__ __launch_bounds__(DELTA_THREADS) void delta_kernel(const kvc_attention_backward_args a, float* delta) {
    const kvc_attention_args& f = a.forward;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t row = blockIdx.x * static_cast<int64_t>(DELTA_THREADS / 32) + threadIdx.x / 32;
    if (row >= f.B * f.Hq * f.S) return;
    const int64_t b = row / f.S / f.Hq, h = row / f.S % f.Hq, s = row % f.S;
    const int64_t at_out = b * f.out.stride_b + h * f.out.stride_h + s * f.out.stride_t;
    const int64_t at_dout = b * a.dout.stride_b + h * a.dout.stride_h + s * a.dout.stride_t;
    float sum = 0.0f;
    for (int d = lane; d < static_cast<int>(f.D); d += 32)
        sum += load_any(f.out.data, f.out.dtype, at_out + d) * load_any(a.dout.data, a.dout.dtype, at_dout + d);
    KVC_UNROLL
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    if (lane == 0) delta[row] = sum - (a.dlse ? a.dlse[row] : 0.0f);
}

// ---- gradients of keys, values and bias ----

template <class T, int MAX_D>
struct keys_shared {
    using S = shape<T, MAX_D>;
    T k[S::TILE * S::PITCH], v[S::TILE * S::PITCH];        // then dk and dv
    T q[S::TILE * S::PITCH], dout[S::TILE * S::PITCH];
    T p[S::TILE * S::P_PITCH], ds[S::TILE * S::P_PITCH];   // [key][query]
    float lse[S::TILE], delta[S::TILE];                    // of the queries
    float dbias[S::PARTS][S::TILE];
    bool blind[S::TILE / 32];                              // whether one of 32 queries sees nothing
};

// Makes zeros of the rows of queries that see nothing: whatever the arrays hold there reaches no key. Rare, and not inline:
// it would take registers from the loop around it.
template <class T, int MAX_D>
__device__ __noinline__ void clear_blind_rows(keys_shared<T, MAX_D>* shared) {
    using S = shape<T, MAX_D>;
    for (int row = static_cast<int>(threadIdx.x) / 32; row < S::TILE; row += S::WARPS)
        for (int i = static_cast<int>(threadIdx.x) % 32; i < S::PITCH && shared->lse[row] == -INFINITY; i += 32)
            shared->q[row * S::PITCH + i] = shared->dout[row * S::PITCH + i] = T{};
}

template <class T, int MAX_D, bool CAPPED>
__global__ __launch_bounds__(shape<T, MAX_D>::THREADS, 1) void keys_kernel(const kvc_attention_backward_args a,
                                                                        const settings set, const float* delta) {
    using S = shape<T, MAX_D>;
    using memory = keys_shared<T, MAX_D>;
    constexpr int TILE = S::TILE, PITCH = S::PITCH, THREADS = S::THREADS;
    KVC_DYNAMIC_SHARED(memory, shared);
    const kvc_attention_args& f = a.forward;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int group = warp / S::PARTS, part = warp % S::PARTS;
    const int64_t heads = f.B * f.Hkv, head = blockIdx.x % heads, b = head / f.Hkv, g = head % f.Hkv;
    const int64_t G = f.Hq / f.Hkv;
    const int t0 = static_cast<int>(blockIdx.x / heads) * TILE;  // the first keys are seen by the most queries
    const int D = static_cast<int>(f.D), K = (D + 15) / 16 * 16;
    const int column = part * S::SUMS * 8, tiles = (K - column) / 8;  // of the gradients; K may end before the part
    const sequence_mask mask(set.mask, f, b);
    const query_range range(mask, t0, TILE);
    const int row = 16 * group + lane / 4;  // key of the tile; the other one is row + 8
    float bias[2] = {}, dbias[2] = {}, dk[S::SUMS][4] = {}, dv[S::SUMS][4] = {};
    KVC_UNROLL
    for (int r = 0; r < 2; r++)
        if (f.key_bias && t0 + row + 8 * r < mask.T) bias[r] = f.key_bias[head * f.T + t0 + row + 8 * r];

    // The next round's dout is on its way while dk is computed, its q from there on
    const int begin = range.begin / TILE * TILE;
    const int64_t heads_end = range.begin < range.end ? (g + 1) * G : g * G;
    int64_t h = g * G;
    int s0 = begin;
    if (h < heads_end) {  // else nobody waits for the copies
        load_rows<TILE, MAX_D, THREADS>(shared->k, f.k, set.wide_k, b, g, t0, mask.length, D);
        load_rows<TILE, MAX_D, THREADS>(shared->v, f.v, set.wide_v, b, g, t0, mask.length, D);
        load_rows<TILE, MAX_D, THREADS>(shared->q, f.q, set.wide_q, b, h, s0, mask.S, D);
        load_rows<TILE, MAX_D, THREADS>(shared->dout, a.dout, set.wide_dout, b, h, s0, mask.S, D);
        commit_copies();
    }
    while (h < heads_end) {
        if (const int i = static_cast<int>(threadIdx.x); i < TILE) {  // a thread for each query
            const int64_t at = (b * f.Hq + h) * f.S + s0 + i;
            const float lse = s0 + i < mask.S ? f.lse[at] : 0.0f;  // past the end: zeros, which no mask sees
            shared->lse[i] = lse;
            shared->delta[i] = s0 + i < mask.S ? delta[at] : 0.0f;
            const bool some_blind = __ballot_sync(FULL_WARP, lse == -INFINITY) != 0;
            if (i % 32 == 0) shared->blind[i / 32] = some_blind;
        }
        wait_for_copies<0>();
        __syncthreads();
        if (shared->blind[0] || shared->blind[TILE / 32 - 1]) {  // the same in every thread
            clear_blind_rows(shared);
            __syncthreads();
        }
        const bool all_seen = mask.sees_all(s0, TILE, t0, TILE);
        const int queries = part * S::LOGITS * 8;  // the first one of this warp's logits
        float p[S::LOGITS][4] = {}, ds[S::LOGITS][4] = {};
        warp_multiply<b_layout::columns, MAX_D>(p, shared->k + 16 * group * PITCH, PITCH, shared->q + queries * PITCH,
                                                PITCH, K);
        warp_multiply<b_layout::columns, MAX_D>(ds, shared->v + 16 * group * PITCH, PITCH,
                                                shared->dout + queries * PITCH, PITCH, K);
        KVC_UNROLL
        for (int i = 0; i < 4 * S::LOGITS; i++) {
            const int r = i % 4 / 2, n = queries + i / 4 * 8 + lane % 4 * 2 + i % 2;
            const int s = s0 + n, t = t0 + row + 8 * r;
            const float lse = shared->lse[n];
            const bool own = t == mask.shift + s, seen = (all_seen || mask.sees(s, t)) && lse != -INFINITY;
            float &weight = p[i / 4][i % 4], &change = ds[i / 4][i % 4];
            float logit = weight * f.scale, slope = 1.0f;
            if constexpr (CAPPED) {
                const float tanh = softcap_tanh<T>(logit, f.softcap);
                logit = f.softcap * tanh;
                slope = 1.0f - tanh * tanh;
            }
            weight = seen ? exp_of_difference<T>(logit + (own ? 0.0f : bias[r]), lse) : 0.0f;
            change = seen ? weight * (change - shared->delta[n]) : 0.0f;
            if (!own) dbias[r] += change;
            if (CAPPED && seen) change *= slope;
        }
        const int at = 16 * group * S::P_PITCH + queries;
        store_result(shared->p + at, S::P_PITCH, p);
        store_result(shared->ds + at, S::P_PITCH, ds);
        __syncthreads();
        const int rows = 16 * group * S::P_PITCH;
        if (tiles > 0)
            warp_multiply<b_layout::rows, TILE>(dv, shared->p + rows, S::P_PITCH, shared->dout + column, PITCH, TILE,
                                                tiles);
        __syncthreads();  // dout is used
        s0 += TILE;
        if (s0 >= range.end) {
            s0 = begin;
            h++;
        }
        if (h < heads_end) load_rows<TILE, MAX_D, THREADS>(shared->dout, a.dout, set.wide_dout, b, h, s0, mask.S, D);
        if (tiles > 0)
            warp_multiply<b_layout::rows, TILE>(dk, shared->ds + rows, S::P_PITCH, shared->q + column, PITCH, TILE,
                                                tiles);
        __syncthreads();  // so is q
        if (h < heads_end) load_rows<TILE, MAX_D, THREADS>(shared->q, f.q, set.wide_q, b, h, s0, mask.S, D);
        commit_copies();
    }
    KVC_UNROLL
    for (int n = 0; n < S::SUMS; n++) {
        KVC_UNROLL
        for (int i = 0; i < 4; i++) dk[n][i] *= f.scale;
    }
    if (tiles > 0) {
        store_result(shared->k + 16 * group * PITCH + column, PITCH, dk);
        store_result(shared->v + 16 * group * PITCH + column, PITCH, dv);
    }
    KVC_UNROLL
    for (int r = 0; r < 2; r++) {
        dbias[r] += __shfl_xor_sync(FULL_WARP, dbias[r], 1);
        dbias[r] += __shfl_xor_sync(FULL_WARP, dbias[r], 2);
        if (lane % 4 == 0) shared->dbias[part][row + 8 * r] = dbias[r];
    }
    __syncthreads();
    store_rows<TILE, MAX_D, THREADS>(a.dk, set.wide_dk, b, g, t0, mask.T, D, shared->k);
    store_rows<TILE, MAX_D, THREADS>(a.dv, set.wide_dv, b, g, t0, mask.T, D, shared->v);
    for (int i = static_cast<int>(threadIdx.x); a.dkey_bias && i < TILE && t0 + i < mask.T; i += THREADS) {
        float sum = 0.0f;
        KVC_UNROLL
        for (int x = 0; x < S::PARTS; x++) sum += shared->dbias[x][i];
        a.dkey_bias[head * f.T + t0 + i] = sum;
    }
}

// ---- gradient of queries ----

template <class T, int MAX_D>
struct queries_shared {
    using S = shape<T, MAX_D>;
    T q[S::TILE * S::PITCH], dout[S::TILE * S::PITCH];  // q: then dq
    T k[S::TILE * S::PITCH], v[S::TILE * S::PITCH];
    T ds[S::TILE * S::P_PITCH];  // [query][key]
};

template <class T, int MAX_D, bool CAPPED>
__global__ __launch_bounds__(shape<T, MAX_D>::THREADS, CAPPED ? 1 : shape<T, MAX_D>::RESIDENT) void queries_kernel(
    const kvc_attention_backward_args a, const settings set, const float* delta) {
    using S = shape<T, MAX_D>;
    using memory = queries_shared<T, MAX_D>;
    constexpr int TILE = S::TILE, PITCH = S::PITCH, THREADS = S::THREADS;
    KVC_DYNAMIC_SHARED(memory, shared);
    const kvc_attention_args& f = a.forward;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int group = warp / S::PARTS, part = warp % S::PARTS;
    const int64_t heads = f.B * f.Hq, head = blockIdx.x % heads, b = head / f.Hq, h = head % f.Hq;
    const int64_t g = h / (f.Hq / f.Hkv);
    const int s0 = (set.tiles - 1 - static_cast<int>(blockIdx.x / heads)) * TILE;  // the most keys first
    const int D = static_cast<int>(f.D), K = (D + 15) / 16 * 16;
    const int column = part * S::SUMS * 8, columns = (K - column) / 8;  // of the gradient
    const sequence_mask mask(set.mask, f, b);
    const key_tiles<TILE> tiles(mask, s0, TILE);
    const float* bias = f.key_bias ? f.key_bias + (b * f.Hkv + g) * f.T : nullptr;
    const int row = 16 * group + lane / 4;  // query of the tile; the other one is row + 8
    float lse[2], own_delta[2], dq[S::SUMS][4] = {};
    KVC_UNROLL
    for (int r = 0; r < 2; r++) {
        const int s = s0 + row + 8 * r;
        lse[r] = s < mask.S ? f.lse[head * f.S + s] : -INFINITY;
        own_delta[r] = s < mask.S ? delta[head * f.S + s] : 0.0f;
    }
    if (tiles.first() < tiles.end) {
        load_rows<TILE, MAX_D, THREADS>(shared->q, f.q, set.wide_q, b, h, s0, mask.S, D);
        load_rows<TILE, MAX_D, THREADS>(shared->dout, a.dout, set.wide_dout, b, h, s0, mask.S, D);
        load_rows<TILE, MAX_D, THREADS>(shared->k, f.k, set.wide_k, b, g, tiles.first() * TILE, mask.length, D);
        load_rows<TILE, MAX_D, THREADS>(shared->v, f.v, set.wide_v, b, g, tiles.first() * TILE, mask.length, D);
        commit_copies();
    }
    // The next tile's values are on their way while dq is computed, its keys from there on
    for (int tile = tiles.first(); tile < tiles.end;) {
        const int t0 = tile * TILE;
        wait_for_copies<0>();
        __syncthreads();
        const bool all_seen = mask.sees_all(s0, TILE, t0, TILE);
        const int keys = part * S::LOGITS * 8;  // the first one of this warp's logits
        float p[S::LOGITS][4] = {}, ds[S::LOGITS][4] = {};
        warp_multiply<b_layout::columns, MAX_D>(p, shared->q + 16 * group * PITCH, PITCH, shared->k + keys * PITCH, PITCH, K);
        warp_multiply<b_layout::columns, MAX_D>(ds, shared->dout + 16 * group * PITCH, PITCH, shared->v + keys * PITCH, PITCH,
                                         K);
        KVC_UNROLL
        for (int i = 0; i < 4 * S::LOGITS; i++) {
            const int r = i % 4 / 2, s = s0 + row + 8 * r, t = t0 + keys + i / 4 * 8 + lane % 4 * 2 + i % 2;
            const bool seen = (all_seen || mask.sees(s, t)) && lse[r] != -INFINITY;
            float& change = ds[i / 4][i % 4];
            float x = p[i / 4][i % 4] * f.scale, slope = 1.0f;
            if constexpr (CAPPED) {
                const float tanh = softcap_tanh<T>(x, f.softcap);
                x = f.softcap * tanh;
                slope = 1.0f - tanh * tanh;
            }
            if (seen && bias && t != mask.shift + s) x += bias[t];
            change = seen ? exp_of_difference<T>(x, lse[r]) * (change - own_delta[r]) : 0.0f;
            if (CAPPED && seen) change *= slope;
        }
        store_result(shared->ds + 16 * group * S::P_PITCH + keys, S::P_PITCH, ds);
        __syncthreads();  // the values are used
        tile = tiles.after(tile);
        if (tile < tiles.end)
            load_rows<TILE, MAX_D, THREADS>(shared->v, f.v, set.wide_v, b, g, tile * TILE, mask.length, D);
        if (columns > 0)
            warp_multiply<b_layout::rows, TILE>(dq, shared->ds + 16 * group * S::P_PITCH, S::P_PITCH, shared->k + column,
                                          PITCH, TILE, columns);
        __syncthreads();  // so are the keys
        if (tile < tiles.end)
            load_rows<TILE, MAX_D, THREADS>(shared->k, f.k, set.wide_k, b, g, tile * TILE, mask.length, D);
        commit_copies();
    }
    KVC_UNROLL
    for (int n = 0; n < S::SUMS; n++) {
        KVC_UNROLL
        for (int i = 0; i < 4; i++) dq[n][i] *= f.scale;
    }
    if (columns > 0) store_result(shared->q + 16 * group * PITCH + column, PITCH, dq);
    __syncthreads();
    store_rows<TILE, MAX_D, THREADS>(a.dq, set.wide_dq, b, h, s0, mask.S, D, shared->q);
}

// ---- gradients of the sinks: a block per head ----

__global__ __launch_bounds__(DELTA_THREADS) void sinks_kernel(const kvc_attention_backward_args a, const float* delta) {
    __shared__ double of_warp[DELTA_THREADS / 32];
    const kvc_attention_args& f = a.forward;
    const int64_t h = blockIdx.x, rows = f.B * f.S;
    const float sink = f.sink_logits[h];
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < rows && sink != -INFINITY; i += DELTA_THREADS) {
        const int64_t at = (i / f.S * f.Hq + h) * f.S + i % f.S;
        if (f.lse[at] == -INFINITY) continue;  // padding
        sum -= static_cast<double>(expf(sink - f.lse[at])) * static_cast<double>(delta[at]);
    }
    KVC_UNROLL
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int w = 1; w < DELTA_THREADS / 32; w++) sum += of_warp[w];
    a.dsink_logits[h] = static_cast<float>(sum);
}

// ---- host ----

cudaError_t launch_sinks(const kvc_attention_backward_args& a, cudaStream_t stream) {
    if (!a.dsink_logits || a.forward.Hq == 0) return cudaSuccess;
    const float* delta = static_cast<const float*>(a.scratch);
    KVC_LAUNCH(sinks_kernel, static_cast<unsigned>(a.forward.Hq), DELTA_THREADS, 0, stream, a, delta);
    return cudaSuccess;
}

cudaError_t launch_delta(const kvc_attention_backward_args& a, cudaStream_t stream) {
    const int64_t blocks = ceil_div(a.forward.B * a.forward.Hq * a.forward.S, DELTA_THREADS / 32);
    if (blocks > MAX_GRID_X) return cudaErrorInvalidValue;
    if (blocks == 0) return cudaSuccess;
    KVC_LAUNCH(delta_kernel, static_cast<unsigned>(blocks), DELTA_THREADS, 0, stream, a, static_cast<float*>(a.scratch));
    return cudaSuccess;
}

template <class T, int MAX_D, bool CAPPED>
cudaError_t launch(const kvc_attention_backward_args& a, cudaStream_t stream) {
    using S = shape<T, MAX_D>;
    const kvc_attention_args& f = a.forward;
    settings set = {};
    set.mask = mask_of(f);
    set.wide_q = wide_rows(f.q, f.D);
    set.wide_k = wide_rows(f.k, f.D);
    set.wide_v = wide_rows(f.v, f.D);
    set.wide_dout = wide_rows(a.dout, f.D);
    set.wide_dq = wide_rows(a.dq, f.D);
    set.wide_dk = wide_rows(a.dk, f.D);
    set.wide_dv = wide_rows(a.dv, f.D);
    const int64_t key_blocks = f.B * f.Hkv * ceil_div(f.T, S::TILE);
    const int64_t query_blocks = f.B * f.Hq * ceil_div(f.S, S::TILE);
    if (key_blocks > MAX_GRID_X || query_blocks > MAX_GRID_X) return cudaErrorInvalidValue;
    const float* delta = static_cast<const float*>(a.scratch);
    constexpr size_t KEYS_SHARED = sizeof(keys_shared<T, MAX_D>), QUERIES_SHARED = sizeof(queries_shared<T, MAX_D>);
    const auto of_keys = keys_kernel<T, MAX_D, CAPPED>;
    KVC_TRY(allow_shared(of_keys, KEYS_SHARED));
    KVC_LAUNCH(of_keys, static_cast<unsigned>(key_blocks), S::THREADS, KEYS_SHARED, stream, a, set, delta);
    if (query_blocks == 0) return cudaSuccess;
    const auto of_queries = queries_kernel<T, MAX_D, CAPPED>;
    KVC_TRY(allow_shared(of_queries, QUERIES_SHARED));
    set.tiles = static_cast<int>(ceil_div(f.S, S::TILE));
    KVC_LAUNCH(of_queries, static_cast<unsigned>(query_blocks), S::THREADS, QUERIES_SHARED, stream, a, set, delta);
    return cudaSuccess;
}

template <class T, int MAX_D>
cudaError_t launch(const kvc_attention_backward_args& a, cudaStream_t stream) {
    if (!shared_fits(sizeof(keys_shared<T, MAX_D>)) || !shared_fits(sizeof(queries_shared<T, MAX_D>)))
        return attend_wide_backward(a, static_cast<const float*>(a.scratch), stream);
    return a.forward.softcap > 0.0f ? launch<T, MAX_D, true>(a, stream) : launch<T, MAX_D, false>(a, stream);
}

bool valid(const kvc_attention_backward_args& a) {
    const kvc_dtype dtype = a.forward.q.dtype;
    return valid_attention(a.forward) && a.dout.dtype == dtype && a.dq.dtype == dtype && a.dk.dtype == dtype &&
           a.dv.dtype == dtype && (a.forward.sink_logits || !a.dsink_logits);
}

}  // namespace

extern "C" int64_t kvc_cuda_attention_backward_scratch_bytes(const kvc_attention_backward_args* args) {
    if (!valid(*args)) return 0;
    const int64_t rows = args->forward.B * args->forward.Hq * args->forward.S;
    return ceil_div(rows * static_cast<int64_t>(sizeof(float)), 64) * 64;
}

extern "C" cudaError_t kvc_cuda_attention_backward(const kvc_attention_backward_args* args, cudaStream_t stream) {
    const kvc_attention_backward_args& a = *args;
    const kvc_attention_args& f = a.forward;
    if (!valid(a)) return cudaErrorInvalidValue;
    if (f.B == 0 || f.Hkv == 0 || f.T == 0) return launch_sinks(a, stream);
    if (!f.k.data || !f.v.data || !a.dk.data || !a.dv.data) return cudaErrorInvalidValue;
    if (f.Hq > 0 && f.S > 0 &&
        (!f.q.data || !f.out.data || !f.lse || !a.dout.data || !a.dq.data || !a.scratch))
        return cudaErrorInvalidValue;
    KVC_TRY(launch_delta(a, stream));
    KVC_TRY(launch_sinks(a, stream));
    return with_dtype(f.q.dtype, [&](auto element) {
        using T = decltype(element);
        if (f.D <= 64) return launch<T, 64>(a, stream);
        if (f.D <= 128) return launch<T, 128>(a, stream);
        if (f.D <= 256) return launch<T, 256>(a, stream);
        return attend_wide_backward(a, static_cast<const float*>(a.scratch), stream);
    });
}
