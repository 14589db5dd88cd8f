"""Saved caches: what they are after they are loaded, in another process too, and what is refused."""

import json
import os
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import (
    DMC_MODES,
    attached,
    deciding_model,
    kind_model,
    left_padded,
    needs_transformers,
    random_ids,
    tiny_gates,
    tiny_model,
)
from safetensors.torch import load_file, save_file

import kvcompress
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from kvcompress import (
    AdaKV,
    DMCCache,
    Gate,
    GatedCache,
    GlobalTopK,
    IterativeCache,
    PoDCache,
    PrunedCache,
    QuestCache,
    RemoteGap,
    StreamingCache,
    attach,
    load_cache,
    load_caches,
    pod,
    prefill,
    save_caches,
)
from kvcompress.caches import saving
from kvcompress.caches.store import PageStore
from kvcompress.pod import PoDConfig
from kvcompress.pruners import H2O, Pruner, SnapKV

SNAP = SnapKV(window=4)
PRUNED = {"page_size": 8}
GAP = RemoteGap(gap=8, near_length=4)


def sharing():
    model = attached(num_hidden_layers=4)
    pod.convert(model, PoDConfig(((0, 0), (0, 1), (2, 1), (2, 1)), 3, 9))
    return model


def deciding(mode):
    model = deciding_model(dmc=DMC_MODES[mode])
    attach(model)
    return model


def windows():
    model = kind_model("gemma2")
    attach(model)
    return model


CASES = {
    "pruned": (attached, lambda c: PrunedCache(c, SNAP, AdaKV(), keep=20, **PRUNED)),
    "kept later": (attached, lambda c: PrunedCache(c, SNAP, GlobalTopK(), keep=20, later="keep", **PRUNED)),
    "h2o, every, gap": (attached, lambda c: PrunedCache(c, H2O(), keep=20, every=3, positions=GAP)),
    "no growth": (attached, lambda c: PrunedCache(c, SNAP, keep=20, page_size=8, max_pages=64, grow="error")),
    "iterative": (attached, lambda c: IterativeCache(c, memory_size=20, chunk_size=16, track=True)),
    "iterative, every": (attached, lambda c: IterativeCache(c, memory_size=20, budget=AdaKV(), chunk_size=16, every=3)),
    "gated": (attached, lambda c: GatedCache(c, tiny_gates(), threshold=0.0, window=8, page_size=4, track=True)),
    "gates": (attached, lambda c: PrunedCache(c, Gate(tiny_gates(), last=4), keep=20, every=3)),
    "streaming": (attached, lambda c: StreamingCache(c, window_size=20)),
    "lm-infinite": (attached, lambda c: StreamingCache(c, window_size=20, sink_distance="window")),
    "quest": (attached, lambda c: QuestCache(c, token_budget=12, page_size=4)),
    "windows": (windows, lambda c: PrunedCache(c, SNAP, keep=20)),
    "dmc": (lambda: deciding("dmc"), lambda c: DMCCache(c, track=True)),
    "dms": (lambda: deciding("dms"), lambda c: DMCCache(c, page_size=4)),
    "pod": (sharing, lambda c: PoDCache(c, page_size=4, tau=0.7, pruner=SNAP, distant=12)),
}  # fmt: skip
# the model with windows softcaps its attention
_MARKS = {"windows": [needs_transformers(5, 23)]}
cases = pytest.mark.parametrize(
    ("new_model", "new_cache"),
    [pytest.param(*case, id=name, marks=_MARKS.get(name, ())) for name, case in CASES.items()],
)


def answer(model, ids, cache, **settings):
    return model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False, **settings)


def longer(ids, seed=7, n=6):
    return torch.cat([ids, random_ids(n, batch=ids.shape[0], seed=seed)], 1)


@cases
def test_a_loaded_cache_goes_on_as_the_saved_one(new_model, new_cache, tmp_path):
    """With a prompt read, tokens generated, a batch of several lengths."""
    model, prompts = new_model(), [random_ids(50), random_ids(31, seed=2)]
    ids, mask = left_padded(prompts)
    cache = new_cache(model.config)
    first = kvcompress.generate(model, ids, cache, mask, max_new_tokens=5, do_sample=False)
    path = cache.save(tmp_path / "cache.safetensors")
    again = load_cache(path, model)
    assert type(again) is type(cache)
    for name in ("stored_lengths", "nbytes", "get_seq_length"):
        assert getattr(again, name)() == getattr(cache, name)()
    full = torch.cat([mask, torch.ones(2, 11, dtype=torch.long)], 1)
    asked = torch.cat([first, random_ids(6, batch=2, seed=9)], 1)
    assert torch.equal(
        answer(model, asked, again, attention_mask=full), answer(model, asked, cache, attention_mask=full)
    )
    if not isinstance(cache, DMCCache) or cache.track:
        mine, theirs = again.kept_positions(), cache.kept_positions()
        assert [[[h.tolist() for h in row] for row in x] for x in mine] == [
            [[h.tolist() for h in row] for row in x] for x in theirs
        ]


