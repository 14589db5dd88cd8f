// Attention of a few queries over ragged paged rows: see kvc_decode in kvc.h.
//
// Must move: 2*(end - begin)*D*(bytes of the cache's type) per row, once for up to TILE queries that share the row's
// keys; 4*G*S*D flops per key. Up to 16 queries that is under 16 flops per byte of bf16: the ceiling is memory
// bandwidth, on every device, if enough bytes are on their way and the work is even.
//
// Even work: rows are cut into pieces of PIECE keys from their own beginning (so that a query's bits depend on its own
// row only). plan_kernel lists the pieces on the device: nothing waits for the host, and the grids depend on sizes
// only, so that a step can be captured in a CUDA graph. As many blocks as fit on the device take the pieces in turns:
// one long row among short ones keeps all of them busy. join_kernel adds up a row's pieces in their order.
//
// Bytes on their way: H200 reads 4.8 TB/s at about 0.8 us of latency, 3.8 MB or 29 KB per multiprocessor; A100 2 TB/s,
// 13 KB. pieces_mma_kernel (16-bit) copies STAGE keys and values ahead by cp.async: 32 KB per block at D = 128, and
// 75 KB of shared memory let three blocks run per multiprocessor of an H200, two of an A100: 96 and 64 KB. While one
// block starts a piece (list, block table, first copy: three loads in a chain, under 3 us of the 11 us that 128 KB take
// at a third of a multiprocessor's share) the others read on.
// Instructions: per 16 keys a warp issues 32 mma, 24 ldmatrix and about 150 others for 8 KB of keys and values; at the
// H200's 20 bytes per clock and multiprocessor that is 206 of 1640 issue slots.
// The pieces' results are (D + 2)*4 bytes per query and piece, written and read once: 3% of the keys and values at
// G*S = 4, D = 128.
//
// pieces_kernel takes the rest: float32 caches, queries of another type, head dims that are no multiple of 16 bytes.
#include "kvc_cuda.h"
#include "tile.cuh"

