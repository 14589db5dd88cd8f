"""quality/long_prompts.py on short texts: losses are the model's own, answers are counted, rows and figures fit."""

import json
import math
from dataclasses import replace

import pytest
import torch
from helpers import tiny_model

import kvcompress
from benchmarks.quality import long_prompts as bench
from benchmarks.quality.parts import long_prompts_tasks as tasks
from kvcompress import IterativeCache
from kvcompress.caches.track import ChunkReading, LayerReading, Track
from kvcompress.models.text import held_out_text
from kvcompress.models.tokenizer import byte_tokenizer
from kvcompress.pruners import SnapKV, StreamingLLM

SIZES, FULL = bench.SIZES["tiny"], bench.SIZES["full"]


def losses_one_by_one(model, ids, context=lambda t: 0):
    """Nats of tokens 1, 2, ..., each from a call of its own that begins at context(t)."""
    with torch.no_grad():
        return torch.stack([-model(ids[None, context(t) : t]).logits[0, -1].log_softmax(-1)[ids[t]]
                            for t in range(1, len(ids))])  # fmt: skip


def test_losses_are_those_of_a_loop_over_the_dense_model():
    model, ids = tiny_model(), torch.randint(2, 97, (50,))
    expected = losses_one_by_one(model, ids)
    torch.testing.assert_close(tasks.dense_losses(model, ids), expected, atol=1e-4, rtol=1e-4)
    with kvcompress.attach(model):
        cache = IterativeCache(model.config, memory_size=64, chunk_size=16)
        everything_kept = tasks.iterative_losses(model, ids, cache)
    torch.testing.assert_close(everything_kept, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [10, 16, 17, 50, 52])
