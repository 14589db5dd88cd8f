/* Arguments out of bytes, the checks after a call, and the entry of libFuzzer (and of random_main.c). */
#include "fuzz.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ARRAYS = 128, MOST_FIELDS = 64 };

static struct {
    const uint8_t *at, *end;
    uint64_t state; /* of the numbers that fill arrays */
    int64_t odd;    /* one in so many elements is out of the ordinary; 0: none is */
} input;

static struct {
    char *data, *before;
    size_t bytes;
    int writable, scratch;
    char *between; /* of a view: 1 where a byte belongs to none of its elements */
} arrays[MOST_ARRAYS];
static int array_count;
static void *pointer_fields[MOST_FIELDS];
static int64_t *size_fields[MOST_FIELDS];
static int pointer_count, size_count;

static void stop(const char *what) {
    fprintf(stderr, "fuzz: %s\n", what);
    abort();
}

/* ---- numbers ---- */

static uint64_t next(int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) value = value << 8 | (input.at < input.end ? *input.at++ : 0);
    return value;
}

int64_t between(int64_t least, int64_t most) {
    if (most <= least) return least;
    const uint64_t range = (uint64_t)(most - least) + 1;
    return least + (int64_t)(next(range <= 256 ? 1 : range <= 65536 ? 2 : 8) % range);
}

int once_in(int64_t many) {
    return between(0, many - 1) == many - 1;
}

int64_t any_number(void) {
    static const int64_t limits[] = {INT64_MAX, INT64_MIN, INT32_MAX, INT32_MIN, INT64_MAX - 1, INT64_MAX / 2,
                                     (int64_t)1 << 31, (int64_t)1 << 32, UINT32_MAX, (int64_t)1 << 62};
    switch (between(0, 7)) {
        case 0: return limits[between(0, (int64_t)(sizeof limits / sizeof *limits) - 1)];
        case 1: return (int64_t)next(8);
        case 2: return between(-3, 300);
        default: return between(0, 9);
    }
}

float any_float(void) {
    static const float odd[] = {NAN, INFINITY, -INFINITY, -0.0f, 3e38f, -3e38f, 1e-42f, -1.0f};
    if (once_in(8)) return odd[between(0, 7)];
    return (float)between(0, 64) / 16.0f;
}

kvc_dtype any_dtype(void) {
    return once_in(40) ? (kvc_dtype)between(3, 200) : (kvc_dtype)between(0, 2);
}

kvc_format any_format(void) {
    return once_in(40) ? (kvc_format)between(5, 200) : (kvc_format)between(0, 4);
}

static uint64_t random_bits(void) {
    input.state ^= input.state << 13, input.state ^= input.state >> 7, input.state ^= input.state << 17;
    return input.state * 0x2545f4914f6cdd1du;
}

static int is_odd(void) {
    return input.odd && random_bits() % (uint64_t)input.odd == 0;
}

/* ---- arrays ---- */

static void *new_array(int64_t count, int64_t size, int writable) {
    if (array_count == MOST_ARRAYS) stop("too many arrays");
    if (count < 0 || count > (int64_t)1 << 28) stop("an array of a size that no call has");
    const size_t bytes = (size_t)(count * size);
    char *data = malloc(bytes);
    if (!data) stop("no memory");
    memset(data, 0x5a, bytes);
    arrays[array_count].data = data, arrays[array_count].bytes = bytes, arrays[array_count].before = NULL;
    arrays[array_count].writable = writable, arrays[array_count].scratch = 0, arrays[array_count].between = NULL;
    array_count++;
    return data;
}

static float odd_float(void) {
    static const float odd[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 0.0f, 1e-42f, 1e5f};
    return odd[random_bits() % 8];
}

static float even_float(void) {
    return (float)(random_bits() >> 40) * 0x1p-23f - 1.0f;
}

void *elements(int64_t count, kvc_dtype dtype, int writable) {
    if (dtype != KVC_BF16 && dtype != KVC_F16) return floats(count, writable);
    uint16_t *data = new_array(count, 2, writable);
    for (int64_t i = 0; i < count; i++) {
        const uint64_t bits = random_bits();
        const float value = even_float();
        uint32_t wide;
        memcpy(&wide, &value, 4);
        const uint64_t half = (bits & 0x83ff) | ((8 + bits / 65536 % 8) << 10);
        data[i] = (uint16_t)(is_odd() ? bits >> 20 : dtype == KVC_BF16 ? wide >> 16 : half);
    }
    return data;
}

float *floats(int64_t count, int writable) {
    float *data = new_array(count, 4, writable);
    for (int64_t i = 0; i < count; i++) data[i] = is_odd() ? odd_float() : even_float();
    return data;
}

void *codes(int64_t bytes, int writable) {
    uint8_t *data = new_array(bytes, 1, writable);
    for (int64_t i = 0; i < bytes; i++) data[i] = (uint8_t)(random_bits() >> 30);
    return data;
}

