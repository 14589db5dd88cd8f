// One decoded step of DMC's cache: see kvc_dmc_step in kvc_step.h.
//
// Must move, beside what decode reads: the queries in and out, the new keys and values, each row's tail and newest slot in
// and out, 12*R*D bytes of float32 and 2*R*D elements. What counts is launches: one block decides, takes the pages, lists
// decode's pieces and, for a few rows, writes their slots and rotates the queries; then the kernel of decode's pieces.
// With many sequences rows and queries have a launch of their own.
#include "dmc_rows.cuh"
#include "gates.cuh"
#include "step.cuh"

namespace {

constexpr int64_t FEW_HEADS = 128;  // queries and rows that the one block serves itself, a warp at a time

// Warps of that block: fewer where a row's columns take their registers and shared memory.
template <int COLUMNS>
constexpr int WARPS_OF = COLUMNS <= 2 ? STEP_WARPS : COLUMNS <= 4 ? STEP_WARPS / 2 : PLACE_WARPS;

struct parts {
    float *alpha, *omega;  // [R] each
    int32_t *notes, *positions;
    void *q, *decode;
    int64_t bytes;
};

kvc_decode_args decode_of(const kvc_dmc_step_args& args) {
    const kvc_dmc_append_args& a = args.append;
    kvc_decode_args d = {};
    d.out = args.out, d.lse = args.lse, d.rows = a.rows;
    d.q = kvc_dense_view(nullptr, args.q.dtype, args.Hq, 1, a.D);
    d.block_table = a.table.block_table, d.end = a.table.lengths;
    d.B = a.B, d.Hq = args.Hq, d.Hkv = a.Hkv, d.S = 1, d.D = a.D;
    d.P = a.table.P, d.pages = a.table.pages, d.blocks = a.table.blocks;
    d.scale = args.scale, d.softcap = args.softcap, d.sink_logits = args.sink_logits;
    return d;
}

parts parts_of(const kvc_dmc_step_args& args, const kvc_decode_args& decode) {
    const int64_t R = args.append.table.R;
    parts p = {};
    p.alpha = static_cast<float*>(kvc_part_of(args.scratch, &p.bytes, R * 4));
    p.omega = static_cast<float*>(kvc_part_of(args.scratch, &p.bytes, R * 4));
    p.notes = static_cast<int32_t*>(kvc_part_of(args.scratch, &p.bytes, (4 * R + 1) * 4));
    p.positions = static_cast<int32_t*>(kvc_part_of(args.scratch, &p.bytes, args.append.B * 4));
    p.q = kvc_part_of(args.scratch, &p.bytes, args.append.B * args.Hq * args.append.D * bytes_of(args.q.dtype));
    p.decode = kvc_part_of(args.scratch, &p.bytes, kvc_cuda_decode_scratch_bytes(&decode));
    return p;
}

// Query head `item`, then row item - B*Hq, by a warp; keys: float [32 * COLUMNS] of shared memory of the warp's own.
template <int COLUMNS, class X>
__device__ inline void place_head(const kvc_dmc_step_args& args, const parts& p, const kvc_dmc_append_args& a, int64_t item,
                                  float* keys) {
    const int64_t queries = a.B * args.Hq, b = quotient(item, args.Hq);
    if (item < queries) {
        rotate_head(args.q, row_at(args.q, b, remainder_of(item, args.Hq), 0), p.q, args.q.dtype, item * a.D, a.D,
                    a.rotary_dim, a.cos, a.sin, p.positions[b], a.table_rows, a.neuron);
        return;
    }
    const notes n = notes_of(a);
    if (!*n.refused) settle_row<COLUMNS, X>(a, n, item - queries, keys);
}

// `a`: args.append with its scratch, positions and gates set.
template <int COLUMNS, class X>
__global__ __launch_bounds__(32 * WARPS_OF<COLUMNS>, 1) void begin_kernel(const kvc_dmc_step_args args, const parts p,
                                                             const kvc_dmc_append_args a, const kvc_decode_args decode,
                                                             const plan pieces, const scratch s, int64_t heads) {
    __shared__ float keys[WARPS_OF<COLUMNS>][32 * COLUMNS];
    for (int64_t row = threadIdx.x; row < a.table.R; row += blockDim.x) {
        const int64_t b = quotient(row, a.Hkv), h = remainder_of(row, a.Hkv);
        if (!args.append.alpha) {
            kvc_view x = a.k;
            const float logit = load_any(x.data, x.dtype, row_at(x, b, h, 0) + a.neuron);
            p.alpha[row] = decision_at(logit, 1.0f, args.decision_shift) > args.decision_margin ? 1.0f : 0.0f;
        }
        if (!args.append.omega) {
            kvc_view x = args.q;
            x.data = static_cast<char*>(x.data) + a.neuron * (x.dtype == KVC_F32 ? 4 : 2);
            p.omega[row] = importance_at(x, b, h, 0, args.Hq / a.Hkv, args.omega_shift, args.omega_eps, args.reduce);
        }
    }
    for (int64_t b = threadIdx.x; b < a.B; b += blockDim.x) {
        const int32_t place = args.places[b];
        p.positions[b] = place + (args.offsets ? args.offsets[b] : 0);
    }
    __syncthreads();
    grow_rows(a, misses_page(a.table, nullptr));
    __syncthreads();
    for (int64_t b = threadIdx.x; b < a.B && !*notes_of(a).refused; b += blockDim.x) args.places[b]++;
    list_pieces(decode, pieces, s);
    for (int64_t item = threadIdx.x / 32; item < heads; item += WARPS_OF<COLUMNS>)
        place_head<COLUMNS, X>(args, p, a, item, keys[threadIdx.x / 32]);
}

template <int COLUMNS, class X>
__global__ __launch_bounds__(PLAN_THREADS, 1) void place_kernel(const kvc_dmc_step_args args, const parts p,
                                                             const kvc_dmc_append_args a, int64_t heads) {
    __shared__ float keys[PLACE_WARPS][32 * COLUMNS];
    const int64_t between = gridDim.x * static_cast<int64_t>(PLACE_WARPS);
    for (int64_t item = blockIdx.x * static_cast<int64_t>(PLACE_WARPS) + threadIdx.x / 32; item < heads; item += between)
        place_head<COLUMNS, X>(args, p, a, item, keys[threadIdx.x / 32]);
}

bool valid(const kvc_dmc_step_args& args) {
    const kvc_dmc_append_args& a = args.append;
    return a.B >= 0 && a.Hkv >= 0 && args.Hq >= 0 && a.S == 1 && a.D >= 1 && a.D <= KVC_CUDA_MAX_HEAD_DIM &&
           (a.Hkv ? args.Hq % a.Hkv == 0 : args.Hq == 0) && a.table.R == a.B * a.Hkv && a.neuron >= 0 && a.neuron < a.D &&
           a.rotary_dim >= 0 && a.rotary_dim <= a.D && a.rotary_dim % 2 == 0 && !a.positions && !a.counts &&
           a.window >= 0 && a.window <= KVC_DMC_MAX_WINDOW && valid_scale(args.scale, args.softcap) &&
           valid_dtype(args.q.dtype) && valid_dtype(a.k.dtype) && a.v.dtype == a.k.dtype &&
           format_takes(a.rows, a.k.dtype, a.D) && valid_table(a.table) && (a.table.P & (a.table.P - 1)) == 0;
}

bool empty(const kvc_dmc_step_args& args) { return args.append.table.R == 0 || args.Hq == 0; }

}  // namespace

