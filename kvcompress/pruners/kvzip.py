"""KVzip: keep what a model looks at when it says the text again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..support.checks import need
from .base import Candidates, Pruner, Reread
from .replay import Replay, asked_again
from .score_profile import ScoreProfile

PROMPT = "\n\nRepeat the previous context exactly."
NEXT_PROMPT = "\n\nRepeat the part of the previous context exactly, starting with "
_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_REPLAY = Replay()


@dataclass(frozen=True)
class KVzip(Pruner):
    """Keeps keys by the most attention that they get while the text is read once more, behind itself.

    What prefill has read it reads again, in chunks: the words `prompt` (for later chunks next_prompt and the last
    `lead_in` tokens of the chunk before), `suffix`, then the chunk. That text sees the whole cache, which is dense
    until then, and is not stored. A key's score is the maximum, over all of its queries and the query heads of the KV
    head, of a softmax over the first num_sink_tokens, the chunk in the cache, and the repeating text up to the query.
    After the last chunk each layer drops what its budget leaves out. No question need be known.
    mass: the score is multiplied by what Replay would see of the first reading, the mean instead of the maximum: the
    attention that the key gets from all queries, asked behind the text, over an even share of it. The maximum alone
    keeps what is looked up once, and heads that spread their attention lose the most of it; this keeps both. False is
    the paper's.
    profile: with mass, how much maximum and mean count in each KV head of a model (ScoreProfile.load of a file that
    `kvcompress analyze scores` wrote), so that scores compare where layers and heads share one budget. It is learned
    for a chunk and for prompts that are read at once.
    The paper's budget is one over all layers and heads: GlobalTopK; Uniform and AdaKV are its other forms.
    prompt, next_prompt, suffix: token ids, none by default; with_tokenizer(tokenizer) gives the paper's words and what
    ends a message in the tokenizer's chat template. num_sink_tokens: always stay and are not read again; a system
    prompt's length in the authors' code.
    Read with kvcompress.prefill or generate, chunk by chunk with a chunk_size: then each chunk is read again after
    itself, from what is held then. What comes otherwise (questions, decoded tokens) is kept whole, and in later calls
    of prefill counts more than any score. The cache keeps the scores, 4 bytes a key.
    Cost: of n tokens read, the second reading is one of n and some 30 tokens per chunk, whose queries see all keys (an
    attention twice a causal one's), and the products of queries and keys of each chunk once more; mass adds Replay's.
    It needs as many positions behind the text, which the model must know, but where frequencies follow the length
    (dynamic).
    Source: KVzip (Kim et al. 2025, arXiv:2505.23416), section 3 and algorithm 1; prompts and chunks as in the authors'
    code. kvpress's KVzipPress reads chunks of 2,048.
    """

    chunk: int = 2000
    num_sink_tokens: int = 4
    lead_in: int = 8
    mass: bool = False
    prompt: tuple[int, ...] = ()
    next_prompt: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    profile: ScoreProfile | None = None
    accumulates = True
    rereads = True
    window = 1
    by_head = True
    one_frame = True

    def __post_init__(self) -> None:
        self._check(chunk=1, lead_in=0)
        need(isinstance(self.mass, bool), f"mass must be True or False, got {self.mass!r}")
        if self.profile is not None:
            kind = type(self.profile).__name__
            need(isinstance(self.profile, ScoreProfile),
                 f"profile must be a ScoreProfile, got {kind}: ScoreProfile.load reads it")  # fmt: skip
            need(self.mass, "mass must be True with a profile, which weighs it, got False")
        for name in ("prompt", "next_prompt", "suffix"):
            ids = getattr(self, name)
            good = isinstance(ids, (list, tuple)) and all(type(i) is int and i >= 0 for i in ids)
            need(good, f"{name} must be token ids as integers, got {ids!r}: with_tokenizer makes them of words")
            object.__setattr__(self, name, tuple(ids))

    def with_tokenizer(self, tokenizer: Any) -> KVzip:
        words = (PROMPT, NEXT_PROMPT, _suffix(tokenizer))
        prompt, next_prompt, suffix = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in words)
        return replace(self, prompt=prompt, next_prompt=next_prompt, suffix=suffix)

    def check_rows(self, heads: Sequence[int]) -> None:
        if self.profile is not None:
            self.profile.check_rows(heads)

    def positions_behind(self, tokens: int) -> int:
        words = max(len(self.prompt), len(self.next_prompt) + self.lead_in) + len(self.suffix)
        return max(words + min(self.chunk, tokens), _REPLAY.positions_behind(tokens) if self.mass else 0)

    def reread(self, tokens: Tensor, before: Tensor, begins: bool) -> list[Reread]:
        own, parts = tokens[:0], []
        start = min(self.num_sink_tokens, len(tokens) - 1) if begins else 0
        for first in range(start, len(tokens), self.chunk):
            end = min(first + self.chunk, len(tokens))
            earlier = torch.cat([before, tokens[:first]]) if first > start or len(before) else own
            earlier = earlier[max(len(earlier) - self.lead_in, 0) :]
            words = self.next_prompt if first > start or len(before) else self.prompt
            asked = [own.new_tensor(words), earlier, own.new_tensor(self.suffix), tokens[first:end]]
            parts.append(Reread(first, end, torch.cat(asked)))
        return parts

    def carried(self, received: Tensor, votes: Tensor) -> Tensor:
        return torch.where(votes != 0, votes, received)  # a key is read again once

    def votes(self, candidates: Candidates) -> Tensor:
        out = torch.zeros(candidates.heads, candidates.count, device=candidates.keys.device)
        if candidates.repeated is None:
            return self._masses(candidates, out) if self.mass else out
        (back, length), n, D = candidates.repeated, candidates.guide_length, candidates.keys.shape[3]
        shortest = candidates.count if candidates.shortest is None else candidates.shortest - n
        sinks = max(min(self.num_sink_tokens, shortest - back), 0)
        ends = torch.as_tensor(candidates.places()[1], device=out.device)
        own = ends - back + torch.arange(length, device=out.device).expand(candidates.heads, -1)
        first, guide = (torch.arange(count, device=out.device).expand(candidates.heads, -1) for count in (sinks, n))
        slots = torch.cat([first, own, ends + guide], 1)
        keys = candidates.keys[0].gather(1, slots[..., None].expand(-1, -1, D))
        seen = replace(candidates, keys=keys[None], count=sinks + length, lengths=None, shortest=None)
        scores = seen.attention(n, reduce="max")[:, sinks:]
        if self.mass:
            assert candidates.received is not None  # the first reading's
            means, profile = -candidates.received.gather(1, own), self.profile
            scores = scores * means if profile is None else profile.scores(candidates.number, scores, means)
        return out.scatter(1, own, scores.clamp_min(_LEAST))

    def _masses(self, candidates: Candidates, out: Tensor) -> Tensor:
        """Of a first reading's own keys, negative: until they are read again they have no score."""
        S, groups = candidates.chunk_length, candidates.queries.shape[1] // candidates.heads
        if S == 0:
            return out
        own = candidates.own_slots()
        sums = asked_again(candidates, _REPLAY.chunk, "sum").gather(1, own)
        shares = sums * (candidates.places()[1] / (S * groups))  # of what each head has
        return out.scatter(1, own, -shares.clamp_min(_LEAST))

    def scores(self, candidates: Candidates, keep: int) -> Tensor:
        if candidates.received is None:
            raise ValueError("candidates must have received for KVzip, which scores by a second reading, got None")
        unread = _MOST if self.mass else 1.0
        return torch.where(candidates.received <= 0, unread, candidates.received)


def _suffix(tokenizer: Any) -> str:
    """What comes between a user's words and the model's in the chat template; a line's end where there is none."""
    if getattr(tokenizer, "chat_template", None) is None:
        return "\n"
    mark = "\n#######"
    messages = [{"role": "user", "content": f"text{mark}"}]
    made = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, enable_thinking=False)
    return str(made.partition(mark)[2])