@needs_transformers(5, 23)
def test_recurrent_layers_are_saved(tmp_path):
    model = CONFIGURATIONS["qwen3_next"].model()
    attach(model)
    ids = random_ids(40)
    cache = prefill(model, ids, PrunedCache(model.config, SNAP, keep=20))
    again = load_cache(cache.save(tmp_path / "c"), model)
    assert torch.equal(answer(model, ids, again), answer(model, ids, cache))


def test_another_process_goes_on(tmp_path):
    model, ids = attached(), random_ids(60)
    cache = prefill(model, ids, PrunedCache(model.config, SNAP, AdaKV(), keep=20))
    path = cache.save(tmp_path / "cache.safetensors")
    script = (
        "import sys, torch; sys.path.insert(0, sys.argv[2]); from helpers import attached, random_ids\n"
        "import kvcompress; model = attached(); cache = kvcompress.load_cache(sys.argv[1], model)\n"
        "out = model.generate(random_ids(60), past_key_values=cache, max_new_tokens=5, do_sample=False)\n"
        "print(out[0, -5:].tolist())"
    )
    out = subprocess.run(
        [sys.executable, "-c", script, path, str(Path(__file__).parent)], capture_output=True, text=True, check=True
    )
    assert json.loads(out.stdout) == answer(model, ids, cache)[0, -5:].tolist()


def test_forks_share_their_prompt_in_the_file_and_after(tmp_path):
    model, ids = attached(), random_ids(200)
    cache = prefill(model, ids, IterativeCache(model.config, memory_size=160, chunk_size=64, page_size=8))
    forks = [cache.fork() for _ in range(4)]
    for seed, fork in enumerate(forks[:3]):
        answer(model, longer(ids, seed, 3), fork)
    alone = cache.save(tmp_path / "one").stat().st_size
    path = save_caches([cache, *forks], tmp_path / "all")
    assert path.stat().st_size < 1.6 * alone
    again = load_caches(path, model)
    assert len({id(x.layers[0].pool.store) for x in again}) == 1
    for mine, theirs in zip(again, [cache, *forks], strict=True):
        asked = longer(ids, 11, 15)
        assert torch.equal(answer(model, asked, mine), answer(model, asked, theirs))
    with pytest.raises(ValueError, match=r"all holds 5 caches: load_caches gives them all"):
        load_cache(path, model)
    used = again[0].nbytes()
    del again[1:], mine
    again[0].trim()
    assert again[0].reserved_nbytes() < 1.1 * used


def test_a_loaded_file_is_mapped_and_never_written(tmp_path):
    model, ids = attached(), random_ids(60)
    path = prefill(model, ids, PrunedCache(model.config, SNAP, keep=20, page_size=64)).save(tmp_path / "c")
    before = path.read_bytes()
    again = load_cache(path, model, verify=False)
    answer(model, ids, again)  # into pages that have room
    assert path.read_bytes() == before
    assert torch.equal(answer(model, ids, load_cache(path, model)), answer(model, ids, load_cache(path, model)))
    assert [x.name for x in tmp_path.iterdir()] == ["c"]  # nothing temporary is left


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = attached()
    cache = prefill(model, random_ids(60), PrunedCache(model.config, SNAP, keep=20))
    return model, cache.save(tmp_path_factory.mktemp("saved") / "c.safetensors")


