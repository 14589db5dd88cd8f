// One decoded step of DMC's cache: see kvc_dmc_step in kvc_step.h.
//
// Must move, beside what decode reads: the queries in and out, the new keys and values, each row's tail and newest slot in
// and out, 12*R*D bytes of float32 and 2*R*D elements. What counts is launches: one block decides, takes the pages, lists
// decode's pieces and, for a few rows, writes their slots and rotates the queries; then the kernel of decode's pieces.
// With many sequences rows and queries have a launch of their own.
#include "../dmc_step.h"
#include "dmc_rows.cuh"
#include "gates.cuh"
#include "step.cuh"

namespace {

// Warps of that block: fewer where a row's columns take their registers and shared memory.
template <int COLUMNS>
constexpr int WARPS_OF = COLUMNS <= 2 ? STEP_WARPS : COLUMNS <= 4 ? STEP_WARPS / 2 : PLACE_WARPS;

kvc_dmc_parts parts_of(const kvc_step& a) {
    const kvc_decode_args decode = kvc_step_decode(&a, nullptr);
    return kvc_dmc_parts_of(&a, kvc_cuda_decode_scratch_bytes(&decode));
}

// Query head `item`, then row item - B*Hq, by a warp; keys: float [32 * COLUMNS] of shared memory of the warp's own.
template <int COLUMNS, class X>
__device__ inline void place_head(const kvc_dmc_step_args& args, const kvc_dmc_parts& p, const kvc_dmc_append_args& a,
                                  int64_t item, float* keys) {
    const kvc_step& step = args.step;
    const int64_t queries = a.B * step.Hq, b = quotient(item, step.Hq);
    if (item < queries) {
        turn_head(step, step.q, row_at(step.q, b, remainder_of(item, step.Hq), 0), p.q, item * a.D, p.positions[b], a.neuron);
        return;
    }
    const notes n = notes_of(a);
    if (!*n.refused) settle_row<COLUMNS, X>(a, n, item - queries, keys);
}

// `a`: the append, all of it.
template <int COLUMNS, class X>
__global__ __launch_bounds__(32 * WARPS_OF<COLUMNS>, 1) void begin_kernel(const kvc_dmc_step_args args,
                                                             const kvc_dmc_parts p, const kvc_dmc_append_args a,
                                                             const kvc_decode_args decode, const plan pieces,
                                                             const scratch s, int64_t heads) {
    __shared__ float keys[WARPS_OF<COLUMNS>][32 * COLUMNS];
    for (int64_t row = threadIdx.x; row < a.table.R; row += blockDim.x) {
        const int64_t b = quotient(row, a.Hkv), h = remainder_of(row, a.Hkv);
        if (!args.alpha) {
            kvc_view x = a.k;
            const float logit = load_any(x.data, x.dtype, row_at(x, b, h, 0) + a.neuron);
            p.alpha[row] = decision_at(logit, 1.0f, args.decision_shift) > args.decision_margin ? 1.0f : 0.0f;
        }
        if (!args.omega) {
            kvc_view x = args.step.q;
            x.data = static_cast<char*>(x.data) + a.neuron * (x.dtype == KVC_F32 ? 4 : 2);
            p.omega[row] = importance_at(x, b, h, 0, args.step.Hq / a.Hkv, args.omega_shift, args.omega_eps, args.reduce);
        }
    }
    for (int64_t b = threadIdx.x; b < a.B; b += blockDim.x) {
        const int32_t place = args.places[b];
        p.positions[b] = place + (args.offsets ? args.offsets[b] : 0);
    }
    __syncthreads();
    grow_rows(a, misses_page(a.table, nullptr));
    __syncthreads();
    for (int64_t b = threadIdx.x; b < a.B && !*notes_of(a).refused; b += blockDim.x) args.places[b]++;
    list_pieces(decode, pieces, s);
    for (int64_t item = threadIdx.x / 32; item < heads; item += WARPS_OF<COLUMNS>)
        place_head<COLUMNS, X>(args, p, a, item, keys[threadIdx.x / 32]);
}

template <int COLUMNS, class X>
__global__ __launch_bounds__(PLAN_THREADS, 1) void place_kernel(const kvc_dmc_step_args args, const kvc_dmc_parts p,
                                                             const kvc_dmc_append_args a, int64_t heads) {
    __shared__ float keys[PLACE_WARPS][32 * COLUMNS];
    const int64_t between = gridDim.x * static_cast<int64_t>(PLACE_WARPS);
    for (int64_t item = blockIdx.x * static_cast<int64_t>(PLACE_WARPS) + threadIdx.x / 32; item < heads; item += between)
        place_head<COLUMNS, X>(args, p, a, item, keys[threadIdx.x / 32]);
}

}  // namespace

extern "C" int64_t kvc_cuda_dmc_step_scratch_bytes(const kvc_dmc_step_args* args) {
    return kvc_step_is_sized(&args->step, kvc_dmc_step_check(args)) ? parts_of(args->step).bytes : 0;
}

extern "C" cudaError_t kvc_cuda_dmc_step(const kvc_dmc_step_args* args, cudaStream_t stream) {
    const kvc_step& step = args->step;
    const kvc_status checked = kvc_dmc_step_check(args);
    if (checked != KVC_OK || kvc_step_is_empty(&step)) return error_of(checked);
    const kvc_dmc_parts p = parts_of(step);
    kvc_decode_args decode = kvc_step_decode(&step, p.q);
    decode.scratch = p.decode;
    const kvc_dmc_append_args a = kvc_dmc_step_append(args, &p);
    const plan pieces = plan_of(decode);
    const int64_t heads = a.B * (step.Hq + a.Hkv), alone = heads_alone(step, heads, false, 0);
    if (!fits_grids(pieces) || heads > MAX_GRID_X) return cudaErrorInvalidValue;
    const cudaError_t begun = with_dtype(a.k.dtype, [&](auto type) {
        using X = decltype(type);
        return with_columns(a.D, [&](auto columns) {
            constexpr int COLUMNS = decltype(columns)::value;
            KVC_LAUNCH((begin_kernel<COLUMNS, X>), 1, 32 * WARPS_OF<COLUMNS>, 0, stream, *args, p, a, decode, pieces,
                       scratch_of(decode, pieces), alone);
            if (!alone)
                KVC_LAUNCH((place_kernel<COLUMNS, X>), place_blocks(heads), PLAN_THREADS, 0, stream, *args, p, a, heads);
            return cudaSuccess;
        });
    });
    return begun == cudaSuccess ? decode_listed(decode, stream) : begun;
}
