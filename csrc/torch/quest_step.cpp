#include "step.h"

namespace {

void explain(const kvc_quest_step_args& args) {
    const char* op = "quest_step_";
    const kvc_page_table& table = args.step.table;
    explain_table(op, table);
    for (int64_t r = 0; r < table.R; r += args.step.Hkv) explain_positions(op, "lengths", args.step, table.lengths[r], "row", r);
    explain_rows(op, table, !args.held);
}

// keys, values: none where the newest token is held.
std::tuple<Tensor, Tensor, Tensor> quest_step_(const Tensor& queries, const std::optional<Tensor>& keys,
                                               const std::optional<Tensor>& values, Tensor k_pages, Tensor v_pages,
                                               Tensor ranges, Tensor block_table, Tensor lengths, Tensor refs,
                                               Tensor free_pages, Tensor free_count, int64_t pages_read,
                                               const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                                               double scale, const std::optional<Tensor>& sink_logits, double softcap,
                                               std::optional<Tensor> key_scales, std::optional<Tensor> value_scales) {
    const Changed changed = changed_of(block_table, lengths, refs, free_pages, free_count, {k_pages, v_pages, ranges},
                                       key_scales, value_scales);
    Step step(changed, block_table, "block_table", queries, keys, values, cos, sin, scale, sink_logits, softcap);
    const kvc_page_table table = table_of(block_table, lengths, refs, free_pages, free_count, page_size_of(k_pages));
    step.keep(k_pages, v_pages, key_scales, value_scales, table, block_table, table.pages);
    const Tensor& numbers = step.frame.rows.key_scales ? ranges : k_pages;
    step.frame.k.dtype = step.frame.v.dtype = dtype_of(numbers, "ranges");
    check_array(ranges, block_table, numbers.scalar_type(), {table.R, -1, 2 * step.frame.D}, "ranges");
    KVC_CHECK(ranges.size(1) >= table.blocks, "ranges must have a place for each of ", table.blocks, " pages of a row, got ",
              ranges.size(1));
    KVC_CHECK(pages_read >= 1, "pages_read must be at least 1, got ", pages_read);
    KVC_CHECK(keys.has_value() == values.has_value(), "keys and values must come together");
    KVC_CHECK(keys.has_value() || step.frame.rotary_dim == 0, "cos and sin must not come without keys");
    if (keys.has_value()) step.take(step.frame.rows, k_pages, ranges);
    const Tensor chosen = torch::stable::new_empty(block_table, {table.R, pages_read < table.blocks ? pages_read : table.blocks});
    kvc_quest_step_args args = {.step = step.frame, .ranges = ranges.mutable_data_ptr(), .chosen = ints(chosen),
                                .range_pages = ranges.size(1), .pages_read = pages_read, .held = !keys.has_value()};
    KVC_RUN_STEP(quest_step, step.queries, args);
    return {step.out, step.lse, chosen};
}

}  // namespace

KVC_REGISTER(quest_step_,
             "quest_step_(Tensor queries, Tensor? keys, Tensor? values, Tensor(a!) k_pages, Tensor(b!) v_pages, "
             "Tensor(c!) ranges, Tensor(d!) block_table, Tensor(e!) lengths, Tensor(f!) refs, Tensor(g!) free_pages, "
             "Tensor(h!) free_count, int pages_read, Tensor? cos, Tensor? sin, float scale, Tensor? sink_logits, "
             "float softcap, Tensor(i!)? key_scales=None, Tensor(j!)? value_scales=None) -> (Tensor, Tensor, Tensor)")
