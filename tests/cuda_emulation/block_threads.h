// What cuda_runtime.h needs from block_threads.cpp, which runs the blocks. Apart, so that kernels compile fast.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "cuda_types.h"

namespace kvc_emulation {

extern const dim3* thread_index;
extern dim3 block_index, block_size, grid_size;

// Runs body(context) for every thread of every block; errors are for take_last_error.
void launch_body(const void* kernel, dim3 grid, dim3 threads, size_t shared_bytes, void (*body)(void*), void* context);
void* dynamic_shared();
cudaError_t take_last_error();
int driver_version();
bool noting();  // whether launches are only noted: kvc_emulation_note_launches
void allow_shared_bytes(const void* kernel, size_t bytes);

void syncthreads();
unsigned lane();
enum class warp_op { none, syncwarp, shuffle, ballot, exchange };
// Waits for all lanes of `mask` that have not returned. A shuffle gives what lane `source` has given; a ballot and
// syncwarp give one bit per lane: whether it has given something else than 0.
uint64_t warp_operation(warp_op operation, unsigned mask, uint64_t given, unsigned source);

// Each of the warp's 32 lanes gives up to 32 bytes; of_lane(result, i) is what lane i gave, until the exchange after
// the next one.
const char* warp_exchange(const void* given, size_t bytes);
inline const char* of_lane(const char* all, unsigned lane) { return all + 32 * lane; }

// Fails the launch if `at` is not a multiple of `bytes`.
void check_aligned(const void* at, size_t bytes);

// A copy in the background fills its target with NaN bytes when it is issued and with the data as late as it may, when
// the thread waits for it: nobody can read the old data or the new too early. Without `there`: zeros.
void async_copy(void* to, const void* from, size_t bytes, bool there);
void async_commit();
void async_wait(unsigned groups);

}  // namespace kvc_emulation
