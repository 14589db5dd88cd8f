/* Memory schedules, chunk plan and adaptive division of IMDC ("Memorize Step by Step"), integers only. */
#include "kvc.h"

#define LIMIT ((uint64_t)1 << 63) /* no product may reach it */

enum { LARGEST_UNIT = 31, SMALLEST_UNIT = 16 }; /* powers of two in which kvc_divide_memory may count weights */

/* a*b, LIMIT where it reaches that. */
static uint64_t product(uint64_t a, uint64_t b) {
    return a && b > (LIMIT - 1) / a ? LIMIT : a * b;
}

/* a/b rounded, halves up; a >= 0, b >= 1. */
static int64_t rounded(int64_t a, int64_t b) {
    return a / b + (a % b >= b - a % b);
}

/* Largest r with r*r <= x; x >= 0. */
static int64_t root(int64_t x) {
    int64_t r = 0;
    for (int64_t bit = (int64_t)1 << 31; bit; bit >>= 1) {
        if (r + bit <= x / (r + bit)) r += bit;
    }
    return r;
}

static int64_t greatest_divisor(int64_t a, int64_t b) {
    while (b) {
        const int64_t rest = a % b;
        a = b, b = rest;
    }
    return a;
}

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

int64_t kvc_plan_iterations(int64_t prompt_length, int64_t chunk_size) {
    if (prompt_length < 0 || chunk_size < 1) return -1;
    return prompt_length / chunk_size + (prompt_length % chunk_size != 0);
}

/* Low layers grow late, high layers early; a middle one between them, so that the mean stays LINEAR's. */
static kvc_schedule layer_schedule(const kvc_plan_args *args, int64_t j) {
    if (args->schedule == KVC_SCHEDULE_ADAPTIVE) return KVC_SCHEDULE_LINEAR;
    if (args->schedule != KVC_SCHEDULE_SQUARE_SQRT) return args->schedule;
    if (j < args->layers / 2) return KVC_SCHEDULE_SQUARE;
    return args->layers % 2 && j == args->layers / 2 ? KVC_SCHEDULE_LINEAR : KVC_SCHEDULE_SQRT;
}

/* Whether all that scheduled() multiplies for i <= last stays below LIMIT. */
static int schedule_fits(kvc_schedule schedule, int64_t growth, int64_t last) {
    const uint64_t g = (uint64_t)growth, steps = (uint64_t)last;
    if (schedule == KVC_SCHEDULE_FIXED || last == 0) return 1;
    if (schedule == KVC_SCHEDULE_SQRT) return product(product(product(4, g), g), steps) < LIMIT;
    return product(2 * g + 1, schedule == KVC_SCHEDULE_SQUARE ? product(steps, steps) : steps) < LIMIT;
}

/* Memory after iteration i of 0..last by one layer's rule: from `first` to `first + growth`. */
static int64_t scheduled(kvc_schedule schedule, int64_t first, int64_t growth, int64_t i, int64_t last) {
    if (schedule == KVC_SCHEDULE_FIXED || last == 0) return first + growth;
    if (schedule == KVC_SCHEDULE_SQUARE) return first + rounded(growth * i * i, last * last);
    if (schedule == KVC_SCHEDULE_SQRT) return first + (root(4 * growth * growth * i / last) + 1) / 2;
    return first + rounded(growth * i, last);
}

static void constant_chunks(const kvc_plan_args *args, int64_t n) {
    for (int64_t i = 0; i < n - 1; i++) args->chunks[i] = args->chunk_size;
    args->chunks[n - 1] = args->prompt_length - (n - 1) * args->chunk_size;
}

/* chunks[i] + mean_memory[i-1] is the same number (`level`) or one more for all i >= 1 but the clamped ones. Memory does
 * not fall, so chunks do not rise, and the clamped ones are the last. */
