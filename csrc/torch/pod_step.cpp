#include "step.h"

namespace {

void explain(const kvc_pod_step_args& args) {
    const char* op = "pod_step_";
    const kvc_step& step = args.step;
    find_outside(op, "places", args.places, step.B, 0, step.rotary_dim ? step.table_rows - 1 : INT32_MAX - 1,
                 step.rotary_dim ? "last row of cos and sin" : "most that int32 counts");
    explain_rows(op, step.table, 1);
    explain_rows("pod_step_: value_table", args.values, 1);
    const bool counted = args.far == KVC_FAR_SHARED || (args.far == KVC_FAR_OWN && args.probabilities);
    for (int64_t r = 0; r < step.table.R; r++) {
        const int64_t all = args.values.lengths[r] + static_cast<int64_t>(1), P = args.values.P;
        const int64_t begin = args.sinks < all ? args.sinks : all, end = all - args.recent > begin ? all - args.recent : begin;
        KVC_CHECK(!counted || end - begin <= args.columns, op, ": probabilities must have a column for each of ",
                  end - begin, " distant tokens of row ", r, ", got ", args.columns);
        KVC_CHECK(args.far != KVC_FAR_OWN || end <= step.table.lengths[r] + static_cast<int64_t>(1), op,
                  ": lengths must be at least ", end - 1, " for the distant keys of row ", r, ", got ",
                  step.table.lengths[r]);
        const int64_t held = step.table.lengths[r] + static_cast<int64_t>(1), near = held > args.recent ? held - args.recent : 0;
        for (int64_t t = 0; t < held; t = t / P * P + P) {  // a key of each page
            const bool sees = t < (args.sinks < near ? args.sinks : near) || t / P >= near / P;
            const int64_t moved = args.moved && t / P >= args.first ? args.moved[r] : 0, place = t / P + moved;
            KVC_CHECK(!sees || (place >= 0 && place * P < all), op, ": moved must lead from page ", t / P, " of the keys of row ",
                      r, " to one of the ", (all + P - 1) / P, " pages of its values, got ", moved);
        }
        if (args.far != KVC_FAR_LED) continue;
        KVC_CHECK(end <= args.lead_blocks * P, op, ": lead.block_table must hold ", end, " slots in row ", r, ", got ",
                  args.lead_blocks, " pages of ", P);
        if (begin < end)
            find_missing_page(op, args.lead_table, args.lead_blocks, r, begin / P, (end - 1) / P, args.lead_pages,
                              "lead.block_table");
    }
}

// far: of kvc_far. probabilities, far_lse: written if the layer leads (OWN), read if it follows (SHARED).
std::tuple<Tensor, Tensor, Tensor, Tensor> pod_step_(
    const Tensor& queries, const Tensor& keys, const Tensor& values, Tensor k_pages, Tensor v_pages,
    Tensor block_table, Tensor lengths, Tensor refs, Tensor free_pages, Tensor free_count, Tensor value_table,
    Tensor value_lengths, Tensor value_refs, Tensor value_free_pages, Tensor value_free_count, Tensor places,
    const std::optional<Tensor>& moved, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, int64_t sinks,
    int64_t recent, int64_t first, int64_t far, std::optional<Tensor> probabilities, std::optional<Tensor> far_lse,
    const std::optional<Tensor>& lead_queries, const std::optional<Tensor>& lead_k_pages,
    const std::optional<Tensor>& lead_table, double scale, const std::optional<Tensor>& sink_logits, double softcap,
    double threshold, std::optional<Tensor> key_scales, std::optional<Tensor> value_scales,
    const std::optional<Tensor>& lead_key_scales) {
    Changed changed = changed_of(block_table, lengths, refs, free_pages, free_count, {k_pages, v_pages, places},
                                 key_scales, value_scales);
    for (const auto& [x, name] : {std::pair{&value_table, "value_table"}, std::pair{&value_lengths, "value_lengths"},
                                  std::pair{&value_refs, "value_refs"}, std::pair{&value_free_pages, "value_free_pages"},
                                  std::pair{&value_free_count, "value_free_count"}}) {
        changed.add(name, *x);
    }
    Step step(changed, block_table, "block_table", queries, keys, values, cos, sin, scale, sink_logits, softcap);
    const int64_t B = step.frame.B, Hq = step.frame.Hq, D = step.frame.D, R = block_table.size(0), P = page_size_of(k_pages);
    KVC_CHECK(far >= KVC_FAR_NONE && far <= KVC_FAR_SHARED, "far must be between 0 and 3, got ", far);
    KVC_CHECK(sinks >= 0 && recent >= 1 && first >= 0, "sinks and first must be at least 0 and recent at least 1, got ",
              sinks, ", ", first, " and ", recent);
    check_array(value_table, block_table, ScalarType::Int, {R, -1}, "value_table");
    step.keep(k_pages, v_pages, key_scales, value_scales, table_of(block_table, lengths, refs, free_pages, free_count, P),
              block_table, value_refs.size(0));
    step.take(step.frame.rows, k_pages, *step.keys);
    const Tensor turned = torch::stable::new_empty(queries, {B, Hq, 1, D});
    const Tensor skipped = torch::stable::new_empty(queries, {B, Hq, 1}, ScalarType::Byte);
    kvc_pod_step_args args = {};
    args.step = step.frame, args.turned = turned.mutable_data_ptr();
    args.values = table_of(value_table, value_lengths, value_refs, value_free_pages, value_free_count, P);
    args.places = step.places(places), args.moved = int_array(moved, block_table, {R}, "moved");
    args.sinks = sinks, args.recent = recent, args.first = first, args.far = static_cast<kvc_far>(far);
    args.threshold = static_cast<float>(threshold);
    args.skipped = static_cast<uint8_t*>(skipped.mutable_data_ptr());
    static float nothing;  // there is no column: a row that has distant tokens is refused
    if (far == KVC_FAR_OWN || far == KVC_FAR_SHARED) {
        KVC_CHECK(far_lse.has_value(), "far_lse must be given");
        check_array(*far_lse, queries, ScalarType::Float, {B, Hq, 1}, "far_lse");
        args.far_lse = static_cast<float*>(far_lse->mutable_data_ptr());
        KVC_CHECK(far == KVC_FAR_OWN || probabilities.has_value(), "probabilities must be given");
    }
    if (probabilities.has_value() && far != KVC_FAR_NONE) {
        check_device(*probabilities, queries, "probabilities");
        KVC_CHECK(probabilities->dim() == 3 && probabilities->size(0) == B && probabilities->size(1) == Hq &&
                      probabilities->scalar_type() == ScalarType::Float &&
                      (probabilities->numel() == 0 || probabilities->size(2) <= 1 || probabilities->stride(2) == 1) &&
                      (far == KVC_FAR_SHARED || probabilities->is_contiguous()),
                  "probabilities must be float32 [B, Hq, columns], contiguous in its last dimension");
        args.columns = probabilities->size(2);
        args.stride_b = probabilities->stride(0), args.stride_h = probabilities->stride(1);
        args.probabilities = args.columns ? static_cast<float*>(probabilities->mutable_data_ptr()) : &nothing;
    }
    if (far == KVC_FAR_LED) {
        KVC_CHECK(lead_queries.has_value() && lead_k_pages.has_value() && lead_table.has_value(),
                  "lead_queries, lead_k_pages and lead_table must be given");
        check_device(*lead_queries, queries, "lead_queries");
        KVC_CHECK(lead_queries->dim() == 4 && lead_queries->size(0) == B && lead_queries->size(1) == Hq &&
                      lead_queries->size(2) == 1 && lead_queries->size(3) == D &&
                      lead_queries->scalar_type() == queries.scalar_type(),
                  "lead_queries must be [B, Hq, 1, D] in the queries' dtype");
        check_array(*lead_k_pages, queries, k_pages.scalar_type(), {-1, P, D}, "lead_k_pages");
        args.lead_q = view_of(*lead_queries, "lead_queries");
        args.lead_keys = lead_k_pages->const_data_ptr();
        KVC_CHECK(lead_key_scales.has_value() == key_scales.has_value(),
                  "lead_key_scales must be given where key_scales are, and else not");
        if (lead_key_scales.has_value()) {
            check_array(*lead_key_scales, queries, ScalarType::Half, {lead_k_pages->size(0), P}, "lead_key_scales");
            args.lead_key_scales = lead_key_scales->const_data_ptr();
        }
        args.lead_table = int_array(lead_table, queries, {R, -1}, "lead_table");
        args.lead_pages = lead_k_pages->size(0), args.lead_blocks = lead_table->size(1);
    }
    KVC_RUN_STEP(pod_step, step.queries, args);
    return {step.out, turned, step.lse, skipped};
}

}  // namespace

KVC_REGISTER(pod_step_,
             "pod_step_(Tensor queries, Tensor keys, Tensor values, Tensor(a!) k_pages, Tensor(b!) v_pages, "
             "Tensor(c!) block_table, Tensor(d!) lengths, Tensor(e!) refs, Tensor(f!) free_pages, Tensor(g!) free_count, "
             "Tensor(h!) value_table, Tensor(i!) value_lengths, Tensor(j!) value_refs, Tensor(k!) value_free_pages, "
             "Tensor(l!) value_free_count, Tensor(m!) places, Tensor? moved, Tensor? cos, Tensor? sin, int sinks, "
             "int recent, int first, int far, Tensor(n!)? probabilities, Tensor(o!)? far_lse, Tensor? lead_queries, "
             "Tensor? lead_k_pages, Tensor? lead_table, float scale, Tensor? sink_logits, float softcap, float threshold, "
             "Tensor(p!)? key_scales=None, Tensor(q!)? value_scales=None, Tensor? lead_key_scales=None) "
             "-> (Tensor, Tensor, Tensor, Tensor)")
