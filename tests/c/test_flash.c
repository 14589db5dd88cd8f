/* Tests of flash attention, forward and backward, against naive loops in double. */
#include "check.h"

typedef struct {
    int64_t B, Hq, Hkv, S, T, D, window, sinks;
    int causal, complement, bias, ragged;
    kvc_dtype dtype;
    float softcap;
    int has_sinks;
} flash_case;

typedef struct {
    double *out, *lse, *dq, *dk, *dv, *dbias, *dsinks;
} flash_results;

static int sees(const flash_case *c, int64_t length, int64_t i, int64_t t) {
    if (i < 0 || t >= length) return 0;
    if (c->causal && t > i) return 0;
    if (!c->window) return 1;
    return (t < c->sinks || t > i - c->window) != c->complement;
}

/* The formulas of kvc.h; arrays are [B, H, T, D], contiguous. */
static void naive(const flash_case *c, const float *q, const float *k, const float *v, const float *bias,
                  const int32_t *lengths, const float *dout, const float *dlse, double scale, const float *sinks,
                  const flash_results *r) {
    const int64_t G = c->Hq / c->Hkv, D = c->D;
    double *p = room(8 * c->T), *slope = room(8 * c->T);
    for (int64_t row = 0; row < c->B * c->Hq * c->S; row++) {
        const int64_t s = row % c->S, h = row / c->S % c->Hq, b = row / c->S / c->Hq, kv = b * c->Hkv + h / G;
        const int64_t length = lengths ? lengths[b] : c->T, i = length - c->S + s;
        double most = -INFINITY, sum = 0, delta = -(double)dlse[row];
        for (int64_t t = 0; t < c->T; t++) {
            p[t] = -INFINITY;
            if (!sees(c, length, i, t)) continue;
            double x = 0;
            for (int64_t d = 0; d < D; d++) x += scale * (double)q[row * D + d] * (double)k[(kv * c->T + t) * D + d];
            const double cap = (double)c->softcap, tanh_of = cap > 0 ? tanh(x / cap) : 0;
            slope[t] = 1 - tanh_of * tanh_of;
            p[t] = (cap > 0 ? cap * tanh_of : x) + (bias && t != i ? (double)bias[kv * c->T + t] : 0);
            most = fmax(most, p[t]);
        }
        const double sink = sinks && i >= 0 ? (double)sinks[h] : -INFINITY;
        most = fmax(most, sink);
        for (int64_t t = 0; t < c->T && most > -INFINITY; t++) sum += exp(p[t] - most);
        if (most > -INFINITY) sum += exp(sink - most);
        r->lse[row] = most + log(sum);
        for (int64_t d = 0; d < D; d++) {
            for (int64_t t = 0; t < c->T && most > -INFINITY; t++) {
                r->out[row * D + d] += exp(p[t] - r->lse[row]) * (double)v[(kv * c->T + t) * D + d];
            }
            delta += (double)dout[row * D + d] * r->out[row * D + d];
        }
        if (most > -INFINITY) r->dsinks[h] -= exp(sink - r->lse[row]) * delta;
        for (int64_t t = 0; t < c->T && most > -INFINITY; t++) {
            if (p[t] == -INFINITY) continue;
            const double weight = exp(p[t] - r->lse[row]);
            double dp = 0;
            for (int64_t d = 0; d < D; d++) dp += (double)dout[row * D + d] * (double)v[(kv * c->T + t) * D + d];
            const double ds = weight * (dp - delta);
            if (t != i) r->dbias[kv * c->T + t] += ds;
            for (int64_t d = 0; d < D; d++) {
                r->dq[row * D + d] += scale * ds * slope[t] * (double)k[(kv * c->T + t) * D + d];
                r->dk[(kv * c->T + t) * D + d] += scale * ds * slope[t] * (double)q[row * D + d];
                r->dv[(kv * c->T + t) * D + d] += weight * (double)dout[row * D + d];
            }
        }
    }
    free(p), free(slope);
}

