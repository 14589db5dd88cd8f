"""Files of caches that an earlier version saved, as this one would have saved them."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

FORMER = "kvcompress caches 4"  # a budget held its size, a share the one to remove; what was read had another name
_BUDGETS = "kvcompress.budgets:"
_SIZED = {_BUDGETS + name for name in ("Uniform", "PyramidKV", "GlobalTopK")} | {"kvcompress.profiles:Profiled"}
_RENAMED = {"kvcompress.caches.track:Reading": "kvcompress.caches.track:ChunkReading"}


def as_now(saved: dict[str, Any]) -> dict[str, Any]:
    """The header of a file of FORMER. Raises ValueError for a budget that is not ours, whose size nobody can tell."""
    objects: list[Any] = saved["objects"]
    for one in objects:
        one["class"] = _RENAMED.get(one["class"], one["class"])
        if one["class"] == "kvcompress.gates.cache:GatedCache":
            one["state"]["keep"] = one["state"].pop("share")
    kept: dict[int, Any] = {}  # what a budget kept, by its number
    for policy in [one for one in objects if one["class"] == "kvcompress.caches.policy:Policy"]:
        number = policy["state"]["budget"]["object"]
        if number not in kept:
            kept[number] = _size_of(objects, number)
        policy["state"]["keep"] = _new(objects, "kvcompress.units:Keep", {"text": str(kept[number])})
    for cache in [one for one in objects if one["class"] == "kvcompress.caches.pruned:PrunedCache"]:
        size = kept[cache["state"]["budget"]["object"]]
        own = objects[cache["state"]["budget"]["object"]]["class"] == "kvcompress.pruners.duo:StreamingHeads"
        cache["state"]["keep"] = None if own else float(size) if isinstance(size, Decimal) else size
    return saved


def _size_of(objects: list[Any], number: int) -> int | str | Decimal:
    """What that budget kept, taken out of it: tokens, bytes, or the share that stays."""
    kind, state = objects[number]["class"], objects[number]["state"]
    if kind == "kvcompress.pruners.duo:StreamingHeads":
        state.pop("size", None)
        return Decimal("1.0")
    if kind == _BUDGETS + "AdaKV":
        inner = state["inner"]
        if isinstance(inner, dict) and "object" in inner:
            return _size_of(objects, inner["object"])
        state["inner"] = _new(objects, _BUDGETS + "Uniform", {})
        return _kept(inner)
    if kind not in _SIZED:
        raise ValueError(f"a cache with the budget {kind.rpartition(':')[2]} was saved before budgets lost their size: "
                         "read the text anew")  # fmt: skip
    return _kept(state.pop("size"))


def _kept(size: int | float | str) -> int | str | Decimal:
    return 1 - Decimal(repr(size)) if isinstance(size, float) else size


def _new(objects: list[Any], kind: str, state: dict[str, Any]) -> dict[str, int]:
    objects.append({"class": kind, "state": state})
    return {"object": len(objects) - 1}
