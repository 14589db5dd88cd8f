// Joins attention by probabilities that another layer has computed with near attention: see kvc_decode_shared in kvc.h.
//
// Must move, per row that is not skipped: (end - begin)*D*(bytes of the cache's type) of values, once for up to 8 query
// heads (more of them read the same piece side by side, the second time from L2), and 4 bytes of probability per value
// and query head: 256 + 16 at D = 128 in 16 bits, G = 4. 2*G flops per element, 4 per byte there: the ceiling is memory
// bandwidth. Of a row whose query heads are all skipped, nothing but their lse.
//
// Bytes on their way: a thread has 64 bytes of values under way while it adds up the 64 before. 4 blocks of 128 threads
// per multiprocessor, what the registers of 8 query heads allow, make 32 KB; an H200 needs 29, an A100 13 (decode.cu).
// Instructions, at G = 8 in 16 bits: per 512 bytes that a warp loads 64 FMA, 8 conversions, 3 loads from shared memory
// and about 10 others, 85 of the 102 issue slots in which an H200's multiprocessor is given 512 bytes. So 8 query heads
// are as many as one reading serves; with 16 of them the kernel is bound by instructions.
//
// mix_kernel has a block for each piece of PIECE values that a row can have, cut from the row's own beginning; those of
// pieces that are not there end at once. Its sums are D*4 bytes per piece and query head, written and read once: 6% of
// the values at D = 128 in 16 bits, G = 4. join_kernel adds up a row's pieces in a fixed order.
//
// Of codes a value's scale is in its probabilities; the sums of those of 4 bits are turned back, a query head a warp.
#include "codes.cuh"
#include "kvc_cuda.h"

