/* Tests of the C kernels without Torch or Python: rope, select, conversions; main. Every table of inner
 * loops that the CPU can run is compared with naive loops in double. */
#include "check.h"

#include "../../csrc/simd.h"

#include <pthread.h>

int failures;
const char *test_case = "";
const char *tables[4];
int table_count;

void *room(int64_t bytes) {
    void *memory = NULL;
    if (posix_memalign(&memory, 64, bytes > 0 ? (size_t)bytes : 1)) abort();
    memset(memory, 0x5a, bytes > 0 ? (size_t)bytes : 1);
    return memory;
}

float uniform(void) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (float)(state >> 40) * 0x1p-23f - 1.0f;
}

void fill(float *values, int64_t count, float scale) {
    for (int64_t i = 0; i < count; i++) values[i] = scale * uniform();
}

void *rounded(float *values, int64_t count, kvc_dtype dtype) {
    void *array = room(count * kvc_dtype_bytes(dtype));
    kvc_simd_portable.store[dtype](array, values, count);
    kvc_simd_portable.load[dtype](values, array, count);
    return array;
}

float element(const void *array, int64_t index, kvc_dtype dtype) {
    float value;
    kvc_simd_portable.load[dtype](&value, (const char *)array + index * kvc_dtype_bytes(dtype), 1);
    return value;
}

double epsilon(kvc_dtype dtype) {
    return dtype == KVC_F32 ? 0x1p-23 : dtype == KVC_BF16 ? 0x1p-8 : 0x1p-11;
}

static void backwards(int64_t count, int64_t grain, kvc_range_fn fn, void *context) {
    (void)grain;
    for (int64_t i = count - 1; i >= 0; i--) fn(i, i + 1, context);
}

static void in_threes(int64_t count, int64_t grain, kvc_range_fn fn, void *context) {
    (void)grain;
    for (int64_t i = 0; i < count; i += 3) fn(i, i + 3 < count ? i + 3 : count, context);
}

typedef struct {
    int64_t begin, end;
    kvc_range_fn fn;
    void *context;
} slice;

static void *run_slice(void *argument) {
    const slice *part = argument;
    part->fn(part->begin, part->end, part->context);
    return NULL;
}

static void threaded(int64_t count, int64_t grain, kvc_range_fn fn, void *context) {
    (void)grain;
    pthread_t threads[3];
    slice parts[3];
    for (int i = 0; i < 3; i++) {
        parts[i] = (slice){count * i / 3, count * (i + 1) / 3, fn, context};
        if (pthread_create(&threads[i], NULL, run_slice, &parts[i])) abort();
    }
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
}

const kvc_parallel_for runners[RUNNERS] = {NULL, backwards, in_threes, threaded};

static void test_status(void) {
    test_case = "status";
    for (int i = 0; i <= KVC_BAD_FORMAT + 1; i++) CHECK(strlen(kvc_status_message((kvc_status)i)) > 5);
    CHECK(kvc_dtype_bytes(KVC_F32) == 4 && kvc_dtype_bytes(KVC_F16) == 2 && kvc_dtype_bytes((kvc_dtype)9) == 0);
    const char *before = kvc_simd_name();
    CHECK(kvc_simd_select("none") == KVC_BAD_SIMD && kvc_simd_name() == before);
    CHECK(kvc_simd_select(NULL) == KVC_NULL_POINTER && kvc_simd_name() == before);
}

