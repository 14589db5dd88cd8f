/* The one function of cuBLAS that the kernels call, as a pointer: nothing here links against cuBLAS, of any version.
 *
 * Prototype and values are those of cublas_v2.h, cublas_api.h and library_types.h, the same in CUDA 11 to 13. Stated here
 * because the wheel that holds the header, nvidia-cublas, is 418 MB; enumerations are passed as the int that they are.
 */
#ifndef KVC_BLAS_H
#define KVC_BLAS_H
#include <cuda_runtime.h>
#ifdef __cplusplus
extern "C" {
#endif

enum {
    KVC_BLAS_SUCCESS = 0,      /* CUBLAS_STATUS_SUCCESS */
    KVC_BLAS_OP_N = 0,         /* CUBLAS_OP_N: as it is */
    KVC_BLAS_OP_T = 1,         /* CUBLAS_OP_T: transposed */
    KVC_BLAS_F32 = 0,          /* CUDA_R_32F */
    KVC_BLAS_F16 = 2,          /* CUDA_R_16F */
    KVC_BLAS_BF16 = 14,        /* CUDA_R_16BF */
    KVC_BLAS_COMPUTE_F32 = 68, /* CUBLAS_COMPUTE_32F: products of 16-bit numbers summed in float32 */
    KVC_BLAS_DEFAULT = -1      /* CUBLAS_GEMM_DEFAULT: cuBLAS chooses the algorithm */
};

/* cublasGemmStridedBatchedEx: for each i < batch, C + i*stride_c [m, n] = alpha * op(A + i*stride_a) [m, k] *
 * op(B + i*stride_b) [k, n] + beta * C, all by columns, ld* elements apart. Returns a cublasStatus_t. */
typedef int (*kvc_blas_gemm)(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a,
                             int a_type, int lda, long long stride_a, const void *b, int b_type, int ldb,
                             long long stride_b, const void *beta, void *c, int c_type, int ldc, long long stride_c,
                             int batch, int compute_type, int algorithm);

/* handle: a cublasHandle_t of the current device that enqueues on the stream of the launcher, with scalars on the host
 * (as it is created). A launcher whose product was refused returns cudaErrorUnknown and leaves what cuBLAS said in
 * status. Products are enqueued like kernels, and can be captured in a CUDA graph as the handle's other products can. */
typedef struct {
    kvc_blas_gemm gemm;
    void *handle;
    int status;
} kvc_cuda_blas;

#ifdef __cplusplus
}
#endif
#endif