kvc_rows stored(kvc_format format, int64_t pages, int64_t value_pages, int64_t slots, int64_t D, int writable) {
    kvc_rows rows = {.format = format};
    if (format != KVC_FORMAT_INT8 && format != KVC_FORMAT_K8V4) {
        rows.keys = elements(pages * slots * D, (kvc_dtype)format, writable);
        rows.values = elements(value_pages * slots * D, (kvc_dtype)format, writable);
        return rows;
    }
    rows.keys = codes(pages * slots * kvc_key_bytes(format, D), writable);
    rows.values = codes(value_pages * slots * kvc_value_bytes(format, D), writable);
    rows.key_scales = elements(pages * slots, KVC_F16, writable);
    rows.value_scales = elements(value_pages * slots, KVC_F16, writable);
    return rows;
}

float *positive(int64_t count) {
    float *data = floats(count, READ);
    for (int64_t i = 0; i < count; i++) data[i] = fabsf(data[i]) + 1e-6f;
    return data;
}

static int64_t odd_integer(int64_t least, int64_t most) {
    static const int64_t odd[] = {-1, INT32_MAX, INT32_MIN, -2, 1 << 16, 1 << 30};
    switch (random_bits() % 4) {
        case 0: return most + 1;
        case 1: return least - 1;
        default: return odd[random_bits() % 6];
    }
}

int32_t *integers(int64_t count, int64_t least, int64_t most, int writable) {
    int32_t *data = new_array(count, 4, writable);
    const uint64_t range = (uint64_t)(most >= least ? most - least : 0) + 1;
    for (int64_t i = 0; i < count; i++) {
        data[i] = (int32_t)(is_odd() ? odd_integer(least, most) : least + (int64_t)(random_bits() % range));
    }
    return data;
}

int64_t *sizes(int64_t count, int64_t least, int64_t most, int writable) {
    int64_t *data = new_array(count, 8, writable);
    for (int64_t i = 0; i < count; i++) {
        data[i] = is_odd() ? (random_bits() % 2 ? odd_integer(least, most) : (int64_t)random_bits())
                           : least + (int64_t)(random_bits() % (uint64_t)(most - least + 1));
    }
    return data;
}

uint8_t *flags(int64_t count, int writable) {
    uint8_t *data = new_array(count, 1, writable);
    for (int64_t i = 0; i < count; i++) data[i] = (uint8_t)(random_bits() % 2);
    return data;
}

void *scratch(int64_t bytes) {
    if (once_in(60)) return NULL;
    if (bytes < 0) bytes = 0;
    if (bytes > (int64_t)1 << 30) stop("scratch of a size that small arrays cannot need");
    void *data = NULL;
    if (posix_memalign(&data, 64, (size_t)bytes)) stop("no memory");
    if (array_count == MOST_ARRAYS) stop("too many arrays");
    arrays[array_count].data = data, arrays[array_count].bytes = 0, arrays[array_count].before = NULL;
    arrays[array_count].writable = WRITE, arrays[array_count].scratch = 1, arrays[array_count].between = NULL;
    array_count++;
    return data;
}

kvc_view view(int64_t B, int64_t H, int64_t T, int64_t D, kvc_dtype dtype, int writable) {
    const int64_t count[3] = {B, H, T};
    int64_t stride[3], order[3] = {0, 1, 2}, step = D;
    if (once_in(3)) order[1] = 2, order[2] = 1; /* [B, T, H, D] */
    if (once_in(6)) order[0] = order[2], order[2] = 0;
    if (once_in(4)) step += between(0, 5);
    for (int i = 2; i >= 0; i--) {
        stride[order[i]] = step;
        step *= count[order[i]] > 0 ? count[order[i]] : 1;
        if (once_in(8)) step += between(0, 9);
    }
    if (!writable && once_in(8)) stride[between(0, 2)] = 0;
    int64_t last = D;
    for (int i = 0; i < 3; i++) last += (count[i] - 1) * stride[i];
    void *data = elements(B && H && T && D ? last : 0, dtype, writable);
    if (writable && B && H && T && D) { /* what lies between the elements belongs to others */
        const int64_t width = kvc_dtype_bytes(dtype) ? kvc_dtype_bytes(dtype) : 4;
        char *gaps = malloc((size_t)(last * width));
        if (!gaps) stop("no memory");
        memset(gaps, 1, (size_t)(last * width));
        for (int64_t i = 0; i < B * H * T; i++) {
            const int64_t at = i / (H * T) * stride[0] + i / T % H * stride[1] + i % T * stride[2];
            memset(gaps + at * width, 0, (size_t)(D * width));
        }
        arrays[array_count - 1].between = gaps;
    }
    return (kvc_view){data, dtype, stride[0], stride[1], stride[2]};
}

