"""Which versions of other packages this one needs, asked before their import, in which old ones fail anywhere."""

import re
from importlib.metadata import PackageNotFoundError, version

NEEDED = {"torch": (2, 11), "transformers": (5, 19)}  # as pyproject.toml has them


def check_versions() -> None:
    """Raises ImportError for a package that is too old, with what is needed. One that is missing says so itself."""
    for package, (major, minor) in NEEDED.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        numbers = re.match(r"(\d+)\.(\d+)", found or "")  # None where an install is damaged
        if numbers is not None and tuple(map(int, numbers.groups())) < (major, minor):
            raise ImportError(
                f"{package} must be {major}.{minor} or newer for kvcompress, got {found}: "
                f"pip install '{package}>={major}.{minor}'"
            )