namespace {

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int PER_LANE = 8;  // elements of a head that one lane of pieces_kernel holds: 32 * 8 = KVC_CUDA_MAX_HEAD_DIM
constexpr int PIECE = 256;   // keys
constexpr int STAGE = 64;    // keys of a piece in shared memory at a time, 16 per warp
constexpr int MMA_QUERIES = 16;
constexpr int PLAN_THREADS = 256;
constexpr int JOIN_THREADS = 512;
constexpr float LOG2_E = 1.44269504088896340736f, LN_2 = 0.69314718055994530942f;

struct plan {
    int64_t rows, queries;  // queries that share a row's keys: G*S
    int64_t row_pieces;     // pieces of a row that is full
    int64_t capacity;
    int64_t bytes_list, bytes_first, bytes_count, bytes_statistics, bytes_values;
    int page_shift;    // log2(P); unused without a block table
    int lanes;         // pieces_kernel: neighbouring threads that share one key
    int tiles;         // of queries
    int join_columns;  // threads side by side in join_kernel: D rounded up to a power of two, at least a warp
    bool wide_q;
};

// Where everything lies in the scratch memory. Maximum and sum are of base 2: m = max(x*log2(e)), l = sum 2^(.. - m).
struct scratch {
    int4* list;          // [pieces] row, first key, end of the row, place of the result
    int32_t* first;      // [rows] number of the row's first piece in the list
    int32_t* count;      // [1] pieces in the list
    float2* statistics;  // [rows, row_pieces, queries] m, l
    float* values;       // [rows, row_pieces, queries, D]
};

plan plan_of(const kvc_decode_args& a) {
    plan p = {};
    p.rows = a.B * a.Hkv;
    p.queries = a.Hq / a.Hkv * a.S;
    p.capacity = a.block_table ? a.blocks * a.P : a.P;
    if (a.value_table && a.value_blocks < a.blocks) p.capacity = a.value_blocks * a.P;
    p.row_pieces = ceil_div(p.capacity, PIECE);
    while (a.P >> p.page_shift > 1) p.page_shift++;
    p.join_columns = 32;
    while (p.join_columns < a.D) p.join_columns *= 2;
    const auto size = [](int64_t count, int64_t bytes) { return ceil_div(count * bytes, 64) * 64; };
    const int64_t pieces = p.rows * p.row_pieces;
    p.bytes_list = size(pieces, sizeof(int4));
    p.bytes_first = size(p.rows, sizeof(int32_t));
    p.bytes_count = 64;
    p.bytes_statistics = size(pieces * p.queries, sizeof(float2));
    p.bytes_values = size(pieces * p.queries * a.D, sizeof(float));
    return p;
}

scratch scratch_of(const kvc_decode_args& a, const plan& p) {
    char* at = static_cast<char*>(a.scratch);
    scratch s = {};
    s.list = reinterpret_cast<int4*>(at);
    s.first = reinterpret_cast<int32_t*>(at += p.bytes_list);
    s.count = reinterpret_cast<int32_t*>(at += p.bytes_first);
    s.statistics = reinterpret_cast<float2*>(at += p.bytes_count);
    s.values = reinterpret_cast<float*>(at += p.bytes_statistics);
    return s;
}

__device__ inline int begin_of(const kvc_decode_args& a, int64_t row) {
    return a.begin && a.begin[row] > 0 ? a.begin[row] : 0;
}

__device__ inline int end_of(const kvc_decode_args& a, const plan& p, int64_t row) {
    return a.end[row] < p.capacity ? a.end[row] : static_cast<int>(p.capacity);
}

__device__ inline int pieces_of(const kvc_decode_args& a, const plan& p, int64_t row) {
    const int64_t keys = static_cast<int64_t>(end_of(a, p, row)) - begin_of(a, row);
    return keys > 0 ? static_cast<int>(ceil_div(keys, PIECE)) : 0;
}

// The pages of key t of the row and of its value, both -1 if one of them is on no page.
__device__ inline int2 pages_of(const kvc_decode_args& a, const plan& p, int64_t row, int64_t t) {
    int2 at;
    at.x = at.y = static_cast<int>(row);
    if (a.block_table) at.x = at.y = a.block_table[row * a.blocks + (t >> p.page_shift)];
    if (a.value_table) at.y = a.value_table[row * a.value_blocks + (t >> p.page_shift)];
    const int64_t value_pages = a.value_table ? a.value_pages : a.pages;
    if (at.x < 0 || at.x >= a.pages || at.y < 0 || at.y >= value_pages) at.x = at.y = -1;
    return at;
}

// Where key or value t lies in a page of k_pages or v_pages.
__device__ inline int64_t offset_in(const kvc_decode_args& a, int page, int64_t t) {
    return (page * a.P + (a.block_table ? t & (a.P - 1) : t)) * a.D;
}

// 2^x of a difference to a maximum; -inf - -inf is no number, so a maximum of -inf counts as 0.
__device__ inline float finite_or_0(float m) { return m == -INFINITY ? 0.0f : m; }

// One block: counts the pieces of every row, adds the counts up, lists the pieces row by row.
__global__ __launch_bounds__(PLAN_THREADS) void plan_kernel(const kvc_decode_args a, const plan p, const scratch s) {
    __shared__ int of_warp[PLAN_THREADS / 32];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int64_t share = ceil_div(p.rows, PLAN_THREADS), begin = thread * share;
    const int64_t end = begin + share < p.rows ? begin + share : p.rows;
    int own = 0;
    for (int64_t row = begin; row < end; row++) own += pieces_of(a, p, row);
    int sum = own;  // of this lane and those before it
    KVC_UNROLL
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(FULL_WARP, sum, step);
        if (lane >= step) sum += before;
    }
    if (lane == 31) of_warp[warp] = sum;
    __syncthreads();
    int first = sum - own;
    for (int w = 0; w < warp; w++) first += of_warp[w];
    for (int64_t row = begin; row < end; row++) {
        s.first[row] = first;
        first += pieces_of(a, p, row);
    }
    if (thread == PLAN_THREADS - 1) *s.count = first;
    __syncthreads();
    for (int64_t row = warp; row < p.rows; row += PLAN_THREADS / 32) {
        const int pieces = pieces_of(a, p, row), row_begin = begin_of(a, row), row_end = end_of(a, p, row);
        for (int i = lane; i < pieces; i += 32) {
            int4 piece;
            piece.x = static_cast<int>(row);
            piece.y = row_begin + i * PIECE;
            piece.z = row_end;
            piece.w = static_cast<int>(row * p.row_pieces + i);
            s.list[s.first[row] + i] = piece;
        }
    }
}

