"""What a model writes, shown as it comes."""

from __future__ import annotations

from typing import Any

from transformers import TextStreamer


class Streamed(TextStreamer):
    """Prints what is written after a prompt. answers: to a question or a turn, so that white space before the first
    word is not shown: a line that somebody typed ends where the model has a newline still to write. The tokens are what
    they are, and so is the cache. note: say so where there is nothing else to see."""

    def __init__(self, tokenizer: Any, *, answers: bool, note: bool = True) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.answers, self.note, self._visible = answers, note, False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.answers and not self._visible:
            text = text.lstrip()
        self._visible = self._visible or not (text == "" or text.isspace())
        if stream_end and self.note and not self._visible:
            text = "(nothing but white space)"
        super().on_finalized_text(text, stream_end)
        if stream_end:
            self._visible = False
