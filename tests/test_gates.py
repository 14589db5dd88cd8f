"""Gates: a token's own queries say whether it stays; in one reading, in chunks, and as it is decoded."""

import copy
import json
import pickle
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from helpers import KINDS, attached, kind_model, left_padded, logits_of, random_ids, tiny_gates, tiny_model, weaker
from huggingface_hub.errors import RepositoryNotFoundError
from typer.testing import CliRunner

import kvcompress
from kvcompress import CacheSpec, Gate, GlobalTopK, IterativeCache, PrunedCache, Replay, SnapKV, prefill
from kvcompress.cli import app
from kvcompress.gates import fit_gates
from kvcompress.gates.fitting import QueriesPass
from kvcompress.hf.attach import is_attached
from kvcompress.hf.reading import plain_decoder, read
from kvcompress.pruners import Candidates, ChunkKV, CriticalKV, Gates, Pruner
from kvcompress.retrofit.regression import explained, levels_of
from kvcompress.support import names

GATES = tiny_gates()
GATE = Gate(GATES, last=4)


def said(model, ids, gates=GATES):
    """[layers that compress][Hkv, T]: what gates say of a text, from the queries of a plain reading."""
    with plain_decoder(model) as (decoder, facts):
        passed = QueriesPass(facts)
        read(decoder, ids[0], passed)
    layers = sorted(passed.seen)[-len(gates.layers) :]
    return [
        (passed.seen[layer] @ form.weight.T + form.bias).T for layer, form in zip(layers, gates.layers, strict=True)
    ]


def kept(cache):
    return [[[row.tolist() for row in rows] for rows in layer] for layer in cache.kept_positions()]


def test_a_score_is_a_linear_map_of_a_tokens_own_queries():
    model, ids = attached(), random_ids(60)
    cache = PrunedCache(model.config, GATE, keep=1.0, later="keep")
    with torch.no_grad():
        prefill(model, torch.cat([ids, ids[:, :1]], 1), cache)
    for layer, wanted in zip(cache.compressing, said(model, ids), strict=True):
        scores = layer.chooser.held.scores[:, :60]
        torch.testing.assert_close(scores, wanted, rtol=1e-4, atol=1e-3)


def test_chunks_keep_what_one_reading_keeps():
    model, ids = attached(), random_ids(121)
    rows = []
    for chunk_size in (None, 40, 17):
        cache = PrunedCache(model.config, GATE, keep=20, chunk_size=chunk_size)
        with torch.no_grad():
            prefill(model, ids, cache)
        rows.append(kept(cache))
    # later chunks see what stayed of earlier ones, so that their queries differ from the second layer on
    assert rows[0][0] == rows[1][0] == rows[2][0]
    alone = PrunedCache(model.config, replace(GATE, last=0, num_sink_tokens=0), keep=20)
    with torch.no_grad():
        prefill(model, ids, alone)
    # by definition: the best by what is said, of the text's own queries
    wanted = [row.topk(20).indices.sort().values.tolist() for layer in said(model, ids[:, :-1]) for row in layer]
    assert [row for layer in kept(alone) for row in layer[0]] == wanted


def test_decoded_tokens_are_judged_as_a_prompt_is():
    """Token by token, with every=1, the same tokens stay as after one reading."""
    model, ids = attached(), random_ids(70)
    one, stepped = (PrunedCache(model.config, GATE, keep=20, every=every) for every in (None, 1))
    with torch.no_grad():
        prefill(model, torch.cat([ids, ids[:, :1]], 1), one)
        model(ids[:, :30], past_key_values=stepped)
        for i in range(30, 70):
            model(ids[:, i : i + 1], past_key_values=stepped)
    # the first call's scores are those of one reading; later tokens saw less, so that their queries differ from layer 1
    assert kept(one)[0] == kept(stepped)[0]


def test_padded_sequences_of_a_batch_keep_what_they_keep_alone():
    model = attached()
    prompts = [random_ids(n, seed=n) for n in (50, 31, 50)]
    ids, mask = left_padded(prompts)
    together = PrunedCache(model.config, GATE, GlobalTopK(), keep=12)
    with torch.no_grad():
        prefill(model, ids, together, attention_mask=mask)
    for b, prompt in enumerate(prompts):
        alone = PrunedCache(model.config, GATE, GlobalTopK(), keep=12)
        with torch.no_grad():
            prefill(model, prompt, alone)
        assert [layer[b] for layer in kept(together)] == [layer[0] for layer in kept(alone)]


