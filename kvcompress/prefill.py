"""prefill and generate: read a prompt through a compressed cache, then go on as usual."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .caches import CompressedCache
from .caches.base import Iteration, Step
from .hf.attach import base_model, is_attached

Progress = Callable[[int, int], None]


def _need_tensors(**arguments: object) -> None:
    for name, x in arguments.items():
        if not isinstance(x, Tensor) and (x is not None or name == "input_ids"):
            advice = f"; pass its .{name}" if isinstance(x, Mapping) and name in x else ""
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}{advice}")


def _held_back(input_ids: Tensor, attention_mask: Tensor | None, seen: int, guide: Tensor) -> int:
    """Columns at the end that generation reads itself: the last one, or the guide where every prompt ends with it."""
    length = len(guide)
    if length < 2 or length > input_ids.shape[1] - seen or not bool((input_ids[:, -length:] == guide).all()):
        return 1
    padded = attention_mask is not None and not bool((attention_mask[:, -length:] != 0).all())
    return 1 if padded else length


def _lengths(input_ids: Tensor, attention_mask: Tensor | None, seen: int, held_back: int) -> list[int]:
    """Tokens per sequence in the columns that are to be read."""
    batch, columns = input_ids.shape
    if attention_mask is None:
        return [columns - held_back - seen] * batch
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids {tuple(input_ids.shape)}, "
            f"got {tuple(attention_mask.shape)}"
        )
    mask = attention_mask != 0
    if bool((mask[:, 1:] < mask[:, :-1]).any()) or not bool(mask[:, -1].all()):
        raise ValueError("attention_mask must be left-padded: zeros, then at least one 1 in every row")
    return mask[:, seen:-held_back].sum(1).tolist()


@torch.inference_mode(False)  # so that the cache can be used outside inference mode afterwards
@torch.no_grad()
def prefill(
    model: nn.Module,
    input_ids: Tensor,
    cache: CompressedCache,
    attention_mask: Tensor | None = None,
    *,
    guide: Tensor | None = None,
    progress: Progress | None = None,
) -> CompressedCache:
    """Reads all but the last token of a prompt; model.generate(input_ids, past_key_values=cache) goes on from there.

    model: attached (kvcompress.attach). input_ids: [B, T], T >= 1; if the cache has seen tokens already, the whole
    conversation: the first cache.get_seq_length() columns are skipped. attention_mask: [B, T] for left-padded
    batches. guide: [g] token ids of an instruction or question, the same for all sequences; they follow each chunk as
    the observation window, choose what is kept, and are not stored; where every prompt ends with the guide, that end is
    held back too, so that generation reads the question in full. progress: called with (tokens read, tokens in all).
    Returns the cache. Only cache-sized state and one chunk's activations are held; no logits are computed.
    Raises TypeError for what is no tensor, ValueError for wrong shapes or padding or a cache of another model's shape,
    RuntimeError if the model is not attached or the cache is incomplete.
    After an error or Ctrl-C the cache says that it is incomplete until reset().
    Source: IMDC ("Memorize Step by Step"), section 3.1.
    """
    if not isinstance(cache, CompressedCache):
        raise ValueError(f"cache must be a kvcompress cache, got {type(cache).__name__}")
    if not is_attached(model):
        raise RuntimeError("model is not attached: call kvcompress.attach(model) first")
    _need_tensors(input_ids=input_ids, attention_mask=attention_mask, guide=guide)
    if input_ids.ndim != 2 or input_ids.shape[1] < 1 or input_ids.shape[0] < 1:
        raise ValueError(f"input_ids must be [B, T] with at least one token, got shape {tuple(input_ids.shape)}")
    if input_ids.is_floating_point():
        raise ValueError(f"input_ids must be integers, got {input_ids.dtype}")
    if guide is not None and (guide.ndim != 1 or guide.shape[0] < 1 or guide.is_floating_point()):
        raise ValueError(f"guide must be [g] token ids with g >= 1, got {guide.dtype} of shape {tuple(guide.shape)}")
    cache.check_complete()
    decoder = base_model(model)
    cache.check_model(decoder)
    seen = cache.get_seq_length()
    batch, columns = input_ids.shape
    if columns <= seen:
        raise ValueError(
            f"input_ids must hold the conversation and at least one new token: the cache has seen {seen}, got {columns}"
        )
    if cache.batch_size not in (-1, batch):
        raise ValueError(f"input_ids have batch size {batch}, but the cache holds {cache.batch_size} sequences")
    tail = torch.empty(0, dtype=input_ids.dtype, device=input_ids.device) if guide is None else guide.to(input_ids)
    held_back = _held_back(input_ids, attention_mask, seen, tail)
    lengths = _lengths(input_ids, attention_mask, seen, held_back)
    plans = [cache.plan_prompt(length) for length in lengths]
    iterations = max(len(plan) for plan in plans)
    if iterations == 0:
        return cache
    guide_length = len(tail)
    if guide is not None:
        cache.check_guide()
    read, total = [0] * batch, sum(lengths)
    cache.mark_incomplete()
    try:
        cache.begin_prompt(plans, guide_length)
        cache.mark_incomplete(False)
        for i in range(iterations):
            # sequences end together: a shorter one starts later
            number = [i - (iterations - len(plan)) for plan in plans]
            chunks = [plan.chunks[j] if j >= 0 else 0 for plan, j in zip(plans, number, strict=True)]
            memory = [plan.memory[j] if j >= 0 else 1 for plan, j in zip(plans, number, strict=True)]
            width = max(chunks) + guide_length
            ids = input_ids.new_zeros(batch, width)
            mask = torch.zeros(batch, width, dtype=torch.bool)
            for b, chunk in enumerate(chunks):
                if chunk:
                    start = columns - held_back - lengths[b] + read[b]
                    ids[b, width - guide_length - chunk :] = torch.cat([input_ids[b, start : start + chunk], tail])
                    mask[b, width - guide_length - chunk :] = True
                    read[b] += chunk
            cache.step = Step(iteration=Iteration(tuple(memory), guide_length))
            decoder(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            if progress is not None:
                progress(sum(read), total)
        cache.end_prompt(columns - held_back - seen)
    except BaseException:
        cache.mark_incomplete()
        raise
    finally:
        cache.step = Step()
    return cache


def generate(
    model: nn.Module,
    input_ids: Tensor,
    cache: CompressedCache,
    attention_mask: Tensor | None = None,
    *,
    guide: Tensor | None = None,
    progress: Progress | None = None,
    **generation: Any,
) -> Any:
    """prefill, then model.generate with the same cache; returns what model.generate returns.

    attention_mask: where it is None and the prompts hold the pad token, those are padding, as model.generate has it.
    generation: any argument of model.generate (max_new_tokens, do_sample, num_beams, num_return_sequences, ...).
    """
    _need_tensors(input_ids=input_ids, attention_mask=attention_mask)
    whole: Any = model
    if attention_mask is None:
        settings = generation.get("generation_config") or whole.generation_config
        pad, end = (generation.get(name, getattr(settings, name)) for name in ("pad_token_id", "eos_token_id"))
        ends = end if isinstance(end, (list, tuple)) else [end]
        if pad is not None and pad not in ends and bool((input_ids == pad).any()):
            attention_mask = (input_ids != pad).to(torch.long)
    prefill(model, input_ids, cache, attention_mask, guide=guide, progress=progress)
    return whole.generate(input_ids, attention_mask=attention_mask, past_key_values=cache, **generation)
