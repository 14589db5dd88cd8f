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

static void compact_rows_(Tensor rows, const Tensor& indices) {
    KVC_CHECK(rows.dim() == 3, "rows must have 3 dimensions [R, T, D], got ", rows.dim());
    const int64_t R = rows.size(0), T = rows.size(1), D = rows.size(2);
    KVC_CHECK((D <= 1 || rows.stride(2) == 1) && (T <= 1 || rows.stride(1) == D),
              "rows must be contiguous in its last two dimensions");
    check_array(indices, rows, ScalarType::Int, {R, -1}, "indices");
    const kvc_compact_rows_args args = {
        .rows = rows.mutable_data_ptr(),
        .indices = static_cast<const int32_t*>(indices.const_data_ptr()),
        .R = R, .T = T, .D = D,
        .k = indices.size(1),
        .row_stride = rows.stride(0),
        .element_bytes = kvc_dtype_bytes(dtype_of(rows, "rows")),
    };
    run("compact_rows_", rows, [&] { return kvc_compact_rows(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_compact_rows(&args, stream)), [&] {
            for (int64_t r = 0; r < R; r++) find_not_rising("compact_rows_", args.indices, args.k, r, args.k, T);
        });
}

KVC_REGISTER(select_topk, "select_topk(Tensor scores, int k, Tensor? lengths) -> Tensor")
KVC_REGISTER(compact_rows_, "compact_rows_(Tensor(a!) rows, Tensor indices) -> ()")
