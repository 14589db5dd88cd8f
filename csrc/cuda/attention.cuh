// What the kernels of attention share: the softmax, the mask, and tiles of rows in shared memory.
#pragma once
#include "kvc_cuda.h"
#include "tile.cuh"

// e^(x - y). For 16-bit types one FMA and ex2; for float32 the difference comes first, so that it loses nothing.
template <class T>
__device__ inline float exp_of_difference(float x, float y) {
    if constexpr (sizeof(T) == 2) return exp2_fast(x * LOG2_E - y * LOG2_E);
    else return expf(x - y);
}

// Online softmax of a warp, of the logits x of its rows and a tile of keys, which become weights: maxima m rise to theirs,
// sums l and values get smaller by as much, and the weights are added to l. Four lanes share a row; each has an l of its own.
// factor: of 16-bit types what makes logits of base 2 of x.
template <class T, int BLOCKS, int L, int N>
__device__ inline void weigh_tile(float (&x)[BLOCKS][L][4], float (&m)[BLOCKS][2], float (&l)[BLOCKS][2],
                                  float (&values)[BLOCKS][N][4], float factor) {
    float keep[BLOCKS][2];
    bool moved = false;
    KVC_UNROLL
    for (int i = 0; i < 2 * BLOCKS; i++) {
        const int j = i / 2, r = i % 2;
        float top = m[j][r];
        KVC_UNROLL
        for (int n = 0; n < 2 * L; n++) top = fmaxf(top, x[j][n / 2][2 * r + n % 2]);
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
        moved |= top > m[j][r];
        const float shift = finite_or_0(top);
        keep[j][r] = sizeof(T) == 2 ? exp2_fast((m[j][r] - shift) * factor) : expf(m[j][r] - shift);
        l[j][r] *= keep[j][r];
        m[j][r] = top;
        KVC_UNROLL
        for (int n = 0; n < 2 * L; n++) {
            float& weight = x[j][n / 2][2 * r + n % 2];
            if constexpr (sizeof(T) == 2) weight = exp2_fast(weight * factor - shift * factor);
            else weight = expf(weight - shift);
            l[j][r] += weight;
        }
    }
    // Maxima settle after a few tiles; then nothing is scaled
    if (__ballot_sync(FULL_WARP, moved)) {
        KVC_UNROLL
        for (int i = 0; i < BLOCKS * N * 4; i++) values[i / N / 4][i / 4 % N][i % 4] *= keep[i / N / 4][i % 4 / 2];
    }
}

// Joins the sink of a head to a row's maximum and sum; returns by what sums made with the old maximum shrink. NaN shows.
__device__ inline float join_sink(float sink, float& m, float& l) {
    if (sink == -INFINITY) return 1.0f;
    const float top = fmaxf(m, sink), keep = m == -INFINITY ? 0.0f : expf(m - top);
    l = l * keep + expf(sink - top);
    m = top;
    return keep;
}

__device__ inline float sink_of(const kvc_attention_args& a, int64_t h) {
    return a.sink_logits ? a.sink_logits[h] : -INFINITY;
}

// The mask of one call; window and sinks are cut to T, beyond which they change nothing.
struct mask_settings {
    int S, T, window, sinks;
    bool causal, complement;
};

inline mask_settings mask_of(const kvc_attention_args& a) {
    mask_settings m = {};
    m.S = static_cast<int>(a.S);
    m.T = static_cast<int>(a.T);
    m.window = static_cast<int>(a.window < a.T ? a.window : a.T);
    m.sinks = static_cast<int>(a.sinks < a.T ? a.sinks : a.T);
    m.causal = a.causal;
    m.complement = a.complement;
    return m;
}

__device__ inline int smaller(int a, int b) { return a < b ? a : b; }
__device__ inline int larger(int a, int b) { return a > b ? a : b; }

// The mask of one sequence: query s stands at position shift + s.
struct sequence_mask : mask_settings {
    int length, shift;
    bool has_window;

