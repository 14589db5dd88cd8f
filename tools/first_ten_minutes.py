"""Plays what a new user does first: python tools/first_ten_minutes.py [--python PYTHON] [--wheel WHEEL]

A fresh environment with the wheel, not the clone; info; the README's Python in order; generate and needle; a cache
saved, and gone on with in another process; a notebook. Each must print what it should. --python: an environment that
has the package already, to see other versions of PyTorch and transformers. Without it one is made that borrows what is
installed beside this Python, and the wheel (of this tree and its built extension, if none is given) is put into it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import site
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tools.notebooks import code_cells, code_of  # noqa: E402
from tools.wheel import built_wheel  # noqa: E402

NOTEBOOK = ROOT / "notebooks/first_steps.ipynb"
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
# One process imports PyTorch and transformers once: what follows the other is what a user would do in one session.
START = """
import contextlib, io, json, sys, time

def timed(what, begin):
    print(f"{time.perf_counter() - begin:6.1f} s  {what}", file=sys.stderr, flush=True)

def run(code, namespace):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "given", "exec"), namespace)
    return printed.getvalue()

begin = time.perf_counter()
import kvcompress
timed("import", begin)
given, found = json.loads(sys.argv[1]), {"file": kvcompress.__file__}
TEXT = "def area(width, height):\\n    return width * height\\n\\n# The pass key of iron-lake is 48213.\\n" * 4

def go_on(cache, model, ids):
    return model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)[0, -8:].tolist()

def example():
    model, tokenizer = kvcompress.load_example_model()
    kvcompress.attach(model)
    return model, tokenizer(TEXT, return_tensors="pt").input_ids
"""
FIRST = (
    START
    + """
from typer.testing import CliRunner
from kvcompress.cli import app

def command(*arguments):
    begin = time.perf_counter()
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    timed("kvcompress " + arguments[0], begin)
    return result.stdout

begin = time.perf_counter()
found["readme"] = run(given["readme"], {})
timed("README", begin)
asked = TEXT + "# The pass key of iron-lake is "
found["generate"] = command("generate", asked, "--max-new-tokens", "5", "--quiet")
memory = "iterative,memory_size=256,chunk_size=512,num_sink_tokens=4,pruner=snapkv"
asked_of = ("--cache", memory, "--question", "guide", "--json", "needle.json")
command("eval", "needle", "--lengths", "4096", "--depths", "2", *asked_of)
with open("needle.json") as file:
    found["needle"] = json.load(file)["rows"]
begin = time.perf_counter()
model, ids = example()
cache = kvcompress.prefill(model, ids, kvcompress.PrunedCache(model.config, keep=0.5, later="keep"))
cache.save("cache.safetensors")
found["written"] = go_on(cache, model, ids)
timed("a cache saved", begin)
json.dump(found, open("found.json", "w"))
"""
)
SECOND = (
    START
    + """
begin = time.perf_counter()
model, ids = example()
found["written"] = go_on(kvcompress.load_cache("cache.safetensors", model), model, ids)
timed("the cache loaded", begin)
begin = time.perf_counter()
import matplotlib
matplotlib.use("agg")
for cell in given["cells"]:
    run(cell, found)
timed("a notebook", begin)
json.dump({"written": found["written"]}, open("found.json", "w"))
"""
)


def fresh(folder: Path, wheel: Path) -> Path:
    """The Python of a new environment with this wheel; what it requires is this Python's."""
    venv.create(folder)
    python = folder / "bin/python"
    lib = next(folder.glob("lib/python*/site-packages"))
    # paths alone: the .pth files of the other environment, an editable install's among them, are not read
    (lib / "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    install = ["-m", "pip", "--python", str(python), "install", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([sys.executable, *install, "--no-index", str(wheel)], check=True)
    return python


def need(right: bool, what: str) -> None:
    if not right:
        raise SystemExit(what)


def play(python: Path, folder: Path) -> None:
    """folder: an empty one, which all runs in."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    clean |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "80", "TERM": "dumb"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, env=clean, stdout=subprocess.PIPE, text=True)
        need(done.returncode == 0, f"{command[0]} failed")
        return done.stdout

    def session(code: str, **given: object) -> dict[str, object]:
        run(str(python), "-c", code, json.dumps(given))
        return json.loads((folder / "found.json").read_text())

    begin = time.perf_counter()
    info = json.loads(run(str(python.parent / "kvcompress"), "info", "--json"))
    print(f"{time.perf_counter() - begin:6.1f} s  kvcompress info:", end=" ", file=sys.stderr)
    print(*(f"{name} {info[name]}" for name in ("torch", "transformers", "python")), sep=", ", file=sys.stderr)

    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    first = session(FIRST, readme="\n".join(code for code, _ in blocks))
    need(not Path(str(first["file"])).is_relative_to(ROOT), f"kvcompress is that of the clone: {first['file']}")
    wanted = "".join(text for _, text in blocks)
    need(str(first["readme"]).strip() == wanted.strip(), f"README prints\n{first['readme']}\nnot\n{wanted}")
    need("48213" in str(first["generate"]), f"generate does not recall the fact: {first['generate']}")
    rows: list[dict[str, object]] = first["needle"]  # type: ignore[assignment]
    need(len(rows) == 1 and all(row["score"] == 1.0 for row in rows), f"needle does not recall its facts: {rows}")

    second = session(SECOND, cells=[code_of(cell) for cell in code_cells(NOTEBOOK)])
    need(second["written"] == first["written"], f"the loaded cache goes on with {second}, not {first['written']}")


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--python", type=Path, help="of an environment that has kvcompress")
    parse.add_argument("--wheel", type=Path, help="to install; not given: made of this tree")
    choice = parse.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in ("empty", "wheel"):
            (folder / name).mkdir()
        python = choice.python and choice.python.absolute()
        if python is None:
            python = fresh(folder / "environment", choice.wheel or built_wheel(folder / "wheel"))
            print(f"{time.perf_counter() - begin:6.1f} s  a fresh environment with the wheel", file=sys.stderr)
        play(python, folder / "empty")
    print(f"{time.perf_counter() - begin:6.1f} s in all", file=sys.stderr)


if __name__ == "__main__":
    main()
