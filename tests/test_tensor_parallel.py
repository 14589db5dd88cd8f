"""Models whose heads are cut over ranks (tp_plan): each rank compresses those that it has."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers import attached, in_ranks, random_ids, stays, tiny_model

import kvcompress
from kvcompress import AdaKV, GlobalTopK, dmc, pod
from kvcompress.pruners import TOVA, KeyDiff, SnapKV

IDS = random_ids(30, 2)


def caches(config):
    yield kvcompress.PrunedCache(config, SnapKV(window=4), keep=12)
    yield kvcompress.IterativeCache(config, memory_size=16, chunk_size=8)
    yield kvcompress.StreamingCache(config, window_size=8)


def answers(folder, **options):
    """Logits and tokens of a converted model and its cache's bytes, tokens of the plain one by other caches."""
    model = kvcompress.from_pretrained(folder / "dmc", dtype=torch.float32, **options)
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    cache = kvcompress.DMCCache(model.config)
    found = [kvcompress.generate(model, IDS, cache, max_new_tokens=10, do_sample=False)]
    found.append(model.generate(IDS, max_new_tokens=10, do_sample=False))
    plain = kvcompress.from_pretrained(folder / "plain", dtype=torch.float32, **options)
    for other in caches(plain.config):
        found.append(kvcompress.generate(plain, IDS, other, max_new_tokens=10, do_sample=False))
    return logits, found, cache.nbytes(), cache.compression_ratio(), model


def in_parts(folder):
    """The same by a rank that has half of the heads, and what it says to training and to PoD."""
    logits, found, nbytes, ratio, model = answers(folder, tp_plan="auto")
    errors = []
    for step in (
        lambda: model.train()(input_ids=IDS, labels=IDS),
        lambda: kvcompress.from_pretrained(folder / "pod", tp_plan="auto"),
    ):
        with pytest.raises(ValueError, match=r"must (be|have)") as error:
            step()
        errors.append(str(error.value))
    plain = kvcompress.from_pretrained(folder / "plain", tp_plan="auto")
    with pytest.warns(UserWarning, match="AdaKV divides .*, and the heads of this model are cut over 2 ranks"):
        kvcompress.prefill(plain, IDS, kvcompress.PrunedCache(plain.config, SnapKV(window=4), AdaKV(), keep=12))
    return logits, found, nbytes, ratio, errors


@pytest.mark.parametrize(
    ("pruner", "size", "said"),
    [
        (SnapKV(window=4), stays(12), None),
        (SnapKV(window=4), stays(0.5), None),
        (SnapKV(window=4), stays(12, AdaKV()), "AdaKV divides a budget over heads"),
        (KeyDiff(), stays(0.5, GlobalTopK()), "GlobalTopK divides a budget over heads"),
        (SnapKV(window=4), stays("1MiB"), "keep in bytes (1MiB) is of all heads, here of those of a rank"),
        (TOVA(), stays(12), "TOVA may judge heads together"),
    ],
)
def test_what_judges_heads_together_says_once_that_a_rank_has_some_alone(pruner, size, said):
    model = attached()
    for ranks in (1, 2):
        model.config.distributed_config = SimpleNamespace(tp_size=ranks)  # the heads themselves are all there
        cache = kvcompress.PrunedCache(model.config, pruner, **size)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            for _ in range(2):
                kvcompress.generate(model, IDS[:1], cache, max_new_tokens=2, do_sample=False)
                cache.reset()
        found = [str(warning.message) for warning in given if "ranks" in str(warning.message)]
        expected = [] if said is None or ranks == 1 else [f"{said}, and the heads of this model are cut over 2 ranks"]
        assert [message.split(": each")[0] for message in found] == expected


def test_heads_on_two_ranks_give_the_tokens_of_one(tmp_path):
    torch.manual_seed(0)
    for name in ("plain", "dmc", "pod"):
        model = tiny_model()
        if name == "dmc":
            dmc.convert(model, dmc.DMCConfig(shift=0.0), anneal=False)
            for layer in model.model.layers:
                layer.self_attn.k_proj.weight.data += 0.1 * torch.randn_like(layer.self_attn.k_proj.weight)
        if name == "pod":
            pod.convert(model, pod.PoDConfig(((0, 0), (0, 1), (0, 1)), 2, 6))
        model.save_pretrained(tmp_path / name)
    logits, expected, nbytes, ratio, _ = answers(tmp_path)
    ranks = in_ranks(2, in_parts, tmp_path)
    for found in ranks:
        torch.testing.assert_close(found[0], logits, rtol=1e-4, atol=1e-4)
        assert all(torch.equal(x, y) for x, y in zip(found[1], expected, strict=True))
        assert found[2] < 0.7 * nbytes
        assert "tp_size must be 1 in training, got 2" in found[4][0]
        assert "lead must have the 1 KV heads" in found[4][1]
    assert ranks[0][3] != ranks[1][3] and min(x[3] for x in ranks) < ratio < max(x[3] for x in ranks)
