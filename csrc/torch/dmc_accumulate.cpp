#include "common.h"

namespace {

const float* floats(const std::optional<Tensor>& x) {
    return x.has_value() ? static_cast<const float*>(x->const_data_ptr()) : nullptr;
}

void check_like(const Tensor& x, const Tensor& like, const char* name) {
    check_device(x, like, name);
    KVC_CHECK(x.dim() == 4 && x.scalar_type() == like.scalar_type(), name, " must be [B, Hkv, T, D] in the keys' dtype");
    for (int64_t d = 0; d < 4; d++) KVC_CHECK(x.size(d) == like.size(d), name, " must have the keys' shape");
}

kvc_dmc_accumulate_args arguments(const Tensor& keys, const Tensor& values, const Tensor& alpha, const Tensor& omega,
                                  const std::optional<Tensor>& initial_z, int64_t neuron, int64_t window) {
    KVC_CHECK(keys.dim() == 4, "keys must be [B, Hkv, T, D]");
    const int64_t B = keys.size(0), Hkv = keys.size(1), T = keys.size(2), D = keys.size(3);
    check_like(values, keys, "values");
    check_array(alpha, keys, ScalarType::Float, {B, Hkv, T}, "alpha");
    check_array(omega, keys, ScalarType::Float, {B, Hkv, T}, "omega");
    if (initial_z.has_value()) check_array(*initial_z, keys, ScalarType::Float, {B, Hkv}, "initial_z");
    return {
        .out_k = {}, .out_v = {},
        .k = view_of(keys, "keys"),
        .v = view_of(values, "values"),
        .z = nullptr, .states = nullptr,
        .alpha = floats(alpha), .omega = floats(omega),
        .initial_k = nullptr, .initial_v = nullptr, .initial_z = floats(initial_z),
        .scratch = nullptr,
        .B = B, .Hkv = Hkv, .T = T, .D = D,
        .neuron = neuron,
        .window = window,
    };
}

// Averages of keys and values, z and the states of the scan.
std::tuple<Tensor, Tensor, Tensor, Tensor> dmc_accumulate(
    const Tensor& keys, const Tensor& values, const Tensor& alpha, const Tensor& omega,
    const std::optional<Tensor>& initial_k, const std::optional<Tensor>& initial_v,
    const std::optional<Tensor>& initial_z, int64_t neuron, int64_t window) {
    kvc_dmc_accumulate_args args = arguments(keys, values, alpha, omega, initial_z, neuron, window);
    if (initial_z.has_value()) {
        KVC_CHECK(!window, "initial_z must not come with a window");
        KVC_CHECK(initial_k.has_value() && initial_v.has_value(), "initial_k and initial_v must come with initial_z");
        check_array(*initial_k, keys, ScalarType::Float, {args.B, args.Hkv, args.D}, "initial_k");
        check_array(*initial_v, keys, ScalarType::Float, {args.B, args.Hkv, args.D}, "initial_v");
        args.initial_k = floats(initial_k);
        args.initial_v = floats(initial_v);
    }
    const auto empty = [&] { return torch::stable::new_empty(keys, {args.B, args.Hkv, args.T, args.D}); };
    Tensor out_k = empty(), out_v = empty();
    Tensor z = torch::stable::new_empty(keys, {args.B, args.Hkv, args.T}, ScalarType::Float);
    Tensor states = torch::stable::new_empty(
        keys, {args.B, args.Hkv, kvc_dmc_chunks(args.T, window), 2, args.D}, ScalarType::Float);
    args.out_k = view_of(out_k, "out");
    args.out_v = view_of(out_v, "out");
    args.z = static_cast<float*>(z.mutable_data_ptr());
    args.states = static_cast<float*>(states.mutable_data_ptr());
    int64_t bytes = 0;
#ifdef KVC_WITH_CUDA
    if (!on_cpu(keys)) bytes = kvc_cuda_dmc_accumulate_scratch_bytes(&args);
#endif
    Tensor scratch = scratch_for(keys, bytes);
    args.scratch = scratch.mutable_data_ptr();
    run("dmc_accumulate", keys, [&] { return kvc_dmc_accumulate(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_dmc_accumulate(&args, stream)));
    return {out_k, out_v, z, states};
}

// dk, dv, dalpha, domega.
std::tuple<Tensor, Tensor, Tensor, Tensor> dmc_accumulate_backward(
    const Tensor& dout_k, const Tensor& dout_v, const Tensor& keys, const Tensor& values, const Tensor& alpha,
    const Tensor& omega, const std::optional<Tensor>& initial_z, const Tensor& z, const Tensor& states, int64_t neuron,
    int64_t window) {
    kvc_dmc_accumulate_backward_args args = {};
    kvc_dmc_accumulate_args& forward = args.forward;
    forward = arguments(keys, values, alpha, omega, initial_z, neuron, window);
    check_like(dout_k, keys, "dout_k");
    check_like(dout_v, keys, "dout_v");
    check_array(z, keys, ScalarType::Float, {forward.B, forward.Hkv, forward.T}, "z");
    check_array(states, keys, ScalarType::Float,
                {forward.B, forward.Hkv, kvc_dmc_chunks(forward.T, window), 2, forward.D}, "states");
    // read only: the kernels of a backward pass write neither
    forward.z = static_cast<float*>(const_cast<void*>(z.const_data_ptr()));
    forward.states = static_cast<float*>(const_cast<void*>(states.const_data_ptr()));
    const auto empty = [&] { return torch::stable::new_empty(keys, {forward.B, forward.Hkv, forward.T, forward.D}); };
    Tensor dk = empty(), dv = empty();
    const auto gates = [&] {
        return torch::stable::new_empty(keys, {forward.B, forward.Hkv, forward.T}, ScalarType::Float);
    };
    Tensor dalpha = gates(), domega = gates();
    args.dout_k = view_of(dout_k, "dout_k");
    args.dout_v = view_of(dout_v, "dout_v");
    args.dk = view_of(dk, "dk");
    args.dv = view_of(dv, "dv");
    args.dalpha = static_cast<float*>(dalpha.mutable_data_ptr());
    args.domega = static_cast<float*>(domega.mutable_data_ptr());
    Tensor scratch = scratch_for(keys, KVC_SCRATCH_BYTES(keys, dmc_accumulate_backward, &args));
    args.scratch = scratch.mutable_data_ptr();
    run("dmc_accumulate_backward", keys, [&] { return kvc_dmc_accumulate_backward(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_dmc_accumulate_backward(&args, stream)));
    return {dk, dv, dalpha, domega};
}

}  // namespace

KVC_REGISTER(dmc_accumulate,
             "dmc_accumulate(Tensor keys, Tensor values, Tensor alpha, Tensor omega, "
             "Tensor? initial_k, Tensor? initial_v, Tensor? initial_z, int neuron, int window) -> "
             "(Tensor, Tensor, Tensor, Tensor)")
KVC_REGISTER(dmc_accumulate_backward,
             "dmc_accumulate_backward(Tensor dout_k, Tensor dout_v, Tensor keys, Tensor values, Tensor alpha, "
             "Tensor omega, Tensor? initial_z, Tensor z, Tensor states, int neuron, int window) -> "
             "(Tensor, Tensor, Tensor, Tensor)")
