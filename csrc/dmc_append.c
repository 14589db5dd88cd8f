/* DMC's cache at inference: a new token opens a slot of its row or joins the newest one. */
#include "formats.h"
#include "page_table.h"

#include <string.h>

enum { RUN = 64, PARALLEL_BYTES = 1 << 16 /* least to move before a second thread is worth its start */ };

static int64_t count_of(const kvc_dmc_append_args *args, int64_t r) {
    return args->counts ? args->counts[r] : args->S;
}

static int wants_to_join(const kvc_dmc_append_args *args, int64_t r, int64_t s) {
    return args->alpha[r * args->S + s] > 0.5f; /* a NaN does not */
}

/* Whether the first of the row's new tokens joins what is there. */
static int continues(const kvc_dmc_append_args *args, int64_t r, int64_t length) {
    const int64_t count = count_of(args, r);
    return count > 0 && length > 0 && args->tail_counts[r] > 0 && wants_to_join(args, r, args->S - count);
}

/* Slots that the row's new tokens open. */
static int64_t opened_by(const kvc_dmc_append_args *args, int64_t r, int64_t length) {
    const int64_t count = count_of(args, r);
    int64_t opened = count > 0 && !continues(args, r, length);
    for (int64_t s = args->S - count + 1; s < args->S; s++) opened += !wants_to_join(args, r, s);
    return opened;
}

/* The entry of the page that holds the row's newest slot if the call writes to it, else NULL. */
static int32_t *rewritten(const kvc_dmc_append_args *args, int64_t r, int64_t length) {
    const kvc_page_table *table = &args->table;
    const int writes = continues(args, r, length) || (count_of(args, r) > 0 && length % table->P != 0);
    return writes ? entry(table, r, (length - 1) / table->P) : NULL;
}

/* ---- one row ---- */

/* Tokens [s, s + n) into the mean of a slot that holds z already. */
static void add_to_mean(const kvc_dmc_append_args *args, int64_t r, int64_t s, int64_t n, int joins) {
    const kvc_simd *simd = kvc_simd_table();
    const int64_t b = r / args->Hkv, h = r % args->Hkv, D = args->D;
    float z = joins ? args->tail_w[r] : 0.0f;
    for (int64_t some; n > 0; s += some, n -= some) {
        float keep[RUN], add[RUN];
        some = min_of(RUN, n);
        for (int64_t i = 0; i < some; i++) {
            const float omega = args->omega[r * args->S + s + i], before = z;
            z += omega;
            keep[i] = before / z;
            add[i] = omega / z;
        }
        simd->scan[args->k.dtype](NULL, 0, view_at(&args->k, b, h, s, 0), args->k.stride_t, keep, add,
                                  args->tail_k + r * D, some, D, NULL, 0);
        simd->scan[args->v.dtype](NULL, 0, view_at(&args->v, b, h, s, 0), args->v.stride_t, keep, add,
                                  args->tail_v + r * D, some, D, NULL, 0);
        if (args->neuron >= 0) args->tail_k[r * D + args->neuron] = 0.0f;
    }
    args->tail_w[r] = z;
}

/* The last of tokens [s, s + n) into the ring of a slot that holds `held` tokens already. */
static void add_to_ring(const kvc_dmc_append_args *args, int64_t r, int64_t s, int64_t n, int64_t held) {
    const kvc_simd *simd = kvc_simd_table();
    const int64_t b = r / args->Hkv, h = r % args->Hkv, D = args->D, N = args->window;
    for (int64_t i = max_of(n - N, 0); i < n; i++) {
        const int64_t place = r * N + (held + i) % N;
        simd->load[args->k.dtype](args->tail_k + place * D, view_at(&args->k, b, h, s + i, 0), D);
        simd->load[args->v.dtype](args->tail_v + place * D, view_at(&args->v, b, h, s + i, 0), D);
        if (args->neuron >= 0) args->tail_k[place * D + args->neuron] = 0.0f;
        args->tail_w[place] = args->omega[r * args->S + s + i];
    }
}

