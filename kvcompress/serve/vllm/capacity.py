"""What memory holds of requests under vLLM, before it starts: known by the model's config and the cache alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...caches.huge import gives_back
from ...support.units import size
from .engine import Engine

LENGTHS = (1024, 8192, 32768)  # tokens of prompts that are said to fit, as far as the model takes them


@dataclass(frozen=True)
class Capacity:
    """nbytes: of all requests' caches, on `device`. length: most tokens of a prompt and its answer. What lies beside
    vLLM's memory (a streaming cache's windows, and those of layers that see one) is counted as blocks of it. A GPU has
    that memory from the start, used or not, and so vLLM gets what is left there.

    Raises ValueError for memory that holds no request of that length.
    """

    engine: Engine
    nbytes: int
    length: int
    device: torch.device

    def __post_init__(self) -> None:
        shares, of = self._shares
        needed = -(-(self.engine.blocks_for(self.length) + 1) * self.block_nbytes * shares // of)
        if self.nbytes < needed:
            raise ValueError(
                f"memory must be at least {size(needed)} ({needed}B) for a request of {self.length:,} tokens, got "
                f"{size(self.nbytes)}: give more, or less of --max-model-len"
            )

    @property
    def block_nbytes(self) -> int:
        """Of a page of every KV head of every layer."""
        return self.engine.page_nbytes * self.engine.heads

    @property
    def vllm_nbytes(self) -> int:
        """Of its blocks."""
        shares, of = self._shares
        return self.nbytes * of // shares

    def at_once(self, tokens: int) -> int:
        """How many prompts of so many tokens fit at once; with a learned ratio, of which nothing is known before
        prompts are read, by the ratio that is expected."""
        return self.engine.fit(self.vllm_nbytes // self.block_nbytes - 1, tokens)

    def lines(self, name: str, address: str) -> list[str]:
        """What the command says. name: of the model."""
        engine = self.engine
        dtype = str(engine.dtype).removeprefix("torch.")
        known = sorted({min(tokens, self.length) for tokens in LENGTHS})
        fits = ", ".join(f"{self.at_once(tokens):,} of {tokens:,} tokens" for tokens in known)
        ratio = 1 / float(engine.bounds.share.mean()) if engine.bounds.learned else 1.0
        guess = f" where {ratio:g} tokens share a slot" if ratio > 1 else ""
        return [
            f"model    {name}: {dtype}, at most {self.length:,} tokens of a prompt and its answer",
            f"cache    {engine.settings.cache}: {size(self.nbytes)}, in blocks of {engine.block_size} tokens",
            f"requests prompts that fit at once{guess}: {fits}",
            f"server   vLLM's, at {address}",
        ]

    @property
    def _shares(self) -> tuple[int, int]:
        """What all takes, for so much of vLLM's memory."""
        if gives_back(self.device):
            return 1, 1
        return 2 * self.engine.heads - self.engine.bounds.rows, self.engine.heads
