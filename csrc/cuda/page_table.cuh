// The table of pages (kvc_page_table) on the device: what every kernel that appends to rows needs.
#pragma once
#include "kvc_cuda.h"
#include "types.cuh"

constexpr int MAX_WARPS = 32;

__device__ inline int32_t* entry(const kvc_page_table& table, int64_t row, int64_t block) {
    return table.block_table + row * table.blocks + block;
}

// Pages that so many slots take, at most those of a whole line of the table.
__device__ inline int64_t pages_for(const kvc_page_table& table, int64_t slots) {
    return quotient(slots + table.P - 1, table.P);
}

__device__ inline bool page_exists(const kvc_page_table& table, int32_t page) {
    return page >= 0 && page < table.pages;
}

__device__ inline int64_t free_pages(const kvc_page_table& table) {
    const int64_t count = table.free_count[0];
    return count < 0 ? 0 : count > table.pages ? table.pages : count;
}

__device__ inline void give_up_page(const kvc_page_table& table, int32_t page) {
    if (!page_exists(table, page) || atomicAdd(&table.page_refs[page], -1) != 1) return;
    const int place = atomicAdd(&table.free_count[0], 1);
    if (place >= 0 && place < table.pages) table.free_pages[place] = page;
}

// The page at `place` from the end of the free list, now named once.
__device__ inline int32_t take_page(const kvc_page_table& table, int64_t place) {
    const int32_t page = table.free_pages[place];
    if (page_exists(table, page)) table.page_refs[page] = 1;
    return page;
}

// What a warp has of rows that several share: every `stride`-th from `first` on, and `part` of `parts` of each.
struct row_share {
    int first, stride, part, parts;
};

__device__ inline row_share share_of(int warp, int warps, int rows) {
    if (rows >= warps) return {warp, warps, 0, 1};
    const int parts = static_cast<int>(quotient(warps, rows)), row = static_cast<int>(quotient(warp, parts));
    return {row, rows, warp - row * parts, parts};
}

// Whether this lane finds a page missing of the slots that its warp's share of the rows holds, from first[row] (NULL: 0) on.
// Of a row that does not fit its line no page is looked at: it finds no room. AT_A_TIME: entries that a lane has under way.
template <unsigned AT_A_TIME>
__device__ inline bool misses_page(const kvc_page_table& table, const int32_t* first, const row_share& own) {
    const unsigned lane = threadIdx.x % 32, stride = 32u * own.parts;
    unsigned worst = 0;  // page of any; a negative one is beyond all others
    bool any = false;
    for (int row = own.first; row < table.R; row += own.stride) {
        const int64_t length = table.lengths[row], from = first && first[row] > 0 ? quotient(first[row], table.P) : 0;
        const bool fits = length >= 0 && length <= table.blocks * table.P;
        const unsigned end = fits ? static_cast<unsigned>(pages_for(table, length)) : 0;
        const int32_t* line = entry(table, row, 0);
        KVC_ROLLED
        for (unsigned block = static_cast<unsigned>(from) + 32 * own.part + lane; block < end; block += AT_A_TIME * stride) {
            unsigned pages[AT_A_TIME];
            KVC_UNROLL
            for (unsigned i = 0; i < AT_A_TIME; i++) {  // past the last one: that once more
                const unsigned at = block + i * stride;
                pages[i] = static_cast<unsigned>(line[at < end ? at : end - 1]);
            }
            KVC_UNROLL
            for (unsigned i = 0; i < AT_A_TIME; i++) worst = pages[i] > worst ? pages[i] : worst;
            any = true;
        }
    }
    return any && worst >= table.pages;
}

// The same of all rows, each thread's part of it, by a whole block.
__device__ inline bool misses_page(const kvc_page_table& table, const int32_t* first) {
    return misses_page<4>(table, first, share_of(threadIdx.x / 32, blockDim.x / 32, static_cast<int>(table.R)));
}

// Sum of `value` over the threads before this one; total: over all. Every thread of the block must call it.
__device__ inline int scan_block(int value, int* total) {
    __shared__ int sums[MAX_WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    int through = value;
    KVC_UNROLL
    for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(FULL_WARP, through, step);
        if (lane >= step) through += below;
    }
    if (lane == 31) sums[warp] = through;
    __syncthreads();
    int before = 0;
    *total = 0;
    for (int i = 0; i < warps; i++) {
        if (i < warp) before += sums[i];
        *total += sums[i];
    }
    __syncthreads();  // sums are free for the next call
    return before + through - value;
}

// Whether the free list serves `own` pages of each thread, all of which exist, and no thread objects.
__device__ inline bool could_take(const kvc_page_table& table, int own, bool objects) {
    int needed, objections;
    scan_block(own, &needed);
    const int64_t held = free_pages(table);
    for (int64_t i = threadIdx.x; i < needed && i < held; i += blockDim.x)
        objects |= !page_exists(table, table.free_pages[held - 1 - i]);
    scan_block(objects, &objections);
    return objections == 0 && needed <= held;
}

// The same; the verdict lies in *refused too, and is counted.
__device__ inline bool can_take(const kvc_page_table& table, int own, bool objects, int32_t* refused) {
    const bool fits = could_take(table, own, objects);
    if (threadIdx.x == 0) {
        *refused = !fits;
        if (!fits) table.free_count[1]++;
    }
    return fits;
}

// ---- host ----

inline bool valid_table(const kvc_page_table& table) {
    return table_sizes_are_good(&table) && table.R <= MAX_GRID_X && table_is_there(&table);
}

// Threads of the one block that hands out pages.
inline unsigned threads_for(int64_t items) { return items <= 128 ? 128 : items <= 512 ? 512 : 1024; }
