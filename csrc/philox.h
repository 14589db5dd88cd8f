/* Random numbers that are the same on every CPU and on CUDA: Philox 4x32-10 and the logistic noise made from it.
 *
 * Included by C and by CUDA sources. The arithmetic is single operations that round once each (no fused multiply-add), so
 * that the same counter gives the same bits everywhere.
 */
#ifndef KVC_PHILOX_H
#define KVC_PHILOX_H
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define KVC_PHILOX_FN __device__ static inline
KVC_PHILOX_FN float kvc_mul(float a, float b) { return __fmul_rn(a, b); }
KVC_PHILOX_FN float kvc_add(float a, float b) { return __fadd_rn(a, b); }
KVC_PHILOX_FN float kvc_div(float a, float b) { return __fdiv_rn(a, b); }
#else
#define KVC_PHILOX_FN static inline
KVC_PHILOX_FN float kvc_mul(float a, float b) { return a * b; }
KVC_PHILOX_FN float kvc_add(float a, float b) { return a + b; }
KVC_PHILOX_FN float kvc_div(float a, float b) { return a / b; }
#endif

/* First word of Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"). */
KVC_PHILOX_FN uint32_t kvc_philox(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint64_t key) {
    uint32_t low = (uint32_t)key, high = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t first = (uint64_t)a * 0xD2511F53u, second = (uint64_t)c * 0xCD9E8D57u;
        a = (uint32_t)(second >> 32) ^ b ^ low;
        b = (uint32_t)second;
        c = (uint32_t)(first >> 32) ^ d ^ high;
        d = (uint32_t)first;
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    return a;
}

/* ln(x) for normal x >= 1; polynomial of Cephes' logf, within 1 ulp or so. */
KVC_PHILOX_FN float kvc_log(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    /* x = m * 2^e with m in [sqrt(1/2), sqrt(2)) */
    const uint32_t shifted = bits - 0x3f3504f3u;
    const float e = (float)(int32_t)(shifted >> 23);
    bits = (shifted & 0x7fffffu) + 0x3f3504f3u;
    float m;
    memcpy(&m, &bits, sizeof m);
    m = kvc_add(m, -1.0f);
    const float square = kvc_mul(m, m);
    float p = 7.0376836292e-2f;
    p = kvc_add(kvc_mul(p, m), -1.1514610310e-1f);
    p = kvc_add(kvc_mul(p, m), 1.1676998740e-1f);
    p = kvc_add(kvc_mul(p, m), -1.2420140846e-1f);
    p = kvc_add(kvc_mul(p, m), 1.4249322787e-1f);
    p = kvc_add(kvc_mul(p, m), -1.6668057665e-1f);
    p = kvc_add(kvc_mul(p, m), 2.0000714765e-1f);
    p = kvc_add(kvc_mul(p, m), -2.4999993993e-1f);
    p = kvc_add(kvc_mul(p, m), 3.3333331174e-1f);
    p = kvc_mul(kvc_mul(p, m), square);
    p = kvc_add(p, kvc_mul(e, -2.12194440e-4f)); /* ln 2 in two parts: e times the first is exact */
    p = kvc_add(p, kvc_mul(square, -0.5f));
    return kvc_add(kvc_add(m, p), kvc_mul(e, 0.693359375f));
}

/* counter + i mod 2^32: counters may stand at the ends of their type. */
KVC_PHILOX_FN uint32_t kvc_counter(int64_t counter, int64_t i) { return (uint32_t)counter + (uint32_t)i; }

/* Logistic noise of one token: ln(m) - ln(2^24 - m) for odd m, as the logarithm of one correctly rounded quotient. */
KVC_PHILOX_FN float kvc_logistic(int64_t token, int64_t stream, int64_t sample, int64_t offset, int64_t seed) {
    const uint32_t word =
        kvc_philox((uint32_t)token, (uint32_t)stream, (uint32_t)sample, (uint32_t)offset, (uint64_t)seed);
    const uint32_t m = 2u * (word >> 9) + 1u, rest = (1u << 24) - m;
    const float size = kvc_log(m > rest ? kvc_div((float)m, (float)rest) : kvc_div((float)rest, (float)m));
    return m > rest ? size : -size;
}
#endif
