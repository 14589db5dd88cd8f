"""What a model converted to DMC or DMS is: everything that inference needs to know of how it was trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from ..hf.config import decoder_config, sizes_of
from ..ops.dmc_accumulate import MAX_DMC_WINDOW
from ..ops.dmc_gates import IMPORTANCES, LARGEST, SMALLEST
from ..ops.native import MAX_HEAD_DIM
from ..support.checks import MOST_INT32, need, need_fields, need_integer, need_number

if TYPE_CHECKING:
    from typing_extensions import Self

CHOICES = {
    "mode": ("dmc", "dms"),
    "omega": ("learned", "uniform"),
    "gqa_omega": IMPORTANCES,
    "share_heads": ("none", "mean", "head0"),
    "dms_decides": ("successor", "own"),
}


@dataclass(frozen=True)
class DMCConfig:
    """How a converted model decides and merges; saved with it as config.kvcompress.

    mode: "dmc" (a token is appended or merged into the newest entry) or "dms" (it is dropped once it is dms_window
    tokens old, if its successor decided so, see dms_decides). neuron: the coordinate of queries and keys that carries
    the decisions, negative from the end; it takes no part in attention. shift, temperature: c and tau of the relaxed
    decisions.
    window: an entry averages its last tokens alone, 1..64 (released models: 12); None = all.
    omega: "learned" weights from the query neuron, or "uniform" ones. omega_eps: added to them. gqa_omega: how the
    query heads of a KV head agree on one: "mean_logit", "mean_sigmoid" or "first". decision_margin: logits must exceed
    it to merge. share_heads: "none", or one decision and weight for all heads of a layer (DMC-HardC), their "mean" or
    that of "head0". dms_window: tokens that are never dropped, besides the newest. dms_scale: factor of the logits.
    dms_decides: whose decision drops a token: its "successor"'s, as in DMC and the authors' code of DMS, or its "own",
    which can be fitted to a pruner's scores (dmc.fit): the token itself says twice as well what they will be.
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
    dms_decides: str = "successor"
    stride: int | None = None
    neuron_scale: float = 0.0

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            need(value in choices, f"{name} must be one of {', '.join(choices)}, got {value!r}")
        for name, least, most in (
            ("shift", -LARGEST, LARGEST), ("temperature", SMALLEST, LARGEST), ("omega_eps", 0, LARGEST),
            ("decision_margin", -LARGEST, LARGEST), ("dms_scale", SMALLEST, LARGEST), ("neuron_scale", 0, 1),
        ):  # fmt: skip
            need_number(name, getattr(self, name), least, most)
        need_integer("neuron", self.neuron, -MAX_HEAD_DIM, MAX_HEAD_DIM - 1)
        need_integer("dms_window", self.dms_window, 0, MOST_INT32 - 1)  # and the newest token besides
        own = self.dms_decides == "own"
        need(not own or self.mode == "dms", f"dms_decides must be 'successor' with mode={self.mode!r}, got 'own'")
        if self.window is not None:
            need_integer("window", self.window, 1, MAX_DMC_WINDOW)
            need(self.mode == "dmc", f"window must be None with mode='dms', which merges nothing, got {self.window}")
        if self.stride is not None:
            need_integer("stride", self.stride, 1, MOST_INT32)
            need(self.mode == "dmc", f"stride must be None with mode={self.mode!r}, got {self.stride}")

    @property
    def decides_alone(self) -> bool:
        """Every KV head decides and weighs by its own neurons."""
        return self.share_heads == "none" and self.stride is None

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
        return cls(**need_fields(saved, "dmc", [field.name for field in fields(cls)]))
