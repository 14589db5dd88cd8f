"""Pruners that ask a text about itself, or its keys about each other: Replay, Successor, KeyDiff."""

from dataclasses import replace

import oracle
import pytest
import torch
from helpers import attached, left_padded, random_ids, tiny_model

import kvcompress
from kvcompress import AdaKV, IterativeCache, PrunedCache, RemoteGap, ops, prefill
from kvcompress.ops.softmax import Softmax
from kvcompress.positions import RotaryTables
from kvcompress.pruners import Candidates, KeyDiff, Replay, Successor

PRUNERS = [Replay(chunk=8, last=4), Successor(chunk=8, last=4), KeyDiff(last=4)]
ROPES = {
    "default": {},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
}


def name_of(x):
    return type(x).__name__


def text(T=40, heads=2, group=2, softmax=None, **config):
    """(candidates of a first call, unrotated queries, unrotated keys)."""
    rotary = RotaryTables(tiny_model(max_position_embeddings=32, **config).model.rotary_emb)  # dynamic: past its switch
    queries, keys = torch.randn(1, heads * group, T, 16), torch.randn(1, heads, T, 16)
    offer = Candidates(
        rotary.rotate(queries, None, T, [T]), rotary.rotate(keys, None, T, [T]), T, T, 0, softmax or Softmax(0.25),
        unrotated=queries, position=T, rotary=rotary, in_sight=T,
    )  # fmt: skip
    return offer, queries, keys


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("rope", ROPES)
def test_replay_is_what_its_definition_says(rope, chunk):
    softmax = Softmax(0.25, softcap=3.0, sink_logits=torch.randn(4)) if chunk == 7 else None
    offer, queries, _ = text(softmax=softmax, **ROPES[rope])
    places = (torch.arange(40) % chunk + 40)[None].to(torch.int32)
    again = offer.rotary.rotate(queries, places, 40 + chunk, [40])
    x = (y.double() for y in (offer.queries, again, offer.keys))
    expected = oracle.replay_scores(*x, chunk=chunk, **offer.softmax.options)[0]
    torch.testing.assert_close(Replay(chunk=chunk).scores(offer, 20).double(), expected, atol=1e-5, rtol=1e-4)


def test_replay_sees_what_a_second_reading_would():
    """In one layer the text read twice gives the same attention: the far copy's scores are those of the first text."""
    model, ids, noted = attached(num_hidden_layers=1), random_ids(31), []

    class Spy(Replay):
        def scores(self, candidates, keep):
            noted.append(super().scores(candidates, keep))
            return noted[-1]

    prefill(model, ids, PrunedCache(model.config, Spy(chunk=64, last=4), keep=10))
    twice = torch.cat([ids[:, :-1], ids[:, :-1]], 1)
    base = model.model
    with torch.no_grad():
        x = base.layers[0].input_layernorm(base.embed_tokens(twice))
        attention = base.layers[0].self_attn
        q, k = (p(x).unflatten(-1, (-1, 16)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj))
    tables = RotaryTables(base.rotary_emb)
    q, k = (tables.rotate(y, None, 60, [60]) for y in (q, k))
    scores = ops.window_scores(q[:, :, 30:], k, reduce="max", kernel_size=1, skip_last=30)[0]
    torch.testing.assert_close(noted[0], scores, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("pruner", "most"), [(Replay(), 16), (Successor(), 16), (KeyDiff(), 32)], ids=str)
def test_of_little_few_are_sure_to_stay_for_being_recent(pruner, most):
    assert [pruner.recent(keep, keep) for keep in (8, 64, 100, 1000)] == [2, min(16, most), min(25, most), most]
    assert replace(pruner, last=20).recent(64, 64) == 20


def loops(offer, unrotated, chunk):
    """Successor by loops over heads and tokens."""
    heads, T = offer.heads, offer.count
    expected = torch.zeros(heads, T)
    for h in range(heads):
        for g in range(2):
            for t in range(T - 1):
                q, keys = offer.queries[0, 2 * h + g, t], offer.keys[0, h]
                own = (keys[: t + 1] @ q * 0.25).logsumexp(0)
                place = torch.tensor([[T + t % chunk]], dtype=torch.int32)
                turned = offer.rotary.rotate(unrotated[:, 2 * h + g : 2 * h + g + 1, t : t + 1], place, 2 * T, [T])
                score = torch.sigmoid(turned.flatten() @ keys[t + 1] * 0.25 - own)
                expected[h, t + 1] = max(expected[h, t + 1], score)
    return expected