static double *zeros(int64_t count) {
    double *array = room(8 * count);
    for (int64_t i = 0; i < count; i++) array[i] = 0;
    return array;
}

static void compare(const void *array, kvc_dtype dtype, const double *expected, int64_t count, double tolerance) {
    double largest = 0;
    for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(expected[i]));
    for (int64_t i = 0; i < count; i++) {
        const double found = (double)element(array, i, dtype);
        CHECK(fabs(found - expected[i]) <= (tolerance + epsilon(dtype)) * fmax(largest, 1));
    }
}

static void test_flash_case(const flash_case *c) {
    const int64_t queries = c->B * c->Hq * c->S, keys = c->B * c->Hkv * c->T, D = c->D, size = kvc_dtype_bytes(c->dtype);
    float *q = room(4 * queries * D), *k = room(4 * keys * D), *v = room(4 * keys * D), *dout = room(4 * queries * D);
    float *bias = room(4 * keys), *dlse = room(4 * queries), *sinks = room(4 * c->Hq);
    fill(q, queries * D, 2.0f), fill(k, keys * D, 2.0f), fill(v, keys * D, 1.0f), fill(dout, queries * D, 1.0f);
    fill(bias, keys, 3.0f), fill(dlse, queries, 1.0f), fill(sinks, c->Hq, 2.0f);
    sinks[c->Hq - 1] = c->Hq > 1 ? -INFINITY : 0.5f;
    for (int64_t i = 0; i < keys; i += 3) bias[i] = -INFINITY;
    void *arrays[4] = {rounded(q, queries * D, c->dtype), rounded(k, keys * D, c->dtype), rounded(v, keys * D, c->dtype),
                       rounded(dout, queries * D, c->dtype)};
    int32_t *lengths = room(4 * c->B);
    for (int64_t b = 0; b < c->B; b++) lengths[b] = (int32_t)(c->T * b / c->B);
    const flash_results exact = {zeros(queries * D), zeros(queries), zeros(queries * D), zeros(keys * D), zeros(keys * D),
                                 zeros(keys), zeros(c->Hq)};
    naive(c, q, k, v, c->bias ? bias : NULL, c->ragged ? lengths : NULL, dout, dlse, 0.3,
          c->has_sinks ? sinks : NULL, &exact);
    for (int64_t i = 0; i < queries; i++) { /* what a query that sees nothing holds reaches nothing */
        for (int64_t d = 0; d < D && exact.lse[i] == -INFINITY; d++) q[i * D + d] = dout[i * D + d] = NAN;
        if (exact.lse[i] == -INFINITY) dlse[i] = NAN;
    }
    free(arrays[0]), free(arrays[3]);
    arrays[0] = rounded(q, queries * D, c->dtype), arrays[3] = rounded(dout, queries * D, c->dtype);
    const kvc_view query_view = {NULL, c->dtype, c->Hq * c->S * D, c->S * D, D};
    const kvc_view key_view = {NULL, c->dtype, c->Hkv * c->T * D, c->T * D, D};
    unsigned char *first = NULL;
    const int64_t bytes = size * D * (2 * queries + 2 * keys) + 4 * (queries + keys + c->Hq);
    for (int runner = 0; runner < RUNNERS; runner++) {
        unsigned char *all = room(bytes); /* lse, dkey_bias, dsink_logits, out, dq, dk, dv */
        memset(all, 0, (size_t)bytes);
        kvc_attention_backward_args args = {.forward = {
            .out = query_view, .q = query_view, .k = key_view, .v = key_view, .lse = (float *)(void *)all,
            .key_bias = c->bias ? bias : NULL, .lengths = c->ragged ? lengths : NULL, .B = c->B, .Hq = c->Hq,
            .Hkv = c->Hkv, .S = c->S, .T = c->T, .D = D, .window = c->window, .sinks = c->sinks, .scale = 0.3f,
            .causal = c->causal, .complement = c->complement, .softcap = c->softcap,
            .sink_logits = c->has_sinks ? sinks : NULL},
            .dout = query_view, .dq = query_view, .dk = key_view, .dv = key_view, .dlse = dlse};
        unsigned char *next = all + 4 * (queries + keys + c->Hq);
        args.dkey_bias = args.forward.lse + queries;
        args.dsink_logits = c->has_sinks ? args.dkey_bias + keys : NULL;
        args.forward.out.data = next, args.dq.data = next + size * D * queries;
        args.dk.data = next + 2 * size * D * queries, args.dv.data = next + size * D * (2 * queries + keys);
        args.forward.q.data = arrays[0], args.forward.k.data = arrays[1], args.forward.v.data = arrays[2];
        args.dout.data = arrays[3];
        args.scratch = room(kvc_attention_backward_scratch_bytes(&args));
        CHECK(kvc_attention(&args.forward, runners[runner]) == KVC_OK);
        CHECK(kvc_attention_backward(&args, runners[runner]) == KVC_OK);
        if (!first) {
            const double loose = c->dtype == KVC_F32 ? 2e-5 : c->dtype == KVC_F16 ? 3e-3 : 3e-2; /* out is rounded */
            compare(args.forward.out.data, c->dtype, exact.out, queries * D, 1e-5);
            for (int64_t i = 0; i < queries; i++) {
                CHECK(exact.lse[i] == (double)args.forward.lse[i] ||
                      fabs(exact.lse[i] - (double)args.forward.lse[i]) <= 2e-5);
            }
            compare(args.dq.data, c->dtype, exact.dq, queries * D, loose);
            compare(args.dk.data, c->dtype, exact.dk, keys * D, loose);
            compare(args.dv.data, c->dtype, exact.dv, keys * D, loose);
            compare(args.dkey_bias, KVC_F32, exact.dbias, keys, loose);
            if (c->has_sinks) compare(args.dsink_logits, KVC_F32, exact.dsinks, c->Hq, 10 * loose);
            first = memcpy(room(bytes), all, (size_t)bytes);
        }
        CHECK(memcmp(first, all, (size_t)bytes) == 0);
        memset(all, 0x77, (size_t)bytes); /* nothing is written on a bad argument */
        kvc_attention_backward_args bad = args;
        bad.forward.S = c->T + 1;
        CHECK(kvc_attention(&bad.forward, NULL) == KVC_BAD_SIZE && kvc_attention_backward(&bad, NULL) == KVC_BAD_SIZE);
        bad = args, bad.forward.window = 3, bad.forward.causal = 0;
        CHECK(kvc_attention(&bad.forward, NULL) == KVC_BAD_SIZE);
        bad = args, bad.forward.window = 0, bad.forward.complement = 1;
        CHECK(kvc_attention(&bad.forward, NULL) == KVC_BAD_SIZE);
        for (int i = 0; i < 3; i++) {
            const int64_t head_dims[3] = {-1, 0, KVC_MAX_HEAD_DIM + 1};
            bad = args, bad.forward.D = head_dims[i];
            CHECK(kvc_attention(&bad.forward, NULL) == KVC_BAD_SIZE);
            CHECK(kvc_attention_backward(&bad, NULL) == KVC_BAD_SIZE);
        }
        for (int i = 0; i < 5; i++) {
            const float numbers[5] = {INFINITY, NAN, -1, INFINITY, NAN};
            bad = args;
            if (i < 2) bad.forward.scale = numbers[i];
            else bad.forward.softcap = numbers[i];
            CHECK(kvc_attention(&bad.forward, NULL) == KVC_BAD_SIZE);
            CHECK(kvc_attention_backward(&bad, NULL) == KVC_BAD_SIZE);
        }
        bad = args, bad.forward.sink_logits = NULL, bad.dsink_logits = dlse;
        CHECK(kvc_attention_backward(&bad, NULL) == KVC_NULL_POINTER);
        bad = args, bad.forward.k.dtype = (kvc_dtype)7;
        CHECK(kvc_attention(&bad.forward, NULL) == KVC_BAD_DTYPE);
        bad = args, bad.dv.dtype = (kvc_dtype)7;
        CHECK(kvc_attention_backward(&bad, NULL) == KVC_BAD_DTYPE);
        bad = args, bad.scratch = NULL;
        CHECK(kvc_attention_backward(&bad, NULL) == KVC_NULL_POINTER);
        lengths[0] = (int32_t)c->T + 1;
        bad = args, bad.forward.lengths = lengths;
        CHECK(kvc_attention(&bad.forward, NULL) == KVC_BAD_INDEX && kvc_attention_backward(&bad, NULL) == KVC_BAD_INDEX);
        lengths[0] = 0;
        for (int64_t i = 0; i < bytes; i++) CHECK(all[i] == 0x77);
        free(all), free(args.scratch);
    }
    free(q), free(k), free(v), free(dout), free(bias), free(dlse), free(lengths), free(first), free(sinks);
    for (int i = 0; i < 4; i++) free(arrays[i]);
    free(exact.out), free(exact.lse), free(exact.dq), free(exact.dk), free(exact.dv), free(exact.dbias);
    free(exact.dsinks);
}

