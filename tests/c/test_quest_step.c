/* Tests of kvc_quest_step: known pages are chosen and attended to, and what is refused changes nothing. */
#include "check.h"

enum { B = 1, HKV = 2, HQ = 20, R = B * HKV, D = 6, P = 2, BLOCKS = 160, PAGES = 2 * BLOCKS, RANGES = BLOCKS + 1 };
enum { LONG = 300, SHORT = 3, READ = 4, NEWEST = LONG / P }; /* slots of the two rows; pages that are read */

typedef struct {
    int32_t block_table[R * BLOCKS], lengths[R], refs[PAGES], free_pages[PAGES], free_count[2], chosen[R * READ];
    float k_pages[PAGES * P * D], v_pages[PAGES * P * D], ranges[R * RANGES * 2 * D], out[B * HQ * D], lse[B * HQ];
} state;

static state now;
static float q[B * HQ * D], k[R * D], v[R * D], cosines[LONG + 1], sines[LONG + 1];

/* Keys are small but in pages 7, 140 and 9 of the first row, each of which one query head likes. */
static void open_state(void) {
    memset(&now, 0, sizeof now);
    now.lengths[0] = LONG, now.lengths[1] = SHORT, now.free_count[0] = PAGES - NEWEST - 2;
    for (int i = 0; i < NEWEST; i++) now.block_table[i] = PAGES - 1 - i, now.refs[PAGES - 1 - i] = 1;
    for (int i = 0; i < 2; i++) now.block_table[BLOCKS + i] = i, now.refs[i] = 1;
    for (int i = 0; i < PAGES; i++) now.free_pages[i] = i < now.free_count[0] ? 2 + i : -1;
    for (int i = 0; i < PAGES * P * D; i++) now.k_pages[i] = (float)(i % 7 - 3) / 64, now.v_pages[i] = (float)(i % 11) / 8;
    const int liked[3] = {7, 140, 9};
    for (int i = 0; i < 3; i++) now.k_pages[(PAGES - 1 - liked[i]) * P * D + i] = i == 2 ? -9.0f : 9.0f;
    for (int i = 0; i < B * HQ * D; i++) q[i] = 0.0f;
    for (int i = 0; i < 3; i++) q[(i * 4 + 1) * D + i] = i == 2 ? -1.0f : 1.0f; /* heads 1, 5, 9 of the first row */
    for (int i = 0; i < R * D; i++) k[i] = (float)(i - 5), v[i] = 2.0f;
    for (int i = 0; i <= LONG; i++) cosines[i] = 1.0f, sines[i] = 0.0f;
    for (int r = 0; r < R; r++) {
        for (int i = 0; i * P < now.lengths[r]; i++) {
            float *range = now.ranges + (r * RANGES + i) * 2 * D;
            for (int d = 0; d < 2 * D; d++) range[d] = -INFINITY;
            for (int t = i * P; t < now.lengths[r] && t < (i + 1) * P; t++) {
                const float *key = now.k_pages + (now.block_table[r * BLOCKS + i] * P + t % P) * D;
                for (int d = 0; d < D; d++) range[d] = fmaxf(range[d], key[d]), range[D + d] = fmaxf(range[D + d], -key[d]);
            }
        }
    }
}

static kvc_view view_of(float *data, int64_t heads) {
    return (kvc_view){data, KVC_F32, heads * D, D, D};
}

static kvc_quest_step_args quest_args(void) {
    return (kvc_quest_step_args){
        .step = {.out = now.out, .lse = now.lse, .q = view_of(q, HQ), .k = view_of(k, HKV), .v = view_of(v, HKV),
                 .rows = {now.k_pages, now.v_pages, NULL, NULL, KVC_FORMAT_F32},
                 .table = {now.block_table, now.lengths, now.refs, now.free_pages, now.free_count, R, BLOCKS, P, PAGES},
                 .cos = cosines, .sin = sines, .B = B, .Hq = HQ, .Hkv = HKV, .S = 1, .D = D, .rotary_dim = 2,
                 .table_rows = LONG + 1, .scale = 0.5f},
        .ranges = now.ranges, .chosen = now.chosen, .range_pages = RANGES, .pages_read = READ,
    };
}

