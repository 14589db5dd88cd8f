from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def executed(name: str) -> list[str]:
    """What the notebook's code cells return when it is run now, as text."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    return [out.data["text/plain"] for out in outputs if out.output_type == "execute_result"]


def test_reading_notebook_runs_and_its_answer_is_right():
    asked, answer, *_ = executed("reading.ipynb")
    assert answer in asked


def test_merging_notebook_runs_its_answer_is_right_and_its_cache_is_smaller():
    asked, answer, ratios, *_, difference = executed("merging.ipynb")
    assert asked.endswith(f"{answer})")
    assert float(ratios.rsplit(",", 1)[1].rstrip(")")) > 1.5
    assert float(difference.strip("'").rsplit(" ", 1)[1]) < 1e-3


def test_sharing_notebook_runs_its_answer_is_right_and_its_cache_is_smaller():
    asked, lead, answer, keys, nbytes, _, skipped, difference = executed("sharing.ipynb")
    assert asked.endswith(f"{answer})")
    assert "0.625 of all heads follow" in lead
    assert keys.startswith("([[1904, 1904], [304, 304], [304, 1904], [304, 304]]")
    ours, dense = (int(part.strip("(')").split()[0].replace(",", "")) for part in nbytes.split("', '"))
    assert ours < 0.8 * dense
    assert "SkipShares(followers=0." in skipped
    assert float(difference.strip("'").rsplit(" ", 1)[1]) < 1e-3
