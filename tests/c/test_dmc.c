/* Tests of DMC's gates, partial averages and cache against naive loops in double. */
#include "check.h"

/* ---- gates ---- */

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

static int close_to(double x, double y, double tolerance) {
    return (isinf(y) && x == y) || fabs(x - y) <= tolerance * (1 + fabs(y));
}

/* Neuron 2 of keys [B, H, T, 5]. */
static void test_gates(kvc_dtype dtype) {
    enum { B = 2, H = 4, T = 300, D = 5, COUNT = B * H * T };
    test_case = "dmc gates";
    float *keys = room(4 * COUNT * D), *noise = room(4 * COUNT), *first = NULL;
    fill(keys, COUNT * D, 8.0f), fill(noise, COUNT, 4.0f);
    void *array = rounded(keys, COUNT * D, dtype);
    const kvc_view x = {(char *)array + 2 * kvc_dtype_bytes(dtype), dtype, H * T * D, T * D, D};
    for (int runner = 0; runner < RUNNERS; runner++) {
        float *out = room(4 * COUNT * 8), *alpha = out, *hard = out + COUNT, *tempered = out + 2 * COUNT;
        float *bias = out + 3 * COUNT, *drawn = out + 4 * COUNT, *omega = out + 7 * COUNT;
        memset(out, 0, 4 * COUNT * 8);
        kvc_dmc_decisions_args decide = {.alpha = alpha, .hard = hard, .tempered = tempered, .x = x, .noise = noise,
                                         .B = B, .H = H, .T = T, .shift = 1.0f, .temperature = 0.5f, .scale = 2.0f,
                                         .margin = 0.25f};
        CHECK(kvc_dmc_decisions(&decide, runners[runner]) == KVC_OK);
        const kvc_dmc_mask_args mask = {bias, tempered, B, H, T};
        CHECK(kvc_dmc_mask(&mask, runners[runner]) == KVC_OK);
        const kvc_dmc_importance_args weigh = {omega, x, B, H, 2, T, -2.0f, 0.125f, KVC_MEAN_LOGIT};
        CHECK(kvc_dmc_importance(&weigh, runners[runner]) == KVC_OK);
        for (int i = 0; i < COUNT; i++) {
            const int t = i % T, row = i / T;
            const double y = 2 * (double)keys[i * D + 2] - 1 + (double)noise[i];
            CHECK(close_to((double)tempered[i], y / 0.5, 1e-5) && close_to((double)alpha[i], sigmoid(y / 0.5), 1e-5));
            CHECK(hard[i] == (float)(y > 0.25));
            CHECK(close_to((double)bias[i], t + 1 < T ? -log1p(exp((double)tempered[i + 1])) : 0, 1e-5));
            if (row % H < 2) {
                const int b = row / H, h = row % H, from = ((b * H + 2 * h) * T + t) * D + 2;
                const double mean = ((double)keys[from] + (double)keys[from + T * D]) / 2;
                const double expected = fmax(sigmoid(mean - 2), 0x1p-40) + 0.125;
                CHECK(close_to((double)omega[(b * 2 + h) * T + t], expected, 1e-5));
            }
        }
        decide.alpha = drawn, decide.hard = drawn + COUNT, decide.tempered = drawn + 2 * COUNT;
        decide.noise = NULL, decide.drawn = 1, decide.seed = -1, decide.offset = INT64_MAX, decide.only_hard = 1;
        CHECK(kvc_dmc_decisions(&decide, runners[runner]) == KVC_OK);
        for (int i = 0; i < COUNT; i++) {
            CHECK(drawn[i] == drawn[COUNT + i] && drawn[2 * COUNT + i] == (drawn[i] > 0.5f ? INFINITY : -INFINITY));
        }
        /* counters are taken mod 2^32, at the ends of their type too */
        float *wrapped = room(4 * COUNT * 3);
        decide.token = decide.stream = decide.sample = -1;
        CHECK(kvc_dmc_decisions(&decide, runners[runner]) == KVC_OK);
        decide.alpha = wrapped, decide.hard = wrapped + COUNT, decide.tempered = wrapped + 2 * COUNT;
        decide.token = decide.stream = decide.sample = INT64_MAX;
        CHECK(kvc_dmc_decisions(&decide, runners[runner]) == KVC_OK && memcmp(wrapped, drawn, 4 * COUNT * 3) == 0);
        free(wrapped);
        if (!first) first = memcpy(room(4 * COUNT * 8), out, 4 * COUNT * 8);
        CHECK(memcmp(first, out, 4 * COUNT * 8) == 0);
        free(out);
    }
    free(first), free(array), free(keys), free(noise);
}

