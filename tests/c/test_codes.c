/* Tests of codes: vectors there and back, the integer products of every table against plain loops, and rows of codes against
 * rows of the numbers that they stand for. */
#include "check.h"
#include "../../csrc/simd.h"

static int code_of(const uint8_t *codes, int64_t D, int64_t d, kvc_codes kind) {
    if (kind == KVC_INT8) return (int8_t)codes[d];
    const int half = d < D / 2 ? codes[d] & 15 : codes[d - D / 2] >> 4;
    return half > 7 ? half - 16 : half;
}

/* What is stored of element d where codes stand for `stored`: of KVC_INT4 times Hadamard's matrix over the root of its size,
 * in blocks of the largest power of two that divides D. */
static double stood_for(const double *stored, int64_t D, int64_t d, kvc_codes kind) {
    const int64_t block = D & -D, first = d / block * block;
    double sum = 0.0;
    if (kind == KVC_INT8) return stored[d];
    for (int64_t j = 0; j < block; j++) {
        sum += (__builtin_popcountll((uint64_t)((d - first) & j)) % 2 ? -1.0 : 1.0) * stored[first + j];
    }
    return sum / sqrt((double)block);
}

static void *bytes_of_codes(int64_t count) {
    uint8_t *codes = room(count);
    for (int64_t i = 0; i < count; i++) codes[i] = (uint8_t)(i * 89 + i / 7 * 31);
    return codes;
}

static void test_vectors(kvc_codes kind, int64_t D, kvc_dtype dtype, int runner) {
    test_case = "vectors";
    enum { B = 2, H = 2, T = 3, N = B * H * T };
    const int64_t bytes = kind == KVC_INT4 ? D / 2 : D, levels = kind == KVC_INT4 ? 7 : 127;
    float *x = room(N * D * 4);
    fill(x, N * D, 2.0f);
    for (int64_t d = 0; d < D; d++) x[d] = 0.0f;
    x[D] = NAN, x[2 * D + D - 1] = -INFINITY;
    void *array = rounded(x, N * D, dtype);
    kvc_quantize_args args = {.codes = room(N * bytes), .scales = room(N * 2), .x = {array, dtype, H * T * D, T * D, D},
                              .B = B, .H = H, .T = T, .D = D, .kind = kind};
    CHECK(kvc_quantize(&args, runners[runner]) == KVC_OK);
    kvc_dequantize_args back = {.x = room(N * D * 4), .codes = args.codes, .scales = args.scales, .dtype = KVC_F32, .N = N,
                                .D = D, .kind = kind};
    CHECK(kvc_dequantize(&back, runners[runner]) == KVC_OK);
    for (int64_t n = 0; n < N; n++) {
        const float scale = element(args.scales, n, KVC_F16);
        CHECK(isnan(scale) == (n == 1 || n == 2) && (n || scale == 0.0f));
        double stored[KVC_MAX_HEAD_DIM], squares = 0.0;
        for (int64_t d = 0; d < D; d++) {
            const int code = code_of((const uint8_t *)args.codes + n * bytes, D, d, kind);
            CHECK(code >= -levels && code <= levels && (code == 0 || !isnan(scale)));
            stored[d] = (double)scale * code;
        }
        for (int64_t d = 0; d < D; d++) {
            const double found = (double)element(back.x, n * D + d, KVC_F32), slack = kind == KVC_INT4 ? 1e-5 * scale : 0.0;
            CHECK(isnan(scale) ? isnan(found) : fabs(found - stood_for(stored, D, d, kind)) <= slack * (double)levels);
            CHECK(kind == KVC_INT4 || isnan(scale) || fabs(found - (double)x[n * D + d]) <= (double)scale * 0.500001);
            squares += (found - (double)x[n * D + d]) * (found - (double)x[n * D + d]);
        }
        CHECK(isnan(scale) || sqrt(squares) <= sqrt((double)D) * (double)scale * 0.5001);
    }
    kvc_quantize_args bad = args;
    bad.D = 0;
    CHECK(kvc_quantize(&bad, NULL) == KVC_BAD_SIZE);
    bad = args, bad.D = KVC_MAX_HEAD_DIM + 1;
    CHECK(kvc_quantize(&bad, NULL) == KVC_BAD_SIZE);
    bad = args, bad.kind = (kvc_codes)2;
    CHECK(kvc_quantize(&bad, NULL) == KVC_BAD_SIZE);
    bad = args, bad.x.dtype = (kvc_dtype)4;
    CHECK(kvc_quantize(&bad, NULL) == KVC_BAD_DTYPE);
    bad = args, bad.scales = NULL;
    CHECK(kvc_quantize(&bad, NULL) == KVC_NULL_POINTER);
    bad = args, bad.kind = KVC_INT4, bad.D = 5;
    CHECK(kvc_quantize(&bad, NULL) == KVC_BAD_SIZE);
    kvc_dequantize_args wrong = back;
    wrong.codes = NULL;
    CHECK(kvc_dequantize(&wrong, NULL) == KVC_NULL_POINTER);
    wrong = back, wrong.dtype = (kvc_dtype)4;
    CHECK(kvc_dequantize(&wrong, NULL) == KVC_BAD_DTYPE);
    wrong = back, wrong.N = -1;
    CHECK(kvc_dequantize(&wrong, NULL) == KVC_BAD_SIZE);
    free(x), free(array), free(args.codes), free(args.scales), free(back.x);
}