void test_flash(void) {
    const flash_case cases[] = {
        {1, 1, 1, 1, 1, 1, 0, 0, 1, 0, 0, 0, KVC_F32, 0, 0},       {2, 4, 2, 5, 9, 16, 0, 0, 1, 0, 1, 1, KVC_F32, 0, 0},
        {1, 2, 1, 70, 150, 33, 0, 0, 0, 0, 1, 0, KVC_F32, 0, 0},   {3, 2, 2, 40, 140, 64, 20, 3, 1, 0, 1, 1, KVC_BF16, 0, 0},
        {1, 3, 1, 65, 130, 80, 30, 5, 1, 1, 1, 0, KVC_F32, 0, 0},  {2, 6, 2, 7, 20, 16, 3, 9, 1, 0, 0, 0, KVC_F16, 0, 0},
        {1, 1, 1, 66, 66, 256, 0, 0, 1, 0, 0, 0, KVC_BF16, 0, 0},  {1, 2, 2, 10, 12, 4, 100, 2, 1, 1, 0, 0, KVC_F32, 0, 0},
        {1, 2, 1, 33, 200, 128, 1, 200, 1, 0, 1, 0, KVC_F32, 0, 0},
        {2, 4, 2, 70, 90, 32, 20, 3, 1, 0, 1, 1, KVC_F32, 2, 1},
        {2, 4, 2, 40, 60, 24, 20, 3, 1, 1, 0, 1, KVC_F32, 0, 1},
        {1, 3, 1, 9, 70, 512, 0, 0, 1, 0, 1, 0, KVC_BF16, 3, 1},
        {1, 1, 1, 66, 66, 301, 0, 0, 0, 0, 0, 0, KVC_F32, 5, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char name[32];
        snprintf(name, sizeof name, "flash %d", (int)i);
        test_case = name;
        test_flash_case(&cases[i]);
        test_case = "";
    }
    test_case = "flash, nothing";
    kvc_attention_backward_args none = {.forward = {.Hkv = 2, .Hq = 4, .S = 0, .T = 3, .D = 4, .B = 0, .scale = 1}};
    CHECK(kvc_attention(&none.forward, NULL) == KVC_OK && kvc_attention_backward(&none, NULL) == KVC_OK);
    CHECK(kvc_attention(NULL, NULL) == KVC_NULL_POINTER && kvc_attention_backward(NULL, NULL) == KVC_NULL_POINTER);
    CHECK(kvc_attention_backward_scratch_bytes(&none) == 0);
    float ones[24], dv[24];
    for (int i = 0; i < 24; i++) ones[i] = 1;
    none.forward.B = 1, none.forward.D = 4; /* keys without queries: their gradient is 0, and written */
    none.dk = none.dv = (kvc_view){ones, KVC_F32, 24, 12, 4};
    none.dv.data = memcpy(dv, ones, sizeof dv);
    CHECK(kvc_attention_backward(&none, NULL) == KVC_OK);
    for (int i = 0; i < 24; i++) CHECK(ones[i] == 0 && dv[i] == 0);
}
