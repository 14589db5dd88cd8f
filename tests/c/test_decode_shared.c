/* Tests of the probabilities that decode writes, and of attention by them, against naive loops in double. */
#include "check.h"

typedef struct {
    int64_t B, Hq, Hkv, D, P, blocks;
    kvc_dtype dtype, cache_dtype;
    float threshold;
} shared_case;

/* Rows of pages: the first is full, the last is empty if there are several. */
typedef struct {
    int64_t R, G, pages, columns; /* columns: keys of the longest row */
    int32_t *table, *begin, *end;
} page_rows;

static page_rows rows_of(const shared_case *c) {
    page_rows rows = {.R = c->B * c->Hkv, .G = c->Hq / c->Hkv, .columns = c->blocks * c->P};
    rows.pages = rows.R * c->blocks + 1;
    rows.table = room(4 * rows.R * c->blocks), rows.begin = room(4 * rows.R), rows.end = room(4 * rows.R);
    for (int64_t i = 0; i < rows.R * c->blocks; i++) rows.table[i] = (int32_t)((i * 7919) % rows.pages);
    for (int64_t r = 0; r < rows.R; r++) {
        rows.end[r] = (int32_t)(rows.columns * (rows.R - r) / rows.R);
        rows.begin[r] = r == rows.R - 1 && r ? rows.end[r] : (int32_t)(r * rows.columns / (4 * rows.R));
    }
    return rows;
}

static int64_t place_of(const shared_case *c, const page_rows *rows, int64_t row, int64_t t) {
    return (rows->table[row * c->blocks + t / c->P] * c->P + t % c->P) * c->D;
}

static void free_rows(page_rows *rows) {
    free(rows->table), free(rows->begin), free(rows->end);
}

static void test_probabilities_case(const shared_case *c) {
    page_rows rows = rows_of(c);
    const int64_t heads = c->B * c->Hq, cache = rows.pages * c->P * c->D, columns = rows.columns + 3;
    float *q = room(4 * heads * c->D), *k = room(4 * cache), *v = room(4 * cache), *first = NULL;
    fill(q, heads * c->D, 2.0f), fill(k, cache, 2.0f), fill(v, cache, 1.0f);
    void *q_array = rounded(q, heads * c->D, c->dtype);
    void *k_array = rounded(k, cache, c->cache_dtype), *v_array = rounded(v, cache, c->cache_dtype);
    double *p = room(8 * rows.columns);
    const float scale = 0.3f;
    for (int runner = 0; runner < RUNNERS; runner++) {
        const int64_t bytes = heads * columns * 4;
        kvc_decode_args args = {
            .out = room(heads * c->D * kvc_dtype_bytes(c->dtype)), .lse = room(4 * heads),
            .q = {q_array, c->dtype, c->Hq * c->D, c->D, c->D}, .rows = {k_array, v_array, NULL, NULL, (kvc_format)c->cache_dtype},
            .block_table = rows.table, .begin = rows.begin, .end = rows.end, .B = c->B,
            .Hq = c->Hq, .Hkv = c->Hkv, .S = 1, .D = c->D, .P = c->P, .pages = rows.pages, .blocks = c->blocks,
            .scale = scale, .probabilities = room(bytes), .columns = columns};
        args.scratch = room(kvc_decode_scratch_bytes(&args));
        for (int64_t i = 0; i < heads * columns; i++) args.probabilities[i] = 7;
        CHECK(kvc_decode(&args, runners[runner]) == KVC_OK);
        for (int64_t h = 0; h < heads && runner == 0; h++) {
            const int64_t row = h / rows.G, begin = rows.begin[row], count = rows.end[row] - begin;
            double most = -INFINITY, sum = 0;
            for (int64_t j = 0; j < count; j++) {
                p[j] = 0;
                for (int64_t d = 0; d < c->D; d++) {
                    p[j] += (double)scale * (double)q[h * c->D + d] * (double)k[place_of(c, &rows, row, begin + j) + d];
                }
                most = fmax(most, p[j]);
            }
            for (int64_t j = 0; j < count; j++) sum += exp(p[j] - most);
            for (int64_t j = 0; j < columns; j++) {
                const double found = (double)args.probabilities[h * columns + j];
                if (j < count) CHECK(fabs(found - exp(p[j] - most) / sum) <= 2e-5 * exp(p[j] - most) / sum + 1e-12);
                else CHECK(found == 7);
            }
        }
        if (!first) first = memcpy(room(bytes), args.probabilities, (size_t)bytes);
        CHECK(memcmp(first, args.probabilities, (size_t)bytes) == 0);
        memset(args.probabilities, 0x77, (size_t)bytes); /* nothing is written on a bad argument */
        kvc_decode_args bad = args;
        bad.S = 2;
        CHECK(kvc_decode(&bad, NULL) == KVC_BAD_SIZE && kvc_decode_scratch_bytes(&bad) == 0);
        bad.S = 0;
        CHECK(kvc_decode(&bad, NULL) == KVC_BAD_SIZE);
        bad = args, bad.columns = -1;
        CHECK(kvc_decode(&bad, NULL) == KVC_BAD_SIZE);
        bad = args, bad.columns = rows.columns - 1;
        CHECK(kvc_decode(&bad, NULL) == KVC_BAD_INDEX);
        for (int64_t i = 0; i < bytes; i++) CHECK(((const unsigned char *)args.probabilities)[i] == 0x77);
        free(args.out), free(args.lse), free(args.scratch), free(args.probabilities);
    }
    free(q), free(k), free(v), free(q_array), free(k_array), free(v_array), free(p), free(first);
    free_rows(&rows);
}

