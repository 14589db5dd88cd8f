/* Rows of shared pages: random calls on two tables over the same pages, against lists; what must be refused. */
#include "check.h"

enum { R = 4, P = 4, PAGES = 60, BLOCKS = 9, CAPACITY = BLOCKS * P, S = 6, ARRAYS = 2, BYTES_A = 5, BYTES_B = 8 };

/* What the rows of one table should hold: each slot a number, from which its bytes follow. */
typedef struct {
    int32_t *block_table, *lengths;
    int count[R], slots[R][CAPACITY];
} rows;

typedef struct {
    char *pages[ARRAYS];
    int32_t *refs, *free_pages, *free_count;
    rows tables[2];
} store;

static const int64_t bytes_of[ARRAYS] = {BYTES_A, BYTES_B};

static void write_slot(char *slot, int number, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++) slot[i] = (char)(number * 31 + number / 256 * (int)i + (int)i);
}

static int below(int limit) {
    return (int)((uniform() + 1.0f) * 0.5f * (float)limit) % limit;
}

static kvc_page_table table_of(const store *all, int which) {
    const rows *own = &all->tables[which];
    return (kvc_page_table){own->block_table, own->lengths, all->refs, all->free_pages, all->free_count,
                            R, BLOCKS, P, PAGES};
}

static void open_store(store *all) {
    for (int a = 0; a < ARRAYS; a++) all->pages[a] = room(PAGES * P * bytes_of[a]);
    all->refs = room(4 * PAGES), all->free_pages = room(4 * PAGES), all->free_count = room(8);
    for (int i = 0; i < PAGES; i++) all->refs[i] = 0, all->free_pages[i] = PAGES - 1 - i;
    all->free_count[0] = PAGES, all->free_count[1] = 0;
    for (int t = 0; t < 2; t++) {
        all->tables[t].block_table = room(4 * R * BLOCKS), all->tables[t].lengths = room(4 * R);
        for (int r = 0; r < R; r++) all->tables[t].lengths[r] = all->tables[t].count[r] = 0;
    }
}

static void close_store(store *all) {
    for (int a = 0; a < ARRAYS; a++) free(all->pages[a]);
    for (int t = 0; t < 2; t++) free(all->tables[t].block_table), free(all->tables[t].lengths);
    free(all->refs), free(all->free_pages), free(all->free_count);
}

/* Contents as listed; every page named as often as refs says, or free once. */
static void check_store(const store *all) {
    int named[PAGES] = {0}, free_named[PAGES] = {0};
    for (int t = 0; t < 2; t++) {
        const rows *own = &all->tables[t];
        for (int r = 0; r < R; r++) {
            CHECK(own->lengths[r] == own->count[r]);
            for (int i = 0; i < own->count[r]; i++) {
                const int32_t page = own->block_table[r * BLOCKS + i / P];
                if (i % P == 0) named[page]++;
                for (int a = 0; a < ARRAYS; a++) {
                    char expected[BYTES_B];
                    write_slot(expected, own->slots[r][i], bytes_of[a]);
                    const char *slot = all->pages[a] + (page * P + i % P) * bytes_of[a];
                    CHECK(memcmp(slot, expected, (size_t)bytes_of[a]) == 0);
                }
            }
        }
    }
    for (int i = 0; i < all->free_count[0]; i++) free_named[all->free_pages[i]]++;
    for (int i = 0; i < PAGES; i++) {
        CHECK(all->refs[i] == named[i]);
        CHECK(free_named[i] == (named[i] == 0));
    }
    CHECK(all->free_count[1] == 0);
}

