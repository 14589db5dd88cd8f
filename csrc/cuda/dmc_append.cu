// DMC's cache at inference: see kvc_dmc_append in kvc.h.
//
// Must move: the new tokens in, 2*R*S*D*(bytes), every slot that they open or join out, 4*D*(1 to window) bytes of state
// per row in and out. A decode step (S = 1) is two launches of a few microseconds each; in a long prompt a warp takes the
// slots that open within one piece of a row. No two warps write the same slot, and none waits for another.
// A slot's tokens are taken one after the other, so that any chunks of a prompt give the same bits.
#include <type_traits>

#include "dmc_slots.cuh"

namespace {

constexpr int WARPS = 4;
constexpr int PIECE = KVC_DMC_PIECE;

// ---- decisions ----

// Whether the first of the row's new tokens joins what is there.
__device__ inline bool continues(const kvc_dmc_append_args& a, int64_t row, int64_t length, int64_t count) {
    return count > 0 && length > 0 && a.tail_counts[row] > 0 && wants_to_join(a, row, a.S - count);
}

// The caller's scratch.
struct notes {
    int32_t* rows;     // [R, 3]: the page that the row copies or -1, the slots that it opens, whether it continues one
    int32_t* pieces;   // [R, count]: slots opened in each piece of S, not counting the row's first token
    int32_t* refused;  // whether nothing is done
    int64_t count;     // pieces of a row
};

__host__ __device__ inline notes notes_of(const kvc_dmc_append_args& a) {
    const int64_t R = a.table.R, count = (a.S + PIECE - 1) / PIECE;
    return {a.scratch, a.scratch + 3 * R, a.scratch + (3 + count) * R, count};
}

// A warp per piece of a row.
__global__ __launch_bounds__(WARPS * 32) void count_kernel(const kvc_dmc_append_args a) {
    const notes n = notes_of(a);
    const int lane = threadIdx.x % 32;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(WARPS) + threadIdx.x / 32; i < a.table.R * n.count;
         i += gridDim.x * static_cast<int64_t>(WARPS)) {
        const int64_t row = i / n.count, piece = i % n.count * PIECE, first = a.S - count_of(a, row);
        int opened = 0;
        for (int64_t s = piece; s < piece + PIECE && s < a.S; s += 32) {
            const bool there = s + lane < piece + PIECE && s + lane < a.S && s + lane >= first;
            // the first token of the row is settled where the row's length is known
            opened += __popc(__ballot_sync(FULL_WARP, there && s + lane > first && !wants_to_join(a, row, s + lane)));
        }
        if (lane == 0) n.pieces[i] = opened;
    }
}

// ---- pages ----

struct growth {
    int64_t length, opened;
    int32_t shared;  // the page that the row copies, or -1
    int pages;       // how many it takes
    bool continues, valid;
};

__device__ inline growth growth_of(const kvc_dmc_append_args& a, const notes& n, int64_t row) {
    const kvc_page_table& table = a.table;
    growth g = {table.lengths[row], 0, -1, 0, false, false};
    const int64_t count = count_of(a, row);
    if (g.length < 0 || g.length > table.blocks * table.P || count < 0 || count > a.S) return g;
    g.continues = continues(a, row, g.length, count);
    g.opened = count > 0 && !g.continues;
    for (int64_t piece = 0; a.S > 1 && piece < n.count; piece++) g.opened += n.pieces[row * n.count + piece];
    if (g.length + g.opened > table.blocks * table.P) return g;
    g.valid = true;
    g.pages = static_cast<int>(ceil_div(g.length + g.opened, table.P) - ceil_div(g.length, table.P));
    if (g.continues || (count > 0 && g.length % table.P != 0)) {
        const int32_t last = *entry(table, row, (g.length - 1) / table.P);
        g.valid = page_exists(table, last);
        if (g.valid && table.page_refs[last] > 1) {
            g.shared = last;
            g.pages++;
        }
    }
    return g;
}

