"""ALiBi as a rotation of a few more coordinates: what it adds to products, and caches that give positions anew."""

import dataclasses

import pytest
import torch
from helpers import DTYPES, forward, random_ids

import kvcompress
from benchmarks.quality.parts.families_checks import TOLERANCE, difference
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from kvcompress import IterativeCache, PrunedCache, QuantizedCache, RemoteGap, StreamingCache, attach, ops, pruners
from kvcompress.dmc import DMCConfig
from kvcompress.hf.alibi import MOST, AlibiTables
from kvcompress.hf.attach import base_model, facts_of
from kvcompress.hf.facts import LayerFacts
from kvcompress.positions import Unrotated
from kvcompress.pruners import KeyDiff, SnapKV

SLOPES = torch.tensor([0.84, 0.5, 2**-8 * 3, 0.0039])
PLACES = torch.tensor([[0, 1, 255, 256, 257, 767, 768, 1000, 4097, 70_001]], dtype=torch.int32)


def facts_with(scale, D=16):
    tables = AlibiTables(SLOPES / scale)
    return LayerFacts(0, 4, 2, D, D, tables, tables)


def framed(x, facts, places, *, keys):
    return facts.key_rotary.rotate(facts.framed(x, keys=keys), places, MOST, [1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_biased_by_the_distance(dtype):
    scale, T = 1 / 11.3, PLACES.shape[1]
    facts, zeros = facts_with(scale), torch.zeros(1, 4, T, 16, dtype=dtype)
    q, k = (framed(zeros, facts, PLACES, keys=keys).double() for keys in (False, True))
    # of each query, between neighbouring keys: what is the same for all of them changes no softmax
    found = scale * (q @ k.mT).diff(dim=-1)
    want = (SLOPES.double()[:, None] * PLACES.double().diff())[None, :, None].expand_as(found)
    least = 2.0 ** {torch.float32: -20, torch.float16: -15, torch.bfloat16: -15}[dtype]
    assert bool(((found - want).abs() <= least * want.abs() + 1e-4).all())
    assert q.shape[-1] == facts.size == 24


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_move_stand_where_they_went(dtype):
    facts = facts_with(1.0)
    k = torch.randn(1, 2, PLACES.shape[1], 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    here = framed(k, facts, PLACES, keys=True)
    for by in (1, 255, 300, 5000):
        there = framed(k, facts, PLACES + by, keys=True)
        distance = torch.full_like(PLACES, by)
        assert torch.equal(facts.key_rotary.move_on(here, distance, MOST, 1), there)
        assert torch.equal(facts.key_rotary.move_back(there, distance, MOST, 1), here)
    assert torch.equal(facts.key_rotary.unrotate(here, MOST, [1], PLACES), facts.framed(k, keys=True))
    assert torch.equal(facts.own(here), k)


def test_gradients_go_through_both():
    facts = facts_with(0.25)
    x = torch.randn(1, 4, 10, 16, requires_grad=True, generator=torch.Generator().manual_seed(0))
    framed(x, facts, PLACES, keys=False).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_attention_is_that_of_a_bias():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 40, 16, generator=generator) for _ in range(3))
    facts = facts_with(0.25)
    places = torch.arange(40, dtype=torch.int32)[None]
    out = ops.attention(
        framed(q, facts, places, keys=False), framed(k, facts, places, keys=True), facts.padded(v), scale=0.25
    )[0][..., :16]
    bias = SLOPES[:, None, None] * (torch.arange(40) - torch.arange(40)[:, None])
    mask = bias.masked_fill(bias > 0, -torch.inf)[None]
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.25)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def test_positions_that_16_bits_do_not_tell_apart_are_refused():
    with pytest.raises(ValueError, match="tokens of a model with ALiBi stand below position 131,072, got 131,073"):
        AlibiTables(SLOPES).tables(MOST + 1, 1, torch.device("cpu"))
    assert len(AlibiTables(SLOPES).tables(MOST, 1, torch.device("cpu"))[0]) == MOST


# ---- models ----


