// Whether the machine's driver serves the CUDA runtime that is linked into this file. Asking starts no CUDA: no context is
// made, so that a process may still fork.
#pragma once
#ifdef KVC_WITH_CUDA
#include <cuda_runtime.h>

#include <fstream>
#include <sstream>
#include <string>

struct cuda_versions {
    int driver = 0, runtime = 0;  // CUDA's, as 12080 for 12.8; driver 0: there is none
};

inline cuda_versions versions_of_cuda() {
    cuda_versions found;
    if (cudaDriverGetVersion(&found.driver) != cudaSuccess || cudaRuntimeGetVersion(&found.runtime) != cudaSuccess) return {};
    return found;
}

// The first driver that serves any runtime of a major version (NVIDIA, "CUDA Compatibility"); 0 where that is not known here.
inline int first_driver(int major) {
    switch (major) {
        case 11: return 450;
        case 12: return 525;
        case 13: return 580;
        default: return 0;
    }
}

// Why kernels cannot run with these versions and what to do; empty if they can, or if there is no driver at all.
inline std::string driver_fault(const cuda_versions& found) {
    const int major = found.runtime / 1000;
    if (!found.driver || found.driver / 1000 >= major) return {};
    std::string own;
    std::ifstream("/sys/module/nvidia/version") >> own;
    std::ostringstream text;
    text << "the NVIDIA driver of this machine" << (own.empty() ? "" : ", ") << own << (own.empty() ? "" : ",")
         << " serves CUDA up to " << found.driver / 1000 << '.' << found.driver % 1000 / 10
         << ", and these kernels were built with CUDA " << major << '.' << found.runtime % 1000 / 10 << ", which needs driver ";
    if (const int first = first_driver(major)) text << first << " or newer";
    else text << "for CUDA " << major;
    text << ": update the driver, or build kvcompress with nvcc of CUDA " << found.driver / 1000
         << " (CUDA_HOME, KVC_CUDA=1) beside a PyTorch for it";
    return text.str();
}
#endif
