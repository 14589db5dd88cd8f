#include "common.h"

static Tensor rope(const Tensor& x, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& positions,
                   bool inverse) {
    const kvc_view in = view_of(x, "x");
    const int64_t B = x.size(0), H = x.size(1), T = x.size(2), D = x.size(3);
    check_array(cos, x, ScalarType::Float, {-1, -1}, "cos");
    check_array(sin, x, ScalarType::Float, {cos.size(0), cos.size(1)}, "sin");
    Tensor out = torch::stable::new_empty(x, {B, H, T, D});
    const kvc_rope_args args = {
        .out = view_of(out, "out"),
        .x = in,
        .cos = static_cast<const float*>(cos.const_data_ptr()),
        .sin = static_cast<const float*>(sin.const_data_ptr()),
        .positions = int_array(positions, x, {B, T}, "positions"),
        .B = B, .H = H, .T = T, .D = D,
        .rotary_dim = 2 * cos.size(1),
        .table_rows = cos.size(0),
        .inverse = inverse,
    };
    run("rope", x, [&] { return kvc_rope(&args, torch_parallel_for); }, KVC_CUDA_CALL(kvc_cuda_rope(&args, stream)), [&] {
        find_outside("rope", "positions", args.positions, B * T, 0, args.table_rows - 1, "last row of cos and sin", T);
    });
    return out;
}

KVC_REGISTER(rope, "rope(Tensor x, Tensor cos, Tensor sin, Tensor? positions, bool inverse) -> Tensor")
