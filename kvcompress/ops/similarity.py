"""How differently the layers of a model attend."""

from __future__ import annotations

import torch
from torch import Tensor

from ..support.checks import dense_last, need, need_device, need_heads, need_integer, need_scale, need_softcap
from .native import MAX_HEAD_DIM, native

_MOST = (1 << 31) - 1
_MOST_CUDA_LAYERS = 188


def layer_similarity(
    queries: Tensor,
    keys: Tensor,
    *,
    scale: float | None = None,
    sinks: int = 0,
    recent: int = 0,
    softcap: float | None = None,
) -> tuple[Tensor, int]:
    """Jensen-Shannon divergence of the attention rows of all pairs of layers, summed over the last queries of a text.

    queries: [L, Hq, S, D] rotated, the last S tokens, of every layer. keys: [L, Hkv, T, D] rotated, S <= T. scale:
    factor of the logits, above 0; None = 1/sqrt(D). A query at position i attends to the keys sinks <= t <= i - recent;
    0 and 0: to all up to itself. The rest is renormalised; a query without such keys does not count. A learned sink
    logit, which weighs all keys of a query alike, would change nothing: there is no such argument.
    softcap: logits become softcap * tanh(logit / softcap); None = as they are.
    Returns (float64 [Hq, L, L], queries that count): the sum over them of the divergence in bits, 0..1 each, symmetric,
    0 on the diagonal and wherever rows are equal; both add up over texts. NaN logits make the sums of their head's
    pairs with their layer NaN. Memory: two numbers per row and 64 keys, and the probabilities of some of the keys for
    one KV head, never all of them. The same bits for any number of threads. Without gradient.
    Raises ValueError for wrong shapes, dtypes, scale, softcap, sinks or recent, and on CUDA for more than 188 layers or
    a head dim above 512.
    Source: PoD, section 2.2.
    """
    L, Hq, S, D, Hkv, T = need_heads(queries, keys, "[L, Hq, S, D]", "[L, Hkv, T, D]")
    need(1 <= S <= T, f"queries must be between 1 and the keys' {T} tokens, got {S}")
    need_integer("sinks", sinks, 0, _MOST)
    need_integer("recent", recent, 0, _MOST)
    scale = need_scale(scale, D)
    need(scale > 0, f"scale must be above 0, got {scale}")
    cap = need_softcap(softcap)
    need_device(queries, keys=keys)
    if queries.is_cuda:
        need(L <= _MOST_CUDA_LAYERS, f"queries on CUDA must have at most {_MOST_CUDA_LAYERS} layers, got {L}")
        need(D <= MAX_HEAD_DIM, f"queries on CUDA must have a head dim of at most {MAX_HEAD_DIM}, got {D}")
    sums = native.layer_similarity(dense_last(queries.detach()), dense_last(keys.detach()), scale, sinks, recent, cap)
    return sums, max(0, min(S, T - sinks - recent))


@torch.library.register_fake("kvcompress::layer_similarity")
def _(queries, *rest):  # type: ignore[no-untyped-def]
    L, Hq = queries.shape[:2]
    return queries.new_empty((Hq, L, L), dtype=torch.float64)
