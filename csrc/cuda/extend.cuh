// How rows grow: pages are handed out by one block, by prefix sums over the rows, so that the same call gives the same
// pages.
#pragma once
#include "page_table.cuh"

namespace {

struct growth {
    int64_t length, added;  // slots before, and new ones
    int32_t shared;         // the page that the row copies, or -1
    int pages;              // how many it takes
    bool valid;
};

// Of a row of `length` slots that gets `added` more. touches: it writes to the page of its last slot.
__device__ inline growth growth_by(const kvc_page_table& table, int64_t row, int64_t length, int64_t added, bool touches) {
    growth g = {length, added, -1, 0, false};
    if (length < 0 || added < 0 || length + added > table.blocks * table.P) return g;
    g.valid = true;
    g.pages = static_cast<int>(pages_for(table, length + added) - pages_for(table, length));
    if (touches) {
        const int32_t last = *entry(table, row, quotient(length - 1, table.P));
        g.valid = page_exists(table, last);
        if (g.valid && table.page_refs[last] > 1) {
            g.shared = last;
            g.pages++;
        }
    }
    return g;
}

// A whole block, all of its threads: takes the pages of all rows and writes table and lengths, or sets *refused. objects:
// whether this thread knows why not. growth_of: of a row; note: keeps what is to be known of a row that has grown; shared_of:
// the page that it copies, as noted. What the block wrote it sees behind a barrier.
template <class GrowthOf, class Note, class SharedOf>
__device__ inline void grow(const kvc_page_table& table, int32_t* refused, bool objects, GrowthOf growth_of, Note note,
                            SharedOf shared_of) {
    int own = 0;
    for (int64_t row = threadIdx.x; row < table.R; row += blockDim.x) {
        const growth g = growth_of(row);
        own += g.pages;
        objects |= !g.valid;
    }
    if (!can_take(table, own, objects, refused)) return;
    int64_t held = free_pages(table);
    for (int64_t first = 0; first < table.R; first += blockDim.x) {
        const int64_t row = first + threadIdx.x;
        const growth g = row < table.R ? growth_of(row) : growth{0, 0, -1, 0, false};
        int total;
        int64_t place = held - 1 - scan_block(g.pages, &total);
        held -= total;
        if (row >= table.R) continue;
        int64_t block = pages_for(table, g.length);
        if (g.shared >= 0) block--;
        for (int i = 0; i < g.pages; i++) *entry(table, row, block + i) = take_page(table, place--);
        note(row, g);
        table.lengths[row] = static_cast<int32_t>(g.length + g.added);
    }
    __syncthreads();
    if (threadIdx.x == 0) table.free_count[0] = static_cast<int32_t>(held);
    __syncthreads();
    for (int64_t row = threadIdx.x; row < table.R; row += blockDim.x)
        if (shared_of(row) >= 0) give_up_page(table, shared_of(row));
}

__device__ inline int64_t count_of(const kvc_append_tokens_args& a, int64_t row) {
    return a.counts ? a.counts[row] : a.S;
}

__device__ inline growth growth_of(const kvc_append_tokens_args& a, int64_t row) {
    const int64_t length = a.table.lengths[row], count = count_of(a, row);
    return growth_by(a.table, row, length, count > a.S ? -1 : count, count > 0 && remainder_of(length, a.table.P) != 0);
}

// Whether extend_rows would refuse, where no thread objects; a whole block asks.
__device__ inline bool lacks_room(const kvc_append_tokens_args& a) {
    int own = 0;
    bool objects = false;
    for (int64_t row = threadIdx.x; row < a.table.R; row += blockDim.x) {
        const growth g = growth_of(a, row);
        own += g.pages;
        objects |= !g.valid;
    }
    return !could_take(a.table, own, objects);
}

// The rows of an append; scratch [R + 1]: the page that each row copies (or -1), and whether the call is refused. objects: as
// in grow.
__device__ inline void extend_rows(const kvc_append_tokens_args& a, bool objects = false) {
    const kvc_page_table& table = a.table;
    grow(
        table, a.scratch + table.R, objects, [&](int64_t row) { return growth_of(a, row); },
        [&](int64_t row, const growth& g) { a.scratch[row] = g.shared; }, [&](int64_t row) { return a.scratch[row]; });
}

}  // namespace
