"""Measuring how alike layers attend, grouping them, and the file that says so."""

import itertools
import json
import math
import sys

import pytest
import torch
from helpers import random_ids, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.similarity import divergence_bits

from kvcompress.pod.plan import PoDPlan, delta_for_share, follower_share, lead_table
from kvcompress.pod.refine import refine

# the worked example: rows of four layers
ROWS = torch.tensor(
    [[0.5, 0.25, 0.125, 0.125], [0.25, 0.5, 0.125, 0.125], [0.125, 0.125, 0.25, 0.5], [0.0, 0.0, 0.25, 0.75]]
).double()
WORKED = 1 - divergence_bits(ROWS[:, None], ROWS[None])[None]


def random_similarity(L, Hkv=1, seed=0, levels=None):
    """Symmetric, 0..1; few levels make equal entries."""
    generator = torch.Generator().manual_seed(seed)
    sim = torch.rand(Hkv, L, L, generator=generator, dtype=torch.float64)
    sim = sim.tril(-1) if levels is None else ((sim * levels).round() / levels).tril(-1)
    return sim + sim.mT + torch.eye(L).double()


def plan_of(lead, **fields):
    return PoDPlan(**{"lead": lead, "sinks": 1, "recent": 2, "query_heads": 2 * len(lead[0]), "head_dim": 16} | fields)


def blocks_of(lead, head=0):
    return [list(block) for block in plan_of(lead).blocks(head)]


# ---- grouping ----


def test_the_worked_example():
    expected = {
        (0, 1): 0.938722,
        (0, 2): 0.795566,
        (0, 3): 0.431037,
        (1, 2): 0.795566,
        (1, 3): 0.431037,
        (2, 3): 0.856844,
    }
    for (a, b), value in expected.items():
        assert WORKED[0, a, b].item() == pytest.approx(value, abs=1e-6)
    for delta, blocks in (
        (0.5, [[0, 1, 2], [3]]), (0.8, [[0, 1], [2, 3]]), (0.9, [[0, 1], [2], [3]]), (0.25, [[0, 1, 2, 3]]),
        (0.0, [[0, 1, 2, 3]]), (1.01, [[0], [1], [2], [3]]),
    ):  # fmt: skip
        assert blocks_of(lead_table(WORKED, delta)) == blocks
    plan = plan_of(lead_table(WORKED, 0.5))
    assert plan.share == 0.5 and plan.followers == 2
    assert plan.saved(10) == pytest.approx(0.175) and plan.saved(100) == pytest.approx(0.2425)
    dense = plan.dense_nbytes(10, torch.float32)
    assert dense == 2 * 4 * 10 * 16 * 4 and plan.nbytes(10, torch.float32) == dense - (40 - 26) * 16 * 4
    assert plan.nbytes(100) == plan.dense_nbytes(100) - (400 - 206) * 16 * 2
    assert plan.saved(3) == 0 and plan.nbytes(3) == plan.dense_nbytes(3) and plan.nbytes(0) == 0


