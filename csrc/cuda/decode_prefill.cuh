// Many queries over rows of pages in 16-bit types: decode_prefill.cu, which kvc_cuda_decode asks for what it takes.
#pragma once
#include "kvc_cuda.h"

// Whether it may take arguments of these sizes and types; they are ones that kvc_cuda_decode allows, and not empty.
bool prefill_may_take(const kvc_decode_args& a);
// Whether it takes these, whose pages lie where they do.
bool prefill_takes(const kvc_decode_args& a);
// From sizes alone.
int64_t prefill_scratch_bytes(const kvc_decode_args& a);
// kvc_cuda_decode of what it takes.
cudaError_t decode_prefill(const kvc_decode_args& a, cudaStream_t stream);
