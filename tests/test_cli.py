import re
from itertools import pairwise

import pytest
import torch
from helpers import tiny_model
from typer.testing import CliRunner

from kvcompress import plan
from kvcompress.apps.plan_report import picture
from kvcompress.cli import app


def run(*arguments, command="demo"):
    return CliRunner().invoke(app, [command, *arguments], env={"COLUMNS": "80"})


def test_demo_answers_right_and_says_what_the_others_lost():
    result = run("--quick", "--seed", "1")
    assert result.exit_code == 0, result.output
    rows = dict(re.findall(r"^ *(iterative|StreamingLLM|dense) .* (yes|no) *$", result.output, re.MULTILINE))
    assert rows == {"iterative": "yes", "StreamingLLM": "no", "dense": "yes"}
    assert max(map(len, result.output.splitlines())) <= 80
    assert "the fact left its window" in result.output


def test_demo_fails_where_the_answer_is_wrong():
    result = run("--tokens", "4096", "--dense-tokens", "0", "--memory-size", "5", "--chunk-size", "512")
    assert result.exit_code == 1
    assert "wrong answer" in result.output


@pytest.mark.parametrize(
    "arguments", [("--tokens", "3"), ("--depth", "1.5"), ("--memory-size", "0"), ("--chunk-size", "0")]
)
def test_wrong_options_are_named(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.output


def test_tokens_are_written_as_everywhere_and_a_share_is_none():
    settings = [["--tokens", "4096", "--chunk-size", "1024"], ["--tokens", "4k", "--chunk-size", "1K"]]
    assert len({run(*given, command="plan").output for given in settings}) == 1
    for given, said in (
        (["--tokens", "4k", "--memory-size", "1/4"], "it must be a number of tokens (1024, '1k'), got '1/4'"),
        (["--tokens", "0"], "it must be at least 1, got 0"),
    ):
        refused = run(*given, command="plan")
        assert refused.exit_code == 2 and given[-2] in refused.output
        assert said in " ".join(refused.output.replace("│", " ").split())


# ---- plan ----


def table_of(output):
    """{row: (this plan, fixed memory)} of the printed table."""
    rows = re.findall(r"^ (\S.*?)  +(\S.*?)   +(\S.*?) *$", output, re.MULTILINE)
    return {name: values for name, *values in rows}


def planned(*arguments):
    result = run(*arguments, command="plan")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    return result.output


def test_large_numbers_of_a_plan_are_whole():
    output = planned(
        "--tokens", "10000000", "--chunk-size", "64k", "--memory-size", "16k", "--dynamic", "--model", "example"
    )
    assert "…" not in output and "57,274" in output


def test_plan_prints_what_the_plan_is():
    output = planned("--tokens", "32", "--chunk-size", "8", "--memory-size", "8", "--dynamic", "--initial-memory", "2")
    assert output.startswith("32 tokens, schedule linear, shrinking chunks\n")
    rows = table_of(output)
    assert rows["iterations"] == ["4", "4"]
    assert rows["chunk: first, longest, last"] == ["8  10  6", "8  8  8"]
    assert rows["memory: first, last"] == ["2  8", "8  8"]
    assert rows["mean memory met (m-hat)"] == ["4.0", "8.0"]
    assert rows["largest context (positions)"] == ["12", "16"]
    assert rows["attended pairs"] == ["236", "336"]
    assert rows['peak keys per row, prune="forward"'] == ["12", "16"]
    assert rows['peak keys per row, prune="layer"'] == ["8 + 12 once", "8 + 16 once"]
    assert rows["ratio of keys (q of equation 4)"] == ["1.333", "1"]
    assert rows["speed-up for --share 1"] == ["1.333", "1"]
    assert rows["ratio of attended pairs"] == ["1.424", "1"]
    assert "MiB" not in output
    bars = [line.split() for line in output.splitlines()[-4:]]
    assert [bar[:3] for bar in bars] == [["0", "0", "8"], ["1", "2", "10"], ["2", "4", "8"], ["3", "6", "6"]]
    assert [len(bar[3]) for bar in bars[1:]] == [48, 48, 48]
    assert [bar[3].count("█") for bar in bars] == [0, 8, 16, 24]


def test_plan_of_many_iterations_is_drawn_in_few_lines():
    output = planned(
        "--tokens",
        "1000000",
        "--chunk-size",
        "1024",
        "--memory-size",
        "2048",
        "--schedule",
        "sqrt",
        "--dynamic",
        "--share",
        "0.5",
    )
    first = next(i for i, line in enumerate(output.splitlines()) if line.startswith("iterations"))
    bars = output.splitlines()[first + 1 :]
    assert len(bars) == 20
    ranges = [tuple(map(int, bar.split()[0].split("-"))) for bar in bars]
    assert ranges[0][0] == 0 and ranges[-1][1] == 976
    assert all(before[1] + 1 == after[0] for before, after in pairwise(ranges))
    rows = table_of(output)
    ratio, gain = (float(rows[name][0]) for name in ("ratio of keys (q of equation 4)", "speed-up for --share 0.5"))
    assert gain == pytest.approx(1 + (ratio - 1) / 2, abs=1e-3)


def test_plan_is_drawn_in_ascii_where_the_terminal_has_no_more():
    lines = picture(
        plan(32, chunk_size=8, memory_size=8, schedule="linear", dynamic=True, least_memory=2), ascii_only=True
    )
    assert lines[0].isascii()
    assert [line.split()[-1] for line in lines[2:]] == ["#" * count + "." * (48 - count) for count in (8, 16, 24)]


def test_plan_counts_bytes_of_a_model(tmp_path):
    config = tiny_model(num_hidden_layers=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=1000).config
    config.dtype = torch.float32
    config.save_pretrained(tmp_path)
    sizes = ("--tokens", "32000", "--chunk-size", "800", "--memory-size", "800", "--initial-memory", "20")
    output = planned(*sizes, "--model", str(tmp_path))
    rows = table_of(output)
    nbytes = 2 * 2 * 16 * 4  # of a key and its value in the heads of a layer
    keys = {"forward": (4 * 1580, 4 * 1600), "layer": (4 * 800 + 1580, 4 * 800 + 1600)}
    for prune, counts in keys.items():
        expected = [f"{count * nbytes / 2**20:.1f} MiB" for count in counts]
        assert rows[f'peak keys and values, prune="{prune}"'] == expected
    assert "1,580 keys in sight are more than the 1,000 positions" in " ".join(output.split())
    given = table_of(planned(*sizes, "--layers", "4", "--kv-heads", "2", "--head-dim", "16", "--dtype", "float32"))
    assert given == rows
    half = table_of(planned(*sizes, "--model", str(tmp_path), "--dtype", "float16"))
    expected = [f"{count * nbytes / 2**11:.1f} KiB" for count in keys["layer"]]
    assert half['peak keys and values, prune="layer"'] == expected
    codes = table_of(planned(*sizes, "--model", str(tmp_path), "--dtype", "k8v4"))
    expected = [f"{count * 2 * (16 + 2 + 8 + 2) / 2**10:.1f} KiB" for count in keys["layer"]]
    assert codes['peak keys and values, prune="layer"'] == expected


def test_plan_says_what_is_special():
    sizes = ("--tokens", "48", "--chunk-size", "8", "--memory-size", "24", "--initial-memory", "4")
    output = " ".join(planned(*sizes, "--dynamic").split())
    assert "Note: memory_size = 24 is large for chunk_size = 8 and schedule 'linear': 1 of 6 chunks" in output
    assert "linear; give --layers" in planned(*sizes, "--schedule", "square-sqrt")
    assert "give --layers" not in planned(*sizes, "--schedule", "square-sqrt", "--layers", "3")
    assert "what it retains" in " ".join(planned(*sizes, "--schedule", "adaptive").split())
    assert "Note: a fixed memory of 24 is full only after 3 of 6 iterations" in output
    assert "Note" not in planned("--tokens", "48", "--chunk-size", "8", "--memory-size", "8", "--dynamic")
    assert table_of(planned("--tokens", "5"))["iterations"] == ["1", "1"]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("--tokens", "0"), "--tokens"),
        (("--chunk-size", "0"), "--chunk-size"),
        (("--memory-size", "0"), "--memory-size"),
        (("--memory-size", "9" * 19), "--memory-size"),
        (("--chunk-size", "1", "--tokens", "9" * 9), "--chunk-size"),
        (("--schedule", "cubic"), "--schedule"),
        (("--initial-memory", "9"), "--initial-memory"),
        (("--min-chunk", "0"), "--min-chunk"),
        (("--share", "1.5"), "--share"),
        (("--memory-size", "24", "--dynamic", "--strict", "--initial-memory", "4"), "--memory-size"),
        (("--layers", "0"), "--layers"),
        (("--kv-heads", "2"), "--kv-heads"),
        (("--layers", "2", "--head-dim", "64"), "--head-dim"),
        (("--dtype", "float16"), "--dtype"),
        (("--dtype", "float8", "--layers", "1", "--kv-heads", "1", "--head-dim", "1"), "--dtype"),
        (("--model", "/no/such/model"), "--model"),
    ],
)
def test_wrong_options_of_plan_are_named(arguments, option):
    sizes = {"--tokens": "48", "--chunk-size": "8", "--memory-size": "8"}
    given = [x for name, value in sizes.items() if name not in arguments for x in (name, value)]
    result = run(*given, *arguments, command="plan")
    assert result.exit_code == 2, result.output
    assert f"Invalid value for '{option}'" in result.output or f"Invalid value for {option}" in result.output


def test_plan_needs_a_prompt_length():
    result = run(command="plan")
    assert result.exit_code == 2
    assert "--tokens" in result.output
