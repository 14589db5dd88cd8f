// window_scores by cuBLAS: 16-bit products on tensor cores, slab by slab of keys, softmax and sums by our kernels.
//
// The logits of a slab, float32 [KV heads, rows, keys], never outgrow KVC_CUDA_SLAB_BYTES: what cuBLAS has just written is
// read from L2. Twice over the slabs: first each row's maximum and sum, then the probabilities and the sums of columns,
// from the last slab, which is still there, to the first. Rows are the G*W queries of a KV head, packed beside each other,
// PASS_ROWS at a time (with all queries of a prompt, as in H2O, each pass ends at the last key that its queries see).
//
// At T = 32K, W = 64, Hq = 32, Hkv = 8, D = 128: 17 Gflop for each of the two products, 0.04 ms together at an H100's
// 989 TFLOP/s; keys read twice, 134 MB, 0.04 ms at 3.35 TB/s. But the logits are 268 MB, written and read in L2 in each
// pass: 1.07 GB, 0.2 ms at about 5 TB/s, is the ceiling, and 64 launches need about 1 us each. Estimated 0.25 to 0.3 ms,
// where float32 units (score.cu) took an estimated 1.0 to 1.5 ms; none of it is measured.
#include "score.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int64_t PASS_ROWS = 256;
constexpr int64_t LEAST_KEYS = 64;  // and what slabs are multiples of: rows of logits start on 16 bytes
constexpr int COLUMNS = 128;        // keys of a block of columns_kernel: four for each lane
constexpr int AHEAD = 4;            // rows whose logits a warp of it loads before it uses them

struct slabs {
    int64_t rows;       // G*W, of a KV head
    int64_t pass_rows;  // of them at a time
    int64_t keys;       // of a slab; rows of logits are that far apart
    int64_t heads;      // KV heads at a time, of all sequences
    int64_t bytes_logits, bytes_queries, bytes_statistics;
};

