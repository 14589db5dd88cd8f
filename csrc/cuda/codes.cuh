// Codes of keys and values (kvc_quantize in kvc.h) on the device: a vector becomes codes by a warp, and codes become the
// numbers that tensor cores take, in registers.
#pragma once
#include "types.cuh"

// What rows store: numbers, or codes of 8 bits, or those with values of 4.
enum class stored { numbers, int8, k8v4 };

__host__ __device__ constexpr int bits_of_values(stored kind) { return kind == stored::k8v4 ? 4 : 8; }

// What a row's elements are loaded as: of codes of 4 bits a value is half of a byte, the low one up to D/2.
struct int8_row {};
struct k8v4_row {};

template <class T>
struct elements_of {
    using key = T;
    using value = T;
    static constexpr bool CODES = false;
};
template <>
struct elements_of<int8_row> {
    using key = int8_t;
    using value = int8_t;
    static constexpr bool CODES = true;
};
template <>
struct elements_of<k8v4_row> {
    using key = int8_t;
    using value = uint8_t;
    static constexpr bool CODES = true;
};

__device__ inline float to_float(int8_t code) { return static_cast<float>(code); }

// Of a byte that holds two codes.
__device__ inline float nibble(uint8_t byte, bool high) {
    return static_cast<float>(((high ? byte >> 4 : byte & 15) ^ 8) - 8);
}

// ---- a vector by a warp: element 32*i + lane in x[i], 0 from D on ----

// Elements of a head of D that a lane holds, as small as may be known when this is compiled. Calls fn with that many.
template <class Fn>
__device__ KVC_INLINE void with_elements(int64_t D, Fn fn) {
    float few[4] = {}, some[8] = {}, many[16] = {};
    if (D <= 128) fn(few);
    else if (D <= 256) fn(some);
    else fn(many);
}

// By Hadamard's matrix, as kvc_turn does: the same sums in the same order.
template <int EACH>
__device__ KVC_INLINE void turn_vector(float (&x)[EACH], int D) {
    const int lane = threadIdx.x % 32, block = D & -D;
    KVC_UNROLL
    for (int half = 1; half < 32; half *= 2) {
        if (half >= block) break;
        KVC_UNROLL
        for (int i = 0; i < EACH; i++) {
            const float other = __shfl_xor_sync(FULL_WARP, x[i], half);
            x[i] = lane & half ? other - x[i] : x[i] + other;
        }
    }
    KVC_UNROLL
    for (int step = 1; step < EACH; step *= 2) {
        if (32 * step >= block) break;
        KVC_UNROLL
        for (int i = 0; i < EACH; i++) {
            if (i & step) continue;
            const float a = x[i], b = x[i + step];
            x[i] = a + b;
            x[i + step] = a - b;
        }
    }
    const float factor = 1.0f / sqrtf(static_cast<float>(block));
    KVC_UNROLL
    for (int i = 0; i < EACH; i++) x[i] *= factor;
}

// The float16 scale of a vector whose largest element is `most`; NaN: there is none.
__device__ inline float code_scale(float most, float levels, f16& bits) {
    float scale = most / levels;
    from_float(scale, bits);
    scale = to_float(bits);
    if (scale * levels < most) {  // exact: 11 and 7 bits; the next float16
        bits.bits++;
        scale = to_float(bits);
    }
    if (scale - scale == 0.0f) return scale;
    bits.bits = 0x7e00;
    return NAN;
}

// Codes and scale of a vector, bits 8 or 4 (D even then); x is turned first for 4.
template <int EACH>
__device__ KVC_INLINE void quantize_vector(float (&x)[EACH], int D, int bits, void* codes, f16* scale_at) {
    const int lane = threadIdx.x % 32;
    const float levels = bits == 4 ? 7.0f : 127.0f;
    if (bits == 4) turn_vector(x, D);
    uint32_t most = 0;  // bits of numbers that are not negative rise as they do, NaN above all
    KVC_UNROLL
    for (int i = 0; i < EACH; i++) {
        const uint32_t size = float_bits(x[i]) & 0x7fffffffu;
        most = size > most ? size : most;
    }
    KVC_UNROLL
    for (int step = 16; step > 0; step /= 2) {
        const uint32_t other = __shfl_xor_sync(FULL_WARP, most, step);
        most = other > most ? other : most;
    }
    f16 rounded;
    const float scale = code_scale(bits_float(most), levels, rounded);
    int code[EACH];
    KVC_UNROLL
    for (int i = 0; i < EACH; i++) {
        const float share = fminf(fmaxf(x[i] / scale, -levels), levels);
        code[i] = scale > 0.0f ? static_cast<int>(rintf(share)) : 0;
    }
    if (lane == 0) *scale_at = rounded;
    if (bits == 8) {
        KVC_UNROLL
        for (int i = 0; i < EACH; i++)
            if (32 * i + lane < D) static_cast<int8_t*>(codes)[32 * i + lane] = static_cast<int8_t>(code[i]);
        return;
    }
    // Byte j holds codes j and j + D/2, which another lane may have
    const int half = D / 2, from = (lane + half) % 32;
    const bool next = lane + half % 32 >= 32;
    int other[EACH + 1] = {};
    KVC_UNROLL
    for (int i = 0; i < EACH; i++) other[i] = __shfl_sync(FULL_WARP, code[i], from);
    KVC_UNROLL
    for (int step = 1; step < EACH; step *= 2) {
        KVC_UNROLL
        for (int i = 0; i <= EACH; i++)
            if (half / 32 & step) other[i] = i + step <= EACH ? other[i + step] : 0;
    }
    KVC_UNROLL
    for (int i = 0; i < (EACH + 1) / 2; i++) {
        const int high = next ? other[i + 1] : other[i];
        if (32 * i + lane < half)
            static_cast<uint8_t*>(codes)[32 * i + lane] = static_cast<uint8_t>((code[i] & 15) | (high & 15) << 4);
    }
}