static void decremental_chunks(const kvc_plan_args *args, int64_t n) {
    const int64_t shortest = args->prompt_length / n, least = smaller(args->min_chunk, shortest);
    int64_t end = n, before = 0, level = 0, larger = 0;
    args->chunks[0] = shortest + (args->prompt_length % n != 0);
    int64_t sum = args->prompt_length - args->chunks[0];
    for (int64_t i = 1; i < n; i++) sum += args->mean_memory[i - 1];
    while (end > 1 && before != end) {
        before = end, level = sum / (end - 1), larger = sum % (end - 1);
        for (; level + (end - 1 <= larger) - args->mean_memory[end - 2] < least; end--) {
            args->chunks[end - 1] = least;
            args->clamped[end - 1] = 1;
            sum -= least + args->mean_memory[end - 2];
        }
    }
    for (int64_t i = 1; i < end; i++) args->chunks[i] = level + (i <= larger) - args->mean_memory[i - 1];
}

kvc_status kvc_plan(const kvc_plan_args *args) {
    if (!args) return KVC_NULL_POINTER;
    const int64_t n = kvc_plan_iterations(args->prompt_length, args->chunk_size), m_max = args->memory_size;
    const int64_t L = args->layers;
    if (n < 0 || m_max < 1 || args->initial_memory < -1 || args->initial_memory > m_max || L < 1 ||
        args->min_chunk < 1 || product((uint64_t)L, (uint64_t)m_max) >= LIMIT) {
        return KVC_BAD_SIZE;
    }
    if ((unsigned)args->schedule > KVC_SCHEDULE_ADAPTIVE) return KVC_BAD_SCHEDULE;
    if (n == 0) return KVC_OK;
    const int64_t smallest = rounded(m_max, n) ? rounded(m_max, n) : 1; /* at most m_max, which is at least 1 */
    const int64_t m_0 = args->initial_memory < 0 ? smallest : args->initial_memory;
    if (args->decremental && product((uint64_t)(n - 1), (uint64_t)m_max) >= LIMIT - (uint64_t)args->prompt_length) {
        return KVC_BAD_SIZE;
    }
    const int64_t middle = L / 2; /* layers 0, L/2 and L-1 have all the rules that there are */
    if (!schedule_fits(layer_schedule(args, 0), m_max - m_0, n - 1) ||
        !schedule_fits(layer_schedule(args, middle), m_max - m_0, n - 1) ||
        !schedule_fits(layer_schedule(args, L - 1), m_max - m_0, n - 1)) {
        return KVC_BAD_SIZE;
    }
    if (!args->chunks || !args->mean_memory || !args->clamped || !args->memory || !args->stored) {
        return KVC_NULL_POINTER;
    }
    for (int64_t i = 0; i < n; i++) args->mean_memory[i] = args->clamped[i] = 0;
    for (int64_t j = 0; j < L; j++) {
        const kvc_schedule schedule = layer_schedule(args, j);
        for (int64_t i = 0; i < n; i++) {
            args->memory[j * n + i] = scheduled(schedule, m_0, m_max - m_0, i, n - 1);
            args->mean_memory[i] += args->memory[j * n + i];
        }
    }
    for (int64_t i = 0; i < n; i++) args->mean_memory[i] = rounded(args->mean_memory[i], L);
    if (args->decremental) decremental_chunks(args, n);
    else constant_chunks(args, n);
    for (int64_t j = 0; j < L; j++) {
        int64_t stored = 0;
        for (int64_t i = 0; i < n; i++) {
            const int64_t memory = args->memory[j * n + i]; /* compared as a difference: the sum could overflow */
            stored = args->chunks[i] < memory - stored ? stored + args->chunks[i] : memory;
            args->stored[j * n + i] = stored;
        }
    }
    return KVC_OK;
}

/* Bits of the unit that weights are counted in, such that no product of kvc_divide_memory reaches LIMIT; less than
 * SMALLEST_UNIT if there is none. */
static int unit_bits(int64_t layers, int64_t total) {
    const uint64_t count = product((uint64_t)layers, (uint64_t)(total ? total : 1));
    int bits = LARGEST_UNIT;
    while (bits >= SMALLEST_UNIT && product(count, (uint64_t)1 << bits) >= LIMIT) bits--;
    return bits;
}

/* What one unit of weight is divided into: the common denominator of the ratios if it is not above `most`, else `most`. */
static int64_t weight_unit(const kvc_divide_memory_args *args, int64_t most) {
    int64_t common = 1;
    for (int64_t j = 0; j < args->layers; j++) {
        if (!args->stored[j]) continue;
        const int64_t denominator = args->stored[j] / greatest_divisor(args->stored[j], args->kept[j]);
        common *= denominator / greatest_divisor(common, denominator);
        if (common > most) return most;
    }
    return common;
}

