"""Gates that others published: read as they are, they judge by what enters attention, and memory is freed."""

import copy
import json
import pickle
from dataclasses import replace

import pytest
import torch
from helpers import KINDS, attached, kind_model, left_padded, logits_of, random_ids, tiny_gates, tiny_model
from published_gates import (
    FORMS,
    entering,
    fast_layers,
    hidden_gates_folder,
    kvzap,
    numbers,
    write,
    write_fast,
    write_kvzap,
)
from safetensors.torch import load_file, save_file

import kvcompress
from kvcompress import CacheSpec, Gate, GatedCache, GlobalTopK, IterativeCache, KVzip, PrunedCache, prefill
from kvcompress.gates import train_gates, with_levels
from kvcompress.hf.attach import base_model, facts_of
from kvcompress.hf.seam import seam_of
from kvcompress.pruners import ChunkKV, Gates
from kvcompress.pruners.gates import HIDDEN
from kvcompress.retrofit.passes import whole_layers
from kvcompress.support import names

WINDOW, SINKS = 6, 2
FAMILIES = ("llama", "qwen3")


def kept(cache):
    return [[[row.tolist() for row in rows] for rows in layer] for layer in cache.kept_positions()]


def hidden_gates(form="mlp"):
    return Gates.load(hidden_gates_folder(form))


def gated(model, gates, threshold=-1.0, **given):
    return GatedCache(
        model.config, gates, threshold=threshold, window=WINDOW,
        **{"num_sink_tokens": SINKS, "page_size": 4, "track": True, **given},
    )  # fmt: skip


def middle(says, found):
    """A threshold between two numbers, in the middle of all that is said of these hidden states."""
    every = torch.cat([says(i, x[0][0]).flatten() for i, x in found.items()]).sort().values
    return float(every[len(every) // 2 - 1 : len(every) // 2 + 1].mean())


@pytest.mark.parametrize("form", FORMS)
def test_a_published_gate_says_what_its_authors_formula_says(form, tmp_path):
    path, says = write(form, tmp_path / "gates")
    gates = Gates.load(path)
    x = torch.randn(2, 1, 40, 64)
    for i in range(3):
        found, wanted = gates.says(i, x), torch.stack([says(i, one[0]) for one in x])
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
    assert gates.looks_at == HIDDEN and gates.levels == () and path.name in gates.measured
    again = Gates.load(gates.save(tmp_path / "ours"))
    assert again == gates and again.form == gates.form and again != replace(gates, looks_at="queries")
    assert pickle.loads(pickle.dumps(gates)) == gates and copy.deepcopy(gates) is gates


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS[:2] + FORMS[3:])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_keeps_what_the_formula_says(family, form, tmp_path):
    path, says = write(form, tmp_path / "gates")
    model, ids = tiny_model(family), random_ids(60)
    with entering(model) as found:
        model(ids, use_cache=False)
    every = torch.stack([says(i, found[i][0][0]) for i in range(3)])
    cache = PrunedCache(model.config, Gate(str(path), last=0, num_sink_tokens=0), GlobalTopK(floor=0.0), keep=15)
    with kvcompress.attach(model):
        model(ids, past_key_values=cache)
    best = torch.zeros(every.numel(), dtype=torch.bool).index_fill_(0, every.flatten().topk(15 * 6).indices, True)
    wanted = [[row.nonzero().flatten().tolist() for row in layer] for layer in best.view_as(every)]
    assert [layer[0] for layer in kept(cache)] == wanted


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS[:2] + FORMS[3:])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_threshold_keeps_what_the_formula_says(family, form, tmp_path):
    path, says = write(form, tmp_path / "gates")
    model, ids = tiny_model(family), random_ids(60)
    with entering(model) as found:
        model(ids, use_cache=False)
    threshold = middle(says, found)
    cache = gated(model, str(path), threshold)
    with kvcompress.attach(model), entering(model) as found:  # layers see what those below them kept
        model(ids, past_key_values=cache)
    t, some = torch.arange(60), 0
    for i, layer in enumerate(kept(cache)):
        stays = (says(i, found[i][0][0]) >= threshold) | (t < SINKS) | (t >= 60 - WINDOW)
        assert layer[0] == [row.nonzero().flatten().tolist() for row in stays]
        some += int(stays.sum())
    assert 6 * 20 < some < 6 * 50  # neither all nor nothing


