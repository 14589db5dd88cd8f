"""lm-eval's tasks through a compressed cache: python -m kvcompress.lm_eval --model kvcompress --model_args ..."""

# ruff: noqa: E402  who has no lm-eval is told so before it is imported

from __future__ import annotations

from .hf.argument import CACHE
from .support.extras import need_packages

need_packages("kvcompress.lm_eval", "lm_eval")

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator
from torch import Tensor
from tqdm import tqdm
from transformers.cache_utils import Cache

from .caches.base import CompressedCache
from .caches.converted import ConvertedCache
from .caches.quest import QuestCache
from .caches.spec import DENSE, KINDS, CacheSpec, UnknownKey
from .hf.attach import attach, base_model, facts_of
from .logits import TokenLoss
from .reading.prefilling import prefill

MODEL_KEYS = tuple(name for name in inspect.signature(HFLM).parameters if name not in ("pretrained", "kwargs"))

# (what was asked, as text; None for a window of loglikelihood_rolling), context, continuation
Request = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("kvcompress")
class CompressedLM(HFLM):
    """lm-eval's `hf` model, with a compressed cache.

    pretrained: as in `hf`. cache, and its settings beside it: as in CacheSpec; a converted model has its method's cache
    where none is named, any other model must be given one; cache=dense is `hf` itself. All else that `hf` takes by name
    (dtype, batch_size, max_length, peft, ...) is handed on; what is neither raises ValueError. The context window,
    max_length, is the model's unless given: give more to let IterativeCache and StreamingCache read longer texts.

    Every batch of requests has a new cache. What is measured:
    - loglikelihood: all but the last token of a context are read through the cache (kvcompress.prefill); the last one
      and the continuation follow and attend to what is left. Where that makes a difference (Quest, `every`, PoD's tau)
      they come one by one, as if they were decoded. A context with several continuations is read once. A question at
      the end of the context is in sight of the pruner.
    - loglikelihood_rolling: windows of max_length tokens, as `hf` divides the text, each read anew through the cache,
      and every token scored as it is read: it sees the memory and its own chunk. ValueError for caches that read a
      text in one pass, of which nothing would be compressed: PrunedCache without chunk_size, Quest.
    - generate_until: as kvcompress.generate, prompts of several lengths left-padded.
    The results' config says which cache it was, and which share of the tokens read was stored (cache_tokens_kept).
    """

    def __init__(self, pretrained: Any, cache: str | None = None, **settings: Any) -> None:
        theirs = {key: settings.pop(key) for key in MODEL_KEYS if key in settings}
        spec = None if cache is None else _spec(cache, settings)
        super().__init__(pretrained, **theirs)
        if self.backend != "causal":
            raise ValueError(f"backend must be causal for a compressed cache, got {self.backend!r}")
        if spec is None:
            kind = CacheSpec.kind_of(self.model.config)
            if kind is None:
                raise ValueError(
                    f"cache must be one of {', '.join(KINDS)} for {type(self.model).__name__}, which is not converted, "
                    "got none; dense is the model as it is"
                )
            spec = _spec(kind, settings)
        self.spec = spec
        self._new_cache()  # refuses what is out of range, before anything is run
        self._stored = self._read = 0  # tokens of rows
        if spec.kind != DENSE or CacheSpec.kind_of(self.model.config) is not None:
            attach(self.model)

    def get_model_info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"cache": str(self.spec)}
        if self._read:
            info["cache_tokens_kept"] = self._stored / self._read
        return cast(dict[str, Any], super().get_model_info()) | info

    # ---- loglikelihood ----

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        if self.spec.kind == DENSE:
            return cast(Any, super()._loglikelihood_tokens(requests, disable_tqdm, override_bs))
        # equal contexts side by side, the longest first
        order = Collator(requests, sort_fn=lambda request: (-len(request[1]), request[1], request[2]))
        size, schedule = override_bs or self.batch_size, None
        if size == "auto":
            size, schedule = 0, self._batch_scheduler if requests else None
            self.batch_sizes: dict[int, int] = {}  # of other requests
        answers = []
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="loglikelihood requests") as shown:
            for batch in order.get_batched(n=size, batch_fn=schedule):
                score = self._while_reading if batch[0][0] is None else self._after_reading
                for (asked, _, _), answer in zip(batch, score(batch), strict=True):
                    answers.append(answer)
                    if asked is not None:
                        self.cache_hook.add_partial("loglikelihood", asked, answer)
                shown.update(len(batch))
        return cast(Any, order.get_original(answers))

    @torch.no_grad()
    def _after_reading(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding gives it) of continuations, after the contexts were read."""
        contexts: dict[tuple[int, ...], int] = {}  # each of them once
        rows, ends = [], [continuation for _, _, continuation in requests]
        for _, context, end in requests:
            context = (context + end)[-(self.max_length + 1) : -len(end)]
            if not context:
                raise ValueError(
                    f"max_length must be at least the {len(end)} tokens of a continuation, got {self.max_length}"
                )
            rows.append(contexts.setdefault(tuple(context), len(contexts)))
        ids, mask = _left_padded(contexts)
        cache = self._prefilled(ids, mask)
        if cache.get_seq_length() and rows != list(range(len(contexts))):
            cache.select_sequences(rows)
        # a row's tokens, and what does not matter: nothing that comes before attends to it
        tail = ids.new_zeros(len(rows), max(map(len, ends)))
        for row, (number, end) in enumerate(zip(rows, ends, strict=True)):
            tail[row, : len(end)] = torch.tensor([int(ids[number, -1]), *end[:-1]])
        logits = self._continued(cache, tail, mask[rows], torch.tensor([len(end) for end in ends]))
        answers = []
        for row, end in enumerate(ends):
            chances = torch.log_softmax(logits[row, : len(end)], -1, dtype=self.softmax_dtype)
            targets = torch.tensor(end, device=chances.device)
            found = chances.gather(-1, targets[:, None]).sum()
            answers.append((float(found), bool((chances.argmax(-1) == targets).all())))
        return answers

    @torch.no_grad()
    def _while_reading(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """The same of windows of a text, whose tokens are scored as they are read; nobody asks whether greedily."""
        whole, loss = [context + end for _, context, end in requests], TokenLoss()
        self._prefilled(*_left_padded(whole), loss)
        return [(-float(loss.nll(b)[-len(end) :].double().sum()), False) for b, (_, _, end) in enumerate(requests)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        cache = self._new_cache()
        in_one_pass = getattr(cache, "chunk_size", None) is None and not isinstance(cache, ConvertedCache)
        if self.spec.kind != DENSE and (in_one_pass or isinstance(cache, QuestCache)):
            raise ValueError(
                f"cache={self.spec} attends to all of a text while reading it, so that loglikelihood_rolling would "
                "measure no compression: give pruned a chunk_size, or choose iterative or streaming"
            )
        return cast(list[float], super().loglikelihood_rolling(requests, disable_tqdm))

    # ---- generation ----

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation: Any) -> Any:
        if self.spec.kind != DENSE:
            generation[CACHE] = self._prefilled(context, generation["attention_mask"])
        return super()._model_generate(context, max_length, stop, **generation)

    # ---- the model ----

    def _new_cache(self) -> Cache:
        return self.spec.make(self.model.config, self.tokenizer)

    def _autocast(self) -> torch.autocast:
        kind = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=kind, enabled=kind is not None)

    def _prefilled(self, ids: Tensor, mask: Tensor, logits: TokenLoss | None = None) -> CompressedCache:
        """A new cache that has read all but the last token of ids [B, T], left-padded."""
        cache = cast(CompressedCache, self._new_cache())
        with self._autocast():
            prefill(self.model, ids.to(self.device), cache, mask.to(self.device), logits=logits)
        tokens = int(mask.sum()) - len(mask)
        for layer in cache.stored_lengths():
            if layer:
                self._stored += sum(map(sum, layer))
                self._read += tokens * len(layer[0])
        return cache

    def _continued(self, cache: CompressedCache, tail: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        """[R, n, vocabulary]: the logits of tail [R, n], the last tokens of contexts mask [R, T] and what follows; of a
        row, lengths[r] of them are its own."""
        columns = tail.shape[1]
        first = mask.sum(1)[:, None] - 1
        # beyond a row's own end none where the model might have no position
        last = (first + lengths[:, None] - 1).clamp_(min=cache.trained_length - 1)
        places = torch.minimum(first + torch.arange(columns), last).to(self.device)
        seen, mask = mask.shape[1] - 1, torch.cat([mask, mask.new_ones(len(mask), columns - 1)], 1).to(self.device)
        told, tail, out = facts_of(base_model(self.model)).takes_positions, tail.to(self.device), []
        width = 1 if cache.steps_differ else columns
        for start in range(0, columns, width):
            part = slice(start, start + width)
            given = {CACHE: cache, "attention_mask": mask[:, : seen + part.stop], "use_cache": True}
            given |= {"position_ids": places[:, part]} if told else {}
            with self._autocast():
                out.append(self.model(tail[:, part], **given).logits)
        return torch.cat(out, 1)


def _spec(kind: str, settings: dict[str, Any]) -> CacheSpec:
    try:
        return CacheSpec.of(kind, settings)
    except UnknownKey as error:
        raise UnknownKey(f"{error} (of the model itself: pretrained, {', '.join(MODEL_KEYS)})") from None


def _left_padded(texts: Any) -> tuple[Tensor, Tensor]:
    """(ids, mask), int64 [B, T] on the CPU."""
    texts = list(texts)
    width = max(map(len, texts))
    ids, mask = torch.zeros(2, len(texts), width, dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, width - len(text) :] = torch.tensor(text)
        mask[row, width - len(text) :] = 1
    return ids, mask


if __name__ == "__main__":
    cli_evaluate()
