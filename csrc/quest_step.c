/* One decoded step whose query reads only the pages that may matter to it: rotate, append, choose and attend in one call.
 *
 * Bytes: the ranges of every page once, 2/P of the keys and values of the context, and the keys and values of those that
 * are chosen. Pages are scored in stretches of AT_ONCE, one work item each, so that threads get equal shares of a long row.
 */
#include "paged_step.h"
#include "quest_step.h"
#include "select.h"

enum {
    FEW = 8,      /* query heads that are multiplied at once */
    AT_ONCE = 128 /* pages */
};

typedef struct {
    const kvc_quest_step_args *args;
    const kvc_simd *simd;
    kvc_view q;          /* rotated */
    kvc_placing placing;
    float *scores;       /* [R, blocks] */
    int32_t *table, *end; /* [R, width] pages that are read; [R] slots in them */
    int64_t width, bytes;
} quest_job;

static quest_job job_of(const kvc_quest_step_args *args) {
    const kvc_step *step = &args->step;
    const int64_t R = step->table.R;
    quest_job job = {.args = args, .simd = kvc_simd_table(), .q = step->q, .width = kvc_quest_width(args)};
    job.placing = kvc_placing_of(step, &job.bytes);
    job.scores = kvc_part_of(step->scratch, &job.bytes, R * step->table.blocks * (int64_t)sizeof(float));
    job.table = kvc_ints_of(step->scratch, &job.bytes, R * job.width);
    job.end = kvc_ints_of(step->scratch, &job.bytes, R);
    return job;
}

int64_t kvc_quest_step_scratch_bytes(const kvc_quest_step_args *args) {
    if (!args || !kvc_step_is_sized(&args->step, kvc_quest_check(args))) return 0;
    quest_job job = job_of(args);
    const kvc_decode_args decode = kvc_quest_decode(args, NULL, job.table, job.end);
    kvc_part_of(NULL, &job.bytes, kvc_decode_scratch_bytes(&decode));
    return job.bytes;
}

/* Where page i of row r has its range, [2*D]. */
static char *range_at(const kvc_quest_step_args *args, int64_t r, int64_t i) {
    const int64_t bytes = 2 * args->step.D * kvc_dtype_bytes(args->step.k.dtype);
    return (char *)args->ranges + (r * args->range_pages + i) * bytes;
}

/* ---- scores ---- */

/* max(q, 0) and max(-q, 0) of query heads [first, first + count) of a row; NaN stays. */
static void split_queries(const quest_job *job, int64_t r, int64_t first, int64_t count, float *halves) {
    const kvc_step *step = &job->args->step;
    const int64_t D = step->D, G = step->Hq / step->Hkv, h = r % step->Hkv * G + first;
    for (int64_t i = 0; i < count; i++, halves += 2 * D) {
        job->simd->load[job->q.dtype](halves, view_at(&job->q, r / step->Hkv, h + i, 0, 0), D);
        for (int64_t d = 0; d < D; d++) {
            const float x = halves[d];
            halves[d] = x < 0.0f ? 0.0f : x;
            halves[D + d] = x > 0.0f ? 0.0f : -x;
        }
    }
}

/* Of the pages before the newest one, of rows that leave some out. */
static void score_range(int64_t begin, int64_t end, void *context) {
    const quest_job *job = context;
    const kvc_step *step = &job->args->step;
    const kvc_page_table *table = &step->table;
    const int64_t D = step->D, G = step->Hq / step->Hkv, stretches = ceil_div(table->blocks, AT_ONCE);
    for (int64_t item = begin; item < end; item++) {
        const int64_t r = item / stretches, first = item % stretches * AT_ONCE, held = blocks_of(table, table->lengths[r]);
        const int64_t pages = min_of(held - 1 - first, AT_ONCE);
        if (held <= job->width || pages <= 0) continue;
        _Alignas(64) float halves[FEW * 2 * KVC_MAX_HEAD_DIM], products[FEW * AT_ONCE];
        float *scores = job->scores + r * table->blocks + first;
        for (int64_t j = 0; j < pages; j++) scores[j] = -INFINITY;
        for (int64_t g = 0; g < G; g += FEW) {
            const int64_t count = min_of(FEW, G - g);
            split_queries(job, r, g, count, halves);
            job->simd->dots[step->k.dtype](products, AT_ONCE, halves, 2 * D, range_at(job->args, r, first), pages, count,
                                           NULL);
            for (int64_t i = 0; i < count; i++) {
                for (int64_t j = 0; j < pages; j++) {
                    const float x = products[i * AT_ONCE + j];
                    /* a page that holds NaN is read, as dense attention would */
                    scores[j] = x != x ? INFINITY : x > scores[j] ? x : scores[j];
                }
            }
        }
    }
}

