"""The cache of models whose layers share distant keys (PoD), and of its baselines window attention and CLA."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..pod.config import PoDConfig
from ..pruners import Pruner
from .converted import ConvertedCache
from .distant import select_distant
from .pod_layer import Lead, PoDLayer


@dataclass(frozen=True)
class SkipShares:
    """Shares of what decoding did since the cache was new or reset, 0..1: followers = skipped of the followers' distant
    (query head, token) pairs; distant = skipped of all distant pairs; work = multiply-adds of attention, of those with
    tau=None. NaN where there were none."""

    followers: float
    distant: float
    work: float


class PoDCache(ConvertedCache):
    """The cache of a model converted to PoD, or to one of its baselines (config.kvcompress says which).

    PoD: every layer keeps all values; a KV head that leads itself keeps all keys, one that follows keeps those of the
    first tokens and of the recent ones and reads the distant ones of its lead. What a follower drops is gone: pages go
    back as soon as no query to come sees a key of theirs. Window attention: every head keeps what is near, keys and
    values. CLA: a follower keeps nothing and reads its lead's keys and values. Results are those of the model without a
    cache, however a prompt is divided into chunks or batches.

    config: the converted model's config. chunk_size: tokens that `prefill` reads at a time, None = the whole prompt.
    tau: a query head of a follower takes the near tokens alone, when one token is decoded, where they have at least
    this probability; None = the config's. Distant values that no query head of a KV head needs are not read;
    skip_shares() says how much that was. reuse: whether followers take over, when one token is decoded, the
    probabilities of distant tokens that their lead has computed, and read its keys no more; None = where that moves
    fewer bytes, and with tau.
    pruner, distant: after a prompt (and any other call of several tokens) each KV head keeps so many distant tokens,
    those that the pruner scores highest at the lead of their block, rounded up so that whole pages go; near tokens stay
    and later ones are added. SnapKV, for one; a pruner that sums up all queries' votes (H2O) is refused.
    page_size, max_pages, grow: see PoolSettings; keys have as many pages in each layer as values.
    A prompt of several chunks that finds no page leaves the cache incomplete: reset() it.
    Raises ValueError for settings out of range and for a config that is not of a converted model.
    Source: PoD, section 2.3.
    """

    title = "PoD"
    layers: list[PoDLayer]
    smaller = "PoDCache lets every token be seen; use shorter prompts"

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        page_size: int = 64,
        max_pages: int | None = None,
        grow: str = "double",
        chunk_size: int | None = None,
        tau: float | None = None,
        reuse: bool | None = None,
        pruner: Pruner | None = None,
        distant: int | None = None,
    ) -> None:
        if tau is not None and (not isinstance(tau, Real) or not 0 <= tau <= 1):
            raise ValueError(f"tau must be a number between 0 and 1 or None, got {tau!r}")
        if reuse not in (None, True, False):
            raise ValueError(f"reuse must be True, False or None, got {reuse!r}")
        if pruner is not None and (not isinstance(pruner, Pruner) or pruner.accumulates):
            raise ValueError(f"pruner must be a Pruner that needs the latest queries alone, got {pruner!r}")
        if (pruner is None) != (distant is None):
            raise ValueError(f"pruner and distant go together, got pruner={pruner!r} and distant={distant!r}")
        if distant is not None and (type(distant) is not int or distant < 0):
            raise ValueError(f"distant must be an integer of at least 0 or None, got {distant!r}")
        self.pruner, self.distant = pruner, distant
        self.leads: dict[int, Lead] = {}  # of the forward pass that is under way
        self.pairs = {"near": 0, "lead": 0, "follower": 0}  # (query head, token), counted with tau alone
        self.skipped_pairs: Tensor | None = None
        super().__init__(config, page_size, max_pages, grow, chunk_size)
        self.tau = self.pod.tau if tau is None else tau
        self.skips = self.pod.mode == "pod" and self.tau is not None and self.tau != 1
        if reuse is False and self.skips:
            raise ValueError(f"reuse must not be False with tau {self.tau}: the gate is known from what is reused")
        self.reuse = reuse
        if pruner is not None and distant is not None:
            self._check_pruner(pruner, distant)

    def _check_pruner(self, pruner: Pruner, distant: int) -> None:
        if self.pod.mode != "pod":
            raise ValueError(f"pruner must be None with mode {self.pod.mode!r}, which keeps no tokens of a lead alone")
        kept = pruner.recent(self.pod.window + distant, pruner.window or 1)
        if 0 < distant <= kept - self.pod.recent:
            raise ValueError(
                f"pruner must leave some of {distant} distant tokens to its scores: {type(pruner).__name__} keeps its "
                f"last {kept} tokens in any case, of which {self.pod.recent} are near; choose a smaller window, or a "
                "pruner that scores"
            )

    @property
    def pod(self) -> PoDConfig:
        return self.settings

    @staticmethod
    def parsed(saved: dict[str, Any]) -> PoDConfig:
        return PoDConfig.from_dict(saved)

    def _settings_of(self, config: Any) -> PoDConfig:
        settings: PoDConfig = super()._settings_of(config)
        self.query_heads = config.num_attention_heads
        settings.check_model(config)
        return settings

    def _new_layer(self, index: int, sliding_window: int | None) -> PoDLayer:
        return PoDLayer(self, index, sliding_window)

    def reuses(self, lead: int, keys: Tensor) -> bool:
        """Whether followers of a layer take over its probabilities. keys: [B, Hkv, S, D], any."""
        if self.reuse is not None or self.skips:
            return self.reuse is not False
        # what is written once and read by each follower, against the keys that each would read
        G = self.query_heads // keys.shape[1]
        leads = sum(a == lead for a in self.pod.lead[lead])
        followers = sum(a == lead for row in self.pod.lead[lead + 1 :] for a in row)
        return 4 * G * (leads + followers) < followers * keys.shape[3] * keys.element_size()

    @property
    def skipping(self) -> bool:
        """Whether the pass that is under way skips: one token of each sequence at most, which is not of a prompt."""
        return self.skips and self.step.columns == 1 and self.step.iteration is None

    def count(self, held: list[int], heads: int, skipped: Tensor | None) -> None:
        """Adds up what a step attends to in one layer: held tokens of each sequence by so many query heads; skipped:
        bool [B, heads, 1] in a follower, None in a lead."""
        if not self.skipping:
            return
        seen = [n * count for n, count in zip(held, self.step.counts, strict=True)]
        far = [max(n - self.pod.window, 0) for n in seen]
        self.pairs["near"] += heads * (sum(seen) - sum(far))
        self.pairs["lead" if skipped is None else "follower"] += heads * sum(far)
        if skipped is not None:
            counts = torch.tensor(far).to(skipped.device)[:, None, None]
            more = (skipped * counts).sum()
            self.skipped_pairs = more if self.skipped_pairs is None else self.skipped_pairs + more

    # ---- reading ----

    def begin_forward(self, decoder: Any, name: str, tokens: Tensor, attention_mask: Tensor | None) -> None:
        self.leads = {}
        super().begin_forward(decoder, name, tokens, attention_mask)

    def end_forward(self) -> None:
        self.leads = {}
        prompt = self.step.iteration is None and self.step.columns > 1
        if prompt:
            self._select()
        super().end_forward()
        if prompt and self.pruner is not None:
            self.fixed = self.seen  # what went cannot come back

    def end_prompt(self, columns: int) -> None:
        self._select()
        super().end_prompt(columns)

    def _select(self) -> None:
        if self.pruner is None or self.distant is None:
            return
        select_distant(self.layers, self.pruner, self.distant)
        for layer in self.layers:
            layer.recent = None

    def check_guide(self) -> None:
        raise ValueError(
            "guide is not supported by PoDCache, whose pruner looks at the prompt's last queries: put the question "
            "at the end of the prompt"
        )

    def reset(self) -> None:
        self.leads = {}
        self.pairs, self.skipped_pairs = dict.fromkeys(self.pairs, 0), None
        super().reset()

    def activate_past_recording(self) -> None:
        if self.pod.mode != "cla" and (self.pod.followers or self.pod.mode == "window"):
            raise NotImplementedError(
                "assisted decoding is not supported by PoDCache: near keys that were dropped cannot come back"
            )
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back tokens; a negative number, as transformers has it. Not those of the prompt, and not so many that
        a near key that was dropped would be near again."""
        most = min(layer.removable() for layer in self.layers)
        if most < -tokens_to_remove <= self.seen - self.fixed:
            raise ValueError(
                f"crop can remove at most {most} tokens here, got {-tokens_to_remove}: earlier near keys were dropped"
            )
        super().crop(tokens_to_remove)

    # ---- what users ask ----

    def skip_shares(self) -> SkipShares:
        """What tau has saved since the cache was new or reset; nothing with 1. Raises ValueError without tau."""
        if self.tau is None or self.pod.mode != "pod":
            raise ValueError(
                f"tau must be given, and mode 'pod', for anything to be skipped, got {self.tau} and {self.pod.mode!r}"
            )
        if not self.skips:
            return SkipShares(0.0, 0.0, 1.0)
        near, lead, follower = (self.pairs[name] for name in ("near", "lead", "follower"))
        skipped = 0 if self.skipped_pairs is None else int(self.skipped_pairs)
        # a key is multiplied once and a value once; followers multiply distant values alone
        work = 2 * near + 2 * lead + follower
        return SkipShares(
            skipped / follower if follower else math.nan,
            skipped / (lead + follower) if lead + follower else math.nan,
            (work - skipped) / work if work else math.nan,
        )

    def stored_keys(self) -> list[list[list[int]]]:
        """Keys held per layer, sequence and KV head: [L][B][Hkv]; stored_lengths() says it of values."""
        return [layer.stored_keys() for layer in self.layers]
