"""Checks of arguments that the ops share: each names the argument, its value and what is allowed.

Those that a decoded token comes by for every layer make no message before it is needed.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
SMALLEST, LARGEST = 2.0**-126, 3.4028234663852886e38  # normal numbers of float32
MOST_INT32 = (1 << 31) - 1  # tokens and places on the device


def need(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def renamed(**ours: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Of a function: arguments that it has under another name, which the ValueError of one says."""

    def of(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **given: P.kwargs) -> T:
            for name in ours.keys() & given.keys():
                raise ValueError(f"{name} is {ours[name]} here, got {name}={given[name]!r}")
            refuse_misspelt(function, given)
            return function(*args, **given)

        return run

    return of


def refuse_misspelt(made: Callable[..., Any], given: Iterable[str]) -> None:
    """TypeError for an argument of a function or class that is but for a letter or two one of its own; all others
    Python refuses."""
    known = inspect.signature(made).parameters
    for name in given:
        if name not in known and (meant := meant_by(name, known)):
            raise TypeError(f"{made.__name__} has no {name!r}{meant}")


def meant_by(name: str, known: Iterable[str]) -> str:
    """A hint such as ": did you mean keep?" for a name near one of those known, else nothing."""
    near = difflib.get_close_matches(name, list(known), 1, 0.7)
    return f": did you mean {near[0]}?" if near else ""


def need_text(name: str, value: Any, wish: str) -> None:
    """A str that is not empty. wish: what it must be, in words."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be {wish}, got {type(value).__name__}")
    need(bool(value), f"{name} must not be empty")


def need_tensor(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def need_tensors(**tensors: Tensor) -> None:
    """TypeError for the first that is no tensor: for arguments whose dtype or shape is looked at next."""
    for name, x in tensors.items():
        need_tensor(name, x)


def need_sequence(name: str, values: Sequence[Any], of: str = "tensors") -> None:
    """A list or tuple; a tensor, which could be iterated too, is none."""
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{name} must be a list or tuple of {of}, got {type(values).__name__}")


def need_float(name: str, x: Tensor, ndim: int, shape: str) -> None:
    if isinstance(x, Tensor) and x.dtype in FLOATS and x.ndim == ndim:
        return
    need_tensor(name, x)
    need(x.dtype in FLOATS, f"{name} must be float32, bfloat16 or float16, got {x.dtype}")
    raise ValueError(f"{name} must be {shape}, got shape {tuple(x.shape)}")


def need_heads(queries: Tensor, keys: Tensor, queries_are: str, keys_are: str) -> tuple[int, int, int, int, int, int]:
    """Of one batch and head dim, and query heads that the keys' divide; gives B, Hq, S, D, Hkv and T."""
    need_float("queries", queries, 4, queries_are)
    need_float("keys", keys, 4, keys_are)
    B, Hq, S, D = queries.shape
    Hkv, T = keys.shape[1:3]
    need(keys.shape[0] == B and keys.shape[3] == D, f"keys must be [{B}, Hkv, T, {D}], got shape {tuple(keys.shape)}")
    need(Hkv > 0 and Hq % Hkv == 0, f"queries have {Hq} heads, which the keys' {Hkv} heads do not divide")
    return B, Hq, S, D, Hkv, T


