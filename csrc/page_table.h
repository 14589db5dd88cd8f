/* The table of pages (kvc_page_table): what every function that appends to rows needs. */
#ifndef KVC_PAGE_TABLE_H
#define KVC_PAGE_TABLE_H
#include "kernel.h"

static inline kvc_status check_table(const kvc_page_table *table) {
    if (!table_sizes_are_good(table)) return KVC_BAD_SIZE;
    if (!table_is_there(table)) return KVC_NULL_POINTER;
    if (!table->R) return KVC_OK;
    if (table->free_count[0] < 0 || table->free_count[0] > table->pages) return KVC_BAD_INDEX;
    for (int64_t r = 0; r < table->R; r++) {
        if (table->lengths[r] < 0 || table->lengths[r] > table->blocks * table->P) return KVC_BAD_INDEX;
    }
    return KVC_OK;
}

static inline int page_exists(const kvc_page_table *table, int32_t page) {
    return page >= 0 && page < table->pages;
}

/* Pages that hold `length` slots. */
static inline int64_t blocks_of(const kvc_page_table *table, int64_t length) {
    return ceil_div(length, table->P);
}

static inline int32_t *entry(const kvc_page_table *table, int64_t r, int64_t block) {
    return table->block_table + r * table->blocks + block;
}

/* check_table, and whether the slots of every row from first[r] (NULL: 0) on lie in pages that exist. */
static inline kvc_status check_pages(const kvc_page_table *table, const int32_t *first) {
    const kvc_status status = check_table(table);
    for (int64_t r = 0; status == KVC_OK && r < table->R; r++) {
        for (int64_t block = first ? first[r] / table->P : 0; block < blocks_of(table, table->lengths[r]); block++) {
            if (!page_exists(table, *entry(table, r, block))) return KVC_BAD_INDEX;
        }
    }
    return status;
}

/* Whether `count` pages can be taken. */
static inline kvc_status check_free(const kvc_page_table *table, int64_t count) {
    const int64_t held = table->free_count[0];
    if (count > held) return KVC_POOL_FULL;
    for (int64_t i = held - count; i < held; i++) {
        if (!page_exists(table, table->free_pages[i])) return KVC_BAD_INDEX;
    }
    return KVC_OK;
}

static inline int32_t take_page(const kvc_page_table *table) {
    const int32_t page = table->free_pages[--table->free_count[0]];
    table->page_refs[page] = 1;
    return page;
}

static inline void give_up_page(const kvc_page_table *table, int32_t page) {
    if (table->page_refs[page] < 1) return; /* damaged: a page that is named has 1 at least */
    if (--table->page_refs[page] != 0) return;
    if (table->free_count[0] < table->pages) table->free_pages[table->free_count[0]++] = page;
}

/* What kvc_append_tokens would refuse, which changes nothing then. */
kvc_status kvc_append_tokens_check(const kvc_append_tokens_args *args);
#endif
