/* Divergence of attention rows: plain C that each table's file compiles for its instruction set.
 *
 * No function on vec is needed, and every table gives the same bits.
 */
#ifndef KVC_SIMD_DIVERGENCE_H
#define KVC_SIMD_DIVERGENCE_H
#include "simd.h"

#include <string.h>

enum { DIVERGENCE_LANES = 16 };
#define LEAST_NORMAL 1.17549435e-38f

/* 1 + log2(x) for normal x > 0, 0 for 0.5 exactly. x = 2^e * m, m in [sqrt(1/2), sqrt(2)); polynomial of Cephes' logf. */
static inline float one_plus_log2(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const int32_t exponent = (bits - 0x3f3504f3) >> 23;
    bits -= exponent * (1 << 23);
    float m;
    memcpy(&m, &bits, sizeof m);
    const float f = m - 1.0f, z = f * f;
    float y = 7.0376836292e-2f;
    y = y * f - 1.1514610310e-1f;
    y = y * f + 1.1676998740e-1f;
    y = y * f - 1.2420140846e-1f;
    y = y * f + 1.4249322787e-1f;
    y = y * f - 1.6668057665e-1f;
    y = y * f + 2.0000714765e-1f;
    y = y * f - 2.4999993993e-1f;
    y = y * f + 3.3333331174e-1f;
    return (float)(exponent + 1) + (f + (y * f * z - 0.5f * z)) * KVC_LOG2E;
}

/* p*(1 + log2(p/(p+r))) + r*(1 + log2(r/(p+r))): 2 times what a key adds to the divergence; 0*log 0 = 0. */
static inline float divergence_term(float p, float r) {
    const float sum = p + r, whole = sum < LEAST_NORMAL ? LEAST_NORMAL : sum;
    const float a = p / whole, b = r / whole;
    return p * one_plus_log2(a < LEAST_NORMAL ? LEAST_NORMAL : a) +
           r * one_plus_log2(b < LEAST_NORMAL ? LEAST_NORMAL : b);
}

static void divergence(double *sums, const float *p, const float *r, int64_t rows) {
    for (int64_t i = 0; i < rows; i++, r += KVC_TILE) {
        float lanes[DIVERGENCE_LANES] = {0};
        for (int t = 0; t < KVC_TILE; t += DIVERGENCE_LANES) {
            for (int j = 0; j < DIVERGENCE_LANES; j++) lanes[j] += divergence_term(p[t + j], r[t + j]);
        }
        for (int step = DIVERGENCE_LANES / 2; step > 0; step /= 2) {
            for (int j = 0; j < step; j++) lanes[j] += lanes[j + step];
        }
        sums[i] += 0.5 * (double)lanes[0];
    }
}
#endif
