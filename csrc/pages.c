/* Rows of slots in pages that may be shared until written: append, truncate, keep chosen slots. */
#include "page_table.h"

#include <stddef.h>
#include <string.h>

enum { PARALLEL_BYTES = 1 << 16 }; /* least to move before a second thread is worth its start */

/* ---- slots of all arrays ----------------------------------------------------------------------------------------- */

static kvc_status check_arrays(const kvc_slot_array *arrays, int64_t count, int64_t pages, int tokens) {
    if (count < 0 || count > KVC_MAX_SLOT_ARRAYS) return KVC_BAD_SIZE;
    for (int64_t a = 0; a < count; a++) {
        if (arrays[a].slot_bytes < 0) return KVC_BAD_SIZE;
        if (arrays[a].slot_bytes && ((pages && !arrays[a].pages) || (tokens && !arrays[a].tokens))) {
            return KVC_NULL_POINTER;
        }
    }
    return KVC_OK;
}

static void give_up_blocks(const kvc_page_table *table, int64_t r, int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++) give_up_page(table, *entry(table, r, block));
}

static char *slot_at(const kvc_slot_array *array, int64_t P, int32_t page, int64_t place) {
    return (char *)array->pages + (page * P + place) * array->slot_bytes;
}

static int64_t slot_bytes(const kvc_slot_array *arrays, int64_t count) {
    int64_t bytes = 0;
    for (int64_t a = 0; a < count; a++) bytes += arrays[a].slot_bytes;
    return bytes;
}

/* ---- append ----------------------------------------------------------------------------------------------------- */

static int64_t count_of(const kvc_append_tokens_args *args, int64_t r) {
    return args->counts ? args->counts[r] : args->S;
}

/* Whether row r, of this length, would write to a page that others name too. */
static int writes_shared(const kvc_page_table *table, int64_t r, int64_t length, int64_t count) {
    return count > 0 && length % table->P != 0 && table->page_refs[*entry(table, r, length / table->P)] > 1;
}

/* Rows [begin, end), whose pages are there and whose lengths are the new ones. */
static void append_range(int64_t begin, int64_t end, void *context) {
    const kvc_append_tokens_args *args = context;
    const kvc_page_table *table = &args->table;
    for (int64_t r = begin; r < end; r++) {
        const int64_t count = count_of(args, r), start = table->lengths[r] - count, place = start % table->P;
        for (int64_t a = 0; count && a < args->array_count; a++) {
            const kvc_slot_array *array = &args->arrays[a];
            if (!array->slot_bytes) continue;
            if (args->scratch[r] >= 0) {
                memcpy(slot_at(array, table->P, *entry(table, r, start / table->P), 0),
                       slot_at(array, table->P, args->scratch[r], 0), (size_t)(place * array->slot_bytes));
            }
            const char *token = (const char *)array->tokens + r / args->heads * array->stride_b +
                                r % args->heads * array->stride_h + (args->S - count) * array->stride_s;
            for (int64_t t = start; t < table->lengths[r];) {
                const int32_t page = *entry(table, r, t / table->P);
                const int64_t run = min_of(table->P - t % table->P, table->lengths[r] - t);
                char *slot = slot_at(array, table->P, page, t % table->P);
                if (array->stride_s == array->slot_bytes) {
                    memcpy(slot, token, (size_t)(run * array->slot_bytes));
                } else {
                    for (int64_t i = 0; i < run; i++) {
                        memcpy(slot + i * array->slot_bytes, token + i * array->stride_s, (size_t)array->slot_bytes);
                    }
                }
                token += run * array->stride_s, t += run;
            }
        }
    }
}

