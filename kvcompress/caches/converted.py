"""What caches of converted models have in common: settings that come with the model, prompts read as they are."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from ..hf.config import decoder_config
from ..support.units import Tokens, tokens_of
from .base import CompressedCache
from .formats import Dtypes
from .store import PoolSettings


class ConvertedCache(CompressedCache):
    """A cache that does what config.kvcompress says.

    title: of the method, for messages. settings: what config.kvcompress says. chunk_size: tokens that `prefill` reads
    at a time, None = the whole prompt. Raises ValueError for settings out of range and for a config that is not of a
    model converted to the method.
    """

    title: ClassVar[str]
    answers: ClassVar[tuple[str, ...]] = ("converted_layers", "settings")

    def __init__(
        self, config: PreTrainedConfig, page_size: int, max_pages: int | None, grow: str,
        chunk_size: Tokens | None,
        dtype: Dtypes = None,
    ) -> None:  # fmt: skip
        if chunk_size is not None:
            chunk_size = tokens_of("chunk_size", chunk_size)
        self.pool_settings, self.chunk_size = PoolSettings(page_size, max_pages, grow, dtype), chunk_size
        self.settings = self._settings_of(decoder_config(config))
        super().__init__(config)

    @staticmethod
    @abstractmethod
    def parsed(saved: dict[str, Any]) -> Any:
        """The settings in config.kvcompress; ValueError for those of another method."""

    def _settings_of(self, config: Any) -> Any:
        saved = getattr(config, "kvcompress", None)
        if saved is None:
            raise ValueError(
                f"config.kvcompress must be that of a model converted to {self.title}, got none: this model is not "
                f"converted; kvcompress retrofit {self.title.split()[0].lower()} converts one and trains it"
            )
        return self.parsed(saved)

    def check_model(self, decoder: Any) -> None:
        super().check_model(decoder)
        settings = self._settings_of(decoder.config)
        if settings != self.settings:
            ours, theirs = self.settings.to_dict(), settings.to_dict()
            differ = ", ".join(f"{name} = {ours[name]!r}" for name in ours if ours[name] != theirs[name])
            raise ValueError(
                f"cache was made from a config.kvcompress with {differ}, but that of {type(decoder).__name__} has "
                "others; make it from this model's config"
            )

    # ---- what users ask ----

    @property
    def converted_layers(self) -> list[int]:
        """The model's numbers of the layers that the method converted; others are as in any cache."""
        return [layer.index for layer in self.compressing]
