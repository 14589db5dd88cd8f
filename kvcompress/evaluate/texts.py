"""Where evaluation takes its texts and words from: files that the user names, or the standard library's source."""

from __future__ import annotations

import functools
import random
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..models.text import held_out_text, long_text
from ..support.checks import need

_VOCABULARY_NBYTES, _LEAST_OFTEN = 1 << 23, 3  # of source, whose words are taken if they come so often
# what a needle's key is made of, "adjective-noun"
_ADJECTIVES = """
    able ample ancient autumn bitter blue bold brave brief bright broad busy calm careful cheap civil clean clear
    clever cold common cosmic crisp curious damp dark dear deep distant dusty eager early easy empty even fair
    famous fancy fast fierce final firm flat fluffy fresh frosty gentle giant glad golden grand green happy hardy
    harsh hasty heavy hidden hollow honest humble icy jolly keen kind large late lazy light little lively lonely
    long loud lucky mellow merry mild modern narrow neat nervous noble odd old open pale patient plain polite proud
    quick quiet rapid rare raw ready rough round rusty sharp shiny short shy silent silver simple sleepy slow small
    smooth soft solid sour steady steep still strange strict strong subtle sunny sweet swift tall tame tender thick
    thin tidy tiny tough upper urban vast warm weak weary wide wild windy wise witty wooden young zesty
"""
_NOUNS = """
    acorn anchor apple arrow attic badge banjo barrel basket beacon bell bench berry bicycle blanket border bottle
    branch brick bridge brush bucket button cabin cable camel candle canoe canyon carpet castle cellar chain chalk
    cherry circle clock cloud clover coast coffee comet copper corner cotton cradle crane crayon crown curtain
    desert dolphin donkey dragon drawer drum eagle engine fabric falcon farmer feather fence ferry field fiddle
    finger flame flute forest fossil fountain garden garlic gate ginger glacier glove goose grape guitar hammer
    harbor hazel helmet heron hill hinge honey hospital island jacket jewel jungle kettle kitchen ladder lagoon lamp
    lantern lemon letter lily lizard lobster locket magnet mango maple marble market meadow melon mirror mitten
    monkey mountain museum mushroom needle oasis ocean olive onion orchard otter oyster paddle palace panda paper
    parrot pasta pebble pencil pepper piano pigeon pillow planet plum pocket pond potato puzzle quarry rabbit raven
    ribbon river rocket saddle salmon sandal school shadow shell signal spider sponge spoon stable statue sunset
    table teapot temple thunder ticket tiger timber tower trumpet tulip tunnel turtle valley velvet village violin
    wagon walnut walrus whistle willow window winter wizard wool yogurt zebra
"""


class Source(ABC):
    """A text, piece by piece. joint: what stands between two pieces."""

    joint: str

    @property
    @abstractmethod
    def text(self) -> str:
        """All of it."""

    @abstractmethod
    def pieces(self, size: int) -> list[str]:
        """The first `size` units of the text, as the places between which a sentence may be put; the text begins again
        for as long as it takes."""

    @abstractmethod
    def words(self) -> list[str]:
        """Different words of three to ten letters a-z, sorted; of source code those that come three times."""


class Library(Source):
    """Source files of the standard library that the shipped model was not trained on. Units are lines."""

    joint = "\n"

    @functools.cached_property
    def text(self) -> str:
        return held_out_text().replace(b"\0", b"").decode("utf-8", "ignore")

    @functools.cached_property
    def _lines(self) -> list[str]:
        return self.text.splitlines()

    def pieces(self, size: int) -> list[str]:
        return _again(self._lines, size)

    def words(self) -> list[str]:
        return list(_library_words())


class Prose(Source):
    """UTF-8 files that the user names. Units are words, with single spaces between; pieces are sentences (RULER's
    essays). Raises ValueError for files without a word, FileNotFoundError for none at all."""

    joint = " "

    def __init__(self, paths: Sequence[Path]) -> None:
        for path in paths:
            if not path.is_file():
                raise FileNotFoundError(f"text must be files, got {path}")
        self._text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
        self._units = self._text.split()
        need(bool(self._units), f"text must have words, got none in {', '.join(map(str, paths))}")

    @property
    def text(self) -> str:
        return self._text

    def pieces(self, size: int) -> list[str]:
        return re.split(r"(?<=[.!?])\s+(?=[\"'(]?[A-Z0-9])", " ".join(_again(self._units, size)))

    def words(self) -> list[str]:
        return _words(self._text)


def source_of(paths: Sequence[Path]) -> Source:
    """Files that the user names; none: the standard library."""
    return Prose(paths) if paths else Library()


def _again(units: list[str], size: int) -> list[str]:
    whole, rest = divmod(size, len(units))
    return units * whole + units[:rest]


@functools.cache
def _library_words() -> tuple[str, ...]:
    return tuple(_words(long_text(_VOCABULARY_NBYTES).decode("utf-8", "ignore"), _LEAST_OFTEN))


def _words(text: str, least: int = 1) -> list[str]:
    often = Counter(re.findall(r"\b[a-z]{3,10}\b", text))
    return sorted(word for word, count in often.items() if count >= least)


class Keys:
    """Names such as "ancient-lantern", each given once. Raises ValueError when there are no more."""

    def __init__(self, rng: random.Random) -> None:
        adjectives, nouns = _ADJECTIVES.split(), _NOUNS.split()
        self._rng, self._adjectives, self._nouns = rng, adjectives, nouns
        self._given: set[str] = set()

    def draw(self) -> str:
        most = len(self._adjectives) * len(self._nouns)
        need(len(self._given) < most, f"length must need at most {most:,} different keys")
        while (key := f"{self._rng.choice(self._adjectives)}-{self._rng.choice(self._nouns)}") in self._given:
            pass
        self._given.add(key)
        return key