kvc_status kvc_append_tokens_check(const kvc_append_tokens_args *args) {
    const kvc_page_table *table = &args->table;
    kvc_status status = check_table(table);
    if (status == KVC_OK) status = check_arrays(args->arrays, args->array_count, table->pages, args->S > 0);
    if (status != KVC_OK) return status;
    if (args->S < 0 || args->heads < 1 || table->R % args->heads) return KVC_BAD_SIZE;
    if (!table->R || !args->S) return KVC_OK;
    if (!args->scratch) return KVC_NULL_POINTER;
    int64_t needed = 0;
    for (int64_t r = 0; r < table->R; r++) {
        const int64_t length = table->lengths[r], count = count_of(args, r);
        if (count < 0 || count > args->S || length + count > table->blocks * table->P) return KVC_BAD_INDEX;
        if (length % table->P && !page_exists(table, *entry(table, r, length / table->P))) return KVC_BAD_INDEX;
        needed += blocks_of(table, length + count) - blocks_of(table, length) + writes_shared(table, r, length, count);
    }
    return check_free(table, needed);
}

kvc_status kvc_append_tokens(const kvc_append_tokens_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    const kvc_page_table *table = &args->table;
    const kvc_status status = kvc_append_tokens_check(args);
    if (status != KVC_OK || !table->R || !args->S) return status;

    for (int64_t r = 0; r < table->R; r++) {
        const int64_t length = table->lengths[r], count = count_of(args, r);
        args->scratch[r] = -1; /* the page whose slots the row copies */
        if (writes_shared(table, r, length, count)) {
            int32_t *last = entry(table, r, length / table->P);
            args->scratch[r] = *last;
            *last = take_page(table);
        }
        for (int64_t block = blocks_of(table, length); block < blocks_of(table, length + count); block++) {
            *entry(table, r, block) = take_page(table);
        }
        table->lengths[r] = (int32_t)(length + count);
    }
    const int64_t bytes = args->S * slot_bytes(args->arrays, args->array_count);
    const int64_t grain = max_of(1, PARALLEL_BYTES / max_of(1, bytes));
    run_parallel(parallel_for, table->R, grain, append_range, (void *)(uintptr_t)args);
    for (int64_t r = 0; r < table->R; r++) {
        if (args->scratch[r] >= 0) give_up_page(table, args->scratch[r]);
    }
    return KVC_OK;
}

/* ---- truncate --------------------------------------------------------------------------------------------------- */

kvc_status kvc_truncate_rows(const kvc_truncate_rows_args *args) {
    if (!args) return KVC_NULL_POINTER;
    const kvc_page_table *table = &args->table;
    const kvc_status status = check_table(table);
    if (status != KVC_OK || !table->R) return status;
    if (!args->new_lengths) return KVC_NULL_POINTER;
    for (int64_t r = 0; r < table->R; r++) {
        if (args->new_lengths[r] < 0 || args->new_lengths[r] > table->lengths[r]) return KVC_BAD_INDEX;
        const int64_t end = blocks_of(table, table->lengths[r]);
        for (int64_t block = blocks_of(table, args->new_lengths[r]); block < end; block++) {
            if (!page_exists(table, *entry(table, r, block))) return KVC_BAD_INDEX;
        }
    }
    for (int64_t r = 0; r < table->R; r++) {
        give_up_blocks(table, r, blocks_of(table, args->new_lengths[r]), blocks_of(table, table->lengths[r]));
        table->lengths[r] = args->new_lengths[r];
    }
    return KVC_OK;
}

/* ---- compaction ------------------------------------------------------------------------------------------------- */

/* Slots that row r keeps of those that may move; negative: it is left as it is. */
static int64_t kept_of(const kvc_compact_pages_args *args, int64_t r) {
    return args->kept ? args->kept[r] : args->K;
}

/* Whether any slot of this block of the row changes: indices rise, so the last one tells for all. */
static int block_moves(const kvc_compact_pages_args *args, int64_t r, int64_t block) {
    const int64_t last = min_of((block + 1) * args->table.P, kept_of(args, r)) - 1;
    return args->indices[r * args->K + last] != last;
}

