#include <vector>

#include "page_table.h"

// Slots of one array, [pages, P, ...] contiguous, any dtype.
static kvc_slot_array slots_of(const Tensor& array, const kvc_page_table& table, const Tensor& like) {
    check_device(array, like, "arrays");
    KVC_CHECK(array.is_contiguous(), "arrays must be contiguous");
    KVC_CHECK(array.dim() >= 2 && array.size(0) == table.pages && array.size(1) == table.P,
              "arrays must be [", table.pages, ", ", table.P, ", ...]");
    int64_t bytes = static_cast<int64_t>(array.element_size());
    for (int64_t d = 2; d < array.dim(); d++) bytes *= array.size(d);
    return {.pages = array.mutable_data_ptr(), .tokens = nullptr, .slot_bytes = bytes,
            .stride_b = 0, .stride_h = 0, .stride_s = 0};
}

static void explain_truncate(const kvc_truncate_rows_args& args) {
    explain_table("truncate_rows_", args.table);
    for (int64_t r = 0; r < args.table.R; r++) {
        KVC_CHECK(args.new_lengths[r] >= 0 && args.new_lengths[r] <= args.table.lengths[r],
                  "truncate_rows_: new_lengths must be between 0 and ", args.table.lengths[r], " (lengths), got ",
                  args.new_lengths[r], " at ", r);
        explain_pages("truncate_rows_", args.table, r, args.new_lengths[r]);
    }
}

static void explain_compact(const kvc_compact_pages_args& args) {
    explain_table("compact_pages_", args.table);
    for (int64_t r = 0; r < args.table.R; r++) {
        const int64_t kept = args.kept ? args.kept[r] : args.K;
        KVC_CHECK(kept <= args.K, "compact_pages_: kept must be at most ", args.K, " (K), got ", kept, " at ", r);
        find_not_rising("compact_pages_", args.indices, args.K, r, kept, args.table.lengths[r]);
        if (kept >= 0) explain_pages("compact_pages_", args.table, r, 0);
    }
}

static void check_count(const std::vector<Tensor>& arrays) {
    KVC_CHECK(arrays.size() <= KVC_MAX_SLOT_ARRAYS, "arrays must hold at most ",
              static_cast<int>(KVC_MAX_SLOT_ARRAYS), " tensors, got ", arrays.size());
}

