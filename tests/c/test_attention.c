/* Tests of window scores, decode and merge against naive loops in double. */
#include "check.h"

typedef struct {
    int64_t B, Hq, Hkv, W, T, D, kernel;
    kvc_reduce reduce;
    kvc_pool pool;
    kvc_dtype dtype;
    int ragged, capped; /* capped: softcap 2 and sinks */
} score_case;

/* The formula of kvc.h, in double; k and q are [B, H, T, D] float32. */
static void naive_scores(const score_case *c, const float *q, const float *k, const int32_t *lengths, double scale,
                         const float *sinks, double *scores) {
    const int64_t G = c->Hq / c->Hkv, width = c->T - c->W;
    double *p = room(8 * c->T), *s = room(8 * c->T);
    for (int64_t row = 0; row < c->B * c->Hkv; row++) {
        const int64_t b = row / c->Hkv, length = lengths ? lengths[b] : c->T, count = length - c->W;
        for (int64_t t = 0; t < c->T; t++) s[t] = 0;
        for (int64_t i = 0; i < G * c->W; i++) {
            const int64_t seen = count + i % c->W + 1;
            double most = -INFINITY, sum = 0;
            for (int64_t t = 0; t < seen; t++) {
                p[t] = 0;
                for (int64_t d = 0; d < c->D; d++) {
                    p[t] += scale * (double)q[(row * G * c->W + i) * c->D + d] * (double)k[(row * c->T + t) * c->D + d];
                }
                if (c->capped) p[t] = 2 * tanh(p[t] / 2);
                most = fmax(most, p[t]);
            }
            for (int64_t t = 0; t < seen; t++) sum += exp(p[t] - most);
            if (c->capped) sum += exp((double)sinks[row % c->Hkv * G + i / c->W] - most);
            for (int64_t t = 0; t < count; t++) {
                const double value = exp(p[t] - most) / sum;
                s[t] = c->reduce == KVC_REDUCE_MAX ? fmax(s[t], value) : s[t] + value;
            }
        }
        for (int64_t t = 0; t < width; t++) {
            double pooled = 0;
            for (int64_t i = t - c->kernel / 2; i <= t + c->kernel / 2; i++) {
                if (i < 0 || i >= count) continue;
                pooled = c->pool == KVC_POOL_MAX ? fmax(pooled, s[i]) : pooled + s[i];
            }
            if (c->pool == KVC_POOL_AVG) pooled /= (double)c->kernel;
            if (c->reduce == KVC_REDUCE_MEAN) pooled /= (double)(G * c->W);
            scores[row * width + t] = t < count ? pooled : 0;
        }
    }
    free(p), free(s);
}