@torch.no_grad()
@pytest.mark.parametrize("form", ["linear", "fast"])
def test_chunks_and_single_tokens_keep_what_one_pass_keeps(form, tmp_path):
    path, says = write(form, tmp_path / "gates")
    model, ids = attached("qwen3"), random_ids(70)
    with entering(model) as found:
        model(ids, use_cache=False)
    caches = [gated(model, str(path), middle(says, found), chunk_size=n) for n in (None, 17, None)]
    for cache in caches[:2]:
        prefill(model, ids, cache)
    for token in ids[0, :-1]:
        model(token[None, None], past_key_values=caches[2])
    assert kept(caches[0]) == kept(caches[1]) == kept(caches[2])
    assert caches[0].kept_share() < 0.9


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gated", "pruned", "pruned, contest"])
def test_padded_sequences_keep_what_they_keep_alone(kind):
    model, gates = attached(), hidden_gates()
    budget = GlobalTopK() if kind.endswith("contest") else None

    def made():
        if kind == "gated":
            return gated(model, gates)
        return PrunedCache(model.config, Gate(gates, last=4), budget, keep=12, every=3)

    prompts = [random_ids(n, seed=n) for n in (40, 25, 40)]
    ids, mask = left_padded(prompts)
    together, follow = made(), random_ids(8, batch=3, seed=1)
    prefill(model, ids, together, attention_mask=mask)
    for t in range(8):
        mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
        model(follow[:, t : t + 1], past_key_values=together, attention_mask=mask)
    for b, prompt in enumerate(prompts):
        alone = made()
        prefill(model, prompt, alone)
        for t in range(8):
            model(follow[b : b + 1, t : t + 1], past_key_values=alone)
        assert [layer[b] for layer in kept(together)] == [layer[0] for layer in kept(alone)]


@torch.no_grad()
def test_decoded_tokens_are_judged_as_a_prompt_is():
    """Of the first layer, whose hidden states depend on nothing that was dropped."""
    model, ids = attached(), random_ids(70)
    one, stepped = (PrunedCache(model.config, Gate(hidden_gates(), last=4), keep=20, every=x) for x in (None, 1))
    prefill(model, torch.cat([ids, ids[:, :1]], 1), one)
    model(ids[:, :30], past_key_values=stepped)
    for i in range(30, 70):
        model(ids[:, i : i + 1], past_key_values=stepped)
    assert kept(one)[0] == kept(stepped)[0]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_watched_in_every_kind_of_model(kind):
    model, ids = kind_model(kind), random_ids(50)
    with kvcompress.attach(model) as decoder:
        facts = facts_of(base_model(decoder))
        layers = [numbers(x, facts[x].kv_heads, 65) for x in whole_layers(facts)]
        gates = Gates(tuple(layers), looks_at=HIDDEN)
        for cache in (gated(model, gates, 0.0), PrunedCache(model.config, Gate(gates, last=4), keep=12, every=3)):
            prefill(model, ids, cache)
            for i in range(6):
                out = model(ids[:, i : i + 1], past_key_values=cache)
            assert out.logits.isfinite().all()
            lengths = [len(row) for layer in cache.compressing for row in layer.kept_positions()[0]]
            assert sum(lengths) < 50 * len(lengths)


@torch.no_grad()
def test_a_memory_and_neighbours_are_chosen_by_them():
    model, ids = attached(), random_ids(120)
    memory = IterativeCache(model.config, memory_size=30, chunk_size=25, pruner=Gate(hidden_gates()), every=4)
    chunks = PrunedCache(model.config, ChunkKV(Gate(hidden_gates(), last=0)), keep=20)
    for cache in (memory, chunks):
        prefill(model, ids, cache)
        for i in range(9):
            out = model(ids[:, i : i + 1], past_key_values=cache)
        assert out.logits.isfinite().all() and all(len(row) < 40 for layer in kept(cache) for row in layer[0])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gated", "pruned"])