/* Every 16-bit pattern, and floats at and around every rounding boundary, give the portable table's bits. */
static void test_conversions(void) {
    test_case = "conversions";
    enum { COUNT = 65536 };
    uint16_t *all = room(2 * COUNT), *half = room(2 * COUNT), *expected_half = room(2 * COUNT);
    float *wide = room(4 * COUNT), *expected = room(4 * COUNT);
    for (int i = 0; i < COUNT; i++) all[i] = (uint16_t)i;
    const kvc_simd *simd = kvc_simd_table();
    for (int dtype = KVC_BF16; dtype <= KVC_F16; dtype++) {
        kvc_simd_portable.load[dtype](expected, all, COUNT);
        simd->load[dtype](wide, all, COUNT);
        CHECK(memcmp(wide, expected, 4 * COUNT) == 0);
        for (int step = -1; step <= 1; step++) {
            const uint32_t middle = dtype == KVC_BF16 ? 0x8000u : 0x1000u;
            for (int i = 0; i < COUNT; i++) {
                uint32_t bits;
                memcpy(&bits, &expected[i], 4);
                bits += middle + (uint32_t)step;
                memcpy(&wide[i], &bits, 4);
            }
            kvc_simd_portable.store[dtype](expected_half, wide, COUNT);
            simd->store[dtype](half, wide, COUNT);
            CHECK(memcmp(half, expected_half, 2 * COUNT) == 0);
            for (int i = 0; i < COUNT && dtype == KVC_F16; i++) {
                /* the portable one itself, against rounding in double (finite results only) */
                const double back = (double)element(half, i, KVC_F16), value = (double)wide[i];
                if (isnan(value)) CHECK(isnan(back));
                if (!(fabs(value) < 65504)) continue;
                const double spacing = value == 0 ? 0 : fmax(ldexp(1, ilogb(value) - 10), 0x1p-24);
                CHECK(fabs(back - value) <= 0.5 * spacing);
            }
        }
        for (int64_t n = 0; n <= 33; n++) { /* tails touch nothing else */
            uint16_t *short_half = room(2 * n);
            float *short_wide = room(4 * n);
            simd->load[dtype](short_wide, all + 1000, n);
            simd->store[dtype](short_half, short_wide, n);
            CHECK(n == 0 || memcmp(short_half, all + 1000, (size_t)(2 * n)) == 0);
            free(short_half), free(short_wide);
        }
    }
    const float values[4] = {1.00390625f, 1.01171875f, NAN, INFINITY}; /* two ties of bfloat16: to even both ways */
    kvc_simd_portable.store[KVC_BF16](half, values, 4);
    CHECK(half[0] == 0x3f80 && half[1] == 0x3f82 && (half[2] & 0x7fff) > 0x7f80 && half[3] == 0x7f80);
    free(all), free(half), free(expected_half), free(wide), free(expected);
}

/* The loops with an exponential, in ulps of the true value, over the whole range down to subnormals. */
static void test_exponential(void) {
    test_case = "exponential";
    enum { COUNT = 20011 };
    float *x = room(4 * COUNT), *zero = room(4 * COUNT), *out = room(4 * COUNT);
    double worst = 0;
    for (int i = 0; i < COUNT; i++) x[i] = -87.0f * (float)i / COUNT, zero[i] = 0.0f;
    kvc_simd_table()->exp_difference(out, x, zero, COUNT);
    for (int i = 0; i < COUNT; i++) {
        const double truth = exp((double)x[i]), ulp = ldexp(1, ilogb(truth) - 23);
        worst = fmax(worst, fabs((double)out[i] - truth) / ulp);
    }
    CHECK(worst < 1.5);
    const float edges[6] = {0.0f, -100.0f, -103.0f, -110.0f, -INFINITY, NAN};
    kvc_simd_table()->exp_difference(out, edges, zero, 6);
    CHECK(out[0] == 1.0f && fabs((double)out[1] - exp(-100.0)) <= 0x1p-149 && out[2] == 0x1p-149f);
    CHECK(out[3] == 0.0f && out[4] == 0.0f && isnan(out[5]));
    free(x), free(zero), free(out);
}

