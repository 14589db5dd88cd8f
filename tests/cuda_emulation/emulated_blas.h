// cublasGemmStridedBatchedEx on the CPU, as cuBLAS documents it: matrices by columns, operations, leading dimensions and
// strides in elements. What cuBLAS refuses is refused; beta = 0 reads nothing of C. Counts its calls.
#pragma once
#include "cuda/blas.h"

extern "C" {
int emulated_gemm(void* handle, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a, int a_type,
                  int lda, long long stride_a, const void* b, int b_type, int ldb, long long stride_b, const void* beta,
                  void* c, int c_type, int ldc, long long stride_c, int batch, int compute_type, int algorithm);
int64_t emulated_gemm_calls();
// 0: calls succeed. Otherwise what the calls to come return.
void emulated_gemm_fails(int status);
}

inline kvc_cuda_blas emulated_blas() { return {emulated_gemm, nullptr, 0}; }
