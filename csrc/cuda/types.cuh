// Element types and their conversions, 16-byte loads and stores, dispatch on kvc_dtype.
//
// Own 16-bit types instead of cuda_fp16.h and cuda_bf16.h: the emulated build has neither, and loads and stores move
// bits anyway. On the device each conversion is one instruction; on the host the same rounding (to nearest, ties to
// even; NaN stays NaN) is done by hand.
#pragma once
#include <math.h>
#include <string.h>

#include "../checks.h"
#include "launch.h"

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

__host__ __device__ inline uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

__host__ __device__ inline float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

__host__ __device__ inline float to_float(float x) { return x; }

__host__ __device__ inline float to_float(bf16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }

__host__ __device__ inline float to_float(f16 x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#else
    const uint32_t sign = (x.bits & 0x8000u) << 16, exponent = x.bits >> 10 & 31u, mantissa = x.bits & 1023u;
    if (exponent == 31) return bits_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent > 0) return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
    const float tiny = static_cast<float>(mantissa) * 0x1p-24f;  // subnormal: exact in float32
    return bits_float(sign | float_bits(tiny));
#endif
}

__host__ __device__ inline void from_float(float x, float& y) { y = x; }

__host__ __device__ inline void from_float(float x, bf16& y) {
#ifdef __CUDA_ARCH__
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    const uint32_t bits = float_bits(x);
    if (x != x)
        y.bits = 0x7fff;
    else
        y.bits = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
#endif
}

__host__ __device__ inline void from_float(float x, f16& y) {
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    const uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000u;
    const float size = fabsf(x);
    uint32_t half;
    if (x != x) {
        half = 0x7fff;
    } else if (size >= 65520.0f) {
        half = 0x7c00;
    } else if (size < 0x1p-14f) {
        half = float_bits(size + 0.5f) - float_bits(0.5f);  // the addition rounds to multiples of 2^-24
    } else {
        const uint32_t positive = bits & 0x7fffffffu;
        half = (positive - (112u << 23) + 0xfffu + (positive >> 13 & 1u)) >> 13;
    }
    y.bits = static_cast<uint16_t>(sign | half);
#endif
}

// N neighbours, aligned so that one load or store moves them all.
template <class T, int N>
struct alignas(sizeof(T) * N) packed {
    T at[N];
};

template <class T>
constexpr int PER_16_BYTES = 16 / static_cast<int>(sizeof(T));

template <int N, class T>
__device__ inline void load(float (&to)[N], const T* from) {
    const packed<T, N> values = *reinterpret_cast<const packed<T, N>*>(from);
    KVC_UNROLL
    for (int i = 0; i < N; i++) to[i] = to_float(values.at[i]);
}

// `to` is global memory.
template <int N, class T>
__device__ inline void store(T* to, const float (&from)[N]) {
    packed<T, N> values;
    KVC_UNROLL
    for (int i = 0; i < N; i++) from_float(from[i], values.at[i]);
    if constexpr (sizeof values == sizeof(uint4)) {
        // A plain store of 16 bytes is split into its members by nvcc in some kernels; this one never is
        uint4 bits;
        memcpy(&bits, &values, sizeof bits);
        __stwb(reinterpret_cast<uint4*>(to), bits);
    } else {
        *reinterpret_cast<packed<T, N>*>(to) = values;
    }
}

constexpr float LOG2_E = 1.44269504088896340736f;