static void test_score_case(const score_case *c) {
    const int64_t queries = c->B * c->Hq * c->W * c->D, keys = c->B * c->Hkv * c->T * c->D;
    const int64_t outputs = c->B * c->Hkv * (c->T - c->W);
    float *q = room(4 * queries), *k = room(4 * keys), *first = NULL;
    double *expected = room(8 * outputs);
    float *sinks = room(4 * c->Hq);
    fill(sinks, c->Hq, 3.0f);
    fill(q, queries, 2.0f), fill(k, keys, 2.0f);
    void *q_array = rounded(q, queries, c->dtype), *k_array = rounded(k, keys, c->dtype);
    int32_t *lengths = room(4 * c->B);
    for (int64_t b = 0; b < c->B; b++) lengths[b] = (int32_t)(c->T - (c->T - c->W - 1) * b / c->B);
    const float scale = c->D ? 1.0f / sqrtf((float)c->D) : 1.0f;
    naive_scores(c, q, k, c->ragged ? lengths : NULL, (double)scale, sinks, expected);
    for (int runner = 0; runner < RUNNERS; runner++) {
        kvc_window_scores_args args = {
            .scores = room(4 * outputs), .q = {q_array, c->dtype, c->Hq * c->W * c->D, c->W * c->D, c->D},
            .k = {k_array, c->dtype, c->Hkv * c->T * c->D, c->T * c->D, c->D}, .lengths = c->ragged ? lengths : NULL,
            .B = c->B, .Hq = c->Hq, .Hkv = c->Hkv, .W = c->W, .T = c->T, .D = c->D, .scale = scale,
            .reduce = c->reduce, .pool = c->pool, .kernel_size = c->kernel, .skip_last = c->W,
            .softcap = c->capped ? 2.0f : 0.0f, .sink_logits = c->capped ? sinks : NULL};
        args.scratch = room(kvc_window_scores_scratch_bytes(&args));
        CHECK(kvc_window_scores(&args, runners[runner]) == KVC_OK);
        for (int64_t i = 0; i < outputs; i++) {
            CHECK(fabs((double)args.scores[i] - expected[i]) <= 4e-6 * fabs(expected[i]) + 1e-12);
        }
        if (!first) first = memcpy(room(4 * outputs), args.scores, (size_t)(4 * outputs));
        CHECK(memcmp(first, args.scores, (size_t)(4 * outputs)) == 0);
        /* a NaN key, an infinite logit: its head is NaN, the others keep their bits */
        const int64_t shortest = c->ragged ? lengths[c->B - 1] : c->T, per_head = c->T - c->W;
        if (c->D && c->dtype == KVC_F32 && c->Hq && !c->capped) {
            float *element_of_last = (float *)k_array + keys - (c->T - shortest + 1) * c->D, kept = *element_of_last;
            for (int kind = 0; kind < 2; kind++) {
                *element_of_last = kind ? NAN : INFINITY;
                CHECK(kvc_window_scores(&args, runners[runner]) == KVC_OK);
                const int64_t others = outputs - per_head;
                CHECK(memcmp(first, args.scores, (size_t)(4 * others)) == 0);
                for (int64_t t = 0; t < shortest - c->W; t++) CHECK(isnan(args.scores[others + t]) || !kind);
            }
            *element_of_last = kept;
            if (shortest < c->T) { /* behind the end nothing is read into a score */
                float *behind = (float *)k_array + keys - c->D;
                kept = *behind, *behind = NAN;
                CHECK(kvc_window_scores(&args, runners[runner]) == KVC_OK);
                CHECK(memcmp(first, args.scores, (size_t)(4 * outputs)) == 0);
                *behind = kept;
            }
        }
        free(args.scratch), free(args.scores);
    }
    free(q), free(k), free(first), free(expected), free(q_array), free(k_array), free(lengths);
    free(sinks);
}

static void test_score_arguments(void) {
    test_case = "score arguments";
    float data[64] = {0}, scores[4] = {9, 9, 9, 9};
    int32_t length = 1;
    const kvc_window_scores_args good = {.scores = scores, .q = {data, KVC_F32, 8, 4, 2},
                                         .k = {data, KVC_F32, 12, 12, 2},
                                         .scratch = data, .B = 1, .Hq = 2, .Hkv = 1, .W = 2, .T = 6, .D = 2,
                                         .scale = 1, .kernel_size = 3, .skip_last = 2, .lengths = &length};
    kvc_window_scores_args args = good;
    CHECK(kvc_window_scores(&args, NULL) == KVC_BAD_INDEX);
    length = 7;
    CHECK(kvc_window_scores(&args, NULL) == KVC_BAD_INDEX);
    args.kernel_size = 4;
    CHECK(kvc_window_scores(&args, NULL) == KVC_BAD_SIZE && kvc_window_scores_scratch_bytes(&args) == 0);
    args = good, args.Hkv = 3;
    CHECK(kvc_window_scores(&args, NULL) == KVC_BAD_SIZE);
    args = good, args.T = 2;
    CHECK(kvc_window_scores(&args, NULL) == KVC_BAD_SIZE);
    args = good, args.skip_last = 6;
    CHECK(kvc_window_scores(&args, NULL) == KVC_BAD_SIZE);
    args = good, args.mask_first = -1;
    CHECK(kvc_window_scores(&args, NULL) == KVC_BAD_SIZE);
    args = good, args.scale = NAN;
    CHECK(kvc_window_scores(&args, NULL) == KVC_BAD_SIZE);
    args = good, args.softcap = -1;
    CHECK(kvc_window_scores(&args, NULL) == KVC_BAD_SIZE);
    args = good, args.scratch = NULL;
    CHECK(kvc_window_scores(&args, NULL) == KVC_NULL_POINTER);
    args = good, args.k.dtype = (kvc_dtype)5;
    CHECK(kvc_window_scores(&args, NULL) == KVC_BAD_DTYPE);
    args = good, args.reduce = (kvc_reduce)5;
    CHECK(kvc_window_scores(&args, NULL) == KVC_BAD_SIZE);
    args = good, args.B = 0;
    CHECK(kvc_window_scores(&args, NULL) == KVC_OK);
    for (int i = 0; i < 4; i++) CHECK(scores[i] == 9);
    length = 2; /* no key is left to score */
    args = good, args.scratch = room(kvc_window_scores_scratch_bytes(&good));
    CHECK(kvc_window_scores(&args, NULL) == KVC_OK && scores[0] == 0 && scores[3] == 0);
    free(args.scratch);
    scores[0] = scores[3] = 9;
    args = good, args.lengths = NULL, args.Hq = 0;
    CHECK(kvc_window_scores(&args, NULL) == KVC_OK && scores[0] == 0 && scores[3] == 0);
}

