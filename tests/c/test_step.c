/* Tests of the functions that decode a whole step: they are their parts in turn, and what they refuse changes nothing. */
#include "check.h"

enum { B = 2, HKV = 2, HQ = 4, R = B * HKV, D = 6, P = 2, BLOCKS = 3, PAGES = 9 };
enum { ROTARY = 4, POSITIONS = 9, NEURON = 1 };

/* All that a step may change. */
typedef struct {
    int32_t block_table[R * BLOCKS], lengths[R], refs[PAGES], free_pages[PAGES], free_count[2], places[B], held[R];
    float k_pages[PAGES * P * D], v_pages[PAGES * P * D], tail_k[R * D], tail_v[R * D], tail_w[R];
    float out[B * HQ * D], lse[B * HQ];
} state;

static state now;
static float q[B * HQ * D], k[R * D], v[R * D], cosines[POSITIONS * ROTARY / 2], sines[POSITIONS * ROTARY / 2];
static int32_t shift[R], begin[R];

/* The first two rows share two pages, the last of them half full; the third row's only page is full. */
static void open_state(void) {
    const state rows = {
        .block_table = {0, 1, 9, 0, 1, 9, 3, -1, 9, 4, 9, 9}, .lengths = {3, 3, 2, 1}, .refs = {2, 2, 0, 1, 1},
        .free_pages = {2, 5, 6, 7, 8, 99, 99, 99, 99}, .free_count = {5, 0}, .places = {5, 2}, .held = {2, 1, 4, 0},
    };
    now = rows;
    for (int i = 0; i < PAGES * P * D; i++) now.k_pages[i] = (float)(i % 7 - 3) / 4, now.v_pages[i] = (float)(i % 11) / 8;
    for (int i = 0; i < R * D; i++) {
        now.tail_k[i] = i % D == NEURON ? 0.0f : (float)(i % 5) / 4, now.tail_v[i] = (float)(i % 3);
        k[i] = (float)(i % 13 - 6) / 4, v[i] = (float)(i % 4 - 2);
    }
    for (int r = 0; r < R; r++) now.tail_w[r] = 1.5f, shift[r] = r < HKV ? 3 : 0, begin[r] = r % 3;
    for (int i = 0; i < B * HQ * D; i++) q[i] = (float)(i % 17 - 8) / 4;
    for (int i = 0; i < POSITIONS * ROTARY / 2; i++) cosines[i] = cosf((float)i), sines[i] = sinf((float)i);
    for (int r = 0; r < R; r++) k[r * D + NEURON] = r % 2 ? 9.0f : 1.0f; /* joins with a shift of 5, or does not */
}

static kvc_page_table table_of(void) {
    return (kvc_page_table){now.block_table, now.lengths, now.refs, now.free_pages, now.free_count, R, BLOCKS, P, PAGES};
}

static kvc_view view_of(float *data, int64_t heads) {
    return (kvc_view){data, KVC_F32, heads * D, D, D};
}

static kvc_decode_args decode_of(kvc_view queries, const int32_t *first) {
    return (kvc_decode_args){
        .out = now.out, .lse = now.lse, .q = queries,
        .rows = {now.k_pages, now.v_pages, NULL, NULL, KVC_FORMAT_F32}, .block_table = now.block_table, .begin = first, .end = now.lengths, .B = B, .Hq = HQ,
        .Hkv = HKV, .S = 1, .D = D, .P = P, .pages = PAGES, .blocks = BLOCKS, .scale = 0.5f, .causal = 1,
    };
}

static kvc_status attend(kvc_decode_args decode) {
    decode.scratch = room(kvc_decode_scratch_bytes(&decode));
    const kvc_status status = kvc_decode(&decode, NULL);
    free(decode.scratch);
    return status;
}

static kvc_status turn(float *to, float *from, int64_t heads, const int32_t *positions) {
    const kvc_rope_args rope = {.out = view_of(to, heads), .x = view_of(from, heads), .cos = cosines, .sin = sines,
                                .positions = positions, .B = B, .H = heads, .T = 1, .D = D, .rotary_dim = ROTARY,
                                .table_rows = POSITIONS};
    return kvc_rope(&rope, NULL);
}

