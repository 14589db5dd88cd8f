"""Budgets that go by a measured profile."""

import json

import pytest
import torch
from helpers import attached, left_padded, random_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import kvcompress
from kvcompress import CacheSpec, GlobalTopK, IterativeCache, PrunedCache, prefill
from kvcompress.analysis import measure_profile
from kvcompress.analysis.texts import texts as read_texts
from kvcompress.budgets import CacheShape
from kvcompress.cli import app
from kvcompress.profiles import BudgetProfile, Profiled
from kvcompress.pruners import H2O, Replay, SnapKV
from kvcompress.support.units import Keep

SHARES = ((1.0, 0.5), (3.0, 0.2), (0.8, 0.5))
PROFILE = BudgetProfile(SHARES, "by hand")


def lengths(cache):
    return [row for (row,) in cache.stored_lengths()]


@settings(deadline=None, max_examples=60)
@given(mean=st.integers(1, 300), length=st.integers(1, 600), seed=st.integers(0, 1000), layers=st.integers(1, 9))
def test_layers_share_exactly(mean, length, seed, layers):
    mean = min(mean, length)
    weights = torch.rand(layers, 2, generator=torch.Generator().manual_seed(seed)) ** 3 + 1e-4
    budget = Profiled(BudgetProfile(tuple(tuple(row) for row in weights.tolist())))
    tokens = [budget.tokens_of(Keep.of(mean), length, layer, CacheShape(layers, 2, 64, 16)) for layer in range(layers)]
    assert sum(tokens) == layers * mean
    assert 1 <= min(tokens) and max(tokens) <= length


def test_every_row_has_its_share():
    model, ids = attached(), random_ids(101)
    cache = prefill(model, ids, PrunedCache(model.config, SnapKV(window=2), Profiled(PROFILE), keep=20))
    expected = [[20 * share for share in row] for row in SHARES]  # their mean is 1
    for row, wanted in zip(lengths(cache), expected, strict=True):
        assert all(abs(held - share) <= 1 for held, share in zip(row, wanted, strict=True))
    assert sum(map(sum, lengths(cache))) == 120
    kept = prefill(model, ids, PrunedCache(model.config, SnapKV(window=2), keep=61))
    best = [layer.pool.gather(61)[0] for layer in kept.layers]
    held = [layer.pool.gather(max(layer.pool.counts))[0] for layer in cache.layers]
    for layer, row in enumerate(lengths(cache)):  # the best of its own scores: a subset of the 61 best
        for h, n in enumerate(row):
            assert ((held[layer][h, :n, None] == best[layer][h]).all(-1).any(1)).all()


def test_what_always_stays_stays_where_its_row_has_less():
    model, ids = attached(), random_ids(101)
    cache = prefill(model, ids, PrunedCache(model.config, SnapKV(window=12), Profiled(PROFILE), keep=20))
    assert all(n >= 12 for row in lengths(cache) for n in row)
    assert sum(map(sum, lengths(cache))) == 120


@pytest.mark.parametrize(
    "pruner", [SnapKV(window=4), H2O(0.1), Replay(chunk=16, last=4)], ids=lambda x: type(x).__name__
)
def test_prompts_batches_decoding_and_iterative_reading(pruner):
    model = attached()
    prompts = [random_ids(length, seed=length) for length in (70, 9, 41)]
    ids, mask = left_padded(prompts)
    caches = {
        "pruned": lambda: PrunedCache(model.config, pruner, Profiled(PROFILE), keep=15, every=4, page_size=8),
        "chunks": lambda: PrunedCache(model.config, pruner, Profiled(PROFILE), keep=15, chunk_size=16),
        "iterative": lambda: IterativeCache(
            model.config, memory_size=15, budget=Profiled(PROFILE), chunk_size=16, pruner=pruner
        ),
    }
    for name, make in caches.items():
        together = kvcompress.generate(model, ids, make(), mask, max_new_tokens=8, do_sample=False)
        for b, prompt in enumerate(prompts):
            alone = make()
            expected = kvcompress.generate(model, prompt, alone, max_new_tokens=8, do_sample=False)
            assert torch.equal(together[b, -8:], expected[0, -8:]), (name, b)
            if b == 0:
                assert 90 <= sum(map(sum, lengths(alone))) <= 6 * 24
                assert lengths(alone)[1][0] > 2 * lengths(alone)[1][1]