namespace {

constexpr int THREADS = 128, JOIN_THREADS = 512;
constexpr int PIECE = 256;   // values
constexpr int FEW_PER_LANE = 8, MANY_PER_LANE = 16;  // elements of a head that one lane of mix_kernel holds

struct plan {
    int64_t rows, G, capacity;
    int64_t row_pieces;  // of a row that is full
    int page_shift;      // log2(P)
    int lanes;           // mix_kernel: neighbouring threads that share a value
    int tiles;           // of query heads
    int join_columns;    // threads side by side in join_kernel: D rounded up to a power of two, at least a warp
    float* sums;         // [rows, row_pieces, G, D]
};

plan plan_of(const kvc_decode_shared_args& a) {
    plan p = {};
    p.rows = a.B * a.Hkv;
    p.G = a.Hq / a.Hkv;
    p.capacity = a.blocks * a.P;
    p.row_pieces = ceil_div(p.capacity, PIECE);
    while (a.P >> p.page_shift > 1) p.page_shift++;
    p.lanes = lanes_for(ceil_div(a.D, FEW_PER_LANE));  // all 32 where D is above 256, with MANY_PER_LANE
    p.join_columns = 32;
    while (p.join_columns < a.D) p.join_columns *= 2;
    p.sums = static_cast<float*>(a.scratch);
    return p;
}

// Values [begin, end) of a row: what it asks for, within its capacity and the columns.
struct range {
    int begin, end;
};

__device__ inline range range_of(const kvc_decode_shared_args& a, const plan& p, int64_t row) {
    range r;
    r.begin = a.begin[row] > 0 ? a.begin[row] : 0;
    r.end = a.end[row] < p.capacity ? a.end[row] : static_cast<int>(p.capacity);
    if (r.end - static_cast<int64_t>(r.begin) > a.columns) r.end = r.begin + static_cast<int>(a.columns);
    return r;
}

// Of a head of a row that has values or not; NaN skips nothing.
__device__ inline bool is_skipped(const kvc_decode_shared_args& a, bool has_values, float near, float far) {
    return has_values && a.threshold != INFINITY && near - far >= a.threshold;
}

// Blocks of a multiprocessor; codes become floats in registers of their own.
template <class T, int PER_LANE>
constexpr int AT_ONCE = PER_LANE != FEW_PER_LANE ? 2 : elements_of<T>::CODES ? 3 : 4;

template <class T, int VEC, int HEADS, int PER_LANE>
__global__ __launch_bounds__(THREADS, (AT_ONCE<T, PER_LANE>)) void mix_kernel(const kvc_decode_shared_args a, const plan p) {
    using V = typename elements_of<T>::value;
    constexpr bool CODES = elements_of<T>::CODES, HALVES = std::is_same<T, k8v4_row>::value;
    constexpr int CHUNKS = PER_LANE / VEC;
    // values that a lane loads at once
    constexpr int AHEAD = VEC < 8 || PER_LANE != FEW_PER_LANE ? 2 : CODES ? 8 : 4;
    constexpr int STEP = HEADS < 4 ? HEADS : 4;   // weights per load from shared memory
    constexpr int WIDTH = VEC < 4 ? VEC : 4;      // sums per store into it
    KVC_DYNAMIC_SHARED(int64_t, shared);
    int64_t* places = shared;                                 // [PIECE] where a value begins, -1: on no page
    float* weights = reinterpret_cast<float*>(places + PIECE);  // [PIECE][HEADS]
    float* sums_of = reinterpret_cast<float*>(shared);        // after the last value: [groups][HEADS][D]

    const int64_t item = blockIdx.x / p.tiles, row = item / p.row_pieces, b = row / a.Hkv, g = row % a.Hkv;
    const int64_t first = blockIdx.x % p.tiles * HEADS;  // of the tile, in the row
    const int column = static_cast<int>(item % p.row_pieces) * PIECE;
    const range values = range_of(a, p, row);
    const int left = values.end - values.begin - column, count = left < PIECE ? left : PIECE;
    if (count <= 0) return;
    bool wanted = false;
    KVC_UNROLL
    for (int n = 0; n < HEADS; n++) {
        if (first + n >= p.G) continue;
        const float near = a.near_lse[row * p.G + first + n], far = a.far_lse[row * p.G + first + n];
        wanted |= far != -INFINITY && !is_skipped(a, true, near, far);
    }
    if (!wanted) return;

    const int thread = threadIdx.x, lanes = p.lanes, groups = THREADS / lanes;
    const int lane = thread % lanes, group = thread / lanes, D = static_cast<int>(a.D), width = HALVES ? D / 2 : D;
    const float* probabilities = a.probabilities + b * a.stride_b + (g * p.G + first) * a.stride_h + column;
    KVC_UNROLL
    for (int i = 0; i < PIECE / THREADS; i++) {
        const int j = i * THREADS + thread;
        if (j >= count) continue;
        const int64_t t = static_cast<int64_t>(values.begin) + column + j;
        const int page = a.block_table[row * a.blocks + (t >> p.page_shift)];
        const bool there = page >= 0 && page < a.pages;
        const int64_t slot = there ? page * a.P + (t & (a.P - 1)) : 0;
        places[j] = there ? slot * width : -1;
        float scale = 1.0f;
        if (CODES && there) scale = to_float(static_cast<const f16*>(a.rows.value_scales)[slot]);
        packed<float, STEP> of_heads[HEADS / STEP];
        KVC_UNROLL
        for (int n = 0; n < HEADS; n++)
            of_heads[n / STEP].at[n % STEP] = first + n < p.G ? probabilities[n * a.stride_h + j] * scale : 0.0f;
        KVC_UNROLL
        for (int n = 0; n < HEADS / STEP; n++) {
            // a value on no page counts nothing, whatever its probability
            if (!there) of_heads[n] = {};
            *reinterpret_cast<packed<float, STEP>*>(weights + j * HEADS + n * STEP) = of_heads[n];
        }
    }
    __syncthreads();

    const V* pages = static_cast<const V*>(a.rows.values);
    float sums[HEADS][PER_LANE] = {};
    packed<V, VEC> now[AHEAD][CHUNKS], next[AHEAD][CHUNKS];
    const auto fetch = [&](int base) {
        KVC_UNROLL
        for (int u = 0; u < AHEAD; u++) {
            const int j = base + u * groups + group;
            const int64_t place = j < count ? places[j] : -1;
            KVC_UNROLL
            for (int c = 0; c < CHUNKS; c++) {
                const int d = (c * lanes + lane) * VEC;
                next[u][c] = {};
                if (place >= 0 && d < D)
                    next[u][c] = *reinterpret_cast<const packed<V, VEC>*>(pages + place + (d < width ? d : d - width));
            }
        }
    };
    fetch(0);
    for (int base = 0; base < count; base += AHEAD * groups) {
        KVC_UNROLL
        for (int u = 0; u < AHEAD; u++) {
            KVC_UNROLL
            for (int c = 0; c < CHUNKS; c++) now[u][c] = next[u][c];
        }
        fetch(base + AHEAD * groups);
        KVC_UNROLL
        for (int u = 0; u < AHEAD; u++) {
            const int j = base + u * groups + group;
            if (j >= count) continue;
            KVC_UNROLL
            for (int n = 0; n < HEADS; n += STEP) {
                float weight[STEP];
                load<STEP>(weight, weights + j * HEADS + n);
                KVC_UNROLL
                for (int i = 0; i < STEP * PER_LANE; i++) {
                    const int e = i % PER_LANE;
                    const V x = now[u][e / VEC].at[e % VEC];
                    float& sum = sums[n + i / PER_LANE][e];
                    if constexpr (HALVES) sum += weight[i / PER_LANE] * nibble(x, (e / VEC * lanes + lane) * VEC >= width);
                    else sum += weight[i / PER_LANE] * to_float(x);
                }
            }
        }
    }

    // Join the groups, in their order
    __syncthreads();  // weights are out of use
    KVC_UNROLL
    for (int n = 0; n < HEADS; n++) {
        KVC_UNROLL
        for (int i = 0; i < PER_LANE; i += WIDTH) {
            const int d = (i / VEC * lanes + lane) * VEC + i % VEC;
            packed<float, WIDTH> part;
            KVC_UNROLL
            for (int e = 0; e < WIDTH; e++) part.at[e] = sums[n][i + e];
            if (d < D) *reinterpret_cast<packed<float, WIDTH>*>(sums_of + (group * HEADS + n) * D + d) = part;
        }
    }
    __syncthreads();
    const auto sum_groups = [&](int i) {
        float sum = 0.0f;
        for (int x = 0; x < groups; x++) sum += sums_of[x * HEADS * D + i];
        return sum;
    };
    float* to = p.sums + (item * p.G + first) * D;
    if constexpr (HALVES) {
        constexpr int EACH = PER_LANE;  // of the 32 lanes that D needs at most
        for (int n = thread / 32; n < HEADS && first + n < p.G; n += THREADS / 32) {
            float x[EACH] = {};
            KVC_UNROLL
            for (int i = 0; i < EACH; i++)
                if (32 * i + thread % 32 < D) x[i] = sum_groups(n * D + 32 * i + thread % 32);
            turn_vector(x, D);
            KVC_UNROLL
            for (int i = 0; i < EACH; i++)
                if (32 * i + thread % 32 < D) to[n * D + 32 * i + thread % 32] = x[i];
        }
    } else {
        for (int i = thread; i < HEADS * D && first + i / D < p.G; i += THREADS) to[i] = sum_groups(i);
    }
}

// A block per query head. Threads share its D columns, `parts` of them each: part i adds up pieces i, i + parts, ...
__global__ __launch_bounds__(JOIN_THREADS) void join_kernel(const kvc_decode_shared_args a, const plan p) {
    constexpr int AHEAD = 8;
    __shared__ float of_thread[JOIN_THREADS];
    const int thread = threadIdx.x, columns = p.join_columns, parts = JOIN_THREADS / columns;
    const int64_t head = blockIdx.x, row = head / p.G, n = head % p.G;
    const int D = static_cast<int>(a.D), d = thread % columns, part = thread / columns;
    const range values = range_of(a, p, row);
    const float near = a.near_lse[head], far = a.far_lse[head];
    const bool has_values = values.begin < values.end, skipped = is_skipped(a, has_values, near, far);
    const bool no_near = near == -INFINITY, no_far = skipped || !has_values || far == -INFINITY;
    const int pieces = no_far ? 0 : (values.end - values.begin + PIECE - 1) / PIECE;
    float sum = 0.0f;
    for (int i = part; i < pieces && d < D; i += AHEAD * parts) {
        float x[AHEAD];
        KVC_UNROLL
        for (int u = 0; u < AHEAD; u++) {
            const int64_t piece = i + u * parts;
            x[u] = piece < pieces ? p.sums[((row * p.row_pieces + piece) * p.G + n) * D + d] : 0.0f;
        }
        KVC_UNROLL
        for (int u = 0; u < AHEAD; u++) sum += x[u];
    }
    of_thread[thread] = sum;
    __syncthreads();
    if (thread == 0) a.skipped[head] = skipped;
    if (part > 0 || d >= D) return;
    for (int i = 1; i < parts; i++) sum += of_thread[i * columns + d];
    // an empty side is left out by name, also where its out holds NaN
    float out = no_near ? 0.0f : load_any(a.near, a.dtype, head * D + d);
    if (!no_far) {
        const float gate = no_near ? 0.0f : 1.0f / (1.0f + expf(far - near));
        out = (no_near ? 0.0f : gate * out) + (1.0f - gate) * sum;
    }
    store_any(a.out, a.dtype, head * D + d, out);
}

// ---- host ----

template <class T, int VEC, int HEADS, int PER_LANE = FEW_PER_LANE>
cudaError_t launch_mix(const kvc_decode_shared_args& a, plan p, cudaStream_t stream) {
    p.tiles = static_cast<int>(ceil_div(p.G, HEADS));
    const int64_t blocks = p.rows * p.row_pieces * p.tiles;
    if (blocks > MAX_GRID_X) return cudaErrorInvalidValue;
    // At most 128 threads * 8 heads * 8 floats (above D = 256: 4 heads * 16) = 32 KiB: no attribute to set
    const size_t held = PIECE * (sizeof(int64_t) + HEADS * sizeof(float));
    const size_t sums = static_cast<size_t>(THREADS / p.lanes * HEADS * a.D) * sizeof(float);
    const size_t bytes = held > sums ? held : sums;
    KVC_LAUNCH((mix_kernel<T, VEC, HEADS, PER_LANE>), static_cast<unsigned>(blocks), THREADS, bytes, stream, a, p);
    return cudaSuccess;
}

// The smallest tile that holds all of a row's query heads, up to 8.
template <class T, int VEC>
cudaError_t launch_mix(const kvc_decode_shared_args& a, const plan& p, cudaStream_t stream) {
    if (a.D > 32 * FEW_PER_LANE)
        return p.G == 1 ? launch_mix<T, VEC, 1, MANY_PER_LANE>(a, p, stream)
                        : launch_mix<T, VEC, 4, MANY_PER_LANE>(a, p, stream);
    if (p.G == 1) return launch_mix<T, VEC, 1>(a, p, stream);
    if (p.G <= 4) return launch_mix<T, VEC, 4>(a, p, stream);
    return launch_mix<T, VEC, 8>(a, p, stream);
}

bool valid(const kvc_decode_shared_args& a) {
    return a.B >= 0 && a.Hq >= 0 && a.Hkv >= 0 && a.D >= 1 && a.D <= KVC_CUDA_MAX_HEAD_DIM &&
           (a.Hkv ? a.Hq % a.Hkv == 0 : a.Hq == 0) && a.P >= 1 && (a.P & (a.P - 1)) == 0 && a.pages >= 0 &&
           a.blocks >= 0 && a.columns >= 0 && a.threshold == a.threshold && dtype_known(a.dtype) &&
           valid_format(a.rows, a.D);
}

bool empty(const kvc_decode_shared_args& a) { return a.B == 0 || a.Hq == 0; }

}  // namespace

