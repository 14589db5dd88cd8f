import re

import pytest
from typer.testing import CliRunner

from kvcompress.cli import app


def run(*arguments):
    return CliRunner().invoke(app, ["demo", *arguments], env={"COLUMNS": "80"})


def test_demo_answers_right_and_says_what_the_others_lost():
    result = run("--tokens", "16384", "--dense-tokens", "1024", "--seed", "1")
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
