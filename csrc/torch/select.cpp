#include "common.h"

static Tensor select_topk(const Tensor& scores, int64_t k, const std::optional<Tensor>& lengths) {
    check_array(scores, scores, ScalarType::Float, {-1, -1}, "scores");
    const int64_t R = scores.size(0), T = scores.size(1);
    KVC_CHECK(k >= 0 && k <= T, "k must be between 0 and T = ", T, ", got ", k);
    Tensor indices = torch::stable::new_empty(scores, {R, k}, ScalarType::Int);
    const kvc_select_topk_args args = {
        .indices = static_cast<int32_t*>(indices.mutable_data_ptr()),
        .scores = static_cast<const float*>(scores.const_data_ptr()),
        .lengths = int_array(lengths, scores, {R}, "lengths"),
        .R = R, .T = T, .k = k,
    };
    run("select_topk", scores, [&] { return kvc_select_topk(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_select_topk(&args, stream)),
        [&] { find_outside("select_topk", "lengths", args.lengths, R, k, T, "T"); });
    return indices;
}

KVC_REGISTER(select_topk, "select_topk(Tensor scores, int k, Tensor? lengths) -> Tensor")
