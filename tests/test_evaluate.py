"""`kvcompress eval`: what a task measures, at which bytes, and what comes of it on two families of models."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from helpers import tiny_gates_folder, tiny_model
from typer.testing import CliRunner

import kvcompress
from kvcompress import CacheSpec
from kvcompress.cli import app
from kvcompress.evaluate.equal_bytes import TOLERANCE, EqualBytes, dense_bytes
from kvcompress.evaluate.losses import loss_measure
from kvcompress.evaluate.questions import needle_measure, recall_measure, ruler_measure, turns_measure
from kvcompress.evaluate.report import best_of, by_depth, hint_of
from kvcompress.evaluate.ruler.registry import MADE
from kvcompress.evaluate.run import evaluate
from kvcompress.evaluate.texts import Library
from kvcompress.models.tokenizer import byte_tokenizer
from kvcompress.reading.framing import Framing

SOURCE = Library()
WHOLE = CacheSpec.parse("pruned,pruner=snapkv,keep=100000")
MEMORY = "iterative,memory_size=128,chunk_size=256,pruner=snapkv,num_sink_tokens=4"


@pytest.fixture(scope="module")
def framing(reader):
    return Framing(reader.tokenizer)


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["eval", *map(str, arguments)], env={"COLUMNS": "120"})
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


# ---- what a task asks ----


def test_facts_are_where_they_are_asked_and_answers_are_theirs(framing):
    needle = needle_measure(framing, 400, SOURCE, 4, 1, 0, "end")
    turns = turns_measure(framing, 500, SOURCE, 3, 2, 0)
    recall = recall_measure(framing, 400, 4, 2, 0)
    assert [needle.count, turns.count, recall.count] == [4, 2, 2]
    for measure, most in ((needle, 400), (turns, 500), (recall, 400)):
        for prompt in measure.prompts:
            text = bytes(prompt.context)
            assert (
                most - (45 if measure is recall else 1)
                < len(text) + (len(prompt.asked[0].ids) if measure is needle else 0)
                <= most
            )
            for asked in prompt.asked:
                said = bytes(asked.ids) + asked.answers[0].encode() + b".\n"
                place = text.index(said)
                assert text.count(said) == 1 and asked.new_tokens == 6
                assert place / len(text) == pytest.approx(asked.depth, abs=0.1)
    assert [prompt.asked[0].depth for prompt in needle.prompts] == [0.125, 0.375, 0.625, 0.875]
    assert [len(prompt.asked) for prompt in turns.prompts + recall.prompts] == [3, 3, 4, 4]
    fact = rb"(\n# The pass key of [a-z]+-[a-z]+ is \d{5}\.\n)+"
    assert all(re.fullmatch(fact, bytes(prompt.context)) for prompt in recall.prompts)
    with pytest.raises(ValueError, match=r"at least .* got 40"):
        needle_measure(framing, 40, SOURCE, 1, 1, 0, "end")


def test_a_cache_that_keeps_all_says_and_scores_what_the_dense_one_does(reader, framing):
    kept = replace(reader, spec=WHOLE)
    measures = [needle_measure(framing, 300, SOURCE, 1, 1, 3, question) for question in ("end", "later", "guide")]
    measures += [turns_measure(framing, 400, SOURCE, 3, 1, 0), recall_measure(framing, 300, 3, 1, 0)]
    for measure in measures:
        dense, whole = measure.run(reader, 0), measure.run(kept, 0)
        assert dense.said == whole.said and dense.score == 1.0
        assert dense.nbytes == measure.held(reader) == 4096 * measure.tokens  # 2 x 4 layers x 2 heads x 64, float32
        assert whole.nbytes >= dense.nbytes and min(whole.first_seconds, whole.token_seconds) > 0
    for block in (None, 1, 7):
        measure = loss_measure("x", framing, 64, 24, SOURCE, 1, 0, block=block)
        dense, whole = measure.run(reader, 0), measure.run(kept, 0)
        assert whole.score == pytest.approx(dense.score, abs=1e-4)
        assert dense.nbytes == 4096 * measure.tokens


@pytest.mark.parametrize("budget", ["none", "globaltopk"])
@pytest.mark.parametrize("pruner", ["streamingllm", "tova", "h2o", "keydiff"])
def test_blocks_are_what_decoding_is_that_compresses_as_often(reader, framing, pruner, budget):
    """The prompt fills the budget, so that both compress behind the same tokens."""
    spec = f"pruned,pruner={pruner},keep=48,budget={budget},page_size=8"
    found = []
    for block, more in ((1, ",every=16"), (16, "")):
        measure = loss_measure("x", framing, 49, 96, SOURCE, 1, 0, block=block)
        found.append(measure.run(replace(reader, spec=CacheSpec.parse(spec + more)), 0))
    assert found[0].score == pytest.approx(found[1].score, rel=2e-3)
    assert found[0].score != measure.run(replace(reader, spec=WHOLE), 0).score


def test_bits_per_byte_are_those_of_the_text_that_follows(reader, framing):
    measure = loss_measure("ppl", framing, 100, 40, SOURCE, 3, 0)
    assert len({text.nbytes for text in measure.texts}) <= 3 and measure.tokens == 99
    for index, text in enumerate(measure.texts):
        whole = bytes(text.read + text.scored)
        assert whole.decode() in SOURCE.text and (len(text.read), len(text.scored)) == (100, text.nbytes)
        ids = torch.tensor([list(whole)])
        with torch.no_grad():
            logits = reader.model(ids, use_cache=False).logits[0, 99:-1]
        nats = torch.nn.functional.cross_entropy(logits, ids[0, 100:], reduction="sum").item()
        assert measure.run(reader, index).score == pytest.approx(nats / math.log(2) / text.nbytes, rel=1e-4)
    with pytest.raises(ValueError, match="length must be at most"):
        loss_measure("ppl", framing, 10**6, 40, SOURCE, 3, 0)


def test_the_question_is_kept_for_as_it_is_told(reader, framing):
    """A small memory recalls a fact that it was told to look for, and not one that comes too late."""
    memory = replace(reader, spec=CacheSpec.parse(MEMORY))
    found = {q: needle_measure(framing, 900, SOURCE, 1, 1, 0, q).run(memory, 0).score for q in ("guide", "later")}
    assert found == {"guide": 1.0, "later": 0.0}


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (f"gated,gates={tiny_gates_folder()},keep=0.5", "GatedCache: a token's own queries decide"),
        ("pruned,pruner=keydiff", "the pruner KeyDiff"),
        ("streaming", "StreamingCache"),
        ("quest", "QuestCache"),
    ],
    ids=["gated", "keydiff", "streaming", "quest"],  # a folder's name is another in each process
)
def test_a_cache_that_looks_at_no_guide_is_refused_before_anything_is_read(reader, framing, cache, reason, monkeypatch):
    measure = needle_measure(framing, 300, SOURCE, 1, 1, 0, "guide")
    specs = [CacheSpec.parse(text) for text in ("dense", MEMORY, cache)]
    said = f"question must be end or later with {cache}.*: guide has no effect with {reason}"
    with monkeypatch.context() as patched:
        patched.setattr(type(reader), "read", None)
        with pytest.raises(ValueError, match=said):
            next(evaluate(reader, specs, [measure], EqualBytes.parse("1/4")))
    sized = replace(reader, spec=specs[2] if specs[2].size_key is None else specs[2].sized(64))
    with pytest.raises(ValueError, match=said):
        measure.run(sized, 0)


def test_a_chat_prompt_is_the_template_s_with_the_answer_s_beginning_behind(framing):
    tokenizer = byte_tokenizer()
    turn = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    tokenizer.chat_template = turn + "{% if add_generation_prompt %}<reply>{% endif %}"
    context, question = Framing(tokenizer, chat=True).parts("a text. ", "a question?", " It is")
    assert bytes(context) == b"<user>a text. " and bytes(question) == b"a question?</><reply> It is"
    measure = ruler_measure("fwe", MADE["fwe"], Framing(tokenizer, chat=True), 700, SOURCE, 1, 0, "later")
    prompt = measure.prompts[0]
    assert 600 < len(prompt.context) + len(prompt.asked[0].ids) <= 650
    with pytest.raises(ValueError, match="no chat template"):
        Framing(byte_tokenizer(), chat=True)
    with pytest.raises(ValueError, match="question must be one of end, later, guide, got 'now'"):
        needle_measure(framing, 300, SOURCE, 1, 1, 0, "now")


# ---- equal bytes ----


@pytest.mark.parametrize(
    "text",
    [
        "pruned,pruner=streamingllm,page_size=8",
        "pruned,pruner=keydiff,budget=adakv,page_size=8",
        "iterative,memory_size=9,chunk_size=128,page_size=16",
        "streaming,chunk_size=64",
    ],
)
def test_caches_get_the_most_that_fits_into_their_bytes(text, reader, framing):
    measure, spec = loss_measure("ppl", framing, 256, 8, SOURCE, 1, 0), CacheSpec.parse(text)
    given = replace(reader, spec=spec)
    dense = dense_bytes(reader, measure)
    assert dense == 4096 * 255
    pruned = spec.kind == "pruned"
    equal, target = (EqualBytes.parse("1/4"), dense / 4) if pruned else (EqualBytes.parse("400KB"), 400_000)
    sized = equal.sized(given, measure, dense)
    tokens, unit = int(sized.given[sized.size_key]), int(spec.given.get("page_size", 8))
    held = [measure.held(replace(reader, spec=spec.sized(tokens + more))) for more in (0, unit)]
    assert held[0] <= (1 + TOLERANCE) * target < held[1] and held[0] > 0.85 * target


def test_what_has_no_size_or_too_few_bytes_is_said(reader, framing):
    measure = loss_measure("ppl", framing, 256, 8, SOURCE, 1, 0)
    quest = replace(reader, spec=CacheSpec.parse("quest"))
    assert EqualBytes.parse("1/4").sized(quest, measure, 4096 * 255) is quest.spec
    small = replace(reader, spec=CacheSpec.parse("pruned,pruner=h2o"))
    with pytest.raises(ValueError, match=r"keep must leave room for pruned,pruner=h2o: .* smaller page_size"):
        EqualBytes.parse("1/50").sized(small, measure, 4096 * 255)
    for keep, message in (("x", "a share of .*got the text 'x'"), ("2.0", "at most 1, got 2"), ("200%", "got 200%"),
                          ("256", "keep must be a share .*got 256 tokens"), ("0B", "above 0 bytes")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            EqualBytes.parse(keep)
    with pytest.raises(ValueError, match="converted model"):
        EqualBytes.parse("1/2").target(None)


# ---- rows ----


def test_rows_say_what_was_measured_and_the_best_is_named(reader, framing):
    specs = [CacheSpec.parse(x) for x in ("dense", "pruned,pruner=snapkv,keep=0.1", "pruned,pruner=random,keep=0.1")]
    measures = [
        needle_measure(framing, 400, SOURCE, 2, 1, 0, "end"),
        loss_measure("ppl", framing, 256, 32, SOURCE, 2, 0),
    ]
    told: list[str] = []
    rows = list(evaluate(reader, specs, measures, told=told.append))
    assert len(told) == sum(measure.count for measure in measures) * len(specs)  # what takes long is each sample
    assert told[1] == f"{told[0]}, 2 of 2" and told[0].endswith("tokens: dense")
    assert [(row.task, row.cache) for row in rows] == [(m.name, str(s)) for m in measures for s in specs]
    needle, ppl = rows[:3], rows[3:]
    assert by_depth(needle[0]) == {0.25: 1.0, 0.75: 1.0} and needle[2].score == 0.0
    assert needle[1].score < 1.0 and best_of(needle) == needle[1:] and best_of(ppl[:1]) == ppl[:1]
    assert best_of(ppl) == [min(ppl[1:], key=lambda row: row.score)]
    for row in rows:
        assert row.score == pytest.approx(sum(row.samples) / 2)
        assert row.score_se == pytest.approx(abs(row.samples[0] - row.samples[1]) / 2)
        assert row.dense_nbytes > 0 and (row.share < 0.5) == (row.cache != "dense")
    none = [replace(row, score=0.0) for row in needle]
    assert "this model cannot do the task" in hint_of(none) and "add --cache dense" in hint_of(none[1:])
    assert hint_of(needle) is None and hint_of([needle[0], *none[1:]]) is None
    assert hint_of([replace(row, score=0.0) for row in ppl]) is None
    assert all(row.token_seconds is None for row in ppl) and all(row.token_seconds for row in needle)


# ---- the command ----


@pytest.fixture(scope="module")
def other_family(tmp_path_factory):
    """A random model of another family whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("qwen3")
    tiny_model("qwen3", vocab_size=256, max_position_embeddings=1024).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("which", ["shipped", "another family"])
