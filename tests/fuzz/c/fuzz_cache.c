/* Kernels over pages: appending, truncating, compacting, decoding, DMC's append. */
#include "fuzz.h"

static int64_t page_size(void) {
    return once_in(20) ? between(0, 12) : (int64_t)1 << between(0, 5);
}

static int64_t head_dim(void) {
    static const int64_t dims[] = {64, 128, 511, 512, 513, 256};
    return once_in(4) ? dims[between(0, 5)] : between(once_in(30) ? 0 : 1, 24);
}

static void table_fields(kvc_page_table *table) {
    POINTER(table->block_table), POINTER(table->lengths), POINTER(table->page_refs), POINTER(table->free_pages);
    POINTER(table->free_count);
    SIZE(table->R), SIZE(table->pages), SIZE(table->P);
}

/* A table whose pages have at least one slot, as arrays are made for it. */
static kvc_page_table any_table(int64_t R, int64_t longest) {
    const int64_t P = page_size();
    kvc_page_table table = page_table(R, P ? P : 1, longest);
    if (!P) table.P = 0;
    return table;
}

static int64_t slots(const kvc_page_table *table) {
    return table->pages * (table->P > 0 ? table->P : 1);
}

static void append_tokens(void) {
    const int64_t heads = between(1, 3), R = heads * between(0, 3) + once_in(20), S = between(0, once_in(4) ? 60 : 6);
    const int64_t B = (R + heads - 1) / heads;
    kvc_append_tokens_args args = {
        .table = any_table(R, between(0, once_in(4) ? 90 : 12)),
        .counts = once_in(3) ? NULL : integers(R, 0, S, READ),
        .scratch = scratch(4 * (R + 1)), .array_count = once_in(30) ? any_number() : between(0, 3),
        .heads = once_in(40) ? between(-1, 0) : heads, .S = S,
    };
    for (int64_t i = 0; i < args.array_count && i < KVC_MAX_SLOT_ARRAYS; i++) {
        const int64_t bytes = between(once_in(20) ? -1 : 0, 20), held = bytes > 0 ? bytes : 0;
        const kvc_view tokens = view(B, heads, S, (held + 3) / 4, KVC_F32, READ); /* strides of bytes below */
        args.arrays[i] = (kvc_slot_array){flags(slots(&args.table) * held, WRITE), tokens.data, bytes,
                                          4 * tokens.stride_b, 4 * tokens.stride_h, 4 * tokens.stride_t};
        POINTER(args.arrays[i].pages), POINTER(args.arrays[i].tokens);
    }
    POINTER(args.counts);
    table_fields(&args.table);
    SIZE(args.S);
    damage();
    finish(kvc_append_tokens(&args, NULL), 1);
}

static void truncate_rows(void) {
    const int64_t R = between(0, 6), longest = between(0, once_in(4) ? 90 : 12);
    kvc_truncate_rows_args args = {.table = any_table(R, longest)};
    int32_t *lengths = integers(R, 0, longest, READ);
    for (int64_t r = 0; r < R; r++) {
        if (lengths[r] > args.table.lengths[r] && !once_in(9)) lengths[r] = args.table.lengths[r];
    }
    args.new_lengths = lengths;
    POINTER(args.new_lengths);
    table_fields(&args.table);
    damage();
    finish(kvc_truncate_rows(&args), 1);
}

static void compact_pages(void) {
    const int64_t R = between(0, 5), longest = between(0, once_in(4) ? 90 : 12), K = between(0, longest + 1);
    kvc_compact_pages_args args = {
        .table = any_table(R, longest), .array_count = once_in(30) ? any_number() : between(0, 3), .K = K,
        .kept = once_in(4) ? NULL : integers(R, -1, K, READ),
    };
    int32_t *indices = integers(R * K, 0, longest ? longest - 1 : 0, READ);
    for (int64_t i = 0; i < R * K && !once_in(30); i++) { /* rising, mostly */
        if (i % K && indices[i] <= indices[i - 1]) indices[i] = indices[i - 1] < INT32_MAX ? indices[i - 1] + 1 : 0;
        if (i % K == 0) indices[i] = (int32_t)between(0, 3);
    }
    int32_t *kept = (int32_t *)(uintptr_t)args.kept;
    for (int64_t r = 0; kept && r < R && !once_in(9); r++) {
        int32_t held = 0;
        while (held < K && held < kept[r] && indices[r * K + held] < args.table.lengths[r]) held++;
        if (kept[r] > held) kept[r] = held;
    }
    args.indices = indices;
    args.scratch = scratch(4 * (R * args.table.blocks + 1));
    for (int64_t i = 0; i < args.array_count && i < KVC_MAX_SLOT_ARRAYS; i++) {
        const int64_t bytes = between(once_in(20) ? -1 : 0, 20);
        args.arrays[i] = (kvc_slot_array){.pages = flags(slots(&args.table) * (bytes > 0 ? bytes : 0), WRITE),
                                          .slot_bytes = bytes};
        POINTER(args.arrays[i].pages);
    }
    POINTER(args.indices), POINTER(args.kept);
    table_fields(&args.table);
    SIZE(args.K);
    damage();
    finish(kvc_compact_pages(&args, NULL), 1);
}

