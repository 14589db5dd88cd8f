"""quality/pod_quality.py on a few short prompts and models that nobody trained: its rows hold what they name."""

import argparse
import json
import math
from dataclasses import replace

import pytest

import kvcompress
from benchmarks.quality import pod_quality as benchmark
from kvcompress.models.tokenizer import byte_tokenizer
from kvcompress.pod import PoDConfig, convert

SIZES = replace(benchmark.SIZES["tiny"], taus=(1.0, 0.5, 0.0))
LEAD = ((0, 0), (0, 0), (0, 2), (0, 2))  # 5 of 8 follow
CONFIG = PoDConfig(LEAD, sinks=4, recent=28)
MEASURED = ("bits_per_byte", "fact_recall", "later_recall", "pair_recall")


def example():
    return kvcompress.load_example_model()[0]


def converted(**changes):
    model = example()
    convert(model, replace(CONFIG, **changes))
    return model


def by_name(rows):
    return {row["name"].removeprefix("pod_quality/example/"): row for row in rows}


def test_rows_of_every_subject(tmp_path, monkeypatch):
    pruned = ("SnapKV", "PyramidKV31")
    monkeypatch.setattr(benchmark, "PRUNED", {name: benchmark.PRUNED[name] for name in pruned})
    subjects = [benchmark.Subject("near", "window", converted(mode="window")),
                benchmark.Subject("mine", "PoD", converted()),
                benchmark.Subject("pairs", "CLA", converted(mode="cla"))]  # fmt: skip
    rows = benchmark.run(example(), byte_tokenizer(), subjects, SIZES, page_size=4)
    found = by_name(rows)
    assert list(found) == [
        "dense", "window/near", "PoD/mine", "PoD+SnapKV/distant32", "PoD+SnapKV31/distant32", "PoD/mine/tau1",
        "PoD/mine/tau0.5", "PoD/mine/tau0", "CLA/pairs", "PoD/untrained", "window/untrained",
        *(f"{name}/as_mine" for name in pruned), "StreamingLLM/near32", "LM-Infinite/near32",
        *(f"{name}/near32" for name in pruned), "Quest/near32",
    ]  # fmt: skip
    dense, mine = found["dense"], found["PoD/mine"]
    assert dense["fact_recall"] == dense["recall_kept"] == 1.0 and dense["nbytes_share"] == 1.0
    for field in (*MEASURED, "full_bits_per_byte"):
        assert len(mine[f"{field}_samples"]) == len(dense[f"{field}_samples"])

    # bytes: what the method says, and tables and what is left of pages on top
    assert mine["phi"] == 5 / 8 and "phi" not in found["window/near"]
    T, W = dense["prompt_tokens"]["text"], 32
    shares = {
        "PoD/mine": 1 - 0.5 * 5 / 8 * (T - W) / T, "window/near": W / T, "CLA/pairs": 3 / 8,
        "PoD+SnapKV/distant32": (2 * W - 0.5 * 5 / 8 * W) / T, "StreamingLLM/near32": W / T,
        "LM-Infinite/near32": (W + 4) / T, "SnapKV/near32": W / T, "Quest/near32": 1 + 1 / 16,
        "SnapKV/as_mine": mine["nbytes_share"], "PyramidKV31/as_mine": mine["nbytes_share"],
    }  # fmt: skip
    for name, share in shares.items():
        assert found[name]["nbytes_share"] == pytest.approx(share, abs=0.04), name
    for field in MEASURED:
        share = mine[f"{field}_nbytes_share"]
        assert found["SnapKV/as_mine"][f"{field}_nbytes_share"] == pytest.approx(share, rel=0.04)

    # the given models are the original, converted, as the untrained ones are
    for name, same in (("PoD/mine", "PoD/untrained"), ("window/near", "window/untrained")):
        assert found[same]["untrained"] and not found[name]["untrained"]
        for field in (*MEASURED, "full_bits_per_byte"):
            assert found[name][f"{field}_samples"] == found[same][f"{field}_samples"]
    assert mine["full_bits_per_byte_over_dense"] > 0

    # token by token without skipping is the model itself; with tau 0 every follower skips, and near tokens remain
    taus = [found[f"PoD/mine/tau{tau}"] for tau in ("1", "0.5", "0")]
    assert taus[0]["bits_per_byte_samples"] == pytest.approx(mine["bits_per_byte_samples"], rel=1e-3)
    assert [row["skipped_of_followers"] for row in taus][::2] == [0.0, 1.0]
    assert taus[2]["skipped_of_distant"] == pytest.approx(5 / 8)
    assert 0 < taus[1]["skipped_of_followers"] < 1
    assert 1.0 == taus[0]["attention_work"] > taus[1]["attention_work"] > taus[2]["attention_work"]
    assert set(taus[1]["skipped_by_task"]) == set(dense["prompt_tokens"])

    choice = argparse.Namespace(json=tmp_path / "rows.json", figure=tmp_path / "rows.png")
    benchmark.deliver(choice, rows, benchmark.show, benchmark.draw)
    assert choice.figure.stat().st_size > 10_000
    assert json.loads(choice.json.read_text())["rows"] == rows