int64_t whole_lines(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

slabs slabs_of(const kvc_window_scores_args& a) {
    constexpr int64_t most = KVC_CUDA_SLAB_BYTES / static_cast<int64_t>(sizeof(float));
    slabs s = {};
    s.rows = a.Hq / a.Hkv * a.W;
    s.pass_rows = s.rows < PASS_ROWS ? s.rows : PASS_ROWS;
    // Keys for eight heads at a time: a product large enough for all multiprocessors. Not a function of B
    const int64_t wish = most / (s.pass_rows * (a.Hkv < 8 ? a.Hkv : 8)) / LEAST_KEYS * LEAST_KEYS;
    const int64_t all = ceil_div(a.T, LEAST_KEYS) * LEAST_KEYS;
    s.keys = wish < LEAST_KEYS ? LEAST_KEYS : wish < all ? wish : all;
    s.heads = most / (s.pass_rows * s.keys);
    if (s.heads > a.B * a.Hkv) s.heads = a.B * a.Hkv;
    if (s.heads < 1) s.heads = 1;
    const int64_t rows = s.heads * s.pass_rows;
    s.bytes_logits = whole_lines(rows * s.keys * static_cast<int64_t>(sizeof(float)));
    s.bytes_queries = whole_lines(rows * a.D * bytes_of(a.q.dtype));
    s.bytes_statistics = whole_lines(rows * static_cast<int64_t>(sizeof(float2)));
    return s;
}

// What the kernels work on: the rows [n0, n0 + count) of `heads` KV heads from `first` of B*Hkv on, and the keys
// [t0, end) of a slab.
struct part {
    int64_t first, heads, n0, count, t0, end;
};

__global__ __launch_bounds__(THREADS) void clear_kernel(float* columns, int64_t count) {
    const int64_t step = gridDim.x * static_cast<int64_t>(THREADS);
    for (int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; i < count; i += step) columns[i] = 0.0f;
}

// queries [heads, pass_rows, D] = those of a part, whatever their 16-bit type; statistics [heads, pass_rows] begin
// with the sinks.
__global__ __launch_bounds__(THREADS) void pack_kernel(const kvc_window_scores_args a, const slabs s, const part p,
                                                       bool wide, uint16_t* queries, float2* statistics) {
    const int64_t chunks = a.D / 8, i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x;
    if (i >= p.heads * p.count * chunks) return;
    const int64_t chunk = i % chunks, n = i / chunks % p.count, head = i / chunks / p.count;
    const int64_t b = (p.first + head) / a.Hkv, g = (p.first + head) % a.Hkv;
    const int64_t h = g * (a.Hq / a.Hkv) + (p.n0 + n) / a.W, w = (p.n0 + n) % a.W;
    const uint16_t* from =
        static_cast<const uint16_t*>(a.q.data) + b * a.q.stride_b + h * a.q.stride_h + w * a.q.stride_t + 8 * chunk;
    const int64_t row = head * s.pass_rows + n;
    using bits = packed<uint16_t, 8>;
    bits eight;
    if (wide) {
        eight = *reinterpret_cast<const bits*>(from);
    } else {
        KVC_UNROLL
        for (int e = 0; e < 8; e++) eight.at[e] = from[e];
    }
    *reinterpret_cast<bits*>(queries + row * a.D + 8 * chunk) = eight;
    if (chunk > 0) return;
    float2 start;
    start.x = a.sink_logits ? a.sink_logits[h] : -INFINITY;
    start.y = 1.0f;  // of a sink of -inf, or none, nothing is left as soon as a key is seen
    statistics[row] = start;
}

// Maximum and sum of each row over the slab, joined with those of the slabs before it. A block per row.
__global__ __launch_bounds__(THREADS) void statistics_kernel(const kvc_window_scores_args a, const slabs s, const part p,
                                                             const float* logits, float2* statistics) {
    __shared__ float tops[WARPS], sums[WARPS];
    const int64_t n = blockIdx.x % p.count, head = blockIdx.x / p.count, row = head * s.pass_rows + n;
    const int64_t limit = seen_end(a, keys_of(a, (p.first + head) / a.Hkv), (p.n0 + n) % a.W);
    const int seen = static_cast<int>((limit < p.end ? limit : p.end) - p.t0);
    if (seen <= 0) return;
    const float* own = logits + row * s.keys;
    float m = -INFINITY, l = 0.0f;
    for (int i = 4 * static_cast<int>(threadIdx.x); i < seen; i += 4 * THREADS) {
        float x[4], top = m;
        load<4>(x, own + i);
        KVC_UNROLL
        for (int e = 0; e < 4; e++) {
            x[e] = i + e < seen ? logit_of(a, x[e]) : -INFINITY;
            top = fmaxf(top, x[e]);
        }
        const float shift = top == -INFINITY ? 0.0f : top;
        l *= expf(m - shift);
        KVC_UNROLL
        for (int e = 0; e < 4; e++) l += expf(x[e] - shift);
        m = top;
    }
    KVC_UNROLL
    for (int step = 16; step > 0; step /= 2) {
        const float other_m = __shfl_xor_sync(FULL_WARP, m, step), other_l = __shfl_xor_sync(FULL_WARP, l, step);
        join(m, l, other_m, other_l);
    }
    if (threadIdx.x % 32 == 0) {
        tops[threadIdx.x / 32] = m;
        sums[threadIdx.x / 32] = l;
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    float2 all = statistics[row];
    for (int warp = 0; warp < WARPS; warp++) join(all.x, all.y, tops[warp], sums[warp]);
    statistics[row] = all;
}

// Adds the probabilities of a part to the columns, or takes the larger. A block per COLUMNS keys; a warp takes every
// WARPS-th row.
__global__ __launch_bounds__(THREADS) void columns_kernel(const kvc_window_scores_args a, const slabs s, const part p,
                                                          const float* logits, const float2* statistics,
                                                          float* columns) {
    __shared__ float tops[PASS_ROWS], factors[PASS_ROWS];
    __shared__ int limits[PASS_ROWS];
    alignas(16) __shared__ float partial[WARPS][COLUMNS];
    const int64_t blocks = ceil_div(p.end - p.t0, COLUMNS), head = blockIdx.x / blocks;
    const int64_t begin = blockIdx.x % blocks * COLUMNS;  // in the slab
    const int64_t length = keys_of(a, (p.first + head) / a.Hkv), t0 = p.t0 + begin;
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int64_t within = p.end - t0 < COLUMNS ? p.end - t0 : COLUMNS, scored = length - a.skip_last - t0;
    if (scored <= 0) return;
    for (int64_t n = threadIdx.x; n < p.count; n += THREADS) {
        const float2 row = statistics[head * s.pass_rows + n];
        const int64_t limit = seen_end(a, length, (p.n0 + n) % a.W) - t0;
        tops[n] = row.x;
        factors[n] = 1.0f / row.y;
        limits[n] = static_cast<int>(limit < 0 ? 0 : limit < within ? limit : within);
    }
    __syncthreads();
    const bool maximum = a.reduce == KVC_REDUCE_MAX;
    const float* own = logits + head * s.pass_rows * s.keys + begin + 4 * lane;
    const int count = static_cast<int>(p.count);
    float column[4] = {};  // 0 is neutral for the maximum too: no probability is below it
    for (int n0 = warp; n0 < count; n0 += AHEAD * WARPS) {
        float x[AHEAD][4] = {};
        int seen[AHEAD];
        KVC_UNROLL
        for (int i = 0; i < AHEAD; i++) {
            const int n = n0 + i * WARPS;
            seen[i] = n < count ? limits[n] - 4 * lane : 0;
            if (seen[i] > 0) load<4>(x[i], own + n * s.keys);
        }
        KVC_UNROLL
        for (int i = 0; i < AHEAD; i++) {
            const int n = n0 + i * WARPS;
            KVC_UNROLL
            for (int e = 0; e < 4; e++) {
                if (e >= seen[i]) continue;
                column[e] = reduce(column[e], expf(logit_of(a, x[i][e]) - tops[n]) * factors[n], maximum);
            }
        }
    }
    KVC_UNROLL
    for (int e = 0; e < 4; e++) partial[warp][4 * lane + e] = column[e];
    __syncthreads();
    const int64_t t = threadIdx.x;
    if (t >= within || t >= scored) return;
    float sum = 0.0f;
    for (int y = 0; y < WARPS; y++) sum = reduce(sum, partial[y][t], maximum);
    if (a.reduce == KVC_REDUCE_MEAN) sum /= static_cast<float>(s.rows);
    float& to = columns[(p.first + head) * (a.T - a.skip_last) + t0 + t];
    to = reduce(to, sum, maximum);
}

int blas_type(kvc_dtype dtype) { return dtype == KVC_BF16 ? KVC_BLAS_BF16 : KVC_BLAS_F16; }

// logits [heads, pass_rows, keys] = packed queries times the keys of a part. By columns, as cuBLAS has it, that is
// [keys, rows] = keys [D, keys] transposed times queries [D, rows].
cudaError_t multiply(const kvc_window_scores_args& a, const slabs& s, const part& p, kvc_cuda_blas& blas,
                     int64_t stride_head, const void* queries, float* logits) {
    const float one = 1.0f, zero = 0.0f;
    const char* keys = static_cast<const char*>(a.k.data) +
                       bytes_of(a.k.dtype) * (p.first / a.Hkv * a.k.stride_b + p.first % a.Hkv * a.k.stride_h +
                                              p.t0 * a.k.stride_t);
    const int type = blas_type(a.k.dtype), D = static_cast<int>(a.D), ld = static_cast<int>(s.keys);
    blas.status = blas.gemm(blas.handle, KVC_BLAS_OP_T, KVC_BLAS_OP_N, static_cast<int>(p.end - p.t0),
                            static_cast<int>(p.count), D, &one, keys, type, static_cast<int>(a.k.stride_t), stride_head,
                            queries, type, D, s.pass_rows * a.D, &zero, logits, KVC_BLAS_F32, ld, s.pass_rows * s.keys,
                            static_cast<int>(p.heads), KVC_BLAS_COMPUTE_F32, KVC_BLAS_DEFAULT);
    return blas.status == KVC_BLAS_SUCCESS ? cudaSuccess : cudaErrorUnknown;
}

}  // namespace

bool suits_blas(const kvc_window_scores_args& a) {
    return a.q.dtype == a.k.dtype && a.k.dtype != KVC_F32 && a.D % 8 == 0 && aligned_16(a.k) && a.k.stride_t >= a.D &&
           a.k.stride_t <= INT32_MAX && a.T <= INT32_MAX;
}

int64_t blas_scratch_bytes(const kvc_window_scores_args& a) {
    const slabs s = slabs_of(a);
    return s.bytes_logits + s.bytes_queries + s.bytes_statistics + column_bytes(a);
}

cudaError_t score_by_blas(const kvc_window_scores_args& a, kvc_cuda_blas& blas, cudaStream_t stream) {
    const slabs s = slabs_of(a);
    char* scratch = static_cast<char*>(a.scratch);
    float* logits = reinterpret_cast<float*>(scratch);
    uint16_t* queries = reinterpret_cast<uint16_t*>(scratch + s.bytes_logits);
    float2* statistics = reinterpret_cast<float2*>(scratch + s.bytes_logits + s.bytes_queries);
    float* raw = reinterpret_cast<float*>(scratch + s.bytes_logits + s.bytes_queries + s.bytes_statistics);
    float* columns = a.kernel_size > 1 ? raw : a.scores;
    const int64_t total = a.B * a.Hkv, width = a.T - a.skip_last;
    const int64_t clear_blocks = ceil_div(total * width, THREADS);
    KVC_LAUNCH(clear_kernel, static_cast<unsigned>(clear_blocks < MAX_GRID_X ? clear_blocks : MAX_GRID_X), THREADS, 0,
               stream, columns, total * width);

    // Heads of several sequences are at one stride if there is one head, or one sequence, or they lie beside each other
    const bool one_stride = a.Hkv == 1 || a.B == 1 || a.k.stride_b == a.Hkv * a.k.stride_h;
    const int64_t stride_head = a.Hkv == 1 ? a.k.stride_b : a.k.stride_h;
    part p = {};
    for (; p.first < total; p.first += p.heads) {
        const int64_t left = one_stride ? total - p.first : a.Hkv - p.first % a.Hkv;
        p.heads = s.heads < left ? s.heads : left;
        for (p.n0 = 0; p.n0 < s.rows; p.n0 += s.pass_rows) {
            p.count = s.rows - p.n0 < s.pass_rows ? s.rows - p.n0 : s.pass_rows;
            const int64_t end = seen_end(a, a.T, latest_query(a, p.n0, p.n0 + p.count));
            if (end <= a.mask_first) continue;
            const int64_t pack_blocks = ceil_div(p.heads * p.count * (a.D / 8), THREADS);
            KVC_LAUNCH(pack_kernel, static_cast<unsigned>(pack_blocks), THREADS, 0, stream, a, s, p, aligned_16(a.q),
                       queries, statistics);
            const int64_t slab_count = ceil_div(end - a.mask_first, s.keys);
            const auto take_slab = [&](int64_t slab) {
                p.t0 = a.mask_first + slab * s.keys;
                p.end = p.t0 + s.keys < end ? p.t0 + s.keys : end;
            };
            for (int64_t slab = 0; slab < slab_count; slab++) {
                take_slab(slab);
                KVC_TRY(multiply(a, s, p, blas, stride_head, queries, logits));
                KVC_LAUNCH(statistics_kernel, static_cast<unsigned>(p.heads * p.count), THREADS, 0, stream, a, s, p,
                           logits, statistics);
            }
            for (int64_t slab = slab_count - 1; slab >= 0; slab--) {
                take_slab(slab);
                if (p.t0 >= width) continue;  // of keys without a score only the statistics count
                if (slab < slab_count - 1) KVC_TRY(multiply(a, s, p, blas, stride_head, queries, logits));
                const int64_t blocks = p.heads * ceil_div(p.end - p.t0, COLUMNS);
                KVC_LAUNCH(columns_kernel, static_cast<unsigned>(blocks), THREADS, 0, stream, a, s, p, logits,
                           statistics, columns);
            }
        }
    }
    return pool_columns(a, columns, stream);
}
