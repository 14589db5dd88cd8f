import json

import pytest
from typer.testing import CliRunner

import kvcompress
from kvcompress.apps.streamed import Streamed
from kvcompress.cli import app

FACT = (
    "def f(x):\n    return x\n\n" * 8 + "# The pass key of iron-lake is 48213.\n" + "def g(x):\n    return x\n\n" * 24
)
QUESTION = "\n# The pass key of iron-lake is "
MEMORY = "iterative,memory_size=128,chunk_size=256,pruner=snapkv,num_sink_tokens=4"


def run(*arguments, text=None, code=0):
    result = CliRunner().invoke(app, list(arguments), input=text, env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


def test_version_is_that_of_the_package():
    assert run("--version") == f"kvcompress {kvcompress.__version__}\n"


def test_info_says_what_a_token_takes():
    found = json.loads(run("info", "--model", "example", "--json"))
    assert found["cache_nbytes_per_token"] == 2 * 4 * 2 * 64 * 4  # keys and values, layers, KV heads, head dim, float32
    assert (found["layers"], found["trained_length"]) == (4, 2048)
    assert "inner loops" in run("info")
    assert "./no/where" in run("info", "--model", "./no/where", code=2)


@pytest.mark.parametrize("source", ["argument", "file", "input"])
def test_generate_answers_from_a_prompt_however_it_comes(source, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(FACT)
    given = {"argument": [FACT], "file": ["--file", str(file)], "input": []}[source]
    options = ["--question", QUESTION, "--cache", MEMORY, "--max-new-tokens", "5", "--json"]
    found = json.loads(run("generate", *given, *options, text=FACT if source == "input" else None))
    assert found["text"] == "48213"
    assert found["tokens_read"] == len(FACT) + len(QUESTION)


def test_generate_writes_as_it_goes_and_says_what_was_held():
    output = run("generate", "def area(width, height):\n    return", "--cache", "streaming", "--max-new-tokens", "4")
    assert "35 tokens read, 4 written" in output
    assert "no fewer than dense" in output and "every token is kept" in output
    quiet = run("generate", "def area(", "--cache", "dense", "--max-new-tokens", "4", "--quiet")
    assert "tokens read" not in quiet


def test_a_converted_model_is_read_through_its_own_cache(tmp_path):
    model, tokenizer = kvcompress.load_example_model(retrofit="dmc")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found = json.loads(run("generate", "def area(", "--model", str(tmp_path), "--max-new-tokens", "2", "--json"))
    assert found["cache"] == "dmc"


def test_a_plan_of_the_example_model_asks_no_network():
    assert "MiB" in run("plan", "--tokens", "10000", "--model", "example")


def test_a_dense_cache_holds_more_than_a_memory():
    def held(cache):
        arguments = ("generate", FACT, "--cache", cache, "--max-new-tokens", "1", "--json")
        return json.loads(run(*arguments))["cache_nbytes"]

    assert held("dense") > 4 * held(MEMORY)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("generate", "x", "--cache", "prund"), "prund"),
        (("generate", "x", "--cache", "pruned,budgt=3"), "budgt"),
        (("generate", "x", "--model", "./no/where"), "./no/where"),
        (("generate", "--file", "nowhere.txt"), "nowhere.txt"),
        (("generate", "x", "--file", "nowhere.txt"), "file"),
        (("needle", "--lengths", "9"), "needle is eval needle now"),
        (("eval", "recall", "--share", "1/4"), "--share is --keep now"),
        (("recommend", "--text", "x", "--bytes", "1MiB"), "--bytes is --keep now"),
        (("plan", "--tokens", "9", "--memory", "4"), "--memory is --memory-size now"),
        (("fit", "dms", "--out", "x", "--target-cr", "2"), "--target-cr is --target-ratio now"),
        (("analyze", "budget", "--out", "x", "--size", "0.75"), "--size is --keep, where a share"),
        (("generate", "x", "--share", "1/4"), "--share is the cache's"),
        (("generate", "x", "--keep", "0.5"), "--keep is the cache's: --cache pruned,keep=0.5, say."),
        (("chat", "--keep", "0.5"), "--keep is the cache's"),
        (("generate", "x", "--budget", "9"), "--budget is the cache's"),
        (("bench", "--memory-size", "9"), "--memory-size is the cache's"),
        (("eval", "recall", "--budget", "1/4"), "--budget is --keep, where a share is the one that stays now"),
        (("fit", "dms", "--out", "x", "--target_cr", "2"), "--target_cr is --target-ratio now"),
        (("recommend", "--text", __file__, "--keep", "foo"), "keep must be a share of the dense cache's bytes"),
        (("chat", "--cache", "dense"), "must be a compressed one"),
        (("generate", "x", "--cache", "pruned,budget=0.75"), "(0.75 was the share to remove)"),
    ],
)
def test_what_is_wrong_is_named(arguments, named):
    assert named in run(*arguments, code=2)


