// Rows of any format as kernels that append to them meet them: a page's slots copied, a token stored. By a warp.
#pragma once
#include "codes.cuh"
#include "step.cuh"

namespace {

// What a row keeps of a page that it shared: the first `slots` slots of keys, values and their scales.
__device__ inline void copy_shared(const kvc_page_table& table, const kvc_rows& rows, int32_t from, int32_t to, int64_t slots,
                                   int64_t D) {
    const int64_t key_bytes = stores_codes(rows) ? D : bytes_of(static_cast<kvc_dtype>(rows.format)) * D;
    copy_slots(table, from, to, slots, rows.keys, key_bytes);
    copy_slots(table, from, to, slots, rows.values, rows.format == KVC_FORMAT_K8V4 ? D / 2 : key_bytes);
    if (stores_codes(rows))
        for (void* scales : {rows.key_scales, rows.value_scales}) copy_slots(table, from, to, slots, scales, sizeof(f16));
}

// A key's slot and its value's, where they differ.
struct slot_of_each {
    int64_t key, value;
};
__device__ inline int64_t key_slot(int64_t place) { return place; }
__device__ inline int64_t value_slot(int64_t place) { return place; }
__device__ inline int64_t key_slot(slot_of_each place) { return place.key; }
__device__ inline int64_t value_slot(slot_of_each place) { return place.value; }

// Key and value as codes at slot `place`, or at slot_of_each. key, value: element 32*i + lane of each by i, as float; i < EACH.
template <int EACH, class Place, class Key, class Value>
__device__ KVC_INLINE void store_columns(const kvc_rows& rows, Place place, int D, Key key, Value value) {
    const int lane = threadIdx.x % 32, size = D, bits = rows.format == KVC_FORMAT_K8V4 ? 4 : 8;
    float x[EACH];
    KVC_UNROLL
    for (int i = 0; i < EACH; i++) x[i] = 32 * i + lane < size ? key(i) : 0.0f;
    quantize_vector(x, size, 8, static_cast<int8_t*>(rows.keys) + key_slot(place) * D,
                    static_cast<f16*>(rows.key_scales) + key_slot(place));
    KVC_UNROLL
    for (int i = 0; i < EACH; i++) x[i] = 32 * i + lane < size ? value(i) : 0.0f;
    quantize_vector(x, size, bits, static_cast<uint8_t*>(rows.values) + value_slot(place) * (D * bits / 8),
                    static_cast<f16*>(rows.value_scales) + value_slot(place));
}

// Key and value as codes at `place`. key, value: element d of each, as float. MOST: elements of a head at most, 128, 256
// or 512: a block of many threads has no registers for more than 256, of 1,024 threads for more than 128.
template <int MOST, class Place, class Key, class Value>
__device__ KVC_INLINE void store_codes(const kvc_rows& rows, Place place, int64_t D, Key key, Value value) {
    const int lane = threadIdx.x % 32, size = static_cast<int>(D);
    const auto key_at = [&](int i) { return key(32 * i + lane); };
    const auto value_at = [&](int i) { return value(32 * i + lane); };
    if (MOST <= 128 || D <= 128) store_columns<4>(rows, place, size, key_at, value_at);
    else if (MOST <= 256 || D <= 256) store_columns<8>(rows, place, size, key_at, value_at);
    else store_columns<16>(rows, place, size, key_at, value_at);
}

// Key and value of a step's new token as codes at `place`: as kvc_rope and kvc_quantize make them in turn.
template <int MOST, class Place>
__device__ inline void store_turned(const kvc_step& a, const kvc_rows& rows, int64_t key, int64_t value, int64_t position,
                                    Place place) {
    const int half = static_cast<int>(a.rotary_dim / 2);
    const bool inside = position >= 0 && position < a.table_rows;
    const auto turned = [&](int d) {
        const float x = load_any(a.k.data, a.k.dtype, key + d);
        if (d >= 2 * half) return x;
        const int pair = d < half ? d : d - half;
        const float other = load_any(a.k.data, a.k.dtype, key + (d < half ? d + half : d - half));
        const float c = inside ? a.cos[position * half + pair] : NAN, s = inside ? a.sin[position * half + pair] : NAN;
        return rounded_to(a.k.dtype, d < half ? x * c - other * s : x * c + other * s);
    };
    store_codes<MOST>(rows, place, a.D, turned, [&](int d) { return load_any(a.v.data, a.v.dtype, value + d); });
}

}  // namespace
