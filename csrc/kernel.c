/* Packing of queries and keys for the logits of a tile. */
#include "kernel.h"

void kvc_tile_pack_queries(float *packed, const kvc_view *q, int64_t b, int64_t head, int64_t S, int64_t D,
                           int64_t first, int64_t rows) {
    const kvc_simd *simd = kvc_simd_table();
    float piece[KVC_TILE_DEPTH];
    for (int64_t i = 0; i < rows; i++) {
        const int64_t block = i / KVC_TILE_ROWS * KVC_TILE_ROWS, width = block_rows(block, rows);
        float *column = packed + block * D + (i - block);
        for (int64_t d0 = 0; d0 < D; d0 += KVC_TILE_DEPTH) {
            const int64_t depth = min_of(KVC_TILE_DEPTH, D - d0);
            simd->load[q->dtype](piece, view_at(q, b, head + (first + i) / S, (first + i) % S, d0), depth);
            for (int64_t d = 0; d < depth; d++) column[(d0 + d) * width] = piece[d];
        }
    }
}

void kvc_tile_pack_keys(float *packed, float *buffer, const char *src, kvc_dtype dtype, int64_t stride, int64_t keys,
                        int64_t depth) {
    const kvc_simd *simd = kvc_simd_table();
    if (dtype == KVC_F32) {
        simd->transpose(packed, (const float *)(const void *)src, stride, keys, depth);
        return;
    }
    const int64_t step = stride * kvc_dtype_bytes(dtype);
    for (int64_t j = 0; j < keys; j++) simd->load[dtype](buffer + j * KVC_TILE_DEPTH, src + j * step, depth);
    simd->transpose(packed, buffer, KVC_TILE_DEPTH, keys, depth);
}
