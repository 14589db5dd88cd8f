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
                          const Tensor& free_pages, const Tensor& free_count, const std::vector<Tensor>& arrays,
                          const std::optional<Tensor>& key_scales = {}, const std::optional<Tensor>& value_scales = {}) {
    Changed changed = {{"block_table", &block_table}, {"lengths", &lengths}, {"refs", &refs},
                       {"free_pages", &free_pages}, {"free_count", &free_count}};
    for (const Tensor& array : arrays) changed.add("arrays", array);
    changed.add("key_scales", key_scales);
    changed.add("value_scales", value_scales);
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

// Fails with what is wrong with an append of counts[r] (NULL: S) of S tokens to every row r.
inline void explain_append(const char* op, const kvc_page_table& table, const int32_t* counts, int64_t S) {
    explain_table(op, table);
    find_outside(op, "counts", counts, table.R, 0, S, "S");
    for (int64_t r = 0; r < table.R; r++) {
        const int64_t length = table.lengths[r], count = counts ? counts[r] : S;
        KVC_CHECK(length + count <= table.blocks * table.P, op, ": block_table must have room for ", length + count,
                  " slots in row ", r, " (", length, " held and ", count, " new), got ", table.blocks, " pages of ",
                  table.P);
        explain_pages(op, table, r, length / table.P * table.P);
    }
}

// New tokens in the dtype of `numbers`, [B, Hkv, S, D] with the D of pages of keys.
inline kvc_view tokens_of(const Tensor& x, const Tensor& numbers, const Tensor& pages, int64_t B, int64_t Hkv, int64_t S,
                          const char* name) {
    check_device(x, pages, name);
    KVC_CHECK(x.dim() == 4 && x.scalar_type() == numbers.scalar_type(), name, " must be [B, Hkv, S, D] in ",
              &numbers == &pages ? "the pages' dtype" : "the dtype of keys");
    KVC_CHECK(x.size(0) == B && x.size(1) == Hkv && x.size(2) == S && x.size(3) == pages.size(2), name,
              " must be [B, Hkv, S, D] with the pages' D");
    return view_of(x, name);
}

// Tables of cosines and sines, [rows, dim/2]; dim 0 without.
struct rotation {
    const float *cos, *sin;
    int64_t dim, rows;
};

inline rotation rotation_of(const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, const Tensor& like) {
    KVC_CHECK(cos.has_value() == sin.has_value(), "cos and sin must come together");
    if (!cos.has_value()) return {nullptr, nullptr, 0, 0};
    check_array(*cos, like, ScalarType::Float, {-1, -1}, "cos");
    check_array(*sin, like, ScalarType::Float, {cos->size(0), cos->size(1)}, "sin");
    return {static_cast<const float*>(cos->const_data_ptr()), static_cast<const float*>(sin->const_data_ptr()),
            2 * cos->size(1), cos->size(0)};
}