static void append(store *all, int which, int next, int runner) {
    rows *own = &all->tables[which];
    /* tokens [1, R, S] with a gap after each */
    char *tokens[ARRAYS];
    int32_t *counts = room(4 * R), *scratch = room(4 * (R + 1));
    kvc_append_tokens_args args = {.table = table_of(all, which), .counts = counts, .scratch = scratch};
    args.array_count = ARRAYS, args.heads = R / 2, args.S = S;
    for (int a = 0; a < ARRAYS; a++) {
        const int64_t stride = bytes_of[a] + (a ? 0 : 3);
        tokens[a] = room(R * S * stride);
        for (int i = 0; i < R * S; i++) write_slot(tokens[a] + i * stride, next + i, bytes_of[a]);
        args.arrays[a] = (kvc_slot_array){all->pages[a], tokens[a], bytes_of[a], R / 2 * S * stride, S * stride, stride};
    }
    for (int r = 0; r < R; r++) {
        counts[r] = below(S + 1);
        if (own->count[r] + counts[r] > CAPACITY) counts[r] = 0;
    }
    const int32_t free_before = all->free_count[0];
    const kvc_status status = kvc_append_tokens(&args, runners[runner]);
    CHECK(status == KVC_OK || (status == KVC_POOL_FULL && all->free_count[0] == free_before));
    for (int r = 0; r < R && status == KVC_OK; r++) {
        for (int i = 0; i < counts[r]; i++) own->slots[r][own->count[r]++] = next + r * S + S - counts[r] + i;
    }
    for (int a = 0; a < ARRAYS; a++) free(tokens[a]);
    free(counts), free(scratch);
}

static void truncate_rows(store *all, int which) {
    rows *own = &all->tables[which];
    int32_t *lengths = room(4 * R);
    for (int r = 0; r < R; r++) lengths[r] = own->count[r] = below(own->count[r] + 1);
    const kvc_truncate_rows_args args = {table_of(all, which), lengths};
    CHECK(kvc_truncate_rows(&args) == KVC_OK);
    free(lengths);
}

static void compact(store *all, int which, int runner) {
    rows *own = &all->tables[which];
    rows after = *own;
    int32_t *indices = room(4 * R * CAPACITY), *kept = room(4 * R), *scratch = room(4 * (R * BLOCKS + 1));
    for (int r = 0; r < R; r++) {
        kept[r] = 0;
        const int head = below(own->count[r] + 1);
        for (int i = 0; i < own->count[r]; i++) {
            if (i < head || below(2)) {
                after.slots[r][kept[r]] = own->slots[r][i];
                indices[r * CAPACITY + kept[r]++] = i;
            }
        }
        after.count[r] = kept[r];
        if (below(5) == 0) {
            kept[r] = -1, after.count[r] = own->count[r];
            memcpy(after.slots[r], own->slots[r], sizeof after.slots[r]);
        }
    }
    kvc_compact_pages_args args = {.table = table_of(all, which), .indices = indices, .kept = kept, .scratch = scratch};
    args.array_count = ARRAYS, args.K = CAPACITY;
    for (int a = 0; a < ARRAYS; a++) args.arrays[a] = (kvc_slot_array){all->pages[a], NULL, bytes_of[a], 0, 0, 0};
    const kvc_status status = kvc_compact_pages(&args, runners[runner]);
    CHECK(status == KVC_OK || status == KVC_POOL_FULL);
    if (status == KVC_OK) *own = after;
    free(indices), free(kept), free(scratch);
}

/* The other table gives up its rows and names those of this one. */
static void fork_rows(store *all, int which) {
    const rows *own = &all->tables[which];
    rows *other = &all->tables[1 - which];
    int32_t *nothing = room(4 * R);
    memset(nothing, 0, 4 * R);
    const kvc_truncate_rows_args args = {table_of(all, 1 - which), nothing};
    CHECK(kvc_truncate_rows(&args) == KVC_OK);
    for (int r = 0; r < R; r++) {
        const int from = below(R);
        other->lengths[r] = other->count[r] = own->count[from];
        memcpy(other->slots[r], own->slots[from], sizeof own->slots[from]);
        for (int block = 0; block * P < own->count[from]; block++) {
            other->block_table[r * BLOCKS + block] = own->block_table[from * BLOCKS + block];
            all->refs[own->block_table[from * BLOCKS + block]]++;
        }
    }
    free(nothing);
}

static void test_random_calls(int runner) {
    test_case = "pages";
    store all;
    open_store(&all);
    for (int step = 0; step < 400; step++) {
        const int which = below(2), action = below(8);
        if (action < 4) {
            append(&all, which, step * R * S, runner);
        } else if (action < 5) {
            truncate_rows(&all, which);
        } else if (action < 7) {
            compact(&all, which, runner);
        } else {
            fork_rows(&all, which);
        }
        check_store(&all);
    }
    close_store(&all);
}

