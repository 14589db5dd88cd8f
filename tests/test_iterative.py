import copy

import pytest
import torch
from helpers import DTYPES, FAMILIES, attached, left_padded, random_ids, tiny_model
from reading_definition import plain_reading
from test_positions import SCALINGS, scaled_model

import kvcompress
from kvcompress import IterativeCache, PrunedCache, attach, prefill
from kvcompress.pruners import Pruner, SnapKV, StreamingLLM

PRUNERS = {"snapkv": SnapKV(window=6, num_sink_tokens=2), "streaming": StreamingLLM(num_sink_tokens=2)}
families = pytest.mark.parametrize("family", FAMILIES)
pruners = pytest.mark.parametrize("pruner", PRUNERS.values(), ids=PRUNERS)


def next_logits(model, ids, cache, mask=None):
    """Logits after the last token, through the cache."""
    prefill(model, ids, cache, mask)
    with torch.no_grad():
        return model(ids[:, -1:], past_key_values=cache, attention_mask=mask).logits[:, -1]


@families
@pytest.mark.parametrize(
    ("length", "memory", "chunk"), [(70, 70, 16), (70, 128, 7), (5, 8, 16), (1, 4, 4), (33, 40, 33)]
)
def test_memory_as_large_as_the_prompt_gives_the_dense_model(family, length, memory, chunk):
    model, ids = attached(family), random_ids(length)
    with torch.no_grad():
        dense = model(ids).logits[:, -1]
    cache = IterativeCache(model.config, memory_size=memory, chunk_size=chunk)
    torch.testing.assert_close(next_logits(model, ids, cache), dense, atol=2e-4, rtol=2e-4)
    expected = model.generate(ids, max_new_tokens=10, do_sample=False)
    cache = IterativeCache(model.config, memory_size=memory, chunk_size=chunk)
    assert torch.equal(kvcompress.generate(model, ids, cache, max_new_tokens=10, do_sample=False), expected)


