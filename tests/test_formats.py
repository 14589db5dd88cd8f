"""Caches whose keys and values are codes: what they would be if they held what the codes stand for."""

import copy
import re
from unittest import mock

import pytest
import torch
from helpers import (
    attached,
    covering,
    deciding_model,
    kind_model,
    left_padded,
    random_ids,
    tiny_gates_folder,
    tiny_model,
)

import kvcompress
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from kvcompress import (
    AdaKV,
    CacheSpec,
    DMCCache,
    GatedCache,
    GlobalTopK,
    IterativeCache,
    PoDCache,
    PrunedCache,
    QuantizedCache,
    QuestCache,
    RemoteGap,
    StreamingCache,
    attach,
    load_cache,
    ops,
    pod,
    prefill,
)
from kvcompress.caches import PoolSettings, local, streaming
from kvcompress.caches.dense import DenseCache, DenseLayer
from kvcompress.caches.formats import FORMATS, PAIR, Format, keys_and_values, slot_nbytes
from kvcompress.caches.local import LocalLayer
from kvcompress.caches.paged import PagedLayer
from kvcompress.caches.pool import PagePool
from kvcompress.pod import PoDConfig
from kvcompress.pod.layer import PoDLayer
from kvcompress.pruners import H2O, Replay, SnapKV

CPU = torch.device("cpu")
CALLS = [40] + [1] * 6 + [7] + [1] * 5 + [20, 1, 1]
CACHES = {
    "quantized": lambda config, dtype: DenseCache(config, page_size=4, dtype=dtype),
    "snapkv": lambda config, dtype: PrunedCache(config, SnapKV(window=6), keep=16, every=4, page_size=4, dtype=dtype),
    "h2o": lambda config, dtype: PrunedCache(config, H2O(), keep=20, every=5, dtype=dtype),
    "replay": lambda config, dtype: PrunedCache(config, Replay(chunk=16, last=4), GlobalTopK(), keep=0.5, dtype=dtype),
    "gap": lambda config, dtype: PrunedCache(
        config, SnapKV(window=6), keep=16, every=4, positions=RemoteGap(gap=6, headroom=16), dtype=dtype
    ),
    "contiguous": lambda config, dtype: PrunedCache(
        config, SnapKV(window=4), keep=18, every=6, positions="contiguous", dtype=dtype
    ),
    "keep": lambda config, dtype: PrunedCache(config, SnapKV(window=6), keep=16, later="keep", dtype=dtype),
    "quest": lambda config, dtype: QuestCache(config, token_budget=16, page_size=4, dense_layers=1, dtype=dtype),
    "iterative": lambda config, dtype: IterativeCache(
        config, memory_size=16, chunk_size=12, pruner=SnapKV(window=4), dtype=dtype
    ),
    "iterative, every": lambda config, dtype: IterativeCache(
        config, memory_size=16, chunk_size=12, pruner=SnapKV(window=4), every=4, dtype=dtype
    ),
    "stream": lambda config, dtype: StreamingCache(config, window_size=20, num_sink_tokens=3, dtype=dtype),
    "stream, apart": lambda config, dtype: StreamingCache(
        config, window_size=20, num_sink_tokens=3, sink_distance="window", dtype=dtype
    ),
}  # fmt: skip


MODELS = {"dms": {"mode": "dms", "dms_window": 7}, "dmc": {}, "dmc, window": {"window": 3}}  # that decide
WAITING = {  # whose newest tokens or averages wait in the model's dtype, or in float32, before they are codes
    "gated": lambda config, dtype: GatedCache(config, tiny_gates_folder(), keep=0.5, window=8, dtype=dtype),
} | dict.fromkeys(MODELS, lambda config, dtype: DMCCache(config, dtype=dtype, page_size=4))
EVERY = CACHES | WAITING
STREAMS = ["stream", "stream, apart"]


def model_of(name):
    if name not in MODELS:
        return attached()
    model = deciding_model(dmc=MODELS[name])
    attach(model)
    return model