void test_score(void) {
    const score_case cases[] = {
        {1, 1, 1, 1, 2, 1, 1, KVC_REDUCE_MEAN, KVC_POOL_AVG, KVC_F32, 0, 0},
        {2, 4, 2, 3, 150, 33, 5, KVC_REDUCE_MEAN, KVC_POOL_AVG, KVC_F32, 1, 0},
        {2, 4, 1, 3, 130, 16, 7, KVC_REDUCE_MAX, KVC_POOL_MAX, KVC_F32, 1, 0},
        {1, 8, 1, 2, 65, 128, 3, KVC_REDUCE_SUM, KVC_POOL_MAX, KVC_BF16, 0, 0},
        {1, 2, 2, 70, 200, 80, 5, KVC_REDUCE_MEAN, KVC_POOL_AVG, KVC_F16, 0, 0},
        {3, 3, 3, 5, 64, 256, 1, KVC_REDUCE_MAX, KVC_POOL_AVG, KVC_F32, 1, 0},
        {1, 2, 1, 64, 320, 129, 999, KVC_REDUCE_SUM, KVC_POOL_AVG, KVC_F32, 0, 0},
        {1, 2, 1, 4, 70, 0, 5, KVC_REDUCE_MEAN, KVC_POOL_AVG, KVC_F32, 0, 0},
        {1, 7, 1, 1, 20000, 2, 5, KVC_REDUCE_MEAN, KVC_POOL_AVG, KVC_F32, 0, 0},
        {1, 9, 1, 30, 17000, 2, 5, KVC_REDUCE_MEAN, KVC_POOL_AVG, KVC_F32, 0, 0}, /* several passes of rows */
        {2, 4, 2, 3, 150, 33, 5, KVC_REDUCE_MEAN, KVC_POOL_AVG, KVC_F32, 1, 1},
        {1, 9, 1, 30, 17000, 2, 5, KVC_REDUCE_SUM, KVC_POOL_AVG, KVC_F32, 0, 1},
        {1, 2, 1, 9, 70, 512, 3, KVC_REDUCE_MAX, KVC_POOL_MAX, KVC_BF16, 0, 1},
    };
    test_case = "score";
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) test_score_case(&cases[i]);
    test_score_arguments();
}

typedef struct {
    int64_t B, Hq, Hkv, S, D, P, blocks;
    kvc_dtype q_dtype, cache_dtype;
    int paged, causal;
    int64_t sinks;
    float softcap;
    int has_sinks;
} decode_case;

