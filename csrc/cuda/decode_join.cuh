// The results of a row's pieces joined: GROUP pieces at a time, in their order, then the groups. Where a row's queries are
// a tile (plan.fused), the block that finishes the last piece of a group joins that, and the one that finishes the last
// group of a row joins these: no block ever waits for another. Else join_kernel of decode.cu does, with the same bits.
//
// What is read was written by other blocks a moment ago and lies in L2: a group of 32 pieces, 4 queries and D = 128 is
// 64 KB, which a block of 128 threads, 32 KB of it under way, has in about two trips there.
#pragma once
#include "decode_pieces.cuh"

namespace {

template <int VEC>
struct columns_of_lane {
    using type = float;
};
template <>
struct columns_of_lane<4> {
    using type = float4;
};

// A query's results together; sum: with its sink. top: of its keys alone.
template <int VEC>
struct joined {
    float top, sum, value[VEC];
};

// A warp: `count` results of a query, statistics and values so far apart. values: of the lane's VEC columns, if it has any
// (here), of AT_ONCE results at a time. sink: in base 2. Reads go past the multiprocessor's own cache: other blocks of the
// launch have written what they are for.
template <int VEC, int AT_ONCE>
__device__ inline joined<VEC> join(const float2* statistics, int64_t apart, const float* values, int64_t values_apart,
                                   int count, bool here, float sink) {
    using unit = typename columns_of_lane<VEC>::type;
    const int lane = threadIdx.x % 32;
    const auto statistic = [&](int i) {
        float2 one;
        one.x = -INFINITY;
        one.y = 0.0f;
        if (i < count) one = __ldcg(statistics + i * apart);
        return one;
    };
    unit under_way[AT_ONCE] = {};
    const auto fetch = [&](int first) {
        KVC_UNROLL
        for (int u = 0; u < AT_ONCE; u++)
            if (here && first + u < count)
                under_way[u] = __ldcg(reinterpret_cast<const unit*>(values + (first + u) * values_apart));
    };
    const float2 first_ones = statistic(lane);
    fetch(0);
    joined<VEC> all = {};
    all.top = first_ones.x;
    for (int i = 32 + lane; i < count; i += 32) all.top = fmaxf(all.top, statistic(i).x);
    KVC_UNROLL
    for (int step = 16; step > 0; step /= 2) all.top = fmaxf(all.top, __shfl_xor_sync(FULL_WARP, all.top, step));
    const float shift = finite_or_0(fmaxf(all.top, sink));
    for (int base = 0; base < count; base += 32) {
        const float2 own = base ? statistic(base + lane) : first_ones;
        const float weight = exp2f(own.x - shift);
        all.sum = fmaf(weight, own.y, all.sum);
        KVC_ROLLED
        for (int half = 0; half < 32 && base + half < count; half += AT_ONCE) {
            if (base + half > 0) fetch(base + half);
            KVC_UNROLL
            for (int u = 0; u < AT_ONCE; u++) {
                const float share = __shfl_sync(FULL_WARP, weight, half + u);
                if (base + half + u >= count) continue;
                float value[VEC];
                memcpy(value, &under_way[u], sizeof value);
                KVC_UNROLL
                for (int e = 0; e < VEC; e++) all.value[e] = fmaf(share, value[e], all.value[e]);
            }
        }
    }
    KVC_UNROLL
    for (int step = 16; step > 0; step /= 2) all.sum += __shfl_xor_sync(FULL_WARP, all.sum, step);
    all.sum += exp2f(sink - shift);  // a sink that is NaN shows
    return all;
}

// The sink of query n of a row, -inf without one.
__device__ inline float sink_of(const kvc_decode_args& a, const query& q) {
    return a.sink_logits ? a.sink_logits[q.h] : -INFINITY;
}

// Columns [d, d + VEC) of a query's result, and with the first ones its lse.
template <int VEC>
__device__ inline void write_result(const kvc_decode_args& a, int64_t row, const query& q, int d, const joined<VEC>& all) {
    const float sink = sink_of(a, q), shift = finite_or_0(fmaxf(all.top, sink * LOG2_E));
    const int64_t at = (quotient(row, a.Hkv) * a.Hq + q.h) * a.S + q.s;
    KVC_UNROLL
    for (int e = 0; e < VEC; e++)
        store_any(a.out, a.q.dtype, at * a.D + d + e, all.sum == 0.0f ? 0.0f : all.value[e] / all.sum);
    const bool no_key = all.top == -INFINITY && all.sum == 1.0f;  // then the sink's own bits
    if (d == 0) a.lse[at] = all.sum == 0.0f ? -INFINITY : no_key ? sink : (shift + log2f(all.sum)) * LN_2;
}

// A warp: a row without pieces, of which nobody else knows.
__device__ inline void write_keyless(const kvc_decode_args& a, const plan& p, int64_t row) {
    for (int64_t i = threadIdx.x % 32; i < p.queries * a.D; i += 32) {
        const int64_t n = quotient(i, a.D);
        const query q = query_of(a, p, remainder_of(row, a.Hkv), n, 0);
        const float sink = sink_of(a, q) * LOG2_E;
        const joined<1> none = {-INFINITY, exp2f(sink - finite_or_0(fmaxf(-INFINITY, sink))), {0.0f}};
        write_result<1>(a, row, q, static_cast<int>(i - n * a.D), none);
    }
}

// A warp: 32*VEC columns, from `column` on, of query n's results in a group of a row's pieces. They come to lie where those
// of the group's first piece do.
template <int VEC, int AT_ONCE = 16>
__device__ inline void join_group(const kvc_decode_args& a, const plan& p, const scratch& s, int64_t row, int pieces,
                                  int64_t n, int group, int column) {
    const int lane = threadIdx.x % 32, d = column + VEC * lane, D = static_cast<int>(a.D), left = pieces - group * GROUP;
    const int64_t first = (row * p.row_pieces + group * GROUP) * p.queries + n;
    const joined<VEC> all = join<VEC, AT_ONCE>(s.statistics + first, p.queries, s.values + first * D + d, p.queries * D,
                                      left < GROUP ? left : GROUP, d < D, -INFINITY);
    if (d < D) {
        typename columns_of_lane<VEC>::type value;
        memcpy(&value, all.value, sizeof value);
        *reinterpret_cast<decltype(value)*>(s.values + first * D + d) = value;
    }
    float2 both;
    both.x = all.top;
    both.y = all.sum;
    if (d == 0) s.groups[(row * p.row_groups + group) * p.queries + n] = both;
}

// A warp: 32*VEC columns of the result of query n of a row of pieces, whose groups are joined if they are several. Returns
// what probabilities are relative to, and their sum.
template <int VEC, int AT_ONCE = 16>
__device__ inline float2 join_row(const kvc_decode_args& a, const plan& p, const scratch& s, int64_t row, int pieces,
                                  int64_t n, int column) {
    const int d = column + VEC * static_cast<int>(threadIdx.x % 32), D = static_cast<int>(a.D), groups = groups_in(pieces);
    const query q = query_of(a, p, remainder_of(row, a.Hkv), n, 0);
    const float sink = sink_of(a, q) * LOG2_E;
    const bool grouped = groups > 1;
    const int64_t first = row * p.row_pieces * p.queries + n;
    const float2* statistics = grouped ? s.groups + row * p.row_groups * p.queries + n : s.statistics + first;
    const joined<VEC> all = join<VEC, AT_ONCE>(statistics, p.queries, s.values + first * D + d, (grouped ? GROUP : 1) * p.queries * D,
                                      grouped ? groups : pieces, d < D, sink);
    if (d < D) write_result<VEC>(a, row, q, d, all);
    float2 both;
    both.x = finite_or_0(fmaxf(all.top, sink));
    both.y = all.sum;
    return both;
}

// A whole block, whose results are written: whether they are the last of `all` that count here. If so, it sees those of the
// others: what a block writes comes before its barrier and the fence before its count, what it reads behind a fence.
__device__ inline bool counts_last(int32_t* counter, int all) {
    __shared__ int before;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        before = atomicAdd(counter, 1);
        __threadfence();
    }
    __syncthreads();
    return before + 1 == all;
}

