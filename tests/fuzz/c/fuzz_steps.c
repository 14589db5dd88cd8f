/* Kernels of a whole decoded step. What they promise where a later page of a row does not exist is memory safety alone. */
#include "fuzz.h"

typedef struct {
    int64_t B, Hq, Hkv, D, rotary_dim, rows;
    kvc_dtype type, query_type;
} layer_sizes;

static layer_sizes any_sizes(void) {
    static const int64_t dims[] = {64, 128, 511, 512, 513, 256};
    layer_sizes n = {.B = between(0, 3), .Hkv = between(0, 2), .rows = between(0, 120), .type = any_dtype()};
    n.Hq = once_in(10) ? between(0, 6) : n.Hkv * between(0, 4);
    n.D = once_in(4) ? dims[between(0, 5)] : between(once_in(30) ? 0 : 1, 24);
    n.rotary_dim = 2 * between(0, n.D / 2);
    n.query_type = once_in(3) ? any_dtype() : n.type;
    return n;
}

static float any_scale(void) {
    return once_in(10) ? any_float() : 0.25f;
}

static kvc_page_table any_table(int64_t R) {
    const int64_t longest = between(0, once_in(4) ? 300 : 20);
    kvc_page_table table = page_table(R, (int64_t)1 << between(0, 5), longest);
    if (once_in(30)) table.P = between(0, table.P);
    return table;
}

static void table_fields(kvc_page_table *table) {
    POINTER(table->block_table), POINTER(table->lengths), POINTER(table->page_refs), POINTER(table->free_pages);
    POINTER(table->free_count);
    SIZE(table->R), SIZE(table->pages), SIZE(table->P);
}

/* The frame of a step; table, rows and what is attended to are of a format of their own. */
static kvc_step any_frame(const layer_sizes *n, int64_t S, kvc_format format, kvc_page_table table, int64_t value_pages) {
    return (kvc_step){
        .out = elements(n->B * n->Hq * S * n->D, n->query_type, WRITE), .lse = floats(n->B * n->Hq * S, WRITE),
        .q = view(n->B, n->Hq, S, n->D, n->query_type, READ), .k = view(n->B, n->Hkv, S, n->D, n->type, READ),
        .v = view(n->B, n->Hkv, S, n->D, once_in(30) ? any_dtype() : n->type, READ),
        .rows = stored(format, table.pages, value_pages, table.P > 0 ? table.P : 0, n->D, WRITE), .table = table,
        .cos = floats(n->rows * (n->D / 2), READ), .sin = floats(n->rows * (n->D / 2), READ),
        .B = n->B, .Hq = n->Hq, .Hkv = n->Hkv, .S = S, .D = n->D, .rotary_dim = n->rotary_dim, .table_rows = n->rows,
        .scale = any_scale(), .softcap = once_in(4) ? any_float() : 0.0f,
        .sink_logits = once_in(3) ? floats(n->Hq, READ) : NULL,
    };
}

static void frame_fields(kvc_step *step) {
    POINTER(step->out), POINTER(step->lse), POINTER(step->q.data), POINTER(step->k.data), POINTER(step->v.data);
    POINTER(step->rows.keys), POINTER(step->rows.values), POINTER(step->cos), POINTER(step->sin);
    table_fields(&step->table);
    SIZE(step->B), SIZE(step->Hq), SIZE(step->Hkv), SIZE(step->S), SIZE(step->D), SIZE(step->rotary_dim);
    SIZE(step->table_rows);
}

/* The format of rows beside tokens of this type. */
static kvc_format format_beside(kvc_dtype type) {
    return once_in(3) ? any_format() : (kvc_format)type;
}

static kvc_step paged_frame(int64_t S) {
    const layer_sizes n = any_sizes();
    const kvc_page_table table = any_table(n.B * n.Hkv);
    return any_frame(&n, S, format_beside(n.type), table, table.pages);
}

