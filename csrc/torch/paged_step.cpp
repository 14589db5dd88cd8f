#include "page_table.h"
#include "rows.h"

namespace {

void explain(const kvc_paged_step_args& args) {
    const char* op = "paged_step_";
    const kvc_page_table& table = args.table;
    explain_table(op, table);
    for (int64_t r = 0; r < table.R; r++) {
        const int64_t first = table.lengths[r] + static_cast<int64_t>(args.shift ? args.shift[r] : 0);
        KVC_CHECK(r % args.Hkv || !args.rotary_dim || (first >= 0 && first + args.S <= args.table_rows), op,
                  ": positions (lengths + shift) must be between 0 and ", args.table_rows - 1,
                  " (last row of cos and sin), got ", first, " to ", first + args.S - 1, " in row ", r);
        const int64_t begin = args.begin ? args.begin[r] : 0, end = table.lengths[r] + args.S;
        KVC_CHECK(begin >= 0 && begin <= end, op, ": begin must be between 0 and ", end, " (the row's new length), got ",
                  begin, " at ", r);
    }
    for (int64_t r = 0; r < table.R; r++) explain_pages(op, table, r, (args.begin ? args.begin[r] : 0) / table.P * table.P);
    explain_append(op, table, nullptr, args.S);
}

std::tuple<Tensor, Tensor> paged_step_(const Tensor& given_queries, const Tensor& given_keys,
                                       const Tensor& given_values, Tensor k_pages, Tensor v_pages, Tensor block_table,
                                       Tensor lengths, Tensor refs, Tensor free_pages, Tensor free_count,
                                       const std::optional<Tensor>& given_shift,
                                       const std::optional<Tensor>& given_begin,
                                       const std::optional<Tensor>& given_cos, const std::optional<Tensor>& given_sin,
                                       double scale, const std::optional<Tensor>& sink_logits, double softcap,
                                       std::optional<Tensor> key_scales, std::optional<Tensor> value_scales) {
    Changed changed = changed_of(block_table, lengths, refs, free_pages, free_count, {k_pages, v_pages});
    if (key_scales.has_value()) changed.add("key_scales", *key_scales);
    if (value_scales.has_value()) changed.add("value_scales", *value_scales);
    const Tensor queries = changed.apart(given_queries), keys = changed.apart(given_keys);
    const Tensor values = changed.apart(given_values);
    const std::optional<Tensor> shift = changed.apart(given_shift), begin = changed.apart(given_begin);
    const std::optional<Tensor> cos = changed.apart(given_cos), sin = changed.apart(given_sin);
    const kvc_view q = view_of(queries, "queries");
    KVC_CHECK(keys.dim() == 4, "keys must be [B, Hkv, S, D]");
    const int64_t B = queries.size(0), Hq = queries.size(1), S = queries.size(2), D = queries.size(3);
    const int64_t R = block_table.size(0), Hkv = keys.size(1);
    check_device(queries, block_table, "queries");
    KVC_CHECK(Hq > 0 || B == 0, "queries must have at least one head, got 0");
    KVC_CHECK(R == B * Hkv && (R == 0 || Hq % Hkv == 0), "block_table must have B*Hkv rows, Hkv dividing Hq, got ", R);
    KVC_CHECK(D >= 1 && D <= KVC_MAX_HEAD_DIM, "queries must have a head dim between 1 and ",
              static_cast<int>(KVC_MAX_HEAD_DIM), ", got ", D);
    const kvc_rows stored = changed_rows_of(k_pages, v_pages, key_scales, value_scales, block_table, refs.size(0), D);
    const int64_t P = k_pages.size(1);
    // rows of codes take new tokens of any dtype, keys and values of one
    const Tensor& numbers = stored.key_scales ? keys : k_pages;
    KVC_CHECK(P > 0 && (P & (P - 1)) == 0, "k_pages must have a page size that is a power of two, got ", P);
    const rotation turns = rotation_of(cos, sin, block_table);
    Tensor out = torch::stable::new_empty(queries, {B, Hq, S, D});
    Tensor lse = torch::stable::new_empty(queries, {B, Hq, S}, ScalarType::Float);
    kvc_paged_step_args args = {
        .out = out.mutable_data_ptr(),
        .lse = static_cast<float*>(lse.mutable_data_ptr()),
        .q = q,
        .k = tokens_of(keys, numbers, k_pages, B, Hkv, S, "keys"),
        .v = tokens_of(values, numbers, k_pages, B, Hkv, S, "values"),
        .rows = stored,
        .table = table_of(block_table, lengths, refs, free_pages, free_count, P),
        .shift = int_array(shift, block_table, {R}, "shift"),
        .begin = int_array(begin, block_table, {R}, "begin"),
        .cos = turns.cos, .sin = turns.sin,
        .scratch = nullptr,
        .B = B, .Hq = Hq, .Hkv = Hkv, .S = S, .D = D,
        .rotary_dim = turns.dim, .table_rows = turns.rows,
        .scale = static_cast<float>(scale),
        .softcap = static_cast<float>(softcap),
        .sink_logits = sinks_array(sink_logits, queries, Hq),
    };
    Tensor scratch = scratch_for(queries, KVC_SCRATCH_BYTES(queries, paged_step, &args));
    args.scratch = scratch.mutable_data_ptr();
    run("paged_step_", queries, [&] { return kvc_paged_step(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_paged_step(&args, stream)), [&] { explain(args); });
    return {out, lse};
}

}  // namespace

KVC_REGISTER(paged_step_,
             "paged_step_(Tensor queries, Tensor keys, Tensor values, Tensor(a!) k_pages, Tensor(b!) v_pages, "
             "Tensor(c!) block_table, Tensor(d!) lengths, Tensor(e!) refs, Tensor(f!) free_pages, "
             "Tensor(g!) free_count, Tensor? shift, Tensor? begin, Tensor? cos, Tensor? sin, float scale, "
             "Tensor? sink_logits, float softcap, Tensor(h!)? key_scales=None, Tensor(i!)? value_scales=None) "
             "-> (Tensor, Tensor)")
