// One decoded step of a cache that keeps its tokens: see kvc_paged_step in kvc_step.h.
//
// Must move, beside what decode reads: B*S*(2*Hq + 4*Hkv)*D elements, 25 KB for a token of a Llama 3 8B layer. What counts
// is launches: one block takes the pages, lists decode's pieces and, for a few heads, rotates and stores them; then the
// kernel of decode's pieces. With many sequences the heads have a launch of their own, with many queries the join.
#include "paged_begin.cuh"

namespace {

kvc_decode_args decode_of(const kvc_paged_step_args& args, void* turned) {
    kvc_decode_args decode = kvc_step_decode(&args.step, turned);
    decode.begin = args.begin, decode.causal = 1;
    return decode;
}

__global__ __launch_bounds__(BEGIN_THREADS, 1) void begin_kernel(const kvc_paged_step_args args, const placing p,
                                                             const kvc_decode_args decode, const plan pieces,
                                                             const scratch s, int heads) {
    begin_step(args, p, decode, pieces, s, heads);
}

__global__ __launch_bounds__(PLAN_THREADS, 1) void place_kernel(const kvc_paged_step_args args, const placing p,
                                                             int64_t heads) {
    const int64_t between = gridDim.x * static_cast<int64_t>(PLACE_WARPS);
    for (int64_t item = blockIdx.x * static_cast<int64_t>(PLACE_WARPS) + threadIdx.x / 32; item < heads; item += between)
        place_head<512>(args.step, args.shift, p, item);
}

}  // namespace

extern "C" int64_t kvc_cuda_paged_step_scratch_bytes(const kvc_paged_step_args* args) {
    const kvc_step& a = args->step;
    if (!kvc_step_is_sized(&a, kvc_step_check(&a, &a.table))) return 0;
    const kvc_decode_args decode = decode_of(*args, nullptr);
    int64_t bytes = 0;
    placing_of(a, &bytes);
    kvc_part_of(nullptr, &bytes, kvc_cuda_decode_scratch_bytes(&decode));
    return bytes;
}

extern "C" cudaError_t kvc_cuda_paged_step(const kvc_paged_step_args* args, cudaStream_t stream) {
    const kvc_step& a = args->step;
    const kvc_status checked = kvc_step_check(&a, &a.table);
    if (checked != KVC_OK || kvc_step_is_empty(&a)) return error_of(checked);
    int64_t bytes = 0;
    const placing p = placing_of(a, &bytes);
    kvc_decode_args decode = decode_of(*args, p.q);
    decode.scratch = kvc_part_of(a.scratch, &bytes, kvc_cuda_decode_scratch_bytes(&decode));
    const plan pieces = plan_of(decode);
    const int64_t heads = a.B * (a.Hq + a.Hkv) * a.S, alone = heads_alone(a, heads, stores_codes(a.rows), 256);
    if (!fits_grids(pieces) || heads > MAX_GRID_X) return cudaErrorInvalidValue;
    KVC_LAUNCH(begin_kernel, 1, BEGIN_THREADS, 0, stream, *args, p, decode, pieces, scratch_of(decode, pieces),
               static_cast<int>(alone));
    if (!alone) KVC_LAUNCH(place_kernel, place_blocks(heads), PLAN_THREADS, 0, stream, *args, p, heads);
    return decode_listed(decode, stream);
}