// Query n of a row: head g*G + n / S, position n % S. limit: the key behind the last one that it sees.
struct query {
    bool here;
    int64_t h, s;
    int limit;
};

__device__ inline query query_of(const kvc_decode_args& a, const plan& p, int64_t g, int64_t n, int row_end) {
    query q;
    q.here = n < p.queries;
    q.h = g * (a.Hq / a.Hkv) + n / a.S;
    q.s = n % a.S;
    q.limit = !q.here ? -1 : a.causal ? row_end - static_cast<int>(a.S - 1 - q.s) : row_end;
    return q;
}

// ---- 16-bit queries and caches: tensor cores ----

template <class T, int MAX_D>
struct mma_shared {
    static constexpr int PITCH = pitch_of<T>(MAX_D);
    union {
        struct {
            T k[STAGE * PITCH], v[STAGE * PITCH];
        } stages[2];
        float values[WARPS][MMA_QUERIES][MAX_D];  // after the last key of a piece
    };
    T q[MMA_QUERIES * PITCH];
    float2 statistics[WARPS][MMA_QUERIES];
    int2 pages[PIECE];  // of the piece's keys and values
};

static_assert(sizeof(mma_shared<bf16, 128>) + 1024 <= 228 * 1024 / 3, "three blocks per multiprocessor of an H200");

