// window_scores of 16-bit queries and keys on tensor cores; the logits never leave the registers.
//
// Three launches, and one that pools. statistics_kernel: maximum and sum of each query row over a part of the keys.
// join_kernel: of a row over all parts and its sink, as what a logit lacks to be ln of a probability. columns_kernel: the logits
// once more, as probabilities, reduced over the rows of a key.
// Flops: 4*D for each query and key that it sees. Must move: keys twice, queries twice. A block holds 128 rows (or keys)
// and has the others come by, 64 columns of 128 at a time: 64 flops per byte from L2. A warp makes 64 x 64 logits, so
// that 8 ldmatrix serve 32 mma; a logit costs 5 instructions in the first pass and 3 in the second (2 for maxima, whose
// exponential is taken once per key). The ceiling is the rate of mma.sync, about 60% of what wgmma reaches on an H200.
// At T = 32K, Hq = 32, Hkv = 8, D = 128, on an H200 (docs/gpu.md): all queries (H2O), causal tiles left out, are 8.8 Tflop
// and took 26.7 ms; a window of 64 is 34 Gflop and 134 MB of keys, 0.08 ms at 400 TFLOP/s, and took 0.20.
#include "attention.cuh"
#include "score.cuh"

namespace {

constexpr int THREADS = 128, JOIN_THREADS = 256;
constexpr int TILE = 128;                 // query rows, and keys, of a block's logits
constexpr int OWN = 64;                   // of a warp
constexpr int DEPTH = 64;                 // columns of D that come at a time
constexpr int RESIDENT_DEPTH = 128;       // columns that a block holds of its own rows or keys; of more D both come
constexpr int64_t BLOCKS = 512;           // that fill any device; more splits would only cost scratch
constexpr int64_t MAX_SPLITS = 256;
constexpr int M = OWN / 16, N = OWN / 8;  // blocks of 16 rows, tiles of 8 keys

struct plan {
    int64_t rows, row_tiles;  // G*W of a KV head
    int64_t splits, split_tiles;
    int64_t column_tiles;  // of the keys that get a score
    int64_t bytes_statistics, bytes_offsets;
    bool wide_q, wide_k;
};

plan plan_of(const kvc_window_scores_args& a) {
    plan p = {};
    const int64_t key_tiles = ceil_div(a.T, TILE), heads = a.B * a.Hkv;
    p.rows = a.Hq / a.Hkv * a.W;
    p.row_tiles = ceil_div(p.rows, TILE);
    // Not a function of B: splitting a batch changes no bit
    const int64_t wish = ceil_div(BLOCKS, a.Hkv * p.row_tiles), most = key_tiles < MAX_SPLITS ? key_tiles : MAX_SPLITS;
    p.split_tiles = ceil_div(key_tiles, wish < most ? wish : most);
    p.splits = ceil_div(key_tiles, p.split_tiles);
    p.column_tiles = ceil_div(a.T - a.skip_last, TILE);
    p.bytes_statistics = heads * p.splits * p.row_tiles * TILE * static_cast<int64_t>(sizeof(float2));
    p.bytes_offsets = heads * p.row_tiles * TILE * static_cast<int64_t>(sizeof(float));
    p.wide_q = wide_rows(a.q, a.D);
    p.wide_k = wide_rows(a.k, a.D);
    return p;
}

// A tile of either kind: its own rows or keys stay (D <= RESIDENT_DEPTH), or come with the others.
template <class T, bool RESIDENT>
struct tile_memory {
    static constexpr int STAGES = 3, PITCH = pitch_of<T>(DEPTH), STAYING_PITCH = pitch_of<T>(RESIDENT_DEPTH);
    T staying[TILE * STAYING_PITCH];
    struct {
        T coming[TILE * PITCH];
    } stages[STAGES];
    __device__ T* staying_at(int, int column) { return staying + column; }
};
template <class T>
struct tile_memory<T, false> {
    static constexpr int STAGES = 2, PITCH = pitch_of<T>(DEPTH), STAYING_PITCH = PITCH;
    struct {
        T coming[TILE * PITCH], staying[TILE * PITCH];
    } stages[STAGES];
    __device__ T* staying_at(int stage, int) { return stages[stage].staying; }
};

static_assert(sizeof(tile_memory<bf16, true>) <= 228 * 1024 / 2 - 4096, "two blocks per multiprocessor of an H100");
static_assert(sizeof(tile_memory<bf16, true>) <= 99 * 1024, "what sm_86 has");

// The rows or the keys of one KV head. Row n is token n % window of head n / window; a tile is mostly of one head.
template <class T>
struct side {
    const T* data;
    int64_t stride, stride_head;  // from token to token, from head to head
    int window;
    int count;  // from here on rows are zeros
    bool wide;

