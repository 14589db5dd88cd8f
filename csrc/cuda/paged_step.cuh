// What begins a step of rows that keep their tokens: the new ones rotated and appended. See kvc_paged_step in kvc_step.h.
#pragma once
#include "extend.cuh"
#include "rows.cuh"

namespace {

struct placing {
    int32_t* copied;  // [R + 1]
    void* q;          // rotated
};

// The first parts of the step's scratch; *bytes: as kvc_part_of.
inline placing placing_of(const kvc_step& a, int64_t* bytes) {
    int32_t* copied = kvc_ints_of(a.scratch, bytes, a.table.R + 1);
    return {copied, kvc_part_of(a.scratch, bytes, kvc_step_query_bytes(&a))};
}

// The rows' growth by the new tokens, whose arrays nobody reads.
__host__ __device__ inline kvc_append_tokens_args append_of(const kvc_step& a, int32_t* copied) {
    kvc_append_tokens_args append = {};
    append.table = a.table, append.scratch = copied, append.heads = a.Hkv, append.S = a.S;
    return append;
}

// Head `item` of the queries, then of the new tokens, by a warp; the rows have grown. shift: of kvc_paged_step_args. MOST:
// as in store_codes.
template <int MOST>
__device__ inline void place_head(const kvc_step& a, const int32_t* shift, const placing& p, int64_t item) {
    const kvc_page_table& table = a.table;
    const bool refused = p.copied[table.R];
    const int64_t queries = a.B * a.Hq * a.S, heads = item < queries ? a.Hq : a.Hkv, own = item < queries ? item : item - queries;
    const int64_t s = remainder_of(own, a.S), all = quotient(own, a.S), h = remainder_of(all, heads), b = quotient(all, heads);
    const int64_t first = b * a.Hkv;
    const int64_t start = table.lengths[first] - (refused ? 0 : a.S);
    const int64_t position = start + (shift ? shift[first] : 0) + s;
    if (item < queries) {
        turn_head(a, a.q, row_at(a.q, b, h, s), p.q, own * a.D, position, -1);
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
    turn_head(a, a.k, row_at(a.k, b, h, s), a.rows.keys, place * a.D, position, -1);
    copy_head(a.v.data, from, a.rows.values, place * a.D, a.k.dtype, a.D);
}

}  // namespace