template <class T, int MAX_D>
__global__ __launch_bounds__(THREADS) void pieces_mma_kernel(const kvc_decode_args a, const plan p, const scratch s) {
    using memory = mma_shared<T, MAX_D>;
    constexpr int PITCH = memory::PITCH, N = MAX_D / 8, CHUNKS = MAX_D / 8;  // a chunk: 16 bytes
    KVC_DYNAMIC_SHARED(memory, shared);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int D = static_cast<int>(a.D), K = (D + 15) / 16 * 16;
    const int chunk = thread % CHUNKS * 8;  // the column that this thread copies, of every THREADS / CHUNKS-th key
    const T* k_pages = static_cast<const T*>(a.k_pages);
    const T* v_pages = static_cast<const T*>(a.v_pages);
    const T* queries = static_cast<const T*>(a.q.data);
    const float scale = a.scale * LOG2_E;
    const int64_t work = static_cast<int64_t>(*s.count) * p.tiles;

    for (int64_t item = blockIdx.x; item < work; item += gridDim.x) {
        const int4 piece = s.list[item / p.tiles];
        const int64_t row = piece.x, b = row / a.Hkv, g = row % a.Hkv, first = item % p.tiles * MMA_QUERIES;
        const int begin = piece.y, row_end = piece.z, end = row_end < begin + PIECE ? row_end : begin + PIECE;
        for (int i = thread; i < PIECE; i += THREADS) {
            int2 none;
            none.x = none.y = -1;
            shared->pages[i] = begin + i < end ? pages_of(a, p, row, begin + i) : none;
        }
        for (int i = thread / CHUNKS; i < MMA_QUERIES; i += THREADS / CHUNKS) {
            if (chunk >= K) continue;
            const query q = query_of(a, p, g, first + i, row_end);
            const int64_t at = b * a.q.stride_b + q.h * a.q.stride_h + q.s * a.q.stride_t + chunk;
            packed<T, 8> part = {};
            if (q.here && chunk < D) {
                if (p.wide_q) part = *reinterpret_cast<const packed<T, 8>*>(queries + at);
                else for (int e = 0; e < 8; e++) part.at[e] = queries[at + e];
            }
            *reinterpret_cast<packed<T, 8>*>(shared->q + i * PITCH + chunk) = part;
        }
        __syncthreads();

        const auto copy_stage = [&](int stage) {
            auto& to = shared->stages[stage % 2];
            for (int i = thread / CHUNKS; i < STAGE; i += THREADS / CHUNKS) {
                if (chunk >= K) continue;
                const int2 page = shared->pages[stage * STAGE + i];
                const bool there = page.x >= 0 && chunk < D;
                const int64_t t = begin + stage * STAGE + i;
                const int64_t key_at = there ? offset_in(a, page.x, t) + chunk : 0;
                const int64_t value_at = there ? offset_in(a, page.y, t) + chunk : 0;
                copy_16_async(to.k + i * PITCH + chunk, k_pages + key_at, there);
                copy_16_async(to.v + i * PITCH + chunk, v_pages + value_at, there);
            }
        };
        // Online softmax per warp, of its own 16 keys of every stage. A lane holds rows lane / 4 and + 8 of the queries
        int limit[2];
        float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, values[N][4] = {};
        KVC_UNROLL
        for (int i = 0; i < 2; i++) limit[i] = query_of(a, p, g, first + lane / 4 + 8 * i, row_end).limit;

        const int stages = (end - begin + STAGE - 1) / STAGE;
        copy_stage(0);
        commit_copies();
        for (int stage = 0; stage < stages; stage++) {
            if (stage + 1 < stages) copy_stage(stage + 1);
            commit_copies();
            wait_for_copies<1>();
            __syncthreads();
            const auto& now = shared->stages[stage % 2];
            float x[2][4] = {};
            warp_multiply<b_layout::columns>(x, shared->q, PITCH, now.k + 16 * warp * PITCH, PITCH, K);
            float top[2] = {m[0], m[1]}, keep[2];
            KVC_UNROLL
            for (int i = 0; i < 8; i++) {
                const int r = i % 4 / 2, key = stage * STAGE + 16 * warp + i / 4 * 8 + lane % 4 * 2 + i % 2;
                const bool seen = begin + key < limit[r] && shared->pages[key].x >= 0;
                float& logit = x[i / 4][i % 4];
                logit = seen ? logit * scale : -INFINITY;
                top[r] = fmaxf(top[r], logit);
            }
            KVC_UNROLL
            for (int r = 0; r < 2; r++) {
                top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], 1));
                top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], 2));
                keep[r] = exp2f(m[r] - finite_or_0(top[r]));
                l[r] *= keep[r];
                m[r] = top[r];
            }
            KVC_UNROLL
            for (int i = 0; i < 8; i++) {
                const int r = i % 4 / 2;
                float& weight = x[i / 4][i % 4];
                weight = exp2f(weight - finite_or_0(m[r]));
                l[r] += weight;
            }
            // Maxima settle after a few stages; then nothing is scaled
            if (__ballot_sync(FULL_WARP, keep[0] != 1.0f || keep[1] != 1.0f)) {
                KVC_UNROLL
                for (int n = 0; n < N; n++) {
                    values[n][0] *= keep[0];
                    values[n][1] *= keep[0];
                    values[n][2] *= keep[1];
                    values[n][3] *= keep[1];
                }
            }
            multiply_result(values, x, now.v + 16 * warp * PITCH, PITCH, K / 8);
            __syncthreads();  // the stage's memory is free
        }
        // Join the warps, in their order
        KVC_UNROLL
        for (int r = 0; r < 2; r++) {
            l[r] += __shfl_xor_sync(FULL_WARP, l[r], 1);
            l[r] += __shfl_xor_sync(FULL_WARP, l[r], 2);
            float2 both;
            both.x = m[r];
            both.y = l[r];
            if (lane % 4 == 0) shared->statistics[warp][lane / 4 + 8 * r] = both;
        }
        KVC_UNROLL
        for (int n = 0; n < N; n++) {
            KVC_UNROLL
            for (int i = 0; i < 4; i++)
                shared->values[warp][lane / 4 + i / 2 * 8][8 * n + lane % 4 * 2 + i % 2] = values[n][i];
        }
        __syncthreads();
        for (int i = thread; i < MMA_QUERIES * MAX_D; i += THREADS) {
            const int n = i / MAX_D, d = i % MAX_D;
            if (first + n >= p.queries) break;
            if (d >= D) continue;
            float all = -INFINITY, sum = 0.0f, value = 0.0f;
            KVC_UNROLL
            for (int w = 0; w < WARPS; w++) all = fmaxf(all, shared->statistics[w][n].x);
            KVC_UNROLL
            for (int w = 0; w < WARPS; w++) {
                const float weight = exp2f(shared->statistics[w][n].x - finite_or_0(all));
                sum += weight * shared->statistics[w][n].y;
                value += weight * shared->values[w][n][d];
            }
            const int64_t at = piece.w * p.queries + first + n;
            s.values[at * D + d] = value;
            float2 both;
            both.x = all;
            both.y = sum;
            if (d == 0) s.statistics[at] = both;
        }
        // No barrier: the next piece writes nothing that is read here before its first one
    }
}

