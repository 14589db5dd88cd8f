#include "emulated_blas.h"

#include <atomic>

#include "cuda/types.cuh"

namespace {

constexpr int INVALID_VALUE = 7, NOT_SUPPORTED = 15;  // CUBLAS_STATUS_...
std::atomic<int64_t> calls{0};
std::atomic<int> failure{0};

// Element (row, column) of op(x), x by columns ld apart.
float element(const void* x, int type, int op, long long first, int ld, int row, int column) {
    const long long at = first + (op == KVC_BLAS_OP_T ? column + static_cast<long long>(row) * ld
                                                      : row + static_cast<long long>(column) * ld);
    if (type == KVC_BLAS_BF16) return to_float(static_cast<const bf16*>(x)[at]);
    return to_float(static_cast<const f16*>(x)[at]);
}

}  // namespace

int64_t emulated_gemm_calls() { return calls; }
void emulated_gemm_fails(int status) { failure = status; }

int emulated_gemm(void*, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a, int a_type, int lda,
                  long long stride_a, const void* b, int b_type, int ldb, long long stride_b, const void* beta, void* c,
                  int c_type, int ldc, long long stride_c, int batch, int compute_type, int) {
    calls++;
    if (failure) return failure;
    const auto too_small = [](int ld, int rows) { return ld < rows || ld < 1; };
    const auto known = [](int op) { return op == KVC_BLAS_OP_N || op == KVC_BLAS_OP_T; };
    if (m < 0 || n < 0 || k < 0 || batch < 0 || !known(op_a) || !known(op_b)) return INVALID_VALUE;
    if (too_small(lda, op_a == KVC_BLAS_OP_N ? m : k) || too_small(ldb, op_b == KVC_BLAS_OP_N ? k : n) ||
        too_small(ldc, m))
        return INVALID_VALUE;
    if (a_type != b_type || (a_type != KVC_BLAS_BF16 && a_type != KVC_BLAS_F16) || c_type != KVC_BLAS_F32 ||
        compute_type != KVC_BLAS_COMPUTE_F32)
        return NOT_SUPPORTED;
    if (kvc_emulation::noting()) return KVC_BLAS_SUCCESS;
    const float scale = *static_cast<const float*>(alpha), keep = *static_cast<const float*>(beta);
    for (int i = 0; i < batch; i++)
        for (int column = 0; column < n; column++)
            for (int row = 0; row < m; row++) {
                float sum = 0.0f;
                for (int d = 0; scale != 0.0f && d < k; d++)
                    sum += element(a, a_type, op_a, i * stride_a, lda, row, d) *
                           element(b, b_type, op_b, i * stride_b, ldb, d, column);
                float& to = static_cast<float*>(c)[i * stride_c + row + static_cast<long long>(column) * ldc];
                to = scale * sum + (keep == 0.0f ? 0.0f : keep * to);
            }
    return KVC_BLAS_SUCCESS;
}
