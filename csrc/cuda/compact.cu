// In-place compaction of rows to chosen indices: see kvc_compact_rows in kvc.h.
//
// Must move: 2*R*k*D*element_bytes and 4*R*k bytes of indices; no arithmetic: the ceiling is memory bandwidth.
#include "kvc_cuda.h"
#include "types.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int SLOTS = 4;         // slots that a thread holds in registers between load and store
constexpr int SLICE_BYTES = 64;  // bytes of each slot that one block moves: two sectors of memory

// A block moves one slice of every slot of one row, tile by tile: a tile is read whole before it is written. Indices
// rise, so indices[j] >= j: no later tile reads a slot that an earlier one wrote. Slices share no byte, so blocks need
// not wait for each other.
template <class Unit>
__global__ void compact_kernel(const kvc_compact_rows_args a, int64_t units, int64_t slices) {
    constexpr int LANES = SLICE_BYTES / static_cast<int>(sizeof(Unit)), GROUPS = THREADS / LANES;
    const int64_t row = blockIdx.x / slices;
    const int64_t unit = blockIdx.x % slices * LANES + threadIdx.x % LANES;
    const int group = static_cast<int>(threadIdx.x) / LANES;
    Unit* base = reinterpret_cast<Unit*>(static_cast<char*>(a.rows) + row * a.row_stride * a.element_bytes) + unit;
    const int32_t* indices = a.indices + row * a.k;
    for (int64_t tile = 0; tile < a.k; tile += GROUPS * SLOTS) {
        Unit held[SLOTS];
        bool moves[SLOTS];
        KVC_UNROLL
        for (int i = 0; i < SLOTS; i++) {
            const int64_t j = tile + i * GROUPS + group;
            const int64_t from = j < a.k ? indices[j] : -1;
            moves[i] = unit < units && from >= 0 && from < a.T && j < a.T;
            if (moves[i]) held[i] = base[from * units];
        }
        __syncthreads();
        KVC_UNROLL
        for (int i = 0; i < SLOTS; i++)
            if (moves[i]) base[(tile + i * GROUPS + group) * units] = held[i];
        // The next tile's reads lie past this tile's writes: no second barrier
    }
}

template <class Unit>
cudaError_t launch(const kvc_compact_rows_args& a, cudaStream_t stream) {
    const int64_t units = a.D * a.element_bytes / static_cast<int64_t>(sizeof(Unit));
    const int64_t slices = ceil_div(units, SLICE_BYTES / static_cast<int64_t>(sizeof(Unit)));
    if (a.R > MAX_GRID_X / slices) return cudaErrorInvalidValue;
    KVC_LAUNCH((compact_kernel<Unit>), static_cast<unsigned>(a.R * slices), THREADS, 0, stream, a, units, slices);
    return cudaGetLastError();
}

}  // namespace

extern "C" cudaError_t kvc_cuda_compact_rows(const kvc_compact_rows_args* args, cudaStream_t stream) {
    const kvc_compact_rows_args& a = *args;
    if (a.R < 0 || a.T < 0 || a.D < 0 || a.k < 0 || a.k > a.T || a.element_bytes < 1) return cudaErrorInvalidValue;
    if (a.R == 0 || a.D == 0 || a.k == 0) return cudaSuccess;
    if (!a.rows || !a.indices) return cudaErrorInvalidValue;
    // The widest unit that every slot of every row is a whole number of
    const uint64_t every = reinterpret_cast<uintptr_t>(a.rows) | static_cast<uint64_t>(a.D * a.element_bytes) |
                           static_cast<uint64_t>(a.row_stride * a.element_bytes);
    if (every % 16 == 0) return launch<uint4>(a, stream);
    if (every % 4 == 0) return launch<uint32_t>(a, stream);
    if (every % 2 == 0) return launch<uint16_t>(a, stream);
    return launch<uint8_t>(a, stream);
}
