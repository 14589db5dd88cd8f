"""How texts become tokens of a prompt: as they are, or as a user's turn of the tokenizer's chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..support.checks import need

BORDER = "\N{SECTION SIGN}\N{PILCROW SIGN}\N{SECTION SIGN}"  # a text that no tokenizer's template writes by itself


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def next_turn(tokenizer: Any, text: str, rest: str = "", **options: Any) -> str:
    """A later turn as the chat template writes it: all that follows the words of the answer before it, its end
    included. rest: of that answer. options: of the template."""
    turns = [("user", "?"), ("assistant", f"...{BORDER}{rest}"), ("user", text)]
    messages = [{"role": role, "content": content} for role, content in turns]
    whole = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options))
    return whole.partition(BORDER)[2]


def unended(model: Any, ids: list[int]) -> list[int]:
    """What a model wrote, without the token that ended it, if one did: the next turn brings that, as the template has
    it. No cache has seen it, as generation feeds no token that it stops at."""
    ends = model.generation_config.eos_token_id
    return ids[:-1] if ids and ids[-1] in (ends if isinstance(ends, list) else [ends]) else ids


@dataclass(frozen=True)
class Framing:
    """How texts become tokens. chat: a prompt is a user's turn of the tokenizer's chat template; the beginning of the
    answer follows it. Raises ValueError for a tokenizer without a template."""

    tokenizer: Any
    chat: bool = False

    def __post_init__(self) -> None:
        need(has_template(self.tokenizer) or not self.chat, "chat must be False: this tokenizer has no chat template")

    def bare(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    @property
    def begin(self) -> list[int]:
        """The token that begins a text, if this tokenizer gives it one."""
        token = self.tokenizer.bos_token_id
        return [token] if token is not None and list(self.tokenizer("a").input_ids)[:1] == [token] else []

    def texts(self, context: str, question: str) -> tuple[str, str]:
        """(what is read first, the question with what follows it)."""
        if not self.chat:
            return context, question
        turn = [{"role": "user", "content": context + BORDER + question}]
        whole = self.tokenizer.apply_chat_template(
            turn, add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        before, _, behind = str(whole).partition(BORDER)
        return before, behind

    def parts(self, context: str, question: str, prefix: str = "") -> tuple[list[int], list[int]]:
        """(tokens of what is read first, of the question and of how the answer begins)."""
        before, behind = self.texts(context, question)
        return ([] if self.chat else self.begin) + self.bare(before), self.bare(behind + prefix)

    def later(self, question: str, prefix: str = "", rest: str = "") -> list[int]:
        """Tokens of a question, and of how its answer begins, that follow another answer in the same conversation.
        rest: of that answer."""
        if not self.chat:
            return self.bare(rest + question + prefix)
        return self.bare(next_turn(self.tokenizer, question.strip(), rest, enable_thinking=False) + prefix)

    def count(self, context: str, question: str, prefix: str = "") -> int:
        return sum(map(len, self.parts(context, question, prefix)))


def framing_of(tokenizer: Any, raw: bool) -> Framing:
    """By the chat template where the tokenizer has one. raw: as texts are, in any case."""
    return Framing(tokenizer, has_template(tokenizer) and not raw)