def test_the_figures_of_a_large_model():
    """LLaMA3-8B: 128 KiB per token in bfloat16; 35% at 32K needs a share of 0.8."""
    lead = [(layer // 5 * 5,) * 8 for layer in range(32)]
    plan = plan_of(lead, sinks=16, recent=4080, query_heads=32, head_dim=128)
    assert plan.dense_nbytes(1) == 128 << 10
    assert plan.saved(32768) == pytest.approx(0.5 * plan.share * 0.875)
    assert 1 - plan.nbytes(32768) / plan.dense_nbytes(32768) == pytest.approx(plan.saved(32768))


def test_equal_layers_join_at_delta_1_and_equality_joins():
    sim = random_similarity(3)
    sim[0, 0, 1] = sim[0, 1, 0] = 1.0
    assert blocks_of(lead_table(sim, 1.0)) == [[0, 1], [2]]
    assert lead_table(sim, sim[0, 1, 2].item())[2][0] == (0 if sim[0, 0, 2] >= sim[0, 1, 2] else 2)


def fewest_blocks(alike):
    """By trying every way to cut 0..L-1 into runs whose pairs are all alike."""
    L = len(alike)
    for cuts in range(L):
        for chosen in itertools.combinations(range(1, L), cuts):
            runs = [range(a, b) for a, b in itertools.pairwise((0, *chosen, L))]
            if all(alike[a][b] for run in runs for a, b in itertools.combinations(run, 2)):
                return cuts + 1
    raise AssertionError


@settings(deadline=None, max_examples=60)
@given(
    L=st.integers(1, 9), Hkv=st.integers(1, 3), seed=st.integers(0, 2**31), delta=st.floats(0, 1),
    levels=st.sampled_from([None, 4]),
)  # fmt: skip
def test_blocks_are_runs_of_alike_layers_and_the_fewest(L, Hkv, seed, delta, levels):
    sim = random_similarity(L, Hkv, seed, levels)
    lead = lead_table(sim, delta)
    for head in range(Hkv):
        blocks, alike = blocks_of(lead, head), (sim[head] >= delta).tolist()
        assert list(itertools.chain(*blocks)) == list(range(L))
        assert all(lead[layer][head] == block[0] for block in blocks for layer in block)
        assert all(alike[a][b] for block in blocks for a, b in itertools.combinations(block, 2))
        for block, after in itertools.pairwise(blocks):
            assert not all(alike[after[0]][layer] for layer in block)
        assert len(blocks) == fewest_blocks(alike)


@settings(deadline=None, max_examples=60)
@given(L=st.integers(2, 12), seed=st.integers(0, 2**31), low=st.floats(0, 1), high=st.floats(0, 1))
def test_blocks_never_become_fewer_as_delta_rises(L, seed, low, high):
    sim = random_similarity(L, 2, seed)
    low, high = min(low, high), max(low, high)
    for head in range(2):
        assert len(blocks_of(lead_table(sim, low), head)) <= len(blocks_of(lead_table(sim, high), head))


@settings(deadline=None, max_examples=60)
@given(L=st.integers(1, 10), seed=st.integers(0, 2**31), part=st.floats(0, 1), levels=st.sampled_from([None, 5]))
def test_delta_for_share_is_the_largest_that_reaches_it(L, seed, part, levels):
    sim = random_similarity(L, 2, seed, levels)
    target = part * (L - 1) / L
    delta = delta_for_share(sim, target)
    assert follower_share(lead_table(sim, delta)) >= target
    rows, columns = torch.tril_indices(L, L, -1)
    for entry in sim[:, rows, columns].unique().tolist():
        assert entry <= delta or follower_share(lead_table(sim, entry)) < target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sim: sim[0], r"similarity must be \[Hkv, L, L\], got shape \(4, 4\)"),
        (lambda sim: sim.index_fill(1, torch.tensor(2), float("nan")), r"between 0 and 1, got nan at \[0, 2, 0\]"),
        (lambda sim: sim * 1.5, "similarity must be between 0 and 1, got 1.5"),
        (lambda sim: sim.triu(), "similarity must be symmetric"),
        (lambda sim: sim * 0.5, "similarity must be 1 on the diagonal"),
    ],
)
def test_a_similarity_that_is_none_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        lead_table(change(WORKED.clone()), 0.5)


def test_wrong_thresholds_are_named():
    with pytest.raises(ValueError, match="delta must be a number, got nan"):
        lead_table(WORKED, float("nan"))
    with pytest.raises(ValueError, match=r"share must be between 0 and \(layers - 1\) / layers = 0.75, got 0.8"):
        delta_for_share(WORKED, 0.8)


# ---- the plan ----


@pytest.mark.parametrize(
    ("lead", "message"),
    [
        ([[0, 0], [0, 1], [0, 0]], r"lead\[2\]\[1\] must be 1 or 2 .*got 0"),  # a closed block
        ([[0, 0], [0, 2], [0, 2]], r"lead\[1\]\[1\] must be 0 or 1 .*got 2"),  # above itself
        ([[0, 1], [0, 1]], r"lead\[0\]\[1\] must be 0 .*got 1"),
        ([[0, 0], [0, -1]], r"lead\[1\]\[1\] must be"),
        ([[0, 0], [0]], r"lead\[1\] must have 2 KV heads as lead\[0\], got 1"),
        ([[0, 0], [0, 0.0]], r"lead\[1\]\[1\] must be a layer, got 0.0"),
        ([], r"lead must be \[L\]\[Hkv\]"),
        ("0", r"lead must be \[L\]\[Hkv\]"),
    ],
)
def test_a_lead_table_that_breaks_the_rules_is_refused_by_layer_and_head(lead, message):
    with pytest.raises(ValueError, match=message):
        PoDPlan(lead=lead, sinks=1, recent=2, query_heads=2, head_dim=16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sinks": -1}, "sinks must be at least 0, got -1"),
        ({"recent": 0}, "recent must be at least 1, got 0"),
        ({"recent": 2.0}, "recent must be an integer, got 2.0"),
        ({"query_heads": 3}, "query_heads must be a multiple of the lead table's 2 KV heads, got 3"),
        ({"reduce": "max"}, "reduce must be one of mean, min, got 'max'"),
        ({"delta": float("nan")}, "delta must be a number of at least 0 or None, got nan"),
        ({"similarity": random_similarity(3, 2)}, r"similarity must have shape \(2, 2, 2\) as lead, got \(2, 3, 3\)"),
        ({"model": 3}, "model must be a text, got 3"),
    ],
)
def test_a_field_that_cannot_be_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        plan_of([[0, 0], [0, 1]], **fields)


