import functools
from dataclasses import replace

import oracle
import pytest
import torch
from helpers import tiny_model

from kvcompress import GlobalTopK, IterativeCache, PrunedCache, QuantizedCache, read
from kvcompress.budgets import AdaKV
from kvcompress.ops.softmax import Softmax
from kvcompress.positions import RotaryTables
from kvcompress.pruners import (
    H2O,
    TOVA,
    Candidates,
    CenterOfGravity,
    ExpectedAttention,
    KeyNorm,
    Random,
    SnapKV,
    StreamingLLM,
)


def offer(count=60, chunk=20, guide=0, heads=2, group=2):
    queries = torch.randn(1, heads * group, chunk + guide, 16)
    keys = torch.randn(1, heads, count + guide, 16)
    return Candidates(queries, keys, count, chunk, guide, Softmax(0.25))


def assert_valid(chosen, heads, keep, count):
    assert chosen.shape == (heads, keep)
    assert chosen.dtype == torch.int32
    assert (chosen[:, 1:] > chosen[:, :-1]).all()
    assert chosen.min() >= 0
    assert chosen.max() < count


@pytest.mark.parametrize("keep", [1, 2, 3, 10, 35, 59])
@pytest.mark.parametrize("sinks", [0, 2])
def test_snapkv_keeps_window_sinks_and_best(keep, sinks):
    candidates = offer()
    pruner = SnapKV(window=8, num_sink_tokens=sinks)
    chosen = pruner.select(candidates, keep)
    assert_valid(chosen, 2, keep, 60)
    s = min(sinks, keep)
    W = min(8, keep - s)
    expected = [set(range(s)) | set(range(60 - W, 60)) for _ in range(2)]
    if W:
        scores = oracle.window_scores(candidates.queries[:, :, -W:], candidates.keys, scale=0.25)[0]
        for h in range(2):
            rest = [t for t in scores[h].argsort(descending=True).tolist() if t >= s]
            expected[h] |= set(rest[: keep - s - W])
    assert [set(row.tolist()) for row in chosen] == expected


@pytest.mark.parametrize("guide_reduce", ["max", "mean"])
def test_guided_snapkv_lets_the_guide_choose(guide_reduce):
    candidates = offer(guide=6)
    chosen = SnapKV(window=4, guide_kernel_size=3, guide_reduce=guide_reduce).select(candidates, 15)
    scores = oracle.window_scores(
        candidates.queries[:, :, -6:], candidates.keys, scale=0.25, reduce=guide_reduce, pooling="max", kernel_size=3
    )[0]
    assert torch.equal(chosen[:, :11], oracle.select_topk(scores[:, :56], 11))
    assert chosen[:, 11:].tolist() == [[56, 57, 58, 59]] * 2


def test_a_key_that_the_guide_asks_for_is_kept_with_what_follows():
    candidates = offer(count=200, chunk=20, guide=3)
    candidates.keys[0, :, 70] = 8 * candidates.queries[0, ::2, -1]
    chosen = SnapKV(window=4).select(candidates, 20)
    for row in chosen:
        assert set(range(70, 78)) <= set(row.tolist())  # half of the pooling width


@pytest.mark.parametrize(("keep", "expected"), [(3, [0, 1, 2]), (4, [0, 1, 2, 3]), (6, [0, 1, 2, 3, 58, 59])])
def test_streaming_keeps_first_and_last(keep, expected):
    chosen = StreamingLLM(num_sink_tokens=4).select(offer(), keep)
    assert_valid(chosen, 2, keep, 60)
    assert chosen.tolist() == [expected] * 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SnapKV(window=0), "window must be at least 1, got 0"),
        (lambda: SnapKV(kernel_size=4), "kernel_size must be odd, got 4"),
        (lambda: SnapKV(guide_kernel_size=0), "guide_kernel_size must be at least 1, got 0"),
        (lambda: SnapKV(guide_reduce="median"), "guide_reduce must be one of mean, sum, max"),
        (lambda: SnapKV(num_sink_tokens=-1), "num_sink_tokens must be at least 0, got -1"),
        (lambda: StreamingLLM(num_sink_tokens=-1), "num_sink_tokens must be at least 0, got -1"),
    ],
)
def test_wrong_settings_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# logits of intelllm's first example: rows of one head over 12 keys, two queries; as keys of unit queries they are exact
LOGITS = torch.tensor(
    [[3.5, 2.5, 0.5, 0.2, 1.8, 0.4, 0.0, 1.3, 0.9, 0.6, 1.0, 0.0],
     [0.2, -0.3, 1.4, 1.0, 0.1, 0.3, 1.6, 0.0, 0.2, 3.2, 3.6, 4.0]]
)  # fmt: skip
HEAD_A, HEAD_B = [(0.0, 1.0), (-2.0, -2.0)], [(3.0, 3.0), (3.0, 1.0)]
KEYS = [(2, 0), (1, 0), (-3, 1), (-1, 1), (-2, 0), (2, -2), (0, -1), (-2, 1), (3, -3), (-2, 1), (-3, -3), (3, 2)]