static void test_gate_arguments(void) {
    test_case = "dmc gate arguments";
    float x[4] = {1, 2, 3, 4}, out[4] = {9, 9, 9, 9};
    const kvc_view view = {x, KVC_F32, 4, 2, 1};
    kvc_dmc_decisions_args decide = {.alpha = out, .hard = out, .tempered = out, .x = view, .noise = x,
                                     .B = 1, .H = 2, .T = 2, .temperature = 1.0f, .drawn = 1};
    CHECK(kvc_dmc_decisions(&decide, NULL) == KVC_BAD_SIZE && kvc_dmc_decisions(NULL, NULL) == KVC_NULL_POINTER);
    decide.drawn = 0, decide.hard = NULL;
    CHECK(kvc_dmc_decisions(&decide, NULL) == KVC_NULL_POINTER);
    decide.x.dtype = (kvc_dtype)5;
    CHECK(kvc_dmc_decisions(&decide, NULL) == KVC_BAD_DTYPE);
    kvc_dmc_importance_args weigh = {out, view, 1, 2, 0, 2, 0.0f, 0.0f, KVC_MEAN_LOGIT};
    CHECK(kvc_dmc_importance(&weigh, NULL) == KVC_BAD_SIZE);
    weigh.Hkv = 2, weigh.reduce = (kvc_importance)3;
    CHECK(kvc_dmc_importance(&weigh, NULL) == KVC_BAD_SIZE);
    weigh.reduce = KVC_FIRST_HEAD, weigh.T = 0;
    CHECK(kvc_dmc_importance(&weigh, NULL) == KVC_OK);
    kvc_dmc_mask_args mask = {out, NULL, 1, 1, 4};
    CHECK(kvc_dmc_mask(&mask, NULL) == KVC_NULL_POINTER);
    mask.T = -1;
    CHECK(kvc_dmc_mask(&mask, NULL) == KVC_BAD_SIZE);
    for (int i = 0; i < 4; i++) CHECK(out[i] == 9);
}

/* ---- partial averages ---- */

typedef struct {
    int64_t R, T, D, window, neuron;
    kvc_dtype dtype;
    int initial;
    double merging;
} accumulate_case;

/* One row: weights of all tokens in each average, and by them the averages and all gradients; O(T*T*D). x, dout: two
 * arrays [T, D]; out, dx alike; gates: z, dalpha, domega [3, T]. a: decisions, 0 where none may merge (forced). */
