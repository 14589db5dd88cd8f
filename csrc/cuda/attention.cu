// Flash attention, forward: see kvc_attention in kvc.h. Backward: attention_backward.cu.
//
// Flops: 4*D for each query and key that it sees; tiles that the mask empties cost nothing. Must move: queries and out
// once; keys and values once per 128 queries and head, nearly always from L2. The ceiling is the rate of the products:
// mma.sync for 16-bit types (about 60% of what wgmma reaches on an H200), FMA for float32.
// 16-bit types up to D = 128: a warp holds 32 queries, so that each B operand read from shared memory serves two mma. At
// D = 128, of 32 keys that all of them see, a warp issues 128 mma, 48 ldmatrix (192 clocks of shared memory, beside 256
// of an A100's tensor cores and 198 of an H100's) and 270 others, 398 where a row's maximum moves. 248 registers: two
// blocks per multiprocessor of sm_80 and sm_90, one of sm_86, whose shared memory holds no second one.
// One block: four warps and the queries of one head. 16-bit types: the next tile of keys and values is on its way while
// this one is computed. float32: while the logits of a tile are computed its values are on their way, then the next
// tile's keys. Blocks with the most keys start first. Only tiles that the mask cuts test for it.
#include "attention.cuh"

namespace {

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;

struct settings {
    mask_settings mask;
    int tiles;  // of queries
    bool wide_q, wide_k, wide_v, wide_out;
};

template <class T, int MAX_D>
struct shape {
    static constexpr int BLOCKS = sizeof(T) == 2 && MAX_D <= 128 ? 2 : 1;  // of 16 queries, of a warp
    static constexpr int ROWS = 16 * BLOCKS, QUERIES = ROWS * WARPS;
    static constexpr int KEYS = 32, STAGES = sizeof(T) == 2 ? 2 : 1;  // two of float32 would not fit at D = 256
    static constexpr int PITCH = pitch_of<T>(MAX_D);
    static constexpr int RESIDENT = MAX_D > 128 ? 1 : sizeof(T) == 2 && MAX_D == 128 ? 2 : 3;  // blocks at a time that registers are for
};

// The weights between the two products: of 16-bit types they stay in registers.
template <class T, int MAX_D>
struct weights_shared {};
template <int MAX_D>
struct weights_shared<float, MAX_D> {
    static constexpr int P_PITCH = pitch_of<float>(shape<float, MAX_D>::KEYS);
    float p[WARPS][16 * P_PITCH];
};

template <class T, int MAX_D>
struct forward_shared : weights_shared<T, MAX_D> {
    using S = shape<T, MAX_D>;
    T q[S::QUERIES * S::PITCH];
    struct {
        T k[S::KEYS * S::PITCH], v[S::KEYS * S::PITCH];
    } stages[S::STAGES];
};

static_assert(sizeof(forward_shared<bf16, 256>) <= 99 * 1024, "what sm_86 has");

template <class T, int MAX_D, bool CAPPED>
__global__ __launch_bounds__(THREADS, shape<T, MAX_D>::RESIDENT) void forward_kernel(const kvc_attention_args a,
                                                                                 const settings set) {
    using S = shape<T, MAX_D>;
    using memory = forward_shared<T, MAX_D>;
    constexpr int KEYS = S::KEYS, PITCH = S::PITCH, BLOCKS = S::BLOCKS, QUERIES = S::QUERIES, N = MAX_D / 8;
    KVC_DYNAMIC_SHARED(memory, shared);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t heads = a.B * a.Hq, head = blockIdx.x % heads, b = head / a.Hq, h = head % a.Hq;
    const int64_t g = h / (a.Hq / a.Hkv);
    const int first = (set.tiles - 1 - static_cast<int>(blockIdx.x / heads)) * QUERIES, own = first + warp * S::ROWS;
    const int D = static_cast<int>(a.D), K = (D + 15) / 16 * 16;
    const sequence_mask mask(set.mask, a, b);
    const key_tiles<KEYS> tiles(mask, first, QUERIES);
    const float* bias = a.key_bias ? a.key_bias + (b * a.Hkv + g) * a.T : nullptr;
    // Logits of which the products are only multiplied by a positive scale stay products: the exponent's factor has it
    const bool products = sizeof(T) == 2 && !CAPPED && !bias && a.scale > 0.0f;
    const float unit = products ? a.scale : 1.0f, factor = unit * LOG2_E;

    const auto load_keys = [&](int tile, int stage) {
        if (tile >= tiles.end) return;
        load_rows<KEYS, MAX_D, THREADS>(shared->stages[stage].k, a.k, set.wide_k, b, g, tile * KEYS, mask.length, D);
    };
    const auto load_values = [&](int tile, int stage) {
        if (tile >= tiles.end) return;
        load_rows<KEYS, MAX_D, THREADS>(shared->stages[stage].v, a.v, set.wide_v, b, g, tile * KEYS, mask.length, D);
    };
    load_rows<QUERIES, MAX_D, THREADS>(shared->q, a.q, set.wide_q, b, h, first, mask.S, D);
    load_keys(tiles.first(), 0);
    if (S::STAGES == 2) load_values(tiles.first(), 0);
    commit_copies();

    // Online softmax; a lane holds rows row(j, 0) and row(j, 1) of block j, which four lanes share
    const auto row = [&](int j, int r) { return own + 16 * j + lane / 4 + 8 * r; };
    float m[BLOCKS][2], l[BLOCKS][2] = {}, values[BLOCKS][N][4] = {};
    KVC_UNROLL
    for (int i = 0; i < 2 * BLOCKS; i++) m[i / 2][i % 2] = -INFINITY;
    int stage = 0;
    for (int tile = tiles.first(); tile < tiles.end; tile = tiles.after(tile)) {
        const int t0 = tile * KEYS;
        const auto& now = shared->stages[stage];
        if constexpr (S::STAGES == 2) {
            wait_for_copies<0>();
            __syncthreads();  // the tile is there, and the one before is used
            stage ^= 1;
            load_keys(tiles.after(tile), stage);
            load_values(tiles.after(tile), stage);
            commit_copies();
        } else {
            load_values(tile, 0);
            commit_copies();
            wait_for_copies<1>();
            __syncthreads();  // the keys are there
        }
        const bool some_seen = mask.sees_some(own, S::ROWS, t0, KEYS);
        float x[BLOCKS][KEYS / 8][4] = {};
        if (some_seen)
            warp_multiply<b_layout::columns, MAX_D>(x, shared->q + S::ROWS * warp * PITCH, PITCH, now.k, PITCH, K);
        if constexpr (S::STAGES == 1) {
            __syncthreads();  // and used
            load_keys(tiles.after(tile), 0);
            commit_copies();
        }
        if (some_seen) {
            const auto key = [&](int n) { return t0 + n / 2 * 8 + lane % 4 * 2 + n % 2; };
            if (!products) {
                KVC_UNROLL
                for (int i = 0; i < BLOCKS * KEYS / 2; i++) {
                    float& logit = x[i / (KEYS / 2)][i / 4 % (KEYS / 8)][i % 4];
                    logit *= a.scale;
                    if constexpr (CAPPED) logit = capped_logit<T>(logit, a.softcap);
                }
            }
            if (!mask.sees_all(own, S::ROWS, t0, KEYS)) {
                KVC_UNROLL
                for (int i = 0; i < 2 * BLOCKS; i++) {
                    const int j = i / 2, r = i % 2, end = mask.end_of(row(j, r)), near = mask.window_of(row(j, r));
                    KVC_UNROLL
                    for (int n = 0; n < KEYS / 4; n++)
                        if (!mask.sees_key(end, near, key(n))) x[j][n / 2][2 * r + n % 2] = -INFINITY;
                }
            }
            if (bias) {
                KVC_UNROLL
                for (int i = 0; i < 2 * BLOCKS; i++) {
                    const int j = i / 2, r = i % 2, at = mask.shift + row(j, r);
                    KVC_UNROLL
                    for (int n = 0; n < KEYS / 4; n++) {
                        float& logit = x[j][n / 2][2 * r + n % 2];
                        if (logit != -INFINITY && key(n) != at) logit += bias[key(n)];
                    }
                }
            }
            weigh_tile<T>(x, m, l, values, factor);
            if constexpr (sizeof(T) == 4) store_result(shared->p[warp], shared->P_PITCH, x[0]);
        }
        if constexpr (S::STAGES == 1) {
            wait_for_copies<1>();
            __syncthreads();  // the values are there
        }
        if (some_seen) {
            if constexpr (sizeof(T) == 2) multiply_result(values, x, now.v, PITCH, K / 8);
            else warp_multiply<b_layout::rows>(values, shared->p[warp], shared->P_PITCH, now.v, PITCH, KEYS, K / 8);
        }
        if constexpr (S::STAGES == 1) __syncthreads();  // and used
    }
    wait_for_copies<0>();
    __syncthreads();  // without a tile nobody has waited for the queries yet
    const float sink = sink_of(a, h);
    KVC_UNROLL
    for (int j = 0; j < BLOCKS; j++) {
        float norm[2];  // what a row's values are multiplied by
        KVC_UNROLL
        for (int r = 0; r < 2; r++) {
            float sum = l[j][r], top = m[j][r] * unit, keep = 1.0f;
            sum += __shfl_xor_sync(FULL_WARP, sum, 1);
            sum += __shfl_xor_sync(FULL_WARP, sum, 2);
            const int s = row(j, r);
            if (mask.shift + s >= 0) keep = join_sink(sink, top, sum);
            if (lane % 4 == 0 && s < mask.S) a.lse[head * a.S + s] = sum == 0.0f ? -INFINITY : top + logf(sum);
            norm[r] = sum == 0.0f ? 0.0f : keep / sum;
        }
        KVC_UNROLL
        for (int i = 0; i < 4 * N; i++) {
            float& value = values[j][i / 4][i % 4];
            value = norm[i % 4 / 2] == 0.0f ? 0.0f : value * norm[i % 4 / 2];  // where nothing is seen, whatever it is
        }
        store_result(shared->q + (S::ROWS * warp + 16 * j) * PITCH, PITCH, values[j]);
    }
    __syncthreads();
    store_rows<QUERIES, MAX_D, THREADS>(a.out, set.wide_out, b, h, first, mask.S, D, shared->q);
}

template <class T, int MAX_D, bool CAPPED>
cudaError_t launch(const kvc_attention_args& a, cudaStream_t stream) {
    settings set = {};
    set.mask = mask_of(a);
    set.tiles = static_cast<int>(ceil_div(a.S, shape<T, MAX_D>::QUERIES));
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
