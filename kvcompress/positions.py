"""Positions: rotation tables from the model's own rotary embedding, and the gap that RGL puts between them."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .support.checks import MOST_INT32, need_integer


def parts(out: Any) -> tuple[Tensor, Tensor]:
    """(cos, sin) of what a rotary embedding returns: these, or a complex number of them (llama4)."""
    return (out.real, out.imag) if isinstance(out, Tensor) else (out[0], out[1])


def _copy(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    return copy.deepcopy(module, {} if config is None else {id(config): config})


def _plain_copy(module: nn.Module) -> Any:
    """A copy without hooks, those of other libraries that replace its forward included."""
    out = _copy(module).requires_grad_(False)
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        getattr(out, name).clear()
    return out


class RotaryTables:
    """Cosines and sines of the positions that a cache gives out, with the model's own frequencies.

    module: a rotary embedding, called as module(x, position_ids, *arguments, **keywords); it returns (cos, sin), or the
    two as a complex number. Works on a copy of it, because those that depend on length (dynamic, longrope) change
    themselves when called; their length is the number of keys in sight, never the position in the prompt.
    columns: which of its columns turns each pair of coordinates, coordinate i being paired with i + len(columns); None
    = the first half of them. axes: leading axes of its position_ids, () or (3,).
    beside: coordinates that stand in front of a head's own and hold positions alone (ALiBi).
    Raises ValueError for what is no rotary embedding.
    """

    beside = 0

    def __init__(
        self, module: nn.Module, columns: Tensor | None = None, *, arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None, axes: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        if not any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
            raise ValueError(
                f"{type(module).__name__} is not supported: a rotary embedding has frequencies in a buffer inv_freq"
            )
        self._module = _plain_copy(module)
        self._columns, self._arguments, self._keywords, self._axes = columns, arguments, keywords or {}, axes
        kind = getattr(module, "rope_type", "default")
        parameters: Any = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
        if isinstance(kind, dict):  # one embedding with frequencies of its own for each type of layers
            layer_type = next((x for x in (*arguments, *self._keywords.values()) if x in kind), None)
            kind = kind.get(layer_type, "default")
            parameters = parameters.get(layer_type, {})
        self._type: str = kind
        self._switch = 0  # length up to which frequencies are those of any other
        if "dynamic" in kind:
            self._switch = int(module.original_max_seq_len)  # type: ignore[arg-type]
        elif kind == "longrope":
            self._switch = int(parameters["original_max_position_embeddings"])
        self._tables: dict[tuple[int, torch.device, int | None], tuple[Tensor, Tensor]] = {}
        self._scaling: float | None = None

    def _regime(self, length: int) -> int:
        """A number that is the same for all lengths with the same frequencies."""
        if "dynamic" in self._type:
            return length if length > self._switch else 0
        return int(self._type == "longrope" and length > self._switch)

    def tables(self, rows: int, length: int, device: torch.device, without: int | None = None) -> tuple[Tensor, Tensor]:
        """(cos, sin), float32 [at least `rows`, rotary_dim/2], for `length` keys in sight.

        without: a coordinate of which nothing goes into the one it is paired with; None = all rotate.
        """
        key = (self._regime(length), device, without)
        held = self._tables.get(key)
        if held is None or held[0].shape[0] < rows:
            held = self._grown(key, rows, length, held)
        return held

    @torch.inference_mode(False)
    @torch.no_grad()
    def _grown(
        self, key: tuple[int, torch.device, int | None], rows: int, length: int, held: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        _, device, without = key
        rows = max(rows, 2 * held[0].shape[0] if held is not None else 256)
        module = _copy(self._module).to(device)
        forward, x = type(module).forward, torch.empty(1, 1, 1, dtype=torch.float32, device=device)

        def called(function: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
            out = function(module, x, positions.expand(*self._axes, 1, -1), *self._arguments, **self._keywords)
            return parts(out)

        for last in (0, max(length, 1) - 1):  # forgets what the model saw before, and settles for this length
            called(forward, torch.tensor([[last]], device=device))
        # past what would settle them anew by the positions of the table
        cos, sin = (x.flatten(0, -3)[0] for x in called(inspect.unwrap(forward), self._positions(rows, device)))
        columns = torch.arange(cos.shape[1] // 2, device=device) if self._columns is None else self._columns
        cos, sin = (table[:, columns.to(device)].float().contiguous() for table in (cos, sin))
        if without is not None and without < 2 * len(columns):
            sin[:, without % len(columns)] = 0
        if len(self._tables) >= 8:
            self._tables = {}
        self._tables[key] = (cos, sin)
        return cos, sin

    def _positions(self, rows: int, device: torch.device) -> Tensor:
        """[1, rows] or [axes, 1, rows]: the positions of a table's rows."""
        return torch.arange(rows, device=device)[None]

    def of(self, b: int) -> RotaryTables:
        """That of one sequence of a batch."""
        return self

    def step_tables(
        self, rows: int, lengths: list[int], device: torch.device
    ) -> tuple[Tensor, Tensor] | tuple[None, None] | None:
        """(cos, sin) for an op that rotates queries and keys of all sequences itself; (None, None) where nothing turns.

        None where it cannot: sequences have frequencies of their own, or rotation is more than a table.
        """
        if self._switch and len({self._regime(length) for length in lengths}) > 1:
            return None
        return self.tables(rows, lengths[0], device)

    def batch_tables(self, rows: int, lengths: list[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
        """(cos, sin, offsets) of a batch whose sequences have rows of their own for all that is to come, as
        joint_tables has them, the same objects until they grow; None where step_tables says it all, or nothing can."""
        return None

    def joint_tables(
        self, rows: int, lengths: list[int], device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor | None] | tuple[None, None, None]:
        """(cos, sin, offsets) for an op that takes one pair of tables for several sequences; None each where nothing
        turns.

        lengths: keys in sight of each sequence. offsets: int32 [B, 1], to be added to the positions of each, which are
        below rows; None = 0: all have the same frequencies.
        """
        regimes = [self._regime(length) for length in lengths]
        if len(set(regimes)) == 1:
            return *self.tables(rows, lengths[0], device), None
        of = {regime: i for i, regime in enumerate(dict.fromkeys(regimes))}
        parts = [self.tables(rows, lengths[regimes.index(regime)], device) for regime in of]
        cos, sin = (torch.cat([part[i][:rows] for part in parts]) for i in range(2))
        offsets = torch.tensor([[of[regime] * rows] for regime in regimes], dtype=torch.int32, device=device)
        return cos, sin, offsets

    @property
    def follows_length(self) -> bool:
        """Whether frequencies follow the number of keys in sight (dynamic), so that no position is too large."""
        return "dynamic" in self._type

    @property
    def asks_host(self) -> bool:
        """Whether the model's own embedding asks the device for the largest position of each pass, where it rotates."""
        return self._switch > 0

    def check_axes(self, axes: int) -> None:
        """Raises ValueError where tokens cannot stand elsewhere on each of so many axes (M-RoPE), as an image's do."""
        reason = None
        if self._axes != (axes,):
            knows = f"{self._axes[0]} positions" if self._axes else "one position"
            reason = f"this model's rotation knows {knows} a token"
        elif self._switch:
            reason = f"frequencies of rope type {self._type!r} follow the length, which such places are not"
        else:
            x = torch.empty(1, 1, 1, dtype=torch.float32, device="cpu")
            at = torch.zeros(*self._axes, 1, 1, dtype=torch.int64, device="cpu")
            module = _copy(self._module).to("cpu")
            if parts(type(module).forward(module, x, at, *self._arguments, **self._keywords))[0].ndim > 3:
                reason = "this model joins the axes in its attention, behind its rotary embedding"
        if reason is not None:
            raise ValueError(
                f"position_ids must be the same on every axis, got those of an image or video: {reason}; give text"
            )

    def check_one_table(self, length: int) -> None:
        """Raises ValueError if `length` keys in sight have other frequencies: keys cannot move then."""
        if self._regime(length):
            raise ValueError(
                f"positions cannot be given anew with rope type {self._type!r} beyond its switch point: {length} "
                "positions have frequencies of their own; use positions='original' or a shorter prompt"
            )

    @property
    def scaling(self) -> float:
        """Factor that cosines and sines carry (yarn, longrope); 1 elsewhere."""
        if self._scaling is None:  # the cosine of no angle
            self._scaling = float(self.tables(1, 1, torch.device("cpu"))[0][0].max())
        return self._scaling

    def rotate(
        self, x: Tensor, positions: Tensor | None, bound: int, lengths: list[int], *, without: int | None = None
    ) -> Tensor:
        """x [B, H, T, D] rotated to positions (int32 [B, T] below bound; None = 0..T-1), lengths[b] keys in sight.

        without: a coordinate that counts as 0 and is 0 in the result; None = none.
        """
        out = self._apply(x, positions, bound, lengths, inverse=False, without=without)
        if without is not None:
            out[..., without] = 0
        return out

    def unrotate(self, x: Tensor, bound: int, lengths: list[int], positions: Tensor | None = None) -> Tensor:
        """Undoes rotate(x, positions, bound, lengths)."""
        return self._apply(x, positions, bound, lengths, inverse=True)

    def distances(self, end: int, tokens: int, first: int, last: int, chunk: int, device: torch.device) -> Tensor:
        """int32 [1, last - first]: of the `tokens` tokens before number `end`, how far those from their first to
        last - 1 move where each `chunk` of them is to stand behind all."""
        return tokens - torch.arange(first, last, dtype=torch.int32, device=device)[None] // chunk * chunk

    def behind(self, x: Tensor, end: int, tokens: int, first: int, chunk: int, length: int) -> Tensor:
        """x [1, H, n, D] of those tokens from their first on, before rotation, rotated to there."""
        numbers = torch.arange(x.shape[2], dtype=torch.int32, device=x.device)[None] % chunk + end
        return self.rotate(x, numbers, end + min(chunk, x.shape[2]), [length])

    def move_back(self, x: Tensor, distance: Tensor, bound: int, length: int) -> Tensor:
        """Rotated x [B, H, T, D] moved to positions smaller by distance (int32 [B, T] below bound)."""
        return self._moved(x, distance, bound, length, inverse=True)

    def move_on(self, x: Tensor, distance: Tensor, bound: int, length: int) -> Tensor:
        """The same to larger positions."""
        return self._moved(x, distance, bound, length, inverse=False)

    def _moved(self, x: Tensor, distance: Tensor, bound: int, length: int, *, inverse: bool) -> Tensor:
        cos, sin = self.tables(bound, length, x.device)
        if self.scaling != 1.0:
            cos, sin = cos / self.scaling, sin / self.scaling
        return ops.rope(x, cos, sin, distance, inverse=inverse)

    def _apply(
        self, x: Tensor, positions: Tensor | None, bound: int, lengths: list[int], *, inverse: bool,
        without: int | None = None,
    ) -> Tensor:  # fmt: skip
        if len({self._regime(length) for length in lengths}) > 1:  # sequences with frequencies of their own
            parts = []
            for b, length in enumerate(lengths):
                own = None if positions is None else positions[b : b + 1]
                parts.append(self._apply(x[b : b + 1], own, bound, [length], inverse=inverse, without=without))
            return torch.cat(parts)
        cos, sin = self.tables(bound, lengths[0], x.device, without)
        if inverse and self.scaling != 1.0:  # (a R)^-1 = R^T / a
            cos, sin = cos / self.scaling**2, sin / self.scaling**2
        return ops.rope(x, cos, sin, positions, inverse=inverse)


class NormedTables(RotaryTables):
    """Rotation that a norm follows in every head (hunyuan): its weights, as they are now, are taken out of queries or
    keys before they rotate and put back behind. norm: without a mean."""

    def __init__(self, tables: RotaryTables, norm: nn.Module) -> None:
        self.__dict__.update(vars(tables))
        self.norm: Any = norm

    def _weights(self, like: Tensor) -> Tensor:
        return self.norm(torch.ones(like.shape[-1], dtype=torch.float32, device=like.device))

    def check_axes(self, axes: int) -> None:
        raise ValueError(
            "position_ids must be the same on every axis, got those of an image or video: a norm with weights follows "
            "this model's rotation; give text"
        )

    def step_tables(self, rows: int, lengths: list[int], device: torch.device) -> None:
        return None

    def _moved(self, x: Tensor, distance: Tensor, bound: int, length: int, *, inverse: bool) -> Tensor:
        weights = self._weights(x)
        return (super()._moved(x.float() / weights, distance, bound, length, inverse=inverse) * weights).to(x.dtype)

    def _apply(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weights = self._weights(x)
        return (super()._apply(x.float() / weights, *args, **kwargs) * weights).to(x.dtype)


class Unrotated(RotaryTables):
    """Of a layer that gives its queries and keys no position."""

    def __init__(self) -> None:
        self._type, self._switch, self._scaling = "default", 0, 1.0

    def tables(self, rows: int, length: int, device: torch.device, without: int | None = None) -> tuple[Tensor, Tensor]:
        return torch.ones(rows, 1, device=device), torch.zeros(rows, 1, device=device)

    def step_tables(self, rows: int, lengths: list[int], device: torch.device) -> tuple[None, None]:
        return None, None

    def joint_tables(self, rows: int, lengths: list[int], device: torch.device) -> tuple[None, None, None]:
        return None, None, None

    def _moved(self, x: Tensor, distance: Tensor, bound: int, length: int, *, inverse: bool) -> Tensor:
        return x

    def _apply(self, x: Tensor, *args: Any, without: int | None = None, **kwargs: Any) -> Tensor:
        return x if without is None else x.clone()


@dataclass(frozen=True)
class RemoteGap:
    """RGL: where the compressed tokens of a pruned cache stand, as seen from the near ones.

    Compressed tokens are numbered by rank, a number of ids stays unused, and near tokens follow; ids never grow without
    end, and none reaches the length that the model was trained for.
    gap: "auto" (the largest that fits, at most 4096) or tokens, 0 = contiguous. reading: what the gap measures:
    "between" the windows (unused ids), "to_query" (from the newest compressed token to the newest near one: the unused
    ids are gap - near), "constant" (every compressed key at this distance from every query). comp_positions:
    "contiguous" or "shared" (all compressed tokens on id 0). near_length: least number of last tokens that are near;
    None = as many as the pruner always keeps. headroom: tokens that may follow a compression (the cache's every or
    chunk_size, where that is more).
    on_overflow: where ids would reach the trained length: "error", "warn" (once, go on) or "clamp" (warn, smaller gap).
    Raises ValueError for a field out of range. Source: IntelLLM, section 4.3.2; the two-segment form is ours.
    """

    gap: int | str = "auto"
    reading: str = "between"
    comp_positions: str = "contiguous"
    near_length: int | None = None
    headroom: int = 128
    on_overflow: str = "error"

    def __post_init__(self) -> None:
        if isinstance(self.gap, str) and self.gap != "auto":
            raise ValueError(f"gap must be 'auto' or an integer of at least 0, got {self.gap!r}")
        if not isinstance(self.gap, str):
            need_integer("gap", self.gap, 0, MOST_INT32)
        if self.near_length is not None:
            need_integer("near_length", self.near_length, 1, MOST_INT32)
        need_integer("headroom", self.headroom, 1, MOST_INT32)
        for name, choices in (
            ("reading", ("between", "to_query", "constant")),
            ("comp_positions", ("contiguous", "shared")),
            ("on_overflow", ("error", "warn", "clamp")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.reading == "constant" and self.gap == "auto":
            raise ValueError("gap must be a number of tokens with reading='constant', got 'auto'")

    @property
    def shared(self) -> bool:
        """All compressed keys stand on one id."""
        return self.comp_positions == "shared" or self.reading == "constant"

    def blank(
        self, compressed: int, near: int, growth: int, trained_length: int, *,
        warn: Callable[[str], None] = warnings.warn,
    ) -> int:  # fmt: skip
        """Unused ids between the windows ("constant": the distance itself), within the trained length.

        compressed, near: tokens of the two windows after a compression. growth: tokens between two compressions, as far
        as known. warn: told of what does not fit but may. Raises ValueError where nothing fits, or where on_overflow
        says so.
        """
        headroom = max(self.headroom, growth)
        if self.reading == "constant":
            assert isinstance(self.gap, int)
            if self.gap < near + headroom:
                raise ValueError(
                    f"gap must be at least near {near} + headroom {headroom} tokens with reading='constant', "
                    f"got {self.gap}"
                )
            most, wanted, others = trained_length - 1, self.gap, 1
        else:
            ids = min(compressed, 1) if self.shared else compressed
            others = ids + near + headroom
            most = trained_length - others
            if self.gap == "auto":
                wanted = min(4096, most)
            else:
                assert isinstance(self.gap, int)
                wanted = self.gap - (near if self.reading == "to_query" else 0)
                if wanted < 0:
                    raise ValueError(f"gap must be at least near = {near} with reading='to_query', got {self.gap}")
        if most < 0:
            raise ValueError(
                f"compressed {compressed} + near {near} + headroom {headroom} tokens leave no position below the "
                f"{trained_length} that the model was trained for; use a smaller budget or headroom"
            )
        if self.reading == "constant" and most < near + headroom:
            raise ValueError(
                f"near {near} + headroom {headroom} tokens reach beyond the {trained_length - 1} positions that a gap "
                "may have with reading='constant'; use a smaller budget or headroom"
            )
        if wanted <= most:
            return wanted
        message = (
            f"gap {self.gap} needs {wanted + others} positions (compressed_length {compressed} + gap {wanted} + "
            f"near_length {near} + headroom {headroom}) but the model was trained for {trained_length}; "
            f"use gap <= {self.gap - (wanted - most)} or on_overflow='clamp'"  # type: ignore[operator]
        )
        if self.on_overflow == "error":
            raise ValueError(message)
        warn(message)
        return most if self.on_overflow == "clamp" else wanted
