// Attention that a window of queries pays to each earlier key: see kvc_window_scores in kvc.h. Queries and keys of one
// 16-bit type go to tensor cores (score_mma.cu); here is everything else.
//
// The probabilities are never stored. One kernel finds maximum and sum of each query row per split of T, a second joins
// the splits, a third computes the logits again, turns them into probabilities and reduces each column, a fourth pools.
// Must move: the keys twice, 2*B*Hkv*T*D*bytes, once more for every further 64 rows of the G*W query rows (from L2).
// Flops: 4*B*Hq*W*T*D. With G*W rows per key the ratio is G*W flops per byte of bf16: from a few dozen rows on the
// ceiling is the float32 rate, not memory.
#include "score.cuh"

namespace {

constexpr int TILE = 64;          // query rows and keys of a tile of logits
constexpr int DEPTH = 32;         // columns of D in shared memory at a time
constexpr int THREADS = 256;      // 16 x 16, each 4 rows x 4 keys
constexpr int PITCH = TILE + 4;   // rows of a shared tile start on 16 bytes, off each other's banks
constexpr int64_t BLOCKS = 1024;  // blocks that fill any device; more splits would only cost scratch
constexpr int64_t MAX_SPLITS = 256;

struct plan {
    int64_t row_tiles, splits, split_keys;
    int64_t blocks_statistics, blocks_columns;
    int64_t bytes_statistics, bytes_joined;
    bool wide_q, wide_k;
};

plan plan_of(const kvc_window_scores_args& a) {
    plan p = {};
    const int64_t key_tiles = ceil_div(a.T, TILE), heads = a.B * a.Hkv;
    p.row_tiles = ceil_div(a.Hq / a.Hkv * a.W, TILE);
    // Not a function of B: splitting a batch changes no bit
    const int64_t wish = ceil_div(BLOCKS, a.Hkv * p.row_tiles);
    p.splits = wish < key_tiles ? wish : key_tiles;
    if (p.splits > MAX_SPLITS) p.splits = MAX_SPLITS;
    p.split_keys = ceil_div(key_tiles, p.splits) * TILE;
    p.blocks_statistics = heads * p.row_tiles * p.splits;
    p.blocks_columns = heads * ceil_div(a.T - a.skip_last, TILE);
    const int64_t rows = a.B * a.Hq * a.W;
    p.bytes_statistics = ceil_div(rows * p.splits * static_cast<int64_t>(sizeof(float2)), 64) * 64;
    p.bytes_joined = ceil_div(rows * static_cast<int64_t>(sizeof(float2)), 64) * 64;
    const auto wide = [&](const kvc_view& x) { return aligned_16(x) && a.D * bytes_of(x.dtype) % 16 == 0; };
    p.wide_q = wide(a.q);
    p.wide_k = wide(a.k);
    return p;
}

__device__ inline int64_t end_of_tile(int64_t n0, int64_t rows) { return n0 + TILE < rows ? n0 + TILE : rows; }

// dst[d][row] = element d0 + d of TILE rows as float, zeros past D; a negative offset stands for a row of zeros.
template <class T, int VEC, class Offset>
__device__ void load_tile(float (&dst)[DEPTH][PITCH], const T* data, Offset offset_of, int d0, int D) {
    constexpr int PER_ROW = DEPTH / VEC;
#ifndef KVC_CUDA_EMULATION
#pragma unroll 2  // with more, registers spill
#endif
    for (int i = threadIdx.x; i < TILE * PER_ROW; i += THREADS) {
        const int row = i / PER_ROW, d = i % PER_ROW * VEC;
        const int64_t offset = offset_of(row);
        float part[VEC] = {};
        if (offset >= 0 && d0 + d < D) load<VEC>(part, data + offset + d0 + d);
        KVC_UNROLL
        for (int e = 0; e < VEC; e++) dst[d + e][row] = part[e];
    }
}

template <class Offset>
__device__ void load_tile(float (&dst)[DEPTH][PITCH], const kvc_view& x, bool wide, Offset offset_of, int d0, int D) {
    if (x.dtype == KVC_F32 && wide) load_tile<float, 4>(dst, static_cast<const float*>(x.data), offset_of, d0, D);
    else if (x.dtype == KVC_F32) load_tile<float, 1>(dst, static_cast<const float*>(x.data), offset_of, d0, D);
    else if (x.dtype == KVC_BF16) load_tile<bf16, 1>(dst, static_cast<const bf16*>(x.data), offset_of, d0, D);
    else load_tile<f16, 1>(dst, static_cast<const f16*>(x.data), offset_of, d0, D);
}

struct alignas(16) tiles {
    float q[DEPTH][PITCH], k[DEPTH][PITCH];
};

// logits[i][j] = scale * <query row n0 + 4*ty + i, key t0 + 4*tx + j>; row n of KV head g is query n % W of
// head g*G + n / W. Starts and ends with the block's threads free to use their own registers only.
__device__ void compute_logits(float (&logits)[4][4], tiles& tile, const kvc_window_scores_args& a, const plan& p,
                               int64_t b, int64_t g, int64_t n0, int64_t t0) {
    const int64_t G = a.Hq / a.Hkv, rows = G * a.W;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16, D = static_cast<int>(a.D);
    const auto query = [&](int row) {
        const int64_t n = n0 + row;
        return n < rows ? (g * G + n / a.W) * a.q.stride_h + n % a.W * a.q.stride_t : int64_t{-1};
    };
    const auto key = [&](int row) { return t0 + row < a.T ? (t0 + row) * a.k.stride_t : int64_t{-1}; };
    kvc_view q = a.q, k = a.k;
    q.data = static_cast<char*>(a.q.data) + b * a.q.stride_b * (a.q.dtype == KVC_F32 ? 4 : 2);
    k.data = static_cast<char*>(a.k.data) + (b * a.k.stride_b + g * a.k.stride_h) * (a.k.dtype == KVC_F32 ? 4 : 2);
    float before[4][4] = {};  // sums of 128 products each: one chain of 512 roundings would lose twice as much
    KVC_UNROLL
    for (int i = 0; i < 16; i++) logits[i / 4][i % 4] = 0.0f;
    for (int d0 = 0; d0 < D; d0 += DEPTH) {
        if (d0 > 0 && d0 % 128 == 0) {
            KVC_UNROLL
            for (int i = 0; i < 16; i++) {
                before[i / 4][i % 4] += logits[i / 4][i % 4];
                logits[i / 4][i % 4] = 0.0f;
            }
        }
        __syncthreads();  // the tile before has been used by all
        load_tile(tile.q, q, p.wide_q, query, d0, D);
        load_tile(tile.k, k, p.wide_k, key, d0, D);
        __syncthreads();
        for (int d = 0; d < DEPTH; d++) {
            float x[4], y[4];
            load<4>(x, &tile.q[d][4 * ty]);
            load<4>(y, &tile.k[d][4 * tx]);
            KVC_UNROLL
            for (int i = 0; i < 16; i++) logits[i / 4][i % 4] += x[i / 4] * y[i % 4];
        }
    }
    KVC_UNROLL
    for (int i = 0; i < 16; i++) logits[i / 4][i % 4] = logit_of(a, before[i / 4][i % 4] + logits[i / 4][i % 4]);
}

__global__ __launch_bounds__(THREADS) void statistics_kernel(const kvc_window_scores_args a, const plan p,
                                                             float2* statistics) {
    __shared__ tiles tile;
    const int64_t split = blockIdx.x % p.splits, row_tile = blockIdx.x / p.splits % p.row_tiles;
    const int64_t head = blockIdx.x / p.splits / p.row_tiles, b = head / a.Hkv, g = head % a.Hkv;
    const int64_t G = a.Hq / a.Hkv, rows = G * a.W, n0 = row_tile * TILE, length = keys_of(a, b);
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    int64_t limit[4];
    float m[4], l[4];
    KVC_UNROLL
    for (int i = 0; i < 4; i++) {
        const int64_t n = n0 + 4 * ty + i;
        limit[i] = n < rows ? seen_end(a, length, n % a.W) : 0;
        m[i] = -INFINITY;
        l[i] = 0.0f;
    }
    const int64_t begin = split * p.split_keys, stop = begin + p.split_keys;
    const int64_t seen = seen_end(a, length, latest_query(a, n0, end_of_tile(n0, rows))), end = stop < seen ? stop : seen;
    for (int64_t t0 = begin; t0 < end; t0 += TILE) {
        if (t0 + TILE <= a.mask_first) continue;
        float logits[4][4];
        compute_logits(logits, tile, a, p, b, g, n0, t0);
        KVC_UNROLL
        for (int i = 0; i < 4; i++) {
            float top = m[i], sum = 0.0f;
            KVC_UNROLL
            for (int j = 0; j < 4; j++) {
                const int64_t t = t0 + 4 * tx + j;
                if (t < a.mask_first || t >= limit[i]) logits[i][j] = -INFINITY;
                top = fmaxf(top, logits[i][j]);
            }
            const float shift = top == -INFINITY ? 0.0f : top;
            KVC_UNROLL
            for (int j = 0; j < 4; j++) sum += expf(logits[i][j] - shift);
            l[i] = l[i] * expf(m[i] - shift) + sum;
            m[i] = top;
        }
    }
    KVC_UNROLL
    for (int i = 0; i < 4; i++) {
        KVC_UNROLL
        for (int step = 8; step > 0; step /= 2) {
            const float other_m = __shfl_xor_sync(FULL_WARP, m[i], step);
            const float other_l = __shfl_xor_sync(FULL_WARP, l[i], step);
            join(m[i], l[i], other_m, other_l);
        }
        const int64_t n = n0 + 4 * ty + i;
        if (tx > 0 || n >= rows) continue;
        float2 both;
        both.x = m[i];
        both.y = l[i];
        statistics[((b * a.Hkv + g) * rows + n) * p.splits + split] = both;  // heads g*G.. in order: [B, Hq, W, splits]
    }
}

// (m, l) of each query row over all splits and the sink of its head. Kept apart: exp(x - m)/l loses less than exp(x - lse) with a rounded lse.
__global__ __launch_bounds__(THREADS) void join_kernel(const kvc_window_scores_args a, float2* joined, const float2* statistics, int64_t rows,
                            int64_t splits) {
    const int64_t row = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x;
    if (row >= rows) return;
    float2 all;
    all.x = -INFINITY;
    all.y = 0.0f;
    for (int64_t split = 0; split < splits; split++) {
        const float2 part = statistics[row * splits + split];
        join(all.x, all.y, part.x, part.y);
    }
    if (a.sink_logits) {
        const float sink = a.sink_logits[row / a.W % a.Hq];
        join(all.x, all.y, sink, 1.0f);
        if (sink != sink) all.y = sink;  // NaN shows
    }
    joined[row] = all;
}

__global__ __launch_bounds__(THREADS) void columns_kernel(const kvc_window_scores_args a, const plan p,
                                                          const float2* rows_statistics, float* columns) {
    __shared__ tiles tile;
    __shared__ float partial[16][TILE];
    const int64_t width = a.T - a.skip_last, key_tiles = ceil_div(width, TILE);
    const int64_t head = blockIdx.x / key_tiles, t0 = blockIdx.x % key_tiles * TILE;
    const int64_t b = head / a.Hkv, g = head % a.Hkv, rows = a.Hq / a.Hkv * a.W, length = keys_of(a, b);
    const int64_t scored = length - a.skip_last;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const bool maximum = a.reduce == KVC_REDUCE_MAX;
    float column[4] = {};  // 0 is neutral for the maximum too: no probability is below it
    for (int64_t n0 = 0; n0 < rows && t0 < scored; n0 += TILE) {
        if (t0 + TILE <= a.mask_first || t0 >= seen_end(a, length, latest_query(a, n0, end_of_tile(n0, rows)))) continue;
        float logits[4][4];
        compute_logits(logits, tile, a, p, b, g, n0, t0);
        KVC_UNROLL
        for (int i = 0; i < 4; i++) {
            const int64_t n = n0 + 4 * ty + i;
            if (n >= rows) continue;
            const float2 row = rows_statistics[head * rows + n];
            const int64_t limit = seen_end(a, length, n % a.W);
            KVC_UNROLL
            for (int j = 0; j < 4; j++) {
                const int64_t t = t0 + 4 * tx + j;
                if (t < a.mask_first || t >= limit) continue;
                column[j] = reduce(column[j], expf(logits[i][j] - row.x) / row.y, maximum);
            }
        }
    }
    KVC_UNROLL
    for (int j = 0; j < 4; j++) partial[ty][4 * tx + j] = column[j];
    __syncthreads();
    if (threadIdx.x >= TILE || t0 + threadIdx.x >= width) return;
    float sum = 0.0f;
    for (int y = 0; y < 16; y++) sum = reduce(sum, partial[y][threadIdx.x], maximum);
    if (a.reduce == KVC_REDUCE_MEAN) sum /= static_cast<float>(rows);
    columns[head * width + t0 + threadIdx.x] = t0 + threadIdx.x < scored ? sum : 0.0f;
}

__global__ __launch_bounds__(THREADS) void pool_kernel(const kvc_window_scores_args a, const float* columns) {
    const int64_t width = a.T - a.skip_last, count = a.B * a.Hkv * width, reach = a.kernel_size / 2;
    const int64_t step = gridDim.x * static_cast<int64_t>(THREADS);
    for (int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; i < count; i += step) {
        const int64_t t = i % width, scored = keys_of(a, i / width / a.Hkv) - a.skip_last;
        const int64_t begin = t > reach ? t - reach : 0, end = t + reach + 1 < scored ? t + reach + 1 : scored;
        const bool maximum = a.pool == KVC_POOL_MAX;
        float pooled = 0.0f;
        for (int64_t x = begin; x < end; x++) pooled = reduce(pooled, columns[i - t + x], maximum);
        if (!maximum) pooled /= static_cast<float>(a.kernel_size);
        a.scores[i] = t < scored ? pooled : 0.0f;
    }
}

bool valid(const kvc_window_scores_args& a) {
    return a.B >= 0 && a.Hq >= 0 && a.Hkv >= 0 && a.W >= 0 && a.T >= 0 && a.D >= 0 && a.D <= KVC_CUDA_MAX_HEAD_DIM &&
           scale_is_good(a.scale, a.softcap) && dtype_known(a.q.dtype) && dtype_known(a.k.dtype) && a.kernel_size >= 1 && a.kernel_size % 2 == 1 &&
           a.reduce >= KVC_REDUCE_MEAN && a.reduce <= KVC_REDUCE_MAX && a.pool >= KVC_POOL_AVG &&
           a.pool <= KVC_POOL_MAX && a.skip_last >= 0 && a.mask_first >= 0 && a.mask_last >= 0;
}

bool empty(const kvc_window_scores_args& a) {
    return a.B == 0 || a.Hq == 0 || a.Hkv == 0 || a.W == 0 || a.T == 0 || a.D == 0;
}

bool bad_sizes(const kvc_window_scores_args& a) {
    return a.W > a.T || a.skip_last >= a.T || a.Hq % a.Hkv != 0;
}

}  // namespace

