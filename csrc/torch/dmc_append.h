// What the two ops that add tokens to DMC's rows have in common.
#pragma once
#include "page_table.h"
#include "rows.h"

// The tail and the new tokens of every row, checked; what says which of them merge, and where they stand, is left to the
// caller.
inline kvc_dmc_append_args append_of(const kvc_rows& rows, const Tensor& k_pages, const kvc_page_table& table,
                                     const Tensor& like, const Tensor& tail_keys, const Tensor& tail_values,
                                     const Tensor& tail_weights, const Tensor& tail_counts, const Tensor& keys,
                                     const Tensor& values, const rotation& turns, int64_t neuron, int64_t window) {
    // rows of codes take new tokens of any dtype, keys and values of one
    const Tensor& numbers = rows.key_scales ? keys : k_pages;
    const auto floats = [](const Tensor& x) { return static_cast<float*>(x.mutable_data_ptr()); };
    const int64_t B = keys.size(0), Hkv = keys.size(1), S = keys.size(2), D = k_pages.size(2);
    const int64_t N = window > 0 ? window : 1, R = table.R;
    KVC_CHECK(B * Hkv == R, "keys must be of ", R, " rows, got ", B * Hkv);
    check_array(tail_keys, like, ScalarType::Float, {R, N, D}, "tail.keys");
    check_array(tail_values, like, ScalarType::Float, {R, N, D}, "tail.values");
    check_array(tail_weights, like, ScalarType::Float, {R, N}, "tail.weights");
    check_array(tail_counts, like, ScalarType::Int, {R}, "tail.counts");
    return {
        .table = table,
        .rows = rows,
        .k = tokens_of(keys, numbers, k_pages, B, Hkv, S, "keys"),
        .v = tokens_of(values, numbers, k_pages, B, Hkv, S, "values"),
        .tail_k = floats(tail_keys), .tail_v = floats(tail_values), .tail_w = floats(tail_weights),
        .tail_counts = ints(tail_counts),
        .alpha = nullptr, .omega = nullptr,
        .cos = turns.cos, .sin = turns.sin,
        .positions = nullptr, .counts = nullptr,
        .scratch = nullptr,
        .B = B, .Hkv = Hkv, .S = S, .D = D,
        .rotary_dim = turns.dim, .table_rows = turns.rows,
        .neuron = neuron,
        .window = window,
    };
}