@torch.no_grad()
def run(model, cache, ids):
    """(logits, what is kept and which pages are read) after each call of so many tokens; a prompt in chunks is read by
    prefill."""
    out, start, tracks = [], 0, not isinstance(cache, DenseCache | GatedCache | DMCCache | PoDCache)
    step, read = ops.quest_step_, []

    def noted(*arguments, **options):
        found = step(*arguments, **options)
        read.append(found.chosen.tolist())
        return found

    if isinstance(cache, IterativeCache):
        prefill(model, ids[:, : CALLS[0] + 1], cache)
        start = CALLS[0]
    for count in CALLS[1 if start else 0 :]:
        with mock.patch.object(ops, "quest_step_", noted):
            logits = model(ids[:, start : start + count], past_key_values=cache).logits[0, -1]
        out.append((logits, f"{cache.kept_positions() if tracks else ''}{read}"))
        start += count
        read.clear()
    return out


def rounding(monkeypatch, kind):
    """What is stored anywhere is rounded as codes are, and stays numbers; one token takes the way of several."""
    append = PagePool.append

    def rounded(tokens, names):
        codes = [Format(kind, x.dtype).code(name) for name, x in zip(names, tokens, strict=True)]
        return [ops.dequantize(*ops.quantize(x, code), code, x.dtype) for x, code in zip(tokens, codes, strict=True)]

    monkeypatch.setattr(
        PagePool, "append", lambda pool, tokens, counts=None: append(pool, rounded(tokens, pool.store.arrays), counts)
    )
    attend_held = DenseLayer.attend_held  # a first part reads what is stored, as with codes
    monkeypatch.setattr(DenseLayer, "attend_held", lambda *given: attend_held(*given[:-1], None))
    for module in (local, streaming):
        monkeypatch.setattr(module, "coded", lambda form, tokens: rounded(tokens, PAIR))
    for layer in (LocalLayer, PagedLayer, PoDLayer, streaming.StreamingLayer):
        monkeypatch.setattr(layer, "_step", lambda *_: None)


@pytest.mark.parametrize(("name", "kind", "family"), covering(CACHES, FORMATS, ["llama", "gemma2", "gpt_oss", "glm"]))
def test_caches_are_those_of_what_codes_stand_for(monkeypatch, name, kind, family):
    model, ids = kind_model(family), random_ids(sum(CALLS), seed=7)
    attach(model)
    cache = CACHES[name](model.config, kind)
    found = run(model, cache, ids)
    plain = CACHES[name](model.config, None)
    unrounded = run(model, plain, ids)
    with monkeypatch.context() as patch:
        rounding(patch, kind)
        other = CACHES[name](model.config, None)
        wanted = run(model, other, ids)
    # a code may fall to the other side where a number lies between two, and so a token that ties with another
    same = [i for i, ((_, kept), (_, other_kept)) in enumerate(zip(found, wanted, strict=True)) if kept == other_kept]
    assert len(same) >= len(found) - 4
    off, rounded_off = (torch.stack([(x[i][0] - wanted[i][0]).abs() for i in same]) for x in (found, unrounded))
    assert off.mean() < 0.15 * rounded_off.mean()
    assert off.amax() < 0.03 * max(found[i][0].abs().amax() for i in same)
    assert cache.stored_lengths() == other.stored_lengths()
    assert cache.nbytes() < 0.8 * plain.nbytes()


POD = {  # lead, mode, options of the cache
    "one": (((0, 0),) * 4, "pod", {"reuse": False}),
    "reuse": (((0, 0),) * 4, "pod", {"reuse": True}),
    "tau": (((0, 0),) * 4, "pod", {"tau": 0.6}),
    "mixed": (((0, 0), (0, 1), (2, 1), (2, 1)), "pod", {}),
    "pruner": (((0, 0), (0, 1), (2, 1), (2, 1)), "pod", {"pruner": SnapKV(window=4, kernel_size=1), "distant": 8}),
    "window": (((0, 0),) * 4, "window", {}),
    "cla": (((0, 0), (0, 1), (2, 1), (2, 1)), "cla", {}),
}


