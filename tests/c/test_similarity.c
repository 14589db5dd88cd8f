/* Tests of the layers' divergence against naive loops in double. */
#include "check.h"

typedef struct {
    int64_t L, Hq, Hkv, S, T, D, sinks, recent;
} sizes;

/* Probabilities of one row in p [T]; 0 if it sees nothing. */
static int row_of(double *p, const sizes *n, const void *q, const void *k, kvc_dtype dtype, int64_t l, int64_t h,
                  int64_t s) {
    const int64_t end = n->T - n->S + s + 1 - n->recent, g = h / (n->Hq / n->Hkv);
    double norm = 0, most = -INFINITY;
    for (int64_t t = 0; t < n->T; t++) {
        p[t] = -INFINITY;
        if (t < n->sinks || t >= end) continue;
        p[t] = 0;
        for (int64_t d = 0; d < n->D; d++) {
            p[t] += 0.5 * (double)element(q, ((l * n->Hq + h) * n->S + s) * n->D + d, dtype) *
                    (double)element(k, ((l * n->Hkv + g) * n->T + t) * n->D + d, dtype);
        }
        most = fmax(most, p[t]);
    }
    for (int64_t t = 0; t < n->T; t++) norm += p[t] = p[t] == -INFINITY ? 0 : exp(p[t] - most);
    for (int64_t t = 0; t < n->T; t++) p[t] /= norm > 0 ? norm : 1;
    return norm > 0;
}

static double term(double p, double r) { return p > 0 ? p * log2(2 * p / (p + r)) : 0; }

static void test_case_of(sizes n, kvc_dtype dtype) {
    const int64_t queries = n.L * n.Hq * n.S * n.D, keys = n.L * n.Hkv * n.T * n.D, count = n.Hq * n.L * n.L;
    float *q = room(4 * queries), *k = room(4 * keys);
    fill(q, queries, 2.0f), fill(k, keys, 2.0f);
    void *q_array = rounded(q, queries, dtype), *k_array = rounded(k, keys, dtype);
    double *expected = room(8 * count), *p = room(8 * n.T), *r = room(8 * n.T), *first = NULL;
    memset(expected, 0, (size_t)(8 * count));
    for (int64_t h = 0; h < n.Hq; h++)
        for (int64_t s = 0; s < n.S; s++)
            for (int64_t a = 0; a < n.L; a++)
                for (int64_t b = 0; b < n.L; b++) {
                    if (!row_of(p, &n, q_array, k_array, dtype, a, h, s)) continue;
                    row_of(r, &n, q_array, k_array, dtype, b, h, s);
                    double js = 0;
                    for (int64_t t = 0; t < n.T; t++) js += (term(p[t], r[t]) + term(r[t], p[t])) / 2;
                    expected[(h * n.L + a) * n.L + b] += js;
                }
    for (int runner = 0; runner < RUNNERS; runner++) {
        double *sums = room(8 * count);
        kvc_layer_similarity_args args = {
            .sums = sums, .q = {q_array, dtype, n.Hq * n.S * n.D, n.S * n.D, n.D},
            .k = {k_array, dtype, n.Hkv * n.T * n.D, n.T * n.D, n.D}, .L = n.L, .Hq = n.Hq, .Hkv = n.Hkv, .S = n.S,
            .T = n.T, .D = n.D, .scale = 0.5f, .sinks = n.sinks, .recent = n.recent};
        args.scratch = room(kvc_layer_similarity_scratch_bytes(&args));
        CHECK(kvc_layer_similarity(&args, runners[runner]) == KVC_OK);
        for (int64_t i = 0; i < count; i++) CHECK(fabs(sums[i] - expected[i]) <= 4e-6 * (double)n.S);
        for (int64_t i = 0; i < count; i++) CHECK(i / n.L % n.L != i % n.L || sums[i] == 0.0);
        if (!first) first = memcpy(room(8 * count), sums, (size_t)(8 * count));
        CHECK(memcmp(first, sums, (size_t)(8 * count)) == 0);
        free(args.scratch), free(sums);
    }
    free(first), free(expected), free(p), free(r), free(q_array), free(k_array), free(q), free(k);
}

static void test_errors(void) {
    float x[64] = {0};
    double sums[4] = {1, 1, 1, 1};
    kvc_layer_similarity_args args = {.sums = sums, .q = {x, KVC_F32, 8, 8, 8}, .k = {x, KVC_F32, 16, 16, 8}, .L = 2,
                                      .Hq = 1, .Hkv = 1, .S = 1, .T = 2, .D = 8, .scale = 1.0f};
    CHECK(kvc_layer_similarity(NULL, NULL) == KVC_NULL_POINTER);
    CHECK(kvc_layer_similarity(&args, NULL) == KVC_NULL_POINTER); /* no scratch */
    args.scale = -1.0f;
    CHECK(kvc_layer_similarity(&args, NULL) == KVC_BAD_SIZE);
    args.scale = 1.0f, args.S = 3;
    CHECK(kvc_layer_similarity(&args, NULL) == KVC_BAD_SIZE);
    CHECK(kvc_layer_similarity_scratch_bytes(&args) == 0);
    args.S = 1, args.sinks = -1;
    CHECK(kvc_layer_similarity(&args, NULL) == KVC_BAD_SIZE);
    args.sinks = 0, args.q.dtype = (kvc_dtype)7;
    CHECK(kvc_layer_similarity(&args, NULL) == KVC_BAD_DTYPE);
    args.q.dtype = KVC_F32;
    CHECK(sums[0] == 1 && sums[3] == 1);
    args.S = 0; /* no query: nothing differs */
    CHECK(kvc_layer_similarity(&args, NULL) == KVC_OK && sums[1] == 0);
}

void test_similarity(void) {
    const sizes cases[] = {{2, 1, 1, 1, 1, 3, 0, 0}, {3, 4, 2, 5, 70, 17, 0, 0}, {4, 2, 1, 8, 200, 130, 3, 9},
                           {2, 2, 2, 7, 64, 16, 40, 20}, {2, 1, 1, 3, 9, 8, 5, 9}, {3, 1, 1, 2, 130, 16, 65, 1}};
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++)
        for (int dtype = KVC_F32; dtype <= KVC_F16; dtype++) {
            test_case = "layer similarity";
            test_case_of(cases[i], (kvc_dtype)dtype);
        }
    test_case = "layer similarity in slabs";
    test_case_of((sizes){2, 1, 1, 96, 11000, 2, 0, 0}, KVC_F32);
    test_case = "layer similarity errors";
    test_errors();
}
