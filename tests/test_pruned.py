"""What PrunedCache keeps and answers, with every pruner and budget; and IterativeCache with the same."""

import copy

import pruned_definition as definition
import pytest
import torch
from helpers import FAMILIES, attached, covering, left_padded, random_ids, stays, tiny_gates

import kvcompress
from kvcompress import AdaKV, GlobalTopK, IterativeCache, PrunedCache, PyramidKV, RemoteGap, prefill
from kvcompress.pruners import (
    H2O,
    TOVA,
    CenterOfGravity,
    ExpectedAttention,
    Gate,
    KeyDiff,
    KeyNorm,
    Random,
    Replay,
    SnapKV,
    StreamingLLM,
    WindowAttention,
)

EVERY_PRUNER = [
    SnapKV(window=6),
    StreamingLLM(),
    WindowAttention(),
    H2O(),
    TOVA(),
    CenterOfGravity(10, 10, 2, window=4),
    KeyNorm(),
    Random(),
    ExpectedAttention(future_positions=16),
    Replay(chunk=16, last=4),
    KeyDiff(last=4),
    Gate(tiny_gates(), last=4),
]
EVERY_SIZE = [stays(20), stays(0.4), stays("48KiB"), stays(20, PyramidKV(window=6)), stays(20, AdaKV()),
              stays(20, AdaKV(PyramidKV(window=6), floor=0.5))]  # fmt: skip


def name_of(x):
    return type(x).__name__ if not isinstance(x, dict) else f"{x['keep']} {type(x['budget']).__name__}"


@torch.no_grad()
def run(model, cache, ids, calls):
    """Logits after each call of so many tokens."""
    out, start = [], 0
    for count in calls:
        out.append(model(ids[:, start : start + count], past_key_values=cache).logits[0, -1])
        start += count
    return out


CALLS = [26] + [1] * 6 + [7] + [1] * 5 + [20, 1]
GAP = {"gap": 6, "headroom": 16}


DEFINED = [
    (SnapKV(window=6, kernel_size=3), definition.snapkv(6, 3)),
    (H2O(), definition.h2o()),
    (TOVA(), definition.tova()),
    (CenterOfGravity(10, 6, 2, "global", window=4), lambda: definition.cge(10, 6, 2, 4, "global")),
    (CenterOfGravity(10, 6, 3, "local", window=4), lambda: definition.cge(10, 6, 3, 4, "local")),
    (CenterOfGravity(10, 6, 3, "local", False, 4), lambda: definition.cge(10, 6, 3, 4, "local", False)),
    (CenterOfGravity(10, 6, 3, "global", False, 4), lambda: definition.cge(10, 6, 3, 4, "global", False)),
    (
        CenterOfGravity(10, 6, 2, window=3, heads="shared"),
        lambda: definition.cge(10, 6, 2, 3, "global", True, True),
    ),
]


@pytest.mark.parametrize(
    ("defined", "every", "positions"),
    covering(DEFINED, [None, 1, 4], ["original", "contiguous", "between", "to_query", "constant", "shared"]),
)
def test_what_the_definition_says(defined, every, positions):
    """Prompt, decoding, a short and a long further turn."""
    pruner, choose = defined
    choose = choose if "choose" in getattr(choose, "__qualname__", "") else choose()
    model, ids = attached(num_hidden_layers=2).double().float(), random_ids(sum(CALLS))
    near = pruner.recent(16, 16)
    if positions != "original" and not near:
        near, choose = 5, definition.tova(near=5)
    policy, settings = {
        "original": ("original", {}),
        "contiguous": (RemoteGap(gap=0, near_length=near or None), {"blank": 0}),
        "between": (RemoteGap(**GAP, near_length=near or None), {"blank": 6}),
        "to_query": (RemoteGap(gap=near + 3, reading="to_query", near_length=near or None), {"blank": 3}),
        "constant": (
            RemoteGap(gap=40, reading="constant", headroom=20, near_length=near or None),
            {"blank": 40, "constant": True},
        ),
        "shared": (RemoteGap(**GAP, comp_positions="shared", near_length=near or None), {"blank": 6, "shared": True}),
    }[positions]
    cache = PrunedCache(model.config, pruner, keep=16, every=every, positions=policy, page_size=4)
    ours = run(model, cache, ids, CALLS)
    exact = copy.deepcopy(model).double()
    kvcompress.detach(exact)
    votes = 10**6 if isinstance(pruner, H2O) and every is None else every
    expected = definition.Definition(exact, choose, 16, every=votes, **settings)
    start = 0
    for number, (count, logits) in enumerate(zip(CALLS, ours, strict=True)):
        wanted = expected(ids[0, start : start + count])
        start += count
        torch.testing.assert_close(
            logits.double(), wanted, atol=3e-3, rtol=3e-3, msg=lambda m, n=number: f"call {n}: {m}"
        )
    assert cache.stored_lengths() == [[[len(row.k) for row in rows]] for rows in expected.rows]