def test_a_fork_and_a_saved_cache_go_on_alike(kind, tmp_path):
    model, ids, gates = attached(), random_ids(70), hidden_gates("fast")
    cache = gated(model, gates, -2.0) if kind == "gated" else PrunedCache(model.config, Gate(gates), keep=16, every=4)
    prefill(model, ids[:, :50], cache)
    cache.save(tmp_path / "cache")
    others = [cache.fork(), kvcompress.load_cache(tmp_path / "cache", model)]
    wanted = [logits_of(model, ids[:, i : i + 1], cache) for i in range(50, 70)]
    for other in others:
        for i, logits in enumerate(wanted, start=50):
            assert torch.equal(logits_of(model, ids[:, i : i + 1], other), logits)
        assert kept(other) == kept(cache)


def test_gates_in_caches_that_an_earlier_version_saved_are_linear_ones_of_queries():
    now = tiny_gates()
    state = now.__getstate__()
    del state["looks_at"]
    state["layers"] = tuple(torch.cat([x.weight, x.bias[:, None]], 1) for x in now.layers)
    then = object.__new__(Gates)
    then.__setstate__(state)
    assert then == now and then.looks_at == "queries"


def test_attention_is_watched_from_the_first_such_cache_until_it_is_detached():
    model, ids = tiny_model(), random_ids(30)

    def hooks():
        return [len(layer.self_attn._forward_pre_hooks) for layer in model.model.layers]

    with kvcompress.attach(model), torch.no_grad():
        prefill(model, ids, GatedCache(model.config, tiny_gates(), threshold=0.0))
        assert hooks() == [0, 0, 0]
        for _ in range(2):
            prefill(model, ids, gated(model, hidden_gates()))
            assert hooks() == [1, 1, 1]
        twin = copy.deepcopy(model)
        assert seam_of(base_model(twin)).attending[0]() is twin.model.layers[0].self_attn
        prefill(twin, ids, gated(twin, hidden_gates()))
    assert hooks() == [0, 0, 0]


@torch.no_grad()
def test_hidden_states_that_nobody_noted_are_an_error_before_anything_is_stored():
    model, ids = attached(), random_ids(30)
    seam_of(base_model(model)).watches = True  # as for code that was compiled before
    for cache in (gated(model, hidden_gates()), PrunedCache(model.config, Gate(hidden_gates()), keep=8)):
        with pytest.raises(RuntimeError, match="hidden states that enter attention must be known for these gates"):
            model(ids, past_key_values=cache)
        assert cache.nbytes() == 0


