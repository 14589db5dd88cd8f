/* What one key adds to the divergence of two attention rows. Included by C and by CUDA sources. */
#ifndef KVC_DIVERGENCE_H
#define KVC_DIVERGENCE_H
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define KVC_DIVERGENCE_FN __device__ static inline
#else
#define KVC_DIVERGENCE_FN static inline
#endif
#define KVC_LEAST_NORMAL 1.17549435e-38f

/* 1 + log2(x) for normal x > 0, 0 for 0.5 exactly. x = 2^e * m, m in [sqrt(1/2), sqrt(2)); polynomial of Cephes' logf. */
KVC_DIVERGENCE_FN float kvc_one_plus_log2(float x) {
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
    return (float)(exponent + 1) + (f + (y * f * z - 0.5f * z)) * 1.44269504088896341f;
}

/* p*(1 + log2(p/(p+r))) + r*(1 + log2(r/(p+r))): twice what the key adds, in bits. 0*log 0 = 0; 0 for p = r exactly. */
KVC_DIVERGENCE_FN float kvc_divergence_term(float p, float r) {
    const float sum = p + r, whole = sum < KVC_LEAST_NORMAL ? KVC_LEAST_NORMAL : sum;
    const float a = p / whole, b = r / whole;
    const float term = p * kvc_one_plus_log2(a < KVC_LEAST_NORMAL ? KVC_LEAST_NORMAL : a) +
                       r * kvc_one_plus_log2(b < KVC_LEAST_NORMAL ? KVC_LEAST_NORMAL : b);
    return sum < KVC_LEAST_NORMAL ? 0.0f : term; /* the division would not be exact there */
}
#endif
