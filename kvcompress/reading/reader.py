"""read(model, tokenizer, text).ask(question): a text is read once, asked often, and kept in a file between."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from ..budgets import Budget
from ..caches.base import CompressedCache
from ..caches.pruned import PrunedCache
from ..caches.saving import load_cache
from ..caches.spec import DENSE, CacheSpec
from ..hf.argument import CACHE, with_cache
from ..hf.attach import attach, is_attached
from ..hf.reminder import warn_of_length, without_reminder
from ..support.checks import need, need_text
from ..support.kvpress_names import no_ratio
from ..support.progress import Progress
from ..support.units import Size
from .prefilling import prefill

KEEP = 0.25  # of a text's tokens, where nothing is said


class Reading:
    """A text that a model has read into a compressed cache. Made by kvcompress.read, or Reading.load.

    model, tokenizer: that read it. cache: what is left of the text; asking does not change it.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, cache: CompressedCache) -> None:
        need(cache.read_ids is not None, "cache must be one that kvcompress.read has filled")
        self.model, self.tokenizer, self.cache = model, tokenizer, cache

    @overload
    def ask(self, question: str, **generation: Any) -> str: ...
    @overload
    def ask(self, question: Sequence[str], **generation: Any) -> list[str]: ...
    def ask(self, question: str | Sequence[str], **generation: Any) -> Any:
        """What the model writes after the text and a question, greedily unless generation says otherwise.

        question: text that follows the one that was read, as it is (the words of a chat template included), or several,
        each of which is asked of the text alone. generation: arguments of model.generate; max_new_tokens is 64 where
        nothing says how long. Returns the answer, or a list of answers; each of them is a list where generation asks
        for several (num_return_sequences). Warns where positions reach beyond the trained length.
        Raises ValueError for an empty question and for return_dict_in_generate, TypeError for what is no text.
        """
        if isinstance(question, (list, tuple)):
            return [self.ask(one, **generation) for one in question]
        need_text("question", question, "a str, or a list of them")
        seen = self.cache.read_ids
        assert seen is not None
        asked = self.tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids.to(seen)
        settings = {"do_sample": False, "return_dict_in_generate": False, "tokenizer": self.tokenizer, **generation}
        need(not settings["return_dict_in_generate"], "return_dict_in_generate must be False for ask, got True")
        if not {"max_new_tokens", "max_length"} & settings.keys():
            settings["max_new_tokens"] = 64
        ids = torch.cat([seen, asked], dim=1)
        whole: Any = self.model
        asking = self.cache.fork()
        with without_reminder():
            out = whole.generate(ids, attention_mask=torch.ones_like(ids), **with_cache(asking, settings))
        warn_of_length(asking, 2)
        answers: Any = self.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        return answers[0] if len(answers) == 1 else answers

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Saves cache and token ids as one file, as CompressedCache.save does. Returns the path."""
        return self.cache.save(path, self.model)

    @staticmethod
    def load(path: str | os.PathLike[str], model: nn.Module, tokenizer: Any, **options: Any) -> Reading:
        """What save wrote, in any process. model: as it was then; attached if it is not. options: of load_cache.

        Raises what load_cache does, and ValueError for a cache that was not saved by a Reading.
        """
        _attached(model)
        return Reading(model, tokenizer, load_cache(path, model, **options))

    def __repr__(self) -> str:
        return f"Reading({self.cache!r})"


@no_ratio()
def read(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    *,
    keep: Size | None = None,
    budget: Budget | None = None,
    cache: CompressedCache | CacheSpec | str | None = None,
    guide: str | None = None,
    progress: Progress | bool = False,
) -> Reading:
    """Reads a text once, for questions that come later.

    model: attached if it is not yet, and it stays so. text: as the tokenizer takes it. keep: how much
    stays of the text, as PrunedCache has it: a share (0.25 where neither keep nor cache is given), tokens or bytes.
    budget: how that is divided; None = over all layers and heads, by Replay's scores (GlobalTopK), which need no
    question. cache: another way to read, an empty cache or one as text ("iterative,memory_size=1024"); that of a
    converted model where it is None. guide: what will be asked about, for caches that look at a question.
    progress: True shows a bar; a function is called with (tokens read, tokens in all).
    Returns the Reading; its cache holds what is left of the text. Questions are kept whole.
    Raises ValueError for an empty text, for a cache that is not empty, for keep or budget and a cache together, and for
    them with a converted model, which decides itself; TypeError for what is no text.
    Source: the setting is that of KVzip, a text compressed once without knowing the questions.
    """
    if isinstance(text, Path):
        raise TypeError(f"text must be a str, got {type(text).__name__}: give text.read_text()")
    need_text("text", text, "a str")
    if guide is not None:
        need_text("guide", guide, "a str or None")
    _attached(model)
    whole: Any = model
    kind = CacheSpec.kind_of(whole.config)
    for name, value in (("keep", keep), ("budget", budget)):
        need(
            value is None or cache is None,
            f"{name} must be None where a cache is given, got {name}={value!r} and cache={cache!r}: leave one of them "
            f"out, or make a pruned cache with {name} itself ('pruned,{name}=...')",
        )
        need(value is None or kind is None, f"{name} must be None with a model converted to {kind}, got {value!r}")
    if cache is None and kind is None:
        cache = PrunedCache(whole.config, budget=budget, keep=KEEP if keep is None else keep, later="keep")
        if guide is not None and not cache.pruner.uses_guide:
            raise ValueError(
                "guide has no effect with Replay, which chooses where no cache is given: give "
                f'cache="pruned,pruner=snapkv,keep={cache.keep}", say, which looks at one'
            )
    elif cache is None:
        cache = CacheSpec(str(kind), {})
    if isinstance(cache, str):
        cache = CacheSpec.parse(cache)
    if isinstance(cache, CacheSpec):
        need(cache.kind != DENSE, "cache must be a compressed one, got dense")
        cache = cache.make(whole.config, tokenizer)
    if not isinstance(cache, CompressedCache):
        raise ValueError(f"cache must be a kvcompress cache, or one as text, got {type(cache).__name__}")
    need(cache.get_seq_length() == 0, f"cache must be empty, got {cache!r}")
    device = whole.get_input_embeddings().weight.device
    ids: Tensor = tokenizer(text, return_tensors="pt").input_ids.to(device)
    question = None
    if guide is not None:
        question = tokenizer(guide, return_tensors="pt", add_special_tokens=False).input_ids[0].to(device)
    prefill(model, ids, cache, guide=question, progress=progress)
    with torch.no_grad():  # what prefill holds back: nothing of the text is left for the first question
        whole(input_ids=ids[:, cache.get_seq_length() :], **{CACHE: cache})
    cache.read_ids = ids
    return Reading(model, tokenizer, cache)


def _attached(model: nn.Module) -> None:
    if not is_attached(model):
        attach(model)
