// Flash attention, forward: see kvc_attention in kvc.h. Backward: attention_backward.cu.
//
// Flops: 4*D for each query and key that it sees; tiles that the mask empties cost nothing. Must move: queries and out
// once; keys and values once per 64 queries and head, nearly always from L2. The ceiling is the rate of the products:
// mma.sync for 16-bit types (about 60% of what wgmma reaches on an H200), FMA for float32. A warp holds 16 queries, so
// each B operand is read from shared memory for one mma: 256 bytes for 2 clocks of an A100's tensor cores, just what
// its shared memory gives; on Hopper that bounds the kernel at half of the mma rate.
// One block: 64 queries of one head, 4 warps. While the logits of a tile are computed its values are on their way, then
// the next tile's keys. Blocks with the most keys start first.
#include "attention.cuh"

namespace {

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int QUERIES = 64;

struct settings {
    mask_settings mask;
    int tiles;  // of queries
    bool wide_q, wide_k, wide_v, wide_out;
};

template <class T, int MAX_D>
struct forward_shared {
    static constexpr int KEYS = sizeof(T) == 2 ? 64 : 32;  // float32 at D = 256 would not fit otherwise
    static constexpr int PITCH = pitch_of<T>(MAX_D), P_PITCH = pitch_of<T>(KEYS);
    T q[QUERIES * PITCH];
    T k[KEYS * PITCH], v[KEYS * PITCH];
    T p[WARPS][sizeof(T) == 2 ? PER_16_BYTES<T> : 16 * P_PITCH];  // float32: the weights between the two products
};

template <class T, int MAX_D, bool CAPPED>
__global__ __launch_bounds__(THREADS, MAX_D <= 128 ? 3 : 1) void forward_kernel(const kvc_attention_args a, const settings set) {
    using memory = forward_shared<T, MAX_D>;
    constexpr int KEYS = memory::KEYS, PITCH = memory::PITCH, P_PITCH = memory::P_PITCH, N = MAX_D / 8;
    KVC_DYNAMIC_SHARED(memory, shared);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t heads = a.B * a.Hq, head = blockIdx.x % heads, b = head / a.Hq, h = head % a.Hq;
    const int64_t g = h / (a.Hq / a.Hkv);
    const int first = (set.tiles - 1 - static_cast<int>(blockIdx.x / heads)) * QUERIES;
    const int D = static_cast<int>(a.D), K = (D + 15) / 16 * 16;
    const sequence_mask mask(set.mask, a, b);
    const key_tiles<KEYS> tiles(mask, first, QUERIES);
    const float* bias = a.key_bias ? a.key_bias + (b * a.Hkv + g) * a.T : nullptr;

    const auto load_keys = [&](int tile) {
        load_rows<KEYS, MAX_D, THREADS>(shared->k, a.k, set.wide_k, b, g, tile * KEYS, mask.length, D);
    };
    load_rows<QUERIES, MAX_D, THREADS>(shared->q, a.q, set.wide_q, b, h, first, mask.S, D);
    if (tiles.first() < tiles.end) load_keys(tiles.first());
    commit_copies();

    // Online softmax over rows row and row + 8 of the tile, spread over the four lanes that share them
    const int row = 16 * warp + lane / 4;
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, values[N][4] = {};
    for (int tile = tiles.first(); tile < tiles.end;) {
        const int t0 = tile * KEYS;
        load_rows<KEYS, MAX_D, THREADS>(shared->v, a.v, set.wide_v, b, g, t0, mask.length, D);
        commit_copies();
        wait_for_copies<1>();
        __syncthreads();  // the keys are there
        float x[KEYS / 8][4] = {};
        warp_multiply<b_layout::columns>(x, shared->q + 16 * warp * PITCH, PITCH, shared->k, PITCH, K);
        __syncthreads();  // and used
        tile = tiles.after(tile);
        if (tile < tiles.end) load_keys(tile);
        commit_copies();

        const bool all_seen = mask.sees_all(first, QUERIES, t0, KEYS);
        float top[2] = {m[0], m[1]}, keep[2];
        KVC_UNROLL
        for (int i = 0; i < KEYS / 2; i++) {
            const int r = i % 4 / 2, s = first + row + 8 * r, t = t0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
            float& logit = x[i / 4][i % 4];
            logit *= a.scale;
            if constexpr (CAPPED) logit = a.softcap * tanh_of_logit(logit, a.softcap);
            if (!all_seen && !mask.sees(s, t)) logit = -INFINITY;
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
            const int r = i % 4 / 2;
            float& weight = x[i / 4][i % 4];
            weight = exp_of_difference<T>(weight, finite_or_0(m[r]));
            l[r] += weight;
        }
        if constexpr (sizeof(T) == 4) store_result(shared->p[warp], P_PITCH, x);
        KVC_UNROLL
        for (int n = 0; n < N; n++) {
            values[n][0] *= keep[0];
            values[n][1] *= keep[0];
            values[n][2] *= keep[1];
            values[n][3] *= keep[1];
        }
        wait_for_copies<1>();
        __syncthreads();  // the values are there
        if constexpr (sizeof(T) == 2) multiply_result(values, x, shared->v, PITCH, K / 8);
        else warp_multiply<b_layout::rows>(values, shared->p[warp], P_PITCH, shared->v, PITCH, KEYS, K / 8);
        __syncthreads();  // and used
    }
    wait_for_copies<0>();
    __syncthreads();  // without a tile nobody has waited for the queries yet
    const float sink = sink_of(a, h);
    float keep[2] = {1.0f, 1.0f};
    KVC_UNROLL
    for (int r = 0; r < 2; r++) {
        l[r] += __shfl_xor_sync(FULL_WARP, l[r], 1);
        l[r] += __shfl_xor_sync(FULL_WARP, l[r], 2);
        const int s = first + row + 8 * r;
        if (mask.shift + s >= 0) keep[r] = join_sink(sink, m[r], l[r]);
        if (lane % 4 == 0 && s < mask.S)
            a.lse[head * a.S + s] = l[r] == 0.0f ? -INFINITY : m[r] + logf(l[r]);
    }
    KVC_UNROLL
    for (int n = 0; n < N; n++) {
        KVC_UNROLL
        for (int i = 0; i < 4; i++) values[n][i] = l[i / 2] == 0.0f ? 0.0f : values[n][i] * keep[i / 2] / l[i / 2];
    }
    store_result(shared->q + 16 * warp * PITCH, PITCH, values);
    __syncthreads();
    store_rows<QUERIES, MAX_D, THREADS>(a.out, set.wide_out, b, h, first, mask.S, D, shared->q);
}

template <class T, int MAX_D, bool CAPPED>
cudaError_t launch(const kvc_attention_args& a, cudaStream_t stream) {
    settings set = {};
    set.mask = mask_of(a);
    set.tiles = static_cast<int>(ceil_div(a.S, QUERIES));
    set.wide_q = wide_rows(a.q, a.D);
    set.wide_k = wide_rows(a.k, a.D);
    set.wide_v = wide_rows(a.v, a.D);
    set.wide_out = wide_rows(a.out, a.D);
    if (a.B * a.Hq > MAX_GRID_X / set.tiles) return cudaErrorInvalidValue;
    constexpr size_t SHARED = sizeof(forward_shared<T, MAX_D>);
    const auto kernel = forward_kernel<T, MAX_D, CAPPED>;
    KVC_TRY(allow_shared(kernel, SHARED));
    const unsigned blocks = static_cast<unsigned>(a.B * a.Hq * set.tiles);
    KVC_LAUNCH(kernel, blocks, THREADS, SHARED, stream, a, set);
    return cudaSuccess;
}

template <class T, int MAX_D>
cudaError_t launch(const kvc_attention_args& a, cudaStream_t stream) {
    if (!shared_fits(sizeof(forward_shared<T, MAX_D>))) return attend_wide(a, stream);
    return a.softcap > 0.0f ? launch<T, MAX_D, true>(a, stream) : launch<T, MAX_D, false>(a, stream);
}

}  // namespace

extern "C" cudaError_t kvc_cuda_attention(const kvc_attention_args* args, cudaStream_t stream) {
    const kvc_attention_args& a = *args;
    if (!valid_attention(a)) return cudaErrorInvalidValue;
    if (a.B == 0 || a.Hq == 0 || a.S == 0) return cudaSuccess;
    if (!a.out.data || !a.q.data || !a.k.data || !a.v.data || !a.lse) return cudaErrorInvalidValue;
    return with_dtype(a.q.dtype, [&](auto element) {
        using T = decltype(element);
        if (a.D <= 64) return launch<T, 64>(a, stream);
        if (a.D <= 128) return launch<T, 128>(a, stream);
        return a.D <= 256 ? launch<T, 256>(a, stream) : attend_wide(a, stream);
    });
}
