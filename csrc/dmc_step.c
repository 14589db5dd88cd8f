/* One decoded step of DMC's cache: decide, rotate, append or merge, and attend in one call. */
#include "formats.h"
#include "page_table.h"
#include "step.h"

#include <string.h>

typedef struct { /* parts of the scratch */
    float *alpha, *omega, *unused; /* [R] each; unused: what else decisions give, [2, R] */
    int32_t *notes, *positions;    /* of kvc_dmc_append; [B] */
    void *q, *decode;              /* rotated queries */
    int64_t bytes;
} step_scratch;

static kvc_decode_args decode_of(const kvc_dmc_step_args *args) {
    const kvc_dmc_append_args *append = &args->append;
    const kvc_page_table *table = &append->table;
    return (kvc_decode_args){
        .out = args->out, .lse = args->lse, .q = args->q, .rows = append->rows, .block_table = table->block_table,
        .end = table->lengths, .B = append->B, .Hq = args->Hq, .Hkv = append->Hkv, .S = 1, .D = append->D,
        .P = table->P, .pages = table->pages, .blocks = table->blocks, .scale = args->scale, .softcap = args->softcap, .sink_logits = args->sink_logits,
    };
}

static step_scratch scratch_of(const kvc_dmc_step_args *args) {
    const kvc_decode_args decode = decode_of(args);
    const int64_t R = args->append.table.R, gates = R * (int64_t)sizeof(float);
    const int64_t q = args->append.B * args->Hq * args->append.D * kvc_dtype_bytes(args->q.dtype);
    step_scratch scratch = {0};
    scratch.alpha = kvc_part_of(args->scratch, &scratch.bytes, gates);
    scratch.omega = kvc_part_of(args->scratch, &scratch.bytes, gates);
    scratch.unused = kvc_part_of(args->scratch, &scratch.bytes, 2 * gates);
    scratch.notes = kvc_part_of(args->scratch, &scratch.bytes, (4 * R + 1) * (int64_t)sizeof(int32_t));
    scratch.positions = kvc_part_of(args->scratch, &scratch.bytes, args->append.B * (int64_t)sizeof(int32_t));
    scratch.q = kvc_part_of(args->scratch, &scratch.bytes, q);
    scratch.decode = kvc_part_of(args->scratch, &scratch.bytes, kvc_decode_scratch_bytes(&decode));
    return scratch;
}

static kvc_status check(const kvc_dmc_step_args *args) {
    const kvc_dmc_append_args *append = &args->append;
    if (append->B < 0 || append->Hkv < 0 || args->Hq < 0 || append->S != 1) return KVC_BAD_SIZE;
    if (append->Hkv ? args->Hq % args->append.Hkv != 0 : args->Hq != 0) return KVC_BAD_SIZE;
    if (append->D < 1 || append->D > KVC_MAX_HEAD_DIM || !table_sizes_are_good(&append->table)) return KVC_BAD_SIZE;
    if (append->rotary_dim < 0 || append->rotary_dim > append->D || append->rotary_dim % 2) return KVC_BAD_SIZE;
    if (append->table_rows < 0 || append->window < 0 || append->window > KVC_DMC_MAX_WINDOW) return KVC_BAD_SIZE;
    if ((append->table.P & (append->table.P - 1)) != 0 || append->table.R != append->B * append->Hkv) return KVC_BAD_SIZE;
    if (append->neuron < 0 || append->neuron >= append->D) return KVC_BAD_SIZE;
    if (append->counts || append->positions || !scale_is_good(args->scale, args->softcap)) return KVC_BAD_SIZE;
    if (!dtype_known(args->q.dtype) || !dtype_known(append->k.dtype)) return KVC_BAD_DTYPE;
    const kvc_status status = format_takes(append->rows.format, append->k.dtype, append->D);
    if (status != KVC_OK || !append->table.R || !args->Hq) return status;
    if (!args->out || !args->lse || !args->q.data || !args->places || !args->scratch || !append->k.data) {
        return KVC_NULL_POINTER;
    }
    return KVC_OK;
}

int64_t kvc_dmc_step_scratch_bytes(const kvc_dmc_step_args *args) {
    return args && check(args) != KVC_BAD_SIZE ? scratch_of(args).bytes : 0;
}

