"""What kvcompress must do to a model that it attaches to: the same as before with all that is not a cache of ours, the
dense model's numbers with a cache of ours that has room for everything, and nothing at all after detach."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

import kvcompress
from benchmarks.quality.parts.families_models import VOCABULARY, Configuration

TOLERANCE = 2e-5  # of the largest difference, relative to the largest logit
UNLIKE = 1e-3  # a dense model that differs by more from itself, read another way, has no right answer to compare with
COLUMNS, PADDED, PADDING, PROMPT, NEW_TOKENS = 50, 40, 11, 30, 16
ROOM = 64  # of every cache, in tokens: more than any prompt here
READINGS = {  # columns of each call
    "at once": [COLUMNS],
    "in chunks": [7] * 5 + [5] + [1] * 10,
    "token by token": [PROMPT] + [1] * (COLUMNS - PROMPT),
}
OTHERS = {  # caches that a model's forward pass fills by itself
    "PrunedCache": lambda config: kvcompress.PrunedCache(config, keep=ROOM),
    "StreamingCache": lambda config: kvcompress.StreamingCache(config, window_size=ROOM),
    "QuestCache": lambda config: kvcompress.QuestCache(config, token_budget=ROOM, page_size=8, dense_layers=0),
}


def iterative(config: Any, chunk_size: int = ROOM) -> Any:
    return kvcompress.IterativeCache(config, memory_size=ROOM, chunk_size=chunk_size)


@dataclass
class Result:
    """outcome: right, wrong, refused (kvcompress says why), or no answer (the dense model itself fails). worst: largest
    difference relative to the largest logit. reason: of a refusal, or which check failed. notes: what was compared
    otherwise than usual."""

    name: str
    outcome: str = "right"
    worst: float | None = None
    tolerance: float = TOLERANCE
    reason: str = ""
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        right = {"right": True, "wrong": False}.get(self.outcome)
        finite = self.worst is not None and self.worst < float("inf")  # JSON knows no other numbers
        return {
            "name": f"family/{self.name}", "right": right, "worst": float(f"{self.worst:.2e}") if finite else None,
            "reason": self.reason, "outcome": self.outcome, "tolerance": float(f"{self.tolerance:.2e}"),
            "notes": "; ".join(self.notes),
        }  # fmt: skip

    def fail(self, what: str) -> None:
        self.failures.append(what)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest, relative to the largest logit; infinite where ours is not finite."""
    if ours.shape != theirs.shape or not bool(ours.isfinite().all()):
        return float("inf")
    return float((ours - theirs).abs().max() / theirs.abs().max())


class Inputs:
    """Prompts, the same as one left-padded batch, and what a model's forward takes of it."""

    def __init__(self, model: Any) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, VOCABULARY, (2, COLUMNS), generator=numbers)
        self.mask = torch.ones(2, PADDED, dtype=torch.long)
        self.mask[0, :PADDING] = 0
        self.padded = self.ids[:, :PADDED] * self.mask
        takes = inspect.signature(type(model).forward).parameters
        told = "position_ids" in takes or "decoder_position_ids" in takes
        self.positions = (self.mask.cumsum(1) - 1).clamp_min(0) if told else None

    def padded_arguments(self, first: int = 0) -> dict[str, Tensor]:
        """Of a forward pass over the padded batch from this column on."""
        given = {"input_ids": self.padded[:, first:], "attention_mask": self.mask}
        return given if self.positions is None else given | {"position_ids": self.positions[:, first:].contiguous()}


def read(model: Any, ids: Tensor, sizes: list[int], cache: Any, *, first: int = 0, positions: bool = False) -> Tensor:
    """Logits of consecutive calls. cache: None = the model makes its own. first: the column that ids begin with.
    positions: give them; few families need that, since a cache knows how many tokens it has seen."""
    if not first:  # else recurrent_gemma would forget: it keeps its state in the model, not in the cache
        settle(model)
    logits = []
    for piece in ids.split(sizes, 1):
        given = {"position_ids": torch.arange(first, first + piece.shape[1]).repeat(len(piece), 1)} if positions else {}
        out = model(input_ids=piece, past_key_values=cache, use_cache=True, **given)
        first += piece.shape[1]
        cache = out.past_key_values if cache is None else cache
        logits.append(out.logits)
    return torch.cat(logits, 1)


def settle(model: Any) -> None:
    """A short call: frequencies that follow the length of the last call (dynamic, longrope) start again."""
    model(input_ids=torch.full((1, 1), 3), use_cache=False)


def greedy(model: Any, ids: Tensor, mask: Tensor | None = None, **given: Any) -> Tensor:
    settle(model)
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, **given)


