"""Decisions of DMS that are fitted to a pruner's scores, in minutes and without a backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..hf.attach import attach, base_model, detach, facts_of, is_attached
from ..hf.method import KEYWORD, Pass
from ..hf.projections import out_dim, projections_of
from ..hf.seam import evaluating
from ..ops.softmax import Softmax
from ..pruners.base import Pruner
from ..pruners.gates import level_at
from ..retrofit.passes import whole_layers
from ..retrofit.regression import RidgeSums, explained, levels_of
from ..retrofit.targets import check_teacher, log_scores
from ..support.checks import need, need_integer, need_number
from .config import DMCConfig
from .convert import convert, state
from .method import DMCMethod
from .neurons import check_floating, neuron_rows

_SMALL = 10.0  # logits of a neuron's unit where a norm makes it one of the numbers that it divides by
_LEVELS = 1001
_LEAST_ONE = 0.1  # of what stands for 1 where there is no bias

Scored = dict[int, tuple[Tensor, Tensor]]  # a text, by layer: features [n, d], logarithms of scores [n, Hkv]; float32


class KeyLinear(NamedTuple):
    """The linear layer that makes a layer's keys. rows: int64 [Hkv], those of the neurons."""

    module: Any
    rows: Tensor


class Between(NamedTuple):
    """What stands between such a layer and attention. signs: float32 [Hkv], 1, or -1 where a norm of keys turns a
    neuron's sign. normed: whether there is such a norm."""

    signs: Tensor
    normed: bool


@dataclass(frozen=True)
class Fitted:
    """What was fitted, and how well. r2: [L][Hkv], share of the variance of the logarithms of scores that the fit
    explains in texts held out, of the converted layers. levels: under the i-th of them lies a share of i / (len - 1) of
    what is said of those texts. weights: float32 [d, Hkv + 1] by layer, of what enters the keys' linear layer (and of a
    1, where that has a bias): they say the logarithms, and a 1. signs: float32 [Hkv] by layer, -1 where a norm turns
    what comes of them. slope: logits per unit of the logarithm."""

    r2: list[list[float]]
    levels: list[float]
    weights: dict[int, Tensor]
    signs: dict[int, Tensor]
    slope: float

    def threshold(self, ratio: float) -> float:
        """The logarithm of a score under which a token is dropped."""
        need_number("ratio", ratio, 1, 1e6)
        return level_at(self.levels, 1 - 1 / ratio)

    @torch.no_grad()
    def set_ratio(self, model: nn.Module, ratio: float) -> None:
        """Writes decisions of a ratio, tokens per entry beyond the window, into the rows of the neurons of the model
        that was fitted, in place: dms_scale * neuron = slope (threshold - what is said), dropped above 0."""
        decoder, config, threshold = base_model(model), state(model).config, self.threshold(ratio)
        linears = _key_linears(decoder, facts_of(decoder), config)
        for layer, weights in self.weights.items():
            linear, rows = linears[layer]
            wanted = (self.slope / config.dms_scale * (threshold * weights[:, -1:] - weights[:, :-1])).T  # [Hkv, d]
            wanted *= self.signs[layer][:, None]
            weight = linear.weight if out_dim(linear) == 0 else linear.weight.T
            weight[rows.to(weight.device)] = wanted[:, : weight.shape[1]].to(weight)
            if linear.bias is not None:
                linear.bias[rows.to(weight.device)] = wanted[:, -1].to(weight)