def sharing(name):
    """A model converted to PoD, and makers of its cache by dtype."""
    lead, mode, options = POD[name]
    model = tiny_model(num_hidden_layers=4)
    pod.convert(model, PoDConfig(lead, 2, 9, mode=mode))
    attach(model)
    return model, lambda dtype: PoDCache(model.config, page_size=4, dtype=dtype, **options)


@pytest.mark.parametrize(("name", "kind"), covering(POD, FORMATS))
def test_pod_is_that_of_what_codes_stand_for(monkeypatch, name, kind):
    (model, new), ids = sharing(name), random_ids(sum(CALLS), seed=7)
    cache, plain = new(kind), new(None)
    found, unrounded = run(model, cache, ids), run(model, plain, ids)
    with monkeypatch.context() as patch:
        rounding(patch, kind)
        wanted = run(model, new(None), ids)
    found, unrounded, wanted = (torch.stack([logits for logits, _ in x]) for x in (found, unrounded, wanted))
    off = (found - wanted).abs()
    assert off.mean() < 0.15 * (unrounded - wanted).abs().mean() and off.amax() < 0.03 * wanted.abs().amax()
    assert (cache.stored_lengths(), cache.stored_keys()) == (plain.stored_lengths(), plain.stored_keys())
    assert cache.nbytes() < 0.5 * plain.nbytes()


@pytest.mark.parametrize(("name", "kind"), covering(POD, FORMATS))
def test_pods_batches_forks_and_saved_ones_go_on_alike(name, kind, tmp_path):
    model, new = sharing(name)
    check_sharing(model, new, kind, tmp_path)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "kind", "family"), covering(["quantized", *STREAMS], FORMATS, ["llama", "gemma2", "gpt_oss", "glm"])
)
def test_a_prompt_in_parts_is_rounded_as_one(name, kind, family):
    model, ids = kind_model(family), random_ids(60, seed=11)
    attach(model)
    found = []
    for calls, dtype in (([60], None), ([60], kind), ([25, 25, 10], kind), ([40] + [1] * 20, kind)):
        cache = CACHES[name](model.config, dtype)
        parts = torch.split(ids, calls, 1)
        found.append(torch.cat([model(part, past_key_values=cache).logits[0] for part in parts]))
        assert cache.get_seq_length() == 60
    dense, one, *others = found
    for other in others:  # a number near the middle of two codes may fall to the other side: few do
        assert (other - one).abs().mean() < 0.15 * (one - dense).abs().mean()
        assert (other - one).abs().amax() < 0.03 * one.abs().amax()


@torch.no_grad()
@pytest.mark.parametrize(("name", "kind"), covering(list(WAITING), FORMATS))
def test_what_waits_becomes_codes_once(name, kind):
    model = model_of(name)
    ids = random_ids(sum(CALLS), seed=3)
    plain, one = (WAITING[name](model.config, dtype) for dtype in (None, kind))
    wanted, found = run(model, plain, ids), run(model, one, ids)
    assert one.stored_lengths()[0] == plain.stored_lengths()[0]  # later layers' decisions follow what was rounded
    exact, logits = (torch.stack([x for x, _ in each]) for each in (wanted, found))
    most = {"int8": 0.03, "k8v4": 0.2}[kind] * exact.abs().mean()
    assert 0 < (logits - exact).abs().mean() < most
    assert one.nbytes() < 0.7 * plain.nbytes()
    parts = WAITING[name](model.config, kind)
    for part in torch.split(ids, 9, 1):
        last = model(part, past_key_values=parts).logits[0, -1]
    assert parts.stored_lengths()[0] == one.stored_lengths()[0]
    assert (last - logits[-1]).abs().mean() < most


