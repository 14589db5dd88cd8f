// Flash attention of head dims up to 512, and of others where the tiles of attention.cu and attention_backward.cu do
// not fit into a block's shared memory: see kvc_attention and kvc_attention_backward in kvc.h.
//
// Flops as there. One block: 16 queries (or keys) of one head, 4 warps, each with a quarter of MAX_D: of the logits it
// sums its own columns, which are joined through shared memory, of the results it holds its own columns, so that a
// lane's sums fit into its registers. Must move, per block: keys and values once (forward), k, q, v, dout and q or k
// once more (backward), from L2. Sharing them among 16 rows only is what this path costs beside the others; 75 KB of
// shared memory at most let it run on every device from sm_80 on.
#include "attention.cuh"

namespace {

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int ROWS = 16;  // queries, or keys, of a block
constexpr int MAX_D = 512, PART = MAX_D / WARPS, SUMS = PART / 8;

static_assert(MAX_D == KVC_CUDA_MAX_HEAD_DIM, "this path takes them all");

struct settings {
    mask_settings mask;
    bool wide_q, wide_k, wide_v, wide_out, wide_dout, wide_dq, wide_dk, wide_dv;
};

settings settings_of(const kvc_attention_args& a) {
    settings set = {};
    set.mask = mask_of(a);
    set.wide_q = wide_rows(a.q, a.D);
    set.wide_k = wide_rows(a.k, a.D);
    set.wide_v = wide_rows(a.v, a.D);
    set.wide_out = wide_rows(a.out, a.D);
    return set;
}

// What a warp does of head dim D.
struct part {
    int column, depth, tiles;  // its first column; its columns up to D, rounded up to 16; the same in tiles of 8

