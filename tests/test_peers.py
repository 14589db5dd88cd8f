"""quality/peers.py: another library's presses are measured as our caches are, on the same prompts, and compared."""

import json
import sys

import numpy as np
import pytest
import torch

import kvcompress
from benchmarks.quality import peers, quality
from benchmarks.quality.parts import kvpress_rows
from benchmarks.quality.parts.measures import make_tasks
from benchmarks.quality.parts.tasks import measure
from kvcompress import PrunedCache
from kvcompress.pruners import WindowAttention

SIZES = quality.SIZES["tiny"]
KEPT = 100

# what stands for kvpress: presses that keep the last tokens of every head, by cutting the cache or by hiding the others
STAND_IN = """
from contextlib import contextmanager
import torch

class Press:
    hides = False
    def __init__(self, ratio=0.0, *, compression_ratio=None, **others):
        self.ratio = ratio if compression_ratio is None else compression_ratio
        if not isinstance(self.ratio, float):
            raise TypeError("a press over a press")
    @contextmanager
    def __call__(self, model):
        def cut(module, args, kwargs, output):
            layer = kwargs["past_key_values"].layers[module.layer_idx]
            first = layer.keys.shape[2] - int(layer.keys.shape[2] * (1 - self.ratio))
            if self.hides:
                gone = torch.zeros(layer.keys.shape[:3], dtype=torch.bool)
                gone[:, :, :first] = True
                module.masked_key_indices = gone.nonzero(as_tuple=True)
            else:
                layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]
        hooks = [layer.self_attn.register_forward_hook(cut, with_kwargs=True) for layer in model.model.layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

class KVzipPress(Press):
    hides = True

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Press
"""


def test_attention_sees_all_before_it_but_what_is_hidden():
    torch.manual_seed(0)
    B, Hq, Hkv, S, T, D = 1, 4, 2, 3, 7, 8
    module = torch.nn.Module()
    module.masked_key_indices = None
    query, key, value = torch.randn(B, Hq, S, D), torch.randn(B, Hkv, T, D), torch.randn(B, Hkv, T, D)
    hidden = [(0, 0, 1), (0, 1, 3), (0, 1, 0)]
    for places in ([], hidden):
        if places:
            module.masked_key_indices = tuple(map(torch.tensor, zip(*places, strict=True)))
        out, _ = kvpress_rows.attend(module, query, key, value, None, scaling=0.3)
        for h in range(Hq):
            for s in range(S):
                seen = [t for t in range(T - S + s + 1) if (0, h // 2, t) not in places]
                weights = torch.softmax(0.3 * key[0, h // 2, seen] @ query[0, h, s], 0)
                torch.testing.assert_close(out[0, s, h], weights @ value[0, h // 2, seen])
    kvpress_rows.attend(module, query, key[:, :, :S], value[:, :, :S], None, scaling=0.3)  # another prompt begins
    assert module.masked_key_indices is None


def test_a_press_is_measured_as_our_caches_are(tmp_path, monkeypatch):
    """The whole program, with a stand-in for kvpress."""
    (tmp_path / "kvpress.py").write_text(STAND_IN)
    about = tmp_path / "kvpress-9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpress\nVersion: 9\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["peers.py", "--tiny", "--python", sys.executable, "--json", str(path),
                                      "--presses", "SnapKV", "KVzip", "AdaKV(SnapKV)"])  # fmt: skip
    peers.main()
    written = json.loads(path.read_text())
    assert written["machine"]["kvpress"] == "9"
    rows = {row["name"].removeprefix("kvpress/example/"): row for row in written["rows"]}
    dense, cut, hiding = rows["dense/keep1"], rows["SnapKV/keep0.5"], rows["KVzip/keep0.5"]
    assert "press over a press" in rows["AdaKV(SnapKV)/keep0.5"]["error"]
    assert "trained" in rows["not_run/KVzapPress"]["reason"]
    assert (cut["frees_memory"], hiding["frees_memory"]) == (True, False)
    assert cut["nbytes_share"] == hiding["nbytes_share"] == 0.5
    model, tokenizer = kvcompress.load_example_model()
    with kvcompress.attach(model):
        for task in make_tasks(tokenizer, SIZES):
            field = f"{quality.RECALLS.get(task.name, 'bits_per_byte')}_samples"
            kept = int(len(task.prompts[0]) * 0.5)
            for row, budget in ((dense, len(task.prompts[0])), (cut, kept), (hiding, kept)):
                ours = measure(model, task, lambda n=budget: PrunedCache(model.config, WindowAttention(), n))
                np.testing.assert_allclose(row[field], ours.samples, atol=1e-4)


def test_prompts_of_another_python_are_refused_and_an_error_there_is_one_here(tmp_path):
    row = {"method": "dense", "share_kept": 1.0, "bits_per_byte": 1.0, "bits_per_byte_samples": [1.0, 1.0]}
    with pytest.raises(ValueError, match="ours must be rows of the same model"):
        peers.peer_rows([row], [row | {"bits_per_byte_samples": [1.0, 1.1]}])
    model, tokenizer = kvcompress.load_example_model()
    with pytest.raises(RuntimeError, match="ended with status 1"):
        list(peers.lines_of(sys.executable, model, tokenizer, {"dtype": "float32"}))


def test_the_best_of_both_and_who_is_ahead():
    def row(method, part, bits, recall, **more):
        row = {"method": method, "share_kept": 1 / part, "nbytes_share": 1 / part, "frees_memory": True}
        for field, samples in (("bits_per_byte", bits), ("later_recall", recall)):
            row |= {field: sum(samples) / 2, f"{field}_samples": samples}
        return row | {"bits_per_byte_over_dense": row["bits_per_byte"] - 2.0} | more

    dense = row("dense", 1, [1.0, 3.0], [1.0, 1.0])
    theirs = [dense, row("p", 4, [1.5, 3.5], [1.0, 0.5]), row("q", 4, [1.1, 3.0], [0.0, 0.5], frees_memory=False),
              row("much", 4, [1.0, 3.0], [1.0, 1.0], nbytes_share=0.3)]  # fmt: skip
    ours = [dense, row("a", 4, [1.0, 3.05], [1.0, 1.0]), row("b", 4, [1.4, 3.0], [1.0, 0.5]),
            row("told", 4, [1.0, 3.0], [1.0, 1.0], guided=True)]  # fmt: skip
    found = {best["name"]: best for best in peers.peer_rows(theirs, ours)}
    later, bits = found["peers/later/4"], found["peers/bits/4"]
    assert (later["method"], later["press"], later["recall"], later["press_recall"]) == ("a", "p", 1.0, 0.75)
    assert (later["lead"], later["lead_se"], later["press_frees_memory"]) == (0.25, 0.25, True)
    assert (bits["method"], bits["press"], bits["press_frees_memory"]) == ("a", "q", False)
    assert bits["over_dense"] == pytest.approx(0.0125) and bits["press_over_dense"] == pytest.approx(0.025)
    assert bits["lead"] == pytest.approx(0.0125)
