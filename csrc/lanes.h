/* One step of attention for up to KVC_TILE queries that lie side by side in the lanes of the vectors.
 *
 * Logits are made as [keys, KVC_TILE]: maximum, exponential and sum then run along the keys, lane by lane, and keys and
 * values are read as they lie in memory; only the queries are transposed, once.
 */
#ifndef KVC_LANES_H
#define KVC_LANES_H
#include "kernel.h"

enum {
    KVC_LANES_KEYS = 128,       /* keys per step at most */
    KVC_LANES_FLOATS = 1 << 14  /* floats of a converted block of keys or values: 64 KiB */
};

/* queries: how many of the lanes are in use. q [D, KVC_TILE]: queries as columns, times the scale. sums [queries, D].
 * slope (NULL: not wanted): the derivatives of capped logits [keys, KVC_TILE]; written with a softcap alone. */
typedef struct {
    const kvc_simd *simd;
    int64_t queries, D;
    float *q, *sums, softcap, *slope;
    float max[KVC_TILE], norm[KVC_TILE];
} kvc_lanes_state;

/* Keys per step, so that a converted block fits KVC_LANES_FLOATS; D <= KVC_MAX_HEAD_DIM. */
static inline int64_t kvc_lanes_keys(int64_t D) {
    return D <= 128 ? KVC_LANES_KEYS : D <= 256 ? KVC_LANES_FLOATS / 256 : KVC_LANES_FLOATS / KVC_MAX_HEAD_DIM;
}

/* Empties the state. */
void kvc_lanes_begin(kvc_lanes_state *state);

/* x [n, KVC_TILE] = products of n rows of D floats, stride apart, and columns [D, KVC_TILE]. */
void kvc_lanes_product(const kvc_simd *simd, float *x, const float *rows, int64_t stride, const float *columns, int64_t n,
                       int64_t D);

/* x [n, KVC_TILE] = capped logits of keys [t, t + n), the first at k, k_stride floats apart: with bias (NULL: none) added where
 * the key is not the lane's own, and -inf where `hide` and the lane does not see the key. */
void kvc_lanes_logits(const kvc_lanes_state *state, const kvc_lanes *lanes, const float *k, int64_t k_stride, int64_t t,
                      int64_t n, const float *bias, int hide, float *x);

/* Joins logits x into max and norm, rescales sums, and leaves the weights in x; the values are still to be added. */
void kvc_lanes_weigh(kvc_lanes_state *state, float *x, int64_t n);

/* sums += weights x [n, KVC_TILE] of values, the first at v, v_stride floats apart. */
void kvc_lanes_add(const kvc_lanes_state *state, const float *x, const float *v, int64_t v_stride, int64_t n);

/* rows[j*D + d] = element (b, h, t + j, d) as float32, or the view's own rows if it is float32; returns the rows and their
 * distance. */
const float *kvc_lanes_rows(const kvc_view *view, int64_t b, int64_t h, int64_t t, int64_t n, int64_t D, float *rows,
                            int64_t *stride);
#endif