def test_a_memory_is_chosen_by_gates():
    model, ids = attached(), random_ids(200)
    cache = IterativeCache(model.config, memory_size=40, chunk_size=30, pruner=GATE)
    with torch.no_grad():
        prefill(model, ids, cache)
        assert model(ids[:, :1], past_key_values=cache).logits.isfinite().all()
    assert all(len(row) == 41 for layer in cache.kept_positions() for row in layer[0])


def test_a_fork_and_a_saved_cache_go_on_alike(tmp_path):
    model, ids = attached(), random_ids(80)
    cache = PrunedCache(model.config, GATE, GlobalTopK(), keep=16, every=4)
    with torch.no_grad():
        prefill(model, ids[:, :60], cache)
        cache.save(tmp_path / "cache")
        others = [cache.fork(), kvcompress.load_cache(tmp_path / "cache", model)]
        assert others[1].pruner == GATE
        wanted = [logits_of(model, ids[:, i : i + 1], cache) for i in range(60, 80)]
        for other in others:
            for i, logits in enumerate(wanted, start=60):
                assert torch.equal(logits_of(model, ids[:, i : i + 1], other), logits)
            assert kept(other) == kept(cache)


@pytest.mark.parametrize("kind", KINDS)
def test_gates_of_every_kind_of_model(kind):
    model = kind_model(kind)
    teacher = SnapKV(window=4)
    texts = [random_ids(64, seed=seed)[0] for seed in range(4)]
    gates = fit_gates(model, texts, _Above(teacher), held_out=1)
    with kvcompress.attach(model), torch.no_grad():
        cache = PrunedCache(model.config, Gate(gates, last=4), GlobalTopK(), keep=16, every=3)
        prefill(model, texts[0][None], cache)
        for token in texts[1][:8]:
            out = model(token[None, None], past_key_values=cache)
    assert out.logits.isfinite().all()


@dataclass(frozen=True)
class _Above(Pruner):
    """Scores of another pruner, above 0."""

    inner: Pruner
    window: int = 4
    num_sink_tokens: int = 0

    def scores(self, candidates: Candidates, keep: int):
        return self.inner.scores(candidates, keep) + 1e-6


@dataclass(frozen=True)
class _Planted(Pruner):
    """Scores that are what some gates say, of all tokens."""

    gates: Gates
    window: int = 1
    num_sink_tokens: int = 0

    def scores(self, candidates: Candidates, keep: int):
        return self.gates.says(candidates.number, candidates.unrotated)[0].exp()


def test_a_fit_finds_the_map_that_made_the_scores():
    model = tiny_model()
    true = weaker(GATES, 0.05)
    texts = [random_ids(300, seed=seed)[0] for seed in range(6)]
    found = fit_gates(model, texts, _Planted(true), held_out=2, ridge=1e-9)
    assert not is_attached(model)
    assert min(min(row) for row in found.r2) > 0.999
    for own, wanted in zip(found.layers, true.layers, strict=True):
        for one, other in zip(own.tensors().values(), wanted.tensors().values(), strict=True):
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.02)
    kvcompress.attach(model)
    every = torch.cat([x.flatten() for ids in texts[4:] for x in said(model, ids[None], found)])
    for share in (0.25, 0.5):
        assert float((every > found.threshold(share)).float().mean()) == pytest.approx(share, abs=0.01)


def test_levels_lie_between_what_is_said():
    """At a number that a token said, rounding would decide whether that token stays."""
    parts = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (500, 301)]
    every, levels = torch.cat(parts).sort().values, levels_of(parts, 101)
    assert (levels[0], levels[-1]) == (every[0], every[-1])
    for i, level in enumerate(levels[1:-1].tolist(), start=1):
        assert level == pytest.approx(float(every[8 * i - 1] + every[8 * i]) / 2, abs=1e-6)
    for few in (1, 2, 3):
        assert levels_of([every[:few]], 5).diff().min() >= 0


def test_texts_held_out_are_not_fitted_to():
    model, texts = tiny_model(), [random_ids(120, seed=seed)[0] for seed in range(4)]
    first = fit_gates(model, texts, _Above(SnapKV(window=4)), held_out=1)
    other = fit_gates(model, [*texts[:3], random_ids(120, seed=9)[0]], _Above(SnapKV(window=4)), held_out=1)
    assert replace(first, levels=(), r2=()) == replace(other, levels=(), r2=())
    assert first.r2 != other.r2


