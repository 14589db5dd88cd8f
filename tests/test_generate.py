"""What transformers' generate does with a cache: every decoding mode, against the dense model where all is kept."""

import pytest
import torch
from helpers import attached, kind_model, needs_transformers, random_ids, tiny_gates, tiny_model

import kvcompress
from kvcompress import GatedCache, IterativeCache, QuestCache, StreamingCache, attach, prefill

CACHES = {
    "iterative": lambda config: IterativeCache(config, memory_size=128, chunk_size=16),
    "gated": lambda config: GatedCache(config, tiny_gates(), threshold=0.0, window=128, chunk_size=16),
    "streaming": lambda config: StreamingCache(config, window_size=128, chunk_size=16),
    "quest": lambda config: QuestCache(config, token_budget=128, chunk_size=16),
}
caches = pytest.mark.parametrize("new_cache", CACHES.values(), ids=CACHES)
MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "beams returned": {"num_beams": 4, "num_return_sequences": 3},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
}


@caches
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_dense_models_tokens_where_all_is_kept(new_cache, mode):
    model, ids = attached(), random_ids(50, batch=2)
    torch.manual_seed(3)
    dense = model.generate(ids, max_new_tokens=12, **MODES[mode])
    cache = new_cache(model.config)
    prefill(model, ids, cache)
    torch.manual_seed(3)
    assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=12, **MODES[mode]), dense)


def test_beams_over_a_compressed_prompt_each_have_their_own_continuation():
    model, ids = attached(), random_ids(60)
    cache = IterativeCache(model.config, memory_size=20, chunk_size=16)
    prefill(model, ids, cache)
    out = model.generate(
        ids, past_key_values=cache, max_new_tokens=12, num_beams=4, num_return_sequences=4,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    scores = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices, normalize_logits=False)
    for beam in range(4):  # each beam's log-probability, computed alone
        alone = IterativeCache(model.config, memory_size=20, chunk_size=16)
        prefill(model, ids, alone)
        with torch.no_grad():
            logits = model(out.sequences[beam : beam + 1, 59:-1], past_key_values=alone).logits[0]
        chosen = out.sequences[beam, 60:]
        expected = logits.log_softmax(-1)[torch.arange(12), chosen]
        torch.testing.assert_close(scores[beam], expected, atol=1e-3, rtol=1e-3)


@needs_transformers(5, 14)
@pytest.mark.parametrize("memory", [20, 128])
def test_assisted_decoding_gives_the_greedy_tokens(memory):
    model = attached()
    ids = random_ids(12).repeat(1, 5)  # so that prompt lookup finds candidates

    def new_cache():
        cache = IterativeCache(model.config, memory_size=memory, chunk_size=16)
        return prefill(model, ids, cache)

    greedy = model.generate(ids, past_key_values=new_cache(), max_new_tokens=20, do_sample=False)
    looked_up = model.generate(
        ids, past_key_values=new_cache(), max_new_tokens=20, do_sample=False, prompt_lookup_num_tokens=3
    )
    assert torch.equal(looked_up, greedy)
    helped = model.generate(
        ids, past_key_values=new_cache(), max_new_tokens=20, do_sample=False, assistant_model=tiny_model(seed=5)
    )
    assert torch.equal(helped, greedy)


@torch.no_grad()
def test_crop_takes_a_tensor_as_a_number():
    model, ids = attached(), random_ids(30)
    caches = [
        prefill(model, ids[:, :20], IterativeCache(model.config, memory_size=64, chunk_size=16)) for _ in range(2)
    ]
    for cache, removed in zip(caches, (-3, torch.tensor(-3)), strict=True):
        model(ids[:, 20:26], past_key_values=cache)
        cache.crop(removed)
        assert type(cache.seen) is int
        assert all(type(tokens) is int for tokens in cache.seen_lengths())
    first, second = (model(ids[:, 26:], past_key_values=cache).logits for cache in caches)
    assert torch.equal(first, second)
    with pytest.raises(ValueError, match=r"got 3; before transformers 5\.14"):
        caches[0].crop(3)


@needs_transformers(5, 14)
def test_assisted_decoding_over_a_window_is_refused_with_the_reason():
    model = kind_model("gemma3_text")
    given = {"max_new_tokens": 4, "prompt_lookup_num_tokens": 2}
    with attach(model), pytest.raises(NotImplementedError, match="layers that see a window or a chunk"):
        kvcompress.generate(model, random_ids(30), IterativeCache(model.config), **given)