/* ---- rows ---- */

/* Joins the range of a row's newest page with the new key. */
static void note_key(const quest_job *job, int64_t r) {
    const kvc_step *step = &job->args->step;
    const kvc_page_table *table = &step->table;
    const kvc_dtype dtype = step->k.dtype;
    const int64_t D = step->D, slot = table->lengths[r] - 1, page = slot / table->P;
    char *range = range_at(job->args, r, page);
    float key[2 * KVC_MAX_HEAD_DIM], most[2 * KVC_MAX_HEAD_DIM];
    load_key(job->simd, key, &step->rows, *entry(table, r, page) * table->P + slot % table->P, D);
    for (int64_t d = 0; d < D; d++) key[D + d] = -key[d];
    if (slot % table->P) {
        job->simd->load[dtype](most, range, 2 * D);
        for (int64_t d = 0; d < 2 * D; d++) key[d] = most[d] >= key[d] || most[d] != most[d] ? most[d] : key[d];
    }
    job->simd->store[dtype](range, key, 2 * D);
}

static void rows_range(int64_t begin, int64_t end, void *context) {
    const quest_job *job = context;
    const kvc_page_table *table = &job->args->step.table;
    for (int64_t r = begin; r < end; r++) {
        if (!job->args->held) note_key(job, r);
        const int64_t held = blocks_of(table, table->lengths[r]), count = min_of(job->width, held);
        int32_t *chosen = job->args->chosen + r * job->width, *pages = job->table + r * job->width;
        for (int64_t i = 0; i < job->width; i++) chosen[i] = i < count ? (int32_t)i : -1;
        if (held > count) {
            kvc_select_row(chosen, job->scores + r * table->blocks, held - 1, count - 1);
            chosen[count - 1] = (int32_t)(held - 1);
        }
        for (int64_t i = 0; i < job->width; i++) pages[i] = i < count ? *entry(table, r, chosen[i]) : -1;
        /* the newest page comes last and is the only one that is not full */
        job->end[r] = (int32_t)(table->lengths[r] - (held - count) * table->P);
    }
}

kvc_status kvc_quest_step(const kvc_quest_step_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    const kvc_step *step = &args->step;
    kvc_status status = kvc_quest_check(args);
    if (status != KVC_OK || kvc_step_is_empty(step)) return status;
    quest_job job = job_of(args);
    status = check_pages(&step->table, NULL); /* any of them may be chosen once rows and ranges have changed */
    if (status == KVC_OK && !args->held) status = kvc_place_tokens(step, NULL, &job.placing, &job.q, parallel_for);
    if (status != KVC_OK) return status;
    const kvc_page_table *table = &step->table;
    int64_t longest = 0;
    for (int64_t r = 0; r < table->R; r++) longest = max_of(longest, blocks_of(table, table->lengths[r]));
    if (longest > job.width) {
        const int64_t stretches = table->R * ceil_div(table->blocks, AT_ONCE);
        const int64_t work = 2 * longest * step->B * step->Hq * step->D;
        run_parallel(parallel_for, stretches, grain_of(stretches, work), score_range, &job);
    }
    run_parallel(parallel_for, table->R, grain_of(table->R, 32 * longest * table->R), rows_range, &job);
    kvc_decode_args decode = kvc_quest_decode(args, NULL, job.table, job.end);
    decode.q = job.q;
    decode.scratch = kvc_part_of(step->scratch, &job.bytes, kvc_decode_scratch_bytes(&decode));
    return kvc_decode(&decode, parallel_for);
}
