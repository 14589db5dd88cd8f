"""What a model converted to DMC or DMS is: everything that inference needs to know of how it was trained."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from ..hf.config import decoder_config, sizes_of
from ..ops.dmc_accumulate import MAX_DMC_WINDOW
from ..ops.dmc_gates import IMPORTANCES

if TYPE_CHECKING:
    from typing_extensions import Self

CHOICES = {
    "mode": ("dmc", "dms"),
    "omega": ("learned", "uniform"),
    "gqa_omega": IMPORTANCES,
    "share_heads": ("none", "mean", "head0"),
}


@dataclass(frozen=True)
class DMCConfig:
    """How a converted model decides and merges; saved with it as config.kvcompress.

    mode: "dmc" (a token is appended or merged into the newest entry) or "dms" (it is dropped once it is dms_window
    tokens old, if its successor decided so). neuron: the coordinate of queries and keys that carries the decisions,
    negative from the end; it takes no part in attention. shift, temperature: c and tau of the relaxed decisions.
    window: an entry averages its last tokens alone, 1..64 (released models: 12); None = all.
    omega: "learned" weights from the query neuron, or "uniform" ones. omega_eps: added to them. gqa_omega: how the
    query heads of a KV head agree on one: "mean_logit", "mean_sigmoid" or "first". decision_margin: logits must exceed
    it to merge. share_heads: "none", or one decision and weight for all heads of a layer (DMC-HardC), their "mean" or
    that of "head0". dms_window: tokens that are never dropped, besides the newest. dms_scale: factor of the logits.
    stride: None, or every so many tokens one opens an entry and the others merge, whatever the logits say (fixed memory
    pooling, DMC's baseline; with omega="uniform").
    neuron_scale: what is left of the neuron in attention, 1 (untouched) to 0 (converted); between them the model is
    being annealed, attends to everything and decides nothing.
    Raises ValueError for a field out of range. Source: DMC, sections 3 and 4; fields as in its released code, "window"
    and "omega_eps" included.
    """

    mode: str = "dmc"
    neuron: int = -1
    shift: float = 5.0
    temperature: float = 0.1
    window: int | None = None
    omega: str = "learned"
    omega_eps: float = 0.0
    gqa_omega: str = "mean_logit"
    decision_margin: float = 0.0
    share_heads: str = "none"
    dms_window: int = 512
    dms_scale: float = 1.0
    stride: int | None = None
    neuron_scale: float = 0.0

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if isinstance(self.neuron, bool) or not isinstance(self.neuron, int):
            raise ValueError(f"neuron must be an integer, got {self.neuron!r}")
        for name in ("shift", "temperature", "omega_eps", "decision_margin", "dms_scale", "neuron_scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
        for name in ("window", "dms_window", "stride"):
            if isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be an integer, got {getattr(self, name)}")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        if self.window is not None and (not isinstance(self.window, int) or not 1 <= self.window <= MAX_DMC_WINDOW):
            raise ValueError(f"window must be between 1 and {MAX_DMC_WINDOW} or None, got {self.window!r}")
        if not self.omega_eps >= 0:
            raise ValueError(f"omega_eps must be at least 0, got {self.omega_eps}")
        if not isinstance(self.dms_window, int) or self.dms_window < 0:
            raise ValueError(f"dms_window must be an integer of at least 0, got {self.dms_window!r}")
        if not self.dms_scale > 0:
            raise ValueError(f"dms_scale must be positive, got {self.dms_scale}")
        if self.stride is not None and (not isinstance(self.stride, int) or self.stride < 1):
            raise ValueError(f"stride must be an integer of at least 1 or None, got {self.stride!r}")
        if self.stride is not None and self.mode != "dmc":
            raise ValueError(f"stride must be None with mode={self.mode!r}, got {self.stride}")
        if not 0 <= self.neuron_scale <= 1:
            raise ValueError(f"neuron_scale must be between 0 and 1, got {self.neuron_scale}")
        if self.mode == "dms" and self.window is not None:
            raise ValueError(f"window must be None with mode='dms', which merges nothing, got {self.window}")

    def place(self, head_dim: int) -> int:
        """The neuron as a number of 0..head_dim-1; ValueError where it is none."""
        if not -head_dim <= self.neuron < head_dim:
            raise ValueError(f"neuron must be between {-head_dim} and {head_dim - 1}, got {self.neuron}")
        return self.neuron % head_dim

    def check_model(self, config: Any) -> None:
        """Raises ValueError if the neuron is no coordinate of the heads of a model (of its config)."""
        sizes = sizes_of(decoder_config(config))["head dim"]
        self.place(max(sizes) if isinstance(sizes, list) else sizes)

    @classmethod
    def released(cls, **changes: Any) -> Self:
        """The settings of the authors' released code and models."""
        return cls(**({"window": 12, "omega_eps": 2.0**-7} | changes))

    def to_dict(self) -> dict[str, Any]:
        """What goes into a model's config.json."""
        return {"method": "dmc"} | asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        """Of what to_dict gave; ValueError for other methods and unknown fields."""
        given = dict(saved)
        if given.pop("method", None) != "dmc":
            raise ValueError(f"config.kvcompress must be of the method dmc, got {saved.get('method')!r}")
        unknown = sorted(set(given) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"config.kvcompress has unknown fields {', '.join(unknown)}: saved by a newer version?")
        return cls(**given)