/* Rows of pages as decoding reads them: begin <= end <= longest. */
typedef struct {
    int32_t *table, *begin, *end;
    int64_t blocks, pages, P;
} paged_rows;

static paged_rows rows_of(int64_t R, int64_t longest) {
    const int64_t P = page_size(), held = P ? P : 1, used = (longest + held - 1) / held;
    paged_rows rows = {.blocks = used + between(0, 2), .pages = used + between(once_in(20) ? 0 : 1, 6), .P = P};
    rows.table = integers(R * rows.blocks, 0, rows.pages - 1, READ);
    rows.end = integers(R, 0, longest, READ);
    rows.begin = once_in(2) ? NULL : integers(R, 0, longest, READ);
    for (int64_t r = 0; rows.begin && r < R && !once_in(9); r++) {
        if (rows.begin[r] > rows.end[r]) rows.begin[r] = rows.end[r];
    }
    return rows;
}

static void decode(void) {
    const int64_t B = between(0, 3), Hkv = between(0, 2), Hq = once_in(10) ? between(0, 6) : Hkv * between(0, 5);
    const int64_t S = between(0, once_in(4) ? 20 : 2), D = head_dim(), R = B * Hkv;
    const int64_t longest = between(0, once_in(4) ? 700 : 40), columns = once_in(3) ? between(0, 50) : longest;
    const paged_rows rows = rows_of(R, longest);
    const int64_t P = rows.P > 0 ? rows.P : 1;
    const int contiguous = once_in(4), values = once_in(4), wanted = S == 1 && once_in(3);
    const int64_t value_blocks = rows.blocks + between(0, 1), value_pages = rows.pages + between(0, 2);
    const int64_t held = contiguous ? R + between(0, 1) : rows.pages, slot_count = contiguous ? longest : P;
    kvc_decode_args args = {
        .lse = floats(B * Hq * S, WRITE), .q = view(B, Hq, S, D, any_dtype(), READ),
        .rows = stored(any_format(), held, values && !contiguous ? value_pages : held, slot_count, D, READ),
        .block_table = contiguous ? NULL : rows.table, .begin = rows.begin, .end = rows.end,
        .B = B, .Hq = Hq, .Hkv = Hkv, .S = S, .D = D, .P = contiguous ? longest : rows.P, .pages = held,
        .blocks = contiguous ? any_number() : rows.blocks, .scale = once_in(10) ? any_float() : 0.25f,
        .causal = (int)between(0, 1),
        .value_table = values && !contiguous ? integers(R * value_blocks, 0, value_pages - 1, READ) : NULL,
        .value_pages = values ? value_pages : any_number(), .value_blocks = values ? value_blocks : any_number(),
        .probabilities = wanted ? floats(B * Hq * columns, WRITE) : NULL, .columns = wanted ? columns : any_number(),
        .sinks = once_in(3) ? any_number() : 0, .softcap = once_in(4) ? any_float() : 0.0f,
        .sink_logits = once_in(3) ? floats(Hq, READ) : NULL,
    };
    args.out = elements(B * Hq * S * D, args.q.dtype, WRITE);
    POINTER(args.out), POINTER(args.lse), POINTER(args.q.data), POINTER(args.rows.keys), POINTER(args.rows.values);
    POINTER(args.rows.key_scales), POINTER(args.rows.value_scales);
    POINTER(args.begin), POINTER(args.end), POINTER(args.probabilities), POINTER(args.sink_logits);
    SIZE(args.B), SIZE(args.Hq), SIZE(args.Hkv), SIZE(args.S), SIZE(args.D), SIZE(args.P), SIZE(args.sinks);
    damage();
    args.scratch = scratch(kvc_decode_scratch_bytes(&args));
    finish(kvc_decode(&args, NULL), 0);
}