def need_device(like: Tensor, **tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and not (isinstance(x, Tensor) and x.device == like.device):
            need_tensor(name, x)
            raise ValueError(f"{name} must be on {like.device}, got {x.device}")


def need_int32(name: str, x: Tensor | None, shape: tuple[int, ...]) -> None:
    if x is not None and not (isinstance(x, Tensor) and x.dtype == torch.int32 and x.shape == shape):
        need_tensor(name, x)
        need(x.dtype == torch.int32, f"{name} must be int32, got {x.dtype}")
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")


def need_tables(cos: Tensor | None, sin: Tensor | None, D: int, device: torch.device) -> None:
    """Cosines and sines, [T, rotary_dim/2] each, for vectors of D."""
    if cos is None or sin is None:
        raise ValueError("cos and sin must be given together")
    for name, x in (("cos", cos), ("sin", sin)):
        need_tensor(name, x)
        if x.dtype != torch.float32 or x.ndim != 2 or x.shape != cos.shape or x.device != device:
            raise ValueError(
                f"{name} must be float32 [T, rotary_dim/2] on {device}, got {x.dtype} {tuple(x.shape)} on {x.device}"
            )
    if 2 * cos.shape[1] > D:
        raise ValueError(f"cos and sin rotate {2 * cos.shape[1]} dimensions, but keys have only {D}")


def need_parts(device: torch.device, *parts: tuple[str, Tensor, torch.dtype, tuple[int, ...]]) -> None:
    """Tensors of one dtype and shape each, on a device; those whose names end in pages are contiguous."""
    for name, x, kind, size in parts:
        need_tensor(name, x)
        if x.dtype != kind or x.shape != size or x.device != device:
            raise ValueError(f"{name} must be {kind} {size} on {device}, got {x.dtype} {tuple(x.shape)} on {x.device}")
        if name.endswith("pages") and not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous")


def need_choice(name: str, value: str, choices: tuple[str, ...]) -> int:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return choices.index(value)


def need_dtype(value: str) -> torch.dtype | None:
    """Of the option --dtype; None = auto."""
    need_choice("dtype", value, (*DTYPES, "auto"))
    return DTYPES.get(value)


def need_integer(name: str, value: int, least: int, most: int = (1 << 63) - 1) -> None:
    if type(value) is int and least <= value <= most:
        return
    whole = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    need(whole, f"{name} must be an integer, got {_shown(value)}")
    need(value >= least, f"{name} must be at least {least}, got {_shown(value)}")
    need(value <= most, f"{name} must be at most {most}, got {_shown(value)}")


def need_number(name: str, value: float, least: float, most: float) -> None:
    """A finite number between the two."""
    if not _is_number(value) or not least <= value <= most:
        raise ValueError(f"{name} must be a number between {least} and {most}, got {_shown(value)}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def need_fields(saved: Any, method: str, known: Sequence[str]) -> dict[str, Any]:
    """The fields of a config.kvcompress of this method."""
    need(isinstance(saved, Mapping), f"config.kvcompress must be a dict, got {_shown(saved)}")
    given = dict(saved)
    found = given.pop("method", None)
    need(found == method, f"config.kvcompress must be of the method {method}, got {_shown(found)}")
    unknown = sorted(str(name) for name in set(given) - set(known))
    need(not unknown, f"config.kvcompress has unknown fields {', '.join(unknown)}: saved by a newer version?")
    return given


def _shown(value: object) -> str:
    """What an error says was given, in a line of reasonable length."""
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return f"{'-' if value < 0 else ''}2**{value.bit_length() - 1} or more"
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def need_scale(scale: float | None, head_dim: int) -> float:
    """The factor of the logits; None = 1/sqrt(head_dim)."""
    if scale is None:
        return head_dim**-0.5 if head_dim else 1.0
    if not (_is_number(scale) and -LARGEST <= scale <= LARGEST):
        raise ValueError(f"scale must be finite in float32, got {_shown(scale)}")
    return scale


def need_softcap(softcap: float | None) -> float:
    """What the native ops take: 0 = none."""
    if softcap is None:
        return 0.0
    if not (_is_number(softcap) and SMALLEST <= softcap <= LARGEST):
        raise ValueError(f"softcap must be above 0 and finite in float32, or None, got {_shown(softcap)}")
    return softcap


def need_sink_logits(sink_logits: Tensor | None, heads: int, like: Tensor) -> Tensor | None:
    if sink_logits is None:
        return None
    need_tensor("sink_logits", sink_logits)
    need(sink_logits.dtype == torch.float32, f"sink_logits must be float32, got {sink_logits.dtype}")
    need(tuple(sink_logits.shape) == (heads,), f"sink_logits must be [{heads}], got shape {tuple(sink_logits.shape)}")
    need_device(like, sink_logits=sink_logits)
    return sink_logits.contiguous()


def need_integers(name: str, values: Sequence[int], count: int) -> Tensor:
    """As an int64 tensor [count]."""
    need_sequence(name, values, "integers")
    need(len(values) == count, f"{name} must have {count} elements, got {len(values)}")
    for j, value in enumerate(values):
        need_integer(f"{name}[{j}]", value, 0)
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def dense_last(x: Tensor) -> Tensor:
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()
