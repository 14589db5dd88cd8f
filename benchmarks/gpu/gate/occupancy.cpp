// Blocks of a kernel that a multiprocessor holds at a time, by NVIDIA's calculator. One question per line of standard
// input: major minor optin_bytes bytes_of_processor threads_of_processor registers static_bytes dynamic_bytes threads;
// one answer per line: blocks, and what each of registers, shared memory, warps and the count of blocks would allow.
#include <cuda_occupancy.h>

#include <cstdio>

int main() {
    int major, minor, optin, of_processor, most_threads, registers, fixed, dynamic, threads;
    while (std::scanf("%d %d %d %d %d %d %d %d %d", &major, &minor, &optin, &of_processor, &most_threads, &registers,
                      &fixed, &dynamic, &threads) == 9) {
        cudaOccDeviceProp device;
        device.computeMajor = major;
        device.computeMinor = minor;
        device.maxThreadsPerBlock = 1024;
        device.maxThreadsPerMultiprocessor = most_threads;
        device.regsPerBlock = device.regsPerMultiprocessor = 65536;
        device.warpSize = 32;
        device.sharedMemPerBlock = 48 * 1024;
        device.sharedMemPerBlockOptin = static_cast<size_t>(optin);
        device.sharedMemPerMultiprocessor = static_cast<size_t>(of_processor);
        device.reservedSharedMemPerBlock = 1024;
        device.numSms = 1;
        cudaOccFuncAttributes kernel;
        kernel.maxThreadsPerBlock = 1024;
        kernel.numRegs = registers;
        kernel.sharedSizeBytes = static_cast<size_t>(fixed);
        kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        kernel.maxDynamicSharedSizeBytes = static_cast<size_t>(dynamic);
        kernel.numBlockBarriers = 1;
        cudaOccDeviceState state;
        cudaOccResult result;
        const cudaOccError error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads,
                                                                          static_cast<size_t>(dynamic));
        if (error != CUDA_OCC_SUCCESS) return 1;
        std::printf("%d %d %d %d %d\n", result.activeBlocksPerMultiprocessor, result.blockLimitRegs,
                    result.blockLimitSharedMem, result.blockLimitWarps, result.blockLimitBlocks);
    }
    return 0;
}
