"""What a model converted to PoD, or to one of its baselines, is: which layer leads which, and what is near."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from ..hf.config import decoder_config, sizes_of
from ..support.checks import MOST_INT32, need, need_fields, need_integer, need_number
from .lead import Lead, LeadTable, check_lead

if TYPE_CHECKING:
    from typing_extensions import Self

MODES = ("pod", "window", "cla")


@dataclass(frozen=True)
class PoDConfig(LeadTable):
    """How a converted model attends; saved with it as config.kvcompress.

    lead: [layers][KV heads], the layer whose queries and keys a head uses for distant tokens: itself, or the lead of
    the next layer below of the same kind. A layer that sees a window or a chunk, or recurs, leads itself and is left as
    it is.
    sinks, recent: the first tokens, and the last ones (the query's own included), that are near. tau: followers skip
    distant tokens while decoding where the near ones have at least this probability; None = never.
    mode: "pod"; or a baseline: "window" (near tokens are all that is seen; lead is of no consequence), "cla" (a head
    uses its lead's keys and values for all tokens, with its own queries; sinks and recent are of no consequence).
    Raises ValueError for a field out of range, naming the layer and head where it is of lead.
    Source: PoD, sections 2 and 3; CLA (Brandon et al. 2024).
    """

    lead: Lead
    sinks: int = 16
    recent: int = 4080
    tau: float | None = None
    mode: str = "pod"

    def __post_init__(self) -> None:
        object.__setattr__(self, "lead", check_lead(self.lead))  # JSON brings lists
        need_integer("sinks", self.sinks, 0, MOST_INT32)
        need_integer("recent", self.recent, 1, MOST_INT32)
        need(
            self.window <= MOST_INT32,
            f"sinks + recent must be at most {MOST_INT32} tokens, got {self.sinks} + {self.recent}",
        )
        if self.tau is not None:
            need_number("tau", self.tau, 0, 1)
        need(self.mode in MODES, f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")

    def led_by(self, layer: int) -> list[tuple[int, list[int]]]:
        """The leads of a layer's heads, lowest first, each with the KV heads that it leads."""
        row = self.lead[layer]
        return [(a, [head for head, b in enumerate(row) if a == b]) for a in sorted(set(row))]

    def last_follower(self, layer: int) -> int:
        """The highest layer that follows this one; the layer itself if none does."""
        return max(above for above, row in enumerate(self.lead) if above == layer or layer in row)

    def check_model(self, config: Any) -> None:
        """Raises ValueError if lead is not of the size of a model (of its config)."""
        sizes, found = sizes_of(decoder_config(config)), (len(self.lead), len(self.lead[0]))
        heads = sizes["KV heads"]
        needed = (sizes["layers"], found[1] if isinstance(heads, list) and found[1] in heads else heads)
        if needed != found:
            raise ValueError(
                f"lead must be [{needed[0]} layers][{needed[1]} KV heads] for this model, got [{found[0]}][{found[1]}]"
            )

    @classmethod
    def of(cls, plan: LeadTable, **changes: Any) -> Self:
        """What a plan asks for. changes: further fields."""
        return cls(plan.lead, plan.sinks, plan.recent, **changes)

    def to_dict(self) -> dict[str, Any]:
        """What goes into a model's config.json."""
        return {"method": "pod"} | asdict(self) | {"lead": [list(row) for row in self.lead]}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        """Of what to_dict gave; ValueError for other methods and unknown or missing fields."""
        given = need_fields(saved, "pod", [field.name for field in fields(cls)])
        need("lead" in given, "config.kvcompress must have the field lead, got none")
        return cls(**given)
