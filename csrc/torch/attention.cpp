#include "common.h"

namespace {

kvc_attention_args arguments(const Tensor& queries, const Tensor& keys, const Tensor& values,
                             const std::optional<Tensor>& key_bias, const std::optional<Tensor>& lengths,
                             const Tensor& out, const Tensor& lse, double scale, bool causal, int64_t window,
                             int64_t sinks, bool complement, const std::optional<Tensor>& sink_logits, double softcap) {
    const int64_t B = queries.size(0), Hq = queries.size(1), S = queries.size(2), D = queries.size(3);
    const int64_t Hkv = keys.size(1), T = keys.size(2);
    if (key_bias.has_value()) check_array(*key_bias, queries, ScalarType::Float, {B, Hkv, T}, "key_bias");
    return {
        .out = view_of(out, "out"),
        .q = view_of(queries, "queries"),
        .k = view_of(keys, "keys"),
        .v = view_of(values, "values"),
        .lse = static_cast<float*>(const_cast<void*>(lse.const_data_ptr())),
        .key_bias = key_bias.has_value() ? static_cast<const float*>(key_bias->const_data_ptr()) : nullptr,
        .lengths = int_array(lengths, queries, {B}, "lengths"),
        .B = B, .Hq = Hq, .Hkv = Hkv, .S = S, .T = T, .D = D,
        .window = window,
        .sinks = sinks,
        .scale = static_cast<float>(scale),
        .causal = causal,
        .complement = complement,
        .softcap = static_cast<float>(softcap),
        .sink_logits = sinks_array(sink_logits, queries, Hq),
    };
}

void check_same(const Tensor& x, const Tensor& like, const char* name) {
    check_device(x, like, name);
    KVC_CHECK(x.dim() == 4 && x.scalar_type() == like.scalar_type(), name, " must be [B, H, T, D] of one dtype");
    for (int64_t d = 0; d < 4; d++) KVC_CHECK(x.size(d) == like.size(d), name, " has another shape");
}

void check_keys(const Tensor& queries, const Tensor& keys, const Tensor& values) {
    KVC_CHECK(queries.dim() == 4 && keys.dim() == 4, "queries and keys must be [B, H, T, D]");
    check_device(keys, queries, "keys");
    KVC_CHECK(keys.scalar_type() == queries.scalar_type(), "keys must have the queries' dtype");
    KVC_CHECK(keys.size(0) == queries.size(0) && keys.size(3) == queries.size(3) && keys.size(1) > 0,
              "keys must be [B, Hkv, T, D] of at least one head");
    check_same(values, keys, "values");
}

std::tuple<Tensor, Tensor> attention(const Tensor& queries, const Tensor& keys, const Tensor& values,
                                     const std::optional<Tensor>& key_bias, const std::optional<Tensor>& lengths,
                                     double scale, bool causal, int64_t window, int64_t sinks, bool complement,
                                     const std::optional<Tensor>& sink_logits, double softcap) {
    check_keys(queries, keys, values);
    const int64_t B = queries.size(0), Hq = queries.size(1), S = queries.size(2);
    Tensor out = torch::stable::new_empty(queries, {B, Hq, S, queries.size(3)});
    Tensor lse = torch::stable::new_empty(queries, {B, Hq, S}, ScalarType::Float);
    const kvc_attention_args args = arguments(queries, keys, values, key_bias, lengths, out, lse, scale, causal, window,
                                              sinks, complement, sink_logits, softcap);
    run("attention", queries, [&] { return kvc_attention(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_attention(&args, stream)),
        [&] { find_outside("attention", "lengths", args.lengths, B, 0, args.T, "T"); });
    return {out, lse};
}

// Returns dq, dk, dv, dkey_bias and dsink_logits (no elements without key_bias and sink_logits).
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& queries, const Tensor& keys,
    const Tensor& values, const std::optional<Tensor>& key_bias, const std::optional<Tensor>& lengths, const Tensor& out,
    const Tensor& lse, double scale, bool causal, int64_t window, int64_t sinks, bool complement,
    const std::optional<Tensor>& sink_logits, double softcap) {
    check_keys(queries, keys, values);
    check_same(dout, queries, "dout");
    check_same(out, queries, "out");
    const int64_t B = queries.size(0), Hq = queries.size(1), S = queries.size(2), D = queries.size(3);
    const int64_t Hkv = keys.size(1), T = keys.size(2);
    check_array(lse, queries, ScalarType::Float, {B, Hq, S}, "lse");
    if (dlse.has_value()) check_array(*dlse, queries, ScalarType::Float, {B, Hq, S}, "dlse");
    Tensor dq = torch::stable::new_empty(queries, {B, Hq, S, D});
    Tensor dk = torch::stable::new_empty(queries, {B, Hkv, T, D}), dv = torch::stable::new_empty(queries, {B, Hkv, T, D});
    Tensor dbias = torch::stable::new_empty(queries, {B, Hkv, key_bias.has_value() ? T : 0}, ScalarType::Float);
    Tensor dsinks = torch::stable::new_empty(queries, {sink_logits.has_value() ? Hq : 0}, ScalarType::Float);
    kvc_attention_backward_args args = {
        .forward = arguments(queries, keys, values, key_bias, lengths, out, lse, scale, causal, window, sinks,
                             complement, sink_logits, softcap),
        .dout = view_of(dout, "dout"),
        .dq = view_of(dq, "dq"),
        .dk = view_of(dk, "dk"),
        .dv = view_of(dv, "dv"),
        .dlse = dlse.has_value() ? static_cast<const float*>(dlse->const_data_ptr()) : nullptr,
        .dkey_bias = key_bias.has_value() ? static_cast<float*>(dbias.mutable_data_ptr()) : nullptr,
        .scratch = nullptr,
        .dsink_logits = sink_logits.has_value() ? static_cast<float*>(dsinks.mutable_data_ptr()) : nullptr,
    };
    Tensor scratch = scratch_for(queries, KVC_SCRATCH_BYTES(queries, attention_backward, &args));
    args.scratch = scratch.mutable_data_ptr();
    run("attention_backward", queries, [&] { return kvc_attention_backward(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_attention_backward(&args, stream)),
        [&] { find_outside("attention_backward", "lengths", args.forward.lengths, B, 0, T, "T"); });
    return {dq, dk, dv, dbias, dsinks};
}

}  // namespace

KVC_REGISTER(attention,
             "attention(Tensor queries, Tensor keys, Tensor values, Tensor? key_bias, Tensor? lengths, float scale, "
             "bool causal, int window, int sinks, bool complement, Tensor? sink_logits=None, float softcap=0.) "
             "-> (Tensor, Tensor)")
KVC_REGISTER(attention_backward,
             "attention_backward(Tensor dout, Tensor? dlse, Tensor queries, Tensor keys, Tensor values, "
             "Tensor? key_bias, Tensor? lengths, Tensor out, Tensor lse, float scale, bool causal, int window, "
             "int sinks, bool complement, Tensor? sink_logits=None, float softcap=0.) "
             "-> (Tensor, Tensor, Tensor, Tensor, Tensor)")
