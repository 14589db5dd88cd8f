// What begins a step of rows that keep their tokens: the new ones rotated and appended. See kvc_paged_step in kvc_step.h.
#pragma once
#include "extend.cuh"
#include "rows.cuh"

namespace {

constexpr int64_t FEW_HEADS = 128;  // which the block that takes the pages rotates itself, a warp at a time

struct placing {
    int32_t* copied;  // [R + 1]
    void* q;          // rotated
};

// The first parts of a.scratch; *bytes: as kvc_part_of.
inline placing placing_of(const kvc_paged_step_args& a, int64_t* bytes) {
    placing p = {};
    p.copied = static_cast<int32_t*>(kvc_part_of(a.scratch, bytes, (a.table.R + 1) * 4));
    p.q = kvc_part_of(a.scratch, bytes, a.B * a.Hq * a.S * a.D * bytes_of(a.q.dtype));
    return p;
}

inline kvc_append_tokens_args append_of(const kvc_paged_step_args& a, const placing& p) {
    kvc_append_tokens_args append = {};
    append.table = a.table, append.scratch = p.copied, append.heads = a.Hkv, append.S = a.S;
    return append;
}

// Head `item` of the queries, then of the new tokens, by a warp; the rows have grown. MOST: as in store_codes.
template <int MOST>
__device__ inline void place_head(const kvc_paged_step_args& a, const placing& p, int64_t item) {
    const kvc_page_table& table = a.table;
    const bool refused = p.copied[table.R];
    const int64_t queries = a.B * a.Hq * a.S, heads = item < queries ? a.Hq : a.Hkv, own = item < queries ? item : item - queries;
    const int64_t s = remainder_of(own, a.S), all = quotient(own, a.S), h = remainder_of(all, heads), b = quotient(all, heads);
    const int64_t first = b * a.Hkv;
    const int64_t start = table.lengths[first] - (refused ? 0 : a.S);
    const int64_t position = start + (a.shift ? a.shift[first] : 0) + s;
    if (item < queries) {
        rotate_head(a.q, row_at(a.q, b, h, s), p.q, a.q.dtype, own * a.D, a.D, a.rotary_dim, a.cos, a.sin, position,
                    a.table_rows, -1);
        return;
    }
    if (refused) return;
    const int64_t row = first + h, before = table.lengths[row] - a.S, slot = before + s;
    if (s == 0 && p.copied[row] >= 0)
        copy_shared(table, a.rows, p.copied[row], *entry(table, row, quotient(before, table.P)), remainder_of(before, table.P), a.D);
    const int32_t page = *entry(table, row, quotient(slot, table.P));
    if (!page_exists(table, page)) return;
    const int64_t place = page * table.P + remainder_of(slot, table.P), from = row_at(a.v, b, h, s);
    if (stores_codes(a.rows)) {
        store_turned<MOST>(a, a.rows, row_at(a.k, b, h, s), from, position, place);
        return;
    }
    rotate_head(a.k, row_at(a.k, b, h, s), a.rows.keys, a.k.dtype, place * a.D, a.D, a.rotary_dim, a.cos, a.sin, position,
                a.table_rows, -1);
    copy_head(a.v.data, from, a.rows.values, place * a.D, a.k.dtype, a.D);
}

// ---- host ----

// Heads that the block which begins a step serves itself: a few, and none whose codes want more registers than it has for
// `most` elements.
inline int64_t heads_alone(const kvc_paged_step_args& a, int64_t heads, int64_t most) {
    return heads <= FEW_HEADS && !(stores_codes(a.rows) && a.D > most) ? heads : 0;
}

// Blocks of PLAN_THREADS that place so many heads.
inline unsigned place_blocks(int64_t heads) {
    const int64_t blocks = ceil_div(heads, PLACE_WARPS);
    return static_cast<unsigned>(blocks < MAX_GRID_X ? blocks : MAX_GRID_X);
}

inline bool valid_step(const kvc_paged_step_args& a) {
    return a.B >= 0 && a.Hq >= 0 && a.Hkv >= 0 && a.S >= 0 && a.D >= 1 && a.D <= KVC_CUDA_MAX_HEAD_DIM &&
           a.table.R == a.B * a.Hkv && (a.Hkv ? a.Hq % a.Hkv == 0 : a.Hq == 0) && a.rotary_dim >= 0 &&
           a.rotary_dim <= a.D && a.rotary_dim % 2 == 0 && valid_scale(a.scale, a.softcap) && valid_dtype(a.q.dtype) &&
           valid_dtype(a.k.dtype) && a.v.dtype == a.k.dtype && format_takes(a.rows, a.k.dtype, a.D) &&
           valid_table(a.table) && (a.table.P & (a.table.P - 1)) == 0;
}

inline bool empty_step(const kvc_paged_step_args& a) { return a.table.R == 0 || a.Hq == 0 || a.S == 0; }

inline bool has_pointers(const kvc_paged_step_args& a) {
    if (!a.out || !a.lse || !a.q.data || !a.k.data || !a.v.data || !a.scratch) return false;
    if (a.table.pages && !rows_there(a.rows)) return false;
    return !a.rotary_dim || !a.table_rows || (a.cos && a.sin);
}

}  // namespace
