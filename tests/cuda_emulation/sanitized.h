// What the programs for the sanitizers share: checks that count failures, arrays that end where the contract says.
#pragma once
#include <math.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda/kvc_cuda.h"
#include "cuda/types.cuh"

inline int failures = 0;

inline void expect(cudaError_t error, const char* what, int64_t size) {
    if (error == cudaSuccess) return;
    std::printf("%s (%lld): error %d\n", what, static_cast<long long>(size), static_cast<int>(error));
    failures++;
}

inline void expect_true(bool condition, const char* what, int64_t size) {
    if (!condition) std::printf("%s (%lld): wrong\n", what, static_cast<long long>(size)), failures++;
}

inline void expect_refused(cudaError_t error, const char* what) { expect_true(error == cudaErrorInvalidValue, what, error); }

// Arguments that are right but for one change; none of the calls may do anything.
template <class Args, class... Changes>
void expect_refused(cudaError_t (*launch)(const Args*, cudaStream_t), const Args& args, const char* what,
                    Changes... changes) {
    int place = 0;
    const auto check = [&](auto change) {
        Args changed = args;
        change(changed);
        expect_true(launch(&changed, nullptr) == cudaErrorInvalidValue, what, place++);
    };
    (check(changes), ...);
}

// Heap array of exactly `count` elements of a dtype, small numbers of both signs.
struct array {
    std::unique_ptr<char, void (*)(void*)> bytes;
    kvc_dtype dtype;
    int64_t strides[3] = {0, 0, 0};

    array(int64_t count, kvc_dtype type) : bytes(nullptr, std::free), dtype(type) {
        const size_t size = type == KVC_F32 ? 4 : 2;
        bytes.reset(static_cast<char*>(std::malloc(static_cast<size_t>(count) * size)));
        for (int64_t i = 0; i < count; i++) {
            const float value = static_cast<float>(i * 37 % 19 - 9) / 8.0f;
            if (type == KVC_F32) std::memcpy(bytes.get() + 4 * i, &value, 4);
            else std::memset(bytes.get() + 2 * i, static_cast<int>(0x30 + i % 9), 2);
        }
    }
    array(int64_t B, int64_t H, int64_t T, int64_t D, kvc_dtype type) : array(B * H * T * D, type) {
        strides[0] = H * T * D;
        strides[1] = T * D;
        strides[2] = D;
    }
    kvc_view view() const { return {bytes.get(), dtype, strides[0], strides[1], strides[2]}; }
    float* floats() const { return reinterpret_cast<float*>(bytes.get()); }
};

// Rows of numbers.
inline kvc_rows rows_of(const array& k, const array& v, kvc_dtype dtype) {
    return {k.bytes.get(), v.bytes.get(), nullptr, nullptr, static_cast<kvc_format>(dtype)};
}

// Gates of B*H rows of T: decisions of both kinds, weights above 0.
struct dmc_gates {
    array alpha, omega;

    dmc_gates(int64_t B, int64_t H, int64_t T) : alpha(B * H * T, KVC_F32), omega(B * H * T, KVC_F32) {
        for (int64_t i = 0; i < B * H * T; i++) {
            alpha.floats()[i] = i % 5 == 0 ? 0.0f : i % 7 == 0 ? 1.0f : 0.9f;
            omega.floats()[i] = 0.5f + static_cast<float>(i % 3);
        }
    }
};

using scratch_memory = std::unique_ptr<void, void (*)(void*)>;

// Exactly so many bytes, rounded up to the alignment.
inline scratch_memory scratch_of(int64_t bytes) {
    return {std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64)), std::free};
}

void check_contracts();  // sanitized_contracts.cpp
// sanitized_steps.cpp: B sequences of Hkv KV heads, at least 2, with 2 query heads each
void run_paged_step(int64_t B, int64_t Hkv, int64_t S, int64_t D, kvc_dtype dtype);
// rows of so many slots, G query heads per KV head
void run_quest_step(int64_t B, int64_t Hkv, int64_t G, int64_t D, int64_t pages_read, int64_t length, kvc_dtype dtype);
void run_dmc_step(int64_t B, int64_t Hkv, int64_t D, int64_t window, kvc_dtype dtype);
enum class ring { window, sinks, apart, pages };
void run_ring_step(int64_t D, int64_t Hq, ring kind, kvc_dtype dtype, int steps = 4);