/* The neuron of the heads as [B, H, 1], D = 1. */
static kvc_view neuron_of(const kvc_view *x, int64_t neuron) {
    kvc_view view = *x;
    view.data = (char *)x->data + neuron * kvc_dtype_bytes(x->dtype);
    return view;
}

/* Which rows merge, and how much each token weighs, where the caller has not said so. */
static kvc_status decide(const kvc_dmc_step_args *args, const step_scratch *scratch, kvc_dmc_append_args *append,
                         kvc_parallel_for parallel_for) {
    const int64_t R = append->table.R;
    kvc_status status = KVC_OK;
    if (!append->alpha) {
        const kvc_dmc_decisions_args decisions = {
            .alpha = scratch->unused, .hard = scratch->alpha, .tempered = scratch->unused + R,
            .x = neuron_of(&append->k, append->neuron), .B = append->B, .H = append->Hkv, .T = 1,
            .shift = args->decision_shift, .temperature = 1.0f, .scale = 1.0f,
            .margin = args->decision_margin, .only_hard = 1,
        };
        status = kvc_dmc_decisions(&decisions, parallel_for);
        append->alpha = scratch->alpha;
    }
    if (status == KVC_OK && !append->omega) {
        const kvc_dmc_importance_args importance = {
            .omega = scratch->omega, .x = neuron_of(&args->q, append->neuron), .B = append->B, .Hq = args->Hq,
            .Hkv = append->Hkv, .T = 1, .shift = args->omega_shift, .eps = args->omega_eps, .reduce = args->reduce,
        };
        status = kvc_dmc_importance(&importance, parallel_for);
        append->omega = scratch->omega;
    }
    return status;
}

/* The queries at their places, the neuron 0 before and after. */
static kvc_status rotate(const kvc_dmc_step_args *args, const step_scratch *scratch, kvc_view *q,
                         kvc_parallel_for parallel_for) {
    const kvc_dmc_append_args *append = &args->append;
    const int64_t B = append->B, Hq = args->Hq, D = append->D, bytes = kvc_dtype_bytes(args->q.dtype);
    *q = kvc_dense_view(scratch->q, args->q.dtype, Hq, 1, D);
    for (int64_t i = 0; i < B * Hq; i++) {
        char *head = (char *)scratch->q + i * D * bytes;
        memcpy(head, view_at(&args->q, i / Hq, i % Hq, 0, 0), (size_t)(D * bytes));
        memset(head + append->neuron * bytes, 0, (size_t)bytes);
    }
    if (!append->rotary_dim) return KVC_OK;
    const kvc_rope_args rope = {.out = *q, .x = *q, .cos = append->cos, .sin = append->sin, .positions = scratch->positions,
                                .B = B, .H = Hq, .T = 1, .D = D, .rotary_dim = append->rotary_dim,
                                .table_rows = append->table_rows};
    const kvc_status status = kvc_rope(&rope, parallel_for);
    for (int64_t i = 0; i < B * Hq; i++) {
        memset((char *)scratch->q + (i * D + append->neuron) * bytes, 0, (size_t)bytes);
    }
    return status;
}

kvc_status kvc_dmc_step(const kvc_dmc_step_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    kvc_status status = check(args);
    if (status != KVC_OK || !args->append.table.R || !args->Hq) return status;
    for (int64_t b = 0; b < args->append.B; b++) {
        if (args->places[b] < 0 || args->places[b] == INT32_MAX) return KVC_BAD_INDEX;
    }
    const step_scratch scratch = scratch_of(args);
    for (int64_t b = 0; b < args->append.B; b++) {
        const int64_t position = args->places[b] + (int64_t)(args->offsets ? args->offsets[b] : 0);
        scratch.positions[b] = (int32_t)min_of(max_of(position, -1), INT32_MAX);
    }
    kvc_dmc_append_args append = args->append;
    append.positions = scratch.positions;
    append.scratch = scratch.notes;
    kvc_decode_args decode = decode_of(args);
    decode.scratch = scratch.decode;
    status = check_pages(&append.table, NULL); /* what decode reads: it would refuse too late */
    if (status == KVC_OK) status = decide(args, &scratch, &append, parallel_for);
    if (status == KVC_OK) status = rotate(args, &scratch, &decode.q, parallel_for);
    if (status == KVC_OK) status = kvc_dmc_append(&append, parallel_for);
    if (status != KVC_OK) return status;
    for (int64_t b = 0; b < append.B; b++) args->places[b]++;
    return kvc_decode(&decode, parallel_for);
}