def test_a_text_is_read_and_saved_then_asked_without_reading_it_again(tmp_path):
    file = str(tmp_path / "text.safetensors")
    read = json.loads(run("generate", FACT, "--cache", "pruned,keep=1.0,later=keep", "--save", file, "--json"))
    assert (read["text"], read["tokens_read"]) == ("", len(FACT))
    found = json.loads(run("generate", "--load", file, "--question", QUESTION, "--max-new-tokens", "5", "--json"))
    assert found["text"] == "48213" and found["cache_nbytes"] == read["cache_nbytes"]
    assert "question must be given with load" in run("generate", "--load", file, code=2)
    assert "load takes the place of a text" in run("generate", "x", "--load", file, "--question", "y", code=2)


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    """The example model with a chat template."""
    folder = tmp_path_factory.mktemp("talking")
    model, tokenizer = kvcompress.load_example_model()
    tokenizer.chat_template = "<|{% for m in messages %}{{ m.content }}{% endfor %}|>"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_prompt_is_a_users_turn_where_there_is_a_chat_template_and_raw_is_none(talking, tmp_path):
    options = ("--model", talking, "--cache", "pruned,keep=1.0", "--max-new-tokens", "1", "--json")
    for more, tokens in (((), len("<|one two|>")), (("--raw",), len("one two"))):
        assert json.loads(run("generate", "one ", "--question", "two", *options, *more))["tokens_read"] == tokens
    plain = ("generate", "one ", "--model", "example", *options[2:])
    assert run(*plain).partition('"seconds"')[0] == run(*plain, "--raw").partition('"seconds"')[0]
    file = str(tmp_path / "text.safetensors")
    assert json.loads(run("generate", "one ", "--save", file, *options))["tokens_read"] == len("<|one ")
    ask = ("generate", "--load", file, "--question", "two", "--model", talking, "--max-new-tokens", "1", "--json")
    json.loads(run(*ask))
    assert "raw must be False, as when the text was saved, got True" in " ".join(run(*ask, "--raw", code=2).split())


def test_every_command_that_loads_a_model_has_the_same_dtypes(talking):
    text = ("generate", "x", "--model", talking, "--cache", "pruned,keep=1.0", "--max-new-tokens", "1", "--json")
    sizes = {
        d: json.loads(run(*text, "--dtype", d))["cache_nbytes"] for d in ("auto", "float32", "bfloat16", "float16")
    }
    assert sizes["auto"] == sizes["float32"] and sizes["bfloat16"] == sizes["float16"]
    assert 1.9 * sizes["bfloat16"] < sizes["float32"] <= 2 * sizes["bfloat16"]  # tables of pages have no dtype
    commands = [("eval", task) for task in ("ruler", "needle", "recall", "turns", "ppl", "decode")]
    commands += [("analyze", what, "--out", "x") for what in ("pod", "attention", "heads", "budget")]
    loading = (*commands, ("generate", "x"), ("chat",), ("bench",), ("demo",), ("serve",))
    counting = (("info", "--model", "example"), ("plan", "--tokens", "9", "--model", "example"))  # codes too
    for command in loading + counting:
        said = " ".join(run(*command, "--dtype", "bf16", code=2).replace("│", " ").split())
        known = (
            "float32, bfloat16, float16, int8, k8v4, auto"
            if command in counting
            else "float32, bfloat16, float16, auto"
        )
        assert f"dtype must be one of {known}, got 'bf16'" in said, command


def test_wrong_files_are_named_with_their_option(tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\xff\xfe\xfa")
    for arguments, option in (
        (("--file", str(tmp_path / "none.txt")), "--file"),
        (("--file", str(bad)), "--file"),
        (("x", "--model", "./no/where"), "--model"),
        (("x", "--cache", "prund"), "--cache"),
    ):
        assert f"Invalid value for {option}" in run("generate", *arguments, code=2).replace("'", "")


def test_bench_has_a_row_for_each_cache():
    options = ["--tokens", "256", "--max-new-tokens", "2", "--cache", "dense", "--cache", "pruned,keep=0.25"]
    rows = json.loads(run("bench", *options, "--json"))["rows"]
    assert [row["cache"] for row in rows] == ["dense", "pruned,keep=0.25"]
    assert rows[0]["cache_nbytes"] == 257 * 2 * 4 * 2 * 64 * 4 > 2 * rows[1]["cache_nbytes"]
    assert all(row["read_tokens_per_second"] > 0 and row["written_tokens_per_second"] > 0 for row in rows)
    long = "iterative,memory_size=512,chunk_size=512"
    lines = [line.split() for line in run("bench", *options[:4], "--cache", long).splitlines()]
    assert any(line[:1] == [long] for line in lines), lines  # whole


def test_chat_answers_lines_of_a_pipe():
    assert "48213" in run("chat", "--cache", "pruned,keep=1.0", "--max-new-tokens", "5", text="\n".join(
        [FACT.replace("\n", " ") + QUESTION.strip() + " ", "/memory", ""]
    ))  # fmt: skip


def test_a_long_text_is_said_to_take_less_than_dense():
    assert "times less than dense (" in run("generate", FACT, "--cache", MEMORY, "--max-new-tokens", "1")


def test_a_warning_is_a_line_without_source(recwarn):
    cache = "pruned,pruner=snapkv,keep=0.5"
    result = CliRunner().invoke(app, ["generate", "x = 1\n" * 350, "--cache", cache, "--max-new-tokens", "1"])
    assert result.exit_code == 0 and result.stderr.startswith("warning: positions reach 2,099 ")
    assert ".py" not in result.stderr and not recwarn.list


@pytest.mark.parametrize(
    ("pieces", "answers", "shown"),
    [
        (["\n", "   ", "a ", "b\n", "  c"], True, "a b\n  c\n"),
        (["\n", "   ", "a ", "b"], False, "\n   a b\n"),
        (["\n", "  "], True, "(nothing but white space)\n"),
        ([], True, "(nothing but white space)\n"),
    ],
)
def test_an_answer_is_shown_from_its_first_word_on(pieces, answers, shown, capsys):
    _, tokenizer = kvcompress.load_example_model()
    streamed = Streamed(tokenizer, answers=answers)
    for _ in range(2):  # another turn begins anew
        streamed.put(tokenizer("asked", return_tensors="pt").input_ids)
        for piece in pieces:
            streamed.put(tokenizer(piece, return_tensors="pt").input_ids)
        streamed.end()
        assert capsys.readouterr().out == shown
    quiet = Streamed(tokenizer, answers=True, note=False)
    quiet.end()
    assert capsys.readouterr().out == "\n"
