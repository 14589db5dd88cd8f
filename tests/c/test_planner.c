/* Plans and divisions of memory: worked examples, what must hold for random sizes, sizes near 2^63. */
#include "check.h"

enum { MOST = 64 };

static int64_t chunks[MOST], mean[MOST], clamped[MOST], memory[MOST * 8], stored[MOST * 8];

static kvc_plan_args plan_of(int64_t prompt_length, int64_t chunk_size, int64_t memory_size, kvc_schedule schedule,
                             int decremental) {
    return (kvc_plan_args){
        .chunks = chunks, .mean_memory = mean, .clamped = clamped, .memory = memory, .stored = stored,
        .prompt_length = prompt_length, .chunk_size = chunk_size, .memory_size = memory_size, .initial_memory = -1,
        .layers = 1, .min_chunk = 1, .schedule = schedule, .decremental = decremental,
    };
}

static int equals(const int64_t *found, int64_t count, const int64_t *expected) {
    return memcmp(found, expected, (size_t)count * sizeof *found) == 0;
}

static void test_examples(void) {
    test_case = "plan, examples";
    kvc_plan_args args = plan_of(32, 8, 8, KVC_SCHEDULE_LINEAR, 1);
    CHECK(kvc_plan(&args) == KVC_OK);
    CHECK(equals(chunks, 4, (int64_t[]){8, 10, 8, 6}) && equals(memory, 4, (int64_t[]){2, 4, 6, 8}));
    args = plan_of(47, 10, 12, KVC_SCHEDULE_SQRT, 1);
    CHECK(kvc_plan(&args) == KVC_OK);
    CHECK(equals(chunks, 5, (int64_t[]){10, 15, 10, 7, 5}) && equals(memory, 5, (int64_t[]){2, 7, 9, 11, 12}));
    args = plan_of(47, 10, 12, KVC_SCHEDULE_SQUARE, 1);
    CHECK(kvc_plan(&args) == KVC_OK);
    CHECK(equals(chunks, 5, (int64_t[]){10, 12, 11, 9, 5}) && equals(memory, 5, (int64_t[]){2, 3, 5, 8, 12}));
    args = plan_of(48, 8, 24, KVC_SCHEDULE_LINEAR, 1), args.min_chunk = 4;
    CHECK(kvc_plan(&args) == KVC_OK);
    CHECK(equals(chunks, 6, (int64_t[]){8, 15, 11, 6, 4, 4}) && equals(clamped, 6, (int64_t[]){0, 0, 0, 0, 1, 1}));
    args.min_chunk = 1;
    CHECK(kvc_plan(&args) == KVC_OK);
    CHECK(equals(chunks, 6, (int64_t[]){8, 16, 12, 8, 3, 1}) && equals(stored, 6, (int64_t[]){4, 8, 12, 16, 19, 20}));
}

static int64_t below(int64_t limit) {
    return (int64_t)((uniform() + 1.0f) * 0.5f * (float)limit) % limit;
}

