// Attention of a few queries over ragged paged rows: see kvc_decode in kvc.h.
//
// Must move: 2*(end - begin)*D*(bytes of the cache's type) per row and tile of queries; 4*G*S*D flops per key, so with
// few queries the ceiling is memory bandwidth. One block per row and tile, not yet split over keys: with fewer rows
// than SMs only as many SMs read.
#include "kvc_cuda.h"
#include "types.cuh"

namespace {

constexpr int THREADS = 128;
constexpr int PER_LANE = 8;  // elements of a head that one lane holds: 32 lanes * 8 = KVC_CUDA_MAX_HEAD_DIM

struct geometry {
    int lanes;       // neighbouring threads that share one key; the block reads THREADS / lanes keys at a time
    int page_shift;  // log2(P); unused without a block table
    int64_t tiles;   // tiles of QUERIES queries per row
};

// Where key t of the row lies in k_pages and v_pages, -1 if on no page.
__device__ inline int64_t key_offset(const kvc_decode_args& a, const geometry& geo, int64_t row, int64_t t) {
    int64_t page = row, slot = t;
    if (a.block_table) {
        page = a.block_table[row * a.blocks + (t >> geo.page_shift)];
        slot = t & (a.P - 1);
    }
    return page >= 0 && page < a.pages ? (page * a.P + slot) * a.D : -1;
}

template <class T, int VEC, int QUERIES>
__global__ __launch_bounds__(THREADS) void decode_kernel(const kvc_decode_args a, const geometry geo) {
    constexpr int CHUNKS = PER_LANE / VEC;
    KVC_DYNAMIC_SHARED(float, shared);
    const int lanes = geo.lanes, groups = THREADS / lanes;
    const int lane = static_cast<int>(threadIdx.x) % lanes, group = static_cast<int>(threadIdx.x) / lanes;
    const int D = static_cast<int>(a.D);
    const int64_t row = blockIdx.x / geo.tiles, first = blockIdx.x % geo.tiles * QUERIES;
    const int64_t b = row / a.Hkv, g = row % a.Hkv, G = a.Hq / a.Hkv, queries = G * a.S;
    const int64_t capacity = a.block_table ? a.blocks * a.P : a.P;
    const int64_t begin = a.begin && a.begin[row] > 0 ? a.begin[row] : 0;
    const int64_t end = a.end[row] < capacity ? a.end[row] : capacity;

    // Online softmax, one per group of lanes and query: maximum m, sum l, weighted values
    float q[QUERIES][PER_LANE], values[QUERIES][PER_LANE], m[QUERIES], l[QUERIES];
    int64_t limit[QUERIES], last = begin;
    KVC_UNROLL
    for (int n = 0; n < QUERIES; n++) {
        const bool here = first + n < queries;
        const int64_t h = g * G + (first + n) / a.S, s = (first + n) % a.S;
        limit[n] = !here ? begin : a.causal ? end - (a.S - 1 - s) : end;
        last = limit[n] > last ? limit[n] : last;
        m[n] = -INFINITY;
        l[n] = 0.0f;
        KVC_UNROLL
        for (int i = 0; i < PER_LANE; i++) {
            const int d = (i / VEC * lanes + lane) * VEC + i % VEC;
            const int64_t at = b * a.q.stride_b + h * a.q.stride_h + s * a.q.stride_t + d;
            q[n][i] = here && d < D ? load_any(a.q.data, a.q.dtype, at) * a.scale : 0.0f;
            values[n][i] = 0.0f;
        }
    }
    // All lanes run every round: the sums over lanes are shuffles of the whole warp
    for (int64_t base = begin; base < last; base += groups) {
        const int64_t t = base + group, offset = t < last ? key_offset(a, geo, row, t) : -1;
        float k[PER_LANE] = {}, v[PER_LANE] = {};
        KVC_UNROLL
        for (int c = 0; c < CHUNKS; c++) {
            const int d = (c * lanes + lane) * VEC;
            if (offset < 0 || d >= D) continue;
            float part_k[VEC], part_v[VEC];
            load<VEC>(part_k, static_cast<const T*>(a.k_pages) + offset + d);
            load<VEC>(part_v, static_cast<const T*>(a.v_pages) + offset + d);
            KVC_UNROLL
            for (int e = 0; e < VEC; e++) {
                k[c * VEC + e] = part_k[e];
                v[c * VEC + e] = part_v[e];
            }
        }
        KVC_UNROLL
        for (int n = 0; n < QUERIES; n++) {
            float score = 0.0f;
            KVC_UNROLL
            for (int i = 0; i < PER_LANE; i++) score += q[n][i] * k[i];
            for (int step = lanes / 2; step > 0; step /= 2) score += __shfl_xor_sync(FULL_WARP, score, step);
            if (offset < 0 || t >= limit[n]) continue;
            const float grown = fmaxf(m[n], score);
            const float shift = grown == -INFINITY ? 0.0f : grown;  // -inf - -inf is no number
            const float keep = expf(m[n] - shift), weight = expf(score - shift);
            m[n] = grown;
            l[n] = l[n] * keep + weight;
            KVC_UNROLL
            for (int i = 0; i < PER_LANE; i++) values[n][i] = values[n][i] * keep + weight * v[i];
        }
    }
    // Join the groups, in their order
    float* m_of = shared;                        // [groups][QUERIES]
    float* l_of = m_of + groups * QUERIES;       // [groups][QUERIES]
    float* values_of = l_of + groups * QUERIES;  // [groups][QUERIES][D]
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
        if (first + n >= queries) break;
        float top = -INFINITY, sum = 0.0f, value = 0.0f;
        for (int x = 0; x < groups; x++) top = fmaxf(top, m_of[x * QUERIES + n]);
        const float shift = top == -INFINITY ? 0.0f : top;
        for (int x = 0; x < groups; x++) {
            const float weight = expf(m_of[x * QUERIES + n] - shift);
            sum += weight * l_of[x * QUERIES + n];
            value += weight * values_of[(x * QUERIES + n) * D + d];
        }
        const int64_t h = g * G + (first + n) / a.S, s = (first + n) % a.S, at = (b * a.Hq + h) * a.S + s;
        store_any(a.out, a.q.dtype, at * D + d, sum == 0.0f ? 0.0f : value / sum);
        if (d == 0) a.lse[at] = sum == 0.0f ? -INFINITY : shift + logf(sum);
    }
}