    // Columns [column, column + DEPTH) of TILE rows from `first`, zeros past D; copies in the background if wide.
    __device__ void load(T* to, int pitch, int first, int column, int D) const {
        constexpr int VEC = PER_16_BYTES<T>, CHUNKS = DEPTH / VEC, STEP = THREADS / CHUNKS;
        const int own = static_cast<int>(threadIdx.x) % CHUNKS * VEC, d = column + own;
        if (d >= (D + 15) / 16 * 16) return;
        const int first_head = static_cast<int>(quotient(first, window)), first_token = first - first_head * window;
        const int own_row = static_cast<int>(threadIdx.x) / CHUNKS, rows = d < D ? count - first : 0;
        to += own_row * pitch + own;
        if (wide && first_token + TILE <= window) {
            const T* from = data + first_head * stride_head + (first_token + own_row) * stride + d;
            const int64_t step = STEP * stride;
            KVC_UNROLL
            for (int row = 0; row < TILE; row += STEP, from += step)
                copy_16_async(to + row * pitch, from, own_row + row < rows);
            return;
        }
        const auto row_at = [&](int row) {
            const int n = own_row + row < rows ? first + own_row + row : 0;
            return data + quotient(n, window) * stride_head + remainder_of(n, window) * stride + d;
        };
        if (wide) {
            KVC_UNROLL
            for (int row = 0; row < TILE; row += STEP) copy_16_async(to + row * pitch, row_at(row), own_row + row < rows);
            return;
        }
        KVC_ROLLED
        for (int row = 0; row < TILE; row += STEP) {
            const T* from = row_at(row);
            packed<T, VEC> part = {};
            KVC_UNROLL
            for (int e = 0; e < VEC; e++)
                if (own_row + row < rows && d + e < D) part.at[e] = from[e];
            *reinterpret_cast<packed<T, VEC>*>(to + row * pitch) = part;
        }
    }
};

template <class T>
__device__ side<T> queries_of(const kvc_window_scores_args& a, const plan& p, int64_t b, int64_t g) {
    side<T> q;
    q.data = static_cast<const T*>(a.q.data) + b * a.q.stride_b + g * quotient(a.Hq, a.Hkv) * a.q.stride_h;
    q.stride = a.q.stride_t;
    q.stride_head = a.q.stride_h;
    q.window = static_cast<int>(a.W);
    q.count = static_cast<int>(p.rows);
    q.wide = p.wide_q;
    return q;
}

template <class T>
__device__ side<T> keys_side(const kvc_window_scores_args& a, const plan& p, int64_t b, int64_t g, int64_t length) {
    side<T> k;
    k.data = static_cast<const T*>(a.k.data) + b * a.k.stride_b + g * a.k.stride_h;
    k.stride = a.k.stride_t;
    k.stride_head = 0;
    k.window = static_cast<int>(MAX_GRID_X / 2);  // all of them
    k.count = static_cast<int>(length);
    k.wide = p.wide_k;
    return k;
}

// Products of the tile `own` of one side with tiles first, next(first), .. < end of the other: begin(tile), then
// use(tile, products) for each. QUERIES_STAY: the tile `own` is of queries. Rows of products are queries in either case.
template <bool QUERIES_STAY, class T, bool RESIDENT, class Next, class Begin, class Use>
__device__ void each_tile(tile_memory<T, RESIDENT>* shared, const side<T>& staying, int own, const side<T>& coming,
                          int first, int end, int D, Next next, Begin begin, Use use) {
    using memory = tile_memory<T, RESIDENT>;
    constexpr int STAGES = memory::STAGES;
    const int warp = static_cast<int>(threadIdx.x) / 32, columns = (D + 15) / 16 * 16;
    const int row = OWN * (warp / 2), key = OWN * (warp % 2);
    int ahead = first, ahead_column = 0;
    const auto load_ahead = [&](int stage) {
        if (ahead < end) {
            coming.load(shared->stages[stage].coming, memory::PITCH, ahead * TILE, ahead_column, D);
            if constexpr (!RESIDENT)
                staying.load(shared->staying_at(stage, 0), memory::STAYING_PITCH, own * TILE, ahead_column, D);
            ahead_column += DEPTH;
            if (ahead_column >= columns) {
                ahead_column = 0;
                ahead = next(ahead);
            }
        }
        commit_copies();
    };
    if constexpr (RESIDENT) {
        for (int column = 0; column < columns; column += DEPTH)
            staying.load(shared->staying_at(0, column), memory::STAYING_PITCH, own * TILE, column, D);
    }
    for (int stage = 0; stage + 1 < STAGES; stage++) load_ahead(stage);
    int stage = 0;
    for (int tile = first; tile < end; tile = next(tile)) {
        float x[M][N][4] = {};
        begin(tile);
        KVC_ROLLED
        for (int column = 0; column < columns; column += DEPTH) {
            wait_for_copies<STAGES - 2>();
            __syncthreads();  // the stage is here, and the one before is used
            load_ahead(stage == 0 ? STAGES - 1 : stage - 1);
            const T *stays = shared->staying_at(stage, column), *comes = shared->stages[stage].coming;
            const int K = smaller(columns - column, DEPTH);
            if constexpr (QUERIES_STAY)
                warp_multiply<b_layout::columns, DEPTH>(x, stays + row * memory::STAYING_PITCH, memory::STAYING_PITCH,
                                                        comes + key * memory::PITCH, memory::PITCH, K);
            else
                warp_multiply<b_layout::columns, DEPTH>(x, comes + row * memory::PITCH, memory::PITCH,
                                                        stays + key * memory::STAYING_PITCH, memory::STAYING_PITCH, K);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        use(tile, x);
    }
    wait_for_copies<0>();
    __syncthreads();
}

// What makes products logits of base 2.
template <bool CAPPED>
struct logits {
    float scale, cap, cap_2, factor;

    __device__ explicit logits(const kvc_window_scores_args& a)
        : scale(a.scale), cap(a.softcap), cap_2(a.softcap * LOG2_E), factor(a.scale * LOG2_E) {}
    __device__ float operator()(float product, float more = 0.0f) const {
        if constexpr (CAPPED) return cap_2 * tanh_of_logit(product * scale, cap) + more;
        else return product * factor + more;
    }
};

// The larger; NaN if one is.
__device__ inline float larger_or_nan(float x, float y) {
#ifdef KVC_CUDA_EMULATION
    return reduce(x, y, true);
#else
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
#endif
}

// join() in base 2.
__device__ inline void join_2(float& m, float& l, float other_m, float other_l) {
    const float top = fmaxf(m, other_m), shift = finite_or_0(top);
    l = l * exp2f(m - shift) + other_l * exp2f(other_m - shift);
    m = top;
}

// The keys that rows [first, first + TILE) see: all of them those before `least`, none those from `most` on.
struct seen_by_tile {
    int head, least, most;  // head: of the first row

    __device__ seen_by_tile(const kvc_window_scores_args& a, const plan& p, int length, int first) {
        const int W = static_cast<int>(a.W), last = smaller(first + TILE, static_cast<int>(p.rows)) - 1;
        head = static_cast<int>(quotient(first, W));
        const int from = first - head * W, to = last - head * W;
        least = static_cast<int>(seen_end(a, length, to < W ? from : 0));
        most = static_cast<int>(seen_end(a, length, to < W ? to : W - 1));
    }
};

// One past the last key that row n sees; 0 for rows that are no query.
__device__ inline int end_of_row(const kvc_window_scores_args& a, const plan& p, int length, int n) {
    return n < p.rows ? static_cast<int>(seen_end(a, length, remainder_of(n, a.W))) : 0;
}

// Logits of base 2 that row n does not see are -inf. n0, t0: the tile's first row and key.
__device__ inline void mask_tile(float (&x)[M][N][4], const kvc_window_scores_args& a, const plan& p, int length, int n0,
                                 int t0) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int first = static_cast<int>(a.mask_first);
    KVC_UNROLL
    for (int i = 0; i < 2 * M; i++) {
        const int end = end_of_row(a, p, length, n0 + OWN * (warp / 2) + 16 * (i / 2) + lane / 4 + 8 * (i % 2));
        KVC_UNROLL
        for (int j = 0; j < 2 * N; j++) {
            const int t = t0 + OWN * (warp % 2) + 8 * (j / 2) + 2 * (lane % 4) + j % 2;
            if (t < first || t >= end) x[i / 2][j / 2][2 * (i % 2) + j % 2] = -INFINITY;
        }
    }
}

template <class T, bool RESIDENT, bool CAPPED>
__global__ __launch_bounds__(THREADS, 2) void statistics_kernel(const kvc_window_scores_args a, const plan p,
                                                                float2* statistics) {
    using memory = tile_memory<T, RESIDENT>;
    KVC_DYNAMIC_SHARED(memory, shared);
    __shared__ float2 of_keys[2][TILE];
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int64_t split = remainder_of(blockIdx.x, p.splits), rest = quotient(blockIdx.x, p.splits);
    // Rows with the most keys first
    const int row_tile = static_cast<int>(p.row_tiles - 1 - remainder_of(rest, p.row_tiles)), n0 = row_tile * TILE;
    const int64_t head = quotient(rest, p.row_tiles), b = quotient(head, a.Hkv), g = remainder_of(head, a.Hkv);
    const int length = static_cast<int>(keys_of(a, b)), mask_first = static_cast<int>(a.mask_first);
    const seen_by_tile seen(a, p, length, n0);
    const int begin = larger(static_cast<int>(split * p.split_tiles), mask_first / TILE);
    const int end = smaller(static_cast<int>((split + 1) * p.split_tiles), (larger(seen.most, 0) + TILE - 1) / TILE);
    const logits<CAPPED> logit(a);
    // Logits of which the products are only multiplied by a positive scale stay products: the exponent's factor has it
    const bool products = !CAPPED && a.scale > 0.0f;
    const float factor = products ? logit.factor : 1.0f;
    // Each lane has a softmax of its own of the keys that it holds of its rows
    float m[2 * M], l[2 * M];
    KVC_UNROLL
    for (int i = 0; i < 2 * M; i++) {
        m[i] = -INFINITY;
        l[i] = 0.0f;
    }
    each_tile<true>(
        shared, queries_of<T>(a, p, b, g), row_tile, keys_side<T>(a, p, b, g, length), begin, end,
        static_cast<int>(a.D), [](int tile) { return tile + 1; }, [](int) {},
        [&](int tile, float (&x)[M][N][4]) {
            if (!products) {
                KVC_UNROLL
                for (int i = 0; i < M * N * 4; i++) {
                    float& y = x[i / N / 4][i / 4 % N][i % 4];
                    y = logit(y);
                }
            }
            if (tile * TILE < mask_first || (tile + 1) * TILE > seen.least) mask_tile(x, a, p, length, n0, tile * TILE);
            KVC_UNROLL
            for (int i = 0; i < 2 * M; i++) {
                float top = m[i], sum = 0.0f;
                KVC_UNROLL
                for (int j = 0; j < 2 * N; j++) top = fmaxf(top, x[i / 2][j / 2][2 * (i % 2) + j % 2]);
                const float shift = finite_or_0(top) * factor;
                KVC_UNROLL
                for (int j = 0; j < 2 * N; j++) sum += exp2_fast(x[i / 2][j / 2][2 * (i % 2) + j % 2] * factor - shift);
                l[i] = l[i] * exp2_fast(m[i] * factor - shift) + sum;
                m[i] = top;
            }
        });
    KVC_UNROLL
    for (int i = 0; i < 2 * M; i++) {
        m[i] *= factor;
        KVC_UNROLL
        for (int step = 1; step < 4; step *= 2) {
            const float other_m = __shfl_xor_sync(FULL_WARP, m[i], step);
            const float other_l = __shfl_xor_sync(FULL_WARP, l[i], step);
            join_2(m[i], l[i], other_m, other_l);
        }
        float2 both;
        both.x = m[i];
        both.y = l[i];
        if (lane % 4 == 0) of_keys[warp % 2][OWN * (warp / 2) + 16 * (i / 2) + lane / 4 + 8 * (i % 2)] = both;
    }
    __syncthreads();
    float2 all = of_keys[0][threadIdx.x];
    join_2(all.x, all.y, of_keys[1][threadIdx.x].x, of_keys[1][threadIdx.x].y);
    statistics[((head * p.splits + split) * p.row_tiles + row_tile) * TILE + threadIdx.x] = all;
}

// offsets[head][row] = -log2 sum over its keys and its sink of 2^logit; -inf for rows that are no query, whose weights are 0.
__global__ __launch_bounds__(JOIN_THREADS) void join_kernel(const kvc_window_scores_args a, const plan p,
                                                            const float2* statistics, float* offsets) {
    const int64_t i = blockIdx.x * static_cast<int64_t>(JOIN_THREADS) + threadIdx.x, padded = p.row_tiles * TILE;
    if (i >= a.B * a.Hkv * padded) return;
    const int64_t head = quotient(i, padded), n = remainder_of(i, padded);
    float m = -INFINITY, l = 0.0f;
    for (int64_t split = 0; split < p.splits; split++) {
        const float2 part = statistics[(head * p.splits + split) * padded + n];
        join_2(m, l, part.x, part.y);
    }
    if (n >= p.rows) {
        offsets[i] = -INFINITY;
        return;
    }
    if (a.sink_logits) {
        const int64_t G = quotient(a.Hq, a.Hkv);
        const float sink = a.sink_logits[remainder_of(head, a.Hkv) * G + quotient(n, a.W)];
        join_2(m, l, sink * LOG2_E, 1.0f);
        if (sink != sink) l = sink;  // NaN shows
    }
    offsets[i] = -(m + log2f(l));
}

template <class T, bool RESIDENT, bool CAPPED>
__global__ __launch_bounds__(THREADS, 2) void columns_kernel(const kvc_window_scores_args a, const plan p,
                                                             const float* offsets, float* columns) {
    using memory = tile_memory<T, RESIDENT>;
    KVC_DYNAMIC_SHARED(memory, shared);
    __shared__ float of_rows[2][TILE];
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    // Keys that the most queries see first
    const int64_t heads = a.B * a.Hkv, head = remainder_of(blockIdx.x, heads);
    const int own = static_cast<int>(quotient(blockIdx.x, heads)), t0 = own * TILE;
    const int64_t b = quotient(head, a.Hkv), g = remainder_of(head, a.Hkv), width = a.T - a.skip_last;
    const int length = static_cast<int>(keys_of(a, b)), mask_first = static_cast<int>(a.mask_first);
    const int64_t scored = length - a.skip_last;
    const bool maximum = a.reduce == KVC_REDUCE_MAX;
    const logits<CAPPED> logit(a);
    const int row_tiles = t0 + TILE <= mask_first || t0 >= scored ? 0 : static_cast<int>(p.row_tiles);
    const int first_token = t0 - (length - static_cast<int>(a.W));  // of the window, that sees t0
    const auto next = [&](int tile) {
        tile++;
        while (tile < row_tiles) {
            const seen_by_tile seen(a, p, length, tile * TILE);
            if (seen.most > t0) break;
            tile = larger(tile + 1, (seen.head * static_cast<int>(a.W) + first_token) / TILE);
        }
        return tile;
    };
    const float* own_offsets = offsets + head * p.row_tiles * TILE;
    float offset[2 * M], column[2 * N];
    KVC_UNROLL
    for (int j = 0; j < 2 * N; j++) column[j] = maximum ? -INFINITY : 0.0f;
    each_tile<false>(
        shared, keys_side<T>(a, p, b, g, length), own, queries_of<T>(a, p, b, g), next(-1), row_tiles,
        static_cast<int>(a.D), next,
        [&](int tile) {
            KVC_UNROLL
            for (int i = 0; i < 2 * M; i++)
                offset[i] = own_offsets[tile * TILE + OWN * (warp / 2) + 16 * (i / 2) + lane / 4 + 8 * (i % 2)];
        },
        [&](int tile, float (&x)[M][N][4]) {
            KVC_UNROLL
            for (int i = 0; i < M * N * 4; i++) {
                float& y = x[i / N / 4][i / 4 % N][i % 4];
                y = logit(y, offset[i / N / 4 * 2 + i % 4 / 2]);
            }
            // Rows that are no query too: of an infinite key their products are no numbers
            if (t0 < mask_first || tile * TILE + TILE > p.rows ||
                t0 + TILE > seen_by_tile(a, p, length, tile * TILE).least)
                mask_tile(x, a, p, length, tile * TILE, t0);
            if (maximum) {  // of the logarithms
                KVC_UNROLL
                for (int i = 0; i < 2 * M; i++) {
                    KVC_UNROLL
                    for (int j = 0; j < 2 * N; j++)
                        column[j] = larger_or_nan(column[j], x[i / 2][j / 2][2 * (i % 2) + j % 2]);
                }
            } else {
                KVC_UNROLL
                for (int j = 0; j < 2 * N; j++) {
                    float sum = 0.0f;  // of the tile: one chain over all rows of a long window would round too often
                    KVC_UNROLL
                    for (int i = 0; i < 2 * M; i++) sum += exp2_fast(x[i / 2][j / 2][2 * (i % 2) + j % 2]);
                    column[j] += sum;
                }
            }
        });
    KVC_UNROLL
    for (int j = 0; j < 2 * N; j++) {
        if (maximum) column[j] = exp2_fast(column[j]);
        KVC_UNROLL
        for (int step = 4; step < 32; step *= 2)
            column[j] = reduce(column[j], __shfl_xor_sync(FULL_WARP, column[j], step), maximum);
        if (lane < 4) of_rows[warp / 2][OWN * (warp % 2) + 8 * (j / 2) + 2 * lane + j % 2] = column[j];
    }
    __syncthreads();
    const int64_t t = t0 + threadIdx.x;
    if (t >= width) return;
    float all = reduce(of_rows[0][threadIdx.x], of_rows[1][threadIdx.x], maximum);
    if (a.reduce == KVC_REDUCE_MEAN) all /= static_cast<float>(p.rows);
    columns[head * width + t] = t < scored ? all : 0.0f;
}

template <class T, bool RESIDENT, bool CAPPED>
cudaError_t launch(const kvc_window_scores_args& a, cudaStream_t stream) {
    const plan p = plan_of(a);
    const int64_t heads = a.B * a.Hkv, statistics_blocks = heads * p.row_tiles * p.splits;
    const int64_t join_blocks = ceil_div(heads * p.row_tiles * TILE, JOIN_THREADS), column_blocks = heads * p.column_tiles;
    // Rows are counted in 31 bits too
    if (statistics_blocks > MAX_GRID_X || heads * p.row_tiles * TILE > MAX_GRID_X || column_blocks > MAX_GRID_X)
        return cudaErrorInvalidValue;
    char* scratch = static_cast<char*>(a.scratch);
    float2* statistics = reinterpret_cast<float2*>(scratch);
    float* offsets = reinterpret_cast<float*>(scratch + p.bytes_statistics);
    float* raw = reinterpret_cast<float*>(scratch + p.bytes_statistics + p.bytes_offsets);
    float* columns = a.kernel_size > 1 ? raw : a.scores;
    constexpr size_t SHARED = sizeof(tile_memory<T, RESIDENT>);
    const auto statistics_of = statistics_kernel<T, RESIDENT, CAPPED>;
    const auto columns_of = columns_kernel<T, RESIDENT, CAPPED>;
    KVC_TRY(allow_shared(statistics_of, SHARED));
    KVC_TRY(allow_shared(columns_of, SHARED));
    KVC_LAUNCH(statistics_of, static_cast<unsigned>(statistics_blocks), THREADS, SHARED, stream, a, p, statistics);
    KVC_LAUNCH(join_kernel, static_cast<unsigned>(join_blocks), JOIN_THREADS, 0, stream, a, p, statistics, offsets);
    KVC_LAUNCH(columns_of, static_cast<unsigned>(column_blocks), THREADS, SHARED, stream, a, p, offsets, columns);
    return pool_columns(a, columns, stream);
}

template <class T>
cudaError_t launch(const kvc_window_scores_args& a, cudaStream_t stream) {
    if (a.D <= RESIDENT_DEPTH)
        return a.softcap > 0.0f ? launch<T, true, true>(a, stream) : launch<T, true, false>(a, stream);
    return a.softcap > 0.0f ? launch<T, false, true>(a, stream) : launch<T, false, false>(a, stream);
}

}  // namespace

bool suits_mma(const kvc_window_scores_args& a) {
    return a.q.dtype == a.k.dtype && a.k.dtype != KVC_F32 && a.T <= MAX_GRID_X / 2;
}

int64_t mma_scratch_bytes(const kvc_window_scores_args& a) {
    const plan p = plan_of(a);
    return p.bytes_statistics + p.bytes_offsets + column_bytes(a);
}

cudaError_t score_by_mma(const kvc_window_scores_args& args, cudaStream_t stream) {
    kvc_window_scores_args a = args;  // places are counted in 32 bits
    if (a.mask_first > a.T) a.mask_first = a.T;
    if (a.mask_last > a.T) a.mask_last = a.T;
    return a.q.dtype == KVC_BF16 ? launch<bf16>(a, stream) : launch<f16>(a, stream);
}