static void check_bad_arguments(const kvc_decode_shared_args *good, int32_t *table, int32_t *end, int64_t longest) {
    const int64_t bytes = good->B * good->Hq * good->D * kvc_dtype_bytes(good->dtype);
    kvc_decode_shared_args bad = *good;
    memset(good->out, 0x77, (size_t)bytes), memset(good->skipped, 0x77, (size_t)(good->B * good->Hq));
    const int64_t head_dims[3] = {-1, 0, KVC_MAX_HEAD_DIM + 1};
    for (int i = 0; i < 3; i++) {
        bad.D = head_dims[i];
        CHECK(kvc_decode_shared(&bad, NULL) == KVC_BAD_SIZE && kvc_decode_shared_scratch_bytes(&bad) == 0);
    }
    bad = *good, bad.P = 3;
    CHECK(kvc_decode_shared(&bad, NULL) == KVC_BAD_SIZE);
    bad = *good, bad.threshold = NAN;
    CHECK(kvc_decode_shared(&bad, NULL) == KVC_BAD_SIZE && kvc_decode_shared_scratch_bytes(&bad) == 0);
    bad = *good, bad.columns = -1;
    CHECK(kvc_decode_shared(&bad, NULL) == KVC_BAD_SIZE);
    bad = *good, bad.Hq = 2 * good->Hq + 1, bad.Hkv = 2;
    CHECK(kvc_decode_shared(&bad, NULL) == KVC_BAD_SIZE);
    bad = *good, bad.dtype = (kvc_dtype)4;
    CHECK(kvc_decode_shared(&bad, NULL) == KVC_BAD_DTYPE);
    bad = *good, bad.rows.format = (kvc_format)9;
    CHECK(kvc_decode_shared(&bad, NULL) == KVC_BAD_FORMAT);
    bad = *good, bad.rows.format = KVC_FORMAT_INT8; /* no scales */
    CHECK(kvc_decode_shared(&bad, NULL) == KVC_NULL_POINTER);
    bad = *good, bad.far_lse = NULL;
    CHECK(kvc_decode_shared(&bad, NULL) == KVC_NULL_POINTER);
    bad = *good, bad.scratch = NULL;
    CHECK(kvc_decode_shared(&bad, NULL) == KVC_NULL_POINTER);
    bad = *good, bad.probabilities = NULL;
    CHECK(kvc_decode_shared(&bad, NULL) == KVC_NULL_POINTER);
    bad = *good, bad.columns = longest - 1;
    CHECK(kvc_decode_shared(&bad, NULL) == KVC_BAD_INDEX);
    bad = *good, bad.pages = 0;
    CHECK(kvc_decode_shared(&bad, NULL) == KVC_BAD_INDEX);
    end[0]++;
    CHECK(kvc_decode_shared(good, NULL) == KVC_BAD_INDEX);
    end[0]--, table[0] -= 1 << 20;
    CHECK(kvc_decode_shared(good, NULL) == KVC_BAD_INDEX);
    table[0] += 1 << 20;
    bad = *good, bad.B = 0;
    CHECK(kvc_decode_shared(&bad, NULL) == KVC_OK);
    for (int64_t i = 0; i < bytes; i++) CHECK(((const unsigned char *)good->out)[i] == 0x77);
    for (int64_t i = 0; i < good->B * good->Hq; i++) CHECK(good->skipped[i] == 0x77);
}