static void test_refusals(void) {
    test_case = "pages refusals";
    int32_t block_table[4] = {2, 0, 2, 0}, lengths[2] = {6, 5}, refs[3] = {2, 0, 2}, free_pages[3] = {1, 7, 7};
    int32_t free_count[2] = {1, 0}, scratch[5], counts[2] = {1, 1}, indices[4] = {1, 2, 0, 1}, now[2] = {3, 3};
    char pages[12] = "abcdefghijk", tokens[4] = "xyz";
    const kvc_page_table table = {block_table, lengths, refs, free_pages, free_count, 2, 2, 4, 3};
    const kvc_slot_array bytes = {pages, tokens, 1, 2, 1, 1};
    kvc_append_tokens_args append_args = {.table = table, .arrays = {bytes}, .counts = counts, .scratch = scratch};
    append_args.array_count = 1, append_args.heads = 2, append_args.S = 1;
    CHECK(kvc_append_tokens(&append_args, NULL) == KVC_POOL_FULL);
    counts[1] = 2;
    CHECK(kvc_append_tokens(&append_args, NULL) == KVC_BAD_INDEX);
    counts[1] = -1;
    CHECK(kvc_append_tokens(&append_args, NULL) == KVC_BAD_INDEX);
    counts[1] = 0, free_pages[0] = 3;
    CHECK(kvc_append_tokens(&append_args, NULL) == KVC_BAD_INDEX);
    free_pages[0] = 1, lengths[0] = 8;
    CHECK(kvc_append_tokens(&append_args, NULL) == KVC_BAD_INDEX);
    lengths[0] = 6, block_table[1] = -1;
    CHECK(kvc_append_tokens(&append_args, NULL) == KVC_BAD_INDEX);
    block_table[1] = 0, append_args.heads = 3;
    CHECK(kvc_append_tokens(&append_args, NULL) == KVC_BAD_SIZE);
    append_args.heads = 2, append_args.array_count = KVC_MAX_SLOT_ARRAYS + 1;
    CHECK(kvc_append_tokens(&append_args, NULL) == KVC_BAD_SIZE);
    append_args.array_count = 1, append_args.arrays[0].tokens = NULL;
    CHECK(kvc_append_tokens(&append_args, NULL) == KVC_NULL_POINTER);

    kvc_truncate_rows_args truncate_args = {table, now};
    now[1] = 6;
    CHECK(kvc_truncate_rows(&truncate_args) == KVC_BAD_INDEX);
    now[1] = -1;
    CHECK(kvc_truncate_rows(&truncate_args) == KVC_BAD_INDEX);
    truncate_args.table.P = 0;
    CHECK(kvc_truncate_rows(&truncate_args) == KVC_BAD_SIZE);

    kvc_compact_pages_args compact_args = {.table = table, .arrays = {bytes}, .indices = indices, .scratch = scratch};
    compact_args.array_count = 1, compact_args.K = 2;
    CHECK(kvc_compact_pages(&compact_args, NULL) == KVC_OK); /* row 1 moves nothing and needs no page */
    CHECK(memcmp(pages, "abcdjkghijk", 11) == 0);
    CHECK(block_table[0] == 1 && block_table[2] == 2 && refs[2] == 1 && refs[0] == 0);
    CHECK(lengths[0] == 2 && lengths[1] == 2 && free_count[0] == 1 && free_pages[0] == 0);
    const int32_t bad[3][2] = {{1, 1}, {-1, 0}, {0, 2}};
    for (int i = 0; i < 3; i++) {
        memcpy(indices, bad[i], sizeof bad[i]);
        CHECK(kvc_compact_pages(&compact_args, NULL) == KVC_BAD_INDEX);
    }
    CHECK(lengths[0] == 2 && lengths[1] == 2 && free_count[0] == 1);
}

void test_pages(void) {
    for (int runner = 0; runner < RUNNERS; runner++) test_random_calls(runner);
    test_refusals();
}
