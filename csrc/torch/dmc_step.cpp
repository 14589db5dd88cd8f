#include "dmc_append.h"

namespace {

void explain(const kvc_dmc_step_args& args) {
    const char* op = "dmc_step_";
    const kvc_dmc_append_args& append = args.append;
    const kvc_page_table& table = append.table;
    explain_table(op, table);
    find_outside(op, "places", args.places, append.B, 0, INT32_MAX - 1, "most that int32 counts");
    for (int64_t b = 0; append.rotary_dim && b < append.B; b++) {
        const int64_t position = args.places[b] + static_cast<int64_t>(args.offsets ? args.offsets[b] : 0);
        KVC_CHECK(position >= 0 && position < append.table_rows, op, ": positions (places + offsets) must be between 0 "
                  "and ", append.table_rows - 1, " (last row of cos and sin), got ", position, " in sequence ", b);
    }
    for (int64_t r = 0; r < table.R; r++) {
        explain_pages(op, table, r, 0);
        KVC_CHECK(table.lengths[r] < table.blocks * table.P, op, ": block_table must have room for ",
                  table.lengths[r] + 1, " slots in row ", r, ", got ", table.blocks, " pages of ", table.P);
    }
}

std::tuple<Tensor, Tensor> dmc_step_(const Tensor& given_queries, const Tensor& given_keys, const Tensor& given_values,
                                     Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor lengths, Tensor refs,
                                     Tensor free_pages, Tensor free_count, Tensor tail_keys, Tensor tail_values,
                                     Tensor tail_weights, Tensor tail_counts, Tensor places,
                                     const std::optional<Tensor>& given_offsets,
                                     const std::optional<Tensor>& given_alpha, const std::optional<Tensor>& given_omega,
                                     const std::optional<Tensor>& given_cos, const std::optional<Tensor>& given_sin,
                                     int64_t neuron, int64_t window, double decision_shift, double margin, double omega_shift, double omega_eps, int64_t reduce, double scale,
                                     const std::optional<Tensor>& sink_logits, double softcap,
                                     std::optional<Tensor> key_scales, std::optional<Tensor> value_scales) {
    Changed changed = changed_of(block_table, lengths, refs, free_pages, free_count,
                                 {k_pages, v_pages, tail_keys, tail_values, tail_weights, tail_counts, places});
    changed.add("key_scales", key_scales);
    changed.add("value_scales", value_scales);
    const Tensor queries = changed.apart(given_queries), keys = changed.apart(given_keys);
    const Tensor values = changed.apart(given_values);
    const std::optional<Tensor> alpha = changed.apart(given_alpha), omega = changed.apart(given_omega);
    const std::optional<Tensor> offsets = changed.apart(given_offsets);
    const std::optional<Tensor> cos = changed.apart(given_cos), sin = changed.apart(given_sin);
    const kvc_view q = view_of(queries, "queries");
    KVC_CHECK(k_pages.dim() == 3 && keys.dim() == 4, "k_pages must be [pages, P, D] and keys [B, Hkv, 1, D]");
    const int64_t B = queries.size(0), Hq = queries.size(1), D = queries.size(3), Hkv = keys.size(1);
    const int64_t P = k_pages.size(1);
    check_device(queries, block_table, "queries");
    KVC_CHECK(queries.size(2) == 1 && keys.size(2) == 1 && keys.size(0) == B, "queries and keys must be of one token");
    KVC_CHECK(D == k_pages.size(2) && D >= 1 && D <= KVC_MAX_HEAD_DIM, "queries must have the pages' head dim, between "
              "1 and ", static_cast<int>(KVC_MAX_HEAD_DIM), ", got ", D);
    KVC_CHECK(Hq > 0 || B == 0, "queries must have at least one head, got 0");
    KVC_CHECK(Hkv ? Hq % Hkv == 0 : Hq == 0, "queries must have a multiple of ", Hkv, " heads, got ", Hq);
    KVC_CHECK(P > 0 && (P & (P - 1)) == 0, "k_pages must have a page size that is a power of two, got ", P);
    KVC_CHECK(neuron >= 0 && neuron < D, "neuron must be between 0 and ", D - 1, ", got ", neuron);
    check_array(places, block_table, ScalarType::Int, {B, 1}, "places");
    const auto gates = [&](const std::optional<Tensor>& x, const char* name) -> const float* {
        if (!x.has_value()) return nullptr;
        check_array(*x, block_table, ScalarType::Float, {B, Hkv, 1}, name);
        return static_cast<const float*>(x->const_data_ptr());
    };
    Tensor out = torch::stable::new_empty(queries, {B, Hq, 1, D});
    Tensor lse = torch::stable::new_empty(queries, {B, Hq, 1}, ScalarType::Float);
    kvc_dmc_step_args args = {
        .append = append_of(changed_rows_of(k_pages, v_pages, key_scales, value_scales, block_table, refs.size(0), refs.size(0), D),
                            k_pages, table_of(block_table, lengths, refs, free_pages, free_count, P),
                            block_table, tail_keys, tail_values, tail_weights, tail_counts, keys, values,
                            rotation_of(cos, sin, block_table), neuron, window),
        .out = out.mutable_data_ptr(),
        .lse = static_cast<float*>(lse.mutable_data_ptr()),
        .q = q,
        .places = ints(places),
        .offsets = int_array(offsets, block_table, {B, 1}, "offsets"),
        .scratch = nullptr,
        .Hq = Hq,
        .scale = static_cast<float>(scale),
        .softcap = static_cast<float>(softcap),
        .sink_logits = sinks_array(sink_logits, queries, Hq),
        .decision_shift = static_cast<float>(decision_shift),
        .decision_margin = static_cast<float>(margin),
        .omega_shift = static_cast<float>(omega_shift),
        .omega_eps = static_cast<float>(omega_eps),
        .reduce = static_cast<kvc_importance>(reduce),
    };
    args.append.alpha = gates(alpha, "alpha");
    args.append.omega = gates(omega, "omega");
    Tensor scratch = scratch_for(queries, KVC_SCRATCH_BYTES(queries, dmc_step, &args));
    args.scratch = scratch.mutable_data_ptr();
    run("dmc_step_", queries, [&] { return kvc_dmc_step(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_dmc_step(&args, stream)), [&] { explain(args); });
    return {out, lse};
}

}  // namespace

KVC_REGISTER(dmc_step_,
             "dmc_step_(Tensor queries, Tensor keys, Tensor values, Tensor(a!) k_pages, Tensor(b!) v_pages, "
             "Tensor(c!) block_table, Tensor(d!) lengths, Tensor(e!) refs, Tensor(f!) free_pages, "
             "Tensor(g!) free_count, Tensor(h!) tail_keys, Tensor(i!) tail_values, Tensor(j!) tail_weights, "
             "Tensor(k!) tail_counts, Tensor(l!) places, Tensor? offsets, Tensor? alpha, Tensor? omega, Tensor? cos, Tensor? sin, "
             "int neuron, int window, float decision_shift, float margin, float omega_shift, "
             "float omega_eps, int reduce, float scale, Tensor? sink_logits, float softcap, "
             "Tensor(m!)? key_scales=None, Tensor(n!)? value_scales=None) -> (Tensor, Tensor)")