/* Moves the slots of rows [begin, end); scratch holds the page that each block is written to. */
static void compact_range(int64_t begin, int64_t end, void *context) {
    const kvc_compact_pages_args *args = context;
    const kvc_page_table *table = &args->table;
    const int64_t P = table->P;
    for (int64_t r = begin; r < end; r++) {
        const int32_t *indices = args->indices + r * args->K, *pages = args->scratch + r * table->blocks;
        const int64_t kept = kept_of(args, r);
        for (int64_t j = 0; j < kept;) {
            if (!block_moves(args, r, j / P)) {
                j = (j / P + 1) * P;
                continue;
            }
            const int64_t from = indices[j], room = P - max_of(j % P, from % P);
            int64_t run = 1;
            while (run < room && j + run < kept && indices[j + run] == from + run) run++;
            for (int64_t a = 0; a < args->array_count; a++) {
                const kvc_slot_array *array = &args->arrays[a];
                if (!array->slot_bytes) continue;
                char *to = slot_at(array, P, pages[j / P], j % P);
                const char *source = slot_at(array, P, *entry(table, r, from / P), from % P);
                if (to != source) memmove(to, source, (size_t)(run * array->slot_bytes));
            }
            j += run;
        }
    }
}

kvc_status kvc_compact_pages(const kvc_compact_pages_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    const kvc_page_table *table = &args->table;
    kvc_status status = check_table(table);
    if (status == KVC_OK) status = check_arrays(args->arrays, args->array_count, table->pages, 0);
    if (status != KVC_OK) return status;
    if (args->K < 0) return KVC_BAD_SIZE;
    if (!table->R) return KVC_OK;
    if (!args->scratch || (args->K && !args->indices)) return KVC_NULL_POINTER;
    int64_t needed = 0;
    for (int64_t r = 0; r < table->R; r++) {
        const int64_t kept = kept_of(args, r), blocks = blocks_of(table, table->lengths[r]);
        if (kept > args->K) return KVC_BAD_INDEX;
        for (int64_t j = 0, last = -1; j < kept; last = args->indices[r * args->K + j++]) {
            const int64_t index = args->indices[r * args->K + j];
            if (index <= last || index >= table->lengths[r]) return KVC_BAD_INDEX;
        }
        for (int64_t block = 0; kept >= 0 && block < blocks; block++) {
            const int32_t page = *entry(table, r, block);
            if (!page_exists(table, page)) return KVC_BAD_INDEX;
            needed += block < blocks_of(table, kept) && table->page_refs[page] > 1 && block_moves(args, r, block);
        }
    }
    status = check_free(table, needed);
    if (status != KVC_OK) return status;

    for (int64_t r = 0; r < table->R; r++) {
        const int64_t kept = kept_of(args, r);
        for (int64_t block = 0; block * table->P < kept; block++) {
            const int32_t page = *entry(table, r, block);
            const int fresh = table->page_refs[page] > 1 && block_moves(args, r, block);
            args->scratch[r * table->blocks + block] = fresh ? take_page(table) : page;
        }
    }
    const int64_t bytes = args->K * slot_bytes(args->arrays, args->array_count);
    const int64_t grain = max_of(1, PARALLEL_BYTES / max_of(1, bytes));
    run_parallel(parallel_for, table->R, grain, compact_range, (void *)(uintptr_t)args);
    for (int64_t r = 0; r < table->R; r++) {
        const int64_t kept = kept_of(args, r);
        if (kept < 0) continue;
        for (int64_t block = 0; block * table->P < kept; block++) {
            const int32_t page = *entry(table, r, block), now = args->scratch[r * table->blocks + block];
            if (page == now) continue;
            give_up_page(table, page);
            *entry(table, r, block) = now;
        }
        give_up_blocks(table, r, blocks_of(table, kept), blocks_of(table, table->lengths[r]));
        table->lengths[r] = (int32_t)kept;
    }
    return KVC_OK;
}
