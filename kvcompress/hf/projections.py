"""Which row of which linear layer makes each coordinate of a model's queries, keys and values: learned by running it.

Every linear layer of a small pass gives marks in place of its numbers, whose signs spell its number and the row in the
rows of the batch. Fused projections, however they are cut, and norms of a head that keep signs are seen through.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.softmax import Softmax
from .facts import Facts
from .method import KEYWORD, Pass
from .own_attention import number_of
from .seam import evaluating

TOKENS = 3


class Made(NamedTuple):
    """What queries, keys or values of a layer are made by. names: linear layers, by their name in the decoder. number:
    int64 [H, D], which of them; row: int64 [H, D], its row; of each coordinate as attention is given it."""

    names: tuple[str, ...]
    number: Tensor
    row: Tensor

    @property
    def used(self) -> list[str]:
        """The linear layers that have a part in it."""
        return [self.names[i] for i in self.number.unique().tolist()]

    def rows_of(self, coordinate: int) -> dict[str, Tensor]:
        """Rows, int64 [n], that make a coordinate of all heads, by linear layer."""
        number, row = self.number[:, coordinate], self.row[:, coordinate]
        return {self.names[i]: row[number == i] for i in number.unique().tolist()}


class LayerMade(NamedTuple):
    """Of one layer."""

    queries: Made
    keys: Made
    values: Made


class _MarkedPass(Pass):
    chooses = True

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        own = self.facts[layer]
        self.seen[layer] = own.own(queries), own.own(keys), values[..., : own.value_dim]
        return torch.zeros_like(queries)


def linear_layers(module: nn.Module, prefix: str = "") -> list[tuple[str, Any]]:
    """The linear layers in a module by name, those of PEFT as one each."""
    found: list[tuple[str, Any]] = []
    for name, child in module.named_children():
        weight = getattr(child, "weight", None)
        if hasattr(child, "base_layer") or (isinstance(weight, Tensor) and weight.ndim == 2 and _multiplies(child)):
            found.append((prefix + name, child))
        else:
            found += linear_layers(child, f"{prefix}{name}.")
    return found


def _multiplies(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D" or hasattr(module, "in_features")


def out_dim(module: nn.Module) -> int:
    """Which dimension of a linear layer's weight counts its outputs; transformers' Conv1D has it transposed."""
    return 1 if type(module).__name__ == "Conv1D" else 0


def attention_linears(decoder: nn.Module) -> dict[int, list[tuple[str, Any]]]:
    """The linear layers in the innermost modules that know the number of their layer, by that number."""

    def knows(module: nn.Module) -> bool:  # an indexer is a part of its attention
        return type(number_of(module)) is int and not hasattr(module, "index_topk")

    owners = [(name, module) for name, module in decoder.named_modules() if knows(module)]
    found: dict[int, list[tuple[str, Any]]] = {}
    for name, module in owners:
        if not any(inner is not module and knows(inner) for inner in module.modules()):
            found.setdefault(number_of(module), []).extend(linear_layers(module, f"{name}."))
    return found


@torch.inference_mode(False)
@torch.no_grad()
def projections_of(decoder: Any, facts: Facts) -> dict[int, LayerMade]:
    """What makes the queries, keys and values of every layer of an attached decoder that attends.

    Raises ValueError, naming the layer, where no row of a linear layer does.
    """
    linears = attention_linears(decoder)
    widest = max((_outputs(module) for some in linears.values() for _, module in some), default=1)
    row_bits = max(widest - 1, 1).bit_length()
    number_bits = max(max(map(len, linears.values()), default=1) - 1, 1).bit_length()
    rows = 1 + row_bits + number_bits
    generator = torch.Generator().manual_seed(0)
    marks = torch.rand(TOKENS, widest, generator=generator, device="cpu") + 0.5
    spelt = torch.arange(widest, device="cpu")
    signs = [torch.ones(widest, device="cpu"), *(1.0 - 2 * ((spelt >> bit) & 1) for bit in range(row_bits))]

    def marking(number: int) -> Any:
        bits = [1.0 - 2 * ((number >> b) & 1) for b in range(number_bits)]
        own = torch.stack([*signs, *(torch.full_like(signs[0], bit) for bit in bits)])

        def hook(module: nn.Module, args: Any, out: Any) -> Any:
            if not isinstance(out, Tensor) or out.ndim < 3 or (out.shape[0], out.shape[-2]) != (rows, TOKENS):
                return None
            size = out.shape[-1]
            marked = (own[:, None, :size] * marks[None, :, :size]).to(out.device, out.dtype)
            return marked.view(rows, *[1] * (out.ndim - 3), TOKENS, size).expand_as(out)

        return hook

    hooks = [
        module.register_forward_hook(marking(number))
        for some in linears.values()
        for number, (_, module) in enumerate(some)
    ]
    marked = _MarkedPass(facts)
    try:
        device = decoder.get_input_embeddings().weight.device
        ids = torch.ones(rows, TOKENS, dtype=torch.long, device=device)
        with evaluating(decoder):
            decoder(input_ids=ids, use_cache=False, **{KEYWORD: marked})
    finally:
        for hook in hooks:
            hook.remove()
    found = {}
    for layer, seen in marked.seen.items():
        some = linears.get(layer, [])
        try:
            made = [_made(kind, x, row_bits, some) for kind, x in zip(LayerMade._fields, seen, strict=True)]
        except ValueError as error:
            raise ValueError(f"layer {layer} of {type(decoder).__name__}: {error}") from None
        found[layer] = LayerMade(*made)
    return found


def _outputs(module: Any) -> int:
    base = getattr(module, "base_layer", module)
    size = getattr(base, "out_features", None)
    return int(base.weight.shape[out_dim(base)] if size is None else size)


def _made(kind: str, x: Tensor, row_bits: int, linears: list[tuple[str, Any]]) -> Made:
    """x: [rows, H, TOKENS, D], of which the first row has no sign changed."""
    x = x.float().cpu()
    same = (x.abs() - x[0].abs()).abs().amax((0, 2)) <= 1e-2 * x[0].abs().amax(1).clamp_min(1e-12)
    ratio = x[1:] * x[0]  # [bits, H, TOKENS, D]
    steady = ((ratio > 0).all(2) | (ratio < 0).all(2)).all(0)
    if not bool((same & steady).all()):
        raise ValueError(
            f"its {kind} are not made by rows of its linear layers, each by one: what follows the projection (a norm "
            "that subtracts a mean, for one) mixes them"
        )
    bits = (ratio < 0).all(2).long()
    spelt = [sum(bit << i for i, bit in enumerate(part)) for part in (bits[:row_bits], bits[row_bits:])]
    row, number = (torch.as_tensor(part, device="cpu") for part in spelt)
    sizes = torch.tensor([_outputs(module) for _, module in linears] or [0], device="cpu")
    if bool((number >= len(linears)).any()) or bool((row >= sizes[number.clamp(max=len(sizes) - 1)]).any()):
        raise ValueError(f"its {kind} are not made by linear layers of its own")
    return Made(tuple(name for name, _ in linears), number, row)
