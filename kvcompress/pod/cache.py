"""The cache of models whose layers share distant keys (PoD), and of its baselines window attention and CLA."""

from __future__ import annotations

from numbers import Real
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from ..caches.converted import ConvertedCache
from ..caches.passes import CachePass
from ..hf.config import decoder_config
from ..hf.method import Pass
from ..pruners.base import Pruner
from ..support.units import Tokens, tokens_of
from .config import PoDConfig
from .layer import PoDLayer
from .select import select_distant
from .skips import Skips, SkipShares


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
    page_size, max_pages, grow, dtype: see PoolSettings; keys have as many pages in each layer as values. With a dtype a
    prompt reads itself as it is and what came before as it is stored.
    A prompt of several chunks that finds no page leaves the cache incomplete: reset() it.
    Raises ValueError for settings out of range and for a config that is not of a converted model.
    Source: PoD, section 2.3.
    """

    title = "PoD"
    answers = (*ConvertedCache.answers, "kept_key_positions", "skip_shares", "stored_keys")

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        page_size: int = 16,
        max_pages: int | None = None,
        grow: str = "double",
        dtype: str | None = None,
        chunk_size: Tokens | None = None,
        tau: float | None = None,
        reuse: bool | None = None,
        pruner: Pruner | None = None,
        distant: Tokens | None = None,
    ) -> None:
        if tau is not None and (not isinstance(tau, Real) or not 0 <= tau <= 1):
            raise ValueError(f"tau must be a number between 0 and 1 or None, got {tau!r}")
        if reuse not in (None, True, False):
            raise ValueError(f"reuse must be True, False or None, got {reuse!r}")
        if pruner is not None and (not isinstance(pruner, Pruner) or pruner.accumulates):
            raise ValueError(f"pruner must be a Pruner that needs the latest queries alone, got {pruner!r}")
        if (pruner is None) != (distant is None):
            raise ValueError(f"pruner and distant go together, got pruner={pruner!r} and distant={distant!r}")
        if distant is not None:
            distant = tokens_of("distant", distant, 0)
        self.pruner, self.distant = pruner, distant
        settings = self._settings_of(decoder_config(config))
        self.tau = settings.tau if tau is None else tau
        self.skips = Skips(self.tau if settings.mode == "pod" else None, settings.window)
        if reuse is False and self.skips.any:
            raise ValueError(f"reuse must not be False with tau {self.tau}: the gate is known from what is reused")
        self.reuse = True if self.skips.any else reuse
        if isinstance(dtype, (list, tuple)):
            raise ValueError(f"dtype must be one for all layers, which read each other's keys, got {dtype!r}")
        super().__init__(config, page_size, max_pages, grow, chunk_size, dtype)
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
        """How the model shares."""
        return self.settings

    @staticmethod
    def parsed(saved: dict[str, Any]) -> PoDConfig:
        return PoDConfig.from_dict(saved)

    def _settings_of(self, config: Any) -> PoDConfig:
        settings: PoDConfig = super()._settings_of(config)
        settings.check_model(config)
        return settings

    def _new_layer(self, index: int, number: int) -> PoDLayer:
        votes = 0 if self.pruner is None else self.pruner.window or 1
        return PoDLayer(
            index, number, self.pool_settings, self.pod, reuse=self.reuse, skips=self.skips, votes=votes
        )  # fmt: skip

    # ---- reading ----

    def end(self, current: Pass, hidden: Tensor | None) -> None:
        assert isinstance(current, CachePass)
        prompt = current.iteration is None and current.columns > 1
        if prompt:
            self._select()
        super().end(current, hidden)
        if prompt and self.pruner is not None:
            self.fixed = self.seen  # what went cannot come back

    def end_prompt(self, columns: int) -> None:
        self._select()
        super().end_prompt(columns)

    def _select(self) -> None:
        if self.pruner is None or self.distant is None or self.facts is None:
            return
        select_distant(self.compressing, self.facts, self.pruner, self.distant)
        for layer in self.compressing:
            layer.recent = None

    @property
    def steps_differ(self) -> bool:
        return self.skips.any

    def check_guide(self) -> None:
        raise ValueError(
            "guide is not supported by PoDCache, whose pruner looks at the prompt's last queries: put the question "
            "at the end of the prompt"
        )

    def reset(self) -> None:
        self.skips.reset()
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
        most = min(layer.removable() for layer in self.compressing)
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
        return self.skips.shares()

    def kept_positions(self) -> list[list[list[Tensor]]]:
        """As in every cache, of values; kept_key_positions() says it of keys."""
        return super().kept_positions()

    def kept_key_positions(self) -> list[list[list[Tensor]]]:
        """Which keys are held: [L][B][Hkv] of int64, rising, on the CPU, as many as stored_keys() says; of followers
        the near ones and those that share a page with them. The same as of values for layers that are not converted."""
        return [
            layer.kept_key_positions() if isinstance(layer, PoDLayer) else held
            for layer, held in zip(self.layers, self.kept_positions(), strict=True)
        ]

    def _entries(self) -> list[list[list[float]]]:
        return [
            [[(k + v) / 2 for k, v in zip(*pair, strict=True)] for pair in zip(keys, values, strict=True)]
            for keys, values in ((layer.stored_keys(), layer.stored_lengths()) for layer in self.compressing)
        ]

    def stored_keys(self) -> list[list[list[int]]]:
        """Keys held per layer, sequence and KV head: [L][B][Hkv]; stored_lengths() says it of values. The same for
        layers that are not converted."""
        return [
            layer.stored_keys() if isinstance(layer, PoDLayer) else held
            for layer, held in zip(self.layers, self.stored_lengths(), strict=True)
        ]