// ---- everything else: plain FMA ----

template <class T, int VEC, int QUERIES>
__global__ __launch_bounds__(THREADS, 1) void pieces_kernel(const kvc_decode_args a, const plan p, const scratch s) {
    constexpr int CHUNKS = PER_LANE / VEC;
    constexpr int AHEAD = QUERIES > 4 ? 2 : 4;  // keys that a lane loads before it uses the first
    KVC_DYNAMIC_SHARED(float, shared);
    const int lanes = p.lanes, groups = THREADS / lanes;
    const int lane = static_cast<int>(threadIdx.x) % lanes, group = static_cast<int>(threadIdx.x) / lanes;
    const int D = static_cast<int>(a.D);
    const int64_t work = static_cast<int64_t>(*s.count) * p.tiles;
    float* m_of = shared;                        // [groups][QUERIES]
    float* l_of = m_of + groups * QUERIES;       // [groups][QUERIES]
    float* values_of = l_of + groups * QUERIES;  // [groups][QUERIES][D]

    for (int64_t item = blockIdx.x; item < work; item += gridDim.x) {
        const int4 piece = s.list[item / p.tiles];
        const int64_t row = piece.x, b = row / a.Hkv, g = row % a.Hkv, first = item % p.tiles * QUERIES;
        const int begin = piece.y, row_end = piece.z, end = row_end < begin + PIECE ? row_end : begin + PIECE;
        // Online softmax, one per group of lanes and query: maximum m, sum l, weighted values
        float q[QUERIES][PER_LANE], values[QUERIES][PER_LANE], m[QUERIES], l[QUERIES];
        int limit[QUERIES];
        KVC_UNROLL
        for (int n = 0; n < QUERIES; n++) {
            const query one = query_of(a, p, g, first + n, row_end);
            limit[n] = one.limit;
            m[n] = -INFINITY;
            l[n] = 0.0f;
            KVC_UNROLL
            for (int i = 0; i < PER_LANE; i++) {
                const int d = (i / VEC * lanes + lane) * VEC + i % VEC;
                const int64_t at = b * a.q.stride_b + one.h * a.q.stride_h + one.s * a.q.stride_t + d;
                q[n][i] = one.here && d < D ? load_any(a.q.data, a.q.dtype, at) * (a.scale * LOG2_E) : 0.0f;
                values[n][i] = 0.0f;
            }
        }
        // All lanes run every round: the sums over lanes are shuffles of the whole warp
        for (int base = begin; base < end; base += AHEAD * groups) {
            packed<T, VEC> k[AHEAD][CHUNKS], v[AHEAD][CHUNKS];
            bool there[AHEAD];
            KVC_UNROLL
            for (int u = 0; u < AHEAD; u++) {
                const int t = base + u * groups + group;
                int2 page;
                page.x = page.y = -1;
                if (t < end) page = pages_of(a, p, row, t);
                there[u] = page.x >= 0;
                const int64_t key_at = there[u] ? offset_in(a, page.x, t) : 0;
                const int64_t value_at = there[u] ? offset_in(a, page.y, t) : 0;
                KVC_UNROLL
                for (int c = 0; c < CHUNKS; c++) {
                    const int d = (c * lanes + lane) * VEC;
                    k[u][c] = {};
                    v[u][c] = {};
                    if (!there[u] || d >= D) continue;
                    k[u][c] = *reinterpret_cast<const packed<T, VEC>*>(static_cast<const T*>(a.k_pages) + key_at + d);
                    v[u][c] = *reinterpret_cast<const packed<T, VEC>*>(static_cast<const T*>(a.v_pages) + value_at + d);
                }
            }
            KVC_UNROLL
            for (int n = 0; n < QUERIES; n++) {
                float score[AHEAD], top = m[n];
                KVC_UNROLL
                for (int u = 0; u < AHEAD; u++) {
                    score[u] = 0.0f;
                    KVC_UNROLL
                    for (int i = 0; i < PER_LANE; i++) score[u] += q[n][i] * to_float(k[u][i / VEC].at[i % VEC]);
                    for (int step = lanes / 2; step > 0; step /= 2)
                        score[u] += __shfl_xor_sync(FULL_WARP, score[u], step);
                    if (!there[u] || base + u * groups + group >= limit[n]) score[u] = -INFINITY;
                    top = fmaxf(top, score[u]);
                }
                const float shift = finite_or_0(top), keep = exp2f(m[n] - shift);
                m[n] = top;
                l[n] *= keep;
                KVC_UNROLL
                for (int i = 0; i < PER_LANE; i++) values[n][i] *= keep;
                KVC_UNROLL
                for (int u = 0; u < AHEAD; u++) {
                    // a key that is not seen may hold anything: 0*inf
                    if (!there[u] || base + u * groups + group >= limit[n]) continue;
                    const float weight = exp2f(score[u] - shift);
                    l[n] += weight;
                    KVC_UNROLL
                    for (int i = 0; i < PER_LANE; i++) values[n][i] += weight * to_float(v[u][i / VEC].at[i % VEC]);
                }
            }
        }
        // Join the groups, in their order
        __syncthreads();  // the piece before is out of shared memory
        KVC_UNROLL
        for (int n = 0; n < QUERIES; n++) {
            if (lane == 0) {
                m_of[group * QUERIES + n] = m[n];
                l_of[group * QUERIES + n] = l[n];
            }
            KVC_UNROLL
            for (int i = 0; i < PER_LANE; i++) {
                const int d = (i / VEC * lanes + lane) * VEC + i % VEC;
                if (d < D) values_of[(group * QUERIES + n) * D + d] = values[n][i];
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < QUERIES * D; i += THREADS) {
            const int n = i / D, d = i % D;
            if (first + n >= p.queries) break;
            float all = -INFINITY, sum = 0.0f, value = 0.0f;
            for (int x = 0; x < groups; x++) all = fmaxf(all, m_of[x * QUERIES + n]);
            for (int x = 0; x < groups; x++) {
                const float weight = exp2f(m_of[x * QUERIES + n] - finite_or_0(all));
                sum += weight * l_of[x * QUERIES + n];
                value += weight * values_of[(x * QUERIES + n) * D + d];
            }
            const int64_t at = piece.w * p.queries + first + n;
            s.values[at * D + d] = value;
            float2 both;
            both.x = all;
            both.y = sum;
            if (d == 0) s.statistics[at] = both;
        }
    }
}

// ---- the pieces of a row, in their order ----

// Threads share a query's D columns, `parts` of them each column: part i adds up pieces i, i + parts, ...
__global__ __launch_bounds__(JOIN_THREADS) void join_kernel(const kvc_decode_args a, const plan p, const scratch s) {
    constexpr int WARPS_HERE = JOIN_THREADS / 32;
    __shared__ float of_warp[WARPS_HERE], of_thread[JOIN_THREADS];
    const int thread = threadIdx.x, columns = p.join_columns, parts = JOIN_THREADS / columns;
    const int64_t row = blockIdx.x / p.queries, n = blockIdx.x % p.queries, b = row / a.Hkv, g = row % a.Hkv;
    const query q = query_of(a, p, g, n, 0);
    const int pieces = pieces_of(a, p, row), D = static_cast<int>(a.D), d = thread % columns, part = thread / columns;
    const float2* statistics = s.statistics + row * p.row_pieces * p.queries + n;
    const float* values = s.values + (row * p.row_pieces * p.queries + n) * D;

    float top = -INFINITY;
    for (int i = thread; i < pieces; i += JOIN_THREADS) top = fmaxf(top, statistics[i * p.queries].x);
    KVC_UNROLL
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step));
    if (thread % 32 == 0) of_warp[thread / 32] = top;
    __syncthreads();
    KVC_UNROLL
    for (int w = 0; w < WARPS_HERE; w++) top = fmaxf(top, of_warp[w]);
    const float shift = finite_or_0(top);
    __syncthreads();

    float sum = 0.0f, value = 0.0f;
    for (int i = thread; i < pieces; i += JOIN_THREADS) {
        const float2 one = statistics[i * p.queries];
        sum += exp2f(one.x - shift) * one.y;
    }
    KVC_UNROLL
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    if (thread % 32 == 0) of_warp[thread / 32] = sum;
    if (d < D)
        for (int i = part; i < pieces; i += parts)
            value += exp2f(statistics[i * p.queries].x - shift) * values[i * p.queries * D + d];
    of_thread[thread] = value;
    __syncthreads();
    if (part > 0 || d >= D) return;
    sum = 0.0f;
    KVC_UNROLL
    for (int w = 0; w < WARPS_HERE; w++) sum += of_warp[w];
    for (int i = 1; i < parts; i++) value += of_thread[i * columns + d];
    const int64_t at = (b * a.Hq + q.h) * a.S + q.s;
    store_any(a.out, a.q.dtype, at * D + d, sum == 0.0f ? 0.0f : value / sum);
    if (d == 0) a.lse[at] = sum == 0.0f ? -INFINITY : (shift + log2f(sum)) * LN_2;
}

