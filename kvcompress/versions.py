"""Which versions of other packages this one needs, asked before their import, in which old ones fail anywhere."""

import re
from importlib.metadata import PackageNotFoundError, version

# as pyproject.toml has them: from the first on, before the second; None = any newer one
NEEDED: dict[str, tuple[tuple[int, int], tuple[int, int] | None]] = {
    "torch": ((2, 11), None),
    "transformers": ((5, 19), (5, 25)),  # of a newer one nobody knows what it renames, as 5.24 did past_key_values
}


def check_versions() -> None:
    """Raises ImportError for a package that is too old or too new, with what is needed. One that is missing says so
    itself."""
    for package, (oldest, before) in NEEDED.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        numbers = re.match(r"(\d+)\.(\d+)", found or "")  # None where an install is damaged
        if numbers is None:
            continue
        here = tuple(map(int, numbers.groups()))
        if here < oldest or (before is not None and here >= before):
            first, end = (None if x is None else ".".join(map(str, x)) for x in (oldest, before))
            wanted = f"{first} or newer" + ("" if end is None else f", and older than {end},")
            bounds = f">={first}" + ("" if end is None else f",<{end}")
            raise ImportError(
                f"{package} must be {wanted} for kvcompress, got {found}: pip install '{package}{bounds}'"
            )
