/* Which keys stay: top-k of each row's scores. */
#include "select.h"

#include <stddef.h>
#include <string.h>

/* ---- top-k ------------------------------------------------------------------------------------------------------ */

enum { WIDEST = 11 }; /* bits of a key per pass: 11, 11, 10; the counts fit the first-level cache */

/* A score as an unsigned integer of the same order; NaN is 0, below -inf (0x007fffff). Adding 0 makes -0 equal +0. */
static inline uint32_t key_of(float score) {
    const float value = score + 0.0f;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t mask = (uint32_t)-(int32_t)(bits >> 31) | 0x80000000u;
    return value != value ? 0u : bits ^ mask;
}

/* Among the keys that agree with prefix above bits [shift, shift + width): finds the value of those bits at which the
 * keys with a higher or equal value reach *places, adds it to prefix, and leaves in *places what it must give. */
static uint32_t descend(const float *scores, int64_t length, uint32_t prefix, int shift, int width, int64_t *places) {
    const uint32_t last = (1u << width) - 1u;
    int32_t counts[1 << WIDEST] = {0};
    for (int64_t t = 0; t < length; t++) {
        const uint32_t key = key_of(scores[t]);
        /* two shifts, since one by 32 is undefined */
        if (((key ^ prefix) >> shift) >> width == 0) counts[(key >> shift) & last]++;
    }
    uint32_t bin = last;
    while (bin > 0 && counts[bin] < *places) *places -= counts[bin--];
    return prefix | bin << shift;
}

/* Radix select from the top bits down: no sort, three passes of counting and one that writes the places in order. */
void kvc_select_row(int32_t *indices, const float *scores, int64_t length, int64_t k) {
    int64_t ties = k;
    uint32_t threshold = descend(scores, length, 0, 21, 11, &ties);
    threshold = descend(scores, length, threshold, 10, 11, &ties);
    threshold = descend(scores, length, threshold, 0, 10, &ties);
    if (threshold == 0) ties = 0; /* fewer than k that are not NaN: take them all */
    int64_t count = 0;
    for (int64_t t = 0; t < length && count < k; t++) {
        const uint32_t key = key_of(scores[t]);
        const int tie = key == threshold && ties > 0;
        ties -= tie;
        indices[count] = (int32_t)t;
        count += (key > threshold) | tie;
    }
    for (; count < k; count++) indices[count] = -1;
}

static void select_range(int64_t begin, int64_t end, void *context) {
    const kvc_select_topk_args *args = context;
    for (int64_t r = begin; r < end; r++) {
        const int64_t length = args->lengths ? args->lengths[r] : args->T;
        kvc_select_row(args->indices + r * args->k, args->scores + r * args->T, length, args->k);
    }
}

kvc_status kvc_select_topk(const kvc_select_topk_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    if (args->R < 0 || args->T < 0 || args->T > INT32_MAX || args->k < 0 || args->k > args->T) return KVC_BAD_SIZE;
    if (!args->R || !args->k) return KVC_OK;
    if (!args->indices || !args->scores) return KVC_NULL_POINTER;
    for (int64_t r = 0; args->lengths && r < args->R; r++) {
        if (args->lengths[r] < args->k || args->lengths[r] > args->T) return KVC_BAD_INDEX;
    }
    run_parallel(parallel_for, args->R, 1, select_range, (void *)(uintptr_t)args);
    for (int64_t r = 0; r < args->R; r++) {
        if (args->indices[r * args->k + args->k - 1] < 0) return KVC_TOO_FEW_SCORES;
    }
    return KVC_OK;
}
