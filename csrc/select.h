/* Top-k of a row of scores, for kernels that choose as a part of what they do. */
#ifndef KVC_SELECT_H
#define KVC_SELECT_H
#include "kernel.h"

/* indices[0..k) = places of the k largest of `length` scores, as kvc_select_topk has them; k <= length. */
void kvc_select_row(int32_t *indices, const float *scores, int64_t length, int64_t k);
#endif