def test_gates_are_saved_and_loaded_whole(tmp_path):
    gates = Gates(GATES.layers, GATES.levels, {"b": 1}, "here", ((0.5, 0.25),) * 3)
    folder = gates.save(tmp_path / "new" / "gates")
    assert sorted(x.name for x in folder.parent.iterdir()) == ["gates"]
    assert Gates.load(folder) == gates == Gate(str(folder)).gates
    assert gates != Gates(GATES.layers)
    assert repr(gates) == "Gates(3 layers, 2 KV heads each; here)"
    config = tiny_model().config
    for text in (f"pruner=gate:{folder}", f"pruner=gate,gates={folder}"):
        cache = CacheSpec.parse(f"pruned,{text},last=4,keep=0.25,budget=globaltopk").make(config)
        assert cache.pruner == Gate(gates, last=4)
    with pytest.raises(ValueError, match="folder must be new"):
        gates.save(folder)


def test_copies_and_devices_share_the_weights():
    gates = tiny_gates()
    assert copy.deepcopy(gates) is gates
    meta = torch.device("meta")
    there = gates._on(1, meta)
    assert there.weight.device == there.bias.device == meta and gates._on(1, meta) is there
    assert gates._on(1, torch.device("cpu")).weight is gates.layers[1].weight
    assert pickle.loads(pickle.dumps(gates)) == gates
    assert "_there" not in gates.__getstate__()


@pytest.mark.parametrize("name", ["smollm2_gates", "smollm2_gates_trained"])
def test_the_gates_that_come_along_are_smollm2s(name):
    gates = Gates.load(Path(__file__).parents[1] / "examples" / name)
    assert [(layer.heads, layer.width) for layer in gates.layers] == [(3, 9 * 64)] * 30
    assert (gates.form, gates.looks_at) == ("linear", "queries")
    assert gates.model["hidden_size"] == 576 and gates.threshold(0.25) > gates.threshold(0.5)
    assert ("trained on: 160 steps" in gates.measured) == name.endswith("trained") == (gates.r2 == ())


def test_damaged_gates_are_refused(tmp_path):
    folder = GATES.save(tmp_path / "gates")
    weights, about = folder / "gates.safetensors", folder / "gates.json"
    text, bytes_ = about.read_text(), weights.read_bytes()
    for change, error in (
        (lambda: weights.write_bytes(bytes_[:100]), "damaged"),
        (lambda: about.write_text(text[:20]), "gates' description in JSON"),
        (lambda: about.write_text(text.replace("gates 1", "gates 9")), "format of gates.json must be"),
        (lambda: about.write_text(json.dumps({**json.loads(text), "levels": [2.0, 1.0]})), "levels must be rising"),
        (lambda: about.write_text(text.replace("-8.0,", "NaN,")), "levels must be rising"),
        (lambda: about.write_text(json.dumps({**json.loads(text), "r2": [0.5]})), "r2 must be finite"),
        (lambda: about.write_text(json.dumps({**json.loads(text), "model": 3})), "model must be fields"),
        (lambda: about.write_text(json.dumps({**json.loads(text), "more": 1})), "must have the fields"),
    ):
        change()
        with pytest.raises(ValueError, match=error):
            Gates.load(folder)
        about.write_text(text)
        weights.write_bytes(bytes_)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="file of weights"):
        Gate(folder)
    about.unlink()
    with pytest.raises(FileNotFoundError, match=r'gates.json, as `kvcompress fit gates` .* "kvzap", got neither in'):
        Gate(folder)
    with pytest.raises(FileNotFoundError, match="gates must be a folder or a name on the Hub"):
        Gate(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("made", "error"),
    [
        (lambda: Gates(()), "layers must be a form for each layer"),
        (
            lambda: Gates((torch.zeros(2, 3, dtype=torch.float64),)),
            r"layers\[0\]: weight must be a float32 tensor, got torch.float64 \(2, 2\)",
        ),
        (lambda: Gates((torch.zeros(2),)), r"layers\[0\]: weights must be float32 \[Hkv, n \+ 1\], got \(2,\)"),
        (lambda: Gates(("linear",)), r"layers\[0\] must be a LinearGate or .* as all layers, got str"),
        (lambda: Gates(GATES.layers, looks_at="keys"), "looks_at must be one of queries, hidden states, got 'keys'"),
        (lambda: Gates((torch.tensor([[float("nan"), 0.0]]),)), r"layers\[0\]: weight must be finite"),
        (lambda: Gates(GATES.layers, (1.0,)), "levels must be rising"),
        (lambda: Gates(GATES.layers, (1, 2)), "levels must be rising"),
        (lambda: Gates(GATES.layers, model=3), "model must be fields of a config"),
        (lambda: Gates(GATES.layers).threshold(0.5), "gates must have levels"),
        (lambda: GATES.threshold(1.5), "share must be"),
        (lambda: Gate(3), "gates must be Gates, or the folder"),
        (lambda: Gate(GATES, last=-1), "last must be"),
        (lambda: fit_gates(tiny_model(), [random_ids(40)[0]], _Above(SnapKV())), "samples must be more than the 4"),
        (lambda: fit_gates(tiny_model(), [random_ids(40)[0]] * 6, 3), "pruner must be a Pruner"),
        (
            lambda: fit_gates(tiny_model("mistral", sliding_window=8), [random_ids(40)[0]] * 6, _Above(SnapKV())),
            "model must have a layer that sees all tokens",
        ),
        (lambda: fit_gates(tiny_model(), [random_ids(40)[0]] * 6, _Above(SnapKV()), held_out=0), "held_out must be"),
        (lambda: fit_gates(tiny_model(), [random_ids(40)[0]] * 6, _Above(SnapKV()), ridge=0), "ridge must be"),
    ],
)
def test_bad_gates_are_refused(made, error):
    with pytest.raises(ValueError, match=error):
        made()