static void append_tokens_(std::vector<Tensor> arrays, std::vector<Tensor> tokens, Tensor block_table, Tensor lengths,
                           Tensor refs, Tensor free_pages, Tensor free_count, const std::optional<Tensor>& given_counts) {
    check_count(arrays);
    KVC_CHECK(!arrays.empty() && arrays.size() == tokens.size() && tokens[0].dim() >= 3,
              "tokens must hold one [B, H, S, ...] tensor for each of arrays");
    KVC_CHECK(arrays[0].dim() >= 2, "arrays must be [pages, P, ...]");
    const int64_t B = tokens[0].size(0), H = tokens[0].size(1), S = tokens[0].size(2);
    const Changed changed = changed_of(block_table, lengths, refs, free_pages, free_count, arrays);
    for (Tensor& x : tokens) x = changed.apart(x);
    const std::optional<Tensor> counts = changed.apart(given_counts);
    kvc_append_tokens_args args = {
        .table = table_of(block_table, lengths, refs, free_pages, free_count, arrays[0].size(1)),
        .arrays = {},
        .counts = int_array(counts, block_table, {block_table.size(0)}, "counts"),
        .scratch = nullptr,
        .array_count = static_cast<int64_t>(arrays.size()),
        .heads = H,
        .S = S,
    };
    KVC_CHECK(B * H == args.table.R, "tokens must be of ", args.table.R, " rows, got ", B * H);
    for (size_t i = 0; i < arrays.size(); i++) {
        const Tensor &array = arrays[i], &from = tokens[i];
        kvc_slot_array& slots = args.arrays[i] = slots_of(array, args.table, block_table);
        check_device(from, block_table, "tokens");
        KVC_CHECK(from.scalar_type() == array.scalar_type(), "tokens must have the dtype of their array");
        KVC_CHECK(from.dim() == array.dim() + 1 && from.size(0) == B && from.size(1) == H && from.size(2) == S,
                  "tokens must be [B, H, S, ...] with the last sizes of their array");
        int64_t inner = 1;
        for (int64_t d = from.dim() - 1; d > 2; d--) {
            KVC_CHECK(from.size(d) == array.size(d - 1), "tokens must have the last sizes of their array");
            KVC_CHECK(from.size(d) <= 1 || from.stride(d) == inner, "tokens must be contiguous past [B, H, S]");
            inner *= from.size(d);
        }
        const int64_t size = static_cast<int64_t>(array.element_size());
        slots.tokens = from.const_data_ptr();
        slots.stride_b = from.stride(0) * size;
        slots.stride_h = from.stride(1) * size;
        slots.stride_s = from.stride(2) * size;
    }
    if (args.table.R == 0) return;
    Tensor scratch = torch::stable::new_empty(block_table, {args.table.R + 1}, ScalarType::Int);
    args.scratch = ints(scratch);
    run("append_tokens_", block_table, [&] { return kvc_append_tokens(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_append_tokens(&args, stream)),
        [&] { explain_append("append_tokens_", args.table, args.counts, args.S); });
}

static void truncate_rows_(Tensor block_table, Tensor lengths, Tensor refs, Tensor free_pages, Tensor free_count,
                           const Tensor& given_lengths, int64_t page_size) {
    const Changed changed = changed_of(block_table, lengths, refs, free_pages, free_count, {});
    const Tensor new_lengths = changed.apart(given_lengths);
    check_array(new_lengths, block_table, ScalarType::Int, {lengths.size(0)}, "new_lengths");
    const kvc_truncate_rows_args args = {
        .table = table_of(block_table, lengths, refs, free_pages, free_count, page_size),
        .new_lengths = static_cast<const int32_t*>(new_lengths.const_data_ptr()),
    };
    run("truncate_rows_", block_table, [&] { return kvc_truncate_rows(&args); },
        KVC_CUDA_CALL(kvc_cuda_truncate_rows(&args, stream)), [&] { explain_truncate(args); });
}

static void compact_pages_(std::vector<Tensor> arrays, Tensor block_table, Tensor lengths, Tensor refs,
                           Tensor free_pages, Tensor free_count, const Tensor& given_indices,
                           const std::optional<Tensor>& given_kept) {
    check_count(arrays);
    KVC_CHECK(!arrays.empty() && arrays[0].dim() >= 2, "arrays must be [pages, P, ...], at least one");
    const Changed changed = changed_of(block_table, lengths, refs, free_pages, free_count, arrays);
    const Tensor indices = changed.apart(given_indices);
    const std::optional<Tensor> kept = changed.apart(given_kept);
    check_array(indices, block_table, ScalarType::Int, {lengths.size(0), -1}, "indices");
    kvc_compact_pages_args args = {
        .table = table_of(block_table, lengths, refs, free_pages, free_count, arrays[0].size(1)),
        .arrays = {},
        .indices = static_cast<const int32_t*>(indices.const_data_ptr()),
        .kept = int_array(kept, block_table, {lengths.size(0)}, "kept"),
        .scratch = nullptr,
        .array_count = static_cast<int64_t>(arrays.size()),
        .K = indices.size(1),
    };
    for (size_t i = 0; i < arrays.size(); i++) args.arrays[i] = slots_of(arrays[i], args.table, block_table);
    Tensor scratch = torch::stable::new_empty(block_table, {args.table.R * args.table.blocks + 1}, ScalarType::Int);
    args.scratch = ints(scratch);
    run("compact_pages_", block_table, [&] { return kvc_compact_pages(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_compact_pages(&args, stream)), [&] { explain_compact(args); });
}

KVC_REGISTER(append_tokens_,
             "append_tokens_(Tensor(a!)[] arrays, Tensor[] tokens, Tensor(b!) block_table, Tensor(c!) lengths, "
             "Tensor(d!) refs, Tensor(e!) free_pages, Tensor(f!) free_count, Tensor? counts) -> ()")
KVC_REGISTER(truncate_rows_,
             "truncate_rows_(Tensor(a!) block_table, Tensor(b!) lengths, Tensor(c!) refs, Tensor(d!) free_pages, "
             "Tensor(e!) free_count, Tensor new_lengths, int page_size) -> ()")
KVC_REGISTER(compact_pages_,
             "compact_pages_(Tensor(a!)[] arrays, Tensor(b!) block_table, Tensor(c!) lengths, Tensor(d!) refs, "
             "Tensor(e!) free_pages, Tensor(f!) free_count, Tensor indices, Tensor? kept) -> ()")
