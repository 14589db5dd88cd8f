// A turn or a chunk of a prompt over rows of pages: flash attention of many queries, see kvc_decode in kvc.h. 16-bit
// types in rows of 16-byte units, up to D = 256; decode.cu keeps the rest.
//
// Flops: 4*D for each query and key that it sees. Must move: queries and out once; a row's keys and values once per 128
// of its queries (64 above D = 128), mostly from L2, since blocks of one row read the same keys at about the same time.
// That is one flop per byte and query of a tile: of few queries memory is the ceiling, from a full tile on the rate of
// the products (mma.sync, about 60% of what wgmma reaches on an H200). 2,048 new tokens that end 32,768, Hq 32, Hkv 8,
// D 128: 1,065 GFLOP, 1.7 ms at that rate, beside 0.05 ms for 168 MB; an H200 took 3.9 (docs/gpu.md).
// Per 32 keys that all see, at D = 128, a warp issues 128 mma, 48 ldmatrix and some 400 others: 224 clocks of shared
// memory and 198 of an H100's tensor cores.
//
// A tile holds the G query heads of neighbouring positions, so that they share the keys and a causal tile ends early.
// The rest is attention.cu's: four warps, 32 keys at a time, the next ones on their way. New are the keys' places: each
// warp looks up those of a tile, one per lane, a tile before their copies begin, and hands them over by shuffles: no
// shared memory, nobody waits. The first keys of a row (`sinks`) and its range are numbered through.
// Where rows and tiles are too few to fill a device, blocks share a tile's keys; join_kernel adds their results up in
// order. A part takes (D + 2)*4 bytes per query, written once and read once, mostly in L2: 64 new tokens of the sizes
// above go in 15 parts, 32 MB beside the 134 of keys and values.
#include "decode_prefill.cuh"

#include "attention.cuh"
#include "decode_pieces.cuh"

namespace {

// Queries of a row from which on this is faster. pieces_mma_kernel reads a key from L2 for every 16 of them: at 64 that
// takes twice as long as to read it from memory once (4 times at 5.5 TB/s, once at 3.35 TB/s on an H100), and grows.
constexpr int LEAST_QUERIES = 64;
constexpr int KEYS = 32;  // of a stage
#ifdef KVC_CUDA_EMULATION
constexpr int FULL_DEVICE = 64, SPLIT_KEYS = 64;  // so that short rows are split
constexpr int64_t PARTIAL_BYTES = 1 << 19;        // and a few sequences go in several turns
#else
constexpr int FULL_DEVICE = 256;  // blocks: two for each of 132 multiprocessors, but for a few
constexpr int SPLIT_KEYS = 256;   // at least, of the capacity
constexpr int64_t PARTIAL_BYTES = SLAB_BYTES;
#endif

template <int MAX_D>
struct shape {
    static constexpr int BLOCKS = MAX_D <= 128 ? 2 : 1;  // of 16 queries, of a warp
    static constexpr int ROWS = 16 * BLOCKS, QUERIES = ROWS * WARPS;
    static constexpr int RESIDENT = MAX_D > 128 ? 1 : MAX_D > 64 ? 2 : 3;  // blocks at a time that registers are for
};

template <class T, int MAX_D>
struct prefill_shared {
    static constexpr int PITCH = pitch_of<T>(MAX_D);
    T q[shape<MAX_D>::QUERIES * PITCH];
    struct {
        T k[KEYS * PITCH], v[KEYS * PITCH];
    } stages[2];
};

static_assert(sizeof(prefill_shared<bf16, 256>) <= 99 * 1024, "what sm_86 has");

struct prefill_plan {
    int64_t first_row, rows;  // of a launch
    int64_t batch;            // sequences of a launch: their partial results wait in the scratch memory
    int64_t statistics_bytes, value_bytes;
    int tiles, splits;  // of a row's queries; of a tile's keys
    bool wide_q, wide_out;
};

// Of query n of a row and split i at [row of the launch, n, i]: maximum and sum, of base e, and weighted values.
struct partial_results {
    float2* statistics;
    float* values;
};

inline partial_results partials_of(const kvc_decode_args& a, const prefill_plan& set) {
    partial_results partial = {};
    partial.statistics = static_cast<float2*>(a.scratch);
    partial.values = reinterpret_cast<float*>(static_cast<char*>(a.scratch) + set.statistics_bytes);
    return partial;
}

// The keys of a row that are seen, numbered through: [0, front), then [begin, end).
struct seen_keys {
    int begin, end, front;