// ---- host ----

// As many blocks as the device holds at a time, at most one for each piece and tile that can exist.
template <class Kernel>
cudaError_t blocks_for(unsigned& blocks, Kernel* kernel, size_t shared, int64_t work) {
    int device = 0, processors = 0, resident = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess)
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, THREADS, shared);
    const int64_t all = static_cast<int64_t>(processors) * (resident > 0 ? resident : 1);
    blocks = static_cast<unsigned>(work < all ? work : all);
    return error;
}

template <class T, int MAX_D>
cudaError_t launch_mma(const kvc_decode_args& a, plan p, cudaStream_t stream) {
    constexpr size_t SHARED = sizeof(mma_shared<T, MAX_D>);
    const auto kernel = pieces_mma_kernel<T, MAX_D>;
    p.tiles = static_cast<int>(ceil_div(p.queries, MMA_QUERIES));
    if (SHARED > 48 * 1024) {
        const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(SHARED));
        if (error != cudaSuccess) return error;
    }
    unsigned blocks = 0;
    const cudaError_t error = blocks_for(blocks, kernel, SHARED, p.rows * p.row_pieces * p.tiles);
    if (error != cudaSuccess) return error;
    KVC_LAUNCH(kernel, blocks, THREADS, SHARED, stream, a, p, scratch_of(a, p));
    return cudaGetLastError();
}

