"""Passages that people read, what is asked of them, and one reading of them for many caches."""

import json
import math
import re
import sys
from dataclasses import replace
from itertools import chain, pairwise

import pytest
import torch
from helpers import covering

import kvcompress
from benchmarks.quality import witness
from benchmarks.quality.parts import books
from benchmarks.quality.parts.cells import Cell, Cells, over, rows_of
from kvcompress import CacheSpec
from kvcompress.evaluate.measure import Outcome
from kvcompress.evaluate.prose import Prose, answer_ids, asked_once, next_turn, passage, question_ids, stretch
from kvcompress.evaluate.reading import Following, Reader
from kvcompress.evaluate.sharing import LayerInputs, SharedReader
from kvcompress.models.tokenizer import byte_tokenizer
from kvcompress.reading.framing import Framing

LENGTH, SCORED = 480, 12
TEXT = "\n\n".join(
    f"The {number}th letter. It was {'very ' * (number % 7)}long; nobody read it." for number in range(900)
)
BOOKS = [("letters", TEXT), ("more letters", TEXT.replace("letter", "postcard"))]
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"


@pytest.fixture(scope="module")
def framing(reader):
    return Framing(reader.tokenizer)


@pytest.fixture(scope="module")
def chat():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}"
    return Framing(tokenizer, chat=True)


def said(ids):
    return bytes(ids).decode()


# ---- passages ----


@pytest.mark.parametrize("in_chat", [False, True])
def test_a_passage_is_the_book_s_with_facts_at_their_depths(framing, chat, in_chat):
    own, most = chat if in_chat else framing, 900
    for number in range(4):
        found = passage(own, BOOKS, most, number, SCORED)
        text, length = said(found.context), len(found.context)
        assert found.book == BOOKS[number % 2][0]
        assert text.startswith("<user>") == in_chat and most - 80 < length + 4 * in_chat <= most
        facts = [f"{question.prefix}{question.answer}" for question in found.questions]
        plain = text.removeprefix("<user>")
        for question, fact in zip(found.questions, facts, strict=True):
            fact += "." * (question.kind == "number")
            assert text.count(fact) == 1 and text.index(fact) / length == pytest.approx(question.depth, abs=0.12)
            plain = plain.replace(f" {fact}", "")
        assert sorted(question.depth for question in found.questions) == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
        assert plain + said(found.behind) in BOOKS[number % 2][1] and len(found.behind) == SCORED + 1
        assert found == passage(own, BOOKS, most, number, SCORED)
    passages = [said(passage(own, BOOKS[:1], most, number, SCORED).context) for number in range(12)]
    places = sorted(int(re.search(r"The (\d+)th letter", text)[1]) for text in passages)
    assert min(b - a for a, b in pairwise(places)) > 20  # of one book they lie apart


def test_what_has_no_room_is_said(framing):
    with pytest.raises(ValueError, match=r"length must be at least \d+ tokens for the facts, got 100"):
        passage(framing, BOOKS, 100, 0, SCORED)
    with pytest.raises(ValueError, match=r"length must be shorter than short, of 40 characters, got one"):
        passage(framing, [("short", TEXT[:40])], LENGTH, 0, SCORED)
    sentences = "A sentence of nine words that is not long. " * 20
    with pytest.raises(ValueError, match=r"length must be shorter than short|length must leave 13 tokens behind it"):
        passage(framing, [("short", "\n\n" + sentences)], LENGTH, 0, SCORED)


def test_turns_are_what_the_template_makes_of_the_conversation(chat):
    found = passage(chat, BOOKS, LENGTH, 0, SCORED)
    first, second = found.questions[:2]
    parts = [found.context, question_ids(chat, first), answer_ids(chat, first), next_turn(chat, second)]
    context = said(found.context).removeprefix("<user>")
    answer = f"{first.prefix}{first.answer}."
    turns = [("user", context + first.words), ("assistant", answer), ("user", second.words.strip())]
    whole = chat.tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns], add_generation_prompt=True, tokenize=False
    )
    assert said(chain(*parts)) == whole + second.prefix
    assert said(answer_ids(chat, second)) == second.answer


