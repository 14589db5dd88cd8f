// One decoded step of a cache that keeps its tokens: see kvc_paged_step in kvc_step.h.
//
// Must move, beside what decode reads: B*S*(2*Hq + 4*Hkv)*D elements, 25 KB for a token of a Llama 3 8B layer. What counts
// is launches: one block takes the pages, lists decode's pieces and, for a few heads, rotates and stores them; then the
// kernel of decode's pieces. With many sequences the heads have a launch of their own, with many queries the join.
#include "paged_begin.cuh"

namespace {

kvc_decode_args decode_of(const kvc_paged_step_args& a) {
    kvc_decode_args d = {};
    d.out = a.out, d.lse = a.lse, d.rows = a.rows;
    d.q = kvc_dense_view(nullptr, a.q.dtype, a.Hq, a.S, a.D);
    d.block_table = a.table.block_table, d.begin = a.begin, d.end = a.table.lengths;
    d.B = a.B, d.Hq = a.Hq, d.Hkv = a.Hkv, d.S = a.S, d.D = a.D;
    d.P = a.table.P, d.pages = a.table.pages, d.blocks = a.table.blocks;
    d.scale = a.scale, d.causal = 1, d.softcap = a.softcap, d.sink_logits = a.sink_logits;
    return d;
}

__global__ __launch_bounds__(BEGIN_THREADS, 1) void begin_kernel(const kvc_paged_step_args a, const placing p,
                                                             const kvc_decode_args decode, const plan pieces,
                                                             const scratch s, int heads) {
    begin_step(a, p, decode, pieces, s, heads);
}

__global__ __launch_bounds__(PLAN_THREADS, 1) void place_kernel(const kvc_paged_step_args a, const placing p, int64_t heads) {
    const int64_t between = gridDim.x * static_cast<int64_t>(PLACE_WARPS);
    for (int64_t item = blockIdx.x * static_cast<int64_t>(PLACE_WARPS) + threadIdx.x / 32; item < heads; item += between)
        place_head<512>(a, p, item);
}

}  // namespace

extern "C" int64_t kvc_cuda_paged_step_scratch_bytes(const kvc_paged_step_args* args) {
    if (!valid_step(*args) || empty_step(*args)) return 0;
    const kvc_decode_args decode = decode_of(*args);
    int64_t bytes = 0;
    placing_of(*args, &bytes);
    kvc_part_of(nullptr, &bytes, kvc_cuda_decode_scratch_bytes(&decode));
    return bytes;
}

extern "C" cudaError_t kvc_cuda_paged_step(const kvc_paged_step_args* args, cudaStream_t stream) {
    const kvc_paged_step_args& a = *args;
    if (!valid_step(a)) return cudaErrorInvalidValue;
    if (empty_step(a)) return cudaSuccess;
    if (!has_pointers(a)) return cudaErrorInvalidValue;
    kvc_decode_args decode = decode_of(a);
    int64_t bytes = 0;
    const placing p = placing_of(a, &bytes);
    decode.q.data = p.q, decode.scratch = kvc_part_of(a.scratch, &bytes, kvc_cuda_decode_scratch_bytes(&decode));
    const plan pieces = plan_of(decode);
    const int64_t heads = a.B * (a.Hq + a.Hkv) * a.S, alone = heads_alone(a, heads, 256);
    if (!fits_grids(pieces) || heads > MAX_GRID_X) return cudaErrorInvalidValue;
    KVC_LAUNCH(begin_kernel, 1, BEGIN_THREADS, 0, stream, a, p, decode, pieces, scratch_of(decode, pieces),
               static_cast<int>(alone));
    if (!alone)
        KVC_LAUNCH(place_kernel, place_blocks(heads), PLAN_THREADS, 0, stream, a, p, heads);
    return decode_listed(decode, stream);
}