extern "C" int64_t kvc_cuda_decode_shared_scratch_bytes(const kvc_decode_shared_args* args) {
    if (!valid(*args) || empty(*args)) return 0;
    const plan p = plan_of(*args);
    return p.rows * p.row_pieces * p.G * args->D * static_cast<int64_t>(sizeof(float));
}

extern "C" cudaError_t kvc_cuda_decode_shared(const kvc_decode_shared_args* args, cudaStream_t stream) {
    const kvc_decode_shared_args& a = *args;
    if (!valid(a)) return cudaErrorInvalidValue;
    if (empty(a)) return cudaSuccess;
    if (!a.out || !a.skipped || !a.near || !a.near_lse || !a.far_lse) return cudaErrorInvalidValue;
    if (!a.block_table || !a.begin || !a.end) return cudaErrorInvalidValue;
    if ((a.columns && !a.probabilities) || (a.pages && !a.rows.values)) return cudaErrorInvalidValue;
    if (a.pages && stores_codes(a.rows) && !a.rows.value_scales) return cudaErrorInvalidValue;
    const plan p = plan_of(a);
    if (p.row_pieces > 0 && !a.scratch) return cudaErrorInvalidValue;
    if (p.capacity > MAX_GRID_X || p.rows * p.row_pieces > MAX_GRID_X || p.rows * p.G > MAX_GRID_X)
        return cudaErrorInvalidValue;
    if (p.row_pieces > 0 && a.columns > 0) {
        const bool whole = aligned_16(a.rows.values);
        cudaError_t status;
        if (a.rows.format == KVC_FORMAT_INT8) {
            status = whole && a.D % 8 == 0 ? launch_mix<int8_row, 8>(a, p, stream) : launch_mix<int8_row, 1>(a, p, stream);
        } else if (a.rows.format == KVC_FORMAT_K8V4) {
            status = whole && a.D % 16 == 0 ? launch_mix<k8v4_row, 8>(a, p, stream) : launch_mix<k8v4_row, 1>(a, p, stream);
        } else {
            status = with_dtype(dtype_of(a.rows), [&](auto element) {
                using T = decltype(element);
                constexpr int VEC = PER_16_BYTES<T>;
                return whole && a.D % VEC == 0 ? launch_mix<T, VEC>(a, p, stream) : launch_mix<T, 1>(a, p, stream);
            });
        }
        KVC_TRY(status);
    }
    KVC_LAUNCH(join_kernel, static_cast<unsigned>(p.rows * p.G), JOIN_THREADS, 0, stream, a, p);
    return cudaSuccess;
}
