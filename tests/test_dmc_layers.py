"""The layers of DMCCache on given queries, keys and values: against loops, in any chunks, padded, by hand."""

import accuracy
import pytest
import torch
from dmc_definition import definition
from helpers import DTYPES, covering, tiny_model
from oracle import visible
from torch import nn

from kvcompress import DMCCache
from kvcompress.caches.passes import CachePass
from kvcompress.dmc import DMCConfig
from kvcompress.dmc.dms import DMSLayer
from kvcompress.hf.facts import Facts, LayerFacts
from kvcompress.ops.softmax import Softmax
from kvcompress.positions import RotaryTables

Hq, Hkv, D = 4, 2, 16
SETTINGS = {
    "plain": {},
    "window 1": {"window": 1},
    "window 2": {"window": 2},
    "window 12": {"window": 12, "omega_eps": 2.0**-7},
    "uniform": {"omega": "uniform"},
    "mean sigmoid": {"gqa_omega": "mean_sigmoid"},
    "first": {"gqa_omega": "first", "decision_margin": 0.5},
    "one decision": {"share_heads": "mean"},
    "first head decides": {"share_heads": "head0"},
    "first neuron": {"neuron": 0, "shift": 4.0},
    "dms 0": {"mode": "dms", "dms_window": 0},
    "dms 1": {"mode": "dms", "dms_window": 1, "dms_scale": 1.5},
    "dms 7": {"mode": "dms", "dms_window": 7},
    "dms 500": {"mode": "dms", "dms_window": 500},
    "dms own 0": {"mode": "dms", "dms_window": 0, "dms_decides": "own"},
    "dms own 7": {"mode": "dms", "dms_window": 7, "dms_decides": "own"},
    "dms one decision": {"mode": "dms", "dms_window": 3, "share_heads": "mean"},
}
settings = pytest.mark.parametrize("config", [DMCConfig(**x) for x in SETTINGS.values()], ids=SETTINGS)
CHUNKS = {"at once": [60], "one by one": [1] * 60, "mixed": [1, 1, 17, 1, 3, 25, 1, 11]}


class Rotation(nn.Module):
    rope_type, attention_scaling = "default", 1.0

    def __init__(self, inv_freq):
        super().__init__()
        self.register_buffer("inv_freq", inv_freq)

    def forward(self, x, positions):
        angles = positions[..., None] * self.inv_freq
        return angles.cos(), angles.sin()