    __device__ explicit part(int D) {
        const int K = (D + 15) / 16 * 16;
        column = static_cast<int>(threadIdx.x) / 32 * PART;
        depth = larger(0, smaller(PART, K - column));
        tiles = depth / 8;
    }
};

// The sum of c over the block's warps, the same bits in each. Ends with the reads of `of_warps` still under way.
template <int N>
__device__ inline void sum_over_warps(float (&c)[N][4], float (*of_warps)[ROWS][8 * N + 4]) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    KVC_UNROLL
    for (int i = 0; i < 4 * N; i++)
        of_warps[warp][lane / 4 + i % 4 / 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2] = c[i / 4][i % 4];
    __syncthreads();
    KVC_UNROLL
    for (int i = 0; i < 4 * N; i++) {
        float sum = 0.0f;
        KVC_UNROLL
        for (int w = 0; w < WARPS; w++)
            sum += of_warps[w][lane / 4 + i % 4 / 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
        c[i / 4][i % 4] = sum;
    }
}

__device__ inline void wait_for_rows() {
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
}

// ---- forward ----

template <class T>
struct forward_shared {
    static constexpr int KEYS = sizeof(T) == 2 ? 32 : 16;
    static constexpr int PITCH = pitch_of<T>(MAX_D), P_PITCH = pitch_of<T>(KEYS);
    T q[ROWS * PITCH];
    T rows[KEYS * PITCH];  // keys, then values
    T p[ROWS * P_PITCH];
    float of_warps[WARPS][ROWS][KEYS + 4];
};

template <class T>
__global__ __launch_bounds__(THREADS, 1) void forward_kernel(const kvc_attention_args a, const settings set,
                                                          int tiles_of_queries) {
    using memory = forward_shared<T>;
    constexpr int KEYS = memory::KEYS, PITCH = memory::PITCH, P_PITCH = memory::P_PITCH;
    KVC_DYNAMIC_SHARED(memory, shared);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, row = lane / 4;
    const int64_t heads = a.B * a.Hq, head = blockIdx.x % heads, b = head / a.Hq, h = head % a.Hq;
    const int64_t g = h / (a.Hq / a.Hkv);
    const int first = (tiles_of_queries - 1 - static_cast<int>(blockIdx.x / heads)) * ROWS, D = static_cast<int>(a.D);
    const part own(D);
    const sequence_mask mask(set.mask, a, b);
    const key_tiles<KEYS> tiles(mask, first, ROWS);
    const float* bias = a.key_bias ? a.key_bias + (b * a.Hkv + g) * a.T : nullptr;

    load_rows<ROWS, MAX_D, THREADS>(shared->q, a.q, set.wide_q, b, h, first, mask.S, D);
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, values[SUMS][4] = {};
    for (int tile = tiles.first(); tile < tiles.end; tile = tiles.after(tile)) {
        const int t0 = tile * KEYS;
        load_rows<KEYS, MAX_D, THREADS>(shared->rows, a.k, set.wide_k, b, g, t0, mask.length, D);
        wait_for_rows();
        float x[KEYS / 8][4] = {};
        warp_multiply<b_layout::columns>(x, shared->q + own.column, PITCH, shared->rows + own.column, PITCH, own.depth);
        sum_over_warps(x, shared->of_warps);  // every warp has used the keys
        load_rows<KEYS, MAX_D, THREADS>(shared->rows, a.v, set.wide_v, b, g, t0, mask.length, D);
        float top[2] = {m[0], m[1]}, keep[2];
        KVC_UNROLL
        for (int i = 0; i < KEYS / 2; i++) {
            const int r = i % 4 / 2, s = first + row + 8 * r, t = t0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
            float& logit = x[i / 4][i % 4];
            logit *= a.scale;
            if (a.softcap > 0.0f) logit = a.softcap * tanh_of_logit(logit, a.softcap);
            if (!mask.sees(s, t)) logit = -INFINITY;
            else if (bias && t != mask.shift + s) logit += bias[t];
            top[r] = fmaxf(top[r], logit);
        }
        KVC_UNROLL
        for (int r = 0; r < 2; r++) {
            top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], 2));
            keep[r] = exp_of_difference<T>(m[r], finite_or_0(top[r]));
            l[r] *= keep[r];
            m[r] = top[r];
        }
        KVC_UNROLL
        for (int i = 0; i < KEYS / 2; i++) {
            float& weight = x[i / 4][i % 4];
            weight = exp_of_difference<T>(weight, finite_or_0(m[i % 4 / 2]));
            l[i % 4 / 2] += weight;
        }
        if (sizeof(T) == 4 && warp == 0) store_result(shared->p, P_PITCH, x);
        KVC_UNROLL
        for (int i = 0; i < 4 * SUMS; i++) values[i / 4][i % 4] *= keep[i % 4 / 2];
        wait_for_rows();
        if constexpr (sizeof(T) == 2) multiply_result(values, x, shared->rows + own.column, PITCH, own.tiles);
        else
            warp_multiply<b_layout::rows>(values, shared->p, P_PITCH, shared->rows + own.column, PITCH, KEYS, own.tiles);
        __syncthreads();  // the values are used
    }
    wait_for_rows();  // without a tile nobody has waited for the queries yet
    const float sink = sink_of(a, h);
    float keep[2] = {1.0f, 1.0f};
    KVC_UNROLL
    for (int r = 0; r < 2; r++) {
        l[r] += __shfl_xor_sync(FULL_WARP, l[r], 1);
        l[r] += __shfl_xor_sync(FULL_WARP, l[r], 2);
        const int s = first + row + 8 * r;
        if (mask.shift + s >= 0) keep[r] = join_sink(sink, m[r], l[r]);
        if (warp == 0 && lane % 4 == 0 && s < mask.S)
            a.lse[head * a.S + s] = l[r] == 0.0f ? -INFINITY : m[r] + logf(l[r]);
    }
    KVC_UNROLL
    for (int i = 0; i < 4 * SUMS; i++) {
        const float norm = l[i % 4 / 2];
        values[i / 4][i % 4] = norm == 0.0f ? 0.0f : values[i / 4][i % 4] * keep[i % 4 / 2] / norm;
    }
    store_result(shared->q + own.column, PITCH, values);
    __syncthreads();
    store_rows<ROWS, MAX_D, THREADS>(a.out, set.wide_out, b, h, first, mask.S, D, shared->q);
}

// ---- backward ----

template <class T>
struct backward_shared {
    static constexpr int PITCH = pitch_of<T>(MAX_D), P_PITCH = pitch_of<T>(ROWS);
    T rows[ROWS * PITCH], others[ROWS * PITCH];  // of the block's own 16 rows and of the 16 that they meet
    T p[ROWS * P_PITCH], ds[ROWS * P_PITCH];
    float of_warps[WARPS][ROWS][ROWS + 4];
    float lse[ROWS], delta[ROWS];  // of the queries
};