def test_recall_is_over_the_originals_and_over_all_tasks():
    row = benchmark.run(example(), byte_tokenizer(), [benchmark.Subject("near", "window", converted(mode="window"))],
                        replace(SIZES, facts=4))[1]  # fmt: skip
    recalls = ("fact_recall", "later_recall", "pair_recall")
    assert row["recall_kept"] == pytest.approx(sum(row[field] for field in recalls) / 3, abs=1e-5)
    assert row["recall_kept"] < 1
    for depth in range(8):
        known = [row[f"{field}_by_depth"][depth] for field in recalls]
        known = [share for share in known if share is not None]
        wanted = sum(known) / len(known) if known else None
        assert row["recall_by_depth"][depth] == (wanted if wanted is None else pytest.approx(wanted, abs=1e-5))


def test_a_plan_without_followers_is_the_original(monkeypatch):
    monkeypatch.setattr(benchmark, "PRUNED", {})
    monkeypatch.setattr(benchmark, "DISTANT", ())
    monkeypatch.setattr(benchmark, "UNTRAINED", ())
    subject = benchmark.Subject("all", "PoD", converted(lead=((0, 0), (1, 1), (2, 2), (3, 3))))
    rows = benchmark.run(example(), byte_tokenizer(), [subject], replace(SIZES, taus=(0.5,)))
    dense, same, *_ = rows
    assert same["phi"] == 0.0 and same["nbytes_share"] == pytest.approx(1, abs=0.03)
    for field in (*MEASURED, "full_bits_per_byte"):
        assert same[field] == pytest.approx(dense[field], abs=1e-4)
    tau = next(row for row in rows if "tau" in row)
    assert tau["skipped_of_followers"] is None and tau["skipped_of_distant"] == 0.0  # nothing that could be skipped
    benchmark.show(rows)


def test_prompts_and_what_follows_fill_a_window():
    for given, longest in (("full", 2048), ("quick", 1024 + 156)):
        chosen = benchmark.fitted(byte_tokenizer(), benchmark.SIZES[given])
        tasks = benchmark.make_tasks(byte_tokenizer(), chosen)
        lengths = {task.name: len(task.prompts[0]) + max(map(len, task.following)) for task in tasks}
        assert max(lengths.values()) == lengths["later"] == longest
    with pytest.raises(ValueError, match=r"window must hold .*, got 512 for 490 \+ 33 tokens of text"):
        benchmark.fitted(byte_tokenizer(), replace(SIZES, length=490))
    with pytest.raises(ValueError, match="window must be at most 2048 tokens"):
        benchmark.run(example(), byte_tokenizer(), [], replace(SIZES, window=4096))


def test_shares_of_batches_are_weighed_by_their_prompts():
    class Cache:
        skips = True

        def __init__(self, prompts, share):
            self.prompts, self.share = prompts, share

        def seen_lengths(self):
            return [1] * self.prompts

        def skip_shares(self):
            return kvcompress.pod.skips.SkipShares(self.share, self.share / 2, 1 - self.share)

    found = benchmark.skip_shares([Cache(3, 0.4), Cache(1, 0.8)])
    assert found == pytest.approx({"skipped_of_followers": 0.5, "skipped_of_distant": 0.25, "attention_work": 0.5})
    assert math.isnan(benchmark.skip_shares([Cache(1, math.nan)])["attention_work"])
