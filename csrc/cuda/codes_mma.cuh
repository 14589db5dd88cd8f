// Products of queries and weights with codes in shared memory, by one warp on tensor cores: codes become 16-bit numbers in
// registers, exactly. A code is a byte or a half of one, and matrices are loaded as pairs of bytes: what ldmatrix gives a lane
// are neighbouring dimensions where tensor cores want another order. Sums over dimensions do not mind, if the queries lie in
// the same order (store_for_codes); and results of values come out in an order that store_mixed knows.
#pragma once
#include "codes.cuh"
#include "tile.cuh"

// Where 16-byte unit `unit` of row `row` lies in a tile of rows of BYTES bytes, a power of two from 32 on, without a gap: units
// of a row change places so that 8 rows read at the same one lie in different banks.
template <int BYTES>
__device__ inline int code_place(int row, int unit) {
    constexpr int UNITS = BYTES / 16;
    return row * BYTES + ((unit ^ (UNITS >= 8 ? row & 7 : row * UNITS / 8 & (UNITS - 1))) * 16);
}

// Eight neighbours of a query, the first at column `chunk` (a multiple of 8), which lies at `to`: of every 16 columns the even
// ones of lane t (4*t, 4*t + 2) are places 2*t and 2*t + 1, the odd ones 8 further.
template <class T>
__device__ inline void store_for_codes(T* to, const packed<T, 8>& part, int chunk) {
    T* sixteen = to - chunk % 16;
    KVC_UNROLL
    for (int i = 0; i < 2; i++) {
        const int t = chunk % 16 / 4 + i;
        packed<T, 2> even, odd;
        even.at[0] = part.at[4 * i];
        even.at[1] = part.at[4 * i + 2];
        odd.at[0] = part.at[4 * i + 1];
        odd.at[1] = part.at[4 * i + 3];
        *reinterpret_cast<packed<T, 2>*>(sixteen + 2 * t) = even;
        *reinterpret_cast<packed<T, 2>*>(sixteen + 2 * t + 8) = odd;
    }
}

// x += queries [16, K] times the codes of 16 keys [16, K], K a multiple of 32 up to MAX_D.
template <class T, int MAX_D>
__device__ inline void multiply_codes(float (&x)[2][4], const T* q, int pitch_q, const unsigned char* keys, int K) {
    const int lane = static_cast<int>(threadIdx.x) % 32, matrix = lane / 8, row = lane % 8;
    q += (row + matrix % 2 * 8) * pitch_q + matrix / 2 * 8;
    // Matrices (keys 0-7, dims 0-15), (0-7, 16-31), (8-15, 0-15), (8-15, 16-31)
    KVC_UNROLL
    for (int k = 0; k < MAX_D; k += 32) {
        if (k >= K) break;
        uint32_t codes[4];
        load_matrices<false>(codes, keys + code_place<MAX_D>(row + matrix / 2 * 8, matrix % 2 + k / 16));
        KVC_UNROLL
        for (int half = 0; half < 2; half++) {
            uint32_t of_q[4];
            load_matrices<false>(of_q, q + k + 16 * half);
            KVC_UNROLL
            for (int tile = 0; tile < 2; tile++) {
                uint32_t even, odd;
                code_pairs<T>(codes[2 * tile + half], even, odd);
                multiply_16x8x16<T>(x[tile], of_q, even, odd);
            }
        }
    }
}

// values += weights [16, 16], rounded to bfloat16 (value scales are among them, which float16 may not hold), times the codes of
// 16 values of D dimensions. Tiles j and j + 1 are dimensions 8*j.. and, of codes of 4 bits, the second half of them D/2 + ..
template <stored KIND, int MAX_D, int N>
__device__ inline void mix_codes(float (&values)[N][4], const float (&weights)[2][4], const unsigned char* v, int D) {
    constexpr int BYTES = MAX_D * bits_of_values(KIND) / 8;
    const int lane = static_cast<int>(threadIdx.x) % 32, matrix = lane / 8, row = lane % 8;
    const int bytes = D * bits_of_values(KIND) / 8;
    uint32_t of_w[4];
    KVC_UNROLL
    for (int e = 0; e < 4; e++) {
        bf16 low, high;
        from_float(weights[e / 2][e % 2 * 2], low);
        from_float(weights[e / 2][e % 2 * 2 + 1], high);
        of_w[e] = low.bits | static_cast<uint32_t>(high.bits) << 16;
    }
    // Matrices (values 0-7, bytes 0-15), (8-15, 0-15), (0-7, 16-31), (8-15, 16-31)
    KVC_UNROLL
    for (int c = 0; c < BYTES; c += 32) {
        if (c >= bytes) break;
        uint32_t codes[4];
        load_matrices<true>(codes, v + code_place<BYTES>(row + matrix % 2 * 8, matrix / 2 + c / 16));
        KVC_UNROLL
        for (int half = 0; half < 2; half++) {
            const int tile = c / 8 + 2 * half;
            if constexpr (KIND == stored::k8v4) {
                KVC_UNROLL
                for (int high = 0; high < 2; high++) {
                    uint32_t even[2], odd[2];  // of values 0-7 and 8-15
                    nibble_pairs(codes[2 * half], high, even[0], odd[0]);
                    nibble_pairs(codes[2 * half + 1], high, even[1], odd[1]);
                    multiply_16x8x16<bf16>(values[tile + high * (N / 2)], of_w, even[0], even[1]);
                    multiply_16x8x16<bf16>(values[tile + high * (N / 2) + 1], of_w, odd[0], odd[1]);
                }
            } else {
                uint32_t even[2], odd[2];
                code_pairs<bf16>(codes[2 * half], even[0], odd[0]);
                code_pairs<bf16>(codes[2 * half + 1], even[1], odd[1]);
                multiply_16x8x16<bf16>(values[tile], of_w, even[0], even[1]);
                multiply_16x8x16<bf16>(values[tile + 1], of_w, odd[0], odd[1]);
            }
        }
    }
}

// Row r of a lane's values (of the two that it has) to where their dimensions are: column 2*t of tiles j and j + 1 is
// dimension 8*j + 4*t and the next, column 2*t + 1 the two behind.
template <stored KIND, int MAX_D, int N>
__device__ inline void store_mixed(float* to, const float (&values)[N][4], int r, [[maybe_unused]] int D) {
    const int t = static_cast<int>(threadIdx.x) % 4;
    KVC_UNROLL
    for (int j = 0; j < N; j += 2) {
        int d = 8 * j + 4 * t;
        if constexpr (KIND == stored::k8v4) {
            const int own = j < N / 2 ? d : d - MAX_D / 2;
            if (own >= D / 2) continue;
            d = j < N / 2 ? own : own + D / 2;
        }
        float4 four;
        four.x = values[j][2 * r];
        four.y = values[j + 1][2 * r];
        four.z = values[j][2 * r + 1];
        four.w = values[j + 1][2 * r + 1];
        *reinterpret_cast<float4*>(to + d) = four;
    }
}
