"""Files by their names on the Hub: what its cache has is read from there, and what can be no name is not asked for."""

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import RemoteEntryNotFoundError

import kvcompress
from kvcompress import CacheSpec, PrunedCache
from kvcompress.caches.saving import load_cache
from kvcompress.heads import HeadProfile
from kvcompress.profiles import BudgetProfile
from kvcompress.pruners import ScoreProfile, SnapKV
from kvcompress.support import names

COMMIT = "0" * 40
SAVED = {
    "shares.json": BudgetProfile(((1.0, 3.0), (2.0, 2.0))),
    "heads.json": HeadProfile(((0.5, 0.25),)),
    "scores.json": ScoreProfile((((1.0, 0.5, 0.0),),)),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the Hub's cache has the files of someone/made; nothing else can be had."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    top = tmp_path / "models--someone--made"
    (top / "refs").mkdir(parents=True)
    (top / "refs/main").write_text(COMMIT)
    (top / "snapshots" / COMMIT / "of").mkdir(parents=True)
    return top / "snapshots" / COMMIT


@pytest.mark.parametrize("usual", SAVED)
def test_a_profile_comes_by_its_name_on_the_hub(folder, usual):
    profile = SAVED[usual]
    profile.save(folder / usual)
    profile.save(folder / "of/other.json")
    for name in ("someone/made", f"someone/made/{usual}", "someone/made/of/other.json"):
        assert type(profile).load(name) == profile
    with pytest.raises(ConnectionError, match="no such file here, and the Hub cannot be reached"):
        type(profile).load("someone/made/none.json")


def test_a_saved_cache_comes_by_its_name_on_the_hub(folder):
    model, _ = kvcompress.load_example_model()
    with kvcompress.attach(model):
        cache = kvcompress.prefill(model, torch.arange(40)[None], PrunedCache(model.config, SnapKV(window=4), keep=8))
        cache.save(folder / "cache.safetensors")
        assert load_cache("someone/made", model).stored_lengths() == cache.stored_lengths()
    with pytest.raises(ConnectionError, match="the Hub cannot be reached"):
        load_cache("someone/made/none.safetensors", model)


def test_a_cache_as_text_takes_a_profile_by_its_name_on_the_hub(folder):
    SAVED["shares.json"].save(folder / "shares.json")
    for name in ("someone/made", "someone/made/shares.json"):
        spec = CacheSpec.parse(f"pruned,pruner=snapkv,keep=8,budget=profiled:{name}")
        model, _ = kvcompress.load_example_model()
        assert spec.make(model.config).budget.profile == SAVED["shares.json"]


def test_what_can_be_no_name_is_not_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(names, "get_hf_file_metadata", lambda *args: pytest.fail("the Hub was asked"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    for name in (
        "none", "none.json", "folder/none.json", "out/none", "out/a/none.json", "./a/b/c", "../a/b.json", "~/a/b",
        "runs/one.kv", "runs/one/shares.tsv", "me/patterns/llama",
        str(tmp_path / "none.json"), "two words/b/c.json", "",
    ):  # fmt: skip
        with pytest.raises(FileNotFoundError, match="profile must be a file, got"):
            BudgetProfile.load(name)


def test_no_file_and_no_hub_is_a_missing_file_too(folder):
    with pytest.raises(FileNotFoundError, match="the Hub cannot be reached"):
        BudgetProfile.load("sessions/alice")


def test_what_the_hub_has_not_is_named(tmp_path, monkeypatch):
    class NotFound(RemoteEntryNotFoundError):
        def __init__(self):
            """Without the answer that the Hub gave."""

    def refuse(*args):
        raise NotFound

    monkeypatch.setattr(names, "get_hf_file_metadata", refuse)
    monkeypatch.chdir(tmp_path)
    said = r"profile must be a file, or one on the Hub \(owner/name/file\), got a/b/c.json: the Hub has none that may"
    with pytest.raises(FileNotFoundError, match=said):
        BudgetProfile.load("a/b/c.json")


def test_a_hub_that_cannot_be_reached_is_asked_once(tmp_path, monkeypatch):
    """A download would try for half a minute."""

    def no_network(*args):
        raise OSError("no route to host")

    monkeypatch.setattr(names, "get_hf_file_metadata", no_network)
    monkeypatch.setattr(names, "hf_hub_download", lambda *args: pytest.fail("the Hub was asked again"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConnectionError, match=r"got a/b/c.json: .* the Hub cannot be reached: no route to host"):
        BudgetProfile.load("a/b/c.json")
