// The block that begins a step of rows that keep their tokens. What it waits for are loads, each of which takes a trip to
// memory: three, one behind the other, where a lane knows a row (length; page of the newest slot; how often that is named),
// and for 40 heads and 32,768 keys five where a warp rotates two heads and looks at its part of the table; then one barrier.
//
// A lane of the last warps (growers) knows a row: how many pages and pieces it takes. Meanwhile the other warps look for
// missing pages, rotate the queries, whose positions follow from the lengths of before, and lay the new tokens ready. Free
// pages are fetched before anybody knows that he wants one. Behind the barrier every warp knows all that it needs: the
// pages that were taken are written, and nobody reads them again. Where a call is refused or takes many pages, and with more
// rows than QUICK_ROWS, extend_rows and list_pieces do it.
#pragma once
#include "paged_step.cuh"

namespace {

constexpr int BEGIN_THREADS = 768, BEGIN_WARPS = BEGIN_THREADS / 32, QUICK_ROWS = BEGIN_THREADS / 2;
constexpr int STAGED_BYTES = 16 * 1024;  // of new tokens that lie ready
constexpr int OBJECTS = 1, NO_FREE_PAGE = 2, SHARES = 4;  // what a warp has found

// Of every row, by the lane that knows it, and of every warp.
struct noted_rows {
    int length[QUICK_ROWS];        // before
    int begin[QUICK_ROWS];         // of what is read
    int last[QUICK_ROWS];          // page of the newest slot
    int copied[QUICK_ROWS];        // page of which the row takes a copy, or -1
    int first_new[QUICK_ROWS];     // block of the row from which on its pages are new
    int taken_before[QUICK_ROWS];  // pages taken by rows of the same warp before it
    int listed[QUICK_ROWS], listed_before[QUICK_ROWS];  // pieces
    int free_pages[QUICK_ROWS];    // those that are taken first
    int taken_of[BEGIN_WARPS], listed_of[BEGIN_WARPS], found_by[BEGIN_WARPS];
    int held;  // free pages
};

// Sum over the lanes up to this one.
__device__ inline int scan_warp(int value) {
    KVC_UNROLL
    for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(FULL_WARP, value, step);
        if (static_cast<int>(threadIdx.x % 32) >= step) value += below;
    }
    return value;
}

// Head `item` of the queries, then of the new tokens.
struct head_of_step {
    bool query;
    int own, b, h, s;
};

__device__ inline head_of_step head_at(const kvc_step& a, int item, int queries) {
    head_of_step x = {item < queries, item < queries ? item : item - queries, 0, 0, 0};
    const int heads = static_cast<int>(x.query ? a.Hq : a.Hkv), S = static_cast<int>(a.S);
    const int all = S == 1 ? x.own : static_cast<int>(quotient(x.own, S));
    x.s = x.own - all * S;
    x.b = a.B == 1 ? 0 : static_cast<int>(quotient(all, heads));
    x.h = all - x.b * heads;
    return x;
}

// Queries to where decode finds them, new tokens to `staged`, by a warp; the rows have not grown.
__device__ inline void prepare_head(const kvc_paged_step_args& args, const placing& p, const head_of_step& x, void* staged) {
    const kvc_step& a = args.step;
    const kvc_view& from = x.query ? a.q : a.k;
    const int64_t first = x.b * a.Hkv, before = a.table.lengths[first], at = (x.query ? 1 : 2) * x.own * a.D;
    turn_head(a, from, row_at(from, x.b, x.h, x.s), x.query ? p.q : staged, at,
              before + (args.shift ? args.shift[first] : 0) + x.s, -1);
    if (!x.query) copy_head(a.v.data, row_at(a.v, x.b, x.h, x.s), staged, at + a.D, a.k.dtype, a.D);
}

