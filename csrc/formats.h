/* What keys and values are stored as: what the kernels that read and write codes share. */
#ifndef KVC_FORMATS_H
#define KVC_FORMATS_H
#include "kernel.h"

/* Whether a format is known. */
static inline int format_known(kvc_format format) {
    return kvc_key_bytes(format, 1) != 0;
}

/* Codes of the values of a format that has codes; its keys are KVC_INT8. */
static inline kvc_codes value_codes(kvc_format format) {
    return format == KVC_FORMAT_K8V4 ? KVC_INT4 : KVC_INT8;
}

/* Bytes of the codes of a vector. */
static inline int64_t code_bytes(kvc_codes kind, int64_t D) {
    return kind == KVC_INT4 ? D / 2 : D;
}

/* Turns a vector as it is before it becomes KVC_INT4: by an orthogonal matrix of equal sizes (Hadamard's), its own inverse,
 * in blocks of the largest power of two that divides D. No element is then much larger than the others, as 15 levels want. */
static inline void kvc_turn(float *x, int64_t D) {
    const int64_t block = D & -D;
    for (int64_t half = 1; half < block; half *= 2) {
        for (int64_t first = 0; first < D; first += 2 * half) {
            for (int64_t i = first; i < first + half; i++) {
                const float a = x[i], b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
        }
    }
    const float factor = 1.0f / sqrtf((float)block);
    for (int64_t d = 0; d < D; d++) x[d] *= factor;
}

/* The key of slot `at` of rows as numbers, not rounded. */
static inline void load_key(const kvc_simd *simd, float *key, const kvc_rows *rows, int64_t at, int64_t D) {
    const char *stored = (const char *)rows->keys + at * kvc_key_bytes(rows->format, D);
    float scale;
    if (!format_of_codes(rows->format)) {
        simd->load[rows->format](key, stored, D);
        return;
    }
    simd->load[KVC_F16](&scale, (const uint16_t *)rows->key_scales + at, 1);
    simd->dequantize[KVC_INT8](key, stored, scale, D);
}

/* Room for the codes of new tokens; NULL where rows store numbers. */
typedef struct {
    void *keys, *values, *key_scales, *value_scales;
} kvc_new_codes;

/* Parts of a scratch for [B, Hkv, S] tokens, none where rows store numbers; *bytes: as kvc_part_of. */
kvc_new_codes kvc_new_codes_of(void *scratch, int64_t *bytes, const kvc_rows *rows, int64_t tokens, int64_t D);

/* The arrays of an append of k and v [B, Hkv, S, D] (append->heads, append->S) to rows: as they are, or quantized first. */
kvc_status kvc_tokens_to_append(kvc_append_tokens_args *append, const kvc_rows *rows, const kvc_view *k, const kvc_view *v,
                                const kvc_new_codes *codes, int64_t B, int64_t D, kvc_parallel_for parallel_for);

/* Key and value, float32 [D] each, into a slot of rows: rounded to its numbers, or as kvc_quantize makes them codes. */
void kvc_store_slot(const kvc_rows *rows, int64_t slot, const float *key, const float *value, int64_t D);

/* codes = x / scale in integers up to most, and that scale: 0 (codes 0) for zeros, NaN (codes 0) where x is not finite. */
static inline float quantize_words(const kvc_simd *simd, int16_t *codes, const float *x, float most, int64_t n) {
    const float scale = simd->largest(x, n) / most;
    if (scale > 0.0f && isfinite(scale)) {
        simd->quantize(codes, x, scale, most, n);
        return scale;
    }
    for (int64_t i = 0; i < n; i++) codes[i] = 0;
    return scale == 0.0f ? 0.0f : NAN;
}
#endif
