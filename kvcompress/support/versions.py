"""Which versions of other packages this one needs, asked before their import, in which old ones fail anywhere."""

import re
from importlib.metadata import PackageNotFoundError, version

# as pyproject.toml has them: from the first on, before the second; None = any newer one
NEEDED: dict[str, tuple[tuple[int, int], tuple[int, int] | None]] = {
    "torch": ((2, 11), None),
    # 5.5 is the first whose caches have layers for recurrent states; of one newer than the second nobody knows what it
    # renames, as 5.24 did past_key_values
    "transformers": ((5, 5), (5, 25)),
}
SERVING = (5, 18)  # transformers whose continuous batching is what kvcompress.serve is built on


def check_versions() -> None:
    """Raises ImportError for a package that is too old or too new, with what is needed. One that is missing says so
    itself."""
    for package, (oldest, before) in NEEDED.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        here = numbers_of(found)
        if here is None:
            continue
        if here < oldest or (before is not None and here >= before):
            first, end = (None if x is None else ".".join(map(str, x)) for x in (oldest, before))
            wanted = f"{first} or newer" + ("" if end is None else f", and older than {end},")
            bounds = f">={first}" + ("" if end is None else f",<{end}")
            raise ImportError(
                f"{package} must be {wanted} for kvcompress, got {found}: pip install '{package}{bounds}'"
            )


def check_serving(found: str) -> None:
    """Raises ImportError for a transformers, by its version, whose continuous batching is another."""
    here = numbers_of(found)
    if here is not None and here < SERVING:
        first = ".".join(map(str, SERVING))
        raise ImportError(f"transformers must be {first} or newer for kvcompress.serve, got {found}")


def numbers_of(found: str | None) -> tuple[int, int] | None:
    """The first two numbers of a version; None where an install is damaged."""
    numbers = re.match(r"(\d+)\.(\d+)", found or "")
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))
