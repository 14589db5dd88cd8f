// One decoded step of a cache that keeps its tokens: see kvc_paged_step in kvc_step.h.
//
// Must move, beside what decode reads: B*S*(2*Hq + 4*Hkv)*D elements, 25 KB for a token of a Llama 3 8B layer. What counts
// is launches: one block takes the pages, lists decode's pieces and, for a few heads, rotates and stores them; then the two
// kernels of decode. With many sequences the heads have a launch of their own.
#include "extend.cuh"
#include "step.cuh"

namespace {

constexpr int64_t FEW_HEADS = 128;  // which the one block rotates itself, a warp at a time

struct parts {
    int32_t* copied;
    void *q, *decode;
    int64_t bytes;
};

kvc_decode_args decode_of(const kvc_paged_step_args& a) {
    kvc_decode_args d = {};
    d.out = a.out, d.lse = a.lse, d.k_pages = a.k_pages, d.v_pages = a.v_pages, d.cache_dtype = a.k.dtype;
    d.q = kvc_dense_view(nullptr, a.q.dtype, a.Hq, a.S, a.D);
    d.block_table = a.table.block_table, d.begin = a.begin, d.end = a.table.lengths;
    d.B = a.B, d.Hq = a.Hq, d.Hkv = a.Hkv, d.S = a.S, d.D = a.D;
    d.P = a.table.P, d.pages = a.table.pages, d.blocks = a.table.blocks;
    d.scale = a.scale, d.causal = 1, d.softcap = a.softcap, d.sink_logits = a.sink_logits;
    return d;
}

parts parts_of(const kvc_paged_step_args& a, const kvc_decode_args& decode) {
    parts p = {};
    p.copied = static_cast<int32_t*>(kvc_part_of(a.scratch, &p.bytes, (a.table.R + 1) * 4));
    p.q = kvc_part_of(a.scratch, &p.bytes, a.B * a.Hq * a.S * a.D * bytes_of(a.q.dtype));
    p.decode = kvc_part_of(a.scratch, &p.bytes, kvc_cuda_decode_scratch_bytes(&decode));
    return p;
}

kvc_append_tokens_args append_of(const kvc_paged_step_args& a, const parts& p) {
    kvc_append_tokens_args append = {};
    append.table = a.table, append.scratch = p.copied, append.heads = a.Hkv, append.S = a.S;
    return append;
}

// Head `item` of the queries, then of the new tokens, by a warp; the rows have grown.
__device__ inline void place_head(const kvc_paged_step_args& a, const parts& p, int64_t item) {
    const kvc_page_table& table = a.table;
    const bool refused = p.copied[table.R];
    const int64_t queries = a.B * a.Hq * a.S, heads = item < queries ? a.Hq : a.Hkv, own = item < queries ? item : item - queries;
    const int64_t s = own % a.S, h = own / a.S % heads, b = own / a.S / heads, first = b * a.Hkv;
    const int64_t start = table.lengths[first] - (refused ? 0 : a.S);
    const int64_t position = start + (a.shift ? a.shift[first] : 0) + s;
    if (item < queries) {
        rotate_head(a.q, row_at(a.q, b, h, s), p.q, a.q.dtype, own * a.D, a.D, a.rotary_dim, a.cos, a.sin, position,
                    a.table_rows, -1);
        return;
    }
    if (refused) return;
    const int64_t row = first + h, before = table.lengths[row] - a.S, slot = before + s;
    if (s == 0 && p.copied[row] >= 0)
        copy_slots(table, p.copied[row], *entry(table, row, before / table.P), before % table.P, a.k_pages, a.v_pages,
                   a.k.dtype, a.D);
    const int32_t page = *entry(table, row, slot / table.P);
    if (!page_exists(table, page)) return;
    const int64_t at = (page * table.P + slot % table.P) * a.D, from = row_at(a.v, b, h, s);
    rotate_head(a.k, row_at(a.k, b, h, s), a.k_pages, a.k.dtype, at, a.D, a.rotary_dim, a.cos, a.sin, position,
                a.table_rows, -1);
    copy_head(a.v.data, from, a.v_pages, at, a.k.dtype, a.D);
}

__global__ __launch_bounds__(PLAN_THREADS, 1) void begin_kernel(const kvc_paged_step_args a, const parts p,
                                                             const kvc_append_tokens_args append,
                                                             const kvc_decode_args decode, const plan pieces,
                                                             const scratch s, int64_t heads) {
    extend_rows(append);
    __syncthreads();
    list_pieces(decode, pieces, s);
    for (int64_t item = threadIdx.x / 32; item < heads; item += STEP_WARPS) place_head(a, p, item);
}

__global__ __launch_bounds__(PLAN_THREADS, 1) void place_kernel(const kvc_paged_step_args a, const parts p, int64_t heads) {
    const int64_t between = gridDim.x * static_cast<int64_t>(STEP_WARPS);
    for (int64_t item = blockIdx.x * static_cast<int64_t>(STEP_WARPS) + threadIdx.x / 32; item < heads; item += between)
        place_head(a, p, item);
}

bool valid(const kvc_paged_step_args& a) {
    return a.B >= 0 && a.Hq >= 0 && a.Hkv >= 0 && a.S >= 0 && a.D >= 1 && a.D <= KVC_CUDA_MAX_HEAD_DIM &&
           a.table.R == a.B * a.Hkv && (a.Hkv ? a.Hq % a.Hkv == 0 : a.Hq == 0) && a.rotary_dim >= 0 &&
           a.rotary_dim <= a.D && a.rotary_dim % 2 == 0 && valid_scale(a.scale, a.softcap) && valid_dtype(a.q.dtype) &&
           valid_dtype(a.k.dtype) && a.v.dtype == a.k.dtype && valid_table(a.table) && (a.table.P & (a.table.P - 1)) == 0;
}

bool empty(const kvc_paged_step_args& a) { return a.table.R == 0 || a.Hq == 0 || a.S == 0; }

}  // namespace