template <class T, int VEC, int QUERIES>
cudaError_t launch_fma(const kvc_decode_args& a, plan p, cudaStream_t stream) {
    const auto kernel = pieces_kernel<T, VEC, QUERIES>;
    p.lanes = lanes_for(ceil_div(a.D, VEC));
    p.tiles = static_cast<int>(ceil_div(p.queries, QUERIES));
    // At most 128 groups * 8 queries * 2 + 128 threads * 8 queries * 8 floats = 40 KiB: no attribute to set
    const size_t shared = static_cast<size_t>(THREADS / p.lanes * QUERIES * (a.D + 2)) * sizeof(float);
    unsigned blocks = 0;
    const cudaError_t error = blocks_for(blocks, kernel, shared, p.rows * p.row_pieces * p.tiles);
    if (error != cudaSuccess) return error;
    KVC_LAUNCH(kernel, blocks, THREADS, shared, stream, a, p, scratch_of(a, p));
    return cudaGetLastError();
}

// The smallest tile that holds all of a row's queries, up to 8.
template <class T, int VEC>
cudaError_t launch_fma(const kvc_decode_args& a, const plan& p, cudaStream_t stream) {
    if (p.queries == 1) return launch_fma<T, VEC, 1>(a, p, stream);
    if (p.queries <= 4) return launch_fma<T, VEC, 4>(a, p, stream);
    return launch_fma<T, VEC, 8>(a, p, stream);
}