@torch.no_grad()
def test_keys_of_a_long_stream_are_rounded_twice_at_most(monkeypatch):
    """Of 8,064 tokens, the last 128 since the window was moved back for the twentieth time."""
    monkeypatch.setattr(streaming, "_LEAST_BLOCK", 256)
    model, ids = attached(num_hidden_layers=1), random_ids(8_064, seed=4)
    plain, coded = (StreamingCache(model.config, window_size=200, dtype=dtype) for dtype in (None, "int8"))
    for part in torch.split(ids, 128, 1):
        for cache in (plain, coded):
            model(part, past_key_values=cache)
    exact, layer = plain.layers[0].keys, coded.layers[0]
    assert layer.base == [8_064 - 128 - 200]
    keys, step = ops.dequantize(layer.keys, layer.scales[0], "int8"), layer.scales[0].float().amax()
    off = (keys - exact).abs() / step
    # half a step, turned by an angle, and half a step; float16 scales are rounded up by a little
    assert 0.5 < off.amax() < (1 + 2**0.5) / 2 * 1.01
    assert off.square().mean().sqrt() < (2 / 12) ** 0.5


SHARED = ["quantized", "snapkv", "replay", "iterative", *WAITING, *STREAMS]


@pytest.mark.parametrize(("name", "kind"), covering([*SHARED, "quest"], FORMATS))
def test_batches_forks_and_saved_ones_go_on_alike(name, kind, tmp_path):
    model = model_of(name)
    check_sharing(model, lambda dtype: EVERY[name](model.config, dtype), kind, tmp_path)