static void paged_step(void) {
    kvc_paged_step_args args = {.step = paged_frame(between(0, once_in(4) ? 9 : 2))};
    if (once_in(2)) args.shift = integers(args.step.table.R, 0, 9, READ);
    if (once_in(2)) args.begin = integers(args.step.table.R, 0, 5, READ);
    POINTER(args.shift);
    frame_fields(&args.step);
    damage();
    args.step.scratch = scratch(kvc_paged_step_scratch_bytes(&args));
    finish(kvc_paged_step(&args, NULL), 0);
}

static void quest_step(void) {
    kvc_quest_step_args args = {
        .step = paged_frame(once_in(20) ? between(0, 2) : 1), .held = once_in(3),
        .pages_read = once_in(4) ? any_number() : between(1, 5),
    };
    const kvc_page_table *table = &args.step.table;
    args.range_pages = table->blocks + between(once_in(20) ? -1 : 0, 2);
    if (args.held && !once_in(4)) args.step.rotary_dim = 0;
    const int64_t range_pages = args.range_pages > 0 ? args.range_pages : 0;
    const int64_t width = args.pages_read < table->blocks ? args.pages_read : table->blocks;
    args.ranges = elements(table->R * range_pages * 2 * args.step.D, args.step.k.dtype, WRITE);
    args.chosen = integers(table->R * (width > 0 ? width : 0), 0, 0, WRITE);
    POINTER(args.ranges), POINTER(args.chosen);
    frame_fields(&args.step);
    damage();
    args.step.scratch = scratch(kvc_quest_step_scratch_bytes(&args));
    finish(kvc_quest_step(&args, NULL), 0);
}

static void dmc_step(void) {
    const layer_sizes n = any_sizes();
    const int64_t R = n.B * n.Hkv, window = once_in(2) ? 0 : once_in(3) ? any_number() : between(1, 12);
    const int64_t N = window > 0 && window < 70 ? window : 1;
    const kvc_page_table table = any_table(R);
    const int decided = once_in(2);
    kvc_dmc_step_args args = {
        .step = any_frame(&n, once_in(30) ? between(0, 1) : 1, format_beside(n.type), table, table.pages),
        .tail_k = floats(R * N * n.D, WRITE), .tail_v = floats(R * N * n.D, WRITE), .tail_w = floats(R * N, WRITE),
        .tail_counts = integers(R, 0, 5, WRITE), .alpha = decided ? NULL : floats(R, READ),
        .omega = decided && !once_in(9) ? NULL : positive(R), .neuron = once_in(4) ? any_number() : between(0, n.D - 1),
        .window = window, .places = integers(n.B, 0, 40, WRITE), .offsets = once_in(2) ? integers(n.B, -9, 9, READ) : NULL,
        .decision_shift = any_float(), .decision_margin = any_float(), .omega_shift = any_float(),
        .omega_eps = any_float(), .reduce = (kvc_importance)between(0, once_in(20) ? 9 : 2),
    };
    POINTER(args.tail_k), POINTER(args.tail_v), POINTER(args.tail_w), POINTER(args.tail_counts);
    POINTER(args.alpha), POINTER(args.omega), POINTER(args.places);
    frame_fields(&args.step);
    damage();
    args.step.scratch = scratch(kvc_dmc_step_scratch_bytes(&args));
    finish(kvc_dmc_step(&args, NULL), 0);
}