def test_a_stretch_is_a_book_s_own_tokens_read_then_scored(framing):
    for number in range(4):
        book, text = stretch(framing, BOOKS, 300, number, 120)
        assert book == BOOKS[number % 2][0]
        assert (len(text.read), len(text.scored), text.nbytes) == (120, 180, 180)  # what is counted are tokens
        assert said(text.read + text.scored).lstrip() in BOOKS[number % 2][1]
    pieces = [said(stretch(framing, BOOKS[:1], 300, number, 120)[1].read) for number in range(12)]
    places = sorted(int(re.search(r"The (\d+)th letter", text)[1]) for text in pieces)
    assert min(b - a for a, b in pairwise(places)) > 20  # as passages do
    with pytest.raises(ValueError, match="length must be shorter than letters"):
        stretch(framing, BOOKS, len(TEXT), 0, 120)


# ---- outcomes ----


def test_what_follows_is_scored_as_a_plain_model_scores_it(reader, framing):
    """Copies in one call, of a cache that stays as it is, against one pass without a cache for each."""
    found = passage(framing, BOOKS, LENGTH, 1, SCORED)
    measure = Prose("prose", LENGTH, (found,), framing)
    texts = measure.followings(0)
    assert [text.kind for text in texts] == ["text", *["number"] * 4, "sentence", "turn"]
    outcome, cache = measure.run(reader, 0), reader.read(found.context)
    answers = iter(outcome.said)
    for text, (nats, right) in zip(texts, reader.follow(cache, texts), strict=True):
        ids = torch.tensor([[*found.context, *text.ids]])
        with torch.no_grad():
            logits = reader.model(ids, use_cache=False).logits[0, len(found.context) :]
        wanted = [slice(begin, end) for begin, end in text.wanted]
        exact = sum(
            -logits.log_softmax(-1)[place - 1, text.ids[place]].item()
            for part in wanted
            for place in range(part.start, part.stop)
        )
        assert nats == pytest.approx(exact, rel=1e-3)
        assert right == tuple(
            logits[part.start - 1 : part.stop - 1].argmax(-1).tolist() == list(text.ids)[part] for part in wanted
        )
        if text.kind == "text":
            assert outcome.score == pytest.approx(exact / math.log(2) / SCORED, rel=1e-3)
            continue
        for part in right:
            answer = next(answers)
            assert (answer["kind"], answer["score"]) == (text.kind, float(part))
    assert next(answers, None) is None and cache.get_seq_length() == len(found.context)
    assert outcome.nbytes == 4096 * len(found.context) == measure.held(reader)


def test_an_answer_is_right_where_every_token_is_the_likeliest(reader):
    """The model's own continuation is right, and is not once its last token is another."""
    ids = list(b"# The pass key of rose-fern is 51113.\n" * 6)
    cache, asked = reader.read(ids), list(b"# The pass key of rose-fern is")
    answer = list(b" 51113")
    wrong = [*answer[:-1], ord("4")]
    span = ((len(asked), len(asked) + len(answer)),)
    found = reader.follow(cache, [Following("number", asked + x, span) for x in (answer, wrong)])
    assert [right for _, right in found] == [(True,), (False,)] and found[0][0] < found[1][0]


def test_a_question_at_the_end_is_read_with_the_text(reader, framing):
    found = passage(framing, BOOKS, LENGTH, 2, SCORED)
    measure = asked_once(framing, LENGTH, found, 6, "end")
    question = found.questions[2]
    assert measure.tokens == len(found.context) + len(question_ids(framing, question)) - 1
    (answer,) = measure.run(reader, 0).said
    assert answer["answers"] == [question.answer.strip()] and answer["depth"] == question.depth


