// The cuBLAS that Torch itself uses, found at run time: nothing here links against one, of any version.
//
// The function is looked up in libtorch_cuda.so and what that depends on: the very library that Torch's handle belongs to,
// even if a process holds another beside it. A Torch that has cuBLAS inside itself shows none; then nothing is found.
#pragma once
#include "common.h"

#ifdef KVC_WITH_CUDA
#ifdef KVC_CUDA_EMULATION
#include "emulated_blas.h"
#else
#include <dlfcn.h>
// From Torch 2.10 on. Weak: a CPU build of Torch has no such symbol.
extern "C" __attribute__((weak)) AOTITorchError torch_get_current_cuda_blas_handle(void**);

inline kvc_blas_gemm find_gemm() {
    void* torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return torch ? reinterpret_cast<kvc_blas_gemm>(dlsym(torch, "cublasGemmStridedBatchedEx")) : nullptr;
}
#endif

// cuBLAS for the device and the current stream of `on`; without a gemm where there is none, or on the CPU. Torch gives each
// of its handles the current stream and a workspace of its own allocator: a product asks for no memory, and what Torch
// says of its own products in CUDA graphs (run once before the capture) holds.
inline kvc_cuda_blas blas_for(const char* op, const Tensor& on) {
#ifdef KVC_CUDA_EMULATION
    (void)op, (void)on;
    return emulated_blas();
#else
    static const kvc_blas_gemm gemm = find_gemm();
    if (on.is_cpu() || !gemm) return {nullptr, nullptr, 0};
    torch::stable::accelerator::DeviceGuard guard(on.get_device_index());
    void* handle = nullptr;
    KVC_CHECK(torch_get_current_cuda_blas_handle != nullptr && torch_get_current_cuda_blas_handle(&handle) == 0, op,
              ": Torch gave no cuBLAS handle");
    return {gemm, handle, 0};
#endif
}
#endif
