"""Caches as JSON and named tensors, and back: objects of our own classes alone, each with what it holds."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from ..hf.config import EMPTY
from ..hf.places import Places
from .origins import Origins
from .pool import PagePool
from .store import PageStore, Rows
from .track import LayerReading

_MOVED = {"kvcompress.units": "kvcompress.support.units", "kvcompress.softmax": "kvcompress.ops.softmax"}  # modules
_THEIRS = {f"{x.__module__}:{x.__qualname__}": x for x in (*EMPTY, LinearAttentionLayer)}
_LEAVES = (bool, int, float, str, Tensor, torch.dtype, torch.device, PagePool, PageStore)
_ON_HOST = (Origins, LayerReading, Places)  # whose tensors are on the host, wherever the model is


def state_of(x: Any) -> dict[str, Any]:
    """What an object holds."""
    state = (x.__getstate__() or {}) if "__getstate__" in dir(type(x)) else vars(x)
    if not isinstance(state, dict):
        raise TypeError(f"a {type(x).__name__} cannot be saved")
    return state


def _parts(x: Any) -> Iterator[Any]:
    """What is in a container or an object."""
    if isinstance(x, (list, tuple, set, frozenset)):
        yield from x
    elif isinstance(x, Mapping):
        yield from x.values()
    elif not (x is None or isinstance(x, _LEAVES)):
        yield from state_of(x).values()


def pools_of(x: Any) -> list[PagePool]:
    """Every pool in what caches hold, each once."""
    found: dict[int, PagePool] = {}
    seen: dict[int, Any] = {}
    open_ = [x]
    while open_:
        one = open_.pop()
        if isinstance(one, PagePool):
            found[id(one)] = one
        elif id(one) not in seen:
            seen[id(one)] = one
            open_ += _parts(one)
    return list(found.values())


class Encoder:
    """tensors: by name, on the CPU. objects: what is referred to by number, {"class", "state"} each."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._keep: list[Any] = []  # so that no id is given twice
        self._copies: dict[int, tuple[PageStore, Rows]] = {}
        self._copied: set[int] = set()  # where the tensors of those copies are
        stores: dict[int, list[PagePool]] = {}
        for pool in pools_of(list(caches)):
            stores.setdefault(id(pool.store), []).append(pool)
        for pools in stores.values():  # pages that forks share are saved once, those of others not at all
            with pools[0].store.lock:
                store, rows = pools[0].store.copy_of([pool._rows for pool in pools])
            self._copied |= {x.data_ptr() for x in store.arrays.values()}
            self._copies |= {id(pool): (store, row) for pool, row in zip(pools, rows, strict=True)}

    def encode(self, x: Any, *, host: bool = False) -> Any:
        """As JSON has it. host: its tensors stay on the host."""
        if x is None or isinstance(x, (bool, int, str)):
            return x
        if isinstance(x, float):
            return x if math.isfinite(x) else {"float": str(x)}
        if isinstance(x, Tensor):
            return {"tensor": self._tensor(x), **({"host": True} if host else {})}
        if isinstance(x, torch.dtype):
            return {"dtype": str(x).removeprefix("torch.")}
        if isinstance(x, torch.device):
            return {"device": "model"}
        if type(x) is list:
            return [self.encode(y, host=host) for y in x]
        if type(x) is tuple:
            return {"tuple": [self.encode(y, host=host) for y in x]}
        if type(x) in (set, frozenset):
            return {type(x).__name__: [self.encode(y) for y in sorted(x)]}
        if type(x) is dict:
            return {"dict": [[self.encode(key), self.encode(value, host=host)] for key, value in x.items()]}
        if isinstance(x, tuple):  # a named one
            return {"named": _name(type(x)), "values": [self.encode(y, host=host) for y in x]}
        return {"object": self._object(x)}

    def _tensor(self, x: Tensor) -> str:
        if id(x) not in self._numbers:
            self._numbers[id(x)] = len(self.tensors)
            self._keep.append(x)
            own = x.detach().to("cpu").contiguous()
            # a file holds no two tensors of one storage
            ours = own.data_ptr() != x.data_ptr() or own.data_ptr() in self._copied
            whole = own.untyped_storage().nbytes() == own.nbytes and ours
            self.tensors[f"t{self._numbers[id(x)]}"] = own if whole else own.clone()
        return f"t{self._numbers[id(x)]}"

    def _object(self, x: Any) -> int:
        if id(x) not in self._numbers:
            number = self._numbers[id(x)] = len(self.objects)
            self._keep.append(x)
            self.objects.append(None)
            if isinstance(x, PagePool):
                store, rows = self._copies[id(x)]
                state = vars(x) | {"_bounds": list(x.bounds), "store": store, "_rows": rows, "_stock": -1, "_room": 0}
            elif isinstance(x, PageStore):
                count = int((x.refs > 0).sum())
                arrays = {name: array[:count] for name, array in x.arrays.items()}
                state = {"settings": x.settings, "arrays": arrays, "refs": x.refs[:count], "form": x.form}
            else:
                state = state_of(x)
            host = isinstance(x, _ON_HOST)
            encoded = {name: self.encode(value, host=host) for name, value in state.items()}
            self.objects[number] = {"class": _name(type(x)), "state": encoded}
        return self._numbers[id(x)]