// A whole warp: the notes of `row` by each of its lanes, which returns what it has found.
__device__ inline int note_row(const kvc_paged_step_args& args, const kvc_decode_args& decode, const plan& pieces, int row,
                               noted_rows& rows) {
    const kvc_page_table& table = args.step.table;
    const int S = static_cast<int>(args.step.S), shift = pieces.page_shift, inside = (1 << shift) - 1;
    const bool here = row < table.R;
    const int held = static_cast<int>(free_pages(table));
    const int length = here ? table.lengths[row] : 0, begin = here && args.begin && args.begin[row] > 0 ? args.begin[row] : 0;
    const bool valid = here && length >= 0 && length + args.step.S <= table.blocks * table.P;
    const bool touches = valid && (length & inside) != 0;
    const int32_t last = touches ? *entry(table, row, length >> shift) : -1;
    const int place = held - 1 - row;
    const int32_t candidate = place >= 0 ? table.free_pages[place] : -1;
    const bool there = page_exists(table, last);
    const bool shared = there && table.page_refs[last] > 1;
    int found = place >= 0 && !page_exists(table, candidate) ? NO_FREE_PAGE : 0;
    if (here && (!valid || (touches && !there))) found |= OBJECTS;
    if (shared) found |= SHARES;
    int first_new = 0, pages = 0, listed = 0;
    if (valid) {
        first_new = static_cast<int>((static_cast<unsigned>(length) + inside) >> shift) - shared;
        pages = static_cast<int>((static_cast<unsigned>(length) + S + inside) >> shift) - first_new;
        listed = static_cast<int>(pieces_in(int64_t{end_at(decode, pieces, length + S)} - begin));
    }
    const int taken = scan_warp(pages), all = scan_warp(listed), warp = threadIdx.x / 32;
    if (row == 0) rows.held = held;
    rows.length[row] = length, rows.begin[row] = begin, rows.last[row] = last, rows.copied[row] = shared ? last : -1;
    rows.first_new[row] = first_new, rows.taken_before[row] = taken - pages, rows.free_pages[row] = candidate;
    rows.listed[row] = listed, rows.listed_before[row] = all - listed;
    if (threadIdx.x % 32 == 31) rows.taken_of[warp] = taken, rows.listed_of[warp] = all;
    return found;
}