/* ---- rows that keep their tokens ---- */

static kvc_step frame(void) {
    return (kvc_step){
        .out = now.out, .lse = now.lse, .q = view_of(q, HQ), .k = view_of(k, HKV), .v = view_of(v, HKV),
        .rows = {now.k_pages, now.v_pages, NULL, NULL, KVC_FORMAT_F32}, .table = table_of(), .cos = cosines, .sin = sines,
        .B = B, .Hq = HQ, .Hkv = HKV, .S = 1, .D = D, .rotary_dim = ROTARY, .table_rows = POSITIONS, .scale = 0.5f,
    };
}

static kvc_paged_step_args paged_args(void) {
    return (kvc_paged_step_args){.step = frame(), .shift = shift, .begin = begin};
}

static kvc_status paged_step(kvc_paged_step_args args, int runner) {
    args.step.scratch = room(kvc_paged_step_scratch_bytes(&args));
    const kvc_status status = kvc_paged_step(&args, runners[runner]);
    free(args.step.scratch);
    return status;
}

static void test_paged_parts(int runner) {
    test_case = "paged_step, parts";
    open_state();
    CHECK(paged_step(paged_args(), runner) == KVC_OK);
    const state found = now;
    open_state();
    float turned_q[B * HQ * D], turned_k[R * D];
    const int32_t positions[B] = {now.lengths[0] + shift[0], now.lengths[HKV] + shift[HKV]};
    CHECK(turn(turned_q, q, HQ, positions) == KVC_OK && turn(turned_k, k, HKV, positions) == KVC_OK);
    int32_t scratch[R + 1];
    const kvc_append_tokens_args append = {
        .table = table_of(), .scratch = scratch, .array_count = 2, .heads = HKV, .S = 1,
        .arrays = {{now.k_pages, turned_k, 4 * D, 4 * HKV * D, 4 * D, 4 * D},
                   {now.v_pages, v, 4 * D, 4 * HKV * D, 4 * D, 4 * D}},
    };
    CHECK(kvc_append_tokens(&append, NULL) == KVC_OK && attend(decode_of(view_of(turned_q, HQ), begin)) == KVC_OK);
    CHECK(memcmp(&found, &now, sizeof now) == 0 && now.lengths[0] == 4 && now.block_table[1] != now.block_table[4]);
}

/* A fresh call after some changes to `args` and `now` has this status and changes nothing. */
#define PAGED_REFUSES(expected, ...)                                                                     \
    do {                                                                                                 \
        open_state();                                                                                    \
        kvc_paged_step_args args = paged_args();                                                         \
        __VA_ARGS__;                                                                                     \
        const state before = now;                                                                        \
        CHECK(paged_step(args, 0) == (expected) && memcmp(&before, &now, sizeof now) == 0);              \
    } while (0)

/* Of what the step itself looks at: no scratch is asked for either. */
#define PAGED_REFUSES_SIZE(...)                                                                          \
    do {                                                                                                 \
        PAGED_REFUSES(KVC_BAD_SIZE, __VA_ARGS__);                                                        \
        PAGED_REFUSES(kvc_paged_step_scratch_bytes(&args) ? KVC_OK : KVC_BAD_SIZE, __VA_ARGS__);         \
    } while (0)