extern "C" int64_t kvc_cuda_dmc_step_scratch_bytes(const kvc_dmc_step_args* args) {
    return valid(*args) && !empty(*args) ? parts_of(*args, decode_of(*args)).bytes : 0;
}

extern "C" cudaError_t kvc_cuda_dmc_step(const kvc_dmc_step_args* args, cudaStream_t stream) {
    if (!valid(*args)) return cudaErrorInvalidValue;
    if (empty(*args)) return cudaSuccess;
    kvc_dmc_append_args a = args->append;
    if (!args->out || !args->lse || !args->q.data || !args->places || !args->scratch || !a.k.data || !a.v.data ||
        !a.tail_k || !a.tail_v || !a.tail_w || !a.tail_counts || (a.table.pages && !rows_there(a.rows)))
        return cudaErrorInvalidValue;
    if (a.rotary_dim && a.table_rows && (!a.cos || !a.sin)) return cudaErrorInvalidValue;
    kvc_decode_args decode = decode_of(*args);
    const parts p = parts_of(*args, decode);
    decode.q.data = p.q, decode.scratch = p.decode;
    a.scratch = p.notes, a.positions = p.positions;
    if (!a.alpha) a.alpha = p.alpha;
    if (!a.omega) a.omega = p.omega;
    const plan pieces = plan_of(decode);
    if (!fits_grids(pieces) || a.B * (args->Hq + a.Hkv) > MAX_GRID_X) return cudaErrorInvalidValue;
    const int64_t heads = a.B * args->Hq + a.table.R, alone = heads <= FEW_HEADS ? heads : 0;
    const cudaError_t begun = with_dtype(a.k.dtype, [&](auto type) {
        using X = decltype(type);
        return with_columns(a.D, [&](auto columns) {
            constexpr int COLUMNS = decltype(columns)::value;
            KVC_LAUNCH((begin_kernel<COLUMNS, X>), 1, 32 * WARPS_OF<COLUMNS>, 0, stream, *args, p, a, decode, pieces,
                       scratch_of(decode, pieces), alone);
            if (alone) return cudaSuccess;
            const int64_t blocks = ceil_div(heads, PLACE_WARPS);
            KVC_LAUNCH((place_kernel<COLUMNS, X>), static_cast<unsigned>(blocks < MAX_GRID_X ? blocks : MAX_GRID_X),
                       PLAN_THREADS, 0, stream, *args, p, a, heads);
            return cudaSuccess;
        });
    });
    return begun == cudaSuccess ? decode_listed(decode, stream) : begun;
}