@pytest.mark.parametrize(
    ("name", "slopes"),
    [
        ("bloom/six_heads", [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        ("mpt/alibi", [2**-2, 2**-4, 2**-6, 2**-8]),
        ("falcon/alibi", [2**-4, 2**-6, 2**-8, 2**-10]),  # of products before they are scaled, by 1/4 here
        ("falcon/alibi_eager", [2**-3, 2**-5, 2**-7, 2**-9]),  # transformers adds them twice
    ],
)
def test_slopes_are_the_familys(name, slopes):
    model = CONFIGURATIONS[name].model()
    with attach(model):
        facts = facts_of(base_model(model))
    assert len(facts) == 2 and facts.takes_positions
    for own in facts.values():
        torch.testing.assert_close(own.query_rotary._slopes, torch.tensor(slopes) * own.head_dim**0.5)


def one_layer(seed=0):
    """Keys are of their tokens alone; one KV head, so that there is one list of them; four slopes."""
    configuration = CONFIGURATIONS["falcon/alibi"]
    settings = configuration.settings | {"num_hidden_layers": 1}
    return dataclasses.replace(configuration, settings=settings).model(seed)


STAYS, PROMPT = 9, 30
RENUMBERING = {
    "contiguous": lambda config: PrunedCache(config, SnapKV(window=4), keep=STAYS, positions="contiguous", page_size=4),
    "iterative": lambda config: IterativeCache(config, memory_size=STAYS, chunk_size=8),
    "every": lambda config: IterativeCache(config, memory_size=STAYS, chunk_size=8, every=4),
    "streaming": lambda config: StreamingCache(config, window_size=7, num_sink_tokens=2),
}


@pytest.mark.parametrize("cache", RENUMBERING)
def test_a_token_sees_what_stays_as_a_prompt_of_its_own(cache):
    model, ids = one_layer(), random_ids(PROMPT + 30)
    with attach(model):
        held = RENUMBERING[cache](model.config)
        kvcompress.prefill(model, ids[:, : PROMPT + 1], held)
        for i in range(PROMPT, ids.shape[1]):
            new = forward(model, ids[:, i : i + 1], past_key_values=held)[:, -1]
            kept = held.kept_positions()[0][0][0]
            assert int(kept[-1]) == i and len(kept) < i + 1
            if cache == "every" and len(kept) == STAYS:  # what was dropped behind it was still seen by it
                continue
            dense = forward(model, ids[:, kept], use_cache=False)[:, -1]
            assert difference(new, dense) <= 2 * TOLERANCE, i


def test_a_gap_moves_what_is_far():
    model, ids, gap = one_layer(), random_ids(PROMPT + 6), 20
    with attach(model):
        positions = RemoteGap(gap, headroom=8)
        held = PrunedCache(model.config, SnapKV(window=4), keep=STAYS, positions=positions, page_size=4)
        kvcompress.prefill(model, ids[:, : PROMPT + 1], held)
        new = forward(model, ids[:, PROMPT : PROMPT + 1], past_key_values=held)[:, -1]
        kept = held.kept_positions()[0][0][0]
        far = len(kept) - 5  # the last 4 of the prompt and the new one are near
        filled = torch.cat([ids[:, kept[:far]], torch.zeros(1, gap, dtype=torch.long), ids[:, kept[far:]]], 1)
        hidden = torch.arange(filled.shape[1])
        hidden = (hidden >= far) & (hidden < far + gap)

        def hide(module, args, given):
            mask = given["attention_mask"].masked_fill(hidden, torch.finfo(torch.float32).min)
            return args, given | {"attention_mask": mask}

        module = base_model(model).h[0].self_attention
        hook = module.register_forward_pre_hook(hide, with_kwargs=True)
        dense = forward(model, filled, use_cache=False)[:, -1]
        hook.remove()
    assert difference(new, dense) <= 2 * TOLERANCE


@pytest.mark.parametrize("name", ["bloom/six_heads", "mpt/alibi", "falcon/alibi"])
def test_a_left_padded_prompt_is_read_in_chunks(name):
    model, ids = CONFIGURATIONS[name].model(), random_ids(24, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with attach(model):
        cache = kvcompress.prefill(model, ids, IterativeCache(model.config, memory_size=64, chunk_size=7), mask)
        ours = forward(model, ids[:, -1:], past_key_values=cache, attention_mask=mask)
    alone = [forward(model, ids[b : b + 1, first:], use_cache=False)[:, -1:] for b, first in enumerate((9, 0))]
    assert difference(ours, torch.cat(alone)) <= 2 * TOLERANCE


@pytest.mark.parametrize(
    "pruner",
    [KeyDiff(), KeyDiff(rotated=True), pruners.LeverageScore(sketch=None), pruners.LagKV(lag=4), pruners.KeyNorm(),
     pruners.CurDKV(), pruners.RKV(window=2, mix=0.0)],
    ids=lambda pruner: f"{type(pruner).__name__}{getattr(pruner, 'rotated', '')}",
)  # fmt: skip
def test_pruners_of_keys_see_no_positions(pruner):
    """Without slopes such a model's keys are those of one without positions, and what stays is the same."""
    kept = []
    for biased in (True, False):
        model = CONFIGURATIONS["bloom"].model()
        with attach(model):
            facts = facts_of(base_model(model))
            if not biased:
                plain = Unrotated()
                for index, own in list(facts.items()):
                    facts[index] = dataclasses.replace(own, query_rotary=plain, key_rotary=plain)
            cache = PrunedCache(model.config, pruner, keep=STAYS)
            forward(model, random_ids(PROMPT), past_key_values=cache)
            kept.append(cache.kept_positions()[0][0])  # of the first layer, whose keys are the same
    assert all(torch.equal(x, y) for x, y in zip(*kept, strict=True))


@pytest.mark.parametrize(
    "make", [QuantizedCache, lambda config: PrunedCache(config, keep=9, dtype="int8"),
             lambda config: StreamingCache(config, dtype="k8v4")],
)  # fmt: skip
def test_codes_are_refused(make):
    model = CONFIGURATIONS["bloom"].model()
    with attach(model):
        cache = make(model.config)
        with pytest.raises(
            ValueError, match=r"dtype must be None for BloomModel, got '(int8|k8v4)': its keys hold their"
        ):
            forward(model, random_ids(9), past_key_values=cache)
        assert cache.get_seq_length() == 0


def test_dmc_is_refused():
    model = CONFIGURATIONS["bloom"].model()
    with pytest.raises(ValueError, match=r"BloomModel is not supported by DMC: layer 0 adds positions .*\(ALiBi\)"):
        kvcompress.dmc.convert(model, DMCConfig())


def test_generate_asks_a_model_that_says_it_uses_no_cache():
    configuration = CONFIGURATIONS["mpt/alibi"]
    model = dataclasses.replace(configuration, settings=configuration.settings | {"use_cache": False}).model()
    ids = random_ids(20)
    given = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    dense = model.generate(ids, **given)
    with attach(model):
        assert torch.equal(kvcompress.generate(model, ids, PrunedCache(model.config, keep=64), **given), dense)
