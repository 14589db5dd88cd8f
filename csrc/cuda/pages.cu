// Rows of slots in pages that may be shared until written: see pages.c in kvc.h.
//
// Must move: append 2*R*S*slot bytes, compaction 2*R*K*slot bytes and 4*R*K bytes of indices; the tables are a few bytes
// per row. No arithmetic: the ceiling is memory bandwidth; with one token per row, the latency of the two launches.
// Pages are handed out by one block (prefix sums over the rows, so that the same call gives the same pages), filled by
// one block per row and tile of tokens, or moved by one per row and slice of its slots, and given up with atomics.
#include "extend.cuh"

namespace {

constexpr int THREADS = 128;
constexpr int TILE = 64;         // tokens that one block appends

// Of a compaction
constexpr int MOVERS = 256;         // threads of a block
constexpr int SLOTS = 4;            // slots that a thread reads while it writes as many
constexpr int SLICE_BYTES = 64;     // of each slot that a block moves: two sectors of memory; one of them where
constexpr int FEWEST_BLOCKS = 256;  // otherwise fewer than two blocks would come to a multiprocessor

// ---- append ----

__global__ __launch_bounds__(MOST_THREADS) void extend_kernel(const kvc_append_tokens_args a) { extend_rows(a); }

// A block copies TILE tokens of one row of one array, and with the first of them the slots of the shared page.
template <class Unit>
__global__ __launch_bounds__(THREADS) void append_kernel(const kvc_append_tokens_args a, int64_t first_array, int64_t tiles) {
    const kvc_page_table& table = a.table;
    if (a.scratch[table.R]) return;
    const int64_t tile = blockIdx.x % tiles, row = blockIdx.x / tiles % table.R;
    const kvc_slot_array& array = a.arrays[first_array + blockIdx.x / tiles / table.R];
    const int units = static_cast<int>(array.slot_bytes / static_cast<int64_t>(sizeof(Unit)));
    const int64_t count = count_of(a, row), start = table.lengths[row] - count;
    if (units == 0) return;
    Unit* pages = static_cast<Unit*>(array.pages);
    if (tile == 0 && a.scratch[row] >= 0) {
        const int32_t now = *entry(table, row, start / table.P);
        const int64_t from = a.scratch[row] * table.P * units, to = now * table.P * units;
        for (int64_t i = threadIdx.x; page_exists(table, now) && i < start % table.P * units; i += THREADS)
            pages[to + i] = pages[from + i];
    }
    const char* tokens = static_cast<const char*>(array.tokens) + row / a.heads * array.stride_b +
                         row % a.heads * array.stride_h + (a.S - count) * array.stride_s;
    const int64_t end = count < (tile + 1) * TILE ? count : (tile + 1) * TILE;
    const int lanes = units < THREADS ? units : THREADS, groups = THREADS / lanes;
    const int group = static_cast<int>(threadIdx.x) / lanes, lane = static_cast<int>(threadIdx.x) % lanes;
    for (int64_t i = tile * TILE + group; group < groups && i < end; i += groups) {
        const int64_t slot = start + i;
        const int32_t page = *entry(table, row, slot / table.P);
        if (!page_exists(table, page)) continue;
        const Unit* from = reinterpret_cast<const Unit*>(tokens + i * array.stride_s);
        Unit* to = pages + (page * table.P + slot % table.P) * units;
        for (int unit = lane; unit < units; unit += lanes) to[unit] = from[unit];
    }
}

// ---- truncate ----

// A block per row.
__global__ __launch_bounds__(THREADS) void truncate_kernel(const kvc_truncate_rows_args a) {
    const kvc_page_table& table = a.table;
    const int64_t row = blockIdx.x, capacity = table.blocks * table.P;
    int64_t old = table.lengths[row], now = a.new_lengths[row];
    old = old < 0 ? 0 : old > capacity ? capacity : old;
    now = now < 0 ? 0 : now > old ? old : now;
    __syncthreads();
    for (int64_t block = ceil_div(now, table.P) + threadIdx.x; block < ceil_div(old, table.P); block += THREADS)
        give_up_page(table, *entry(table, row, block));
    if (threadIdx.x == 0) table.lengths[row] = static_cast<int32_t>(now);
}

// ---- compaction ----

// Slots held by the row, and how many of them it keeps (-1: the row is left as it is).
__device__ inline int64_t held_of(const kvc_page_table& table, int64_t row) {
    const int64_t length = table.lengths[row], capacity = table.blocks * table.P;
    return length < 0 ? 0 : length > capacity ? capacity : length;
}

__device__ inline int64_t kept_of(const kvc_compact_pages_args& a, int64_t row) {
    const int64_t kept = a.kept ? a.kept[row] : a.K, most = held_of(a.table, row);
    return kept < 0 ? -1 : kept < most ? (kept < a.K ? kept : a.K) : (most < a.K ? most : a.K);
}

// The page that block `item` % blocks of row `item` / blocks may write: its own, none (-1) or a fresh one.
enum class target { none, own, fresh };

__device__ inline target target_of(const kvc_compact_pages_args& a, int64_t item) {
    const kvc_page_table& table = a.table;
    const int64_t row = item / table.blocks, block = item % table.blocks, kept = kept_of(a, row);
    if (block * table.P >= kept) return target::none;
    const int64_t end = (block + 1) * table.P, last = (end < kept ? end : kept) - 1;
    // Indices rise: where the last one of a block stays, all before it do
    if (a.indices[row * a.K + last] == last || !page_exists(table, table.block_table[item])) return target::none;
    return table.page_refs[table.block_table[item]] > 1 ? target::fresh : target::own;
}

// One block: scratch [R*blocks + 1]: the page that each block of each row is written to, and whether the call is refused.
__global__ __launch_bounds__(MOST_THREADS) void claim_kernel(const kvc_compact_pages_args a) {
    const kvc_page_table& table = a.table;
    const int64_t items = table.R * table.blocks;
    int own = 0;
    for (int64_t item = threadIdx.x; item < items; item += blockDim.x) own += target_of(a, item) == target::fresh;
    if (!can_take(table, own, false, a.scratch + items)) return;
    int64_t held = free_pages(table);
    for (int64_t first = 0; first < items; first += blockDim.x) {
        const int64_t item = first + threadIdx.x;
        const target kind = item < items ? target_of(a, item) : target::none;
        int total;
        const int64_t place = held - 1 - scan_block(kind == target::fresh, &total);
        held -= total;
        if (item >= items) continue;
        a.scratch[item] = kind == target::none  ? -1
                          : kind == target::own ? table.block_table[item]
                                                : take_page(table, place);
    }
    __syncthreads();
    if (threadIdx.x == 0) table.free_count[0] = static_cast<int32_t>(held);
}

// How the arrays of a compaction are cut into slices, one for each block of a row.
struct move_plan {
    int slices[KVC_MAX_SLOT_ARRAYS];  // of each array
    int units[KVC_MAX_SLOT_ARRAYS];   // bytes that one load moves
    int all, slice_bytes;
    int page_shift;  // log2(P), or -1 where P is no power of two
};

__device__ inline int64_t page_of(const kvc_page_table& table, const move_plan& plan, int64_t slot) {
    // 32 bits: a row holds fewer slots, and a division of 64 takes a hundred instructions
    return plan.page_shift >= 0 ? slot >> plan.page_shift : static_cast<unsigned>(slot) / static_cast<unsigned>(table.P);
}

// Moves one slice of every kept slot of a row, tile by tile. As indices[j] >= j, a tile reads no slot that an earlier one
// writes: while it is written, the next one is read, and the indices of the one after that.
template <class Unit>
__device__ inline void move_slice(const kvc_compact_pages_args& a, const move_plan& plan, const kvc_slot_array& array,
                                  int64_t row, int slice) {
    const kvc_page_table& table = a.table;
    const int lanes = plan.slice_bytes / static_cast<int>(sizeof(Unit)), groups = MOVERS / lanes;
    const int group = static_cast<int>(threadIdx.x) / lanes;
    const int64_t units = array.slot_bytes / static_cast<int64_t>(sizeof(Unit));
    const int64_t unit = static_cast<int64_t>(slice) * lanes + threadIdx.x % lanes;
    const int64_t kept = kept_of(a, row), length = held_of(table, row), step = groups * SLOTS;
    const int32_t *indices = a.indices + row * a.K, *pages_of_row = entry(table, row, 0);
    const int32_t* targets = a.scratch + row * table.blocks;
    Unit* slots = static_cast<Unit*>(array.pages) + unit;

    int64_t from[SLOTS];  // slots of the tile to be read next; -1: none
    const auto ask = [&](int64_t tile) {
        KVC_UNROLL
        for (int i = 0; i < SLOTS; i++) {
            const int64_t j = tile + i * groups + group;
            from[i] = -1;
            if (j < kept && unit < units) from[i] = indices[j];
        }
    };
    const auto read = [&](int64_t tile, Unit (&values)[SLOTS], int64_t (&to)[SLOTS]) {
        int64_t at[SLOTS];
        KVC_UNROLL
        for (int i = 0; i < SLOTS; i++) {
            const int64_t j = tile + i * groups + group;
            int32_t source = -1, target = -1;
            if (from[i] >= 0 && from[i] < length) {
                source = pages_of_row[page_of(table, plan, from[i])];
                target = targets[page_of(table, plan, j)];
            }
            const bool there = page_exists(table, source) && page_exists(table, target);
            at[i] = (source * table.P + from[i] - page_of(table, plan, from[i]) * table.P) * units;
            to[i] = there ? (target * table.P + j - page_of(table, plan, j) * table.P) * units : -1;
        }
        KVC_UNROLL
        for (int i = 0; i < SLOTS; i++)
            if (to[i] >= 0) values[i] = slots[at[i]];
    };
    Unit values[SLOTS], next[SLOTS];
    int64_t to[SLOTS], next_to[SLOTS];
    ask(0);
    read(0, values, to);
    ask(step);
    for (int64_t tile = 0; tile < kept; tile += step) {
        __syncthreads();  // all of this tile is read
        read(tile + step, next, next_to);
        ask(tile + 2 * step);
        KVC_UNROLL
        for (int i = 0; i < SLOTS; i++) {
            if (to[i] >= 0) slots[to[i]] = values[i];
            values[i] = next[i];
            to[i] = next_to[i];
        }
    }
}

__global__ __launch_bounds__(MOVERS) void move_kernel(const kvc_compact_pages_args a, const move_plan plan) {
    if (a.scratch[a.table.R * a.table.blocks]) return;
    const int64_t row = blockIdx.x / static_cast<unsigned>(plan.all);
    int slice = static_cast<int>(blockIdx.x % static_cast<unsigned>(plan.all)), i = 0;
    while (slice >= plan.slices[i]) slice -= plan.slices[i++];
    switch (plan.units[i]) {
        case 16: return move_slice<uint4>(a, plan, a.arrays[i], row, slice);
        case 4: return move_slice<uint32_t>(a, plan, a.arrays[i], row, slice);
        case 2: return move_slice<uint16_t>(a, plan, a.arrays[i], row, slice);
        default: return move_slice<uint8_t>(a, plan, a.arrays[i], row, slice);
    }
}

// A block per row: the fresh pages enter the table, what is no longer named is given up.
__global__ __launch_bounds__(THREADS) void settle_kernel(const kvc_compact_pages_args a) {
    const kvc_page_table& table = a.table;
    if (a.scratch[table.R * table.blocks]) return;
    const int64_t row = blockIdx.x, kept = kept_of(a, row), blocks = ceil_div(held_of(table, row), table.P);
    __syncthreads();
    if (kept < 0) return;
    for (int64_t block = threadIdx.x; block < blocks; block += THREADS) {
        int32_t* page = entry(table, row, block);
        const int32_t now = a.scratch[row * table.blocks + block];
        if (block * table.P >= kept) {
            give_up_page(table, *page);
        } else if (now >= 0 && now != *page) {
            give_up_page(table, *page);
            *page = now;
        }
    }
    if (threadIdx.x == 0) table.lengths[row] = static_cast<int32_t>(kept);
}

// ---- host ----

bool valid_arrays(const kvc_slot_array* arrays, int64_t count, int64_t pages, bool tokens) {
    if (count < 0 || count > KVC_MAX_SLOT_ARRAYS) return false;
    for (int64_t i = 0; i < count; i++) {
        const kvc_slot_array& array = arrays[i];
        if (array.slot_bytes < 0 || array.slot_bytes > INT32_MAX) return false;
        if (array.slot_bytes > 0 && ((pages && !array.pages) || (tokens && !array.tokens))) return false;
    }
    return true;
}

// The widest unit, in bytes, that every slot (and every token) is a whole number of.
int unit_of(const kvc_slot_array& array, bool tokens) {
    uint64_t every = reinterpret_cast<uintptr_t>(array.pages) | static_cast<uint64_t>(array.slot_bytes);
    if (tokens)
        every |= reinterpret_cast<uintptr_t>(array.tokens) | static_cast<uint64_t>(array.stride_b) |
                 static_cast<uint64_t>(array.stride_h) | static_cast<uint64_t>(array.stride_s);
    return every % 16 == 0 ? 16 : every % 4 == 0 ? 4 : every % 2 == 0 ? 2 : 1;
}

template <class Fn>
cudaError_t with_unit(int bytes, Fn fn) {
    switch (bytes) {
        case 16: return fn(uint4{});
        case 4: return fn(uint32_t{});
        case 2: return fn(uint16_t{});
        default: return fn(uint8_t{});
    }
}

move_plan plan_of(const kvc_compact_pages_args& a) {
    move_plan plan = {};
    plan.page_shift = -1;
    if ((a.table.P & (a.table.P - 1)) == 0)
        for (int64_t P = a.table.P; P > 0; P /= 2) plan.page_shift++;
    for (int bytes = SLICE_BYTES; bytes >= SLICE_BYTES / 2; bytes /= 2) {
        plan.slice_bytes = bytes;
        plan.all = 0;
        for (int64_t i = 0; i < a.array_count; i++) {
            plan.units[i] = unit_of(a.arrays[i], false);
            plan.slices[i] = static_cast<int>(ceil_div(a.arrays[i].slot_bytes, bytes));
            plan.all += plan.slices[i];
        }
        if (a.table.R * plan.all >= FEWEST_BLOCKS) break;
    }
    return plan;
}

}  // namespace