static void test_rope(void) {
    enum { B = 2, H = 3, T = 5, ROWS = 7 };
    const int64_t dims[][2] = {{16, 16}, {80, 80}, {7, 4}, {5, 0}, {300, 290}, {128, 64}};
    for (size_t c = 0; c < sizeof dims / sizeof *dims; c++) {
        for (int mode = 0; mode < 3 * 2 * 2; mode++) {
            const kvc_dtype dtype = (kvc_dtype)(mode % 3);
            const int inverse = mode / 3 % 2, in_place = mode / 6;
            const int64_t D = dims[c][0], rotary = dims[c][1], half = rotary / 2, count = B * H * T * D;
            test_case = in_place ? "rope in place" : "rope";
            float *x = room(4 * count), *cosines = room(4 * ROWS * half), *sines = room(4 * ROWS * half);
            fill(x, count, 2.0f), fill(cosines, ROWS * half, 1.0f), fill(sines, ROWS * half, 1.0f);
            void *source = rounded(x, count, dtype);
            const int32_t positions[B * T] = {0, 6, 3, 3, 1, 2, 5, 4, 0, 6};
            void *first = NULL;
            for (int runner = 0; runner < RUNNERS; runner++) {
                const int64_t bytes = count * kvc_dtype_bytes(dtype);
                void *out = room(bytes), *input = room(bytes);
                memcpy(input, source, (size_t)bytes);
                kvc_rope_args args = {
                    .x = {input, dtype, H * T * D, T * D, D},
                    .out = {in_place ? input : out, dtype, H * T * D, T * D, D},
                    .cos = cosines, .sin = sines, .positions = positions,
                    .B = B, .H = H, .T = T, .D = D, .rotary_dim = rotary, .table_rows = 6, .inverse = inverse};
                CHECK(kvc_rope(&args, runners[runner]) == KVC_BAD_INDEX && memcmp(input, source, (size_t)bytes) == 0);
                args.table_rows = ROWS;
                CHECK(kvc_rope(&args, runners[runner]) == KVC_OK);
                const void *result = args.out.data;
                for (int64_t i = 0; i < count; i++) {
                    const int64_t d = i % D, t = i / D % T, b = i / (D * T * H), low = d % (half ? half : 1);
                    const float *row = x + (i - d);
                    double expected = (double)x[i];
                    if (d < rotary) {
                        const double cosine = (double)cosines[positions[b * T + t] * half + low];
                        const double sine = (inverse ? -1 : 1) * (double)sines[positions[b * T + t] * half + low];
                        const double other = (double)row[d < half ? d + half : d - half];
                        expected = expected * cosine + (d < half ? -1 : 1) * other * sine;
                    }
                    CHECK(fabs((double)element(result, i, dtype) - expected) <= epsilon(dtype) * 5);
                }
                if (!first) first = memcpy(room(bytes), result, (size_t)bytes);
                CHECK(memcmp(first, result, (size_t)bytes) == 0);
                free(out), free(input);
            }
            free(first), free(source), free(x), free(cosines), free(sines);
        }
    }
    test_case = "rope arguments";
    float x[4] = {1, 2, 3, 4};
    kvc_rope_args args = {.x = {x, KVC_F32, 4, 4, 4}, .out = {x, KVC_F32, 4, 4, 4}, .cos = x, .sin = x,
                          .B = 1, .H = 1, .T = 1, .D = 4, .rotary_dim = 3, .table_rows = 1};
    CHECK(kvc_rope(&args, NULL) == KVC_BAD_SIZE);
    args.rotary_dim = 6;
    CHECK(kvc_rope(&args, NULL) == KVC_BAD_SIZE);
    args.rotary_dim = 2, args.cos = NULL;
    CHECK(kvc_rope(&args, NULL) == KVC_NULL_POINTER);
    args.cos = x, args.out.dtype = (kvc_dtype)7;
    CHECK(kvc_rope(&args, NULL) == KVC_BAD_DTYPE);
    args.out.dtype = KVC_F32, args.T = 2;
    CHECK(kvc_rope(&args, NULL) == KVC_BAD_SIZE);
    args.T = 0;
    CHECK(kvc_rope(&args, NULL) == KVC_OK && kvc_rope(NULL, NULL) == KVC_NULL_POINTER);
    CHECK(x[0] == 1 && x[1] == 2 && x[2] == 3 && x[3] == 4);
}

/* scores of row r in rank order: a beats b if greater, or equal and earlier; NaN beats nothing. */
static int chosen(const float *scores, int64_t length, int64_t k, int64_t t) {
    int64_t rank = 0;
    if (isnan(scores[t])) return 0;
    for (int64_t i = 0; i < length; i++) rank += scores[i] > scores[t] || (scores[i] == scores[t] && i < t);
    return rank < k;
}

