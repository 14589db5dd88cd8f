/* What fuzzing (tests/fuzz/c) has found: calls that once overflowed. */
#include "check.h"

/* A page that is named counts 1 at least; what a damaged count says is left as it is. */
static void test_damaged_counts(void) {
    test_case = "damaged page_refs";
    for (int32_t count = INT32_MIN; count < 1; count += INT32_MAX / 2 + 1) {
        int32_t block_table[1] = {0}, lengths[1] = {3}, refs[1] = {count}, free_pages[1] = {-1}, free_count[2] = {0, 0};
        const int32_t none[1] = {0};
        const kvc_truncate_rows_args args = {{block_table, lengths, refs, free_pages, free_count, 1, 1, 4, 1}, none};
        CHECK(kvc_truncate_rows(&args) == KVC_OK && lengths[0] == 0);
        CHECK(refs[0] == count && free_count[0] == 0 && free_pages[0] == -1);
    }
}

/* Chunks begin anew where the ring does: no token leaves it for pages, and no slot behind them need be there. */
static void test_chunks_with_pages(void) {
    test_case = "ring_step of chunks with pages";
    float x[4] = {0}, ring[4] = {0}, pages[4] = {0}, lse[1], alpha[1] = {1}, out[4];
    int32_t block_table[1] = {0}, lengths[1] = {0}, refs[1] = {1}, free_pages[1] = {0}, free_count[2] = {0, 0};
    int32_t places[1] = {3};
    uint8_t *marks = room(1);
    const kvc_view one = {x, KVC_F32, 4, 4, 4};
    kvc_ring_step_args args = {
        .step = {.out = out, .lse = lse, .q = one, .k = one, .v = one,
                 .rows = {.keys = pages, .values = pages + 2, .format = KVC_FORMAT_F32},
                 .table = {block_table, lengths, refs, free_pages, free_count, 1, 1, 1, 1},
                 .B = 1, .Hq = 1, .Hkv = 1, .S = 1, .D = 2, .scale = 1.0f},
        .ring = {.keys = ring, .values = ring + 2, .format = KVC_FORMAT_F32}, .places = places, .marks = marks,
        .alpha = alpha, .capacity = 1, .window = 3, .neuron = -1, .chunked = 1,
    };
    args.step.scratch = room(4096);
    CHECK(kvc_ring_step_scratch_bytes(&args) == 0 && kvc_ring_step(&args, NULL) == KVC_BAD_SIZE && places[0] == 3);
    free(args.step.scratch), free(marks);
}

void test_fuzzed(void) {
    test_chunks_with_pages();
    test_damaged_counts();
}
