// Rows of pages cut into pieces for decode.cu: the list of them, made on the device, where their results lie, and the
// queries that share a row. The first FEW pieces of a row have SHORT_PIECE keys, so that short rows keep a device busy;
// those behind them PIECE. Where a piece begins follows from its number alone.
#pragma once
#include "kvc_cuda.h"
#include "tile.cuh"

namespace {

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int FEW_PER_LANE = 8, MANY_PER_LANE = 16;  // elements of a head that one lane of pieces_kernel holds
constexpr int PIECE = 256, SHORT_PIECE = 128;  // keys
#ifdef KVC_CUDA_EMULATION
constexpr int FEW = 2;  // so that tests see both
constexpr int GROUP = 2;
#else
constexpr int FEW = 32;
constexpr int GROUP = 32;  // pieces of a row that are joined before the groups are
#endif
#ifdef KVC_CUDA_EMULATION
constexpr int64_t FUSED_PIECES = INT64_MAX;  // tests see both joins at few queries and many
#else
// That a call has at most where the pieces' kernel joins them: about a block each. With more of them every block waits behind
// each of its pieces for memory to be in order, while the next one's copies are on their way: an H200 took 76 us for 32,768
// keys of 8 heads, and 65 with a launch of its own for the join.
constexpr int64_t FUSED_PIECES = 384;
#endif
constexpr int FUSED_QUERIES = 8;  // of a row, that its pieces' kernel joins: a tile of every one of them
constexpr int STAGE = 64;    // keys of a piece in shared memory at a time, 16 per warp
constexpr int MMA_QUERIES = 16;
constexpr int PLAN_THREADS = 256;
constexpr int JOIN_THREADS = 256;
constexpr int SOFTMAX_QUERIES = 4;  // whose logits a block turns into probabilities at a time
constexpr float LN_2 = 0.69314718055994530942f;

struct plan {
    int64_t rows, queries;  // queries that share a row's keys: G*slab
    int64_t first, slab;    // which of the S positions are served at a time: their results wait in the scratch memory
    int64_t row_pieces;     // pieces of a row that is full
    int64_t capacity;
    int64_t bytes_list, bytes_first, bytes_count, bytes_statistics, bytes_values, bytes_groups, bytes_done;
    int page_shift;    // log2(P); unused without a block table
    int lanes;         // pieces_kernel: neighbouring threads that share one key
    int tiles;         // of queries
    bool wide_q;
    bool fused;          // the pieces' kernel joins them: a row's queries are one tile, and there is no join_kernel
    int64_t row_groups;  // GROUP pieces each, of a row that is full
};

// Of a row of so many keys.
__host__ __device__ constexpr int64_t pieces_in(int64_t keys) {
    if (keys <= 0) return 0;
    return keys <= FEW * SHORT_PIECE ? (keys + SHORT_PIECE - 1) / SHORT_PIECE : FEW + (keys - FEW * SHORT_PIECE + PIECE - 1) / PIECE;
}

// Where piece i of a row begins, counted from the row's beginning.
__host__ __device__ constexpr int begin_of_piece(int i) {
    return i <= FEW ? i * SHORT_PIECE : FEW * SHORT_PIECE + (i - FEW) * PIECE;
}

// Groups that so many pieces of a row are joined in.
__host__ __device__ constexpr int groups_in(int64_t pieces) { return static_cast<int>((pieces + GROUP - 1) / GROUP); }

// Whether every grid of a call stays within bounds.
inline bool fits_grids(const plan& p) {
    return p.capacity <= MAX_GRID_X && p.rows * p.row_pieces <= MAX_GRID_X && p.rows * p.queries <= MAX_GRID_X &&
           p.rows * p.row_pieces * p.queries <= MAX_GRID_X;  // items of work are counted in 32 bits
}

// Where everything lies in the scratch memory. Maximum and sum are of base 2: m = max(x*log2(e)), l = sum 2^(.. - m).
struct scratch {
    int4* list;          // [pieces] row, first key, end of the row, place of the result
    int32_t* first;      // [rows] number of the row's first piece in the list
    int32_t* count;      // [1] pieces in the list
    float2* statistics;  // [rows, row_pieces, queries] m, l
    float* values;       // [rows, row_pieces, queries, D]
    float2* groups;      // [rows, row_groups, queries] m, l of a group of pieces, whose values lie where its first piece's do
    int32_t* done;       // [rows, row_groups + 1] groups that are joined, pieces of each group that are there
};

#ifdef KVC_CUDA_EMULATION
constexpr int64_t SLAB_BYTES = 1 << 16;  // so that a few queries are several slabs
#else
constexpr int64_t SLAB_BYTES = 1 << 26;
#endif

// Of positions `first` and on, as many as SLAB_BYTES hold the results of; one at least.
inline plan plan_of(const kvc_decode_args& a, int64_t first = 0) {
    plan p = {};
    p.rows = a.B * a.Hkv;
    p.first = first;
    p.capacity = a.block_table ? a.blocks * a.P : a.P;
    if (a.value_table && a.value_blocks < a.blocks) p.capacity = a.value_blocks * a.P;
    p.row_pieces = pieces_in(p.capacity) + pieces_in(a.sinks < p.capacity ? a.sinks : p.capacity);  // of the front too
    while (a.P >> p.page_shift > 1) p.page_shift++;
    const int64_t position = p.rows * p.row_pieces * (a.Hq / a.Hkv) * (a.D + 2) * static_cast<int64_t>(sizeof(float));
    const int64_t most = position > 0 && position < SLAB_BYTES ? SLAB_BYTES / position : 1;
    p.slab = a.S - first < most ? a.S - first : most;
    p.queries = a.Hq / a.Hkv * p.slab;
    const auto size = [](int64_t count, int64_t bytes) { return ceil_div(count * bytes, 64) * 64; };
    const int64_t pieces = p.rows * p.row_pieces;
    p.bytes_list = size(pieces, sizeof(int4));
    p.bytes_first = size(p.rows, sizeof(int32_t));
    p.bytes_count = 64;
    p.bytes_statistics = size(pieces * p.queries, sizeof(float2));
    p.bytes_values = size(pieces * p.queries * a.D, sizeof(float));
    p.row_groups = groups_in(p.row_pieces);
    const int64_t of_wide_heads = stores_codes(a.rows) ? 1 : FUSED_QUERIES / 2;  // what pieces_kernel has in a tile
    p.fused = !a.probabilities && pieces <= FUSED_PIECES && p.queries <= (a.D > 32 * FEW_PER_LANE ? of_wide_heads : FUSED_QUERIES);
    p.bytes_groups = size(p.rows * p.row_groups * p.queries, sizeof(float2));
    p.bytes_done = size(p.rows * (p.row_groups + 1), sizeof(int32_t));
    return p;
}

inline scratch scratch_of(const kvc_decode_args& a, const plan& p) {
    char* at = static_cast<char*>(a.scratch);
    scratch s = {};
    s.list = reinterpret_cast<int4*>(at);
    s.first = reinterpret_cast<int32_t*>(at += p.bytes_list);
    s.count = reinterpret_cast<int32_t*>(at += p.bytes_first);
    s.statistics = reinterpret_cast<float2*>(at += p.bytes_count);
    s.values = reinterpret_cast<float*>(at += p.bytes_statistics);
    s.groups = reinterpret_cast<float2*>(at += p.bytes_values);
    s.done = reinterpret_cast<int32_t*>(at += p.bytes_groups);
    return s;
}

__device__ inline int begin_of(const kvc_decode_args& a, int64_t row) {
    return a.begin && a.begin[row] > 0 ? a.begin[row] : 0;
}

// One past the last key that a query of the slab sees, of a row that ends at `said`.
__device__ inline int end_at(const kvc_decode_args& a, const plan& p, int said) {
    said = said > 0 ? said : 0;
    const int end = said < p.capacity ? said : static_cast<int>(p.capacity);
    return a.causal ? end - static_cast<int>(a.S - p.first - p.slab) : end;
}

__device__ inline int end_of(const kvc_decode_args& a, const plan& p, int64_t row) { return end_at(a, p, a.end[row]); }

// The first keys before the row's range that are seen: [0, front).
__device__ inline int front_of(const kvc_decode_args& a, const plan& p, int64_t row) {
    const int begin = begin_of(a, row), end = end_of(a, p, row), before = begin < end ? begin : end;
    return a.sinks < before ? static_cast<int>(a.sinks) : before;
}

__device__ inline int pieces_of(const kvc_decode_args& a, const plan& p, int64_t row) {
    return static_cast<int>(pieces_in(front_of(a, p, row)) + pieces_in(int64_t{end_of(a, p, row)} - begin_of(a, row)));
}

// Number of a piece in its row.
__device__ inline int number_of(const plan& p, const int4& piece) {
    return static_cast<int>(piece.w - piece.x * p.row_pieces);
}

// One past the piece's last key.
__device__ inline int end_of_piece(const kvc_decode_args& a, const plan& p, const int4& piece) {
    int number = number_of(p, piece), end = piece.z;
    if (a.sinks > 0) {
        const int front = front_of(a, p, piece.x), of_front = static_cast<int>(pieces_in(front));
        if (number < of_front) end = front;
        else number -= of_front;
    }
    const int most = piece.y + (number < FEW ? SHORT_PIECE : PIECE);
    return end < most ? end : most;
}

// The pages of key t of the row and of its value, both -1 if one of them is on no page.
__device__ inline int2 pages_of(const kvc_decode_args& a, const plan& p, int64_t row, int64_t t) {
    int2 at;
    at.x = at.y = static_cast<int>(row);
    if (a.block_table) at.x = at.y = a.block_table[row * a.blocks + (t >> p.page_shift)];
    if (a.value_table) at.y = a.value_table[row * a.value_blocks + (t >> p.page_shift)];
    const int64_t value_pages = a.value_table ? a.value_pages : a.pages;
    if (at.x < 0 || at.x >= a.pages || at.y < 0 || at.y >= value_pages) at.x = at.y = -1;
    return at;
}

// The slot of key or value t, counted from the first of all pages.
__device__ inline int64_t slot_in(const kvc_decode_args& a, int page, int64_t t) {
    return page * a.P + (a.block_table ? t & (a.P - 1) : t);
}

// Where the blocks count that work on a row; list_pieces makes that 0.
__device__ inline int32_t* counters_of(const plan& p, const scratch& s, int64_t row) {
    return s.done + row * (p.row_groups + 1);
}

// Where a piece's logits, in base 2, wait in a.probabilities until probabilities_kernel knows their sum: those of the
// row's query n at + n*columns. count: keys of the piece that have a column.
struct piece_columns {
    float* at;
    int count;
};

__device__ inline piece_columns columns_of(const kvc_decode_args& a, const plan& p, const int4& piece) {
    const int number = number_of(p, piece), most = number < FEW ? SHORT_PIECE : PIECE;
    const int64_t row = piece.x, first = begin_of_piece(number), left = a.columns - first;
    const int keys = piece.z - piece.y < most ? piece.z - piece.y : most;
    piece_columns columns;
    columns.at = a.probabilities + row * p.queries * a.columns + first;
    columns.count = left < keys ? static_cast<int>(left) : keys;
    return columns;
}

// Query n of a row and slab: head g*G + n / slab, position first + n % slab. limit: the key behind the last one that it
// sees.
struct query {
    bool here;
    int64_t h, s;
    int limit;
};

__device__ inline query query_of(const kvc_decode_args& a, const plan& p, int64_t g, int64_t n, int row_end) {
    query q;
    q.here = n < p.queries;
    q.h = g * quotient(a.Hq, a.Hkv) + quotient(n, p.slab);
    q.s = p.first + remainder_of(n, p.slab);
    q.limit = !q.here ? -1 : a.causal ? row_end - static_cast<int>(p.first + p.slab - 1 - q.s) : row_end;
    return q;
}

}  // namespace

// kvc_cuda_decode for arguments that it would take, whose pieces list_pieces has listed by plan_of(a); they are not empty.
cudaError_t decode_listed(const kvc_decode_args& a, cudaStream_t stream);
