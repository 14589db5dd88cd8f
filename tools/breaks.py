"""Breaks one line at a time and asks the tests: what no test notices is printed.

`python tools/breaks.py --count 40 --seed 0 [--json FILE]`: breaks are drawn by turns from the folders of the package
and of csrc, always the same for a seed. Each is made in a copy of the checkout, what it needs is built there, and the
nearest tests run first: those named after the file, then those that import it, then those of what imports it. The
first failure ends it. `--minutes` bounds what one break may take; one that outlives it counts as missed, with the tests
that ran.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILT = ("kvcompress/_C.abi3.so", "tests/cuda_emulation/build", "tests/c/build", "build")
TOGETHER = 5  # files of tests in one process, which takes seconds to begin
SPARED = re.compile(r'\s*(#|//|\*|/\*|template|KVC_REGISTER|"|using|static_assert)')
WRITTEN = ("kvcompress/_C.abi3.so", "tests/cuda_emulation/build/library/emulated.so")
SWAPS = {  # what a token of C becomes
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "+", "/": "*",
    "&&": "||", "||": "&&", "+=": "-=", "++": "--",
}  # fmt: skip
COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
            ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip
COUNTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}


@dataclass
class Break:
    file: str
    line: int
    before: str
    after: str


# ---- what can break ----


def breaks_of(path: Path) -> list[Break]:
    name = path.relative_to(ROOT).as_posix()
    found = _python(path.read_text()) if path.suffix == ".py" else _native(path.read_text())
    return [Break(name, line, before, after) for line, before, after in found if before != after]


def _python(text: str) -> Iterator[tuple[int, str, str]]:
    """One operator, condition or statement of a line turned or taken out; messages and annotations stay."""
    lines, tree = text.split("\n"), ast.parse(text)
    spared = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise | ast.AnnAssign | ast.Import | ast.ImportFrom | ast.JoinedStr)
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if not line or line in spared or getattr(node, "end_lineno", line) != line:
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
            other = ast.Compare(node.left, [COMPARED[type(node.ops[0])](), *node.ops[1:]], node.comparators)
        elif isinstance(node, ast.BinOp) and type(node.op) in COUNTED and not isinstance(node.left, ast.Constant):
            other = ast.BinOp(node.left, COUNTED[type(node.op)](), node.right)
        elif isinstance(node, ast.BoolOp):
            other = ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            other = node.operand
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            other = ast.Constant(node.value + 1)
        elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or isinstance(node, ast.AugAssign):
            other = ast.Pass()
        else:
            continue
        source = lines[line - 1]
        begin, end = (len(source.encode()[:x].decode()) for x in (node.col_offset, node.end_col_offset))
        new = ast.unparse(ast.fix_missing_locations(other))
        if not isinstance(other, ast.stmt | ast.Constant | ast.Name):
            new = f"({new})"
        yield line, source, source[:begin] + new + source[end:]


def _native(text: str) -> Iterator[tuple[int, str, str]]:
    """One token of a line of C, CUDA or C++ turned, or an assignment taken out; comments and directives stay."""
    comment = False
    for number, line in enumerate(text.split("\n"), 1):
        code = line
        if comment:
            comment = "*/" not in code
            continue
        if SPARED.match(code) or code.rstrip().endswith("\\"):
            comment = "/*" in code and "*/" not in code
            continue
        bare = re.sub(r'"(\\.|[^"\\])*"|//.*|/\*.*?\*/', lambda m: " " * len(m.group()), code)
        for found in re.finditer(r"(?<= )(<=|>=|==|!=|&&|\|\||\+=|[-+*/<>])(?= )|\+\+", bare):
            new = SWAPS[found.group()]
            if found.group() == "*" and not re.search(r"[\w)\]] $", bare[: found.start()]):
                continue  # a pointer
            yield number, line, code[: found.start()] + new + code[found.end() :]
        if re.match(r"\s+\w[\w.\->\[\]]* (=|\+=) .*;$", bare):
            yield number, line, re.match(r"\s*", line).group() + ";"  # type: ignore[union-attr]


def drawn(count: int, seed: int) -> list[Break]:
    """By turns from every folder, so that small ones have their share."""
    folders: dict[str, list[Path]] = {}
    for path in [*ROOT.glob("kvcompress/**/*.py"), *ROOT.glob("csrc/**/*")]:
        if path.suffix in (".py", ".c", ".cu", ".cuh", ".cpp", ".h") and path.name != "__init__.py":
            folders.setdefault(path.parent.relative_to(ROOT).as_posix(), []).append(path)
    for native in [name for name in folders if name.startswith("csrc")]:
        folders[native + " "] = folders[native]  # kernels are half of what can be wrong
    generator = random.Random(seed)
    order = sorted(folders)
    generator.shuffle(order)
    chosen: list[Break] = []
    while len(chosen) < count:
        for folder in order:
            every = [one for path in sorted(folders[folder]) for one in breaks_of(path)]
            if every and len(chosen) < count:
                chosen.append(generator.choice(every))
    return chosen


# ---- who should notice ----


def imports(path: Path) -> set[str]:
    """Modules that a file names in imports, as dotted names."""
    name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    package = name.rsplit(".", 1)[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def nearest(file: str) -> list[str]:
    """Test files, nearest first: of the file's name, of who imports it, of who imports those; then all others."""
    native, stem = file.startswith("csrc"), re.sub(r"^(simd|kvc)_", "", Path(file).stem)
    modules = {path: imports(path) for path in ROOT.glob("kvcompress/**/*.py")}
    names = {
        path: path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for path in modules
    }
    rings = [{names[path] for path in modules if (path.stem == stem if native else path == ROOT / file)}]
    for _ in range(2):
        users = {names[path] for path, used in modules.items() if used & rings[-1] and path.name != "public.py"}
        rings.append(users - set().union(*rings))
    words = {*stem.split("_"), Path(file).parent.name} - {"run", "step", "cache", "layer", "common", "plan", "cuda"}

    def distance(test: Path) -> tuple[int, str]:
        used, name, text = imports(test), test.stem.removeprefix("test_"), test.read_text()
        if name in (stem, f"{Path(file).parent.name}_{stem}"):
            return 0, test.name
        if not native and "backend" in text and file.split("/")[1] != "ops":
            return 8, test.name  # of kernels
        if words & set(name.split("_")):
            return 1, test.name
        named = any(module.rsplit(".", 1)[-1].lower() in text.lower() for module in rings[0])
        far = 0 if named else next((far for far, ring in enumerate(rings) if used & ring), None)
        if far is not None:
            return 2 + far, test.name
        return (3 if native and "backend" in text else 9), test.name

    tests = sorted(ROOT.glob("tests/**/test_*.py"), key=distance)
    return [test.relative_to(ROOT).as_posix() for test in tests if "vllm_plugin" not in test.parts]


