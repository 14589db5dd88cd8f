"""Caches that drop tokens, on one family of each kind of layer, with gates on all that there are (make test-all).

What is seen is dense attention with a mask for every head, or, where the tokens that stay stand elsewhere, the dense
model that reads those alone. tests/test_families.py has the same caches with room for everything.
"""

import itertools
from contextlib import contextmanager

import pytest
import torch
from helpers import KINDS, and_others, forward, kind_model, random_gates, random_ids
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

import kvcompress
from benchmarks.quality.parts.families_checks import TOLERANCE, difference, said_by_us
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from kvcompress import GatedCache
from kvcompress.hf.attach import base_model, facts_of
from kvcompress.hf.own_attention import number_of, own_family
from kvcompress.hf.seam import _before
from kvcompress.pruners import Gates, KeyDiff, SnapKV

PROMPT, WHOLE, STAYS = 30, 38, 9
NAMES = [
    "llama", "qwen3_moe", "gemma2", "gemma3_text/sliding", "gemma4_text/shared", "gpt_oss/sliding", "phi3",
    "cohere2/sliding", "glm4", "gpt_neox", "hunyuan_v1_dense", "deepseek_v3", "llama4_text/chunked", "falcon_h1",
    "falcon/new", "falcon/every_kv_head", "falcon", "falcon/alibi", "bloom", "mpt/alibi", "gpt_neo", "xglm/one_head",
    "bart/encoder", "whisper", "t5gemma",
]  # fmt: skip
DROPS = {
    "snapkv": lambda config: kvcompress.PrunedCache(config, SnapKV(window=4, kernel_size=1), keep=STAYS, page_size=4),
    "adakv": lambda config: kvcompress.PrunedCache(
        config, SnapKV(window=2), kvcompress.AdaKV(), keep=STAYS, page_size=4
    ),
    "keydiff": lambda config: kvcompress.PrunedCache(config, KeyDiff(num_sink_tokens=1), keep=STAYS, page_size=4),
}  # fmt: skip
MASKED = "masked_by_head"


