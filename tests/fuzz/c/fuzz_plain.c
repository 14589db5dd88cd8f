/* Kernels over arrays without pages: rope, scores, selection, attention, plans, and DMC's gates and averages. */
#include "fuzz.h"

#include <math.h>

/* D of attention: small, odd, and at the limit. */
static int64_t head_dim(void) {
    static const int64_t dims[] = {16, 64, 128, 256, 511, 512, 513, 80};
    return once_in(3) ? dims[between(0, 7)] : between(once_in(30) ? 0 : 1, 40);
}

static float any_scale(void) {
    return once_in(10) ? any_float() : 0.25f;
}

static float any_softcap(void) {
    return once_in(4) ? any_float() : 0.0f;
}

static void rope(void) {
    const int64_t B = between(0, 3), H = between(0, 3), T = between(0, 9), D = between(0, once_in(4) ? 300 : 20);
    const int64_t rotary_dim = once_in(8) ? any_number() : 2 * between(0, D / 2), half = D / 2;
    const int64_t rows = once_in(4) ? between(0, 9) : T + between(0, 3);
    const kvc_dtype type = any_dtype();
    const int in_place = once_in(3) ? WRITE : READ;
    kvc_rope_args args = {
        .x = view(B, H, T, D, type, in_place),
        .cos = floats(rows * half, READ), .sin = floats(rows * half, READ),
        .positions = once_in(3) ? NULL : integers(B * T, 0, rows - 1, READ),
        .B = B, .H = H, .T = T, .D = D, .rotary_dim = rotary_dim, .table_rows = rows,
        .inverse = (int)between(0, 1),
    };
    args.out = in_place ? args.x : view(B, H, T, D, once_in(3) ? any_dtype() : type, WRITE);
    POINTER(args.cos), POINTER(args.sin), POINTER(args.positions), POINTER(args.x.data), POINTER(args.out.data);
    SIZE(args.B), SIZE(args.H), SIZE(args.T), SIZE(args.D), SIZE(args.rotary_dim), SIZE(args.table_rows);
    damage();
    finish(kvc_rope(&args, NULL), 1);
}

static void window_scores(void) {
    const int64_t B = between(0, 3), Hkv = between(0, 3), Hq = once_in(10) ? between(0, 6) : Hkv * between(0, 4);
    const int64_t W = between(0, once_in(4) ? 70 : 9), T = W + between(0, once_in(4) ? 600 : 40), D = between(0, once_in(4) ? 300 : 40);
    const int64_t skip = once_in(4) ? any_number() : between(0, T);
    kvc_window_scores_args args = {
        .scores = floats(skip >= 0 && skip < T ? B * Hkv * (T - skip) : 0, WRITE),
        .q = view(B, Hq, W, D, any_dtype(), READ), .k = view(B, Hkv, T, D, any_dtype(), READ),
        .lengths = once_in(3) ? NULL : integers(B, W > skip && skip >= 0 ? W : 0, T, READ),
        .B = B, .Hq = Hq, .Hkv = Hkv, .W = W, .T = T, .D = D,
        .scale = any_scale(), .reduce = (kvc_reduce)between(0, 3), .pool = (kvc_pool)between(0, 2),
        .kernel_size = once_in(6) ? any_number() : 2 * between(0, 4) + 1,
        .skip_last = skip, .mask_first = any_number(), .mask_last = any_number(),
        .softcap = any_softcap(), .sink_logits = once_in(3) ? floats(Hq, READ) : NULL,
    };
    POINTER(args.scores), POINTER(args.q.data), POINTER(args.k.data), POINTER(args.lengths);
    SIZE(args.B), SIZE(args.Hq), SIZE(args.Hkv), SIZE(args.W), SIZE(args.D), SIZE(args.kernel_size);
    damage();
    args.scratch = scratch(kvc_window_scores_scratch_bytes(&args));
    finish(kvc_window_scores(&args, NULL), 0);
}

