/* Divergence of attention rows: plain C that each table's file compiles for its instruction set.
 *
 * No function on vec is needed, and every table gives the same bits.
 */
#ifndef KVC_SIMD_DIVERGENCE_H
#define KVC_SIMD_DIVERGENCE_H
#include "divergence.h"
#include "simd.h"

enum { DIVERGENCE_LANES = 16 };

static void divergence(double *sums, const float *p, const float *r, int64_t rows) {
    for (int64_t i = 0; i < rows; i++, r += KVC_TILE) {
        float lanes[DIVERGENCE_LANES] = {0};
        for (int t = 0; t < KVC_TILE; t += DIVERGENCE_LANES) {
            for (int j = 0; j < DIVERGENCE_LANES; j++) lanes[j] += kvc_divergence_term(p[t + j], r[t + j]);
        }
        for (int step = DIVERGENCE_LANES / 2; step > 0; step /= 2) {
            for (int j = 0; j < step; j++) lanes[j] += lanes[j + step];
        }
        sums[i] += 0.5 * (double)lanes[0];
    }
}
#endif
