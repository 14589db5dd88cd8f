"""What a model's layers are to attention: learned by the probe, read by passes and caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..positions import NormedTables, RotaryTables
from .alibi import AlibiTables
from .argument import CACHE
from .indexing import Indexer
from .places import Places, placed


@dataclass(frozen=True, eq=False)
class LayerFacts:
    """index: of the layer. query_heads, kv_heads, head_dim, value_dim: as the family's attention has them.

    query_rotary, key_rotary: what rotates its queries and keys; one object but where a norm follows the rotation.
    order: int64 [D], in which coordinate i of what we are given stands at place order[i] of the family's head, so that
    rotation pairs i with i + half; None = as they are. window: keys that a query sees, itself included; chunk: a query
    sees those of its own chunk of so many positions; None = all. reads: the layer whose keys and values it attends to,
    None = its own. readers: layers that read this one's. rotates: whether positions turn anything. normed: a norm
    follows the rotation. indexer: what chooses the tokens that a query sees, None = nothing does.
    """

    index: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    query_rotary: RotaryTables
    key_rotary: RotaryTables
    order: Tensor | None = None
    window: int | None = None
    chunk: int | None = None
    reads: int | None = None
    readers: tuple[int, ...] = ()
    rotates: bool = True
    normed: bool = False
    indexer: Indexer | None = None
    _orders: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)  # order on each device

    @property
    def size(self) -> int:
        """Numbers of a key, and of a value, as we are given them."""
        return max(self.head_dim + self.beside, self.value_dim)

    @property
    def beside(self) -> int:
        """How many of a query or key come before the family's own (ALiBi)."""
        return self.query_rotary.beside

    @property
    def is_local(self) -> bool:
        """Sees a window or a chunk: keeps it, and nothing of it is dropped or merged."""
        return self.window is not None or self.chunk is not None

    @property
    def is_relative(self) -> bool:
        """Whether what a query says to a key depends on how far apart they stand alone, so that both may move together;
        not where a norm with weights follows the rotation."""
        return not any(isinstance(rotary, NormedTables) for rotary in (self.query_rotary, self.key_rotary))

    def check_relative(self, wish: str) -> None:
        """Raises ValueError, which begins with the wish, where positions cannot be given anew."""
        if not self.is_relative:
            raise ValueError(
                f"{wish} with this model: in its layer {self.index} a norm with weights follows the rotation, so that "
                "attention depends on where tokens stand, not on their distance alone, and they cannot be moved"
            )

    def framed(self, x: Tensor, *, keys: bool = False) -> Tensor:
        """Queries or keys [B, H, T, head_dim] of the family, as we want them: [B, H, T, size]."""
        if self.order is not None:
            x = x.index_select(-1, self._order_on(x.device))
        if isinstance(self.query_rotary, AlibiTables):
            x = self.query_rotary.framed(x, keys=keys)
        return x if self.size == x.shape[-1] else torch.nn.functional.pad(x, (0, self.size - x.shape[-1]))

    @torch.inference_mode(False)
    def _order_on(self, device: torch.device) -> Tensor:
        """Copied once: a step that is recorded must copy nothing from the host."""
        assert self.order is not None
        if device not in self._orders:
            self._orders[device] = self.order.to(device)
        return self._orders[device]

    def own(self, x: Tensor) -> Tensor:
        """The family's coordinates [..., head_dim] of framed queries or keys, in our order."""
        return x[..., self.beside : self.beside + self.head_dim]

    def padded(self, values: Tensor) -> Tensor:
        """Values [B, H, T, value_dim] as we want them: [B, H, T, size]."""
        if self.size == self.value_dim:
            return values
        return torch.nn.functional.pad(values, (0, self.size - self.value_dim))

    def place(self, coordinate: int) -> int:
        """Which coordinate of the family's head is coordinate i of what we are given."""
        return coordinate if self.order is None else int(self.order[coordinate])


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """The output projection of a layer: a linear layer whose input is the heads' results, one behind the other.
    transposed: its weight is [outputs, inputs]."""

    module: Any
    heads: int
    value_dim: int
    transposed: bool

    def weights(self) -> Tensor:
        """[Hq, D, hidden], as they are now: a head's result [D] times these is what it adds to the hidden state."""
        weight = getattr(self.module, "base_layer", self.module).weight.detach()
        return (weight.T if self.transposed else weight).unflatten(0, (self.heads, self.value_dim))


class Facts(dict[int, LayerFacts]):
    """The layers of a decoder that attend, by number. reads_chunks: whether the family gives the same whether it reads
    tokens at once or in several calls of several tokens; some recurrent layers begin anew in each. takes_positions:
    whether position_ids from 0 on are what the family counts by itself; some count from elsewhere, by their ids.
    asks_length: whether layers ask the cache how many tokens came before, which is one number for a whole batch.
    hands_states: whether recurrent layers hand their states to the cache; some families keep them in the model.
    crosses: whether layers attend to an encoder besides. loops: whether an attention module serves several layers,
    which only a cache tells apart.
    outputs: the output projections by layer, where something has asked for them.
    """

    reads_chunks = True
    hands_states = True
    takes_positions = True
    asks_length = False
    crosses = False
    loops = False
    outputs: Mapping[int, OutputLayer] = MappingProxyType({})

    def check_alone(self, wish: str) -> None:
        """Raises ValueError, which begins with the wish, for a decoder that attends to an encoder besides."""
        if self.crosses:
            raise ValueError(
                f"{wish} needs a decoder alone, and this model's attends to an encoder besides: give a cache to "
                f"model.generate(inputs, {CACHE}=cache)"
            )

    def placed(self, places: Sequence[Places]) -> Facts:
        """The same layers, rotating sequences whose tokens stand at these places. Raises ValueError for a model of
        which none can."""
        tables: dict[RotaryTables, RotaryTables] = {}
        for own in self.values():
            for plain in (own.query_rotary, own.key_rotary):
                if plain not in tables:
                    tables[plain] = placed(plain, places)
        new = Facts({
            index: replace(own, query_rotary=tables[own.query_rotary], key_rotary=tables[own.key_rotary])
            for index, own in self.items()
        })  # fmt: skip
        vars(new).update(vars(self))
        return new
