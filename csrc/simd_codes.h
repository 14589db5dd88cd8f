/* Products of codes, the same for every instruction set with registers of 16-bit integers, written once over them.
 *
 * A table's file defines, before it includes this (again for other products): `ivec`, CODE_WIDTH = 2*VEC_WIDTH words of 16
 * bits; CODES(name), the name of a function here; CODES_TARGET, an attribute of all of them; CODES_MADD(sums, a, b), 32-bit
 * sums + products of neighbouring words; and, once: ivec_zero, ivec_bytes(p, n) and ivec_words(p, n), the first n <=
 * CODE_WIDTH bytes, sign-extended, or words at p and zeros, ivec_set(x) of a pair of words, ivec_low_nibbles(x) and
 * ivec_high_nibbles(x) of such bytes, ivec_low(a, b) and ivec_high(a, b), which interleave words within 128 bits,
 * ivec_sums(x), the sums of VEC_WIDTH registers of 32 bits, ivec_store(p, x), and ivec_add_to(y, low, high, n): the sums of
 * ivec_low and ivec_high words, put in order, added to the first n of CODE_WIDTH int32 at y.
 */
#define CODES_INLINE CODES_TARGET static inline __attribute__((always_inline))

/* VEC_WIDTH / queries keys against 1, 2 or 4 queries, as dots_block. */
CODES_INLINE void CODES(code_dots_block)(int32_t *c, int64_t ldc, const int16_t *q, int64_t D, const char *k, int64_t keys,
                                         const int queries) {
    const int width = VEC_WIDTH / queries;
    const char *row[VEC_WIDTH];
    ivec sums[VEC_WIDTH];
#pragma GCC unroll 16
    for (int j = 0; j < width; j++) row[j] = k + (j < keys ? j : keys - 1) * D; /* a short block reads its last twice */
#pragma GCC unroll 16
    for (int i = 0; i < VEC_WIDTH; i++) sums[i] = ivec_zero();
    int64_t d = 0;
    for (; d + CODE_WIDTH <= D; d += CODE_WIDTH) {
        ivec query[VEC_WIDTH];
#pragma GCC unroll 4
        for (int i = 0; i < queries; i++) query[i] = ivec_words(q + i * D + d, CODE_WIDTH);
#pragma GCC unroll 16
        for (int j = 0; j < width; j++) {
            const ivec key = ivec_bytes(row[j] + d, CODE_WIDTH);
#pragma GCC unroll 4
            for (int i = 0; i < queries; i++) sums[i * width + j] = CODES_MADD(sums[i * width + j], query[i], key);
        }
    }
    if (d < D) {
        ivec query[VEC_WIDTH]; /* unrolled too: the sums stay in registers */
#pragma GCC unroll 4
        for (int i = 0; i < queries; i++) query[i] = ivec_words(q + i * D + d, D - d);
#pragma GCC unroll 16
        for (int j = 0; j < width; j++) {
            const ivec key = ivec_bytes(row[j] + d, D - d);
#pragma GCC unroll 4
            for (int i = 0; i < queries; i++) sums[i * width + j] = CODES_MADD(sums[i * width + j], query[i], key);
        }
    }
    int32_t total[VEC_WIDTH];
    ivec_store(total, ivec_sums(sums));
#pragma GCC unroll 4
    for (int i = 0; i < queries; i++) {
        if (keys >= width) memcpy(c + i * ldc, total + i * width, (size_t)width * sizeof *c);
        else for (int j = 0; j < keys; j++) c[i * ldc + j] = total[i * width + j];
    }
}

CODES_TARGET static void CODES(code_dots)(int32_t *c, int64_t ldc, const int16_t *q, int64_t D, const void *k, int64_t keys,
                                          int64_t queries, const void *next) {
    enum { MOST = VEC_WIDTH >= 16 ? 4 : 2, SPAN = VEC_WIDTH }; /* as in dots_of */
    for (int64_t j = 0; j < keys; j += SPAN) {
        const int64_t span = keys - j < SPAN ? keys - j : SPAN;
        const char *rows = (const char *)k + j * D;
        fetch_ahead(k, keys * D, j * D, SPAN * D, next);
        int64_t i = 0;
        for (; i + MOST <= queries; i += MOST) {
            for (int64_t n = 0; n < span; n += VEC_WIDTH / MOST) {
                CODES(code_dots_block)(c + i * ldc + j + n, ldc, q + i * D, D, rows + n * D, span - n, MOST);
            }
        }
        for (; i + 2 <= queries; i += 2) {
            for (int64_t n = 0; n < span; n += VEC_WIDTH / 2) {
                CODES(code_dots_block)(c + i * ldc + j + n, ldc, q + i * D, D, rows + n * D, span - n, 2);
            }
        }
        if (i < queries) CODES(code_dots_block)(c + i * ldc + j, ldc, q + i * D, D, rows, span, 1);
    }
}

/* `count` bytes at place d of every value, of 1, 2 or 4 queries; two keys at a time, whose codes lie side by side. ahead:
 * where what is to be fetched begins, NULL: nothing. INT4: the bytes' high halves are those of the elements D/2 on. */