static void test_decode_case(const decode_case *c) {
    const int64_t R = c->B * c->Hkv, G = c->Hq / c->Hkv, capacity = c->paged ? c->blocks * c->P : c->P;
    const int64_t pages = c->paged ? R * c->blocks + 1 : R, cache = pages * c->P * c->D, queries = c->B * c->Hq * c->S;
    float *q = room(4 * queries * c->D), *k = room(4 * cache), *v = room(4 * cache), *first_lse = NULL;
    void *first = NULL;
    fill(q, queries * c->D, 2.0f), fill(k, cache, 2.0f), fill(v, cache, 1.0f);
    void *q_array = rounded(q, queries * c->D, c->q_dtype);
    void *k_array = rounded(k, cache, c->cache_dtype), *v_array = rounded(v, cache, c->cache_dtype);
    int32_t *table = room(4 * R * c->blocks), *begin = room(4 * R), *end = room(4 * R);
    for (int64_t i = 0; i < R * c->blocks; i++) table[i] = (int32_t)((i * 7919) % pages);
    for (int64_t r = 0; r < R; r++) { /* the first row is full, the last is empty if there are several */
        end[r] = (int32_t)(r ? capacity * (R - r) / R : capacity);
        begin[r] = r == R - 1 && R > 1 ? end[r] : (int32_t)(r * capacity / (4 * R));
    }
    double *p = room(8 * capacity);
    float *sink_logits = room(4 * c->Hq);
    fill(sink_logits, c->Hq, 2.0f);
    if (c->Hq > 1) sink_logits[0] = -INFINITY;
    const float scale = 0.3f;
    for (int runner = 0; runner < RUNNERS; runner++) {
        const int64_t bytes = queries * c->D * kvc_dtype_bytes(c->q_dtype);
        kvc_decode_args args = {
            .out = room(bytes), .lse = room(4 * queries),
            .q = {q_array, c->q_dtype, c->Hq * c->S * c->D, c->S * c->D, c->D},
            .rows = {k_array, v_array, NULL, NULL, (kvc_format)c->cache_dtype},
            .block_table = c->paged ? table : NULL, .begin = begin, .end = end, .B = c->B, .Hq = c->Hq, .Hkv = c->Hkv,
            .S = c->S, .D = c->D, .P = c->P, .pages = pages, .blocks = c->blocks, .scale = scale, .causal = c->causal,
            .sinks = c->sinks, .softcap = c->softcap, .sink_logits = c->has_sinks ? sink_logits : NULL};
        args.scratch = room(kvc_decode_scratch_bytes(&args));
        CHECK(kvc_decode(&args, runners[runner]) == KVC_OK);
        for (int64_t i = 0; i < queries && runner == 0; i++) {
            const int64_t s = i % c->S, row = i / (c->S * G), last = end[row] - (c->causal ? c->S - 1 - s : 0);
            double most = -INFINITY, sum = 0;
            for (int64_t t = 0; t < last; t++) {
                const int64_t page = c->paged ? table[row * c->blocks + t / c->P] : row;
                double x = 0;
                for (int64_t d = 0; d < c->D; d++) {
                    x += (double)scale * (double)q[i * c->D + d] * (double)k[(page * c->P + t % c->P) * c->D + d];
                }
                if (c->softcap > 0) x = (double)c->softcap * tanh(x / (double)c->softcap);
                p[t] = t >= begin[row] || t < c->sinks ? x : -INFINITY;
                most = fmax(most, p[t]);
            }
            const double sink = c->has_sinks ? (double)sink_logits[i / c->S % c->Hq] : -INFINITY;
            most = fmax(most, sink);
            for (int64_t t = 0; t < last && most > -INFINITY; t++) sum += exp(p[t] - most);
            if (most > -INFINITY) sum += exp(sink - most);
            if (most == -INFINITY) CHECK(args.lse[i] == -INFINITY);
            else CHECK(fabs((double)args.lse[i] - (most + log(sum))) <= 1e-5);
            for (int64_t d = 0; d < c->D; d++) {
                double expected = 0;
                for (int64_t t = 0; t < last && most > -INFINITY; t++) {
                    const int64_t page = c->paged ? table[row * c->blocks + t / c->P] : row;
                    expected += exp(p[t] - most) / sum * (double)v[(page * c->P + t % c->P) * c->D + d];
                }
                CHECK(fabs((double)element(args.out, i * c->D + d, c->q_dtype) - expected) <=
                      5e-6 + epsilon(c->q_dtype) * fabs(expected));
            }
        }
        if (!first) {
            first = memcpy(room(bytes), args.out, (size_t)bytes);
            first_lse = memcpy(room(4 * queries), args.lse, (size_t)(4 * queries));
        }
        CHECK(memcmp(first, args.out, (size_t)bytes) == 0 && memcmp(first_lse, args.lse, (size_t)(4 * queries)) == 0);
        kvc_decode_args bad = args; /* nothing is written on a bad argument */
        memset(args.out, 0x77, (size_t)bytes);
        end[0]++;
        CHECK(kvc_decode(&bad, NULL) == KVC_BAD_INDEX);
        end[0]--;
        bad.P = c->paged ? 3 : -1;
        CHECK(kvc_decode(&bad, NULL) == KVC_BAD_SIZE);
        bad = args, bad.pages = c->paged ? 0 : R - 1;
        CHECK(kvc_decode(&bad, NULL) == (c->paged ? KVC_BAD_INDEX : KVC_BAD_SIZE));
        for (int i = 0; i < 3; i++) {
            const int64_t head_dims[3] = {-1, 0, KVC_MAX_HEAD_DIM + 1};
            bad = args, bad.D = head_dims[i];
            CHECK(kvc_decode(&bad, NULL) == KVC_BAD_SIZE && kvc_decode_scratch_bytes(&bad) == 0);
        }
        bad = args, bad.scale = INFINITY;
        CHECK(kvc_decode(&bad, NULL) == KVC_BAD_SIZE);
        bad = args, bad.softcap = NAN;
        CHECK(kvc_decode(&bad, NULL) == KVC_BAD_SIZE);
        bad = args, bad.scratch = NULL;
        CHECK(kvc_decode(&bad, NULL) == KVC_NULL_POINTER);
        bad = args, bad.rows.format = (kvc_format)5;
        CHECK(kvc_decode(&bad, NULL) == KVC_BAD_FORMAT);
        bad = args, bad.Hq = c->Hq * c->Hkv + 1, bad.Hkv = 2;
        CHECK(c->Hkv % 2 || kvc_decode(&bad, NULL) == KVC_BAD_SIZE);
        for (int64_t i = 0; i < bytes; i++) CHECK(((const unsigned char *)args.out)[i] == 0x77);
        free(args.out), free(args.lse), free(args.scratch);
    }
    free(q), free(k), free(v), free(q_array), free(k_array), free(v_array), free(table), free(begin), free(end);
    free(p), free(first), free(first_lse), free(sink_logits);
}

