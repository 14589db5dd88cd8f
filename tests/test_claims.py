"""What a pass will need of a pool's pages is claimed before it changes anything: other threads cannot take it."""

import threading

import pytest
import torch
from helpers import deciding_model, random_ids, tiny_model
from pool_definition import append, check, new_pool, numbered, step

from kvcompress import DMCCache, IterativeCache, PrunedCache, QuestCache, SnapKV, attach, prefill

SNAPKV = SnapKV(window=4, num_sink_tokens=1)


@pytest.mark.parametrize("grow", ["double", "error"])
def test_a_claim_is_left_to_the_pool_that_has_it(grow):
    pool, x = new_pool(2, 4, max_pages=6, grow=grow), numbered(2, 8)
    append(pool, x)
    fork, one, two = pool.fork(), numbered(2, 1, 1000), numbered(2, 1, 2000)
    fork.claim([1, 1])
    assert pool.store.count_free() + fork.claimed() == pool.store.pages - 4
    with pytest.raises(RuntimeError, match="max_pages = 6 is too few: 8 pages"):
        step(pool, one)
    pool.trim()  # gives free pages back, and owes those that are claimed
    with pytest.raises(RuntimeError, match="max_pages = 6 is too few: 8 pages"):
        append(pool, one)
    step(fork, two)
    assert fork.claimed() == 0
    rows = [torch.cat([x[0, r], two[0, r]]) for r in range(2)]
    check((pool, list(x[0])), (fork, rows))
    del fork
    append(pool, one)
    check((pool, [torch.cat([x[0, r], one[0, r]]) for r in range(2)]))


def test_a_step_that_has_its_pages_set_aside_keeps_them_when_others_count():
    pool, x = new_pool(2, 4, max_pages=8, grow="error"), numbered(2, 8)
    append(pool, x)
    fork = pool.fork()
    step(fork, numbered(2, 1, 1000))  # sets pages aside for three more
    assert fork.room == 3
    fork.claim([1, 1])
    assert pool.store.count_free() == 2 and fork.room == 0
    append(pool, numbered(2, 1, 3000))
    fork.claim([3, 3])
    with pytest.raises(RuntimeError, match="max_pages = 8 is too few: 10 pages"):
        append(pool, numbered(2, 4, 4000))
    append(fork, numbered(2, 3, 2000))
    assert fork.lengths.tolist() == [12, 12] and pool.lengths.tolist() == [9, 9]


def test_what_is_claimed_beside_tokens_stays_when_they_are_there():
    pool, x = new_pool(2, 4, max_pages=8), numbered(2, 8)
    append(pool, x)
    fork = pool.fork()
    fork.claim([1, 1], fork.shared_pages() // 2)
    step(fork, numbered(2, 1, 1000))
    assert fork.claimed() == 2
    with pytest.raises(RuntimeError, match="max_pages = 8"):
        append(pool, numbered(2, 1, 3000))
    fork.keep(torch.tensor([[1, 2, 3]] * 2, dtype=torch.int32), [3, 3])
    assert fork.claimed() == 0 and fork.lengths.tolist() == [3, 3]
    pool.claim([1, 1])
    assert pool.claimed() == 2
    assert pool.unclaim() == (2, 0) and pool.claimed() == 0


def logits_of(model, cache, token):
    with torch.no_grad():
        return model(torch.tensor([[token]]), past_key_values=cache).logits


CACHES = {  # with one page less than their second layer needs once the first one has had what it needs
    "pruned": lambda config, pages: PrunedCache(config, SNAPKV, keep=16, every=1, page_size=4, max_pages=pages),
    "iterative": lambda config, pages: IterativeCache(
        config, memory_size=16, chunk_size=8, page_size=4, max_pages=pages
    ),
    "quest": lambda config, pages: QuestCache(config, token_budget=16, page_size=4, max_pages=pages),
    "dmc": lambda config, pages: DMCCache(config, page_size=1, max_pages=pages),
}


@pytest.mark.parametrize("kind", CACHES)
def test_a_token_has_its_pages_whatever_another_fork_does_meanwhile(kind):
    """Another thread's fork asks for pages after the token's pass has begun."""
    model = deciding_model() if kind == "dmc" else tiny_model()
    attach(model)
    cache = prefill(model, random_ids(33), CACHES[kind](model.config, None))
    expected = logits_of(model, cache.fork(), 5)
    for more in range(12):  # the least that a token can be decoded with
        most = max(layer.pool.store.pages - layer.pool.store.count_free() for layer in cache.layers) + more
        limited = prefill(model, random_ids(33), CACHES[kind](model.config, most))
        try:
            assert torch.equal(logits_of(model, limited.fork(), 5), expected)
            break
        except RuntimeError as error:
            if "max_pages" not in str(error):
                raise
    else:
        pytest.fail("no number of pages was enough")
    first, second, refused = limited.fork(), limited.fork(), []

    def ask():
        try:
            logits_of(model, second, 7)
        except RuntimeError as error:
            refused.append(str(error))

    def meanwhile(*_):
        hook.remove()
        other = threading.Thread(target=ask)
        other.start()
        other.join()

    hook = model.model.layers[0].register_forward_pre_hook(meanwhile)
    assert torch.equal(logits_of(model, first, 5), expected)
    assert refused and "max_pages" in refused[0]
    second.check_complete()
    del first
    assert torch.equal(logits_of(model, second, 5), expected)
