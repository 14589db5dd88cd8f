#include <torch/csrc/stable/device.h>

#include <string>

#include "common.h"

// Names the schedules that plan an empty prompt: those that are there.
static void explain_schedule(int64_t schedule) {
    static const char* const names[] = {"fixed", "linear", "square", "sqrt", "square-sqrt", "adaptive"};  // kvc_schedule
    const int64_t count = sizeof names / sizeof *names;
    if (schedule < 0 || schedule >= count) return;
    std::string implemented;
    for (int64_t i = 0; i < count; i++) {
        const kvc_plan_args empty = {
            .chunks = nullptr, .memory = nullptr, .stored = nullptr,
            .prompt_length = 0, .chunk_size = 1, .memory_size = 1, .initial_memory = -1,
            .schedule = static_cast<kvc_schedule>(i),
        };
        if (kvc_plan(&empty) == KVC_OK) implemented += (implemented.empty() ? "" : ", ") + std::string(names[i]);
    }
    fail("plan: the schedule ", names[schedule], " is not implemented yet; implemented: ", implemented);
}

// Integers in, integers out: [3, n] rows chunks, memory, stored; always on the CPU.
static Tensor plan(int64_t prompt_length, int64_t chunk_size, int64_t memory_size, int64_t initial_memory,
                   int64_t schedule) {
    const int64_t n = kvc_plan_iterations(prompt_length, chunk_size);
    KVC_CHECK(n >= 0, "plan: prompt_length must be at least 0 and chunk_size at least 1");
    Tensor out = torch::stable::empty({3, n}, ScalarType::Long);
    int64_t* rows = static_cast<int64_t*>(out.mutable_data_ptr());
    const kvc_plan_args args = {
        .chunks = rows,
        .memory = rows + n,
        .stored = rows + 2 * n,
        .prompt_length = prompt_length,
        .chunk_size = chunk_size,
        .memory_size = memory_size,
        .initial_memory = initial_memory,
        .schedule = static_cast<kvc_schedule>(schedule),
    };
    const kvc_status status = kvc_plan(&args);
    if (status == KVC_BAD_SCHEDULE) explain_schedule(schedule);
    check_status(status, "plan");
    return out;
}

// The table of inner loops in use; a name switches to that table first (for tests).
static std::string simd(std::string name) {
    if (!name.empty()) check_status(kvc_simd_select(name.c_str()), "simd");
    return kvc_simd_name();
}

STABLE_TORCH_LIBRARY_FRAGMENT(kvcompress, m) {
    m.def("plan(int prompt_length, int chunk_size, int memory_size, int initial_memory, int schedule) -> Tensor");
    m.def("simd(str name) -> str");
}
STABLE_TORCH_LIBRARY_IMPL(kvcompress, CompositeExplicitAutograd, m) {
    m.impl("plan", TORCH_BOX(&plan));
    m.impl("simd", TORCH_BOX(&simd));
}
