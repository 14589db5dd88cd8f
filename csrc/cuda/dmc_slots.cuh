// The newest slot of a row of DMC's cache, held by a warp: takes tokens, is written to its page, is saved as the row's tail.
#pragma once
#include "rows.cuh"

__device__ inline int64_t count_of(const kvc_dmc_append_args& a, int64_t row) { return a.counts ? a.counts[row] : a.S; }

__device__ inline bool wants_to_join(const kvc_dmc_append_args& a, int64_t row, int64_t s) {
    return a.alpha[row * a.S + s] > 0.5f;  // a NaN does not
}

// The newest slot of a row in the registers of a warp: lane l holds columns l, l + 32, ...
template <int COLUMNS>
struct slot_of_warp {
    float k[COLUMNS], v[COLUMNS];  // averages
    float z;
    int64_t held;  // tokens in it
};

template <int COLUMNS, class X>
__device__ inline void load_token(const kvc_dmc_append_args& a, int64_t row, int64_t s, float (&k)[COLUMNS],
                                  float (&v)[COLUMNS]) {
    const int lane = threadIdx.x % 32;
    const int64_t b = row / a.Hkv, h = row % a.Hkv;
    const X* from_k = static_cast<const X*>(a.k.data) + b * a.k.stride_b + h * a.k.stride_h + s * a.k.stride_t;
    const X* from_v = static_cast<const X*>(a.v.data) + b * a.v.stride_b + h * a.v.stride_h + s * a.v.stride_t;
    KVC_UNROLL
    for (int i = 0; i < COLUMNS; i++) {
        const int64_t d = lane + 32 * i;
        k[i] = d < a.D && d != a.neuron ? to_float(from_k[d]) : 0.0f;
        v[i] = d < a.D ? to_float(from_v[d]) : 0.0f;
    }
}

// The average over the ring of the last `window` tokens of a slot, the last `fresh` of which are tokens before `end`.
template <int COLUMNS, class X>
__device__ inline void average_ring(const kvc_dmc_append_args& a, int64_t row, int64_t end, int64_t fresh,
                                    slot_of_warp<COLUMNS>& slot) {
    const int lane = threadIdx.x % 32, places = static_cast<int>(slot.held < a.window ? slot.held : a.window);
    // the token at each place is the newest one that belongs there; counted from the slot's first
    const auto token_at = [&](int place) { return slot.held - 1 - (slot.held - 1 - place) % a.window; };
    const auto weight_at = [&](int place) {
        const int64_t back = slot.held - token_at(place);
        return back <= fresh ? a.omega[row * a.S + end - back] : a.tail_w[row * a.window + place];
    };
    slot.z = 0.0f;
    for (int place = 0; place < places; place++) slot.z += weight_at(place);
    KVC_UNROLL
    for (int i = 0; i < COLUMNS; i++) slot.k[i] = slot.v[i] = 0.0f;
    for (int place = 0; place < places; place++) {
        const float share = weight_at(place) / slot.z;
        const int64_t back = slot.held - token_at(place), at = (row * a.window + place) * a.D;
        float k[COLUMNS], v[COLUMNS];
        if (back <= fresh) load_token<COLUMNS, X>(a, row, end - back, k, v);
        KVC_UNROLL
        for (int i = 0; i < COLUMNS; i++) {
            const int64_t d = lane + 32 * i;
            if (back > fresh) {
                k[i] = d < a.D ? a.tail_k[at + d] : 0.0f;
                v[i] = d < a.D ? a.tail_v[at + d] : 0.0f;
            }
            slot.k[i] = fmaf(share, k[i], slot.k[i]);
            slot.v[i] = fmaf(share, v[i], slot.v[i]);
        }
    }
}

