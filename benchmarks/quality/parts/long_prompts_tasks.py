"""What long_prompts.py measures: loss along a text, one fact at a depth of it, what memory holds of a fact.

Nothing here is trained text: all of it is cut from the held-out files, and asking for more than they hold is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvcompress
from benchmarks.quality.parts.tasks import Question, Task, Writer, planted
from kvcompress import CompressedCache, IterativeCache
from kvcompress.caches.track import Track
from kvcompress.logits import TokenLoss
from kvcompress.models.text import held_out_text, question, random_name, random_pass_key

ROWS = 2048  # logits computed at a time


# ---- loss over position ----


def held_out_ids(write: Writer, length: int) -> Tensor:
    """int64 [T]: the first tokens of the held-out text, `length` of them or all there are."""
    return torch.tensor((write.begin + write(held_out_text()))[:length])


@torch.no_grad()
def dense_losses(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Nats [T - 1] of tokens 1, 2, ... of ids [T] where every token sees all before it, read in one pass."""
    ids = ids.to(model.device)
    hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
    loss, head = TokenLoss(), model.get_output_embeddings()
    for start, part in enumerate(hidden.split(ROWS)):
        targets = ids[1 + start * ROWS :][: len(part)]
        loss(0, start * ROWS, head(part), targets)
    return loss.nll()


def window_losses(model: PreTrainedModel, ids: Tensor, window: int, context: int) -> Tensor:
    """The same with no long past: dense windows, each of which scores what follows its first `context` tokens.

    A token is scored once, by the window that shows it between context and window - 1 tokens; the first window scores
    its context too.
    """
    parts = []
    for start in range(0, max(len(ids) - context, 1), window - context):
        losses = dense_losses(model, ids[start : start + window])
        parts.append(losses if start == 0 else losses[context - 1 :])
    return torch.cat(parts)


def iterative_losses(model: PreTrainedModel, ids: Tensor, cache: CompressedCache) -> Tensor:
    """The same read through a cache; the model is attached."""
    loss = TokenLoss()
    kvcompress.prefill(model, ids[None].to(model.device), cache, logits=loss)
    return loss.nll()


class BitsPerByte:
    """Of the text whose tokens are ids, from losses [T - 1] or fewer: places count tokens, token 0 has no loss."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> None:
        self.tokenizer, self.ids = tokenizer, ids

    def __call__(self, losses: Tensor, start: int, stop: int) -> float:
        """Of tokens start..stop - 1; nan where not all of them were measured."""
        if not 0 < start < stop <= len(losses) + 1:
            return math.nan
        nbytes = len(self.tokenizer.decode(self.ids[start:stop].tolist()).encode())
        return losses[start - 1 : stop - 1].double().sum().item() / math.log(2) / nbytes

    def blocks(self, losses: Tensor, size: int, start: int = 0, stop: int | None = None) -> list[float]:
        """Of each whole block of `size` tokens; that at the text's start lacks token 0."""
        stop = len(losses) + 1 if stop is None else stop
        return [self(losses, max(place, 1), place + size) for place in range(start, stop - size + 1, size)]


# ---- recall ----


def depths(count: int) -> list[float]:
    """From 0.05 to 0.95."""
    return [round(float(depth), 4) for depth in np.linspace(0.05, 0.95, count)]


def needle_task(write: Writer, length: int, at: Sequence[float], trials: int = 1) -> Task:
    """One five-digit fact in `length` tokens of source text that end with the question for it; `trials` prompts per
    depth, side by side.

    Fact and text of a prompt depend on its length, depth and number alone. The question's last token, which brings the
    first logits of the answer, is left to what follows.
    """
    pieces = write.source(len(at) * trials, length)
    order = np.random.default_rng(length).permutation(len(pieces))  # a depth has no text of its own
    prompts, following, questions, ends = [], [], [], []
    for number, piece in enumerate(order):
        depth, trial = at[number // trials], number % trials
        rng = np.random.default_rng([length, round(10_000 * depth), trial])
        item = random_name(rng), random_pass_key(rng)
        asked, answer = write(question(item[0])), write(item[1])
        text = planted(write, pieces[piece], [item], [depth], length - len(asked))
        prompts.append(text + asked[:-1])
        following.append([asked[-1], *answer])
        questions.append([Question(tuple(asked), tuple(answer), 1, depth)])
        ends.append(len(asked) - 1)
    return Task("needle", prompts, following, questions=questions, question_tokens=ends)


def needle_places(write: Writer, task: Task, row: int) -> tuple[int, int]:
    """Where in a prompt the fact's digits stand: first, and one past the last."""
    (asked,) = task.questions[row]
    prompt, wanted = task.prompts[row], [*asked.asked, *asked.answer]
    for start in range(len(prompt) - len(wanted) + 1):
        if prompt[start : start + len(wanted)] == wanted:
            return start + len(asked.asked), start + len(wanted)
    raise ValueError(f"prompt {row} must hold its fact, got none")


# ---- what a reading did ----


def tracked(
    model: PreTrainedModel, prompt: Sequence[int], cache: IterativeCache, guide: Sequence[int] | None = None
) -> Track:
    """What reading a whole prompt kept; guide: not part of it."""
    known = None if guide is None else torch.tensor(guide, device=model.device)
    tail = list(prompt[-1:] if guide is None else guide)  # left to who goes on
    kvcompress.prefill(model, torch.tensor([[*prompt, *tail]], device=model.device), cache, guide=known)
    assert cache.track is not None
    return cache.track


def held(track: Track, first: int, stop: int) -> Tensor:
    """float32 [n, L]: share of tokens first..stop - 1 that some KV head of a layer holds after each iteration."""
    rows = []
    for reading in track.readings[0]:
        row = []
        for layer in reading.layers:
            places = torch.cat(layer.positions)
            row.append(len(places[(places >= first) & (places < stop)].unique()) / (stop - first))
        rows.append(row)
    return torch.tensor(rows)