@contextmanager
def hiding(model, hide):
    """The dense model, some of whose attention is hidden. hide: (module, query heads) -> bool [B, Hq, WHOLE, WHOLE],
    None where nothing is."""

    def masked(mask, hidden, dtype, true_hides=False):
        if hidden is None:
            return mask
        if mask.dtype == torch.bool:
            return mask | hidden if true_hides else mask & ~hidden
        return mask.expand(hidden.shape).masked_fill(hidden, torch.finfo(dtype).min)

    def attention(module, query, key, value, mask, **options):
        if getattr(module, "is_causal", True):  # an encoder's, and attention to it, stay as they are
            mask = masked(mask, hide(module, query.shape[1]), query.dtype)
        return _before(module, "eager")(module, query, key, value, mask, **options)

    def before(module, args, given):
        hidden = hide(module, getattr(module, "num_heads", None) or module.n_heads)
        mask = masked(given["attention_mask"], hidden, args[0].dtype, type(module).__name__ == "MptAttention")
        return args, given | {"attention_mask": mask}

    own, implementation = [x for x in model.modules() if own_family(x) is not None], model.config._attn_implementation
    hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in own]
    AttentionInterface.register(MASKED, attention)
    AttentionMaskInterface.register(MASKED, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    try:
        if not own:
            model.set_attn_implementation(MASKED)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        if not own:
            model.set_attn_implementation(implementation)


def masked_by_head(kept, facts, prompt=PROMPT, whole=WHOLE):
    """What hiding takes: tokens behind the prompt see of it what their KV head has kept. kept: by layer [B][Hkv] of the
    prompt's places that are left; [] = those of the layer that it reads."""

    def hide(module, heads):
        layer = number_of(module)
        of = kept[layer] or kept[facts[layer].reads]
        hidden = torch.zeros(len(of), heads, whole, whole, dtype=torch.bool)
        for b, rows in enumerate(of):
            for head in range(heads):
                gone = torch.ones(whole, dtype=torch.bool)
                gone[rows[head * len(rows) // heads]], gone[prompt:] = False, False
                hidden[b, head, prompt:, gone] = True
        return hidden

    return hide


@pytest.mark.parametrize(("name", "cache"), list(zip(NAMES, itertools.cycle(DROPS), strict=False)))
@torch.no_grad()
def test_what_follows_a_pruned_prompt_sees_what_each_head_has_kept(name, cache):
    model = CONFIGURATIONS[name].model()
    ids = torch.randint(3, 97, (2, WHOLE), generator=torch.Generator().manual_seed(1))
    with kvcompress.attach(model):
        held, facts = DROPS[cache](model.config), facts_of(base_model(model))
        ours = [forward(model, ids[:, :PROMPT], past_key_values=held)[:, -1:]]
        kept = held.kept_positions()
        ours += [forward(model, ids[:, i : i + 1], past_key_values=held) for i in range(PROMPT, WHOLE)]
    local = {index for index, found in facts.items() if found.is_local}
    dropped = {index for index, rows in enumerate(kept) if any(len(x) < PROMPT for row in rows for x in row)}
    assert dropped - local  # or the test would show nothing
    for index in local:  # a window or a chunk is the family's own mask
        kept[index] = [[torch.arange(PROMPT)] * facts[index].kv_heads] * len(ids)
    with hiding(model, masked_by_head(kept, facts)):
        dense = forward(model, ids, use_cache=False)[:, PROMPT - 1 :]
    assert difference(torch.cat(ours, 1), dense) <= 2 * TOLERANCE
    whole = forward(model, ids, use_cache=False)[:, PROMPT:]
    assert difference(dense[:, 1:], whole) > 100 * TOLERANCE  # what is dropped matters


# ---- gates ----

WINDOW, SINKS = 8, 2
GATED = [
    *NAMES, "granitemoehybrid/rope", "nemotron_h", "qwen3_next", "zamba2/rope", "hrm_text", "gpt2", "mistral/sliding",
    "gemma3n_text/shared", "mimo_v2_flash/sliding", "bloom/six_heads",
]  # fmt: skip
REFUSED = {  # beside families that nothing attaches to: what a layer is, and what is said
    "no layer": "gates must be of this model: they have 1 layers, 0 are needed",
    "reads": "not supported by GatedCache: layer . reads the keys of layer .",
    "normed": "not supported by GatedCache: layer . norms its keys behind their rotation",
    "sizes": "not supported by GatedCache: layer . has keys of .* and values of .* numbers",
}


def seen_by_head(held, order):
    """What hiding takes: tokens see of each KV head the last WINDOW ones and those that it holds at the end. order:
    numbers of layers as they attend, from some of which modules have none, or that of another."""
    every, calls = held.kept_positions(), itertools.count()
    kept = {layer.index: every[layer.index] for layer in held.compressing}
    near = torch.arange(WHOLE)[:, None] - torch.arange(WHOLE) < WINDOW

    def hide(module, heads):
        rows = kept.get(order[next(calls) % len(order)])
        if rows is None:  # a window or a chunk is the family's own mask
            return None
        stays = torch.zeros(len(rows), heads, 1, WHOLE, dtype=torch.bool)
        for b, head in itertools.product(range(len(rows)), range(heads)):
            stays[b, head, 0, rows[b][head * len(rows[b]) // heads]] = True
        return ~(stays | near)

    return hide


def unlike_a_gated_cache(facts):
    """What of these layers a GatedCache refuses, by its name in REFUSED; None = nothing."""
    whole = [own for own in facts.values() if not own.is_local]
    found = {
        "reads": any(own.reads is not None for own in facts.values()),
        "normed": any(own.normed for own in whole),
        "sizes": any(own.value_dim != own.head_dim for own in whole),
        "no layer": not whole,
    }
    return next((name for name, true in found.items() if true), None)


@pytest.mark.parametrize("name", and_others(GATED, CONFIGURATIONS))
@torch.no_grad()
def test_a_token_sees_what_gates_let_through(name):
    if CONFIGURATIONS[name].grows:
        pytest.skip("its frequencies change with every token, so that one pass is another model")
    if name in ("xglm", "trocr", "mvp", "led"):
        pytest.skip("its own code takes one mask for all heads: xglm/one_head is here")
    model = CONFIGURATIONS[name].model()
    ids = torch.randint(3, 97, (2, WHOLE), generator=torch.Generator().manual_seed(1))
    try:
        attachment = kvcompress.attach(model)
    except ValueError as error:
        if not said_by_us(error):
            raise
        return
    with attachment:
        facts = facts_of(base_model(model))
        unlike = unlike_a_gated_cache(facts)
        gates = Gates((torch.zeros(2, 65),)) if unlike == "no layer" else random_gates(model)

        def read(sizes):
            held = GatedCache(
                model.config, gates, threshold=0.0, window=WINDOW, num_sink_tokens=SINKS, page_size=4, track=True
            )
            return torch.cat([forward(model, part, past_key_values=held) for part in ids.split(sizes, 1)], 1), held

        if unlike is not None:
            with pytest.raises(ValueError, match=REFUSED[unlike]):
                read([WHOLE])
            return
        ours, held = read([PROMPT] + [1] * (WHOLE - PROMPT))
        once, again = read([WHOLE])
        assert held.stored_lengths() == again.stored_lengths() and held.kept_share() < 0.95
        whole = forward(model, ids, use_cache=False)
    with hiding(model, seen_by_head(held, sorted(facts))):
        dense = forward(model, ids, use_cache=False)
    for found in (ours, once):
        assert difference(found, dense) <= 4 * TOLERANCE
    assert difference(dense, whole) > 100 * TOLERANCE  # what is dropped matters


# ---- caches that give positions anew ----

ONE_LAYER = ["llama", "qwen3", "phi3", "glm", "gpt_neox", "hunyuan_v1_dense"]
GAP = 20
RENUMBERING = {  # and the unused ids between what is compressed and the last 4 tokens
    "contiguous": (
        lambda config: kvcompress.PrunedCache(
            config, SnapKV(window=4), keep=STAYS, positions="contiguous", page_size=4
        ), 0
    ),
    "gap": (
        lambda config: kvcompress.PrunedCache(
            config, SnapKV(window=4), keep=STAYS, positions=kvcompress.RemoteGap(GAP, headroom=8), page_size=4
        ),
        GAP,
    ),
    "every": (lambda config: kvcompress.IterativeCache(config, memory_size=STAYS, chunk_size=8, every=4), 0),
    "iterative": (lambda config: kvcompress.IterativeCache(config, memory_size=STAYS, chunk_size=8), 0),
    "streaming": (lambda config: kvcompress.StreamingCache(config, window_size=7, num_sink_tokens=2), 0),
}  # fmt: skip


def one_layer(kind, monkeypatch):
    """Whose keys are of their tokens alone, so that those that stay are a prompt of their own; one KV head, so that
    there is one list of them."""
    monkeypatch.setitem(KINDS, kind, KINDS.get(kind, {}))
    heads = {"num_attention_heads": 1, "hidden_size": 16} if kind == "gpt_neox" else {"num_key_value_heads": 1}
    return kind_model(kind, num_hidden_layers=1, **heads)


@pytest.mark.parametrize(("cache", "kind"), list(itertools.product(RENUMBERING, ONE_LAYER)))
def test_a_token_sees_what_stays_as_a_prompt_of_its_own(cache, kind, monkeypatch):
    model, ids, (new_cache, gap) = one_layer(kind, monkeypatch), random_ids(PROMPT + 6), RENUMBERING[cache]
    with kvcompress.attach(model):
        held = new_cache(model.config)
        if kind == "hunyuan_v1_dense" and cache != "iterative":
            for _ in range(2):  # nothing is noted of a model that is refused
                with pytest.raises(ValueError, match="a norm with weights follows the rotation"):
                    kvcompress.prefill(model, ids, held)
                assert held.get_seq_length() == 0
            return
        kvcompress.prefill(model, ids[:, : PROMPT + 1], held)
        for i in range(PROMPT, ids.shape[1]):
            new = forward(model, ids[:, i : i + 1], past_key_values=held)[:, -1]
            kept = held.kept_positions()[0][0][0]
            stays = ids[:, kept]
            assert int(kept[-1]) == i and len(kept) < i + 1
            if cache == "every" and len(kept) == STAYS:  # what was dropped behind it was still seen by it
                continue
            near = len(kept) - (STAYS - 4)  # what follows the compressed ones
            at = torch.arange(len(kept)) + gap * (torch.arange(len(kept)) >= len(kept) - near)
            # with a mask, or transformers takes what follows a gap for another document
            mask = torch.ones_like(stays)
            dense = forward(model, stays, attention_mask=mask, position_ids=at[None], use_cache=False)[:, -1]
            assert difference(new, dense) <= 2 * TOLERANCE, i


@pytest.mark.parametrize("room", [2, 0])
def test_streaming_on_a_norm_behind_the_rotation_goes_on_until_something_would_go(room, monkeypatch):
    model, ids = one_layer("hunyuan_v1_dense", monkeypatch), random_ids(PROMPT)
    dense = forward(model, ids)
    with kvcompress.attach(model):
        held = kvcompress.StreamingCache(model.config, window_size=PROMPT - 4 + room, num_sink_tokens=2)
        if room:
            torch.testing.assert_close(forward(model, ids, past_key_values=held), dense, rtol=1e-4, atol=1e-4)
            return
        forward(model, ids[:, : PROMPT - 2], past_key_values=held)
        message = (
            rf"num_sink_tokens \+ window_size \({PROMPT - 2}\) must hold all tokens with this model: in its layer 0"
        )
        with pytest.raises(ValueError, match=message):
            forward(model, ids[:, PROMPT - 2 : PROMPT - 1], past_key_values=held)
        assert held.get_seq_length() == PROMPT - 2
        held.check_complete()
