"""What a token's own queries say of how much it will be attended to: fitted before, in a folder."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..checks import need, need_number
from ..files import naming, read_json, staged, write_text
from ..hf.facts import LayerFacts
from ..names import folder_of

FORMAT = "kvcompress gates 1"
_WEIGHTS, _ABOUT = "gates.safetensors", "gates.json"
_SIZES = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
          "num_key_value_heads", "vocab_size")  # fmt: skip
_MOST = 80.0  # of a logarithm, either way: float32 holds its exponential


@dataclass(frozen=True, eq=False)
class Gates:
    """Of each KV head a map from a token's queries to the logarithm of how much attention its key is worth.

    layers: of each layer that compresses float32 [Hkv, Hq D + 1]: weights of all its queries before rotation, head
    after head, and of a 1. levels: rising; a share of i / (len - 1) of what is said of texts held out lies under the
    i-th of them; none = not known, and no threshold can be had of a share. model: fields of their model's config
    (sizes_of); none = not known. measured: what they come from, for people. r2: [layers][Hkv], how much of the variance
    of what they were fitted to they explain in texts held out; none = not known.
    `kvcompress fit gates` and kvcompress.gates.fit_gates make them.
    Raises ValueError for anything else.
    Source: gates that say KVzip's scores are KVzap's and Fast KVzip's; theirs look at hidden states.
    """

    layers: tuple[Tensor, ...]
    levels: tuple[float, ...] = ()
    model: dict[str, Any] = field(default_factory=dict)
    measured: str = ""
    r2: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        good = isinstance(self.layers, (list, tuple)) and len(self.layers) > 0
        need(good, f"layers must be a tensor for each layer that compresses, got {type(self.layers).__name__}")
        for number, layer in enumerate(self.layers):
            good = isinstance(layer, Tensor) and layer.dtype == torch.float32 and layer.ndim == 2 and layer.numel() > 0
            got = f"{layer.dtype} {tuple(layer.shape)}" if isinstance(layer, Tensor) else type(layer).__name__
            need(good, f"layers[{number}] must be float32 [Hkv, Hq D + 1], got {got}")
            need(bool(layer.isfinite().all()), f"layers[{number}] must be finite numbers, got others")
        levels = tuple(self.levels)
        good = all(type(x) is float and math.isfinite(x) for x in levels)
        need(good and list(levels) == sorted(levels) and len(levels) != 1,
             "levels must be rising numbers, at least two, or none")  # fmt: skip
        need(isinstance(self.model, dict), f"model must be fields of a config, got {self.model!r}")
        need(isinstance(self.measured, str), f"measured must be a text, got {self.measured!r}")
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "levels", levels)
        good = all(isinstance(row, (list, tuple)) for row in self.r2)
        good = good and all(type(x) in (int, float) and math.isfinite(x) for row in self.r2 for x in row)
        need(good, f"r2 must be finite numbers of layers and heads, got {self.r2}")
        object.__setattr__(self, "r2", tuple(tuple(row) for row in self.r2))

    def __repr__(self) -> str:
        heads = "+".join(str(n) for n in dict.fromkeys(map(len, self.layers)))
        return f"Gates({len(self.layers)} layers, {heads} KV heads each; {self.measured or 'not known of what'})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Gates) or len(self.layers) != len(other.layers):
            return False
        rest = [(x.levels, x.model, x.measured, x.r2) for x in (self, other)]
        pairs = zip(self.layers, other.layers, strict=True)
        return rest[0] == rest[1] and all(torch.equal(own.cpu(), theirs.cpu()) for own, theirs in pairs)

    def __hash__(self) -> int:
        return hash((self.levels, self.measured, self.r2))

    def __deepcopy__(self, memo: object) -> Gates:
        return self  # forks of a cache have the same

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_there"}

    def _on(self, number: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """A layer's weights [Hkv, Hq D] and what comes of the 1, [Hkv], brought to a device once."""
        there: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = vars(self).setdefault("_there", {})
        if (number, device) not in there:
            with torch.inference_mode(False):
                layer = self.layers[number].to(device)
                there[number, device] = layer[:, :-1].contiguous(), layer[:, -1].contiguous()
        return there[number, device]

    def says(self, number: int, queries: Tensor) -> Tensor:
        """float32 [B, Hkv, S]: logarithms. number: the layer's place among those that compress. queries: [B, Hq, S, D],
        before rotation."""
        weights, bias = self._on(number, queries.device)
        B, heads, S, D = queries.shape
        if heads * D != weights.shape[1]:
            self._need_width(number, self.layers[number], heads * D)
        kind = queries.device.type
        seen = queries.transpose(1, 2).flatten(2).float()
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            said = torch.nn.functional.linear(seen, weights, bias)
        return said.clamp_(-_MOST, _MOST).transpose(1, 2)

    def threshold(self, share: float) -> float:
        """Above which that share of what is said lies, over all layers and heads, in texts that were held out. Raises
        ValueError without levels."""
        need_number("share", share, 0, 1)
        need(len(self.levels) > 0, "gates must have levels for a threshold, got none")
        return level_at(self.levels, 1 - share)

    def check_rows(self, heads: Sequence[int]) -> None:
        """Raises ValueError if they are not for a model whose layers that compress have so many KV heads."""
        own = [len(layer) for layer in self.layers]
        need(
            own == list(heads),
            f"gates must be of this model: they have KV heads {own}, the model's layers that compress {list(heads)}"
            + (f"; measured: {self.measured}" if self.measured else ""),
        )

    def check_model(self, decoder: Any, layers: Sequence[LayerFacts]) -> None:
        """Raises ValueError if they are not for a model of these layers, those that compress, or are known to be of
        another one."""
        theirs = sizes_of(decoder.config)
        differ = [f"{name} = {value} (here {theirs.get(name)})" for name, value in self.model.items()
                  if theirs.get(name) != value]  # fmt: skip
        need(not differ, f"gates must be of this model, {type(decoder).__name__}: they are of one with "
             f"{', '.join(differ)}")  # fmt: skip
        self.check_rows([layer.kv_heads for layer in layers])
        for number, (own, layer) in enumerate(zip(self.layers, layers, strict=True)):
            self._need_width(number, own, layer.query_heads * layer.head_dim)

    @staticmethod
    def _need_width(number: int, weights: Tensor, width: int) -> None:
        need(width + 1 == weights.shape[1], f"gates must be of this model: they look at {weights.shape[1] - 1} numbers "
             f"of a token's queries in layer {number}, the model has {width}")  # fmt: skip

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """A new folder with gates.safetensors and gates.json, whole or not at all. Returns its path. Raises ValueError
        for a folder that is there."""
        folder = Path(folder)
        need(not folder.exists(), f"folder must be new, got {folder}")
        about = {"format": FORMAT, "measured": self.measured, "model": self.model, "levels": self.levels, "r2": self.r2}
        text = json.dumps(about, allow_nan=False) + "\n"
        with naming(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                fresh = Path(temporary, folder.name)
                fresh.mkdir()
                weights = {f"layers.{i}": x.detach().cpu().contiguous().clone() for i, x in enumerate(self.layers)}
                with staged(fresh / _WEIGHTS) as written:  # of the mode of new files here
                    save_file(weights, written)
                write_text(fresh / _ABOUT, text)
                fresh.rename(folder)
        return folder

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> Gates:
        """What save wrote. folder: or its name on the Hub, "owner/name". Raises ValueError for anything else,
        FileNotFoundError for no such folder, ConnectionError where the Hub cannot be reached."""
        folder = folder_of("gates", os.fspath(folder), (_WEIGHTS, _ABOUT))
        about = read_json(folder / _ABOUT, "gates' description", FORMAT)
        known = {"measured", "model", "levels", "r2"}
        need(set(about) == known, f"{_ABOUT} must have the fields {', '.join(sorted(known))}, got {sorted(about)}")
        try:
            found = load_file(folder / _WEIGHTS)
        except FileNotFoundError:
            raise FileNotFoundError(f"gates must have a file of weights, got none at {folder / _WEIGHTS}") from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder / _WEIGHTS} is damaged, or no file of gates: {error}") from None
        names = [f"layers.{i}" for i in range(len(found))]
        need(set(found) == set(names), f"{_WEIGHTS} must hold layers.0, layers.1, ..., got {sorted(found)}")
        levels = about["levels"]
        good = isinstance(levels, list) and all(type(x) in (int, float) for x in levels)
        need(good and isinstance(about["r2"], list), f"levels and r2 of {_ABOUT} must be lists of numbers")
        return Gates(tuple(found[name] for name in names), tuple(map(float, levels)), about["model"],
                     about["measured"], about["r2"])  # fmt: skip


def as_gates(given: Any) -> Gates:
    """Gates, or of the folder that they are in. Raises ValueError for anything else."""
    if isinstance(given, (str, os.PathLike)):
        return Gates.load(given)
    need(isinstance(given, Gates), f"gates must be Gates, or the folder that they are in, got {type(given).__name__}")
    return given


def level_at(levels: Sequence[float], share: float) -> float:
    """Under which that share of all numbers lies. levels: rising; the i-th lies over a share of i / (len - 1)."""
    place = share * (len(levels) - 1)
    below = min(int(place), len(levels) - 2)
    return levels[below] + (place - below) * (levels[below + 1] - levels[below])


def sizes_of(config: Any) -> dict[str, Any]:
    """Fields of a decoder's config that tell models apart, whatever is quantised or new in a version."""
    return {name: getattr(config, name) for name in _SIZES if getattr(config, name, None) is not None}
