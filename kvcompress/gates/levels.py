"""Levels of gates that come without, such as those that others have published."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn

from ..hf.facts import Facts
from ..hf.reading import plain_decoder, read, token_rows
from ..ops.softmax import Softmax
from ..pruners import Gates
from ..pruners.gates import HIDDEN, as_gates, sizes_of
from ..retrofit.passes import TrainingPass, whole_layers
from ..retrofit.regression import levels_of
from ..support.checks import need
from .fitting import LEVELS


class _SayingPass(TrainingPass):
    """The model's own attention, which notes what gates say. numbers: of layers that compress, by layer."""

    def __init__(self, facts: Facts, gates: Gates, numbers: dict[int, int]) -> None:
        super().__init__(facts)
        self.gates, self.numbers = gates, numbers
        self.wants_entering = gates.looks_at == HIDDEN
        self.said: list[Tensor] = []

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        if layer in self.numbers:
            seen = self.gates.seen(self.facts[layer].own(queries), self.entering)
            self.said.append(self.gates.says(self.numbers[layer], seen).cpu())
        return self.attend_locally(layer, queries, keys, values, softmax)


def with_levels(model: nn.Module, gates: Gates | str, samples: Iterable[Tensor]) -> Gates:
    """The same gates with levels of your own texts, by which GatedCache(keep=...) finds its threshold; known to be this
    model's from then on.

    model: attached or not, not converted; it is left as it was. gates: or what Gates.load takes. samples: int64 [T]
    each, read in one pass one after the other; eight of 1,000 tokens do.
    Raises ValueError for a converted model, gates of another one, no samples, and what gates say that is no number.
    """
    gates, said, tokens, texts = as_gates(gates), list[Tensor](), 0, 0
    with plain_decoder(model) as (decoder, facts):
        compressing = [layer for layer in whole_layers(facts) if facts[layer].reads is None]
        gates.check_model(decoder, [facts[layer] for layer in compressing])
        for ids in token_rows(decoder, samples):
            passed = _SayingPass(facts, gates, {layer: number for number, layer in enumerate(compressing)})
            read(decoder, ids, passed)
            said, tokens, texts = said + passed.said, tokens + len(ids), texts + 1
        need(texts > 0, "samples must be at least one text, got none")
        need(not any(bool(x.isnan().any()) for x in said), "model must say numbers, got NaN")
        config = sizes_of(decoder.config)
    how = f"levels of {texts} texts of {tokens:,} tokens in all"
    measured = "; ".join(filter(None, (gates.measured, how)))
    return replace(gates, levels=tuple(levels_of(said, LEVELS).tolist()), model=config, measured=measured)