@pytest.mark.parametrize(
    ("positions", "size", "pruner"),
    covering(["original", RemoteGap(gap=8, near_length=4, headroom=8)], EVERY_SIZE, EVERY_PRUNER),
)
def test_every_pruner_with_every_budget_keeps_what_the_budget_says(pruner, size, positions):
    if pruner.one_frame and positions != "original":
        pytest.skip("judges keys of one segment only")
    model, ids = attached(), random_ids(61)
    cache = PrunedCache(model.config, pruner, **size, every=4, positions=positions, page_size=8)
    out = kvcompress.generate(model, ids, cache, max_new_tokens=14, do_sample=False)
    assert out.shape == (1, 75)
    stored = cache.stored_lengths()
    keep, budget = size["keep"], size["budget"]
    if isinstance(keep, str):
        assert sum(layer.pool.nbytes() for layer in cache.layers) <= 48 * 1024
        return
    mean = 20 if not isinstance(keep, float) else 30
    total = sum(sum(row) for (row,) in stored)
    assert 3 * 2 * mean <= total <= 3 * 2 * (mean + 4)
    for (row,) in stored:
        assert len(set(row)) == 1 or isinstance(budget, AdaKV)
    if isinstance(budget, PyramidKV) or isinstance(getattr(budget, "inner", None), PyramidKV):
        assert sum(stored[0][0]) > sum(stored[2][0])


@pytest.mark.parametrize(
    ("chunk_size", "size", "pruner"),
    covering([None, 16], [stays(20), stays(20, AdaKV()), stays(0.4)], EVERY_PRUNER[:1] + EVERY_PRUNER[3:6]),
)
def test_left_padding_changes_no_token(pruner, size, chunk_size):
    model = attached()
    prompts = [random_ids(length, seed=length) for length in (70, 9, 41)]
    ids, mask = left_padded(prompts)
    settings = {"every": 5, "positions": "contiguous", "chunk_size": chunk_size, "page_size": 8}
    cache = PrunedCache(model.config, pruner, **size, **settings)
    together = kvcompress.generate(model, ids, cache, mask, max_new_tokens=12, do_sample=False)
    for b, prompt in enumerate(prompts):
        alone = PrunedCache(model.config, pruner, **size, **settings)
        expected = kvcompress.generate(model, prompt, alone, max_new_tokens=12, do_sample=False)
        assert torch.equal(together[b, -12:], expected[0, -12:]), b
        assert [layer[b] for layer in cache.stored_lengths()] == [layer[0] for layer in alone.stored_lengths()]


@pytest.mark.parametrize("pruner", EVERY_PRUNER, ids=name_of)
@pytest.mark.parametrize(
    "size", [stays(61), stays(1000), stays(1.0), stays("64MiB"), stays(61, AdaKV()), stays(61, PyramidKV())],
    ids=name_of,
)  # fmt: skip
def test_a_size_that_holds_everything_changes_nothing(pruner, size):
    model, ids = attached(), random_ids(61)
    dense = model.generate(ids, max_new_tokens=12, do_sample=False)
    cache = PrunedCache(model.config, pruner, **size)
    whole = PrunedCache(model.config, WindowAttention(), keep=10**6)
    assert torch.equal(kvcompress.generate(model, ids, cache, max_new_tokens=12, do_sample=False), dense)
    kvcompress.generate(model, ids, whole, max_new_tokens=12, do_sample=False)
    with torch.no_grad():
        a, b = (model(dense[:, -1:], past_key_values=c).logits for c in (cache, whole))
    assert torch.equal(a, b)
    assert cache.stored_lengths() == [[[73, 73]]] * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family):
    model, ids = attached(family), random_ids(50)
    cache = PrunedCache(model.config, CenterOfGravity(10, 10, 2, window=4), every=3, positions=RemoteGap(gap=12))
    assert kvcompress.generate(model, ids, cache, max_new_tokens=10, do_sample=False).shape == (1, 60)
    assert max(max(row) for (row,) in cache.stored_lengths()) <= 22