def fit(
    model: nn.Module,
    config: DMCConfig,
    texts: Iterable[Tensor],
    pruner: Pruner,
    *,
    ratio: float = 2.0,
    held_out: int = 4,
    slope: float = 2.0,
    ridge: float = 1e-3,
) -> Fitted:
    """Converts a plain model to DMS whose decisions are already good: in place, as convert(model, config, anneal=False)
    does, and writes into the rows of the neurons what says the logarithms of a pruner's scores best.

    config: of mode "dms", with shift=0. texts: int64 [T] each, read in one pass; some 40 of 1,000 tokens do. pruner:
    one whose scores are above 0, held, and compared over layers and heads, such as KVzip(mass=True), with_tokenizer.
    The score of a token in a head is said by what enters the keys' linear layer with it (dms_decides="own") or with the
    token after it ("successor"): one ridge regression per layer, no backward pass. A token is dropped where what is
    said lies under one threshold for all layers and heads, under which 1 - 1 / ratio of what is said of the last
    held_out texts lies. slope: logits per unit of the logarithm; ridge: on the diagonal, times its mean. What is
    returned makes other ratios of it; training (DMCRecipe with anneal_steps=0) goes on from there.
    A model that norms its keys (Qwen3) takes the sign of a decision alone, and wants dms_scale=100: neurons that are
    small beside the rest of a key.
    Raises ValueError for a config that is not DMS with a decision per head, or not for such a norm, a pruner of other
    scores, too few texts, adapters, weights in shards, and as convert and PrunedCache do; the model is plain then.
    Source: KVzap and Fast KVzip fit gates to KVzip's scores; DMS is what carries them here.
    """
    for name, value in (("mode", "dms"), ("shift", 0), ("decision_margin", 0), ("share_heads", "none")):
        given = getattr(config, name)
        need(given == value, f"config must have {name} = {value!r} to be fitted, got {given!r}")
    check_teacher(pruner)
    need_number("ratio", ratio, 1, 1e6)
    need_number("slope", slope, 1e-6, 1e6)
    need_number("ridge", ridge, 1e-12, 1e6)
    need_integer("held_out", held_out, 1, 1 << 20)
    decoder, plain = base_model(model), not is_attached(model)
    if plain:
        attach(model)
    try:
        config.check_model(decoder.config)
        check_floating(decoder)
        DMCMethod(config).check_facts(decoder, facts_of(decoder))
        linears = _key_linears(decoder, facts_of(decoder), config)
        between = _between(decoder, facts_of(decoder), config, linears)
        if any(own.normed for own in between.values()):
            need(config.dms_scale >= _SMALL, f"dms_scale must be at least {_SMALL} for a model that norms its keys, so "
                 f"that neurons are small beside the rest of a key, got {config.dms_scale}")  # fmt: skip
        with evaluating(model):
            solved, waiting = _solved(model, texts, pruner, linears, config, held_out, ridge)
        r2, levels = _judged(solved, waiting)
        convert(model, config, anneal=False)
    except BaseException:
        if plain:
            detach(model)
        raise
    fitted = Fitted(r2, levels.tolist(), solved, {layer: between[layer].signs for layer in solved}, slope)
    fitted.set_ratio(model, ratio)
    return fitted


def _solved(
    model: nn.Module, texts: Iterable[Tensor], pruner: Pruner, linears: dict[int, KeyLinear], config: DMCConfig,
    held_out: int, ridge: float,
) -> tuple[dict[int, Tensor], list[Scored]]:  # fmt: skip
    """What each layer's regression gives, and the texts that were held out of it: the last ones."""
    sums: dict[int, RidgeSums] = {}
    waiting: list[Scored] = []
    for ids in texts:
        waiting.append(_scored(model, ids, pruner, linears, own=config.dms_decides == "own"))
        if len(waiting) > held_out:
            for layer, (x, y) in waiting.pop(0).items():
                if layer not in sums:
                    sums[layer] = RidgeSums(x.shape[1], y.shape[1] + 1)
                # and of a 1, which stands for the bias where there is none
                sums[layer].add(x, torch.cat([y, y.new_ones(len(y), 1)], 1))
    need(bool(sums), f"texts must be more than the {held_out} that are held out, got {len(waiting)}")
    return {layer: own.solved(ridge) for layer, own in sums.items()}, waiting


def _judged(solved: dict[int, Tensor], texts: list[Scored]) -> tuple[list[list[float]], Tensor]:
    """R2 of layers and heads, and the levels of what is said, float32 [_LEVELS]."""
    r2, said = [], []
    for layer, weights in solved.items():
        x, y = (torch.cat([text[layer][part] for text in texts]) for part in (0, 1))
        found, one = (x @ weights).split([y.shape[1], 1], 1)
        r2.append(explained(found, y))
        said.append(found / one.clamp_min(_LEAST_ONE))
    return r2, levels_of(said, _LEVELS)