static void layer_similarity(void) {
    const int64_t L = between(0, 3), Hkv = between(0, 2), Hq = once_in(10) ? between(0, 5) : Hkv * between(0, 3);
    const int64_t S = between(0, once_in(4) ? 90 : 9), T = S + between(once_in(20) ? -3 : 0, once_in(4) ? 400 : 30);
    const int64_t D = between(0, once_in(6) ? 200 : 24), keys = T > 0 ? T : 0;
    kvc_layer_similarity_args args = {
        .sums = (double *)(void *)sizes(Hq * L * L, 0, 0, WRITE),
        .q = view(L, Hq, S, D, any_dtype(), READ), .k = view(L, Hkv, keys, D, any_dtype(), READ),
        .L = L, .Hq = Hq, .Hkv = Hkv, .S = S, .T = T, .D = D,
        .scale = any_scale(), .sinks = any_number(), .recent = any_number(), .softcap = any_softcap(),
    };
    POINTER(args.sums), POINTER(args.q.data), POINTER(args.k.data);
    SIZE(args.L), SIZE(args.Hq), SIZE(args.Hkv), SIZE(args.S), SIZE(args.T), SIZE(args.D);
    damage();
    args.scratch = scratch(kvc_layer_similarity_scratch_bytes(&args));
    finish(kvc_layer_similarity(&args, NULL), 0);
}

static void select_topk(void) {
    const int64_t R = between(0, 5), T = between(0, once_in(4) ? 3000 : 60), k = between(0, T + (once_in(9) ? 2 : 0));
    kvc_select_topk_args args = {
        .indices = integers(R * k, 0, 0, WRITE), .scores = floats(R * T, READ),
        .lengths = once_in(3) ? NULL : integers(R, k <= T ? k : 0, T, READ), .R = R, .T = T, .k = k,
    };
    POINTER(args.indices), POINTER(args.scores), POINTER(args.lengths);
    SIZE(args.R), SIZE(args.T), SIZE(args.k);
    damage();
    finish(kvc_select_topk(&args, NULL), 0);
}

static kvc_attention_args attention_args(void) {
    const int64_t B = between(0, 3), Hkv = between(0, 2), Hq = once_in(10) ? between(0, 5) : Hkv * between(0, 4);
    const int64_t S = between(0, once_in(4) ? 90 : 9), T = S + between(once_in(20) ? -3 : 0, once_in(4) ? 300 : 30);
    const int64_t D = head_dim(), keys = T > 0 ? T : 0;
    const kvc_dtype type = any_dtype();
    return (kvc_attention_args){
        .out = view(B, Hq, S, D, type, WRITE), .q = view(B, Hq, S, D, type, READ),
        .k = view(B, Hkv, keys, D, once_in(30) ? any_dtype() : type, READ), .v = view(B, Hkv, keys, D, type, READ),
        .lse = floats(B * Hq * S, WRITE), .key_bias = once_in(3) ? floats(B * Hkv * keys, READ) : NULL,
        .lengths = once_in(3) ? integers(B, 0, T, READ) : NULL,
        .B = B, .Hq = Hq, .Hkv = Hkv, .S = S, .T = T, .D = D,
        .window = once_in(2) ? any_number() : 0, .sinks = once_in(2) ? any_number() : 0,
        .scale = any_scale(), .causal = (int)between(0, 1), .complement = once_in(4),
        .softcap = any_softcap(), .sink_logits = once_in(3) ? floats(Hq, READ) : NULL,
    };
}

static void attention(void) {
    kvc_attention_args args = attention_args();
    POINTER(args.out.data), POINTER(args.q.data), POINTER(args.k.data), POINTER(args.v.data), POINTER(args.lse);
    POINTER(args.key_bias), POINTER(args.lengths), POINTER(args.sink_logits);
    SIZE(args.B), SIZE(args.Hq), SIZE(args.Hkv), SIZE(args.S), SIZE(args.D), SIZE(args.window), SIZE(args.sinks);
    damage();
    finish(kvc_attention(&args, NULL), 0);
}

