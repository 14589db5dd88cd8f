#include "page_table.h"
#include "rows.h"

namespace {

void explain(const kvc_quest_step_args& args) {
    const char* op = "quest_step_";
    const kvc_page_table& table = args.step.table;
    explain_table(op, table);
    for (int64_t r = 0; r < table.R; r++) {
        KVC_CHECK(r % args.step.Hkv || !args.step.rotary_dim || table.lengths[r] < args.step.table_rows, op,
                  ": positions (lengths) must be between 0 and ", args.step.table_rows - 1,
                  " (last row of cos and sin), got ", table.lengths[r], " in row ", r);
    }
    for (int64_t r = 0; r < table.R; r++) explain_pages(op, table, r, 0);
    if (!args.held) explain_append(op, table, nullptr, 1);
}

// keys, values: none where the newest token is held.
std::tuple<Tensor, Tensor, Tensor> quest_step_(const Tensor& given_queries, const std::optional<Tensor>& given_keys,
                                               const std::optional<Tensor>& given_values, Tensor k_pages, Tensor v_pages,
                                               Tensor ranges, Tensor block_table, Tensor lengths, Tensor refs,
                                               Tensor free_pages, Tensor free_count, int64_t pages_read,
                                               const std::optional<Tensor>& given_cos,
                                               const std::optional<Tensor>& given_sin, double scale,
                                               const std::optional<Tensor>& sink_logits, double softcap,
                                               std::optional<Tensor> key_scales, std::optional<Tensor> value_scales) {
    Changed changed = changed_of(block_table, lengths, refs, free_pages, free_count, {k_pages, v_pages, ranges});
    if (key_scales.has_value()) changed.add("key_scales", *key_scales);
    if (value_scales.has_value()) changed.add("value_scales", *value_scales);
    const Tensor queries = changed.apart(given_queries);
    const std::optional<Tensor> keys = changed.apart(given_keys), values = changed.apart(given_values);
    const std::optional<Tensor> cos = changed.apart(given_cos), sin = changed.apart(given_sin);
    const kvc_view q = view_of(queries, "queries");
    const int64_t B = queries.size(0), Hq = queries.size(1), D = queries.size(3), R = block_table.size(0);
    check_device(queries, block_table, "queries");
    KVC_CHECK(queries.size(2) == 1, "queries must be of one token, got ", queries.size(2));
    KVC_CHECK(B == 0 ? R == 0 : R % B == 0, "block_table must have B*Hkv rows, got ", R);
    const int64_t Hkv = B ? R / B : 0;
    KVC_CHECK(Hq > 0 || B == 0, "queries must have at least one head, got 0");
    KVC_CHECK(Hkv == 0 ? Hq == 0 || B == 0 : Hq % Hkv == 0, "block_table must have B*Hkv rows, Hkv dividing Hq, got ", R);
    KVC_CHECK(D >= 1 && D <= KVC_MAX_HEAD_DIM, "queries must have a head dim between 1 and ",
              static_cast<int>(KVC_MAX_HEAD_DIM), ", got ", D);
    KVC_CHECK(k_pages.dim() == 3, "k_pages must be [pages, P, D]");
    const int64_t P = k_pages.size(1), blocks = block_table.size(1);
    KVC_CHECK(P > 0 && (P & (P - 1)) == 0, "k_pages must have a page size that is a power of two, got ", P);
    const kvc_rows stored = changed_rows_of(k_pages, v_pages, key_scales, value_scales, block_table, refs.size(0), refs.size(0),
                                            D);
    const Tensor& numbers = stored.key_scales ? ranges : k_pages;
    const kvc_dtype dtype = dtype_of(numbers, "ranges");
    check_array(ranges, block_table, numbers.scalar_type(), {R, -1, 2 * D}, "ranges");
    KVC_CHECK(ranges.size(1) >= blocks, "ranges must have a place for each of ", blocks, " pages of a row, got ",
              ranges.size(1));
    KVC_CHECK(pages_read >= 1, "pages_read must be at least 1, got ", pages_read);
    KVC_CHECK(keys.has_value() == values.has_value(), "keys and values must come together");
    const rotation turns = rotation_of(cos, sin, block_table);
    KVC_CHECK(keys.has_value() || turns.dim == 0, "cos and sin must not come without keys");
    Tensor out = torch::stable::new_empty(queries, {B, Hq, 1, D});
    Tensor lse = torch::stable::new_empty(queries, {B, Hq, 1}, ScalarType::Float);
    Tensor chosen = torch::stable::new_empty(block_table, {R, pages_read < blocks ? pages_read : blocks});
    const kvc_view none = {nullptr, dtype, 0, 0, 0};
    kvc_quest_step_args args = {
        .step = {
            .out = out.mutable_data_ptr(),
            .lse = static_cast<float*>(lse.mutable_data_ptr()),
            .q = q,
            .k = keys.has_value() ? tokens_of(*keys, numbers, k_pages, B, Hkv, 1, "keys") : none,
            .v = values.has_value() ? tokens_of(*values, numbers, k_pages, B, Hkv, 1, "values") : none,
            .rows = stored,
            .table = table_of(block_table, lengths, refs, free_pages, free_count, P),
            .shift = nullptr, .begin = nullptr,
            .cos = turns.cos, .sin = turns.sin,
            .scratch = nullptr,
            .B = B, .Hq = Hq, .Hkv = Hkv, .S = 1, .D = D,
            .rotary_dim = turns.dim, .table_rows = turns.rows,
            .scale = static_cast<float>(scale),
            .softcap = static_cast<float>(softcap),
            .sink_logits = sinks_array(sink_logits, queries, Hq),
        },
        .ranges = ranges.mutable_data_ptr(),
        .chosen = ints(chosen),
        .range_pages = ranges.size(1),
        .pages_read = pages_read,
        .held = !keys.has_value(),
    };
    Tensor scratch = scratch_for(queries, KVC_SCRATCH_BYTES(queries, quest_step, &args));
    args.step.scratch = scratch.mutable_data_ptr();
    run("quest_step_", queries, [&] { return kvc_quest_step(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_quest_step(&args, stream)), [&] { explain(args); });
    return {out, lse, chosen};
}

}  // namespace

KVC_REGISTER(quest_step_,
             "quest_step_(Tensor queries, Tensor? keys, Tensor? values, Tensor(a!) k_pages, Tensor(b!) v_pages, "
             "Tensor(c!) ranges, Tensor(d!) block_table, Tensor(e!) lengths, Tensor(f!) refs, Tensor(g!) free_pages, "
             "Tensor(h!) free_count, int pages_read, Tensor? cos, Tensor? sin, float scale, Tensor? sink_logits, "
             "float softcap, Tensor(i!)? key_scales=None, Tensor(j!)? value_scales=None) -> (Tensor, Tensor, Tensor)")
