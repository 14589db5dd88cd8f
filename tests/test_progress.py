"""What takes long says how much is done: a bar on a terminal, lines where there is none."""

import io

import pytest
from rich.console import Console

from kvcompress.support import progress
from kvcompress.support.progress import counted, showing, telling


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass with each look at the clock: 30."""
    times = iter(range(0, 10_000, 30))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def test_a_line_a_minute_with_what_is_left(clock, capsys):
    with showing(True, 8, label="training", unit="steps", console=Console(file=io.StringIO())) as show:
        for step in range(1, 6):
            show(step, "loss [0.5]" if step == 4 else "")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "training: 2 of 8 steps, 60 s, about 180 s left",
        "loss [0.5]: 4 of 8 steps, 120 s, about 120 s left",
    ]


def test_what_has_no_known_end_has_no_estimate(clock, capsys):
    with showing(True, None, console=Console(file=io.StringIO())) as show:
        for done in (1000, 2000):
            show(done)
    assert capsys.readouterr().err == "reading: 2,000 tokens, 60 s\n"


def test_items_are_counted_when_they_are_done(clock, capsys):
    assert [*counted(["a", "b", "c"], console=Console(file=io.StringIO()))] == ["a", "b", "c"]
    assert capsys.readouterr().err == "reading: 2 of 3 texts, 60 s, about 30 s left\n"


def test_what_comes_next_is_told_before_it(clock, capsys):
    with telling(4, unit="rows", console=Console(file=io.StringIO())) as told:
        for name in ("dense", "pruned", "streaming"):
            told(name)
    assert capsys.readouterr().err == "pruned: 1 of 4 rows, 60 s, about 180 s left\n"


def test_a_terminal_has_a_bar():
    console = terminal()
    with showing(True, 4, label="reading", unit="texts", console=console) as show:
        show(3, "what [comes]")
    assert isinstance(console.file, io.StringIO)
    assert "what [comes]" in console.file.getvalue() and "3 texts" in console.file.getvalue()


def test_a_function_is_called_instead():
    calls = []
    with showing(lambda done, whole: calls.append((done, whole)), 9) as show:
        show(4, "text")
    with showing(False, 9) as show:
        show(4)
    assert calls == [(4, 9)]