// The whole block: what begins the step where no call is refused and the rows take few pages; false where these are not
// so, and the rows as they were, or more than QUICK_ROWS. served: heads up to there need nothing more, of `heads`.
__device__ inline bool begins_quickly(const kvc_paged_step_args& args, const placing& p, const kvc_decode_args& decode,
                                      const plan& pieces, const scratch& s, int heads, int& served, bool& objects) {
    __shared__ noted_rows rows;
    __shared__ uint4 staged[STAGED_BYTES / sizeof(uint4)];
    const kvc_step& a = args.step;
    const kvc_page_table& table = a.table;
    const int R = static_cast<int>(table.R), lane = threadIdx.x % 32, warp = threadIdx.x / 32, shift = pieces.page_shift;
    const int growers = (R + 31) / 32, workers = BEGIN_WARPS - growers;
    const int queries = heads ? static_cast<int>(a.B * a.Hq * a.S) : 0;
    const bool stages = 2 * (heads - queries) * a.D * (a.k.dtype == KVC_F32 ? 4 : 2) <= STAGED_BYTES;

    int found = 0;
    if (warp >= workers) {
        found = note_row(args, decode, pieces, threadIdx.x - 32 * workers, rows);
    } else {
        KVC_ROLLED
        for (int item = warp; item < (stages ? heads : queries); item += workers)
            prepare_head(args, p, head_at(a, item, queries), staged);
        if (misses_page<16>(table, args.begin, share_of(warp, workers, R))) found = OBJECTS;
        if (lane == 0) rows.taken_of[warp] = rows.listed_of[warp] = 0;
    }
    KVC_UNROLL
    for (int step = 16; step > 0; step /= 2) found |= __shfl_xor_sync(FULL_WARP, found, step);
    if (lane == 0) rows.found_by[warp] = found;
    __syncthreads();

    // Every warp has the sums of all
    const int of = lane < BEGIN_WARPS ? lane : 0, taken = lane < BEGIN_WARPS ? rows.taken_of[of] : 0;
    const int listed = lane < BEGIN_WARPS ? rows.listed_of[of] : 0, held = rows.held;
    const int taken_through = scan_warp(taken), listed_through = scan_warp(listed);
    found = rows.found_by[of];
    KVC_UNROLL
    for (int step = 16; step > 0; step /= 2) found |= __shfl_xor_sync(FULL_WARP, found, step);
    const int needed = __shfl_sync(FULL_WARP, taken_through, 31), count = __shfl_sync(FULL_WARP, listed_through, 31);
    served = queries;
    objects = (found & OBJECTS) != 0;
    if (objects || needed > held || needed > 32 * growers || (needed && found & NO_FREE_PAGE)) return false;
    if (stages) served = heads;
    const auto before_row = [&](int through, int of_warp, int row) {  // by a whole warp, of the same 32 rows
        return __shfl_sync(FULL_WARP, through - of_warp, workers + row / 32);
    };
    if (warp >= workers) {
        const int row = threadIdx.x - 32 * workers, place = before_row(taken_through, taken, row) + rows.taken_before[row];
        if (row < R) {
            const int length = rows.length[row] + static_cast<int>(a.S), first = rows.first_new[row];
            const int pages = static_cast<int>((static_cast<unsigned>(length) + (1u << shift) - 1) >> shift) - first;
            KVC_ROLLED
            for (int i = 0; i < pages; i++) {
                const int32_t page = rows.free_pages[place + i];
                *entry(table, row, first + i) = page;
                table.page_refs[page] = 1;
            }
            p.copied[row] = rows.copied[row];
            table.lengths[row] = length;
        }
        if (row == 0) {
            p.copied[R] = 0;
            *s.count = count;
            table.free_count[0] = held - needed;
        }
    } else if (stages) {
        KVC_ROLLED
        for (int item = warp; item < heads; item += workers) {  // what this warp has laid ready
            if (item < queries) continue;
            const head_of_step x = head_at(a, item, queries);
            const int row = x.b * static_cast<int>(a.Hkv) + x.h, slot = rows.length[row] + x.s;
            const int block = slot >> shift, inside = slot & ((1 << shift) - 1), fresh = block - rows.first_new[row];
            const int place = before_row(taken_through, taken, row) + rows.taken_before[row];
            const int32_t page = fresh < 0 ? rows.last[row] : rows.free_pages[place + fresh];
            if (x.s == 0 && rows.copied[row] >= 0) copy_shared(table, a.rows, rows.copied[row], page, inside, a.D);
            const int64_t at = (int64_t{page} << shift) + inside, from = 2 * x.own * a.D;
            if (stores_codes(a.rows)) {
                store_codes<256>(
                    a.rows, at, a.D, [&](int d) { return load_any(staged, a.k.dtype, from + d); },
                    [&](int d) { return load_any(staged, a.k.dtype, from + a.D + d); });
                continue;
            }
            copy_head(staged, from, a.rows.keys, at * a.D, a.k.dtype, a.D);
            copy_head(staged, from + a.D, a.rows.values, at * a.D, a.k.dtype, a.D);
        }
    }
    const row_share own = share_of(warp, BEGIN_WARPS, R);
    for (int row = own.first; row < R; row += own.stride) {
        const int first = before_row(listed_through, listed, row) + rows.listed_before[row];
        const int end = end_at(decode, pieces, rows.length[row] + static_cast<int>(a.S));
        list_row(decode, pieces, s, row, first, rows.listed[row], 0, rows.begin[row], end, own.part, own.parts);
    }
    if (found & SHARES || served < heads) __syncthreads();  // the rows have grown
    if (found & SHARES)
        for (int row = threadIdx.x; row < R; row += BEGIN_THREADS)
            if (rows.copied[row] >= 0) give_up_page(table, rows.copied[row]);
    return true;
}

// A whole block of BEGIN_THREADS, all of its threads: everything that begins the step. heads: those of queries and new tokens
// that it serves too, all or none.
__device__ inline void begin_step(const kvc_paged_step_args& args, const placing& p, const kvc_decode_args& decode,
                                  const plan& pieces, const scratch& s, int heads) {
    const kvc_step& a = args.step;
    const bool quick = a.table.R <= QUICK_ROWS;
    int served = 0;
    bool objects = false;
    if (!quick) objects = misses_page(a.table, args.begin);
    if (!quick || !begins_quickly(args, p, decode, pieces, s, heads, served, objects)) {
        extend_rows(append_of(a, p.copied), objects);
        __syncthreads();
        list_pieces(decode, pieces, s);
    }
    KVC_ROLLED
    for (int item = served + threadIdx.x / 32; item < heads; item += BEGIN_WARPS) place_head<256>(a, args.shift, p, item);
}

}  // namespace
