"""Images in a cache (M-RoPE): where their tokens stand, for every pass that comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..hf.facts import Facts
from ..hf.method import Call
from ..hf.places import Places, noted
from .summary import Summary


class Images(Summary):
    """Of a cache. places: of each sequence, once an image has come; tokens are still counted one by one."""

    places: Sequence[Places] = ()
    _placed: tuple[Facts, Sequence[Places], Facts] | None = None
    seen: int
    fixed: int

    def check_images(self, call: Call) -> None:
        """Raises ValueError where tokens do not stay where the model puts them."""
        call.need_text(
            f"{type(self).__name__} gives tokens places of its own; PrunedCache with positions='original', GatedCache, "
            "QuantizedCache and QuestCache leave them"
        )

    def placed(self, facts: Facts) -> Facts:
        """The layers of a pass: rotating as the sequences stand."""
        if not self.places:
            return facts
        if self._placed is None or self._placed[0] is not facts or self._placed[1] is not self.places:
            self._placed = facts, self.places, facts.placed(self.places)
        return self._placed[2]

    @contextmanager
    def noting(self, call: Call, counts: Sequence[int]) -> Iterator[None]:
        """Opens a pass that brings images: their places are known in it, and forgotten if it cannot begin."""
        axes, batch, columns = call.axes, len(counts), call.tokens.shape[1]
        assert axes is not None
        if axes.shape[1] not in (1, batch) or axes.shape[2] != columns:
            raise ValueError(f"position_ids must be [axes, {batch}, {columns}], got shape {tuple(axes.shape)}")
        before, fixed = self.places, self.fixed
        self.places = noted(before, axes, counts, self._lengths or [0] * batch)
        try:
            self.placed(call.facts)  # refuses models that cannot, before anything is stored
            self.fixed = self.seen + columns  # crop would not know where text stood before
            yield
        except BaseException:
            self.places, self.fixed = before, fixed
            raise

    def shifts(self) -> list[int]:
        """Of each sequence, how far text that comes stands from its number."""
        return [one.later for one in self.places] or [0] * len(self._lengths)

    def select_places(self, indices: Sequence[int]) -> None:
        """Of the given sequences, in this order."""
        if self.places:
            self.places = [self.places[b] for b in indices]

    def join_places(self, other: Images) -> None:
        """Adds the sequences of another cache; both still count their own."""
        some = self.places or other.places
        if some:
            text = Places.of_text(len(some[0].first))
            every = [one.places or [text] * len(one._lengths) for one in (self, other)]
            self.places = [*every[0], *every[1]]