static void naive_row(const accumulate_case *c, const double *a, const int *forced, const float *omega,
                      const float *const x[2], const float *const dout[2], double initial_z,
                      const float *const initial[2], double *const out[2], double *const dx[2], double *gates) {
    const int64_t T = c->T, D = c->D;
    double *z = gates, *dalpha = gates + T, *domega = gates + 2 * T;
    memset(gates, 0, (size_t)(24 * T));
    for (int w = 0; w < 2; w++) memset(dx[w], 0, (size_t)(8 * T * D)), memset(out[w], 0, (size_t)(8 * T * D));
    double *product = room(8 * (T + 1)), *u = room(8 * (T + 1));
    for (int64_t t = 0; t < T; t++) {
        /* place j + 1 is token j, place 0 what came before */
        const int64_t low = c->window && t - c->window + 1 > 0 ? t - c->window + 1 : c->initial ? -1 : 0;
        product[t + 1] = 1;
        for (int64_t j = t - 1; j >= low; j--) product[j + 1] = product[j + 2] * a[j + 1];
        for (int64_t j = low; j <= t; j++) z[t] += product[j + 1] * (j < 0 ? initial_z : (double)omega[j]);
        for (int w = 0; w < 2; w++) {
            for (int64_t j = low; j <= t; j++) {
                const double share = product[j + 1] * (j < 0 ? initial_z : (double)omega[j]) / z[t];
                for (int64_t d = 0; d < D; d++) {
                    if (w == 0 && d == c->neuron) continue;
                    out[w][t * D + d] += share * (double)(j < 0 ? initial[w][d] : x[w][j * D + d]);
                    if (j >= 0) dx[w][j * D + d] += share * (double)dout[w][t * D + d];
                }
            }
        }
        for (int64_t j = low; j <= t; j++) {
            u[j + 1] = 0;
            for (int w = 0; w < 2; w++) {
                for (int64_t d = 0; d < D; d++) {
                    if (w == 0 && d == c->neuron) continue;
                    const double value = (double)(j < 0 ? initial[w][d] : x[w][j * D + d]);
                    u[j + 1] += (double)dout[w][t * D + d] * (value - out[w][t * D + d]) / z[t];
                }
            }
            if (j >= 0) domega[j] += product[j + 1] * u[j + 1];
        }
        double before = 0;
        for (int64_t m = low + 1; m <= t; m++) {
            before = (m - 1 > low ? a[m - 1] * before : 0) + u[m] * (m - 1 < 0 ? initial_z : (double)omega[m - 1]);
            if (!forced[m]) dalpha[m] += product[m + 1] * before;
        }
    }
    free(product), free(u);
}

static void check_close(const void *array, kvc_dtype dtype, const double *expected, int64_t count, double slack) {
    double scale = 1;
    for (int64_t i = 0; i < count; i++) scale = fmax(scale, fabs(expected[i]));
    for (int64_t i = 0; i < count; i++) {
        CHECK(fabs((double)element(array, i, dtype) - expected[i]) <= slack * scale);
    }
}