// Code i of a vector.
__device__ inline float code_of(const void* codes, int bits, int i, int D) {
    if (bits == 8) return static_cast<float>(static_cast<const int8_t*>(codes)[i]);
    const bool high = i >= D / 2;
    return nibble(static_cast<const uint8_t*>(codes)[high ? i - D / 2 : i], high);
}

// ---- four bytes of codes as pairs of 16-bit numbers, exactly ----

#ifdef KVC_CUDA_EMULATION
template <class T>
inline uint32_t pair_of(int low, int high) {
    T both[2];
    from_float(static_cast<float>(low), both[0]);
    from_float(static_cast<float>(high), both[1]);
    return both[0].bits | static_cast<uint32_t>(both[1].bits) << 16;
}
inline int byte_of(uint32_t bytes, int i) { return static_cast<int8_t>(bytes >> 8 * i & 255u); }
inline int nibble_of(uint32_t bytes, int i) { return static_cast<int>((bytes >> 4 * i & 15u) ^ 8u) - 8; }
#else
__device__ inline uint32_t add_pairs(bf16, uint32_t a, uint32_t b) {
    uint32_t sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(0x3f803f80u), "r"(b));
    return sum;
}
__device__ inline uint32_t add_pairs(f16, uint32_t a, uint32_t b) {
    uint32_t sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}
// (x & mask) ^ bits, in one instruction: of two constants the compiler makes two.
__device__ inline uint32_t masked(uint32_t x, uint32_t mask, uint32_t bits) {
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
    return y;
}
// Two codes of 8 bits, in the low bytes of each half.
__device__ inline uint32_t pair_of(bf16, uint32_t bytes) {
    // 128 + its low 7 bits, less 128, or 256 where the sign is set
    return add_pairs(bf16{}, masked(bytes, 0x007f007fu, 0x43004300u), masked(bytes, 0x00800080u, 0xc300c300u));
}
__device__ inline uint32_t pair_of(f16, uint32_t bytes) {
    return add_pairs(f16{}, masked(bytes, 0x00ff00ffu, 0x64806480u), 0xe480e480u);  // 1024 + 128 + code, less that
}
#endif

// even: codes 0 and 2 of four of 8 bits, odd: 1 and 3; the first in the low half.
template <class T>
__device__ inline void code_pairs(uint32_t bytes, uint32_t& even, uint32_t& odd) {
#ifdef KVC_CUDA_EMULATION
    even = pair_of<T>(byte_of(bytes, 0), byte_of(bytes, 2));
    odd = pair_of<T>(byte_of(bytes, 1), byte_of(bytes, 3));
#else
    even = pair_of(T{}, bytes);
    odd = pair_of(T{}, bytes >> 8);
#endif
}

// The same of the low halves of four bytes (half 0), or of the high ones; bfloat16.
__device__ inline void nibble_pairs(uint32_t bytes, int half, uint32_t& even, uint32_t& odd) {
#ifdef KVC_CUDA_EMULATION
    even = pair_of<bf16>(nibble_of(bytes, half), nibble_of(bytes, 4 + half));
    odd = pair_of<bf16>(nibble_of(bytes, 2 + half), nibble_of(bytes, 6 + half));
#else
    // 128 + 8 + code, less that
    even = add_pairs(bf16{}, masked(bytes >> 4 * half, 0x000f000fu, 0x43084308u), 0xc308c308u);
    odd = add_pairs(bf16{}, masked(bytes >> (4 * half + 8), 0x000f000fu, 0x43084308u), 0xc308c308u);
#endif
}