static void attention_backward(void) {
    const kvc_attention_args forward = attention_args();
    const int64_t B = forward.B, Hq = forward.Hq, Hkv = forward.Hkv, S = forward.S, D = forward.D;
    const int64_t T = forward.T > 0 ? forward.T : 0;
    const kvc_dtype type = forward.q.dtype;
    kvc_attention_backward_args args = {
        .forward = forward, .dout = view(B, Hq, S, D, type, READ), .dq = view(B, Hq, S, D, type, WRITE),
        .dk = view(B, Hkv, T, D, type, WRITE), .dv = view(B, Hkv, T, D, type, WRITE),
        .dlse = once_in(2) ? floats(B * Hq * S, READ) : NULL,
        .dkey_bias = once_in(2) ? floats(B * Hkv * T, WRITE) : NULL,
        .dsink_logits = once_in(2) ? floats(Hq, WRITE) : NULL,
    };
    POINTER(args.dout.data), POINTER(args.dq.data), POINTER(args.dk.data), POINTER(args.dv.data);
    POINTER(args.dlse), POINTER(args.dkey_bias), POINTER(args.forward.lse);
    POINTER(args.forward.out.data), POINTER(args.forward.sink_logits), POINTER(args.forward.key_bias);
    SIZE(args.forward.B), SIZE(args.forward.Hq), SIZE(args.forward.S), SIZE(args.forward.window), SIZE(args.forward.D);
    damage();
    args.scratch = scratch(kvc_attention_backward_scratch_bytes(&args));
    finish(kvc_attention_backward(&args, NULL), 0);
}

static void plan(void) {
    const int64_t length = once_in(3) ? any_number() : between(0, 300), chunk = once_in(4) ? any_number() : between(1, 40);
    const int64_t layers = once_in(8) ? any_number() : between(1, 4), n = kvc_plan_iterations(length, chunk);
    const int64_t held = n > 0 && n < 5000 ? n : 0, rows = layers > 0 && layers < 100 ? layers : 0;
    if (n > held || layers > 100) { /* what no caller has arrays for may only be asked for where it is refused */
        finish(KVC_OK, 0);
        return;
    }
    kvc_plan_args args = {
        .chunks = sizes(held, 0, 0, WRITE), .mean_memory = sizes(held, 0, 0, WRITE), .clamped = sizes(held, 0, 0, WRITE),
        .memory = sizes(held * rows, 0, 0, WRITE), .stored = sizes(held * rows, 0, 0, WRITE),
        .prompt_length = length, .chunk_size = chunk, .memory_size = once_in(3) ? any_number() : between(1, 60),
        .initial_memory = once_in(2) ? -1 : any_number(), .layers = layers,
        .min_chunk = once_in(3) ? any_number() : between(1, 9), .schedule = (kvc_schedule)between(0, 6),
        .decremental = (int)between(0, 1),
    };
    POINTER(args.chunks), POINTER(args.mean_memory), POINTER(args.clamped), POINTER(args.memory), POINTER(args.stored);
    damage();
    finish(kvc_plan(&args), 1);
}

static void divide_memory(void) {
    const int64_t layers = between(0, 9), most = once_in(3) ? INT32_MAX : 500;
    kvc_divide_memory_args args = {
        .memory = sizes(layers, 0, 0, WRITE), .kept = sizes(layers, 0, most / 2, READ),
        .stored = sizes(layers, most / 2, most, READ), .lowest = sizes(layers, 0, 20, READ),
        .highest = sizes(layers, 20, most, READ), .layers = layers,
        .total = once_in(3) ? any_number() : between(0, 4000),
    };
    POINTER(args.memory), POINTER(args.kept), POINTER(args.stored), POINTER(args.lowest), POINTER(args.highest);
    SIZE(args.layers);
    damage();
    finish(kvc_divide_memory(&args), 1);
}