static void test_accumulate_case(const accumulate_case *c) {
    const int64_t R = c->R, T = c->T, D = c->D, count = R * T * D, gates = R * T;
    float *x[2], *dout[2], *initial[2], *first = NULL;
    void *x_array[2], *dout_array[2];
    for (int w = 0; w < 2; w++) {
        x[w] = room(4 * count), dout[w] = room(4 * count), initial[w] = room(4 * R * D);
        fill(x[w], count, 2.0f), fill(dout[w], count, 1.0f), fill(initial[w], R * D, 2.0f);
        x_array[w] = rounded(x[w], count, c->dtype), dout_array[w] = rounded(dout[w], count, c->dtype);
    }
    float *alpha = room(4 * gates), *omega = room(4 * gates), *initial_z = room(4 * R);
    for (int64_t i = 0; i < gates; i++) {
        alpha[i] = (float)pow(0.5 + 0.5 * (double)uniform(), (1 - c->merging) / c->merging);
        if (i % 11 == 3) alpha[i] = 0;
        if (i % 13 == 5) alpha[i] = 1;
        omega[i] = 0.51f + 0.5f * uniform();
    }
    for (int64_t r = 0; r < R; r++) initial_z[r] = r ? 0.7f : 0;
    double *a = room(8 * T), *found[4], *row_gates = room(24 * T);
    int *forced = room(4 * T);
    for (int i = 0; i < 4; i++) found[i] = room(8 * T * D);
    for (int runner = 0; runner < RUNNERS; runner++) {
        const int64_t bytes = kvc_dtype_bytes(c->dtype) * count, chunks = kvc_dmc_chunks(T, c->window);
        char *out = room(4 * bytes);
        float *of_gates = room(12 * gates), *states = room(8 * R * chunks * D);
        kvc_view views[8];
        for (int i = 0; i < 8; i++) {
            void *data = i < 2 ? x_array[i] : i < 4 ? dout_array[i - 2] : (void *)(out + (i - 4) * bytes);
            views[i] = (kvc_view){data, c->dtype, R * T * D, T * D, D};
        }
        kvc_dmc_accumulate_backward_args args = {
            .forward = {.out_k = views[4], .out_v = views[5], .k = views[0], .v = views[1], .z = of_gates,
                        .states = states, .alpha = alpha, .omega = omega,
                        .B = 1, .Hkv = R, .T = T, .D = D, .neuron = c->neuron, .window = c->window},
            .dout_k = views[2], .dout_v = views[3], .dk = views[6], .dv = views[7], .dalpha = of_gates + gates,
            .domega = of_gates + 2 * gates};
        if (c->initial) {
            args.forward.initial_k = initial[0], args.forward.initial_v = initial[1];
            args.forward.initial_z = initial_z;
        }
        args.scratch = room(kvc_dmc_accumulate_backward_scratch_bytes(&args));
        CHECK(kvc_dmc_accumulate(&args.forward, runners[runner]) == KVC_OK);
        args.forward.initial_k = args.forward.initial_v = NULL; /* not read any more */
        CHECK(kvc_dmc_accumulate_backward(&args, runners[runner]) == KVC_OK);
        for (int64_t r = 0; runner == 0 && r < R; r++) {
            for (int64_t t = 0; t < T; t++) {
                forced[t] = t == 0 && !c->initial;
                a[t] = forced[t] ? 0 : (double)alpha[r * T + t];
            }
            const float *row_x[2], *row_dout[2], *row_initial[2];
            for (int w = 0; w < 2; w++) {
                row_x[w] = x[w] + r * T * D, row_dout[w] = dout[w] + r * T * D, row_initial[w] = initial[w] + r * D;
            }
            naive_row(c, a, forced, omega + r * T, row_x, row_dout, (double)initial_z[r], row_initial,
                      (double *[]){found[0], found[1]}, (double *[]){found[2], found[3]}, row_gates);
            const int64_t row_bytes = kvc_dtype_bytes(c->dtype) * T * D;
            for (int i = 0; i < 4; i++) {
                check_close(out + i * bytes + r * row_bytes, c->dtype, found[i], T * D, 2e-6 + epsilon(c->dtype));
            }
            for (int i = 0; i < 3; i++) check_close(of_gates + i * gates + r * T, KVC_F32, row_gates + i * T, T, 2e-5);
        }
        if (!first) first = memcpy(room(12 * gates + 4 * bytes), of_gates, (size_t)(12 * gates));
        if (runner == 0) memcpy(first + 3 * gates, out, (size_t)(4 * bytes));
        CHECK(memcmp(first, of_gates, (size_t)(12 * gates)) == 0);
        CHECK(memcmp(first + 3 * gates, out, (size_t)(4 * bytes)) == 0);
        free(args.scratch), free(states), free(of_gates), free(out);
    }
    for (int i = 0; i < 4; i++) free(found[i]);
    for (int w = 0; w < 2; w++) free(x[w]), free(dout[w]), free(initial[w]), free(x_array[w]), free(dout_array[w]);
    free(first), free(alpha), free(omega), free(initial_z), free(a), free(row_gates), free(forced);
}

static void test_accumulate(void) {
    test_case = "dmc_accumulate";
    const accumulate_case cases[] = {
        {2, 1, 7, 0, 3, KVC_F32, 0, 0.5},      {3, 130, 33, 0, -1, KVC_BF16, 1, 0.9},
        {2, 100, 16, 0, 15, KVC_F16, 0, 0.9},  {1, 700, 8, 0, 2, KVC_F32, 0, 0.97},
        {2, 600, 5, 0, -1, KVC_F32, 1, 0.5},   {2, 129, 17, 12, 4, KVC_F32, 0, 0.9},
        {2, 70, 128, 64, 0, KVC_BF16, 0, 0.9}, {1, 65, 3, 1, 0, KVC_F16, 0, 0.5},
        {1, 40, 256, 40, -1, KVC_F32, 0, 0.9}, {2, 63, 200, 2, 199, KVC_F16, 0, 0.5},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) test_accumulate_case(cases + i);
}

