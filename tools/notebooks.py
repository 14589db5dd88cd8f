"""Runs the notebooks and keeps what they show: python tools/notebooks.py [NAME ...], all of them if none is named.

Written into the files are outputs alone: no times, no versions, no numbers of runs. The tests run the same cells in
their own process (results), without starting a kernel for each, and look at the figures that the files hold.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import nbformat

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def code_of(cell: Any) -> str:
    """Its Python, without what is for the notebook's own machinery."""
    return "\n".join(line for line in cell.source.splitlines() if not line.startswith("%"))


def results(path: Path) -> list[Any]:
    """Runs a notebook here; the value of each code cell's last line, None where that is no expression."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    found = []
    for number, cell in enumerate(code_cells(path)):
        tree = ast.parse(code_of(cell), f"{path.name}[{number}]")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"{path.name}[{number}]", "exec"), namespace)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"{path.name}[{number}]", "eval"), namespace)
        found.append(value)
    return found


def execute(path: Path) -> None:
    """Runs it as a notebook, and writes what it shows."""
    from nbclient import NotebookClient

    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=600, kernel_name="python3").execute()
    for cell in book.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
            for out in cell.outputs:
                if "execution_count" in out:
                    out.execution_count = None
    book.metadata = {"kernelspec": book.metadata.kernelspec, "language_info": {"name": "python"}}
    nbformat.write(book, path)


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")):
        execute(NOTEBOOKS / f"{name}.ipynb")
        print(name)
