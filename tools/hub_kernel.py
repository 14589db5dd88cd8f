"""Makes the ops a folder that Hugging Face's `kernels` loads: python tools/hub_kernel.py FOLDER [BACKEND]

FOLDER/build/torch-stable-abi211-BACKEND-x86_64-linux has the extension that stands in kvcompress/, the files of
kvcompress.ops and what those import, and metadata.json. BACKEND: cpu, if not given, or cu130 for one that was built by
CUDA 13.0. `hf upload OWNER/NAME FOLDER --repo-type kernel` publishes it; then

    ops = kernels.get_kernel("OWNER/NAME", revision="main", trust_remote_code=True).ops  # or get_local_kernel(FOLDER)

A process has these ops once: where kvcompress is installed, they are those of the installation.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import re
import runpy
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE, EXTENSION = ROOT / "kvcompress", "_C.abi3.so"
FACE = '''"""The ops of kvcompress: shapes, dtypes and errors are in their docstrings."""

from importlib.util import find_spec

if find_spec("kvcompress") is None:
    from . import ops
else:  # a process has them once
    from kvcompress import ops

__all__ = ["ops"]
'''


def files() -> list[Path]:
    """Those of ops, and what they import of the package."""
    found, coming = [], sorted((PACKAGE / "ops").glob("*.py"))
    while coming:
        path = coming.pop(0)
        found.append(path)
        for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(part, ast.ImportFrom) and part.level:
                beside = path.parents[part.level - 1] / f"{str(part.module).replace('.', '/')}.py"
                if beside.is_file() and beside not in [*found, *coming]:
                    coming.append(beside)
    return found


def make(folder: Path, backend: str = "cpu") -> Path:
    """Returns the folder of the build."""
    if not re.fullmatch(r"cpu|cu\d{2,}", backend):
        raise SystemExit(f"BACKEND must be cpu or such as cu130, got {backend!r}")
    oldest = "".join(map(str, runpy.run_path(str(PACKAGE / "support/versions.py"))["NEEDED"]["torch"][0]))
    build = folder / "build" / f"torch-stable-abi{oldest}-{backend}-{platform.machine()}-linux"
    if build.exists():
        raise SystemExit(f"{build} must be new")
    for path in files():
        target = build / path.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    shutil.copy(PACKAGE / EXTENSION, build)
    (build / "__init__.py").write_text(FACE)
    digest = hashlib.sha256((build / EXTENSION).read_bytes()).hexdigest()[:12]
    about = {
        "id": f"_kvcompress_{backend}_{digest}", "name": "kvcompress", "version": 1, "license": "Apache-2.0",
        "python-depends": [], "backend": {"type": "cpu" if backend == "cpu" else "cuda"},
    }  # fmt: skip
    (build / "metadata.json").write_text(json.dumps(about, indent=1) + "\n")
    return build


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    print(make(Path(sys.argv[1]), *sys.argv[2:]))
