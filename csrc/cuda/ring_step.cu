// One decoded step of a cache whose newest tokens lie in rings: see kvc_ring_step in kvc_step.h.
//
// Must move, beside what decode reads: B*(2*Hq + 4*Hkv)*D elements, and 2*R*D twice where tokens leave for pages. What counts
// is launches: one block says where each token goes, takes the pages, lists decode's pieces and, for a few heads, rotates
// and stores them; then the kernel of decode's pieces, and, with further keys, that once more and the merge. With many
// sequences the heads have a launch of their own.
#include "../ring_step.h"
#include "extend.cuh"
#include "gates.cuh"
#include "rows.cuh"

namespace {

constexpr int BEGIN_THREADS = STEP_THREADS / 2;  // of the one block: a thread keeps more than 64 numbers

struct parts {
    int32_t *tokens;                            // [B] t, or -1: it has no slot
    int32_t *begin, *end, *far, *stays, *copied;  // [R] each; copied [R + 1], of extend_rows
    uint8_t* marks;                             // [R]
    void *q, *far_q, *out, *lse, *decode, *decode_far;
    int64_t bytes;
};

struct ring_span {
    int64_t slot, end, far;
};

__device__ inline ring_span span_of(const kvc_ring_step_args& a, int64_t t) {
    const int64_t full = a.sinks + a.window, gone = t + 1 - a.window;
    ring_span span = {t < a.sinks ? t : a.sinks + (t - a.sinks) % a.window, t < full ? t + 1 : full, 0};
    if (a.chunked) span.end = t % a.window + 1;
    if (a.far.keys)
        span.far = gone < 0 ? 0 : gone < a.sinks ? gone : a.sinks;
    else if (t >= full)
        span.far = a.sinks;
    return span;
}

parts parts_of(const kvc_ring_step_args& args) {
    const kvc_step& a = args.step;
    const int64_t R = a.B * a.Hkv, q = kvc_step_query_bytes(&a);
    const kvc_decode_args near = kvc_ring_near(&args, nullptr), far = kvc_ring_far(&args, nullptr);
    parts p = {};
    const auto part = [&](int64_t bytes) { return kvc_part_of(a.scratch, &p.bytes, bytes); };
    const auto ints = [&](int64_t count) { return kvc_ints_of(a.scratch, &p.bytes, count); };
    p.tokens = ints(a.B);
    p.begin = ints(R), p.end = ints(R), p.far = ints(R);
    p.stays = ints(a.table.R), p.copied = ints(a.table.R + 1);
    p.marks = static_cast<uint8_t*>(part(R));
    p.q = part(q);
    p.decode = part(kvc_cuda_decode_scratch_bytes(&near));
    if (!kvc_ring_has_far(&args)) return p;
    p.far_q = part(args.sinks ? q : 0);
    p.out = part(q);
    p.lse = part(a.B * a.Hq * 4);
    p.decode_far = part(kvc_cuda_decode_scratch_bytes(&far));
    return p;
}

kvc_append_tokens_args append_of(const kvc_ring_step_args& a, const parts& p) {
    kvc_append_tokens_args append = {};
    append.table = a.step.table, append.counts = p.stays, append.scratch = p.copied, append.heads = a.step.Hkv, append.S = 1;
    return append;
}

// Where the token of a row goes, and whether the one that it overwrites stays.
__device__ inline void place_row(const kvc_ring_step_args& a, const parts& p, int64_t row) {
    const int64_t b = quotient(row, a.step.Hkv), h = remainder_of(row, a.step.Hkv), t = a.places[b];
    ring_span span = {-1, 0, 0};
    if (t >= 0 && t < INT32_MAX) span = span_of(a, t);
    const bool here = span.slot >= 0 && span.end <= a.capacity;
    if (h == 0) p.tokens[b] = here ? static_cast<int32_t>(t) : -1;
    p.begin[row] = p.far[row] = here ? static_cast<int32_t>(span.far) : 0;
    p.end[row] = here ? static_cast<int32_t>(span.end) : 0;
    if (!a.marks) return;
    const float logit = a.alpha ? 0.0f : load_any(a.step.k.data, a.step.k.dtype, row_at(a.step.k, b, h, 0) + a.neuron);
    const bool marked =
        a.alpha ? a.alpha[row] > 0.5f : decision_at(logit, a.decision_scale, a.decision_shift) > a.decision_margin;
    p.marks[row] = marked;
    if (!a.step.table.R) return;
    const bool leaves = here && t >= a.window;
    const int64_t says = (a.own ? t : t + 1) % a.window;  // of the token that leaves, or of the one after it
    p.stays[row] = leaves && !(a.window == 1 && !a.own ? marked : a.marks[row * a.capacity + says] != 0);
}

// Query head `item`, then row item - B*Hq, by a warp; pages have been taken. MOST: as in store_codes.
template <int MOST>
__device__ inline void place_head(const kvc_ring_step_args& args, const parts& p, int64_t item) {
    const kvc_step& a = args.step;
    const int64_t queries = a.B * a.Hq, row = item - queries;
    const int64_t heads = item < queries ? a.Hq : a.Hkv, own = item < queries ? item : row, b = quotient(own, heads), h = remainder_of(own, heads);
    const int64_t t = p.tokens[b], position = t < 0 ? -1 : t - (args.base ? args.base[b] : 0);
    const auto rotate = [&](const kvc_view& x, void* to, int64_t at, int64_t where) {
        turn_head(a, x, row_at(x, b, h, 0), to, at, where, args.neuron);
    };
    if (item < queries) {
        rotate(a.q, p.q, item * a.D, position);
        if (args.sinks > 0) rotate(a.q, p.far_q, item * a.D, args.far.keys ? args.window : args.sinks + args.window - 1);
        return;
    }
    const kvc_page_table& table = a.table;
    if (t < 0 || (table.R && p.copied[table.R])) return;
    const int64_t place = row * args.capacity + span_of(args, t).slot, value = row_at(a.v, b, h, 0);
    if (table.R && p.stays[row]) {
        const int64_t slot = table.lengths[row] - 1;
        const int32_t page = *entry(table, row, slot / table.P);
        if (p.copied[row] >= 0) copy_shared(table, a.rows, p.copied[row], page, slot % table.P, a.D);
        const int64_t at = page * table.P + slot % table.P;
        const auto left = [&](const void* ring) {
            return [=](int d) { return load_any(ring, a.k.dtype, place * a.D + d); };
        };
        if (page_exists(table, page) && stores_codes(a.rows)) {
            store_codes<MOST>(a.rows, at, a.D, left(args.ring.keys), left(args.ring.values));
        } else if (page_exists(table, page)) {
            copy_head(args.ring.keys, place * a.D, a.rows.keys, at * a.D, a.k.dtype, a.D);
            copy_head(args.ring.values, place * a.D, a.rows.values, at * a.D, a.k.dtype, a.D);
        }
    }
    __syncwarp();  // the token that leaves is out of its slot
    if (args.marks && threadIdx.x % 32 == 0) args.marks[place] = p.marks[row] && !(args.own && t == 0);
    const auto store = [&](const kvc_rows& rows, int64_t slot, int64_t where) {
        if (stores_codes(rows)) {
            store_turned<MOST>(a, rows, row_at(a.k, b, h, 0), value, where, slot);
        } else {
            rotate(a.k, rows.keys, slot * a.D, where);
            copy_head(a.v.data, value, rows.values, slot * a.D, a.k.dtype, a.D);
        }
    };
    store(args.ring, place, position);
    if (args.far.keys && t < args.sinks) store(args.far, row * args.sinks + t, 0);
}

__global__ __launch_bounds__(BEGIN_THREADS, 1) void begin_kernel(const kvc_ring_step_args a, const parts p,
                                                             const kvc_append_tokens_args append,
                                                             const kvc_decode_args near, const plan near_pieces,
                                                             const scratch near_scratch, const kvc_decode_args far,
                                                             const plan far_pieces, const scratch far_scratch,
                                                             int64_t heads) {
    for (int64_t row = threadIdx.x; row < a.step.B * a.step.Hkv; row += BEGIN_THREADS) place_row(a, p, row);
    __syncthreads();
    if (a.step.table.R) extend_rows(append, misses_page(a.step.table, nullptr));
    __syncthreads();
    const bool refused = a.step.table.R && p.copied[a.step.table.R];
    for (int64_t b = threadIdx.x; b < a.step.B; b += BEGIN_THREADS)
        if (p.tokens[b] >= 0 && !refused) a.places[b] = p.tokens[b] + 1;
    list_pieces(near, near_pieces, near_scratch);
    if (far.scratch) {
        __syncthreads();  // the list's sums are free
        list_pieces(far, far_pieces, far_scratch);
    }
    for (int64_t item = threadIdx.x / 32; item < heads; item += BEGIN_THREADS / 32) place_head<256>(a, p, item);
}

__global__ __launch_bounds__(PLAN_THREADS, 1) void place_kernel(const kvc_ring_step_args a, const parts p, int64_t heads) {
    const int64_t between = gridDim.x * static_cast<int64_t>(PLACE_WARPS);
    for (int64_t item = blockIdx.x * static_cast<int64_t>(PLACE_WARPS) + threadIdx.x / 32; item < heads; item += between)
        place_head<512>(a, p, item);
}

}  // namespace