extern "C" cudaError_t kvc_cuda_append_tokens(const kvc_append_tokens_args* args, cudaStream_t stream) {
    const kvc_append_tokens_args& a = *args;
    if (!valid_table(a.table) || !valid_arrays(a.arrays, a.array_count, a.table.pages, a.S > 0) || a.S < 0 ||
        a.heads < 1 || a.table.R % a.heads)
        return cudaErrorInvalidValue;
    if (a.table.R == 0 || a.S == 0) return cudaSuccess;
    const int64_t tiles = ceil_div(a.S, TILE);
    if (!a.scratch || a.table.R > MAX_GRID_X / tiles / KVC_MAX_SLOT_ARRAYS) return cudaErrorInvalidValue;
    KVC_LAUNCH(extend_kernel, 1, threads_for(a.table.R), 0, stream, a);
    // Neighbouring arrays of one unit, keys and values above all, go in one launch
    for (int64_t first = 0, count; first < a.array_count; first += count) {
        const int unit = unit_of(a.arrays[first], true);
        count = 1;
        while (first + count < a.array_count && unit_of(a.arrays[first + count], true) == unit) count++;
        const unsigned blocks = static_cast<unsigned>(a.table.R * tiles * count);
        const auto launch = [&](auto type) {
            KVC_LAUNCH((append_kernel<decltype(type)>), blocks, THREADS, 0, stream, a, first, tiles);
            return cudaSuccess;
        };
        KVC_TRY(with_unit(unit, launch));
    }
    return cudaSuccess;
}

