"""`kvcompress recommend`: what is asked of a user's own text, and which cache is said to be the one to take."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from helpers import tiny_model
from typer.testing import CliRunner

import kvcompress
from kvcompress import CacheSpec
from kvcompress.cli import app
from kvcompress.evaluate.quotes import QUOTES, REQUEST, quotes_measure
from kvcompress.evaluate.recommend import Candidate, choice, recommend
from kvcompress.evaluate.texts import Library
from kvcompress.models.tokenizer import byte_tokenizer
from kvcompress.reading.framing import Framing

TEXT = Library().text[:9000]
LENGTH, WIDE, SCORED = 1300, 1700, 24


@pytest.fixture(scope="module")
def framing(reader):
    return Framing(reader.tokenizer)


def chat_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer


# ---- what is asked of a text ----


@pytest.mark.parametrize("in_chat", [False, True])
def test_quotes_are_the_text_s_own_and_lie_apart(framing, in_chat):
    own = Framing(chat_tokenizer(), chat=True) if in_chat else framing
    measure = quotes_measure(own, TEXT, WIDE, SCORED, 3)
    assert measure == quotes_measure(own, TEXT, WIDE, SCORED, 3)
    begins = []
    for index, piece in enumerate(measure.pieces):
        read, opening = bytes(piece.context).decode(), "<user>" * in_chat
        assert read.startswith(opening) and WIDE - 8 < len(piece.context) + len("</><assistant>") * in_chat <= WIDE
        read = read.removeprefix(opening)
        begins.append(TEXT.index(read))
        assert TEXT[begins[-1] :].startswith(read + bytes(piece.behind).decode()) and len(piece.behind) == SCORED + 1
        places = [read.index(cue + answer) / len(read) for cue, answer in piece.quotes]
        assert len(places) == QUOTES and all(0 < b - a < 2 / QUOTES for a, b in pairwise(places))
        text, *asked = measure.followings(index)
        assert text.ids == piece.behind
        for following, (cue, answer) in zip(asked, piece.quotes, strict=True):
            before = f"{REQUEST}</><assistant>" if in_chat else "\n\n"
            assert bytes(following.ids).decode() == before + cue + answer
            assert len(cue) > 24 and following.wanted == tuple(
                (place, place + 1) for place in range(len(before + cue), len(before + cue + answer))
            )
    assert begins[0] < 8 and begins[2] > begins[1] > begins[0]
    assert begins[2] + WIDE + 2 * SCORED > len(TEXT) - 64  # they reach to the text's end


def test_a_text_is_read_in_words_of_any_script(framing):
    for text, quotes in (
        ("各地的人们都在谈论这件事情没有人知道为什么。" * 90, 2),
        ("a" * 6000, QUOTES),
        ("é\n\nü \t" * 1500, 6),
    ):
        measure = quotes_measure(framing, text, WIDE, SCORED, 2)
        for piece in measure.pieces:
            assert len(piece.quotes) == quotes and all(answer for _, answer in piece.quotes)


@pytest.mark.parametrize(
    ("text", "length", "told"),
    [
        (TEXT[:500], LENGTH, r"tokens must be at most about \d+ for a text of 500 characters, got 1,300"),
        (TEXT, 150, "tokens must leave 192 characters to be read, got 150"),
    ],
)
def test_what_has_no_room_is_said(framing, text, length, told):
    with pytest.raises(ValueError, match=told):
        quotes_measure(framing, text, length, SCORED, 1)


def test_quotes_are_scored_as_a_plain_model_scores_them(reader, framing):
    measure = quotes_measure(framing, TEXT, LENGTH, SCORED, 1)
    outcome, piece = measure.run(reader, 0), measure.pieces[0]
    for said, following in zip(outcome.said, measure.followings(0)[1:], strict=True):
        ids = torch.tensor([piece.context + list(following.ids)])
        begin = len(piece.context) + following.wanted[0][0]
        with torch.no_grad():
            logits = reader.model(ids).logits[0, begin - 1 : -1]
        nats = torch.nn.functional.cross_entropy(logits, ids[0, begin:])
        assert said["bits"] == pytest.approx(float(nats) / math.log(2), rel=1e-4)
        assert said["score"] == pytest.approx(float((logits.argmax(-1) == ids[0, begin:]).double().mean()))
    assert sum(said["score"] for said in outcome.said) / len(outcome.said) > 0.6  # a model that copies says them


# ---- what is chosen ----


def candidate(name, bits, seconds):
    return Candidate(name, name, name, 100.0, tuple(bits), tuple(bits), (1.0,) * len(bits), seconds, 0.01)


@pytest.mark.parametrize(
    ("best", "other", "taken"),
    [
        (([1.00, 1.20], 9.0), ([1.30, 1.50], 1.0), "best"),  # behind, however fast
        (([1.00, 1.20], 9.0), ([1.003, 1.203], 1.0), "other"),  # no difference to anybody
        (([1.00, 1.20], 9.0), ([1.003, 1.203], 8.0), "best"),  # nor in time
        (([1.00, 1.20], 9.0), ([1.30, 0.95], 1.0), "other"),  # within the error
    ],
)
def test_what_loses_least_is_taken_or_what_is_level_and_faster(best, other, taken):
    dense = candidate("dense", [0.9, 1.1], 2.0)
    found, reason = choice([candidate("best", *best), candidate("other", *other)], dense)
    assert found.cache == taken
    assert reason.startswith("it loses least: 0.100" if taken == "best" else "it loses 0.")
    assert " bits a token, mean of both +bits" in reason and "One piece" not in reason


def test_no_loss_is_said_in_words_and_that_one_piece_says_little():
    found = [candidate("best", [0.998], 9.0), candidate("other", [0.9997], 1.0)]
    nothing, few = "nothing that could be measured", "One piece says little of the next: take more"
    assert choice(found[:1], candidate("dense", [1.0], 2.0))[1] == f"it loses least: {nothing}. {few}"
    reason = choice(found, candidate("dense", [1.0], 2.0))[1]
    assert reason == f"it loses {nothing}, level within 0.005 bits with best, and reads in 0.11 of its time. {few}"


def test_caches_are_held_to_the_bytes_and_what_loses_least_stands_first(reader):
    """Eight caches, each read for its size, its two pieces and its time: 20 s."""
    found = recommend(
        reader.model, reader.tokenizer, TEXT, keep="1/4", tokens=LENGTH, pieces=2,
        caches=["pruned,later=keep", "pruned,pruner=random,later=keep", "quest"],
    )  # fmt: skip
    assert found.dense is not None and found.chosen is not None
    lost = [sum(x.lost(found.dense)) for x in found.candidates]
    assert lost == sorted(lost) and found.dense.lost(found.dense) == (0.0, 0.0)
    held = {x.cache: x.nbytes / found.nbytes for x in found.candidates}
    assert all((0.7 if "quantized" in cache else 0.9) < share < 1.05 for cache, share in held.items()), held
    assert list(found.refused) == ["quest"] and "has no size to set" in found.refused["quest"]
    pruned = {x.cache: x for x in found.candidates if x.cache.startswith("pruned")}
    tokens = {name: int(CacheSpec.parse(x.sized).given["keep"]) for name, x in pruned.items()}
    assert 3 < tokens["pruned,dtype=int8,later=keep"] / tokens["pruned,later=keep"] < 4  # over float32
    names = [x.cache for x in found.candidates]
    assert names.index("pruned,later=keep") < names.index("pruned,pruner=random,later=keep")
    chosen = CacheSpec.parse(found.chosen.pasted)
    assert f'"{chosen}"' in found.line
    for name, x in pruned.items():
        assert float(CacheSpec.parse(x.pasted).given["keep"]) == pytest.approx(tokens[name] / found.tokens, abs=1e-3)


def test_codes_of_all_tokens_are_recommended_where_they_fit(reader, monkeypatch):
    every = ("quantized,dtype=int8", "pruned,dtype=int8,later=keep")
    monkeypatch.setattr("kvcompress.evaluate.recommend.CANDIDATES", every)
    found = recommend(reader.model, reader.tokenizer, TEXT, keep="1/2", tokens=LENGTH, pieces=1)
    assert {x.cache: x.pasted for x in found.candidates} == {
        every[0]: every[0], every[1]: "pruned,dtype=int8,later=keep,keep=1.0",
    }  # fmt: skip
    assert found.chosen is not None and found.chosen.nbytes < 0.4 * found.dense_nbytes


def test_a_dense_cache_that_fits_is_the_answer(reader):
    found = recommend(reader.model, reader.tokenizer, TEXT, keep="1GiB", tokens=LENGTH, pieces=1)
    assert found.chosen is None and found.candidates == () and "nothing to compress" in found.reason
    assert type(eval(found.line.removeprefix("cache = "), {
        "kvcompress": kvcompress, "model": reader.model, "tokenizer": reader.tokenizer,
    })).__name__ == "DynamicCache"  # fmt: skip


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"share": "1/4"}, "share is keep here, got share='1/4'"),
        ({"nbytes": "1MiB"}, "nbytes is keep here"),
        ({"keep": 512}, "keep must be a share of the dense cache's bytes .*, or bytes .*, got 512 tokens"),
        ({"keep": 2.0}, "keep as a share must be above 0 and at most 1"),
        ({"keep": "1KiB", "tokens": LENGTH}, r"keep must leave room for a cache, got 1.0 KiB: pruned,"),
        ({"keep": "1/4", "tokens": 64}, r"tokens must be from 128 to 1,\d+, the model's length"),
        ({"keep": "1/4", "pieces": 0}, "pieces must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_named(reader, given, told):
    with pytest.raises(ValueError, match=told):
        recommend(reader.model, reader.tokenizer, TEXT, **{"pieces": 1, **given})


def test_short_texts_and_converted_models_are_refused(reader):
    with pytest.raises(ValueError, match="text must have at least 256 tokens, got about 100"):
        recommend(reader.model, reader.tokenizer, TEXT[:100], keep="1/4")
    model = tiny_model(max_position_embeddings=512)
    kvcompress.dmc.convert(model, kvcompress.dmc.DMCConfig())
    with pytest.raises(ValueError, match="model must be one that is not converted, got one of dmc"):
        recommend(model, reader.tokenizer, TEXT, keep="1/4")


# ---- the command ----


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["recommend", *map(str, arguments)], env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


def test_the_command_shows_a_table_and_a_line_to_paste(tmp_path, monkeypatch):
    """Three caches and the dense one, one piece: 5 s."""
    monkeypatch.setattr("kvcompress.evaluate.recommend.CANDIDATES", ("pruned,dtype=int8,later=keep", "streaming"))
    text, figures = tmp_path / "text.txt", tmp_path / "figures.json"
    text.write_text(TEXT)
    further = "pruned,pruner=random"
    out = run("--text", text, "--keep", "1/2", "--tokens", LENGTH, "--pieces", 1, "--cache", further, "--json", figures)
    assert "a  dense" in out and "d  " in out and "+bits a token" in out
    said = json.loads(figures.read_text())
    assert out.splitlines()[-1] == said["line"]
    assert len(said["candidates"]) == 3 and said["chosen"]["cache"] in {x["cache"] for x in said["candidates"]}
    assert f"Take {said['chosen']['pasted']}: it loses" in out
    assert "nothing to compress" in run("--text", text, "--keep", "1GiB", "--tokens", LENGTH)


def test_the_command_names_what_is_wrong(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    assert "text must be files, got" in run("--text", tmp_path / "none.txt", "--keep", "1/4", code=2)
    assert "value for --text: text must be" in " ".join(run("--text", "none.txt", code=2).replace("│", " ").split())
    assert "cache must be one of" in run("--text", text, "--keep", "1/4", "--cache", "nothing", code=2)
    assert "json must be in a folder that exists" in run(
        "--text", text, "--keep", "1/4", "--json", tmp_path / "none" / "x.json", code=2
    )
    run("--text", text, "--keep", "1/4", "--tokens", "many", code=2)


def test_a_size_below_one_is_the_share_that_stays():
    spec = CacheSpec.parse("pruned,pruner=snapkv,keep=100,budget=adakv").sized(0.25)
    assert str(spec) == "pruned,pruner=snapkv,keep=0.25,budget=adakv"
    assert replace(spec) == spec