    __device__ seen_keys(const kvc_decode_args& a, const plan& p, int64_t row)
        : begin(smaller(begin_of(a, row), end_of(a, p, row))), end(end_of(a, p, row)), front(front_of(a, p, row)) {}
    __device__ int place_of(int v) const { return v < front ? v : begin + v - front; }
    // How many of them position s sees.
    __device__ int count_for(const kvc_decode_args& a, int64_t s) const {
        const int limit = a.causal ? end - static_cast<int>(a.S - 1 - s) : end;
        return limit <= front ? larger(limit, 0) : limit <= begin ? front : front + limit - begin;
    }
};

// Where query n of a row stands in [B, Hq, S]: its positions' heads are neighbours.
__device__ inline int64_t result_of(const kvc_decode_args& a, int64_t row, int64_t n) {
    const int64_t G = quotient(a.Hq, a.Hkv);  // row*G is b*Hq + g*G
    return (row * G + remainder_of(n, G)) * a.S + quotient(n, G);
}

template <class T, int MAX_D, bool CAPPED>
__global__ __launch_bounds__(THREADS, shape<MAX_D>::RESIDENT) void prefill_kernel(
    const kvc_decode_args a, const plan p, const prefill_plan set, const partial_results partial) {
    using S = shape<MAX_D>;
    using memory = prefill_shared<T, MAX_D>;
    constexpr int PITCH = memory::PITCH, BLOCKS = S::BLOCKS, QUERIES = S::QUERIES, N = MAX_D / 8;
    constexpr int CHUNKS = MAX_D / 8, STEP = THREADS / CHUNKS;  // a chunk: 16 bytes; rows that a block copies at a time
    KVC_DYNAMIC_SHARED(memory, shared);
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int D = static_cast<int>(a.D), K = (D + 15) / 16 * 16, queries = static_cast<int>(p.queries);
    const int column = thread % CHUNKS * 8, own_copy = thread / CHUNKS;
    const int64_t rest = quotient(blockIdx.x, set.rows), row = set.first_row + remainder_of(blockIdx.x, set.rows);
    const int split = static_cast<int>(remainder_of(rest, set.splits));
    const int first = (set.tiles - 1 - static_cast<int>(quotient(rest, set.splits))) * QUERIES;
    const int own = first + warp * S::ROWS;
    const int64_t G = quotient(a.Hq, a.Hkv), first_head = remainder_of(row, a.Hkv) * G;
    const seen_keys seen(a, p, row);
    const auto count_of = [&](int n) { return seen.count_for(a, quotient(n, G)); };
    const int keys = count_of(smaller(first + QUERIES, queries) - 1);
    const int all_tiles = (keys + KEYS - 1) / KEYS, share = (all_tiles + set.splits - 1) / set.splits;
    const int begin = split * share, end = smaller(begin + share, all_tiles);
    // Tiles that some of the warp's queries see something of, and those that all of them see all of
    const int some = own < queries ? (count_of(smaller(own + S::ROWS, queries) - 1) + KEYS - 1) / KEYS : 0;
    const int whole = own < queries ? count_of(own) / KEYS : 0;
    // Logits of which the products are only multiplied by a positive scale stay products: the exponent's factor has it
    const bool products = !CAPPED && a.scale > 0.0f;
    const float unit = products ? a.scale : 1.0f, factor = unit * LOG2_E;

    if (column < K) {
        const T* from = static_cast<const T*>(a.q.data) + quotient(row, a.Hkv) * a.q.stride_b + column;
        KVC_ROLLED
        for (int i = own_copy; i < QUERIES; i += STEP) {
            const int n = first + i;
            const bool here = n < queries && column < D;
            const int64_t at = (first_head + remainder_of(n, G)) * a.q.stride_h + quotient(n, G) * a.q.stride_t;
            T* to = shared->q + i * PITCH + column;
            if (set.wide_q) {
                copy_16_async(to, from + (here ? at : 0), here);
            } else {
                packed<T, 8> part = {};
                if (here)
                    for (int e = 0; e < 8; e++) part.at[e] = from[at + e];
                *reinterpret_cast<packed<T, 8>*>(to) = part;
            }
        }
    }

    const T* k_pages = static_cast<const T*>(a.rows.keys) + column;
    const T* v_pages = static_cast<const T*>(a.rows.values) + column;
    const uint32_t row_elements = static_cast<uint32_t>(D);
    int2 pages;           // of this lane's key of the tile whose copies begin next
    uint32_t coming = 0;  // which keys of the tile that is copied are on a page
    const auto look_up = [&](int tile) {
        const int v = tile * KEYS + lane;
        pages.x = pages.y = -1;
        if (tile < end && v < keys) pages = pages_of(a, p, row, seen.place_of(v));
    };
    const auto copy = [&](int tile, int stage) {
        const int t = seen.place_of(tile * KEYS + lane);
        const uint32_t P = static_cast<uint32_t>(a.P), within = a.block_table ? t & (P - 1) : t;
        const uint32_t key_slot = pages.x < 0 ? 0 : static_cast<uint32_t>(pages.x) * P + within;
        const uint32_t value_slot = pages.y < 0 ? 0 : static_cast<uint32_t>(pages.y) * P + within;
        coming = __ballot_sync(FULL_WARP, pages.x >= 0);
        uint32_t key_slots[KEYS / STEP], value_slots[KEYS / STEP];
        KVC_UNROLL
        for (int i = 0; i < KEYS / STEP; i++) {
            key_slots[i] = __shfl_sync(FULL_WARP, key_slot, own_copy + i * STEP);
            value_slots[i] = __shfl_sync(FULL_WARP, value_slot, own_copy + i * STEP);
        }
        if (column >= K) return;
        const uint32_t held = column < D ? coming >> own_copy : 0;
        T* to_k = shared->stages[stage].k + own_copy * PITCH + column;
        T* to_v = shared->stages[stage].v + own_copy * PITCH + column;
        KVC_UNROLL
        for (int i = 0; i < KEYS / STEP; i++) {
            const bool there = held >> i * STEP & 1;
            copy_16_async(to_k + i * STEP * PITCH, k_pages + uint64_t{key_slots[i]} * row_elements, there);
            copy_16_async(to_v + i * STEP * PITCH, v_pages + uint64_t{value_slots[i]} * row_elements, there);
        }
    };
    look_up(begin);
    if (begin < end) copy(begin, 0);
    commit_copies();
    look_up(begin + 1);

    // Online softmax; a lane holds rows row(j, 0) and row(j, 1) of block j, which four lanes share
    const auto query_at = [&](int j, int r) { return own + 16 * j + lane / 4 + 8 * r; };
    float m[BLOCKS][2], l[BLOCKS][2] = {}, values[BLOCKS][N][4] = {};
    KVC_UNROLL
    for (int i = 0; i < 2 * BLOCKS; i++) m[i / 2][i % 2] = -INFINITY;
    int stage = 0;
    for (int tile = begin; tile < end; tile++) {
        const auto& now = shared->stages[stage];
        const uint32_t there = coming;
        wait_for_copies<0>();
        __syncthreads();  // the tile is there, and the one before is used
        stage ^= 1;
        if (tile + 1 < end) copy(tile + 1, stage);
        commit_copies();
        look_up(tile + 2);
        if (tile >= some) continue;
        float x[BLOCKS][KEYS / 8][4] = {};
        warp_multiply<b_layout::columns, MAX_D>(x, shared->q + S::ROWS * warp * PITCH, PITCH, now.k, PITCH, K);
        if (!products) {
            KVC_UNROLL
            for (int i = 0; i < BLOCKS * KEYS / 2; i++) {
                float& logit = x[i / (KEYS / 2)][i / 4 % (KEYS / 8)][i % 4];
                logit *= a.scale;
                if constexpr (CAPPED) logit = capped_logit<T>(logit, a.softcap);
            }
        }
        if (tile >= whole || there != FULL_WARP) {
            KVC_UNROLL
            for (int i = 0; i < 2 * BLOCKS; i++) {
                const int j = i / 2, r = i % 2, count = count_of(query_at(j, r)) - tile * KEYS;
                KVC_UNROLL
                for (int n = 0; n < KEYS / 4; n++) {
                    const int key = n / 2 * 8 + lane % 4 * 2 + n % 2;
                    if (key >= count || !(there >> key & 1)) x[j][n / 2][2 * r + n % 2] = -INFINITY;
                }
            }
        }
        weigh_tile<T>(x, m, l, values, factor);
        multiply_result(values, x, now.v, PITCH, K / 8);
    }
    wait_for_copies<0>();
    __syncthreads();  // without a tile nobody has waited for the queries yet

    const int64_t item = (row - set.first_row) * queries * set.splits + split;  // of the row's first query
    KVC_UNROLL
    for (int j = 0; j < BLOCKS; j++) {
        float norm[2];  // what a row's values are multiplied by
        KVC_UNROLL
        for (int r = 0; r < 2; r++) {
            float sum = l[j][r], top = m[j][r] * unit, keep = 1.0f;
            sum += __shfl_xor_sync(FULL_WARP, sum, 1);
            sum += __shfl_xor_sync(FULL_WARP, sum, 2);
            const int n = query_at(j, r);
            norm[r] = 1.0f;
            if (n >= queries) continue;
            if (set.splits > 1) {
                float2 both;
                both.x = top;
                both.y = sum;
                if (lane % 4 == 0) partial.statistics[item + int64_t{n} * set.splits] = both;
                continue;
            }
            const int64_t at = result_of(a, row, n);
            if (a.sink_logits) keep = join_sink(a.sink_logits[first_head + remainder_of(n, G)], top, sum);
            if (lane % 4 == 0) a.lse[at] = sum == 0.0f ? -INFINITY : top + logf(sum);
            norm[r] = sum == 0.0f ? 0.0f : keep / sum;
        }
        if (set.splits > 1) {
            KVC_UNROLL
            for (int i = 0; i < 2 * N; i++) {
                const int r = i % 2, n = query_at(j, r), d = i / 2 * 8 + lane % 4 * 2;
                if (n >= queries || d >= D) continue;
                float2 both;
                both.x = values[j][i / 2][2 * r];
                both.y = values[j][i / 2][2 * r + 1];
                *reinterpret_cast<float2*>(partial.values + (item + int64_t{n} * set.splits) * D + d) = both;
            }
            continue;
        }
        KVC_UNROLL
        for (int i = 0; i < 4 * N; i++) {
            float& value = values[j][i / 4][i % 4];
            value = norm[i % 4 / 2] == 0.0f ? 0.0f : value * norm[i % 4 / 2];  // where nothing is seen, whatever it is
        }
        store_result(shared->q + (S::ROWS * warp + 16 * j) * PITCH, PITCH, values[j]);
    }
    if (set.splits > 1) return;
    __syncthreads();
    if (column >= D) return;
    KVC_ROLLED
    for (int i = own_copy; i < QUERIES && first + i < queries; i += STEP) {
        const packed<T, 8> part = *reinterpret_cast<const packed<T, 8>*>(shared->q + i * PITCH + column);
        T* to = static_cast<T*>(a.out) + result_of(a, row, first + i) * D + column;
        if (set.wide_out) {
            uint4 bits;
            memcpy(&bits, &part, sizeof bits);
            __stwb(reinterpret_cast<uint4*>(to), bits);  // a plain store may be split, see store() in types.cuh
        } else {
            for (int e = 0; e < 8; e++) to[e] = part.at[e];
        }
    }
}

// ---- the splits of a query's keys, in their order ----

// Must move: (D + 2)*4 bytes per query and split. A warp for each query: its lanes weigh 32 splits at a time, and add
// up four columns each.
__global__ __launch_bounds__(THREADS) void join_kernel(const kvc_decode_args a, const plan p, const prefill_plan set,
                                                       const partial_results partial) {
    const int lane = static_cast<int>(threadIdx.x) % 32, D = static_cast<int>(a.D), splits = set.splits;
    const int64_t query = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (query >= set.rows * p.queries) return;
    const int64_t row = set.first_row + quotient(query, p.queries), n = remainder_of(query, p.queries);
    const int64_t G = quotient(a.Hq, a.Hkv), at = result_of(a, row, n);
    const int64_t h = remainder_of(row, a.Hkv) * G + remainder_of(n, G);
    const float2* statistics = partial.statistics + query * splits;
    const float* values = partial.values + query * splits * D;
    float top = -INFINITY, sum = 0.0f;
    for (int i = lane; i < splits; i += 32) top = fmaxf(top, statistics[i].x);
    KVC_UNROLL
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step));
    const float shift = finite_or_0(top);
    for (int i = lane; i < splits; i += 32) sum += expf(statistics[i].x - shift) * statistics[i].y;
    KVC_UNROLL
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    const float keep = a.sink_logits ? join_sink(a.sink_logits[h], top, sum) : 1.0f;
    const float norm = sum == 0.0f ? 0.0f : keep / sum;
    if (lane == 0) a.lse[at] = sum == 0.0f ? -INFINITY : top + logf(sum);
    for (int first = 0; first < D; first += 128) {
        const int d = first + 4 * lane;
        float value[4] = {};
        for (int begin = 0; begin < splits; begin += 32) {
            const int some = smaller(splits - begin, 32);
            float2 own = {};
            if (lane < some) own = statistics[begin + lane];
            const float own_weight = expf(own.x - shift);
            const uint32_t seen = __ballot_sync(FULL_WARP, own.y != 0.0f);  // of the others a value may be 0*inf
            for (int i = 0; i < some; i++) {
                const float weight = __shfl_sync(FULL_WARP, own_weight, i);
                packed<float, 4> part = {};
                if (d < D) part = *reinterpret_cast<const packed<float, 4>*>(values + int64_t{begin + i} * D + d);
                KVC_UNROLL
                for (int e = 0; e < 4; e++)
                    if (seen >> i & 1) value[e] += weight * part.at[e];
            }
        }
        if (d >= D) continue;
        KVC_UNROLL
        for (int e = 0; e < 4; e++) store_any(a.out, a.q.dtype, at * D + d + e, norm == 0.0f ? 0.0f : value[e] * norm);
    }
}