void test_decode(void) {
    const decode_case cases[] = {
        {1, 1, 1, 1, 1, 1, 1, KVC_F32, KVC_F32, 0, 0, 0, 0, 0},
        {2, 4, 2, 3, 33, 16, 5, KVC_F32, KVC_F32, 1, 1, 0, 0, 0},
        {1, 8, 1, 1, 128, 64, 20, KVC_BF16, KVC_BF16, 1, 0, 0, 0, 0},
        {2, 2, 2, 1, 256, 700, 1, KVC_F16, KVC_F16, 0, 0, 0, 0, 0},
        {1, 4, 2, 40, 20, 64, 1, KVC_F32, KVC_F16, 1, 1, 0, 0, 0},
        {1, 2, 1, 5, 7, 3, 1, KVC_F32, KVC_F32, 0, 1, 0, 0, 0},
        {1, 1, 1, 1, 5, 1, 1300, KVC_F32, KVC_F32, 1, 0, 0, 0, 0},
        {1, 6, 2, 9, 130, 1100, 1, KVC_F32, KVC_F32, 0, 1, 0, 0, 0},
        {2, 4, 2, 3, 33, 16, 5, KVC_F32, KVC_F32, 1, 1, 7, 0, 0},
        {3, 2, 1, 1, 24, 8, 500, KVC_BF16, KVC_BF16, 1, 0, 600, 0, 0},
        {2, 4, 2, 3, 33, 16, 5, KVC_F32, KVC_F32, 1, 1, 0, 2, 1},
        {2, 8, 2, 1, 64, 16, 40, KVC_BF16, KVC_BF16, 1, 0, 0, 0, 1},
        {1, 4, 2, 40, 512, 64, 1, KVC_F32, KVC_F16, 1, 1, 7, 3, 1},
        {2, 3, 1, 1, 512, 8, 5, KVC_BF16, KVC_BF16, 1, 0, 0, 3, 0},
    };
    test_case = "decode";
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) test_decode_case(&cases[i]);
    test_case = "decode of NaN";
    float q[2] = {1, 1}, k[2] = {NAN, 0}, v[2] = {1, 2}, out[2], lse[2];
    const int32_t begin[2] = {0, 0}, end[2] = {1, 1};
    kvc_decode_args args = {.out = out, .lse = lse, .q = {q, KVC_F32, 1, 1, 1}, .rows = {k, v, NULL, NULL, KVC_FORMAT_F32},
                            .begin = begin, .end = end, .B = 2, .Hq = 1, .Hkv = 1,
                            .S = 1, .D = 1, .P = 1, .pages = 2, .scale = 1};
    args.scratch = room(kvc_decode_scratch_bytes(&args));
    CHECK(kvc_decode(&args, NULL) == KVC_OK && isnan(out[0]) && isnan(lse[0]) && out[1] == 2 && lse[1] == 0);
    free(args.scratch);
}

