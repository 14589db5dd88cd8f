"""Moving the borders of blocks to where sharing costs least, as measured by the model's loss."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..hf.attach import base_model, facts_of
from ..hf.method import set_method
from ..support.checks import need_integer
from .config import PoDConfig
from .convert import convert
from .kinds import kinds_of
from .lead import Kinds, Lead
from .method import PoDMethod
from .plan import PoDPlan


@torch.no_grad()
def refine(
    model: nn.Module,
    plan: PoDPlan,
    rows: Sequence[Tensor],
    *,
    rounds: int = 4,
    report: Callable[[str], object] = lambda line: None,
) -> PoDPlan:
    """A plan with as many followers whose loss on some texts, without any training, is lower.

    Similar attention is a proxy: a layer that looks up one distant token in a thousand may be the one that must keep
    its own keys. In each round every border between blocks of a KV head is moved by one layer, up and down, one at a
    time; the best of these tables is taken if it lowers the loss, else it ends. A round costs two forward passes over
    the texts for each border.
    model: not converted; it is not changed (a copy is). rows: int64 [tokens] each, longer than plan.window to tell
    anything. rounds: most of them, at least 0. report: takes a line for each move, and one at the end.
    Returns the plan with its lead table, delta None and `refined` counting the moves, or the plan itself.
    Raises ValueError where no row has a distant token, RuntimeError where the plan's loss is not finite.
    Source: ours; the paper groups by similarity alone.
    """
    need_integer("rounds", rounds, 0)
    longest = max((len(row) for row in rows), default=0)
    if rounds and longest <= plan.window:
        raise ValueError(
            f"rows must be longer than the {plan.window} tokens (sinks + recent) that keep their own keys, for the "
            f"borders to matter, got {longest} at most"
        )
    converted = copy.deepcopy(model).eval()
    convert(converted, plan)
    decoder, best, lead, moves = base_model(converted), _loss(converted, rows), plan.lead, 0
    kinds = kinds_of(decoder, facts_of(decoder))
    if not math.isfinite(best):
        raise RuntimeError(f"the model's loss with the plan must be finite, got {best}")
    for _ in range(rounds):
        found: list[tuple[float, Lead, str]] = []
        for table, what in _moves(lead, kinds):
            set_method(decoder, PoDMethod(PoDConfig(table, plan.sinks, plan.recent)))
            loss = _loss(converted, rows)
            if math.isfinite(loss):
                found.append((loss, table, what))
        if not found or min(found)[0] >= best:
            what = "no border of a block can be moved" if not found else f"none of {len(found)} moves lowers the loss"
            report(f"{what}: {best:.4f} nats per token")
            break
        before, (best, lead, what), moves = best, min(found), moves + 1
        report(f"{what}: loss {before:.4f} -> {best:.4f} nats per token")
    return plan if moves == 0 else replace(plan, lead=lead, delta=None, refined=plan.refined + moves)


def _moves(lead: Lead, kinds: Kinds) -> Iterator[tuple[Lead, str]]:
    """Tables in which one block begins a layer of its kind lower or higher, and what was done."""
    for head in range(len(lead[0])):
        for kind in dict.fromkeys(kind for kind in kinds if kind is not None):
            layers = [layer for layer, own in enumerate(kinds) if own == kind]
            starts = [i for i, layer in enumerate(layers) if lead[layer][head] == layer]
            for place, start in enumerate(starts):
                for to in (start - 1, start + 1):
                    if start == 0 or to in starts or to >= len(layers):
                        continue
                    moved = [*starts[:place], to, *starts[place + 1 :]]
                    column = {layer: layers[max(j for j in moved if j <= i)] for i, layer in enumerate(layers)}
                    table = tuple(
                        tuple(column.get(layer, above) if c == head else above for c, above in enumerate(row))
                        for layer, row in enumerate(lead)
                    )
                    yield table, f"KV head {head}: layer {layers[to]} leads in place of layer {layers[start]}"


def _loss(model: Any, rows: Sequence[Tensor]) -> float:
    """Mean next-token cross-entropy, nats."""
    device, total, tokens = next(model.parameters()).device, 0.0, 0
    for row in rows:
        ids = row.to(device)[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        total += float(nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        tokens += ids.shape[1] - 1
    return total / tokens