FREQUENCIES = 100.0 ** (-torch.arange(D // 2) / (D // 2))


def new_layer(config, frequencies=FREQUENCIES, heads=(Hq, Hkv), head_dim=D, **options):
    model_config = tiny_model(
        num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=head_dim, num_hidden_layers=1
    ).config
    model_config.kvcompress = config.to_dict()
    cache = DMCCache(model_config, **{"page_size": 4, **options})
    rotary = RotaryTables(Rotation(frequencies), torch.arange(len(frequencies)))
    cache.facts = Facts({0: LayerFacts(0, *heads, head_dim, head_dim, rotary, rotary)})
    return cache


def feed(cache, q, k, v, counts=None):
    """One call of the layer with all these columns; counts: real ones of each sequence."""
    B, S = q.shape[0], q.shape[2]
    step = CachePass(cache.facts, cache.layers, counts or [S] * B, S)
    out = step.attend(0, q, k, v, Softmax(q.shape[3] ** -0.5))
    cache.end(step, None)
    return out


def read(cache, q, k, v, chunks):
    out, at = [], 0
    for chunk in chunks:
        out.append(feed(cache, *(x[:, :, at : at + chunk] for x in (q, k, v))))
        at += chunk
    assert at == q.shape[2]
    return torch.cat(out, 2)


def projections(B=2, T=60, config=DMCConfig(), dtype=torch.float32, seed=0):  # noqa: B008
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(B, Hq, T, D, generator=generator)
    k, v = (torch.randn(B, Hkv, T, D, generator=generator) for _ in range(2))
    q[..., config.neuron] -= config.shift
    scale = config.dms_scale if config.mode == "dms" else 1.0
    # not every sequence of decisions has runs longer than the window of 12
    lean = torch.where(torch.arange(T) % 40 < 20, 2.5, -1.0)
    decide = config.shift + lean + 2 * torch.randn(B, Hkv, T, generator=generator)
    k[..., config.neuron] = decide / scale
    return tuple(x.to(dtype) for x in (q, k, v))


def held(layer):
    """(keys, values) of each row, newest last; of DMS in the order of tokens."""
    k, v = layer.pool.gather(max(layer.pool.counts))
    rows = [(k[r, :n], v[r, :n]) for r, n in enumerate(layer.pool.counts)]
    if isinstance(layer, DMSLayer):
        heads = layer.heads
        for r, (keys, values) in enumerate(rows):
            total = layer.next[r // heads]
            slots = torch.arange(max(total - layer.size, 0), total) % layer.size
            rows[r] = tuple(
                torch.cat([x, near[r, slots]]) for x, near in zip((keys, values), layer.ring.arrays[:2], strict=True)
            )
    return rows


def check(cache, out, q, k, v, tolerance=2e-5):
    """Outputs and what is held against the definition, for each sequence."""
    layer = cache.layers[0]
    for b in range(q.shape[0]):
        expected = definition(q[b], k[b], v[b], cache.dmc, FREQUENCIES)
        assert 0.1 < expected.alpha.float().mean() < 0.9
        torch.testing.assert_close(out[b].double(), expected.out, rtol=tolerance, atol=tolerance)
        assert layer.stored_lengths()[b] == [lengths[-1] for lengths in expected.lengths]
        for h, row in enumerate(expected.rows):
            for found, wanted in zip(held(layer)[b * Hkv + h], zip(*row.entries, strict=True), strict=True):
                torch.testing.assert_close(found.double(), torch.stack(wanted), rtol=tolerance, atol=tolerance)
            if cache.dmc.mode == "dmc" and cache.dmc.window is None:
                z = sum(token[0] for token in row.segment)
                mean = sum(token[0] * token[1] for token in row.segment) / z
                r = b * Hkv + h
                assert int(layer.tail.counts[r]) == len(row.segment)
                torch.testing.assert_close(float(layer.tail.weights[r, 0]), z, rtol=1e-5, atol=0)
                torch.testing.assert_close(layer.tail.keys[r, 0].double(), mean, rtol=tolerance, atol=tolerance)


@settings
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_layers_do_what_the_algorithm_says(config, chunks):
    q, k, v = projections(config=config)
    cache = new_layer(config)
    check(cache, read(cache, q, k, v, chunks), q, k, v)


@settings
def test_padding_of_any_call_changes_nothing(config):
    """Three sequences whose tokens come in calls with different numbers of padded columns, none at all included."""
    calls = [(9, 4, 0), (1, 0, 0), (6, 17, 3), (1, 1, 1), (0, 5, 20), (1, 1, 1), (30, 21, 36)]
    q, k, v = projections(B=3, T=64, config=config)
    lengths = [sum(x) for x in zip(*calls, strict=True)]
    cache, at = new_layer(config), [0, 0, 0]
    out = [[], [], []]
    for counts in calls:
        S = max(counts)
        padded = []
        for x in (q, k, v):
            columns = torch.full((3, x.shape[1], S, D), 77.0)
            for b, count in enumerate(counts):
                columns[b, :, S - count :] = x[b, :, at[b] : at[b] + count]
            padded.append(columns)
        result = feed(cache, *padded, counts)
        for b, count in enumerate(counts):
            out[b].append(result[b, :, S - count :])
        at = [a + count for a, count in zip(at, counts, strict=True)]
    assert cache.seen_lengths() == lengths
    layer = cache.layers[0]
    for b, n in enumerate(lengths):
        expected = definition(q[b, :, :n], k[b, :, :n], v[b, :, :n], config, FREQUENCIES)
        torch.testing.assert_close(torch.cat(out[b], 1).double(), expected.out, rtol=2e-5, atol=2e-5)
        assert layer.stored_lengths()[b] == [row[-1] for row in expected.lengths]
        alone = new_layer(config)
        read(alone, *(x[b : b + 1, :, :n] for x in (q, k, v)), [counts[b] for counts in calls if counts[b]])
        for h in range(Hkv):
            for x, y in zip(held(layer)[b * Hkv + h], held(alone.layers[0])[h], strict=True):
                torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "config", "chunks"),
    covering(DTYPES, [DMCConfig(), DMCConfig(window=12), DMCConfig(mode="dms", dms_window=5)], CHUNKS.values()),
)
def test_every_dtype_is_within_its_roundings(dtype, config, chunks):
    q, k, v = projections(B=1, config=config, dtype=dtype)
    cache = new_layer(config)
    out = read(cache, q, k, v, chunks)
    expected = definition(q[0], k[0], v[0], config, FREQUENCIES)
    assert cache.layers[0].stored_lengths()[0] == [lengths[-1] for lengths in expected.lengths]
    # what attention to as many tokens may lose, where rotated queries and keys are rounded before it: means are smaller
    softmax = accuracy.Softmax(q, k, visible(q.shape[2], q.shape[2])[:, None])
    products = softmax.queries.square() @ softmax.keys.square().mT
    softmax.relative += 4 * accuracy.unit(dtype) * softmax.scale * (2 * products).sqrt()
    # values are rounded where they are means
    allowed = softmax.out_error(v, dtype) + accuracy.unit(dtype) * expected.out.abs()
    assert (out[0].double() - expected.out).abs().max() <= allowed.max()


# ---- worked out by hand: section 12 A of the method ----

Q = [[1, 0, 1], [0, 1, -1], [1, 1, 0], [-1, 0, 1], [0.5, 1, 0.5], [1, -1, 1]]
K = [[1, 0, -1], [1, 3, 2], [1, -1, 2], [0, 1, 1], [5, 1, -4], [-1, 2, 0]]
V = [[3, 0, 0, 1], [0, 3, 0, 1], [0, 1, 2, 1], [0, 0, 5, 0], [5, 0, 0, 5], [1, 2, 3, 4]]
OUT = [[3, 0, 0, 1], [2, 1, 0, 1], [1, 1, 1, 1], [0.207268, 0.207268, 4.170927, 0.207268],
       [2.445151, 0.277424, 1.722576, 2.445151], [1.280369, 1.182915, 1.786383, 2.249667]]  # fmt: skip
KEYS = [[-1.325444, 0, 0.493151, 0], [-3.474536, 0.999200, -0.963120, 0], [-0.283662, 1.997501, 0.958924, 0]]
VALUES = [[1, 1, 1, 1], [3, 0, 2, 3], [1, 2, 3, 4]]
LENGTHS = [1, 1, 1, 2, 2, 3]


def example():
    """q, k, v [1, 1, 6, 4]."""
    importance = torch.tensor([0.5, 0.25, 0.75, 0.5, 0.75, 0.5]).logit() - 5
    decide = torch.tensor([6.0, 5.5, 7.0, 4.5, 5.25, 5.0])
    q, k = (torch.cat([torch.tensor(x).float(), y[:, None]], 1) for x, y in ((Q, importance), (K, decide)))
    return tuple(x[None, None] for x in (q, k, torch.tensor(V).float()))


def example_layer(config, rotate=True):
    return new_layer(config, torch.tensor([1.0, 0.01]) * rotate, heads=(1, 1), head_dim=4, page_size=2)


@pytest.mark.parametrize("chunks", [[1] * 6, [6], [2, 4], [3, 1, 2]])
def test_the_worked_example(chunks):
    q, k, v = example()
    cache = example_layer(DMCConfig())
    at = 0
    for chunk in chunks:
        part = slice(at, at + chunk)
        out = feed(cache, *(x[:, :, part] for x in (q, k, v)))
        torch.testing.assert_close(out[0, 0], torch.tensor(OUT)[part], rtol=0, atol=2e-6)
        at += chunk
        assert cache.stored_lengths() == [[[LENGTHS[at - 1]]]]
    keys, values = held(cache.layers[0])[0]
    torch.testing.assert_close(keys, torch.tensor(KEYS), rtol=0, atol=2e-6)
    torch.testing.assert_close(values, torch.tensor(VALUES).float(), rtol=0, atol=2e-6)
    assert cache.compression_ratio() == 2 and cache.compression_ratios() == [[2.0]]


@pytest.mark.parametrize("chunks", [[1] * 6, [6], [2, 4]])
def test_the_worked_example_without_rotation_and_with_a_window(chunks):
    q, k, v = example()
    out = read(example_layer(DMCConfig(), rotate=False), q, k, v, chunks)
    expected = [[0.377541, 0.377541, 3.489837, 0.377541], [2.124353, 0.437823, 1.562177, 2.124353],
                [1.507432, 0.802896, 1.366940, 1.677268]]  # fmt: skip
    torch.testing.assert_close(out[0, 0, 3:], torch.tensor(expected), rtol=0, atol=2e-6)
    cache = example_layer(DMCConfig(window=2))
    out = read(cache, q, k, v, chunks)
    torch.testing.assert_close(out[0, 0, 2], torch.tensor([0, 1.5, 1.5, 1]), rtol=0, atol=2e-6)
    last = torch.tensor([0.913163, 1.440166, 2.181190, 2.534519])
    torch.testing.assert_close(out[0, 0, 5], last, rtol=0, atol=2e-6)


@pytest.mark.parametrize("chunks", [[1] * 6, [6], [2, 4], [5, 1]])
def test_what_dms_sees_in_the_worked_example(chunks):
    q, k, _ = example()
    v = torch.eye(6)[None, None, :, :4] + torch.tensor([0.0, 0, 0, 0, 1, 10])[:, None]  # no two alike
    seen = [{0}, {0, 1}, {1, 2}, {2, 3}, {2, 3, 4}, {2, 4, 5}]
    cache = example_layer(DMCConfig(mode="dms", dms_window=1))
    out = read(cache, q, k, v, chunks)
    angles = torch.arange(6)[:, None] * torch.tensor([1.0, 0.01])
    for x in (q, k):
        x[..., 3] = 0
    turn = [torch.cat([x[..., :2] * angles.cos() - x[..., 2:] * angles.sin(),
                       x[..., 2:] * angles.cos() + x[..., :2] * angles.sin()], -1) for x in (q, k)]  # fmt: skip
    for x in turn:
        x[..., 3] = 0
    mask = torch.tensor([[j in keys for j in range(6)] for keys in seen])
    expected = torch.nn.functional.scaled_dot_product_attention(*turn, v, attn_mask=mask)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert cache.stored_lengths() == [[[3]]]
    torch.testing.assert_close(held(cache.layers[0])[0][1], v[0, 0, [2, 4, 5]])


# ---- what must always hold ----


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("window", [None, 12])
def test_where_nothing_merges_every_token_is_an_entry(chunks, window):
    config = DMCConfig(window=window)
    q, k, v = projections(config=config)
    k[..., -1] = -100
    cache = new_layer(config)
    out = read(cache, q, k, v, chunks)
    assert cache.stored_lengths() == [[[60] * Hkv] * 2]
    live = torch.ones(D)
    live[-1] = 0
    turned = [cache.facts[0].key_rotary.rotate(x * live, None, 60, [60]) * live for x in (q, k)]
    dense = torch.nn.functional.scaled_dot_product_attention(*turned, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, dense, rtol=1e-5, atol=1e-5)
    dms = new_layer(DMCConfig(mode="dms", dms_window=2))
    torch.testing.assert_close(read(dms, q, k, v, chunks), out, rtol=1e-5, atol=1e-5)
    assert dms.stored_lengths() == cache.stored_lengths()
    k[..., -1] = 100  # a window that holds all is plain attention too
    dms = new_layer(DMCConfig(mode="dms", dms_window=59))
    torch.testing.assert_close(read(dms, q, k, v, chunks), out, rtol=1e-5, atol=1e-5)
    assert dms.stored_lengths() == cache.stored_lengths()


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_where_all_merge_there_is_one_entry_the_running_mean(chunks):
    q, k, v = projections()
    k[..., -1] = 100
    cache = new_layer(DMCConfig())
    out = read(cache, q, k, v, chunks)
    assert cache.stored_lengths() == [[[1] * Hkv] * 2]
    omega = (q[..., -1].unflatten(1, (Hkv, 2)).mean(2) + 5).sigmoid()[..., None]
    mean = (omega * v).cumsum(2) / omega.cumsum(2)
    torch.testing.assert_close(out, mean.repeat_interleave(2, 1), rtol=1e-5, atol=1e-5)


@settings
def test_later_tokens_change_no_earlier_output_and_no_older_entry(config):
    q, k, v = projections(config=config)
    cache = new_layer(config)
    feed(cache, *(x[:, :, :30] for x in (q, k, v)))
    before = held(cache.layers[0])
    read(cache, *(x[:, :, 30:] for x in (q, k, v)), [1] * 4 + [26])
    after = held(cache.layers[0])
    for (old, _), (new, _) in zip(before, after, strict=True):
        if config.mode == "dmc":
            assert torch.equal(old[:-1], new[: len(old) - 1])  # the newest alone may change
        else:
            assert all((new == key).all(-1).any() or i >= len(old) - config.dms_window - 1 for i, key in enumerate(old))
    other = new_layer(config)
    edited = [x.clone() for x in (q, k, v)]
    for x in edited:
        x[:, :, 30:] = torch.randn_like(x[:, :, 30:])
    first, second = read(new_layer(config), q, k, v, [60]), read(other, *edited, [60])
    torch.testing.assert_close(first[:, :, :30], second[:, :, :30], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(first[:, :, 30:], second[:, :, 30:], atol=0.1)


@settings
def test_the_first_decision_and_the_size_of_the_weights_are_immaterial(config):
    q, k, v = projections(config=config)
    out = read(new_layer(config), q, k, v, [60])
    k = k.clone()
    k[:, :, 0, config.neuron] = 2 * config.shift - k[:, :, 0, config.neuron]
    if config.share_heads != "mean":
        assert torch.equal(read(new_layer(config), q, k, v, [60]), out)


@settings
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_pages_are_those_that_the_entries_need(config, chunks):
    q, k, v = projections(config=config)
    cache = new_layer(config)
    read(cache, q, k, v, chunks)
    pool = cache.layers[0].pool
    assert pool.pages_in_use() == sum(-(-count // 4) for count in pool.counts)
    pages = pool.pages_in_use() * 4 * 2 * D * 4 + sum(x.nbytes for x in (pool.block_table, pool.lengths))
    assert cache.nbytes() == pages + sum(x.nbytes for x in cache.layers[0].state())
    stored = [sum(row) for row in zip(*cache.stored_lengths()[0], strict=True)]
    assert cache.compression_ratios() == [[2 * 60 / count for count in stored]]
    assert cache.compression_ratio() == 2 * 60 * Hkv / sum(stored)
    if len(chunks) == 1:  # what merges takes no page even while a prompt is read
        assert pool.store.pages == pool.pages_in_use()


@settings
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_decisions_are_remembered_where_asked_for(config, chunks):
    q, k, v = projections(config=config)
    cache = new_layer(config, track=True)
    read(cache, q, k, v, chunks)
    for b in range(2):
        expected = definition(q[b], k[b], v[b], config, FREQUENCIES)
        assert torch.equal(cache.decisions(0)[b], expected.alpha)
    with pytest.raises(ValueError, match="only with track=True"):
        new_layer(config).decisions(0)


def test_decisions_of_sequences_of_unequal_length_end_together():
    q, k, v = projections(T=12)
    cache = new_layer(DMCConfig(), track=True)
    feed(cache, q, k, v, (12, 5))
    feed(cache, *(x[:, :, :4] for x in (q, k, v)), (1, 4))
    cache.layers[0].select([1, 0, 1], 2)
    found = cache.decisions(0)
    assert found.shape == (3, Hkv, 13)
    hard = k[..., -1] > 5
    short = torch.cat([hard[1, :, 7:], hard[1, :, :4]], 1)
    short[:, 0] = False
    long = torch.cat([hard[0], hard[0, :, 3:4]], 1)
    long[:, 0] = False
    assert torch.equal(found[1], long)
    for b in (0, 2):
        assert torch.equal(found[b, :, 4:], short) and not found[b, :, :4].any()


def test_an_extreme_logit_is_finite():
    q, k, v = projections()
    k[..., -1] = torch.where(torch.rand(2, Hkv, 60) < 0.5, 1e4, -1e4)
    q[..., -1] = torch.where(torch.rand(2, Hq, 60) < 0.5, 1e4, -1e4)
    for config in (DMCConfig(), DMCConfig(window=12), DMCConfig(mode="dms", dms_window=3)):
        for chunks in CHUNKS.values():
            cache = new_layer(config)
            check(cache, read(cache, q, k, v, chunks), q, k, v)