// Writes the slot at its place, keys rotated at token s. keys: float [D] of shared memory of the warp's own.
template <int COLUMNS, class X>
__device__ inline void write_slot(const kvc_dmc_append_args& a, int64_t row, int64_t s, int64_t place,
                                  const slot_of_warp<COLUMNS>& slot, float* keys) {
    const kvc_page_table& table = a.table;
    const int lane = threadIdx.x % 32;
    const int32_t page = *entry(table, row, place / table.P);
    const int64_t half = a.rotary_dim / 2, position = a.positions ? a.positions[row / a.Hkv * a.S + s] : s;
    const int64_t at = page * table.P + place % table.P;
    const bool inside = position >= 0 && position < a.table_rows;
    KVC_UNROLL
    for (int i = 0; i < COLUMNS; i++)
        if (lane + 32 * i < a.D) keys[lane + 32 * i] = slot.k[i];
    __syncwarp();
    const auto key = [&](int i) {
        const int64_t d = lane + 32 * i;
        float x = slot.k[i];
        if (d < a.rotary_dim) {
            const int64_t pair = d < half ? d : d - half;
            const float c = inside ? a.cos[position * half + pair] : NAN, sine = inside ? a.sin[position * half + pair] : NAN;
            x = d < half ? x * c - keys[d + half] * sine : x * c + keys[d - half] * sine;
        }
        return d == a.neuron ? 0.0f : x;
    };
    if (page_exists(table, page) && stores_codes(a.rows)) {
        store_columns<COLUMNS>(a.rows, at, static_cast<int>(a.D), key, [&](int i) { return slot.v[i]; });
    } else if (page_exists(table, page)) {
        KVC_UNROLL
        for (int i = 0; i < COLUMNS; i++) {
            const int64_t d = lane + 32 * i;
            if (d >= a.D) continue;
            from_float(key(i), static_cast<X*>(a.rows.keys)[at * a.D + d]);
            from_float(slot.v[i], static_cast<X*>(a.rows.values)[at * a.D + d]);
        }
    }
    __syncwarp();  // the keys are free for the next slot
}

// The state of the row's newest slot, whose last `fresh` tokens are those before `end`.
template <int COLUMNS, class X>
__device__ inline void save_tail(const kvc_dmc_append_args& a, int64_t row, int64_t end, int64_t fresh,
                                 const slot_of_warp<COLUMNS>& slot) {
    const int lane = threadIdx.x % 32;
    __syncwarp();  // all lanes have read what was there
    if (lane == 0) a.tail_counts[row] = static_cast<int32_t>(slot.held < INT32_MAX ? slot.held : INT32_MAX);
    if (!a.window) {
        if (lane == 0) a.tail_w[row] = slot.z;
        KVC_UNROLL
        for (int i = 0; i < COLUMNS; i++) {
            const int64_t d = lane + 32 * i;
            if (d >= a.D) continue;
            a.tail_k[row * a.D + d] = slot.k[i];
            a.tail_v[row * a.D + d] = slot.v[i];
        }
        return;
    }
    for (int64_t back = fresh < a.window ? fresh : a.window; back > 0; back--) {
        const int64_t place = row * a.window + (slot.held - back) % a.window;
        float k[COLUMNS], v[COLUMNS];
        load_token<COLUMNS, X>(a, row, end - back, k, v);
        if (lane == 0) a.tail_w[place] = a.omega[row * a.S + end - back];
        KVC_UNROLL
        for (int i = 0; i < COLUMNS; i++) {
            const int64_t d = lane + 32 * i;
            if (d >= a.D) continue;
            a.tail_k[place * a.D + d] = k[i];
            a.tail_v[place * a.D + d] = v[i];
        }
    }
}

// Tokens from s on that belong to one slot, into it; returns the first that does not. held: tokens in the slot before.
template <int COLUMNS, class X>
__device__ inline int64_t run_slot(const kvc_dmc_append_args& a, int64_t row, int64_t s, int64_t place,
                                   slot_of_warp<COLUMNS>& slot, float* keys) {
    const int lane = threadIdx.x % 32;
    const int64_t begin = s;
    bool open = true;
    while (open && s < a.S) {
        // 32 tokens at a time, up to the next one that opens a slot
        const bool there = s + lane < a.S;
        const unsigned others = __ballot_sync(FULL_WARP, there && s + lane > begin && !wants_to_join(a, row, s + lane));
        const int64_t left = a.S - s < 32 ? a.S - s : 32;
        const int n = others ? __popc((others & (0u - others)) - 1u) : static_cast<int>(left);
        open = !others;
        const float omega = there ? a.omega[row * a.S + s + lane] : 0.0f;
        for (int i = 0; !a.window && i < n; i++) {
            const float weight = __shfl_sync(FULL_WARP, omega, i), before = slot.z;
            slot.z += weight;
            const float keep = before == 0.0f ? 0.0f : before / slot.z, add = weight / slot.z;
            float k[COLUMNS], v[COLUMNS];
            load_token<COLUMNS, X>(a, row, s + i, k, v);
            KVC_UNROLL
            for (int c = 0; c < COLUMNS; c++) {
                slot.k[c] = fmaf(add, k[c], keep == 0.0f ? 0.0f : keep * slot.k[c]);
                slot.v[c] = fmaf(add, v[c], keep == 0.0f ? 0.0f : keep * slot.v[c]);
            }
        }
        slot.held += n;
        s += n;
    }
    if (a.window) average_ring<COLUMNS, X>(a, row, s, s - begin, slot);
    write_slot<COLUMNS, X>(a, row, s - 1, place, slot, keys);
    if (s == a.S) save_tail<COLUMNS, X>(a, row, s, s - begin, slot);
    return s;
}