static void test_paged_refusals(void) {
    test_case = "paged_step, refusals";
    PAGED_REFUSES_SIZE(args.step.B = -1, args.step.table.R = -HKV);
    PAGED_REFUSES_SIZE(args.step.Hkv = -1, args.step.table.R = -B);
    PAGED_REFUSES_SIZE(args.step.Hq = -HQ);
    PAGED_REFUSES_SIZE(args.step.Hq = HQ + 1);
    PAGED_REFUSES_SIZE(args.step.S = -1);
    PAGED_REFUSES_SIZE(args.step.D = 0, args.step.rotary_dim = 0);
    PAGED_REFUSES_SIZE(args.step.D = KVC_MAX_HEAD_DIM + 1);
    PAGED_REFUSES_SIZE(args.step.table.R = R - 1);
    PAGED_REFUSES_SIZE(args.step.table.P = 0);
    PAGED_REFUSES_SIZE(args.step.table.P = 3);
    PAGED_REFUSES_SIZE(args.step.table.pages = -1);
    PAGED_REFUSES_SIZE(args.step.table.blocks = -1);
    PAGED_REFUSES_SIZE(args.step.table_rows = -1);
    PAGED_REFUSES_SIZE(args.step.rotary_dim = 3);
    PAGED_REFUSES_SIZE(args.step.rotary_dim = -2);
    PAGED_REFUSES_SIZE(args.step.rotary_dim = D + 2);
    PAGED_REFUSES_SIZE(args.step.scale = INFINITY);
    PAGED_REFUSES_SIZE(args.step.scale = NAN);
    PAGED_REFUSES_SIZE(args.step.softcap = -1.0f);
    PAGED_REFUSES_SIZE(args.step.softcap = INFINITY);
    PAGED_REFUSES(KVC_BAD_DTYPE, args.step.q.dtype = (kvc_dtype)5);
    PAGED_REFUSES(KVC_BAD_DTYPE, args.step.k.dtype = args.step.v.dtype = (kvc_dtype)5);
    PAGED_REFUSES(KVC_BAD_DTYPE, args.step.v.dtype = KVC_BF16);
    PAGED_REFUSES(KVC_NULL_POINTER, args.step.out = NULL);
    PAGED_REFUSES(KVC_NULL_POINTER, args.step.lse = NULL);
    PAGED_REFUSES(KVC_NULL_POINTER, args.step.q.data = NULL);
    PAGED_REFUSES(KVC_NULL_POINTER, args.step.k.data = NULL);
    PAGED_REFUSES(KVC_NULL_POINTER, args.step.v.data = NULL);
    PAGED_REFUSES(KVC_NULL_POINTER, args.step.rows.keys = NULL);
    PAGED_REFUSES(KVC_NULL_POINTER, args.step.rows.values = NULL);
    PAGED_REFUSES(KVC_NULL_POINTER, args.step.cos = NULL);
    PAGED_REFUSES(KVC_NULL_POINTER, args.step.sin = NULL);
    PAGED_REFUSES(KVC_NULL_POINTER, args.step.table.block_table = NULL);
    PAGED_REFUSES(KVC_NULL_POINTER, args.step.table.lengths = NULL);
    PAGED_REFUSES(KVC_NULL_POINTER, args.step.table.page_refs = NULL);
    PAGED_REFUSES(KVC_NULL_POINTER, args.step.table.free_pages = NULL);
    PAGED_REFUSES(KVC_NULL_POINTER, args.step.table.free_count = NULL);
    PAGED_REFUSES(KVC_POOL_FULL, now.free_count[0] = 2);
    PAGED_REFUSES(KVC_BAD_INDEX, args.step.table_rows = 6);
    PAGED_REFUSES(KVC_BAD_INDEX, args.step.table_rows = 0);
    PAGED_REFUSES(KVC_BAD_INDEX, shift[HKV] = -3);
    PAGED_REFUSES(KVC_BAD_INDEX, shift[0] = INT32_MAX);
    PAGED_REFUSES(KVC_BAD_INDEX, begin[3] = -1);
    PAGED_REFUSES(KVC_BAD_INDEX, begin[3] = now.lengths[3] + 2);
    PAGED_REFUSES(KVC_BAD_INDEX, now.lengths[3] = -1);
    PAGED_REFUSES(KVC_BAD_INDEX, now.lengths[3] = BLOCKS * P);
    PAGED_REFUSES(KVC_BAD_INDEX, now.lengths[3] = INT32_MAX);
    PAGED_REFUSES(KVC_BAD_INDEX, now.block_table[9] = PAGES);
    PAGED_REFUSES(KVC_BAD_INDEX, now.block_table[9] = -1);
    PAGED_REFUSES(KVC_BAD_INDEX, now.block_table[6] = PAGES, begin[2] = 0); /* an earlier page */
    PAGED_REFUSES(KVC_BAD_INDEX, now.block_table[6] = -1, begin[2] = 1);
    PAGED_REFUSES(KVC_BAD_INDEX, now.free_pages[4] = PAGES);
    PAGED_REFUSES(KVC_BAD_INDEX, now.free_count[0] = PAGES + 1);
    PAGED_REFUSES(KVC_BAD_INDEX, now.free_count[0] = -1);
    PAGED_REFUSES(KVC_OK, args.step.B = 0, args.step.table.R = 0);
    PAGED_REFUSES(KVC_OK, args.step.Hkv = args.step.Hq = 0, args.step.table.R = 0);
    PAGED_REFUSES(KVC_OK, args.step.Hq = 0);
    PAGED_REFUSES(KVC_OK, args.step.S = 0);
    kvc_paged_step_args args = paged_args();
    CHECK(kvc_paged_step(&args, NULL) == KVC_NULL_POINTER && kvc_paged_step(NULL, NULL) == KVC_NULL_POINTER);
    CHECK(kvc_paged_step_scratch_bytes(NULL) == 0);

    open_state();
    now.block_table[6] = PAGES, begin[2] = 2; /* nobody looks there */
    CHECK(paged_step(paged_args(), 0) == KVC_OK);
}

