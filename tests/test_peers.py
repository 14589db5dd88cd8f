"""Another library's presses are measured as our caches are, on the same prompts: `kvcompress eval --peers` and
quality/witness.py."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import kvcompress
from benchmarks.quality import witness
from kvcompress import CacheSpec
from kvcompress.cli import app
from kvcompress.evaluate.equal_bytes import EqualBytes
from kvcompress.evaluate.losses import decode_measure, loss_measure
from kvcompress.evaluate.peers import environment, kvpress_program
from kvcompress.evaluate.peers.environment import Peer, peer_of
from kvcompress.evaluate.peers.exchange import Refused, answers, nats_of, request_of
from kvcompress.evaluate.peers.rows import chosen, peer_rows
from kvcompress.evaluate.questions import needle_measure, recall_measure, turns_measure
from kvcompress.evaluate.report import best_of
from kvcompress.evaluate.texts import Library
from kvcompress.reading.framing import Framing

SOURCE = Library()

# what stands for kvpress: presses that keep the last tokens of every head, by cutting the cache or by hiding the others
STAND_IN = """
from contextlib import contextmanager
import torch

class Press:
    hides = False
    def __init__(self, ratio=0.0, *, compression_ratio=None, **others):
        self.ratio = ratio if compression_ratio is None else compression_ratio
        if not isinstance(self.ratio, float):
            raise TypeError("a press over a press")
    @contextmanager
    def __call__(self, model):
        def cut(module, args, kwargs, output):
            cache = kwargs["cache"] if "cache" in kwargs else kwargs["past_key_values"]  # from transformers 5.24 on
            layer = cache.layers[module.layer_idx]
            first = layer.keys.shape[2] - int(layer.keys.shape[2] * (1 - self.ratio))
            if self.hides:
                gone = torch.zeros(layer.keys.shape[:3], dtype=torch.bool)
                gone[:, :, :first] = True
                module.masked_key_indices = gone.nonzero(as_tuple=True)
            else:
                layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]
        hooks = [layer.self_attn.register_forward_hook(cut, with_kwargs=True) for layer in model.model.layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

class KVzipPress(Press):
    hides = True

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Press
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Every Python that is started has it."""
    (tmp_path / "kvpress.py").write_text(STAND_IN)
    about = tmp_path / "kvpress-9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpress\nVersion: 9\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture(scope="module")
def measure(reader):
    return loss_measure("ppl", Framing(reader.tokenizer), 96, 16, SOURCE, 2, 0)


KNOWN = {
    "versions": {"kvpress": "9", "transformers": "5"},
    "presses": ["SnapKV", "KVzip", "Knorm"],
    "not_run": {"KVzapPress": "needs a network trained for a named model"},
}
HALF = EqualBytes.parse("1/2")


@pytest.fixture
def fake(tmp_path):
    """A Python that says these lines where it is asked to measure, and ends so."""

    def make(*lines: object, status: int = 0) -> Peer:
        python, said = tmp_path / "python", tmp_path / "said.txt"
        said.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
        known = f"if [ $# -eq 1 ]; then echo '{json.dumps(KNOWN)}'; exit; fi"
        python.write_text(f"#!/bin/sh\n{known}\ncat {said}\necho what it died of >&2\nexit {status}\n")
        python.chmod(0o755)
        return peer_of(python, print)

    return make


def nats_here(reader, measure):
    """What the other side must find as well."""
    return nats_of(reader.model, request_of(reader.model, "example", [[measure.sample(0)]], [])["check"])


def answer(measure, nats, *, share=0.5, frees=True):
    """A press's, of ppl: so many nats, in this share of the bytes."""
    samples = [
        {
            "nbytes": int(share * 4096 * measure.tokens),
            "first_seconds": 0.25,
            "scored": [{"nats": [nats[index]], "greedy": []}],
        }
        for index in range(measure.count)
    ]
    return {"setting": "Press(0.5)", "frees_memory": frees, "seconds": 1.0, "samples": samples}


# ---- what is asked, and what comes of it ----


def test_attention_sees_all_before_it_but_what_is_hidden():
    torch.manual_seed(0)
    B, Hq, Hkv, S, T, D = 1, 4, 2, 3, 7, 8
    module = torch.nn.Module()
    module.masked_key_indices = None
    query, key, value = torch.randn(B, Hq, S, D), torch.randn(B, Hkv, T, D), torch.randn(B, Hkv, T, D)
    hidden = [(0, 0, 1), (0, 1, 3), (0, 1, 0)]
    for places in ([], hidden):
        if places:
            module.masked_key_indices = tuple(map(torch.tensor, zip(*places, strict=True)))
        out, _ = kvpress_program.attend(module, query, key, value, None, scaling=0.3)
        for h in range(Hq):
            for s in range(S):
                seen = [t for t in range(T - S + s + 1) if (0, h // 2, t) not in places]
                weights = torch.softmax(0.3 * key[0, h // 2, seen] @ query[0, h, s], 0)
                torch.testing.assert_close(out[0, s, h], weights @ value[0, h // 2, seen])
    kvpress_program.attend(module, query, key[:, :, :S], value[:, :, :S], None, scaling=0.3)  # another prompt begins
    assert module.masked_key_indices is None


def test_an_answer_is_what_our_cache_gives_that_keeps_the_same(stand_in, reader):
    """The whole way through another Python, with a stand-in for kvpress."""
    framing = Framing(reader.tokenizer)
    measures = [
        needle_measure(framing, 200, SOURCE, 1, 1, 0, "end"),
        turns_measure(framing, 300, SOURCE, 3, 1, 0),
        recall_measure(framing, 300, 2, 1, 0),
        loss_measure("ppl", framing, 100, 16, SOURCE, 1, 0),
    ]
    peer = peer_of(Path(sys.executable), print)
    assert peer.versions["kvpress"] == "9" and "trained" in peer.not_run["KVzapPress"]
    told: list[str] = []
    found = peer_rows(peer, ("SnapKV", "KVzip", "AdaKV(SnapKV)"), reader, "example", measures, HALF, told.append)
    assert found.refused is None and found.broken is None and len(told) == 12
    assert [left["task"] for left in found.left_out] == [measure.name for measure in measures]
    assert all("a press over a press" in left["reason"] for left in found.left_out)
    assert found.hiding == ["kvpress KVzip"] and "kvpress KVzip: hide what they drop" in found.notes()[1]
    for measure, cut, hiding in zip(measures, found.rows[::2], found.rows[1::2], strict=True):
        kept = int(measure.tokens * 0.5)
        spec = CacheSpec.parse(f"pruned,pruner=windowattention,keep={kept},later=keep")
        ours = measure.run(replace(reader, spec=spec), 0)
        for row in (cut, hiding):
            assert row.score == pytest.approx(ours.score, abs=1e-4) and row.said == (ours.said,)
            assert row.nbytes == 4096 * kept and row.share == pytest.approx(0.5, abs=0.01)
            assert row.first_token_seconds > 0 and (row.token_seconds is None) == (measure.name == "ppl")
        assert (cut.cache, cut.frees_memory, hiding.frees_memory) == ("kvpress SnapKV", True, False)


def test_rows_stand_in_the_order_and_scores_of_ours(fake, reader, measure):
    nats = nats_here(reader, measure)
    lines = [
        answer(measure, [8.0, 16.0]),
        {"error": "AssertionError: too short"},
        answer(measure, [1.0, 1.0], share=0.6),
    ]
    found = peer_rows(fake({"nats": nats}, *lines), ("SnapKV", "KVzip", "Knorm"), reader, "example", [measure], HALF)
    (row,) = found.rows
    bits = [nats / np.log(2) / text.nbytes for nats, text in zip([8.0, 16.0], measure.texts, strict=True)]
    assert row.samples == pytest.approx(bits) and row.score_se == pytest.approx(abs(bits[0] - bits[1]) / 2)
    assert (row.cache, row.sized, row.dense_nbytes) == ("kvpress SnapKV", "Press(0.5)", 4096 * measure.tokens)
    assert best_of([replace(row, cache="dense", score=0.0), row, replace(row, cache="x", score=9.0)]) == [row]
    reasons = [(left["cache"], left["reason"]) for left in found.left_out]
    assert reasons[0] == ("kvpress KVzip", "AssertionError: too short")
    assert reasons[1][0] == "kvpress Knorm" and "it holds 23" in reasons[1][1]
    assert "kvpress KVzip is left out of ppl, 96 tokens: AssertionError: too short" in found.notes()


def test_a_model_that_it_cannot_measure_is_said_with_the_reason(fake, reader, measure):
    for line, reason in (({"refused": "ValueError: model type x\nmore"}, "ValueError: model type x"),
                         ({"nats": 99.0}, "it computes 99.0000 nats for a token where we have")):  # fmt: skip
        found = peer_rows(fake(line), ("SnapKV",), reader, "example", [measure], HALF)
        assert found.rows == [] and found.broken is None and found.refused.startswith(reason)
        assert f"kvpress is left out: {found.refused}" in found.notes()
    converted = replace(reader, model=kvcompress.load_example_model(retrofit="dmc")[0])
    found = peer_rows(fake(), ("SnapKV",), converted, "x", [measure], EqualBytes.parse("64KiB"))
    assert found.rows == [] and "converted for dmc" in found.refused


def test_one_that_dies_or_writes_rubbish_is_said_and_what_came_before_stays(fake, reader, measure):
    nats = nats_here(reader, measure)
    good = answer(measure, [8.0, 16.0])
    for lines, count, reason in (
        ((), 0, "ended with status 3: what it died of"),
        (({"nats": nats}, good), 1, "ended with status 3: what it died of"),
        (({"nats": nats}, good, "hello"), 1, "no answer: 'hello'"),
        (({"nats": nats}, good, "[1]"), 1, "no answer"),
        (({"nats": nats}, {"samples": good["samples"]}), 0, "no answer: KeyError: 'setting'"),
        (({"nats": nats}, good | {"samples": good["samples"][:1]}), 0, "no answer: IndexError"),
        (({"nothing": 1},), 0, "must say nats"),
    ):
        found = peer_rows(fake(*lines, status=3), ("SnapKV", "KVzip"), reader, "example", [measure], HALF)
        assert len(found.rows) == count and found.refused is None and reason in found.broken
        assert f"kvpress's rows are not all there: {found.broken}" in found.notes()


def test_what_no_press_can_do_is_an_error(fake, reader):
    peer = fake()
    with pytest.raises(ValueError, match="KVzap: it needs a network"):
        chosen(peer, ["KVzap"])
    with pytest.raises(ValueError, match="one of SnapKV, KVzip, Knorm, got 'Snap'"):
        chosen(peer, ["Snap"])
    assert chosen(peer, ["Knorm", "Knorm"]) == ("Knorm",)
    measure = decode_measure(Framing(reader.tokenizer), 64, SOURCE, 1, 0)
    with pytest.raises(ValueError, match="compressed once, got decode"):
        peer_rows(peer, ("SnapKV",), reader, "example", [measure], HALF)
    x = torch.zeros(1, 1, 5, 8)
    with pytest.raises(ValueError, match="sliding window of 4"):
        kvpress_program.attend(torch.nn.Module(), x, x, x, None, scaling=1.0, sliding_window=4)


# ---- the command ----


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["eval", *map(str, arguments)], env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_shows_both_and_says_what_broke(fake, reader, measure, tmp_path):
    nats = nats_here(reader, measure)
    good = answer(measure, [0.1, 0.1], frees=False)
    file = tmp_path / "rows.json"
    arguments = ("ppl", "--lengths", 96, "--scored", 16, "--limit", 2, "--keep", "1/2", "--cache",
                 "pruned,pruner=random,page_size=8", "--json", file, "--peers", "--peers-press", "SnapKV",
                 "--peers-press", "KVzip", "--peers-python")  # fmt: skip
    shown = run(*arguments, fake({"nats": nats}, good, good).python)
    assert "b  kvpress SnapKV  held to Press(0.5)" in shown and "kvpress 9 with transformers 5" in shown
    written = json.loads(file.read_text())
    assert [row["cache"] for row in written["rows"]][1:] == ["kvpress SnapKV", "kvpress KVzip"]
    assert written["peers"]["kvpress"] == "9" and not written["rows"][1]["frees_memory"]
    assert [line.split()[-2:] for line in shown.splitlines() if " ppl" in line] == [["b", "c"]]  # best of both sides
    shown = run(*arguments, fake({"nats": nats}, good, status=4).python, code=1)
    assert "b  kvpress SnapKV" in shown and "ended with status 4: what it died of" in shown
    assert json.loads(file.read_text())["peers"]["broken"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--peers",), "peers must come with keep"),
        (("--peers", "--keep", "1/2", "--peers-python", "/bin/false"), "status 1"),
        (("--peers", "--keep", "1/2", "--peers-python", "/nowhere/python"), "/nowhere/python"),
        (("--keep", "1/2", "--peers-press", "SnapKV"), "peers must be given"),
    ],
)
def test_wrong_settings_are_named_before_anything_is_read(arguments, named):
    assert named in run("ppl", *arguments, code=2)


# ---- an environment of its own ----


def test_an_environment_is_made_once_and_whole_or_not_at_all(fake, tmp_path, monkeypatch):
    python = fake().python.read_text()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made: list[tuple[str, ...]] = []

    def create(folder, with_pip):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin/python").write_text(python)
        (folder / "bin/python").chmod(0o755)

    def install(program, requirements):
        assert program.exists()
        made.append(requirements)

    monkeypatch.setattr(environment.venv, "create", create)
    python = python.replace("if [", "if [ $# -gt 2 ]; then echo no network >&2; exit 1; fi\nif [")  # as pip
    with pytest.raises(ValueError, match=r"could not be made; --peers-python takes one that is there: no network"):
        peer_of(None, print)
    assert list((tmp_path / "cache/kvcompress").iterdir()) == []
    python = fake().python.read_text()
    monkeypatch.setattr(environment, "_install", install)
    told: list[str] = []
    peer = peer_of(None, told.append)
    assert peer.presses == tuple(KNOWN["presses"]) and "transformers<5.3" in made[-1] and len(told) == 4
    assert peer_of(None, told.append) == peer and len(told) == 4 and len(made) == 2
    peer.python.write_text("#!/bin/sh\necho no kvpress >&2\n")
    with pytest.raises(ValueError, match=r"no kvpress; remove .*, and it is made again"):
        peer_of(None, print)


# ---- the benchmark ----


def test_a_press_of_the_benchmark_is_measured_as_our_cache_that_keeps_the_same(stand_in, tmp_path, monkeypatch):
    """The whole program, with a stand-in for kvpress; it goes on where it was cut."""
    path, ours = tmp_path / "rows.json", "pruned,pruner=windowattention"
    monkeypatch.setattr(sys, "argv", ["witness.py", "--tiny", "--peers-python", sys.executable, "--json", str(path),
                                      "--presses", "SnapKV", "KVzip", "AdaKV(SnapKV)", "--cache", ours, "--methods",
                                      "--texts", "1"])  # fmt: skip
    witness.main()
    written = json.loads(path.read_text())
    assert written["machine"]["kvpress"]["kvpress"] == "9"
    for question in witness.SIZES["tiny"].question:
        rows = {row["method"]: row for row in written["rows"] if row["question"] == question}
        if question == "guide":
            assert not any(method.startswith("kvpress") for method in rows)
            continue
        assert "press over a press" in rows["kvpress AdaKV(SnapKV)"]["reason"]
        for press in ("kvpress SnapKV", "kvpress KVzip"):
            assert rows[press]["nbytes_share"] == pytest.approx(0.5, abs=0.01)
            for field in ("bits", "numbers", "sentence", "turns") if question == "later" else ("numbers",):
                # of an odd number of tokens ours keeps one more
                assert rows[press][f"{field}_samples"] == pytest.approx(rows[ours][f"{field}_samples"], abs=5e-3)
    known = Peer(Path(sys.executable), written["machine"]["kvpress"], ("SnapKV", "KVzip", "AdaKV(SnapKV)"), {})
    monkeypatch.setattr(witness, "peer_of", lambda python, told: known)
    monkeypatch.setattr(witness, "answers", None)  # nothing is asked again
    witness.main()
    assert json.loads(path.read_text())["rows"] == written["rows"]


def test_an_error_there_is_one_here(fake, reader, measure):
    request = request_of(reader.model, "example", [[measure.sample(0)]], [("SnapKV", 0, 0.5)])
    with pytest.raises(Refused, match="ValueError: no"):
        list(answers(fake({"refused": "ValueError: no"}), reader.model, reader.tokenizer, request))