static kvc_status quest_step(kvc_quest_step_args args, int runner) {
    args.step.scratch = room(kvc_quest_step_scratch_bytes(&args));
    const kvc_status status = kvc_quest_step(&args, runners[runner]);
    free(args.step.scratch);
    return status;
}

static void test_choice(int runner) {
    test_case = "quest_step, choice";
    open_state();
    CHECK(quest_step(quest_args(), runner) == KVC_OK);
    const int32_t chosen[R * READ] = {7, 9, 140, NEWEST, 0, 1, -1, -1};
    CHECK(memcmp(now.chosen, chosen, sizeof chosen) == 0 && now.lengths[0] == LONG + 1 && now.lengths[1] == SHORT + 1);
    const float *fresh = now.ranges + NEWEST * 2 * D, *joined = now.ranges + (RANGES + 1) * 2 * D;
    const float *before = now.k_pages + P * D; /* slot 2 of the second row */
    for (int d = 0; d < D; d++) {
        CHECK(fresh[d] == k[d] && fresh[D + d] == -k[d]);
        CHECK(joined[d] == fmaxf(before[d], k[D + d]) && joined[D + d] == fmaxf(-before[d], -k[D + d]));
    }
    const state found = now;
    kvc_quest_step_args held = quest_args();
    held.held = 1, held.step.rotary_dim = 0, held.step.k.data = held.step.v.data = NULL;
    CHECK(quest_step(held, runner) == KVC_OK && memcmp(&found, &now, sizeof now) == 0);
    held.pages_read = 1;
    CHECK(quest_step(held, runner) == KVC_OK && now.chosen[0] == NEWEST && now.chosen[1] == 1);
}

/* No sequence has a token yet: a table without columns, and fewer pages than rows. */
static void test_nothing_held(int runner) {
    test_case = "quest_step, nothing held";
    open_state();
    int32_t none[R] = {0, 0}, refs[1] = {0}, free_pages[1] = {0}, free_count[2] = {1, 0};
    kvc_quest_step_args args = quest_args();
    args.held = 1, args.step.rotary_dim = 0, args.step.k.data = args.step.v.data = NULL;
    args.step.table = (kvc_page_table){NULL, none, refs, free_pages, free_count, R, 0, P, 1};
    now.out[0] = 1.0f;
    CHECK(quest_step(args, runner) == KVC_OK);
    for (int i = 0; i < B * HQ * D; i++) CHECK(now.out[i] == 0.0f);
}

/* Codes: the same pages are chosen, and the range of the newest one is of what its code stands for. */
static void test_coded_choice(int runner) {
    test_case = "quest_step, codes";
    static int8_t keys[PAGES * P * D], values[PAGES * P * D];
    static uint16_t key_scales[PAGES * P], value_scales[PAGES * P];
    open_state();
    const kvc_quantize_args quantize = {.codes = keys, .scales = key_scales,
                                        .x = {now.k_pages, KVC_F32, 0, 0, D}, .B = 1, .H = 1, .T = PAGES * P, .D = D,
                                        .kind = KVC_INT8};
    CHECK(kvc_quantize(&quantize, NULL) == KVC_OK);
    kvc_quest_step_args args = quest_args();
    args.step.rows = (kvc_rows){keys, values, key_scales, value_scales, KVC_FORMAT_INT8};
    CHECK(quest_step(args, runner) == KVC_OK);
    const int32_t chosen[R * READ] = {7, 9, 140, NEWEST, 0, 1, -1, -1};
    CHECK(memcmp(now.chosen, chosen, sizeof chosen) == 0);
    float key[D];
    const int slot = now.block_table[NEWEST] * P;
    const kvc_dequantize_args back = {.x = key, .codes = keys + slot * D, .scales = key_scales + slot, .dtype = KVC_F32,
                                      .N = 1, .D = D, .kind = KVC_INT8};
    CHECK(kvc_dequantize(&back, NULL) == KVC_OK);
    const float *fresh = now.ranges + NEWEST * 2 * D;
    for (int d = 0; d < D; d++) CHECK(fresh[d] == key[d] && fresh[D + d] == -key[d] && fabsf(key[d] - k[d]) < 0.05f);
}

