import copy
import pickle
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from helpers import FAMILIES, attached, left_padded, random_ids, rows_of, tiny_model

import kvcompress
from kvcompress import QuestCache, ops, prefill

SMALL = {"token_budget": 12, "page_size": 4, "dense_layers": 1}


@torch.no_grad()
def run(model, cache, ids, calls):
    """Logits after each call of so many tokens."""
    out, start = [], 0
    for count in calls:
        out.append(model(ids[:, start : start + count], past_key_values=cache).logits[:, -1])
        start += count
    return out


@contextmanager
def watched(cache):
    """Notes which pages each layer reads, where it does not read all: a list of [R, n] tensors per layer."""
    seen, step = [[] for _ in cache.layers], ops.quest_step_

    def noted(queries, keys, values, k_pages, v_pages, ranges, table, **options):
        found = step(queries, keys, values, k_pages, v_pages, ranges, table, **options)
        if bool((-(-table.lengths // k_pages.shape[1]) > found.chosen.shape[1]).any()):
            of = next(i for i, layer in enumerate(cache.layers) if layer.ranges is ranges)
            seen[of].append(found.chosen)
        return found

    with mock.patch.object(ops, "quest_step_", noted):
        yield seen


@torch.no_grad()
def definition(model, ids, calls, budget, page, dense_layers):
    """Quest in loops over heads, pages and dimensions; logits after each call and, per layer, the pages of each row."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    base, n_layers = model.model, len(model.model.layers)
    keys = [torch.empty(2, 0, 16, dtype=torch.float64) for _ in range(n_layers)]
    values, logits, chosen = copy.deepcopy(keys), [], [[] for _ in range(n_layers)]
    start = 0
    for count in calls:
        h = base.embed_tokens(ids[:, start : start + count])
        place = torch.arange(start, start + count)[None]
        cos, sin = base.rotary_emb(h, place)
        for j, layer in enumerate(base.layers):
            attention, x = layer.self_attn, layer.input_layernorm(h)
            q, k, v = (p(x).unflatten(-1, (-1, 16)).transpose(1, 2)
                       for p in (attention.q_proj, attention.k_proj, attention.v_proj))  # fmt: skip
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            keys[j], values[j] = torch.cat([keys[j], k[0]], 1), torch.cat([values[j], v[0]], 1)
            T = keys[j].shape[1]
            out, rows = torch.zeros_like(q), []
            for kv_head in range(2):
                pages = [range(t, min(t + page, T)) for t in range(0, T, page)]
                read = list(range(len(pages)))
                if count == 1 and j >= dense_layers:
                    score = []
                    for tokens in pages:
                        here = keys[j][kv_head, list(tokens)]
                        least, most = here.amin(0), here.amax(0)
                        score.append(
                            max(
                                sum(
                                    float(max(a * b, a * c)) for a, b, c in zip(q[0, head, 0], least, most, strict=True)
                                )
                                for head in (2 * kv_head, 2 * kv_head + 1)
                            )
                        )
                    older = sorted(range(len(pages) - 1), key=lambda n: -score[n])
                    read = sorted([*older[: max(3, budget // page) - 1], len(pages) - 1])
                rows.append(read)
                tokens = [t for n in read for t in pages[n]]
                for head in (2 * kv_head, 2 * kv_head + 1):
                    for s in range(count):
                        seen = [t for t in tokens if t <= start + s]
                        weights = (keys[j][kv_head, seen] @ q[0, head, s] / 4).softmax(0)
                        out[0, head, s] = weights @ values[j][kv_head, seen]
            if count == 1 and len(rows[0]) < -(-T // page):
                chosen[j].append(rows)
            h = h + attention.o_proj(out.transpose(1, 2).flatten(2))
            h = h + layer.mlp(layer.post_attention_layernorm(h))
        logits.append(model.lm_head(base.norm(h))[:, -1])
        start += count
    return logits, chosen


def ranges_are_those_of_the_keys(cache):
    for layer in cache.layers:
        if layer.ranges is None:
            continue
        keys, P, D = layer.pool.gather(max(layer.pool.counts))[0], layer.pool.page_size, layer.pool.k_pages.shape[2]
        for r, count in enumerate(layer.pool.counts):
            for block in range(-(-count // P)):
                page = keys[r, block * P : min(block * P + P, count)]
                torch.testing.assert_close(layer.ranges[r, block, :D], page.amax(0), rtol=0, atol=0)
                torch.testing.assert_close(layer.ranges[r, block, D:], -page.amin(0), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("budget", "page", "dense"), [(12, 4, 1), (1, 4, 0), (16, 2, 0), (24, 8, 2), (9, 1, 0), (64, 16, 0)]
)
def test_pages_and_logits_are_what_the_definition_says(budget, page, dense):
    model, calls = attached(), [70, *[1] * 9, 6, 80, *[1] * 6]
    ids = random_ids(sum(calls))
    cache = QuestCache(model.config, token_budget=budget, page_size=page, dense_layers=dense)
    with watched(cache) as seen:
        ours = run(model, cache, ids, calls)
    exact = copy.deepcopy(model)
    kvcompress.detach(exact)
    expected, chosen = definition(exact.double(), ids, calls, budget, page, dense)
    for logits, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(logits.double(), wanted, atol=5e-4, rtol=5e-4)
    assert [[rows.tolist() for rows in notes] for notes in seen] == chosen
    assert all(len(notes) == (15 if j >= dense else 0) for j, notes in enumerate(seen))
    ranges_are_those_of_the_keys(cache)
    assert [layer.ranges is None for layer in cache.layers] == [j < dense for j in range(3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_reads_pages_as_good_as_the_definitions(dtype):
    """Scores are float32 sums, so near ties may go either way: no page left out may be better than one read."""
    model, ids = attached().to(dtype), random_ids(100)
    cache = QuestCache(model.config, token_budget=24, page_size=4, dense_layers=0)
    step, calls = ops.quest_step_, []

    def checked(queries, keys, values, k_pages, v_pages, ranges, table, **options):
        turned = ops.rope(queries, options["cos"], options["sin"], table.lengths[:1, None].clone())
        found = step(queries, keys, values, k_pages, v_pages, ranges, table, **options)
        calls.append(found.chosen)
        held = torch.stack(rows_of(k_pages, table)).double()
        blocks = [held[:, t : t + 4] for t in range(0, held.shape[1], 4)]
        bounds = [(block.amin(1)[:, None], block.amax(1)[:, None]) for block in blocks]
        q = turned.double().reshape(2, 2, 16)
        scores = torch.stack([torch.maximum(q * a, q * b).sum(-1).amax(1) for a, b in bounds], dim=1)
        for r, read in enumerate(found.chosen.tolist()):
            assert len(set(read)) == 6 and read[-1] == len(blocks) - 1
            left = [s for n, s in enumerate(scores[r].tolist()) if n not in read]
            worst = min(scores[r, n].item() for n in read[:-1])
            assert max(left) <= worst + 1e-6 * scores[r].abs().max()
        return found

    with mock.patch.object(ops, "quest_step_", checked):
        out = kvcompress.generate(model, ids, cache, max_new_tokens=10, do_sample=False)
    assert out.shape == (1, 110) and len(calls) == 3 * 10
    assert all(layer.ranges.dtype == dtype for layer in cache.layers)
    ranges_are_those_of_the_keys(cache)


@pytest.mark.parametrize("chunk_size", [None, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_that_holds_the_context_gives_the_dense_models_tokens(family, chunk_size):
    model, ids = attached(family), random_ids(50, batch=2)
    dense = model.generate(ids, max_new_tokens=14, do_sample=False)
    cache = QuestCache(model.config, token_budget=64, chunk_size=chunk_size, dense_layers=0)
    assert torch.equal(kvcompress.generate(model, ids, cache, max_new_tokens=14, do_sample=False), dense)
    assert cache.stored_lengths() == [[[63, 63]] * 2] * 3
    small = QuestCache(model.config, **SMALL, chunk_size=chunk_size)
    assert not torch.equal(kvcompress.generate(model, ids, small, max_new_tokens=14, do_sample=False), dense)


def test_chunks_read_a_prompt_as_one_pass_does():
    model, ids = attached(), random_ids(200)
    whole, chunked = (QuestCache(model.config, **SMALL, chunk_size=size) for size in (None, 70))
    for cache in (whole, chunked):
        prefill(model, ids, cache)
    for a, b in zip(whole.layers, chunked.layers, strict=True):
        for x, y in zip(a.pool.gather(199), b.pool.gather(199), strict=True):
            torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)
    tokens = [model.generate(ids, past_key_values=c, max_new_tokens=12, do_sample=False) for c in (whole, chunked)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("chunk_size", [None, 16])
def test_left_padding_changes_no_token(chunk_size):
    model = attached()
    prompts = [random_ids(length, seed=length) for length in (90, 9, 41, 1)]  # 9 and 1: fewer pages than the budget
    ids, mask = left_padded(prompts)

    def new_cache():
        return QuestCache(model.config, token_budget=24, page_size=4, dense_layers=1, chunk_size=chunk_size)

    cache = new_cache()
    together = kvcompress.generate(model, ids, cache, mask, max_new_tokens=20, do_sample=False)
    ranges_are_those_of_the_keys(cache)
    for b, prompt in enumerate(prompts):
        alone = new_cache()
        expected = kvcompress.generate(model, prompt, alone, max_new_tokens=20, do_sample=False)
        assert torch.equal(together[b, -20:], expected[0, -20:]), b
        assert [layer[b] for layer in cache.stored_lengths()] == [layer[0] for layer in alone.stored_lengths()]


def test_a_forward_pass_with_padding_in_every_row_is_that_of_the_tokens_alone():
    model, ids = attached(), random_ids(40)
    mask = torch.ones(1, 110, dtype=torch.long)
    mask[:, :70] = 0
    padded, plain = QuestCache(model.config, **SMALL), QuestCache(model.config, **SMALL)
    with torch.no_grad():
        a = model(torch.cat([ids.new_zeros(1, 70), ids], 1), attention_mask=mask, past_key_values=padded).logits[:, -1]
        b = model(ids, past_key_values=plain).logits[:, -1]
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [None, "int8", "k8v4"])
def test_forks_answer_as_if_they_were_alone(dtype):
    model, ids = attached(), random_ids(61)
    cache = prefill(model, ids, QuestCache(model.config, **SMALL, dtype=dtype))
    used = cache.nbytes()
    forks = [cache.fork() for _ in range(3)] + [pickle.loads(pickle.dumps(cache))]
    for seed, fork in enumerate(forks):
        question = torch.cat([ids, random_ids(5, seed=seed)], 1)
        alone = prefill(model, ids, QuestCache(model.config, **SMALL, dtype=dtype))
        expected = model.generate(question, past_key_values=alone, max_new_tokens=14, do_sample=False)
        assert torch.equal(model.generate(question, past_key_values=fork, max_new_tokens=14, do_sample=False), expected)
        ranges_are_those_of_the_keys(fork)
    assert cache.stored_lengths() == [[[60, 60]]] * 3 and cache.nbytes() == used
    ranges_are_those_of_the_keys(cache)


def test_beams_each_read_the_pages_of_their_own_queries():
    model, ids = attached(), random_ids(60)
    cache = prefill(model, ids, QuestCache(model.config, **SMALL))
    out = model.generate(
        ids, past_key_values=cache, max_new_tokens=12, num_beams=4, num_return_sequences=4,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    ranges_are_those_of_the_keys(cache)
    scores = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices, normalize_logits=False)
    for beam in range(4):  # each beam's log-probability, computed alone
        alone = prefill(model, ids, QuestCache(model.config, **SMALL))
        logits = torch.cat(run(model, alone, out.sequences[beam : beam + 1, 59:-1], [1] * 12))
        expected = logits.log_softmax(-1)[torch.arange(12), out.sequences[beam, 60:]]
        torch.testing.assert_close(scores[beam], expected, atol=1e-3, rtol=1e-3)


def test_sequences_can_be_chosen_and_repeated():
    model, ids = attached(), random_ids(60, batch=2)
    cache = prefill(model, ids, QuestCache(model.config, **SMALL))
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    ranges_are_those_of_the_keys(cache)
    logits = run(model, cache, ids[[1, 0, 1], 59:], [1])[0]
    torch.testing.assert_close(logits[0], logits[2])
    for b, of in enumerate((1, 0)):
        alone = prefill(model, ids[of : of + 1], QuestCache(model.config, **SMALL))
        torch.testing.assert_close(run(model, alone, ids[of : of + 1, 59:], [1])[0][0], logits[b], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [None, "k8v4"])
@pytest.mark.parametrize("dropped", [1, 3, 8, 30, 60])
def test_tokens_that_are_taken_back_leave_no_trace(dropped, dtype):
    model, ids, other = attached(), random_ids(64), random_ids(40, seed=5)
    cropped, plain = (QuestCache(model.config, **SMALL, dtype=dtype) for _ in range(2))
    run(model, cropped, ids, [60, 1, 1, 1, 1])
    cropped.crop(-dropped)
    ranges_are_those_of_the_keys(cropped)
    kept = 64 - dropped
    run(model, plain, ids, [60, 1, 1, 1, 1][: 1 + max(kept - 60, 0)] if kept >= 60 else [kept])
    for ours, expected in zip(*(run(model, c, other, [1, 3, 1, 1, 30, 1]) for c in (cropped, plain)), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    ranges_are_those_of_the_keys(cropped)


def test_a_prompt_can_be_taken_back_but_not_one_that_was_padded():
    model, ids = attached(), random_ids(50)
    cache = prefill(model, ids, QuestCache(model.config, **SMALL))
    cache.crop(-20)
    assert cache.stored_lengths() == [[[29, 29]]] * 3 and cache.get_seq_length() == 29
    prefill(model, ids, cache)
    whole = prefill(model, ids, QuestCache(model.config, **SMALL))
    torch.testing.assert_close(*(run(model, c, ids[:, -1:], [1])[0] for c in (cache, whole)), atol=1e-4, rtol=1e-4)
    ids, mask = left_padded([random_ids(50), random_ids(9)])
    padded = prefill(model, ids, QuestCache(model.config, **SMALL), mask)
    with pytest.raises(ValueError, match="crop can remove at most the 0 tokens"):
        padded.crop(-1)


def test_assisted_decoding():
    model = attached()
    ids = random_ids(12).repeat(1, 5)  # so that prompt lookup finds candidates
    settings = {"max_new_tokens": 20, "do_sample": False}
    greedy = model.generate(ids, **settings)
    whole = prefill(model, ids, QuestCache(model.config, token_budget=128))
    assert torch.equal(model.generate(ids, past_key_values=whole, **settings, prompt_lookup_num_tokens=3), greedy)
    whole = prefill(model, ids, QuestCache(model.config, token_budget=128))
    assistant = tiny_model(seed=5)
    assert torch.equal(model.generate(ids, past_key_values=whole, **settings, assistant_model=assistant), greedy)
    small = prefill(model, ids, QuestCache(model.config, **SMALL))
    assert model.generate(ids, past_key_values=small, **settings, prompt_lookup_num_tokens=3).shape == greedy.shape
    ranges_are_those_of_the_keys(small)


def test_nbytes_counts_the_ranges_of_layers_that_are_not_dense():
    model, ids = attached(), random_ids(65)
    dense, one = (prefill(model, ids, QuestCache(model.config, page_size=16, dense_layers=n)) for n in (3, 2))
    assert dense.nbytes() >= 3 * 2 * 64 * 2 * 16 * 4
    assert one.nbytes() - dense.nbytes() == 2 * 4 * 2 * 16 * 4  # rows, pages, two vectors
    assert one.reserved_nbytes() - dense.reserved_nbytes() >= one.nbytes() - dense.nbytes()


def test_trim_gives_back_the_room_of_ranges_too():
    model, ids = attached(), random_ids(200)
    caches = [prefill(model, ids, QuestCache(model.config, **SMALL)) for _ in range(2)]
    for cache in caches:
        cache.crop(-150)
    caches[1].trim()
    assert caches[1].reserved_nbytes() < caches[0].reserved_nbytes() / 3
    assert [layer.ranges.shape[1] for layer in caches[1].layers[1:]] == [13, 13]  # 49 tokens in pages of 4
    a, b = (run(model, cache, ids[:, 49:], [1, 1, 1, 1, 30, 1]) for cache in caches)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y)
    ranges_are_those_of_the_keys(caches[1])


def test_nothing_not_a_number_hides():
    model, ids = attached(), random_ids(60)
    cache = prefill(model, ids, QuestCache(model.config, **SMALL))
    pool = cache.layers[1].pool
    pool.k_pages[pool.block_table[0, 3]] = float("nan")
    cache.layers[1]._note_keys([59] * 2)
    with pytest.raises(RuntimeError, match="hidden states hold NaN"):
        run(model, cache, ids[:, -1:], [1])


@pytest.mark.parametrize("grow", ["double", "error"])
def test_a_full_pool_names_its_setting_and_loses_nothing(grow):
    model, ids = attached(), random_ids(60)
    cache = QuestCache(model.config, **SMALL, max_pages=2 * 16, grow=grow)
    with pytest.raises(RuntimeError, match=r"max_pages = 32 is too few: 34 pages of 4 tokens are needed"):
        kvcompress.generate(model, ids, cache, max_new_tokens=8, do_sample=False)
    assert cache.stored_lengths() == [[[64, 64]]] * 3
    cache.crop(-2)
    run(model, cache, ids, [1, 1])
    ranges_are_those_of_the_keys(cache)
    with pytest.raises(RuntimeError, match="max_pages = 32 is too few: 34 pages"):
        prefill(model, random_ids(67), QuestCache(model.config, **SMALL, max_pages=32, grow=grow))
    fresh = QuestCache(model.config, **SMALL, max_pages=32, grow=grow)
    with pytest.raises(RuntimeError, match="max_pages = 32 is too few: 34 pages"):
        run(model, fresh, random_ids(66), [66])
    fresh.check_complete()
    run(model, fresh, random_ids(64), [64])


def test_frequencies_are_settled_for_the_whole_prompt():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = attached(max_position_embeddings=64, rope_parameters=scaling)
    ids = random_ids(100)
    keys = []
    for size in (None, 20):
        cache = prefill(model, ids, QuestCache(model.config, token_budget=1000, chunk_size=size))
        keys.append(cache.layers[2].pool.gather(99)[0])
    torch.testing.assert_close(*keys, atol=1e-3, rtol=1e-3)


def test_a_layer_with_a_window_of_its_own_keeps_that():
    model, ids = attached("mistral", sliding_window=20), random_ids(70)
    dense = model.generate(ids, max_new_tokens=9, do_sample=False)
    cache = QuestCache(model.config, **SMALL)
    assert torch.equal(kvcompress.generate(model, ids, cache, max_new_tokens=9, do_sample=False), dense)
    assert cache.stored_lengths() == [[[20, 20]]] * 3


def test_a_guide_is_refused():
    model = attached()
    with pytest.raises(ValueError, match="guide has no effect with QuestCache"):
        prefill(model, random_ids(40), QuestCache(model.config), guide=random_ids(3)[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_budget": 0}, "token_budget must be at least 1, got 0"),
        (
            {"token_budget": 0.5},
            r"token_budget must be a number of tokens .*, got 0.5: the share that stays is keep=",
        ),
        ({"dense_layers": -1}, "dense_layers must be at least 0, got -1"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ({"page_size": 12}, "page_size must be a power of two, an integer such as 64, got 12"),
        ({"max_pages": 0}, "max_pages must be at least 1, got 0"),
        ({"grow": "error"}, "max_pages must be given with grow='error', got None"),
    ],
)
def test_wrong_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        QuestCache(tiny_model().config, **arguments)
