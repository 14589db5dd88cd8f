"""keep(): slots are chosen in one place, and all that belongs to a slot goes with it."""

from pathlib import Path

import pytest
import torch
from helpers import DMC_MODES, attach, attached, deciding_model, logits_of, random_ids, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_definition import append, new_pool, numbered

import kvcompress
from kvcompress import DMCCache, IterativeCache, PrunedCache, QuestCache
from kvcompress.caches.choose import Choice
from kvcompress.pruners import H2O, SnapKV

SOURCES = Path(kvcompress.__file__).parent
SNAP = SnapKV(window=4)
CACHES = {  # of a prompt that is kept whole, without what only a memory is
    "paged": lambda c: IterativeCache(c, memory_size=99, page_size=4),
    "pruned": lambda c: PrunedCache(c, SNAP, keep=1.0, page_size=4),
    "votes": lambda c: PrunedCache(c, H2O(), keep=1.0, page_size=4),
    "held scores": lambda c: PrunedCache(c, SNAP, keep=1.0, later="keep", page_size=4),
}
T, NEW = 22, 6
CHOSEN = [list(range(0, T, 3)), [1, 2, *range(5, T, 2)]]  # of each KV head


def choice_of(chosen, batch=1):
    rows = chosen * batch
    slots = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int32)
    for row, own in enumerate(rows):
        slots[row, : len(own)] = torch.tensor(own)
    return Choice(slots, [len(own) for own in rows], [None] * batch)


def after_a_prompt(make):
    """A model, the ids of a prompt and of what follows, and a cache that has read the prompt."""
    model, ids = attached(), random_ids(T + NEW)
    cache = make(model.config)
    logits_of(model, ids[:, :T], cache)
    return model, ids, cache