def gravity(**settings):
    return CenterOfGravity(**{"compressed_length": 5, "near_length": 3, "head_length": 2, "window": 2, **settings})


@pytest.mark.parametrize(
    ("order", "keep_head", "stored", "scores"),
    [
        ("local", True, [0, 1, 4, 7, 8, 9, 10, 11], [0.10536, 0.07589, 0.28234, 0.07778, 0.08277, 0.17374, 0.12063]),
        ("global", True, [0, 1, 2, 3, 6, 9, 10, 11], [0.24705, 0.16745, 0.15645, 0.09724, 0.28561, 0.11284, 0.10565]),
        ("local", False, [2, 4, 6, 7, 8, 9, 10, 11], None),
        ("global", False, [2, 3, 4, 6, 7, 9, 10, 11], None),
    ],
)
def test_gravity_of_one_head(order, keep_head, stored, scores):
    queries = torch.eye(16)[None, None, :2]
    keys = torch.zeros(1, 1, 12, 16)
    keys[0, 0, :, :2] = LOGITS.T
    pruner = gravity(order=order, keep_head=keep_head)
    candidates = Candidates(queries, keys, 12, 2, 0, Softmax(1.0))
    if scores is not None:
        torch.testing.assert_close(pruner.scores(candidates, 8)[0, 2:9], torch.tensor(scores), atol=1e-5, rtol=1e-4)
    assert pruner.select(candidates, 8).tolist() == [stored]


@pytest.mark.parametrize(
    ("order", "keep_head", "stored", "scores"),
    [
        ("local", True, [0, 1, 3, 5, 8, 9, 10, 11], [0.20874, 0.49647, 0.10683, 0.32627, 0.08529, 0.23727, 0.33533]),
        ("global", True, [0, 1, 2, 4, 8, 9, 10, 11], [0.57716, 0.23986, 0.47380, 0.16121, 0.14473, 0.29635, 0.46760]),
        ("local", False, [2, 3, 5, 7, 8, 9, 10, 11], None),
        ("global", False, [2, 3, 4, 7, 8, 9, 10, 11], None),
    ],
)
def test_gravity_of_two_query_heads(order, keep_head, stored, scores):
    queries = torch.tensor([[HEAD_A, HEAD_B]])
    keys = torch.tensor([[KEYS]], dtype=torch.float32)
    pruner = gravity(order=order, keep_head=keep_head)
    candidates = Candidates(queries, keys, 12, 2, 0, Softmax(2**-0.5))
    if scores is not None:
        torch.testing.assert_close(pruner.scores(candidates, 8)[0, 2:9], torch.tensor(scores), atol=1e-5, rtol=1e-4)
    assert pruner.select(candidates, 8).tolist() == [stored]


@pytest.mark.parametrize("sizes", [(3, 3, 3), (3, 8, 3), (8, 3, 4), (4, 4, 4), (8, 8, 1)])
def test_a_head_that_must_go_goes_under_every_budget(sizes):
    compressed, near, head = sizes
    pruner = CenterOfGravity(compressed, near, head, keep_head=False, window=1)
    for keep in range(1, compressed + near + 1):
        for count in range(keep + 1, keep + 9):
            ranking = pruner.rank(offer(count=count, chunk=1), keep, recent=near if count % 2 else 0)
            assert ranking.lost == min(head, count - max(ranking.recent, 1))
            assert ranking.keep == min(keep, count - ranking.lost) >= ranking.recent
            assert (ranking.scores[:, : ranking.lost] == float("-inf")).all()
            assert (ranking.scores[:, ranking.lost :] > float("-inf")).all()
            assert (ranking.scores[:, count - ranking.recent :] == float("inf")).all()
            assert pruner.select(offer(count=count, chunk=1), keep).min() >= ranking.lost


def test_gravity_identities():
    candidates = offer(count=60, chunk=20)
    one = Candidates(candidates.queries[:, :1], candidates.keys[:, :1], 60, 20, 0, Softmax(0.25))
    settings = {"compressed_length": 10, "near_length": 10, "head_length": 3}
    local, tail = (CenterOfGravity(**settings, order=order, window=1) for order in ("local", "global"))
    assert torch.equal(local.select(one, 20), tail.select(one, 20))  # one row: both orders choose the same
    settings["head_length"] = 0
    plain = CenterOfGravity(**settings, order="local", window=10)
    assert torch.equal(plain.select(candidates, 20), SnapKV(window=10, kernel_size=1).select(candidates, 20))
    every = CenterOfGravity(**settings, order="global", window=7).scores(candidates, 20)
    torch.testing.assert_close(every.sum(1), torch.full((2,), 14.0), atol=1e-5, rtol=0)  # each row gives exactly 1
    shared = CenterOfGravity(**settings, window=4, heads="shared").select(candidates, 20)
    assert torch.equal(shared[0], shared[1])


