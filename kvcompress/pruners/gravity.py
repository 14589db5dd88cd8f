"""CGE: evict by attention scores with the centers of gravity masked out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from .base import Candidates, Pruner


@dataclass(frozen=True)
class CenterOfGravity(Pruner):
    """Keeps a compression window of old tokens, chosen by masked attention scores, and a near window of the last ones.

    compressed_length, near_length: tokens of the two windows; their sum is kept where the cache is given no keep,
    and any other is divided as they are. head_length: first tokens, the head gravity. order: "global" (tail
    first: the near window is left out of the softmax, so rows that look at the head count little) or "local" (head
    first: the head is left out of it, so rows that look at the near window count little). keep_head: the head always
    stays, inside the compression window; False is the literal algorithm, which loses it at the first compression.
    window: queries that score, at most near_length; fewer where the call had fewer, and where a budget below the sum of
    both makes the near window shorter (of a budget of b it has b * near_length / (compressed_length + near_length)).
    heads: "per_kv_head" or "shared" (one set for all KV heads of a layer).
    score[j] = sum over the queries and the query heads of a KV head of exp(a[i,j]) / sum over unmasked l exp(a[i,l]).
    With a guide, the guide's tokens are the queries.
    The paper's text and the comments of its Algorithm 1 give the two orders opposite names; these follow the text.
    Raises ValueError for a field out of range. Source: IntelLLM, section 4.3 and Algorithm 1.
    """

    compressed_length: int = 2048
    near_length: int = 2048
    head_length: int = 4
    order: str = "global"
    keep_head: bool = True
    window: int = 64
    heads: str = "per_kv_head"
    uses_guide = True
    uses_keep = True

    def __post_init__(self) -> None:
        self._check(compressed_length=0, near_length=1, head_length=0, window=1)
        if self.head_length > self.compressed_length:
            raise ValueError(
                f"head_length must be between 0 and compressed_length = {self.compressed_length}, got "
                f"{self.head_length}"
            )
        if self.window > self.near_length:
            raise ValueError(f"window must be between 1 and near_length = {self.near_length}, got {self.window}")
        for name, choices in (("order", ("local", "global")), ("heads", ("per_kv_head", "shared"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")

    @property
    def num_sink_tokens(self) -> int:  # type: ignore[override]
        return self.head_length if self.keep_head else 0

    @property
    def default_keep(self) -> int:  # type: ignore[override]
        """Tokens of both windows."""
        return self.compressed_length + self.near_length

    def recent(self, keep: int, chunk_length: int) -> int:
        return -(-keep * self.near_length // self.default_keep)  # at least 1

    @property
    def at_once(self) -> int:  # type: ignore[override]
        """Those that look at the others."""
        return self.window

    @property
    def by_head(self) -> bool:  # type: ignore[override]
        return self.heads == "per_kv_head"

    def with_sinks(self, tokens: int) -> CenterOfGravity:
        return replace(self, head_length=tokens)

    def lost(self) -> int:
        return 0 if self.keep_head else self.head_length

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        guided = candidates.guide_length > 0
        near = min(self.recent(keep, candidates.chunk_length), candidates.count)
        window = candidates.guide_length if guided else min(self.window, near, candidates.chunk_length)
        head = self.head_length if self.keep_head or candidates.whole else 0
        scores = candidates.attention(
            window,
            skip_last=min(near, candidates.count - 1),
            mask_first=head if self.order == "local" else 0,
            mask_last=near if self.order == "global" else 0,
        )
        return scores.sum(0, keepdim=True).expand_as(scores) if self.heads == "shared" else scores