void test_merge(void) {
    test_case = "merge";
    enum { N = 5, D = 131 };
    const float lse_a[N] = {1, -INFINITY, 2, -INFINITY, -300}, lse_b[N] = {2, 1, -INFINITY, -INFINITY, 300};
    for (int dtype = 0; dtype < 3; dtype++) {
        float *a = room(4 * N * D), *b = room(4 * N * D), lse[N];
        fill(a, N * D, 1.0f), fill(b, N * D, 1.0f);
        a[D] = NAN, b[2 * D] = NAN; /* in empty sides: never seen */
        for (int in_place = 0; in_place < 2; in_place++) {
            void *x = rounded(a, N * D, (kvc_dtype)dtype), *y = rounded(b, N * D, (kvc_dtype)dtype);
            void *out = in_place ? x : room(N * D * kvc_dtype_bytes((kvc_dtype)dtype));
            kvc_merge_states_args args = {out, lse, x, y, lse_a, lse_b, (kvc_dtype)dtype, N, D};
            CHECK(kvc_merge_states(&args, runners[3]) == KVC_OK);
            for (int64_t i = 0; i < N; i++) {
                const double wa = lse_a[i] == -INFINITY ? 0 : exp((double)lse_a[i] - 300);
                const double wb = lse_b[i] == -INFINITY ? 0 : exp((double)lse_b[i] - 300), sum = wa + wb;
                if (sum == 0) CHECK(lse[i] == -INFINITY);
                else CHECK(fabs((double)lse[i] - (log(sum) + 300)) < 1e-5);
                for (int64_t d = 0; d < D; d++) {
                    const double left = wa == 0 ? 0 : wa * (double)a[i * D + d];
                    const double right = wb == 0 ? 0 : wb * (double)b[i * D + d];
                    const double expected = sum == 0 ? 0 : (left + right) / sum;
                    const double got = (double)element(out, i * D + d, (kvc_dtype)dtype);
                    CHECK(fabs(got - expected) <= 2 * epsilon((kvc_dtype)dtype) * fabs(expected) + 2e-7);
                }
            }
            if (!in_place) free(out);
            free(x), free(y);
        }
        kvc_merge_states_args bad = {a, lse, a, NULL, lse_a, lse_b, (kvc_dtype)dtype, N, D};
        CHECK(kvc_merge_states(&bad, NULL) == KVC_NULL_POINTER);
        bad.N = -1;
        CHECK(kvc_merge_states(&bad, NULL) == KVC_BAD_SIZE);
        bad.N = 0, bad.dtype = (kvc_dtype)3;
        CHECK(kvc_merge_states(&bad, NULL) == KVC_BAD_DTYPE);
        bad.dtype = KVC_F32;
        CHECK(kvc_merge_states(&bad, NULL) == KVC_OK);
        free(a), free(b);
    }
}
