// Attention of a few queries over ragged paged rows: see kvc_decode in kvc.h.
//
// Must move: 2*(end - begin)*D*(bytes of the cache's type) per row, once for up to TILE queries that share the row's
// keys; 4*G*S*D flops per key. Up to 16 queries that is under 16 flops per byte of bf16: the ceiling is memory
// bandwidth, on every device, if enough bytes are on their way and the work is even.
//
// Even work: rows are cut into pieces of up to PIECE keys from their own beginning (so that a query's bits depend on its own
// row only). plan_kernel lists the pieces on the device: nothing waits for the host, and the grids depend on sizes
// only, so that a step can be captured in a CUDA graph. As many blocks as fit on the device take the pieces in turns:
// one long row among short ones keeps all of them busy. The block that finishes a row's last piece adds them up in their
// order (decode_join.cuh); of many queries, or where probabilities are wanted, join_kernel does, with the same bits.
//
// Bytes on their way: H200 reads 4.8 TB/s at about 0.8 us of latency, 3.8 MB or 29 KB per multiprocessor; A100 2 TB/s,
// 13 KB. pieces_mma_kernel (16-bit) copies STAGE keys and values ahead by cp.async: 32 KB per block at D = 128, and
// 75 KB of shared memory let three blocks run per multiprocessor of an H200, two of an A100: 96 and 64 KB. What a piece
// begins with (list, block table, first copy: three loads in a chain, 2 to 3 us) is fetched while the piece before it is
// worked on.
// Instructions: per 16 keys a warp issues 32 mma, 24 ldmatrix and about 150 others for 8 KB of keys and values; at the
// H200's 20 bytes per clock and multiprocessor that is 206 of 1640 issue slots.
// The pieces' results are (D + 2)*4 bytes per query and piece, written and read once: 3% of the keys and values at
// G*S = 4, D = 128.
// Many queries in 16-bit types are decode_prefill.cu's. What is left of them (float32, D > 256, rows that are no 16-byte
// units) goes in slabs of positions whose results fill SLAB_BYTES at most: 2,048 new tokens over 32,768 of Hq 32, Hkv 8,
// D 128 are 17 slabs of 126, where all at once would take 4.4 GB. A slab reads the keys that its queries see once more.
// Probabilities, where they are wanted, take 12 bytes more per key and query head: the pieces write the logits, and
// probabilities_kernel, behind join_kernel, reads and replaces them. At G = 4, D = 128 that is 48 bytes beside the 512
// of a 16-bit key and value: 9%, less where the logits are still in L2. The kernels that write none are apart.
//
// pieces_kernel takes the rest: float32 caches, queries of another type, head dims that are no multiple of 16 bytes or
// above 256, or whose stages do not fit into a block's shared memory.
#include "decode_list.cuh"
#include "decode_mma.cuh"
#include "decode_prefill.cuh"
#include "resident.cuh"

