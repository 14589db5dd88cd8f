/* Memory schedules and chunk plan of IMDC ("Memorize Step by Step"), integers only. */
#include "kvc.h"

int64_t kvc_plan_iterations(int64_t prompt_length, int64_t chunk_size) {
    if (prompt_length < 0 || chunk_size < 1) return -1;
    return prompt_length / chunk_size + (prompt_length % chunk_size != 0);
}

/* FIXED: every memory is memory_size and every chunk chunk_size but the last, which takes what is left (the paper's FM,
 * constant chunks; a prompt of unknown length can be read so). */
kvc_status kvc_plan(const kvc_plan_args *args) {
    if (!args) return KVC_NULL_POINTER;
    const int64_t n = kvc_plan_iterations(args->prompt_length, args->chunk_size);
    if (n < 0 || args->memory_size < 1 || args->initial_memory < -1 || args->initial_memory > args->memory_size) {
        return KVC_BAD_SIZE;
    }
    if (args->schedule != KVC_SCHEDULE_FIXED) return KVC_BAD_SCHEDULE;
    if (n == 0) return KVC_OK;
    if (!args->chunks || !args->memory || !args->stored) return KVC_NULL_POINTER;
    int64_t stored = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t chunk = i < n - 1 ? args->chunk_size : args->prompt_length - (n - 1) * args->chunk_size;
        /* compared as a difference: the sum could overflow */
        stored = chunk < args->memory_size - stored ? stored + chunk : args->memory_size;
        args->chunks[i] = chunk;
        args->memory[i] = args->memory_size;
        args->stored[i] = stored;
    }
    return KVC_OK;
}
