"""benchmarks/quality_common.py: models are what their configs or their users say, and have caches of their own."""

import sys
from pathlib import Path

import pytest
import torch
from helpers import tiny_model
from transformers import DynamicCache

from kvcompress import DMCCache, PoDCache, dmc, pod
from kvcompress.dmc import DMCConfig
from kvcompress.pod import PoDConfig
from kvcompress.retrofit.gqa import convert_to_gqa

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LEAD = ((0, 0), (0, 0), (0, 2))


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("common", "quality_tasks", "quality", "quality_common")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import quality_common

    yield quality_common
    for name in names:
        sys.modules.pop(name, None)


def test_what_a_model_is_says_its_config(common):
    plain = tiny_model()
    assert common.kind_of(plain.config, 2) == "dense"
    assert common.kind_of(convert_to_gqa(plain, 1).config, 2) == "GQA"
    for settings, kind in (({"mode": "dms"}, "DMS"), ({"share_heads": "mean"}, "DMC-HardC"), ({"stride": 4}, "pooling"),
                           ({}, "DMC")):  # fmt: skip
        model = tiny_model()
        dmc.convert(model, DMCConfig(**settings))
        assert common.kind_of(model.config, 2) == kind
    for mode, kind in (("pod", "PoD"), ("window", "window"), ("cla", "CLA")):
        model = tiny_model()
        pod.convert(model, PoDConfig(LEAD, mode=mode))
        assert common.kind_of(model.config, 2) == kind


def test_folders_are_what_their_configs_or_their_users_say(common, tmp_path):
    original, merging, sharing = tiny_model(), tiny_model(), tiny_model()
    dmc.convert(merging, anneal=False)
    merging.to(torch.bfloat16).save_pretrained(tmp_path / "mine")
    pod.convert(sharing, PoDConfig(LEAD))
    sharing.save_pretrained(tmp_path / "shared")
    convert_to_gqa(tiny_model(), 1).save_pretrained(tmp_path / "heads")
    given = [f"DMC-C={tmp_path / 'mine'}", str(tmp_path / "shared"), str(tmp_path / "heads")]
    found = list(common.subjects_of(given, original))
    assert [(subject.kind, subject.name, subject.method) for subject in found] == [
        ("DMC-C", "mine", "dmc"), ("PoD", "shared", "pod"), ("GQA", "heads", None),
    ]  # fmt: skip
    assert [type(subject.cache(4)) for subject in found] == [DMCCache, PoDCache, DynamicCache]
    assert found[1].cache(4, tau=0.5).tau == 0.5
    assert found[1].settings()["config"]["method"] == "pod" and found[2].settings() == {"kv_heads": 1}
    assert all(subject.model.dtype == torch.float32 and not subject.model.training for subject in found)


def test_a_missing_folder_is_found_before_any_is_loaded(common, tmp_path):
    tiny_model().save_pretrained(tmp_path / "there")
    with pytest.raises(FileNotFoundError, match="must be folders with a config"):
        common.subjects_of([str(tmp_path / "there"), f"PoD={tmp_path}"], tiny_model())
