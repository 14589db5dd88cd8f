#include "step.h"

namespace {

void explain(const kvc_ring_step_args& args) {
    const char* op = "ring_step_";
    const kvc_step& step = args.step;
    const int64_t full = args.sinks + args.window;
    find_outside(op, "places", args.places, step.B, 0, INT32_MAX - 1, "most that int32 counts");
    for (int64_t b = 0; b < step.B; b++) {
        const int64_t t = args.places[b], slots = args.chunked ? t % args.window + 1 : t < full ? t + 1 : full;
        KVC_CHECK(slots <= args.capacity, op, ": k_ring must have room for ", slots, " slots, got ", args.capacity,
                  " for place ", t, " of sequence ", b);
        explain_positions(op, "places - base", step, t - (args.base ? args.base[b] : 0), "sequence", b);
    }
    const int64_t rows = args.far.keys ? args.window + 1 : full;
    KVC_CHECK(!args.sinks || !step.rotary_dim || rows <= step.table_rows, op, ": cos and sin must have ", rows,
              " rows for the queries of the sinks, got ", step.table_rows);
    if (step.table.R) explain_rows(op, step.table, 1);
}

std::tuple<Tensor, Tensor> ring_step_(const Tensor& queries, const Tensor& keys, const Tensor& values, Tensor k_ring,
                                      Tensor v_ring, Tensor places, std::optional<Tensor> k_far,
                                      std::optional<Tensor> v_far, std::optional<Tensor> marks,
                                      std::optional<Tensor> k_pages, std::optional<Tensor> v_pages,
                                      std::optional<Tensor> block_table, std::optional<Tensor> lengths,
                                      std::optional<Tensor> refs, std::optional<Tensor> free_pages,
                                      std::optional<Tensor> free_count, const std::optional<Tensor>& given_base,
                                      const std::optional<Tensor>& given_alpha, const std::optional<Tensor>& cos,
                                      const std::optional<Tensor>& sin, int64_t window, int64_t sinks, bool chunked, bool own,
                                      int64_t neuron, double factor, double shift, double margin, double scale,
                                      const std::optional<Tensor>& sink_logits, double softcap,
                                      std::optional<Tensor> key_scales, std::optional<Tensor> value_scales,
                                      std::optional<Tensor> k_ring_scales, std::optional<Tensor> v_ring_scales,
                                      std::optional<Tensor> k_far_scales, std::optional<Tensor> v_far_scales) {
    Changed changed = {{"k_ring", &k_ring}, {"v_ring", &v_ring}, {"places", &places}};
    for (const auto& [name, x] : {std::pair{"k_far", &k_far}, {"v_far", &v_far}, {"marks", &marks},
                                  {"k_pages", &k_pages}, {"v_pages", &v_pages}, {"block_table", &block_table},
                                  {"lengths", &lengths}, {"refs", &refs}, {"free_pages", &free_pages},
                                  {"free_count", &free_count}, {"key_scales", &key_scales},
                                  {"value_scales", &value_scales}, {"k_ring_scales", &k_ring_scales},
                                  {"v_ring_scales", &v_ring_scales}, {"k_far_scales", &k_far_scales},
                                  {"v_far_scales", &v_far_scales}}) {
        changed.add(name, *x);
    }
    Step step(changed, k_ring, "k_ring", queries, keys, values, cos, sin, scale, sink_logits, softcap);
    const std::optional<Tensor> base = changed.apart(given_base), alpha = changed.apart(given_alpha);
    const int64_t B = step.frame.B, R = k_ring.size(0), D = step.frame.D;
    KVC_CHECK(window >= 1 && window <= INT32_MAX && sinks >= 0 && sinks <= INT32_MAX - window,
              "window must be at least 1 and sinks at least 0, got ", window, " and ", sinks);
    const kvc_rows ring = changed_rows_of(k_ring, v_ring, k_ring_scales, v_ring_scales, k_ring, R, R, D);
    step.take(ring, k_ring, *step.keys);
    const int64_t capacity = k_ring.size(1);
    KVC_CHECK(capacity <= sinks + window, "k_ring must have at most ", sinks + window, " slots, got ", capacity);
    KVC_CHECK(!ring.key_scales || !(block_table.has_value() || neuron >= 0), "k_ring of codes comes without pages and neuron");
    KVC_CHECK(k_far.has_value() == v_far.has_value(), "k_far and v_far must come together");
    KVC_CHECK(!(sinks && (chunked || block_table.has_value())), "sinks must be 0 with chunks or pages, got ", sinks);
    KVC_CHECK(!(chunked && block_table.has_value()), "chunked must be False with pages, got True");
    KVC_CHECK(neuron >= -1 && neuron < D, "neuron must be between -1 and ", D - 1, ", got ", neuron);
    KVC_CHECK(!marks.has_value() || alpha.has_value() || neuron >= 0, "marks need alpha or a neuron");
    if (marks.has_value()) check_array(*marks, k_ring, ScalarType::Bool, {R, capacity}, "marks");
    kvc_rows far = {};
    KVC_CHECK(k_far.has_value() || !(k_far_scales.has_value() || v_far_scales.has_value()), "k_far_scales need k_far");
    if (sinks && k_far.has_value()) {
        far = changed_rows_of(*k_far, *v_far, k_far_scales, v_far_scales, k_ring, R, R, D);
        KVC_CHECK(far.format == ring.format && k_far->size(1) == sinks, "k_far must be [R, sinks, D] as k_ring is stored");
    }
    for (const auto* part : {&lengths, &refs, &free_pages, &free_count, &k_pages, &v_pages}) {
        KVC_CHECK(part->has_value() == block_table.has_value(),
                  "block_table must come with the rest of a table, k_pages and v_pages");
    }
    KVC_CHECK(block_table || !(key_scales || value_scales), "key_scales and value_scales must come with block_table");
    if (block_table.has_value()) {
        KVC_CHECK(marks.has_value(), "block_table must come with marks");
        check_device(*block_table, k_ring, "block_table");
        const kvc_page_table table = table_of(*block_table, *lengths, *refs, *free_pages, *free_count, page_size_of(*k_pages));
        KVC_CHECK(table.R == R, "block_table must have ", R, " rows, got ", table.R);
        step.keep(*k_pages, *v_pages, key_scales, value_scales, table, k_ring, table.pages);
        KVC_CHECK(key_scales || k_pages->scalar_type() == k_ring.scalar_type(), "k_pages must have the dtype of k_ring");
    }
    kvc_ring_step_args args = {
        .step = step.frame, .ring = ring, .far = far,
        .places = step.places(places),
        .base = int_array(base, k_ring, {B, 1}, "base"),
        .marks = marks.has_value() ? static_cast<uint8_t*>(marks->mutable_data_ptr()) : nullptr,
        .alpha = step.gates(alpha, "alpha"),
        .capacity = capacity, .window = window, .sinks = sinks, .neuron = neuron,
        .chunked = chunked, .own = own,
        .decision_scale = static_cast<float>(factor),
        .decision_shift = static_cast<float>(shift),
        .decision_margin = static_cast<float>(margin),
    };
    KVC_RUN_STEP(ring_step, step.queries, args);
    return {step.out, step.lse};
}

}  // namespace

KVC_REGISTER(ring_step_,
             "ring_step_(Tensor queries, Tensor keys, Tensor values, Tensor(a!) k_ring, Tensor(b!) v_ring, "
             "Tensor(c!) places, Tensor(d!)? k_far, Tensor(e!)? v_far, Tensor(f!)? marks, Tensor(g!)? k_pages, "
             "Tensor(h!)? v_pages, Tensor(i!)? block_table, Tensor(j!)? lengths, Tensor(k!)? refs, "
             "Tensor(l!)? free_pages, Tensor(m!)? free_count, Tensor? base, Tensor? alpha, Tensor? cos, Tensor? sin, "
             "int window, int sinks, bool chunked, bool own, int neuron, float factor, float shift, float margin, "
             "float scale, Tensor? sink_logits, float softcap, Tensor(n!)? key_scales=None, "
             "Tensor(o!)? value_scales=None, Tensor(p!)? k_ring_scales=None, Tensor(q!)? v_ring_scales=None, "
             "Tensor(r!)? k_far_scales=None, Tensor(s!)? v_far_scales=None) -> (Tensor, Tensor)")