#define QUEST_REFUSES(expected, ...)                                                                     \
    do {                                                                                                 \
        open_state();                                                                                    \
        kvc_quest_step_args args = quest_args();                                                         \
        __VA_ARGS__;                                                                                     \
        const state before = now;                                                                        \
        CHECK(quest_step(args, 0) == (expected) && memcmp(&before, &now, sizeof now) == 0);              \
    } while (0)

#define QUEST_REFUSES_SIZE(...)                                                                          \
    do {                                                                                                 \
        QUEST_REFUSES(KVC_BAD_SIZE, __VA_ARGS__);                                                        \
        QUEST_REFUSES(kvc_quest_step_scratch_bytes(&args) ? KVC_OK : KVC_BAD_SIZE, __VA_ARGS__);         \
    } while (0)

static void test_refusals(void) {
    test_case = "quest_step, refusals";
    QUEST_REFUSES_SIZE(args.step.S = 0);
    QUEST_REFUSES_SIZE(args.step.S = 2);
    QUEST_REFUSES_SIZE(args.pages_read = 0);
    QUEST_REFUSES_SIZE(args.range_pages = BLOCKS - 1);
    QUEST_REFUSES_SIZE(args.held = 1); /* with a rotation */
    QUEST_REFUSES_SIZE(args.step.D = KVC_MAX_HEAD_DIM + 1);
    QUEST_REFUSES_SIZE(args.step.table.P = 3);
    QUEST_REFUSES_SIZE(args.step.Hq = HQ + 1);
    QUEST_REFUSES_SIZE(args.step.scale = NAN);
    QUEST_REFUSES(KVC_BAD_DTYPE, args.step.q.dtype = (kvc_dtype)5);
    QUEST_REFUSES(KVC_BAD_DTYPE, args.step.v.dtype = KVC_BF16);
    QUEST_REFUSES(KVC_NULL_POINTER, args.ranges = NULL);
    QUEST_REFUSES(KVC_NULL_POINTER, args.chosen = NULL);
    QUEST_REFUSES(KVC_NULL_POINTER, args.step.k.data = NULL);
    QUEST_REFUSES(KVC_NULL_POINTER, args.step.q.data = NULL, args.step.rotary_dim = 0, args.held = 1);
    QUEST_REFUSES(KVC_NULL_POINTER, args.step.table.free_count = NULL, args.step.rotary_dim = 0, args.held = 1);
    QUEST_REFUSES(KVC_POOL_FULL, now.free_count[0] = 0);
    QUEST_REFUSES(KVC_BAD_INDEX, args.step.table_rows = LONG);
    QUEST_REFUSES(KVC_BAD_INDEX, now.lengths[1] = -1);
    QUEST_REFUSES(KVC_BAD_INDEX, now.lengths[0] = BLOCKS * P);
    QUEST_REFUSES(KVC_BAD_INDEX, now.lengths[0] = BLOCKS * P + 1, args.step.rotary_dim = 0, args.held = 1);
    QUEST_REFUSES(KVC_BAD_INDEX, now.block_table[7] = PAGES); /* a page that would be chosen */
    QUEST_REFUSES(KVC_BAD_INDEX, now.block_table[8] = PAGES); /* and one that would not */
    QUEST_REFUSES(KVC_OK, args.step.B = 0, args.step.table.R = 0);
    QUEST_REFUSES(KVC_OK, args.step.Hq = 0);
    kvc_quest_step_args args = quest_args();
    CHECK(kvc_quest_step(&args, NULL) == KVC_NULL_POINTER && kvc_quest_step(NULL, NULL) == KVC_NULL_POINTER);
    CHECK(kvc_quest_step_scratch_bytes(NULL) == 0);
    args = quest_args(), args.step.table.P = 16, args.pages_read = BLOCKS; /* more slots than one piece of decode */
    const kvc_decode_args decode = {.block_table = now.block_table, .B = B, .Hq = HQ, .Hkv = HKV, .S = 1, .D = D, .P = 16,
                                    .pages = PAGES, .blocks = BLOCKS, .scale = 0.5f};
    CHECK(kvc_quest_step_scratch_bytes(&args) > kvc_decode_scratch_bytes(&decode));
}

void test_quest_step(void) {
    for (int runner = 0; runner < RUNNERS; runner++) test_choice(runner), test_nothing_held(runner), test_coded_choice(runner);
    test_refusals();
}