static void test_select(void) {
    enum { R = 4 };
    const int64_t sizes[][2] = {{1, 1}, {1, 0}, {5, 5}, {64, 7}, {700, 699}, {700, 33}, {33, 32}};
    for (size_t c = 0; c < sizeof sizes / sizeof *sizes; c++) {
        for (int kind = 0; kind < 4; kind++) { /* spread, many ties with both zeros, special values, close together */
            const int64_t T = sizes[c][0], k = sizes[c][1];
            test_case = "select";
            float *scores = room(4 * R * T);
            int32_t *first = NULL, lengths[R];
            int few = 0;
            for (int64_t i = 0; i < R * T; i++) {
                const float u = uniform(), special[5] = {NAN, INFINITY, -INFINITY, -0.0f, 0.0f};
                scores[i] = kind == 0 ? u : kind == 1 ? (float)(int)(3 * u) * -0.5f
                          : kind == 2 ? special[(int)(2.5f * (u + 1)) % 5] : 1.0f + 1e-6f * u;
            }
            for (int r = 0; r < R; r++) lengths[r] = (int32_t)(T - (T - k) * r / R);
            for (int runner = 0; runner < RUNNERS; runner++) {
                int32_t *indices = room(4 * R * k);
                const kvc_select_topk_args args = {indices, scores, lengths, R, T, k};
                const kvc_status status = kvc_select_topk(&args, runners[runner]);
                for (int64_t r = 0; r < R; r++) {
                    int64_t count = 0;
                    for (int64_t t = 0; t < lengths[r]; t++) {
                        if (chosen(scores + r * T, lengths[r], k, t)) CHECK(indices[r * k + count++] == t);
                    }
                    few |= count < k;
                    for (; count < k; count++) CHECK(indices[r * k + count] == -1);
                }
                CHECK(status == (few ? KVC_TOO_FEW_SCORES : KVC_OK));
                if (!first) first = memcpy(room(4 * R * k), indices, (size_t)(4 * R * k));
                CHECK(memcmp(first, indices, (size_t)(4 * R * k)) == 0);
                free(indices);
            }
            free(first), free(scores);
        }
    }
    test_case = "select arguments";
    float scores[3] = {1, 2, 3};
    int32_t indices[4] = {9, 9, 9, 9}, lengths[1] = {1};
    kvc_select_topk_args args = {indices, scores, lengths, 1, 3, 2};
    CHECK(kvc_select_topk(&args, NULL) == KVC_BAD_INDEX);
    lengths[0] = 4;
    CHECK(kvc_select_topk(&args, NULL) == KVC_BAD_INDEX);
    args.k = 4;
    CHECK(kvc_select_topk(&args, NULL) == KVC_BAD_SIZE);
    args.k = -1;
    CHECK(kvc_select_topk(&args, NULL) == KVC_BAD_SIZE);
    args.k = 2, args.scores = NULL;
    CHECK(kvc_select_topk(&args, NULL) == KVC_NULL_POINTER);
    args.R = 0;
    CHECK(kvc_select_topk(&args, NULL) == KVC_OK && indices[0] == 9 && indices[1] == 9);
}

int main(void) {
    const char *names[4] = {"portable", "avx2", "avx512", "avx512_bf16"};
    for (int i = 0; i < 4; i++) {
        if (kvc_simd_select(names[i]) == KVC_OK) tables[table_count++] = names[i];
    }
    for (int i = 0; i < table_count; i++) {
        kvc_simd_select(tables[i]);
        test_status();
        test_conversions();
        test_exponential();
        test_rope();
        test_score();
        test_decode();
        test_decode_shared();
        test_flash();
        test_merge();
        test_dmc();
        test_step();
        test_quest_step();
        test_similarity();
        test_codes();
        test_fuzzed();
        printf("%s: %s\n", tables[i], failures ? "failed" : "passed");
    }
    test_select();
    test_pages();
    test_planner();
    printf("%d checks failed\n", failures);
    return failures != 0;
}
