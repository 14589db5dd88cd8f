// The pieces of decode.cu on tensor cores: 16-bit queries, and rows of 16 bits or of codes.
#pragma once
#include "codes_mma.cuh"
#include "decode_join.cuh"

namespace {

// A capped logit in base 2. Not inline: it would take registers from the loop around it, mostly for nothing.
__device__ __noinline__ float capped(float x, float cap) { return cap * tanh_of_logit(x, cap); }

// Where a key and its value lie, counted from the first slot of all pages.
struct alignas(8) slot_pair {
    uint32_t key, value;
};
constexpr uint32_t NO_SLOT = 0xffffffffu;

template <class T, int MAX_D, stored KIND>
struct mma_stage {
    T k[STAGE * pitch_of<T>(MAX_D)], v[STAGE * pitch_of<T>(MAX_D)];
};

template <class T, int MAX_D>
struct mma_stage<T, MAX_D, stored::int8> {
    unsigned char k[2 * STAGE * MAX_D], v[2 * STAGE * MAX_D];
    f16 scales[2][2 * STAGE];  // of the keys, and of the values
};

template <class T, int MAX_D>
struct mma_stage<T, MAX_D, stored::k8v4> {
    unsigned char k[2 * STAGE * MAX_D], v[2 * STAGE * MAX_D / 2];
    f16 scales[2][2 * STAGE];
};

template <class T, int MAX_D, stored KIND = stored::numbers>
struct mma_shared {
    static constexpr int PITCH = pitch_of<T>(MAX_D);
    union {
        mma_stage<T, MAX_D, KIND> rows;
        // After the last key of a piece. Rows 8 banks apart: the 16 lanes that store 8 bytes at a time meet no other's
        float values[WARPS][MMA_QUERIES][MAX_D + 8];
    } stages[2];
    T q[MMA_QUERIES * PITCH];
    float2 statistics[WARPS][MMA_QUERIES];
    slot_pair slots[PIECE];         // of the piece's keys and values; of the next one from its last stage on
    uint32_t there[2][PIECE / 32];  // which of its keys are on a page, a bit each; of every second piece
};

static_assert(sizeof(mma_shared<bf16, 128>) + 1024 <= 228 * 1024 / 3, "three blocks per multiprocessor of an H200");
static_assert(sizeof(mma_shared<bf16, 128, stored::int8>) <= sizeof(mma_shared<bf16, 128>), "of codes too");

// Row r of a lane's results of warp_multiply (of the two that it has), to its columns.
template <int N>
__device__ inline void store_columns(float* to, const float (&values)[N][4], int r) {
    KVC_UNROLL
    for (int n = 0; n < N; n++) {
        float2 both;
        both.x = values[n][2 * r];
        both.y = values[n][2 * r + 1];
        *reinterpret_cast<float2*>(to + 8 * n + threadIdx.x % 4 * 2) = both;
    }
}

// Blocks take pieces in turns. While one is worked on, its next STAGE of keys and values is copied; behind its last stage
// the first one of the block's next piece, whose pages and queries wait in registers until then: a block never waits for
// a table, a page number and a key in a row, but at its first piece.
template <class T, int MAX_D, stored KIND, bool PROBABILITIES, bool CAPPED>
__global__ __launch_bounds__(THREADS, MAX_D > 128 ? 1 : MAX_D > 64 || KIND != stored::numbers ? 3 : 4) void pieces_mma_kernel(const kvc_decode_args a, const plan p, const scratch s) {
    using memory = mma_shared<T, MAX_D, KIND>;
    constexpr bool CODES = KIND != stored::numbers;
    constexpr int STAGED = CODES ? 2 * STAGE : STAGE;  // keys: as many bytes are on their way
    [[maybe_unused]] constexpr int VALUE_BYTES = MAX_D * bits_of_values(KIND) / 8;
    constexpr int PITCH = memory::PITCH, N = MAX_D / 8, CHUNKS = MAX_D / 8;  // a chunk: 16 bytes
    constexpr int KEYS = PIECE / THREADS, ROWS = THREADS / CHUNKS, PARTS = MMA_QUERIES / ROWS;  // of a thread
    KVC_DYNAMIC_SHARED(memory, shared);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int D = static_cast<int>(a.D), K = CODES ? (D + 31) / 32 * 32 : (D + 15) / 16 * 16;
    const int chunk = thread % CHUNKS * 8;  // the column that this thread copies, of every ROWS-th key
    const T* k_pages = static_cast<const T*>(a.rows.keys);
    const T* v_pages = static_cast<const T*>(a.rows.values);
    const T* queries = static_cast<const T*>(a.q.data);
    const float scale = a.scale * LOG2_E;
    [[maybe_unused]] const float cap = a.softcap * LOG2_E;
    const unsigned work = static_cast<unsigned>(*s.count * p.tiles);  // at most MAX_GRID_X

    // What a piece begins with, on its way to shared memory
    int2 pages[KEYS];
    packed<T, 8> parts[PARTS];
    const auto first_of = [&](unsigned item) { return static_cast<int>(item % static_cast<unsigned>(p.tiles)) * MMA_QUERIES; };
    const auto fetch = [&](const int4& piece, unsigned item) {
        const int64_t row = piece.x, b = quotient(row, a.Hkv), g = remainder_of(row, a.Hkv);
        const int first = first_of(item), end = end_of_piece(a, p, piece);
        KVC_UNROLL
        for (int i = 0; i < KEYS; i++) {
            const int t = piece.y + i * THREADS + thread;
            pages[i].x = pages[i].y = -1;
            if (t < end) pages[i] = pages_of(a, p, row, t);
        }
        KVC_UNROLL
        for (int i = 0; i < PARTS; i++) {
            parts[i] = {};
            const query q = query_of(a, p, g, first + thread / CHUNKS + i * ROWS, piece.z);
            if (!q.here || chunk >= D) continue;
            const int64_t at = b * a.q.stride_b + q.h * a.q.stride_h + q.s * a.q.stride_t + chunk;
            if (p.wide_q) parts[i] = *reinterpret_cast<const packed<T, 8>*>(queries + at);
            else for (int e = 0; e < 8; e++) parts[i].at[e] = queries[at + e];
        }
    };
    const auto hand_over_pages = [&](int begin, int turn) {
        KVC_UNROLL
        for (int i = 0; i < KEYS; i++) {
            const int t = begin + i * THREADS + thread;
            slot_pair slots;
            slots.key = pages[i].x >= 0 ? static_cast<uint32_t>(slot_in(a, pages[i].x, t)) : NO_SLOT;
            slots.value = pages[i].x >= 0 ? static_cast<uint32_t>(slot_in(a, pages[i].y, t)) : NO_SLOT;
            shared->slots[i * THREADS + thread] = slots;
            const uint32_t there = __ballot_sync(FULL_WARP, pages[i].x >= 0);
            if (lane == 0) shared->there[turn][i * WARPS + warp] = there;
        }
    };
    const auto hand_over_queries = [&]() {
        KVC_UNROLL
        for (int i = 0; i < PARTS; i++)
            if (chunk < K) {
                T* to = shared->q + (thread / CHUNKS + i * ROWS) * PITCH + chunk;
                if constexpr (CODES) store_for_codes(to, parts[i], chunk);
                else *reinterpret_cast<packed<T, 8>*>(to) = parts[i];
            }
    };
    [[maybe_unused]] f16 scales_under_way[2] = {};  // of the stage that is copied: of this thread's key and value
    // Rows of BYTES bytes at most, `bytes` of which are there
    [[maybe_unused]] const auto copy_codes = [&](auto most, unsigned char* to, const void* from, int bytes, bool values, int stage) {
        constexpr int BYTES = decltype(most)::value, UNITS = BYTES / 16;
        const int unit = thread % UNITS;
        const unsigned char* source = static_cast<const unsigned char*>(from) + unit * 16;
        for (int i = thread / UNITS; i < STAGED; i += THREADS / UNITS) {
            const slot_pair both = shared->slots[stage * STAGED + i];
            const uint32_t slot = values ? both.value : both.key;
            const bool there = slot != NO_SLOT && unit * 16 < bytes;
            copy_16_async(to + code_place<BYTES>(i, unit), source + uint64_t{there ? slot : 0} * static_cast<unsigned>(bytes), there);
        }
    };
    const auto copy_stage = [&](int stage, int to_slot) {
        auto& to = shared->stages[to_slot].rows;
        if constexpr (CODES) {
            copy_codes(std::integral_constant<int, MAX_D>{}, to.k, a.rows.keys, D, false, stage);
            copy_codes(std::integral_constant<int, VALUE_BYTES>{}, to.v, a.rows.values, D * bits_of_values(KIND) / 8, true, stage);
            static_assert(STAGED == THREADS, "a key and a value for each thread");
            const slot_pair both = shared->slots[stage * STAGED + thread];
            scales_under_way[0] = scales_under_way[1] = {};
            if (both.key != NO_SLOT) {
                scales_under_way[0] = static_cast<const f16*>(a.rows.key_scales)[both.key];
                scales_under_way[1] = static_cast<const f16*>(a.rows.value_scales)[both.value];
            }
        } else {
            for (int i = thread / CHUNKS; i < STAGE; i += ROWS) {
                if (chunk >= K) continue;
                const slot_pair both = shared->slots[stage * STAGE + i];
                const bool there = both.key != NO_SLOT && chunk < D;
                const uint64_t width = static_cast<unsigned>(D);
                copy_16_async(to.k + i * PITCH + chunk, k_pages + ((there ? both.key : 0) * width + chunk), there);
                copy_16_async(to.v + i * PITCH + chunk, v_pages + ((there ? both.value : 0) * width + chunk), there);
            }
        }
        commit_copies();
    };

    unsigned item = blockIdx.x;
    if (item >= work) return;
    int4 piece = s.list[quotient(item, p.tiles)], next = piece;
    if (item + gridDim.x < work) next = s.list[quotient(item + gridDim.x, p.tiles)];
    int slot = 0, turn = 0;  // of the stage, of the piece
    fetch(piece, item);
    hand_over_pages(piece.y, turn);
    hand_over_queries();
    __syncthreads();
    copy_stage(0, slot);

    for (;;) {
        const unsigned following = item + gridDim.x;
        const int64_t g = remainder_of(piece.x, a.Hkv);
        const int first = first_of(item), begin = piece.y, row_end = piece.z;
        const int keys = end_of_piece(a, p, piece) - begin, stages = (keys + STAGED - 1) / STAGED;
        const bool more = following < work;
        int4 after = next;  // the piece behind the next one
        // Online softmax per warp, of its own 16 keys of every stage. A lane holds rows lane / 4 and + 8 of the queries
        int limit[2];
        float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, values[N][4] = {};
        KVC_UNROLL
        for (int i = 0; i < 2; i++) limit[i] = query_of(a, p, g, first + lane / 4 + 8 * i, row_end).limit;
        piece_columns columns = {};
        if constexpr (PROBABILITIES) columns = columns_of(a, p, piece);

        for (int stage = 0; stage < stages; stage++, slot ^= 1) {
            wait_for_copies<0>();
            if constexpr (CODES)
                for (int i = 0; i < 2; i++) shared->stages[slot].rows.scales[i][thread] = scales_under_way[i];
            __syncthreads();  // the stage is here, and nobody reads the one before it
            if (stage + 1 < stages) copy_stage(stage + 1, slot ^ 1);
            if (more && stage == 0) {
                fetch(next, following);
                if (following + gridDim.x < work) after = s.list[quotient(following + gridDim.x, p.tiles)];
            }
            if (more && stage + 1 == stages) {
                hand_over_pages(next.y, turn ^ 1);  // every thread has begun its copies of this piece
                __syncthreads();
                copy_stage(0, slot ^ 1);
            }
            const auto& now = shared->stages[slot].rows;
            KVC_ROLLED
            for (int part = 0; part < STAGED && stage * STAGED + part < keys; part += STAGE) {
                const uint32_t there = shared->there[turn][(stage * STAGED + part) / 32 + warp / 2] >> warp % 2 * 16;
                float x[2][4] = {};
                [[maybe_unused]] float key_scales[4];  // of this lane's keys
                [[maybe_unused]] uint32_t all_seen = 0;
                if constexpr (CODES) {
                    multiply_codes<T, MAX_D>(x, shared->q, PITCH, now.k + (part + 16 * warp) * MAX_D, K);
                    KVC_UNROLL
                    for (int i = 0; i < 4; i++) {
                        const int key = part + 16 * warp + i / 2 * 8 + lane % 4 * 2 + i % 2;
                        key_scales[i] = to_float(now.scales[0][key]);
                    }
                } else {
                    warp_multiply<b_layout::columns, MAX_D>(x, shared->q, PITCH, now.k + 16 * warp * PITCH, PITCH, K);
                }
                float top[2] = {m[0], m[1]}, keep[2];
                KVC_UNROLL
                for (int i = 0; i < 8; i++) {
                    const int r = i % 4 / 2, own = i / 4 * 8 + lane % 4 * 2 + i % 2, key = stage * STAGED + part + 16 * warp + own;
                    const bool seen = begin + key < limit[r] && (there >> own & 1);
                    float& logit = x[i / 4][i % 4];
                    logit *= scale;
                    if constexpr (CODES) logit *= key_scales[i / 4 * 2 + i % 2];
                    if constexpr (CAPPED) logit = capped_logit<T>(logit, cap);
                    if (!seen) logit = -INFINITY;
                    if constexpr (CODES) all_seen |= static_cast<uint32_t>(seen) << i;
                    if constexpr (PROBABILITIES) {
                        const int64_t n = first + lane / 4 + 8 * r;
                        if (n < p.queries && key < columns.count) columns.at[n * a.columns + key] = logit;
                    }
                    top[r] = fmaxf(top[r], logit);
                }
                KVC_UNROLL
                for (int r = 0; r < 2; r++) {
                    top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], 1));
                    top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], 2));
                    keep[r] = exp2_fast(m[r] - finite_or_0(top[r]));
                    l[r] *= keep[r];
                    m[r] = top[r];
                }
                KVC_UNROLL
                for (int i = 0; i < 8; i++) {
                    const int r = i % 4 / 2;
                    float& weight = x[i / 4][i % 4];
                    weight = exp2_fast(weight - finite_or_0(m[r]));
                    l[r] += weight;
                    if constexpr (CODES) {  // of what is not seen the scale may be NaN
                        const int key = part + 16 * warp + i / 4 * 8 + lane % 4 * 2 + i % 2;
                        weight = all_seen >> i & 1 ? weight * to_float(now.scales[1][key]) : 0.0f;
                    }
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
                if constexpr (CODES) mix_codes<KIND, MAX_D>(values, x, now.v + (part + 16 * warp) * VALUE_BYTES, D);
                else multiply_result(values, x, now.v + 16 * warp * PITCH, PITCH, K / 8);
            }
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
        __syncthreads();  // the last stage's memory and the queries are free
        auto& joined = shared->stages[slot ^ 1].values;
        KVC_UNROLL
        for (int r = 0; r < 2; r++) {
            if (first + lane / 4 + 8 * r >= p.queries) continue;  // nobody reads rows that are no query
            float* to = joined[warp][lane / 4 + 8 * r];
            if constexpr (CODES) store_mixed<KIND, MAX_D>(to, values, r, D);
            else store_columns(to, values, r);
        }
        if (more) hand_over_queries();
        __syncthreads();
        const auto join_warps = [&](int n, int d) {
            float all = -INFINITY, sum = 0.0f, value = 0.0f;
            KVC_UNROLL
            for (int w = 0; w < WARPS; w++) all = fmaxf(all, shared->statistics[w][n].x);
            KVC_UNROLL
            for (int w = 0; w < WARPS; w++) {
                const float weight = exp2f(shared->statistics[w][n].x - finite_or_0(all));
                sum += weight * shared->statistics[w][n].y;
                value += weight * joined[w][n][d];
            }
            float2 both;
            both.x = all;
            both.y = sum;
            if (d == 0) s.statistics[piece.w * p.queries + first + n] = both;
            return value;
        };
        if constexpr (KIND == stored::k8v4) {  // turned back, a query a warp
            for (int n = warp; n < MMA_QUERIES && first + n < p.queries; n += WARPS) {
                float x[MAX_D / 32] = {};
                KVC_UNROLL
                for (int i = 0; i < MAX_D / 32; i++)
                    if (32 * i + lane < D) x[i] = join_warps(n, 32 * i + lane);
                turn_vector(x, D);
                KVC_UNROLL
                for (int i = 0; i < MAX_D / 32; i++)
                    if (32 * i + lane < D) s.values[(piece.w * p.queries + first + n) * D + 32 * i + lane] = x[i];
            }
        } else {
            for (int i = thread; i < MMA_QUERIES * MAX_D; i += THREADS) {
                const int n = i / MAX_D, d = i % MAX_D;
                if (first + n >= p.queries) break;
                if (d < D) s.values[(piece.w * p.queries + first + n) * D + d] = join_warps(n, d);
            }
        }
        if constexpr (!PROBABILITIES) join_behind<4, MAX_D <= 64 ? 8 : 16>(a, p, s, piece);
        if (!more) return;
        // No barrier: what is read here is written again behind the next piece's first one
        item = following;
        piece = next;
        next = after;
        turn ^= 1;
    }
}

}  // namespace