CODES_INLINE void CODES(code_mix_block)(int32_t *y, int64_t D, const int16_t *w, int64_t ldw, const char *v, int64_t step,
                                        int64_t d, int64_t count, int64_t keys, const char *ahead, const int queries,
                                        const kvc_codes kind) {
    const int halves = kind == KVC_INT4 ? 2 : 1;
    ivec sums[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < queries; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < 2 * halves; j++) sums[i][j] = ivec_zero();
    }
    /* a line of two values takes two blocks: each asks for that of one of them, so that memory is asked evenly */
    if (ahead) ahead += d / LINE * LINE + (d % LINE ? step : 0);
    for (int64_t t = 0; t < keys; t += 2) {
        const int two = t + 1 < keys;
        const char *at = v + t * step + d;
        ivec codes[2][2], pair[4];
        if (ahead) __builtin_prefetch(ahead + t * step, 0, 2);
        codes[0][0] = ivec_bytes(at, count);
        codes[1][0] = two ? ivec_bytes(at + step, count) : ivec_zero();
        if (kind == KVC_INT4) {
#pragma GCC unroll 2
            for (int n = 0; n < 2; n++) {
                codes[n][1] = ivec_high_nibbles(codes[n][0]);
                codes[n][0] = ivec_low_nibbles(codes[n][0]);
            }
        }
#pragma GCC unroll 2
        for (int j = 0; j < halves; j++) {
            pair[2 * j] = ivec_low(codes[0][j], codes[1][j]);
            pair[2 * j + 1] = ivec_high(codes[0][j], codes[1][j]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < queries; i++) {
            int16_t weights[2] = {w[i * ldw + t], 0};
            int32_t both;
            if (two) memcpy(&both, w + i * ldw + t, sizeof both);
            else memcpy(&both, weights, sizeof both);
            const ivec weight = ivec_set(both);
#pragma GCC unroll 4
            for (int j = 0; j < 2 * halves; j++) sums[i][j] = CODES_MADD(sums[i][j], weight, pair[j]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < queries; i++) {
#pragma GCC unroll 2
        for (int j = 0; j < halves; j++) {
            ivec_add_to(y + i * D + j * (D / 2) + d, sums[i][2 * j], sums[i][2 * j + 1], count);
        }
    }
}

CODES_INLINE void CODES(code_mix_queries)(int32_t *y, int64_t D, const int16_t *w, int64_t ldw, const char *v, int64_t step,
                                          int64_t keys, const char *ahead, const int queries, const kvc_codes kind) {
    int64_t d = 0;
    for (; d + CODE_WIDTH <= step; d += CODE_WIDTH) {
        CODES(code_mix_block)(y, D, w, ldw, v, step, d, CODE_WIDTH, keys, ahead, queries, kind);
    }
    if (d < step) CODES(code_mix_block)(y, D, w, ldw, v, step, d, step - d, keys, ahead, queries, kind);
}

CODES_INLINE void CODES(code_mix_of)(int32_t *y, int64_t D, const int16_t *w, int64_t ldw, const void *v, int64_t keys,
                                     int64_t queries, const void *next, const kvc_codes kind) {
    const int64_t step = kind == KVC_INT4 ? D / 2 : D, size = keys * step;
    /* as in mix_of: a span comes from memory once and is met again in the first-level cache */
    const int64_t most = KVC_AHEAD / step / 2 * 2;
    for (int64_t t = 0; t < keys; t += most) {
        const int64_t span = keys - t < most ? keys - t : most;
        const char *rows = (const char *)v + t * step, *ahead = ahead_of(v, size, t * step, span * step, next);
        int64_t i = 0;
        for (; i + 4 <= queries; i += 4) {
            CODES(code_mix_queries)(y + i * D, D, w + i * ldw + t, ldw, rows, step, span, i ? NULL : ahead, 4, kind);
        }
        for (; i + 2 <= queries; i += 2) {
            CODES(code_mix_queries)(y + i * D, D, w + i * ldw + t, ldw, rows, step, span, i ? NULL : ahead, 2, kind);
        }
        if (i < queries) {
            CODES(code_mix_queries)(y + i * D, D, w + i * ldw + t, ldw, rows, step, span, i ? NULL : ahead, 1, kind);
        }
    }
}

CODES_TARGET static void CODES(code_mix_int8)(int32_t *y, int64_t D, const int16_t *w, int64_t ldw, const void *v,
                                              int64_t keys, int64_t queries, const void *next) {
    CODES(code_mix_of)(y, D, w, ldw, v, keys, queries, next, KVC_INT8);
}
CODES_TARGET static void CODES(code_mix_int4)(int32_t *y, int64_t D, const int16_t *w, int64_t ldw, const void *v,
                                              int64_t keys, int64_t queries, const void *next) {
    CODES(code_mix_of)(y, D, w, ldw, v, keys, queries, next, KVC_INT4);
}
#undef CODES_INLINE