static void test_shared_case(const shared_case *c) {
    page_rows rows = rows_of(c);
    const int64_t heads = c->B * c->Hq, cache = rows.pages * c->P * c->D;
    const int64_t bytes = heads * c->D * kvc_dtype_bytes(c->dtype);
    const int64_t stride_h = rows.columns + 3, stride_b = c->Hq * stride_h + 5;
    const int64_t weights = (c->B - 1) * stride_b + (c->Hq - 1) * stride_h + rows.columns;
    float *near = room(4 * heads * c->D), *v = room(4 * cache), *p = room(4 * weights);
    float *near_lse = room(4 * heads), *far_lse = room(4 * heads);
    fill(near, heads * c->D, 1.0f), fill(v, cache, 1.0f), fill(p, weights, 1.0f / (float)rows.columns);
    fill(near_lse, heads, 2.0f), fill(far_lse, heads, 2.0f);
    void *near_array = rounded(near, heads * c->D, c->dtype), *v_array = rounded(v, cache, c->cache_dtype);
    /* the values of the first row are not read where all of its query heads are skipped */
    for (int64_t i = 0; i < rows.G && isfinite(c->threshold); i++) near_lse[i] = far_lse[i] + c->threshold + 1;
    for (int64_t i = 0; i < c->blocks && isfinite(c->threshold); i++) {
        const int64_t page = c->P * c->D * kvc_dtype_bytes(c->cache_dtype);
        memset((char *)v_array + rows.table[i] * page, 0xff, (size_t)page);
    }
    void *first = NULL;
    uint8_t *first_skipped = NULL;
    for (int runner = 0; runner < RUNNERS; runner++) {
        kvc_decode_shared_args args = {
            .out = room(bytes), .skipped = room(heads), .near = near_array, .near_lse = near_lse, .far_lse = far_lse,
            .probabilities = p, .stride_b = stride_b, .stride_h = stride_h, .columns = rows.columns, .dtype = c->dtype,
            .rows = {NULL, v_array, NULL, NULL, (kvc_format)c->cache_dtype}, .block_table = rows.table, .begin = rows.begin,
            .end = rows.end, .B = c->B, .Hq = c->Hq, .Hkv = c->Hkv, .D = c->D, .P = c->P, .pages = rows.pages,
            .blocks = c->blocks, .threshold = c->threshold};
        args.scratch = room(kvc_decode_shared_scratch_bytes(&args));
        CHECK(kvc_decode_shared(&args, runners[runner]) == KVC_OK);
        for (int64_t h = 0; h < heads && runner == 0; h++) {
            const int64_t row = h / rows.G, begin = rows.begin[row], count = rows.end[row] - begin;
            const int skipped = count > 0 && c->threshold != INFINITY && near_lse[h] - far_lse[h] >= c->threshold;
            const double gate = skipped || !count ? 1 : 1 / (1 + exp((double)far_lse[h] - (double)near_lse[h]));
            const float *w = p + h / c->Hq * stride_b + h % c->Hq * stride_h;
            CHECK(args.skipped[h] == skipped);
            for (int64_t d = 0; d < c->D; d++) {
                double far = 0, size = 0;
                for (int64_t j = 0; j < count && gate < 1; j++) {
                    const double part = (double)w[j] * (double)v[place_of(c, &rows, row, begin + j) + d];
                    far += part, size += fabs(part);
                }
                const double own = (double)near[h * c->D + d], expected = gate * own + (1 - gate) * far;
                const double got = (double)element(args.out, h * c->D + d, c->dtype);
                CHECK(fabs(got - expected) <= 2e-6 * (fabs(own) + size) + epsilon(c->dtype) * fabs(expected));
                if (gate == 1) CHECK(got == own);
            }
        }
        if (!first) {
            first = memcpy(room(bytes), args.out, (size_t)bytes);
            first_skipped = memcpy(room(heads), args.skipped, (size_t)heads);
        }
        CHECK(memcmp(first, args.out, (size_t)bytes) == 0 && memcmp(first_skipped, args.skipped, (size_t)heads) == 0);
        check_bad_arguments(&args, rows.table, rows.end, rows.columns);
        free(args.out), free(args.skipped), free(args.scratch);
    }
    free(near), free(v), free(p), free(near_lse), free(far_lse), free(near_array), free(v_array), free(first);
    free(first_skipped);
    free_rows(&rows);
}