// 2^x for weights that are rounded to 16 bits: on the device one instruction, whose results below 2^-126 are 0.
__device__ inline float exp2_fast(float x) {
#ifdef KVC_CUDA_EMULATION
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// 1/x within 1 ulp; of more than 2^126 and of infinity 0.
__device__ inline float reciprocal_fast(float x) {
#ifdef KVC_CUDA_EMULATION
    return 1.0f / x;
#else
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// A logit or its slope's tanh under a softcap.
__device__ inline float tanh_of_logit(float x, float cap) { return tanhf(x / cap); }

// A logit's tanh under a softcap. For 16-bit types 1 - 2 / (1 + e^(2x)), off by at most about 2^-21: under a cap of 50 that
// is 2e-5 of a logit, far below what rounding queries and keys to 16 bits does; five instructions instead of 25 and a branch.
template <class T>
__device__ inline float softcap_tanh(float logit, float cap) {
    if constexpr (sizeof(T) == 4) return tanh_of_logit(logit, cap);
    else return 1.0f - 2.0f * reciprocal_fast(1.0f + exp2_fast(logit * (2.0f * LOG2_E / cap)));
}

template <class T>
__device__ inline float capped_logit(float logit, float cap) {
    return cap * softcap_tanh<T>(logit, cap);
}

// -inf - -inf is no number, so a maximum of -inf counts as 0.
__device__ inline float finite_or_0(float m) { return m == -INFINITY ? 0.0f : m; }

// Element i of an array whose type is known at run time only; for what is read or written once.
__device__ inline float load_any(const void* data, kvc_dtype dtype, int64_t i) {
    if (dtype == KVC_F32) return static_cast<const float*>(data)[i];
    if (dtype == KVC_BF16) return to_float(static_cast<const bf16*>(data)[i]);
    return to_float(static_cast<const f16*>(data)[i]);
}

__device__ inline void store_any(void* data, kvc_dtype dtype, int64_t i, float x) {
    if (dtype == KVC_F32)
        static_cast<float*>(data)[i] = x;
    else if (dtype == KVC_BF16)
        from_float(x, static_cast<bf16*>(data)[i]);
    else
        from_float(x, static_cast<f16*>(data)[i]);
}

// x as an array of this type would hold it.
__device__ inline float rounded_to(kvc_dtype dtype, float x) {
    bf16 b;
    f16 h;
    if (dtype == KVC_F32) return x;
    if (dtype == KVC_BF16) {
        from_float(x, b);
        return to_float(b);
    }
    from_float(x, h);
    return to_float(h);
}

// ---- host ----

// Of rows that store numbers.
inline kvc_dtype dtype_of(const kvc_rows& rows) { return static_cast<kvc_dtype>(rows.format); }

__host__ __device__ inline bool stores_codes(const kvc_rows& rows) {
    return rows.format == KVC_FORMAT_INT8 || rows.format == KVC_FORMAT_K8V4;
}

inline bool valid_format(const kvc_rows& rows, int64_t D) {
    return dtype_known(dtype_of(rows)) || (stores_codes(rows) && (rows.format == KVC_FORMAT_INT8 || D % 2 == 0));
}

__host__ __device__ inline int64_t bytes_of(kvc_dtype dtype) { return dtype == KVC_F32 ? 4 : 2; }

// Whether a block of this device may have that much shared memory; 99 KB are there from sm_80 on.
inline bool shared_fits(size_t bytes) {
    int device = 0, most = 0;
    if (bytes <= 99 * 1024) return true;
    if (cudaGetDevice(&device) != cudaSuccess) return false;
    if (cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) return false;
    return static_cast<size_t>(most) >= bytes;
}

template <class Kernel>
cudaError_t allow_shared(Kernel* kernel, size_t bytes) {
    if (bytes <= 48 * 1024) return cudaSuccess;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

inline bool aligned_16(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Whether every [b, h, t] row of the view starts on 16 bytes (then 16-byte loads cover D if D fills them).
inline bool aligned_16(const kvc_view& x) {
    const int64_t bytes = bytes_of(x.dtype);
    return aligned_16(x.data) && x.stride_b * bytes % 16 == 0 && x.stride_h * bytes % 16 == 0 &&
           x.stride_t * bytes % 16 == 0;
}

// Calls fn with a value of the element type; fn returns cudaError_t.
template <class Fn>
cudaError_t with_dtype(kvc_dtype dtype, Fn fn) {
    switch (dtype) {
        case KVC_F32: return fn(float{});
        case KVC_BF16: return fn(bf16{});
        case KVC_F16: return fn(f16{});
    }
    return cudaErrorInvalidValue;
}
