#include "common.h"

static Tensor layer_similarity(const Tensor& queries, const Tensor& keys, double scale, int64_t sinks, int64_t recent,
                               double softcap) {
    const kvc_view q = view_of(queries, "queries"), k = view_of(keys, "keys");
    const int64_t L = queries.size(0), Hq = queries.size(1), S = queries.size(2), D = queries.size(3);
    const int64_t Hkv = keys.size(1), T = keys.size(2);
    check_device(keys, queries, "keys");
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
        .softcap = static_cast<float>(softcap),
    };
    Tensor scratch = scratch_for(queries, KVC_SCRATCH_BYTES(queries, layer_similarity, &args));
    args.scratch = scratch.mutable_data_ptr();
    run("layer_similarity", queries, [&] { return kvc_layer_similarity(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_layer_similarity(&args, stream)));
    return sums;
}

KVC_REGISTER(layer_similarity,
             "layer_similarity(Tensor queries, Tensor keys, float scale, int sinks, int recent, float softcap=0.) -> Tensor")