def test_a_question_that_guides_is_known_while_the_text_is_read(reader, framing, monkeypatch):
    found, known = passage(framing, BOOKS, LENGTH, 2, SCORED), []
    read = type(reader).read
    monkeypatch.setattr(
        type(reader), "read", lambda self, ids, guide=None: known.append((ids, guide)) or read(self, ids, guide)
    )
    measure = asked_once(framing, LENGTH, found, 6, "guide")
    assert measure.tokens == len(found.context)
    measure.run(reader, 0)
    assert known == [(found.context, question_ids(framing, found.questions[2]))]


@torch.no_grad()
def test_a_peer_that_keeps_everything_has_the_dense_cache_s_outcome(reader, framing):
    measure = Prose("prose", LENGTH, (passage(framing, BOOKS, LENGTH, 0, SCORED),), framing)
    sample, scored = measure.sample(0), []
    for text in sample["scored"]:
        logits = reader.model(torch.tensor([sample["read"] + text[:-1]])).logits[0, len(sample["read"]) :].float()
        nats = torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:]), reduction="none")
        scored.append({"nats": nats.tolist(), "greedy": logits.argmax(-1).tolist()})
    theirs = measure.outcome(None, 0, {"nbytes": 7, "first_seconds": 0.5, "scored": scored})
    ours = measure.run(replace(reader, spec=CacheSpec.parse("dense")), 0)
    assert theirs.score == pytest.approx(ours.score, abs=1e-4) and (theirs.nbytes, theirs.first_seconds) == (7, 0.5)
    assert [x["score"] for x in theirs.said] == [x["score"] for x in ours.said]
    for x, y in zip(theirs.said, ours.said, strict=True):
        assert x["kind"] == y["kind"] and x["nats"] == pytest.approx(y["nats"], abs=1e-3)


# ---- one reading for many caches ----

ONE_PASS = [
    "pruner=snapkv,keep=60",
    "pruner=replay,keep=60,budget=globaltopk",
    "pruner=kvzip,chunk=100,keep=60,budget=adakv",
    "pruner=criticalkv,keep=60",
    "pruner=keydiff,keep=60",
    "pruner=streamingllm,keep=0.5,positions=contiguous",
]


@pytest.mark.parametrize(("text", "later"), covering(ONE_PASS, ["keep", "compress"]))
def test_a_shared_reading_gives_the_bits_of_one_of_its_own(reader, text, later):
    ids = list(TEXT.encode())[:260]
    inputs = LayerInputs(reader.model)
    shared = SharedReader(reader.model, reader.tokenizer, CacheSpec("pruned", {}), inputs=inputs)
    calls = []

    def called(module, args, output):
        if args[0].shape[1] == len(ids):  # not the pass that asks which layers project outputs, nor KVzip's second one
            calls.append(module)

    hooks = [layer.mlp.register_forward_hook(called) for layer in reader.model.model.layers]
    first = CacheSpec.parse("pruned,pruner=keynorm,keep=60,page_size=4")
    replace(shared, spec=first).read(ids)
    spec = CacheSpec.parse(f"pruned,{text},page_size=4,later={later}")
    ours = replace(shared, spec=spec).read(ids)
    assert len(calls) == 4  # of the first reading
    for hook in hooks:
        hook.remove()
    plain = Reader(reader.model, reader.tokenizer, spec).read(ids)
    assert ours.nbytes() == plain.nbytes() and ours.stored_lengths() == plain.stored_lengths()
    coming = torch.tensor([list(b"nobody")])
    with torch.no_grad():
        logits = [reader.model(coming, past_key_values=cache).logits for cache in (ours, plain)]
    assert torch.equal(*logits)


def test_one_reading_serves_all_budgets_and_sizes(reader, monkeypatch):
    ids, read, readings = list(TEXT.encode())[:200], Reader.read, []
    monkeypatch.setattr(Reader, "read", lambda self, *a: readings.append(self.spec) or read(self, *a))
    shared = SharedReader(reader.model, reader.tokenizer, CacheSpec("dense", {}), inputs=LayerInputs(reader.model))
    for text in ("keep=0.25", "keep=0.5,budget=adakv", "keep=30,budget=globaltopk", "keep=0.25,budget=pyramidkv"):
        spec = CacheSpec.parse(f"pruned,pruner=keydiff,page_size=4,later=keep,{text}")
        ours = replace(shared, spec=spec).read(ids)
        assert len(readings) == 1
        assert ours.stored_lengths() == read(Reader(reader.model, reader.tokenizer, spec), ids).stored_lengths()