def test_what_is_damaged_is_named(saved, tmp_path):
    model, path = saved
    good = path.read_bytes()
    bad = tmp_path / "bad.safetensors"
    header = 8 + int.from_bytes(good[:8], "little")
    middle = bytearray(good)
    middle[(header + len(good)) // 2] ^= 1
    inside = bytearray(good)
    inside[good.index(b"objects")] ^= 1
    for data in (good[:-7], good[: len(good) // 2], good[:5], b"", b"PK\x03\x04" + good, bytes(middle), bytes(inside)):
        bad.write_bytes(data)
        with pytest.raises(ValueError, match=r"bad.safetensors is damaged"):
            load_cache(bad, model)
    load_cache(path, model, verify=False)
    save_file(load_file(path), bad)
    with pytest.raises(ValueError, match=r"bad.safetensors is a safetensors file, but not one that a cache"):
        load_cache(bad, model)
    text = json.dumps({"format": "kvcompress caches 99"})
    save_file(load_file(path), bad, {"kvcompress": text, "check": str(zlib.crc32(text.encode()))})
    with pytest.raises(ValueError, match=r"format of .*bad.safetensors must be 'kvcompress caches 6', got 'kvcompress"):
        load_cache(bad, model)
    with pytest.raises(FileNotFoundError, match="path must be a file that save wrote"):
        load_cache(tmp_path / "none", model)


def test_another_model_is_refused(saved):
    _, path = saved
    for model, message in (
        (tiny_model("qwen2"), r"class LlamaModel, this one Qwen2Model"),
        (tiny_model(max_position_embeddings=1024), r"config.max_position_embeddings = 512 \(here 1024\)"),
        (tiny_model(seed=1), "saved with other weights"),
        (tiny_model().bfloat16(), "dtype float32, this one bfloat16: load the model with dtype=torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            load_cache(path, model)
    changed = tiny_model()
    changed.model.layers[2].mlp.down_proj.weight.data[0, 0] += 1
    with pytest.raises(ValueError, match="saved with other weights"):
        load_cache(path, changed)


@dataclass(frozen=True)
class Latest(Pruner):
    def scores(self, candidates, keep):
        return torch.arange(candidates.count, dtype=torch.float32).expand(candidates.heads, -1)


def test_pruners_of_ones_own_are_given(tmp_path):
    model, ids = attached(), random_ids(60)
    cache = prefill(model, ids, PrunedCache(model.config, Latest(), keep=20))
    path = cache.save(tmp_path / "c")
    with pytest.raises(ValueError, match=r"holds a .*:Latest, which is no class of kvcompress: give it"):
        load_cache(path, model)
    assert torch.equal(answer(model, ids, load_cache(path, model, classes=[Latest])), answer(model, ids, cache))


def test_what_cannot_be_saved_is_refused_and_leaves_the_file(tmp_path, monkeypatch):
    model, other, ids = attached(), attached(seed=1), random_ids(60)
    cache, path = prefill(model, ids, PrunedCache(model.config, SNAP, keep=20)), tmp_path / "c"
    with pytest.raises(ValueError, match=r"model must be given where caches were not used with a model"):
        PrunedCache(model.config, SNAP, keep=20).save(path)
    with pytest.raises(ValueError, match=r"model must be given where caches are of several models"):
        save_caches([cache, prefill(other, ids, PrunedCache(other.config, SNAP, keep=20))], path)
    with pytest.raises(ValueError, match="caches must be kvcompress caches, got int"):
        save_caches([3], path)
    with pytest.raises(ValueError, match="caches must hold at least one"):
        save_caches([], path)
    assert cache.fork().save(path).exists()
    before = path.read_bytes()
    monkeypatch.setattr(
        "kvcompress.caches.saving.save_file", lambda tensors, name, header: name.write_text("x") and 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        cache.save(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    cache.mark_incomplete()
    with pytest.raises(RuntimeError, match="incomplete"):
        cache.save(path)


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    model = attached()
    cache = prefill(model, random_ids(20), IterativeCache(model.config))
    for path in (tmp_path, tmp_path / "none" / "a.safetensors"):
        with pytest.raises(ValueError, match=f"path must be a file in a folder that exists, got {path}"):
            cache.save(path)
    assert list(tmp_path.iterdir()) == []


def test_no_other_file_is_written_over(tmp_path):
    model = attached()
    cache = prefill(model, random_ids(20), IterativeCache(model.config))
    text, weights = tmp_path / "prompt.txt", tmp_path / "model.safetensors"
    text.write_text("a prompt")
    save_file({"w": torch.ones(3)}, weights)
    for path in (text, weights):
        before = path.read_bytes()
        with pytest.raises(ValueError, match=f"path must be new, or a file that save wrote, got {path}"):
            cache.save(path)
        assert path.read_bytes() == before
    path = cache.save(tmp_path / "cache.safetensors")
    assert cache.save(path) == path and load_cache(path, model).seen == cache.seen


def test_saving_copies_pages_once(tmp_path, monkeypatch):
    """What safetensors is given are the pages that copy_of made."""
    model = attached()
    cache = prefill(model, random_ids(50), PrunedCache(model.config, SNAP, keep=20, **PRUNED))
    copies, copy_of = [], PageStore.copy_of

    def noted(store, rows):
        copies.append(copy_of(store, rows))
        return copies[-1]

    written = []
    monkeypatch.setattr(PageStore, "copy_of", noted)
    monkeypatch.setattr(
        saving,
        "save_file",
        lambda tensors, path, metadata: (written.append(tensors), save_file(tensors, path, metadata)),
    )
    cache.save(tmp_path / "cache.safetensors")
    pages = {x.data_ptr() for store, _ in copies for x in store.arrays.values()}
    assert len(pages) == 2 * len(copies) and pages <= {x.data_ptr() for x in written[0].values()}


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_a_saved_file_has_the_mode_of_a_new_one(umask, tmp_path):
    model = attached()
    cache = prefill(model, random_ids(20), PrunedCache(model.config, SNAP, keep=20))
    before = os.umask(umask)
    try:
        path = cache.save(tmp_path / "cache.safetensors")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
