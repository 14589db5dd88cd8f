// How the rows of DMC's cache take new tokens: pages for the slots that open, then a warp's work on one row.
#pragma once
#include <type_traits>

#include "dmc_slots.cuh"

namespace {


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
    const int64_t R = a.table.R, count = (a.S + KVC_DMC_PIECE - 1) / KVC_DMC_PIECE;
    return {a.scratch, a.scratch + 3 * R, a.scratch + (3 + count) * R, count};
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

// A whole block, all of its threads: takes the pages of all rows, writes table, lengths and the notes about rows, which the
// block sees behind a barrier.
__device__ inline void grow_rows(const kvc_dmc_append_args& a) {
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
    const int64_t first = a.S - count_of(a, row), end = (piece + 1) * KVC_DMC_PIECE < a.S ? (piece + 1) * KVC_DMC_PIECE : a.S;
    const bool continued = n.rows[3 * row + 2];
    if (n.rows[3 * row + 1] == 0 || end <= first) return;
    int earlier = 0;  // slots of the row's new tokens before this piece
    for (int64_t other = lane; other < piece; other += 32) earlier += n.pieces[row * n.count + other];
    KVC_UNROLL
    for (int step = 16; step > 0; step /= 2) earlier += __shfl_xor_sync(FULL_WARP, earlier, step);
    if (!continued && piece * KVC_DMC_PIECE > first) earlier++;
    int64_t place = a.table.lengths[row] - n.rows[3 * row + 1] + earlier;
    int64_t s = piece * KVC_DMC_PIECE > first ? piece * KVC_DMC_PIECE : first;
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

// A warp: what comes in a row before all slots that open, as it reads the tail that they write; and if the row is one
// piece, they too. keys: float [32 * COLUMNS] of shared memory of the warp's own.
template <int COLUMNS, class X>
__device__ inline void settle_row(const kvc_dmc_append_args& a, const notes& n, int64_t row, float* keys) {
    if (n.rows[3 * row] >= 0) copy_page<X>(a, n, row);
    if (n.rows[3 * row + 2]) {
        const int64_t place = a.table.lengths[row] - n.rows[3 * row + 1] - 1;
        continue_slot<COLUMNS, X>(a, row, place, keys);
    }
    if (n.count == 1) open_slots<COLUMNS, X>(a, n, row, 0, keys);
}

// ---- host ----

template <class Fn>
cudaError_t with_columns(int64_t D, Fn fn) {
    if (D <= 64) return fn(std::integral_constant<int, 2>{});
    if (D <= 128) return fn(std::integral_constant<int, 4>{});
    if (D <= 256) return fn(std::integral_constant<int, 8>{});
    return fn(std::integral_constant<int, 16>{});
}

}  // namespace
