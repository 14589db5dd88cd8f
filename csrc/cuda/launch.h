// One way to launch a kernel, so that the same .cu files compile with nvcc and, for tests, with g++ against
// tests/cuda_emulation/cuda_runtime.h (which defines KVC_CUDA_EMULATION and comes first on the include path there).
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

// Returns the error of a call from the function it stands in; the next launch does not find it again.
#define KVC_TRY(...)                                             \
    do {                                                         \
        if (const cudaError_t failed = __VA_ARGS__; failed != cudaSuccess) { \
            (void)cudaGetLastError();                            \
            return failed;                                       \
        }                                                        \
    } while (0)

// Launches, and returns the error from the function it stands in if that failed: what follows would run on what was never
// written. A kernel with template arguments goes in parentheses: KVC_LAUNCH((kernel<float, 4>), ...).
#define KVC_LAUNCH(...)                                                                            \
    do {                                                                                           \
        KVC_ENQUEUE(__VA_ARGS__);                                                                  \
        KVC_TRY(cudaGetLastError());                                                               \
    } while (0)

#ifdef KVC_CUDA_EMULATION
#define KVC_ENQUEUE(kernel, grid, block, shared_bytes, stream, ...)                                         \
    kvc_emulation::launch(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, stream, [&]() { \
        (kernel)(__VA_ARGS__);                                                                             \
    })
// The block's dynamic shared memory; at most one per kernel.
#define KVC_DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(kvc_emulation::dynamic_shared())
#define KVC_UNROLL
#define KVC_ROLLED
#define KVC_INLINE inline
#else
#define KVC_ENQUEUE(kernel, grid, block, shared_bytes, stream, ...) \
    (kernel)<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define KVC_DYNAMIC_SHARED(type, name)                           \
    extern __shared__ __align__(16) unsigned char name##_bytes[]; \
    type* name = reinterpret_cast<type*>(name##_bytes)
#define KVC_UNROLL _Pragma("unroll")
#define KVC_ROLLED _Pragma("unroll 1")  // where more turns at a time would cost registers
#define KVC_INLINE __forceinline__      // of what takes arrays: a call would put them into memory
#endif

constexpr int MOST_THREADS = 1024;  // of a block
constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr int64_t MAX_GRID_X = 0x7fffffff;  // y and z end at 65,535: kernels here count everything in x

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Of numbers from 0 to 2^32 - 1, the second not 0: a division of 64 bits takes a GPU five times as long.
__host__ __device__ constexpr int64_t quotient(int64_t a, int64_t b) {
    return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
}
__host__ __device__ constexpr int64_t remainder_of(int64_t a, int64_t b) {
    return static_cast<uint32_t>(a) % static_cast<uint32_t>(b);
}

// Smallest power of two >= count, at most 32: how many lanes of a warp share one row of `count` items.
inline int lanes_for(int64_t count) {
    int lanes = 1;
    while (lanes < 32 && lanes < count) lanes *= 2;
    return lanes;
}
