"""Gates fitted to a pruner's scores by ridge regression: minutes, and no backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

import torch
from torch import Tensor, nn

from ..hf.facts import Facts
from ..hf.reading import plain_decoder, read, token_rows
from ..ops.softmax import Softmax
from ..pruners import Gates, Pruner
from ..pruners.gate_forms import LinearGate
from ..pruners.gates import sizes_of
from ..retrofit.passes import TrainingPass, whole_layers
from ..retrofit.regression import RidgeSums, explained, levels_of
from ..retrofit.targets import check_teacher, log_scores
from ..support.checks import need, need_integer, need_number

LEVELS = 1001
Scored = dict[int, tuple[Tensor, Tensor]]  # of a text, by layer: features [n, d] and a 1, logarithms [n, Hkv]


class QueriesPass(TrainingPass):
    """The model's own attention, which notes queries before rotation, [T, Hq D] by layer."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.seen: dict[int, Tensor] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        self.seen[layer] = self.facts[layer].own(queries)[0].transpose(0, 1).flatten(1)
        return self.attend_locally(layer, queries, keys, values, softmax)


def fit_gates(
    model: nn.Module, samples: Iterable[Tensor], pruner: Pruner, *, held_out: int = 4, ridge: float = 1e-3
) -> Gates:
    """Gates that say the logarithms of a pruner's scores, from a token's own queries.

    model: attached or not, not converted; it is left as it was. samples: int64 [T] each, read in one pass one after the
    other; some 40 of 1,000 tokens do. pruner: the teacher, whose scores are above 0, held, and compared over layers and
    heads, such as KVzip(mass=True), with_tokenizer. held_out: how many of the last samples say how good the fit is (r2)
    and where thresholds lie (levels). ridge: on the diagonal of a layer's normal equations, times its mean.
    Memory: (Hq D + 1)^2 numbers of 8 bytes for each layer, on the host, however many samples there are.
    Raises ValueError for a converted model, one without layers that see all tokens, a pruner of other scores, too few
    samples, and as PrunedCache does.
    Source: KVzap fits gates to KVzip's scores; ours are linear, of queries, and solved for, not trained.
    """
    check_teacher(pruner)
    need_integer("held_out", held_out, 1, 1 << 20)
    need_number("ridge", ridge, 1e-12, 1e6)
    sums: dict[int, RidgeSums] = {}
    waiting: list[Tensor] = []
    tokens = texts = 0
    with plain_decoder(model) as (decoder, facts):
        need(len(whole_layers(facts)) > 0, f"model must have a layer that sees all tokens, got {type(model).__name__}: "
             "all of its layers see a window or a chunk, and gates have nothing to drop")  # fmt: skip
        for ids in token_rows(decoder, samples):
            waiting.append(ids)
            if len(waiting) <= held_out:
                continue
            for layer, (x, y) in _scored(model, decoder, facts, waiting.pop(0), pruner).items():
                if layer not in sums:
                    sums[layer] = RidgeSums(x.shape[1], y.shape[1])
                sums[layer].add(x, y)
            texts, tokens = texts + 1, tokens + len(ids)
        need(bool(sums), f"samples must be more than the {held_out} that are held out, got {len(waiting)}")
        solved = {layer: own.solved(ridge) for layer, own in sums.items()}
        layers = tuple(weights.T.contiguous() for weights in solved.values())
        r2, levels = _judged(model, decoder, facts, layers, waiting, pruner)
        config = sizes_of(decoder.config)
    how = f"{type(model).__name__}, {texts} texts of {tokens:,} tokens in all, {_words(pruner)}, ridge {ridge:g}"
    return Gates(tuple(map(LinearGate.joined, layers)), levels, config, how, r2)


def _scored(model: nn.Module, decoder: nn.Module, facts: Facts, ids: Tensor, pruner: Pruner) -> Scored:
    """Of a text's tokens that got a score in every head of a layer."""
    passed, found = QueriesPass(facts), {}
    read(decoder, ids, passed)
    for layer, (logs, good) in log_scores(model, ids, pruner).items():
        x = passed.seen[layer][: len(good)][good].float()
        found[layer] = torch.cat([x, x.new_ones(len(x), 1)], 1), logs[good]
    return found


def _words(pruner: Pruner) -> str:
    """Its settings that are not usual, but for words as ids."""
    own = {x.name: getattr(pruner, x.name) for x in fields(pruner) if getattr(pruner, x.name) != x.default}  # type: ignore[arg-type]
    return ", ".join([type(pruner).__name__, *(f"{name}={x}" for name, x in own.items() if not isinstance(x, tuple))])


def _judged(
    model: nn.Module,
    decoder: nn.Module,
    facts: Facts,
    layers: Sequence[Tensor],
    texts: Sequence[Tensor],
    pruner: Pruner,
) -> tuple[tuple[tuple[float, ...], ...], tuple[float, ...]]:
    """R2 of layers and heads on texts that were held out, and the levels of what is said of them."""
    scored = [_scored(model, decoder, facts, ids, pruner) for ids in texts]
    r2, said = [], []
    for layer, weights in zip(scored[0], layers, strict=True):
        x, y = (torch.cat([text[layer][part].cpu() for text in scored]) for part in (0, 1))
        found = x @ weights.T
        r2.append(tuple(explained(found, y)))
        said.append(found)
    return tuple(r2), tuple(levels_of(said, LEVELS).tolist())