// ---- host ----

// Of one sequence's sizes: another number of sequences changes no bit.
inline int splits_of(const kvc_decode_args& a, const plan& p, int64_t tiles, int64_t split_bytes) {
    const int64_t blocks = a.Hkv * tiles, by_keys = p.capacity / SPLIT_KEYS, by_memory = PARTIAL_BYTES / split_bytes;
    int64_t most = by_keys < by_memory ? by_keys : by_memory, best = 1;
    if (most > FULL_DEVICE) most = FULL_DEVICE;
    // The last wave of blocks fills the device in part only. More splits take more memory: only to save an eighth
    for (int64_t i = 2; i <= most; i++)
        if (8 * ceil_div(i * blocks, FULL_DEVICE) * best < 7 * ceil_div(best * blocks, FULL_DEVICE) * i) best = i;
    return static_cast<int>(best);
}

inline plan queries_of(const kvc_decode_args& a) {
    plan p = plan_of(a);
    p.slab = a.S;
    p.queries = a.Hq / a.Hkv * a.S;
    return p;
}

inline prefill_plan prefill_plan_of(const kvc_decode_args& a, const plan& p) {
    prefill_plan set = {};
    const int64_t tiles = ceil_div(p.queries, a.D <= 128 ? shape<128>::QUERIES : shape<256>::QUERIES);
    const int64_t results = a.Hkv * p.queries, split_bytes = results * (a.D + 2) * static_cast<int64_t>(sizeof(float));
    set.tiles = static_cast<int>(tiles);
    set.splits = splits_of(a, p, tiles, split_bytes);
    set.batch = a.B;
    if (set.splits == 1) return set;
    const int64_t most = PARTIAL_BYTES / (set.splits * split_bytes);
    set.batch = most < a.B ? most : a.B;
    set.statistics_bytes = ceil_div(set.batch * results * set.splits * static_cast<int64_t>(sizeof(float2)), 64) * 64;
    set.value_bytes = set.batch * results * set.splits * a.D * static_cast<int64_t>(sizeof(float));
    return set;
}

