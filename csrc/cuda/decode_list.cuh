// The list of decode's pieces, made by one block.
#pragma once
#include "decode_join.cuh"

namespace {

// Warp `part` of `parts` of a row: its pieces to places `first` and on of the list, where the row's own counters begin at 0.
// The first front_pieces lie before the row's range.
__device__ inline void list_row(const kvc_decode_args& a, const plan& p, const scratch& s, int64_t row, int first,
                                int pieces, int front_pieces, int row_begin, int row_end, int part, int parts) {
    const int lane = 32 * part + static_cast<int>(threadIdx.x % 32), lanes = 32 * parts;
    for (int i = lane; i < pieces; i += lanes) {
        int4 piece;
        piece.x = static_cast<int>(row);
        piece.y = i < front_pieces ? begin_of_piece(i) : row_begin + begin_of_piece(i - front_pieces);
        piece.z = row_end;
        piece.w = static_cast<int>(row * p.row_pieces + i);
        s.list[first + i] = piece;
    }
    if (!p.fused) return;
    for (int i = lane; i <= groups_in(pieces); i += lanes) counters_of(p, s, row)[i] = 0;
    if (pieces == 0 && part == 0) write_keyless(a, p, row);
}

// A whole block: counts the pieces of every row, adds the counts up, lists the pieces row by row.
__device__ inline void list_pieces(const kvc_decode_args& a, const plan& p, const scratch& s) {
    __shared__ int of_warp[MOST_THREADS / 32];
    const int threads = blockDim.x, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int64_t share = quotient(p.rows + threads - 1, threads), begin = thread * share;
    const int64_t end = begin + share < p.rows ? begin + share : p.rows;
    int own = 0;
    for (int64_t row = begin; row < end; row++) own += pieces_of(a, p, row);
    int sum = own;  // of this lane and those before it
    KVC_UNROLL
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(FULL_WARP, sum, step);
        if (lane >= step) sum += before;
    }
    if (lane == 31) of_warp[warp] = sum;
    __syncthreads();
    int first = sum - own;
    for (int w = 0; w < warp; w++) first += of_warp[w];
    for (int64_t row = begin; row < end; row++) {
        s.first[row] = first;
        first += pieces_of(a, p, row);
    }
    if (thread == threads - 1) *s.count = first;
    __syncthreads();
    for (int64_t row = warp; row < p.rows; row += threads / 32) {
        const int front_pieces = static_cast<int>(pieces_in(front_of(a, p, row)));
        list_row(a, p, s, row, s.first[row], pieces_of(a, p, row), front_pieces, begin_of(a, row), end_of(a, p, row), 0, 1);
    }
}

}  // namespace
