"""quality/parts/compaction.py: what is fitted is what its formulas say."""

import pytest
import torch

from benchmarks.quality.parts import compaction
from benchmarks.quality.parts.compaction import References, Slots, compacted

N, P, OWN, D = 256, 24, 6, 8


def head(seed=0):
    """(keys, values of the prompt, what is near, queries) of one KV head, and its references."""
    make = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, P, D, generator=make)
    near = torch.randn(2, OWN, D, generator=make)
    queries = torch.randn(N, D, generator=make)
    weights = (queries @ torch.cat([keys, near[0]]).T).softmax(-1)
    outputs = weights @ torch.cat([values, near[1]])
    folds = torch.arange(N) // compaction.BLOCK % 2
    return keys, values, near, queries, References(weights[None, :, :P], outputs[None], folds)


def attended(queries, slots: Slots, near):
    logits = torch.cat([queries @ slots.keys.T + slots.biases, queries @ near[0].T], -1)
    return logits.softmax(-1) @ torch.cat([slots.values, near[1]])


def test_nothing_is_fitted_where_nothing_went():
    keys, values, _, _, references = head()
    whole = compacted(keys, values, references, 0, torch.arange(P), biases=True, fits=True)
    torch.testing.assert_close(whole.values, values, atol=1e-4, rtol=0)
    torch.testing.assert_close(whole.biases, torch.zeros(P), atol=1e-3, rtol=0)


@pytest.mark.parametrize("biases", [False, True])
def test_fitted_values_are_the_ridge_regression_of_what_attention_misses(biases):
    keys, values, near, queries, references = head()
    places = torch.arange(0, P, 3)
    slots = compacted(keys, values, references, 0, places, biases=biases, fits=True)
    chosen = Slots(keys[places], values[places], slots.biases)
    logits = torch.cat([queries @ chosen.keys.T + chosen.biases, queries @ near[0].T], -1)
    A = logits.softmax(-1)[:, : len(places)].double()
    missing = (references.outputs[0] - attended(queries, chosen, near)).double()
    gram = A.T @ A
    eye = torch.eye(len(places), dtype=torch.float64)
    fits = [torch.linalg.solve(gram + ridge * gram.diagonal().mean() * eye, A.T @ missing)
            for ridge in compaction.RIDGE]  # fmt: skip
    change = (slots.values - values[places]).double()
    assert min(float((change - fit).abs().max()) for fit in fits) < 1e-4
    before, after = (attended(queries, x, near) - references.outputs[0] for x in (chosen, slots))
    assert after.square().mean() < before.square().mean()


def test_biases_bring_back_the_mass_and_noise_is_not_fitted():
    keys, values, _, _, references = head()
    places = torch.arange(0, P, 3)
    slots = compacted(keys, values, references, 0, places, biases=True, fits=False)
    attention = references.attention[0]
    lost = [(attention[:, places] @ w - attention.sum(1)).square().mean()
            for w in (torch.ones(len(places)), slots.biases.exp())]  # fmt: skip
    assert lost[1] < lost[0]
    make = torch.Generator().manual_seed(1)
    weights, noise = torch.rand(N, 200, generator=make).softmax(-1), torch.randn(N, D, generator=make)
    assert compaction.fitted_values(weights, noise - noise.mean(0), references.folds).abs().max() < 0.5


def test_a_budget_is_spent_over_all_heads_or_equally():
    scores = torch.rand(2, 3, 50, generator=torch.Generator().manual_seed(0))
    for uniform in (False, True):
        counts = [len(places) for layer in compaction.chosen(scores, 60, uniform=uniform) for places in layer]
        assert sum(counts) == 60 and (set(counts) == {10}) == uniform
