"""What quality/parts/comparison.py compares: models are what configs or users say, and have their own caches."""

import pytest
import torch
from helpers import tiny_model
from transformers import DynamicCache

from benchmarks.quality.parts import comparison
from benchmarks.quality.parts.measures import Sizes, make_tasks
from kvcompress import DMCCache, PoDCache, dmc, pod
from kvcompress.dmc import DMCConfig
from kvcompress.models import RETROFITTED
from kvcompress.models.tokenizer import byte_tokenizer
from kvcompress.pod import PoDConfig
from kvcompress.retrofit.gqa import convert_to_gqa

SIZES = Sizes(length=256, scored=32, texts=2, facts=2, later=2, pairs=2, per_prompt=2, pairs_per_prompt=4)
LEAD = ((0, 0), (0, 0), (0, 2))


def test_what_a_model_is_says_its_config():
    plain = tiny_model()
    assert comparison.kind_of(plain.config, 2) == "dense"
    assert comparison.kind_of(convert_to_gqa(plain, 1).config, 2) == "GQA"
    for settings, kind in (({"mode": "dms"}, "DMS"), ({"share_heads": "mean"}, "DMC-HardC"), ({"stride": 4}, "pooling"),
                           ({}, "DMC")):  # fmt: skip
        model = tiny_model()
        dmc.convert(model, DMCConfig(**settings))
        assert comparison.kind_of(model.config, 2) == kind
    for mode, kind in (("pod", "PoD"), ("window", "window"), ("cla", "CLA")):
        model = tiny_model()
        pod.convert(model, PoDConfig(LEAD, mode=mode))
        assert comparison.kind_of(model.config, 2) == kind


def test_folders_are_what_their_configs_or_their_users_say(tmp_path):
    original, merging, sharing = tiny_model(), tiny_model(), tiny_model()
    dmc.convert(merging, anneal=False)
    merging.to(torch.bfloat16).save_pretrained(tmp_path / "mine")
    pod.convert(sharing, PoDConfig(LEAD))
    sharing.save_pretrained(tmp_path / "shared")
    convert_to_gqa(tiny_model(), 1).save_pretrained(tmp_path / "heads")
    given = [f"DMC-C={tmp_path / 'mine'}", str(tmp_path / "shared"), str(tmp_path / "heads"), str(RETROFITTED["pod"])]
    *found, shipped = list(comparison.subjects_of(given, original))
    assert (shipped.kind, shipped.name, shipped.method) == ("PoD", "example_pod", "pod")
    assert [(subject.kind, subject.name, subject.method) for subject in found] == [
        ("DMC-C", "mine", "dmc"), ("PoD", "shared", "pod"), ("GQA", "heads", None),
    ]  # fmt: skip
    assert [type(subject.cache(4)) for subject in found] == [DMCCache, PoDCache, DynamicCache]
    assert found[1].cache(4, tau=0.5).tau == 0.5
    assert found[1].settings()["config"]["method"] == "pod" and found[2].settings() == {"kv_heads": 1}
    assert all(subject.model.dtype == torch.float32 and not subject.model.training for subject in found)


def test_a_missing_folder_is_found_before_any_is_loaded(tmp_path):
    tiny_model().save_pretrained(tmp_path / "there")
    with pytest.raises(FileNotFoundError, match="must be folders with a config"):
        comparison.subjects_of([str(tmp_path / "there"), f"PoD={tmp_path}"], tiny_model())


def test_every_answer_is_in_its_prompt_and_where_it_is_scored():
    for task in make_tasks(byte_tokenizer(), SIZES)[1:]:
        assert len({len(prompt) for prompt in task.prompts}) == 1
        for prompt, following, questions in zip(task.prompts, task.following, task.questions, strict=True):
            assert questions
            for asked in questions:
                assert bytes([*asked.asked, *asked.answer]) in bytes(prompt)
                assert following[asked.place : asked.place + 5] == list(asked.answer)
