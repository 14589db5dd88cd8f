#include "common.h"

// Integers in, integers out: rows [3 + 2*layers, n] chunks, mean memory, clamped, memory of each layer, stored of each
// layer; always on the CPU.
static Tensor plan(int64_t prompt_length, int64_t chunk_size, int64_t memory_size, int64_t initial_memory,
                   int64_t schedule, bool decremental, int64_t layers, int64_t min_chunk) {
    const int64_t n = kvc_plan_iterations(prompt_length, chunk_size);
    KVC_CHECK(n >= 0, "plan: prompt_length must be at least 0 and chunk_size at least 1");
    KVC_CHECK(layers >= 1 && layers <= INT32_MAX, "plan: layers must be between 1 and 2**31 - 1, got ", layers);
    KVC_CHECK(schedule >= 0 && schedule <= KVC_SCHEDULE_ADAPTIVE, "plan: schedule must be between 0 and ",
              static_cast<int>(KVC_SCHEDULE_ADAPTIVE), ", got ", schedule);
    Tensor out = torch::stable::empty({3 + 2 * layers, n}, ScalarType::Long);
    int64_t* rows = static_cast<int64_t*>(out.mutable_data_ptr());
    const kvc_plan_args args = {
        .chunks = rows,
        .mean_memory = rows + n,
        .clamped = rows + 2 * n,
        .memory = rows + 3 * n,
        .stored = rows + (3 + layers) * n,
        .prompt_length = prompt_length,
        .chunk_size = chunk_size,
        .memory_size = memory_size,
        .initial_memory = initial_memory,
        .layers = layers,
        .min_chunk = min_chunk,
        .schedule = static_cast<kvc_schedule>(schedule),
        .decremental = decremental,
    };
    const kvc_status status = kvc_plan(&args);
    KVC_CHECK(status != KVC_BAD_SIZE, "plan: a size is out of range, or a product of sizes reaches 2**63");
    check_status(status, "plan");
    return out;
}

// int64 [layers], on the CPU.
static Tensor divide_memory(int64_t total, const Tensor& kept, const Tensor& stored, const Tensor& lowest,
                            const Tensor& highest) {
    KVC_CHECK(kept.is_cpu(), "divide_memory: kept must be on the CPU");
    check_array(kept, kept, ScalarType::Long, {-1}, "kept");
    const int64_t layers = kept.size(0);
    check_array(stored, kept, ScalarType::Long, {layers}, "stored");
    check_array(lowest, kept, ScalarType::Long, {layers}, "lowest");
    check_array(highest, kept, ScalarType::Long, {layers}, "highest");
    Tensor out = torch::stable::new_empty(kept, {layers});
    const kvc_divide_memory_args args = {
        .memory = static_cast<int64_t*>(out.mutable_data_ptr()),
        .kept = static_cast<const int64_t*>(kept.const_data_ptr()),
        .stored = static_cast<const int64_t*>(stored.const_data_ptr()),
        .lowest = static_cast<const int64_t*>(lowest.const_data_ptr()),
        .highest = static_cast<const int64_t*>(highest.const_data_ptr()),
        .layers = layers,
        .total = total,
    };
    check_status(kvc_divide_memory(&args), "divide_memory");
    return out;
}

// The table of inner loops in use; a name switches to that table first (for tests).
static std::string simd(std::string name) {
    if (!name.empty()) check_status(kvc_simd_select(name.c_str()), "simd");
    return kvc_simd_name();
}

STABLE_TORCH_LIBRARY_FRAGMENT(kvcompress, m) {
    m.def("plan(int prompt_length, int chunk_size, int memory_size, int initial_memory, int schedule, "
          "bool decremental, int layers, int min_chunk) -> Tensor");
    m.def("divide_memory(int total, Tensor kept, Tensor stored, Tensor lowest, Tensor highest) -> Tensor");
    m.def("simd(str name) -> str");
}
STABLE_TORCH_LIBRARY_IMPL(kvcompress, CompositeExplicitAutograd, m) {
    m.impl("plan", TORCH_BOX(&plan));
    m.impl("divide_memory", TORCH_BOX(&divide_memory));
    m.impl("simd", TORCH_BOX(&simd));
}