def test_other_texts_and_caches_are_read_as_they_are(reader):
    """A text in chunks, a dense cache, another text; and the model is left as it was, also by an error."""
    shared = SharedReader(reader.model, reader.tokenizer, CacheSpec("dense", {}), inputs=LayerInputs(reader.model))
    one, other = list(TEXT.encode())[:200], list(TEXT.encode())[300:500]
    caches = ["pruned,pruner=snapkv,keep=60,later=keep", "pruned,pruner=snapkv,keep=60,chunk_size=100", "dense"]
    coming = torch.tensor([list(b"nobody")])
    for text in caches:
        for ids in (one, other, one):
            spec = CacheSpec.parse(text)
            ours, plain = replace(shared, spec=spec).read(ids), replace(reader, spec=spec).read(ids)
            with torch.no_grad():
                logits = [reader.model(coming, past_key_values=cache).logits for cache in (ours, plain)]
            assert torch.equal(*logits), (text, ids[:9])
    hooks = [len(module._forward_pre_hooks) for module in reader.model.modules()]
    with pytest.raises(RuntimeError, match="stop"), shared.inputs.reading(other):
        raise RuntimeError("stop")
    assert hooks == [len(module._forward_pre_hooks) for module in reader.model.modules()]
    assert not any("forward" in vars(layer) for layer in reader.model.model.layers)


# ---- cells and rows ----

ABOUT = {"model": "x", "split": "tune"}


def cell(text, cache="dense", share=None, bits=2.0, right=1.0, nbytes=100, **more):
    kinds = [("number", 1.0), ("number", right), ("sentence", right), ("turn", 0.0)]
    told = tuple({"kind": kind, "score": score} for kind, score in kinds)
    return Cell("later", 10, text, cache, share, "b", nbytes, bits, told, **more)


def test_a_run_that_was_cut_goes_on_and_one_of_something_else_does_not(tmp_path):
    path = tmp_path / "rows.jsonl"
    cells = Cells(path, ABOUT)
    for text in range(3):
        cells.add(cell(text))
    path.write_text(path.read_text()[:-20])  # in the middle of a line
    again = Cells(path, ABOUT)
    assert list(again.found.values()) == [cell(0), cell(1)]
    again.add(cell(2))
    assert Cells(path, ABOUT).found == cells.found
    before = path.read_text()
    with pytest.raises(ValueError, match=r"rows\.jsonl, are of the same split"):
        Cells(path, ABOUT | {"split": "report"})
    assert path.read_text() == before
    path.write_text(json.dumps(ABOUT)[:9])  # it was cut before the first cell
    assert Cells(path, ABOUT).found == {} and json.loads(path.read_text()) == ABOUT


def test_differences_are_of_the_same_texts_with_the_error_of_the_pairs():
    cells = [cell(0, bits=1.0), cell(1, bits=3.0), cell(2, bits=9.0)]
    cells += [cell(1, "a", 0.5, 3.3, right=0.0, nbytes=60), cell(0, "a", 0.5, 1.1, nbytes=50)]
    cells += [cell(0, "b", 0.5, 1.0), cell(0, "c", 0.5, reason="it cannot")]
    dense, a, b, c = rows_of(cells, {"dense": "dense", "a": "A", "b": "B", "c": "C"}, "tune")
    assert a["name"] == "witness/tune/later/T10/A/keep0.5" and a["texts"] == [0, 1] and dense["texts"] == [0, 1, 2]
    assert a["bits"] == pytest.approx(2.2) and a["nbytes_share"] == pytest.approx(0.55)
    assert a["bits_over_dense"] == pytest.approx(0.2) and a["bits_over_dense_se"] == pytest.approx(0.1)
    assert (a["numbers"], a["sentence"], a["turns"]) == (0.75, 0.5, 0.0)
    assert a["numbers_over_dense"] == pytest.approx(-0.25) and a["numbers_over_dense_se"] == pytest.approx(0.25)
    assert over(a, b, "against")["bits_against"] == pytest.approx(0.1) and b["bits_se"] is None
    assert c == {**c, "reason": "it cannot"} and "bits" not in c