static void mean_of_ring(const kvc_dmc_append_args *args, int64_t r, float *mean_k, float *mean_v) {
    const kvc_simd *simd = kvc_simd_table();
    const int64_t D = args->D, first = r * args->window, held = min_of(args->tail_counts[r], args->window);
    float share[KVC_DMC_MAX_WINDOW], z = 0.0f;
    for (int64_t i = 0; i < held; i++) z += args->tail_w[first + i];
    for (int64_t i = 0; i < held; i++) share[i] = args->tail_w[first + i] / z;
    memset(mean_k, 0, (size_t)D * sizeof(float));
    memset(mean_v, 0, (size_t)D * sizeof(float));
    simd->weighted_sum(mean_k, share, args->tail_k + first * D, D, held, D);
    simd->weighted_sum(mean_v, share, args->tail_v + first * D, D, held, D);
}

/* The row's newest slot as the cache holds it, its newest token being s. */
static void write_slot(const kvc_dmc_append_args *args, int64_t r, int64_t s, int64_t slot) {
    const kvc_simd *simd = kvc_simd_table();
    const int64_t D = args->D, half = args->rotary_dim / 2, P = args->table.P;
    const int64_t place = *entry(&args->table, r, slot / P) * P + slot % P;
    float mean_k[KVC_MAX_HEAD_DIM], mean_v[KVC_MAX_HEAD_DIM];
    if (args->window) {
        mean_of_ring(args, r, mean_k, mean_v);
    } else {
        memcpy(mean_k, args->tail_k + r * D, (size_t)D * sizeof(float));
        memcpy(mean_v, args->tail_v + r * D, (size_t)D * sizeof(float));
    }
    if (half) {
        const int64_t p = args->positions ? args->positions[r / args->Hkv * args->S + s] : s;
        simd->rotate[KVC_F32](mean_k, mean_k, args->cos + p * half, args->sin + p * half, 1.0f, half);
    }
    if (args->neuron >= 0) mean_k[args->neuron] = 0.0f;
    kvc_store_slot(&args->rows, place, mean_k, mean_v, D);
}

static void copy_page(void *pages, int64_t to, int64_t from, int64_t bytes) {
    memcpy((char *)pages + to * bytes, (char *)pages + from * bytes, (size_t)bytes);
}

static void copy_rows(const kvc_dmc_append_args *args, int64_t to, int64_t from) {
    const kvc_rows *rows = &args->rows;
    const int64_t P = args->table.P;
    copy_page(rows->keys, to, from, P * kvc_key_bytes(rows->format, args->D));
    copy_page(rows->values, to, from, P * kvc_value_bytes(rows->format, args->D));
    if (!format_of_codes(rows->format)) return;
    copy_page(rows->key_scales, to, from, P * (int64_t)sizeof(uint16_t));
    copy_page(rows->value_scales, to, from, P * (int64_t)sizeof(uint16_t));
}

/* Rows [begin, end), whose pages are there and whose lengths are the new ones. */
static void append_range(int64_t begin, int64_t end, void *context) {
    const kvc_dmc_append_args *args = context;
    const kvc_page_table *table = &args->table;
    for (int64_t r = begin; r < end; r++) {
        const int64_t copied = args->scratch[2 * r], before = table->lengths[r] - args->scratch[2 * r + 1];
        if (copied >= 0) copy_rows(args, *entry(table, r, (before - 1) / table->P), copied);
        int joins = continues(args, r, before);
        int64_t slot = before - 1, n;
        for (int64_t s = args->S - count_of(args, r); s < args->S; s += n, joins = 0) {
            for (n = 1; s + n < args->S && wants_to_join(args, r, s + n);) n++;
            const int64_t held = joins ? args->tail_counts[r] : 0;
            if (!joins) slot++;
            if (args->window) add_to_ring(args, r, s, n, held);
            else add_to_mean(args, r, s, n, joins);
            args->tail_counts[r] = (int32_t)min_of(held + n, INT32_MAX);
            write_slot(args, r, s + n - 1, slot);
        }
    }
}

