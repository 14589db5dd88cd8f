// One decoded step of a layer of PoD: see kvc_pod_step in kvc_step.h.
//
// The launches of its parts in turn, and two small kernels of its own that tell them on the device where the token stands
// and where near and distant tokens lie: nothing waits for the host.
#include "../pod_step.h"
#include "page_table.cuh"

namespace {

constexpr int THREADS = 128;

__global__ __launch_bounds__(THREADS) void places_kernel(const kvc_pod_step_args a, const kvc_pod_parts parts) {
    for (int64_t b = threadIdx.x; b < a.B; b += THREADS) parts.positions[b] = a.rotary_dim ? a.places[b] : 0;
}

// A block per row, whose tables have grown.
__global__ __launch_bounds__(THREADS) void ranges_kernel(const kvc_pod_step_args a, const kvc_pod_parts parts) {
    const int64_t row = blockIdx.x, held = a.keys.lengths[row], all = a.values.lengths[row];
    const int64_t begin = a.sinks < all ? a.sinks : all, end = all - a.recent, moved = a.moved ? a.moved[row] : 0;
    if (threadIdx.x == 0) {
        parts.begin[row] = static_cast<int32_t>(held > a.recent ? held - a.recent : 0);
        parts.far_begin[row] = static_cast<int32_t>(begin);
        parts.far_end[row] = static_cast<int32_t>(end > begin ? end : begin);
        const int64_t R = a.keys.R;
        if (row % a.Hkv == 0 && !parts.copied[R] && !parts.copied[2 * R + 1]) a.places[row / a.Hkv]++;
    }
    for (int64_t i = threadIdx.x; i < a.keys.blocks; i += THREADS) {
        const int64_t place = i < a.first ? i : i + moved;
        const bool here = place >= 0 && place < a.values.blocks;
        parts.near_table[row * a.keys.blocks + i] = here ? *entry(a.values, row, place) : -1;
    }
}

kvc_pod_parts parts_of(const kvc_pod_step_args& a) {
    const kvc_pod_parts none = kvc_pod_parts_of(&a, 0, 0);
    const kvc_decode_args near = kvc_pod_near(&a, &none), far = kvc_pod_far(&a, &none);
    const kvc_decode_shared_args shared = kvc_pod_shared(&a, &none);
    int64_t far_bytes = 0;
    if (a.far == KVC_FAR_SHARED) far_bytes = kvc_cuda_decode_shared_scratch_bytes(&shared);
    else if (a.far != KVC_FAR_NONE) far_bytes = kvc_cuda_decode_scratch_bytes(&far);
    return kvc_pod_parts_of(&a, kvc_cuda_decode_scratch_bytes(&near), far_bytes);
}

bool valid(const kvc_pod_step_args& a) {
    return kvc_pod_sizes_are_good(&a) && valid_scale(a.scale, a.softcap) && valid_dtype(a.q.dtype) &&
           valid_dtype(a.k.dtype) && a.v.dtype == a.k.dtype && valid_table(a.keys) && valid_table(a.values);
}

bool empty(const kvc_pod_step_args& a) { return a.keys.R == 0 || a.Hq == 0; }

bool complete(const kvc_pod_step_args& a) {
    if (!a.out || !a.turned || !a.q.data || !a.k.data || !a.v.data || !a.places || !a.scratch) return false;
    if ((a.keys.pages && !a.k_pages) || (a.values.pages && !a.v_pages)) return false;
    if (a.far != KVC_FAR_SHARED && !a.lse) return false;
    if (a.far == KVC_FAR_OWN && !a.far_lse) return false;
    if (a.far == KVC_FAR_LED) return a.lead_q.data && (!a.lead_pages || a.lead_k_pages) && (!a.lead_blocks || a.lead_table);
    return a.far != KVC_FAR_SHARED || (a.far_lse && a.skipped && (!a.columns || a.probabilities));
}

}  // namespace

extern "C" int64_t kvc_cuda_pod_step_scratch_bytes(const kvc_pod_step_args* args) {
    return valid(*args) && !empty(*args) ? parts_of(*args).bytes : 0;
}

extern "C" cudaError_t kvc_cuda_pod_step(const kvc_pod_step_args* args, cudaStream_t stream) {
    const kvc_pod_step_args& a = *args;
    if (!valid(a)) return cudaErrorInvalidValue;
    if (empty(a)) return cudaSuccess;
    if (!complete(a)) return cudaErrorInvalidValue;
    const kvc_pod_parts parts = parts_of(a);
    kvc_rope_args queries = kvc_pod_rope(&a, &parts, 0), keys = kvc_pod_rope(&a, &parts, 1);
    if (!a.rotary_dim) queries.table_rows = keys.table_rows = 1;
    const kvc_append_tokens_args both[] = {kvc_pod_append(&a, &parts, 0), kvc_pod_append(&a, &parts, 1)};
    const kvc_decode_args near = kvc_pod_near(&a, &parts), far = kvc_pod_far(&a, &parts);
    const kvc_decode_shared_args shared = kvc_pod_shared(&a, &parts);
    const kvc_merge_states_args merge = kvc_pod_merge(&a, &parts);
    KVC_LAUNCH(places_kernel, 1, THREADS, 0, stream, a, parts);
    KVC_TRY(kvc_cuda_rope(&queries, stream));
    KVC_TRY(kvc_cuda_rope(&keys, stream));
    for (const kvc_append_tokens_args& append : both) KVC_TRY(kvc_cuda_append_tokens(&append, stream));
    KVC_LAUNCH(ranges_kernel, static_cast<unsigned>(a.keys.R), THREADS, 0, stream, a, parts);
    KVC_TRY(kvc_cuda_decode(&near, stream));
    if (a.far == KVC_FAR_NONE) return cudaSuccess;
    if (a.far == KVC_FAR_SHARED) return kvc_cuda_decode_shared(&shared, stream);
    KVC_TRY(kvc_cuda_decode(&far, stream));
    return kvc_cuda_merge_states(&merge, stream);
}
