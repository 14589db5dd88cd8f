"""README and docs/ say what is so: every block runs, in order, as it is written.

python: run, all blocks of a page in one namespace, in an empty folder; a text block right behind one is what it prints.
console: lines `$ kvcompress ...` are run, and what stands behind one is what it prints ("..." for any text).
sh: not run; commands of ours must have the options that they are given, programs and make targets must be there.
"""

import contextlib
import doctest
import io
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from kvcompress.cli import app
from tools import pages

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$(?=(\n\n```text\n(.*?)^```$)?)", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "console", "sh", "text", "bibtex", "json"}


class Block(NamedTuple):
    language: str
    code: str
    line: int
    printed: str | None  # text block right behind it


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(m[2], m[3], text.count("\n", 0, m.start()) + 2, m[5]) for m in FENCE.finditer(text)]


def same(wanted: str, got: str, where: str) -> None:
    squeezed = [re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).strip("\n") + "\n" for text in (wanted, got)]
    assert doctest.OutputChecker().check_output(*squeezed, doctest.ELLIPSIS), f"{where} prints\n{got}\nnot\n{wanted}"


def run_python(block: Block, page: Path, namespace: dict[str, object]) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)
    if block.printed is not None:
        same(block.printed, printed.getvalue(), f"{page.name}:{block.line}")


def run_console(block: Block, page: Path) -> None:
    for command in re.split(r"^\$ ", block.code, flags=re.MULTILINE)[1:]:
        line, _, wanted = command.replace("\\\n", " ").partition("\n")
        program, *arguments = shlex.split(line, comments=True)
        assert program == "kvcompress", f"{page.name}:{block.line} runs {program}"
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80", "TERM": "dumb"})
        assert result.exit_code == 0, f"{line}\n{result.output}"
        same(wanted or "...", result.stdout, f"{page.name}: {line}")


def check_sh(block: Block, page: Path) -> None:
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and "=" in words[0]:  # environment
            del words[0]
        if words[:1] == ["kvcompress"]:
            command, arguments = typer.main.get_command(app), words[1:]
            context = command.make_context("kvcompress", arguments, resilient_parsing=True)
            while arguments and hasattr(command, "get_command"):
                found = command.get_command(context, arguments[0])
                assert found is not None, f"{page.name}: no command {arguments[0]!r} in {line!r}"
                command, arguments = found, arguments[1:]
            command.make_context(command.name, arguments)  # refuses options that are not there
        elif words[:1] == ["make"]:
            makefile = (ROOT / "Makefile").read_text()
            assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in words[1:]), line
        elif words[:1] == ["python"]:
            file = words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1]
            assert (ROOT / file).is_file(), f"{page.name}: no {file}"


@pytest.mark.filterwarnings("error:`past_key_values`:FutureWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    found = blocks(page)
    fences = len(re.findall(r"^ *```", page.read_text(), re.MULTILINE))
    assert fences == 2 * len(found) and {block.language for block in found} <= LANGUAGES
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses look for the module of a class
    for block in found:
        if block.language == "python":
            run_python(block, page, vars(module))
        elif block.language == "console":
            run_console(block, page)
        elif block.language == "sh":
            check_sh(block, page)


def test_no_number_at_the_begin_of_a_line_becomes_a_list():
    for page in PAGES:
        text = re.sub(FENCE, "", page.read_text())
        assert not (found := re.findall(r"^ *\d\d+[.)] .*", text, re.MULTILINE)), f"{page}: {found}"


def test_a_wrong_block_would_be_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n\n```sh\nkvcompress plan --token 5\n```\n")
    shown, _, command = blocks(page)
    with pytest.raises(AssertionError, match=r"page.md:2 prints\n *2\n"):
        run_python(shown, page, {})
    with pytest.raises(Exception, match="--token"):
        check_sh(command, page)


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text())
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_documentation_builds_without_a_warning():
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["models", "cli", "results/pruning", "results/shapes"])
def test_pages_that_are_made_are_what_they_are_made_from(name):
    made = getattr(pages, f"{name.rpartition('/')[2]}_page")()
    assert (ROOT / f"docs/{name}.md").read_text() == made, "run python tools/pages.py"
