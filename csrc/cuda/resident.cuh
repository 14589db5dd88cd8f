// How many blocks of a kernel a device holds at a time, for launchers whose blocks take their work in turns.
#pragma once
#include <atomic>

#include "types.cuh"

// blocks: as many as the device holds at a time, at most one for each item of work. Also allows the kernel so much shared
// memory. The device is asked once, and again where the size of shared memory changes: asking takes longer than a launch.
// What it said is one atomic word, so that any thread may launch.
template <auto KERNEL>
cudaError_t resident_blocks(unsigned& blocks, int threads, size_t shared, int64_t work) {
    constexpr int DEVICES = 64;  // one with a higher number is asked each time
    static std::atomic<uint64_t> known[DEVICES];  // shared + 1 in the high half, blocks in the low one; 0: not asked yet
    int device = 0;
    KVC_TRY(cudaGetDevice(&device));
    uint64_t word = device < DEVICES ? known[device].load(std::memory_order_relaxed) : 0;
    if (word >> 32 != shared + 1) {
        int processors = 0, resident = 0;
        KVC_TRY(allow_shared(KERNEL, shared));
        KVC_TRY(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
        KVC_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, KERNEL, threads, shared));
        word = static_cast<uint64_t>(shared + 1) << 32 | static_cast<uint64_t>(processors * (resident > 0 ? resident : 1));
        if (device < DEVICES) known[device].store(word, std::memory_order_relaxed);
    }
    const int64_t all = static_cast<int64_t>(word & 0xffffffffu);
    blocks = static_cast<unsigned>(work < all ? work : all);
    return cudaSuccess;
}
