"""A few rounds of every fuzzer (tools/fuzz.py runs as many as one likes), and that they would see what is wrong."""

import random
import subprocess
import sys
from pathlib import Path

import fuzz
import fuzz.ops
import pytest
import torch
from fuzz.ops_made import MADE, Maker

from kvcompress import ops

RUNNER = Path(__file__).parents[1] / "tools" / "fuzz.py"
ROUNDS = {"ops": 15, "votes": 3, "turns": 4, "caches_in_threads": 5, "pools": 1, "properties": 6}


@pytest.mark.parametrize("name", fuzz.NAMES)
def test_rounds_of_a_fuzzer(name):
    """Together the smallest form of `make fuzz`; `properties`, 5 s, imports all files that use hypothesis."""
    assert sum(fuzz.one_round(name, seed) for seed in range(ROUNDS[name])) > 0


def test_every_op_is_called():
    called = {name for name in ops.__all__ if name[0].islower()} - {"simd"}
    assert called == set(MADE)


def test_every_file_is_run():
    files = {path.stem for path in Path(fuzz.__file__).parent.glob("*.py")} - {"__init__", "ops_made"}
    assert files == set(fuzz.NAMES) == set(ROUNDS)


class Fixed(random.Random):
    """Every chance is this one."""

    value = 0.0

    def random(self) -> float:
        return self.value


def refusing(error):
    def op(x, *_, **__):
        raise error

    return op


def changing(x, *_, **__):
    x.zero_()
    raise ValueError("x must be better")


@pytest.mark.parametrize(
    ("op", "damages", "message"),
    [
        (lambda x, *_, **__: x * 1.1, False, "rope.*not close"),
        (refusing(ValueError("x must be better")), False, "rope: refused: x must be better"),
        (refusing(AttributeError("x")), True, "rope, cos damaged .*AttributeError"),
        (refusing(ValueError("bad")), True, "ValueError names no argument: bad"),
        (changing, True, "refused, and changed"),
    ],
    ids=["wrong", "refused", "other error", "no name", "changed"],
)
def test_a_wrong_op_is_found(op, damages, message, monkeypatch):
    chance = Fixed()
    chance.value = 0.0 if damages else 0.99
    made = {"x": torch.ones(1, 1, 2, 4), "cos": torch.ones(2, 2), "sin": torch.zeros(2, 2), "positions": None}
    monkeypatch.setitem(MADE, "rope", lambda make: dict(made, inverse=False))
    fuzz.ops.one_call("rope", Maker(chance))
    monkeypatch.setattr(ops, "rope", op)
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        fuzz.ops.one_call("rope", Maker(chance))


def test_the_runner_prints_seeds_and_replays_what_failed():
    done = subprocess.run(
        [sys.executable, str(RUNNER), "--rounds", "2", "--seed", "7", "turns"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (
        "fuzz: turns from seed 7" in done.stdout and "turns: 2 rounds, " in done.stdout and ", 0 wrong" in done.stdout
    )
    wrong = subprocess.run([sys.executable, str(RUNNER), "none"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "NAME must be one of ops, votes, " in wrong.stderr
    # the same round for the same seed
    assert [fuzz.one_round("turns", 7) + fuzz.one_round("turns", 8)] * 2 == [
        int(done.stdout.split("rounds, ")[1].split()[0].replace(",", ""))
    ] * 2


def test_the_states_of_a_round_follow_from_its_seed():
    made = [MADE["decode"](Maker(random.Random("decode 3"))) for _ in range(2)]
    for name, value in made[0].items():
        same = torch.equal(value, made[1][name]) if isinstance(value, torch.Tensor) else value == made[1][name]
        assert same, name
