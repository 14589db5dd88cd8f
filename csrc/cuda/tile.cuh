// Products of small matrices in shared memory by one warp, and copies into shared memory that run in the background.
//
// 16-bit types: mma.sync m16n8k16 with float32 sums, operands through ldmatrix. float32: plain FMA in the same layout
// of the result, so that a kernel is written once for all types. The emulated build does what the PTX ISA says of the
// fragments: which lane and register hold which element.
//
// Result of 16 x 8*N: lane 4*group + t (group 0..7, t 0..3) holds of tile j, columns 8*j..8*j + 7,
//     c[j][0], c[j][1] = row group, columns 8*j + 2*t and + 1        c[j][2], c[j][3] = the same of row group + 8
#pragma once
#include <type_traits>

#include "types.cuh"

// Elements between rows of a tile of `columns` elements: an odd number of 16-byte units, so that 8 rows read at the
// same column lie in different banks. columns is a multiple of 16.
template <class T>
__host__ __device__ constexpr int pitch_of(int columns) {
    return columns + PER_16_BYTES<T>;
}

#ifdef KVC_CUDA_EMULATION
inline void copy_16_async(void* to, const void* from, bool there) { kvc_emulation::async_copy(to, from, 16, there); }
inline void commit_copies() { kvc_emulation::async_commit(); }
template <int GROUPS>
void wait_for_copies() {
    kvc_emulation::async_wait(GROUPS);
}
#else
__device__ inline uint32_t shared_address(const void* at) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// 16 bytes from global to shared memory, zeros if not `there` (then `from` is not read). Both on 16 bytes.
__device__ inline void copy_16_async(void* to, const void* from, bool there) {
    const int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
}

// Closes a group of copies; wait_for_copies<N> waits until at most the last N groups of this thread are under way.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int GROUPS>
__device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}
#endif

// Four 8 x 8 matrices of 16-bit elements: lanes 8*i..8*i + 7 give the addresses of the rows of matrix i. Register i of
// lane 4*r + t is row r, columns 2*t and 2*t + 1 of matrix i; TRANSPOSED: rows 2*t and 2*t + 1 of column r.
template <bool TRANSPOSED>
__device__ inline void load_matrices(uint32_t (&to)[4], const void* row) {
#ifdef KVC_CUDA_EMULATION
    kvc_emulation::check_aligned(row, 16);
    const char* all = kvc_emulation::warp_exchange(&row, sizeof row);
    const unsigned lane = kvc_emulation::lane(), r = lane / 4, t = lane % 4;
    for (unsigned i = 0; i < 4; i++) {
        uint16_t halves[2];
        for (unsigned e = 0; e < 2; e++) {
            const unsigned y = TRANSPOSED ? 2 * t + e : r, x = TRANSPOSED ? r : 2 * t + e;
            const uint16_t* of_row;
            memcpy(&of_row, kvc_emulation::of_lane(all, 8 * i + y), sizeof of_row);
            halves[e] = of_row[x];
        }
        to[i] = halves[0] | static_cast<uint32_t>(halves[1]) << 16;
    }
#else
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(shared_address(row))
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(shared_address(row))
                     : "memory");
#endif
}