/* ---- all rows ---- */

static kvc_status check(const kvc_dmc_append_args *args) {
    const kvc_page_table *table = &args->table;
    if (args->B < 0 || args->Hkv < 0 || args->S < 0 || table->R != args->B * args->Hkv) return KVC_BAD_SIZE;
    if (args->D < 1 || args->D > KVC_MAX_HEAD_DIM || args->neuron < -1 || args->neuron >= args->D) return KVC_BAD_SIZE;
    if (args->rotary_dim < 0 || args->rotary_dim > args->D || args->rotary_dim % 2) return KVC_BAD_SIZE;
    if (args->window < 0 || args->window > KVC_DMC_MAX_WINDOW || args->table_rows < 0) return KVC_BAD_SIZE;
    if (args->rotary_dim && !args->positions && args->S > args->table_rows) return KVC_BAD_SIZE;
    if (!dtype_known(args->k.dtype) || args->v.dtype != args->k.dtype) return KVC_BAD_DTYPE;
    kvc_status status = format_takes(args->rows.format, args->k.dtype, args->D);
    if (status == KVC_OK) status = check_table(table);
    if (status != KVC_OK || !table->R || !args->S) return status;
    if (!args->k.data || !args->v.data || !args->alpha || !args->omega || !args->tail_k || !args->tail_v ||
        !args->tail_w || !args->tail_counts || !args->scratch) {
        return KVC_NULL_POINTER;
    }
    if (table->pages && !rows_are_there(&args->rows)) return KVC_NULL_POINTER;
    return args->rotary_dim && (!args->cos || !args->sin) ? KVC_NULL_POINTER : KVC_OK;
}

kvc_status kvc_dmc_append(const kvc_dmc_append_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    const kvc_page_table *table = &args->table;
    kvc_status status = check(args);
    if (status != KVC_OK || !table->R || !args->S) return status;
    int64_t needed = 0;
    for (int64_t r = 0; r < table->R; r++) {
        const int64_t length = table->lengths[r], count = count_of(args, r);
        if (count < 0 || count > args->S) return KVC_BAD_INDEX;
        for (int64_t s = args->S - count; args->rotary_dim && args->positions && s < args->S; s++) {
            const int32_t position = args->positions[r / args->Hkv * args->S + s];
            if (position < 0 || position >= args->table_rows) return KVC_BAD_INDEX;
        }
        const int64_t after = length + opened_by(args, r, length);
        if (after > table->blocks * table->P) return KVC_BAD_INDEX;
        const int32_t *last = rewritten(args, r, length);
        if (last && !page_exists(table, *last)) return KVC_BAD_INDEX;
        needed += blocks_of(table, after) - blocks_of(table, length) + (last && table->page_refs[*last] > 1);
    }
    status = check_free(table, needed);
    if (status != KVC_OK) return status;

    for (int64_t r = 0; r < table->R; r++) {
        const int64_t length = table->lengths[r], opened = opened_by(args, r, length);
        int32_t *last = rewritten(args, r, length);
        args->scratch[2 * r] = -1; /* the page that the row copies */
        args->scratch[2 * r + 1] = (int32_t)opened;
        if (last && table->page_refs[*last] > 1) {
            args->scratch[2 * r] = *last;
            *last = take_page(table);
        }
        for (int64_t block = blocks_of(table, length); block < blocks_of(table, length + opened); block++) {
            *entry(table, r, block) = take_page(table);
        }
        table->lengths[r] = (int32_t)(length + opened);
    }
    const int64_t bytes = args->S * args->D * kvc_dtype_bytes(args->k.dtype) * 2;
    run_parallel(parallel_for, table->R, max_of(1, PARALLEL_BYTES / bytes), append_range, (void *)(uintptr_t)args);
    for (int64_t r = 0; r < table->R; r++) {
        if (args->scratch[2 * r] >= 0) give_up_page(table, args->scratch[2 * r]);
    }
    return KVC_OK;
}
