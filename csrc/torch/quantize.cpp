#include "common.h"

static kvc_codes kind_of(int64_t bits) {
    KVC_CHECK(bits == 8 || bits == 4, "bits must be 8 or 4, got ", bits);
    return bits == 8 ? KVC_INT8 : KVC_INT4;
}

static std::tuple<Tensor, Tensor> quantize(const Tensor& x, int64_t bits) {
    const kvc_view from = view_of(x, "x");
    const kvc_codes kind = kind_of(bits);
    const int64_t B = x.size(0), H = x.size(1), T = x.size(2), D = x.size(3);
    KVC_CHECK(D >= 1 && D <= KVC_MAX_HEAD_DIM && (kind == KVC_INT8 || D % 2 == 0), "x must have a last dimension between 1 and ",
              static_cast<int>(KVC_MAX_HEAD_DIM), kind == KVC_INT4 ? ", even for 4 bits" : "", ", got ", D);
    Tensor codes = torch::stable::new_empty(x, {B, H, T, kind == KVC_INT4 ? D / 2 : D},
                                            kind == KVC_INT4 ? ScalarType::Byte : ScalarType::Char);
    Tensor scales = torch::stable::new_empty(x, {B, H, T}, ScalarType::Half);
    const kvc_quantize_args args = {
        .codes = codes.mutable_data_ptr(), .scales = scales.mutable_data_ptr(), .x = from,
        .B = B, .H = H, .T = T, .D = D, .kind = kind,
    };
    run("quantize", x, [&] { return kvc_quantize(&args, torch_parallel_for); }, KVC_CUDA_CALL(kvc_cuda_quantize(&args, stream)));
    return {codes, scales};
}

static Tensor dequantize(const Tensor& codes, const Tensor& scales, int64_t bits, ScalarType dtype) {
    const kvc_codes kind = kind_of(bits);
    check_array(codes, codes, kind == KVC_INT4 ? ScalarType::Byte : ScalarType::Char, {-1, -1}, "codes");
    const int64_t N = codes.size(0), D = kind == KVC_INT4 ? 2 * codes.size(1) : codes.size(1);
    check_array(scales, codes, ScalarType::Half, {N}, "scales");
    KVC_CHECK(D >= 1 && D <= KVC_MAX_HEAD_DIM, "codes must be of vectors of 1 to ", static_cast<int>(KVC_MAX_HEAD_DIM),
              " elements, got ", D);
    Tensor x = torch::stable::new_empty(codes, {N, D}, dtype);
    const kvc_dequantize_args args = {
        .x = x.mutable_data_ptr(), .codes = codes.const_data_ptr(), .scales = scales.const_data_ptr(),
        .dtype = dtype_of(x, "dtype"), .N = N, .D = D, .kind = kind,
    };
    run("dequantize", codes, [&] { return kvc_dequantize(&args, torch_parallel_for); },
        KVC_CUDA_CALL(kvc_cuda_dequantize(&args, stream)));
    return x;
}

KVC_REGISTER(quantize, "quantize(Tensor x, int bits) -> (Tensor, Tensor)")
KVC_REGISTER(dequantize, "dequantize(Tensor codes, Tensor scales, int bits, ScalarType dtype) -> Tensor")
