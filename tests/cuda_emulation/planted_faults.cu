// Kernels with one fault each, which test_sanitizers.py must see reported: a program that runs the one it is told to.
#include <cstdio>
#include <cstring>
#include <memory>

#include "cuda/tile.cuh"

namespace {

constexpr int THREADS = 64;

// Sums of neighbours through shared memory, then out; `past`: the last thread reads one element too many.
__global__ void neighbours(float* out, const float* in, bool barrier, bool past) {
    KVC_DYNAMIC_SHARED(float, values);
    const int i = static_cast<int>(threadIdx.x), next = past ? i + 1 : (i + 1) % THREADS;
    values[i] = in[i];
    if (barrier) __syncthreads();
    out[i] = values[i] + values[next];
}

// Reads its own copy without waiting for it, or one element of global memory past the end.
__global__ void copies(float* out, const float* in, bool wait, int first) {
    KVC_DYNAMIC_SHARED(float, values);
    const int i = 4 * static_cast<int>(threadIdx.x);
    copy_16_async(values + i, in + first + i, true);
    commit_copies();
    if (wait) wait_for_copies<0>();
    for (int e = 0; e < 4; e++) out[i + e] = values[i + e];
}

// Between two barriers: overwrites what others may still read, or reads past an array of its own stack.
__global__ void turns(float* out, const float* in, bool barrier, int place) {
    KVC_DYNAMIC_SHARED(float, values);
    const int i = static_cast<int>(threadIdx.x);
    float held[2] = {0.0f, in[i]};
    values[i] = in[i];
    __syncthreads();
    held[0] = values[(i + 1) % THREADS];
    if (barrier) __syncthreads();
    values[i] = held[0];
    __syncthreads();
    const float* const first = held;  // AddressSanitizer's to see
    out[i] = values[i] + first[place];
}

// Overwrites after the last barrier what others read there; with `barrier` that was not the last one.
__global__ void tails(float* out, const float* in, bool barrier) {
    KVC_DYNAMIC_SHARED(float, values);
    const int i = static_cast<int>(threadIdx.x);
    values[i] = in[i];
    __syncthreads();
    out[i] = values[(i + 1) % THREADS] + 1.0f;
    if (barrier) __syncthreads();
    values[i] = 0.0f;
}

// One warp writes and returns, and the other, which waits for its own lanes alone or for the block, reads.
__global__ void returns(float* out, const float* in, bool barrier) {
    KVC_DYNAMIC_SHARED(float, values);
    const int i = static_cast<int>(threadIdx.x);
    out[i] = 2.0f;
    if (i >= 32) {
        values[i] = in[i];
        return;
    }
    if (barrier) __syncthreads();
    else __syncwarp();
    if (i == 0) out[i] = values[32] + 1.0f;
}

// Lane 1 writes before a barrier with lane 0. Lane 2, which reads, has one with lane 0 alone, or with both.
__global__ void groups(float* out, const float* in, bool barrier) {
    KVC_DYNAMIC_SHARED(float, values);
    const int i = static_cast<int>(threadIdx.x);
    out[i] = 2.0f;
    if (i == 1) values[i] = in[i];
    if (barrier && i < 3) __syncwarp(0b111);
    if (i == 0 || i == 2) __syncwarp(0b101);
    if (i == 2) out[i] = values[1] + 1.0f;
    if (i == 0 || i == 1) __syncwarp(0b011);
}

// Reads what a neighbour has written before a shuffle, which orders no memory.
__global__ void shuffles(float* out, const float* in, bool barrier) {
    KVC_DYNAMIC_SHARED(float, values);
    const int i = static_cast<int>(threadIdx.x);
    values[i] = in[i];
    const float other = __shfl_xor_sync(0xffffffffu, in[i], 1);
    if (barrier) __syncwarp();
    out[i] = values[i ^ 1] + other;
}

}  // namespace

int main(int, char** arguments) {
    const auto is = [&](const char* name) { return !std::strcmp(arguments[1], name); };
    const std::unique_ptr<float[]> in(new float[THREADS]), out(new float[THREADS]);
    for (int i = 0; i < THREADS; i++) in[i] = 1.0f;
    if (is("copy without wait") || is("copy past the end"))
        KVC_LAUNCH(copies, 1, THREADS / 4, THREADS * sizeof(float), nullptr, out.get(), in.get(),
                   is("copy past the end"), is("copy past the end") ? 4 : 0);
    else if (is("missing second barrier") || is("read past the stack") || is("turns"))
        KVC_LAUNCH(turns, 1, THREADS, THREADS * sizeof(float), nullptr, out.get(), in.get(),
                   !is("missing second barrier"), is("read past the stack") ? 2 : 1);
    else if (is("write after the last barrier") || is("tails"))
        KVC_LAUNCH(tails, 1, THREADS, THREADS * sizeof(float), nullptr, out.get(), in.get(), is("tails"));
    else if (is("return without barrier") || is("returns"))
        KVC_LAUNCH(returns, 1, THREADS, THREADS * sizeof(float), nullptr, out.get(), in.get(), is("returns"));
    else if (is("barrier of other lanes") || is("groups"))
        KVC_LAUNCH(groups, 1, THREADS, THREADS * sizeof(float), nullptr, out.get(), in.get(), is("groups"));
    else if (is("shuffle for a barrier") || is("shuffles"))
        KVC_LAUNCH(shuffles, 1, THREADS, THREADS * sizeof(float), nullptr, out.get(), in.get(), is("shuffles"));
    else
        KVC_LAUNCH(neighbours, 1, THREADS, THREADS * sizeof(float), nullptr, out.get(), in.get(),
                   !is("missing barrier"), is("read past shared memory"));
    bool right = true;
    for (int i = 0; i < THREADS; i++) right &= out[i] == (is("copy without wait") ? 1.0f : 2.0f);
    std::puts(right ? "right" : "wrong");
    return cudaGetLastError() != cudaSuccess;
}