static void merge_states(void) {
    const int64_t N = between(0, 9), D = between(0, once_in(4) ? 300 : 20);
    const kvc_dtype type = any_dtype();
    kvc_merge_states_args args = {
        .out_b = elements(N * D, type, READ), .lse_a = floats(N, READ), .lse_b = floats(N, READ),
        .lse = floats(N, WRITE), .dtype = type, .N = N, .D = D,
    };
    args.out = elements(N * D, type, WRITE);
    args.out_a = once_in(3) ? args.out : elements(N * D, type, READ);
    POINTER(args.out), POINTER(args.lse), POINTER(args.out_a), POINTER(args.out_b), POINTER(args.lse_a);
    SIZE(args.N), SIZE(args.D);
    damage();
    finish(kvc_merge_states(&args, NULL), 0);
}

/* ---- DMC ---- */

static void dmc_decisions(void) {
    const int64_t B = between(0, 3), H = between(0, 3), T = between(0, once_in(4) ? 200 : 20), count = B * H * T;
    const int drawn = once_in(3);
    kvc_dmc_decisions_args args = {
        .alpha = floats(count, WRITE), .hard = floats(count, WRITE), .tempered = floats(count, WRITE),
        .x = view(B, H, T, 1, any_dtype(), READ), .noise = once_in(3) ? floats(count, READ) : NULL,
        .B = B, .H = H, .T = T, .seed = any_number(), .offset = any_number(), .stream = any_number(),
        .sample = any_number(), .token = any_number(), .shift = any_float(), .temperature = any_float(),
        .scale = any_float(), .margin = any_float(), .drawn = drawn, .only_hard = once_in(3),
    };
    POINTER(args.alpha), POINTER(args.hard), POINTER(args.tempered), POINTER(args.x.data), POINTER(args.noise);
    SIZE(args.B), SIZE(args.H), SIZE(args.T);
    damage();
    finish(kvc_dmc_decisions(&args, NULL), 0);
}

static void dmc_importance(void) {
    const int64_t B = between(0, 3), Hkv = between(0, 3), Hq = once_in(10) ? between(0, 6) : Hkv * between(0, 4);
    const int64_t T = between(0, once_in(4) ? 200 : 20);
    kvc_dmc_importance_args args = {
        .omega = floats(B * Hkv * T, WRITE), .x = view(B, Hq, T, 1, any_dtype(), READ),
        .B = B, .Hq = Hq, .Hkv = Hkv, .T = T, .shift = any_float(), .eps = any_float(),
        .reduce = (kvc_importance)between(0, 3),
    };
    POINTER(args.omega), POINTER(args.x.data);
    SIZE(args.B), SIZE(args.Hq), SIZE(args.Hkv), SIZE(args.T);
    damage();
    finish(kvc_dmc_importance(&args, NULL), 0);
}

static void dmc_mask(void) {
    const int64_t B = between(0, 3), H = between(0, 3), T = between(0, once_in(4) ? 200 : 20);
    kvc_dmc_mask_args args = {
        .bias = floats(B * H * T, WRITE), .tempered = floats(B * H * T, READ), .B = B, .H = H, .T = T,
    };
    POINTER(args.bias), POINTER(args.tempered);
    SIZE(args.B), SIZE(args.H), SIZE(args.T);
    damage();
    finish(kvc_dmc_mask(&args, NULL), 0);
}

static kvc_dmc_accumulate_args accumulate_args(void) {
    const int64_t B = between(0, 2), H = between(0, 2), T = between(0, once_in(3) ? 300 : 20), D = head_dim();
    const int64_t window = once_in(2) ? 0 : any_number(), rows = B * H;
    const kvc_dtype type = any_dtype();
    const int begun = once_in(3);
    return (kvc_dmc_accumulate_args){
        .out_k = view(B, H, T, D, type, WRITE), .out_v = view(B, H, T, D, type, WRITE),
        .k = view(B, H, T, D, type, READ), .v = view(B, H, T, D, once_in(30) ? any_dtype() : type, READ),
        .z = floats(rows * T, WRITE), .states = floats(rows * kvc_dmc_chunks(T, window) * 2 * D, WRITE),
        .alpha = floats(rows * T, READ), .omega = once_in(4) ? floats(rows * T, READ) : positive(rows * T),
        .initial_k = begun ? floats(rows * D, READ) : NULL, .initial_v = begun ? floats(rows * D, READ) : NULL,
        .initial_z = begun ? positive(rows) : NULL,
        .B = B, .Hkv = H, .T = T, .D = D, .neuron = once_in(3) ? any_number() : -1, .window = window,
    };
}

