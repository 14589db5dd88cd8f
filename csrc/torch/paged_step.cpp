#include "step.h"

namespace {

void explain(const kvc_paged_step_args& args) {
    const char* op = "paged_step_";
    const kvc_step& step = args.step;
    const kvc_page_table& table = step.table;
    explain_table(op, table);
    for (int64_t r = 0; r < table.R; r++) {
        const int64_t first = table.lengths[r] + static_cast<int64_t>(args.shift ? args.shift[r] : 0);
        if (r % step.Hkv == 0) explain_positions(op, "lengths + shift", step, first, "row", r);
        const int64_t begin = args.begin ? args.begin[r] : 0, end = table.lengths[r] + step.S;
        KVC_CHECK(begin >= 0 && begin <= end, op, ": begin must be between 0 and ", end, " (the row's new length), got ",
                  begin, " at ", r);
    }
    for (int64_t r = 0; r < table.R; r++) explain_pages(op, table, r, (args.begin ? args.begin[r] : 0) / table.P * table.P);
    explain_append(op, table, nullptr, step.S);
}

std::tuple<Tensor, Tensor> paged_step_(const Tensor& queries, const Tensor& keys, const Tensor& values, Tensor k_pages,
                                       Tensor v_pages, Tensor block_table, Tensor lengths, Tensor refs, Tensor free_pages,
                                       Tensor free_count, const std::optional<Tensor>& given_shift,
                                       const std::optional<Tensor>& given_begin, const std::optional<Tensor>& cos,
                                       const std::optional<Tensor>& sin, double scale,
                                       const std::optional<Tensor>& sink_logits, double softcap,
                                       std::optional<Tensor> key_scales, std::optional<Tensor> value_scales) {
    const Changed changed = changed_of(block_table, lengths, refs, free_pages, free_count, {k_pages, v_pages}, key_scales,
                                       value_scales);
    Step step(changed, block_table, "block_table", queries, keys, values, cos, sin, scale, sink_logits, softcap, false);
    const std::optional<Tensor> shift = changed.apart(given_shift), begin = changed.apart(given_begin);
    step.keep(k_pages, v_pages, key_scales, value_scales,
              table_of(block_table, lengths, refs, free_pages, free_count, page_size_of(k_pages)), block_table, refs.size(0));
    step.take(step.frame.rows, k_pages, *step.keys);
    const int64_t R = block_table.size(0);
    kvc_paged_step_args args = {.step = step.frame, .shift = int_array(shift, block_table, {R}, "shift"),
                                .begin = int_array(begin, block_table, {R}, "begin")};
    KVC_RUN_STEP(paged_step, step.queries, args);
    return {step.out, step.lse};
}

}  // namespace

KVC_REGISTER(paged_step_,
             "paged_step_(Tensor queries, Tensor keys, Tensor values, Tensor(a!) k_pages, Tensor(b!) v_pages, "
             "Tensor(c!) block_table, Tensor(d!) lengths, Tensor(e!) refs, Tensor(f!) free_pages, "
             "Tensor(g!) free_count, Tensor? shift, Tensor? begin, Tensor? cos, Tensor? sin, float scale, "
             "Tensor? sink_logits, float softcap, Tensor(h!)? key_scales=None, Tensor(i!)? value_scales=None) "
             "-> (Tensor, Tensor)")