// c += A x B, 16 x 8 x 16. Lane 4*group + t: a[0] = A(group, 2t..), a[1] = A(group + 8, 2t..), a[2] and a[3] the same
// at columns 2t + 8..; b0 = B(2t.., group), b1 = B(2t + 8.., group). `..`: two neighbours, the first in the low half.
template <class T>
__device__ inline void multiply_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef KVC_CUDA_EMULATION
    const uint32_t given[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const char* all = kvc_emulation::warp_exchange(given, sizeof given);
    const auto element = [&](unsigned of, unsigned which, unsigned half) {
        uint32_t word;
        memcpy(&word, kvc_emulation::of_lane(all, of) + 4 * which, 4);
        return to_float(T{static_cast<uint16_t>(half ? word >> 16 : word & 0xffffu)});
    };
    const unsigned lane = kvc_emulation::lane();
    for (unsigned i = 0; i < 4; i++) {
        const unsigned row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
        for (unsigned k = 0; k < 16; k++)
            c[i] += element(4 * (row % 8) + k % 8 / 2, row / 8 + 2 * (k / 8), k % 2) *
                    element(4 * column + k % 8 / 2, 4 + k / 8, k % 2);
    }
#else
    if constexpr (std::is_same<T, bf16>::value)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// How B lies in shared memory: its column n at b + n*pitch, or its row k at b + k*pitch.
enum class b_layout { columns, rows };

// B for tiles j and j + 1 of one step of 16 k, from the address that this lane gives for it: see warp_multiply. A load
// of B serves M blocks of 16 rows.
template <b_layout B, class T, int M, int N>
__device__ inline void multiply_step(float (&c)[M][N][4], const uint32_t (&a)[M][4], const T* b, int pitch_b, int tiles) {
    KVC_UNROLL
    for (int j = 0; j < N; j += 2) {
        if (j >= tiles) break;
        uint32_t of_b[4];
        load_matrices<B == b_layout::rows>(of_b, b + 8 * j * (B == b_layout::rows ? 1 : pitch_b));
        KVC_UNROLL
        for (int m = 0; m < M; m++) {
            multiply_16x8x16<T>(c[m][j], a[m], of_b[0], of_b[1]);
            multiply_16x8x16<T>(c[m][j + 1], a[m], of_b[2], of_b[3]);
        }
    }
}

// Where this lane's row of the four 8 x 8 matrices of B begins: (columns 0-7, k 0-7), (0-7, 8-15), (8-15, 0-7),
// (8-15, 8-15).
template <b_layout B, class T>
__device__ inline const T* row_of_b(const T* b, int pitch_b) {
    const int lane = static_cast<int>(threadIdx.x) % 32, matrix = lane / 8, row = lane % 8;
    return B == b_layout::columns ? b + (row + matrix / 2 * 8) * pitch_b + matrix % 2 * 8
                                  : b + (row + matrix % 2 * 8) * pitch_b + matrix / 2 * 8;
}

// What a lane does of warp_multiply below; a and b are at its own rows and columns.
template <b_layout B, int N>
__device__ inline void multiply_floats(float (&c)[N][4], const float* a, int pitch_a, const float* b, int pitch_b,
                                       int K, int tiles) {
    KVC_ROLLED
    for (int k = 0; k < K; k += 4) {
        float upper[4], lower[4];
        load<4>(upper, a + k);
        load<4>(lower, a + 8 * pitch_a + k);
        KVC_UNROLL
        for (int j = 0; j < N; j++) {
            if (j >= tiles) break;
            float left[4], right[4];
            if constexpr (B == b_layout::columns) {
                load<4>(left, b + 8 * j * pitch_b + k);
                load<4>(right, b + (8 * j + 1) * pitch_b + k);
            } else {
                KVC_UNROLL
                for (int i = 0; i < 4; i++) {
                    float both[2];
                    load<2>(both, b + (k + i) * pitch_b + 8 * j);
                    left[i] = both[0];
                    right[i] = both[1];
                }
            }
            KVC_UNROLL
            for (int i = 0; i < 4; i++) {
                c[j][0] += upper[i] * left[i];
                c[j][1] += upper[i] * right[i];
                c[j][2] += lower[i] * left[i];
                c[j][3] += lower[i] * right[i];
            }
        }
    }
}

// c += A x B with A [16*M, K] at a + row*pitch_a + k, for the first `tiles` (even, at most N) tiles of 8 columns. K is a
// multiple of 16; rows of A and B start on 16 bytes. All lanes of the warp take part. MAX_K: a K known when this is
// compiled; a product of that K and of all N tiles has neither a loop nor a test.
template <b_layout B, int MAX_K = 0, int M, int N, class T>
__device__ inline void warp_multiply(float (&c)[M][N][4], const T* a, int pitch_a, const T* b, int pitch_b, int K,
                                     int tiles = N) {
    static_assert(N % 2 == 0, "two tiles of B come with one load");
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (sizeof(T) == 2) {
        const int matrix = lane / 8, row = lane % 8;
        // A: matrices (rows 0-7, k 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15)
        a += (row + matrix % 2 * 8) * pitch_a + matrix / 2 * 8;
        b = row_of_b<B>(b, pitch_b);
        const auto step = [&](int k, int count) {
            uint32_t of_a[M][4];
            KVC_UNROLL
            for (int m = 0; m < M; m++) load_matrices<false>(of_a[m], a + 16 * m * pitch_a + k);
            multiply_step<B>(c, of_a, b + k * (B == b_layout::rows ? pitch_b : 1), pitch_b, count);
        };
        if (MAX_K > 0 && K == MAX_K && tiles == N) {
            KVC_UNROLL
            for (int k = 0; k < MAX_K; k += 16) step(k, N);
        } else {
            KVC_ROLLED
            for (int k = 0; k < K; k += 16) step(k, tiles);
        }
    } else {
        const int group = lane / 4, t = lane % 4;
        a += group * pitch_a;
        b += B == b_layout::columns ? 2 * t * pitch_b : 2 * t;
        KVC_UNROLL
        for (int m = 0; m < M; m++, a += 16 * pitch_a) {
            if constexpr (B == b_layout::columns) {
                // Sums of up to 64 products, then their sum: a chain of 256 roundings would lose twice as much
                for (int k = 0; k < K; k += 64) {
                    float part[N][4] = {};
                    multiply_floats<B>(part, a + k, pitch_a, b + k, pitch_b, K - k < 64 ? K - k : 64, tiles);
                    KVC_UNROLL
                    for (int i = 0; i < 4 * N; i++) c[m][i / 4][i % 4] += part[i / 4][i % 4];
                }
            } else {
                multiply_floats<B>(c[m], a, pitch_a, b, pitch_b, K, tiles);
            }
        }
    }
}

// The results of one block of 16 rows as those of M = 1.
template <int N>
__device__ inline float (&one_block(float (&c)[N][4]))[1][N][4] {
    return reinterpret_cast<float (&)[1][N][4]>(c);
}

template <b_layout B, int MAX_K = 0, int N, class T>
__device__ inline void warp_multiply(float (&c)[N][4], const T* a, int pitch_a, const T* b, int pitch_b, int K,
                                     int tiles = N) {
    warp_multiply<B, MAX_K>(one_block(c), a, pitch_a, b, pitch_b, K, tiles);
}

// c += A x B with A [16*M, 8*L] results of warp_multiply, rounded to T (16 bits), and row k of B at b + k*pitch_b: the
// lanes already hold the elements that the product wants from them.
template <class T, int M, int L, int N>
__device__ inline void multiply_result(float (&c)[M][N][4], float (&a)[M][L][4], const T* b, int pitch_b, int tiles) {
    static_assert(L % 2 == 0 && N % 2 == 0, "steps of 16 k, two tiles of B with one load");
    const auto pair = [](float low, float high) {
        T both[2];
        from_float(low, both[0]);
        from_float(high, both[1]);
        return both[0].bits | static_cast<uint32_t>(both[1].bits) << 16;
    };
    b = row_of_b<b_layout::rows>(b, pitch_b);
    const auto multiply = [&](int count) {
        KVC_UNROLL
        for (int i = 0; i < L; i += 2) {
            uint32_t of_a[M][4];
            KVC_UNROLL
            for (int m = 0; m < M; m++) {
                KVC_UNROLL
                for (int e = 0; e < 4; e++) of_a[m][e] = pair(a[m][i + e / 2][e % 2 * 2], a[m][i + e / 2][e % 2 * 2 + 1]);
            }
            multiply_step<b_layout::rows>(c, of_a, b + 8 * i * pitch_b, pitch_b, count);
        }
    };
    if (tiles == N) multiply(N);
    else multiply(tiles);
}

template <class T, int L, int N>
__device__ inline void multiply_result(float (&c)[N][4], float (&a)[L][4], const T* b, int pitch_b, int tiles) {
    multiply_result(one_block(c), one_block(a), b, pitch_b, tiles);
}

// A result of warp_multiply as a tile of T in shared memory, so that it can be the A of another product.
template <int N, class T>
__device__ inline void store_result(T* to, int pitch, const float (&c)[N][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    to += lane / 4 * pitch + 2 * (lane % 4);
    KVC_UNROLL
    for (int j = 0; j < N; j++) {
        packed<T, 2> upper, lower;
        from_float(c[j][0], upper.at[0]);
        from_float(c[j][1], upper.at[1]);
        from_float(c[j][2], lower.at[0]);
        from_float(c[j][3], lower.at[1]);
        *reinterpret_cast<packed<T, 2>*>(to + 8 * j) = upper;
        *reinterpret_cast<packed<T, 2>*>(to + 8 * pitch + 8 * j) = lower;
    }
}
