// What every op needs: argument checks, views for the kernels, and one call that runs on the tensor's device.
//
// The checks here keep memory safe whoever calls torch.ops; kvcompress/ops/ says the same in the user's terms.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "kvc.h"

#ifdef KVC_WITH_CUDA
#include <cuda_runtime.h>

#include "cuda/kvc_cuda.h"
#include "driver.h"
// Weak: a CPU build of Torch has no such symbol, and the library must still load there.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);
#endif

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// RuntimeError in Python with this text alone; Torch's STD_TORCH_CHECK would put the place in this source before it.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw std::runtime_error(text.str());
}

#define KVC_CHECK(condition, ...) \
    do { \
        if (!(condition)) fail(__VA_ARGS__); \
    } while (0)

inline void torch_parallel_for(int64_t count, int64_t grain, kvc_range_fn fn, void* context) {
    torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { fn(begin, end, context); });
}

inline kvc_dtype dtype_of(const Tensor& x, const char* name) {
    switch (x.scalar_type()) {
        case ScalarType::Float: return KVC_F32;
        case ScalarType::BFloat16: return KVC_BF16;
        case ScalarType::Half: return KVC_F16;
        default: KVC_CHECK(false, name, " must be float32, bfloat16 or float16");
    }
    return KVC_F32;
}

inline void check_device(const Tensor& x, const Tensor& like, const char* name) {
    KVC_CHECK(x.is_cpu() == like.is_cpu() && x.get_device_index() == like.get_device_index(), name,
              " must be on the same device as the first argument");
}

// A contiguous tensor of the given type and size; sizes of -1 are free.
inline void check_array(const Tensor& x, const Tensor& like, ScalarType type, std::initializer_list<int64_t> sizes,
                        const char* name) {
    check_device(x, like, name);
    KVC_CHECK(x.scalar_type() == type, name, " has the wrong dtype");
    KVC_CHECK(x.is_contiguous(), name, " must be contiguous");
    KVC_CHECK(x.dim() == static_cast<int64_t>(sizes.size()), name, " must have ", sizes.size(),
              " dimensions, got ", x.dim());
    int64_t d = 0;
    for (int64_t size : sizes) {
        KVC_CHECK(size < 0 || x.size(d) == size, name, " must have size ", size, " in dimension ", d, ", got ",
                  x.size(d));
        d++;
    }
}

// int32 array or NULL.
inline const int32_t* int_array(const std::optional<Tensor>& x, const Tensor& like,
                                std::initializer_list<int64_t> sizes, const char* name) {
    if (!x.has_value()) return nullptr;
    check_array(*x, like, ScalarType::Int, sizes, name);
    static const int32_t nothing = 0;  // an array without elements is not a missing one
    return x->numel() ? static_cast<const int32_t*>(x->const_data_ptr()) : &nothing;
}

// float32 [Hq] or NULL.
inline const float* sinks_array(const std::optional<Tensor>& x, const Tensor& like, int64_t Hq) {
    if (!x.has_value()) return nullptr;
    check_array(*x, like, ScalarType::Float, {Hq}, "sink_logits");
    return static_cast<const float*>(x->const_data_ptr());
}

// A [B, H, T, D] tensor with contiguous last dimension and any other strides.
inline kvc_view view_of(const Tensor& x, const char* name) {
    KVC_CHECK(x.dim() == 4, name, " must have 4 dimensions [B, H, T, D], got ", x.dim());
    KVC_CHECK(x.numel() == 0 || x.size(3) <= 1 || x.stride(3) == 1, name, " must be contiguous in its last dimension");
    return {const_cast<void*>(x.const_data_ptr()), dtype_of(x, name), x.stride(0), x.stride(1), x.stride(2)};
}

// Memory that an op changes, and reads nowhere else: what it is given besides is copied where it lies in that.
class Changed {
 public:
    Changed(std::initializer_list<std::pair<const char*, const Tensor*>> tensors) {
        all_.reserve(tensors.size() + 8);
        for (const auto& [name, x] : tensors) add(name, *x);
    }

    void add(const char* name, const Tensor& x) {
        const Bytes own = bytes_of(x);
        for (const Bytes& other : all_) {
            KVC_CHECK(!overlap(own, other), name, " must not share memory with another tensor that is changed in place");
        }
        all_.push_back(own);
    }

    void add(const char* name, const std::optional<Tensor>& x) {
        if (x.has_value()) add(name, *x);
    }

    // The tensor itself; a contiguous copy if it shares memory with any of the changed ones.
    Tensor apart(const Tensor& x) const {
        const Bytes own = bytes_of(x);
        for (const Bytes& other : all_) {
            if (!overlap(own, other)) continue;
            Tensor copy = torch::stable::new_empty(x, x.sizes());
            torch::stable::copy_(copy, x);
            return copy;
        }
        return x;
    }

    std::optional<Tensor> apart(const std::optional<Tensor>& x) const {
        return x.has_value() ? std::optional<Tensor>(apart(*x)) : std::nullopt;
    }

 private:
    struct Bytes {
        const char *begin, *end;  // equal where there are none
    };

    static Bytes bytes_of(const Tensor& x) {
        const char* begin = static_cast<const char*>(x.const_data_ptr());
        int64_t last = 0;
        for (int64_t d = 0; d < x.dim(); d++) {
            if (x.size(d) == 0) return {begin, begin};
            last += (x.size(d) - 1) * x.stride(d);
        }
        return {begin, begin + (last + 1) * static_cast<int64_t>(x.element_size())};
    }

    static bool overlap(const Bytes& a, const Bytes& b) {
        return a.begin < b.end && b.begin < a.end && a.begin < a.end && b.begin < b.end;
    }