template <class T, int VEC, int QUERIES>
cudaError_t launch(const kvc_decode_args& a, cudaStream_t stream) {
    geometry geo = {};
    geo.lanes = lanes_for(ceil_div(a.D, VEC));
    while (a.P >> geo.page_shift > 1) geo.page_shift++;
    geo.tiles = ceil_div(a.Hq / a.Hkv * a.S, QUERIES);
    if (a.B * a.Hkv > MAX_GRID_X / geo.tiles) return cudaErrorInvalidValue;
    // At most 128 groups * 8 queries * 2 + 128 threads * 8 queries * 8 floats = 40 KiB: no attribute to set
    const size_t shared = static_cast<size_t>(THREADS / geo.lanes * QUERIES * (a.D + 2)) * sizeof(float);
    const unsigned grid = static_cast<unsigned>(a.B * a.Hkv * geo.tiles);
    KVC_LAUNCH((decode_kernel<T, VEC, QUERIES>), grid, THREADS, shared, stream, a, geo);
    return cudaGetLastError();
}

// A key is read once per tile of queries: the smallest tile that holds all of a row's queries, up to 8.
template <class T, int VEC>
cudaError_t launch_tile(const kvc_decode_args& a, cudaStream_t stream) {
    const int64_t queries = a.Hq / a.Hkv * a.S;
    if (queries == 1) return launch<T, VEC, 1>(a, stream);
    if (queries <= 4) return launch<T, VEC, 4>(a, stream);
    return launch<T, VEC, 8>(a, stream);
}

}  // namespace

extern "C" cudaError_t kvc_cuda_decode(const kvc_decode_args* args, cudaStream_t stream) {
    const kvc_decode_args& a = *args;
    if (a.B < 0 || a.Hq < 0 || a.Hkv < 0 || a.S < 0 || a.D < 0 || a.P < 0 || a.pages < 0 || a.blocks < 0 ||
        a.D > KVC_CUDA_MAX_HEAD_DIM || !valid_dtype(a.q.dtype) || !valid_dtype(a.cache_dtype))
        return cudaErrorInvalidValue;
    if (a.B == 0 || a.Hq == 0 || a.S == 0 || a.D == 0) return cudaSuccess;
    if (a.Hkv == 0 || a.Hq % a.Hkv || (a.block_table && (a.P & (a.P - 1)))) return cudaErrorInvalidValue;
    const bool any_key = a.pages > 0 && a.P > 0;
    if (!a.out || !a.lse || !a.q.data || !a.end) return cudaErrorInvalidValue;
    if (any_key && (!a.k_pages || !a.v_pages)) return cudaErrorInvalidValue;
    return with_dtype(a.cache_dtype, [&](auto element) {
        using T = decltype(element);
        constexpr int VEC = PER_16_BYTES<T>;
        if (a.D % VEC == 0 && aligned_16(a.k_pages) && aligned_16(a.v_pages)) return launch_tile<T, VEC>(a, stream);
        return launch_tile<T, 1>(a, stream);
    });
}
