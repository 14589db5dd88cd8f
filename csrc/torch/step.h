// What the ops of a whole decoded step have in common: their frame, filled from tensors.
#pragma once
#include "page_table.h"
#include "rows.h"

#include <string>

namespace {

// The tensors that all of them take, none of which shares memory with what the op changes, and those that they make.
struct Step {
    Tensor queries, out, lse;
    std::optional<Tensor> keys, values, cos, sin;
    kvc_step frame = {};

    // rows: block_table, or rings: one row for each KV head of a sequence. one: of one token each.
    Step(const Changed& changed, const Tensor& rows, const char* name, const Tensor& q, const std::optional<Tensor>& k,
         const std::optional<Tensor>& v, const std::optional<Tensor>& cosines, const std::optional<Tensor>& sines,
         double scale, const std::optional<Tensor>& sink_logits, double softcap, bool one = true)
        : queries(changed.apart(q)), keys(changed.apart(k)), values(changed.apart(v)), cos(changed.apart(cosines)),
          sin(changed.apart(sines)) {
        frame.q = view_of(queries, "queries");
        const int64_t B = queries.size(0), Hq = queries.size(1), S = queries.size(2), D = queries.size(3);
        check_device(queries, rows, "queries");
        KVC_CHECK(!one || S == 1, "queries must be of one token, got ", S);
        KVC_CHECK(Hq > 0 || B == 0, "queries must have at least one head, got 0");
        KVC_CHECK(D >= 1 && D <= KVC_MAX_HEAD_DIM, "queries must have a head dim between 1 and ",
                  static_cast<int>(KVC_MAX_HEAD_DIM), ", got ", D);
        KVC_CHECK(rows.dim() >= 1, name, " must have rows");
        const int64_t R = rows.size(0), Hkv = B ? R / B : 0;
        KVC_CHECK(B * Hkv == R && (Hkv ? Hq % Hkv == 0 : B == 0), name, " must have B*Hkv rows, Hkv dividing Hq, got ", R);
        const rotation turns = rotation_of(cos, sin, rows);
        frame.cos = turns.cos, frame.sin = turns.sin, frame.rotary_dim = turns.dim, frame.table_rows = turns.rows;
        frame.B = B, frame.Hq = Hq, frame.Hkv = Hkv, frame.S = S, frame.D = D;
        frame.scale = static_cast<float>(scale), frame.softcap = static_cast<float>(softcap);
        frame.sink_logits = sinks_array(sink_logits, queries, Hq);
        out = torch::stable::new_empty(queries, {B, Hq, S, D});
        lse = torch::stable::new_empty(queries, {B, Hq, S}, ScalarType::Float);
        frame.out = out.mutable_data_ptr(), frame.lse = static_cast<float*>(lse.mutable_data_ptr());
    }

    // Pages that the op changes, and their table; value_pages: how many the values have.
    void keep(const Tensor& k_pages, const Tensor& v_pages, const std::optional<Tensor>& key_scales,
              const std::optional<Tensor>& value_scales, const kvc_page_table& table, const Tensor& like, int64_t value_pages) {
        KVC_CHECK((table.P & (table.P - 1)) == 0, "k_pages must have a page size that is a power of two, got ", table.P);
        frame.table = table;
        frame.rows = changed_rows_of(k_pages, v_pages, key_scales, value_scales, like, table.pages, value_pages, frame.D);
    }

    // The new tokens, for rows in `pages`: in the dtype of those; rows of codes take any, that of `numbers`.
    void take(const kvc_rows& rows, const Tensor& pages, const Tensor& numbers) {
        const Tensor& like = rows.key_scales ? numbers : pages;
        frame.k = tokens_of(*keys, like, pages, frame.B, frame.Hkv, frame.S, "keys");
        frame.v = tokens_of(*values, like, pages, frame.B, frame.Hkv, frame.S, "values");
    }

    // int32 [B, 1]: the sequences' places, which the op changes.
    int32_t* places(const Tensor& x) const {
        check_array(x, queries, ScalarType::Int, {frame.B, 1}, "places");
        return ints(x);
    }

    // float32 [B, Hkv, 1] or NULL: what each row is told.
    const float* gates(const std::optional<Tensor>& x, const char* name) const {
        if (!x.has_value()) return nullptr;
        check_array(*x, queries, ScalarType::Float, {frame.B, frame.Hkv, 1}, name);
        return static_cast<const float*>(x->const_data_ptr());
    }
};

// The pages' size; 0 for what are no pages, which table_of refuses.
inline int64_t page_size_of(const Tensor& k_pages) { return k_pages.dim() == 3 ? k_pages.size(1) : 0; }

// Calls op's kernel with its scratch. args holds step.frame, and explain(args) says what is wrong with an index.
#define KVC_RUN_STEP(op, queries, args)                                               \
    const Tensor scratch = scratch_for(queries, KVC_SCRATCH_BYTES(queries, op, &args)); \
    args.step.scratch = scratch.mutable_data_ptr();                                   \
    run(#op "_", queries, [&] { return kvc_##op(&args, torch_parallel_for); },        \
        KVC_CUDA_CALL(kvc_cuda_##op(&args, stream)), [&] { explain(args); })

// Fails where new tokens from `position` on, of a sequence (or row), have no rows of cos and sin. from: what it is made of.
inline void explain_positions(const char* op, const char* from, const kvc_step& step, int64_t position, const char* of,
                              int64_t at) {
    const int64_t last = position + step.S - 1;
    if (!step.rotary_dim || (position >= 0 && last < step.table_rows)) return;
    fail(op, ": positions (", from, ") must be between 0 and ", step.table_rows - 1, " (last row of cos and sin), got ",
         position, step.S > 1 ? " to " + std::to_string(last) : "", " in ", of, " ", at);
}

// Fails with what is wrong with a table's rows, or with an append of S tokens to each.
inline void explain_rows(const char* op, const kvc_page_table& table, int64_t S) {
    explain_table(op, table);
    for (int64_t r = 0; r < table.R; r++) explain_pages(op, table, r, 0);
    if (S) explain_append(op, table, nullptr, S);
}

}  // namespace
