// One decoded step of a layer of PoD: see kvc_pod_step in kvc_step.h.
//
// Must move, beside what decode reads: B*(2*Hq + 4*Hkv)*D elements and a table of the near values' pages. What counts is
// launches: one block says where the token stands, takes the pages of both tables, lists the pieces of near and distant
// keys and, for a few heads, rotates and stores them; then the kernel of decode's pieces. With many sequences the heads
// have a launch of their own. Distant keys take one more and the merge, two more for their probabilities; shared
// probabilities the two of decode_shared. Nothing waits for the host.
#include "../pod_step.h"
#include "extend.cuh"
#include "rows.cuh"

namespace {

constexpr int BEGIN_THREADS = 768;  // of the one block: a thread keeps more than 64 numbers

// Whether the rows have not grown.
__device__ inline bool refused(const kvc_pod_step_args& a, const kvc_pod_parts& parts) {
    return parts.copied[a.step.table.R] != 0;
}

// Where near and distant tokens of a row lie, whose tables have grown.
__device__ inline void place_row(const kvc_pod_step_args& a, const kvc_pod_parts& parts, int64_t row) {
    const int64_t held = a.step.table.lengths[row], all = a.values.lengths[row];
    const int64_t begin = a.sinks < all ? a.sinks : all, end = all - a.recent;
    parts.begin[row] = static_cast<int32_t>(held > a.recent ? held - a.recent : 0);
    parts.far_begin[row] = static_cast<int32_t>(begin);
    parts.far_end[row] = static_cast<int32_t>(end > begin ? end : begin);
}

// Slot of the newest token of a row in the keys' pages, or the values'; -1: it has none. What the row shared is its own
// then.
__device__ inline int64_t newest_slot(const kvc_pod_step_args& a, const kvc_pod_parts& parts, int64_t row, int values) {
    const kvc_page_table& table = values ? a.values : a.step.table;
    if (refused(a, parts)) return -1;
    const int64_t slot = table.lengths[row] - 1;
    const int32_t page = *entry(table, row, slot / table.P), copied = parts.copied[(table.R + 1) * values + row];
    if (copied >= 0) {
        const kvc_rows& rows = a.step.rows;
        const bool codes = stores_codes(rows), halves = values && rows.format == KVC_FORMAT_K8V4;
        const int64_t bytes = codes ? halves ? a.step.D / 2 : a.step.D : bytes_of(a.step.k.dtype) * a.step.D;
        copy_slots(table, copied, page, slot % table.P, values ? rows.values : rows.keys, bytes);
        if (codes) copy_slots(table, copied, page, slot % table.P, values ? rows.value_scales : rows.key_scales, sizeof(f16));
    }
    return page_exists(table, page) ? page * table.P + slot % table.P : -1;
}

// Query head `item`, then row item - B*Hq, by a warp; pages have been taken. MOST: as in store_codes.
template <int MOST>
__device__ inline void place_head(const kvc_pod_step_args& args, const kvc_pod_parts& parts, int64_t item) {
    const kvc_step& a = args.step;
    const int64_t queries = a.B * a.Hq, row = item - queries;
    const int64_t heads = item < queries ? a.Hq : a.Hkv, own = item < queries ? item : row, b = quotient(own, heads), h = remainder_of(own, heads);
    const auto rotate = [&](const kvc_view& x, void* to, int64_t at) {
        turn_head(a, x, row_at(x, b, h, 0), to, at, parts.positions[b], -1);
    };
    if (item < queries) {
        rotate(a.q, args.turned, item * a.D);
        return;
    }
    const slot_of_each to = {newest_slot(args, parts, row, 0), newest_slot(args, parts, row, 1)};
    const int64_t moved = args.moved ? args.moved[row] : 0, value = row_at(a.v, b, h, 0);
    if (to.key >= 0 && to.value >= 0) {
        if (stores_codes(a.rows)) {
            store_turned<MOST>(a, a.rows, row_at(a.k, b, h, 0), value, parts.positions[b], to);
        } else {
            rotate(a.k, a.rows.keys, to.key * a.D);
            copy_head(a.v.data, value, a.rows.values, to.value * a.D, a.k.dtype, a.D);
        }
    }
    for (int64_t i = threadIdx.x % 32; i < a.table.blocks; i += 32) {
        const int64_t place = i < args.first ? i : i + moved;
        const bool here = place >= 0 && place < args.values.blocks;
        parts.near_table[row * a.table.blocks + i] = here ? *entry(args.values, row, place) : -1;
    }
}

// far.scratch: NULL where no distant keys are read.
__global__ __launch_bounds__(BEGIN_THREADS, 1) void begin_kernel(const kvc_pod_step_args a, const kvc_pod_parts parts,
                                                             const kvc_append_tokens_args keys,
                                                             const kvc_append_tokens_args values,
                                                             const kvc_decode_args near, const plan near_pieces,
                                                             const scratch near_scratch, const kvc_decode_args far,
                                                             const plan far_pieces, const scratch far_scratch,
                                                             int64_t heads) {
    for (int64_t b = threadIdx.x; b < a.step.B; b += BEGIN_THREADS) parts.positions[b] = a.step.rotary_dim ? a.places[b] : 0;
    // both tables grow, or none
    const bool missing = misses_page(a.step.table, nullptr) | misses_page(a.values, nullptr);
    const bool lacking = lacks_room(keys) | lacks_room(values);
    extend_rows(keys, missing || lacking);
    __syncthreads();
    extend_rows(values, missing || lacking);
    __syncthreads();
    for (int64_t b = threadIdx.x; b < a.step.B && !refused(a, parts); b += BEGIN_THREADS) a.places[b]++;
    for (int64_t row = threadIdx.x; row < a.step.table.R; row += BEGIN_THREADS) place_row(a, parts, row);
    __syncthreads();
    list_pieces(near, near_pieces, near_scratch);
    if (far.scratch) {
        __syncthreads();  // the list's sums are free
        list_pieces(far, far_pieces, far_scratch);
    }
    for (int64_t item = threadIdx.x / 32; item < heads; item += BEGIN_THREADS / 32) place_head<256>(a, parts, item);
}

__global__ __launch_bounds__(PLAN_THREADS, 1) void place_kernel(const kvc_pod_step_args a, const kvc_pod_parts parts,
                                                             int64_t heads) {
    const int64_t between = gridDim.x * static_cast<int64_t>(PLACE_WARPS);
    for (int64_t item = blockIdx.x * static_cast<int64_t>(PLACE_WARPS) + threadIdx.x / 32; item < heads; item += between)
        place_head<512>(a, parts, item);
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

}  // namespace

extern "C" int64_t kvc_cuda_pod_step_scratch_bytes(const kvc_pod_step_args* args) {
    return kvc_step_is_sized(&args->step, kvc_pod_check(args)) ? parts_of(*args).bytes : 0;
}

extern "C" cudaError_t kvc_cuda_pod_step(const kvc_pod_step_args* args, cudaStream_t stream) {
    const kvc_step& a = args->step;
    const kvc_status checked = kvc_pod_check(args);
    if (checked != KVC_OK || kvc_step_is_empty(&a)) return error_of(checked);
    const kvc_pod_parts parts = parts_of(*args);
    const kvc_decode_args near = kvc_pod_near(args, &parts);
    const bool has_far = args->far == KVC_FAR_OWN || args->far == KVC_FAR_LED;
    kvc_decode_args far = {};
    if (has_far) far = kvc_pod_far(args, &parts);
    const plan near_pieces = plan_of(near), far_pieces = has_far ? plan_of(far) : plan{};
    const int64_t heads = a.B * (a.Hq + a.Hkv), alone = heads_alone(a, heads, stores_codes(a.rows), 256);
    if (!fits_grids(near_pieces) || !fits_grids(far_pieces) || heads > MAX_GRID_X) return cudaErrorInvalidValue;
    KVC_LAUNCH(begin_kernel, 1, BEGIN_THREADS, 0, stream, *args, parts, kvc_pod_append(args, &parts, 0),
               kvc_pod_append(args, &parts, 1), near, near_pieces, scratch_of(near, near_pieces), far, far_pieces,
               scratch_of(far, far_pieces), alone);
    if (!alone) KVC_LAUNCH(place_kernel, place_blocks(heads), PLAN_THREADS, 0, stream, *args, parts, heads);
    KVC_TRY(decode_listed(near, stream));
    if (args->far == KVC_FAR_SHARED) {
        const kvc_decode_shared_args shared = kvc_pod_shared(args, &parts);
        return kvc_cuda_decode_shared(&shared, stream);
    }
    if (!has_far) return cudaSuccess;
    KVC_TRY(decode_listed(far, stream));
    const kvc_merge_states_args merge = kvc_step_merge(&a, &near, &far);
    return kvc_cuda_merge_states(&merge, stream);
}
