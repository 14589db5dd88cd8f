"""Images in the prompts of models that place them on three axes (M-RoPE): as the dense model, and under dropping."""

import copy

import pytest
import torch
from helpers import and_others, forward, random_gates, random_ids, tiny_model, turns
from test_dropping_families import hiding, masked_by_head, seen_by_head
from transformers import DynamicCache

import kvcompress
from benchmarks.quality.parts.families_checks import TOLERANCE, difference
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS, names
from benchmarks.quality.parts.families_images import (
    PROMPTS,
    conversation,
    even_prompts,
    images,
    inputs,
    one_prompt,
    picture,
    text,
    two_prompts,
)
from benchmarks.quality.parts.families_models import VIDEO
from kvcompress import GatedCache, PrunedCache, QuantizedCache, QuestCache, dmc
from kvcompress.caches.dense import DenseCache
from kvcompress.caches.pruned_layer import PrunedLayer
from kvcompress.hf.attach import base_model, facts_of
from kvcompress.hf.places import Places, placed
from kvcompress.pruners import ExpectedAttention, KeyDiff, Replay, SnapKV

VISION = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
WHOLE = {
    "pages": lambda model: DenseCache(model.config, page_size=4),
    "pruned": lambda model: PrunedCache(model.config, keep=1.0, page_size=4),
    "kept": lambda model: PrunedCache(model.config, SnapKV(), keep=200, every=4),
    "quest": lambda model: QuestCache(model.config, token_budget=200, page_size=4, dense_layers=1),
    "gated": lambda model: GatedCache(model.config, random_gates(model), keep=1.0, window=8),
}


def vision_model(kind):
    return CONFIGURATIONS[f"{kind}/images"].model()


def dense_cache(model):
    return DynamicCache(config=model.config)


@pytest.mark.parametrize(("kind", "prompt"), turns(VISION, PROMPTS))
@torch.no_grad()
def test_caches_with_room_for_everything_equal_the_dense_model(kind, prompt):
    model, given = vision_model(kind), PROMPTS[prompt]()
    dense = conversation(model, dense_cache(model), given)
    blind = conversation(model, dense_cache(model), {**given, "mm_token_type_ids": None, "image_grid_thw": None,
                                                     "pixel_values": None})  # fmt: skip
    assert difference(blind, dense) > 100 * TOLERANCE  # images matter
    with kvcompress.attach(model):
        for name, make in WHOLE.items():
            ours = conversation(model, cache := make(model), given)
            assert difference(ours, dense) <= 2 * TOLERANCE, name
            assert cache.shifts() == model.model.rope_deltas.flatten().tolist()
        rounded = conversation(model, QuantizedCache(model.config), given)
        assert difference(rounded, dense) < 0.1 < difference(blind, dense)
    assert torch.equal(conversation(model, dense_cache(model), given), dense)


@pytest.mark.parametrize(("kind", "name"), turns(VISION, ["pruned", "gated", "quest"]))
@torch.no_grad()
def test_generation_gives_the_dense_models_tokens(kind, name):
    model, prompt, how = vision_model(kind), two_prompts(), {"max_new_tokens": 4, "do_sample": False}
    dense = model.generate(**prompt, **how)
    turn = torch.cat([dense, torch.tensor([text(3, 30)] * 2)], 1)
    mask = torch.nn.functional.pad(prompt["attention_mask"], (0, 7), value=1)
    kinds = torch.nn.functional.pad(prompt["mm_token_type_ids"], (0, 7))
    second = model.generate(turn, **{**how, **images(0, 1), "attention_mask": mask, "mm_token_type_ids": kinds})
    with kvcompress.attach(model):
        cache = WHOLE[name](model)
        assert torch.equal(model.generate(**prompt, past_key_values=cache, **how), dense)
        assert torch.equal(model.generate(turn, attention_mask=mask, past_key_values=cache, **how), second)
        cache = WHOLE[name](model)
        assert torch.equal(kvcompress.generate(model, prompt, cache, **how), dense)
        assert torch.equal(kvcompress.generate(model, turn, cache, mask, **how), second)  # prefill reads text


