"""Where a prompt's tokens come from, and where its logits go: streams, arrays, sinks, progress."""

import numpy as np
import pytest
import torch
from helpers import attached, left_padded, random_ids
from test_schedules import SCHEDULES, SNAPKV, growing, iterative

import kvcompress
from kvcompress import StreamingCache, prefill
from kvcompress.logits import AllLogits, TokenLoss


@torch.no_grad()
@pytest.mark.parametrize("guide", [None, 3])
def test_streams_and_arrays_read_as_a_tensor_does(guide, tmp_path):
    """They read every token and do not count as seen; a tensor's last token is held back."""
    model, ids = attached(), random_ids(151)
    question = random_ids(5, seed=3)
    known = None if guide is None else random_ids(guide, seed=9)[0]
    file = np.memmap(tmp_path / "ids.bin", dtype=np.uint16, mode="w+", shape=(151,))
    file[:] = ids[0].numpy()
    pieces = [ids[0, :7], int(ids[0, 7]), ids[0, 8:8], ids[0, 8:150].numpy(), np.int32(ids[0, 150])]
    sources = {"memmap": file, "iterator": iter(pieces), "generator": (piece for piece in pieces)}
    cache = prefill(model, torch.cat([ids, question[:, :1]], 1), iterative(model), guide=known)
    expected = model(question, past_key_values=cache).logits
    for source in sources.values():
        cache = prefill(model, source, iterative(model), guide=known)
        assert cache.get_seq_length() == 0
        assert cache.stored_lengths() == [[[30, 30]]] * 3
        assert torch.equal(model(question, past_key_values=cache).logits, expected)
    cache = prefill(model, file, iterative(model), guide=known)
    answer = model.generate(question, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert answer.shape == (1, 9)
    assert answer[0, 5] == expected[0, -1].argmax()


@torch.no_grad()
@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_schedules_read_an_array_whose_length_is_known(schedule):
    model, ids = attached(), random_ids(151)
    whole = prefill(
        model, torch.cat([ids, ids[:, :1]], 1), iterative(model, schedule=schedule, dynamic=True, **growing(schedule))
    )
    array = prefill(model, ids[0].numpy(), iterative(model, schedule=schedule, dynamic=True, **growing(schedule)))
    assert torch.equal(*(model(ids[:, :1], past_key_values=cache).logits for cache in (whole, array)))


@pytest.mark.parametrize("cache", ["streaming", "pruned", "quest"])
@torch.no_grad()
def test_other_caches_read_streams_too(cache):
    model, ids = attached(), random_ids(151)
    make = {
        "streaming": lambda: StreamingCache(model.config, window_size=30, chunk_size=24),
        "pruned": lambda: kvcompress.PrunedCache(model.config, SNAPKV, keep=30, chunk_size=24),
        "quest": lambda: kvcompress.QuestCache(model.config, token_budget=64, chunk_size=24),
    }[cache]
    whole = prefill(model, torch.cat([ids, ids[:, :1]], 1), make())
    stream = prefill(model, iter(ids[0].tolist()), make())
    expected, out = (model(ids[:, :1], past_key_values=cache).logits for cache in (whole, stream))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_what_a_stream_cannot_do_is_said():
    model, ids = attached(), random_ids(50)
    for settings in ({"schedule": "linear"}, {"dynamic": True}):
        with pytest.raises(ValueError, match="unknown length can be read with schedule='fixed' and dynamic=False"):
            prefill(model, iter(ids[0].tolist()), iterative(model, **settings))
    with pytest.raises(ValueError, match="need a PrunedCache with a chunk_size, got None"):
        prefill(model, iter(ids[0].tolist()), kvcompress.PrunedCache(model.config, SNAPKV, keep=30))
    with pytest.raises(ValueError, match="attention_mask must be None"):
        prefill(model, ids[0].numpy(), iterative(model), torch.ones(1, 50))
    with pytest.raises(ValueError, match=r"must be \[T\] integers, got float"):
        prefill(model, np.ones(5), iterative(model))
    with pytest.raises(ValueError, match=r"must be \[T\] integers, got int64 of shape \(2, 3\)"):
        prefill(model, np.ones((2, 3), dtype=np.int64), iterative(model))
    cache = iterative(model)
    with pytest.raises(TypeError, match="iterator must give integers"):
        prefill(model, iter([1, "two"]), cache)
    cache.reset()
    for nothing in (iter([]), np.empty(0, dtype=np.int64)):
        with pytest.raises(ValueError, match="input_ids must hold at least one token"):
            prefill(model, nothing, cache)
    for mistake, message in ((TokenLoss, "got the class TokenLoss: give one of it"), (True, "got True")):
        with pytest.raises(TypeError, match=message):
            prefill(model, ids, cache, logits=mistake)
    with pytest.raises(TypeError, match="progress must be True, False or a function, got 'tqdm'"):
        prefill(model, ids, cache, progress="tqdm")
    with pytest.raises(ValueError, match="use_cache must not be False"):
        kvcompress.generate(model, ids, cache, max_new_tokens=2, use_cache=False)
    cache.reset()
    two = prefill(model, torch.cat([ids, ids]), iterative(model))
    with pytest.raises(ValueError, match="batch size 1, but the cache holds 2"):
        prefill(model, iter([1, 2]), two)
    for mistake in ([1, 2], "text"):
        with pytest.raises(TypeError, match=r"input_ids must be a torch\.Tensor"):
            prefill(model, mistake, iterative(model))


def test_an_endless_stream_stops_with_the_error_it_raises():
    model = attached()
    cache = iterative(model)

    def tokens():
        yield from range(2, 90)
        raise OSError("the line went dead")

    with pytest.raises(OSError, match="the line went dead"):
        prefill(model, tokens(), cache)
    with pytest.raises(RuntimeError, match="incomplete"):
        prefill(model, iter([1, 2]), cache)


@torch.no_grad()
@pytest.mark.parametrize("schedule", ["fixed", "sqrt"])
def test_logits_of_a_prompt_that_is_kept_whole_are_the_dense_ones(schedule):
    model = attached()
    prompts = [random_ids(length, seed=length) for length in (100, 61)]
    ids, mask = left_padded(prompts)
    kept, loss, calls = AllLogits(), TokenLoss(), []

    def sink(sequence, start, logits, targets):
        kept(sequence, start, logits, targets)
        loss(sequence, start, logits, targets)
        calls.append((sequence, start, len(logits), len(targets)))

    cache = iterative(model, memory_size=128, schedule=schedule, initial_memory=100 if schedule == "sqrt" else None)
    prefill(model, ids, cache, mask, guide=random_ids(3, seed=8)[0], logits=sink)
    for b, prompt in enumerate(prompts):
        T = prompt.shape[1]
        dense = model(prompt).logits[0]
        assert [start for sequence, start, _, _ in calls if sequence == b] == list(range(0, T - 1, 24))
        torch.testing.assert_close(kept.logits(b), dense[:-1], atol=3e-4, rtol=3e-4)
        nll = torch.nn.functional.cross_entropy(dense[:-1], prompt[0, 1:], reduction="none")
        torch.testing.assert_close(loss.nll(b), nll, atol=3e-4, rtol=3e-4)


@torch.no_grad()
def test_the_loss_of_a_stream_and_of_its_tensor_are_one():
    model, ids = attached(), random_ids(151)
    losses = []
    for source in (ids, ids[0].numpy(), iter(ids[0].tolist())):
        loss = TokenLoss()
        prefill(model, source, iterative(model), logits=loss)
        losses.append(loss.nll())
        assert len(losses[-1]) == 150
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])
    assert len(TokenLoss().nll()) == 0


