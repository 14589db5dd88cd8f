#include "common.h"

// CUDA's version, as 12080 for 12.8: of the driver (0: there is none), or of the runtime that is linked in (0: a build without).
static int64_t cuda_version([[maybe_unused]] bool of_driver) {
#ifdef KVC_WITH_CUDA
    const cuda_versions found = versions_of_cuda();
    return of_driver ? found.driver : found.runtime;
#else
    return 0;
#endif
}

static std::string cuda_fault() {
#ifdef KVC_WITH_CUDA
    return driver_fault(versions_of_cuda());
#else
    return {};
#endif
}

STABLE_TORCH_LIBRARY_FRAGMENT(kvcompress, m) {
    m.def("cuda_version(bool of_driver) -> int");
    m.def("cuda_fault() -> str");
}
STABLE_TORCH_LIBRARY_IMPL(kvcompress, CompositeExplicitAutograd, m) {
    m.impl("cuda_version", TORCH_BOX(&cuda_version));
    m.impl("cuda_fault", TORCH_BOX(&cuda_fault));
}
