// The tails of DMC's rows, which two ops change.
#pragma once
#include "page_table.h"

struct tail_arrays {
    float *k, *v, *w;
    int32_t* counts;
};

// Of R rows.
inline tail_arrays tail_of(const Tensor& keys, const Tensor& values, const Tensor& weights, const Tensor& counts,
                           const Tensor& like, int64_t R, int64_t window, int64_t D) {
    const int64_t N = window > 0 ? window : 1;
    check_array(keys, like, ScalarType::Float, {R, N, D}, "tail.keys");
    check_array(values, like, ScalarType::Float, {R, N, D}, "tail.values");
    check_array(weights, like, ScalarType::Float, {R, N}, "tail.weights");
    check_array(counts, like, ScalarType::Int, {R}, "tail.counts");
    const auto floats = [](const Tensor& x) { return static_cast<float*>(x.mutable_data_ptr()); };
    return {floats(keys), floats(values), floats(weights), ints(counts)};
}
