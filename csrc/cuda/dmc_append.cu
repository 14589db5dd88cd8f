// DMC's cache at inference: see kvc_dmc_append in kvc.h.
//
// Must move: the new tokens in, 2*R*S*D*(bytes), every slot that they open or join out, 4*D*(1 to window) bytes of state
// per row in and out. A decode step (S = 1) is two launches of a few microseconds each; in a long prompt a warp takes the
// slots that open within one piece of a row. No two warps write the same slot, and none waits for another.
// A slot's tokens are taken one after the other, so that any chunks of a prompt give the same bits.
#include "dmc_rows.cuh"

namespace {

constexpr int APPEND_WARPS = 4;

// A warp per piece of a row.
__global__ __launch_bounds__(APPEND_WARPS * 32) void count_kernel(const kvc_dmc_append_args a) {
    const notes n = notes_of(a);
    const int lane = threadIdx.x % 32;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(APPEND_WARPS) + threadIdx.x / 32; i < a.table.R * n.count;
         i += gridDim.x * static_cast<int64_t>(APPEND_WARPS)) {
        const int64_t row = i / n.count, piece = i % n.count * KVC_DMC_PIECE, first = a.S - count_of(a, row);
        int opened = 0;
        for (int64_t s = piece; s < piece + KVC_DMC_PIECE && s < a.S; s += 32) {
            const bool there = s + lane < piece + KVC_DMC_PIECE && s + lane < a.S && s + lane >= first;
            // the first token of the row is settled where the row's length is known
            opened += __popc(__ballot_sync(FULL_WARP, there && s + lane > first && !wants_to_join(a, row, s + lane)));
        }
        if (lane == 0) n.pieces[i] = opened;
    }
}

__global__ __launch_bounds__(MOST_THREADS) void grow_kernel(const kvc_dmc_append_args a) { grow_rows(a); }

// A warp per row.
template <int COLUMNS, class X>
__global__ __launch_bounds__(APPEND_WARPS * 32, 1) void rows_kernel(const kvc_dmc_append_args a) {
    __shared__ float keys[APPEND_WARPS][32 * COLUMNS];
    const notes n = notes_of(a);
    const int64_t row = blockIdx.x * static_cast<int64_t>(APPEND_WARPS) + threadIdx.x / 32;
    if (row < a.table.R && !*n.refused) settle_row<COLUMNS, X>(a, n, row, keys[threadIdx.x / 32]);
}

// A warp per piece of a row.
template <int COLUMNS, class X>
__global__ __launch_bounds__(APPEND_WARPS * 32, 1) void pieces_kernel(const kvc_dmc_append_args a) {
    __shared__ float keys[APPEND_WARPS][32 * COLUMNS];
    const notes n = notes_of(a);
    if (*n.refused) return;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(APPEND_WARPS) + threadIdx.x / 32; i < a.table.R * n.count;
         i += gridDim.x * static_cast<int64_t>(APPEND_WARPS))
        open_slots<COLUMNS, X>(a, n, i / n.count, i % n.count, keys[threadIdx.x / 32]);
}

// ---- host ----

bool valid(const kvc_dmc_append_args& a) {
    if (a.B < 0 || a.Hkv < 0 || a.S < 0 || a.S > INT32_MAX || a.table.R != a.B * a.Hkv) return false;
    if (a.D < 1 || a.D > KVC_CUDA_MAX_HEAD_DIM || a.neuron < -1 || a.neuron >= a.D) return false;
    if (a.rotary_dim < 0 || a.rotary_dim > a.D || a.rotary_dim % 2 || a.table_rows < 0) return false;
    if (a.window < 0 || a.window > KVC_DMC_MAX_WINDOW || (a.rotary_dim && !a.positions && a.S > a.table_rows)) return false;
    if (!dtype_known(a.k.dtype) || a.v.dtype != a.k.dtype || format_takes(a.rows.format, a.k.dtype, a.D) != KVC_OK) return false;
    if (!valid_table(a.table)) return false;
    if (a.table.R == 0 || a.S == 0) return true;
    if (!a.k.data || !a.v.data || !a.alpha || !a.omega || !a.tail_k || !a.tail_v || !a.tail_w || !a.tail_counts ||
        !a.scratch || (a.table.pages && !rows_are_there(&a.rows)))
        return false;
    return a.rotary_dim == 0 || a.table_rows == 0 || (a.cos && a.sin);
}

unsigned grid_of(int64_t warps) {
    const int64_t blocks = ceil_div(warps, APPEND_WARPS);
    return static_cast<unsigned>(blocks < MAX_GRID_X ? blocks : MAX_GRID_X);
}

}  // namespace

extern "C" cudaError_t kvc_cuda_dmc_append(const kvc_dmc_append_args* args, cudaStream_t stream) {
    const kvc_dmc_append_args& a = *args;
    if (!valid(a)) return cudaErrorInvalidValue;
    if (a.table.R == 0 || a.S == 0) return cudaSuccess;
    const int64_t pieces = notes_of(a).count, R = a.table.R;
    if (a.S > 1) KVC_LAUNCH(count_kernel, grid_of(R * pieces), APPEND_WARPS * 32, 0, stream, a);
    KVC_LAUNCH(grow_kernel, 1, threads_for(R), 0, stream, a);
    return with_dtype(a.k.dtype, [&](auto type) {
        using X = decltype(type);
        return with_columns(a.D, [&](auto columns) {
            constexpr int COLUMNS = decltype(columns)::value;
            KVC_LAUNCH((rows_kernel<COLUMNS, X>), grid_of(R), APPEND_WARPS * 32, 0, stream, a);
            if (pieces > 1) KVC_LAUNCH((pieces_kernel<COLUMNS, X>), grid_of(R * pieces), APPEND_WARPS * 32, 0, stream, a);
            return cudaSuccess;
        });
    });
}