// x[own row][other row] = <own row, other row>. Every warp has then used its rows.
template <class T>
__device__ inline void multiply_rows(float (&x)[2][4], backward_shared<T>* shared, const part& own) {
    constexpr int PITCH = backward_shared<T>::PITCH;
    KVC_UNROLL
    for (int i = 0; i < 8; i++) x[i / 4][i % 4] = 0.0f;
    warp_multiply<b_layout::columns>(x, shared->rows + own.column, PITCH, shared->others + own.column, PITCH,
                                     own.depth);
    sum_over_warps(x, shared->of_warps);
}

// Zeros for the rows of queries that see nothing, whatever the arrays hold there.
template <class T>
__device__ inline void clear_blind_rows(backward_shared<T>* shared) {
    for (int row = static_cast<int>(threadIdx.x) / 32; row < ROWS; row += WARPS)
        for (int i = static_cast<int>(threadIdx.x) % 32; i < shared->PITCH && shared->lse[row] == -INFINITY; i += 32)
            shared->others[row * shared->PITCH + i] = T{};
    __syncthreads();
}

// The softmax's weight and the gradient of a capped logit, and what makes it that of the logit itself.
template <class T>
__device__ inline float gradient(const kvc_attention_args& f, float product, float bias, float lse, float dp,
                                 float delta, float& weight, float& slope) {
    float logit = product * f.scale;
    slope = 1.0f;
    if (f.softcap > 0.0f) {
        const float tanh = tanh_of_logit(logit, f.softcap);
        logit = f.softcap * tanh;
        slope = 1.0f - tanh * tanh;
    }
    weight = exp_of_difference<T>(logit + bias, lse);
    return weight * (dp - delta);
}

template <class T>
__global__ __launch_bounds__(THREADS, 1) void keys_kernel(const kvc_attention_backward_args a, const settings set,
                                                       const float* delta) {
    using memory = backward_shared<T>;
    constexpr int PITCH = memory::PITCH, P_PITCH = memory::P_PITCH;
    KVC_DYNAMIC_SHARED(memory, shared);
    const kvc_attention_args& f = a.forward;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, row = lane / 4;
    const int64_t heads = f.B * f.Hkv, head = blockIdx.x % heads, b = head / f.Hkv, g = head % f.Hkv, G = f.Hq / f.Hkv;
    const int t0 = static_cast<int>(blockIdx.x / heads) * ROWS, D = static_cast<int>(f.D);
    const part own(D);
    const sequence_mask mask(set.mask, f, b);
    const query_range range(mask, t0, ROWS);
    float bias[2] = {}, dbias[2] = {}, dk[SUMS][4] = {}, dv[SUMS][4] = {};
    KVC_UNROLL
    for (int r = 0; r < 2; r++)
        if (f.key_bias && t0 + row + 8 * r < mask.T) bias[r] = f.key_bias[head * f.T + t0 + row + 8 * r];

    for (int64_t h = g * G; h < (g + 1) * G; h++)
        for (int s0 = range.begin / ROWS * ROWS; s0 < range.end; s0 += ROWS) {
            load_rows<ROWS, MAX_D, THREADS>(shared->rows, f.k, set.wide_k, b, g, t0, mask.length, D);
            load_rows<ROWS, MAX_D, THREADS>(shared->others, f.q, set.wide_q, b, h, s0, mask.S, D);
            if (const int i = static_cast<int>(threadIdx.x); i < ROWS) {
                const int64_t at = (b * f.Hq + h) * f.S + s0 + i;
                shared->lse[i] = s0 + i < mask.S ? f.lse[at] : 0.0f;  // past the end: zeros, which no mask sees
                shared->delta[i] = s0 + i < mask.S ? delta[at] : 0.0f;
            }
            wait_for_rows();
            clear_blind_rows(shared);
            float p[2][4], ds[2][4];
            multiply_rows(p, shared, own);
            load_rows<ROWS, MAX_D, THREADS>(shared->rows, f.v, set.wide_v, b, g, t0, mask.length, D);
            load_rows<ROWS, MAX_D, THREADS>(shared->others, a.dout, set.wide_dout, b, h, s0, mask.S, D);
            wait_for_rows();
            clear_blind_rows(shared);
            multiply_rows(ds, shared, own);
            KVC_UNROLL
            for (int i = 0; i < 8; i++) {
                const int r = i % 4 / 2, n = i / 4 * 8 + lane % 4 * 2 + i % 2, s = s0 + n, t = t0 + row + 8 * r;
                const bool at_itself = t == mask.shift + s, seen = mask.sees(s, t) && shared->lse[n] != -INFINITY;
                float &weight = p[i / 4][i % 4], &change = ds[i / 4][i % 4], slope;
                change = gradient<T>(f, weight, at_itself ? 0.0f : bias[r], shared->lse[n], change, shared->delta[n],
                                     weight, slope);
                if (!seen) weight = change = slope = 0.0f;
                if (!at_itself) dbias[r] += change;
                change *= slope;
            }
            if (warp == 0) {
                store_result(shared->p, P_PITCH, p);
                store_result(shared->ds, P_PITCH, ds);
            }
            __syncthreads();
            warp_multiply<b_layout::rows>(dv, shared->p, P_PITCH, shared->others + own.column, PITCH, ROWS, own.tiles);
            __syncthreads();  // dout is used
            load_rows<ROWS, MAX_D, THREADS>(shared->others, f.q, set.wide_q, b, h, s0, mask.S, D);
            wait_for_rows();
            clear_blind_rows(shared);
            warp_multiply<b_layout::rows>(dk, shared->ds, P_PITCH, shared->others + own.column, PITCH, ROWS, own.tiles);
            __syncthreads();  // all tiles of this round are used
        }
    KVC_UNROLL
    for (int i = 0; i < 4 * SUMS; i++) dk[i / 4][i % 4] *= f.scale;
    store_result(shared->rows + own.column, PITCH, dk);
    store_result(shared->others + own.column, PITCH, dv);
    __syncthreads();
    store_rows<ROWS, MAX_D, THREADS>(a.dk, set.wide_dk, b, g, t0, mask.T, D, shared->rows);
    store_rows<ROWS, MAX_D, THREADS>(a.dv, set.wide_dv, b, g, t0, mask.T, D, shared->others);
    KVC_UNROLL
    for (int r = 0; r < 2; r++) {
        dbias[r] += __shfl_xor_sync(FULL_WARP, dbias[r], 1);
        dbias[r] += __shfl_xor_sync(FULL_WARP, dbias[r], 2);
        const int t = t0 + row + 8 * r;
        if (a.dkey_bias && warp == 0 && lane % 4 == 0 && t < mask.T) a.dkey_bias[head * f.T + t] = dbias[r];
    }
}

