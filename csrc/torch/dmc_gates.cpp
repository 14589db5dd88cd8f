#include "common.h"

namespace {

float* floats(const Tensor& x) { return static_cast<float*>(x.mutable_data_ptr()); }

// A [B, H, T] tensor of any strides, as a view with D = 1.
kvc_view gates_of(const Tensor& x) {
    KVC_CHECK(x.dim() == 3, "logits must have 3 dimensions [B, H, T], got ", x.dim());
    return {const_cast<void*>(x.const_data_ptr()), dtype_of(x, "logits"), x.stride(0), x.stride(1), x.stride(2)};
}

std::tuple<Tensor, Tensor, Tensor> dmc_decisions(const Tensor& logits, const std::optional<Tensor>& noise, bool drawn,
                                                 int64_t seed, int64_t offset, int64_t first, int64_t sample,
                                                 int64_t token, double shift, double temperature, double scale,
                                                 double margin, bool hard) {
    const kvc_view x = gates_of(logits);
    const int64_t B = logits.size(0), H = logits.size(1), T = logits.size(2);
    KVC_CHECK(temperature > 0, "temperature must be positive, got ", temperature);
    if (noise.has_value()) check_array(*noise, logits, ScalarType::Float, {B, H, T}, "noise");
    const auto empty = [&] { return torch::stable::new_empty(logits, {B, H, T}, ScalarType::Float); };
    Tensor alpha = empty(), merges = empty(), tempered = empty();
    const kvc_dmc_decisions_args args = {
        .alpha = floats(alpha), .hard = floats(merges), .tempered = floats(tempered),
        .x = x,
        .noise = noise.has_value() ? static_cast<const float*>(noise->const_data_ptr()) : nullptr,
        .B = B, .H = H, .T = T,
        .seed = seed, .offset = offset, .stream = first, .sample = sample, .token = token,
        .shift = static_cast<float>(shift),
        .temperature = static_cast<float>(temperature),
        .scale = static_cast<float>(scale),
        .margin = static_cast<float>(margin),
        .drawn = drawn,
        .only_hard = hard,
    };
    run("dmc_decisions", logits, [&] { return kvc_dmc_decisions(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_dmc_decisions(&args, stream)));
    return {alpha, merges, tempered};
}

Tensor dmc_importance(const Tensor& logits, int64_t kv_heads, double shift, double eps, int64_t reduce) {
    const kvc_view x = gates_of(logits);
    const int64_t B = logits.size(0), Hq = logits.size(1), T = logits.size(2);
    KVC_CHECK(kv_heads > 0 && Hq >= kv_heads && Hq % kv_heads == 0, "kv_heads must divide the ", Hq, " heads, got ",
              kv_heads);
    Tensor omega = torch::stable::new_empty(logits, {B, kv_heads, T}, ScalarType::Float);
    const kvc_dmc_importance_args args = {
        .omega = floats(omega),
        .x = x,
        .B = B, .Hq = Hq, .Hkv = kv_heads, .T = T,
        .shift = static_cast<float>(shift),
        .eps = static_cast<float>(eps),
        .reduce = static_cast<kvc_importance>(reduce),
    };
    run("dmc_importance", logits, [&] { return kvc_dmc_importance(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_dmc_importance(&args, stream)));
    return omega;
}

Tensor dmc_mask(const Tensor& tempered) {
    check_array(tempered, tempered, ScalarType::Float, {-1, -1, -1}, "tempered");
    const int64_t B = tempered.size(0), H = tempered.size(1), T = tempered.size(2);
    Tensor bias = torch::stable::new_empty(tempered, {B, H, T});
    const kvc_dmc_mask_args args = {
        .bias = floats(bias),
        .tempered = static_cast<const float*>(tempered.const_data_ptr()),
        .B = B, .H = H, .T = T,
    };
    run("dmc_mask", tempered, [&] { return kvc_dmc_mask(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_dmc_mask(&args, stream)));
    return bias;
}

}  // namespace

KVC_REGISTER(dmc_decisions,
             "dmc_decisions(Tensor logits, Tensor? noise, bool drawn, int seed, int offset, int stream, int sample, "
             "int token, float shift, float temperature, float scale, float margin, bool hard) -> "
             "(Tensor, Tensor, Tensor)")
KVC_REGISTER(dmc_importance,
             "dmc_importance(Tensor logits, int kv_heads, float shift, float eps, int reduce) -> Tensor")
KVC_REGISTER(dmc_mask, "dmc_mask(Tensor tempered) -> Tensor")