static int64_t smaller_of(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static void test_random_plans(void) {
    test_case = "plan, random";
    for (int trial = 0; trial < 3000; trial++) {
        const int64_t chunk_size = 1 + below(40), n = 1 + below(MOST), L = 1 + below(8);
        kvc_plan_args args = plan_of(1 + (n - 1) * chunk_size + below(chunk_size), chunk_size, 1 + below(100),
                                     (kvc_schedule)below(KVC_SCHEDULE_ADAPTIVE + 1), trial % 2);
        args.layers = L, args.min_chunk = 1 + below(20), args.initial_memory = below(args.memory_size + 2) - 1;
        CHECK(kvc_plan_iterations(args.prompt_length, chunk_size) == n);
        CHECK(kvc_plan(&args) == KVC_OK);
        int64_t end = 0;
        for (int64_t i = 0; i < n; i++) {
            end += chunks[i];
            CHECK(chunks[i] >= 1 && (!clamped[i] || (args.decremental && chunks[i] <= args.min_chunk)));
            int64_t sum = 0;
            for (int64_t j = 0; j < L; j++) {
                const int64_t *m = memory + j * n, *e = stored + j * n;
                sum += m[i];
                CHECK(m[i] <= args.memory_size && e[i] <= m[i] && e[i] <= end);
                CHECK(i == 0 || (m[i] >= m[i - 1] && e[i] >= e[i - 1]));
                CHECK(i < n - 1 || m[i] == args.memory_size);
            }
            CHECK(2 * L * mean[i] > 2 * sum - L - 1 && 2 * L * mean[i] <= 2 * sum + L);
        }
        CHECK(end == args.prompt_length);
    }
}

static void test_limits_of_plans(void) {
    test_case = "plan, limits";
    CHECK(kvc_plan_iterations(0, 4) == 0 && kvc_plan_iterations(9, 4) == 3 && kvc_plan_iterations(8, 4) == 2);
    CHECK(kvc_plan_iterations(-1, 4) == -1 && kvc_plan_iterations(4, 0) == -1);
    CHECK(kvc_plan_iterations(INT64_MAX, 2) == INT64_MAX / 2 + 1);
    CHECK(kvc_plan(NULL) == KVC_NULL_POINTER);
    kvc_plan_args args = plan_of(9, 4, 6, (kvc_schedule)(KVC_SCHEDULE_ADAPTIVE + 1), 0);
    chunks[0] = -5;
    CHECK(kvc_plan(&args) == KVC_BAD_SCHEDULE);
    args.schedule = KVC_SCHEDULE_FIXED, args.initial_memory = 7;
    CHECK(kvc_plan(&args) == KVC_BAD_SIZE);
    args.initial_memory = 0, args.min_chunk = 0;
    CHECK(kvc_plan(&args) == KVC_BAD_SIZE);
    args.min_chunk = 1, args.layers = 0;
    CHECK(kvc_plan(&args) == KVC_BAD_SIZE);
    args.layers = 1, args.memory_size = 0;
    CHECK(kvc_plan(&args) == KVC_BAD_SIZE);
    args.memory_size = 6, args.stored = NULL;
    CHECK(kvc_plan(&args) == KVC_NULL_POINTER && chunks[0] == -5);
    args = plan_of(0, 4, 6, KVC_SCHEDULE_LINEAR, 1);
    args.chunks = args.mean_memory = args.clamped = args.memory = args.stored = NULL;
    CHECK(kvc_plan(&args) == KVC_OK);

    args = plan_of(INT64_MAX, INT64_MAX, INT64_MAX, KVC_SCHEDULE_SQRT, 1); /* one iteration multiplies nothing */
    CHECK(kvc_plan(&args) == KVC_OK && chunks[0] == INT64_MAX && memory[0] == INT64_MAX && stored[0] == INT64_MAX);
    args.layers = 2;
    CHECK(kvc_plan(&args) == KVC_BAD_SIZE);
    args = plan_of(INT64_MAX, INT64_MAX / 2 + 1, INT64_MAX, KVC_SCHEDULE_FIXED, 0);
    CHECK(kvc_plan(&args) == KVC_OK && stored[1] == INT64_MAX);
    args.decremental = 1;
    CHECK(kvc_plan(&args) == KVC_BAD_SIZE);
    args.memory_size = 1, args.prompt_length--;
    CHECK(kvc_plan(&args) == KVC_OK && chunks[0] == chunks[1]);

    /* the largest growth for which products stay below 2^63 with n - 1 = 10, and the next */
    static const struct { kvc_schedule schedule; int64_t growth; } largest[] = {
        {KVC_SCHEDULE_LINEAR, (INT64_MAX / 10 - 1) / 2},
        {KVC_SCHEDULE_ADAPTIVE, (INT64_MAX / 10 - 1) / 2},
        {KVC_SCHEDULE_SQUARE, (INT64_MAX / 100 - 1) / 2},
        {KVC_SCHEDULE_SQRT, 480191941}, /* floor(sqrt(2^63 / 40)), which is not whole */
        {KVC_SCHEDULE_SQUARE_SQRT, 480191941},
    };
    for (int k = 0; k < 5; k++) {
        args = plan_of(11, 1, largest[k].growth, largest[k].schedule, 0), args.initial_memory = 0, args.layers = 2;
        CHECK(kvc_plan(&args) == KVC_OK);
        CHECK(memory[10] == largest[k].growth && memory[21] == largest[k].growth && memory[5] <= memory[16]);
        args.memory_size++;
        CHECK(kvc_plan(&args) == KVC_BAD_SIZE);
        args.initial_memory = 1;
        CHECK(kvc_plan(&args) == KVC_OK);
    }
}

static void test_division(void) {
    int64_t size[8], kept[8], held[8], low[8], high[8];
    kvc_divide_memory_args args = {size, kept, held, low, high, 4, 24};
    static const int64_t ratios[4][4] = {{10, 30, 20, 40}, {0, 50, 25, 25}, {0, 0, 0, 0}, {10, 10, 10, 70}};
    static const int64_t sizes[4][4] = {{2, 7, 5, 10}, {1, 11, 6, 6}, {6, 6, 6, 6}, {5, 5, 4, 10}};
    test_case = "divide memory, examples";
    for (int k = 0; k < 4; k++) {
        for (int j = 0; j < 4; j++) kept[j] = ratios[k][j], held[j] = 100, low[j] = 1, high[j] = k == 3 ? 10 : 50;
        CHECK(kvc_divide_memory(&args) == KVC_OK && equals(size, 4, sizes[k]));
    }
    test_case = "divide memory, random";
    for (int trial = 0; trial < 3000; trial++) {
        args.layers = below(9);
        const int64_t largest = trial % 3 ? 30 : ((int64_t)1 << 44) - 1;
        int64_t lowest = 0, highest = 0, sum = 0;
        args.total = below(largest);
        for (int64_t j = 0; j < args.layers; j++) {
            held[j] = below(trial % 3 ? 6 : INT32_MAX), kept[j] = held[j] && below(4) ? below(held[j] + 1) : 0;
            high[j] = below(5) ? below(largest) / (1 + below(8)) : INT64_MAX, low[j] = smaller_of(high[j], below(5));
            lowest += low[j], highest += smaller_of(high[j], args.total);
        }
        CHECK(kvc_divide_memory(&args) == KVC_OK);
        for (int64_t j = 0; j < args.layers; j++) {
            CHECK(size[j] <= high[j] && size[j] >= (lowest > args.total ? 0 : low[j]));
            sum += size[j];
        }
        CHECK(sum == smaller_of(args.total, highest));
    }
    test_case = "divide memory, limits";
    args.layers = 2, args.total = (int64_t)1 << 46, size[0] = -5;
    for (int j = 0; j < 2; j++) kept[j] = 1, held[j] = 2, low[j] = 0, high[j] = INT64_MAX;
    CHECK(kvc_divide_memory(&args) == KVC_BAD_SIZE);
    args.total--;
    kept[0] = -1;
    CHECK(kvc_divide_memory(&args) == KVC_BAD_INDEX);
    kept[0] = 3;
    CHECK(kvc_divide_memory(&args) == KVC_BAD_INDEX);
    kept[0] = 1, low[1] = 2, high[1] = 1;
    CHECK(kvc_divide_memory(&args) == KVC_BAD_INDEX);
    low[1] = 0, held[1] = (int64_t)1 << 31;
    CHECK(kvc_divide_memory(&args) == KVC_BAD_INDEX && size[0] == -5);
    held[1] = INT32_MAX, kept[1] = INT32_MAX - 1, high[1] = INT64_MAX;
    CHECK(kvc_divide_memory(&args) == KVC_OK && size[0] + size[1] == args.total && size[1] > size[0]);
    args.lowest = NULL;
    CHECK(kvc_divide_memory(&args) == KVC_NULL_POINTER && kvc_divide_memory(NULL) == KVC_NULL_POINTER);
    args.layers = 0;
    CHECK(kvc_divide_memory(&args) == KVC_OK);
    args.total = -1;
    CHECK(kvc_divide_memory(&args) == KVC_BAD_SIZE);
}

void test_planner(void) {
    test_examples();
    test_random_plans();
    test_limits_of_plans();
    test_division();
}