extern "C" cudaError_t kvc_cuda_truncate_rows(const kvc_truncate_rows_args* args, cudaStream_t stream) {
    const kvc_truncate_rows_args& a = *args;
    if (!valid_table(a.table)) return cudaErrorInvalidValue;
    if (a.table.R == 0) return cudaSuccess;
    if (!a.new_lengths) return cudaErrorInvalidValue;
    KVC_LAUNCH(truncate_kernel, static_cast<unsigned>(a.table.R), THREADS, 0, stream, a);
    return cudaSuccess;
}

extern "C" cudaError_t kvc_cuda_compact_pages(const kvc_compact_pages_args* args, cudaStream_t stream) {
    const kvc_compact_pages_args& a = *args;
    if (!valid_table(a.table) || !valid_arrays(a.arrays, a.array_count, a.table.pages, false) || a.K < 0)
        return cudaErrorInvalidValue;
    if (a.table.R == 0) return cudaSuccess;
    if (!a.scratch || (a.K && !a.indices)) return cudaErrorInvalidValue;
    KVC_LAUNCH(claim_kernel, 1, threads_for(a.table.R * a.table.blocks), 0, stream, a);
    const move_plan plan = plan_of(a);
    if (plan.all > 0 && a.K > 0) {
        if (a.table.R > MAX_GRID_X / plan.all) return cudaErrorInvalidValue;
        KVC_LAUNCH(move_kernel, static_cast<unsigned>(a.table.R * plan.all), MOVERS, 0, stream, a, plan);
    }
    KVC_LAUNCH(settle_kernel, static_cast<unsigned>(a.table.R), THREADS, 0, stream, a);
    return cudaSuccess;
}
