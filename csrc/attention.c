/* Flash attention, forward and backward, with the masks of the methods.
 *
 * FLOPs: 4*D per visible (query, key) forward, 10*D backward (logits and <dout, v> anew, then dq, dk, dv); keys and
 * values come from the caches, so that the ceiling is the rate of the matrix products. Queries lie in the lanes (lanes.h).
 * Forward: one work item per block of KVC_TILE queries. Backward: one per KV head and share of its query blocks; every
 * share sums dk and dv of its own in scratch, and the shares are joined in order: their number depends on the shape only,
 * so no bit depends on the threads.
 */
#include "lanes.h"

#include <math.h>
#include <string.h>

enum { FEWEST_ITEMS = 8 }; /* items of the backward pass at least: threads that it can use */

/* Which keys the queries of a block see at all, as two ranges; inside them, lanes->... decides. */
typedef struct {
    int64_t first, count;                 /* of the list of queries of a KV head that starts at head `head` */
    int64_t b, head;                      /* head: of the block's first query */
    kvc_lanes lanes;
    int64_t near_least, begin_most, end_least; /* what every query of the block sees: t < near_least or [begin_most, end_least) */
    int64_t near_most, begin_least, end_most;  /* what any sees */
} query_block;

/* Heads whose queries share a block: so many that short prompts fill the lanes too. */
static int64_t heads_per_block(const kvc_attention_args *args) {
    return min_of(max_of(KVC_TILE / args->S, 1), args->Hq / args->Hkv);
}

/* Blocks per KV head. */
static int64_t blocks_of(const kvc_attention_args *args) {
    const int64_t together = heads_per_block(args);
    return ceil_div(args->Hq / args->Hkv, together) * ceil_div(together * args->S, KVC_TILE);
}

/* Head and query of the block's lane i. */
static void query_at(const kvc_attention_args *args, const query_block *block, int64_t i, int64_t *h, int64_t *s) {
    *h = block->head + (block->first + i) / args->S;
    *s = (block->first + i) % args->S;
}

/* Block number `index` of KV head g. Low and high blocks alternate: under a causal mask high ones cost more, and threads
 * take contiguous items. */
static void block_at(const kvc_attention_args *args, int64_t b, int64_t g, int64_t index, query_block *block) {
    const int64_t G = args->Hq / args->Hkv, together = heads_per_block(args);
    const int64_t per_group = ceil_div(together * args->S, KVC_TILE), group = index / per_group;
    const int64_t turn = index % per_group, place = turn % 2 ? per_group - 1 - turn / 2 : turn / 2;
    const int64_t heads = min_of(together, G - group * together);
    const int64_t length = args->lengths ? args->lengths[b] : args->T;
    block->b = b;
    block->head = g * G + group * together;
    block->first = place * KVC_TILE;
    block->count = min_of(max_of(heads * args->S - block->first, 0), KVC_TILE);
    block->near_least = block->end_least = block->begin_least = INT32_MAX;
    block->begin_most = block->near_most = block->end_most = 0;
    for (int64_t i = 0; i < KVC_TILE; i++) {
        const int64_t position = length - args->S + (block->first + i) % args->S;
        int64_t near = 0, begin = 0, end = 0;
        if (i < block->count && position >= 0) {
            end = args->causal ? position + 1 : length;
            if (args->window && args->complement) {
                begin = args->sinks;
                end = max_of(position - args->window + 1, begin);
            } else if (args->window) {
                near = min_of(args->sinks, end);
                begin = max_of(position - args->window + 1, 0);
            }
        }
        block->lanes.near[i] = (int32_t)near;
        block->lanes.begin[i] = (int32_t)min_of(begin, INT32_MAX);
        block->lanes.end[i] = (int32_t)min_of(end, INT32_MAX);
        block->lanes.own[i] = (int32_t)position;
        if (i >= block->count) continue;
        block->near_least = min_of(block->near_least, near);
        block->near_most = max_of(block->near_most, near);
        block->begin_most = max_of(block->begin_most, begin);
        block->end_least = min_of(block->end_least, end);
        if (begin < end) {
            block->begin_least = min_of(block->begin_least, begin);
            block->end_most = max_of(block->end_most, end);
        }
    }
}