def test_a_plan_comes_back_as_it_was_saved(tmp_path):
    sim = random_similarity(5, 2, seed=3)
    plan = plan_of(
        lead_table(sim, 0.4), similarity=sim, delta=0.4, samples=3, data="texts", model="some/model", reduce="min",
        standard_error=0.01, queries=16, sample_length=100,
    )  # fmt: skip
    path = plan.save(tmp_path / "plan.json")
    assert PoDPlan.load(path) == plan
    assert lead_table(PoDPlan.load(path).similarity, 0.4) == plan.lead  # no digit is lost
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved.pop("recent"), "plan.json must have the field recent"),
        (lambda saved: saved.update(extra=1), "plan.json must have the fields lead, .* alone, got extra"),
        (lambda saved: saved.update(format="other"), "format of plan.json must be .*, got 'other'"),
        (lambda saved: saved.update(lead=[[0], [1], [0]]), r"plan.json is no valid plan: lead\[2\]\[0\]"),
        (lambda saved: saved.update(lead=3), r"plan.json is no valid plan: lead must be"),
        (lambda saved: saved.update(sinks="16"), "sinks must be an integer, got '16'"),
    ],
)
def test_a_plan_that_was_changed_is_refused_by_field(tmp_path, change, message):
    path = plan_of([[0], [0], [2]]).save(tmp_path / "plan.json")
    saved = json.loads(path.read_text())
    change(saved)
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=message):
        PoDPlan.load(path)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"lead": [[0'])
def test_a_file_that_is_no_plan_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"plan\.json must be a plan"):
        PoDPlan.load(path)


def test_a_plan_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = plan_of([[0], [0]]).save(tmp_path / "plan.json")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        plan_of([[0], [1]]).save(path)
    assert PoDPlan.load(path).lead == ((0,), (0,)) and len(list(tmp_path.iterdir())) == 1


def test_a_plan_of_another_model_is_refused_by_what_differs():
    config = tiny_model().config  # 3 layers, 4 query heads, 2 KV heads of 16
    plan_of([[0, 0]] * 3).check_model(config)
    for plan, message in (
        (plan_of([[0, 0]] * 2), "2 layers, the model 3"),
        (plan_of([[0]] * 3, query_heads=4), "1 KV heads, the model 2"),
        (plan_of([[0, 0]] * 3, query_heads=8), "8 query heads, the model 4"),
        (plan_of([[0, 0]] * 3, head_dim=8, model="large"), "8 head dim, the model 16; it was made for large"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.check_model(config)


# ---- borders moved by the loss ----


def needy(layer, head):
    """A model whose KV head `head` finds in layer `layer` what later tokens depend on: that row needs its own keys."""
    model = tiny_model(num_hidden_layers=4, vocab_size=300)
    with torch.no_grad():
        for number, block in enumerate(model.model.layers):
            G, D = 2, model.config.head_dim
            if number != layer:
                block.self_attn.o_proj.weight *= 1e-3  # what it attends to hardly matters
            else:
                other = slice((1 - head) * G * D, (2 - head) * G * D)
                block.self_attn.o_proj.weight[:, other] *= 1e-3
                block.self_attn.o_proj.weight *= 5
    return model


@pytest.mark.parametrize(("layer", "head"), [(2, 1), (1, 0), (2, 0)])
def test_borders_move_to_where_the_loss_is_least(layer, head):
    model = needy(layer, head)
    with torch.no_grad():  # texts that the model itself finds likely: any change of its attention costs
        rows = []
        for seed in range(4):
            ids = random_ids(4, seed=seed)
            while ids.shape[1] < 60:
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
            rows.append(ids[0])
    before = {name: x.clone() for name, x in model.state_dict().items()}
    start = tuple((0, 3 if number == 3 and head == 1 else 0) for number in range(4))
    if head == 0:
        start = tuple((3 if number == 3 else 0, 0) for number in range(4))
    plan = PoDPlan(start, sinks=1, recent=3, query_heads=4, head_dim=model.config.head_dim, delta=0.5)
    lines = []
    better = refine(model, plan, rows, rounds=4, report=lines.append)
    assert [row[head] for row in better.lead][layer] == layer
    assert better.refined == 3 - layer
    assert len(lines) == 3 - layer + 1 and "moves lowers the loss" in lines[-1]
    assert better.followers == plan.followers
    assert better.delta is None
    assert refine(model, better, rows) == better  # nothing is left to gain
    assert getattr(model.config, "kvcompress", None) is None
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert refine(model, plan, rows, rounds=0) is plan


def test_losses_that_are_no_numbers_move_nothing(monkeypatch):
    model, rows = tiny_model(num_hidden_layers=4, vocab_size=300), [random_ids(20)[0]]
    plan = PoDPlan(((0, 0), (0, 0), (2, 2), (2, 2)), sinks=1, recent=3, query_heads=4, head_dim=16)
    module = sys.modules[refine.__module__]
    for losses, refined in ((iter([3.0, math.nan, 2.0, *[math.nan] * 20]), 1), (iter([3.0, *[math.nan] * 9]), 0)):
        monkeypatch.setattr(module, "_loss", lambda *_, losses=losses: next(losses))
        assert refine(model, plan, rows, rounds=4).refined == refined
    monkeypatch.setattr(module, "_loss", lambda *_: math.nan)
    with pytest.raises(RuntimeError, match="loss with the plan must be finite, got nan"):
        refine(model, plan, rows)
    with pytest.raises(ValueError, match=r"rows must be longer than the 4 tokens .* got 4 at most"):
        refine(model, plan, [rows[0][:4]])