static void decode_shared(void) {
    const int64_t B = between(0, 3), Hkv = between(0, 2), Hq = once_in(10) ? between(0, 6) : Hkv * between(0, 5);
    const int64_t D = head_dim(), R = B * Hkv, longest = between(0, once_in(4) ? 700 : 40);
    const int64_t columns = once_in(3) ? between(0, 50) : longest;
    const paged_rows rows = rows_of(R, longest);
    const kvc_dtype type = any_dtype();
    const kvc_view probabilities = view(B, Hq, 1, columns, KVC_F32, READ);
    kvc_decode_shared_args args = {
        .out = elements(B * Hq * D, type, WRITE), .skipped = flags(B * Hq, WRITE), .near = elements(B * Hq * D, type, READ),
        .near_lse = floats(B * Hq, READ), .far_lse = floats(B * Hq, READ), .probabilities = probabilities.data,
        .stride_b = probabilities.stride_b, .stride_h = probabilities.stride_h, .columns = columns,
        .dtype = type, .rows = stored(any_format(), 0, rows.pages, rows.P > 0 ? rows.P : 1, D, READ),
        .block_table = rows.table, .begin = rows.begin ? rows.begin : integers(R, 0, 0, READ), .end = rows.end,
        .B = B, .Hq = Hq, .Hkv = Hkv, .D = D, .P = rows.P, .pages = rows.pages, .blocks = rows.blocks,
        .threshold = any_float(),
    };
    POINTER(args.out), POINTER(args.skipped), POINTER(args.near), POINTER(args.near_lse), POINTER(args.far_lse);
    POINTER(args.probabilities), POINTER(args.rows.values), POINTER(args.block_table), POINTER(args.begin), POINTER(args.end);
    SIZE(args.B), SIZE(args.Hq), SIZE(args.Hkv), SIZE(args.D), SIZE(args.P), SIZE(args.pages), SIZE(args.columns);
    damage();
    args.scratch = scratch(kvc_decode_shared_scratch_bytes(&args));
    finish(kvc_decode_shared(&args, NULL), 1);
}

static void dmc_append(void) {
    const int64_t B = between(0, 3), Hkv = between(0, 3), R = B * Hkv, S = between(0, once_in(4) ? 300 : 9);
    const int64_t D = head_dim(), rotary_dim = 2 * between(0, D / 2), rows = between(0, 30);
    const int64_t window = once_in(2) ? 0 : once_in(3) ? any_number() : between(1, 12);
    const int64_t N = window > 0 && window < 70 ? window : 1;
    const kvc_dtype type = any_dtype();
    const kvc_page_table table = any_table(R, between(0, once_in(4) ? 90 : 12));
    kvc_dmc_append_args args = {
        .table = table,
        .rows = stored(once_in(3) ? any_format() : (kvc_format)type, table.pages, table.pages, table.P > 0 ? table.P : 0, D,
                       WRITE),
        .k = view(B, Hkv, S, D, type, READ), .v = view(B, Hkv, S, D, once_in(30) ? any_dtype() : type, READ),
        .tail_k = floats(R * N * D, WRITE), .tail_v = floats(R * N * D, WRITE), .tail_w = floats(R * N, WRITE),
        .tail_counts = integers(R, 0, 5, WRITE), .alpha = floats(R * S, READ),
        .omega = once_in(4) ? floats(R * S, READ) : positive(R * S),
        .cos = floats(rows * (D / 2), READ), .sin = floats(rows * (D / 2), READ),
        .positions = once_in(4) ? NULL : integers(B * S, 0, rows - 1, READ),
        .counts = once_in(3) ? NULL : integers(R, 0, S, READ),
        .scratch = scratch(4 * (R * (3 + (S + KVC_DMC_PIECE - 1) / KVC_DMC_PIECE) + 1)),
        .B = B, .Hkv = Hkv, .S = S, .D = D, .rotary_dim = rotary_dim, .table_rows = rows,
        .neuron = once_in(3) ? any_number() : -1, .window = window,
    };
    POINTER(args.rows.keys), POINTER(args.rows.values), POINTER(args.k.data), POINTER(args.v.data), POINTER(args.tail_k);
    POINTER(args.tail_v), POINTER(args.tail_w), POINTER(args.tail_counts), POINTER(args.alpha), POINTER(args.omega);
    POINTER(args.cos), POINTER(args.sin), POINTER(args.counts);
    table_fields(&args.table);
    SIZE(args.B), SIZE(args.Hkv), SIZE(args.S), SIZE(args.D), SIZE(args.rotary_dim), SIZE(args.table_rows);
    damage();
    finish(kvc_dmc_append(&args, NULL), 1);
}

const fuzzer cache_fuzzers[] = {append_tokens, truncate_rows, compact_pages, decode, decode_shared, dmc_append, NULL};