def test_ids_that_the_model_has_not_are_refused_before_anything_is_read():
    model, ids = attached(), random_ids(30)
    vocabulary, cache = model.config.vocab_size, StreamingCache(model.config)
    for bad in (vocabulary, -1):
        with pytest.raises(ValueError, match=f"input_ids must be at least 0 and below {vocabulary}, .* got .*{bad}"):
            prefill(model, torch.cat([ids, torch.tensor([[bad, 3]])], 1), cache)
        padded, mask = torch.cat([torch.tensor([[bad, bad]]), ids], 1), torch.ones(1, 32, dtype=torch.long)
        mask[:, :2] = 0  # nobody looks there
        assert prefill(model, padded, StreamingCache(model.config), mask).get_seq_length() == 31
        with pytest.raises(ValueError, match="guide must be at least 0 and below"):
            prefill(model, ids, IterativeCache(model.config), guide=torch.tensor([bad]))
    with pytest.raises(ValueError, match="input_ids must be on the model's device, cpu, got meta"):
        prefill(model, ids.to("meta"), cache)
    assert cache.get_seq_length() == 0
    prefill(model, ids, cache)  # is whole
    with pytest.raises(ValueError, match=r"model must be of float32, bfloat16 or float16 .* got torch.float64"):
        prefill(attached().double(), ids, StreamingCache(model.config))


def test_a_batch_that_does_not_fit_the_cache_is_refused():
    model = attached()
    cache = IterativeCache(model.config, memory_size=20, chunk_size=16)
    prefill(model, random_ids(30, batch=2), cache)
    with pytest.raises(ValueError, match="batch size 3, but the cache holds 2"), torch.no_grad():
        model(random_ids(1, batch=3), past_key_values=cache)
    with pytest.raises(ValueError, match="batch size 3, but the cache holds 2"):
        prefill(model, random_ids(40, batch=3), cache)


@caches
@pytest.mark.parametrize("name", ["input_ids", "inputs_embeds"])
def test_other_prompts_in_place_of_repeated_ones_are_refused_and_nothing_changes(new_cache, name):
    model, ids = attached(), random_ids(30, batch=2)
    cache = prefill(model, ids, new_cache(model.config))
    before = cache.stored_lengths()

    def forward(tokens, cache=cache):
        given = tokens if name == "input_ids" else model.get_input_embeddings()(tokens)
        with torch.no_grad():
            return model(**{name: given}, past_key_values=cache).logits

    others = torch.tensor([[5], [5], [6], [7]])
    message = f"{name} has batch size 4, but the cache holds 2 sequences, and rows .* differ; .*fork"
    with pytest.raises(ValueError, match=message):
        forward(others)
    assert cache.stored_lengths() == before and cache.batch_size == 2
    same = torch.tensor([[5], [5], [6], [6]])
    expected = forward(same[::2], cache.fork())
    torch.testing.assert_close(forward(same, cache.fork()), expected.repeat_interleave(2, 0))
    cache.batch_repeat_interleave(2)  # several ways to go on, asked for
    torch.testing.assert_close(forward(others, cache)[:3:2], expected)


@caches
def test_generate_with_a_cache_of_another_batch_is_refused(new_cache):
    model, ids = attached(), random_ids(30)
    cache = prefill(model, ids, new_cache(model.config))
    prompts = torch.cat([ids, random_ids(30, batch=2, seed=9)])
    with pytest.raises(ValueError, match="input_ids has batch size 3, but the cache holds 1"):
        model.generate(prompts, past_key_values=cache, max_new_tokens=2)
    torch.manual_seed(3)
    assert model.generate(
        ids, past_key_values=cache, max_new_tokens=2, num_return_sequences=3, do_sample=True
    ).shape == (
        3,
        32,
    )


@caches
def test_generate_reads_and_generates_in_one_call(new_cache):
    model, ids = attached(), random_ids(50)
    dense = model.generate(ids, max_new_tokens=6, do_sample=False)
    out = kvcompress.generate(model, ids, new_cache(model.config), max_new_tokens=6, do_sample=False)
    assert torch.equal(out, dense)


@caches
def test_no_mask_of_the_whole_length_is_built(new_cache, monkeypatch):
    model, ids = attached(), random_ids(50)
    layer, masks = model.model.layers[0], []
    forward = type(layer.self_attn).forward

    def spy(self, *args, attention_mask=None, **kwargs):
        masks.append(attention_mask)
        return forward(self, *args, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(type(layer.self_attn), "forward", spy)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    kvcompress.generate(model, ids, new_cache(model.config), mask, max_new_tokens=3, do_sample=False)
    assert masks
    assert all(m is None for m in masks)
