// How differently layers attend: see kvc_layer_similarity in kvc.h.
//
// The probabilities are never stored. One kernel finds maximum and normaliser of each row; a second has a block per query
// and head, which makes the probabilities of all layers for 64 keys in shared memory and then, a pair of layers per
// thread, adds their divergence up; a third adds the queries. Every sum has one thread and a fixed order.
// Must move: the keys twice, 2*L*Hkv*T*D*bytes; each block reads them for itself, G*S times as much, from L2 where the
// blocks of a KV head run side by side. Flops: 4*L*Hq*S*T*D for the logits and about 20*L*L*Hq*S*T for the pairs: the
// ceiling is the float32 rate.
// Not on tensor cores, as window_scores: for each query and key, L = 32 layers at D = 128 take 16,400 flops of logits twice, but
// also about 17,000 of pairs (496 of two logarithms each), which stay: at most 3 times faster, in an op that runs once per
// model that is converted.
#include "../divergence.h"
#include "kvc_cuda.h"
#include "types.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int KEYS = 64;         // per step of the second kernel
constexpr int PITCH = KEYS + 1;  // rows of shared memory off each other's banks
constexpr int64_t MAX_LAYERS = KVC_CUDA_MAX_SIMILARITY_LAYERS;

struct plan {
    int64_t rows;  // Hq*S
    int64_t pairs, bytes_queries, bytes_statistics, bytes_sums;
};