class Dense:
    """What the model says by itself, read in several ways."""

    def __init__(self, model: Any, inputs: Inputs, grows: bool) -> None:
        self.model, self.inputs, self.grows = model, inputs, grows
        self.own_cache = False  # the family takes none but its own
        try:
            read(model, inputs.ids[:, :3], [3], self.cache())
        except Exception:
            self.own_cache = True
        self.positions = False  # bamba counts from 0 in every call
        self.readings = self.outputs()
        self.unlike = self.differences()
        if self.unlike["token by token"] > UNLIKE and inputs.positions is not None and not grows:
            self.positions, without, unlike = True, self.readings, self.unlike
            self.readings = self.outputs()
            self.unlike = self.differences()
            if self.unlike["token by token"] > UNLIKE:
                self.positions, self.readings, self.unlike = False, without, unlike
        settle(model)
        self.alone = model(input_ids=inputs.ids[:1, PADDING:PADDED], use_cache=False).logits
        self.tokens = greedy(model, inputs.ids[:, :PROMPT])
        self.padded_tokens = greedy(model, inputs.padded, inputs.mask)

    def differences(self) -> dict[str, float]:
        return {name: difference(self.readings[name], self.readings["at once"]) for name in READINGS}

    def read(self, sizes: list[int], cache: Any, first: int = 0) -> Tensor:
        return read(self.model, self.inputs.ids[:, first:], sizes, cache, first=first, positions=self.positions)

    def cache(self) -> Any:
        if self.own_cache:
            return None
        own = DynamicCache(config=self.model.config)
        return EncoderDecoderCache(own, DynamicCache()) if self.model.config.is_encoder_decoder else own

    def outputs(self) -> dict[str, Tensor]:
        """Logits of everything that attaching must not change."""
        model, inputs = self.model, self.inputs
        out = {name: self.read(sizes, self.cache()) for name, sizes in READINGS.items()}
        out["without a cache"] = model(input_ids=inputs.ids, use_cache=False).logits
        given = inputs.padded_arguments()
        settle(model)
        out["padded"] = model(**given, past_key_values=self.cache(), use_cache=True).logits
        settle(model)
        out["padded, without a cache"] = model(**given, use_cache=False).logits
        return out

    def difference(self, ours: Tensor, reading: str, first: int = 0) -> float:
        """To the dense model read in the same way or, where that is chunks, which some recurrent layers read as if each
        were a prompt, to one pass. Token by token is how generation goes: there its own numbers alone are right."""
        own, once = (difference(ours, self.readings[name][:, first:]) for name in (reading, "at once"))
        return own if reading == "token by token" and not self.grows else min(own, once)

    def tolerance(self, reading: str) -> float | None:
        """Four times what the model differs from itself, if that is more; None where it is no measure at all."""
        own = self.unlike[reading]
        if own > UNLIKE:
            return TOLERANCE if reading == "token by token" and not self.grows else None
        return max(TOLERANCE, 4 * own)

    def padded_difference(self, ours: Tensor, first: int = 0) -> float:
        """To the padded batch, or in the padded row to what its prompt gives alone."""
        begin = max(first, PADDING)
        padded, row = self.readings["padded"][:, first:], ours[:1, begin - first :]
        own = min(difference(row, padded[:1, begin - first :]), difference(row, self.alone[:, begin - PADDING :]))
        return max(own, difference(ours[1:], padded[1:]))


def traces(model: Any) -> dict[str, Any]:
    """All that detach must leave as it was."""
    modules = dict(model.named_modules())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    configs = {id(m.config): m.config for m in modules.values() if hasattr(m, "config")}
    return {
        "hooks": {name: [len(getattr(m, hook)) for hook in hooks] for name, m in modules.items()},
        "attributes": {name: sorted(vars(m)) for name, m in modules.items()},
        "classes": {name: type(m) for name, m in modules.items()},
        "state_dict": list(model.state_dict()),
        "attention implementation": [config._attn_implementation for config in configs.values()],
        "config": [config.to_dict() for config in configs.values()],
    }