/* The largest integers there are, which must not overflow; codes of -128, which quantize does not make, among them. */
static void test_products(int64_t D, int64_t keys, int64_t queries) {
    test_case = "integer products";
    const kvc_simd *simd = kvc_simd_table();
    const int64_t ldc = keys + 3;
    int16_t *q = room(queries * D * 2), *w = room(queries * ldc * 2);
    int32_t *dots = room((queries + 1) * ldc * 4), *sums = room(queries * D * 4);
    for (int64_t i = 0; i < queries * D; i++) q[i] = (int16_t)(i % 3 == 0 ? KVC_MOST_WORD : i % 3 == 1 ? -KVC_MOST_WORD : i * 977 % 4001);
    for (int64_t i = 0; i < queries * ldc; i++) w[i] = (int16_t)(i % 2 ? 32767 : i * 613 % 32768);
    uint8_t *k = bytes_of_codes(keys * D);
    for (int64_t j = 0; j < ldc; j++) dots[queries * ldc + j] = 77; /* nobody's */
    simd->code_dots(dots, ldc, q, D, k, keys, queries, NULL);
    for (int64_t j = 0; j < ldc; j++) CHECK(dots[queries * ldc + j] == 77);
    for (int64_t i = 0; i < queries; i++) {
        for (int64_t j = 0; j < keys; j++) {
            int64_t expected = 0;
            for (int64_t d = 0; d < D; d++) expected += q[i * D + d] * (int64_t)(int8_t)k[j * D + d];
            CHECK(dots[i * ldc + j] == expected);
        }
    }
    for (int kind = 0; kind < 2; kind++) {
        if (kind == KVC_INT4 && D % 2) continue;
        const int64_t bytes = kind == KVC_INT4 ? D / 2 : D;
        uint8_t *v = bytes_of_codes(keys * bytes);
        for (int64_t i = 0; i < queries * D; i++) sums[i] = (int32_t)i;
        simd->code_mix[kind](sums, D, w, ldc, v, keys, queries, NULL);
        for (int64_t i = 0; i < queries; i++) {
            for (int64_t d = 0; d < D; d++) {
                int64_t expected = i * D + d;
                for (int64_t j = 0; j < keys; j++) {
                    expected += w[i * ldc + j] * (int64_t)code_of(v + j * bytes, D, d, (kvc_codes)kind);
                }
                CHECK(sums[i * D + d] == expected);
            }
        }
        free(v);
    }
    free(q), free(w), free(dots), free(sums), free(k);
}

/* Blocks with a weight that is not finite, of zeros, of almost nothing, and where not all is seen. */
static void test_weights(int64_t n, int64_t width) {
    test_case = "weights in words";
    const int64_t blocks = (width + KVC_MIXED - 1) / KVC_MIXED;
    float *x = room(n * 4), *scales = room(n * 4), *units = room(blocks * 4);
    int16_t *words = room(blocks * KVC_MIXED * 2);
    for (int64_t i = 0; i < n; i++) {
        const int64_t block = i / KVC_MIXED;
        x[i] = (float)(i * 389 % 1009) / 1009.0f * (block == 2 ? 0.0f : block == 3 ? 1e-36f : 1.0f);
        scales[i] = i == KVC_MIXED + 3 ? NAN : (float)(i % 17 + 1) / 64.0f;
    }
    kvc_simd_table()->code_weights(words, units, x, scales, n, width);
    for (int64_t t = 0; t < blocks * KVC_MIXED; t += KVC_MIXED) {
        float largest = 0x1p-100f;
        int finite = 1;
        for (int64_t i = t; i < t + KVC_MIXED && i < n; i++) {
            if (!isfinite(scales[i])) finite = 0;
            largest = x[i] * scales[i] > largest ? x[i] * scales[i] : largest;
        }
        const float unit = units[t / KVC_MIXED], factor = 32767.0f / largest;
        CHECK(finite ? unit == largest / 32767.0f : isnan(unit));
        for (int64_t i = t; i < t + KVC_MIXED; i++) {
            CHECK(words[i] == (finite && i < n ? (int16_t)nearbyintf(x[i] * scales[i] * factor) : 0));
        }
    }
    free(x), free(scales), free(units), free(words);
}