// One block: takes the pages of all rows, writes table, lengths and the notes about rows.
__global__ __launch_bounds__(MOST_THREADS) void grow_kernel(const kvc_dmc_append_args a) {
    const kvc_page_table& table = a.table;
    const notes n = notes_of(a);
    int own = 0;
    bool objects = false;
    for (int64_t row = threadIdx.x; row < table.R; row += blockDim.x) {
        const growth g = growth_of(a, n, row);
        own += g.pages;
        objects |= !g.valid;
    }
    if (!can_take(table, own, objects, n.refused)) return;
    int64_t held = free_pages(table);
    for (int64_t first = 0; first < table.R; first += blockDim.x) {
        const int64_t row = first + threadIdx.x;
        const growth g = row < table.R ? growth_of(a, n, row) : growth{0, 0, -1, 0, false, false};
        int total;
        int64_t place = held - 1 - scan_block(g.pages, &total);
        held -= total;
        if (row >= table.R) continue;
        int64_t block = ceil_div(g.length, table.P);
        if (g.shared >= 0) block--;
        for (int i = 0; i < g.pages; i++) *entry(table, row, block + i) = take_page(table, place--);
        n.rows[3 * row] = g.shared;
        n.rows[3 * row + 1] = static_cast<int32_t>(g.opened);
        n.rows[3 * row + 2] = g.continues;
        table.lengths[row] = static_cast<int32_t>(g.length + g.opened);
    }
    __syncthreads();
    if (threadIdx.x == 0) table.free_count[0] = static_cast<int32_t>(held);
    __syncthreads();
    for (int64_t row = threadIdx.x; row < table.R; row += blockDim.x)
        if (n.rows[3 * row] >= 0) give_up_page(table, n.rows[3 * row]);
}

// A warp copies the slots of the page that the row shared until now.
template <class X>
__device__ inline void copy_page(const kvc_dmc_append_args& a, const notes& n, int64_t row) {
    const kvc_page_table& table = a.table;
    const int64_t before = table.lengths[row] - n.rows[3 * row + 1];
    const int32_t now = *entry(table, row, (before - 1) / table.P);
    const int64_t from = n.rows[3 * row] * table.P * a.D, to = now * table.P * a.D;
    X *k = static_cast<X*>(a.k_pages), *v = static_cast<X*>(a.v_pages);
    if (page_exists(table, now)) {
        for (int64_t i = threadIdx.x % 32; i < ((before - 1) % table.P + 1) * a.D; i += 32) {
            k[to + i] = k[from + i];
            v[to + i] = v[from + i];
        }
    }
    __syncwarp();
}

// ---- slots ----

// The row's new tokens that join its newest slot, which is `place`.
template <int COLUMNS, class X>
__device__ inline void continue_slot(const kvc_dmc_append_args& a, int64_t row, int64_t place, float* keys) {
    const int lane = threadIdx.x % 32;
    slot_of_warp<COLUMNS> slot = {{}, {}, 0.0f, a.tail_counts[row]};
    if (!a.window) {
        slot.z = a.tail_w[row];
        KVC_UNROLL
        for (int i = 0; i < COLUMNS; i++) {
            const int64_t d = lane + 32 * i;
            slot.k[i] = d < a.D && d != a.neuron ? a.tail_k[row * a.D + d] : 0.0f;
            slot.v[i] = d < a.D ? a.tail_v[row * a.D + d] : 0.0f;
        }
    }
    run_slot<COLUMNS, X>(a, row, a.S - count_of(a, row), place, slot, keys);
}

// The slots that open in a piece of the row, to their ends.
template <int COLUMNS, class X>
__device__ inline void open_slots(const kvc_dmc_append_args& a, const notes& n, int64_t row, int64_t piece, float* keys) {
    const int lane = threadIdx.x % 32;
    const int64_t first = a.S - count_of(a, row), end = (piece + 1) * PIECE < a.S ? (piece + 1) * PIECE : a.S;
    const bool continued = n.rows[3 * row + 2];
    if (n.rows[3 * row + 1] == 0 || end <= first) return;
    int earlier = 0;  // slots of the row's new tokens before this piece
    for (int64_t other = lane; other < piece; other += 32) earlier += n.pieces[row * n.count + other];
    KVC_UNROLL
    for (int step = 16; step > 0; step /= 2) earlier += __shfl_xor_sync(FULL_WARP, earlier, step);
    if (!continued && piece * PIECE > first) earlier++;
    int64_t place = a.table.lengths[row] - n.rows[3 * row + 1] + earlier;
    int64_t s = piece * PIECE > first ? piece * PIECE : first;
    // what a slot of an earlier piece takes is passed over
    while (s < end) {
        const int64_t own = s + lane;
        const bool opens = own < end && (own == first ? !continued : !wants_to_join(a, row, own));
        const unsigned openers = __ballot_sync(FULL_WARP, opens);
        if (openers) {
            s += __popc((openers & (0u - openers)) - 1u);
            break;
        }
        s += 32;
    }
    while (s < end) {
        slot_of_warp<COLUMNS> slot = {{}, {}, 0.0f, 0};
        s = run_slot<COLUMNS, X>(a, row, s, place++, slot, keys);
    }
}