def test_gates_are_of_their_model():
    model, ids = attached(), random_ids(40)
    other = Gates(GATES.layers, model={"hidden_size": 7})
    for gates, error in (
        (tiny_gates(layers=2), r"gates must be of this model: they have 2 layers, 3 are needed \(those .*compress\)"),
        (tiny_gates(kv_heads=4), r"they have KV heads \[4, 4, 4\], the model's layers that compress \[2, 2, 2\]"),
        (tiny_gates(numbers=48), "they look at 48 numbers of a token's queries"),
        (other, r"they are of one with hidden_size = 7 \(here 64\)"),
    ):
        for pruner in (Gate(gates), ChunkKV(Gate(gates))):
            cache = PrunedCache(model.config, pruner, keep=20)
            for _ in range(2):  # nothing is stored of a model that is refused
                with pytest.raises(ValueError, match=error):
                    prefill(model, ids, cache)
            assert cache.get_seq_length() == 0


def test_logarithms_are_not_multiplied():
    with pytest.raises(ValueError, match="must not score by logarithms, as Gate does"):
        CriticalKV(GATE)
    with pytest.raises(ValueError, match="must not score by logarithms, as ChunkKV does"):
        CriticalKV(ChunkKV(GATE))


@torch.no_grad()
def test_scores_are_float32_under_autocast():
    model, ids = attached(), random_ids(60)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = prefill(model, ids, PrunedCache(model.config, GATE, keep=1.0, later="keep"))
    scores = cache.compressing[0].chooser.held.scores
    assert scores.dtype == torch.float32 and not torch.equal(scores, scores.bfloat16().float())


def test_a_head_that_never_looks_has_nothing_explained():
    found = explained(torch.zeros(5, 2), torch.tensor([[3.0, float(i)] for i in range(5)]))
    assert found[0] == 0.0 and found[1] < 0
    with pytest.raises(ValueError, match="r2 must be finite"):
        Gates(GATES.layers, r2=((float("nan"),),))


def test_nothing_but_queries_is_gathered_for_gates(monkeypatch):
    model, ids = attached(), random_ids(60)
    cache = PrunedCache(model.config, GATE, keep=20, every=4)
    with torch.no_grad():
        prefill(model, ids, cache)
        pool = type(cache.compressing[0].pool)
        monkeypatch.setattr(pool, "gather", lambda *args: pytest.fail("keys were gathered"))
        for token in ids[0, :20]:
            model(token[None, None], past_key_values=cache)
    assert max(max(row) for layer in cache.stored_lengths() for row in layer) < 24