/* One head, one value of 2 with probability 1, near attention 3. */
static void test_sides(void) {
    const struct {
        float near, far, threshold;
        int32_t end;
        float out;
        uint8_t skipped;
    } cases[] = {
        {0, 0, INFINITY, 1, 2.5f, 0},        {0, -INFINITY, INFINITY, 1, 3, 0},  {-INFINITY, 0, INFINITY, 1, 2, 0},
        {-INFINITY, -INFINITY, 0, 1, 0, 0},  {INFINITY, 0, INFINITY, 1, 3, 0},   {0, 0, 0, 1, 3, 1},
        {0, 0, 0, 0, 3, 0},                  {0, 0, -INFINITY, 1, 3, 1},         {-INFINITY, 0, -INFINITY, 1, 0, 1},
        {-INFINITY, 0, -INFINITY, 0, 0, 0},  {NAN, 0, 0, 1, NAN, 0},             {0, NAN, -INFINITY, 1, NAN, 0},
        {INFINITY, INFINITY, 0, 1, NAN, 0},  {0, -INFINITY, 5, 1, 3, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int empty = cases[i].near == -INFINITY; /* whatever lies there */
        const float near = empty ? NAN : 3, value = 2, probability = 1;
        const int32_t table = 0, begin = 0;
        float out = 77;
        uint8_t skipped = 77;
        kvc_decode_shared_args args = {
            .out = &out, .skipped = &skipped, .near = &near, .near_lse = &cases[i].near, .far_lse = &cases[i].far,
            .probabilities = &probability, .columns = 1,
            .rows = {NULL, (void *)(uintptr_t)&value, NULL, NULL, KVC_FORMAT_F32}, .block_table = &table, .begin = &begin,
            .end = &cases[i].end, .B = 1, .Hq = 1, .Hkv = 1, .D = 1, .P = 1, .pages = 1, .blocks = 1,
            .threshold = cases[i].threshold};
        args.scratch = room(kvc_decode_shared_scratch_bytes(&args));
        CHECK(kvc_decode_shared(&args, NULL) == KVC_OK && skipped == cases[i].skipped);
        CHECK(isnan(cases[i].out) ? isnan(out) : out == cases[i].out);
        free(args.scratch);
    }
}

void test_decode_shared(void) {
    const shared_case cases[] = {
        {1, 1, 1, 1, 1, 1, KVC_F32, KVC_F32, INFINITY},     {2, 4, 2, 33, 16, 5, KVC_F32, KVC_F32, 0.5f},
        {1, 8, 1, 128, 64, 20, KVC_BF16, KVC_BF16, -1},     {2, 2, 2, 256, 256, 3, KVC_F16, KVC_F16, INFINITY},
        {1, 18, 2, 20, 4, 99, KVC_F32, KVC_F16, 0},         {3, 9, 3, 7, 32, 40, KVC_BF16, KVC_F32, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_case = "probabilities of decode";
        test_probabilities_case(&cases[i]);
        test_case = "decode_shared";
        test_shared_case(&cases[i]);
    }
    test_case = "decode_shared's sides";
    test_sides();
    test_case = "probabilities of logits of -inf";
    float q = 1, k[2] = {-INFINITY, -INFINITY}, v[2] = {1, 2}, out, lse, probabilities[2] = {7, 7};
    const int32_t end = 2;
    kvc_decode_args args = {.out = &out, .lse = &lse, .q = {&q, KVC_F32, 1, 1, 1}, .rows = {k, v, NULL, NULL, KVC_FORMAT_F32},
                            .end = &end, .B = 1, .Hq = 1, .Hkv = 1, .S = 1, .D = 1, .P = 2, .pages = 1, .scale = 1,
                            .probabilities = probabilities, .columns = 2};
    args.scratch = room(kvc_decode_scratch_bytes(&args));
    CHECK(kvc_decode(&args, NULL) == KVC_OK && out == 0 && lse == -INFINITY);
    CHECK(probabilities[0] == 0 && probabilities[1] == 0);
    free(args.scratch);
}