template <class T, int MAX_D, bool CAPPED>
cudaError_t launch(const kvc_decode_args& a, const plan& p, prefill_plan set, cudaStream_t stream) {
    constexpr size_t SHARED = sizeof(prefill_shared<T, MAX_D>);
    const auto kernel = prefill_kernel<T, MAX_D, CAPPED>;
    const partial_results partial = partials_of(a, set);
    KVC_TRY(allow_shared(kernel, SHARED));
    for (int64_t b = 0; b < a.B; b += set.batch) {
        set.first_row = b * a.Hkv;
        set.rows = (a.B - b < set.batch ? a.B - b : set.batch) * a.Hkv;
        const unsigned blocks = static_cast<unsigned>(set.rows * set.tiles * set.splits);
        KVC_LAUNCH(kernel, blocks, THREADS, SHARED, stream, a, p, set, partial);
        if (set.splits == 1) continue;
        const unsigned joins = static_cast<unsigned>(ceil_div(set.rows * p.queries, WARPS));
        KVC_LAUNCH(join_kernel, joins, THREADS, 0, stream, a, p, set, partial);
    }
    return cudaSuccess;
}

template <class T, int MAX_D>
cudaError_t launch(const kvc_decode_args& a, const plan& p, const prefill_plan& set, cudaStream_t stream) {
    return a.softcap > 0.0f ? launch<T, MAX_D, true>(a, p, set, stream) : launch<T, MAX_D, false>(a, p, set, stream);
}

