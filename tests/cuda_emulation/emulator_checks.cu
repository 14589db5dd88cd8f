// Kernels that test the emulation itself, and the host side of csrc/cuda/types.cuh; called by test_emulator.py.
#include "cuda/tile.cuh"

namespace {

// out[thread][0..5]: xor, down, up, broadcast, ballot, broadcast within half a warp.
__global__ void shuffles(int* out) {
    const int lane = threadIdx.x % 32, value = 100 + static_cast<int>(threadIdx.x);
    out += 6 * threadIdx.x;
    out[0] = __shfl_xor_sync(FULL_WARP, value, 5);
    out[1] = __shfl_down_sync(FULL_WARP, value, 3);
    out[2] = __shfl_up_sync(FULL_WARP, value, 2);
    out[3] = __shfl_sync(FULL_WARP, value, 7);
    out[4] = static_cast<int>(__ballot_sync(FULL_WARP, lane % 3 == 0));
    // Halves of the warp diverge: each must meet only its own lanes
    if (lane < 16)
        out[5] = __shfl_sync(0x0000ffffu, value, 1);
    else
        out[5] = __shfl_sync(0xffff0000u, 2 * value, 17);
}

// Adds up the block through shared memory; the upper half of the threads returns before the second barrier.
__global__ void early_return(int* out) {
    __shared__ int values[256];
    values[threadIdx.x] = static_cast<int>(threadIdx.x);
    __syncthreads();
    if (threadIdx.x >= blockDim.x / 2) return;
    const int sum = values[threadIdx.x] + values[threadIdx.x + blockDim.x / 2];
    __syncthreads();
    values[threadIdx.x] = sum;
    __syncthreads();
    out[threadIdx.x] = values[blockDim.x / 2 - 1 - threadIdx.x];
}

__global__ void divergent_barrier() {
    if (threadIdx.x < 16)
        __shfl_xor_sync(FULL_WARP, 1, 1);
    else
        __syncthreads();
}

__global__ void shuffle_from_outsider(int* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1, 20);
}

// out[i] is what thread i read from its neighbour: with a barrier 7, without it depends on who runs first.
__global__ void neighbours(int* out, bool barrier) {
    KVC_DYNAMIC_SHARED(int, values);
    values[threadIdx.x] = 0;
    __syncthreads();
    values[threadIdx.x] = 7;
    if (barrier) __syncthreads();
    out[threadIdx.x] = values[(threadIdx.x + 1) % blockDim.x];
}

__global__ void dynamic_shared_end(int* out, int count) {
    KVC_DYNAMIC_SHARED(int, values);
    if (threadIdx.x == 0) *out = values[count - 1];
}

__global__ void greedy() {}  // of its own: what it may have stays, as a kernel's attribute does

__global__ void counters(int* sum, int* top, float* float_sum) {
    atomicAdd(sum, 1);
    atomicMax(top, static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x));
    atomicAdd(float_sum, 0.5f);
}

// out [16, 16] = A x B, then out + 256: (A x B) x B, with A [16, 16] and B [16, 16] by rows or by columns.
template <class T>
__global__ void products(float* out, const float* a, const float* b, bool b_by_columns) {
    KVC_DYNAMIC_SHARED(T, shared);
    constexpr int PITCH = pitch_of<T>(16);
    T *of_a = shared, *of_b = shared + 16 * PITCH;
    for (int i = static_cast<int>(threadIdx.x); i < 256; i += 32) {
        from_float(a[i], of_a[i / 16 * PITCH + i % 16]);
        from_float(b[i], b_by_columns ? of_b[i % 16 * PITCH + i / 16] : of_b[i / 16 * PITCH + i % 16]);
    }
    __syncwarp();
    float once[2][4] = {}, twice[2][4] = {};
    if (b_by_columns) warp_multiply<b_layout::columns>(once, of_a, PITCH, of_b, PITCH, 16);
    else warp_multiply<b_layout::rows>(once, of_a, PITCH, of_b, PITCH, 16);
    if constexpr (sizeof(T) == 2) {
        multiply_result(twice, once, of_b, PITCH, 2);
    } else {
        __syncwarp();
        store_result(of_a, PITCH, once);
        __syncwarp();
        warp_multiply<b_layout::rows>(twice, of_a, PITCH, of_b, PITCH, 16);
    }
    for (int i = 0; i < 8; i++) {
        const int lane = static_cast<int>(threadIdx.x), row = lane / 4 + i % 4 / 2 * 8;
        const int at = 16 * row + i / 4 * 8 + lane % 4 * 2 + i % 2;
        out[at] = once[i / 4][i % 4];
        out[256 + at] = twice[i / 4][i % 4];
    }
}