template <class T>
__global__ __launch_bounds__(THREADS, 1) void queries_kernel(const kvc_attention_backward_args a, const settings set,
                                                          const float* delta, int tiles_of_queries) {
    using memory = backward_shared<T>;
    constexpr int PITCH = memory::PITCH, P_PITCH = memory::P_PITCH;
    KVC_DYNAMIC_SHARED(memory, shared);
    const kvc_attention_args& f = a.forward;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, row = lane / 4;
    const int64_t heads = f.B * f.Hq, head = blockIdx.x % heads, b = head / f.Hq, h = head % f.Hq;
    const int64_t g = h / (f.Hq / f.Hkv);
    const int s0 = (tiles_of_queries - 1 - static_cast<int>(blockIdx.x / heads)) * ROWS, D = static_cast<int>(f.D);
    const part own(D);
    const sequence_mask mask(set.mask, f, b);
    const key_tiles<ROWS> tiles(mask, s0, ROWS);
    const float* bias = f.key_bias ? f.key_bias + (b * f.Hkv + g) * f.T : nullptr;
    float lse[2], own_delta[2], dq[SUMS][4] = {};
    KVC_UNROLL
    for (int r = 0; r < 2; r++) {
        const int s = s0 + row + 8 * r;
        lse[r] = s < mask.S ? f.lse[head * f.S + s] : -INFINITY;
        own_delta[r] = s < mask.S ? delta[head * f.S + s] : 0.0f;
    }
    for (int tile = tiles.first(); tile < tiles.end; tile = tiles.after(tile)) {
        const int t0 = tile * ROWS;
        load_rows<ROWS, MAX_D, THREADS>(shared->rows, f.q, set.wide_q, b, h, s0, mask.S, D);
        load_rows<ROWS, MAX_D, THREADS>(shared->others, f.k, set.wide_k, b, g, t0, mask.length, D);
        wait_for_rows();
        float p[2][4], ds[2][4];
        multiply_rows(p, shared, own);
        load_rows<ROWS, MAX_D, THREADS>(shared->rows, a.dout, set.wide_dout, b, h, s0, mask.S, D);
        load_rows<ROWS, MAX_D, THREADS>(shared->others, f.v, set.wide_v, b, g, t0, mask.length, D);
        wait_for_rows();
        multiply_rows(ds, shared, own);
        load_rows<ROWS, MAX_D, THREADS>(shared->others, f.k, set.wide_k, b, g, t0, mask.length, D);
        KVC_UNROLL
        for (int i = 0; i < 8; i++) {
            const int r = i % 4 / 2, s = s0 + row + 8 * r, t = t0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
            const bool seen = mask.sees(s, t) && lse[r] != -INFINITY;
            float &change = ds[i / 4][i % 4], weight, slope;
            const float added = seen && bias && t != mask.shift + s ? bias[t] : 0.0f;
            change = gradient<T>(f, p[i / 4][i % 4], added, lse[r], change, own_delta[r], weight, slope);
            change = seen ? change * slope : 0.0f;
        }
        if (warp == 0) store_result(shared->ds, P_PITCH, ds);
        wait_for_rows();
        warp_multiply<b_layout::rows>(dq, shared->ds, P_PITCH, shared->others + own.column, PITCH, ROWS, own.tiles);
        __syncthreads();  // all tiles of this round are used
    }
    KVC_UNROLL
    for (int i = 0; i < 4 * SUMS; i++) dq[i / 4][i % 4] *= f.scale;
    store_result(shared->rows + own.column, PITCH, dq);
    __syncthreads();
    store_rows<ROWS, MAX_D, THREADS>(a.dq, set.wide_dq, b, h, s0, mask.S, D, shared->rows);
}

