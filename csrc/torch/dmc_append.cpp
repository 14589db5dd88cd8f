#include "dmc_append.h"
#include "rows.h"

namespace {

void explain(const kvc_dmc_append_args& args) {
    const char* op = "dmc_append_";
    const kvc_page_table& table = args.table;
    explain_table(op, table);
    find_outside(op, "counts", args.counts, table.R, 0, args.S, "S");
    for (int64_t r = 0; r < table.R; r++) {
        const int64_t length = table.lengths[r], count = args.counts ? args.counts[r] : args.S, first = args.S - count;
        const int64_t b = r / args.Hkv;
        for (int64_t s = first; args.positions && args.rotary_dim && s < args.S; s++) {
            const int32_t position = args.positions[b * args.S + s];
            KVC_CHECK(position >= 0 && position < args.table_rows, op, ": positions must be between 0 and ",
                      args.table_rows - 1, " (last row of cos and sin), got ", position, " at [", b, ", ", s, "]");
        }
        int64_t opened = 0;
        for (int64_t s = first; s < args.S; s++) {
            const bool open = s > first || (length > 0 && args.tail_counts[r] > 0);
            opened += !(open && args.alpha[r * args.S + s] > 0.5f);
        }
        KVC_CHECK(length + opened <= table.blocks * table.P, op, ": block_table must have room for ", length + opened,
                  " slots in row ", r, " (", length, " held and ", opened, " new), got ", table.blocks, " pages of ",
                  table.P);
        explain_pages(op, table, r, length > 0 ? (length - 1) / table.P * table.P : 0);
    }
}

void dmc_append_(Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor lengths, Tensor refs, Tensor free_pages,
                 Tensor free_count, Tensor tail_keys, Tensor tail_values, Tensor tail_weights, Tensor tail_counts,
                 const Tensor& given_keys, const Tensor& given_values, const Tensor& given_alpha,
                 const Tensor& given_omega, const std::optional<Tensor>& given_cos,
                 const std::optional<Tensor>& given_sin, const std::optional<Tensor>& given_positions,
                 const std::optional<Tensor>& given_counts, int64_t neuron, int64_t window,
                 std::optional<Tensor> key_scales, std::optional<Tensor> value_scales) {
    const Changed changed = changed_of(block_table, lengths, refs, free_pages, free_count,
                                       {k_pages, v_pages, tail_keys, tail_values, tail_weights, tail_counts}, key_scales,
                                       value_scales);
    const Tensor keys = changed.apart(given_keys), values = changed.apart(given_values);
    const Tensor alpha = changed.apart(given_alpha), omega = changed.apart(given_omega);
    const std::optional<Tensor> cos = changed.apart(given_cos), sin = changed.apart(given_sin);
    const std::optional<Tensor> positions = changed.apart(given_positions), counts = changed.apart(given_counts);
    KVC_CHECK(k_pages.dim() == 3 && keys.dim() == 4, "k_pages must be [pages, P, D] and keys [B, Hkv, S, D]");
    const int64_t B = keys.size(0), Hkv = keys.size(1), S = keys.size(2), R = block_table.size(0);
    KVC_CHECK(!cos.has_value() || positions.has_value() || (cos->dim() == 2 && S <= cos->size(0)), "cos and sin need ", S, " rows");
    check_array(alpha, block_table, ScalarType::Float, {B, Hkv, S}, "alpha");
    check_array(omega, block_table, ScalarType::Float, {B, Hkv, S}, "omega");
    const kvc_rows rows = changed_rows_of(k_pages, v_pages, key_scales, value_scales, block_table, refs.size(0), refs.size(0), keys.size(3));
    const kvc_page_table table = table_of(block_table, lengths, refs, free_pages, free_count, k_pages.size(1));
    const int64_t D = k_pages.size(2);
    const Tensor& numbers = rows.key_scales ? keys : k_pages;  // rows of codes take new tokens of any dtype
    const tail_arrays tail = tail_of(tail_keys, tail_values, tail_weights, tail_counts, block_table, R, window, D);
    const rotation turns = rotation_of(cos, sin, block_table);
    KVC_CHECK(B * Hkv == R, "keys must be of ", R, " rows, got ", B * Hkv);
    kvc_dmc_append_args args = {
        .table = table, .rows = rows,
        .k = tokens_of(keys, numbers, k_pages, B, Hkv, S, "keys"), .v = tokens_of(values, numbers, k_pages, B, Hkv, S, "values"),
        .tail_k = tail.k, .tail_v = tail.v, .tail_w = tail.w, .tail_counts = tail.counts,
        .alpha = static_cast<const float*>(alpha.const_data_ptr()), .omega = static_cast<const float*>(omega.const_data_ptr()),
        .cos = turns.cos, .sin = turns.sin,
        .positions = int_array(positions, block_table, {B, S}, "positions"),
        .counts = int_array(counts, block_table, {R}, "counts"),
        .scratch = nullptr,
        .B = B, .Hkv = Hkv, .S = S, .D = D, .rotary_dim = turns.dim, .table_rows = turns.rows,
        .neuron = neuron, .window = window,
    };
    const int64_t pieces = (S + KVC_DMC_PIECE - 1) / KVC_DMC_PIECE;
    Tensor scratch = torch::stable::new_empty(block_table, {R * (3 + pieces) + 1}, ScalarType::Int);
    args.scratch = ints(scratch);
    run("dmc_append_", block_table, [&] { return kvc_dmc_append(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_dmc_append(&args, stream)), [&] { explain(args); });
}

}  // namespace

KVC_REGISTER(dmc_append_,
             "dmc_append_(Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor(c!) block_table, Tensor(d!) lengths, "
             "Tensor(e!) refs, Tensor(f!) free_pages, Tensor(g!) free_count, Tensor(h!) tail_keys, "
             "Tensor(i!) tail_values, Tensor(j!) tail_weights, Tensor(k!) tail_counts, Tensor keys, Tensor values, "
             "Tensor alpha, Tensor omega, Tensor? cos, Tensor? sin, Tensor? positions, Tensor? counts, int neuron, "
             "int window, Tensor(l!)? key_scales=None, Tensor(m!)? value_scales=None) -> ()")