def test_a_measured_profile_is_what_global_top_k_keeps(tmp_path):
    model, texts = attached(), [random_ids(81, seed=seed) for seed in range(3)]
    profile = measure_profile(model, texts, keep=0.2, pruner=Replay(chunk=16, last=2))
    kept = torch.zeros(3, 2)
    for ids in texts:
        kept += torch.tensor(
            lengths(prefill(model, ids, PrunedCache(model.config, Replay(chunk=16, last=2), GlobalTopK(), keep=0.2)))
        )
    torch.testing.assert_close(torch.tensor(profile.shares), kept / kept.mean(), atol=1e-5, rtol=1e-5)
    assert BudgetProfile.load(profile.save(tmp_path / "profile.json")) == profile
    assert "3 texts" in profile.measured
    with pytest.raises(ValueError, match="texts must hold one that is longer than what is kept"):
        measure_profile(model, texts, keep=100)


def test_a_profile_of_another_model_is_refused():
    model = attached(num_hidden_layers=2)
    for cache in (
        PrunedCache(model.config, SnapKV(), Profiled(PROFILE), keep=9),
        IterativeCache(model.config, memory_size=9, budget=Profiled(PROFILE), chunk_size=16),
    ):
        with pytest.raises(
            ValueError, match=r"KV heads \[2, 2, 2\], the model's layers that compress \[2, 2\]; measured"
        ):
            prefill(model, random_ids(30), cache)
        assert cache.stored_lengths() == [[], []]


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ("[1]", "must be a profile, got a JSON list"),
        ("{", "must be a profile in JSON"),
        ({"shares": [[1]], "measured": ""}, "format of p.json must be 'kvcompress budget profile 1', got None"),
        ({"format": "kvcompress budget profile 1", "shares": [[1]]}, "must have the fields measured, shares, got"),
        ({"format": "kvcompress budget profile 1", "shares": [[-1]], "measured": ""}, "at least 0 and finite, got -1"),
        ({"format": "kvcompress budget profile 1", "shares": [[0]], "measured": ""}, "must not be 0 everywhere"),
        ({"format": "kvcompress budget profile 1", "shares": [], "measured": ""}, "a list of numbers for each layer"),
    ],
)
def test_wrong_files_are_named(tmp_path, saved, message):
    path = tmp_path / "p.json"
    path.write_text(saved if isinstance(saved, str) else json.dumps(saved))
    with pytest.raises(ValueError, match=message):
        BudgetProfile.load(path)
    with pytest.raises(FileNotFoundError, match="profile must be a file"):
        BudgetProfile.load(tmp_path / "none.json")


def test_what_is_no_profile_is_refused():
    with pytest.raises(ValueError, match=r"profile must be a BudgetProfile, got str: BudgetProfile.load reads a file"):
        Profiled("profile.json")


def test_the_command_measures_what_python_does(tmp_path):
    """On the shipped model; its file goes into a cache as text."""
    out = tmp_path / "shares.json"
    call = ["analyze", "budget", "--out", str(out), "--samples", "2", "--length", "300", "--keep", "40"]
    result = CliRunner().invoke(app, [*call, "--pruner", "snapkv:window=8", "--floor", "0.2"])
    assert result.exit_code == 0, result.output
    profile = BudgetProfile.load(out)
    assert "SnapKV(window=8" in profile.measured and "share of the mean" in result.output
    model, tokenizer = kvcompress.load_example_model()
    chosen, _ = read_texts(tokenizer, (), False, 2, 300, 0)
    with kvcompress.attach(model):
        assert measure_profile(model, chosen, keep=40, pruner=SnapKV(window=8), floor=0.2) == profile
    cache = CacheSpec.parse(f"pruned,keep=64,budget=profiled:{out}").make(model.config)
    assert cache.budget == Profiled(profile)
    for wrong, message in (
        (["--pruner", "snap"], "pruner must be one of"), (["--keep", "many"], "must be"), (["--floor", "2"], "floor"),
        (["--length", "4000"], "length must be at most"), (["--pruner", "duoattention"], "needs heads"),
    ):  # fmt: skip
        result = CliRunner().invoke(app, [*call, *wrong])
        assert result.exit_code == 2 and message in " ".join(result.output.split())