@pytest.mark.parametrize("rope", ROPES)
def test_successor_is_what_its_definition_says(rope):
    offer, unrotated, _ = text(T=24, **ROPES[rope])
    scores = Successor(chunk=7).scores(offer, 12)
    torch.testing.assert_close(scores, loops(offer, unrotated, 7), atol=1e-5, rtol=1e-4)
    sums = ops.attention(offer.queries, offer.keys, offer.keys, scale=0.25)[1]
    torch.testing.assert_close(Successor(chunk=7).scores(replace(offer, sums=sums), 12), scores)


def test_the_prompts_attention_says_what_successor_divides_by(monkeypatch):
    """No second attention over a prompt that is read in one call."""
    model, ids = attached(), random_ids(61)
    monkeypatch.setattr(Candidates, "log_sums", lambda self: self.sums)
    assert prefill(model, ids, PrunedCache(model.config, Successor(), keep=20)).stored_lengths() == [[[20, 20]]] * 3


@pytest.mark.parametrize("rope", ROPES)
def test_key_diff_is_what_its_definition_says(rope):
    offer, _, keys = text(**ROPES[rope])
    for pruner, x in ((KeyDiff(), keys[0]), (KeyDiff.preset("paper"), offer.keys[0])):
        anchor = (x / x.norm(dim=-1, keepdim=True)).mean(1, keepdim=True)
        expected = -(x * anchor).sum(-1) / (x.norm(dim=-1) * anchor.norm(dim=-1))
        torch.testing.assert_close(pruner.scores(offer, 20), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pruner", [*PRUNERS, KeyDiff.preset("paper")], ids=name_of)
def test_heads_of_unequal_length_score_as_each_alone(pruner):
    """A further call: the last 10 tokens of every head are new, some heads hold more before them."""
    offer, _, _ = text(heads=3)
    sums = None
    lengths = [40, 22, 31]
    ragged = replace(
        offer, queries=offer.queries[:, :, -10:], unrotated=offer.unrotated[:, :, -10:], chunk_length=10, sums=sums,
        lengths=torch.tensor(lengths, dtype=torch.int32), shortest=22, received=None,
    )  # fmt: skip
    keys = offer.keys.clone()
    for h, n in enumerate(lengths):
        keys[0, h, :n] = offer.keys[0, h, 40 - n :]
        keys[0, h, n:] = float("nan") if isinstance(pruner, Successor) else 7.0
    scores = pruner.scores(replace(ragged, keys=keys), 20)
    for h, n in enumerate(lengths):
        group = slice(2 * h, 2 * h + 2)
        alone = replace(
            ragged, queries=ragged.queries[:, group], unrotated=ragged.unrotated[:, group], keys=keys[:, h : h + 1, :n],
            count=n, lengths=None, shortest=None,
        )  # fmt: skip
        torch.testing.assert_close(scores[h, :n], pruner.scores(alone, 20)[0], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_key_keeps_its_best_score():
    """Two calls and decoded tokens: the scores in the cache are the most that each call's own replay gave."""
    model, ids = attached(num_hidden_layers=1), random_ids(70)
    cache = PrunedCache(model.config, Replay(chunk=16, last=4), keep=200)
    calls = [30, 11, *[1] * 16]
    start = 0
    for count in calls:
        model(ids[:, start : start + count], past_key_values=cache)
        start += count
    base, tables = model.model, cache.facts[0].key_rotary
    x = base.layers[0].input_layernorm(base.embed_tokens(ids[:, :start]))
    attention = base.layers[0].self_attn
    q, k = (p(x).unflatten(-1, (-1, 16)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj))
    rotated = [tables.rotate(y, None, start, [30]) for y in (q, k)]
    expected = torch.zeros(2, start)
    for first, end in ((0, 30), (30, 41), (41, 57)):
        offer = Candidates(
            rotated[0][:, :, first:end], rotated[1][:, :, :end], end, end - first, 0, Softmax(0.25),
            unrotated=q[:, :, first:end], position=end, rotary=tables, in_sight=30,
        )  # fmt: skip
        expected[:, :end] = torch.maximum(expected[:, :end], Replay(chunk=16).scores(offer, 9))
    torch.testing.assert_close(cache.layers[0].chooser.received[:, :start], expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_key_diff_scores_each_key_once_against_all_that_came():
    model, ids = attached(num_hidden_layers=1), random_ids(70)
    cache = PrunedCache(model.config, KeyDiff(last=4), keep=200, chunk_size=20)
    prefill(model, ids[:, :56], cache)
    base = model.model
    keys = base.layers[0].self_attn.k_proj(base.layers[0].input_layernorm(base.embed_tokens(ids[:, :55])))
    keys = keys.unflatten(-1, (-1, 16)).transpose(1, 2)[0]
    expected = torch.cat(
        [
            -torch.cosine_similarity(
                keys[:, first:end], torch.nn.functional.normalize(keys[:, :end], dim=-1).mean(1, keepdim=True), dim=-1
            )
            for first, end in ((0, 20), (20, 40), (40, 55))
        ],
        1,
    )
    torch.testing.assert_close(cache.layers[0].chooser.received[:, :55], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("every", [None, 1, 5])
@pytest.mark.parametrize("pruner", PRUNERS, ids=name_of)
def test_batches_and_padding_change_nothing(pruner, every):
    model = attached()
    prompts = [random_ids(length, seed=length) for length in (50, 9, 31)]
    ids, mask = left_padded(prompts)
    settings = {"every": every, "page_size": 8, "chunk_size": 16}
    cache = PrunedCache(model.config, pruner, AdaKV(), keep=14, **settings)
    together = kvcompress.generate(model, ids, cache, mask, max_new_tokens=12, do_sample=False)
    for b, prompt in enumerate(prompts):
        alone = PrunedCache(model.config, pruner, AdaKV(), keep=14, **settings)
        expected = kvcompress.generate(model, prompt, alone, max_new_tokens=12, do_sample=False)
        assert torch.equal(together[b, -12:], expected[0, -12:]), b
        assert [layer[b] for layer in cache.stored_lengths()] == [layer[0] for layer in alone.stored_lengths()]


@torch.no_grad()
@pytest.mark.parametrize("every", [1, 4])
def test_decoded_tokens_find_their_predecessors(every):
    """Also the one that was decoded before the last vote."""
    model, ids = attached(num_hidden_layers=1), random_ids(60)
    cache = PrunedCache(model.config, Successor(chunk=64, last=8), keep=50, every=every)
    for part in (ids[:, :30], *ids[:, 30:46].split(1, 1)):
        model(part, past_key_values=cache)
    base, tables = model.model, cache.facts[0].key_rotary
    x = base.layers[0].input_layernorm(base.embed_tokens(ids[:, :46]))
    attention = base.layers[0].self_attn
    q, k = (p(x).unflatten(-1, (-1, 16)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj))
    rotated = [tables.rotate(y, None, 46, [30]) for y in (q, k)]
    sums = ops.attention(*rotated, rotated[1])[1][0]
    for t in range(29, 45):
        seen = t + 2 + -(t - 28) % every  # tokens when the pair votes
        first = max(seen - every - 1, 29)
        place = torch.tensor([[seen + t - first]], dtype=torch.int32)
        turned = tables.rotate(q[:, :, t : t + 1], place, 200, [30])[0, :, 0]
        logits = (turned.view(2, 2, 16) * rotated[1][0, :, None, t + 1]).sum(-1) / 4
        expected = torch.sigmoid(logits - sums[:, t].view(2, 2)).amax(1)
        got = cache.layers[0].chooser.received[:, t + 1]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4, msg=lambda m, t=t: f"{t}: {m}")


def test_no_position_that_the_model_does_not_know():
    model, ids = attached(max_position_embeddings=64), random_ids(62)
    with pytest.raises(
        ValueError,
        match=r"Replay asks queries again at 16 positions behind the 61 .* trained for 64: it takes 48 at most",
    ):
        prefill(model, ids, PrunedCache(model.config, Replay(chunk=16), keep=20))
    prefill(model, ids, PrunedCache(model.config, Replay(chunk=3), keep=20))
    prefill(model, ids, IterativeCache(model.config, memory_size=20, chunk_size=20, pruner=Replay()))
    with pytest.raises(ValueError, match="Successor asks queries again at 30 positions behind the 50"):
        prefill(model, ids, IterativeCache(model.config, memory_size=20, chunk_size=30, pruner=Successor()))
    parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    longer = attached(max_position_embeddings=64, rope_parameters=parameters)
    prefill(longer, random_ids(90), PrunedCache(longer.config, Replay(), keep=20))  # frequencies follow the length


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Replay(chunk=0), "chunk must be at least 1, got 0"),
        (lambda: Replay(last=-1), "last must be at least 0, got -1"),
        (lambda: Successor(last=0), "last must be at least 1, got 0"),
        (lambda: KeyDiff(last=1.5), "last must be an integer, got 1.5"),
        (lambda: KeyDiff.preset("mine"), "preset must be paper, got 'mine'"),
        (
            lambda: PrunedCache(tiny_model().config, Replay(), keep=9, positions=RemoteGap()),
            "positions must be 'original' with Replay",
        ),
    ],
)
def test_wrong_settings_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