@pytest.mark.parametrize("pruner", EVERY_PRUNER, ids=name_of)
def test_forks_answer_as_if_they_were_alone(pruner):
    model, ids = attached(), random_ids(61)
    settings = {"every": 4, "page_size": 8}
    cache = prefill(model, ids, PrunedCache(model.config, pruner, keep=20, **settings))
    forks = [cache.fork() for _ in range(3)]
    for seed, fork in enumerate(forks):
        question = torch.cat([ids, random_ids(5, seed=seed)], 1)
        alone = prefill(model, ids, PrunedCache(model.config, pruner, keep=20, **settings))
        expected = model.generate(question, past_key_values=alone, max_new_tokens=14, do_sample=False)
        assert torch.equal(model.generate(question, past_key_values=fork, max_new_tokens=14, do_sample=False), expected)
    assert cache.stored_lengths() == [[[20, 20]]] * 3


@pytest.mark.parametrize("pruner", [SnapKV(window=6), H2O(), CenterOfGravity(10, 10, 2, window=4)], ids=name_of)
def test_beams_and_samples(pruner):
    model, ids = attached(), random_ids(61)
    cache = PrunedCache(model.config, pruner, keep=20, every=3, positions="contiguous", page_size=8)
    beams = kvcompress.generate(model, ids, cache, max_new_tokens=12, do_sample=False, num_beams=3)
    assert beams.shape == (1, 73)
    repeated = PrunedCache(model.config, pruner, keep=20, every=3, positions="contiguous", page_size=8)
    torch.manual_seed(0)
    several = kvcompress.generate(model, ids, repeated, max_new_tokens=12, do_sample=True, num_return_sequences=4)
    assert several.shape == (4, 73)
    assert max(max(row) for layer in repeated.stored_lengths() for row in layer) < 23


@pytest.mark.parametrize("positions", ["original", "contiguous"])
@pytest.mark.parametrize("chunk_size", [None, 16])
def test_the_guide_chooses_and_is_not_stored(chunk_size, positions):
    model, ids, guide = attached(), random_ids(60), random_ids(5, seed=9)[0]
    settings = {"positions": positions, "chunk_size": chunk_size}
    plain = prefill(model, ids, PrunedCache(model.config, SnapKV(window=4), keep=12, **settings))
    guided = prefill(model, ids, PrunedCache(model.config, SnapKV(window=4), keep=12, **settings), guide=guide)
    assert guided.stored_lengths() == plain.stored_lengths() == [[[12, 12]]] * 3
    assert guided.get_seq_length() == 59
    assert any(
        not torch.equal(a.pool.k_pages, b.pool.k_pages) for a, b in zip(plain.layers, guided.layers, strict=True)
    )
    whole = [
        prefill(model, ids, PrunedCache(model.config, SnapKV(), keep=99, **settings), guide=g) for g in (None, guide)
    ]
    with torch.no_grad():
        a, b = (model(ids[:, -1:], past_key_values=cache).logits for cache in whole)
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("budget", "pruner"),
    covering([None, PyramidKV(window=6), AdaKV(), AdaKV(PyramidKV(window=6))], EVERY_PRUNER),
)
def test_iterative_reading_with_every_pruner_and_budget(pruner, budget):
    model, ids = attached(), random_ids(120)
    cache = IterativeCache(model.config, memory_size=20, budget=budget, chunk_size=16, pruner=pruner, page_size=8)
    prefill(model, ids[:, :80], cache)
    assert sum(sum(row) for (row,) in cache.stored_lengths()) == 3 * 2 * 20
    with torch.no_grad():
        model(ids[:, 79:83], past_key_values=cache)
    prefill(model, ids, cache)  # a further prompt
    assert sum(sum(row) for (row,) in cache.stored_lengths()) == 3 * 2 * 20
    if not pruner.one_frame:
        cache = IterativeCache(
            model.config, memory_size=20, budget=budget, chunk_size=16, pruner=pruner, page_size=8, every=4
        )
        kvcompress.generate(model, ids, cache, max_new_tokens=20, do_sample=False)
        assert sum(sum(row) for (row,) in cache.stored_lengths()) < 3 * 2 * 24
        prefill(model, torch.cat([ids, random_ids(60)], 1), cache)
        assert sum(sum(row) for (row,) in cache.stored_lengths()) == 3 * 2 * 20