    __device__ sequence_mask(const mask_settings& m, const kvc_attention_args& a, int64_t b) : mask_settings(m) {
        length = a.lengths ? larger(0, smaller(a.lengths[b], T)) : T;
        shift = length - S;
        has_window = a.window > 0;
    }
    // Of the keys that query s sees: one past the last, and the first in its window.
    __device__ int end_of(int s) const {
        const int i = shift + s;
        return i < 0 || s >= S ? 0 : causal ? smaller(i + 1, length) : length;
    }
    __device__ int window_of(int s) const { return has_window ? shift + s - window + 1 : -T; }
    // end, near: what these say of the query.
    __device__ bool sees_key(int end, int near, int t) const { return t < end && (t < sinks || t >= near) != complement; }
    __device__ bool sees(int s, int t) const { return sees_key(end_of(s), window_of(s), t); }
    // Whether each of `queries` queries from s sees each of `keys` keys from t.
    __device__ bool sees_all(int s, int queries, int t, int keys) const {
        const int low = shift + s, high = low + queries - 1, last = t + keys - 1;
        if (last >= length || low < 0 || s + queries > S) return false;
        if (!causal) return true;
        if (last > low) return false;
        if (!has_window) return true;
        return complement ? t >= sinks && last <= low - window : last < sinks || t > high - window;
    }
    // Whether one of them may see one: false where the end of the queries, the diagonal or a window rules it out.
    __device__ bool sees_some(int s, int queries, int t, int keys) const {
        const int low = shift + s, high = shift + smaller(s + queries, S) - 1;
        if (s >= S || high < 0) return false;
        if (!causal) return true;
        if (t > high) return false;
        return !has_window || complement || t < sinks || t + keys - 1 > low - window;
    }
};

// Tiles of SIZE keys that some of `queries` queries from s see: those of the sinks, then those in the window.
template <int SIZE>
struct key_tiles {
    int sink_tiles, near, end;

    __device__ key_tiles(const sequence_mask& m, int s, int queries) {
        const int low = larger(0, m.shift + s), high = m.shift + smaller(s + queries, m.S) - 1;
        int keys_begin = 0, keys_end = m.causal ? smaller(high + 1, m.length) : m.length, sink_keys = 0;
        if (m.has_window && m.complement) {
            keys_begin = m.sinks;
            keys_end = smaller(keys_end, high - m.window + 1);
        } else if (m.has_window) {
            keys_begin = larger(0, low - m.window + 1);
            sink_keys = smaller(m.sinks, keys_end);
        }
        if (high < 0 || keys_begin >= keys_end) keys_end = 0;
        sink_tiles = keys_end > 0 ? (sink_keys + SIZE - 1) / SIZE : 0;
        near = keys_begin / SIZE;
        end = (keys_end + SIZE - 1) / SIZE;
    }
    __device__ int first() const { return sink_tiles > 0 ? 0 : near; }
    __device__ int after(int tile) const { return tile + 1 >= sink_tiles && tile + 1 < near ? near : tile + 1; }
};

// Queries [begin, end) among which are all that see some of `keys` keys from t.
struct query_range {
    int begin, end;

    __device__ query_range(const sequence_mask& m, int t, int keys) {
        const int last = smaller(t + keys, m.length) - 1;
        int low = 0, high = m.length;  // positions
        if (m.causal) low = t;
        if (m.has_window && m.complement) low = larger(t, m.sinks) + m.window;
        else if (m.has_window && t >= m.sinks) high = smaller(high, last + m.window);
        if (last < t || (m.has_window && m.complement && last < m.sinks)) high = low;
        begin = larger(0, low - m.shift);
        end = high - m.shift;
        begin = larger(begin, -m.shift);
    }
};