def test_levels_of_ones_own_texts_make_keep_work(tmp_path):
    model, texts = tiny_model(), [random_ids(80, seed=seed)[0] for seed in range(6)]
    with pytest.raises(ValueError, match="gates must have levels for keep, got none: kvcompress"):
        GatedCache(model.config, hidden_gates(), keep=0.25)
    gates = with_levels(model, hidden_gates_folder(), texts)
    assert "levels of 6 texts of 480 tokens" in gates.measured and gates.model["hidden_size"] == 64
    assert gates.looks_at == HIDDEN and Gates.load(gates.save(tmp_path / "gates")) == gates
    with kvcompress.attach(model), torch.no_grad():
        shares = []
        for text in texts:
            cache = GatedCache(model.config, gates, keep=0.4, window=1, num_sink_tokens=0)
            model(text[None], past_key_values=cache)
            shares.append(cache.kept_share())
    assert sum(shares) / 6 == pytest.approx(0.4, abs=0.1)
    own = with_levels(model, Gates(tiny_gates().layers), texts)  # those of queries too
    assert len(own.levels) == 1001 and own.measured == "levels of 6 texts of 480 tokens in all"
    for bad, samples, error in (
        (tiny_gates(layers=2), texts, "gates must be of this model"), (gates, [], "samples must be at least one text"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=error):
            with_levels(model, bad, samples)


def test_they_are_not_trained_on():
    words = KVzip(prompt=(5, 6), next_prompt=(7, 8), suffix=(9,))
    with pytest.raises(ValueError, match="linear ones of queries to be trained on, got two layers of hidden states"):
        train_gates(tiny_model(), hidden_gates(), [random_ids(60)[0]] * 6, words)


def test_published_gates_are_of_their_model(tmp_path):
    model, ids = attached(), random_ids(30)
    for name, sizes, error in (
        ("narrow", {"n": 48}, "they look at 48 numbers of a token's hidden states in layer 0, the model has 64"),
        ("heads", {"heads": 4}, r"they have KV heads \[4, 4, 4\], the model's layers that compress \[2, 2, 2\]"),
        ("layers", {"layers": 5}, "they have 5 layers, 3 are needed "),
    ):
        write_kvzap(tmp_path / name, **sizes)
        gates = Gates.load(tmp_path / name)
        for cache in (gated(model, gates), PrunedCache(model.config, Gate(gates), keep=8)):
            with pytest.raises(ValueError, match=f"gates must be of this model: {error}"), torch.no_grad():
                prefill(model, ids, cache)
            assert cache.nbytes() == 0
    wide = kind_model("llama", hidden_size=48, num_hidden_layers=3)  # queries of 64 numbers
    write_kvzap(tmp_path / "wide", n=48)
    with kvcompress.attach(wide), torch.no_grad():
        cache = gated(wide, str(tmp_path / "wide"))
        prefill(wide, ids, cache)
    assert cache.kept_share() < 1


def test_a_text_names_them():
    folder, config = hidden_gates_folder("fast"), tiny_model().config
    made = [
        CacheSpec.parse(f"gated,gates={folder},threshold=-3").make(config).gates,
        CacheSpec.parse(f"pruned,pruner=gate:{folder},keep=8").make(config).pruner.gates,
    ]
    assert made == [Gates.load(folder)] * 2


def test_halves_are_read_as_they_are(tmp_path):
    tensors = write_kvzap(tmp_path / "KVzap", hidden=8, dtype=torch.bfloat16)
    x = torch.randn(1, 1, 5, 64)
    found = Gates.load(tmp_path / "KVzap").says(1, x)[0]
    torch.testing.assert_close(found.double(), kvzap(tensors, 1, x[0, 0]), rtol=1e-5, atol=1e-5)


def rewritten(change):
    def run(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return run


def described(**changes):
    def run(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return run


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (rewritten(lambda x: x.pop("layers.1.2.bias")), "KVzap must hold layers.1.2.bias, got none"),
        (rewritten(lambda x: x.update(more=torch.ones(1))), "no other tensors than its gates', got more"),
        (rewritten(lambda x: x["layers.2.0.weight"].fill_(torch.nan)), r"layers\[2\]: weight1 must be finite"),
        (
            rewritten(lambda x: x.update({"layers.0.2.weight": torch.ones(2, 7)})),
            r"layers\[0\]: weight2 must be of shape \(2, 8\), got \(2, 7\)",
        ),
        (
            rewritten(lambda x: x.update({"layers.0.2.bias": torch.ones(2, dtype=torch.int32)})),
            "layers.0.2.bias must be a tensor of floating point, got torch.int32",
        ),
        (described(n_modules=4), "KVzap must hold layers.3.0.bias, layers.3.0.weight, layers.3.2.bias, got none and"),
        (described(n_modules=0), "n_modules of config.json must be a number of at least 1, got 0"),
        (described(output_dim=4), r"must be those of the weights, \(64, 2\), got \(64, 4\)"),
        (described(hidden_dim=9), "hidden_dim of config.json must be that of the weights, 8, got 9"),
        (described(model_type="qwen3"), 'or with a config.json of "model_type": "kvzap", got "model_type": "qwen3" in'),
        (described(model_type=None), 'or with a config.json of "model_type": "kvzap", got "model_type": null in'),
        (described(hidden_dim=None), "KVzap must hold layers.0.bias, layers.0.weight"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no"), "damaged, or no file of gates"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}'),
            "weight_map of model.safetensors.index.json must say a file in its folder",
        ),
    ],
)
def test_a_damaged_folder_is_refused(damage, error, tmp_path):
    write_kvzap(tmp_path / "KVzap", hidden=8)
    damage(tmp_path / "KVzap")
    with pytest.raises(ValueError, match=error):
        Gates.load(tmp_path / "KVzap")


class _Runs:
    def __reduce__(self):
        return pytest.fail, ("a file of gates was run",)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda saved: saved["module"][1].pop("k_base"), "layer 1 of gates.pt must hold k_base, got none"),
        (lambda saved: saved["module"][0].update(x=torch.ones(1)), "no other tensors than its gates', got x"),
        (lambda saved: saved.pop("module"), "gates.pt must hold a list 'module' of each layer's tensors, got NoneType"),
        (lambda saved: saved["module"][2]["b"].fill_(torch.inf), r"layers\[2\]: bias must be finite"),
        (
            lambda saved: saved["module"][0].update({"k_proj.weight": torch.ones(31, 64)}),
            r"layers\[0\]: key_weight must be of shape \(32, 64\), got \(31, 64\)",
        ),
        (lambda saved: saved["module"][0].update(k_base=torch.ones(2, 3)), "sinks must be of shape"),
        (lambda saved: saved.update(more=_Runs()), r"which torch.load\(weights_only=True\) reads"),
    ],
)
def test_a_damaged_file_is_refused(change, error, tmp_path):
    saved = {"module": fast_layers()}
    change(saved)
    torch.save(saved, tmp_path / "gates.pt")
    with pytest.raises(ValueError, match=error):
        Gates.load(tmp_path / "gates.pt")


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    write_fast(tmp_path / "whole.pt")
    (tmp_path / "gates.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:900])
    with pytest.raises(ValueError, match=r"gates.pt must be gates of Fast KVzip"):
        Gates.load(tmp_path / "gates.pt")
    with pytest.raises(FileNotFoundError, match=r"gates must be a file, or one on the Hub .*: there is no such file"):
        Gates.load(tmp_path / "none.pt")


def test_ours_that_are_damaged_are_refused(tmp_path):
    folder = hidden_gates().save(tmp_path / "gates")
    about = json.loads((folder / "gates.json").read_text())
    for change, error in (
        ({"form": "three layers"}, "form of gates.json must be one of linear, two layers, sinks"),
        ({"form": "linear"}, "gates.safetensors must hold layers.0.weight, layers.0.bias, ..., got"),
        ({"looks_at": "values"}, "looks_at must be one of queries, hidden states, got 'values'"),
    ):
        (folder / "gates.json").write_text(json.dumps(about | change))
        with pytest.raises(ValueError, match=error):
            Gates.load(folder)


def test_of_the_hub_no_more_comes_than_gates_have(tmp_path, monkeypatch):
    write_kvzap(tmp_path / "KVzap", hidden=8, shards=2)
    write_fast(tmp_path / "file.pt")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "qwen3"}')
    asked, folders = [], {"nvidia/KVzap": "KVzap", "some-one/model": "model", "Jang-Hyun/Fast-KVzip": "."}

    def download(name, allow_patterns):
        asked.append(allow_patterns)
        return str(tmp_path / folders[name])

    def download_one(name, file):
        asked.append(file)
        return str(tmp_path / folders[name] / file)

    monkeypatch.setattr(names, "snapshot_download", download)
    monkeypatch.setattr(names, "get_hf_file_metadata", lambda url: None)
    monkeypatch.setattr(names, "hf_hub_download", download_one)
    ours = ["gates.safetensors", "gates.json", "config.json"]
    assert Gates.load("nvidia/KVzap").form == "two layers"
    assert asked == [ours, ["config.json", "model*.safetensors", "model.safetensors.index.json"]]
    asked.clear()
    with pytest.raises(ValueError, match=r'gates must be a folder with gates.json, .* got "model_type": "qwen3"'):
        Gates.load("some-one/model")  # whose weights are no gates
    assert asked == [ours]
    asked.clear()
    assert Gates.load("Jang-Hyun/Fast-KVzip/file.pt").measured == "Fast KVzip, Fast-KVzip/file.pt"
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        Gates.load("Jang-Hyun/Fast-KVzip/other.pt")
    assert asked == ["file.pt", "other.pt"]