/* Walks the steps of keys that a block sees: keys [t, t + n), hide if some query does not see all of them. Start with
 * t = n = 0; returns 0 behind the last. */
static int next_keys(const query_block *block, int64_t most, int64_t *t, int64_t *n, int *hide) {
    *t += *n;
    if (*t >= block->near_most) *t = max_of(*t, max_of(block->begin_least, block->near_most));
    const int64_t end = *t < block->near_most ? block->near_most : block->end_most;
    *n = min_of(most, end - *t);
    if (*n <= 0) return 0;
    *hide = *t + *n > block->near_least && (*t < block->begin_most || *t + *n > block->end_least);
    return 1;
}

/* Element (b, h, s) rows of a block as columns [D, KVC_TILE], times scale; zeros in unused lanes. */
static void columns_of(const kvc_attention_args *args, const query_block *block, const kvc_view *view, float scale,
                       float *columns) {
    const kvc_simd *simd = kvc_simd_table();
    _Alignas(64) float rows[KVC_TILE * KVC_MAX_HEAD_DIM];
    for (int64_t i = 0; i < block->count; i++) {
        int64_t h, s;
        query_at(args, block, i, &h, &s);
        float *row = rows + i * args->D;
        simd->load[view->dtype](row, view_at(view, block->b, h, s, 0), args->D);
        for (int64_t d = 0; d < args->D; d++) row[d] *= scale;
    }
    simd->transpose(columns, rows, args->D, block->count, args->D);
}

static const float *bias_at(const kvc_attention_args *args, int64_t b, int64_t g, int64_t t) {
    return args->key_bias ? args->key_bias + (b * args->Hkv + g) * args->T + t : NULL;
}

/* ---- forward ---- */

/* Rows t[0..n) of keys or values as float32 [n, D]. */
static void gather_rows(const kvc_attention_args *args, const kvc_view *view, int64_t b, int64_t g, const int64_t *t,
                        int64_t n, float *rows) {
    const kvc_simd *simd = kvc_simd_table();
    for (int64_t i = 0; i < n; i++) simd->load[view->dtype](rows + i * args->D, view_at(view, b, g, t[i], 0), args->D);
}

/* The keys that every query of a block sees and none has as its own, from the first that any sees on, where a share of
 * them is hidden by a bias of -inf, as DMC merges and DMS drops them: attends to the others, and returns the key behind
 * them. Else 0. x, rows: scratch. */
static int64_t forward_shared(const kvc_attention_args *args, int64_t g, const query_block *block, kvc_lanes_state *state,
                              float *x, float *rows) {
    if (!args->key_bias || (args->window && !args->complement)) return 0;
    const float *bias = bias_at(args, block->b, g, 0);
    const int64_t first = args->complement ? args->sinks : 0;
    int64_t until = block->end_least, hidden = 0, n = 0, kept[KVC_LANES_KEYS];
    float kept_bias[KVC_LANES_KEYS];
    for (int64_t i = 0; i < block->count; i++) until = min_of(until, max_of(block->lanes.own[i], 0));
    for (int64_t t = first; t < until; t++) hidden += bias[t] == -INFINITY;
    if (hidden * 8 <= until - first) return 0; /* gathering would cost what it saves */
    for (int64_t t = first; t < until; t++) {
        if (bias[t] != -INFINITY) {
            kept[n] = t;
            kept_bias[n++] = bias[t];
        }
        if (n == 0 || (n < kvc_lanes_keys(args->D) && t + 1 < until)) continue;
        gather_rows(args, &args->k, block->b, g, kept, n, rows);
        kvc_lanes_logits(state, &block->lanes, rows, args->D, INT32_MIN, n, kept_bias, 0, x); /* no query's own */
        kvc_lanes_weigh(state, x, n);
        gather_rows(args, &args->v, block->b, g, kept, n, rows);
        kvc_lanes_add(state, x, rows, args->D, n);
        n = 0;
    }
    return until;
}