def test_ragged_rows_stand_where_equal_ones_would():
    """A row that lost its first tokens attends as one that had them hidden: only distances count."""
    model, ids = attached(num_hidden_layers=1), random_ids(60, seed=3)
    cache = IterativeCache(model.config, memory_size=20, budget=AdaKV(floor=0.0), chunk_size=60, pruner=SnapKV(2, 1))
    prefill(model, ids, cache)
    ((row,),) = cache.stored_lengths()
    assert row[0] != row[1]
    with torch.no_grad():
        logits = model(ids[:, -1:], past_key_values=cache).logits[0, -1]
    layer, base = cache.layers[0].pages, model.model
    k, v = layer.pool.gather(max(layer.pool.counts))
    places = torch.arange(k.shape[1])[None] + layer.shift[:, None]
    ends = places.gather(1, layer.pool.lengths[:, None].long() - 1)[:, 0]
    assert ends[0] == ends[1]
    with torch.no_grad():
        x = base.layers[0].input_layernorm(base.embed_tokens(ids[:, -1:]))
        q = base.layers[0].self_attn.q_proj(x).unflatten(-1, (4, 16)).transpose(1, 2)
        q = cache.facts[0].query_rotary.rotate(q, torch.tensor([[layer.next[0] - 1]], dtype=torch.int32), 100, [20])
        out = torch.zeros(4, 16)
        for h in range(4):
            n = layer.pool.counts[h // 2]
            out[h] = (q[0, h] @ k[h // 2, :n].T / 4).softmax(-1) @ v[h // 2, :n]
        h = base.embed_tokens(ids[:, -1:]) + base.layers[0].self_attn.o_proj(out.reshape(1, 1, 64))
        h = h + base.layers[0].mlp(base.layers[0].post_attention_layernorm(h))
        expected = model.lm_head(base.norm(h))[0, -1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "positions", ["original", RemoteGap(gap=8, near_length=4, headroom=16)], ids=["original", "gap"]
)
def test_a_guide_with_sequences_that_start_in_later_chunks(positions):
    model, guide = attached(), random_ids(5, seed=9)[0]
    prompts = [random_ids(length, seed=length) for length in (40, 7, 22)]
    ids, mask = left_padded(prompts)
    settings = {"positions": positions, "chunk_size": 12, "every": 3}
    together = PrunedCache(model.config, SnapKV(window=4), keep=16, **settings)
    out = kvcompress.generate(model, ids, together, mask, guide=guide, max_new_tokens=9, do_sample=False)
    for b, prompt in enumerate(prompts):
        alone = PrunedCache(model.config, SnapKV(window=4), keep=16, **settings)
        expected = kvcompress.generate(model, prompt, alone, guide=guide, max_new_tokens=9, do_sample=False)
        assert torch.equal(out[b, -9:], expected[0, -9:]), b


@pytest.mark.parametrize("chunk_size", [None, 13])
def test_the_guides_queries_do_not_score_while_decoding(chunk_size):
    model, ids, guide = attached(), random_ids(60), random_ids(5, seed=9)[0]
    cache = PrunedCache(model.config, SnapKV(window=6), keep=16, chunk_size=chunk_size, every=2)
    prefill(model, ids, cache, guide=guide)
    queries, valid = cache.layers[0].chooser.recent.get()
    plain = prefill(model, ids, PrunedCache(model.config, SnapKV(window=6), keep=16, chunk_size=chunk_size, every=2))
    assert valid == [6]
    torch.testing.assert_close(queries, plain.layers[0].chooser.recent.get()[0])  # layer 0 sees the same tokens in both


@pytest.mark.parametrize("gap", ["auto", 30, 12], ids=["auto", "between", "to_query"])
def test_one_sequences_gap_is_not_anothers(gap):
    model = attached(max_position_embeddings=64)
    prompts = [random_ids(length, seed=length) for length in (40, 14)]
    ids, mask = left_padded(prompts)
    positions = RemoteGap(gap, "to_query" if gap == 12 else "between", near_length=4, headroom=8)
    caches = [PrunedCache(model.config, SnapKV(window=4), keep=16, positions=positions, every=8) for _ in range(3)]
    out = kvcompress.generate(model, ids, caches[2], mask, max_new_tokens=12, do_sample=False)
    for b, prompt in enumerate(prompts):
        expected = kvcompress.generate(model, prompt, caches[b], max_new_tokens=12, do_sample=False)
        assert torch.equal(out[b, -12:], expected[0, -12:]), b


@pytest.mark.parametrize("decoded", [2, 63, 64, 65])
@pytest.mark.parametrize("every", [None, 2])
def test_h2o_compresses_before_a_turn_whether_or_not_all_have_voted(decoded, every):
    model, ids = attached(num_hidden_layers=1), random_ids(30 + decoded + 9)
    cache = PrunedCache(model.config, H2O(), keep=12, every=every)
    ours = run(model, cache, ids, [30] + [1] * decoded + [9])
    exact = copy.deepcopy(model).double()
    kvcompress.detach(exact)
    expected = definition.Definition(exact, definition.h2o(), 12, every=every or 10**6)
    start = 0
    for count in [30] + [1] * decoded + [9]:
        wanted = expected(ids[0, start : start + count])
        start += count
    torch.testing.assert_close(ours[-1].double(), wanted, atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize("every", [None, 8])
def test_decoded_queries_vote_in_iterative_reading_too(every):
    """Two prompts with decoded tokens between: every query's attention is in the sums, nothing else."""
    model, ids = attached(num_hidden_layers=1), random_ids(60)
    cache = IterativeCache(model.config, memory_size=200, chunk_size=16, pruner=H2O(), every=every)
    prefill(model, ids[:, :30], cache)
    with torch.no_grad():
        for t in range(29, 40):
            model(ids[:, t : t + 1], past_key_values=cache)
    prefill(model, ids, cache)
    torch.testing.assert_close(
        cache.layers[0].chooser.received[:, :59].sum(1), torch.full((2,), 2.0 * 59), rtol=1e-4, atol=0
    )


def test_a_short_turn_leaves_only_queries_whose_keys_are_held():
    model, ids = attached(num_hidden_layers=2), random_ids(60)
    cache = PrunedCache(model.config, SnapKV(window=8), keep=12, every=1)
    run(model, cache, ids, [30, 1, 1, 2])
    assert cache.layers[0].chooser.recent.get()[1] == [2]
    run(model, cache, ids[:, 34:], [1])
    assert cache.layers[0].chooser.recent.get()[1] == [3]


@torch.no_grad()
@pytest.mark.parametrize("pruner", [SnapKV(window=6), TOVA(), H2O()], ids=name_of)
def test_a_prompt_of_one_chunk_is_pruned_alike_by_both_caches_while_decoding_too(pruner):
    """every is below the window: the prompt's last queries score in the first compressions of decoding."""
    model, ids = attached(), random_ids(60)
    iterative = IterativeCache(model.config, memory_size=20, chunk_size=64, pruner=pruner, every=3)
    pruned = PrunedCache(model.config, pruner, keep=20, every=3, positions="contiguous")
    logits = []
    for cache in (iterative, pruned):
        prefill(model, ids[:, :41], cache)
        logits.append(torch.stack([model(ids[:, [t]], past_key_values=cache).logits[0, -1] for t in range(40, 58)]))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    assert iterative.stored_lengths() == pruned.stored_lengths()


@torch.no_grad()
def test_dynamic_rope_in_chunks_is_the_dense_models_where_all_is_kept():
    from test_positions import scaled_model

    model, ids = scaled_model("dynamic"), random_ids(140)
    model.model.rotary_emb.original_max_seq_len = 32
    dense = model(ids[:, :-1]).logits[:, -1]
    kvcompress.attach(model)
    cache = PrunedCache(model.config, SnapKV(), keep=500, chunk_size=16)
    loss = kvcompress.logits.AllLogits()
    prefill(model, ids, cache, logits=loss)
    torch.testing.assert_close(loss.logits()[-1], dense[0], atol=5e-3, rtol=5e-3)


def test_prompts_that_begin_with_the_pad_token_are_padded():
    model, ids = attached(pad_token_id=0), random_ids(40)
    ids[:, :10] = 0
    cache = prefill(model, ids, PrunedCache(model.config, SnapKV(), keep=100))
    assert cache.stored_lengths() == [[[29, 29]]] * 3
    ids[:, 20] = 0
    with pytest.raises(ValueError, match="pad token 0 inside a prompt: pass attention_mask"):
        prefill(model, ids, PrunedCache(model.config, SnapKV(), keep=100))


# ---- batches whose sequences get tokens at different times ----


@torch.no_grad()
@pytest.mark.parametrize("pruner", [SnapKV(window=6), H2O(), ExpectedAttention(future_positions=8)], ids=name_of)
def test_turns_of_unequal_length_give_what_each_sequence_gives_alone(pruner):
    """Turns with padding, one of no tokens at all for a sequence, and decoding between them."""
    model = attached()
    calls = [[20, 9], [1, 1], [1, 1], [7, 0], [1, 1], [2, 5], *[[1, 1]] * 9]
    texts = [random_ids(sum(call[b] for call in calls), seed=b) for b in range(2)]
    cache = PrunedCache(model.config, pruner, keep=12, every=3)
    alone = [PrunedCache(model.config, pruner, keep=12, every=3) for _ in texts]
    start, mask = [0, 0], torch.ones(2, 0, dtype=torch.long)
    for call in calls:
        ids = torch.zeros(2, max(call), dtype=torch.long)
        new = torch.zeros_like(ids)
        for b, count in enumerate(call):
            ids[b, max(call) - count :] = texts[b][0, start[b] : start[b] + count]
            new[b, max(call) - count :] = 1
        mask = torch.cat([mask, new], 1)
        together = model(ids, past_key_values=cache, attention_mask=mask).logits[:, -1]
        for b, count in enumerate(call):
            if count:
                part = texts[b][:, start[b] : start[b] + count]
                torch.testing.assert_close(
                    together[b], model(part, past_key_values=alone[b]).logits[0, -1], atol=1e-4, rtol=1e-4
                )
        start = [begin + count for begin, count in zip(start, call, strict=True)]
        assert [rows[b] for rows in cache.stored_lengths() for b in range(2)] == [
            alone[b].stored_lengths()[j][0] for j in range(3) for b in range(2)
        ]


@torch.no_grad()
def test_unasked_it_keeps_what_needs_no_question_and_divides_sizes():
    model, ids = attached(), random_ids(40)
    cache = PrunedCache(model.config, keep=0.25, later="keep")
    assert cache.pruner == Replay() and cache.budget == GlobalTopK()
    assert PrunedCache(model.config, budget=AdaKV(), keep=8).budget == AdaKV()
    prefill(model, ids, cache)
    cache.compress(keep=0.125)
    assert (cache.keep, cache.budget) == (0.125, GlobalTopK())
    told = PrunedCache(model.config, Replay(), GlobalTopK(), keep=0.125)
    assert cache.stored_lengths() == prefill(model, ids, told).stored_lengths()
    other = prefill(model, ids, PrunedCache(model.config, Replay(), GlobalTopK(floor=0.3), keep=0.5, later="keep"))
    other.compress(keep=0.25)
    assert other.budget == GlobalTopK(floor=0.3)
    with pytest.raises(ValueError, match="positions must be 'original' where no pruner is given"):
        PrunedCache(model.config, keep=8, positions="contiguous")
