"""Successor: keep what the token before it would find again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.softmax import Softmax
from .base import Candidates, Pruner


@dataclass(frozen=True)
class Successor(Pruner):
    """Keeps keys by the attention that the token before each would pay to it from behind the text: Replay's cheap part.

    What copies attends, at a token, to what followed it when it came before. So of a second reading one pair for each
    query is asked: query t, at its place in a chunk behind the text, and key t + 1, against all that query t attended
    to when it was read: score[t + 1] = sigmoid(logit - L_t), L_t the logarithm of what query t's own softmax divided
    by; maximum over the query heads of a KV head. One product per token and head, where the prompt's attention says
    L_t; elsewhere (further calls) L_t costs an attention of the call.
    The first token of a further call has no query before it in that call: it gets the score of the one that follows.
    While decoding it has. A key keeps the highest score that it ever had, 4 bytes in the cache.
    chunk, last: as in Replay. num_sink_tokens: the first token is nobody's successor.
    Source: ours; the attention of induction heads (Olsson et al., In-context Learning and Induction Heads).
    """

    chunk: int = 256
    last: int | None = None
    num_sink_tokens: int = 4
    accumulates = True
    overlap = 1
    window = 1
    by_head = True
    one_frame = True
    uses_sums = True

    def __post_init__(self) -> None:
        self._check(chunk=1, last=1)

    def recent(self, keep: int, chunk_length: int) -> int:
        return self._most_recent(self.last, 16, keep)

    def positions_behind(self, tokens: int) -> int:
        return min(self.chunk, tokens)

    def carried(self, received: Tensor, votes: Tensor) -> Tensor:
        return torch.maximum(received, votes)

    def votes(self, candidates: Candidates) -> Tensor:
        S, heads, D = candidates.chunk_length, candidates.heads, candidates.keys.shape[3]
        out = torch.zeros(heads, candidates.count, device=candidates.keys.device)
        if S < 2:
            return out
        slots = candidates.own_slots()
        own = candidates.keys[0].gather(1, slots[..., None].expand(-1, -1, D)).float()
        sums = candidates.log_sums()[0].unflatten(0, (heads, -1))
        scores = torch.zeros(heads, S, device=out.device)
        for first in range(0, S - 1, self.chunk):
            end = min(first + self.chunk, S - 1)
            queries = candidates.again(first, end, self.chunk)[0].unflatten(0, (heads, -1)).float()
            logits = _logits((queries * own[:, None, first + 1 : end + 1]).sum(-1), candidates.softmax)
            scores[:, first + 1 : end + 1] = torch.sigmoid(logits - sums[:, :, first:end]).amax(1)
        if candidates.position > S:  # the token before the first one was in an earlier call
            known = None if candidates.received is None else candidates.received.gather(1, slots[:, :1])
            scores[:, :1] = scores[:, 1:2] if known is None else torch.where(known > 0, known, scores[:, 1:2])
        return out.scatter(1, slots, scores)

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        return self.votes(candidates) if candidates.received is None else candidates.received


def _logits(products: Tensor, softmax: Softmax) -> Tensor:
    logits = softmax.scale * products
    return logits if softmax.softcap is None else softmax.softcap * torch.tanh(logits / softmax.softcap)