static void forward_block(const kvc_attention_args *args, int64_t g, const query_block *block) {
    const int64_t D = args->D, b = block->b;
    _Alignas(64) float q[KVC_TILE * KVC_MAX_HEAD_DIM], sums[KVC_TILE * KVC_MAX_HEAD_DIM];
    _Alignas(64) float rows[KVC_LANES_FLOATS], x[KVC_LANES_KEYS * KVC_TILE];
    kvc_lanes_state state = {.simd = kvc_simd_table(), .queries = block->count, .D = D, .q = q, .sums = sums,
                             .softcap = args->softcap};
    columns_of(args, block, &args->q, args->scale, q);
    kvc_lanes_begin(&state);
    int64_t t = forward_shared(args, g, block, &state, x, rows), n = 0;
    int hide = 0;
    while (next_keys(block, kvc_lanes_keys(D), &t, &n, &hide)) {
        int64_t stride;
        const float *k = kvc_lanes_rows(&args->k, b, g, t, n, D, rows, &stride);
        kvc_lanes_logits(&state, &block->lanes, k, stride, t, n, bias_at(args, b, g, t), hide, x);
        kvc_lanes_weigh(&state, x, n);
        const float *v = kvc_lanes_rows(&args->v, b, g, t, n, D, rows, &stride);
        kvc_lanes_add(&state, x, v, stride, n);
    }
    for (int64_t i = 0; i < block->count; i++) {
        int64_t h, s;
        query_at(args, block, i, &h, &s);
        float norm = state.norm[i], max = state.max[i], keep = 1.0f;
        if (block->lanes.own[i] >= 0) keep = join_sink(sink_of(args->sink_logits, h), &max, &norm);
        const float inverse = norm == 0.0f ? 0.0f : keep / norm;
        float *row = sums + i * D;
        for (int64_t d = 0; d < D; d++) row[d] = norm == 0.0f ? 0.0f : row[d] * inverse;
        state.simd->store[args->out.dtype](view_at(&args->out, b, h, s, 0), row, D);
        args->lse[(b * args->Hq + h) * args->S + s] = norm == 0.0f ? -INFINITY : max + logf(norm);
    }
}

static void forward_range(int64_t begin, int64_t end, void *context) {
    const kvc_attention_args *args = context;
    const int64_t blocks = blocks_of(args);
    for (int64_t item = begin; item < end; item++) {
        query_block block;
        const int64_t row = item / blocks;
        block_at(args, row / args->Hkv, row % args->Hkv, item % blocks, &block);
        if (block.count) forward_block(args, row % args->Hkv, &block);
    }
}

static kvc_status check(const kvc_attention_args *args) {
    if (args->B < 0 || args->Hq < 0 || args->Hkv < 0 || args->S < 0 || args->T < 0) return KVC_BAD_SIZE;
    if (args->D < 1 || args->D > KVC_MAX_HEAD_DIM || args->S > args->T || args->T >= INT32_MAX) return KVC_BAD_SIZE;
    if (args->Hkv ? args->Hq % args->Hkv != 0 : args->Hq != 0) return KVC_BAD_SIZE;
    if (args->window < 0 || args->sinks < 0 || (args->window && !args->causal)) return KVC_BAD_SIZE;
    if (args->complement && !args->window) return KVC_BAD_SIZE;
    if (!scale_is_good(args->scale, args->softcap)) return KVC_BAD_SIZE;
    const kvc_dtype dtype = args->q.dtype;
    if (!dtype_known(dtype) || args->k.dtype != dtype || args->v.dtype != dtype || args->out.dtype != dtype) {
        return KVC_BAD_DTYPE;
    }
    const int empty = !args->B || !args->Hq || !args->S;
    if (!empty && (!args->q.data || !args->k.data || !args->v.data || !args->out.data || !args->lse)) {
        return KVC_NULL_POINTER;
    }
    for (int64_t b = 0; args->lengths && b < args->B; b++) {
        if (args->lengths[b] < 0 || args->lengths[b] > args->T) return KVC_BAD_INDEX;
    }
    return KVC_OK;
}

