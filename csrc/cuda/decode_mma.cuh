// The pieces of decode.cu on tensor cores: 16-bit queries and caches.
#pragma once
#include "decode_pieces.cuh"

namespace {

// A capped logit in base 2. Not inline: it would take registers from the loop around it, mostly for nothing.
__device__ __noinline__ float capped(float x, float cap) { return cap * tanh_of_logit(x, cap); }

template <class T, int MAX_D>
struct mma_shared {
    static constexpr int PITCH = pitch_of<T>(MAX_D);
    union {
        struct {
            T k[STAGE * PITCH], v[STAGE * PITCH];
        } stages[2];
        // After the last key of a piece. Rows 8 banks apart: the 16 lanes that store 8 bytes at a time meet no other's
        float values[WARPS][MMA_QUERIES][MAX_D + 8];
    };
    T q[MMA_QUERIES * PITCH];
    float2 statistics[WARPS][MMA_QUERIES];
    int2 pages[PIECE];  // of the piece's keys and values
};

static_assert(sizeof(mma_shared<bf16, 128>) + 1024 <= 228 * 1024 / 3, "three blocks per multiprocessor of an H200");

template <class T, int MAX_D, bool PROBABILITIES, bool CAPPED>
__global__ __launch_bounds__(THREADS, MAX_D > 128 ? 1 : 3) void pieces_mma_kernel(const kvc_decode_args a, const plan p, const scratch s) {
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
    [[maybe_unused]] const float cap = a.softcap * LOG2_E;
    const int64_t work = static_cast<int64_t>(*s.count) * p.tiles;

    for (int64_t item = blockIdx.x; item < work; item += gridDim.x) {
        const int4 piece = s.list[item / p.tiles];
        const int64_t row = piece.x, b = row / a.Hkv, g = row % a.Hkv, first = item % p.tiles * MMA_QUERIES;
        const int begin = piece.y, row_end = piece.z, end = end_of_piece(a, p, piece);
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

        piece_columns columns = {};
        if constexpr (PROBABILITIES) columns = columns_of(a, p, piece);
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
            warp_multiply<b_layout::columns, MAX_D>(x, shared->q, PITCH, now.k + 16 * warp * PITCH, PITCH, K);
            float top[2] = {m[0], m[1]}, keep[2];
            KVC_UNROLL
            for (int i = 0; i < 8; i++) {
                const int r = i % 4 / 2, key = stage * STAGE + 16 * warp + i / 4 * 8 + lane % 4 * 2 + i % 2;
                const bool seen = begin + key < limit[r] && shared->pages[key].x >= 0;
                float& logit = x[i / 4][i % 4];
                logit *= scale;
                if constexpr (CAPPED) logit = capped_logit<T>(logit, cap);
                if (!seen) logit = -INFINITY;
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
        for (int r = 0; r < 2; r++) {
            if (first + lane / 4 + 8 * r >= p.queries) continue;  // nobody reads rows that are no query
            KVC_UNROLL
            for (int n = 0; n < N; n++) {
                float2 both;
                both.x = values[n][2 * r];
                both.y = values[n][2 * r + 1];
                *reinterpret_cast<float2*>(&shared->values[warp][lane / 4 + 8 * r][8 * n + lane % 4 * 2]) = both;
            }
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

}  // namespace
