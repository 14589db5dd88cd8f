"""Files of caches that earlier versions saved, as this one would have saved them."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

UNSIZED = "kvcompress caches 5"  # a layer had its tokens so far twice, offsets by row, and lists where tuples are
SIZED = "kvcompress caches 4"  # and a budget held its size, a share the one to remove; what was read had another name
_BUDGETS = "kvcompress.budgets:"
_SIZED = {_BUDGETS + name for name in ("Uniform", "PyramidKV", "GlobalTopK")} | {"kvcompress.profiles:Profiled"}
_TWICE = {
    "kvcompress.caches.pruned_layer:PrunedLayer": ("tokens",),
    "kvcompress.caches.iterative:IterativeCache": ("read",),
    "kvcompress.pod.layer:PoDLayer": ("next",),
}
_RENAMED = {"kvcompress.caches.track:Reading": "kvcompress.caches.track:ChunkReading"}


def as_now(saved: dict[str, Any]) -> dict[str, Any]:
    """The header of a file of SIZED or UNSIZED. Raises ValueError for a budget that is not ours, whose size nobody can
    tell."""
    if saved["format"] == SIZED:
        _take_sizes(saved)
    for one in saved["objects"]:
        kind, state = one["class"], one["state"]
        for name in ("arrays", "scales", "groups"):
            if isinstance(state.get(name), list):
                state[name] = {"tuple": state[name]}
        if state.get("offsets"):  # of a layer with pages
            state["offsets"] = state["offsets"][:: len(state["offsets"]) // len(state["next"])]
            state["_joined"] = None
        for name in ("_batch", *_TWICE.get(kind, ())):
            state.pop(name, None)
    return saved


def _take_sizes(saved: dict[str, Any]) -> None:
    """Budgets give what they keep to those that have them."""
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
        policy["state"]["keep"] = _new(objects, "kvcompress.support.units:Keep", {"text": str(kept[number])})
    for cache in [one for one in objects if one["class"] == "kvcompress.caches.pruned:PrunedCache"]:
        size = kept[cache["state"]["budget"]["object"]]
        own = objects[cache["state"]["budget"]["object"]]["class"] == "kvcompress.pruners.duo:StreamingHeads"
        cache["state"]["keep"] = None if own else float(size) if isinstance(size, Decimal) else size


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