// ROWS rows of x[b, h] from `first` as a tile in shared memory, zeros for rows from `end` on and for columns from D to
// K (D rounded up to 16). Wide: by copies in the background, which the caller commits and waits for.
template <int ROWS, int MAX_D, int THREADS, class T>
__device__ inline void load_rows(T* to, const kvc_view& x, bool wide, int64_t b, int64_t h, int first, int end, int D) {
    constexpr int VEC = PER_16_BYTES<T>, CHUNKS = MAX_D / VEC, STEP = THREADS / CHUNKS, PITCH = pitch_of<T>(MAX_D);
    const int column = static_cast<int>(threadIdx.x) % CHUNKS * VEC, own = static_cast<int>(threadIdx.x) / CHUNKS;
    if (column >= (D + 15) / 16 * 16) return;
    const T* from = static_cast<const T*>(x.data) + b * x.stride_b + h * x.stride_h + (first + own) * x.stride_t + column;
    to += own * PITCH + column;
    const int64_t next = STEP * x.stride_t;
    const int rows = column < D ? end - first - own : 0;  // from the own one on
    if (wide) {
        KVC_UNROLL
        for (int row = 0; row < ROWS; row += STEP, from += next)
            if (ROWS % STEP == 0 || own + row < ROWS) copy_16_async(to + row * PITCH, from, row < rows);
    } else {
        KVC_ROLLED
        for (int row = 0; own + row < ROWS; row += STEP, from += next) {
            packed<T, VEC> part = {};
            KVC_UNROLL
            for (int e = 0; e < VEC; e++)
                if (row < rows && column + e < D) part.at[e] = from[e];
            *reinterpret_cast<packed<T, VEC>*>(to + row * PITCH) = part;
        }
    }
}

// Rows [first, end) of x[b, h], at most ROWS, from a tile in shared memory.
template <int ROWS, int MAX_D, int THREADS, class T>
__device__ inline void store_rows(const kvc_view& x, bool wide, int64_t b, int64_t h, int first, int end, int D,
                                  const T* from) {
    constexpr int VEC = PER_16_BYTES<T>, CHUNKS = MAX_D / VEC, STEP = THREADS / CHUNKS;
    const int column = static_cast<int>(threadIdx.x) % CHUNKS * VEC;
    if (column >= D) return;
    T* to = static_cast<T*>(x.data) + b * x.stride_b + h * x.stride_h + column;
    for (int row = static_cast<int>(threadIdx.x) / CHUNKS; row < ROWS && first + row < end; row += STEP) {
        const packed<T, VEC> part = *reinterpret_cast<const packed<T, VEC>*>(from + row * pitch_of<T>(MAX_D) + column);
        T* at = to + (first + row) * x.stride_t;
        if (wide) {
            uint4 bits;
            memcpy(&bits, &part, sizeof bits);
            __stwb(reinterpret_cast<uint4*>(at), bits);  // a plain store may be split, see store() in types.cuh
        } else {
            KVC_UNROLL
            for (int e = 0; e < VEC; e++)
                if (column + e < D) at[e] = part.at[e];
        }
    }
}

// ---- host ----

// Whether 16-byte loads and stores cover the rows of x.
inline bool wide_rows(const kvc_view& x, int64_t D) { return aligned_16(x) && D * bytes_of(x.dtype) % 16 == 0; }

inline bool valid_attention(const kvc_attention_args& a) {
    const bool sizes = a.B >= 0 && a.Hq >= 0 && a.Hkv >= 0 && a.S >= 0 && a.T >= 0 && a.D >= 1 && a.S <= a.T &&
                       a.T <= MAX_GRID_X / 2 && a.D <= KVC_CUDA_MAX_HEAD_DIM &&
                       (a.Hq == 0 || (a.Hkv > 0 && a.Hq % a.Hkv == 0));
    const bool mask = a.window >= 0 && a.sinks >= 0 && (a.causal || a.window == 0) && (a.window > 0 || !a.complement);
    return sizes && mask && scale_is_good(a.scale, a.softcap) && dtype_known(a.q.dtype) && a.k.dtype == a.q.dtype &&
           a.v.dtype == a.q.dtype && a.out.dtype == a.q.dtype;
}

// Head dims above 256, and others where the tiles do not fit into a block's shared memory: attention_wide.cu.
cudaError_t attend_wide(const kvc_attention_args& a, cudaStream_t stream);
// All but delta and the gradients of the sinks.
cudaError_t attend_wide_backward(const kvc_attention_backward_args& a, const float* delta, cudaStream_t stream);