int64_t whole_lines(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

plan plan_of(const kvc_layer_similarity_args& a) {
    plan p = {};
    p.rows = a.Hq * a.S;
    p.pairs = a.L * (a.L - 1) / 2;
    p.bytes_queries = whole_lines(a.L * p.rows * a.D * static_cast<int64_t>(sizeof(float)));
    p.bytes_statistics = whole_lines(a.L * p.rows * static_cast<int64_t>(sizeof(float2)));
    p.bytes_sums = whole_lines(p.rows * p.pairs * static_cast<int64_t>(sizeof(double)));
    return p;
}

__device__ inline int64_t seen_end(const kvc_layer_similarity_args& a, int64_t s) { return a.T - a.S + s + 1 - a.recent; }

// queries [L, Hq, S, D] as float, times the scale.
__global__ __launch_bounds__(THREADS) void queries_kernel(const kvc_layer_similarity_args a, float* queries) {
    const int64_t count = a.L * a.Hq * a.S * a.D, step = gridDim.x * static_cast<int64_t>(THREADS);
    for (int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; i < count; i += step) {
        const int64_t d = i % a.D, s = i / a.D % a.S, h = i / a.D / a.S % a.Hq, l = i / a.D / a.S / a.Hq;
        queries[i] = a.scale * load_any(a.q.data, a.q.dtype, l * a.q.stride_b + h * a.q.stride_h + s * a.q.stride_t + d);
    }
}

template <class T, int VEC>
__device__ inline float dot(const float* q, const T* k, int64_t D) {
    float sum = 0.0f;
    for (int64_t d = 0; d < D; d += VEC) {
        float part[VEC];
        load<VEC>(part, k + d);
        KVC_UNROLL
        for (int e = 0; e < VEC; e++) sum += q[d + e] * part[e];
    }
    return sum;
}

__device__ inline float capped(float logit, float cap) {
    return cap > 0.0f ? cap * tanh_of_logit(logit, cap) : logit;
}

// (m, l) joined with another row part's; NaN stays in l.
__device__ inline void join(float& m, float& l, float other_m, float other_l) {
    const float top = fmaxf(m, other_m), shift = top == -INFINITY ? 0.0f : top;
    l = l * expf(m - shift) + other_l * expf(other_m - shift);
    m = top;
}

// (maximum, 1/normaliser) of each row of each layer: statistics [L, Hq, S].
template <class T, int VEC>
__global__ __launch_bounds__(THREADS) void statistics_kernel(const kvc_layer_similarity_args a, const float* queries,
                                                             float2* statistics) {
    __shared__ float top[WARPS], sum[WARPS];
    const int64_t row = blockIdx.x, s = row % a.S, h = row / a.S % a.Hq, layer = row / a.S / a.Hq;
    const T* k = static_cast<const T*>(a.k.data) + layer * a.k.stride_b + h / (a.Hq / a.Hkv) * a.k.stride_h;
    float m = -INFINITY, l = 0.0f;
    for (int64_t t = a.sinks + threadIdx.x; t < seen_end(a, s); t += THREADS) {
        const float logit = capped(dot<T, VEC>(queries + row * a.D, k + t * a.k.stride_t, a.D), a.softcap);
        join(m, l, logit, 1.0f);
    }
    for (int step = 16; step > 0; step /= 2) {
        const float other_m = __shfl_xor_sync(FULL_WARP, m, step), other_l = __shfl_xor_sync(FULL_WARP, l, step);
        join(m, l, other_m, other_l);
    }
    if (threadIdx.x % 32 == 0) {
        top[threadIdx.x / 32] = m;
        sum[threadIdx.x / 32] = l;
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < WARPS; warp++) join(m, l, top[warp], sum[warp]);
    float2 both;
    both.x = m;
    both.y = seen_end(a, s) <= a.sinks ? 0.0f : l > 0.0f && l < INFINITY ? 1.0f / l : NAN;
    statistics[row] = both;
}

// sums [Hq, S, pairs], pair (a, b) with b < a at a*(a - 1)/2 + b.
template <class T, int VEC>
__global__ __launch_bounds__(THREADS) void divergence_kernel(const kvc_layer_similarity_args a, const plan p,
                                                             const float* queries, const float2* statistics,
                                                             double* sums) {
    KVC_DYNAMIC_SHARED(float, rows);  // [L, PITCH]
    const int64_t row = blockIdx.x, s = row % a.S, h = row / a.S, end = seen_end(a, s);
    double* own = sums + row * p.pairs;
    for (int64_t pair = threadIdx.x; pair < p.pairs; pair += THREADS) own[pair] = 0.0;
    for (int64_t t0 = a.sinks; t0 < end; t0 += KEYS) {
        for (int64_t i = threadIdx.x; i < a.L * KEYS; i += THREADS) {
            const int64_t layer = i / KEYS, t = t0 + i % KEYS;
            float probability = 0.0f;
            if (t < end) {
                const T* k = static_cast<const T*>(a.k.data) + layer * a.k.stride_b +
                             h / (a.Hq / a.Hkv) * a.k.stride_h + t * a.k.stride_t;
                const float2 row_of_layer = statistics[layer * p.rows + row];
                const float logit = capped(dot<T, VEC>(queries + (layer * p.rows + row) * a.D, k, a.D), a.softcap);
                probability = expf(logit - row_of_layer.x) * row_of_layer.y;
            }
            rows[layer * PITCH + i % KEYS] = probability;
        }
        __syncthreads();
        for (int64_t pair = threadIdx.x; pair < p.pairs; pair += THREADS) {
            int64_t high = static_cast<int64_t>((1.0f + sqrtf(static_cast<float>(1 + 8 * pair))) * 0.5f);
            while (high * (high - 1) / 2 > pair) high--;  // the root is rounded
            while (high * (high + 1) / 2 <= pair) high++;
            const float* first = rows + high * PITCH;
            const float* second = rows + (pair - high * (high - 1) / 2) * PITCH;
            float sum = 0.0f;
            for (int j = 0; j < KEYS; j++) sum += kvc_divergence_term(first[j], second[j]);
            own[pair] += 0.5 * static_cast<double>(sum);
        }
        __syncthreads();
    }
}

__global__ __launch_bounds__(THREADS) void sums_kernel(const kvc_layer_similarity_args a, const plan p, const double* sums) {
    const int64_t count = a.Hq * a.L * a.L, step = gridDim.x * static_cast<int64_t>(THREADS);
    for (int64_t i = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x; i < count; i += step) {
        const int64_t x = i % a.L, y = i / a.L % a.L, h = i / a.L / a.L, high = x > y ? x : y, low = x > y ? y : x;
        double sum = 0.0;
        for (int64_t s = 0; s < a.S && high > low; s++) {
            const double js = sums[(h * a.S + s) * p.pairs + high * (high - 1) / 2 + low];
            sum += js < 0.0 ? 0.0 : js > 1.0 ? 1.0 : js;  // rounding; NaN stays
        }
        a.sums[i] = sum;
    }
}

bool valid(const kvc_layer_similarity_args& a) {
    return a.L >= 0 && a.L <= MAX_LAYERS && a.Hq >= 0 && a.Hkv >= 0 && a.S >= 0 && a.S <= a.T && a.T <= INT32_MAX &&
           a.D >= 0 && a.D <= KVC_CUDA_MAX_HEAD_DIM && dtype_known(a.q.dtype) && dtype_known(a.k.dtype) &&
           a.sinks >= 0 && a.sinks <= INT32_MAX && a.recent >= 0 && a.recent <= INT32_MAX && a.scale >= 0.0f &&
           scale_is_good(a.scale, a.softcap) &&
           (a.Hkv ? a.Hq % a.Hkv == 0 : a.Hq == 0);
}

unsigned grid_for(int64_t items) {
    const int64_t blocks = ceil_div(items, THREADS);
    return static_cast<unsigned>(blocks < MAX_GRID_X ? blocks : MAX_GRID_X);
}

template <class T, int VEC>
cudaError_t compare(const kvc_layer_similarity_args& a, const plan& p, float* queries, float2* statistics, double* sums,
                    cudaStream_t stream) {
    KVC_LAUNCH((statistics_kernel<T, VEC>), static_cast<unsigned>(a.L * p.rows), THREADS, 0, stream, a, queries,
               statistics);
    const int shared = static_cast<int>(a.L) * PITCH * static_cast<int>(sizeof(float));
    KVC_LAUNCH((divergence_kernel<T, VEC>), static_cast<unsigned>(p.rows), THREADS, static_cast<size_t>(shared), stream, a,
               p, queries, statistics, sums);
    return cudaSuccess;
}

}  // namespace

