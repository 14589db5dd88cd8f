/* Where the tokens of a decoded step stand, and queries and keys turned to there. */
#include "step.h"
#include "kernel.h"

#include <string.h>

kvc_status kvc_step_positions(const kvc_step *step, const int32_t *places, const int32_t *offsets, int sign,
                              int32_t *positions) {
    for (int64_t b = 0; b < step->B; b++) {
        if (places[b] < 0 || places[b] == INT32_MAX) return KVC_BAD_INDEX;
        const int64_t position = places[b] + (offsets ? sign * (int64_t)offsets[b] : 0);
        positions[b] = (int32_t)min_of(max_of(position, -1), INT32_MAX);
    }
    return KVC_OK;
}

kvc_status kvc_step_turn(const kvc_step *step, int keys, int64_t neuron, const int32_t *positions, void *to,
                         kvc_view *turned, kvc_parallel_for parallel_for) {
    const kvc_view *x = keys ? &step->k : &step->q;
    const int64_t H = keys ? step->Hkv : step->Hq, S = step->S, D = step->D, bytes = kvc_dtype_bytes(x->dtype);
    const int64_t heads = neuron < 0 ? 0 : step->B * H * S;
    *turned = *x;
    if (!step->rotary_dim && neuron < 0) return KVC_OK;
    *turned = kvc_dense_view(to, x->dtype, H, S, D);
    kvc_rope_args rope = {.out = *turned, .x = *x, .cos = step->cos, .sin = step->sin, .positions = positions, .B = step->B,
                          .H = H, .T = S, .D = D, .rotary_dim = step->rotary_dim, .table_rows = step->table_rows};
    for (int64_t i = 0; i < heads; i++) {
        char *head = (char *)to + i * D * bytes;
        memcpy(head, view_at(x, i / (H * S), i / S % H, i % S, 0), (size_t)(D * bytes));
        memset(head + neuron * bytes, 0, (size_t)bytes);
        rope.x = *turned;
    }
    const kvc_status status = step->rotary_dim ? kvc_rope(&rope, parallel_for) : KVC_OK;
    for (int64_t i = 0; i < heads; i++) memset((char *)to + (i * D + neuron) * bytes, 0, (size_t)bytes);
    return status;
}
