"""The shipped model: what it must be to be worth compressing, on samples small enough for a test."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvcompress
from kvcompress import IterativeCache, StreamingCache
from kvcompress.demo import make_task
from kvcompress.models import EXAMPLE, retrofitted_weights
from kvcompress.models.differences import pack, unpack
from kvcompress.models.task_mixture import SHARES, TaskMixture, weighted_loss, written
from kvcompress.models.text import HELD_OUT, fact, held_out_text, long_text, plant, question
from kvcompress.models.tokenizer import byte_tokenizer
from kvcompress.models.train_example import Mixture, bits_per_byte, recall
from kvcompress.pruners import SnapKV


@pytest.fixture(scope="module")
def model():
    return kvcompress.load_example_model()[0]


def answer(model, task, cache, guided):
    guide = task.guide if guided else None
    with kvcompress.attach(model):
        out = kvcompress.generate(model, task.ids, cache, guide=guide, max_new_tokens=5, do_sample=False)
    return bytes(out[0, task.ids.shape[1] :].tolist()).decode("latin-1")


def test_size(model):
    assert 3e6 <= sum(p.numel() for p in model.parameters()) <= 8e6
    assert (EXAMPLE / "model.safetensors").stat().st_size < 16e6
    assert model.config.max_position_embeddings == 2048


def test_predicts_held_out_text(model):
    assert bits_per_byte(model, 2048, "cpu", count=12) < 1.7


def test_recalls_facts_within_its_length(model):
    assert recall(model, 1024, "cpu", trials=20) >= 0.9


# 4 seconds each: 16K tokens; float16 is slow on CPUs, kernels are tested in it
@pytest.mark.parametrize(("dtype", "depth"), [(torch.float32, 0.1), (torch.bfloat16, 0.7)])
def test_guided_reading_finds_a_fact_that_streaming_loses(dtype, depth):
    model, _ = kvcompress.load_example_model(dtype=dtype)
    task = make_task(16_384, depth, seed=1, device=torch.device("cpu"))
    cache = IterativeCache(model.config, memory_size=256, chunk_size=512, pruner=SnapKV(num_sink_tokens=4))
    assert answer(model, task, cache, guided=True) == task.answer
    assert cache.nbytes() < 330 * 2 * 4 * 2 * 64 * dtype.itemsize
    streaming = StreamingCache(model.config, window_size=252, chunk_size=512)
    assert answer(model, task, streaming, guided=False) != task.answer


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", torch.float64])
def test_a_dtype_that_is_not_there_is_named(dtype):
    with pytest.raises(ValueError, match=r"dtype must be torch.float32, torch.bfloat16 or torch.float16, got .*\d"):
        kvcompress.load_example_model(dtype=dtype)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "gpu", torch.device("cuda")])
def test_a_device_that_is_not_there_is_named(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=rf"device must be one that PyTorch finds here \(cpu\), got '{device}'"):
        kvcompress.load_example_model(device=device)


@given(text=st.text())
def test_a_token_is_a_byte(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text).input_ids
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text


def test_batches_are_padded_on_the_left():
    batch = byte_tokenizer()(["ab", "abcd"], padding=True, return_tensors="pt")
    assert batch.input_ids.tolist() == [[0, 0, 97, 98], [97, 98, 99, 100]]
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]


def test_tokenizer_can_be_saved_and_loaded(tmp_path):
    from transformers import AutoTokenizer

    byte_tokenizer().save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("é").input_ids == list("é".encode())


def test_held_out_files_are_in_no_training_text():
    from kvcompress.models.text import training_text

    training = training_text(np.random.default_rng(0))
    held_out = held_out_text()
    assert len(held_out) > 400_000
    for start in range(0, len(held_out) - 400, 40_000):
        assert held_out[start : start + 400] not in training
    assert len(set(HELD_OUT)) == len(HELD_OUT)


def test_long_text_has_the_length_asked_for():
    whole = long_text(40_000_000)  # longer than the library: it begins again
    assert len(whole) == 40_000_000
    assert whole.startswith(long_text(1000))


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_planted_sentence_lies_at_its_depth(depth):
    sentence = fact(b"red-fox", b"12345")
    assert sentence == question(b"red-fox") + b"12345.\n"
    planted = plant(b"x" * 1000, sentence, depth)
    assert planted.index(sentence) == 1000 * depth
    assert len(planted) == 1000 + len(sentence)
    with pytest.raises(ValueError, match=r"depth must be between 0 and 1, got 1\.5"):
        plant(b"x", sentence, 1.5)


@pytest.mark.parametrize("length", [256, 1024])
def test_training_sequences_have_the_length_asked_for_and_ask_what_was_said(length):
    mixture = Mixture(held_out_text(), np.random.default_rng(0))
    for kind in (mixture.source, mixture.walk, mixture.symbol_repeat, mixture.byte_repeat, mixture.dense_recall):
        assert len(kind(length)) == length
    text = mixture.planted(length)
    assert len(text) == length
    last = text[text.rindex(b"\n# The pass key") :]
    assert text.count(last) == 2  # stated once, asked once


# the shipped weights, as they came out of training: sha256 over names and bytes, in the order of names
@pytest.mark.parametrize(
    ("retrofit", "digest"),
    [("dmc", "4ed247ad76e815ddeb031d5b6ba0c4b7"), ("pod", "93c88aa8080802bb84c2f604a1a99647")],
)
def test_weights_that_ship_as_differences_are_those_that_were_trained(retrofit, digest):
    weights, found = retrofitted_weights(retrofit), hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    assert found.hexdigest()[:32] == digest
    model, _ = kvcompress.load_example_model(dtype=torch.bfloat16, retrofit=retrofit)
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], x) for name, x in weights.items())
    assert model.config.kvcompress["method"] == retrofit


@given(st.lists(st.tuples(st.integers(0, 65535), st.integers(0, 65535)), min_size=1, max_size=40))
def test_differences_give_back_every_bit_of_every_number(pairs):
    def weights(side):
        bits = torch.tensor([pair[side] for pair in pairs], dtype=torch.int32).to(torch.uint16)
        return {"b": bits.view(torch.bfloat16)[:, None], "a": bits[:1].view(torch.bfloat16)}

    before, after = weights(0), weights(1)
    back = unpack(before, pack(before, after))
    assert all(torch.equal(back[name].view(torch.uint16), after[name].view(torch.uint16)) for name in "ab")


def test_differences_of_other_weights_are_refused():
    weights = {"a": torch.zeros(4, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match="after must have the names and shapes of before"):
        pack(weights, {"a": torch.zeros(5, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match=r"weights must be bfloat16, got torch.float32 for a"):
        pack({"a": torch.zeros(4)}, {"a": torch.zeros(4)})
    with pytest.raises(ValueError, match="packed must hold 5 weights, got 4"):
        unpack({"a": torch.zeros(5, dtype=torch.bfloat16)}, pack(weights, weights))


def test_tasks_are_trained_with_their_answers():
    tasks = TaskMixture(np.random.default_rng(0))
    for name in SHARES:
        found = tasks.sample(name, 2048)
        assert found is not None and len(found[0]) + len(found[1]) < 2048
    assert tasks.sample("vt", 768) is None  # its example alone takes 500
    assert written("niah_multivalue", ("1", "2", "3")) == " 1, 2, and 3"
    assert written("cwe", ("a", "b")) == " 1. a 2. b"
    ids, weights = tasks.sequence(2048, bytes(2048))
    assert ids.shape == weights.shape == (2048,)
    answers = bytes(ids[weights == 6])
    assert answers.endswith(b"\0") and answers.count(b"\0") >= 1
    first = bytes(ids[: int((weights == 6).argmax())]).decode()
    assert "Question" in first or "What" in first or "special magic" in first


def test_a_weighted_loss_is_the_mean_by_weight():
    logits, ids = torch.randn(2, 6, 9), torch.randint(9, (2, 6))
    plain = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(weighted_loss(logits, ids, torch.full((2, 6), 3.0)), plain)
    weights = torch.zeros(2, 6)
    weights[1, 4] = 2.0
    one = torch.nn.functional.cross_entropy(logits[1, 3][None], ids[1, 4][None])
    torch.testing.assert_close(weighted_loss(logits, ids, weights), one)