/* Rows of codes in pages against rows of float32 numbers. */
static void test_rows(kvc_format format, int64_t Hq, int64_t S, int64_t D, int64_t P, int runner) {
    test_case = "rows of codes";
    enum { HKV = 2, BLOCKS = 40 };
    const int64_t pages = HKV * BLOCKS, slots = pages * P, kb = kvc_key_bytes(format, D), vb = kvc_value_bytes(format, D);
    const kvc_codes kinds[2] = {KVC_INT8, format == KVC_FORMAT_K8V4 ? KVC_INT4 : KVC_INT8};
    const int32_t begin[HKV] = {3, 0}, end[HKV] = {(int32_t)(BLOCKS * P - 1), (int32_t)(P + 1)};
    int32_t *table = room(pages * 4);
    for (int64_t i = 0; i < pages; i++) table[i] = (int32_t)(i * 7 % pages);
    float *q = room(Hq * S * D * 4), *numbers[2];
    void *codes[2] = {room(slots * kb), room(slots * vb)}, *scales[2] = {room(slots * 2), room(slots * 2)};
    fill(q, Hq * S * D, 1.0f);
    for (int i = 0; i < 2; i++) {
        numbers[i] = room(slots * D * 4);
        fill(numbers[i], slots * D, 1.0f);
        const kvc_quantize_args to = {codes[i], scales[i], {numbers[i], KVC_F32, slots * D, slots * D, D}, 1, 1, slots, D, kinds[i]};
        CHECK(kvc_quantize(&to, NULL) == KVC_OK);
        const kvc_dequantize_args from = {numbers[i], codes[i], scales[i], KVC_F32, slots, D, kinds[i]};
        CHECK(kvc_dequantize(&from, NULL) == KVC_OK);
    }
    float *out[2], *lse[2];
    for (int i = 0; i < 2; i++) {
        out[i] = room(Hq * S * D * 4), lse[i] = room(Hq * S * 4);
        kvc_decode_args args = {
            .out = out[i], .lse = lse[i], .q = {q, KVC_F32, Hq * S * D, S * D, D},
            .rows = {numbers[0], numbers[1], NULL, NULL, KVC_FORMAT_F32}, .block_table = table, .begin = begin, .end = end,
            .B = 1, .Hq = Hq, .Hkv = HKV, .S = S, .D = D, .P = P, .pages = pages, .blocks = BLOCKS,
            .scale = 1.0f / sqrtf((float)D),
            .causal = 1, .sinks = 2};
        if (i) args.rows = (kvc_rows){codes[0], codes[1], scales[0], scales[1], format};
        args.scratch = room(kvc_decode_scratch_bytes(&args));
        CHECK(kvc_decode(&args, i ? runners[runner] : NULL) == KVC_OK);
        if (i) {
            kvc_decode_args bad = args;
            bad.rows.value_scales = NULL;
            CHECK(kvc_decode(&bad, NULL) == KVC_NULL_POINTER);
            bad = args, bad.rows.format = (kvc_format)-1;
            CHECK(kvc_decode(&bad, NULL) == KVC_BAD_FORMAT);
            bad = args, bad.rows.format = KVC_FORMAT_K8V4, bad.D = D - 1;
            CHECK(kvc_decode(&bad, NULL) == KVC_BAD_SIZE);
        }
        free(args.scratch);
    }
    for (int64_t i = 0; i < Hq * S * D; i++) CHECK(fabsf(out[0][i] - out[1][i]) < 1e-3f);
    for (int64_t i = 0; i < Hq * S; i++) CHECK(lse[0][i] == lse[1][i] || fabsf(lse[0][i] - lse[1][i]) < 1e-3f);
    for (int i = 0; i < 2; i++) free(numbers[i]), free(codes[i]), free(scales[i]), free(out[i]), free(lse[i]);
    free(table), free(q);
}

void test_codes(void) {
    const int64_t dims[] = {2, 16, 30, 66, 128, 250, 512}, counts[] = {1, 2, 5, 17, KVC_MIXED};
    for (int i = 0; i < 7; i++) {
        test_vectors(KVC_INT8, dims[i], (kvc_dtype)(i % 3), i % RUNNERS);
        test_vectors(KVC_INT4, dims[i], (kvc_dtype)(i % 3), i % RUNNERS);
        for (int n = 0; n < 5; n++) test_products(dims[i], counts[n], 1 + (i + n) % 8);
    }
    test_products(7, 9, 4);
    test_weights(3, 3);
    test_weights(5 * KVC_MIXED - 7, 6 * KVC_MIXED - 30);
    for (int i = 0; i < 7; i++) {
        test_rows(i % 2 ? KVC_FORMAT_INT8 : KVC_FORMAT_K8V4, 2 + 2 * i, 1 + i % 3, dims[i], 1 << (i % 5), i % RUNNERS);
    }
}
