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

void test_fuzzed(void) {
    test_damaged_counts();
}
