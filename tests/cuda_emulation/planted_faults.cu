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
    else
        KVC_LAUNCH(neighbours, 1, THREADS, THREADS * sizeof(float), nullptr, out.get(), in.get(),
                   !is("missing barrier"), is("read past shared memory"));
    bool right = true;
    for (int i = 0; i < THREADS; i++) right &= out[i] == (is("copy without wait") ? 1.0f : 2.0f);
    std::puts(right ? "right" : "wrong");
    return cudaGetLastError() != cudaSuccess;
}