# ---- asking ----


def copied(folder: Path) -> None:
    """The files of this checkout and what is built of them."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in files.split("\0")[:-1]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    for name in BUILT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name)
        elif (ROOT / name).exists():
            shutil.copy2(ROOT / name, folder / name)


def run(command: list[str], folder: Path, **given: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, **given)


def built(folder: Path, file: str) -> str | None:
    """Builds what a broken native file is part of; what the compiler says of it if it refuses."""
    if not file.startswith("csrc"):
        return None
    environment = os.environ | {"KVC_CUDA": "0"}
    jobs = []
    if "/cuda/" not in file:
        jobs.append(([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], folder))
    if "/cuda/" in file or "/torch/" in file or file.endswith(".h"):
        import torch

        torch_folder = os.path.dirname(torch.__file__)
        jobs.append((["make", "-s", "-j2", "-C", "tests/cuda_emulation", "library", f"TORCH={torch_folder}"], folder))
    for command, where in jobs:
        done = run(command, where, env=environment)
        if done.returncode:
            return (done.stderr or done.stdout).strip()[-200:]
    return None


def asked(folder: Path, one: Break, minutes: float) -> dict[str, object]:
    path = folder / one.file
    text = path.read_text()
    lines = text.split("\n")
    assert lines[one.line - 1] == one.before
    lines[one.line - 1] = one.after
    started, ran = time.monotonic(), []
    path.write_text("\n".join(lines))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    try:
        if (refused := built(folder, one.file)) is not None:
            return {"caught": True, "by": "the compiler", "says": refused, "ran": []}
        kernel = re.fullmatch(r"csrc/\w+\.[ch]", one.file)
        if kernel and run(["make", "-s", "-C", "tests/c", "sanitize"], folder).returncode:
            return {"caught": True, "by": "make sanitize", "ran": ran}
        tests = nearest(one.file)
        for some in (tests[first : first + TOGETHER] for first in range(0, len(tests), TOGETHER)):
            left = minutes * 60 - (time.monotonic() - started)
            if left <= 0:
                break
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:randomly", *some]
            try:
                done = run(command, folder, env=environment, timeout=left)
            except subprocess.TimeoutExpired:
                ran.append(f"{' '.join(some)} (cut)")
                break
            ran += some
            if done.returncode not in (0, 5):
                failed = re.search(r"^(FAILED|ERROR) (\S+)", done.stdout, re.M)
                return {"caught": True, "by": failed[2] if failed else " ".join(some), "ran": ran}
        return {"caught": False, "by": None, "ran": ran}
    finally:
        path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="breaks that are left out, of a run that was cut off")
    parser.add_argument("--minutes", type=float, default=10, help="that one break may take")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    parser.add_argument("--list", action="store_true", help="name the breaks and the first tests, break nothing")
    choice = parser.parse_args()
    every = drawn(choice.count, choice.seed)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not choice.list:
            copied(folder)
        whole = {name: (folder / name).read_bytes() for name in WRITTEN if (folder / name).exists()}
        for number, one in list(enumerate(every))[choice.first :]:
            print(
                f"{number:3} {one.file}:{one.line}", f"- {one.before.strip()}", f"+ {one.after.strip()}", sep="\n    "
            )
            if choice.list:
                print("   ", " ".join(Path(test).stem for test in nearest(one.file)[:6]))
                continue
            row = asdict(one) | asked(folder, one, choice.minutes)
            for name, content in whole.items():  # of the whole sources again
                (folder / name).write_bytes(content)
            rows.append(row)
            print(f"    {row['by'] or 'MISSED'} ({len(row['ran'])} files of tests)", flush=True)  # type: ignore[arg-type]
            if choice.json:
                choice.json.write_text(json.dumps({"seed": choice.seed, "rows": rows}, indent=1) + "\n")
    if rows:
        print(f"{sum(bool(row['caught']) for row in rows)} of {len(rows)} were caught")


if __name__ == "__main__":
    main()
