/* Sentences for status codes, sizes of element types and formats. */
#include "kvc.h"

const char *kvc_status_message(kvc_status status) {
    switch (status) {
        case KVC_OK: return "success";
        case KVC_NULL_POINTER: return "an array that must be there is missing";
        case KVC_BAD_SIZE: return "a size is negative, too large or does not fit the others";
        case KVC_BAD_DTYPE: return "the element type must be float32, bfloat16 or float16";
        case KVC_BAD_INDEX: return "an index, position or length is out of range";
        case KVC_TOO_FEW_SCORES: return "a row has fewer scores that are not NaN than places to fill";
        case KVC_BAD_SCHEDULE: return "there is no such memory schedule";
        case KVC_BAD_SIMD: return "no such table of inner loops, or this CPU cannot run it";
        case KVC_POOL_FULL: return "the pool is full: fewer pages are free than the call needs";
        case KVC_BAD_FORMAT: return "keys and values are stored in a format that this function does not read";
    }
    return "unknown status";
}

int64_t kvc_dtype_bytes(kvc_dtype dtype) {
    switch (dtype) {
        case KVC_F32: return 4;
        case KVC_BF16:
        case KVC_F16: return 2;
    }
    return 0;
}

int64_t kvc_key_bytes(kvc_format format, int64_t D) {
    switch (format) {
        case KVC_FORMAT_INT8:
        case KVC_FORMAT_K8V4: return D;
        default: return D * kvc_dtype_bytes((kvc_dtype)format);
    }
}

int64_t kvc_value_bytes(kvc_format format, int64_t D) {
    return format == KVC_FORMAT_K8V4 ? D / 2 : kvc_key_bytes(format, D);
}