def test_no_logits_are_computed_unless_asked_for():
    model, ids = attached(), random_ids(100)
    rows = []
    model.lm_head.register_forward_hook(
        lambda module, args, out: rows.append(out.shape[1] if out.ndim == 3 else len(out))
    )
    prefill(model, ids, iterative(model))
    assert rows == []
    kvcompress.generate(model, ids, iterative(model), max_new_tokens=3, do_sample=False)
    assert rows == [1, 1, 1]
    with pytest.raises(ValueError, match="no language-model head"):
        prefill(model.model, ids, iterative(model), logits=TokenLoss())


def test_progress_is_told_and_shown(capsys, monkeypatch):
    model, ids = attached(), random_ids(60)
    told = []
    prefill(model, iter(ids[0].tolist()), iterative(model), progress=lambda read, total: told.append((read, total)))
    assert told == [(24, None), (48, None), (60, None)]
    monkeypatch.setattr("kvcompress.support.progress.SECONDS", 0.0)
    prefill(model, ids, iterative(model), progress=True)
    assert [line.partition(" tokens")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"reading: {read} of 59" for read in (24, 48, 59)
    ]


def test_streams_refuse_what_needs_their_length():
    model = attached()
    with pytest.raises(ValueError, match="need dense_below = 0, got 100"):
        prefill(model, iter([1, 2, 3]), iterative(model, dense_below=100))
    with pytest.raises(TypeError, match=r"iterator must give integers, .*, got float64"):
        prefill(model, iter([np.array([3.7, 5.2])]), iterative(model))
    with pytest.raises(ValueError, match="sequence must be one that was read"):
        AllLogits().logits()
