"""What a pruner thought of the tokens of a prompt, held so that they can be compressed again."""

from __future__ import annotations

from torch import Tensor

from .rows import BatchState


class HeldScores(BatchState):
    """scores: float32 [R, T], of a row's first counts[r] slots, None before any; later slots have none. asked[b]: how
    many of them came in the call that scored. tokens[b]: those that the sequence then had, which a budget goes by."""

    def __init__(self, rows: int, batch: int) -> None:
        self.scores: Tensor | None = None
        self.counts, self.asked, self.tokens = [0] * rows, [0] * batch, [0] * batch

    def note(self, some: list[int], scores: Tensor, counts: list[int], asked: int, tokens: list[int]) -> None:
        """Scores [n, Hkv, T] of neighbouring sequences, of counts[i] slots of each of their rows."""
        n, heads, T = scores.shape
        rows, sequences = slice(some[0] * heads, (some[-1] + 1) * heads), slice(some[0], some[-1] + 1)
        if self.scores is None or self.scores.shape[1] < T:
            wider = scores.new_zeros(len(self.counts), T)
            if self.scores is not None:
                wider[:, : self.scores.shape[1]] = self.scores
            self.scores = wider
        self.scores[rows, :T] = scores.flatten(0, 1)
        self.counts[rows], self.asked[sequences], self.tokens[sequences] = counts, [asked] * n, tokens

    def follow(self, slots: Tensor, scored: list[int]) -> None:
        """The chosen slots int32 [R, K] move to the front of their rows; the first scored[r] of them have scores."""
        if self.scores is not None:
            chosen = slots[:, : max(scored, default=0)].long()
            self.scores = self.scores.gather(1, chosen.clamp_(max=self.scores.shape[1] - 1))
        self.counts = list(scored)