@pytest.mark.parametrize("kind", SCALINGS)
def test_every_rope_scaling_within_its_original_length(kind):
    model, ids = scaled_model(kind), random_ids(50)
    with torch.no_grad():
        dense = model(ids).logits[:, -1]
    attach(model)
    cache = IterativeCache(model.config, memory_size=60, chunk_size=16)
    torch.testing.assert_close(next_logits(model, ids, cache), dense, atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
def test_static_rope_scalings_beyond_the_original_length(kind):
    model, ids = scaled_model(kind), random_ids(200)
    with torch.no_grad():
        dense = model(ids).logits[:, -1]
    attach(model)
    cache = IterativeCache(model.config, memory_size=256, chunk_size=64)
    torch.testing.assert_close(next_logits(model, ids, cache), dense, atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_reads_and_generates(dtype):
    model, ids = attached().to(dtype), random_ids(60)
    with torch.no_grad():
        dense = model(ids).logits[:, -1].float()
    cache = IterativeCache(model.config, memory_size=64, chunk_size=16)
    error = (next_logits(model, ids, cache).float() - dense).abs().max()
    assert error <= 40 * torch.finfo(dtype).eps * dense.abs().max()
    small = IterativeCache(model.config, memory_size=16, chunk_size=16)
    assert kvcompress.generate(model, ids, small, max_new_tokens=4, do_sample=False).shape == (1, 64)


@families
@pruners
def test_each_prompt_of_a_padded_batch_gives_what_it_gives_alone(family, pruner):
    model = attached(family)
    prompts = [random_ids(length, seed=length) for length in (70, 33, 16, 17, 1)]
    ids, mask = left_padded(prompts)

    def new_cache():
        return IterativeCache(model.config, memory_size=20, chunk_size=16, pruner=pruner)

    together = kvcompress.generate(model, ids, new_cache(), mask, max_new_tokens=8, do_sample=False)
    for b, prompt in enumerate(prompts):
        alone = kvcompress.generate(model, prompt, new_cache(), max_new_tokens=8, do_sample=False)
        assert together[b, ids.shape[1] :].tolist() == alone[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_padded_batch_with_length_dependent_rope(kind):
    model = scaled_model(kind)
    model.model.rotary_emb.original_max_seq_len = 32  # so that the sequences have different frequencies
    attach(model)
    prompts = [random_ids(length, seed=length) for length in (90, 20)]
    ids, mask = left_padded(prompts)

    def new_cache():
        return IterativeCache(model.config, memory_size=70, chunk_size=30)

    together = next_logits(model, ids, new_cache(), mask)
    for b, prompt in enumerate(prompts):
        torch.testing.assert_close(together[b], next_logits(model, prompt, new_cache())[0], atol=1e-4, rtol=1e-4)


@pruners
@pytest.mark.parametrize(("memory", "chunk"), [(20, 16), (7, 30), (2, 5), (40, 8)])
def test_reading_is_what_the_formulas_say(pruner, memory, chunk):
    model, ids = attached(), random_ids(101)
    chunks = [min(chunk, 100 - start) for start in range(0, 100, chunk)]
    expected = plain_reading(model, ids, chunks, lambda i, history: [memory] * 3, pruner).logits
    cache = IterativeCache(model.config, memory_size=memory, chunk_size=chunk, pruner=pruner)
    torch.testing.assert_close(next_logits(model, ids, cache), expected, atol=2e-4, rtol=2e-4)
    assert cache.stored_lengths() == [[[memory + 1] * 2]] * 3


class Recorder(Pruner):
    """Notes what it is offered, then chooses as another pruner."""

    uses_guide = True

    def __init__(self, inner):
        self.inner, self.offers, self.num_sink_tokens = inner, [], 0

    def recent(self, keep, chunk_length):
        return self.inner.recent(keep, chunk_length)

    def scores(self, candidates, keep):
        self.offers.append((candidates, keep))
        return self.inner.scores(candidates, keep)


def test_the_guide_is_scored_but_never_stored():
    model, ids, guide = attached(), random_ids(60), random_ids(5, seed=9)[0]
    pruner = Recorder(SnapKV(guide_kernel_size=3))
    cache = IterativeCache(model.config, memory_size=12, chunk_size=16, pruner=pruner)
    prefill(model, ids, cache, guide=guide)
    assert cache.get_seq_length() == 59
    assert cache.stored_lengths() == [[[12, 12]]] * 3
    assert {offer.guide_length for offer, _ in pruner.offers} == {5}
    for offer, keep in pruner.offers:
        assert offer.count == offer.keys.shape[2] - 5
        assert offer.queries.shape[2] == offer.chunk_length + 5
        assert keep == 12


def test_a_guide_changes_nothing_where_all_is_kept():
    model, ids, guide = attached(), random_ids(60), random_ids(5, seed=9)[0]
    plain, guided = (IterativeCache(model.config, memory_size=64, chunk_size=16) for _ in range(2))
    prefill(model, ids, plain)
    prefill(model, ids, guided, guide=guide)
    with torch.no_grad():
        expected = model(ids[:, -1:], past_key_values=plain).logits
        torch.testing.assert_close(model(ids[:, -1:], past_key_values=guided).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_prompt_that_ends_with_the_guide_keeps_that_end_for_generation():
    model, ids, guide = attached(), random_ids(60), random_ids(5, seed=9)[0]
    asked = torch.cat([ids, guide[None]], 1)
    cache = IterativeCache(model.config, memory_size=12, chunk_size=16)
    prefill(model, asked, cache, guide=guide)
    assert cache.get_seq_length() == 60
    out = model.generate(asked, past_key_values=cache, max_new_tokens=4, do_sample=False)
    by_hand = prefill(model, torch.cat([ids, ids[:, :1]], 1), IterativeCache(
        model.config, memory_size=12, chunk_size=16), guide=guide)  # fmt: skip
    with torch.no_grad():
        first = model(guide[None], past_key_values=by_hand).logits[0, -1].argmax()
    assert out[0, 65] == first


def test_guided_batch_gives_what_each_gives_alone():
    model, guide = attached(), random_ids(5, seed=9)[0]
    prompts = [random_ids(length, seed=length) for length in (70, 33, 3)]
    ids, mask = left_padded(prompts)

    def new_cache():
        return IterativeCache(model.config, memory_size=20, chunk_size=16)

    together = kvcompress.generate(model, ids, new_cache(), mask, guide=guide, max_new_tokens=8, do_sample=False)
    for b, prompt in enumerate(prompts):
        alone = kvcompress.generate(model, prompt, new_cache(), guide=guide, max_new_tokens=8, do_sample=False)
        assert together[b, ids.shape[1] :].tolist() == alone[0, prompt.shape[1] :].tolist()


def test_memory_is_bounded_while_reading():
    model, ids = attached(), random_ids(400)
    cache = IterativeCache(model.config, memory_size=32, chunk_size=16)
    sizes = []
    prefill(model, ids, cache, progress=lambda read, total: sizes.append((read, total, cache.nbytes())))
    assert [read for read, _, _ in sizes] == [min(16 * i, 399) for i in range(1, 26)]
    assert {total for _, total, _ in sizes} == {399}
    # L layers of K and V of the memory alone, float32
    assert [nbytes for _, _, nbytes in sizes] == [3 * 2 * 2 * 16 * min(32, 16 * i) * 4 for i in range(1, 26)]
    pages = 32 // 16  # of a row, with their number in its table, beside its length
    assert cache.nbytes() == 3 * (2 * 2 * 16 * pages * 16 * 4 + 2 * pages * 4 + 2 * 4)


def test_a_second_prompt_continues_the_reading():
    model, ids = attached(), random_ids(40)
    first = IterativeCache(model.config, memory_size=64, chunk_size=16)
    answer = kvcompress.generate(model, ids, first, max_new_tokens=5, do_sample=False)
    longer = torch.cat([answer, random_ids(30, seed=5)], 1)
    dense = model.generate(longer, max_new_tokens=6, do_sample=False)
    whole = IterativeCache(model.config, memory_size=128, chunk_size=16)
    kvcompress.generate(model, ids, whole, max_new_tokens=5, do_sample=False)
    assert torch.equal(kvcompress.generate(model, longer, whole, max_new_tokens=6, do_sample=False), dense)
    kvcompress.generate(model, longer, first, max_new_tokens=6, do_sample=False)
    assert first.stored_lengths() == [[[64 + 6, 64 + 6]]] * 3


def test_a_prompt_can_go_in_without_prefill_and_stays_uncompressed():
    model = attached()
    prompts = [random_ids(length, seed=length) for length in (30, 12)]
    ids, mask = left_padded(prompts)
    cache = IterativeCache(model.config, memory_size=8, chunk_size=8)
    together = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False)
    for b, prompt in enumerate(prompts):
        alone = model.generate(prompt, max_new_tokens=6, do_sample=False)
        assert together[b, 30:].tolist() == alone[0, prompt.shape[1] :].tolist()
    assert cache.stored_lengths()[0] == [[35, 35], [17, 17]]


def test_a_copied_cache_answers_each_question_as_if_alone():
    model, ids = attached(), random_ids(60)
    cache = IterativeCache(model.config, memory_size=20, chunk_size=16)
    prefill(model, ids, cache)
    answers = []
    for seed in (1, 2, 1):
        asked = torch.cat([ids, random_ids(4, seed=seed)], 1)
        answers.append(model.generate(asked, past_key_values=copy.deepcopy(cache), max_new_tokens=5, do_sample=False))
        fresh = prefill(model, ids, IterativeCache(model.config, memory_size=20, chunk_size=16))
        assert torch.equal(answers[-1], model.generate(asked, past_key_values=fresh, max_new_tokens=5, do_sample=False))
    assert torch.equal(answers[0], answers[2])
    assert not torch.equal(answers[0], answers[1])
    assert cache.get_seq_length() == 59


def test_an_interrupted_reading_is_refused_until_reset():
    model, ids = attached(), random_ids(60)
    cache = IterativeCache(model.config, memory_size=20, chunk_size=16)

    def interrupt(read, total):
        if read > 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prefill(model, ids, cache, progress=interrupt)
    for use in (lambda: prefill(model, ids, cache), lambda: model(ids, past_key_values=cache)):
        with pytest.raises(RuntimeError, match="incomplete"), torch.no_grad():
            use()
    cache.reset()
    assert cache.nbytes() == 0
    fresh = IterativeCache(model.config, memory_size=20, chunk_size=16)
    assert torch.equal(next_logits(model, ids, cache), next_logits(model, ids, fresh))


def test_a_failure_at_the_start_of_a_second_prompt_is_not_forgotten(monkeypatch):
    model, ids = attached(), random_ids(60)
    cache = prefill(model, ids[:, :30], IterativeCache(model.config, memory_size=20, chunk_size=16))
    monkeypatch.setattr(cache.layers[1], "begin_prompt", lambda facts: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prefill(model, ids, cache)
    with pytest.raises(RuntimeError, match="incomplete"):
        prefill(model, ids, cache)


def test_reset_forgets_that_assisted_decoding_began():
    model, ids = attached(), random_ids(60)
    cache = prefill(model, ids[:, :30], IterativeCache(model.config, memory_size=20, chunk_size=16))
    cache.activate_past_recording()
    cache.reset()
    fresh = IterativeCache(model.config, memory_size=20, chunk_size=16)
    assert torch.equal(next_logits(model, ids, cache), next_logits(model, ids, fresh))


def test_padded_input_after_the_prompt_cannot_be_taken_back():
    model, ids = attached(), random_ids(30, batch=2)
    cache = prefill(model, ids, IterativeCache(model.config, memory_size=10, chunk_size=16))
    mask = torch.ones(2, 33, dtype=torch.long)
    mask[1, 29:31] = 0
    with torch.no_grad():
        model(random_ids(4, batch=2), past_key_values=cache, attention_mask=mask)
        assert cache.stored_lengths()[0] == [[14, 14], [12, 12]]
        with pytest.raises(ValueError, match="at most the 0 tokens"):
            cache.crop(-1)
        model(random_ids(1, batch=2), past_key_values=cache)
    cache.crop(-1)
    assert cache.stored_lengths()[0] == [[14, 14], [12, 12]]


def test_pad_tokens_are_padding_for_generate_as_they_are_for_transformers():
    model = attached()
    prompts = [random_ids(length, seed=length) for length in (40, 20)]
    ids, mask = left_padded(prompts)
    with_mask, without = (
        kvcompress.generate(model, ids, IterativeCache(model.config, memory_size=16, chunk_size=8), given,
                            max_new_tokens=6, do_sample=False)
        for given in (mask, None)
    )  # fmt: skip
    assert torch.equal(with_mask, without)


def test_crop_takes_back_what_followed_the_prompt_only():
    model, ids = attached(), random_ids(60)
    cache = IterativeCache(model.config, memory_size=20, chunk_size=16)
    expected = copy.deepcopy(next_logits(model, ids, cache))
    with torch.no_grad():
        model(random_ids(3), past_key_values=cache)
        cache.crop(-4)
        assert cache.get_seq_length() == 59
        torch.testing.assert_close(model(ids[:, -1:], past_key_values=cache).logits[:, -1], expected)
    with pytest.raises(ValueError, match=r"at most the 1 tokens that followed the prompt .* got 2"):
        cache.crop(-2)
    with pytest.raises(ValueError, match="minus the number"):
        cache.crop(5)


def test_long_contexts_warn_about_the_trained_length():
    model, ids = attached(max_position_embeddings=40), random_ids(60)
    with pytest.warns(UserWarning, match="48 keys in sight, more than the 40 positions"):
        prefill(model, ids, IterativeCache(model.config, memory_size=32, chunk_size=16))


def test_a_second_prompt_warns_about_what_both_add_up_to():
    model = attached(max_position_embeddings=50)
    cache = prefill(model, random_ids(31), IterativeCache(model.config, memory_size=64, chunk_size=16))
    with pytest.warns(UserWarning, match="62 keys in sight, more than the 50 positions"):
        prefill(model, random_ids(63), cache)


@torch.no_grad()
def test_layers_with_a_window_keep_it_and_take_no_part():
    """All of a model's layers, or every other one."""
    ids = random_ids(70)
    model = attached("mistral", sliding_window=40)
    for cache in (
        IterativeCache(model.config, memory_size=20, chunk_size=16, schedule="linear", dynamic=True, every=4),
        IterativeCache(model.config, memory_size=20, chunk_size=16, schedule="adaptive", track=True, max_pages=1),
        PrunedCache(model.config, SnapKV(window=4), keep=12, every=2, chunk_size=16, positions="contiguous"),
    ):
        torch.testing.assert_close(next_logits(model, ids, cache), model(ids).logits[:, -1], atol=2e-4, rtol=2e-4)
        assert cache.stored_lengths() == [[[40, 40]]] * 3
        cache.reset()
        answer = kvcompress.generate(model, ids, cache, max_new_tokens=5, do_sample=False)
        assert torch.equal(answer, model.generate(ids, max_new_tokens=5, do_sample=False))


@torch.no_grad()
@pytest.mark.parametrize("schedule", ["fixed", "linear", "square-sqrt", "adaptive"])
def test_memory_is_divided_over_the_layers_that_compress(schedule):
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    model = attached("qwen3", num_hidden_layers=4, layer_types=kinds, sliding_window=12, use_sliding_window=True)
    ids = random_ids(121)
    settings = {"memory_size": 30, "chunk_size": 24, "schedule": schedule, "pruner": SnapKV(window=4)}
    initial = None if schedule == "fixed" else 6
    cache = IterativeCache(model.config, **settings, initial_memory=initial, track=True)
    prefill(model, ids, cache)
    stored = cache.stored_lengths()
    assert stored[0] == stored[2] == [[12, 12]]
    assert stored[1][0][0] + stored[3][0][0] == 60
    assert len(cache.track.readings[0][0].layers) == 2
    whole = IterativeCache(model.config, memory_size=128, chunk_size=24)
    torch.testing.assert_close(next_logits(model, ids, whole), model(ids).logits[:, -1], atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory_size": 0}, "memory_size must be at least 1, got 0"),
        (
            {"compression_ratio": 0.5},
            r"compression_ratio is the share that goes: .* takes memory_size, tokens .* got comp",
        ),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        (
            {"pruner": "snapkv"},
            r"pruner must be an instance .*, got the text 'snapkv': give .*; .*Spec",
        ),
        ({"memory_size": 16.5}, "memory_size must be a number of tokens .*, got 16.5$"),
        ({"schedule": "cubic"}, "schedule must be one of"),
    ],
)
def test_wrong_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        IterativeCache(tiny_model().config, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.empty(1, 0, dtype=torch.long)}, "at least one token"),
        ({"input_ids": torch.ones(5, dtype=torch.long)}, r"input_ids must be \[B, T\]"),
        ({"input_ids": torch.ones(1, 5)}, "input_ids must be integers"),
        ({"attention_mask": torch.ones(1, 9)}, "attention_mask must have the shape"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0, 0, 0]])}, "left-padded"),
        ({"attention_mask": torch.zeros(1, 10)}, "left-padded"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1, 1, 1]])}, "left-padded"),
        ({"guide": torch.ones(1, 3, dtype=torch.long)}, r"guide must be \[g\]"),
        ({"guide": torch.ones(3)}, r"guide must be \[g\]"),
        ({"cache": None}, "cache must be a kvcompress cache"),
    ],
)
def test_wrong_prompts_are_named_and_leave_the_cache_usable(arguments, message):
    model = attached()
    cache = IterativeCache(model.config, memory_size=8, chunk_size=4)
    with pytest.raises(ValueError, match=message):
        prefill(model, **{"input_ids": random_ids(10), "cache": cache, **arguments})
    prefill(model, random_ids(10), cache)
    assert cache.get_seq_length() == 9


def test_a_guide_without_a_scoring_pruner_is_refused():
    model = attached()
    cache = IterativeCache(model.config, memory_size=8, chunk_size=4, pruner=StreamingLLM())
    with pytest.raises(ValueError, match="guide has no effect with the pruner StreamingLLM"):
        prefill(model, random_ids(10), cache, guide=random_ids(2)[0])
