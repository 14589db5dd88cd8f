"""Calls of every op with random arguments, good ones and damaged ones. Each ends in the oracle's result, or in an error
that names an argument and has changed nothing."""

from __future__ import annotations

import functools
import inspect
import math
import random
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import oracle
import torch
from torch import Tensor

from kvcompress import ops
from kvcompress.ops import Lead, Noise, PageTable, Tail

from .ops_made import MADE, Arguments, Maker

UNITS = "calls"
CALLS = 20  # in a round
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 8e-3, torch.float64: 1e-4}
ERRORS = (TypeError, ValueError, NotImplementedError, RuntimeError)
OTHER_NAMES = {*PageTable._fields, *Tail._fields, *Lead._fields, *Noise._fields, "out", "lse", "near_lse"}
FACTORS = ("scale", "softcap", "shift", "temperature", "margin", "factor", "eps")  # with which float32 saturates sooner
PAGED = {"arrays": "table", "k_pages": "table", "v_pages": "table"}  # whose rows alone mean something


def tensors_of(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for part in x:
            yield from tensors_of(part)


def mapped(x: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same lists and tuples with other tensors."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, dict):
        return {name: mapped(value, change) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        parts = [mapped(part, change) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return x


def wide(x: Any) -> Any:
    return x.double() if x.is_floating_point() else x.clone()


def bits(x: Tensor) -> Tensor:
    copy = x.detach().clone(memory_format=torch.contiguous_format).flatten()
    return copy.view(torch.uint8) if x.device.type == "cpu" else copy


def call(function: Callable[..., Any], arguments: Arguments) -> Any:
    if isinstance(states := arguments.get("states"), list):
        return function(*states)
    if "states" in arguments:
        return function(states)
    return function(**arguments)


# ---- damage ----

WRONG_KINDS = (None, [[1.0]], "x", 1.5, 7, True, {}, [])
WRONG_NUMBERS = (-1, 0, 1, 1 << 31, 1 << 40, 1 << 63, -(1 << 63), 1 << 200, 2.5, math.nan, math.inf, -math.inf, 1e300)


def damaged_tensor(make: Maker, x: Tensor) -> tuple[Any, str]:
    """Another value instead of a tensor, and what kind of damage it is."""
    chance = make.chance
    how = chance.choice(
        ["kind", "dtype", "dtype", "fewer", "more", "size", "size", "size", "strides", "values", "values", "meta"]
    )
    if how == "kind":
        return chance.choice(WRONG_KINDS), how
    if how == "meta":
        return x.to("meta"), how
    if how == "dtype":
        dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool]
        return x.to(chance.choice([dtype for dtype in dtypes if dtype != x.dtype])), how
    if how == "fewer" and x.ndim and len(x):
        return x[0].clone(), "size"
    if how == "size" and x.ndim:
        d = chance.randrange(x.ndim)
        n = x.shape[d]
        if n and chance.random() < 0.6:
            return x.narrow(d, 0, chance.randint(0, n - 1)).clone(), "size"
        more = x.new_zeros([*x.shape[:d], chance.randint(1, 3), *x.shape[d + 1 :]])
        return torch.cat([x, more], d), "size"
    if how == "strides" and x.ndim > 1:
        return x.mT.contiguous().mT, how
    if how == "values" and x.numel() and x.dtype != torch.bool:
        x = x.clone()
        for _ in range(chance.randint(1, 3)):
            at = tuple(chance.randrange(n) for n in x.shape)
            if x.is_floating_point():
                x[at] = chance.choice([math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0])
            else:
                bounds, wild = torch.iinfo(x.dtype), [-1, -(1 << 31), (1 << 31) - 1, 1 << 16, 0, 1, 2]
                wild += [bounds.min, bounds.max] if bounds.bits == 8 else []
                x[at] = chance.choice([n for n in wild if bounds.min <= n <= bounds.max])
        return x, how
    return x[None].clone(), "size"


def damaged(make: Maker, value: Any) -> tuple[Any, str]:
    if isinstance(value, Tensor):
        return damaged_tensor(make, value)
    if isinstance(value, (list, tuple)) and len(value) and make.chance.random() < 0.85:
        parts, which = list(value), make.chance.randrange(len(value))
        parts[which], how = damaged(make, parts[which])
        kind = type(value)
        return (kind(*parts) if hasattr(value, "_fields") else kind(parts)), how
    if isinstance(value, (int, float)) and make.chance.random() < 0.7:
        return make.chance.choice(WRONG_NUMBERS), "number"
    return make.chance.choice(WRONG_KINDS), "kind"


# ---- checks ----


def named(name: str, arguments: Arguments, text: str) -> bool:
    if "the pool is full" in text:  # what the free list lacks is no fault of an argument
        return True
    words = {*arguments, *OTHER_NAMES, *(n for n in inspect.signature(getattr(ops, name)).parameters)}
    return any(re.search(rf"(?<![a-z_]){re.escape(word)}(?![a-z_])", text) for word in words)


def close(found: Any, expected: Any, dtype: torch.dtype, what: str) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor) and found.shape == expected.shape, f"{what}: {found}, expected {expected}"
        if not expected.is_floating_point():
            assert torch.equal(found.to(expected.dtype), expected), f"{what}: {found}, expected {expected}"
            return
        finite = expected[expected.isfinite()]
        allowed = ALLOWED[dtype] * (1 + (finite.abs().max().item() if finite.numel() else 0))
        torch.testing.assert_close(
            found.double(), expected.double(), rtol=0, atol=allowed, equal_nan=True, msg=lambda text: f"{what}: {text}"
        )
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), what
        for i, pair in enumerate(zip(found, expected, strict=True)):
            close(*pair, dtype, f"{what}[{i}]")
    else:
        assert found == expected, f"{what}: {found}, expected {expected}"


def rows_of(pages: Tensor, table: PageTable) -> list[Tensor]:
    P = pages.shape[1]
    lines = zip(table.block_table, table.lengths.tolist(), strict=True)
    return [pages[line[: -(-n // P)].long()].flatten(0, 1)[:n] for line, n in lines]


def compare_changed(arguments: Arguments, expected: Arguments, dtype: torch.dtype, what: str) -> None:
    """What the op has changed in place, and what it has not."""
    for name, value in arguments.items():
        table_name = (
            "value_table" if name == "v_pages" and "value_table" in arguments and "far" in arguments else "table"
        )
        table = arguments.get(table_name)
        if isinstance(value, PageTable):
            for field in ("lengths", "refs", "free_count"):
                close(getattr(value, field), getattr(expected[name], field), dtype, f"{what} {name}.{field}")
        elif name in PAGED and isinstance(table, PageTable):
            ours, theirs = ([x] if isinstance(x, Tensor) else x for x in (value, expected[name]))
            for one, other in zip(ours, theirs, strict=True):
                pair = rows_of(one, table), rows_of(other, expected[table_name])
                close(*pair, one.dtype if one.dtype in ALLOWED else dtype, f"{what} {name}")
        elif name != "tokens":
            close(list(tensors_of(value)), list(tensors_of(expected[name])), dtype, f"{what} {name}")


def expected_of(name: str, arguments: Arguments) -> Any:
    """The oracle's result, in float64; arguments are changed as it changes them."""
    if name == "plan":
        found = oracle.plan(**arguments)
        n, layers = len(found.chunks), arguments["layers"]
        clamped = [int(i in found.clamped) if len(found.clamped) != n else int(found.clamped[i]) for i in range(n)]
        rows = [found.chunks, found.mean_memory, clamped, *found.memory, *found.stored]
        return torch.tensor(rows, dtype=torch.int64).reshape(3 + 2 * layers, n)
    if name == "divide_memory":
        total, stored = arguments["total"], arguments["stored"]
        ratios = [
            Fraction(part, whole) if whole else Fraction(0)
            for part, whole in zip(arguments["kept"], stored, strict=True)
        ]
        return torch.tensor(
            oracle.divide_memory(total, ratios, arguments["lowest"], arguments["highest"]), dtype=torch.int64
        )
    if name == "pod_step_":  # the oracle's tensors of these are int32
        arguments |= {part: min(arguments[part], 1 << 20) for part in ("sinks", "recent")}
    return call(getattr(oracle, name), arguments)


def too_long(name: str, arguments: Arguments) -> bool:
    """Whether the oracle would take minutes: a plan of millions of iterations."""
    sizes = [arguments.get(part) for part in ("prompt_length", "chunk_size", "layers")]
    return name == "plan" and all(type(n) is int and n > 0 for n in sizes) and sizes[0] * sizes[2] > 10**5 * sizes[1]


def nothing_new(name: str, arguments: Arguments) -> bool:
    """Whether no token comes: counts that say otherwise are then not looked at."""
    return name == "append_tokens_" and arguments["tokens"][0].shape[2] == 0


def one_call(name: str, make: Maker) -> None:
    arguments, broken = MADE[name](make), ""
    which = None
    if make.chance.random() < 0.6:
        which = make.chance.choice(sorted(arguments))
        arguments[which], broken = damaged(make, arguments[which])
    if too_long(name, arguments):
        return
    what = f"{name}, {which} damaged ({broken})" if which else name
    before = mapped(arguments, bits)
    try:
        given = None if broken == "meta" else mapped(arguments, wide)
        if given is not None and given.get(which) is True:  # an integer for an op
            given[which] = 1
    except RuntimeError:
        given = None
    found, refused = None, None
    try:
        found = call(getattr(ops, name), arguments)
    except ERRORS as error:
        refused = error
    except BaseException as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    taken = refused is None and arguments.get(which) is not True  # which is 1 to an op
    if taken and (check := inspect.getclosurevars(getattr(ops, name)).nonlocals.get("check")):
        try:
            call(check, arguments)
        except (TypeError, ValueError) as error:
            raise AssertionError(f"{what}: accepted, though {error}") from error
    if refused is not None:
        assert which, f"{what}: refused: {refused}"
        kind = type(refused).__name__
        assert named(name, arguments, str(refused)), f"{what}: {kind} names no argument: {refused}"
        pairs = zip(tensors_of(list(mapped(arguments, bits).values())), tensors_of(list(before.values())), strict=True)
        unchanged = all(torch.equal(*pair) for pair in pairs if pair[0].device.type == "cpu")
        assert unchanged, f"{what}: refused, and changed: {refused}"
        return
    if (broken == "number" and which in FACTORS) or nothing_new(name, arguments):
        return
    if given is None or broken in (
        "values",
        "meta",
    ):  # what is not finite, and tables that are wrong where nobody looks
        return
    try:
        expected = expected_of(name, given)
    except Exception as error:
        raise AssertionError(f"{what}: accepted, but the oracle cannot compute it: {error!r}") from error
    # a float of another type is computed with as it is; the allowance is then that of the coarsest
    dtype = torch.bfloat16 if broken == "dtype" else make.dtype
    if which == "neuron":  # whose coordinate a tail holds as 0, which this one did not
        return
    if name == "pod_step_":  # the oracle gives None where nothing is written
        found, expected = (found[0], found[1]), (expected[0], expected[1])
    close(list(tensors_of(found)), list(tensors_of(expected)), dtype, what)
    compare_changed(arguments, given, dtype, what)


@functools.cache
def names() -> list[str]:
    return sorted(MADE)


def one_round(chance: random.Random) -> int:
    for _ in range(CALLS):
        one_call(chance.choice(names()), Maker(chance))
    return CALLS
