"""Layers whose indexer chooses what a query sees (DeepSeek-V3.2, GLM-5): their index keys beside our rows.

The reference is the dense model, each of whose heads sees those `top` tokens, of what its row holds, that the family's
own indexer ranks highest.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from helpers import forward, left_padded, needs_transformers
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

import kvcompress
from benchmarks.quality.parts.families_checks import TOLERANCE, difference
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from kvcompress import AdaKV, IterativeCache, PrunedCache, QuantizedCache, QuestCache, StreamingCache
from kvcompress.caches.dense import DenseCache
from kvcompress.dmc import DMCConfig
from kvcompress.hf import indexing
from kvcompress.hf.attach import base_model, facts_of
from kvcompress.hf.seam import _before
from kvcompress.pod import PoDConfig
from kvcompress.pruners import CriticalKV, KeyDiff, SnapKV
from kvcompress.serve.served import check_served

pytestmark = needs_transformers(5, 24)  # whose attention functions get what an indexer chooses
TOP, PROMPT, WHOLE, STAYS = 8, 30, 42, 14
FAMILIES = {  # neighbours rotate, or halves; a layer that goes by the choice of another; sinks, and the end rotates
    "deepseek_v32": {},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    "hy_v4": {"indexer_types": ["full", "shared"]},
}
RANKED = "ranked_by_head"


def made(family="deepseek_v32", **settings):
    configuration = CONFIGURATIONS[family]
    return replace(
        configuration, settings=configuration.settings | {"index_topk": TOP} | FAMILIES[family] | settings
    ).model()


def ids_of(length=WHOLE, batch=2, seed=1):
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def read(model, ids, cache, sizes):
    """Logits of consecutive calls, and what they saw: by layer bool [B, Hkv, T, T]."""
    logits, seen, first = [], {}, 0
    for size in sizes:
        held = cache.kept_positions()
        logits.append(forward(model, ids[:, first : first + size], past_key_values=cache))
        for layer, rows in enumerate(held):
            heads = len(cache.kept_positions()[layer][0])
            mask = seen.setdefault(layer, torch.zeros(len(ids), heads, ids.shape[1], ids.shape[1], dtype=torch.bool))
            for b, head in ((b, head) for b in range(len(ids)) for head in range(heads)):
                before = torch.zeros(ids.shape[1], dtype=torch.bool)
                before[rows[b][head] if rows else []] = True
                for query in range(first, first + size):
                    mask[b, head, query] = before
                    mask[b, head, query, first : query + 1] = True
        first += size
    return torch.cat(logits, 1), seen


@contextmanager
def seeing(model, seen, top=TOP):
    """The dense model, whose heads choose of what they have seen. top: None = they see all of it."""

    def attention(module, query, key, value, mask, indices=None, **options):
        shown = seen[module.layer_idx]
        if top is not None:
            ranks = indices.argsort(-1)[:, None].masked_fill(~shown, WHOLE)
            best = ranks.topk(min(top, ranks.shape[-1]), largest=False).indices
            shown = torch.zeros_like(shown).scatter(-1, best, True) & shown
        mask = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)
        return _before(module, "eager")(module, query, key, value, mask, **options)

    AttentionInterface.register(RANKED, attention)
    AttentionMaskInterface.register(RANKED, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    before = model.config._attn_implementation
    indexers = [module for module in model.modules() if hasattr(module, "index_topk")]
    model.set_attn_implementation(RANKED)
    for module in indexers:
        module.index_topk = WHOLE  # it ranks all
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for module in indexers:
            module.index_topk = TOP


def test_the_reference_without_dropping_is_the_dense_model():
    model, ids = made(), ids_of()
    causal = torch.ones(WHOLE, WHOLE, dtype=torch.bool).tril().expand(2, 4, -1, -1)
    with seeing(model, dict.fromkeys(range(2), causal)):
        ranked = forward(model, ids)
    assert difference(ranked, forward(model, ids)) <= TOLERANCE
    with seeing(model, dict.fromkeys(range(2), causal), None):
        assert difference(forward(model, ids), ranked) > 100 * TOLERANCE  # what is chosen matters


@pytest.mark.parametrize("family", FAMILIES)
def test_attach_learns_what_an_indexer_is_and_changes_nothing_else(family):
    model, ids = made(family), ids_of()
    own = forward(model, ids)
    with kvcompress.attach(model, verify=True):
        assert torch.equal(forward(model, ids), own)
        facts = facts_of(base_model(model))
        assert [found.indexer.top for found in facts.values()] == [TOP] * 2
        assert all(found.indexer.rotates for found in facts.values())
        order = facts[0].indexer.order
        # of 16 numbers the last 8 rotate, or the first
        assert order.tolist() == [*range(8, 16), *range(8)] if family == "hy_v4" else order is None


@pytest.mark.parametrize("make", [DenseCache, lambda config: PrunedCache(config, SnapKV(window=2), keep=WHOLE)])
@pytest.mark.parametrize("family", FAMILIES)
def test_with_room_for_all_tokens_caches_equal_the_dense_model(family, make):
    model, ids = made(family), ids_of()
    dense = forward(model, ids)
    with kvcompress.attach(model):
        for sizes in ([WHOLE], [7, 1, 1, 20, 1, 12], [1] * WHOLE):
            assert difference(read(model, ids, make(model.config), sizes)[0], dense) <= TOLERANCE
        padded, mask = left_padded([ids[:1, :PROMPT], ids[1:, :19]])
        cache = make(model.config)
        ours = [forward(model, padded, attention_mask=mask, past_key_values=cache)[:, -1:]]
        ours += [forward(model, ids[:, i : i + 1], past_key_values=cache) for i in range(PROMPT, WHOLE)]
        for b, length in enumerate((PROMPT, 19)):
            alone = forward(model, torch.cat([ids[b : b + 1, :length], ids[b : b + 1, PROMPT:]], 1))[:, length - 1 :]
            assert difference(torch.cat(ours, 1)[b : b + 1], alone) <= TOLERANCE


PRUNED = {
    "snapkv": (SnapKV(window=4, kernel_size=1), None, {}),
    "heads of several lengths": (SnapKV(window=2), AdaKV(), {}),
    "while decoding": (SnapKV(window=2), None, {"every": 3}),
    "values weighed by the output projection": (CriticalKV(SnapKV(window=4)), None, {}),
    "turns": (KeyDiff(num_sink_tokens=1), None, {}),
    "turns that are kept": (KeyDiff(num_sink_tokens=1), None, {"later": "keep"}),
}


@pytest.mark.parametrize(("family", "how"), list(zip([*FAMILIES] * 2, PRUNED, strict=True)))
def test_each_head_chooses_of_what_it_has_kept(family, how):
    model, ids = made(family), ids_of()
    pruner, budget, settings = PRUNED[how]
    sizes = [PROMPT, 5, 7] if "turns" in how else [PROMPT, *[1] * (WHOLE - PROMPT)]
    with kvcompress.attach(model):
        cache = PrunedCache(model.config, pruner, budget, keep=STAYS, page_size=4, **settings)
        ours, seen = read(model, ids, cache, sizes)
        for layer, rows in zip(cache.layers, cache.kept_positions(), strict=True):  # nothing is held that no row needs
            for numbers, own in zip(layer.index_keys.numbers, rows, strict=True):
                assert torch.equal(numbers, torch.unique(torch.cat(own)))
                assert len(numbers) < WHOLE or "kept" in how
    with seeing(model, seen):
        dense = forward(model, ids)
    assert difference(ours, dense) <= TOLERANCE
    assert difference(dense, forward(model, ids)) > 100 * TOLERANCE  # what is dropped matters


def test_prompts_that_are_read_in_chunks_and_again_by_replay():
    model, ids = made(), ids_of()
    with kvcompress.attach(model):
        for settings in ({"keep": STAYS}, {"keep": WHOLE, "chunk_size": 11}):
            cache = kvcompress.prefill(model, ids[:, :PROMPT], PrunedCache(model.config, page_size=4, **settings))
            kept = cache.kept_positions()
            ours = [forward(model, ids[:, i : i + 1], past_key_values=cache) for i in range(PROMPT - 1, WHOLE)]
            seen = {layer: torch.ones(WHOLE, WHOLE, dtype=torch.bool).tril().repeat(2, 4, 1, 1) for layer in range(2)}
            for layer, b, head in ((layer, b, head) for layer in seen for b in range(2) for head in range(4)):
                gone = torch.ones(PROMPT - 1, dtype=torch.bool)
                gone[kept[layer][b][head]] = False
                seen[layer][b, head, PROMPT - 1 :, : PROMPT - 1][:, gone] = False
            with seeing(model, seen):
                dense = forward(model, ids)[:, PROMPT - 1 :]
            assert difference(torch.cat(ours, 1), dense) <= TOLERANCE
            assert any(len(row) < PROMPT - 1 for rows in kept[0] for row in rows) is (settings["keep"] == STAYS)


def decoded(model, ids, cache):
    return torch.cat([forward(model, ids[:, i : i + 1], past_key_values=cache) for i in range(ids.shape[1])], 1)


def test_index_keys_live_as_their_rows_do(tmp_path):
    model, ids, more, other = made(), ids_of(PROMPT), ids_of(6, seed=2), ids_of(6, seed=3)
    with kvcompress.attach(model):
        cache = PrunedCache(model.config, KeyDiff(num_sink_tokens=1), keep=STAYS, page_size=4, later="keep")
        forward(model, ids, past_key_values=cache)
        saved = kvcompress.load_cache(cache.save(tmp_path / "cache.safetensors"), model)
        fork, turned = cache.fork(), cache.fork()
        own = decoded(model, more, cache)
        decoded(model, other, fork)
        fork.crop(-6)
        assert torch.equal(decoded(model, more, fork), own)
        assert torch.equal(decoded(model, more, saved), own)
        turned.reorder_cache(torch.tensor([1, 0]))
        assert torch.equal(decoded(model, more.flip(0), turned), own.flip(0))
        alone = [PrunedCache(model.config, KeyDiff(num_sink_tokens=1), keep=STAYS, page_size=4) for _ in range(2)]
        for b, one in enumerate(alone):
            for layer, first in zip(one.layers, alone[0].layers, strict=True):
                layer.store = None if b == 0 else first.pool.store
            forward(model, ids[b : b + 1], past_key_values=one)
        alone[0].join(alone[1])
        assert difference(decoded(model, more, alone[0]), own) <= TOLERANCE
        for layer in cache.layers:
            whole, held, layer.index_keys = layer.nbytes(), layer.index_keys, None
            assert whole - layer.nbytes() == sum(64 * len(n) for n in held.numbers) + 4 * held.places.numel()
        cache.reset()
        assert difference(forward(model, ids, past_key_values=cache), forward(model, ids)) <= TOLERANCE


@pytest.mark.parametrize("make", [DenseCache, lambda config: PrunedCache(config, SnapKV(window=2), keep=STAYS)])
def test_neither_blocks_of_queries_nor_the_default_device_change_anything(make, monkeypatch):
    model, ids, found = made(), ids_of(), []
    with kvcompress.attach(model):
        for most, default in ((1 << 25, "cpu"), (4 * 42 * 16, "meta")):
            monkeypatch.setattr(indexing, "_MOST", most)
            cache = make(model.config)
            with torch.device(default):
                forward(model, ids[:, :PROMPT], past_key_values=cache)
                found.append(decoded(model, ids[:, PROMPT:], cache))
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


def test_codes_are_chosen_from_as_well():
    model, ids = made(num_hidden_layers=1), ids_of()  # of which alone nothing that is rounded enters an indexer
    with kvcompress.attach(model):
        ours = read(model, ids, QuantizedCache(model.config, "int8"), [PROMPT, *[1] * 12])[0]
    assert difference(ours, forward(model, ids)) < 0.03


def test_a_window_of_no_more_tokens_than_an_indexer_chooses_needs_no_index_keys():
    model, ids, caches = made(), ids_of(), []
    with kvcompress.attach(model), torch.no_grad():
        for _ in range(2):
            for module in model.modules():
                if hasattr(module, "wq_b"):
                    module.wk.weight.mul_(-1)  # it chooses others
            caches.append(StreamingCache(model.config, window_size=6, num_sink_tokens=2))
            caches.append(read(model, ids, caches.pop(), [PROMPT, 5, 1, 6])[0])
    assert torch.equal(*caches)


def test_compiled_models_choose_alike():
    model, ids = made(), ids_of()
    with kvcompress.attach(model):
        run = torch.compile(model, backend="eager", fullgraph=True)
        cache, own = DenseCache(model.config), DenseCache(model.config)
        with torch.no_grad():
            for piece in (ids[:, :PROMPT], ids[:, PROMPT : PROMPT + 1]):
                assert torch.equal(run(piece, past_key_values=cache).logits, forward(model, piece, past_key_values=own))
        with pytest.raises(NotImplementedError, match="needs the host for each token"):
            own.check_repeats()


REFUSED = {
    "Quest": lambda config: QuestCache(config, token_budget=32),
    "Iterative": lambda config: IterativeCache(config, memory_size=16),
    "positions must be 'original'": lambda config: PrunedCache(config, SnapKV(), keep=16, positions="contiguous"),
    r"num_sink_tokens \+ window_size must be at most 8, got 9": lambda config: StreamingCache(
        config, window_size=5, num_sink_tokens=4
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_go_by_an_indexer_is_refused(words):
    model = made()
    with kvcompress.attach(model), pytest.raises(ValueError, match=f"{words}.*attends to 8 tokens that its indexer"):
        forward(model, ids_of(), past_key_values=REFUSED[words](model.config))


def test_what_converts_or_serves_a_model_refuses_indexers():
    model = made(qk_nope_head_dim=8, v_head_dim=16)
    with kvcompress.attach(model):
        with pytest.raises(ValueError, match="PoD: layer 0 chooses the tokens that it attends to by an indexer"):
            kvcompress.pod.convert(model, PoDConfig(((0,) * 4, (0,) * 4), 3, 9))
        with pytest.raises(ValueError, match="DMC: layer 0 chooses the tokens that it attends to by an indexer"):
            kvcompress.dmc.convert(model, DMCConfig())
        with pytest.raises(ValueError, match="model must attend to all tokens to be served"):
            check_served(DenseCache(model.config), facts_of(base_model(model)), None)