template <class T>
cudaError_t launch_pieces(const kvc_decode_args& a, const plan& p, cudaStream_t stream) {
    constexpr int VEC = PER_16_BYTES<T>;
    const bool wide = a.D % VEC == 0 && aligned_16(a.k_pages) && aligned_16(a.v_pages);
    if constexpr (sizeof(T) == 2) {
        if (wide && a.q.dtype == a.cache_dtype) {
            if (a.D <= 64) return launch_mma<T, 64>(a, p, stream);
            if (a.D <= 128) return launch_mma<T, 128>(a, p, stream);
            return launch_mma<T, 256>(a, p, stream);
        }
    }
    return wide ? launch_fma<T, VEC>(a, p, stream) : launch_fma<T, 1>(a, p, stream);
}

bool valid(const kvc_decode_args& a) {
    return a.B >= 0 && a.Hq >= 0 && a.Hkv >= 0 && a.S >= 0 && a.D >= 1 && a.P >= 0 && a.pages >= 0 && a.blocks >= 0 &&
           (!a.value_table || (a.block_table && a.value_blocks >= 0 && a.value_pages >= 0)) &&
           a.D <= KVC_CUDA_MAX_HEAD_DIM && valid_dtype(a.q.dtype) && valid_dtype(a.cache_dtype);
}

bool empty(const kvc_decode_args& a) { return a.B == 0 || a.Hq == 0 || a.S == 0; }

bool fits(const kvc_decode_args& a) {
    return a.Hkv > 0 && a.Hq % a.Hkv == 0 && !(a.block_table && (a.P & (a.P - 1)));
}

}  // namespace

extern "C" int64_t kvc_cuda_decode_scratch_bytes(const kvc_decode_args* args) {
    if (!valid(*args) || empty(*args) || !fits(*args)) return 0;
    const plan p = plan_of(*args);
    return p.bytes_list + p.bytes_first + p.bytes_count + p.bytes_statistics + p.bytes_values;
}

extern "C" cudaError_t kvc_cuda_decode(const kvc_decode_args* args, cudaStream_t stream) {
    const kvc_decode_args& a = *args;
    if (!valid(a)) return cudaErrorInvalidValue;
    if (empty(a)) return cudaSuccess;
    if (!fits(a)) return cudaErrorInvalidValue;
    if (!a.out || !a.lse || !a.q.data || !a.end || !a.scratch) return cudaErrorInvalidValue;
    if (a.pages > 0 && a.P > 0 && (!a.k_pages || !a.v_pages)) return cudaErrorInvalidValue;
    plan p = plan_of(a);
    if (p.capacity > MAX_GRID_X || p.rows * p.row_pieces > MAX_GRID_X || p.rows * p.queries > MAX_GRID_X)
        return cudaErrorInvalidValue;
    p.wide_q = aligned_16(a.q);
    const scratch s = scratch_of(a, p);
    KVC_LAUNCH(plan_kernel, 1, PLAN_THREADS, 0, stream, a, p, s);
    cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    if (p.row_pieces > 0) {
        error = with_dtype(a.cache_dtype, [&](auto element) {
            return launch_pieces<decltype(element)>(a, p, stream);
        });
        if (error != cudaSuccess) return error;
    }
    KVC_LAUNCH(join_kernel, static_cast<unsigned>(p.rows * p.queries), JOIN_THREADS, 0, stream, a, p, s);
    return cudaGetLastError();
}
