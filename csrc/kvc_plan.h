/* The plan of IMDC's chunks and memory: planner.c. */
#ifndef KVC_PLAN_H
#define KVC_PLAN_H
#include "kvc.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    KVC_SCHEDULE_FIXED = 0,
    KVC_SCHEDULE_LINEAR,
    KVC_SCHEDULE_SQUARE,
    KVC_SCHEDULE_SQRT,
    KVC_SCHEDULE_SQUARE_SQRT,
    KVC_SCHEDULE_ADAPTIVE
} kvc_schedule;

/* Iterations n = ceil(prompt_length / chunk_size); 0 for an empty prompt, -1 if a size is out of range. */
int64_t kvc_plan_iterations(int64_t prompt_length, int64_t chunk_size);

/* The chunk and memory plan of IMDC, integers only. With n iterations, m = memory_size, m_0 = initial_memory (-1: m/n
 * rounded, at least 1), g = m - m_0, a/b rounded half up:
 *   memory[j,i], scheduled memory of layer j after iteration i; m for n = 1, else by schedule
 *     FIXED m    LINEAR m_0 + g*i / (n-1)    SQUARE m_0 + g*i*i / (n-1)^2    SQRT m_0 + sqrt(g*g*i / (n-1))
 *     SQUARE_SQRT: layers j < L/2 SQUARE, the others SQRT, the middle one of an odd number LINEAR
 *     ADAPTIVE: LINEAR, the base that kvc_divide_memory divides in each iteration
 *   mean_memory[i], mean of memory[.,i] over the layers, rounded
 *   chunks[i], tokens read in iteration i, of sum prompt_length
 *     constant: chunk_size, the last takes what is left
 *     decremental: chunks[0] = prompt_length / n rounded up; chunks[i] + mean_memory[i-1] the same for all i >= 1, the
 *     first ones 1 more if it does not divide evenly. Those that would be below min_chunk (lowered to prompt_length / n)
 *     are set to it, and the rest is divided again without them: clamped[i] = 1, else 0
 *   stored[j,i] = min(memory[j,i], stored[j,i-1] + chunks[i]), what can really be held
 * chunks, mean_memory, clamped int64_t [n]; memory, stored int64_t [layers, n]. prompt_length 0: nothing is written.
 * chunk_size, memory_size, layers and min_chunk >= 1, initial_memory -1..memory_size, else KVC_BAD_SIZE; also where one
 * of these reaches 2^63: layers*m; with decremental chunks prompt_length + (n-1)*m; (2g + 1)*(n-1) in a LINEAR layer,
 * (2g + 1)*(n-1)^2 in a SQUARE layer, 4*g*g*(n-1) in a SQRT layer. Nothing is written on an error.
 * Source: IMDC ("Memorize Step by Step: Efficient Long-Context Prefilling with Incremental Memory and Decremental
 * Chunk"), eq 1, 5-9, section 3.4, A.1; the paper has no rule of rounding, the integers are ours.
 */
typedef struct {
    int64_t *chunks, *mean_memory, *clamped, *memory, *stored;
    int64_t prompt_length, chunk_size, memory_size, initial_memory, layers, min_chunk;
    kvc_schedule schedule;
    int decremental;
} kvc_plan_args;
kvc_status kvc_plan(const kvc_plan_args *args);

/* The ADAPTIVE sizes of one iteration: total tokens divided over the layers by their retention ratios
 * w_j = kept[j] / stored[j] of the iteration before (0 where stored is 0), within lowest[j] <= memory[j] <= highest[j].
 *   1. Of total, the sum of highest at most; if the sum of lowest is more than total, every lowest is 0.
 *   2. Shares total * w_j / sum of w; equal shares if all w_j are 0.
 *   3. If the shares above highest exceed it by at least as much in sum as those below lowest lack, the former are
 *      fixed at highest, else the latter at lowest; steps 2 and 3 again for what is left, until no bound is broken.
 *   4. Shares are rounded down; what is left goes one by one to the largest fractions, ties to the lower layer.
 * So memory sums to min(total, sum of highest). Weights are whole multiples of a unit 1/u, computed from the ratios'
 * values alone: u = the least common denominator of the ratios, and then the result is exact, if that is at most U, the
 * largest power of two up to 2^31 with layers * total * U < 2^63; else u = U, and weights are rounded half up.
 * memory, kept, stored, lowest, highest int64_t [layers], memory apart from the others.
 * KVC_BAD_INDEX unless 0 <= kept <= stored < 2^31 and 0 <= lowest <= highest; KVC_BAD_SIZE if layers or total is
 * negative or layers * total reaches 2^47. Nothing is written on an error.
 * Source: IMDC, eq 2, 3; the bounds and the rounding are ours.
 */
typedef struct {
    int64_t *memory;
    const int64_t *kept, *stored, *lowest, *highest;
    int64_t layers, total;
} kvc_divide_memory_args;
kvc_status kvc_divide_memory(const kvc_divide_memory_args *args);

#ifdef __cplusplus
}
#endif
#endif