kvc_status kvc_attention(const kvc_attention_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    const kvc_status status = check(args);
    if (status != KVC_OK || !args->B || !args->Hq || !args->S) return status;
    run_parallel(parallel_for, args->B * args->Hkv * blocks_of(args), 1, forward_range, (void *)(uintptr_t)args);
    return KVC_OK;
}

/* ---- backward ---- */

typedef struct {
    const kvc_attention_backward_args *args;
    const kvc_simd *simd;
    int64_t blocks, shares;
    int64_t share_floats; /* scratch of one share of one KV head: dk [T, D], dv [T, D], dkey_bias [T] */
} backward_job;

static backward_job backward_job_of(const kvc_attention_backward_args *args) {
    const kvc_attention_args *forward = &args->forward;
    backward_job job = {.args = args, .simd = kvc_simd_table(), .blocks = blocks_of(forward)};
    job.shares = min_of(ceil_div(FEWEST_ITEMS, forward->B * forward->Hkv), job.blocks);
    job.share_floats = ceil_div(forward->T * (2 * forward->D + 1), 16) * 16;
    return job;
}

int64_t kvc_attention_backward_scratch_bytes(const kvc_attention_backward_args *args) {
    if (!args || args->forward.B <= 0 || args->forward.Hkv <= 0 || args->forward.S <= 0 || args->forward.D <= 0 ||
        args->forward.Hq < args->forward.Hkv || args->forward.T < 0) {
        return 0;
    }
    const backward_job job = backward_job_of(args);
    return args->forward.B * args->forward.Hkv * job.shares * job.share_floats * (int64_t)sizeof(float);
}

static float *share_at(const backward_job *job, int64_t row, int64_t share) {
    return (float *)job->args->scratch + (row * job->shares + share) * job->share_floats;
}

static float lse_of(const kvc_attention_args *args, const query_block *block, int64_t h, int64_t s) {
    return args->lse[(block->b * args->Hq + h) * args->S + s];
}

/* Rows of a block's queries as float32 [count, D]: the array itself where it can be read in place. blind: some of the
 * queries see nothing; their rows are zeros, whatever the array holds there. */
static const float *block_rows_of(const kvc_attention_args *args, const query_block *block, const kvc_view *view,
                                  int blind, float *rows, int64_t *stride) {
    int64_t h, s;
    query_at(args, block, 0, &h, &s);
    if (!blind && s + block->count <= args->S) {
        return kvc_lanes_rows(view, block->b, h, s, block->count, args->D, rows, stride);
    }
    for (int64_t i = 0; i < block->count; i++) {
        query_at(args, block, i, &h, &s);
        float *row = rows + i * args->D;
        if (blind && lse_of(args, block, h, s) == -INFINITY) memset(row, 0, (size_t)args->D * sizeof(float));
        else kvc_simd_table()->load[view->dtype](row, view_at(view, block->b, h, s, 0), args->D);
    }
    *stride = args->D;
    return rows;
}

/* <dout, out> - dlse of a query; ds are differences from it. */
static double delta_of(const kvc_attention_backward_args *args, int64_t b, int64_t h, int64_t s, const float *dout) {
    const kvc_attention_args *forward = &args->forward;
    float out[KVC_MAX_HEAD_DIM];
    kvc_simd_table()->load[forward->out.dtype](out, view_at(&forward->out, b, h, s, 0), forward->D);
    double sum = args->dlse ? -(double)args->dlse[(b * forward->Hq + h) * forward->S + s] : 0.0;
    for (int64_t d = 0; d < forward->D; d++) sum += (double)dout[d] * (double)out[d];
    return sum;
}

