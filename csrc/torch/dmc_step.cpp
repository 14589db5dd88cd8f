#include "dmc_append.h"
#include "step.h"

namespace {

void explain(const kvc_dmc_step_args& args) {
    const char* op = "dmc_step_";
    const kvc_page_table& table = args.step.table;
    explain_table(op, table);
    find_outside(op, "places", args.places, args.step.B, 0, INT32_MAX - 1, "most that int32 counts");
    for (int64_t b = 0; b < args.step.B; b++) {
        const int64_t position = args.places[b] + static_cast<int64_t>(args.offsets ? args.offsets[b] : 0);
        explain_positions(op, "places + offsets", args.step, position, "sequence", b);
    }
    for (int64_t r = 0; r < table.R; r++) {
        explain_pages(op, table, r, 0);
        KVC_CHECK(table.lengths[r] < table.blocks * table.P, op, ": block_table must have room for ",
                  table.lengths[r] + 1, " slots in row ", r, ", got ", table.blocks, " pages of ", table.P);
    }
}

std::tuple<Tensor, Tensor> dmc_step_(const Tensor& queries, const Tensor& keys, const Tensor& values, Tensor k_pages,
                                     Tensor v_pages, Tensor block_table, Tensor lengths, Tensor refs, Tensor free_pages,
                                     Tensor free_count, Tensor tail_keys, Tensor tail_values, Tensor tail_weights,
                                     Tensor tail_counts, Tensor places, const std::optional<Tensor>& given_offsets,
                                     const std::optional<Tensor>& given_alpha, const std::optional<Tensor>& given_omega,
                                     const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, int64_t neuron,
                                     int64_t window, double decision_shift, double margin, double omega_shift,
                                     double omega_eps, int64_t reduce, double scale, const std::optional<Tensor>& sink_logits,
                                     double softcap, std::optional<Tensor> key_scales, std::optional<Tensor> value_scales) {
    const Changed changed = changed_of(block_table, lengths, refs, free_pages, free_count,
                                       {k_pages, v_pages, tail_keys, tail_values, tail_weights, tail_counts, places},
                                       key_scales, value_scales);
    Step step(changed, block_table, "block_table", queries, keys, values, cos, sin, scale, sink_logits, softcap);
    const std::optional<Tensor> alpha = changed.apart(given_alpha), omega = changed.apart(given_omega);
    const std::optional<Tensor> offsets = changed.apart(given_offsets);
    const int64_t B = step.frame.B, D = step.frame.D;
    KVC_CHECK(neuron >= 0 && neuron < D, "neuron must be between 0 and ", D - 1, ", got ", neuron);
    step.keep(k_pages, v_pages, key_scales, value_scales,
              table_of(block_table, lengths, refs, free_pages, free_count, page_size_of(k_pages)), block_table, refs.size(0));
    step.take(step.frame.rows, k_pages, *step.keys);
    const tail_arrays tail = tail_of(tail_keys, tail_values, tail_weights, tail_counts, block_table, step.frame.table.R, window, D);
    kvc_dmc_step_args args = {
        .step = step.frame,
        .tail_k = tail.k, .tail_v = tail.v, .tail_w = tail.w, .tail_counts = tail.counts,
        .places = step.places(places),
        .offsets = int_array(offsets, block_table, {B, 1}, "offsets"),
        .alpha = step.gates(alpha, "alpha"), .omega = step.gates(omega, "omega"),
        .neuron = neuron, .window = window,
        .decision_shift = static_cast<float>(decision_shift), .decision_margin = static_cast<float>(margin),
        .omega_shift = static_cast<float>(omega_shift), .omega_eps = static_cast<float>(omega_eps),
        .reduce = static_cast<kvc_importance>(reduce),
    };
    KVC_RUN_STEP(dmc_step, step.queries, args);
    return {step.out, step.lse};
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
