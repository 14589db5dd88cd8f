"""What a token says, as it comes, of how much it will be attended to: learned before, in a folder."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..hf.facts import LayerFacts
from ..support.checks import need, need_number
from ..support.files import naming, read_json, staged, write_text
from ..support.names import file_of, folder_of
from .gate_forms import FORMS, GateForm, LinearGate, formed
from .published_gates import CONFIG, fast_kvzip, kvzap, need_kvzap, read_tensors

FORMAT = "kvcompress gates 1"
QUERIES, HIDDEN = LOOKS_AT = ("queries", "hidden states")
_WEIGHTS, _ABOUT = "gates.safetensors", "gates.json"
_SIZES = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
          "num_key_value_heads", "vocab_size")  # fmt: skip
_MOST = 80.0  # of a logarithm, either way: float32 holds its exponential


@dataclass(frozen=True, eq=False)
class Gates:
    """Of each KV head a map from numbers of a token to the logarithm of how much attention its key is worth.

    layers: of each layer that compresses a GateForm, all of one class; or in place of a LinearGate a tensor, float32
    [Hkv, n + 1], its bias last. levels: rising; a share of i / (len - 1) of what is said of texts held out lies under
    the i-th of them; none = not known, and no threshold can be had of a share. model: fields of their model's config
    (sizes_of); none = not known. measured: what they come from, for people. r2: [layers][Hkv], how much of the variance
    of what they were fitted to they explain in texts held out; none = not known. looks_at: "queries": a token's n = Hq
    D numbers before rotation, head after head; "hidden states": what enters the layer's attention.
    `kvcompress fit gates` and kvcompress.gates.fit_gates make them; load reads those of KVzap and Fast KVzip too.
    Raises ValueError for anything else.
    Source: gates that say KVzip's scores are KVzap's and Fast KVzip's; theirs look at hidden states.
    """

    layers: tuple[GateForm, ...]
    levels: tuple[float, ...] = ()
    model: dict[str, Any] = field(default_factory=dict)
    measured: str = ""
    r2: tuple[tuple[float, ...], ...] = ()
    looks_at: str = QUERIES

    def __post_init__(self) -> None:
        good = isinstance(self.layers, (list, tuple)) and len(self.layers) > 0
        need(good, f"layers must be a form for each layer that compresses, got {type(self.layers).__name__}")
        object.__setattr__(self, "layers", _forms(self.layers))
        levels = tuple(self.levels)
        good = all(type(x) is float and math.isfinite(x) for x in levels)
        need(good and list(levels) == sorted(levels) and len(levels) != 1,
             "levels must be rising numbers, at least two, or none")  # fmt: skip
        need(isinstance(self.model, dict), f"model must be fields of a config, got {self.model!r}")
        need(isinstance(self.measured, str), f"measured must be a text, got {self.measured!r}")
        need(self.looks_at in LOOKS_AT, f"looks_at must be one of {', '.join(LOOKS_AT)}, got {self.looks_at!r}")
        object.__setattr__(self, "levels", levels)
        good = all(isinstance(row, (list, tuple)) for row in self.r2)
        good = good and all(type(x) in (int, float) and math.isfinite(x) for row in self.r2 for x in row)
        need(good, f"r2 must be finite numbers of layers and heads, got {self.r2}")
        object.__setattr__(self, "r2", tuple(tuple(row) for row in self.r2))

    def __repr__(self) -> str:
        heads = "+".join(str(n) for n in dict.fromkeys(layer.heads for layer in self.layers))
        return f"Gates({len(self.layers)} layers, {heads} KV heads each; {self.measured or 'not known of what'})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Gates) or [type(x) for x in self.layers] != [type(x) for x in other.layers]:
            return False
        rest = [(x.levels, x.model, x.measured, x.r2, x.looks_at) for x in (self, other)]
        own, theirs = ([x.cpu() for layer in gates.layers for x in layer.tensors().values()] for gates in (self, other))
        return rest[0] == rest[1] and all(map(torch.equal, own, theirs))

    def __hash__(self) -> int:
        return hash((self.levels, self.measured, self.r2))

    def __deepcopy__(self, memo: object) -> Gates:
        return self  # forks of a cache have the same

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_there"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({"looks_at": QUERIES} | state)
        vars(self)["layers"] = _forms(self.layers)  # tensors in files of caches that an earlier version saved

    @property
    def form(self) -> str:
        """Of all layers: linear, two layers or sinks."""
        return next(name for name, kind in FORMS.items() if type(self.layers[0]) is kind)

    def _on(self, number: int, device: torch.device) -> GateForm:
        """A layer's form, brought to a device once."""
        there: dict[tuple[int, torch.device], GateForm] = vars(self).setdefault("_there", {})
        if (number, device) not in there:
            with torch.inference_mode(False):
                there[number, device] = self.layers[number].on(device)
        return there[number, device]

    def seen(self, queries: Tensor | None, entering: Tensor | None) -> Tensor:
        """What they look at: queries [B, Hq, S, D] before rotation, or what entered attention, [B, 1, S, n]. Raises
        ValueError where that is None."""
        found = queries if self.looks_at == QUERIES else entering
        if found is None:
            raise ValueError(f"{self.looks_at} must be at hand for gates that look at them, got none")
        return found

    def says(self, number: int, seen: Tensor) -> Tensor:
        """float32 [B, Hkv, S]: logarithms. number: the layer's place among those that compress. seen: [B, H, S, D],
        see seen."""
        form = self._on(number, seen.device)
        B, heads, S, D = seen.shape
        if heads * D != form.width:
            self._need_width(number, heads * D)
        kind = seen.device.type
        x = seen.transpose(1, 2).flatten(2).float()
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            said = form.says(x)
        return said.clamp_(-_MOST, _MOST).transpose(1, 2)

    def threshold(self, share: float) -> float:
        """Above which that share of what is said lies, over all layers and heads, in texts that were held out. Raises
        ValueError without levels."""
        need_number("share", share, 0, 1)
        need(len(self.levels) > 0, "gates must have levels for keep, got none: kvcompress.gates.with_levels measures "
             "them on your texts; or give a threshold")  # fmt: skip
        return level_at(self.levels, 1 - share)

    def check_rows(self, heads: Sequence[int]) -> None:
        """Raises ValueError if they are not for a model whose layers that compress have so many KV heads."""
        own = [layer.heads for layer in self.layers]
        measured = f"; measured: {self.measured}" if self.measured else ""
        need(len(own) == len(heads), f"gates must be of this model: they have {len(own)} layers, {len(heads)} are "
             f"needed (those of the model that compress){measured}")  # fmt: skip
        need(own == list(heads), f"gates must be of this model: they have KV heads {own}, the model's layers that "
             f"compress {list(heads)}{measured}")  # fmt: skip

    def check_model(self, decoder: Any, layers: Sequence[LayerFacts]) -> None:
        """Raises ValueError if they are not for a model of these layers, those that compress, or are known to be of
        another one."""
        theirs = sizes_of(decoder.config)
        differ = [f"{name} = {value} (here {theirs.get(name)})" for name, value in self.model.items()
                  if theirs.get(name) != value]  # fmt: skip
        need(not differ, f"gates must be of this model, {type(decoder).__name__}: they are of one with "
             f"{', '.join(differ)}")  # fmt: skip
        self.check_rows([layer.kv_heads for layer in layers])
        for number, layer in enumerate(layers):
            queries = self.looks_at == QUERIES
            self._need_width(number, layer.query_heads * layer.head_dim if queries else decoder.config.hidden_size)

    def _need_width(self, number: int, width: int) -> None:
        own = self.layers[number].width
        need(width == own, f"gates must be of this model: they look at {own} numbers of a token's {self.looks_at} in "
             f"layer {number}, the model has {width}")  # fmt: skip

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """A new folder with gates.safetensors and gates.json, whole or not at all. Returns its path. Raises ValueError
        for a folder that is there."""
        folder = Path(folder)
        need(not folder.exists(), f"folder must be new, got {folder}")
        about = {"format": FORMAT, "looks_at": self.looks_at, "form": self.form, "measured": self.measured,
                 "model": self.model, "levels": self.levels, "r2": self.r2}  # fmt: skip
        text = json.dumps(about, allow_nan=False) + "\n"
        with naming(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                fresh = Path(temporary, folder.name)
                fresh.mkdir()
                weights = {
                    f"layers.{i}.{name}": x.detach().cpu().contiguous().clone()
                    for i, layer in enumerate(self.layers)
                    for name, x in layer.tensors().items()
                }
                with staged(fresh / _WEIGHTS) as written:  # of the mode of new files here
                    save_file(weights, written)
                write_text(fresh / _ABOUT, text)
                fresh.rename(folder)
        return folder

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> Gates:
        """What save wrote, or what others have published.

        folder: or its name on the Hub, "owner/name"; ours, or one of KVzap ("nvidia/KVzap-mlp-Qwen3-8B"). Fast KVzip's
        are files: "Jang-Hyun/Fast-KVzip/qwen3-8b/q4_dim16_sink16.pt", or one that is here. They have no levels
        (kvcompress.gates.with_levels).
        Raises ValueError for anything else, FileNotFoundError for no such folder or file, ConnectionError where the Hub
        cannot be reached.
        """
        name = os.fspath(folder)
        if name.endswith(".pt") and not Path(name).is_dir():
            path = file_of("gates", name, "gates.pt")
            if not path.is_file():
                raise FileNotFoundError(
                    f"gates must be a file, or one on the Hub (owner/name/file), got {name!r}: there is no such file"
                )
            return _published(name, "Fast KVzip", fast_kvzip(path))
        folder = folder_of("gates", name, (_WEIGHTS, _ABOUT, CONFIG))
        if not (folder / _ABOUT).exists():
            need_kvzap(folder, f"{_ABOUT}, as `kvcompress fit gates` writes it")
            folder = folder_of("gates", name, (CONFIG, "model*.safetensors", "model.safetensors.index.json"))
            return _published(name, "KVzap", kvzap(folder))
        about = {"looks_at": QUERIES, "form": None} | read_json(folder / _ABOUT, "gates' description", FORMAT)
        known = {"looks_at", "form", "measured", "model", "levels", "r2"}
        need(set(about) == known, f"{_ABOUT} must have the fields {', '.join(sorted(known))}, got {sorted(about)}")
        layers = _saved(about["form"], read_tensors(folder / _WEIGHTS, "gates"))
        levels = about["levels"]
        good = isinstance(levels, list) and all(type(x) in (int, float) for x in levels)
        need(good and isinstance(about["r2"], list), f"levels and r2 of {_ABOUT} must be lists of numbers")
        return Gates(layers, tuple(map(float, levels)), about["model"], about["measured"], about["r2"],
                     about["looks_at"])  # fmt: skip


def _forms(given: Sequence[GateForm | Tensor]) -> tuple[GateForm, ...]:
    """Each layer's form. Raises ValueError, naming the layer, for what is none, or forms of several classes."""
    made: list[GateForm] = []
    for number, layer in enumerate(given):
        try:
            made.append(LinearGate.joined(layer) if isinstance(layer, Tensor) else layer)
        except ValueError as error:
            raise ValueError(f"layers[{number}]: {error}") from None
        good = type(made[-1]) in FORMS.values() and type(made[-1]) is type(made[0])
        wish = " or ".join(kind.__name__ for kind in FORMS.values())
        need(good, f"layers[{number}] must be a {wish}, as all layers, got {type(layer).__name__}")
    return tuple(made)


def _published(name: str, kind: str, layers: tuple[GateForm, ...]) -> Gates:
    return Gates(layers, measured=f"{kind}, {'/'.join(Path(name).parts[-2:])}", looks_at=HIDDEN)


def _saved(form: Any, found: dict[str, Tensor]) -> tuple[GateForm, ...]:
    """Of the file of weights. form: None = as an earlier version saved them, a tensor for each layer."""
    if form is None:
        names = [f"layers.{i}" for i in range(len(found))]
        need(set(found) == set(names), f"{_WEIGHTS} must hold layers.0, layers.1, ..., got {sorted(found)}")
        return _forms([found[name] for name in names])
    need(form in FORMS, f"form of {_ABOUT} must be one of {', '.join(FORMS)}, got {form!r}")
    fields_ = [x.name for x in fields(FORMS[form])]
    layers = range(len(found) // len(fields_))
    names = [f"layers.{i}.{name}" for i in layers for name in fields_]
    wanted = ", ".join(f"layers.0.{name}" for name in fields_)
    need(bool(names) and set(found) == set(names), f"{_WEIGHTS} must hold {wanted}, ..., got {sorted(found)}")
    return formed(FORMS[form], [{name: found[f"layers.{i}.{name}"] for name in fields_} for i in layers])


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
