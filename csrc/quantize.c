/* Vectors as codes and one scale each, and back. */
#include "formats.h"
#include "step.h"

#include <string.h>

enum { PIECE = 256 }; /* elements of a vector converted at a time; even */

/* The float16 scale of a vector whose largest element is `most`, in bits and as float; NaN: there is none. */
static float scale_of(const kvc_simd *simd, float most, float levels, uint16_t *bits) {
    float scale = most / levels;
    simd->store[KVC_F16](bits, &scale, 1);
    simd->load[KVC_F16](&scale, bits, 1);
    if (scale * levels < most) { /* exact: 11 and 7 bits; the next float16 */
        *bits = (uint16_t)(*bits + 1);
        simd->load[KVC_F16](&scale, bits, 1);
    }
    if (isfinite(scale)) return scale;
    *bits = 0x7e00;
    return NAN;
}

static void pack(uint8_t *codes, const int16_t *low, const int16_t *high, int64_t n) {
    for (int64_t i = 0; i < n; i++) codes[i] = (uint8_t)((low[i] & 15) | ((high[i] & 15) << 4));
}

/* x float32 [D]. */
static void quantize_vector(const kvc_simd *simd, void *codes, uint16_t *bits, const float *x, int64_t D, kvc_codes kind) {
    const float levels = kind == KVC_INT4 ? 7.0f : 127.0f, scale = scale_of(simd, simd->largest(x, D), levels, bits);
    if (!(scale > 0.0f)) {
        memset(codes, 0, (size_t)code_bytes(kind, D));
        return;
    }
    int16_t words[2][PIECE];
    const int64_t count = code_bytes(kind, D);
    for (int64_t i = 0; i < count; i += PIECE) {
        const int64_t n = min_of(PIECE, count - i);
        simd->quantize(words[0], x + i, scale, levels, n);
        if (kind == KVC_INT4) {
            simd->quantize(words[1], x + count + i, scale, levels, n);
            pack((uint8_t *)codes + i, words[0], words[1], n);
        } else {
            for (int64_t j = 0; j < n; j++) ((int8_t *)codes)[i + j] = (int8_t)words[0][j];
        }
    }
}

static void quantize_range(int64_t begin, int64_t end, void *context) {
    const kvc_quantize_args *args = context;
    const kvc_simd *simd = kvc_simd_table();
    const int64_t D = args->D;
    float x[KVC_MAX_HEAD_DIM];
    for (int64_t i = begin; i < end; i++) {
        simd->load[args->x.dtype](x, view_at(&args->x, i / (args->H * args->T), i / args->T % args->H, i % args->T, 0), D);
        if (args->kind == KVC_INT4) kvc_turn(x, D);
        quantize_vector(simd, (char *)args->codes + i * code_bytes(args->kind, D), (uint16_t *)args->scales + i, x, D,
                        args->kind);
    }
}

static int kind_is_good(kvc_codes kind, int64_t D) {
    return kind == KVC_INT8 || (kind == KVC_INT4 && D % 2 == 0);
}

kvc_status kvc_quantize(const kvc_quantize_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    if (args->B < 0 || args->H < 0 || args->T < 0 || args->D < 1 || args->D > KVC_MAX_HEAD_DIM) return KVC_BAD_SIZE;
    if (!kind_is_good(args->kind, args->D)) return KVC_BAD_SIZE;
    if (!dtype_known(args->x.dtype)) return KVC_BAD_DTYPE;
    const int64_t count = args->B * args->H * args->T;
    if (!count) return KVC_OK;
    if (!args->codes || !args->scales || !args->x.data) return KVC_NULL_POINTER;
    run_parallel(parallel_for, count, grain_of(count, count * args->D), quantize_range, (void *)(uintptr_t)args);
    return KVC_OK;
}

static void dequantize_range(int64_t begin, int64_t end, void *context) {
    const kvc_dequantize_args *args = context;
    const kvc_simd *simd = kvc_simd_table();
    const int64_t D = args->D, bytes = code_bytes(args->kind, D);
    float x[KVC_MAX_HEAD_DIM], scale;
    for (int64_t i = begin; i < end; i++) {
        simd->load[KVC_F16](&scale, (const uint16_t *)args->scales + i, 1);
        simd->dequantize[args->kind](x, (const char *)args->codes + i * bytes, scale, D);
        if (args->kind == KVC_INT4) kvc_turn(x, D);
        simd->store[args->dtype]((char *)args->x + i * D * kvc_dtype_bytes(args->dtype), x, D);
    }
}

