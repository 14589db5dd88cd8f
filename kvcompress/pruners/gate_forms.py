"""The forms that gates have: from numbers of a token to what its keys are worth to each KV head."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

from ..support.checks import need

_EPSILON = 1e-6  # of Fast KVzip's norms


@dataclass(frozen=True, eq=False)
class GateForm(ABC):
    """A map of one layer, of float32 tensors. heads: Hkv. width: how many numbers of a token it looks at, n.

    Raises ValueError for tensors of shapes that do not go together.
    """

    def __post_init__(self) -> None:
        tensors = self.tensors()
        for name, x in tensors.items():
            good = isinstance(x, Tensor) and x.dtype == torch.float32 and x.ndim > 0 and x.numel() > 0
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            need(good, f"{name} must be a float32 tensor, got {got}")
        for name, wanted in self._shapes().items():
            shape = tuple(tensors[name].shape)
            need(shape == wanted, f"{name} must be of shape {wanted}, got {shape}")
        for name, x in tensors.items():
            need(bool(x.isfinite().all()), f"{name} must be finite numbers, got others")

    @abstractmethod
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """What the tensors must be, by those that say the sizes."""

    @property
    @abstractmethod
    def heads(self) -> int: ...

    @property
    @abstractmethod
    def width(self) -> int: ...

    @abstractmethod
    def says(self, x: Tensor) -> Tensor:
        """float32 [B, S, Hkv]: logarithms. x: float32 [B, S, n], on the tensors' device."""

    def tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def on(self, device: torch.device) -> GateForm:
        """The same on a device."""
        other = copy.copy(self)
        for name, x in self.tensors().items():
            object.__setattr__(other, name, x.to(device))  # past frozen dataclasses
        return other


@dataclass(frozen=True, eq=False)
class LinearGate(GateForm):
    """weight [Hkv, n] and bias [Hkv]."""

    weight: Tensor
    bias: Tensor

    @staticmethod
    def joined(weights: Tensor) -> LinearGate:
        """Of [Hkv, n + 1], the bias last."""
        shape = tuple(weights.shape)
        need(weights.ndim == 2 and weights.shape[1] > 1, f"weights must be float32 [Hkv, n + 1], got {shape}")
        return LinearGate(weights[:, :-1].contiguous(), weights[:, -1].contiguous())

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.heads, self.width), "bias": (self.heads,)}

    @property
    def heads(self) -> int:
        return self.weight.shape[0]

    @property
    def width(self) -> int:
        return self.weight.shape[-1]

    def says(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, eq=False)
class TwoLayerGate(GateForm):
    """weight2 gelu(weight1 x + bias1) + bias2: [hidden, n], [hidden], [Hkv, hidden] and [Hkv].

    Source: KVzap-MLP (NVIDIA 2026, arXiv:2601.07891).
    """

    weight1: Tensor
    bias1: Tensor
    weight2: Tensor
    bias2: Tensor

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        hidden = self.weight1.shape[0]
        return {"weight1": (hidden, self.width), "bias1": (hidden,), "weight2": (self.heads, hidden),
                "bias2": (self.heads,)}  # fmt: skip

    @property
    def heads(self) -> int:
        return self.weight2.shape[0]

    @property
    def width(self) -> int:
        return self.weight1.shape[-1]

    def says(self, x: Tensor) -> Tensor:
        inner = functional.gelu(functional.linear(x, self.weight1, self.bias1))
        return functional.linear(inner, self.weight2, self.bias2)


@dataclass(frozen=True, eq=False)
class SinkGate(GateForm):
    """A small attention: what a token's own key gets of its own G queries beside learned sinks, mean over G.

    query_weight, query_bias [Hkv G d, n], [Hkv G d] and key_weight [Hkv d, n] make normed queries and keys (query_norm,
    key_norm [d]); sinks [Hkv, K, d] are keys; bias [Hkv, G] is added to a token's own logit.
    Source: Fast KVzip (2026, arXiv:2601.17668), whose scores are these shares, not their logarithms.
    """

    query_weight: Tensor
    query_bias: Tensor
    key_weight: Tensor
    query_norm: Tensor
    key_norm: Tensor
    sinks: Tensor
    bias: Tensor

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        need(self.sinks.ndim == 3 and self.bias.ndim == 2, "sinks must be of shape [Hkv, K, d] and bias of [Hkv, G], "
             f"got {tuple(self.sinks.shape)} and {tuple(self.bias.shape)}")  # fmt: skip
        (H, K, d), G, n = self.sinks.shape, self.bias.shape[1], self.width
        return {"query_weight": (H * G * d, n), "query_bias": (H * G * d,), "key_weight": (H * d, n),
                "query_norm": (d,), "key_norm": (d,), "sinks": (H, K, d), "bias": (H, G)}  # fmt: skip

    @property
    def heads(self) -> int:
        return self.sinks.shape[0]

    @property
    def width(self) -> int:
        return self.query_weight.shape[-1]

    def says(self, x: Tensor) -> Tensor:
        (H, _, d), G = self.sinks.shape, self.bias.shape[1]
        q = functional.linear(x, self.query_weight, self.query_bias).unflatten(-1, (H, G, d))
        k = functional.linear(x, self.key_weight).unflatten(-1, (H, 1, d))
        q, k = (functional.rms_norm(y, (d,), w, _EPSILON) for y, w in ((q, self.query_norm), (k, self.key_norm)))
        own = (q * k).sum(-1) * d**-0.5 + self.bias
        others = torch.einsum("bshgd,hkd->bshgk", q, self.sinks * d**-0.5).logsumexp(-1)
        shares = -functional.softplus(others - own)  # their logarithms
        return shares.logsumexp(-1) - math.log(G)


FORMS: dict[str, type[GateForm]] = {"linear": LinearGate, "two layers": TwoLayerGate, "sinks": SinkGate}


def formed(kind: type[GateForm], layers: Sequence[Mapping[str, Tensor]]) -> tuple[GateForm, ...]:
    """A form of each layer, of tensors by their names there. Raises ValueError, naming the layer."""
    made = []
    for number, tensors in enumerate(layers):
        try:
            made.append(kind(**tensors))
        except ValueError as error:
            raise ValueError(f"layers[{number}]: {error}") from None
    return tuple(made)