extern "C" int64_t kvc_cuda_layer_similarity_scratch_bytes(const kvc_layer_similarity_args* args) {
    if (!valid(*args) || args->L == 0 || args->Hq == 0 || args->S == 0) return 0;
    const plan p = plan_of(*args);
    return p.bytes_queries + p.bytes_statistics + p.bytes_sums;
}

extern "C" cudaError_t kvc_cuda_layer_similarity(const kvc_layer_similarity_args* args, cudaStream_t stream) {
    const kvc_layer_similarity_args& a = *args;
    if (!valid(a)) return cudaErrorInvalidValue;
    if (a.L == 0 || a.Hq == 0) return cudaSuccess;
    if (!a.sums || (a.S && (!a.scratch || (a.D && (!a.q.data || !a.k.data))))) return cudaErrorInvalidValue;
    const plan p = plan_of(a);
    if (a.L * p.rows > MAX_GRID_X) return cudaErrorInvalidValue;
    char* scratch = static_cast<char*>(a.scratch);
    float* queries = reinterpret_cast<float*>(scratch);
    float2* statistics = reinterpret_cast<float2*>(scratch + p.bytes_queries);
    double* sums = reinterpret_cast<double*>(scratch + p.bytes_queries + p.bytes_statistics);
    if (a.S) {
        if (a.D) KVC_LAUNCH(queries_kernel, grid_for(a.L * p.rows * a.D), THREADS, 0, stream, a, queries);
        const bool wide = aligned_16(a.k) && a.D * bytes_of(a.k.dtype) % 16 == 0;
        KVC_TRY(with_dtype(a.k.dtype, [&](auto element) {
            using T = decltype(element);
            return wide ? compare<T, PER_16_BYTES<T>>(a, p, queries, statistics, sums, stream)
                        : compare<T, 1>(a, p, queries, statistics, sums, stream);
        }));
    }
    KVC_LAUNCH(sums_kernel, grid_for(a.Hq * a.L * a.L), THREADS, 0, stream, a, p, sums);
    return cudaSuccess;
}