static void test_accumulate_arguments(void) {
    test_case = "dmc_accumulate arguments";
    float x[8] = {1, 2, 3, 4, 5, 6, 7, 8}, out[8] = {9, 9, 9, 9, 9, 9, 9, 9}, states[4];
    const kvc_view in = {x, KVC_F32, 8, 8, 2}, to = {out, KVC_F32, 8, 8, 2};
    const kvc_dmc_accumulate_args good = {.out_k = to, .out_v = to, .k = in, .v = in, .z = out, .states = states,
                                          .alpha = x, .omega = x, .B = 1, .Hkv = 1, .T = 4, .D = 2, .neuron = -1};
    kvc_dmc_accumulate_args args = good;
    args.neuron = 2;
    CHECK(kvc_dmc_accumulate(&args, NULL) == KVC_BAD_SIZE);
    args.neuron = -2;
    CHECK(kvc_dmc_accumulate(&args, NULL) == KVC_BAD_SIZE);
    args = good, args.D = KVC_MAX_HEAD_DIM + 1;
    CHECK(kvc_dmc_accumulate(&args, NULL) == KVC_BAD_SIZE);
    args = good, args.window = -1;
    CHECK(kvc_dmc_accumulate(&args, NULL) == KVC_BAD_SIZE);
    args = good, args.window = KVC_DMC_MAX_WINDOW + 1, args.T = KVC_DMC_MAX_WINDOW + 2;
    CHECK(kvc_dmc_accumulate(&args, NULL) == KVC_BAD_SIZE);
    args = good, args.window = 2, args.initial_k = x, args.initial_v = x, args.initial_z = x;
    CHECK(kvc_dmc_accumulate(&args, NULL) == KVC_BAD_SIZE);
    args = good, args.initial_z = x;
    CHECK(kvc_dmc_accumulate(&args, NULL) == KVC_NULL_POINTER);
    args = good, args.states = NULL;
    CHECK(kvc_dmc_accumulate(&args, NULL) == KVC_NULL_POINTER);
    args = good, args.v.dtype = KVC_F16;
    CHECK(kvc_dmc_accumulate(&args, NULL) == KVC_BAD_DTYPE);
    args = good, args.out_v.dtype = KVC_BF16;
    CHECK(kvc_dmc_accumulate(&args, NULL) == KVC_BAD_DTYPE && kvc_dmc_accumulate(NULL, NULL) == KVC_NULL_POINTER);
    kvc_dmc_accumulate_backward_args backward = {.forward = good, .dout_k = in, .dout_v = in, .dk = to, .dv = to,
                                                 .dalpha = out, .domega = out};
    CHECK(kvc_dmc_accumulate_backward(&backward, NULL) == KVC_NULL_POINTER); /* no scratch */
    backward.dv.dtype = KVC_F16;
    CHECK(kvc_dmc_accumulate_backward(&backward, NULL) == KVC_BAD_DTYPE);
    for (int i = 0; i < 8; i++) CHECK(out[i] == 9);
    CHECK(kvc_dmc_chunks(0, 0) == 0 && kvc_dmc_chunks(65, 0) == 2 && kvc_dmc_chunks(65, 12) == 0);
    CHECK(kvc_dmc_chunks(65, 65) == 2);
    args = good, args.T = 0;
    CHECK(kvc_dmc_accumulate(&args, NULL) == KVC_OK);
}

/* ---- cache ---- */

enum { HEADS = 2, ROWS = 4, P = 4, D = 6, BLOCKS = 8, PAGES = 30, MOST = 5 };

/* What every slot of every row must hold, un-rotated and in double, and the tokens of its newest one. */
typedef struct {
    double slots[ROWS][BLOCKS * P][2][D], tail[ROWS][400][2][D], weights[ROWS][400];
    int lengths[ROWS], held[ROWS];
} model;

static void expect_token(model *all, int r, const float *k, const float *v, double weight, int joins, int64_t window) {
    if (!joins || !all->held[r]) all->held[r] = 0, all->lengths[r]++;
    const int at = all->held[r]++;
    all->weights[r][at] = weight;
    for (int d = 0; d < D; d++) all->tail[r][at][0][d] = d == 1 ? 0 : (double)k[d], all->tail[r][at][1][d] = (double)v[d];
    double sum = 0, (*slot)[D] = all->slots[r][all->lengths[r] - 1];
    memset(slot, 0, sizeof(double[2][D]));
    for (int i = window && at + 1 > window ? at + 1 - (int)window : 0; i <= at; i++) {
        sum += all->weights[r][i];
        for (int d = 0; d < 2 * D; d++) slot[d / D][d % D] += all->weights[r][i] * all->tail[r][i][d / D][d % D];
    }
    for (int d = 0; d < 2 * D; d++) slot[d / D][d % D] /= sum;
}

