"""prefill and generate: read a prompt through a compressed cache, then go on as usual."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..caches.base import CompressedCache
from ..caches.passes import Iteration
from ..hf.adapters import check_adapter
from ..hf.argument import CACHE, takes_cache, with_cache
from ..hf.attach import base_model, facts_of
from ..hf.method import KEYWORD, method_of
from ..hf.reminder import warn_of_length, without_reminder
from ..logits import LogitsSink, scaled
from ..planner import Plan
from ..support.progress import Progress, showing
from .rereading import latest, pruner_that_rereads, reread
from .token_sources import OF_TEXT, Columns, Prompt, Stream, TokenIds, as_stream, from_tokenizer

PIXELS = ("pixel_values", "pixel_values_videos")  # what images come as
_LOGITS = 1 << 24  # logits are computed for as many rows at a time as make so many numbers


def _need_tensors(**arguments: object) -> None:
    for name, x in arguments.items():
        if not isinstance(x, Tensor) and (x is not None or name == "input_ids"):
            made = "; token ids are what a tokenizer makes of text, which kvcompress.read takes as it is"
            rows = isinstance(x, list) and x and isinstance(x[0], list)
            listed = f": torch.tensor({name if rows else f'[{name}]'})" if isinstance(x, list) else ""
            advice = made if isinstance(x, str) else listed
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}{advice}")


def _need_cache(cache: object) -> None:
    if not isinstance(cache, CompressedCache):
        got = f"the class {cache.__name__}, not one of it" if isinstance(cache, type) else type(cache).__name__
        hint = f": CacheSpec.parse({cache!r}).make(model.config) makes one of text" if isinstance(cache, str) else ""
        raise ValueError(f"cache must be a kvcompress cache, got {got}{hint}")


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


def _padding(model: nn.Module, input_ids: Tensor, generation: Mapping[str, Any]) -> Tensor | None:
    """The attention_mask that model.generate makes of prompts that hold the pad token; None where they do not."""
    settings = generation.get("generation_config") or getattr(model, "generation_config", None)
    if settings is None:
        return None
    pad, end = (generation.get(name, getattr(settings, name)) for name in ("pad_token_id", "eos_token_id"))
    ends = end if isinstance(end, (list, tuple)) else [end]
    if pad is None or pad in ends or not bool((input_ids == pad).any()):
        return None
    mask = input_ids != pad
    if bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise ValueError(
            f"input_ids hold the pad token {pad} inside a prompt: pass attention_mask, with ones where it is text"
        )
    return mask.long()


@takes_cache
@torch.inference_mode(False)  # so that the cache can be used outside inference mode afterwards
@torch.no_grad()
def prefill(
    model: nn.Module,
    input_ids: TokenIds | Mapping[str, Any],
    cache: CompressedCache,
    attention_mask: Tensor | None = None,
    *,
    guide: Tensor | None = None,
    logits: LogitsSink | None = None,
    progress: Progress | bool = False,
) -> CompressedCache:
    """Reads all but the last token of a prompt; model.generate(input_ids, cache=cache) goes on from there.

    model: attached (kvcompress.attach). input_ids: [B, T], T >= 1, or what a tokenizer returns, tensors with their
    attention_mask; if the cache has seen tokens already, the whole conversation: the first cache.get_seq_length()
    columns are skipped. attention_mask: [B, T] for left-padded batches; where there is none and prompts begin with the
    pad token, that is padding, as model.generate has it. guide: [g] token
    ids of an instruction or question, the same for all sequences; they follow each chunk as the observation window,
    choose what is kept, and are not stored; where every prompt ends with the guide, that end is held back too, so that
    generation reads the question in full.
    logits: None computes none at all; else it is called with (sequence, start, logits [n, vocabulary], targets) for
    every stretch of tokens from place `start` of that sequence on, as they are read: TokenLoss(), AllLogits(), or a
    function of yours; targets int64 [n] are the tokens that follow, n - 1 of them at the end of an iterator or array.
    progress: True shows a bar; a function is called with (tokens read, tokens in all or None).

    A prompt that is too long to hold: input_ids may be a numpy array [T] of one sequence (numpy.memmap), which is read
    piece by piece, or an iterator of integers or arrays of them, of which nobody knows the length: it needs a fixed
    chunk and memory. All of its tokens are read, none is held back, and they do not count in get_seq_length(): what
    comes next, model.generate(question_ids, cache=cache), is given without them.

    Returns the cache. Only cache-sized state and one chunk's activations are held.
    Raises TypeError for what is no tensor, ValueError for wrong shapes or padding or a cache of another model's shape,
    RuntimeError if the model is not attached or the cache is incomplete.
    After an error or Ctrl-C the cache says that it is incomplete until reset().
    Source: IMDC ("Memorize Step by Step"), section 3.1.
    """
    _need_cache(cache)
    decoder = base_model(model)
    facts = facts_of(decoder)
    check_adapter(model, reads=True)
    facts.check_alone("kvcompress.prefill")
    input_ids, attention_mask = from_tokenizer(input_ids, attention_mask)
    _need_tensors(attention_mask=attention_mask, guide=guide)
    if logits is not None and (isinstance(logits, type) or not callable(logits)):
        got = f"the class {logits.__name__}: give one of it" if isinstance(logits, type) else repr(logits)
        raise TypeError(f"logits must be TokenLoss(), AllLogits() or a function, got {got}")
    if not isinstance(progress, bool) and not callable(progress):
        raise TypeError(f"progress must be True, False or a function, got {progress!r}")
    if guide is not None and (guide.ndim != 1 or guide.shape[0] < 1 or guide.is_floating_point()):
        raise ValueError(f"guide must be [g] token ids with g >= 1, got {guide.dtype} of shape {tuple(guide.shape)}")
    cache.check_complete()
    if (method := method_of(decoder)) is not None:
        method.check_cache(cache)
    cache.adopt(decoder, facts)
    device = decoder.get_input_embeddings().weight.device
    tail = torch.empty(0, dtype=torch.int64, device="cpu") if guide is None else guide.long()
    prompt: Prompt | None = as_stream(input_ids)
    if prompt is None:
        _need_tensors(input_ids=input_ids)
        _check_device("input_ids", cast(Tensor, input_ids), decoder)
        if attention_mask is None and cast(Tensor, input_ids).ndim == 2:
            attention_mask = _padding(model, cast(Tensor, input_ids), {})
        prompt = _columns(cast(Tensor, input_ids), cache, attention_mask, tail, decoder)
        device = cast(Tensor, input_ids).device
    elif attention_mask is not None:
        raise ValueError("attention_mask must be None with input_ids of one sequence, which has no padding")
    if prompt.columns == 0 and prompt.peek(0) is None:
        raise ValueError("input_ids must hold at least one token, got an iterator or array without any")
    batch = 1 if prompt.lengths is None else len(prompt.lengths)
    if cache.batch_size not in (-1, batch):
        raise ValueError(
            f"input_ids have batch size {batch}, but the cache holds {cache.batch_size} sequences; for other prompts "
            "call cache.reset() first"
        )
    plans = [cache.plan_prompt(length) for length in prompt.lengths] if prompt.lengths is not None else None
    if plans is not None and not any(map(len, plans)):
        return cache
    if guide is not None:
        _check_known("guide", guide, decoder)
        cache.check_guide()
    if cache.recurs:
        _check_states(cache, plans, guide)
    again = pruner_that_rereads(cache)
    if again is not None or (plans is not None and max(map(len, plans)) > 1):  # before anything is read
        cache.check_parts(facts, padded=len(set(prompt.lengths or ())) > 1)
    if plans is not None:
        begin, steps = plans, _known(plans)
    else:
        begin, steps = [cache.stream_plan()], _unknown(cache, cast(Stream, prompt))
    head = None if logits is None else _head_of(model)
    tail, width_of_tail = tail.to(device), len(tail)
    read, whole = [0] * batch, None if prompt.lengths is None else tuple(prompt.lengths)
    seen = cache.get_seq_length()  # columns; of tokens each sequence may have had fewer
    past = [seen] * batch if attention_mask is None else attention_mask[:, :seen].long().sum(1).tolist()
    before = [torch.empty(0, dtype=torch.int64, device=device)] * batch

    def run(ids: Tensor, counts: list[int], places: list[int], iteration: Iteration) -> Any:
        step = cache.open(facts, counts, ids.shape[1], iteration)
        given = _places(places, counts, ids.shape[1], device, facts.takes_positions) | {KEYWORD: step}
        return decoder(input_ids=ids, use_cache=True, **{CACHE: cache}, **given)

    cache.mark_incomplete()
    try:
        cache.begin_prompt(begin, width_of_tail)
        with showing(progress, None if prompt.lengths is None else sum(prompt.lengths)) as show:
            for plans_now, numbers in steps:
                chunks = [plan.chunks[i] if i >= 0 else 0 for plan, i in zip(plans_now, numbers, strict=True)]
                memory = tuple(
                    cache.memory_sizes(b, plan, i) if i >= 0 else ()
                    for b, (plan, i) in enumerate(zip(plans_now, numbers, strict=True))
                )
                width = max(chunks) + width_of_tail
                ids = torch.zeros(batch, width, dtype=torch.int64, device=device)
                counts = [chunk + width_of_tail if chunk else 0 for chunk in chunks]
                for b, chunk in enumerate(chunks):
                    if chunk:
                        ids[b, width - counts[b] :] = torch.cat([prompt.take(b, chunk).to(device), tail])
                first = [a + b for a, b in zip(past, read, strict=True)]
                out = run(ids, counts, first, Iteration(memory, width_of_tail, whole, compresses=again is None))
                if logits is not None:
                    end = width - width_of_tail
                    for b, chunk in enumerate(chunks):
                        rows = slice(end - chunk, end)
                        _give(
                            logits,
                            head,
                            decoder.config,
                            b,
                            read[b],
                            out.last_hidden_state[b, rows],
                            ids[b, rows],
                            prompt.peek(b),
                        )
                if again is not None:
                    own = [ids[b, width - count :] for b, count in enumerate(counts)]
                    reread(again, run, own, before, first, whole)
                    before = latest(before, own, again.lead_in)
                read = [done + chunk for done, chunk in zip(read, chunks, strict=True)]
                show(sum(read))
        cache.end_prompt(prompt.columns)
        cache.mark_incomplete(False)
    except BaseException:
        cache.mark_incomplete()
        raise
    return cache


def _places(
    first: list[int], counts: list[int], width: int, device: torch.device, told: bool
) -> dict[str, Tensor]:  # fmt: skip
    """position_ids of the tokens in a chunk, for families that use them beside rotation, and the attention_mask where
    there is padding, for layers that recur. told: whether the family wants to be told; else it counts by its ids."""
    if not told:
        if min(counts) < width:
            raise ValueError(
                "input_ids must be of one length for this model, which counts its positions from its own padding: read "
                "prompts of several lengths one by one"
            )
        return {}
    counted, begin = (torch.tensor(numbers, device=device)[:, None] for numbers in (counts, first))
    places = (begin + torch.arange(width, device=device) - (width - counted)).clamp_(min=0)
    if min(counts) == width:
        return {"position_ids": places}
    mask = (torch.arange(width, device=device) >= width - counted).long()
    return {"position_ids": places, "attention_mask": mask}


def _check_states(cache: CompressedCache, plans: list[Plan] | None, guide: Tensor | None) -> None:
    """Raises ValueError for what layers that recur cannot do: they take no token back, and have none between others."""
    if guide is not None:
        raise ValueError(
            "guide must be None for a model with recurrent layers: what they have read they cannot take back"
        )
    if plans is None or len(plans) == 1:
        return
    longest = max(plans, key=lambda plan: (len(plan), sum(plan.chunks)))
    for plan in plans:
        ends = longest.chunks[len(longest) - len(plan) + 1 :] if len(plan) else ()
        if tuple(plan.chunks[1:]) != tuple(ends) or (
            len(plan) and plan.chunks[0] > longest.chunks[len(longest) - len(plan)]
        ):
            raise ValueError(
                "input_ids of several lengths are read by a model with recurrent layers only where their chunks end "
                f"together: read them one by one, or in one pass ({type(cache).__name__} with a larger chunk_size)"
            )


Steps = Iterator[tuple[list[Plan], list[int]]]


def _known(plans: list[Plan]) -> Steps:
    """Plans and the iteration of each; sequences end together: a shorter one starts later (below 0: not yet)."""
    iterations = max(map(len, plans))
    for i in range(iterations):
        yield plans, [i - (iterations - len(plan)) for plan in plans]


def _unknown(cache: CompressedCache, stream: Stream) -> Steps:
    """One plan per chunk, for as long as there are tokens."""
    chunk = cache.stream_plan().chunks[0]
    while count := stream.available(chunk):
        yield [cache.plan_prompt(count)], [0]


def _check_device(name: str, ids: Tensor, decoder: Any) -> None:
    """Raises ValueError for ids that are not where the embeddings are. Offloaded ones are nowhere until used."""
    device = decoder.get_input_embeddings().weight.device
    if device.type != "meta" and ids.device != device:
        raise ValueError(f"{name} must be on the model's device, {device}, got {ids.device}")


def _check_known(name: str, ids: Tensor, decoder: Any) -> None:
    """Raises ValueError for ids that the model has not; on the CPU, where nothing waits for it."""
    size = max(len(decoder.get_input_embeddings().weight), getattr(decoder.config, "vocab_size", 0))
    if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise ValueError(
            f"{name} must be at least 0 and below {size:,}, the size of the model's vocabulary, got "
            f"{int(ids.min())} to {int(ids.max())}"
        )


def _columns(
    input_ids: Tensor, cache: CompressedCache, attention_mask: Tensor | None, tail: Tensor, decoder: Any
) -> Columns:  # fmt: skip
    """What of input_ids [B, T] is to be read."""
    if input_ids.ndim != 2 or input_ids.shape[1] < 1 or input_ids.shape[0] < 1:
        raise ValueError(f"input_ids must be [B, T] with at least one token, got shape {tuple(input_ids.shape)}")
    if input_ids.is_floating_point():
        raise ValueError(f"input_ids must be integers, got {input_ids.dtype}")
    seen, columns = cache.get_seq_length(), input_ids.shape[1]
    if columns <= seen:
        raise ValueError(
            f"input_ids must hold the conversation and at least one new token: the cache has seen {seen}, got {columns}"
        )
    held_back = _held_back(input_ids, attention_mask, seen, tail.to(input_ids))
    lengths = _lengths(input_ids, attention_mask, seen, held_back)
    new = input_ids[:, seen:]
    _check_known("input_ids", new if attention_mask is None else new[attention_mask[:, seen:] != 0], decoder)
    return Columns(input_ids, lengths, held_back, columns - held_back - seen)


def _head_of(model: nn.Module) -> nn.Module:
    whole: Any = model
    head = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    if head is None:
        raise ValueError(f"logits must be None with {type(model).__name__}, which has no language-model head")
    return cast(nn.Module, head)


def _give(
    sink: LogitsSink,
    head: nn.Module | None,
    config: Any,
    b: int,
    start: int,
    hidden: Tensor,
    ids: Tensor,
    following: int | None,
) -> None:
    """Hands over the logits of some tokens, as many rows at a time as do not make them large."""
    assert head is not None
    last = ids.new_tensor([] if following is None else [following])
    targets, rows = torch.cat([ids[1:], last]), max(_LOGITS // cast(Any, head).weight.shape[0], 1)
    for first in range(0, len(hidden), rows):
        part = slice(first, first + rows)
        sink(b, start + first, scaled(config, head(hidden[part])), targets[part])


@takes_cache
def generate(
    model: nn.Module,
    input_ids: Tensor | Mapping[str, Any],
    cache: CompressedCache,
    attention_mask: Tensor | None = None,
    *,
    guide: Tensor | None = None,
    logits: LogitsSink | None = None,
    progress: Progress | bool = False,
    **generation: Any,
) -> Any:
    """prefill, then model.generate with the same cache; returns what model.generate returns.

    model, input_ids [B, T] or a tokenizer's, cache, guide, logits, progress: as for prefill. attention_mask: where
    there is none and the prompts hold the pad token, those are padding, as model.generate has it. generation: any
    argument of model.generate (max_new_tokens, do_sample, num_beams, num_return_sequences, ...). Warns where positions
    reach beyond the trained length, before or after, in place of transformers' reminder, which goes by the tokens seen.
    With pixel_values (of a processor, in input_ids or generation) the model itself reads the prompt, in one pass,
    whatever chunk_size says, and its last token is pruned with it. Raises what prefill does, and ValueError for a guide
    or logits with pixel_values.
    """
    sees = hasattr(getattr(model, "config", None), "vision_config")
    if sees and isinstance(input_ids, Mapping) and any(name in input_ids for name in PIXELS):
        taken = set(OF_TEXT) - {"mm_token_type_ids"}  # which say where images are
        generation = {name: x for name, x in input_ids.items() if name not in taken} | generation
        input_ids = {name: x for name, x in input_ids.items() if name in taken}
    pictures = any(generation.get(name) is not None for name in PIXELS)
    for name, x in (("guide", guide), ("logits", logits)) if pictures else ():
        if x is not None:
            raise ValueError(f"{name} must be None with pixel_values: the model reads images itself, in one pass")
    input_ids, attention_mask = from_tokenizer(input_ids, attention_mask)
    _need_tensors(input_ids=input_ids, attention_mask=attention_mask)
    whole: Any = model
    options = with_cache(cache, generation)
    _need_cache(cache)
    facts_of(base_model(model)).check_alone("kvcompress.generate")
    if attention_mask is None:
        attention_mask = _padding(model, cast(Tensor, input_ids), generation)
    if not pictures:
        prefill(model, input_ids, cache, attention_mask, guide=guide, logits=logits, progress=progress)
    warned = warn_of_length(cache, 3)  # takes_cache stands between
    with without_reminder():
        out = whole.generate(input_ids, attention_mask=attention_mask, **options)
    if not warned:
        warn_of_length(cache, 3)
    return out