class Decoder:
    """tensor: by name and whether it stays on the host. device: the model's. classes: of users' pruners and budgets."""

    def __init__(
        self, objects: list[Any], tensor: Callable[[str, bool], Tensor], device: torch.device, classes: Sequence[type]
    ) -> None:
        self._objects, self._tensor, self._device = objects, tensor, device
        self._known = _THEIRS | {_name(x): x for x in classes}
        self._made: dict[int, Any] = {}
        self._tensors: dict[tuple[str, bool], Tensor] = {}

    def decode(self, x: Any) -> Any:
        if x is None or isinstance(x, (bool, int, float, str)):
            return x
        if isinstance(x, list):
            return [self.decode(y) for y in x]
        if "tensor" in x:
            key = x["tensor"], x.get("host", False)
            if key not in self._tensors:
                self._tensors[key] = self._tensor(*key)
            return self._tensors[key]
        if "object" in x:
            return self._object(x["object"])
        if "named" in x:
            return self._class(x["named"])(*map(self.decode, x["values"]))
        [(kind, value)] = x.items()
        if kind == "dict":
            return {self.decode(key): self.decode(y) for key, y in value}
        if kind == "device":
            return self._device
        if kind == "dtype":
            return getattr(torch, value)
        made: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
        return float(value) if kind == "float" else made[kind](map(self.decode, value))

    def _object(self, number: int) -> Any:
        if number in self._made:
            return self._made[number]
        saved = self._objects[number]
        kind = self._class(saved["class"])
        if kind is PageStore:
            given = {name: self.decode(value) for name, value in saved["state"].items()}
            self._made[number] = PageStore.of_pages(**given)
            return self._made[number]
        one: Any = object.__new__(kind)
        self._made[number] = one
        state = {name: self.decode(value) for name, value in saved["state"].items()}
        if "__setstate__" in dir(kind):
            one.__setstate__(state)
        else:
            vars(one).update(state)
        return one

    def _class(self, name: str) -> type:
        """A class of ours or a given one: a file makes nothing else."""
        if name in self._known:
            return self._known[name]
        module, _, qualified = name.partition(":")
        module = _MOVED.get(module, module)
        if module.split(".")[0] != "kvcompress" or "<" in name or "." in qualified:
            raise UnknownClass(name)
        found = vars(importlib.import_module(module)).get(qualified)
        if not isinstance(found, type) or found.__module__ != module:
            raise UnknownClass(name)
        return found


class UnknownClass(ValueError):
    """A class that is not ours, and was not given."""


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