kvc_page_table page_table(int64_t R, int64_t P, int64_t longest) {
    const int64_t used = (longest + P - 1) / P, blocks = used + between(0, 2), spare = between(0, 2 * R + 2);
    const int64_t pages = R * used + spare;
    const int64_t odd = input.odd;
    input.odd = 0;
    kvc_page_table table = {
        .block_table = integers(R * blocks, -3, pages + 3, WRITE),
        .lengths = integers(R, 0, longest, WRITE),
        .page_refs = integers(pages, 0, 0, WRITE),
        .free_pages = integers(pages, -9, -9, WRITE),
        .free_count = integers(2, 0, 0, WRITE),
        .R = R, .blocks = blocks, .P = P, .pages = pages,
    };
    input.odd = odd;
    int64_t taken = 0;
    for (int64_t r = 0; r < R; r++) {
        for (int64_t i = 0; i < (table.lengths[r] + P - 1) / P; i++) {
            const int shares = r > 0 && i * P < table.lengths[r - 1] && random_bits() % 3 == 0;
            const int32_t page = shares ? table.block_table[(r - 1) * blocks + i] : (int32_t)taken++;
            table.block_table[r * blocks + i] = page;
            table.page_refs[page]++;
        }
    }
    for (int64_t page = 0; page < pages; page++) {
        if (table.page_refs[page] == 0) table.free_pages[table.free_count[0]++] = (int32_t)page;
    }
    int32_t *const fields[] = {table.block_table, table.lengths, table.page_refs, table.free_pages, table.free_count};
    const int64_t counts[] = {R * blocks, R, pages, pages, 2};
    if (once_in(4)) {
        for (int64_t i = between(1, 6); i > 0; i--) {
            const int64_t field = between(0, 4);
            if (!counts[field]) continue;
            const int64_t most = field == 1 ? blocks * P : pages - 1, place = between(0, counts[field] - 1);
            fields[field][place] = (int32_t)(once_in(2) ? odd_integer(0, most) : (int64_t)(random_bits() % 64) - 2);
        }
    }
    return table;
}

/* ---- fields ---- */

void *pointer_field(void *field) {
    if (pointer_count == MOST_FIELDS) stop("too many fields");
    return pointer_fields[pointer_count++] = field;
}

void size_field(int64_t *field) {
    if (size_count == MOST_FIELDS) stop("too many fields");
    size_fields[size_count++] = field;
}

void damage(void) {
    if (pointer_count && once_in(12)) memset(pointer_fields[between(0, pointer_count - 1)], 0, sizeof(void *));
    if (size_count && once_in(8)) {
        int64_t *field = size_fields[between(0, size_count - 1)];
        const int64_t smaller = *field > 0 ? *field - 1 : 0;
        const int64_t bad[] = {-1, 0, INT64_MIN, INT32_MIN, smaller, -7};
        *field = bad[between(0, 5)];
    }
    for (int i = 0; i < array_count; i++) {
        if (arrays[i].scratch) continue;
        arrays[i].before = malloc(arrays[i].bytes);
        if (!arrays[i].before) stop("no memory");
        memcpy(arrays[i].before, arrays[i].data, arrays[i].bytes);
    }
}

void finish(kvc_status status, int changes_nothing) {
    if (status < KVC_OK || status > KVC_BAD_FORMAT) stop("a status that there is not");
    for (int i = 0; i < array_count; i++) {
        const int same = !arrays[i].before || memcmp(arrays[i].before, arrays[i].data, arrays[i].bytes) == 0;
        if (!same && !arrays[i].writable) stop("an array that is only read has changed");
        if (!same && changes_nothing && status != KVC_OK) stop("an error, and an array has changed");
        for (size_t at = 0; !same && arrays[i].between && at < arrays[i].bytes; at++) {
            if (arrays[i].between[at] && arrays[i].before[at] != arrays[i].data[at]) stop("a gap of a view has changed");
        }
        free(arrays[i].data), free(arrays[i].before), free(arrays[i].between);
    }
    array_count = pointer_count = size_count = 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const fuzzer *const groups[] = {plain_fuzzers, cache_fuzzers, step_fuzzers};
    static const char *const tables[] = {"portable", "avx2", "avx512", "avx512_bf16"};
    static fuzzer every[64];
    static int count;
    for (int g = 0, first = !count; first && g < 3; g++) {
        for (const fuzzer *one = groups[g]; *one; one++) every[count++] = *one;
    }
    input.at = data, input.end = data + size;
    const fuzzer chosen = every[between(0, count - 1)];
    kvc_simd_select(tables[between(0, 3)]); /* one that this CPU has not leaves the table as it was */
    input.state = (uint64_t)between(1, 65535) * 0x9e3779b97f4a7c15u;
    static const int64_t odds[] = {0, 0, 200, 20, 3};
    input.odd = odds[between(0, 4)];
    chosen();
    return 0;
}