    std::vector<Bytes> all_;
};

inline void check_status(kvc_status status, const char* op) {
    KVC_CHECK(status == KVC_OK, op, ": ", kvc_status_message(status));
}

// Whether the CPU's kernels serve this tensor. Built for the tests' emulation of CUDA, whose arrays lie in the memory of the
// CPU, they never do.
inline bool on_cpu([[maybe_unused]] const Tensor& x) {
#ifdef KVC_CUDA_EMULATION
    return false;
#else
    return x.is_cpu();
#endif
}

// What scratch_for needs to know of an op that has a count for each device.
#ifdef KVC_WITH_CUDA
#define KVC_SCRATCH_BYTES(on, op, args) \
    (on_cpu(on) ? kvc_##op##_scratch_bytes(args) : kvc_cuda_##op##_scratch_bytes(args))
#else
#define KVC_SCRATCH_BYTES(on, op, args) kvc_##op##_scratch_bytes(args)
#endif

// Bytes beside `on`; none for the counts below 0 of sizes that the kernel will refuse.
inline Tensor scratch_for(const Tensor& on, int64_t bytes) {
    return torch::stable::new_empty(on, {bytes > 0 ? bytes : 0}, ScalarType::Byte);
}

// KVC_CUDA_CALL(expression of `stream`): the CUDA side of run(); nothing in a build without CUDA.
#ifdef KVC_WITH_CUDA
#define KVC_CUDA_CALL(...) [&]([[maybe_unused]] cudaStream_t stream) -> cudaError_t { return __VA_ARGS__; }
#else
#define KVC_CUDA_CALL(...) 0
#endif

// After KVC_BAD_INDEX: fails with the first of `count` values outside [least, most], if there is one. most_name: what the
// upper limit is. columns: the values are [count / columns, columns]; 0: one dimension.
inline void find_outside(const char* op, const char* name, const int32_t* values, int64_t count, int64_t least,
                         int64_t most, const char* most_name, int64_t columns = 0) {
    for (int64_t i = 0; values && i < count; i++) {
        if (values[i] >= least && values[i] <= most) continue;
        std::ostringstream place;
        if (columns) place << '[' << i / columns << ", " << i % columns << ']';
        else place << i;
        fail(op, ": ", name, " must be between ", least, " and ", most, " (", most_name, "), got ", values[i], " at ",
             place.str());
    }
}

// The same for the pages that columns [first, last] of row r of a table name.
inline void find_missing_page(const char* op, const int32_t* table, int64_t blocks, int64_t r, int64_t first,
                              int64_t last, int64_t pages, const char* name = "block_table") {
    for (int64_t i = first; i <= last; i++) {
        const int32_t page = table[r * blocks + i];
        KVC_CHECK(page >= 0 && page < pages, op, ": ", name, " must name pages between 0 and ", pages - 1, ", got ",
                  page, " at [", r, ", ", i, "]");
    }
}

// The same for the first `count` indices of row r of [R, columns], which rise strictly within [0, size).
inline void find_not_rising(const char* op, const int32_t* indices, int64_t columns, int64_t r, int64_t count,
                            int64_t size) {
    for (int64_t j = 0, last = -1; j < count; last = indices[r * columns + j++]) {
        const int32_t index = indices[r * columns + j];
        KVC_CHECK(index > last && index < size, op, ": indices of a row must rise and lie between 0 and ", size - 1,
                  ", got ", index, " at [", r, ", ", j, "]");
    }
}

inline void no_explanation() {}

// Runs the kernel of the device that `on` lives on, on Torch's threads or on the current stream. explain: called after
// KVC_BAD_INDEX on the CPU, to fail in terms of the arguments.
template <class Cpu, class Cuda, class Explain = void (*)()>
void run(const char* op, const Tensor& on, Cpu cpu, [[maybe_unused]] Cuda cuda, Explain explain = no_explanation) {
    if (on_cpu(on)) {
        const kvc_status status = cpu();
        if (status == KVC_BAD_INDEX) explain();
        check_status(status, op);
        return;
    }
#ifdef KVC_WITH_CUDA
    void* stream = nullptr;
#ifndef KVC_CUDA_EMULATION
    torch::stable::accelerator::DeviceGuard guard(on.get_device_index());
    KVC_CHECK(aoti_torch_get_current_cuda_stream != nullptr &&
                  aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream) == 0,
              op, ": Torch gave no CUDA stream");
#endif
    cudaError_t error = cuda(static_cast<cudaStream_t>(stream));
    if (error == cudaSuccess) return;
    const std::string fault = driver_fault(versions_of_cuda());  // whatever else went wrong followed from it
    fail(op, ": ", fault.empty() ? cudaGetErrorString(error) : fault);
#else
    KVC_CHECK(false, op, ": this build of kvcompress has no CUDA kernels; rebuild with KVC_CUDA=1");
#endif
}

#ifdef KVC_WITH_CUDA
#define KVC_REGISTER_CUDA(name) \
    STABLE_TORCH_LIBRARY_IMPL(kvcompress, CUDA, m) { m.impl(#name, TORCH_BOX(&name)); }
#else
#define KVC_REGISTER_CUDA(name)
#endif

// One op, one schema, one function for both devices.
#define KVC_REGISTER(name, schema)                                                   \
    STABLE_TORCH_LIBRARY_FRAGMENT(kvcompress, m) { m.def(schema); }                  \
    STABLE_TORCH_LIBRARY_IMPL(kvcompress, CPU, m) { m.impl(#name, TORCH_BOX(&name)); } \
    KVC_REGISTER_CUDA(name)
