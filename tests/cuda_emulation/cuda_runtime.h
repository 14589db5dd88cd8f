// CUDA on the CPU, for tests: enough of the runtime to compile csrc/cuda/*.cu with g++ -x c++ and run them.
//
// A launch runs its blocks one after another. The threads of a block are fibers on one OS thread (ucontext): each runs
// until it waits at a barrier (__syncthreads, __syncwarp, shuffle, ballot), then the next one runs. ThreadSanitizer takes
// them for threads that only barriers order, so that it reports a missing one as a race, whoever runs first.
// What CUDA leaves undefined is an error here, not a guess: the launch prints a sentence and cudaGetLastError returns
// cudaErrorLaunchFailure if threads wait for each other for ever or a shuffle reads a lane that takes no part.
// Matrix operations (csrc/cuda/tile.cuh) exchange fragments between all 32 lanes in the layout of the PTX ISA; a copy in
// the background leaves NaN bytes in its target until the thread waits for it. Dynamic shared memory is an exact heap
// block filled with NaN bytes, so that AddressSanitizer sees its end and a read of what nobody wrote shows.
// KVC_EMULATION_ORDER=reverse runs fibers from the last to the first: code that needs no barrier gives the same result
// in both orders. One launch at a time.
#pragma once
#define KVC_CUDA_EMULATION 1

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "block_threads.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one by one: one copy is the block's own

namespace kvc_emulation {

template <class Body>
void launch(const void* kernel, dim3 grid, dim3 threads, size_t shared_bytes, cudaStream_t, Body body) {
    launch_body(kernel, grid, threads, shared_bytes, [](void* context) { (*static_cast<Body*>(context))(); }, &body);
}

template <class T>
T shuffle(unsigned mask, T value, unsigned source) {
    static_assert(sizeof(T) <= 8, "shuffles move up to 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = warp_operation(warp_op::shuffle, mask, bits, source);
    memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace kvc_emulation

// ---- what kernels call ----

#define threadIdx (*kvc_emulation::thread_index)
#define blockIdx kvc_emulation::block_index
#define blockDim kvc_emulation::block_size
#define gridDim kvc_emulation::grid_size

inline void __syncthreads() { kvc_emulation::syncthreads(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    kvc_emulation::warp_operation(kvc_emulation::warp_op::syncwarp, mask, 0, 0);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return static_cast<unsigned>(
        kvc_emulation::warp_operation(kvc_emulation::warp_op::ballot, mask, predicate != 0, 0));
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
    return kvc_emulation::shuffle(mask, value, static_cast<unsigned>(source) % 32);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
    return kvc_emulation::shuffle(mask, value, kvc_emulation::lane() ^ static_cast<unsigned>(lanes));
}
// Past the end of the warp a lane gets its own value.
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
    const unsigned lane = kvc_emulation::lane();
    return kvc_emulation::shuffle(mask, value, lane + delta < 32 ? lane + delta : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
    const unsigned lane = kvc_emulation::lane();
    return kvc_emulation::shuffle(mask, value, lane >= delta ? lane - delta : lane);
}

template <class T>
void __stwb(T* at, T value) {
    *at = value;
}
// Blocks run one by one: what one has written the next one sees.
inline void __threadfence() {}
template <class T>
T __ldcg(const T* at) {
    return *at;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }

inline int atomicAdd(int* at, int x) { return __atomic_fetch_add(at, x, __ATOMIC_RELAXED); }
inline unsigned atomicAdd(unsigned* at, unsigned x) { return __atomic_fetch_add(at, x, __ATOMIC_RELAXED); }
inline float atomicAdd(float* at, float x) {
    float old, sum;
    __atomic_load(at, &old, __ATOMIC_RELAXED);
    do sum = old + x;
    while (!__atomic_compare_exchange(at, &old, &sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}
inline int atomicMax(int* at, int x) {
    int old = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (old < x && !__atomic_compare_exchange_n(at, &old, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
    return old;
}

// A device of three multiprocessors that hold two blocks each: blocks of persistent kernels take several turns. Its blocks
// have 227 KB of shared memory, or as many bytes as KVC_EMULATION_SHARED says.
inline int most_shared_bytes() {
    const char* wish = getenv("KVC_EMULATION_SHARED");
    return wish ? atoi(wish) : 227 * 1024;
}
// Its driver serves CUDA 13.0, which the runtime is of, or what KVC_EMULATION_DRIVER says (12080 for 12.8). An older one
// launches nothing.
inline cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = 13000;
    return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) {
    *version = kvc_emulation::driver_version();
    return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? most_shared_bytes() : 3;
    return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int, size_t) {
    *blocks = 2;
    return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorInvalidValue           ? "invalid argument"
           : error == cudaErrorInvalidConfiguration ? "invalid configuration argument"
           : error == cudaErrorNotSupported         ? "operation not supported"
           : error == cudaErrorInsufficientDriver   ? "CUDA driver version is insufficient for CUDA runtime version"
                                                    : "unspecified launch failure";
}
inline cudaError_t cudaGetLastError() { return kvc_emulation::take_last_error(); }
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
    // noted, a launch that asks for too much is for who takes the notes to refuse: he knows its kernel
    if (bytes < 0 || (bytes > most_shared_bytes() && !kvc_emulation::noting())) return cudaErrorInvalidValue;
    kvc_emulation::allow_shared_bytes(reinterpret_cast<const void*>(kernel), static_cast<size_t>(bytes));
    return cudaSuccess;
}