extern "C" int64_t kvc_cuda_paged_step_scratch_bytes(const kvc_paged_step_args* args) {
    return valid(*args) && !empty(*args) ? parts_of(*args, decode_of(*args)).bytes : 0;
}

extern "C" cudaError_t kvc_cuda_paged_step(const kvc_paged_step_args* args, cudaStream_t stream) {
    const kvc_paged_step_args& a = *args;
    if (!valid(a)) return cudaErrorInvalidValue;
    if (empty(a)) return cudaSuccess;
    if (!a.out || !a.lse || !a.q.data || !a.k.data || !a.v.data || !a.scratch) return cudaErrorInvalidValue;
    if (a.table.pages && (!a.k_pages || !a.v_pages)) return cudaErrorInvalidValue;
    if (a.rotary_dim && a.table_rows && (!a.cos || !a.sin)) return cudaErrorInvalidValue;
    kvc_decode_args decode = decode_of(a);
    const parts p = parts_of(a, decode);
    decode.q.data = p.q, decode.scratch = p.decode;
    const plan pieces = plan_of(decode);
    if (!fits_grids(pieces)) return cudaErrorInvalidValue;
    const int64_t heads = a.B * (a.Hq + a.Hkv) * a.S, alone = heads <= FEW_HEADS ? heads : 0;
    KVC_LAUNCH(begin_kernel, 1, PLAN_THREADS, 0, stream, a, p, append_of(a, p), decode, pieces, scratch_of(decode, pieces),
               alone);
    if (!alone) {
        const int64_t blocks = ceil_div(heads, STEP_WARPS);
        KVC_LAUNCH(place_kernel, static_cast<unsigned>(blocks < MAX_GRID_X ? blocks : MAX_GRID_X), PLAN_THREADS, 0, stream,
                   a, p, heads);
    }
    return decode_listed(decode, stream);
}