static void pod_step(void) {
    const layer_sizes n = any_sizes();
    const int64_t R = n.B * n.Hkv, Hq = n.Hq;
    const kvc_page_table keys = any_table(R);
    kvc_page_table values = any_table(R);
    const int64_t odd_pages = values.P != keys.P; /* the values have pages of the keys' size, or the call is refused */
    if (odd_pages && !once_in(9)) values = page_table(R, keys.P > 0 ? keys.P : 1, between(0, 40));
    const kvc_far far = (kvc_far)between(0, once_in(20) ? 5 : 3);
    const int64_t columns = once_in(4) ? between(0, 300) : values.blocks * (values.P > 0 ? values.P : 1);
    const kvc_view probabilities = view(n.B, Hq, 1, columns, KVC_F32, WRITE);
    const int64_t lead_blocks = values.blocks + between(0, 2), lead_pages = keys.pages + between(0, 2);
    const kvc_format format = format_beside(n.type);
    const kvc_rows lead = stored(format, lead_pages, 0, keys.P > 0 ? keys.P : 0, n.D, READ);
    kvc_pod_step_args args = {
        .step = any_frame(&n, 1, format, keys, values.pages), .values = values,
        .turned = elements(n.B * Hq * n.D, n.query_type, WRITE),
        .places = integers(n.B, 0, 60, WRITE), .moved = once_in(2) ? integers(R, 0, 3, READ) : NULL,
        .sinks = once_in(4) ? any_number() : between(0, 5), .recent = once_in(4) ? any_number() : between(1, 20),
        .first = once_in(4) ? any_number() : between(0, 3), .far = far,
        .far_lse = floats(n.B * Hq, WRITE), .columns = columns, .probabilities = probabilities.data,
        .stride_b = probabilities.stride_b, .stride_h = probabilities.stride_h,
        .lead_q = view(n.B, Hq, 1, n.D, n.query_type, READ),
        .lead_keys = lead.keys, .lead_key_scales = lead.key_scales,
        .lead_table = integers(R * lead_blocks, 0, lead_pages - 1, READ), .lead_pages = lead_pages,
        .lead_blocks = lead_blocks, .skipped = flags(n.B * Hq, WRITE), .threshold = any_float(),
    };
    if (far == KVC_FAR_OWN) { /* contiguous there, and not always wanted */
        args.probabilities = once_in(3) ? NULL : floats(n.B * Hq * columns, WRITE);
        args.stride_b = Hq * columns, args.stride_h = columns;
    }
    POINTER(args.turned), POINTER(args.places), POINTER(args.far_lse), POINTER(args.probabilities);
    POINTER(args.lead_q.data), POINTER(args.lead_keys), POINTER(args.lead_table), POINTER(args.skipped);
    table_fields(&args.values);
    frame_fields(&args.step);
    if (far != KVC_FAR_OWN) SIZE(args.columns);
    SIZE(args.lead_pages);
    damage();
    args.step.scratch = scratch(kvc_pod_step_scratch_bytes(&args));
    finish(kvc_pod_step(&args, NULL), 0);
}

static void ring_step(void) {
    const layer_sizes n = any_sizes();
    const int64_t R = n.B * n.Hkv, window = between(once_in(20) ? -1 : 1, 12), sinks = once_in(2) ? 0 : between(0, 5);
    const int64_t full = (window > 0 ? window : 0) + sinks, capacity = once_in(3) ? between(0, full + 1) : full;
    const int paged = once_in(3), far = once_in(3);
    const kvc_page_table table = any_table(paged ? R : 0);
    const kvc_format ring = format_beside(n.type);
    kvc_ring_step_args args = {
        .step = any_frame(&n, 1, format_beside(n.type), table, table.pages), .ring = stored(ring, R, R, capacity, n.D, WRITE),
        .far = far ? stored(once_in(20) ? any_format() : ring, R, R, sinks, n.D, WRITE) : (kvc_rows){0},
        .places = integers(n.B, 0, 40, WRITE), .base = once_in(2) ? integers(n.B, 0, 3, READ) : NULL,
        .marks = paged || once_in(4) ? flags(R * capacity, WRITE) : NULL, .alpha = once_in(2) ? floats(R, READ) : NULL,
        .capacity = capacity, .window = window, .sinks = paged && !once_in(9) ? 0 : sinks,
        .neuron = once_in(4) ? any_number() : between(-1, n.D - 1), .chunked = once_in(6), .own = once_in(2),
        .decision_scale = any_float(), .decision_shift = any_float(), .decision_margin = any_float(),
    };
    POINTER(args.ring.keys), POINTER(args.ring.values), POINTER(args.far.keys), POINTER(args.places), POINTER(args.marks);
    POINTER(args.alpha), SIZE(args.capacity), SIZE(args.window), SIZE(args.sinks);
    frame_fields(&args.step);
    damage();
    args.step.scratch = scratch(kvc_ring_step_scratch_bytes(&args));
    finish(kvc_ring_step(&args, NULL), 0);
}

const fuzzer step_fuzzers[] = {paged_step, quest_step, dmc_step, pod_step, ring_step, NULL};