@torch.no_grad()
def test_beams_stand_where_their_prompt_does():
    model, how = vision_model("qwen2_vl"), {"max_new_tokens": 4, "do_sample": False, "num_beams": 2}
    dense = model.generate(**two_prompts(), **how)
    with kvcompress.attach(model):
        assert torch.equal(model.generate(**two_prompts(), past_key_values=WHOLE["kept"](model), **how), dense)


@pytest.mark.parametrize("kind", VISION)
@torch.no_grad()
def test_videos_and_a_second_image_in_a_later_turn(kind):
    model = vision_model(kind)
    film = [*text(3, 1), *picture(0)[:1], *[VIDEO] * 8, *picture(0)[:1], *[VIDEO] * 8, *text(4, 2)]
    if kind != "qwen3_vl":  # which has a time stamp before each frame
        film[12:13] = []
    first = inputs([film], 0)
    first = {name: x for name, x in first.items() if name in ("input_ids", "attention_mask")}
    first |= {
        "mm_token_type_ids": 2 * (first["input_ids"] == VIDEO).int(), "video_grid_thw": torch.tensor([[2, 8, 4]]),
        "pixel_values_videos": torch.cat([images(0)["pixel_values"], images(0)["pixel_values"] / 2]),
    }  # fmt: skip
    later = inputs([[*text(3, 4), *picture(1), *text(4, 5)]], 1)
    ids = torch.cat([first["input_ids"], later["input_ids"]], 1)
    kinds = torch.cat([first["mm_token_type_ids"], later["mm_token_type_ids"]], 1)
    at, _ = model.model.get_rope_index(
        ids, kinds, image_grid_thw=later["image_grid_thw"], video_grid_thw=first["video_grid_thw"]
    )
    del later["attention_mask"], later["mm_token_type_ids"]
    behind = at[:, :, first["input_ids"].shape[1] :]
    after = {"input_ids": torch.tensor([text(2, 9)]), "position_ids": at.max() + 1 + torch.arange(2).expand(3, 1, -1)}

    def read(cache):
        calls = (first, {**later, "position_ids": behind}, after)
        return torch.cat([model(**call, past_key_values=cache).logits[0] for call in calls])

    dense = read(dense_cache(model))
    with kvcompress.attach(model):
        for name, make in WHOLE.items():
            assert difference(read(make(model)), dense) <= 2 * TOLERANCE, name


MROPE = names(
    """glm4v ernie4_5_vl_moe qwen3_5 cohere_compass cosmos3_edge glm4v_moe glm46v glm_ocr glmga minicpmv4_6
    paddleocr_vl qwen2_5_omni_thinker qwen3_5_moe qwen3_omni_moe_thinker qwen3_vl_moe"""
)


@pytest.mark.parametrize("kind", and_others(MROPE[:3], MROPE))
@torch.no_grad()
def test_decoders_of_other_families_turn_by_the_places_of_an_image(kind):
    model, (_, ids, every) = CONFIGURATIONS[f"{kind}/multimodal"].model(), whole_prompt()
    at, _ = vision_model("qwen2_vl").model.get_rope_index(
        ids, every["mm_token_type_ids"], every["image_grid_thw"], attention_mask=every["attention_mask"]
    )
    ids, decoder = ids % 90 + 3, base_model(model)

    def read(cache):
        parts = [slice(PROMPT), *(slice(i, i + 1) for i in range(PROMPT, END))]
        calls = [{"position_ids": at[..., part], "past_key_values": cache, "use_cache": True} for part in parts]
        return torch.cat([decoder(ids[:, x], **given)[0] for x, given in zip(parts, calls, strict=True)], 1)

    dense = read(dense_cache(model))
    with kvcompress.attach(model):
        for name in ("pages", "kept", "quest"):
            assert difference(read(WHOLE[name](model)), dense) <= 2 * TOLERANCE, name


# ---- real dropping ----

