// One decoded step whose query reads only the pages that may matter to it: see kvc_quest_step in kvc_step.h.
//
// Must move, beside what decode reads of the chosen pages: the ranges of every page, 2*D elements each, once for up to
// HEADS query heads of a row: at P = 16 and 32,768 tokens 1 MB of 16-bit numbers per row of D = 128, an eighth of what
// dense decoding reads. The ceiling is memory bandwidth: a warp has PAGES loads of 16 bytes per lane in flight.
// What counts in short contexts is launches: one block takes the pages, lists decode's pieces, whose number follows from
// lengths alone, and, for a few heads, rotates and stores them; one kernel scores, one chooses; then decode's.
// With many sequences the heads have a launch of their own. Grids follow from sizes only: a step can be captured.
#include "../quest_step.h"
#include "paged_step.cuh"
#include "select.cuh"

namespace {

constexpr int HEADS = 4, PAGES = 4;  // query heads, and pages of a warp, whose products are made at once
constexpr int SCORE_THREADS = 128, STRETCH = SCORE_THREADS / 32 * 2 * PAGES;  // pages of a block

struct parts {
    placing heads;
    float* scores;        // [R, blocks]
    int32_t *table, *end;  // [R, width] pages that are read; [R] slots in them
    int64_t width;
};

parts parts_of(const kvc_quest_step_args& args, int64_t* bytes) {
    const kvc_step& a = args.step;
    const int64_t R = a.table.R, width = kvc_quest_width(&args);
    parts p = {placing_of(a, bytes), nullptr, nullptr, nullptr, width};
    p.scores = static_cast<float*>(kvc_part_of(a.scratch, bytes, R * a.table.blocks * 4));
    p.table = kvc_ints_of(a.scratch, bytes, R * width);
    p.end = kvc_ints_of(a.scratch, bytes, R);
    return p;
}

kvc_decode_args decode_of(const kvc_quest_step_args& args, const parts& p) {
    kvc_decode_args decode = kvc_quest_decode(&args, p.heads.q, p.table, p.end);
    if (args.held) decode.q = args.step.q;
    return decode;
}

// ---- rows ----

// Slots of a row, as far as its line of the table goes.
__device__ inline int64_t length_of(const kvc_page_table& table, int64_t row) {
    const int64_t length = table.lengths[row], most = table.blocks * table.P;
    return length < 0 ? 0 : length > most ? most : length;
}

// Joins the range of a row's newest page with the new key, by the warp that has stored that.
__device__ inline void note_key(const kvc_quest_step_args& a, int64_t row) {
    const kvc_step& step = a.step;
    const kvc_page_table& table = step.table;
    const int64_t slot = table.lengths[row] - 1, block = quotient(slot, table.P), D = step.D;
    const int32_t page = *entry(table, row, block);
    if (!page_exists(table, page)) return;
    const int64_t inside = remainder_of(slot, table.P), at = page * table.P + inside;
    const int64_t range = (row * a.range_pages + block) * 2 * D;
    const bool coded = stores_codes(step.rows);
    const float scale = coded ? to_float(static_cast<const f16*>(step.rows.key_scales)[at]) : 1.0f;
    for (int64_t d = threadIdx.x % 32; d < D; d += 32) {
        const float x = coded ? scale * static_cast<const int8_t*>(step.rows.keys)[at * D + d]
                              : load_any(step.rows.keys, step.k.dtype, at * D + d);
        KVC_UNROLL
        for (int side = 0; side < 2; side++) {
            const float bound = side ? -x : x, held = inside ? load_any(a.ranges, step.k.dtype, range + side * D + d) : bound;
            store_any(a.ranges, step.k.dtype, range + side * D + d, held >= bound || held != held ? held : bound);
        }
    }
}

template <int MOST>
__device__ inline void place(const kvc_quest_step_args& a, const parts& p, int64_t item) {
    place_head<MOST>(a.step, nullptr, p.heads, item);
    const int64_t queries = a.step.B * a.step.Hq;
    if (item < queries || p.heads.copied[a.step.table.R]) return;
    __syncwarp();
    note_key(a, item - queries);
}

__global__ __launch_bounds__(STEP_THREADS, 1) void begin_kernel(const kvc_quest_step_args a, const parts p,
                                                                const kvc_append_tokens_args append,
                                                                const kvc_decode_args decode, const plan pieces,
                                                                const scratch s, int64_t heads) {
    const kvc_page_table& table = a.step.table;
    if (!a.held) extend_rows(append, misses_page(table, nullptr));
    __syncthreads();
    for (int64_t row = threadIdx.x; row < table.R; row += blockDim.x) {
        const int64_t length = length_of(table, row), blocks = pages_for(table, length);
        // the newest page comes last and is the only one that is not full
        p.end[row] = static_cast<int32_t>(length - (blocks > p.width ? blocks - p.width : 0) * table.P);
    }
    __syncthreads();
    list_pieces(decode, pieces, s);
    for (int64_t item = threadIdx.x / 32; item < heads; item += STEP_WARPS) place<128>(a, p, item);
}

__global__ __launch_bounds__(PLAN_THREADS, 1) void place_kernel(const kvc_quest_step_args a, const parts p, int64_t heads) {
    const int64_t between = gridDim.x * static_cast<int64_t>(PLACE_WARPS);
    for (int64_t item = blockIdx.x * static_cast<int64_t>(PLACE_WARPS) + threadIdx.x / 32; item < heads; item += between)
        place<512>(a, p, item);
}

// ---- pages ----

// Scores of a stretch of a row's pages before the newest one, where the row leaves some out.
template <class T, int VEC>
__global__ __launch_bounds__(SCORE_THREADS, 1) void score_kernel(const kvc_quest_step_args a, const parts p, const kvc_view q,
                                                              int64_t stretches) {
    __shared__ float halves[HEADS * 2 * KVC_CUDA_MAX_HEAD_DIM];  // max(q, 0) and max(-q, 0) of each head
    __shared__ float best[STRETCH];
    const kvc_step& step = a.step;
    const int64_t row = blockIdx.x / stretches, first = blockIdx.x % stretches * STRETCH, D = step.D;
    const int64_t blocks = ceil_div(length_of(step.table, row), step.table.P), left = blocks - 1 - first;
    if (blocks <= p.width || left <= 0) return;
    const int pages = left < STRETCH ? static_cast<int>(left) : STRETCH;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, G = static_cast<int>(step.Hq / step.Hkv);
    const T* ranges = static_cast<const T*>(a.ranges) + (row * a.range_pages + first) * 2 * D;
    for (int i = threadIdx.x; i < pages; i += SCORE_THREADS) best[i] = -INFINITY;

    for (int g = 0; g < G; g += HEADS) {
        const int heads = G - g < HEADS ? G - g : HEADS;
        __syncthreads();
        for (int64_t i = threadIdx.x; i < heads * D; i += SCORE_THREADS) {
            const int64_t head = row % step.Hkv * G + g + i / D;
            const float x = load_any(q.data, q.dtype, row_at(q, row / step.Hkv, head, 0) + i % D);
            halves[i / D * 2 * D + i % D] = x < 0.0f ? 0.0f : x;
            halves[i / D * 2 * D + D + i % D] = x > 0.0f ? 0.0f : -x;
        }
        __syncthreads();
        for (int page = warp * PAGES; page < pages; page += SCORE_THREADS / 32 * PAGES) {
            float sums[HEADS][PAGES] = {};
            for (int64_t e = lane * VEC; e < 2 * D; e += 32 * VEC) {
                float range[PAGES][VEC];
                KVC_UNROLL
                for (int n = 0; n < PAGES; n++)  // past the last page: that once more
                    load<VEC>(range[n], ranges + (page + n < pages ? page + n : pages - 1) * 2 * D + e);
                KVC_UNROLL
                for (int h = 0; h < HEADS; h++) {
                    if (h >= heads) continue;
                    KVC_UNROLL
                    for (int v = 0; v < VEC; v++) {
                        const float x = halves[h * 2 * D + e + v];
                        KVC_UNROLL
                        for (int n = 0; n < PAGES; n++) sums[h][n] += x * range[n][v];
                    }
                }
            }
            KVC_UNROLL
            for (int n = 0; n < PAGES; n++) {
                float score = -INFINITY;
                KVC_UNROLL
                for (int h = 0; h < HEADS; h++) {
                    float sum = sums[h][n];
                    KVC_UNROLL
                    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, other);
                    // a page that holds NaN is read, as dense attention would
                    if (h < heads) score = sum != sum ? INFINITY : sum > score ? sum : score;
                }
                if (lane == 0 && page + n < pages && score > best[page + n]) best[page + n] = score;
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < pages; i += SCORE_THREADS) p.scores[row * step.table.blocks + first + i] = best[i];
}

// A row's chosen pages, and where they lie.
__global__ __launch_bounds__(MOST_THREADS, 1) void choose_kernel(const kvc_quest_step_args a, const parts p) {
    const kvc_page_table& table = a.step.table;
    const int64_t row = blockIdx.x, blocks = ceil_div(length_of(table, row), table.P);
    const auto write = [&](int64_t j, int64_t place) {
        a.chosen[row * p.width + j] = static_cast<int32_t>(place);
        p.table[row * p.width + j] = place < 0 ? -1 : *entry(table, row, place);
    };
    if (blocks <= p.width) {
        for (int64_t j = threadIdx.x; j < p.width; j += blockDim.x) write(j, j < blocks ? j : -1);
        return;
    }
    if (p.width > 1) select_row(p.scores + row * table.blocks, blocks - 1, p.width - 1, write);
    if (threadIdx.x == 0) write(p.width - 1, blocks - 1);
}

// ---- host ----

template <class T>
cudaError_t score(const kvc_quest_step_args& a, const parts& p, const kvc_view& q, cudaStream_t stream) {
    constexpr int VEC = PER_16_BYTES<T>;
    const int64_t stretches = ceil_div(a.step.table.blocks, STRETCH);
    const unsigned grid = static_cast<unsigned>(a.step.table.R * stretches);
    if (2 * a.step.D % VEC == 0 && aligned_16(a.ranges))
        KVC_LAUNCH((score_kernel<T, VEC>), grid, SCORE_THREADS, 0, stream, a, p, q, stretches);
    else
        KVC_LAUNCH((score_kernel<T, 1>), grid, SCORE_THREADS, 0, stream, a, p, q, stretches);
    return cudaSuccess;
}

kvc_status check(const kvc_quest_step_args& args) {
    const kvc_status status = kvc_quest_check(&args);
    if (status != KVC_OK && status != KVC_NULL_POINTER) return status;
    return args.step.table.R * ceil_div(args.step.table.blocks, STRETCH) <= MAX_GRID_X ? status : KVC_BAD_SIZE;
}

}  // namespace

extern "C" int64_t kvc_cuda_quest_step_scratch_bytes(const kvc_quest_step_args* args) {
    if (!kvc_step_is_sized(&args->step, check(*args))) return 0;
    int64_t bytes = 0;
    const kvc_decode_args decode = decode_of(*args, parts_of(*args, &bytes));
    kvc_part_of(nullptr, &bytes, kvc_cuda_decode_scratch_bytes(&decode));
    return bytes;
}

extern "C" cudaError_t kvc_cuda_quest_step(const kvc_quest_step_args* args, cudaStream_t stream) {
    const kvc_step& a = args->step;
    const kvc_status checked = check(*args);
    if (checked != KVC_OK || kvc_step_is_empty(&a)) return error_of(checked);
    int64_t bytes = 0;
    const parts p = parts_of(*args, &bytes);
    kvc_decode_args decode = decode_of(*args, p);
    decode.scratch = kvc_part_of(a.scratch, &bytes, kvc_cuda_decode_scratch_bytes(&decode));
    const plan pieces = plan_of(decode);
    const int64_t heads = args->held ? 0 : a.B * (a.Hq + a.Hkv), alone = heads_alone(a, heads, stores_codes(a.rows), 128);
    if (!fits_grids(pieces) || heads > MAX_GRID_X) return cudaErrorInvalidValue;
    KVC_LAUNCH(begin_kernel, 1, STEP_THREADS, 0, stream, *args, p, append_of(a, p.heads.copied), decode, pieces,
               scratch_of(decode, pieces), alone);
    if (heads > alone) KVC_LAUNCH(place_kernel, place_blocks(heads), PLAN_THREADS, 0, stream, *args, p, heads);
    if (a.table.blocks > p.width)
        KVC_TRY(with_dtype(a.k.dtype, [&](auto type) { return score<decltype(type)>(*args, p, decode.q, stream); }));
    KVC_LAUNCH(choose_kernel, static_cast<unsigned>(a.table.R), select_threads(a.table.blocks), 0, stream, *args, p);
    return decode_listed(decode, stream);
}