static void test_append(int64_t window, kvc_dtype dtype, int runner) {
    test_case = "dmc_append";
    const int64_t N = window ? window : 1, bytes = kvc_dtype_bytes(dtype);
    char *pages[2] = {room(PAGES * P * D * bytes), room(PAGES * P * D * bytes)};
    float *tail[2] = {room(4 * ROWS * N * D), room(4 * ROWS * N * D)}, *weights = room(4 * ROWS * N);
    int32_t *table = room(4 * ROWS * BLOCKS), *lengths = room(4 * ROWS), *refs = room(4 * PAGES);
    int32_t *free_pages = room(4 * PAGES), *free_count = room(8), *held = room(4 * ROWS), *scratch = room(4 * (ROWS * 4 + 1));
    memset(lengths, 0, 4 * ROWS), memset(refs, 0, 4 * PAGES), memset(held, 0, 4 * ROWS);
    for (int i = 0; i < PAGES; i++) free_pages[i] = i;
    free_count[0] = PAGES, free_count[1] = 0;
    model *all = room(sizeof *all);
    memset(all, 0, sizeof *all);
    for (int step = 0; step < 40; step++) {
        const int64_t S = 1 + step % MOST, count = ROWS * S * D;
        float *x[2] = {room(4 * count), room(4 * count)}, *alpha = room(4 * ROWS * S), *omega = room(4 * ROWS * S);
        int32_t *counts = room(4 * ROWS);
        void *arrays[2];
        for (int w = 0; w < 2; w++) fill(x[w], count, 2.0f), arrays[w] = rounded(x[w], count, dtype);
        for (int64_t i = 0; i < ROWS * S; i++) {
            alpha[i] = i % 7 == 6 ? NAN : uniform() < 0.6f ? 1.0f : 0.0f, omega[i] = 0.6f + 0.5f * uniform();
        }
        for (int r = 0; r < ROWS; r++) counts[r] = (int32_t)((step + r) % (S + 1));
        const kvc_dmc_append_args args = {
            .table = {table, lengths, refs, free_pages, free_count, ROWS, BLOCKS, P, PAGES},
            .rows = {pages[0], pages[1], NULL, NULL, (kvc_format)dtype}, .k = {arrays[0], dtype, HEADS * S * D, S * D, D},
            .v = {arrays[1], dtype, HEADS * S * D, S * D, D}, .tail_k = tail[0], .tail_v = tail[1],
            .tail_w = weights, .tail_counts = held, .alpha = alpha, .omega = omega, .counts = counts,
            .scratch = scratch, .B = ROWS / HEADS, .Hkv = HEADS, .S = S, .D = D, .neuron = 1, .window = window};
        const kvc_status status = kvc_dmc_append(&args, runners[runner]);
        CHECK(status == KVC_OK || status == KVC_POOL_FULL || status == KVC_BAD_INDEX); /* rows grow full */
        for (int r = 0; status == KVC_OK && r < ROWS; r++) {
            for (int64_t s = S - counts[r]; s < S; s++) {
                const float *k = x[0] + (r * S + s) * D, *v = x[1] + (r * S + s) * D;
                expect_token(all, r, k, v, (double)omega[r * S + s], alpha[r * S + s] > 0.5f, window);
            }
        }
        int used = 0;
        for (int r = 0; r < ROWS; r++) {
            CHECK(lengths[r] == all->lengths[r] && held[r] == all->held[r]);
            used += (lengths[r] + P - 1) / P;
            for (int slot = 0; slot < lengths[r]; slot++) {
                const int64_t at = (table[r * BLOCKS + slot / P] * P + slot % P) * D;
                for (int w = 0; w < 2; w++) {
                    check_close(pages[w] + at * bytes, dtype, all->slots[r][slot][w], D, 2e-6 + epsilon(dtype));
                }
            }
        }
        CHECK(free_count[0] == PAGES - used);
        for (int w = 0; w < 2; w++) free(x[w]), free(arrays[w]);
        free(alpha), free(omega), free(counts);
    }
    free(pages[0]), free(pages[1]), free(tail[0]), free(tail[1]), free(weights), free(table), free(lengths), free(refs);
    free(free_pages), free(free_count), free(held), free(scratch), free(all);
}