static void backward_block(const backward_job *job, int64_t g, const query_block *block, float *dk, float *dv,
                           float *dbias) {
    const kvc_attention_backward_args *args = job->args;
    const kvc_attention_args *forward = &args->forward;
    const int64_t D = forward->D, b = block->b, count = block->count;
    _Alignas(64) float q[KVC_TILE * KVC_MAX_HEAD_DIM], dout[KVC_TILE * KVC_MAX_HEAD_DIM];
    _Alignas(64) float q_copy[KVC_TILE * KVC_MAX_HEAD_DIM], dout_copy[KVC_TILE * KVC_MAX_HEAD_DIM];
    _Alignas(64) float dq[KVC_TILE * KVC_MAX_HEAD_DIM], base[KVC_TILE], delta[KVC_TILE];
    _Alignas(64) float k_copy[KVC_LANES_FLOATS], v_copy[KVC_LANES_FLOATS];
    _Alignas(64) float p[KVC_LANES_KEYS * KVC_TILE], ds[KVC_LANES_KEYS * KVC_TILE], slope[KVC_LANES_KEYS * KVC_TILE];
    const kvc_lanes_state state = {.simd = job->simd, .queries = count, .D = D, .q = q, .softcap = forward->softcap,
                                   .slope = slope};
    int blind = 0;
    for (int64_t i = 0; i < KVC_TILE; i++) {
        base[i] = INFINITY; /* an unused lane, and a query that saw nothing: weights 0 */
        delta[i] = 0.0f;
        if (i >= count) continue;
        int64_t h, s;
        query_at(forward, block, i, &h, &s);
        if (lse_of(forward, block, h, s) == -INFINITY) blind = 1;
        else base[i] = lse_of(forward, block, h, s);
    }
    int64_t q_stride, dout_stride;
    const float *q_rows = block_rows_of(forward, block, &forward->q, blind, q_copy, &q_stride);
    const float *dout_rows = block_rows_of(forward, block, &args->dout, blind, dout_copy, &dout_stride);
    columns_of(forward, block, &forward->q, forward->scale, q);
    job->simd->transpose(dout, dout_rows, dout_stride, count, D);
    for (int64_t i = 0; i < count; i++) {
        if (base[i] == INFINITY) continue;
        int64_t h, s;
        query_at(forward, block, i, &h, &s);
        delta[i] = (float)delta_of(args, b, h, s, dout_rows + i * dout_stride);
    }
    memset(dq, 0, (size_t)(count * D) * sizeof(float));
    int64_t t = 0, n = 0;
    int hide = 0;
    while (next_keys(block, kvc_lanes_keys(D), &t, &n, &hide)) {
        int64_t k_stride, v_stride;
        const float *k = kvc_lanes_rows(&forward->k, b, g, t, n, D, k_copy, &k_stride);
        const float *v = kvc_lanes_rows(&forward->v, b, g, t, n, D, v_copy, &v_stride);
        kvc_lanes_logits(&state, &block->lanes, k, k_stride, t, n, bias_at(forward, b, g, t), hide, p);
        job->simd->lanes_exp(p, n, base);
        kvc_lanes_product(job->simd, ds, v, v_stride, dout, n, D);
        job->simd->gemm(dv + t * D, D, p, KVC_TILE, 1, dout_rows, dout_stride, n, D, count, 1);
        job->simd->lanes_gradient(ds, p, n, delta);
        if (dbias) job->simd->lanes_total(dbias + t, ds, n, (int32_t)t, &block->lanes);
        if (forward->softcap > 0.0f) job->simd->multiply(ds, slope, n * KVC_TILE);
        job->simd->gemm(dk + t * D, D, ds, KVC_TILE, 1, q_rows, q_stride, n, D, count, 1);
        job->simd->gemm(dq, D, ds, 1, KVC_TILE, k, k_stride, count, D, n, 1);
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t h, s;
        query_at(forward, block, i, &h, &s);
        for (int64_t d = 0; d < D; d++) dq[i * D + d] *= forward->scale;
        job->simd->store[args->dq.dtype](view_at(&args->dq, b, h, s, 0), dq + i * D, D);
    }
}

static void backward_range(int64_t begin, int64_t end, void *context) {
    const backward_job *job = context;
    const kvc_attention_args *forward = &job->args->forward;
    for (int64_t item = begin; item < end; item++) {
        const int64_t row = item / job->shares, share = item % job->shares;
        float *dk = share_at(job, row, share), *dv = dk + forward->T * forward->D, *dbias = dv + forward->T * forward->D;
        memset(dk, 0, (size_t)job->share_floats * sizeof(float));
        for (int64_t index = share; index < job->blocks; index += job->shares) {
            query_block block;
            block_at(forward, row / forward->Hkv, row % forward->Hkv, index, &block);
            if (block.count) backward_block(job, row % forward->Hkv, &block, dk, dv, job->args->dkey_bias ? dbias : NULL);
        }
    }
}

