// How rows grow when tokens are appended: pages are handed out by one block, by prefix sums over the rows, so that the same
// call gives the same pages.
#pragma once
#include "page_table.cuh"

namespace {

struct growth {
    int64_t length, count;
    int32_t shared;  // the page that the row copies, or -1
    int pages;       // how many it takes
    bool valid;
};

__device__ inline int64_t count_of(const kvc_append_tokens_args& a, int64_t row) {
    return a.counts ? a.counts[row] : a.S;
}

__device__ inline growth growth_of(const kvc_append_tokens_args& a, int64_t row) {
    const kvc_page_table& table = a.table;
    growth g = {table.lengths[row], count_of(a, row), -1, 0, false};
    if (g.length < 0 || g.count < 0 || g.count > a.S || g.length + g.count > table.blocks * table.P) return g;
    g.valid = true;
    g.pages = static_cast<int>(ceil_div(g.length + g.count, table.P) - ceil_div(g.length, table.P));
    if (g.count > 0 && g.length % table.P != 0) {
        const int32_t last = *entry(table, row, g.length / table.P);
        g.valid = page_exists(table, last);
        if (g.valid && table.page_refs[last] > 1) {
            g.shared = last;
            g.pages++;
        }
    }
    return g;
}

// A whole block, all of its threads: takes the pages of all rows, writes table and lengths; scratch [R + 1]: the page that
// each row copies (or -1), and whether the call is refused. What it wrote the block sees behind a barrier.
__device__ inline void extend_rows(const kvc_append_tokens_args& a) {
    const kvc_page_table& table = a.table;
    int own = 0;
    bool objects = false;
    for (int64_t row = threadIdx.x; row < table.R; row += blockDim.x) {
        const growth g = growth_of(a, row);
        own += g.pages;
        objects |= !g.valid;
    }
    if (!can_take(table, own, objects, a.scratch + table.R)) return;
    int64_t held = free_pages(table);
    for (int64_t first = 0; first < table.R; first += blockDim.x) {
        const int64_t row = first + threadIdx.x;
        const growth g = row < table.R ? growth_of(a, row) : growth{0, 0, -1, 0, false};
        int total;
        int64_t place = held - 1 - scan_block(g.pages, &total);
        held -= total;
        if (row >= table.R) continue;
        int64_t block = ceil_div(g.length, table.P);
        if (g.shared >= 0) block--;
        for (int i = 0; i < g.pages; i++) *entry(table, row, block + i) = take_page(table, place--);
        a.scratch[row] = g.shared;
        table.lengths[row] = static_cast<int32_t>(g.length + g.count);
    }
    __syncthreads();
    if (threadIdx.x == 0) table.free_count[0] = static_cast<int32_t>(held);
    __syncthreads();
    for (int64_t row = threadIdx.x; row < table.R; row += blockDim.x)
        if (a.scratch[row] >= 0) give_up_page(table, a.scratch[row]);
}

}  // namespace