kvc_status kvc_dequantize(const kvc_dequantize_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    if (args->N < 0 || args->D < 1 || args->D > KVC_MAX_HEAD_DIM || !kind_is_good(args->kind, args->D)) return KVC_BAD_SIZE;
    if (!dtype_known(args->dtype)) return KVC_BAD_DTYPE;
    if (!args->N) return KVC_OK;
    if (!args->x || !args->codes || !args->scales) return KVC_NULL_POINTER;
    run_parallel(parallel_for, args->N, grain_of(args->N, args->N * args->D), dequantize_range, (void *)(uintptr_t)args);
    return KVC_OK;
}

kvc_new_codes kvc_new_codes_of(void *scratch, int64_t *bytes, const kvc_rows *rows, int64_t tokens, int64_t D) {
    kvc_new_codes codes = {0};
    if (!format_of_codes(rows->format)) return codes;
    codes.keys = kvc_part_of(scratch, bytes, tokens * kvc_key_bytes(rows->format, D));
    codes.values = kvc_part_of(scratch, bytes, tokens * kvc_value_bytes(rows->format, D));
    codes.key_scales = kvc_part_of(scratch, bytes, tokens * (int64_t)sizeof(uint16_t));
    codes.value_scales = kvc_part_of(scratch, bytes, tokens * (int64_t)sizeof(uint16_t));
    return codes;
}

/* One of keys and values, with the scale of its slot if it has codes. */
static void store_vector(const kvc_rows *rows, void *to, int64_t bytes, void *scales, int64_t slot, const float *x, int64_t D,
                         kvc_codes kind) {
    const kvc_simd *simd = kvc_simd_table();
    void *at = (char *)to + slot * bytes;
    if (!format_of_codes(rows->format)) {
        simd->store[rows->format](at, x, D);
        return;
    }
    float turned[KVC_MAX_HEAD_DIM];
    if (kind == KVC_INT4) {
        memcpy(turned, x, (size_t)D * sizeof(float));
        kvc_turn(turned, D);
        x = turned;
    }
    quantize_vector(simd, at, (uint16_t *)scales + slot, x, D, kind);
}

void kvc_store_slot(const kvc_rows *rows, int64_t slot, const float *key, const float *value, int64_t D) {
    store_vector(rows, rows->keys, kvc_key_bytes(rows->format, D), rows->key_scales, slot, key, D, KVC_INT8);
    store_vector(rows, rows->values, kvc_value_bytes(rows->format, D), rows->value_scales, slot, value, D,
                 value_codes(rows->format));
}

/* New tokens, contiguous [B, Hkv, S] of so many bytes. */
static kvc_slot_array dense_slots(void *pages, const void *tokens, int64_t bytes, const kvc_append_tokens_args *append) {
    return (kvc_slot_array){pages, tokens, bytes, append->heads * append->S * bytes, append->S * bytes, bytes};
}

kvc_status kvc_tokens_to_append(kvc_append_tokens_args *append, const kvc_rows *rows, const kvc_view *k, const kvc_view *v,
                                const kvc_new_codes *codes, int64_t B, int64_t D, kvc_parallel_for parallel_for) {
    if (!format_of_codes(rows->format)) {
        append->array_count = 2;
        append->arrays[0] = kvc_slots_of(rows->keys, k, D);
        append->arrays[1] = kvc_slots_of(rows->values, v, D);
        return KVC_OK;
    }
    kvc_quantize_args quantize = {.codes = codes->keys, .scales = codes->key_scales, .x = *k, .B = B, .H = append->heads,
                                  .T = append->S, .D = D, .kind = KVC_INT8};
    kvc_status status = kvc_quantize(&quantize, parallel_for);
    if (status != KVC_OK) return status;
    quantize.codes = codes->values, quantize.scales = codes->value_scales, quantize.x = *v;
    quantize.kind = value_codes(rows->format);
    status = kvc_quantize(&quantize, parallel_for);
    const int64_t word = (int64_t)sizeof(uint16_t);
    append->array_count = 4;
    append->arrays[0] = dense_slots(rows->keys, codes->keys, kvc_key_bytes(rows->format, D), append);
    append->arrays[1] = dense_slots(rows->values, codes->values, kvc_value_bytes(rows->format, D), append);
    append->arrays[2] = dense_slots(rows->key_scales, codes->key_scales, word, append);
    append->arrays[3] = dense_slots(rows->value_scales, codes->value_scales, word, append);
    return status;
}