def test_windows_score_every_token_once_with_enough_context(length):
    model, ids = tiny_model(), torch.randint(2, 97, (length,))
    window, context = 16, 12
    expected = losses_one_by_one(model, ids, lambda t: max(0, (t - context) // (window - context) * (window - context)))
    torch.testing.assert_close(tasks.window_losses(model, ids, window, context), expected, atol=1e-4, rtol=1e-4)


def test_logits_in_pieces_change_no_loss(monkeypatch):
    model, ids = tiny_model(), torch.randint(2, 97, (50,))
    whole = tasks.dense_losses(model, ids)
    monkeypatch.setattr(tasks, "ROWS", 7)
    torch.testing.assert_close(tasks.dense_losses(model, ids), whole)


def test_bits_per_byte_count_the_bytes_of_the_tokens_that_were_scored():
    ids = torch.tensor(list(b"abcdefgh"))
    bits = tasks.BitsPerByte(byte_tokenizer(), ids)
    losses = torch.arange(1, 8) * math.log(2)  # token t costs t bits
    assert bits(losses, 1, 8) == pytest.approx(28 / 7)
    assert bits(losses, 3, 5) == pytest.approx((3 + 4) / 2)
    assert bits.blocks(losses, 4) == pytest.approx([(1 + 2 + 3) / 3, (4 + 5 + 6 + 7) / 4])
    assert bits.blocks(losses, 3) == pytest.approx([(1 + 2) / 2, (3 + 4 + 5) / 3])
    assert math.isnan(bits(losses, 5, 9)) and math.isnan(bits(losses, 0, 3))

    class TwoBytes:
        def decode(self, tokens):
            return "\u00e9" * len(tokens)

    assert tasks.BitsPerByte(TwoBytes(), ids)(losses, 3, 5) == pytest.approx((3 + 4) / 4)


def test_all_text_is_held_out():
    write = bench.Writer(byte_tokenizer())
    assert FULL.position <= len(held_out_text())
    assert bytes(tasks.held_out_ids(write, FULL.position).tolist()) == held_out_text()[: FULL.position]
    with pytest.raises(ValueError, match="length must be at most that of the held-out text"):
        tasks.needle_task(write, len(held_out_text()) + 1, [0.5])


def test_a_fact_stands_at_its_depth_whatever_else_is_asked():
    write, length = bench.Writer(byte_tokenizer()), 600
    at = tasks.depths(4)
    assert at[0] == 0.05 and at[-1] == 0.95
    task = tasks.needle_task(write, length, at, trials=2)
    alone = tasks.needle_task(write, length, at[1:2], trials=2)
    assert alone.questions == task.questions[2:4]
    assert len(set(map(tuple, task.prompts))) == 8
    for row, (prompt, following, (asked,)) in enumerate(zip(task.prompts, task.following, task.questions, strict=True)):
        assert len(prompt) + 1 == length
        assert [*prompt[-task.question_tokens[row] :], following[0]] == list(asked.asked)
        assert following[1:] == list(asked.answer) and len(asked.answer) == 5
        first, stop = tasks.needle_places(write, task, row)
        assert prompt[first:stop] == list(asked.answer)
        assert first == pytest.approx(at[row // 2] * length, abs=90)


def test_recall_counts_right_and_wrong_answers_batched_or_alone():
    model, tokenizer = kvcompress.load_example_model()
    task = tasks.needle_task(bench.Writer(tokenizer), 400, [0.2, 0.5, 0.8])
    wrong = [replace(task.questions[1][0], answer=(*task.questions[1][0].answer[:-1], ord("x")))]
    task = replace(task, questions=[task.questions[0], wrong, task.questions[2]])

    def roomy():
        return IterativeCache(model.config, memory_size=512, chunk_size=128)

    def small():
        return IterativeCache(model.config, memory_size=64, chunk_size=128, pruner=StreamingLLM())

    with kvcompress.attach(model):
        for make, expected in ((roomy, [1.0, 0.0, 1.0]), (small, [0.0, 0.0, 0.0])):
            assert bench.measure(model, task, make, batch=3).samples == expected
            assert bench.measure(model, task, make, batch=1).samples == expected
        assert bench.measure_guided(model, task, roomy).samples == [1.0, 0.0, 1.0]


def test_teacher_forced_answers_are_the_greedy_ones():
    model, tokenizer = kvcompress.load_example_model()
    at = [0.05, 0.35, 0.65, 0.95]
    task = tasks.needle_task(bench.Writer(tokenizer), 1024, at)

    def make():
        return IterativeCache(
            model.config, memory_size=64, chunk_size=128, pruner=SnapKV(num_sink_tokens=4), schedule="linear",
            initial_memory=8,
        )  # fmt: skip

    answers = []
    with kvcompress.attach(model):
        counted = bench.measure_guided(model, task, make).samples
        for prompt, (asked,), held_back in zip(task.prompts, task.questions, task.question_tokens, strict=True):
            guide = torch.tensor(asked.asked)
            ids = torch.cat([torch.tensor(prompt[: len(prompt) - held_back]), guide])[None]
            out = kvcompress.generate(model, ids, make(), guide=guide, max_new_tokens=5, do_sample=False)
            answers.append(float(out[0, ids.shape[1] :].tolist() == list(asked.answer)))
    assert counted == answers
    assert 0.0 in answers and 1.0 in answers


def test_tokens_held_are_counted_over_the_heads_of_a_layer():
    def layer(*positions):
        nothing = torch.zeros(len(positions))
        return LayerReading(tuple(torch.tensor(p, dtype=torch.int32) for p in positions), nothing, nothing, nothing)

    readings = [
        ChunkReading(0, 8, (layer([3, 4, 7], [4, 5, 0]), layer([0], [1]))),
        ChunkReading(8, 8, (layer([3], [9]),) * 2),
    ]
    shares = tasks.held(Track([readings]), 3, 7)
    assert shares.tolist() == [[0.75, 0.0], [0.25, 0.25]]


@pytest.mark.parametrize("part", ["position", "recall", "tracks"])
def test_rows_tables_and_figures_of_each_part(part, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from benchmarks.quality.parts import long_prompts_figures as figures

    model, tokenizer = kvcompress.load_example_model()
    found = [(bench.tidy(row), seen) for row, seen in getattr(bench, part)(model, tokenizer, SIZES, "example")]
    rows = [row for row, _ in found]
    assert len({row["name"] for row in rows}) == len(rows)
    getattr(bench.long_prompts_tables, part)(rows)
    assert rows[-1]["method"].split("/")[0] in capsys.readouterr().out
    bench.write_json(tmp_path / "rows.json", rows)
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == rows
    getattr(figures, part)(found, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    if part == "position":
        windows, dense, fixed = rows[:3]
        assert windows["ratio_over_windows"] == 1.0 and windows["last_over_windows"] == 0.0
        assert dense["ratio"] is None and dense["tokens"] == 512
        assert fixed["bits_per_byte"] == pytest.approx(fixed["windows_bits_per_byte"], rel=0.2)
        assert fixed["ratio"] == pytest.approx(fixed["last"] / fixed["first"], abs=1e-5)
        assert fixed["largest_context"] == 256
    elif part == "recall":
        dense, fixed = rows[:2]
        assert dense["recall_by_length"] == [1.0, None]
        assert fixed["method"] == "FM/SnapKV" and fixed["recall_by_length"] == [1.0, 1.0]
        assert len(fixed["recall"]) == 2 and fixed["memory_at_fact"] == [[128, 128]] * 2
        growing = next(row for row in rows if row["method"] == "IM/linear/SnapKV")
        assert growing["memory_at_fact"] == [[68, 68], [128, 128]]
    else:
        assert [row["last_chunk_share"] > 0.9 for row in rows if row["method"] == "FM/StreamingLLM"] == [True]
        needles = [row for row in rows if "digits_held" in row]
        assert needles[0]["memory_then"] == SIZES.recall_memory and max(needles[0]["digits_held"]) == 1.0


def test_methods_have_names_of_their_own_and_the_longest_prompts_are_for_few():
    for methods in (bench.position_methods(FULL), bench.recall_methods(FULL)):
        names = [(method.name, method.guided, method.memory) for method in methods]
        assert len(set(names)) == len(names)
    everywhere = {m.name for m in bench.recall_methods(FULL) if m.longest == math.inf and m.guided}
    assert {"FM/SnapKV", "IM/linear/SnapKV", "IMDC/linear/SnapKV"} <= everywhere