static void dmc_accumulate(void) {
    kvc_dmc_accumulate_args args = accumulate_args();
    POINTER(args.out_k.data), POINTER(args.out_v.data), POINTER(args.k.data), POINTER(args.v.data), POINTER(args.z);
    POINTER(args.states), POINTER(args.alpha), POINTER(args.omega), POINTER(args.initial_k), POINTER(args.initial_z);
    SIZE(args.B), SIZE(args.Hkv), SIZE(args.T), SIZE(args.D);
    damage();
    finish(kvc_dmc_accumulate(&args, NULL), 0);
}

static void dmc_accumulate_backward(void) {
    const kvc_dmc_accumulate_args forward = accumulate_args();
    const int64_t B = forward.B, H = forward.Hkv, T = forward.T, D = forward.D;
    const kvc_dtype type = forward.k.dtype;
    kvc_dmc_accumulate_backward_args args = {
        .forward = forward, .dout_k = view(B, H, T, D, type, READ), .dout_v = view(B, H, T, D, type, READ),
        .dk = view(B, H, T, D, type, WRITE), .dv = view(B, H, T, D, type, WRITE),
        .dalpha = floats(B * H * T, WRITE), .domega = floats(B * H * T, WRITE),
    };
    POINTER(args.dout_k.data), POINTER(args.dk.data), POINTER(args.dv.data), POINTER(args.dalpha);
    POINTER(args.domega), POINTER(args.forward.z), POINTER(args.forward.states);
    SIZE(args.forward.B), SIZE(args.forward.Hkv), SIZE(args.forward.T), SIZE(args.forward.D);
    damage();
    args.scratch = scratch(kvc_dmc_accumulate_backward_scratch_bytes(&args));
    finish(kvc_dmc_accumulate_backward(&args, NULL), 0);
}

static void quantize(void) {
    const int64_t B = between(0, 2), H = between(0, 3), T = between(0, 9), D = head_dim();
    kvc_quantize_args args = {.x = view(B, H, T, D, any_dtype(), READ), .B = B, .H = H, .T = T, .D = D,
                              .kind = once_in(30) ? (kvc_codes)between(2, 9) : (kvc_codes)between(0, 1)};
    args.codes = codes(B * H * T * (args.kind == KVC_INT4 ? D / 2 : D), WRITE);
    args.scales = elements(B * H * T, KVC_F16, WRITE);
    POINTER(args.codes), POINTER(args.scales), POINTER(args.x.data);
    SIZE(args.B), SIZE(args.H), SIZE(args.T), SIZE(args.D);
    damage();
    finish(kvc_quantize(&args, NULL), 1);
}

static void dequantize(void) {
    const int64_t N = between(0, 12), D = head_dim();
    kvc_dequantize_args args = {.dtype = any_dtype(), .N = N, .D = D,
                                .kind = once_in(30) ? (kvc_codes)between(2, 9) : (kvc_codes)between(0, 1)};
    args.x = elements(N * D, args.dtype, WRITE);
    args.codes = codes(N * (args.kind == KVC_INT4 ? D / 2 : D), READ);
    args.scales = elements(N, KVC_F16, READ);
    POINTER(args.x), POINTER(args.codes), POINTER(args.scales);
    SIZE(args.N), SIZE(args.D);
    damage();
    finish(kvc_dequantize(&args, NULL), 1);
}

const fuzzer plain_fuzzers[] = {
    quantize, dequantize, rope, window_scores, layer_similarity, select_topk, attention, attention_backward, plan, divide_memory, merge_states,
    dmc_decisions, dmc_importance, dmc_mask, dmc_accumulate, dmc_accumulate_backward, NULL,
};