template <class T>
cudaError_t launch(const kvc_decode_args& a, const plan& p, const prefill_plan& set, cudaStream_t stream) {
    if (a.D <= 64) return launch<T, 64>(a, p, set, stream);
    if (a.D <= 128) return launch<T, 128>(a, p, set, stream);
    return launch<T, 256>(a, p, set, stream);
}

}  // namespace

bool prefill_may_take(const kvc_decode_args& a) {
    return a.S > 1 && a.Hq / a.Hkv * a.S >= LEAST_QUERIES && a.D <= 256 && a.D % 8 == 0 && !a.probabilities &&
           a.q.dtype != KVC_F32 && a.q.dtype == dtype_of(a.rows);
}

bool prefill_takes(const kvc_decode_args& a) {
    const int64_t value_pages = a.value_table ? a.value_pages : a.pages;
    const int64_t most = a.P > 0 ? (int64_t{1} << 32) / a.P : MAX_GRID_X;  // slots are counted in 32 bits
    return prefill_may_take(a) && aligned_16(a.rows.keys) && aligned_16(a.rows.values) && a.pages <= most &&
           value_pages <= most && shared_fits(a.D > 128 ? sizeof(prefill_shared<bf16, 256>) : 0);
}

int64_t prefill_scratch_bytes(const kvc_decode_args& a) {
    const prefill_plan set = prefill_plan_of(a, queries_of(a));
    return set.statistics_bytes + set.value_bytes;
}

cudaError_t decode_prefill(const kvc_decode_args& a, cudaStream_t stream) {
    const plan p = queries_of(a);
    if (p.capacity > MAX_GRID_X / 2 || p.queries > MAX_GRID_X / 2) return cudaErrorInvalidValue;
    prefill_plan set = prefill_plan_of(a, p);
    if (p.rows > MAX_GRID_X / set.tiles) return cudaErrorInvalidValue;
    set.wide_q = aligned_16(a.q);
    set.wide_out = aligned_16(a.out);
    return a.q.dtype == KVC_BF16 ? launch<bf16>(a, p, set, stream) : launch<f16>(a, p, set, stream);
}