/* While sizes are sought, size[j] is the weight of an open layer or, negative, -1 - memory of a settled one. An open
 * layer's share is rest * size[j] / weights; comparisons are between whole numbers, both sides times `weights`. */
typedef struct {
    int64_t *size, layers, rest, weights;
} division;

static void weigh(division *all) {
    int64_t open = 0;
    all->weights = 0;
    for (int64_t j = 0; j < all->layers; j++) {
        if (all->size[j] >= 0) open++, all->weights += all->size[j];
    }
    if (all->weights) return;
    all->weights = open;
    for (int64_t j = 0; j < all->layers; j++) {
        if (all->size[j] >= 0) all->size[j] = 1;
    }
}

/* Settles the open layers that lie outside their bounds on the side where more is missing or too much; 0 if none do. */
static int settle(const kvc_divide_memory_args *args, int no_lowest, division *all) {
    int64_t excess = 0, lack = 0, settled = 0;
    for (int pass = 0; pass < 2; pass++) {
        if (pass && !excess && !lack) return 0;
        for (int64_t j = 0; j < all->layers; j++) {
            if (all->size[j] < 0) continue;
            const int64_t low = no_lowest ? 0 : args->lowest[j], high = smaller(args->highest[j], args->total);
            const int64_t share = all->rest * all->size[j];
            const int64_t above = share - high * all->weights, below = low * all->weights - share;
            if (!pass) {
                excess += above > 0 ? above : 0;
                lack += below > 0 ? below : 0;
            } else if (excess >= lack ? above > 0 : below > 0) {
                all->size[j] = -1 - (excess >= lack ? high : low);
                settled += excess >= lack ? high : low;
            }
        }
    }
    all->rest -= settled;
    return 1;
}

/* Every open layer gets its share rounded down; what is left goes one by one to the largest fractions. */
static void round_shares(division *all) {
    int64_t left = all->rest;
    for (int64_t j = 0; j < all->layers; j++) {
        if (all->size[j] >= 0) left -= all->rest * all->size[j] / all->weights;
    }
    for (; left > 0; left--) {
        int64_t best = -1, largest = -1;
        for (int64_t j = 0; j < all->layers; j++) {
            const int64_t fraction = all->size[j] < 0 ? -1 : all->rest * all->size[j] % all->weights;
            if (fraction > largest) best = j, largest = fraction;
        }
        all->size[best] = -2 - all->rest * all->size[best] / all->weights;
    }
    for (int64_t j = 0; j < all->layers; j++) {
        all->size[j] = all->size[j] < 0 ? -1 - all->size[j] : all->rest * all->size[j] / all->weights;
    }
}

kvc_status kvc_divide_memory(const kvc_divide_memory_args *args) {
    if (!args) return KVC_NULL_POINTER;
    const int64_t L = args->layers, total = args->total;
    if (L < 0 || total < 0) return KVC_BAD_SIZE;
    if (L == 0) return KVC_OK;
    const int bits = unit_bits(L, total);
    if (bits < SMALLEST_UNIT) return KVC_BAD_SIZE;
    if (!args->memory || !args->kept || !args->stored || !args->lowest || !args->highest) return KVC_NULL_POINTER;
    int64_t lowest = 0, highest = 0; /* sums, as far as it matters where total lies */
    for (int64_t j = 0; j < L; j++) {
        if (args->kept[j] < 0 || args->kept[j] > args->stored[j] || args->stored[j] > INT32_MAX ||
            args->lowest[j] < 0 || args->lowest[j] > args->highest[j]) {
            return KVC_BAD_INDEX;
        }
        lowest += smaller(args->lowest[j], total + 1);
        highest += smaller(args->highest[j], total);
    }
    division all = {.size = args->memory, .layers = L, .rest = smaller(total, highest)};
    const int64_t unit = weight_unit(args, (int64_t)1 << bits);
    for (int64_t j = 0; j < L; j++) all.size[j] = args->stored[j] ? rounded(args->kept[j] * unit, args->stored[j]) : 0;
    do weigh(&all);
    while (settle(args, lowest > total, &all));
    round_shares(&all);
    return KVC_OK;
}
