// What cuda_runtime.h needs from block_threads.cpp, which runs the blocks. Apart, so that kernels compile fast.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "cuda_types.h"

namespace kvc_emulation {

extern __thread const dim3* thread_index;
extern dim3 block_index, block_size, grid_size;

// Runs body(context) for every thread of every block; errors are for take_last_error.
void launch_body(const void* kernel, dim3 grid, dim3 threads, size_t shared_bytes, void (*body)(void*), void* context);
void* dynamic_shared();
cudaError_t take_last_error();
void allow_shared_bytes(const void* kernel, size_t bytes);

void syncthreads();
unsigned lane();
enum class warp_op { none, syncwarp, shuffle, ballot };
// Waits for all lanes of `mask` that have not returned. A shuffle gives what lane `source` has given; a ballot and
// syncwarp give one bit per lane: whether it has given something else than 0.
uint64_t warp_operation(warp_op operation, unsigned mask, uint64_t given, unsigned source);

}  // namespace kvc_emulation