/* ---- DMC ---- */

static kvc_dmc_step_args dmc_args(void) {
    return (kvc_dmc_step_args){
        .step = frame(), .tail_k = now.tail_k, .tail_v = now.tail_v, .tail_w = now.tail_w, .tail_counts = now.held,
        .places = now.places, .offsets = shift, .neuron = NEURON, .decision_shift = 5.0f, .omega_shift = 5.0f,
        .omega_eps = 0.25f, .reduce = KVC_MEAN_SIGMOID,
    };
}

static kvc_status dmc_step(kvc_dmc_step_args args, int runner) {
    args.step.scratch = room(kvc_dmc_step_scratch_bytes(&args));
    const kvc_status status = kvc_dmc_step(&args, runners[runner]);
    free(args.step.scratch);
    return status;
}

static void test_dmc_parts(int runner) {
    test_case = "dmc_step, parts";
    open_state();
    CHECK(dmc_step(dmc_args(), runner) == KVC_OK);
    const state found = now;
    open_state();
    float alpha[R], hard[R], tempered[R], omega[R], cut[B * HQ * D], turned[B * HQ * D];
    const kvc_dmc_decisions_args decide = {
        .alpha = alpha, .hard = hard, .tempered = tempered, .x = view_of(k + NEURON, HKV), .B = B, .H = HKV, .T = 1,
        .shift = 5.0f, .temperature = 1.0f, .scale = 1.0f, .only_hard = 1,
    };
    const kvc_dmc_importance_args weigh = {omega, view_of(q + NEURON, HQ), B, HQ, HKV, 1, 5.0f, 0.25f, KVC_MEAN_SIGMOID};
    CHECK(kvc_dmc_decisions(&decide, NULL) == KVC_OK && kvc_dmc_importance(&weigh, NULL) == KVC_OK);
    const int32_t positions[B] = {now.places[0] + shift[0], now.places[1] + shift[1]};
    memcpy(cut, q, sizeof q);
    for (int i = 0; i < B * HQ; i++) cut[i * D + NEURON] = 0.0f;
    CHECK(turn(turned, cut, HQ, positions) == KVC_OK);
    for (int i = 0; i < B * HQ; i++) turned[i * D + NEURON] = 0.0f;
    int32_t scratch[4 * R + 1];
    const kvc_dmc_append_args append = {
        .table = table_of(), .rows = {now.k_pages, now.v_pages, NULL, NULL, KVC_FORMAT_F32}, .k = view_of(k, HKV),
        .v = view_of(v, HKV), .tail_k = now.tail_k, .tail_v = now.tail_v, .tail_w = now.tail_w, .tail_counts = now.held,
        .alpha = hard, .omega = omega, .cos = cosines, .sin = sines, .positions = positions, .scratch = scratch, .B = B,
        .Hkv = HKV, .S = 1, .D = D, .rotary_dim = ROTARY, .table_rows = POSITIONS, .neuron = NEURON,
    };
    CHECK(kvc_dmc_append(&append, NULL) == KVC_OK && attend(decode_of(view_of(turned, HQ), NULL)) == KVC_OK);
    now.places[0]++, now.places[1]++;
    CHECK(memcmp(&found, &now, sizeof now) == 0);
    const int32_t lengths[R] = {4, 3, 3, 2}; /* rows 0 and 2 open a slot, 1 joins, 3 has no token to join */
    CHECK(memcmp(now.lengths, lengths, sizeof lengths) == 0);
}