namespace {

// ---- everything else: plain FMA ----

template <class T, int VEC, int QUERIES, int PER_LANE, bool PROBABILITIES>
__global__ __launch_bounds__(THREADS, 1) void pieces_kernel(const kvc_decode_args a, const plan p, const scratch s) {
    using K = typename elements_of<T>::key;
    using V = typename elements_of<T>::value;
    constexpr bool CODES = elements_of<T>::CODES, HALVES = std::is_same<T, k8v4_row>::value;
    constexpr int CHUNKS = PER_LANE / VEC;
    // keys that a lane loads before it uses the first; of wide rows in float32, or whose logits are written, a second one
    // would not find registers
    constexpr int AHEAD = CODES && VEC == 1                                                                ? 1
                          : QUERIES * PER_LANE <= 32                                                       ? 4
                          : PER_LANE == FEW_PER_LANE || (VEC > 1 && sizeof(K) <= 2 && !PROBABILITIES) ? 2
                                                                                                            : 1;
    KVC_DYNAMIC_SHARED(float, shared);
    const int lanes = p.lanes, groups = THREADS / lanes;
    const int lane = static_cast<int>(threadIdx.x) % lanes, group = static_cast<int>(threadIdx.x) / lanes;
    const int D = static_cast<int>(a.D);
    const float cap = a.softcap * LOG2_E;
    const int64_t work = static_cast<int64_t>(*s.count) * p.tiles;
    float* m_of = shared;                        // [groups][QUERIES]
    float* l_of = m_of + groups * QUERIES;       // [groups][QUERIES]
    float* values_of = l_of + groups * QUERIES;  // [groups][QUERIES][D]

    for (int64_t item = blockIdx.x; item < work; item += gridDim.x) {
        const int4 piece = s.list[quotient(item, p.tiles)];
        const int64_t row = piece.x, b = quotient(row, a.Hkv), g = remainder_of(row, a.Hkv);
        const int64_t first = remainder_of(item, p.tiles) * QUERIES;
        const int begin = piece.y, row_end = piece.z, end = end_of_piece(a, p, piece);
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
        piece_columns columns = {};
        if constexpr (PROBABILITIES) columns = columns_of(a, p, piece);
        // All lanes run every round: the sums over lanes are shuffles of the whole warp
        for (int base = begin; base < end; base += AHEAD * groups) {
            packed<K, VEC> k[AHEAD][CHUNKS];
            packed<V, VEC> v[AHEAD][CHUNKS];
            [[maybe_unused]] float key_scale[AHEAD], value_scale[AHEAD];
            bool there[AHEAD];
            KVC_UNROLL
            for (int u = 0; u < AHEAD; u++) {
                const int t = base + u * groups + group;
                int2 page;
                page.x = page.y = -1;
                if (t < end) page = pages_of(a, p, row, t);
                there[u] = page.x >= 0;
                const int64_t key_slot = there[u] ? slot_in(a, page.x, t) : 0, value_slot = there[u] ? slot_in(a, page.y, t) : 0;
                if constexpr (CODES) {
                    key_scale[u] = there[u] ? to_float(static_cast<const f16*>(a.rows.key_scales)[key_slot]) : 0.0f;
                    value_scale[u] = there[u] ? to_float(static_cast<const f16*>(a.rows.value_scales)[value_slot]) : 0.0f;
                }
                KVC_UNROLL
                for (int c = 0; c < CHUNKS; c++) {
                    const int d = (c * lanes + lane) * VEC, byte = HALVES && d >= D / 2 ? d - D / 2 : d;
                    k[u][c] = {};
                    v[u][c] = {};
                    if (!there[u] || d >= D) continue;
                    const K* keys = static_cast<const K*>(a.rows.keys) + key_slot * D;
                    const V* of_values = static_cast<const V*>(a.rows.values) + value_slot * (HALVES ? D / 2 : D);
                    k[u][c] = *reinterpret_cast<const packed<K, VEC>*>(keys + d);
                    v[u][c] = *reinterpret_cast<const packed<V, VEC>*>(of_values + byte);
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
                    if constexpr (CODES) score[u] *= key_scale[u];
                    if (cap > 0.0f) score[u] = capped(score[u], cap);
                    if (!there[u] || base + u * groups + group >= limit[n]) score[u] = -INFINITY;
                    if constexpr (PROBABILITIES) {
                        const int key = base - begin + u * groups + group;
                        if (lane == 0 && first + n < p.queries && key < columns.count)
                            columns.at[(first + n) * a.columns + key] = score[u];
                    }
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
                    float weight = exp2f(score[u] - shift);
                    l[n] += weight;
                    if constexpr (CODES) weight *= value_scale[u];
                    KVC_UNROLL
                    for (int i = 0; i < PER_LANE; i++) {
                        const V x = v[u][i / VEC].at[i % VEC];
                        if constexpr (HALVES) values[n][i] += weight * nibble(x, (i / VEC * lanes + lane) * VEC >= D / 2);
                        else values[n][i] += weight * to_float(x);
                    }
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
        const auto join_groups = [&](int n, int d) {
            float all = -INFINITY, sum = 0.0f, value = 0.0f;
            for (int x = 0; x < groups; x++) all = fmaxf(all, m_of[x * QUERIES + n]);
            for (int x = 0; x < groups; x++) {
                const float weight = exp2f(m_of[x * QUERIES + n] - finite_or_0(all));
                sum += weight * l_of[x * QUERIES + n];
                value += weight * values_of[(x * QUERIES + n) * D + d];
            }
            float2 both;
            both.x = all;
            both.y = sum;
            if (d == 0) s.statistics[piece.w * p.queries + first + n] = both;
            return value;
        };
        if constexpr (HALVES) {  // turned back, a query a warp
            constexpr int EACH = PER_LANE == FEW_PER_LANE ? 8 : 16;
            const int own = static_cast<int>(threadIdx.x) % 32;
            for (int n = static_cast<int>(threadIdx.x) / 32; n < QUERIES && first + n < p.queries; n += WARPS) {
                float x[EACH] = {};
                KVC_UNROLL
                for (int i = 0; i < EACH; i++)
                    if (32 * i + own < D) x[i] = join_groups(n, 32 * i + own);
                turn_vector(x, D);
                KVC_UNROLL
                for (int i = 0; i < EACH; i++)
                    if (32 * i + own < D) s.values[(piece.w * p.queries + first + n) * D + 32 * i + own] = x[i];
            }
        } else {
            for (int i = threadIdx.x; i < QUERIES * D; i += THREADS) {
                const int n = i / D, d = i % D;
                if (first + n >= p.queries) break;
                s.values[(piece.w * p.queries + first + n) * D + d] = join_groups(n, d);
            }
        }
        if constexpr (!PROBABILITIES) join_behind<(VEC == 1 ? 1 : 4)>(a, p, s, piece);
    }
}

// ---- the pieces of a row, in their order ----

// A block for each row and query, where the pieces' kernel has joined nothing.
template <bool PROBABILITIES>
__global__ __launch_bounds__(JOIN_THREADS, 1) void join_kernel(const kvc_decode_args a, const plan p, const scratch s) {
    constexpr int WARPS_HERE = JOIN_THREADS / 32;
    const int warp = threadIdx.x / 32, chunks = (static_cast<int>(a.D) + 31) / 32;
    const int64_t row = quotient(blockIdx.x, p.queries), n = remainder_of(blockIdx.x, p.queries);
    const int pieces = pieces_of(a, p, row), groups = groups_in(pieces);
    for (int i = warp; groups > 1 && i < groups * chunks; i += WARPS_HERE)
        join_group<1>(a, p, s, row, pieces, n, i / chunks, i % chunks * 32);
    __syncthreads();
    float2 both;
    both.x = both.y = 0.0f;
    for (int i = warp; i < chunks; i += WARPS_HERE) both = join_row<1>(a, p, s, row, pieces, n, i * 32);
    if constexpr (PROBABILITIES) {
        __syncthreads();
        // Every warp has read its pieces' statistics: from here on those of the first are the row's
        if (threadIdx.x == 0 && pieces > 0) s.statistics[row * p.row_pieces * p.queries + n] = both;
    }
}

// ---- the logits of pieces as probabilities ----

// Must move: 8 bytes per key and query. A thread has all of its loads under way before the first store: with 12 blocks
// per multiprocessor 48 KB, enough for the bandwidth of an H200.
__global__ __launch_bounds__(THREADS) void probabilities_kernel(const kvc_decode_args a, const plan p,
                                                                const scratch s) {
    constexpr int EACH = PIECE / THREADS;
    const int64_t work = static_cast<int64_t>(*s.count) * p.tiles;
    for (int64_t item = blockIdx.x; item < work; item += gridDim.x) {
        const int4 piece = s.list[quotient(item, p.tiles)];
        const int64_t first = remainder_of(item, p.tiles) * SOFTMAX_QUERIES, row = piece.x;
        const piece_columns columns = columns_of(a, p, piece);
        float x[SOFTMAX_QUERIES][EACH];
        float2 statistics[SOFTMAX_QUERIES];
        KVC_UNROLL
        for (int n = 0; n < SOFTMAX_QUERIES; n++) {
            if (first + n >= p.queries) continue;
            statistics[n] = s.statistics[row * p.row_pieces * p.queries + first + n];
            KVC_UNROLL
            for (int i = 0; i < EACH; i++) {
                const int key = i * THREADS + static_cast<int>(threadIdx.x);
                if (key < columns.count) x[n][i] = columns.at[(first + n) * a.columns + key];
            }
        }
        KVC_UNROLL
        for (int n = 0; n < SOFTMAX_QUERIES; n++) {
            if (first + n >= p.queries) continue;
            const float shift = statistics[n].x, sum = statistics[n].y, factor = sum == 0.0f ? 0.0f : 1.0f / sum;
            KVC_UNROLL
            for (int i = 0; i < EACH; i++) {
                const int key = i * THREADS + static_cast<int>(threadIdx.x);
                if (key < columns.count) columns.at[(first + n) * a.columns + key] = exp2f(x[n][i] - shift) * factor;
            }
        }
    }
}

// ---- host ----

__global__ __launch_bounds__(PLAN_THREADS) void plan_kernel(const kvc_decode_args a, const plan p, const scratch s) {
    list_pieces(a, p, s);
}

template <class T, int MAX_D, stored KIND, bool PROBABILITIES, bool CAPPED>
cudaError_t launch_mma(const kvc_decode_args& a, const plan& p, cudaStream_t stream) {
    constexpr auto kernel = pieces_mma_kernel<T, MAX_D, KIND, PROBABILITIES, CAPPED>;
    constexpr size_t SHARED = sizeof(mma_shared<T, MAX_D, KIND>);
    unsigned blocks = 0;
    KVC_TRY(resident_blocks<kernel>(blocks, THREADS, SHARED, p.rows * p.row_pieces * p.tiles));
    KVC_LAUNCH(kernel, blocks, THREADS, SHARED, stream, a, p, scratch_of(a, p));
    return cudaSuccess;
}

template <class T, int MAX_D, stored KIND = stored::numbers>
cudaError_t launch_mma(const kvc_decode_args& a, plan p, cudaStream_t stream) {
    p.tiles = static_cast<int>(ceil_div(p.queries, MMA_QUERIES));
    if (a.probabilities)
        return a.softcap > 0.0f ? launch_mma<T, MAX_D, KIND, true, true>(a, p, stream)
                                : launch_mma<T, MAX_D, KIND, true, false>(a, p, stream);
    return a.softcap > 0.0f ? launch_mma<T, MAX_D, KIND, false, true>(a, p, stream)
                            : launch_mma<T, MAX_D, KIND, false, false>(a, p, stream);
}

template <class T, int VEC, int QUERIES, int PER_LANE, bool PROBABILITIES>
cudaError_t launch_fma(const kvc_decode_args& a, plan p, cudaStream_t stream) {
    constexpr auto kernel = pieces_kernel<T, VEC, QUERIES, PER_LANE, PROBABILITIES>;
    p.lanes = lanes_for(ceil_div(a.D, VEC));
    p.tiles = static_cast<int>(ceil_div(p.queries, QUERIES));
    // At most 128 groups * 8 queries * 2 + 128 threads * 8 queries * 8 floats = 40 KiB: no attribute to set; above
    // D = 256 with 4 groups and 4 queries
    static_assert(QUERIES * PER_LANE <= 64, "their sums are registers, and then shared memory");
    const size_t shared = static_cast<size_t>(THREADS / p.lanes * QUERIES * (a.D + 2)) * sizeof(float);
    unsigned blocks = 0;
    KVC_TRY(resident_blocks<kernel>(blocks, THREADS, shared, p.rows * p.row_pieces * p.tiles));
    KVC_LAUNCH(kernel, blocks, THREADS, shared, stream, a, p, scratch_of(a, p));
    return cudaSuccess;
}

template <class T, int VEC, int QUERIES, int PER_LANE = FEW_PER_LANE>
cudaError_t launch_fma(const kvc_decode_args& a, const plan& p, cudaStream_t stream) {
    return a.probabilities ? launch_fma<T, VEC, QUERIES, PER_LANE, true>(a, p, stream)
                           : launch_fma<T, VEC, QUERIES, PER_LANE, false>(a, p, stream);
}

// The smallest tile that holds all of a row's queries, up to 8.
template <class T, int VEC>
cudaError_t launch_fma(const kvc_decode_args& a, const plan& p, cudaStream_t stream) {
    if (a.D > 32 * FEW_PER_LANE)
        return p.queries == 1 ? launch_fma<T, VEC, 1, MANY_PER_LANE>(a, p, stream)
                              : launch_fma<T, VEC, 4, MANY_PER_LANE>(a, p, stream);
    if (p.queries == 1) return launch_fma<T, VEC, 1>(a, p, stream);
    if (p.queries <= 4) return launch_fma<T, VEC, 4>(a, p, stream);
    return launch_fma<T, VEC, 8>(a, p, stream);
}

// Whether slots can be counted in 32 bits, as pieces_mma_kernel does.
bool few_slots(const kvc_decode_args& a) {
    const int64_t most = a.P > 0 ? (int64_t{1} << 32) / a.P - 1 : MAX_GRID_X;
    return a.pages <= most && (!a.value_table || a.value_pages <= most);
}

template <class T>
cudaError_t launch_pieces(const kvc_decode_args& a, const plan& p, cudaStream_t stream) {
    constexpr int VEC = PER_16_BYTES<T>;
    const bool wide = a.D % VEC == 0 && aligned_16(a.rows.keys) && aligned_16(a.rows.values);
    if constexpr (sizeof(T) == 2) {
        if (wide && a.q.dtype == dtype_of(a.rows) && few_slots(a)) {
            if (a.D <= 64) return launch_mma<T, 64>(a, p, stream);
            if (a.D <= 128) return launch_mma<T, 128>(a, p, stream);
            if (a.D <= 256 && shared_fits(sizeof(mma_shared<T, 256>))) return launch_mma<T, 256>(a, p, stream);
        }
    }
    return wide ? launch_fma<T, VEC>(a, p, stream) : launch_fma<T, 1>(a, p, stream);
}

template <class T, stored KIND>
cudaError_t launch_codes(const kvc_decode_args& a, const plan& p, cudaStream_t stream) {
    constexpr int VEC = 8, UNIT = 128 / bits_of_values(KIND);  // values in 16 bytes
    const bool whole = aligned_16(a.rows.keys) && aligned_16(a.rows.values);
    const auto mma = [&](auto type) {
        using Q = decltype(type);
        if (a.D <= 64) return launch_mma<Q, 64, KIND>(a, p, stream);
        if (a.D <= 128) return launch_mma<Q, 128, KIND>(a, p, stream);
        return launch_mma<Q, 256, KIND>(a, p, stream);
    };
    if (whole && few_slots(a) && a.D % UNIT == 0 && a.D <= 256 && (a.D <= 128 || shared_fits(sizeof(mma_shared<bf16, 256, KIND>)))) {
        if (a.q.dtype == KVC_BF16) return mma(bf16{});
        if (a.q.dtype == KVC_F16) return mma(f16{});
    }
    const bool wide = whole && a.D % (VEC * 8 / bits_of_values(KIND)) == 0;
    if (a.D > 32 * FEW_PER_LANE)
        return wide && p.queries > 1 ? launch_fma<T, VEC, 4, MANY_PER_LANE>(a, p, stream)
                                     : launch_fma<T, 1, 1, MANY_PER_LANE>(a, p, stream);
    if (p.queries == 1) return wide ? launch_fma<T, VEC, 1>(a, p, stream) : launch_fma<T, 1, 1>(a, p, stream);
    return wide ? launch_fma<T, VEC, 8>(a, p, stream) : launch_fma<T, 1, 8>(a, p, stream);
}

cudaError_t launch_rows(const kvc_decode_args& a, const plan& p, cudaStream_t stream) {
    if (a.rows.format == KVC_FORMAT_INT8) return launch_codes<int8_row, stored::int8>(a, p, stream);
    if (a.rows.format == KVC_FORMAT_K8V4) return launch_codes<k8v4_row, stored::k8v4>(a, p, stream);
    return with_dtype(dtype_of(a.rows), [&](auto element) { return launch_pieces<decltype(element)>(a, p, stream); });
}

cudaError_t launch_probabilities(const kvc_decode_args& a, plan p, cudaStream_t stream) {
    p.tiles = static_cast<int>(ceil_div(p.queries, SOFTMAX_QUERIES));
    unsigned blocks = 0;
    KVC_TRY(resident_blocks<probabilities_kernel>(blocks, THREADS, 0, p.rows * p.row_pieces * p.tiles));
    KVC_LAUNCH(probabilities_kernel, blocks, THREADS, 0, stream, a, p, scratch_of(a, p));
    return cudaSuccess;
}

bool valid(const kvc_decode_args& a) {
    return a.B >= 0 && a.Hq >= 0 && a.Hkv >= 0 && a.S >= 0 && a.D >= 1 && a.P >= 0 && a.pages >= 0 && a.blocks >= 0 &&
           (!a.value_table || (a.block_table && a.value_blocks >= 0 && a.value_pages >= 0)) &&
           (!a.probabilities || (a.S == 1 && a.columns >= 0 && a.sinks == 0)) && a.sinks >= 0 &&
           a.D <= KVC_CUDA_MAX_HEAD_DIM && scale_is_good(a.scale, a.softcap) &&
           dtype_known(a.q.dtype) && valid_format(a.rows, a.D);
}

bool empty(const kvc_decode_args& a) { return a.B == 0 || a.Hq == 0 || a.S == 0; }

bool fits(const kvc_decode_args& a) {
    return a.Hkv > 0 && a.Hq % a.Hkv == 0 && !(a.block_table && (a.P & (a.P - 1)));
}

}  // namespace

extern "C" int64_t kvc_cuda_decode_scratch_bytes(const kvc_decode_args* args) {
    if (!valid(*args) || empty(*args) || !fits(*args)) return 0;
    const plan p = plan_of(*args);
    const int64_t bytes = p.bytes_list + p.bytes_first + p.bytes_count + p.bytes_statistics + p.bytes_values +
                          p.bytes_groups + p.bytes_done;
    const int64_t of_prefill = prefill_may_take(*args) ? prefill_scratch_bytes(*args) : 0;
    return bytes > of_prefill ? bytes : of_prefill;
}

cudaError_t decode_listed(const kvc_decode_args& a, cudaStream_t stream) {
    plan p = plan_of(a);
    while (p.slab > 0) {
        p.wide_q = aligned_16(a.q);
        const scratch s = scratch_of(a, p);
        if (p.first > 0) KVC_LAUNCH(plan_kernel, 1, PLAN_THREADS, 0, stream, a, p, s);
        if (p.row_pieces > 0) KVC_TRY(launch_rows(a, p, stream));
        if (!p.fused) {
            const auto join = a.probabilities ? join_kernel<true> : join_kernel<false>;
            KVC_LAUNCH(join, static_cast<unsigned>(p.rows * p.queries), JOIN_THREADS, 0, stream, a, p, s);
        }
        if (a.probabilities && p.row_pieces > 0) KVC_TRY(launch_probabilities(a, p, stream));
        p = plan_of(a, p.first + p.slab);
    }
    return cudaSuccess;
}

extern "C" cudaError_t kvc_cuda_decode(const kvc_decode_args* args, cudaStream_t stream) {
    const kvc_decode_args& a = *args;
    if (!valid(a)) return cudaErrorInvalidValue;
    if (empty(a)) return cudaSuccess;
    if (!fits(a)) return cudaErrorInvalidValue;
    if (!a.out || !a.lse || !a.q.data || !a.end || !a.scratch) return cudaErrorInvalidValue;
    if (a.pages > 0 && a.P > 0 && !rows_are_there(&a.rows)) return cudaErrorInvalidValue;
    if (prefill_takes(a)) return decode_prefill(a, stream);
    const plan p = plan_of(a);
    if (!fits_grids(p)) return cudaErrorInvalidValue;
    KVC_LAUNCH(plan_kernel, 1, PLAN_THREADS, 0, stream, a, p, scratch_of(a, p));
    return decode_listed(a, stream);
}