// A warp per row: what comes before all slots that open, as it reads the tail that they write; and if the row is one
// piece, they too.
template <int COLUMNS, class X>
__global__ __launch_bounds__(WARPS * 32) void rows_kernel(const kvc_dmc_append_args a) {
    __shared__ float keys[WARPS][32 * COLUMNS];
    const notes n = notes_of(a);
    const int64_t row = blockIdx.x * static_cast<int64_t>(WARPS) + threadIdx.x / 32;
    if (row >= a.table.R || *n.refused) return;
    if (n.rows[3 * row] >= 0) copy_page<X>(a, n, row);
    if (n.rows[3 * row + 2]) {
        const int64_t place = a.table.lengths[row] - n.rows[3 * row + 1] - 1;
        continue_slot<COLUMNS, X>(a, row, place, keys[threadIdx.x / 32]);
    }
    if (n.count == 1) open_slots<COLUMNS, X>(a, n, row, 0, keys[threadIdx.x / 32]);
}

// A warp per piece of a row.
template <int COLUMNS, class X>
__global__ __launch_bounds__(WARPS * 32) void pieces_kernel(const kvc_dmc_append_args a) {
    __shared__ float keys[WARPS][32 * COLUMNS];
    const notes n = notes_of(a);
    if (*n.refused) return;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(WARPS) + threadIdx.x / 32; i < a.table.R * n.count;
         i += gridDim.x * static_cast<int64_t>(WARPS))
        open_slots<COLUMNS, X>(a, n, i / n.count, i % n.count, keys[threadIdx.x / 32]);
}

// ---- host ----

bool valid(const kvc_dmc_append_args& a) {
    if (a.B < 0 || a.Hkv < 0 || a.S < 0 || a.S > INT32_MAX || a.table.R != a.B * a.Hkv) return false;
    if (a.D < 1 || a.D > KVC_CUDA_MAX_HEAD_DIM || a.neuron < -1 || a.neuron >= a.D) return false;
    if (a.rotary_dim < 0 || a.rotary_dim > a.D || a.rotary_dim % 2 || a.table_rows < 0) return false;
    if (a.window < 0 || a.window > KVC_DMC_MAX_WINDOW || (a.rotary_dim && !a.positions && a.S > a.table_rows)) return false;
    if (!valid_dtype(a.k.dtype) || a.v.dtype != a.k.dtype || !valid_table(a.table)) return false;
    if (a.table.R == 0 || a.S == 0) return true;
    if (!a.k.data || !a.v.data || !a.alpha || !a.omega || !a.tail_k || !a.tail_v || !a.tail_w || !a.tail_counts ||
        !a.scratch || (a.table.pages && (!a.k_pages || !a.v_pages)))
        return false;
    return a.rotary_dim == 0 || a.table_rows == 0 || (a.cos && a.sin);
}

unsigned grid_of(int64_t warps) {
    const int64_t blocks = ceil_div(warps, WARPS);
    return static_cast<unsigned>(blocks < MAX_GRID_X ? blocks : MAX_GRID_X);
}

template <class Fn>
cudaError_t with_columns(int64_t D, Fn fn) {
    if (D <= 64) return fn(std::integral_constant<int, 2>{});
    if (D <= 128) return fn(std::integral_constant<int, 4>{});
    if (D <= 256) return fn(std::integral_constant<int, 8>{});
    return fn(std::integral_constant<int, 16>{});
}

}  // namespace

extern "C" cudaError_t kvc_cuda_dmc_append(const kvc_dmc_append_args* args, cudaStream_t stream) {
    const kvc_dmc_append_args& a = *args;
    if (!valid(a)) return cudaErrorInvalidValue;
    if (a.table.R == 0 || a.S == 0) return cudaSuccess;
    const int64_t pieces = notes_of(a).count, R = a.table.R;
    if (a.S > 1) KVC_LAUNCH(count_kernel, grid_of(R * pieces), WARPS * 32, 0, stream, a);
    KVC_LAUNCH(grow_kernel, 1, threads_for(R), 0, stream, a);
    return with_dtype(a.k.dtype, [&](auto type) {
        using X = decltype(type);
        return with_columns(a.D, [&](auto columns) {
            constexpr int COLUMNS = decltype(columns)::value;
            KVC_LAUNCH((rows_kernel<COLUMNS, X>), grid_of(R), WARPS * 32, 0, stream, a);
            if (pieces > 1) KVC_LAUNCH((pieces_kernel<COLUMNS, X>), grid_of(R * pieces), WARPS * 32, 0, stream, a);
            return cudaSuccess;
        });
    });
}