// A whole block, all of its threads, that has written a piece's results.
template <int VEC, int AT_ONCE = 16>
__device__ inline void join_behind(const kvc_decode_args& a, const plan& p, const scratch& s, const int4& piece) {
    if (!p.fused) return;
    const int64_t row = piece.x;
    const int of_front = a.sinks > 0 ? static_cast<int>(pieces_in(front_of(a, p, row))) : 0;
    const int pieces = of_front + static_cast<int>(pieces_in(int64_t{piece.z} - begin_of(a, row)));
    const int groups = groups_in(pieces), group = number_of(p, piece) / GROUP, left = pieces - group * GROUP;
    const int queries = static_cast<int>(p.queries), chunks = (static_cast<int>(a.D) + 32 * VEC - 1) / (32 * VEC);
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    int32_t* done = counters_of(p, s, row);
    if (!counts_last(done + 1 + group, left < GROUP ? left : GROUP)) return;
    if (groups > 1) {
        for (int i = warp; i < queries * chunks; i += warps)
            join_group<VEC, AT_ONCE>(a, p, s, row, pieces, i / chunks, group, i % chunks * 32 * VEC);
        if (!counts_last(done, groups)) return;
    }
    for (int i = warp; i < queries * chunks; i += warps)
        join_row<VEC, AT_ONCE>(a, p, s, row, pieces, i / chunks, i % chunks * 32 * VEC);
}

}  // namespace