@pytest.mark.parametrize(("family", "kind"), covering(["gemma3_text/sliding", "llama4_text/chunked"], FORMATS))
def test_layers_that_see_a_part_hold_codes(family, kind, tmp_path):
    model = CONFIGURATIONS[family].model()
    attach(model)
    check_sharing(model, lambda dtype: QuantizedCache(model.config, dtype), kind, tmp_path)
    cache = QuantizedCache(model.config, kind)
    for _ in range(2):
        prefill(model, random_ids(41), cache)
        windows = [layer for layer in cache.layers if isinstance(layer, LocalLayer)]
        D = model.config.head_dim
        nbytes = {"int8": 2 * D + 4, "k8v4": D + D // 2 + 4}[kind]
        assert windows and all(
            layer.nbytes() == model.config.num_key_value_heads * layer.size * nbytes for layer in windows
        )
        cache.reset()


def check_sharing(model, new, kind, tmp_path):
    prompts = [random_ids(n, seed=n) for n in (41, 30)]
    ids, mask = left_padded(prompts)
    options = {"max_new_tokens": 6, "do_sample": False}
    alone = [kvcompress.generate(model, prompt, new(kind), **options)[0, -6:] for prompt in prompts]
    cache = new(kind)
    together = kvcompress.generate(model, ids, cache, attention_mask=mask, **options)
    assert torch.equal(together[:, -6:], torch.stack(alone))

    cache = new(kind)
    prefill(model, prompts[0], cache)
    fork = cache.fork()
    cache.save(tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors", model)
    assert loaded.nbytes() == cache.nbytes()
    deep = copy.deepcopy(cache)
    for one in (cache, fork, loaded, deep):
        out = model.generate(prompts[0], past_key_values=one, **options)
        assert torch.equal(out[0, -6:], alone[0])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_pool_gives_back_what_its_codes_stand_for(kind):
    k, v = torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    form = Format(kind, torch.float32)
    pool = PagePool(6, keys_and_values(8, torch.float32, form), CPU, PoolSettings(4, dtype=kind), form=form)
    pool.append((k, v))
    wanted = [
        ops.dequantize(*ops.quantize(x, code), code, x.dtype) for x, code in zip((k, v), FORMATS[kind], strict=True)
    ]
    for found, x in zip(pool.gather(9), wanted, strict=True):
        assert torch.equal(found.view(2, 3, 9, 8), x)
    some = pool.gather(9)
    for x in some:
        x[[0, 2, 3, 5]] = 0
    assert all(torch.equal(found, x) for found, x in zip(pool.gather(9, rows=[4, 1]), some, strict=True))
    other = pool.fork()
    slots = torch.tensor([[1, 4, 8]] * 6, dtype=torch.int32)
    pool.keep(slots, [3] * 6)
    for found, x in zip(pool.gather(5), wanted, strict=True):
        assert torch.equal(found[:, :3].view(2, 3, 3, 8), x[:, :, [1, 4, 8]])
        assert (found[:, 3:] == 0).all()
    assert torch.equal(other.gather(9, ["values"])[0].view(2, 3, 9, 8), wanted[1])
    assert other.store.page_nbytes() == 4 * slot_nbytes(form.slots(8)) == 4 * {"int8": 20, "k8v4": 16}[kind]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", list(FORMATS))
def test_what_gets_no_new_position_keeps_its_codes_whatever_others_of_a_batch_do(kind, dtype):
    """Codes of what was rounded to 16 bits are others: values grew by a percent in a hundred steps."""
    model = attached().to(dtype)
    long, short = random_ids(70, seed=1), random_ids(12, seed=2)  # the second never has as many as are kept
    ids, mask = left_padded([long, short])
    cache = PrunedCache(
        model.config, SnapKV(window=4, num_sink_tokens=4), keep=60, every=2, positions="contiguous", dtype=kind
    )
    prefill(model, ids, cache, attention_mask=mask)

    def held():
        pool = cache.layers[0].pool
        return [x[len(x) // 2 :, :10] for x in pool.gather(max(pool.counts), exact=True)]

    before = held()
    for i in range(24):
        model(torch.full((2, 1), 7 + i), past_key_values=cache)
    assert cache.stored_lengths()[0][0] == [60] * 2 and all(map(torch.equal, held(), before))


@torch.no_grad()
def test_compressing_again_moves_codes():
    model = attached()
    cache = PrunedCache(model.config, SnapKV(window=6), keep=0.75, later="keep", dtype="int8")
    prefill(model, random_ids(40, seed=3), cache)
    once = PrunedCache(model.config, SnapKV(window=6), keep=0.5, later="keep", dtype="int8")
    prefill(model, random_ids(40, seed=3), once)
    cache.compress(keep=0.5)
    ids = random_ids(40, seed=3)[:, -1:]
    assert torch.equal(model(ids, past_key_values=cache).logits, model(ids, past_key_values=once).logits)


def test_a_broken_token_is_found():
    """Keys that overflow become NaN codes, and the pass says so, as without codes."""
    model = attached()
    cache = QuantizedCache(model.config)
    with torch.no_grad():
        model(random_ids(20), past_key_values=cache)
        weight = model.model.layers[1].self_attn.k_proj.weight
        before = weight.clone()
        weight.mul_(1e9)
        with pytest.raises(RuntimeError, match="hidden states hold NaN"):
            model(random_ids(1), past_key_values=cache)
        weight.copy_(before)


def test_texts_name_them():
    config = attached().config
    cache = CacheSpec.parse("quantized,dtype=k8v4").make(config)
    assert type(cache) is QuantizedCache
    assert cache.pool_settings.dtype == "k8v4"
    pruned = CacheSpec.parse("pruned,pruner=snapkv,keep=64,dtype=int8").make(config)
    assert pruned.pool_settings.dtype == "int8"
    assert CacheSpec.parse("quantized").make(config).pool_settings.dtype == "int8"
    assert CacheSpec.parse("streaming,window_size=64,dtype=int8").make(config).layers[0].dtype == "int8"
    assert CacheSpec.parse("quest,token_budget=64,dtype=k8v4").make(config).pool_settings.dtype == "k8v4"


@pytest.mark.parametrize("make", [QuantizedCache, CACHES["keep"], CACHES["quest"], CACHES["stream"]])
def test_other_formats_are_refused(make):
    with pytest.raises(ValueError, match=re.escape("got 'int2'")):
        make(attached().config, "int2")


def test_heads_of_an_odd_size_need_whole_bytes():
    form = Format("k8v4", torch.float32)
    with pytest.raises(ValueError, match="'k8v4' needs heads of an even size, got 5: take 'int8'"):
        form.slots(5)
    assert Format("int8", torch.float32).slots(5)["values"] == ((5,), torch.int8)


def test_a_guide_has_no_effect():
    model = attached()
    with pytest.raises(ValueError, match="guide has no effect with QuantizedCache"):
        prefill(model, random_ids(20), QuantizedCache(model.config), guide=random_ids(3)[0])


EACH = (None, "int8", "k8v4")  # of the three layers of the tiny models


@pytest.mark.parametrize("name", ["quantized", "snapkv", "quest", "iterative, every", *STREAMS, "gated", "dms", "dmc"])
def test_each_layer_may_have_a_dtype_of_its_own(name, tmp_path):
    model, ids = model_of(name), random_ids(41, seed=3)
    cache, *others = (EVERY[name](model.config, dtype) for dtype in (list(EACH), *EACH))
    for one in (cache, *others):
        prefill(model, ids, one)
    for index, other in enumerate(others):
        if name not in MODELS or index == 0:  # later layers' decisions follow what was rounded
            assert cache.layers[index].nbytes() == other.layers[index].nbytes()
    assert len({layer.nbytes() for layer in cache.layers}) == 3
    check_sharing(model, lambda dtype: EVERY[name](model.config, dtype), list(EACH), tmp_path)


def test_windows_have_the_dtypes_of_their_layers():
    model, ids = kind_model("gemma2"), random_ids(60)
    attach(model)
    dtypes = (None, "int8", "k8v4", None)  # a window, all, a window, all
    cache, *others = (DenseCache(model.config, dtype=dtype) for dtype in (dtypes, None, "int8", "k8v4"))
    for one in (cache, *others):
        prefill(model, ids, one)
    for layer, dtype in zip(cache.layers, dtypes, strict=True):
        same = others[(None, "int8", "k8v4").index(dtype)]
        assert layer.nbytes() == same.layers[layer.index].nbytes()


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (("int8", None), r"one for each of the model's 3 layers, got a list of 2: \['int8', None\]"),
        ([None, "int2", "int8"], "or a list of these, one for each layer, got 'int2'"),
    ],
)
def test_wrong_dtypes_of_layers_are_named(dtype, message):
    for make in (QuantizedCache, CACHES["keep"], CACHES["stream"]):
        with pytest.raises(ValueError, match=message):
            make(attached().config, dtype)


def test_bytes_count_the_dtypes_of_layers():
    model = attached()
    for budget in (None, AdaKV()):
        cache = PrunedCache(model.config, SnapKV(window=4), budget, keep="32KiB", page_size=4, dtype=EACH)
        prefill(model, random_ids(200), cache)
        numbers, *codes = (layer.stored_lengths()[0] for layer in cache.layers)
        assert sum(numbers) < sum(codes[0]) < sum(codes[1]) and 30 * 2**10 < cache.nbytes() <= 32 * 2**10
    with pytest.raises(ValueError, match="tokens or a share with GlobalTopK where each layer has a dtype, got 32KiB"):
        PrunedCache(model.config, SnapKV(), GlobalTopK(), keep="32KiB", dtype=EACH)


def test_layers_that_read_each_other_have_one_dtype():
    model, new = sharing("one")
    with pytest.raises(ValueError, match="dtype must be one for all layers, which read each other's keys, got"):
        new(["int8"] * 4)


def test_texts_name_a_dtype_for_each_layer():
    config = attached().config
    spec = CacheSpec.parse("pruned,pruner=snapkv,keep=64,dtype=none+2*int8")
    assert spec.make(config).pool_settings.dtype == (None, "int8", "int8")
    assert CacheSpec.parse(str(spec)) == spec
    assert CacheSpec.parse("streaming,window_size=64,dtype=2*k8v4+none").make(config).layers[1].dtype == "k8v4"
    with pytest.raises(ValueError, match=re.escape("each layer such as 2*none+30*int8, got '2**int8'")):
        CacheSpec.parse("quantized,dtype=2**int8")


def test_a_prompt_is_read_by_some_tokens_at_a_time():
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        QuantizedCache(attached().config, chunk_size=0)
