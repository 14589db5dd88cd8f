"""The notebooks run, say what is so, and hold the figures that they show."""

import base64
import json

import pytest
from matplotlib.figure import Figure

from tools.notebooks import NOTEBOOKS, code_cells, results

FIGURES = {
    "choose_a_pruner": 1, "first_steps": 1, "merging": 2, "read_once": 1, "reading": 3, "sharing": 3,
    "speed_and_memory": 1, "your_own_pruner": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def ran():
    """What the code cells of a notebook return when it is run now; each notebook once."""
    found = {}

    def run(name):
        if name not in found:
            found[name] = results(NOTEBOOKS / f"{name}.ipynb")
        return [value for value in found[name] if value is not None]

    return run


def test_every_notebook_is_known_here():
    assert sorted(FIGURES) == sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_pictures_in_the_file(name):
    path = NOTEBOOKS / f"{name}.ipynb"
    pictures = [
        base64.b64decode(out.data["image/png"])
        for cell in code_cells(path)
        for out in cell.outputs
        if "image/png" in out.get("data", {})
    ]
    assert len(pictures) == FIGURES[name]
    assert all(picture.startswith(b"\x89PNG") and 5_000 < len(picture) < 150_000 for picture in pictures)
    assert '"output_type": "error"' not in json.dumps(json.loads(path.read_text()))


def figures(values):
    return sum(isinstance(value, Figure) for value in values)


def test_first_steps(ran):
    (_, answer), said, figure, unguided = ran("first_steps")
    assert said == answer and figures([figure]) == 1 and unguided is False


@pytest.mark.release  # as are the others of 5 seconds and more
def test_choosing_a_pruner(ran):
    (tokens, _), shares, figure = ran("choose_a_pruner")
    assert tokens < 2048 - 256 and figures([figure]) == 1
    (whole,), best, *_, windows = shares.values()
    assert whole >= 0.8 and min(best) >= whole - 0.13 and sum(best) >= sum(windows) + 1


@pytest.mark.release
def test_reading(ran):
    (_, answer), plan, said, memory, losses, unguided = ran("reading")
    assert said == answer and figures([plan, memory, losses]) == 3 and unguided is False


def test_reading_once(ran):
    pairs, (again, size), figure = ran("read_once")
    right = [answer.startswith(key) for answer, key in pairs]
    assert sum(right) >= 4 and again == pairs[0][0] and size.endswith("bytes in the file") and figures([figure]) == 1


def test_merging(ran):
    (_, answer), said, ratio, *shown, difference = ran("merging")
    assert said == answer and ratio > 1.5 and figures(shown) == 2
    assert float(difference.rsplit(" ", 1)[1]) < 1e-3


def test_sharing(ran):
    (_, answer), similarity, blocks, said, keys, sets, (skipped, shares), difference = ran("sharing")
    assert said == skipped == answer and figures([similarity, blocks, sets]) == 3
    assert keys[0] == [[1904, 1904], [256, 256], [256, 1904], [256, 256]]
    assert shares.followers > 0
    assert float(difference.rsplit(" ", 1)[1]) < 1e-3


def test_a_pruner_of_ones_own(ran):
    figure, recalled = ran("your_own_pruner")
    assert figures([figure]) == 1 and set(recalled) == {"Novelty", "SnapKV"}


@pytest.mark.release
def test_speed_and_memory(ran):
    (figure,) = ran("speed_and_memory")
    assert figures([figure]) == 1