/* Joins the shares of keys [begin, end) of the list of all rows' keys. */
static void join_range(int64_t begin, int64_t end, void *context) {
    const backward_job *job = context;
    const kvc_attention_backward_args *args = job->args;
    const int64_t T = args->forward.T, D = args->forward.D;
    for (int64_t item = begin; item < end; item++) {
        const int64_t row = item / T, t = item % T, b = row / args->forward.Hkv, g = row % args->forward.Hkv;
        float sums[2][KVC_MAX_HEAD_DIM] = {{0}}, bias = 0.0f;
        for (int64_t share = 0; share < job->shares; share++) {
            const float *dk = share_at(job, row, share), *dv = dk + T * D;
            for (int64_t d = 0; d < D; d++) sums[0][d] += dk[t * D + d];
            for (int64_t d = 0; d < D; d++) sums[1][d] += dv[t * D + d];
            bias += dv[T * D + t];
        }
        for (int64_t d = 0; d < D; d++) sums[0][d] *= args->forward.scale;
        job->simd->store[args->dk.dtype](view_at(&args->dk, b, g, t, 0), sums[0], D);
        job->simd->store[args->dv.dtype](view_at(&args->dv, b, g, t, 0), sums[1], D);
        if (args->dkey_bias) args->dkey_bias[item] = bias;
    }
}

/* The sinks' gradients of query heads [begin, end): each is summed by one thread. */
static void sinks_range(int64_t begin, int64_t end, void *context) {
    const kvc_attention_backward_args *args = ((const backward_job *)context)->args;
    const kvc_attention_args *forward = &args->forward;
    float dout[KVC_MAX_HEAD_DIM];
    for (int64_t h = begin; h < end; h++) {
        double sum = 0.0;
        const float sink = forward->sink_logits[h];
        for (int64_t i = 0; i < forward->B * forward->S && sink != -INFINITY; i++) {
            const int64_t b = i / forward->S, s = i % forward->S;
            const float lse = forward->lse[(b * forward->Hq + h) * forward->S + s];
            if (lse == -INFINITY) continue; /* padding */
            kvc_simd_table()->load[args->dout.dtype](dout, view_at(&args->dout, b, h, s, 0), forward->D);
            sum -= (double)expf(sink - lse) * delta_of(args, b, h, s, dout);
        }
        args->dsink_logits[h] = (float)sum;
    }
}

kvc_status kvc_attention_backward(const kvc_attention_backward_args *args, kvc_parallel_for parallel_for) {
    if (!args) return KVC_NULL_POINTER;
    const kvc_attention_args *forward = &args->forward;
    const kvc_status status = check(forward);
    if (status != KVC_OK) return status;
    const kvc_dtype dtype = forward->q.dtype;
    if (args->dout.dtype != dtype || args->dq.dtype != dtype || args->dk.dtype != dtype || args->dv.dtype != dtype) {
        return KVC_BAD_DTYPE;
    }
    const int64_t keys = forward->B * forward->Hkv * forward->T;
    const int empty = !forward->B || !forward->Hq || !forward->S;
    if (keys && (!args->dk.data || !args->dv.data)) return KVC_NULL_POINTER;
    if (!empty && (!args->dq.data || !args->dout.data)) return KVC_NULL_POINTER;
    if (args->dsink_logits && !forward->sink_logits) return KVC_NULL_POINTER;
    backward_job job = {.args = args, .simd = kvc_simd_table()}; /* no shares: without queries every gradient is 0 */
    if (!empty) {
        if (!args->scratch) return KVC_NULL_POINTER;
        job = backward_job_of(args);
        run_parallel(parallel_for, forward->B * forward->Hkv * job.shares, 1, backward_range, &job);
    }
    run_parallel(parallel_for, keys, 64, join_range, &job);
    if (args->dsink_logits) run_parallel(parallel_for, forward->Hq, 1, sinks_range, &job);
    return KVC_OK;
}
