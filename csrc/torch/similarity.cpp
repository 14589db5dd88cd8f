#include "common.h"

static Tensor layer_similarity(const Tensor& queries, const Tensor& keys, double scale, int64_t sinks, int64_t recent) {
    const kvc_view q = view_of(queries, "queries"), k = view_of(keys, "keys");
    const int64_t L = queries.size(0), Hq = queries.size(1), S = queries.size(2), D = queries.size(3);
    const int64_t Hkv = keys.size(1), T = keys.size(2);
    check_device(keys, queries, "keys");
    KVC_CHECK(queries.is_cpu(), "layer_similarity has no CUDA kernel; its arguments must be on the CPU");
    KVC_CHECK(keys.size(0) == L && keys.size(3) == D, "keys must be [L, Hkv, T, D] with the queries' L and D");
    KVC_CHECK(S <= T, "keys must be at least as many as the ", S, " queries, got ", T);
    Tensor sums = torch::stable::new_empty(queries, {Hq, L, L}, ScalarType::Double);
    kvc_layer_similarity_args args = {
        .sums = static_cast<double*>(sums.mutable_data_ptr()),
        .q = q,
        .k = k,
        .scratch = nullptr,
        .L = L, .Hq = Hq, .Hkv = Hkv, .S = S, .T = T, .D = D,
        .scale = static_cast<float>(scale),
        .sinks = sinks, .recent = recent,
    };
    Tensor scratch = torch::stable::new_empty(queries, {kvc_layer_similarity_scratch_bytes(&args)}, ScalarType::Byte);
    args.scratch = scratch.mutable_data_ptr();
    check_status(kvc_layer_similarity(&args, torch_parallel_for), "layer_similarity");
    return sums;
}

STABLE_TORCH_LIBRARY_FRAGMENT(kvcompress, m) {
    m.def("layer_similarity(Tensor queries, Tensor keys, float scale, int sinks, int recent) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(kvcompress, CPU, m) { m.impl("layer_similarity", TORCH_BOX(&layer_similarity)); }