cudaError_t pool_columns(const kvc_window_scores_args& a, const float* columns, cudaStream_t stream) {
    if (a.kernel_size == 1) return cudaSuccess;
    const int64_t blocks = ceil_div(a.B * a.Hkv * (a.T - a.skip_last), THREADS);
    const unsigned grid = static_cast<unsigned>(blocks < MAX_GRID_X ? blocks : MAX_GRID_X);
    KVC_LAUNCH(pool_kernel, grid, THREADS, 0, stream, a, columns);
    return cudaSuccess;
}

extern "C" int64_t kvc_cuda_window_scores_scratch_bytes(const kvc_window_scores_args* args) {
    if (!valid(*args) || empty(*args) || bad_sizes(*args)) return 0;
    if (suits_mma(*args)) return mma_scratch_bytes(*args);
    const plan p = plan_of(*args);
    return p.bytes_statistics + p.bytes_joined + column_bytes(*args);
}

extern "C" cudaError_t kvc_cuda_window_scores(const kvc_window_scores_args* args, cudaStream_t stream) {
    const kvc_window_scores_args& a = *args;
    if (!valid(a)) return cudaErrorInvalidValue;
    if (empty(a)) return cudaSuccess;
    if (bad_sizes(a)) return cudaErrorInvalidValue;
    if (!a.scores || !a.q.data || !a.k.data || !a.scratch) return cudaErrorInvalidValue;
    if (suits_mma(a)) return score_by_mma(a, stream);
    const plan p = plan_of(a);
    const int64_t rows = a.B * a.Hq * a.W, join_blocks = ceil_div(rows, THREADS);
    if (p.blocks_statistics > MAX_GRID_X || p.blocks_columns > MAX_GRID_X || join_blocks > MAX_GRID_X)
        return cudaErrorInvalidValue;
    char* scratch = static_cast<char*>(a.scratch);
    float2* statistics = reinterpret_cast<float2*>(scratch);
    float2* joined = reinterpret_cast<float2*>(scratch + p.bytes_statistics);
    float* raw = reinterpret_cast<float*>(scratch + p.bytes_statistics + p.bytes_joined);
    float* columns = a.kernel_size > 1 ? raw : a.scores;

    KVC_LAUNCH(statistics_kernel, static_cast<unsigned>(p.blocks_statistics), THREADS, 0, stream, a, p, statistics);
    KVC_LAUNCH(join_kernel, static_cast<unsigned>(join_blocks), THREADS, 0, stream, a, joined, statistics, rows,
               p.splits);
    KVC_LAUNCH(columns_kernel, static_cast<unsigned>(p.blocks_columns), THREADS, 0, stream, a, p, joined, columns);
    return pool_columns(a, columns, stream);
}