extern "C" int64_t kvc_cuda_ring_step_scratch_bytes(const kvc_ring_step_args* args) {
    return kvc_step_is_sized(&args->step, kvc_ring_check(args)) ? parts_of(*args).bytes : 0;
}

extern "C" cudaError_t kvc_cuda_ring_step(const kvc_ring_step_args* args, cudaStream_t stream) {
    const kvc_step& a = args->step;
    const kvc_status checked = kvc_ring_check(args);
    if (checked != KVC_OK || kvc_step_is_empty(&a)) return error_of(checked);
    const parts p = parts_of(*args);
    const bool has_far = kvc_ring_has_far(args);
    kvc_decode_args near = kvc_ring_near(args, p.q), far = {};
    near.begin = p.begin, near.end = p.end, near.scratch = p.decode;
    const plan near_pieces = plan_of(near);
    plan far_pieces = {};
    if (has_far) {
        far = kvc_ring_far(args, args->sinks ? p.far_q : p.q);
        far.out = p.out, far.lse = static_cast<float*>(p.lse), far.scratch = p.decode_far;
        if (!a.table.R) far.end = p.far;
        far_pieces = plan_of(far);
    }
    const bool codes = stores_codes(args->ring) || (a.table.R && stores_codes(a.rows));
    const int64_t heads = a.B * (a.Hq + a.Hkv), alone = heads_alone(a, heads, codes, 256);
    if (!fits_grids(near_pieces) || !fits_grids(far_pieces) || heads > MAX_GRID_X) return cudaErrorInvalidValue;
    KVC_LAUNCH(begin_kernel, 1, BEGIN_THREADS, 0, stream, *args, p, append_of(*args, p), near, near_pieces,
               scratch_of(near, near_pieces), far, far_pieces, scratch_of(far, far_pieces), alone);
    if (!alone) KVC_LAUNCH(place_kernel, place_blocks(heads), PLAN_THREADS, 0, stream, *args, p, heads);
    KVC_TRY(decode_listed(near, stream));
    if (!has_far) return cudaSuccess;
    KVC_TRY(decode_listed(far, stream));
    const kvc_merge_states_args merge = kvc_step_merge(&a, &near, &far);
    return kvc_cuda_merge_states(&merge, stream);
}
