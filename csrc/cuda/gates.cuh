// One gate of DMC: a decision's logit before noise, and a token's importance.
#pragma once
#include "../philox.h"
#include "kvc_cuda.h"
#include "types.cuh"

namespace {

constexpr float OMEGA_FLOOR = 0x1p-40f;

// Without overflow: exp of a number <= 0 only.
__device__ inline float sigmoid(float x) {
    const float e = expf(-fabsf(x)), large = 1.0f / (1.0f + e);
    return x < 0.0f ? e * large : large;  // a NaN passes
}

__device__ inline float gate_at(const kvc_view& x, int64_t b, int64_t h, int64_t t) {
    return load_any(x.data, x.dtype, b * x.stride_b + h * x.stride_h + t * x.stride_t);
}

// scale*x - shift, by operations that round one by one, as on the CPU: the same bits of hard.
__device__ inline float decision_at(float x, float scale, float shift) { return kvc_add(kvc_mul(scale, x), -shift); }

// Of token t of KV head h, by its G query heads.
__device__ inline float importance_at(const kvc_view& x, int64_t b, int64_t h, int64_t t, int64_t G, float shift, float eps,
                                      kvc_importance reduce) {
    const int64_t heads = reduce == KVC_FIRST_HEAD ? 1 : G;
    float sum = 0.0f;
    for (int64_t g = 0; g < heads; g++) {
        const float logit = gate_at(x, b, h * G + g, t);
        sum += reduce == KVC_MEAN_SIGMOID ? sigmoid(logit + shift) : logit;
    }
    const float mean = sum / static_cast<float>(heads);
    const float y = reduce == KVC_MEAN_SIGMOID ? mean : sigmoid(mean + shift);
    return (y < OMEGA_FLOOR ? OMEGA_FLOOR : y) + eps;
}

}  // namespace