def said_by_us(error: Exception) -> bool:
    """A refusal, not a mistake: kvcompress itself raised a ValueError."""
    folder = str(Path(kvcompress.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and frames[-1].filename.startswith(folder)


def words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if said_by_us(error) else f"{type(error).__name__}: {text}"


@torch.no_grad()
def check(configuration: Configuration, *, caches: tuple[str, ...] = (*OTHERS, "IterativeCache")) -> Result:
    """All checks of one configuration."""
    result = Result(configuration.name)
    try:
        model = configuration.model()
        inputs = Inputs(model)
        model(input_ids=inputs.ids, use_cache=False)
    except Exception as error:
        result.outcome, result.reason = "no answer", f"the dense model fails: {words(error)}"
        return result
    try:
        dense: Dense | None = Dense(model, inputs, configuration.grows)
        broken = ""
    except Exception as error:
        dense, broken = None, words(error)
    before = traces(model)
    try:
        attachment = kvcompress.attach(model)
    except ValueError as error:
        result.outcome, result.reason = "refused", words(error)
    except Exception as error:
        result.fail(f"attach: {words(error)}")
    else:
        with attachment:
            if dense is not None:
                for cache in OTHERS if configuration.encoder else caches:
                    _compare(result, dense, cache)
                _unchanged(result, dense, "while attached")
    after = traces(model)
    for what, was in before.items():
        if after[what] != was:
            result.fail(f"detach leaves other {what}")
    if dense is not None:
        _unchanged(result, dense, "after detach")
    elif result.outcome == "right":
        result.outcome, result.reason = "no answer", f"the dense model fails: {broken}"
    if result.outcome == "right" and result.worst is None:  # by every cache
        result.outcome, result.reason = "refused", result.notes.pop(0) if result.notes else "no cache fits"
    if result.failures:
        result.outcome, result.reason = "wrong", "; ".join(result.failures)
    return result


def _unchanged(result: Result, dense: Dense, when: str) -> None:
    for name, logits in dense.outputs().items():
        if not torch.equal(logits, dense.readings[name]):
            result.fail(f"{when}, {name}: other numbers than before")


def _compare(result: Result, dense: Dense, cache: str) -> None:
    """A cache of ours with the dense model, in every way of reading."""
    if dense.grows and cache == "StreamingCache":
        result.notes.append("StreamingCache: not compared, its frequencies are those of a window's length")
        return
    runs = list(_iterative_runs(dense) if cache == "IterativeCache" else _runs(dense, OTHERS[cache]))
    if dense.grows:
        runs = [run for run in runs if not run[0].startswith("greedy")]
    compare(result, cache, runs)


def compare(result: Result, cache: str, runs: list[Run]) -> None:
    """What each run is off by; what a cache refuses is a note."""
    refusals = []
    for what, run, tolerance in runs:
        try:
            off = run()
        except Exception as error:
            if said_by_us(error):
                refusals.append(f"{cache}, {what}: {words(error)}")
            else:
                result.fail(f"{cache}, {what}: {words(error)}")
            continue
        if tolerance is None and off > UNLIKE:  # neither like one pass nor like the dense model's way
            result.notes.append(f"{cache}, {what}: not compared, the dense model differs from itself")
            continue
        tolerance = tolerance or TOLERANCE
        result.worst = max(result.worst or 0.0, off)
        result.tolerance = max(result.tolerance, tolerance)
        if not off <= tolerance:
            result.fail(f"{cache}, {what}: off by {off:.1e}")
    if len(refusals) == len(runs):
        result.notes.append(refusals[0])
    else:
        result.notes.extend(refusals)


Run = tuple[str, Callable[[], float], float | None]


def _runs(dense: Dense, make: Callable[[Any], Any]) -> Iterator[Run]:
    model, inputs = dense.model, dense.inputs

    def reading(name: str) -> float:
        cache = make(model.config)
        ours = dense.read(READINGS[name], cache)
        _check_filled(cache)
        return dense.difference(ours, name)

    def padded() -> float:
        settle(model)
        cache = make(model.config)
        ours = model(**inputs.padded_arguments(), past_key_values=cache, use_cache=True).logits
        return dense.padded_difference(ours)

    def tokens() -> float:
        ours = greedy(model, inputs.ids[:, :PROMPT], past_key_values=make(model.config))
        return 0.0 if torch.equal(ours, dense.tokens) else float("inf")

    def padded_tokens() -> float:
        ours = greedy(model, inputs.padded, inputs.mask, past_key_values=make(model.config))
        return 0.0 if torch.equal(ours, dense.padded_tokens) else float("inf")

    for name in READINGS:
        yield name, lambda name=name: reading(name), dense.tolerance(name)
    yield "padded", padded, TOLERANCE
    yield "greedy tokens", tokens, TOLERANCE
    yield "greedy tokens, padded", padded_tokens, TOLERANCE


def _iterative_runs(dense: Dense) -> Iterator[Run]:
    """kvcompress.prefill reads all but the last token; the rest of the prompt follows in one call."""
    model, inputs, last = dense.model, dense.inputs, PADDED - 1

    def reading(chunk: int, name: str) -> float:
        cache = kvcompress.prefill(model, inputs.ids[:, :PADDED], iterative(model.config, chunk))
        _check_filled(cache)
        return dense.difference(dense.read([1] * (COLUMNS - last), cache, last), name, last)

    def padded(chunk: int) -> float:
        cache = kvcompress.prefill(model, inputs.padded, iterative(model.config, chunk), inputs.mask)
        given = inputs.padded_arguments(last)
        return dense.padded_difference(model(**given, past_key_values=cache, use_cache=True).logits, last)

    def tokens() -> float:
        given = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
        prompt = inputs.ids[:, :PROMPT]
        ours = kvcompress.generate(model, prompt, iterative(model.config), torch.ones_like(prompt), **given)
        return 0.0 if torch.equal(ours, dense.tokens) else float("inf")

    for name, chunk in {"at once": ROOM, "in chunks": 7}.items():
        how = "token by token" if name == "at once" else name
        tolerance = dense.tolerance(how)
        if tolerance is None and not dense.grows:  # prefill makes the chunks: it must refuse what cannot be read so
            how, tolerance = "at once", TOLERANCE
        yield name, lambda chunk=chunk, how=how: reading(chunk, how), tolerance
        yield f"padded {name}", lambda chunk=chunk: padded(chunk), tolerance
    yield "greedy tokens", tokens, TOLERANCE


def _check_filled(cache: Any) -> None:
    if not cache.nbytes():
        raise AssertionError("the model attends without the cache, which stays empty")