#define DMC_REFUSES(expected, ...)                                                                       \
    do {                                                                                                 \
        open_state();                                                                                    \
        kvc_dmc_step_args args = dmc_args();                                                             \
        __VA_ARGS__;                                                                                     \
        const state before = now;                                                                        \
        CHECK(dmc_step(args, 0) == (expected) && memcmp(&before, &now, sizeof now) == 0);                \
    } while (0)

#define DMC_REFUSES_SIZE(...)                                                                            \
    do {                                                                                                 \
        DMC_REFUSES(KVC_BAD_SIZE, __VA_ARGS__);                                                          \
        DMC_REFUSES(kvc_dmc_step_scratch_bytes(&args) ? KVC_OK : KVC_BAD_SIZE, __VA_ARGS__);             \
    } while (0)

static void test_dmc_refusals(void) {
    test_case = "dmc_step, refusals";
    DMC_REFUSES_SIZE(args.step.B = -1, args.step.table.R = -HKV);
    DMC_REFUSES_SIZE(args.step.Hkv = -1, args.step.table.R = -B);
    DMC_REFUSES_SIZE(args.step.Hq = -HQ);
    DMC_REFUSES_SIZE(args.step.Hq = HQ + 1);
    DMC_REFUSES_SIZE(args.step.S = 0);
    DMC_REFUSES_SIZE(args.step.S = 2);
    DMC_REFUSES_SIZE(args.step.D = 0);
    DMC_REFUSES_SIZE(args.step.D = KVC_MAX_HEAD_DIM + 1);
    DMC_REFUSES_SIZE(args.step.table.R = R - 1);
    DMC_REFUSES_SIZE(args.step.table.P = 0);
    DMC_REFUSES_SIZE(args.step.table.P = 3);
    DMC_REFUSES_SIZE(args.step.table.pages = -1);
    DMC_REFUSES_SIZE(args.step.table.blocks = -1);
    DMC_REFUSES_SIZE(args.step.table_rows = -1);
    DMC_REFUSES_SIZE(args.neuron = -1);
    DMC_REFUSES_SIZE(args.neuron = D);
    DMC_REFUSES_SIZE(args.step.scale = INFINITY);
    DMC_REFUSES_SIZE(args.step.scale = NAN);
    DMC_REFUSES_SIZE(args.step.softcap = -1.0f);
    DMC_REFUSES_SIZE(args.step.rotary_dim = 3);
    DMC_REFUSES_SIZE(args.step.rotary_dim = D + 2);
    DMC_REFUSES_SIZE(args.window = -1);
    DMC_REFUSES_SIZE(args.window = KVC_DMC_MAX_WINDOW + 1);
    DMC_REFUSES(KVC_BAD_SIZE, args.reduce = (kvc_importance)3);
    DMC_REFUSES(KVC_BAD_DTYPE, args.step.q.dtype = (kvc_dtype)5);
    DMC_REFUSES(KVC_BAD_DTYPE, args.step.k.dtype = args.step.v.dtype = (kvc_dtype)5);
    DMC_REFUSES(KVC_BAD_DTYPE, args.step.v.dtype = KVC_BF16);
    DMC_REFUSES(KVC_NULL_POINTER, args.step.out = NULL);
    DMC_REFUSES(KVC_NULL_POINTER, args.step.lse = NULL);
    DMC_REFUSES(KVC_NULL_POINTER, args.step.q.data = NULL);
    DMC_REFUSES(KVC_NULL_POINTER, args.places = NULL);
    DMC_REFUSES(KVC_NULL_POINTER, args.step.k.data = NULL);
    DMC_REFUSES(KVC_NULL_POINTER, args.step.v.data = NULL);
    DMC_REFUSES(KVC_NULL_POINTER, args.step.rows.keys = NULL);
    DMC_REFUSES(KVC_NULL_POINTER, args.step.rows.values = NULL);
    DMC_REFUSES(KVC_NULL_POINTER, args.step.rows.format = KVC_FORMAT_INT8);
    DMC_REFUSES(KVC_BAD_FORMAT, args.step.rows.format = KVC_FORMAT_BF16);
    DMC_REFUSES(KVC_BAD_FORMAT, args.step.rows.format = (kvc_format)9);
    DMC_REFUSES(KVC_NULL_POINTER, args.tail_k = NULL);
    DMC_REFUSES(KVC_NULL_POINTER, args.tail_v = NULL);
    DMC_REFUSES(KVC_NULL_POINTER, args.tail_w = NULL);
    DMC_REFUSES(KVC_NULL_POINTER, args.tail_counts = NULL);
    DMC_REFUSES(KVC_NULL_POINTER, args.step.cos = NULL);
    DMC_REFUSES(KVC_NULL_POINTER, args.step.sin = NULL);
    DMC_REFUSES(KVC_NULL_POINTER, args.step.table.block_table = NULL);
    DMC_REFUSES(KVC_NULL_POINTER, args.step.table.lengths = NULL);
    DMC_REFUSES(KVC_NULL_POINTER, args.step.table.page_refs = NULL);
    DMC_REFUSES(KVC_NULL_POINTER, args.step.table.free_pages = NULL);
    DMC_REFUSES(KVC_NULL_POINTER, args.step.table.free_count = NULL);
    DMC_REFUSES(KVC_POOL_FULL, now.free_count[0] = 2);
    DMC_REFUSES(KVC_BAD_INDEX, args.step.table_rows = 8);
    DMC_REFUSES(KVC_BAD_INDEX, args.step.table_rows = 0);
    DMC_REFUSES(KVC_BAD_INDEX, now.places[1] = -1, shift[1] = 2);
    DMC_REFUSES(KVC_BAD_INDEX, now.places[1] = INT32_MAX);
    DMC_REFUSES(KVC_BAD_INDEX, shift[1] = INT32_MAX);
    DMC_REFUSES(KVC_BAD_INDEX, shift[1] = -3);
    DMC_REFUSES(KVC_BAD_INDEX, now.lengths[3] = -1);
    DMC_REFUSES(KVC_BAD_INDEX, now.lengths[3] = BLOCKS * P);
    DMC_REFUSES(KVC_BAD_INDEX, now.lengths[3] = INT32_MAX);
    DMC_REFUSES(KVC_BAD_INDEX, now.block_table[9] = PAGES);
    DMC_REFUSES(KVC_BAD_INDEX, now.block_table[9] = -1);
    DMC_REFUSES(KVC_BAD_INDEX, now.block_table[6] = PAGES); /* an earlier page */
    DMC_REFUSES(KVC_BAD_INDEX, now.free_pages[4] = PAGES);
    DMC_REFUSES(KVC_BAD_INDEX, now.free_count[0] = PAGES + 1);
    DMC_REFUSES(KVC_BAD_INDEX, now.free_count[0] = -1);
    DMC_REFUSES(KVC_OK, args.step.B = 0, args.step.table.R = 0);
    DMC_REFUSES(KVC_OK, args.step.Hkv = args.step.Hq = 0, args.step.table.R = 0);
    DMC_REFUSES(KVC_OK, args.step.Hq = 0);
    kvc_dmc_step_args args = dmc_args();
    CHECK(kvc_dmc_step(&args, NULL) == KVC_NULL_POINTER && kvc_dmc_step(NULL, NULL) == KVC_NULL_POINTER);
    CHECK(kvc_dmc_step_scratch_bytes(NULL) == 0);
}

void test_step(void) {
    for (int runner = 0; runner < RUNNERS; runner++) test_paged_parts(runner), test_dmc_parts(runner);
    test_paged_refusals();
    test_dmc_refusals();
}