def test_a_cell_says_what_was_measured():
    found = Cell.of(("end", 10, 3, "a", 0.5), "b", Outcome(1.0, 7, 0.1, None, ({"score": 1.0},)))
    assert (found.bits, found.score("numbers"), found.score("turns"), found.nbytes) == (None, 1.0, None, 7)
    assert found.key == ("end", 10, 3, "a", 0.5)


def test_measured_cells_are_not_measured_again(reader, monkeypatch):
    """A cache without a size is measured once, whatever shares are asked for."""
    sizes = replace(witness.SIZES["tiny"], lengths=(LENGTH,), texts=1, question=("later",))
    texts = ("dense", "pruned,pruner=streamingllm", "quest,page_size=8")
    specs, cells = [witness.spec_of(text) for text in texts], Cells(None, ABOUT)
    witness.run(reader.model, reader.tokenizer, BOOKS, specs, sizes, cells)
    assert [cell.share for cell in cells.found.values()] == [None, 0.5, None]
    dense, streaming, quest = cells.found.values()
    assert dense.nbytes > 1.5 * streaming.nbytes and quest.nbytes >= dense.nbytes
    assert abs(quest.bits - dense.bits) < abs(streaming.bits - dense.bits)
    monkeypatch.setattr(SharedReader, "read", None)
    witness.run(reader.model, reader.tokenizer, BOOKS, specs, sizes, cells)
    assert len(cells.found) == 3


def test_a_cache_that_refuses_a_passage_is_left_out_with_its_reason(reader, framing, monkeypatch):
    def refuse(self, ids, guide=None):
        raise ValueError(f"{self.spec.given['keep']} tokens are too few")

    monkeypatch.setattr(SharedReader, "read", refuse)
    spec, found = witness.spec_of("pruned,pruner=keydiff"), passage(framing, BOOKS, LENGTH, 0, SCORED)
    shared = SharedReader(reader.model, reader.tokenizer, spec, inputs=LayerInputs(reader.model))
    measure = Prose("later", LENGTH, (found,), framing)
    (left,) = witness.measured(shared, measure, [spec], "later", found, 0, [0.25], Cells(None, ABOUT))
    assert left.reason == f"{round(len(found.context) / 4)} tokens are too few" and left.bits is None


def test_a_cache_that_looks_at_no_guide_is_left_out_of_that_question(reader, framing):
    specs = [witness.spec_of(text) for text in ("dense", "pruned,pruner=keydiff")]
    found = passage(framing, BOOKS, LENGTH, 0, SCORED)
    shared = SharedReader(reader.model, reader.tokenizer, specs[0], inputs=LayerInputs(reader.model))
    measure = asked_once(framing, LENGTH, found, 0, "guide")
    dense, left = witness.measured(shared, measure, specs, "guide", found, 0, [0.25], Cells(None, ABOUT))
    assert dense.reason is None and "guide has no effect with the pruner KeyDiff" in left.reason


# ---- books ----

PAGE = """<html><head><title>A title, long enough to be taken for a paragraph of prose, is none of it.</title>
</head><body><h1>A heading</h1><p>The first paragraph has <b>bold
words</b> and an entity &amp; goes on for as long as it takes to be one.
<pre>x = 1. This is no prose, however long it is, and however well it ends, with a full stop.</pre>
<ul><li>A short entry.<li>Another entry of the list is a whole sentence &mdash; it has more than eighty characters.</ul>
<p>This one ends without a full stop, as entries of lists of links do, which are of nobody's interest</body></html>"""
PLAIN = """A paragraph of plain text has lines that end
where the page does, and is joined to one line again, with single spaces between its words.

A paragraph with a word that is bro-
ken over two lines is left out, since nobody knows whether its hyphen is one.

Short.
"""