def test_ruler_and_needle_run_end_to_end(which, other_family, tmp_path):
    model = "example" if which == "shipped" else other_family
    tasks = ["fwe"] if which == "shipped" else ["niah_single_1"]
    file, figure = tmp_path / "rows.json", tmp_path / "needle.png"
    caches = ("--cache", "dense", "--cache", "pruned,pruner=snapkv,page_size=8", "--keep", "1/4", "--model", model)
    shown = run("ruler", "--tasks", ",".join(tasks), "--lengths", "600", "--limit", "1", *caches, "--json", file)
    assert "b  pruned,pruner=snapkv,page_size=8" in shown and all(task in shown for task in tasks)
    written = json.loads(file.read_text())
    assert written["question"] == "end" and written["installed"]["kvcompress"] == kvcompress.__version__
    assert [(row["task"], row["length"]) for row in written["rows"]] == [(x, 600) for x in tasks for _ in "ab"]
    for row in written["rows"]:
        assert 0 <= row["score"] <= 1 and len(row["said"][0][0]["written"]) > 0 and row["first_token_seconds"] > 0
        assert row["nbytes_share"] == 1.0 if row["cache"] == "dense" else 0.2 < row["nbytes_share"] < 0.2525
    shown = run("needle", "--lengths", "256,384", "--depths", "2", *caches, "--json", file, "--figure", figure)
    rows = json.loads(file.read_text())["rows"]
    assert [row["length"] for row in rows] == [256, 256, 384, 384] and "75%" in shown
    assert all(row["score"] == (1.0 if which == "shipped" else 0.0) for row in rows if row["cache"] == "dense")
    assert ("this model cannot do the task" in shown) is (which != "shipped")
    assert figure.stat().st_size > 1000


def test_every_other_task_runs_from_the_command_line(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("The sun rose over the hill. " * 60)
    for task, more in (
        ("ppl", ["--scored", "16", "--text", book]),
        ("decode", ["--cache", "pruned,pruner=h2o,keep=32,every=16,page_size=8"]),
        ("recall", ["--questions", "2"]),
        ("turns", ["--questions", "2"]),
    ):
        assert f" {task}" in run(task, "--lengths", "96", "--limit", "1", *more)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("ppl", "--lengths", "many"), "many"),
        (("ppl", "--cache", "prund"), "prund"),
        (("ppl", "--cache", "dense", "--cache", "dense"), "once"),
        (("ppl", "--json", "nowhere/x.json"), "nowhere"),
        (("ppl", "--text", "nowhere.txt"), "nowhere.txt"),
        (("needle", "--lengths", "10"), "10"),
        (("needle", "--question", "now"), "now"),
        (("ruler", "--tasks", "niah"), "niah_single_1"),
        (("ruler", "--tasks", "qa_2"), "hotpotqa"),
        (("ruler", "--chat"), "chat template"),
        (("turns", "--questions", "300"), "256"),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_read(arguments, named):
    assert named in run(*arguments, code=2)
