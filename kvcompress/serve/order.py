"""Who of those that wait is let in next: whose prompt is read for the most part, while that is there."""

from __future__ import annotations

from collections.abc import Mapping

PATIENCE = 16  # so often one that waits is overtaken
LOOKED_AT = 128  # of those that wait, at most


class Order:
    """Longest prefix first, as SGLang has it, but with an end to waiting: who was overtaken PATIENCE times comes before
    everybody. In memory that does not hold all conversations, those that it holds go on, and the others are read anew
    less often."""

    def __init__(self) -> None:
        self._overtaken: dict[str, int] = {}  # in the order in which they came

    def of(self, found: Mapping[str, int]) -> list[str]:
        """found: of waiting requests as they came, tokens that need not be read."""
        for name in found:
            self._overtaken.setdefault(name, 0)
        came = [name for name in self._overtaken if name in found]
        late = [name for name in came if self._overtaken[name] >= PATIENCE]
        return late + sorted((name for name in came if name not in late), key=lambda name: -found[name])

    def let_in(self, request: str) -> None:
        """The request waits no more; those that came before it have been overtaken."""
        if request in self._overtaken:
            for name in self._overtaken:
                if name == request:
                    break
                self._overtaken[name] += 1
            del self._overtaken[request]

    def leave(self, request: str) -> None:
        """The request is over; one that never waited is no error."""
        self._overtaken.pop(request, None)
