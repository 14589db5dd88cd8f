#include "rows.h"

// Fails with the first row that has more keys than there are columns of probabilities.
static void find_long_row(const char* op, bool wanted, const int32_t* begin, const int32_t* end, int64_t R,
                          int64_t columns) {
    for (int64_t r = 0; wanted && r < R; r++) {
        const int64_t keys = end[r] - (begin ? begin[r] : 0);
        KVC_CHECK(keys <= columns, op, ": probabilities must have a column for each of ", keys, " keys of row ", r,
                  ", got ", columns);
    }
}

// Fails with the first row whose keys are not there.
static void explain_rows(const kvc_decode_args& args, int64_t R) {
    const int64_t capacity = args.block_table ? args.blocks * args.P : args.P;
    const char* slots = args.block_table ? "slots in a row of block_table" : "slots in a page";
    find_outside("decode", "end", args.end, R, 0, capacity, slots);
    if (args.value_table)
        find_outside("decode", "end", args.end, R, 0, args.value_blocks * args.P, "slots in a row of value_table");
    find_long_row("decode", args.probabilities != nullptr, args.begin, args.end, R, args.columns);
    for (int64_t r = 0; r < R; r++) {
        const int64_t begin = args.begin ? args.begin[r] : 0, end = args.end[r];
        KVC_CHECK(begin >= 0 && begin <= end, "decode: begin must be between 0 and ", end, " (end), got ", begin, " at ",
                  r);
        if (!args.block_table) continue;
        const int64_t front = args.sinks < begin ? args.sinks : begin;
        const int64_t firsts[] = {0, begin}, lasts[] = {front, end};
        for (int i = 0; i < 2; i++) {
            if (firsts[i] == lasts[i]) continue;
            const int64_t first = firsts[i] / args.P, last = (lasts[i] - 1) / args.P;
            find_missing_page("decode", args.block_table, args.blocks, r, first, last, args.pages);
            if (!args.value_table) continue;
            find_missing_page("decode", args.value_table, args.value_blocks, r, first, last, args.value_pages,
                              "value_table");
        }
    }
}

