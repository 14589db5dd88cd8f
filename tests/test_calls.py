"""Ids, masks and positions of a call with a cache: which are taken, and what is refused before anything is stored."""

import pytest
import torch
from helpers import attached, forward, left_padded, random_ids

import kvcompress
from kvcompress import QuestCache, StreamingCache


@pytest.mark.parametrize("length", [5, 30, 45, 50])
def test_fewer_ids_than_the_cache_has_seen_are_refused(length):
    model, ids = attached(), random_ids(50)
    cache = StreamingCache(model.config, window_size=64)
    kvcompress.generate(model, ids[:, :41], cache, max_new_tokens=10, do_sample=False)
    assert cache.get_seq_length() == 50
    with pytest.raises(ValueError, match="input_ids must hold the whole conversation: the cache has seen 50 tokens"):
        model.generate(random_ids(length, seed=3), past_key_values=cache, max_new_tokens=2)


def test_new_ids_alone_are_taken_by_a_call_of_the_model():
    model, ids = attached(), random_ids(60)
    for count in (9, 30, 31):
        cache = StreamingCache(model.config, window_size=64)
        forward(model, ids[:, :30], past_key_values=cache)
        new = forward(model, ids[:, 30 : 30 + count], past_key_values=cache)
        torch.testing.assert_close(new, forward(model, ids[:, : 30 + count])[:, 30:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("columns", [9, 10, 11])
def test_a_padded_turn_may_have_as_many_columns_as_were_seen(columns):
    """generate makes such a call of other ids, as many as were seen; its position_ids tell the two apart."""
    model, first, turns = attached(), random_ids(10, 2), [random_ids(columns), random_ids(columns - 4, seed=2)]
    ids, mask = left_padded(turns)
    cache = QuestCache(model.config)
    forward(model, first, past_key_values=cache)
    found = forward(model, ids, past_key_values=cache, attention_mask=mask)
    for b, turn in enumerate(turns):
        alone = forward(model, torch.cat([first[b : b + 1], turn], 1))
        torch.testing.assert_close(found[b, -turn.shape[1] :], alone[0, 10:], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="input_ids must hold the whole conversation: the cache has seen"):
        model.generate(random_ids(10 + columns, 2, seed=5), past_key_values=cache, max_new_tokens=2)


PLACES = {  # of 6 tokens behind 10, and what is said
    "a document of its own": ([10, 11, 12, 0, 1, 2], "got 10, 11, 12, 0, 1, 2"),
    "from 0": ([0, 1, 2, 3, 4, 5], "whole conversation"),
    "a hole": ([10, 11, 12, 14, 15, 16], "from the 10 tokens that sequence 1 has had, .* got 10, 11, 12, 14, 15, 16$"),
    "later": ([12, 13, 14, 15, 16, 17], "got 12, 13, 14, 15, 16, 17"),
    "twice": ([10, 11, 11, 12, 13, 15], "got 10, 11, 11, 12, 13, 15"),
    "back": ([15, 14, 13, 12, 11, 15], "got 15, 14, 13, 12, 11, 15"),
    "too few": ([10, 11, 12], r"position_ids must be \[2, 6\], got shape \(2, 3\)"),
}


@pytest.mark.parametrize(("places", "message"), PLACES.values(), ids=PLACES)
def test_positions_that_the_cache_would_not_use_are_refused(places, message):
    model, ids = attached(), random_ids(16, 2)
    cache = QuestCache(model.config)
    forward(model, ids[:, :10], past_key_values=cache)
    at = torch.tensor([[10, 11, 12, 13, 14, 15][: len(places)], places])
    with pytest.raises(ValueError, match=message):
        forward(model, ids[:, 10:], past_key_values=cache, position_ids=at)
    found = forward(model, ids[:, 10:], past_key_values=cache, position_ids=torch.arange(10, 16)[None])
    torch.testing.assert_close(found, forward(model, ids)[:, 10:], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="got 17"):
        forward(model, ids[:, :1], past_key_values=cache, position_ids=torch.tensor([[16], [17]]))


def test_packed_documents_are_refused_by_a_cache():
    model, cache = attached(), QuestCache(attached().config)
    with pytest.raises(ValueError, match="position_ids must count on from the 0 tokens that sequence 0 has had"):
        forward(model, random_ids(9), past_key_values=cache, position_ids=torch.arange(9)[None] % 5)
    assert cache.get_seq_length() == 0


def test_positions_may_count_padding_or_not_and_stop_at_the_last_that_was_trained():
    model, prompts = attached(max_position_embeddings=20), [random_ids(8), random_ids(3, seed=2)]
    (ids, mask), turn = left_padded(prompts), random_ids(16, 2, seed=3)
    after = [8 + torch.arange(16), 3 + torch.arange(16)]
    for places in (
        torch.stack(after),  # as generate counts
        8 + torch.arange(16)[None],  # as the model counts columns
        torch.stack([after[0].clamp(max=19), after[1]]),
    ):
        cache = QuestCache(model.config)
        given = (mask.cumsum(1) - 1).clamp(min=0)
        forward(model, ids, past_key_values=cache, attention_mask=mask, position_ids=given)
        found = forward(model, turn, past_key_values=cache, position_ids=places)
        for b, prompt in enumerate(prompts):
            alone = forward(model, torch.cat([prompt, turn[b : b + 1]], 1))
            torch.testing.assert_close(found[b], alone[0, prompt.shape[1] :], rtol=1e-4, atol=1e-4)
