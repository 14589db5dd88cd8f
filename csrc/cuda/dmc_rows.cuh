// How the rows of DMC's cache take new tokens: pages for the slots that open, then a warp's work on one row.
#pragma once
#include <type_traits>

#include "dmc_slots.cuh"
#include "extend.cuh"

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

// Slots that the row's new tokens open; -1 for numbers out of range.
__device__ inline int64_t opened_by(const kvc_dmc_append_args& a, const notes& n, int64_t row, int64_t length) {
    const int64_t count = count_of(a, row);
    if (length < 0 || length > a.table.blocks * a.table.P || count < 0 || count > a.S) return -1;
    int64_t opened = count > 0 && !continues(a, row, length, count);
    for (int64_t piece = 0; a.S > 1 && piece < n.count; piece++) opened += n.pieces[row * n.count + piece];
    return opened;
}

// A whole block, all of its threads: takes the pages of all rows, writes table, lengths and the notes about rows, which the
// block sees behind a barrier. objects: as in grow.
__device__ inline void grow_rows(const kvc_dmc_append_args& a, bool objects = false) {
    const kvc_page_table& table = a.table;
    const notes n = notes_of(a);
    grow(
        table, n.refused, objects,
        [&](int64_t row) {
            const int64_t length = table.lengths[row], count = count_of(a, row), opened = opened_by(a, n, row, length);
            const bool touches = opened >= 0 && (continues(a, row, length, count) || (count > 0 && length % table.P != 0));
            return growth_by(table, row, length, opened, touches);
        },
        [&](int64_t row, const growth& g) {
            n.rows[3 * row] = g.shared;
            n.rows[3 * row + 1] = static_cast<int32_t>(g.added);
            n.rows[3 * row + 2] = continues(a, row, g.length, count_of(a, row));
        },
        [&](int64_t row) { return n.rows[3 * row]; });
}

// A warp copies the slots of the page that the row shared until now.
__device__ inline void copy_page(const kvc_dmc_append_args& a, const notes& n, int64_t row) {
    const kvc_page_table& table = a.table;
    const int64_t before = table.lengths[row] - n.rows[3 * row + 1];
    const int32_t now = *entry(table, row, (before - 1) / table.P);
    copy_shared(table, a.rows, n.rows[3 * row], now, (before - 1) % table.P + 1, a.D);
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
    if (n.rows[3 * row] >= 0) copy_page(a, n, row);
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
