"""English books and manuals as plain text, from packages of Debian: python benchmarks/quality/parts/books.py

Downloads each package with apt-get, unpacks it without being root, and keeps its paragraphs that are prose as a file
in the user's cache folder, beside books.json: of each book its package, the version, and the SHA-256 of both the
package and the text. What is there already is not made again.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html.parser import HTMLParser
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3]))
from kvcompress.support.checks import need
from kvcompress.support.files import user_cache, write_text

SPLITS = ("tune", "report")
_LEAST = 80  # characters of a paragraph: shorter ones are headings and entries of lists
_BLOCKS = {
    "p", "div", "li", "ul", "ol", "dl", "dt", "dd", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "td", "th", "tr",
    "table", "blockquote", "body", "center", "section",
}  # fmt: skip
_LEFT_OUT = {"script", "style", "head", "pre", "nav"}  # with all that is in them


@dataclass(frozen=True)
class Book:
    """package: of Debian. files: in it, a pattern; HTML, or plain text, packed with gzip or not. without: a pattern of
    names that are lists of changes."""

    package: str
    files: str
    split: str
    without: str = ""


@dataclass(frozen=True)
class Origin:
    """What a text was made of. sha256: of the text, package_sha256: of the package's file."""

    package: str
    version: str
    package_sha256: str
    sha256: str


# What a method or a default was chosen by is no measure of it: a book is of one split for good.
BOOKS = {
    "anarchism": Book("anarchism", "usr/share/doc/anarchism/html/*.html", "tune"),
    "handbook": Book("debian-handbook", "usr/share/doc/debian-handbook/html/en-US/*.html", "tune"),
    "jargon": Book("jargon-text", "usr/share/doc/jargon-text/jargon.txt.gz", "tune"),
    "copyright": Book("cfi-en", "usr/share/doc/cfi-en/html/ch*.htm", "report"),
    "apache": Book("apache2-doc", "usr/share/doc/apache2-doc/manual/en/**/*.html", "report"),
    "gimp": Book("gimp-help-en", "usr/share/gimp/2.0/help/en/*.html", "report"),
    "postgresql": Book("postgresql-doc-15", "usr/share/doc/postgresql-doc-15/html/*.html", "report", "release-*"),
}


# ---- paragraphs ----


class _Paragraphs(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self._now: list[str] = []
        self._within: list[str] = []  # tags whose content is left out

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in _BLOCKS:
            self._end()
        if tag in _LEFT_OUT:
            self._within.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in _BLOCKS:
            self._end()
        if tag in self._within:
            while self._within.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if not self._within:
            self._now.append(data)

    def close(self) -> None:
        super().close()
        self._end()

    def _end(self) -> None:
        self.found.append("".join(self._now))
        self._now = []


def paragraphs(text: str, *, html: bool) -> list[str]:
    """Those that are prose: sentences, of some length, in one line each. A paragraph of plain text with a word that is
    broken over two lines is left out: nothing says whether its hyphen belongs to it."""
    if html:
        parser = _Paragraphs()
        parser.feed(text)
        parser.close()
        parts = parser.found
    else:
        parts = [part for part in re.split(r"\n\s*\n", text) if not re.search(r"\w-\n", part)]
    lines = (" ".join(part.split()) for part in parts)
    return list(dict.fromkeys(line for line in lines if len(line) >= _LEAST and re.search(r"[.!?][\"')\]]*$", line)))


def _decoded(path: Path) -> str:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:  # pages of before that
        return content.decode("cp1252", "replace")


def text_of(files: list[Path]) -> str:
    """Of a book, paragraphs with an empty line between them, each once."""
    found = [x for path in files for x in paragraphs(_decoded(path), html=".htm" in path.name)]
    return "\n\n".join(dict.fromkeys(found)) + "\n"


# ---- packages ----


def folder() -> Path:
    return user_cache() / "books"


def install() -> dict[str, Origin]:
    """What there is, of each book; those that are missing are downloaded and made.

    Raises RuntimeError without Debian's tools, or where a package cannot be had.
    """
    found = _installed()
    for name, book in BOOKS.items():
        if name not in found:
            print(f"books: {name} is made of the package {book.package}", file=sys.stderr)
            found[name] = _made(name, book)
            folder().mkdir(parents=True, exist_ok=True)
            write_text(folder() / "books.json", json.dumps({x: asdict(y) for x, y in found.items()}, indent=1) + "\n")
    return found


def _made(name: str, book: Book) -> Origin:
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise RuntimeError(f"books are packages of Debian, and {program} is not there to get {book.package} with")
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        _run("apt-get", "download", book.package, place=place)
        (package,) = place.glob("*.deb")
        _run("dpkg-deb", "-x", package.name, "content", place=place)
        version = _run("dpkg-deb", "-f", package.name, "Version", place=place).strip()
        files = sorted(path for path in (place / "content").glob(book.files) if not path.match(book.without or "/"))
        text = text_of(files)
        if not text.strip():
            raise RuntimeError(f"{book.package} {version} has no prose in {book.files}")
        folder().mkdir(parents=True, exist_ok=True)
        write_text(folder() / f"{name}.txt", text)
        return Origin(book.package, version, _digest(package.read_bytes()), _digest(text.encode()))


def _run(*command: str, place: Path) -> str:
    done = subprocess.run(command, cwd=place, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _installed() -> dict[str, Origin]:
    """Those that are as they were made."""
    listed = folder() / "books.json"
    if not listed.is_file():
        return {}
    saved = {name: Origin(**fields) for name, fields in json.loads(listed.read_text(encoding="utf-8")).items()}
    return {name: origin for name, origin in saved.items() if name in BOOKS and _is_whole(name, origin)}


def _is_whole(name: str, origin: Origin) -> bool:
    path = folder() / f"{name}.txt"
    return path.is_file() and _digest(path.read_bytes()) == origin.sha256


def books_of(split: str) -> Iterator[tuple[str, str, Origin]]:
    """(name, text, what it was made of) of each, always in the same order. Raises ValueError for another split."""
    need(split in SPLITS, f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    origins = install()
    for name, book in BOOKS.items():
        if book.split == split:
            yield name, (folder() / f"{name}.txt").read_text(encoding="utf-8"), origins[name]


if __name__ == "__main__":
    for name, origin in install().items():
        size = (folder() / f"{name}.txt").stat().st_size
        print(f"{BOOKS[name].split:7} {name:11} {size:>10,} bytes  {origin.package} {origin.version}")