// ---- host ----

template <class T>
cudaError_t forward(const kvc_attention_args& a, cudaStream_t stream) {
    constexpr size_t SHARED = sizeof(forward_shared<T>);
    static_assert(SHARED <= 99 * 1024, "what sm_86 has");
    const auto kernel = forward_kernel<T>;
    const int64_t tiles = ceil_div(a.S, ROWS);
    if (a.B * a.Hq > MAX_GRID_X / tiles) return cudaErrorInvalidValue;
    KVC_TRY(allow_shared(kernel, SHARED));
    KVC_LAUNCH(kernel, static_cast<unsigned>(a.B * a.Hq * tiles), THREADS, SHARED, stream, a, settings_of(a),
               static_cast<int>(tiles));
    return cudaSuccess;
}

template <class T>
cudaError_t backward(const kvc_attention_backward_args& a, const float* delta, cudaStream_t stream) {
    constexpr size_t SHARED = sizeof(backward_shared<T>);
    static_assert(SHARED <= 99 * 1024, "what sm_86 has");
    const kvc_attention_args& f = a.forward;
    settings set = settings_of(f);
    set.wide_dout = wide_rows(a.dout, f.D);
    set.wide_dq = wide_rows(a.dq, f.D);
    set.wide_dk = wide_rows(a.dk, f.D);
    set.wide_dv = wide_rows(a.dv, f.D);
    const int64_t key_blocks = f.B * f.Hkv * ceil_div(f.T, ROWS), tiles = ceil_div(f.S, ROWS);
    const int64_t query_blocks = f.B * f.Hq * tiles;
    if (key_blocks > MAX_GRID_X || query_blocks > MAX_GRID_X) return cudaErrorInvalidValue;
    const auto of_keys = keys_kernel<T>;
    KVC_TRY(allow_shared(of_keys, SHARED));
    KVC_LAUNCH(of_keys, static_cast<unsigned>(key_blocks), THREADS, SHARED, stream, a, set, delta);
    if (query_blocks == 0) return cudaSuccess;
    const auto of_queries = queries_kernel<T>;
    KVC_TRY(allow_shared(of_queries, SHARED));
    KVC_LAUNCH(of_queries, static_cast<unsigned>(query_blocks), THREADS, SHARED, stream, a, set, delta,
               static_cast<int>(tiles));
    return cudaSuccess;
}

}  // namespace

cudaError_t attend_wide(const kvc_attention_args& a, cudaStream_t stream) {
    return with_dtype(a.q.dtype, [&](auto element) { return forward<decltype(element)>(a, stream); });
}

cudaError_t attend_wide_backward(const kvc_attention_backward_args& a, const float* delta, cudaStream_t stream) {
    return with_dtype(a.forward.q.dtype, [&](auto element) { return backward<decltype(element)>(a, delta, stream); });
}