def test_the_command_fits_gates_and_says_how_to_take_them(tmp_path: Path):
    out, figure = tmp_path / "gates", tmp_path / "fit.png"
    given = ["fit", "gates", "--out", str(out), "--figure", str(figure), "--samples", "4", "--length", "200"]
    found = CliRunner().invoke(app, given)
    assert found.exit_code == 0, found.output
    assert (
        f"Take it as --cache gated,gates={out},keep=1/4 or pruned,pruner=gate:{out},keep=1/4,budget=globaltopk"
        in " ".join(found.output.split())
    )
    assert figure.stat().st_size > 5_000
    gates = Gates.load(out)
    assert "KVzip, mass=True" in gates.measured
    model, tokenizer = kvcompress.load_example_model()
    again = CacheSpec.parse(f"pruned,pruner=gate:{out},keep=32").make(model.config)
    with kvcompress.attach(model), torch.no_grad():
        prefill(model, torch.tensor([list(b"def f(x):\n    return x\n" * 8)]), again)
    assert {len(row) for layer in again.kept_positions() for row in layer[0]} == {32}
    short, shorter = tmp_path / "short.txt", tmp_path / "shorter.txt"
    short.write_text("a = 1\n" * 100)  # 601 tokens, with the one behind the document
    shorter.write_text("a = 1\n")
    little = ["--out", str(tmp_path / "b"), "--text"]
    for arguments, error in (
        (
            [*little, str(short), "--samples", "8", "--length", "200"],
            "samples must be at most the 3 rows of 200 tokens in short.txt (600 tokens), got 8; --samples 3, or "
            "--length 75, or a text of 1,600 tokens would do",
        ),
        (
            [*little, str(short), "--samples", "48", "--length", "700"],
            "the 0 rows of 700 tokens in short.txt (601 tokens), got 48; --samples 2 --length 300, or a text of 33,600",
        ),
        (
            [*little, str(shorter), "--length", "200"],
            "in shorter.txt (7 tokens), got 48; a text of 9,600 tokens would do",
        ),
        (["--out", str(out)], "must be a folder that does not exist"),
        (["--out", str(tmp_path / "b"), "--pruner", "gate"], "gate needs gates"),
        (["--out", str(tmp_path / "b"), "--figure", str(tmp_path / "fit.xyz")], "must end in one of"),
    ):
        refused = CliRunner().invoke(app, ["fit", "gates", *arguments])
        assert refused.exit_code == 2
        assert error in " ".join(refused.output.replace("│", " ").split())


def test_the_command_gives_gates_levels_of_a_text(tmp_path):
    """By which keep then finds a threshold."""
    model, tokenizer = kvcompress.load_example_model()
    gates = replace(fit_gates(model, torch.randint(256, (2, 300)), Replay(), held_out=1), model={}, levels=())
    given = ["fit", "gates", "--levels-of", str(gates.save(tmp_path / "gates")), "--samples", "2", "--length", "200"]
    found = CliRunner().invoke(app, [*given, "--out", str(tmp_path / "levels")])
    assert found.exit_code == 0, found.output
    assert f"--cache gated,gates={tmp_path / 'levels'},keep=1/4" in " ".join(found.output.split())
    levelled = Gates.load(tmp_path / "levels")
    assert "levels of 2 texts of 400 tokens" in levelled.measured
    assert levelled == replace(gates, levels=levelled.levels, model=levelled.model, measured=levelled.measured)
    assert CacheSpec.parse(f"gated,gates={tmp_path / 'levels'},keep=1/4").make(model.config).threshold < 0
    refused = CliRunner().invoke(app, [*given, "--out", str(tmp_path / "c"), "--steps", "2"])
    assert refused.exit_code == 2 and "must not be given with levels_of" in " ".join(refused.output.split())


def test_gates_of_the_hub_come_by_name(tmp_path, monkeypatch):
    folder, asked = tiny_gates().save(tmp_path / "gates"), []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr(names, "snapshot_download", download)
    assert Gates.load("some-one/gates") == Gates.load(folder)
    assert asked == [("some-one/gates", ["gates.safetensors", "gates.json", "config.json"])]
    for name in ("./none", "none/", str(tmp_path / "none"), "a/b/c", "two words"):
        with pytest.raises(FileNotFoundError, match=r"gates must be a folder or a name .*no such folder"):
            Gate(name)
    assert len(asked) == 1

    class NotFound(RepositoryNotFoundError):
        def __init__(self):
            """Without the answer that the Hub gave."""

    for error, kind, told in (
        (NotFound(), FileNotFoundError, "the Hub has none that may be read"),
        (OSError("no route to host"), ConnectionError, "the Hub cannot be reached: no route to host"),
    ):

        def refuse(name, allow_patterns, error=error):
            raise error

        monkeypatch.setattr(names, "snapshot_download", refuse)
        with pytest.raises(kind, match=told):
            Gates.load("some-one/gates")