def dense_logits(ids):
    """Of what follows, by a model that sees the prompt whole and of it, behind it, only what was chosen."""
    plain = tiny_model(attn_implementation="eager")
    seen = torch.ones(T + NEW, T + NEW).tril().bool().repeat(1, 4, 1, 1)
    for head in range(4):
        gone = [t for t in range(T) if t not in CHOSEN[head // 2]]
        seen[0, head, T:, gone] = False
    with torch.no_grad():
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        return plain(ids, attention_mask=mask).logits[:, T:]


@pytest.mark.parametrize("calls", [[1] * NEW, [NEW], [1, 4, 1]], ids=str)
@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_what_follows_sees_what_was_kept_where_it_stood(make, calls):
    model, ids, cache = after_a_prompt(make)
    for layer in cache.layers:
        getattr(layer, "pages", layer).keep(choice_of(CHOSEN))
    assert [[row.tolist() for row in layer[0]] for layer in cache.kept_positions()] == [CHOSEN] * 3
    found, begin = [], T
    for columns in calls:
        found.append(logits_of(model, ids[:, begin : begin + columns], cache))
        begin += columns
    new = list(range(T, T + NEW))
    assert [[row.tolist() for row in layer[0]] for layer in cache.kept_positions()] == [[o + new for o in CHOSEN]] * 3
    torch.testing.assert_close(torch.cat(found, 1), dense_logits(ids), atol=1e-4, rtol=1e-4)


def test_a_layer_knows_what_its_pool_alone_let_go():
    """Which tokens slots hold, and where coming ones stand, follow from the pages, whoever moved them."""
    model, ids, cache = after_a_prompt(CACHES["paged"])
    for layer in cache.layers:
        layer.pool.keep(choice_of(CHOSEN).slots, choice_of(CHOSEN).kept)
    assert [row.tolist() for row in cache.kept_positions()[0][0]] == CHOSEN
    assert cache.layers[0].pages.shift.tolist() == [T - len(own) for own in CHOSEN]
    logits = torch.cat([logits_of(model, ids[:, t : t + 1], cache) for t in range(T, T + NEW)], 1)
    torch.testing.assert_close(logits, dense_logits(ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["votes", "held scores"])
def test_scores_follow_their_slots(name):
    _, _, cache = after_a_prompt(CACHES[name])
    layer = cache.layers[1]

    def scores():
        return layer.chooser.received if name == "votes" else layer.chooser.held.scores

    before = scores().clone()
    layer.keep(choice_of(CHOSEN))
    for row, own in enumerate(CHOSEN):
        assert before[row, own].any()
        torch.testing.assert_close(scores()[row, : len(own)], before[row, own])


def test_what_was_chosen_goes_with_forks_and_beams():
    model, ids, cache = after_a_prompt(CACHES["pruned"])
    for layer in cache.layers:
        layer.keep(choice_of(CHOSEN))
    fork = cache.fork()
    fork.batch_repeat_interleave(2)
    fork.layers[0].keep(choice_of([[0, 2], [1]], 2))
    assert [[row.tolist() for row in rows] for rows in fork.kept_positions()[0]] == [[[0, 6], [2]]] * 2
    assert [row.tolist() for row in cache.kept_positions()[0][0]] == CHOSEN
    logits = logits_of(model, ids[:, T:], cache)
    torch.testing.assert_close(logits, dense_logits(ids), atol=1e-4, rtol=1e-4)


def test_a_keep_that_finds_no_pages_changes_nothing():
    model, ids = attached(), random_ids(T)
    cache = PrunedCache(model.config, H2O(), keep=1.0, page_size=4, max_pages=12)
    logits_of(model, ids, cache)
    fork, layer = cache.fork(), cache.layers[0]
    votes = layer.chooser.received.clone()
    with pytest.raises(RuntimeError, match="max_pages = 12 is too few"):
        layer.keep(choice_of([[0, 2, *range(4, T)], list(range(1, T))]))
    assert [row.tolist() for row in layer.kept_positions()[0]] == [list(range(T))] * 2
    assert layer.shift is None and torch.equal(layer.chooser.received, votes)
    assert [row.tolist() for row in fork.kept_positions()[0][0]] == [list(range(T))] * 2


@pytest.mark.parametrize("kind", ["dmc", "dms", "quest"])
def test_slots_of_layers_that_choose_none_are_not_chosen(kind):
    model = attached() if kind == "quest" else deciding_model(dmc=DMC_MODES[kind])
    attach(model)
    cache = QuestCache(model.config) if kind == "quest" else DMCCache(model.config)
    logits_of(model, random_ids(T), cache)
    before = cache.stored_lengths()
    with pytest.raises(NotImplementedError, match=r"slots of \w+Layer cannot be chosen"):
        cache.layers[0].keep(choice_of(CHOSEN))
    assert cache.stored_lengths() == before


@settings(deadline=None, max_examples=50)
@given(data=st.data(), page_size=st.sampled_from([1, 4]))
def test_a_pool_knows_which_tokens_its_slots_hold(data, page_size):
    """rows: the tokens of each, and the number of its next one."""
    pool, rows = new_pool(page_size=page_size), [([], 0)] * 3
    P = page_size
    for _ in range(data.draw(st.integers(1, 8))):
        R = len(rows)
        action = data.draw(st.sampled_from(["append", "append", "keep", "back", "pages", "select", "fork", "join"]))
        if action == "append":
            counts = data.draw(st.lists(st.integers(0, 7), min_size=R, max_size=R))
            append(pool, numbered(R, 7), counts)
            rows = [([*own, *range(n, n + new)], n + new) for (own, n), new in zip(rows, counts, strict=True)]
        elif action == "keep":
            chosen = [sorted(data.draw(st.sets(st.sampled_from(range(len(own)))))) if own else [] for own, _ in rows]
            slots = choice_of(chosen).slots
            kept = [len(own) if data.draw(st.booleans()) else -1 for own in chosen]
            pool.keep(slots, kept)
            rows = [
                ([own[slot] for slot in stay] if count >= 0 else own, n)
                for (own, n), stay, count in zip(rows, chosen, kept, strict=True)
            ]
        elif action == "back":
            free = [len(own) - first for (own, _), first in zip(rows, pool.origins.chosen, strict=True)]
            taken = [data.draw(st.integers(0, count)) for count in free]
            pool.drop_last(taken)
            rows = [(own[: len(own) - count], n - count) for (own, n), count in zip(rows, taken, strict=True)]
        elif action == "pages":
            first = data.draw(st.integers(0, 1))
            pages = [data.draw(st.integers(0, max(-(-len(own) // P) - first, 0))) for own, _ in rows]
            pool.drop_pages(first, pages)
            rows = [
                (own[: first * P] + own[(first + count) * P :], n) for (own, n), count in zip(rows, pages, strict=True)
            ]
        elif action == "select":
            picked = data.draw(st.lists(st.integers(0, R - 1), min_size=1, max_size=4))
            pool.select_rows(picked)
            rows = [rows[row] for row in picked]
        elif action == "fork":
            pool = pool.fork()
        else:
            pool.join_rows(pool.fork())
            rows = rows * 2
        assert [own.tolist() for own in pool.origins.rows(pool.counts, 1)[0]] == [own for own, _ in rows]
        assert [count + late for count, late in zip(pool.counts, pool.origins.later, strict=True)] == [
            n for _, n in rows
        ]


def test_nothing_else_chooses_slots():
    sources = {path.relative_to(SOURCES).as_posix(): path.read_text() for path in SOURCES.rglob("*.py")}

    def callers(call):
        return {path for path, text in sources.items() if call in text}

    assert callers("ops.compact_pages_(") == {"caches/keeping.py"}
    whole = {"caches/store.py", "caches/swapping.py"}  # which give up whole rows, or pages that come back
    assert callers("ops.truncate_rows_(") == {"caches/keeping.py", *whole}
    assert callers("pool.keep(") == {"caches/paged.py", "pod/rows.py"}
    assert callers("pool.drop_pages(") == {"pod/rows.py"}


def test_what_was_chosen_and_taken_back_can_go_no_second_time():
    pool = new_pool(2, 1)
    append(pool, numbered(2, 6))
    pool.keep(torch.arange(6, dtype=torch.int32).repeat(2, 1), [6, 5])
    pool.drop_last([3, 0])
    pool.drop_pages(1, [1, 0])
    pool.drop_last([0, 0])
    assert pool.counts == [2, 5] and pool.origins.chosen[0] <= 2
    append(pool, numbered(2, 2, 1000))
    pool.drop_last([2, 2])
    assert pool.counts == [2, 5]
