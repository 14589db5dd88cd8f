// The table of pages that ops append to, and what is wrong with it.
#pragma once
#include "common.h"

inline int32_t* ints(const Tensor& x) { return static_cast<int32_t*>(x.mutable_data_ptr()); }

// The five arrays of a table, on one device.
inline kvc_page_table table_of(const Tensor& block_table, const Tensor& lengths, const Tensor& refs,
                               const Tensor& free_pages, const Tensor& free_count, int64_t P) {
    check_array(block_table, block_table, ScalarType::Int, {-1, -1}, "block_table");
    check_array(lengths, block_table, ScalarType::Int, {block_table.size(0)}, "lengths");
    check_array(refs, block_table, ScalarType::Int, {-1}, "refs");
    check_array(free_pages, block_table, ScalarType::Int, {refs.size(0)}, "free_pages");
    check_array(free_count, block_table, ScalarType::Int, {2}, "free_count");
    KVC_CHECK(P >= 1, "page_size must be at least 1, got ", P);
    return {
        .block_table = ints(block_table), .lengths = ints(lengths), .page_refs = ints(refs),
        .free_pages = ints(free_pages), .free_count = ints(free_count),
        .R = block_table.size(0), .blocks = block_table.size(1), .P = P, .pages = refs.size(0),
    };
}

// The table's arrays, which ops change, and some others.
inline Changed changed_of(const Tensor& block_table, const Tensor& lengths, const Tensor& refs,
                          const Tensor& free_pages, const Tensor& free_count, const std::vector<Tensor>& arrays) {
    Changed changed = {{"block_table", &block_table}, {"lengths", &lengths}, {"refs", &refs},
                       {"free_pages", &free_pages}, {"free_count", &free_count}};
    for (const Tensor& array : arrays) changed.add("arrays", array);
    return changed;
}

// Fails with what is out of range in the table itself.
inline void explain_table(const char* op, const kvc_page_table& table) {
    find_outside(op, "lengths", table.lengths, table.R, 0, table.blocks * table.P, "slots in a row of block_table");
    find_outside(op, "free_count", table.free_count, 1, 0, table.pages, "pages");
    find_outside(op, "free_pages", table.free_pages, table.free_count[0], 0, table.pages - 1, "last page");
}

// Fails with the first page of row r past its first `slots` slots that is not there.
inline void explain_pages(const char* op, const kvc_page_table& table, int64_t r, int64_t slots) {
    const int64_t first = (slots + table.P - 1) / table.P, last = (table.lengths[r] + table.P - 1) / table.P - 1;
    find_missing_page(op, table.block_table, table.blocks, r, first, last, table.pages);
}