__global__ void half_a_warp_multiplies(float* out) {
    float c[4] = {};
    const uint32_t a[4] = {};
    if (threadIdx.x < 16) multiply_16x8x16<bf16>(c, a, 0, 0);
    out[threadIdx.x] = c[0];
}

__global__ void copy_to_odd_address(float* out) {
    KVC_DYNAMIC_SHARED(float, values);
    copy_16_async(values + 1, out, true);
}

__global__ void nothing() {}

}  // namespace

extern "C" {
cudaError_t check_shuffles(int* out, int threads) {
    KVC_LAUNCH(shuffles, 1, threads, 0, nullptr, out);
    return cudaGetLastError();
}
cudaError_t check_early_return(int* out) {
    KVC_LAUNCH(early_return, 1, 256, 0, nullptr, out);
    return cudaGetLastError();
}
cudaError_t check_divergent_barrier() {
    KVC_LAUNCH(divergent_barrier, 2, 64, 0, nullptr);
    return cudaGetLastError();
}
cudaError_t check_shuffle_from_outsider(int* out) {
    KVC_LAUNCH(shuffle_from_outsider, 1, 32, 0, nullptr, out);
    return cudaGetLastError();
}
cudaError_t check_neighbours(int* out, int barrier) {
    KVC_LAUNCH(neighbours, 1, 64, 64 * sizeof(int), nullptr, out, barrier != 0);
    return cudaGetLastError();
}
cudaError_t check_shared_bytes(int* out, int bytes, int with_attribute) {
    if (with_attribute) {
        const cudaError_t error =
            cudaFuncSetAttribute(dynamic_shared_end, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error != cudaSuccess) return error;
    }
    KVC_LAUNCH(dynamic_shared_end, 1, 32, static_cast<size_t>(bytes), nullptr, out, bytes / 4);
    return cudaGetLastError();
}
// A launcher that asks for as much as a block of sm_80 has not, and only for many rows.
cudaError_t check_greedy(long long rows) {
    const size_t bytes = rows < 1 << 20 ? 4096 : 300 * 1024;
    KVC_TRY(allow_shared(greedy, bytes));
    KVC_LAUNCH(greedy, 1, 32, bytes, nullptr);
    return cudaGetLastError();
}
cudaError_t check_counters(int* sum, int* top, float* float_sum) {
    KVC_LAUNCH(counters, 3, 96, 0, nullptr, sum, top, float_sum);
    return cudaGetLastError();
}
cudaError_t check_products(float* out, const float* a, const float* b, int dtype, int b_by_columns) {
    return with_dtype(static_cast<kvc_dtype>(dtype), [&](auto element) {
        using T = decltype(element);
        KVC_LAUNCH(products<T>, 1, 32, 32 * pitch_of<T>(16) * sizeof(T), nullptr, out, a, b, b_by_columns != 0);
        return cudaGetLastError();
    });
}
cudaError_t check_half_a_warp(float* out) {
    KVC_LAUNCH(half_a_warp_multiplies, 1, 32, 0, nullptr, out);
    return cudaGetLastError();
}
cudaError_t check_copy_to_odd_address(float* out) {
    KVC_LAUNCH(copy_to_odd_address, 1, 1, 64, nullptr, out);
    return cudaGetLastError();
}
cudaError_t check_grid(unsigned x, unsigned y, unsigned threads) {
    KVC_LAUNCH(nothing, dim3(x, y), threads, 0, nullptr);
    return cudaGetLastError();
}
void check_conversions(const float* from, uint16_t* as_f16, uint16_t* as_bf16, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        f16 half;
        bf16 brain;
        from_float(from[i], half);
        from_float(from[i], brain);
        as_f16[i] = half.bits;
        as_bf16[i] = brain.bits;
    }
}
void check_f16(const uint16_t* from, float* to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = to_float(f16{from[i]});
}
}
