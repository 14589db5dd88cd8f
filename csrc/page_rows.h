/* Rows of keys or values in pages: what the kernels that read them share. */
#ifndef KVC_PAGE_ROWS_H
#define KVC_PAGE_ROWS_H
#include "kernel.h"
#include "simd.h"

typedef struct { /* keys or values of all rows */
    const void *pages;
    const int32_t *table; /* NULL: row r is page r */
    int64_t count, blocks, P;
    int64_t bytes; /* of one key or value */
    const uint16_t *scales; /* float16, of codes; NULL of numbers */
} page_rows;

enum { MEMORY_PAGE = 4096 };

/* Slot, counted from the first page's, of key or value t of a row, and in *run how many of n lie there without a gap: pages
 * that were handed out one after the other are read as one. */
static inline int64_t slot_of(const page_rows *of, int64_t row, int64_t t, int64_t n, int64_t *run) {
    const int64_t offset = of->table ? t & (of->P - 1) : t;
    const int32_t *table = of->table ? of->table + row * of->blocks + t / of->P : NULL;
    const int64_t page = table ? *table : row;
    int64_t length = of->P - offset;
    for (; table && length < n && table[1] == table[0] + 1; table++) length += of->P;
    *run = min_of(length, n);
    return page * of->P + offset;
}

/* Its address. */
static inline const char *page_at(const page_rows *of, int64_t row, int64_t t, int64_t n, int64_t *run) {
    return (const char *)of->pages + slot_of(of, row, t, n, run) * of->bytes;
}

/* How many keys or values behind the first of a run what is to be fetched meanwhile begins: pages of few bytes are left
 * before memory answers, so that it lies in one of the pages behind the next. */
static inline int64_t far_of(const page_rows *of, int64_t run) {
    return max_of(run, KVC_AHEAD / of->bytes);
}

/* Where the row's key or value t lies, to be fetched ahead; NULL past the row's end. One line of each of its memory pages
 * is asked for at once: pages of the pool lie anywhere, and looking up their addresses takes as long as reading them. */
static inline const char *next_at(const page_rows *of, int64_t row, int64_t t, int64_t most, int64_t end) {
    int64_t run;
    if (t >= end) return NULL;
    const int64_t slot = slot_of(of, row, t, min_of(most, end - t), &run);
    const char *next = (const char *)of->pages + slot * of->bytes;
    for (int64_t i = 0; of->scales && i < run; i += 32) __builtin_prefetch(of->scales + slot + i); /* of a line each */
    for (int64_t i = 0; i < run * of->bytes; i += MEMORY_PAGE) __builtin_prefetch(next + i, 0, 2);
    return next;
}

/* Whether the row's keys or values [begin, end) are there: begin <= end <= most, and each page exists. */
static inline int rows_exist(const page_rows *of, int64_t row, int64_t begin, int64_t end, int64_t most) {
    if (begin < 0 || begin > end || end > most) return 0;
    if (!of->table || begin == end) return 1;
    for (int64_t i = begin / of->P; i <= (end - 1) / of->P; i++) {
        const int32_t page = of->table[row * of->blocks + i];
        if (page < 0 || page >= of->count) return 0;
    }
    return 1;
}
#endif