PROMPT, END, STAYS = 30, 38, 9
DROPS = {
    "snapkv": lambda config: PrunedCache(config, SnapKV(window=4, kernel_size=1), keep=STAYS, page_size=4),
    "keydiff": lambda config: PrunedCache(config, KeyDiff(num_sink_tokens=1), keep=STAYS, page_size=4),
    "replay": lambda config: PrunedCache(config, keep=STAYS, page_size=4),
    "expected": lambda config: PrunedCache(config, ExpectedAttention(future_positions=8), keep=STAYS, page_size=4),
}  # fmt: skip


def followed(model, cache, prompt, ids):
    logits = [model(**prompt, past_key_values=cache).logits]
    for i in range(PROMPT, END):
        at = (i + model.model.rope_deltas).expand(3, -1, -1)
        logits.append(model(input_ids=ids[:, i : i + 1], position_ids=at, past_key_values=cache).logits)
    return torch.cat(logits, 1)


def whole_prompt():
    """even_prompts and what follows them, as one."""
    prompt = even_prompts()
    ids = torch.cat([prompt["input_ids"], torch.tensor([text(END - PROMPT, 40 + b) for b in range(2)])], 1)
    every = {**prompt, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    every["mm_token_type_ids"] = torch.nn.functional.pad(prompt["mm_token_type_ids"], (0, END - PROMPT))
    return prompt, ids, every


def masked(model, hide, every):
    with hiding(base_model(model), hide):
        return model(**every, use_cache=False).logits


@pytest.mark.parametrize(("kind", "cache"), [("qwen2_vl", "replay"), ("qwen2_vl", "snapkv"), ("qwen2_5_vl", "keydiff"),
                                             ("qwen2_5_vl", "replay"), ("qwen3_vl", "expected")])  # fmt: skip
@torch.no_grad()
def test_what_follows_a_pruned_image_sees_what_each_head_has_kept(kind, cache):
    model, (prompt, ids, every) = vision_model(kind), whole_prompt()
    with kvcompress.attach(model):
        held, facts = DROPS[cache](model.config), facts_of(base_model(model))
        read = copy.deepcopy(held)
        ours = followed(model, held, prompt, ids)[:, PROMPT - 1 :]
        model(**prompt, past_key_values=read)
    kept = read.kept_positions()
    assert any(len(x) < PROMPT for layer in kept for row in layer for x in row)
    dense = masked(model, masked_by_head(kept, facts, PROMPT, END), every)[:, PROMPT - 1 :]
    assert difference(ours, dense) <= 2 * TOLERANCE
    assert difference(dense[:, 1:], model(**every, use_cache=False).logits[:, PROMPT:]) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", VISION)
@torch.no_grad()
def test_gates_drop_tokens_of_images(kind):
    model, (prompt, ids, every) = vision_model(kind), whole_prompt()
    with kvcompress.attach(model):
        held = GatedCache(model.config, random_gates(model), threshold=0.0, window=8, num_sink_tokens=2, track=True)
        ours = followed(model, held, prompt, ids)
        assert held.kept_share() < 0.95
    dense = masked(model, seen_by_head(held, list(range(2))), every)
    assert difference(ours, dense) <= 4 * TOLERANCE


# ---- places ----


def rotary(kind="qwen2_vl"):
    model = vision_model(kind)
    with kvcompress.attach(model):
        return facts_of(base_model(model))[0].key_rotary


def a_place(later=-4):
    """Five of text, eight of an image, text behind."""
    t, h, w = torch.meshgrid(torch.tensor([5]), torch.arange(5, 9), torch.arange(5, 7), indexing="ij")
    image = torch.stack([t.flatten(), h.flatten(), w.flatten()])
    return Places(torch.cat([torch.arange(5).expand(3, -1), image], 1), later)


def test_places_are_what_was_noted():
    place = a_place()
    again = Places.of_text(3).followed_by(torch.cat([place.first, torch.arange(9, 14).expand(3, -1)], 1), 0)
    assert again.like(place) and again.first.shape == (3, 13)
    assert place.at(12, 16).tolist() == [[5, 9, 10, 11], [8, 9, 10, 11], [6, 9, 10, 11]]
    assert place.at(20, 22).tolist() == [[16, 17]] * 3 and place.at(3, 3).shape == (3, 0)
    assert place.followed_by(place.at(18, 21), 18).like(place)
    film = Places.of_text(3).followed_by(torch.tensor([[0, 9], [0, 0], [0, 0]]), 0)
    assert film.at(2, 4).tolist() == [[10, 11]] * 3  # behind the largest


def test_where_all_is_text_nothing_is_other_than_before():
    plain, x, at = rotary(), torch.randn(1, 2, 6, 16), torch.arange(20, 26, dtype=torch.int32)[None]
    there = placed(plain, [Places.of_text(3)])
    assert torch.equal(there.rotate(x, at, 26, [26]), plain.rotate(x, at, 26, [26]))
    assert torch.equal(there.distances(26, 6, 1, 5, 2, x.device), plain.distances(26, 6, 1, 5, 2, x.device))
    torch.testing.assert_close(there.behind(x[:, :, 2:], 26, 6, 2, 2, 26), plain.behind(x[:, :, 2:], 26, 6, 2, 2, 26))


def test_what_is_asked_again_stands_behind_the_text_as_it_stood_in_it():
    plain, place, x = rotary(), a_place(), torch.randn(1, 2, 20, 16)
    end, chunk = 20, 7  # chunks begin amid the image
    there = placed(plain, [place])
    own = torch.arange(end, dtype=torch.int32)[None]
    moved = place.at(0, end) + there.distances(end, end, 0, end, chunk, x.device)
    next_ = end + place.later
    assert [int(moved[:, a : a + chunk].min()) for a in range(0, end, chunk)] == [next_] * 3
    expected = placed(plain, [Places(moved)]).rotate(x, own, end, [end])
    torch.testing.assert_close(there.behind(x, end, end, 0, chunk, end), expected, rtol=1e-4, atol=1e-5)
    distance = there.distances(end, end, 0, end, chunk, x.device)
    keys = there.move_on(there.rotate(x, own, end, [end]), distance, end, end)
    torch.testing.assert_close(keys, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(there.unrotate(there.rotate(x, own, end, [end]), end, [end], own), x)


def test_sequences_with_places_of_their_own_turn_together_as_each_alone():
    plain, x = rotary(), torch.randn(3, 2, 20, 16)
    places = [a_place(), Places.of_text(3), a_place()]
    both, at = placed(plain, places), torch.arange(20, dtype=torch.int32)[None]
    assert both.of(0) is both.of(2) and both.step_tables(20, [20] * 3, x.device) is None
    for positions in (None, at, at.expand(3, -1)):
        out = both.rotate(x, positions, 20, [20] * 3)
        for b in range(3):
            alone = placed(plain, [places[b]]).rotate(x[b : b + 1], at, 20, [20])
            torch.testing.assert_close(out[b : b + 1], alone)
    assert placed(plain, [a_place(), a_place()]).step_tables(20, [20] * 2, x.device) is not None


@torch.no_grad()
def test_a_decoded_token_is_one_op_wherever_images_stand(monkeypatch):
    model, prompt = vision_model("qwen2_vl"), two_prompts()
    with kvcompress.attach(model):
        cache = PrunedCache(model.config, SnapKV(window=4), keep=9, page_size=4)
        model(**prompt, past_key_values=cache)
        other, decoder, ids = cache.fork(), base_model(model), torch.tensor([[9], [10]])
        assert len(set(cache.shifts())) == 2
        with monkeypatch.context() as now:
            now.setattr(PrunedLayer, "append", None)
            one = torch.cat([decoder(ids, past_key_values=cache)[0] for _ in range(3)], 1)
        with monkeypatch.context() as now:
            now.setattr(PrunedLayer, "shifts", False)
            several = torch.cat([decoder(ids, past_key_values=other)[0] for _ in range(3)], 1)
        torch.testing.assert_close(one, several)


# ---- caches as they are handled ----


@torch.no_grad()
def test_forks_files_beams_and_joined_sequences_know_where_they_stand(tmp_path):
    model, given = vision_model("qwen2_vl"), two_prompts()
    with kvcompress.attach(model):

        def cache():
            return DenseCache(model.config, page_size=4)

        held = cache()
        model(**given, past_key_values=held)
        ids = torch.tensor([[9], [10]])
        shifts = held.shifts()
        assert shifts == model.model.rope_deltas.flatten().tolist() and len(set(shifts)) == 2
        at = (torch.tensor(held.seen_lengths()) + torch.tensor(shifts)).view(1, 2, 1).expand(3, -1, -1)
        want = model(input_ids=ids, position_ids=at, past_key_values=held.fork()).logits
        held.save(tmp_path / "held.safetensors", model)
        loaded = kvcompress.load_cache(tmp_path / "held.safetensors", model)
        assert torch.equal(base_model(model)(ids, past_key_values=loaded)[0] @ model.lm_head.weight.T, want)
        turned = held.fork()
        tables = [one.placed(facts_of(base_model(model)))[0].key_rotary.of(0) for one in (held, turned)]
        assert tables[0] is tables[1]  # one for all forks
        turned.select_sequences([1, 0])
        found = base_model(model)(ids.flip(0), past_key_values=turned)[0] @ model.lm_head.weight.T
        torch.testing.assert_close(found, want.flip(0), rtol=1e-4, atol=1e-4)
        held.reset()
        assert not held.shifts() and not held.places
        typed = random_ids(12)
        fresh = base_model(model)(typed, past_key_values=held)[0]
        assert torch.equal(fresh, base_model(model)(typed, past_key_values=cache())[0])


@torch.no_grad()
def test_sequences_join_those_of_text():
    model = vision_model("qwen2_5_vl")
    typed, image = random_ids(30), one_prompt()
    with kvcompress.attach(model):
        spec = {"page_size": 4}
        parts = [DenseCache(model.config, **spec) for _ in range(2)]
        base_model(model)(typed, past_key_values=parts[0])
        model(**image, past_key_values=parts[1])
        ids = torch.tensor([[9], [10]])
        alone = [base_model(model)(ids[b : b + 1], past_key_values=parts[b].fork())[0] for b in range(2)]
        shift = parts[1].shifts()[0]
        parts[0].join_places(parts[1])
        assert parts[0].shifts() == [0, shift] and len(alone) == 2


@torch.no_grad()
def test_conversations_in_turn_are_counted_by_their_own_caches():
    """transformers keeps in the model what the last image was, whose ever it is."""
    model, how = vision_model("qwen2_vl"), {"max_new_tokens": 4, "do_sample": False}
    with kvcompress.attach(model):

        def talk(cache, ids):
            more = torch.cat([ids, torch.tensor([text(3, 50)])], 1)
            return model.generate(more, attention_mask=torch.ones_like(more), past_key_values=cache, **how)

        def begun():
            pictures, typed = (PrunedCache(model.config, SnapKV(), keep=100) for _ in range(2))
            return pictures, model.generate(**one_prompt(), past_key_values=pictures, **how), typed

        pictures, seen, typed = begun()
        alone = talk(pictures, seen)
        written = talk(typed, typed_ids := random_ids(10))
        again = talk(typed, written)
        pictures, seen, typed = begun()
        written = talk(typed, typed_ids)  # the model forgets the image
        assert torch.equal(talk(pictures, seen), alone)
        pictures, seen, _ = begun()  # and now it knows of one
        assert torch.equal(talk(typed, written), again)


# ---- what is refused ----

REFUSED = {
    "streaming": lambda config: kvcompress.StreamingCache(config),
    "iterative": lambda config: kvcompress.IterativeCache(config),
    "contiguous": lambda config: PrunedCache(config, SnapKV(), keep=9, positions="contiguous"),
    "gap": lambda config: PrunedCache(config, SnapKV(), keep=9, positions=kvcompress.RemoteGap(20)),
}


@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_caches_that_place_tokens_themselves_refuse_images_and_read_text(name):
    model, given = vision_model("qwen2_vl"), one_prompt()
    with kvcompress.attach(model):
        cache = REFUSED[name](model.config)
        with pytest.raises(ValueError, match=r"position_ids must be the same on every axis, got those of an image"):
            model(**given, past_key_values=cache)
        assert cache.get_seq_length() == 0 and not cache.places
        forward(model, random_ids(8), past_key_values=cache)


@pytest.mark.parametrize(("name", "reason"), [("hunyuan_vl/multimodal", "a norm with weights follows"),
                                              ("llama", "knows one position a token")])  # fmt: skip
@torch.no_grad()
def test_models_that_cannot_stand_on_several_axes_say_so(name, reason):
    model = CONFIGURATIONS[name].model() if "/" in name else tiny_model()
    at = torch.arange(6).expand(3, 1, 6).clone()
    at[1, 0, 3] = 4
    with kvcompress.attach(model):
        cache = QuestCache(model.config)
        with pytest.raises(ValueError, match=reason):
            base_model(model)(random_ids(6), position_ids=at, past_key_values=cache)
        assert cache.get_seq_length() == 0 and not cache.places
        base_model(model)(random_ids(6), past_key_values=cache)


@torch.no_grad()
def test_positions_of_another_shape_are_refused():
    model, at = vision_model("qwen2_vl"), torch.arange(6).expand(3, 1, 6).clone()
    at[1, 0, 3] = 4
    with kvcompress.attach(model):
        cache, decoder = QuestCache(model.config), base_model(model)
        for wrong, message in (
            (at[..., :5], r"must be \[axes, 1, 6\], got shape \(3, 1, 5\)"),
            (at[:2], "knows 3 positions a token"),
            (at - 1, "must begin behind the tokens that sequence 0 has had, at 0, got -1"),
            (at * 1.25, r"must be whole numbers, got 1\.25: the frames of a video stand between positions"),
        ):
            with pytest.raises(ValueError, match=message):
                decoder(random_ids(6), position_ids=wrong, past_key_values=cache)
            assert not cache.places and cache.get_seq_length() == 0 and cache.fixed == 0


@torch.no_grad()
def test_frequencies_that_follow_the_length_are_refused():
    plain = rotary()
    plain._switch, plain._type = 100, "dynamic"
    with pytest.raises(ValueError, match="frequencies of rope type 'dynamic' follow the length"):
        placed(plain, [a_place()])


@torch.no_grad()
def test_an_image_comes_in_one_call_and_stays():
    model, given = vision_model("qwen2_vl"), one_prompt()
    at, _ = model.model.get_rope_index(given["input_ids"], given["mm_token_type_ids"], given["image_grid_thw"])
    decoder = base_model(model)
    with kvcompress.attach(model):
        cache = DenseCache(model.config)
        decoder(given["input_ids"][:, :8], position_ids=at[..., :8], past_key_values=cache)
        message = "must begin behind the tokens that sequence 0 has had, at 7, got 5: a whole image"
        with pytest.raises(ValueError, match=message):
            decoder(given["input_ids"][:, 8:], position_ids=at[..., 8:], past_key_values=cache)
        assert cache.get_seq_length() == 8
        decoder(random_ids(3), past_key_values=cache)
        cache.crop(-3)
        with pytest.raises(ValueError, match="crop can remove at most the 0 tokens"):
            cache.crop(-1)


@torch.no_grad()
def test_converted_models_take_no_images():
    model, given = vision_model("qwen2_vl"), one_prompt()
    decoder = base_model(model)
    at, _ = model.model.get_rope_index(given["input_ids"], given["mm_token_type_ids"], given["image_grid_thw"])
    with kvcompress.attach(model):
        dmc.convert(model, dmc.DMCConfig(), anneal=False)
        for cache in (None, kvcompress.DMCCache(model.config)):
            with pytest.raises(ValueError, match="same on every axis, got those of an image or video"):
                decoder(given["input_ids"], position_ids=at, past_key_values=cache)


def test_what_chooses_by_text_is_refused_with_images():
    model = vision_model("qwen2_vl")
    with kvcompress.attach(model):
        for given in ({"guide": torch.tensor([3])}, {"logits": lambda *_: None}):
            with pytest.raises(ValueError, match="must be None with pixel_values"):
                kvcompress.generate(model, one_prompt(), WHOLE["pruned"](model), **given)


def test_replay_is_the_default_and_takes_images():
    assert isinstance(PrunedCache(vision_model("qwen2_vl").config, keep=9).pruner, Replay)