// probabilities: NULL, or float32 [B, Hq, columns] that are written.
static std::tuple<Tensor, Tensor> decode_to(const Tensor& queries, const Tensor& k_pages, const Tensor& v_pages,
                                            const std::optional<Tensor>& block_table,
                                            const std::optional<Tensor>& value_table,
                                            const std::optional<Tensor>& begin, const Tensor& end, double scale,
                                            bool causal, int64_t sinks, const std::optional<Tensor>& sink_logits,
                                            double softcap, Tensor* probabilities,
                                            const std::optional<Tensor>& key_scales,
                                            const std::optional<Tensor>& value_scales) {
    const kvc_view q = view_of(queries, "queries");
    const int64_t B = queries.size(0), Hq = queries.size(1), S = queries.size(2), D = queries.size(3);
    KVC_CHECK(block_table.has_value() || !value_table.has_value(), "value_table needs a block_table");
    KVC_CHECK(k_pages.dim() == 3, "k_pages must be [pages, P, D]");
    const kvc_rows stored = rows_of(k_pages, v_pages, key_scales, value_scales, queries, -1,
                                    value_table.has_value() ? -1 : k_pages.size(0), D);
    check_array(end, queries, ScalarType::Int, {-1}, "end");
    const int64_t R = end.size(0), Hkv = B > 0 ? R / B : 0;
    KVC_CHECK(B > 0 && R == B * Hkv && Hkv > 0 && Hq % Hkv == 0,
              "end must have one entry per row, B*Hkv with Hkv dividing Hq; got ", R);
    Tensor out = torch::stable::new_empty(queries, {B, Hq, S, D});
    Tensor lse = torch::stable::new_empty(queries, {B, Hq, S}, ScalarType::Float);
    kvc_decode_args args = {
        .out = out.mutable_data_ptr(),
        .lse = static_cast<float*>(lse.mutable_data_ptr()),
        .q = q,
        .rows = stored,
        .block_table = int_array(block_table, queries, {R, -1}, "block_table"),
        .begin = int_array(begin, queries, {R}, "begin"),
        .end = static_cast<const int32_t*>(end.const_data_ptr()),
        .scratch = nullptr,
        .B = B, .Hq = Hq, .Hkv = Hkv, .S = S, .D = D,
        .P = k_pages.size(1),
        .pages = k_pages.size(0),
        .blocks = block_table.has_value() ? block_table->size(1) : 1,
        .scale = static_cast<float>(scale),
        .causal = causal,
        .value_table = int_array(value_table, queries, {R, -1}, "value_table"),
        .value_pages = v_pages.size(0),
        .value_blocks = value_table.has_value() ? value_table->size(1) : 1,
        .probabilities = nullptr,
        .columns = 0,
        .sinks = sinks,
        .softcap = static_cast<float>(softcap),
        .sink_logits = sinks_array(sink_logits, queries, Hq),
    };
    if (probabilities) {
        check_array(*probabilities, queries, ScalarType::Float, {B, Hq, -1}, "probabilities");
        KVC_CHECK(S == 1, "probabilities are of one query per head, got ", S);
        args.columns = probabilities->size(2);
        static float nothing;  // wanted, though there is no column: a row that has keys is refused
        args.probabilities = args.columns ? static_cast<float*>(probabilities->mutable_data_ptr()) : &nothing;
    }
    Tensor scratch = scratch_for(queries, KVC_SCRATCH_BYTES(queries, decode, &args));
    args.scratch = scratch.mutable_data_ptr();
    run("decode", queries, [&] { return kvc_decode(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_decode(&args, stream)), [&] { explain_rows(args, R); });
    return {out, lse};
}

static std::tuple<Tensor, Tensor> decode(const Tensor& queries, const Tensor& k_pages, const Tensor& v_pages,
                                         const std::optional<Tensor>& block_table,
                                         const std::optional<Tensor>& value_table, const std::optional<Tensor>& begin,
                                         const Tensor& end, double scale, bool causal, int64_t sinks,
                                         const std::optional<Tensor>& sink_logits, double softcap,
                                         const std::optional<Tensor>& key_scales,
                                         const std::optional<Tensor>& value_scales) {
    KVC_CHECK(sinks >= 0, "sinks must be at least 0, got ", sinks);
    return decode_to(queries, k_pages, v_pages, block_table, value_table, begin, end, scale, causal, sinks,
                     sink_logits, softcap, nullptr, key_scales, value_scales);
}

static std::tuple<Tensor, Tensor> decode_probabilities(const Tensor& queries, const Tensor& k_pages,
                                                       const Tensor& v_pages, const std::optional<Tensor>& block_table,
                                                       const std::optional<Tensor>& value_table,
                                                       const std::optional<Tensor>& begin, const Tensor& end,
                                                       Tensor probabilities, double scale,
                                                       const std::optional<Tensor>& sink_logits, double softcap,
                                                       const std::optional<Tensor>& key_scales,
                                                       const std::optional<Tensor>& value_scales) {
    return decode_to(queries, k_pages, v_pages, block_table, value_table, begin, end, scale, false, 0,
                     sink_logits, softcap, &probabilities, key_scales, value_scales);
}

static std::tuple<Tensor, Tensor> decode_shared(const Tensor& near, const Tensor& near_lse, const Tensor& probabilities,
                                                const Tensor& far_lse, const Tensor& v_pages, const Tensor& block_table,
                                                const Tensor& begin, const Tensor& end, double threshold,
                                                const std::optional<Tensor>& value_scales) {
    KVC_CHECK(near.dim() == 4 && near.is_contiguous() && near.size(2) == 1, "near must be contiguous [B, Hq, 1, D]");
    const int64_t B = near.size(0), Hq = near.size(1), D = near.size(3);
    check_array(near_lse, near, ScalarType::Float, {B, Hq, 1}, "near_lse");
    check_array(far_lse, near, ScalarType::Float, {B, Hq, 1}, "far_lse");
    check_device(probabilities, near, "probabilities");
    KVC_CHECK(probabilities.dim() == 3 && probabilities.size(0) == B && probabilities.size(1) == Hq &&
                  probabilities.scalar_type() == ScalarType::Float &&
                  (probabilities.numel() == 0 || probabilities.size(2) <= 1 || probabilities.stride(2) == 1),
              "probabilities must be float32 [B, Hq, columns], contiguous in its last dimension");
    kvc_rows rows = {nullptr, const_cast<void*>(v_pages.const_data_ptr()), nullptr, nullptr, KVC_FORMAT_INT8};
    if (value_scales.has_value()) {
        rows.format = format_of_values(v_pages);
        rows.value_scales = const_cast<void*>(value_scales->const_data_ptr());
        check_array(*value_scales, near, ScalarType::Half, {v_pages.size(0), v_pages.size(1)}, "value_scales");
        KVC_CHECK(rows.format != KVC_FORMAT_K8V4 || D % 2 == 0, "v_pages of 4 bits need an even head dim, got ", D);
    } else {
        rows.format = static_cast<kvc_format>(dtype_of(v_pages, "v_pages without scales"));
    }
    check_array(v_pages, near, v_pages.scalar_type(), {-1, -1, rows.format == KVC_FORMAT_K8V4 ? D / 2 : D}, "v_pages");
    check_array(end, near, ScalarType::Int, {-1}, "end");
    const int64_t R = end.size(0), Hkv = B > 0 ? R / B : 0;
    KVC_CHECK(B > 0 && R == B * Hkv && Hkv > 0 && Hq % Hkv == 0,
              "end must have one entry per row, B*Hkv with Hkv dividing Hq; got ", R);
    Tensor out = torch::stable::empty_like(near);
    Tensor skipped = torch::stable::new_empty(near, {B, Hq, 1}, ScalarType::Byte);
    kvc_decode_shared_args args = {
        .out = out.mutable_data_ptr(),
        .skipped = static_cast<uint8_t*>(skipped.mutable_data_ptr()),
        .near = near.const_data_ptr(),
        .near_lse = static_cast<const float*>(near_lse.const_data_ptr()),
        .far_lse = static_cast<const float*>(far_lse.const_data_ptr()),
        .probabilities = static_cast<const float*>(probabilities.const_data_ptr()),
        .stride_b = probabilities.stride(0),
        .stride_h = probabilities.stride(1),
        .columns = probabilities.size(2),
        .dtype = dtype_of(near, "near"),
        .rows = rows,
        .block_table = int_array(block_table, near, {R, -1}, "block_table"),
        .begin = int_array(begin, near, {R}, "begin"),
        .end = static_cast<const int32_t*>(end.const_data_ptr()),
        .scratch = nullptr,
        .B = B, .Hq = Hq, .Hkv = Hkv, .D = D,
        .P = v_pages.size(1),
        .pages = v_pages.size(0),
        .blocks = block_table.size(1),
        .threshold = static_cast<float>(threshold),
    };
    Tensor scratch = scratch_for(near, KVC_SCRATCH_BYTES(near, decode_shared, &args));
    args.scratch = scratch.mutable_data_ptr();
    run("decode_shared", near, [&] { return kvc_decode_shared(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_decode_shared(&args, stream)), [&] {
            find_outside("decode_shared", "end", args.end, R, 0, args.blocks * args.P, "slots in a row of block_table");
            find_long_row("decode_shared", true, args.begin, args.end, R, args.columns);
            for (int64_t r = 0; r < R; r++) {
                const int64_t first = args.begin[r], last = args.end[r];
                KVC_CHECK(first >= 0 && first <= last, "decode_shared: begin must be between 0 and ", last,
                          " (end), got ", first, " at ", r);
                if (first == last) continue;
                find_missing_page("decode_shared", args.block_table, args.blocks, r, first / args.P,
                                  (last - 1) / args.P, args.pages);
            }
        });
    return {out, skipped};
}

static std::tuple<Tensor, Tensor> merge_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                               const Tensor& lse_b) {
    KVC_CHECK(out_a.dim() == 4 && out_a.is_contiguous(), "out_a must be contiguous [B, Hq, S, D]");
    const int64_t B = out_a.size(0), Hq = out_a.size(1), S = out_a.size(2), D = out_a.size(3);
    check_array(out_b, out_a, out_a.scalar_type(), {B, Hq, S, D}, "out_b");
    check_array(lse_a, out_a, ScalarType::Float, {B, Hq, S}, "lse_a");
    check_array(lse_b, out_a, ScalarType::Float, {B, Hq, S}, "lse_b");
    Tensor out = torch::stable::empty_like(out_a), lse = torch::stable::empty_like(lse_a);
    const kvc_merge_states_args args = {
        .out = out.mutable_data_ptr(),
        .lse = static_cast<float*>(lse.mutable_data_ptr()),
        .out_a = out_a.const_data_ptr(),
        .out_b = out_b.const_data_ptr(),
        .lse_a = static_cast<const float*>(lse_a.const_data_ptr()),
        .lse_b = static_cast<const float*>(lse_b.const_data_ptr()),
        .dtype = dtype_of(out_a, "out_a"),
        .N = B * Hq * S,
        .D = D,
    };
    run("merge_states", out_a, [&] { return kvc_merge_states(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_merge_states(&args, stream)));
    return {out, lse};
}

KVC_REGISTER(decode,
             "decode(Tensor queries, Tensor k_pages, Tensor v_pages, Tensor? block_table, Tensor? value_table, "
             "Tensor? begin, Tensor end, float scale, bool causal, int sinks, Tensor? sink_logits=None, float softcap=0., "
             "Tensor? key_scales=None, Tensor? value_scales=None) -> (Tensor, Tensor)")
KVC_REGISTER(decode_probabilities,
             "decode_probabilities(Tensor queries, Tensor k_pages, Tensor v_pages, Tensor? block_table, "
             "Tensor? value_table, Tensor? begin, Tensor end, Tensor(a!) probabilities, float scale, "
             "Tensor? sink_logits=None, float softcap=0., Tensor? key_scales=None, Tensor? value_scales=None) "
             "-> (Tensor, Tensor)")
KVC_REGISTER(decode_shared,
             "decode_shared(Tensor near, Tensor near_lse, Tensor probabilities, Tensor far_lse, Tensor v_pages, "
             "Tensor block_table, Tensor begin, Tensor end, float threshold, Tensor? value_scales=None) "
             "-> (Tensor, Tensor)")
KVC_REGISTER(merge_states,
             "merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)")