def norms_keys(model: nn.Module) -> bool:
    """Whether something stands between the linear layers that make an attached model's keys and its attention."""
    decoder, config = base_model(model), DMCConfig(mode="dms")
    facts = facts_of(decoder)
    return any(own.normed for own in _between(decoder, facts, config, _key_linears(decoder, facts, config)).values())


def _key_linears(decoder: Any, facts: Any, config: DMCConfig) -> dict[int, KeyLinear]:
    """Of each layer to be converted."""
    rows, found = neuron_rows(decoder, facts, config), {}
    for layer, made in projections_of(decoder, facts).items():
        if layer in whole_layers(facts):
            (name,) = made.keys.used
            own = made.keys.row[:, config.place(facts[layer].head_dim)]
            assert set(own.tolist()) <= set(rows[name].tolist())
            module = decoder.get_submodule(name)
            need(not hasattr(module, "base_layer"), f"model must be fitted before it gets adapters, got one at {name}")
            need(not isinstance(module.weight, DTensor), f"model must be fitted before its weights are cut over ranks, "
                 f"got {name} on {getattr(module.weight, 'device_mesh', None)}")  # fmt: skip
            found[layer] = KeyLinear(module, own)
    return found


class _KeysPass(Pass):
    """What attention is given as keys, [B, Hkv, T, D] by layer, when nothing of it comes back."""

    def __init__(self, facts: Any) -> None:
        self.facts, self.keys = facts, dict[int, Tensor]()

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        self.keys[layer] = keys
        return torch.zeros_like(queries)


def _between(decoder: Any, facts: Any, config: DMCConfig, linears: dict[int, KeyLinear]) -> dict[int, Between]:
    """Of a model that is not converted yet, whose neurons are still there, by running it on a few tokens."""
    made: dict[int, Tensor] = {}

    def noting(layer: int) -> Any:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            made[layer] = out.detach()

        return hook

    hooks = [own.module.register_forward_hook(noting(layer)) for layer, own in linears.items()]
    seen = _KeysPass(facts)
    ids = torch.arange(1, 9, device=decoder.get_input_embeddings().weight.device)[None]
    try:
        with evaluating(decoder), torch.no_grad():
            decoder(input_ids=ids, use_cache=False, **{KEYWORD: seen})
    finally:
        for hook in hooks:
            hook.remove()
    found = {}
    for layer, own in linears.items():
        place = config.place(facts[layer].head_dim)
        before = made[layer][0][:, own.rows.to(made[layer].device)].float().T  # [Hkv, T]
        behind = seen.keys[layer][0, :, :, place].float()
        signs = torch.where((before * behind).sum(1) < 0, -1.0, 1.0).cpu()
        found[layer] = Between(signs, not torch.allclose(before, behind, rtol=1e-2, atol=1e-4))
    return found


def _scored(model: nn.Module, ids: Tensor, pruner: Pruner, linears: dict[int, KeyLinear], *, own: bool) -> Scored:
    """Of a text's tokens that got a score in every head of a layer."""
    with _first_inputs(linears) as inputs:
        targets = log_scores(model, ids, pruner)
    found = {}
    for layer, (y, good) in targets.items():
        if layer not in linears:
            continue
        x = inputs[layer][: len(y)]
        if not own:
            x, y, good = x[1:], y[:-1], good[:-1]
        x, y = x[good].cpu().float(), y[good].cpu()
        if linears[layer].module.bias is not None:
            x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        found[layer] = x, y
    return found


@contextmanager
def _first_inputs(linears: dict[int, KeyLinear]) -> Iterator[dict[int, Tensor]]:
    """What enters linear layers in the first pass, [T, d]."""
    inputs: dict[int, Tensor] = {}

    def noting(layer: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            inputs.setdefault(layer, args[0][0].detach())

        return hook

    hooks = [own.module.register_forward_pre_hook(noting(layer)) for layer, own in linears.items()]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()
