"""Replay: keep what a second reading of the same text would attend to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .base import Candidates, Pruner

_TOGETHER = 4096  # tokens whose keys and queries are rotated in one call


@dataclass(frozen=True)
class Replay(Pruner):
    """Keeps keys by the most attention that they would get if the text were read once more, behind itself.

    A model that copies or answers finds a key by what stood before it, as it would in a second reading. That reading is
    not done: the queries of the first one are rotated again, to positions behind the text, and asked there. They come
    in chunks: a query's softmax is over the whole text, at a distance, and over its own chunk up to itself, which the
    second reading would have before it; so the distance never passes the text's length + chunk. A key's score is the
    maximum over all queries and the query heads of a KV head: heads that look back at one place only, as those that
    copy do, count as much as those that look everywhere. No question need be known, and nothing is trained.
    In further calls (chunks of a prompt, turns, decoded tokens in groups) the queries of the call are asked, about what
    is held then; a key keeps the highest score that it ever had, 4 bytes in the cache.
    chunk: queries that are asked together. last: most recent tokens that always stay; None = a quarter of what stays,
    at most 16.
    Cost: the products of one causal attention of the call, in the score kernel. A call of several tokens needs `chunk`
    positions behind it that the model knows, but where frequencies follow the length (dynamic).
    Source: ours; KVzip scores by a second reading that is done. reference.replay_scores is the definition.
    """

    chunk: int = 256
    last: int | None = None
    num_sink_tokens: int = 0
    accumulates = True
    window = 1
    by_head = True
    one_frame = True

    def __post_init__(self) -> None:
        self._check(chunk=1, last=0)

    def recent(self, keep: int, chunk_length: int) -> int:
        return self._most_recent(self.last, 16, keep)

    def positions_behind(self, tokens: int) -> int:
        return min(self.chunk, tokens)

    def carried(self, received: Tensor, votes: Tensor) -> Tensor:
        return torch.maximum(received, votes)

    def votes(self, candidates: Candidates) -> Tensor:
        return asked_again(candidates, self.chunk, "max")

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        return self.votes(candidates) if candidates.received is None else candidates.received


def asked_again(candidates: Candidates, chunk: int, reduce: str) -> Tensor:
    """float32 [Hkv, count]: attention from the call's queries behind the text, `chunk` of them at a time as Replay has
    it, over all of them and the query heads of a KV head: the maximum, or the sum. Zeros where there are no queries,
    or no rotation to move them by."""
    S, rotary = candidates.chunk_length, candidates.key_rotary or candidates.rotary
    out = torch.zeros(candidates.heads, candidates.count, device=candidates.keys.device)
    if S == 0 or rotary is None:
        return out
    keys, heads, D = candidates.keys[0], candidates.heads, candidates.keys.shape[3]
    most, bound, count = min(chunk, S), candidates.position + min(chunk, S), candidates.count
    ends = None if candidates.lengths is None else candidates.lengths[:, None].long()
    if ends is None:
        own, room = keys[:, count - S : count], keys.new_empty(heads, count + most, D)
    else:
        own = keys.gather(1, candidates.own_slots()[..., None].expand(-1, -1, D))
        room = keys.new_zeros(heads, count + most, D)
    # the second reading's chunk follows the text
    room[:, : keys.shape[1]] = keys[:, : count + most]
    shortest = candidates.count if candidates.shortest is None else candidates.shortest
    together = chunk * max(_TOGETHER // chunk, 1)
    for first in range(0, S, together):
        end = min(first + together, S)
        # of each token, to the place of its chunk behind the text
        distance = candidates.distances(first, end, chunk)
        near = rotary.move_on(own[None, :, first:end], distance, bound, candidates.settled)[0]
        queries = candidates.again(first, end, chunk)
        for part in range(0, end - first, chunk):
            n = min(chunk, end - first - part)
            chunk_keys = near[:, part : part + n]
            if ends is None:
                room[:, count : count + n] = chunk_keys
            else:
                slots = (torch.arange(n, device=keys.device) + ends).expand(heads, -1)
                room.scatter_(1, slots[..., None].expand(-1, -1, D), chunk_keys)
            asked = replace(  # the chunk is to the text what a guide is
                candidates, queries=queries[:, :, part : part + n], keys=room[None, :, : count + n],
                guide_length=n, shortest=shortest + n,
                lengths=None if candidates.lengths is None else candidates.lengths + n,
            )  # fmt: skip
            found = asked.attention(n, reduce=reduce)
            out = torch.maximum(out, found) if reduce == "max" else out + found
    return out