def test_gravity_is_finite_at_large_logits():
    candidates = Candidates(100 * torch.randn(1, 2, 5, 16), 100 * torch.randn(1, 1, 40, 16), 40, 5, 0, Softmax(1.0))
    for order in ("local", "global"):
        assert CenterOfGravity(8, 8, 2, order, window=5).scores(candidates, 16).isfinite().all()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("official", (32, 5, "avg", "sum")),
        ("kvpress", (64, 5, "avg", "mean")),
        ("kvcache-factory", (8, 7, "max", "sum")),
        ("adakv", (32, 7, "max", "mean")),
    ],
)
def test_presets_score_as_those_codes_do(name, settings):
    """The formula of each code, for one query head per KV head, written out."""
    window, kernel, pooling, reduce = settings
    pruner = SnapKV.preset(name, num_sink_tokens=1)
    assert (pruner.window, pruner.kernel_size, pruner.pooling, pruner.reduce) == settings
    assert pruner.num_sink_tokens == 1
    queries, keys = torch.randn(1, 2, 90, 16), torch.randn(1, 2, 90, 16)
    logits = queries[:, :, -window:] @ keys.transpose(2, 3) / 4
    logits[..., -window:] += torch.full((window, window), -1e30).triu(1)
    votes = getattr(logits.softmax(-1)[..., :-window], reduce)(dim=-2)
    pool = torch.nn.functional.avg_pool1d if pooling == "avg" else torch.nn.functional.max_pool1d
    expected = pool(votes, kernel, stride=1, padding=kernel // 2)[0]
    ours = pruner.scores(Candidates(queries, keys, 90, 90, 0, Softmax(0.25)), 85)
    torch.testing.assert_close(ours[:, : 90 - window], expected, atol=1e-6, rtol=1e-5)


def test_h2o_keeps_what_all_queries_ever_paid_attention_to():
    candidates = offer(count=30, chunk=30)
    logits = candidates.queries.view(2, 2, 30, 16) @ candidates.keys[0][:, None].transpose(2, 3) * 0.25
    logits = logits.masked_fill(torch.ones(30, 30, dtype=torch.bool).triu(1), float("-inf"))
    sums = logits.softmax(-1).sum((1, 2))
    torch.testing.assert_close(H2O().votes(candidates), sums, atol=1e-5, rtol=1e-5)
    chosen = H2O(recent_ratio=0.5).select(candidates, 10)
    assert torch.equal(chosen[:, :5], oracle.select_topk(sums[:, :25], 5))
    assert chosen[:, 5:].tolist() == [[25, 26, 27, 28, 29]] * 2


def test_tova_asks_the_last_token_of_all_heads():
    candidates = offer(count=30, chunk=12)
    logits = candidates.queries.view(2, 2, 12, 16)[:, :, -1:] @ candidates.keys[0][:, None].transpose(2, 3) * 0.25
    expected = oracle.select_topk(logits.softmax(-1).sum((0, 1)), 9)
    assert torch.equal(TOVA().select(candidates, 9), expected.expand(2, -1))


def test_key_norm_keeps_the_small_ones():
    candidates = offer()
    assert torch.equal(KeyNorm().select(candidates, 9), oracle.select_topk(-candidates.keys[0].norm(dim=-1), 9))


def test_random_is_the_same_for_the_same_seed_and_differs_by_layer():
    candidates = offer()
    first = Random(seed=3).select(candidates, 20)
    assert torch.equal(first, Random(seed=3).select(candidates, 20))
    assert not torch.equal(first, Random(seed=4).select(candidates, 20))
    assert not torch.equal(first, Random(seed=3).select(replace(candidates, layer=1), 20))
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("rope", [{}, {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}])
@pytest.mark.parametrize(("use_covariance", "use_value_norm"), [(True, True), (False, True), (True, False)])
def test_expected_attention_as_its_formula(use_covariance, use_value_norm, rope):
    config = tiny_model(**({"rope_parameters": rope} if rope else {}))
    rotary = RotaryTables(config.model.rotary_emb)
    queries, keys, values = torch.randn(1, 4, 40, 16), torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    pruner = ExpectedAttention(8, 3, use_covariance, use_value_norm, epsilon=0.01)
    candidates = Candidates(
        queries, keys, 40, 40, 0, Softmax(0.25), values=values, unrotated=queries, position=40, rotary=rotary
    )
    scores = pruner.scores(candidates, 20)
    # kvpress: matrices of rotation, their mean, mean and covariance of the queries through it
    inverse = rotary._module.inv_freq.float()
    angles = torch.cat([torch.arange(40, 48)[:, None] * inverse] * 2, -1)
    half = torch.zeros(16, 16)
    half[8:, :8], half[:8, 8:] = torch.eye(8), -torch.eye(8)
    turn = (angles.cos()[:, :, None] * torch.eye(16) + angles.sin()[:, :, None] * half).mean(0)
    turn = turn * config.model.rotary_emb.attention_scaling
    expected = torch.zeros(2, 37)
    for h in range(4):
        sample = queries[0, h, 3:]
        mean, centred = turn @ sample.mean(0), (sample - sample.mean(0)) @ turn.T
        logits = keys[0, h // 2, 3:] @ mean / 4
        if use_covariance:
            spread = centred.T @ centred / 37
            logits = logits + torch.einsum("ti,ij,tj->t", keys[0, h // 2, 3:], spread, keys[0, h // 2, 3:]) / 32
        expected[h // 2] += logits.softmax(-1) / 2
    expected = expected + 0.01
    if use_value_norm:
        expected = expected * values[0, :, 3:].norm(dim=-1)
    torch.testing.assert_close(scores[:, 3:], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: H2O(recent_ratio=1.5), "recent_ratio must be between 0 and 1, got 1.5"),
        (lambda: TOVA(num_sink_tokens=-1), "num_sink_tokens must be at least 0, got -1"),
        (lambda: CenterOfGravity(near_length=0), "near_length must be at least 1, got 0"),
        (lambda: CenterOfGravity(8, 8, 9, window=1), "head_length must be between 0 and compressed_length = 8, got 9"),
        (lambda: CenterOfGravity(8, 8, 1, window=9), "window must be between 1 and near_length = 8, got 9"),
        (lambda: CenterOfGravity(order="tail"), "order must be one of local, global, got 'tail'"),
        (lambda: CenterOfGravity(heads="all"), "heads must be one of per_kv_head, shared, got 'all'"),
        (lambda: ExpectedAttention(future_positions=0), "future_positions must be at least 1, got 0"),
        (lambda: ExpectedAttention(epsilon=-1.0), "epsilon must be at least 0, got -1.0"),
        (lambda: SnapKV.preset("mine"), "preset must be one of official, kvpress, kvcache-factory, adakv, got 'mine'"),
        (lambda: SnapKV(pooling="min"), "pooling must be one of avg, max, got 'min'"),
    ],
)
def test_wrong_settings_of_the_others_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_name_of_kvpress_is_answered_with_ours():
    ours = r"is keep = 1 - compression_ratio here: PrunedCache\(config, SnapKV\(\), keep=0.3\)"
    for made in (SnapKV, functools.partial(SnapKV.preset, "kvpress")):
        with pytest.raises(TypeError, match=rf"SnapKV has no 'compression_ratio'; .* {ours}"):
            made(compression_ratio=0.7)
    with pytest.raises(
        TypeError, match=r"SnapKV has no 'window_size'; known are window, .* window_size is window here"
    ):
        SnapKV(window_size=32)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        SnapKV(nothing=1)
    ours = r"is keep = 1 - compression_ratio here: PrunedCache\(config, SnapKV\(\), GlobalTopK\(\), keep=0.5\)"
    with pytest.raises(TypeError, match=rf"GlobalTopK has no 'compression_ratio'; known are floor; .* {ours}"):
        GlobalTopK(compression_ratio=0.5)
    with pytest.raises(TypeError, match=r"AdaKV has no 'alpha_safeguard'; .* is floor here"):
        AdaKV(alpha_safeguard=0.5)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda config: PrunedCache(config, SnapKV(), kep=0.5),
            "has no 'kep': did you mean keep?",
        ),
        (lambda config: QuantizedCache(config, dtpye="int8"), "QuantizedCache .* did you mean dtype"),
        (lambda config: IterativeCache(config, memory=64), "no 'memory': did you mean memory_size"),
        (lambda config: SnapKV(widow=8), "SnapKV has no 'widow': did you mean window"),
        (lambda config: AdaKV(flor=0.5), "AdaKV has no 'flor': did you mean floor"),
        (lambda config: read(None, None, "", guides=""), "read has no 'guides': did you mean guide"),
        (lambda config: PrunedCache(config, SnapKV(), nothing=1), "unexpected keyword argument 'nothing'"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_one_that_is_meant(call, said):
    with pytest.raises(TypeError, match=said):
        call(tiny_model().config)


def test_a_pruner_that_is_called_as_a_press_says_where_it_is_given():
    said = r"^SnapKV must be given to a cache, .*: kvcompress.attach\(model\), then past_.*=PrunedCache\(.*SnapKV"
    with pytest.raises(TypeError, match=said), SnapKV()(tiny_model()):
        pass
