#include <algorithm>

#include "common.h"

static Tensor window_scores(const Tensor& queries, const Tensor& keys, const std::optional<Tensor>& lengths,
                            double scale, int64_t reduce, int64_t pool, int64_t kernel_size, int64_t skip_last,
                            int64_t mask_first, int64_t mask_last, const std::optional<Tensor>& sink_logits,
                            double softcap) {
    const kvc_view q = view_of(queries, "queries"), k = view_of(keys, "keys");
    const int64_t B = queries.size(0), Hq = queries.size(1), W = queries.size(2), D = queries.size(3);
    const int64_t Hkv = keys.size(1), T = keys.size(2);
    check_device(keys, queries, "keys");
    KVC_CHECK(keys.size(0) == B && keys.size(3) == D && Hkv > 0, "keys must be [B, Hkv, T, D] with the queries' B and D");
    KVC_CHECK(W >= 1, "queries must hold at least 1 token, got ", W);
    KVC_CHECK(W <= T, "keys must be at least as many as the window's ", W, " queries, got ", T);
    KVC_CHECK(skip_last >= 0 && skip_last < T, "skip_last must be between 0 and T - 1 = ", T - 1, ", got ",
                    skip_last);
    KVC_CHECK(reduce >= 0 && reduce <= KVC_REDUCE_MAX && pool >= 0 && pool <= KVC_POOL_MAX,
                    "reduce and pool must be values of kvc_reduce and kvc_pool");
    Tensor scores = torch::stable::new_empty(queries, {B, Hkv, T - skip_last}, ScalarType::Float);
    if (queries.numel() == 0) torch::stable::zero_(scores);  // no kernel writes anything then
    kvc_window_scores_args args = {
        .scores = static_cast<float*>(scores.mutable_data_ptr()),
        .q = q,
        .k = k,
        .lengths = int_array(lengths, queries, {B}, "lengths"),
        .scratch = nullptr,
        .B = B, .Hq = Hq, .Hkv = Hkv, .W = W, .T = T, .D = D,
        .scale = static_cast<float>(scale),
        .reduce = static_cast<kvc_reduce>(reduce),
        .pool = static_cast<kvc_pool>(pool),
        .kernel_size = kernel_size, .skip_last = skip_last, .mask_first = mask_first, .mask_last = mask_last,
        .softcap = static_cast<float>(softcap),
        .sink_logits = sinks_array(sink_logits, queries, Hq),
    };
    Tensor scratch = scratch_for(queries, KVC_SCRATCH_BYTES(queries, window_scores, &args));
    args.scratch = scratch.mutable_data_ptr();
    run("window_scores", queries, [&] { return kvc_window_scores(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_window_scores(&args, stream)),
        [&] { find_outside("window_scores", "lengths", args.lengths, B, std::max(W, skip_last), T, "T"); });
    return scores;
}

KVC_REGISTER(window_scores,
             "window_scores(Tensor queries, Tensor keys, Tensor? lengths, float scale, int reduce, int pool, "
             "int kernel_size, int skip_last, int mask_first, int mask_last, Tensor? sink_logits=None, "
             "float softcap=0.) -> Tensor")