static void test_append_to_shared_pages(void) {
    test_case = "dmc_append to shared pages";
    for (int joins = 0; joins < 2; joins++) {
        /* two rows of 2 and 3 slots in pages of 2 that share their first page */
        float pages[2][4 * 2] = {{0, 1, 2, 3, 4, 5, 6, 7}, {0, 1, 2, 3, 4, 5, 6, 7}};
        float tail[2][2] = {{1, 4}, {1, 4}}, weights[2] = {1, 1}, x[2] = {3, 8}, one[2] = {1, 1};
        float alpha[2] = {(float)joins, (float)joins};
        int32_t table[2][3] = {{0, -1, -1}, {0, 2, -1}}, lengths[2] = {2, 3}, refs[4] = {2, 0, 1, 0}, held[2] = {1, 1};
        int32_t free_pages[4] = {1, 3, -1, -1}, free_count[2] = {2, 0}, scratch[9], counts[2] = {1, 1};
        kvc_dmc_append_args args = {
            .table = {table[0], lengths, refs, free_pages, free_count, 2, 3, 2, 4},
            .rows = {pages[0], pages[1], NULL, NULL, KVC_FORMAT_F32}, .k = {x, KVC_F32, 2, 1, 1}, .v = {x, KVC_F32, 2, 1, 1}, .tail_k = tail[0],
            .tail_v = tail[1], .tail_w = weights, .tail_counts = held, .alpha = alpha, .omega = one, .counts = counts,
            .scratch = scratch, .B = 1, .Hkv = 2, .S = 1, .D = 1, .neuron = -1};
        CHECK(kvc_dmc_append(&args, NULL) == KVC_OK);
        CHECK(free_count[0] == 1 && pages[0][0] == 0 && pages[0][1] == 1); /* one page taken; nothing shared is written */
        if (joins) {
            CHECK(table[0][0] == 3 && refs[0] == 1 && refs[3] == 1 && lengths[0] == 2 && lengths[1] == 3);
            CHECK(pages[0][6] == 0 && pages[0][7] == 2 && pages[0][4] == 6 && held[0] == 2 && weights[0] == 2);
        } else {
            CHECK(table[0][0] == 0 && table[0][1] == 3 && refs[0] == 2 && lengths[0] == 3 && lengths[1] == 4);
            CHECK(pages[0][6] == 3 && pages[0][5] == 8 && held[0] == 1 && weights[0] == 1);
        }
        float cosines[2] = {1, 1};
        int32_t positions[1] = {2};
        args.D = 2, args.rotary_dim = 2, args.table_rows = 2, args.positions = positions;
        args.cos = args.sin = cosines;
        CHECK(kvc_dmc_append(&args, NULL) == KVC_BAD_INDEX);
        args.rotary_dim = 3;
        CHECK(kvc_dmc_append(&args, NULL) == KVC_BAD_SIZE);
        args.rotary_dim = 0, args.window = KVC_DMC_MAX_WINDOW + 1;
        CHECK(kvc_dmc_append(&args, NULL) == KVC_BAD_SIZE);
        args.window = 0, args.tail_w = NULL;
        CHECK(kvc_dmc_append(&args, NULL) == KVC_NULL_POINTER);
        args.v.dtype = KVC_F16;
        CHECK(kvc_dmc_append(&args, NULL) == KVC_BAD_DTYPE && kvc_dmc_append(NULL, NULL) == KVC_NULL_POINTER);
    }
}

void test_dmc(void) {
    for (int dtype = KVC_F32; dtype <= KVC_F16; dtype++) test_gates((kvc_dtype)dtype);
    test_accumulate();
    for (int runner = 0; runner < RUNNERS; runner++) {
        test_append(0, KVC_F32, runner);
        test_append(3, KVC_BF16, runner);
    }
    test_gate_arguments();
    test_accumulate_arguments();
    test_append_to_shared_pages();
}