def test_paragraphs_are_prose_without_tags_and_broken_words():
    first, entry = books.paragraphs(PAGE, html=True)
    assert first == "The first paragraph has bold words and an entity & goes on for as long as it takes to be one."
    assert entry.startswith("Another entry") and "\u2014 it has" in entry
    (plain,) = books.paragraphs(PLAIN, html=False)
    assert plain.startswith("A paragraph of plain text has lines that end where the page does, and is joined")


@pytest.fixture
def debian(tmp_path, monkeypatch):
    """Stand-ins for Debian's tools, and a cache folder of its own."""
    tools = tmp_path / "tools"
    tools.mkdir()
    page = tmp_path / "page.html"
    page.write_text(PAGE)
    for name, lines in (
        ("apt-get", f"echo $2 >> {tmp_path}/asked; echo package of $2 > $2.deb"),
        ("dpkg-deb", f"if [ $1 = -f ]; then echo 1.2-3; else mkdir -p $3/pages; cp {page} $3/pages/a.html; fi"),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(books, "BOOKS", {"a": books.Book("pa", "pages/*.html", "tune"),
                                         "b": books.Book("pb", "pages/*.html", "report")})  # fmt: skip
    return tmp_path


def test_books_are_made_once_and_again_where_they_are_damaged(debian):
    ((name, text, origin),) = books.books_of("report")
    assert (name, origin.package, origin.version) == ("b", "pb", "1.2-3") and text.count("\n\n") == 1
    assert origin.sha256 == books._digest(text.encode()) and len(origin.package_sha256) == 64
    assert [name for name, _, _ in books.books_of("tune")] == ["a"]
    asked = debian / "asked"
    assert asked.read_text().split() == ["pa", "pb"]
    (books.folder() / "a.txt").write_text("what somebody wrote into it")
    assert books.install()["b"] == origin and asked.read_text().split() == ["pa", "pb", "pa"]
    with pytest.raises(ValueError, match="split must be one of tune, report, got 'test'"):
        list(books.books_of("test"))


def test_a_book_that_cannot_be_had_is_said(debian, monkeypatch):
    (debian / "page.html").write_text("<p>Nothing.")
    with pytest.raises(RuntimeError, match=r"pa 1\.2-3 has no prose in pages/\*\.html"):
        books.install()
    (debian / "tools/apt-get").write_text("#!/bin/sh\necho no such package >&2\nexit 100\n")
    with pytest.raises(RuntimeError, match="apt-get download pa failed: no such package"):
        books.install()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="apt-get is not there to get pa with"):
        books.install()
    assert not (books.folder() / "books.json").exists()


def test_a_book_is_of_one_split():
    assert {book.split for book in books.BOOKS.values()} == set(books.SPLITS)
    assert len({book.package for book in books.BOOKS.values()}) == len(books.BOOKS)


def test_models_that_were_converted_are_measured_beside_the_model(tmp_path, monkeypatch):
    """Under the name of their folder; cells are of its weights."""
    model, tokenizer = kvcompress.load_example_model(retrofit="dmc")
    for x in (model, tokenizer):
        x.save_pretrained(tmp_path / "merging")
    path = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["witness.py", "--tiny", "--question", "later", "--methods", "--converted",
                                      str(tmp_path / "merging"), "--json", str(path)])  # fmt: skip
    witness.main()
    rows = json.loads(path.read_text())["rows"]
    assert {row["method"] for row in rows} == {"dense", "merging"}
    (own,) = (row for row in rows if row["method"] == "merging")
    assert len(own["texts"]) == 2 and 0.1 < own["nbytes_share"] < 0.6 and "bits_over_dense" in own
    digest = own["cache"].split(": ")[0]
    model.config.kvcompress["shift"] = 1.0
    model.save_pretrained(tmp_path / "merging")
    witness._of.cache_clear()
    assert witness._of(tmp_path / "merging") != digest + ": "
