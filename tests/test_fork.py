"""Pages that sequences, beams and forks share, and pools that may not grow."""

import copy
import pickle
import threading

import pytest
import torch
from helpers import deciding_model, random_ids, tiny_gates, tiny_model

import kvcompress
from kvcompress import GatedCache, IterativeCache, PrunedCache, QuestCache, StreamingCache, attach, prefill
from kvcompress.caches import PoolSettings

CACHES = {
    "iterative": lambda config: IterativeCache(config, memory_size=20, chunk_size=16, page_size=4),
    "gated": lambda config: GatedCache(config, tiny_gates(), threshold=0.0, window=12, chunk_size=16, page_size=4),
    "streaming": lambda config: StreamingCache(config, window_size=20, chunk_size=16),
    "lm-infinite": lambda config: StreamingCache(config, window_size=20, chunk_size=16, sink_distance="window"),
    "quest": lambda config: QuestCache(config, token_budget=12, page_size=4, chunk_size=16),
}
caches = pytest.mark.parametrize("new_cache", CACHES.values(), ids=CACHES)


@pytest.fixture(scope="module")
def model():
    model = tiny_model()
    attach(model)
    return model


def answer(model, ids, cache, **settings):
    return model.generate(ids, past_key_values=cache, max_new_tokens=6, **{"do_sample": False, **settings})


def stores(cache):
    return [layer.pool.store for layer in cache.layers]


def pages_in_use(cache):
    """Of all caches over the same pages, per layer."""
    return [store.pages - store.count_free() for store in stores(cache)]


@caches
def test_forks_answer_each_question_as_if_alone(model, new_cache):
    ids = random_ids(60)
    cache = prefill(model, ids, new_cache(model.config))
    questions = [torch.cat([ids, random_ids(4, seed=seed)], 1) for seed in (1, 2, 1)]
    alone = [answer(model, asked, prefill(model, ids, new_cache(model.config))) for asked in questions]
    forks = [cache.fork() for _ in questions]
    for asked, fork, expected in zip(questions, forks, alone, strict=True):
        assert torch.equal(answer(model, asked, fork), expected)
        assert cache.get_seq_length() == 59 and fork.get_seq_length() == 69
    assert torch.equal(answer(model, questions[1], cache.fork()), alone[1])
    assert torch.equal(answer(model, questions[0], cache), alone[0])


def test_forks_share_the_prompt_and_take_pages_for_their_own_tokens(model):
    ids = random_ids(60)
    cache = prefill(model, ids, CACHES["iterative"](model.config))
    assert pages_in_use(cache) == [2 * 5] * 3
    used = cache.nbytes()
    forks = [cache.fork() for _ in range(4)]
    assert pages_in_use(cache) == [2 * 5] * 3
    assert [fork.nbytes() for fork in forks] == [used] * 4
    for seed, fork in enumerate(forks):
        # the question of 3 tokens, the prompt's last one and the 5 answered that were fed back: 9 in 3 pages
        answer(model, torch.cat([ids, random_ids(3, seed=seed)], 1), fork)
    assert cache.nbytes() == used
    assert pages_in_use(cache) == [2 * (5 + 4 * 3)] * 3
    assert [store.pages for store in stores(cache)] == [store.pages for store in stores(forks[0])]
    assert cache.reserved_nbytes() >= 3 * 2 * (5 + 4 * 3) * 4 * 2 * 16 * 4


@pytest.mark.parametrize("how", ["fork", "copy", "deepcopy", "reset"])
def test_pages_of_a_dropped_fork_return_at_once(model, how):
    ids = random_ids(60)
    cache = prefill(model, ids, CACHES["iterative"](model.config))
    for seed in range(6):
        fork = getattr(copy, how)(cache) if how.endswith("copy") else cache.fork()
        answer(model, torch.cat([ids, random_ids(3, seed=seed)], 1), fork)
        if how == "reset":
            fork.reset()
            assert fork.nbytes() == 0
        else:
            del fork  # no cycle holds it
        assert pages_in_use(cache) == [2 * 5] * 3
    assert max(store.pages for store in stores(cache)) <= 2 * 2 * (5 + 3)


@caches
@pytest.mark.parametrize("how", ["copy", "deepcopy"])
def test_a_copy_and_its_end_leave_the_original_alone(model, new_cache, how):
    ids = random_ids(60)
    cache = prefill(model, ids, new_cache(model.config))
    other = getattr(copy, how)(cache)
    longer = answer(model, torch.cat([ids, random_ids(4)], 1), other)
    assert longer.shape[1] == 70 and other.get_seq_length() == 69
    del other
    assert cache.get_seq_length() == 59
    assert torch.equal(answer(model, ids, cache), answer(model, ids, prefill(model, ids, new_cache(model.config))))


def test_trim_gives_back_what_dropped_forks_have_left(model):
    ids, question = random_ids(60), torch.cat([random_ids(60), random_ids(3)], 1)
    cache = prefill(model, ids, CACHES["iterative"](model.config))
    forks = [cache.fork() for _ in range(4)]
    expected = answer(model, question, forks[0])
    for fork in (*forks[1:], cache):
        assert torch.equal(answer(model, question, fork), expected)
    kept = forks[1]
    del forks, fork
    assert cache.reserved_nbytes() > 1.9 * cache.nbytes()
    cache.trim()
    assert pages_in_use(cache) == [store.pages for store in stores(cache)] == [2 * (5 + 2 * 3)] * 3
    for one in (cache, kept):  # both go on where they were
        longer = model.generate(expected, past_key_values=one.fork(), max_new_tokens=5, do_sample=False)
        assert torch.equal(longer[:, :69], expected)
    other = model.generate(expected, past_key_values=kept, max_new_tokens=5, do_sample=False)
    assert torch.equal(other, longer)
    del kept, one
    cache.trim()
    assert cache.nbytes() <= cache.reserved_nbytes() < 1.05 * cache.nbytes()
    again = model.generate(expected, past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(again, longer)
    streaming = prefill(model, ids, CACHES["streaming"](model.config))
    streaming.trim()
    assert streaming.reserved_nbytes() == streaming.nbytes()


def test_a_fork_outlives_its_origin(model):
    ids = random_ids(60)
    cache = prefill(model, ids, CACHES["iterative"](model.config))
    expected = answer(model, ids, cache.fork())
    fork = cache.fork()
    del cache
    assert torch.equal(answer(model, ids, fork), expected)
    assert pages_in_use(fork) == [2 * 7] * 3


@caches
def test_a_saved_cache_comes_back(model, new_cache):
    ids = random_ids(60)
    cache = prefill(model, ids, new_cache(model.config))
    again = pickle.loads(pickle.dumps(cache))
    assert torch.equal(answer(model, ids, again), answer(model, ids, cache))


@caches
def test_a_cache_is_not_forked_while_it_reads(model, new_cache):
    cache = new_cache(model.config)
    with pytest.raises(RuntimeError, match="incomplete: a prompt is being read, or"):
        prefill(model, random_ids(60), cache, progress=lambda read, total: cache.fork())
    with pytest.raises(RuntimeError, match="incomplete"):
        cache.fork()
    cache.reset()
    assert cache.fork().get_seq_length() == 0


@pytest.mark.parametrize(
    "mode", [{"num_return_sequences": 4, "do_sample": True}, {"num_beams": 4}, {"num_beams": 4, "do_sample": True}]
)
def test_samples_and_beams_share_the_prompts_pages(model, mode):
    ids = random_ids(60)
    cache = prefill(model, ids, CACHES["iterative"](model.config))
    answer(model, ids, cache, **mode)
    # 4 continuations of 6 tokens (the prompt's last and 5 fed back) in 2 pages each, of every KV head
    most = 2 * (5 + 4 * 2)
    assert [row for layer in cache.stored_lengths() for row in layer] == [[26, 26]] * 12
    assert all(2 * 5 < used <= most for used in pages_in_use(cache))
    if "num_beams" not in mode:
        assert pages_in_use(cache) == [most] * 3
    assert [layer.pool.pages_in_use() for layer in cache.layers] == pages_in_use(cache)


@pytest.mark.parametrize("grow", ["double", "error"])
def test_a_full_pool_names_its_setting_and_loses_nothing(model, grow):
    ids = random_ids(60)
    options = {"memory_size": 20, "chunk_size": 16, "page_size": 4}
    free = IterativeCache(model.config, **options)
    expected = kvcompress.generate(model, ids, free, max_new_tokens=8, do_sample=False)
    # 5 pages per row for the memory and one for 4 tokens after it
    cache = IterativeCache(model.config, **options, max_pages=2 * 6, grow=grow)
    with pytest.raises(RuntimeError, match=r"max_pages = 12 is too few: 14 pages of 4 tokens are needed"):
        kvcompress.generate(model, ids, cache, max_new_tokens=8, do_sample=False)
    assert cache.stored_lengths() == [[[24, 24]]] * 3
    assert cache.get_seq_length() == 59 + 4
    cache.crop(-2)
    out = model.generate(expected[:, :62], past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert torch.equal(out, expected[:, :64])
    with pytest.raises(RuntimeError, match="max_pages = 9 is too few: 10 pages of 4 tokens are needed in one layer"):
        prefill(model, ids, IterativeCache(model.config, **options, max_pages=9))


def test_forks_and_beams_share_one_limit_of_pages(model):
    ids = random_ids(60)
    # 20 tokens in 5 pages per row, 2 rows: 10 pages; each fork's tokens need 2 more per row
    limit = 2 * (5 + 2 + 1)
    cache = IterativeCache(model.config, memory_size=20, chunk_size=16, page_size=4, max_pages=limit)
    prefill(model, ids, cache)
    first = cache.fork()
    answer(model, ids, first)
    with pytest.raises(
        RuntimeError, match=r"max_pages = 16 .* in one layer, those of all forks, beams and samples together"
    ):
        answer(model, ids, cache.fork())
    with pytest.raises(RuntimeError, match="max_pages = 16"):
        answer(model, ids, cache.fork(), num_beams=3)
    del first
    assert answer(model, ids, cache).shape == (1, 66)


def test_pages_of_a_layer_are_those_of_its_rows(model):
    settings = PoolSettings(page_size=4)
    rows = 2 * model.config.num_key_value_heads
    cache = IterativeCache(model.config, memory_size=21, chunk_size=16, page_size=4)
    prefill(model, random_ids(60, batch=2), cache)
    assert pages_in_use(cache) == [rows * settings.blocks(21)] * 3 == [rows * 6] * 3


def test_a_pool_takes_what_the_prompt_needs_and_then_doubles(model):
    cache = prefill(model, random_ids(60), CACHES["iterative"](model.config))
    assert [store.pages for store in stores(cache)] == [10] * 3
    answer(model, random_ids(60), cache)
    assert [store.pages for store in stores(cache)] == [20] * 3
    fixed = IterativeCache(model.config, memory_size=20, chunk_size=16, max_pages=64, grow="error")
    prefill(model, random_ids(60), fixed)
    assert [store.pages for store in stores(fixed)] == [64] * 3


def test_wrong_settings_are_named(model):
    with pytest.raises(ValueError, match="page_size must be a power of two, an integer such as 64, got 3"):
        IterativeCache(model.config, page_size=3)
    with pytest.raises(ValueError, match="max_pages must be given with grow='error'"):
        IterativeCache(model.config, grow="error")


@pytest.mark.parametrize("kind", ["pruned", "iterative", "quest", "streaming", "dmc"])
def test_forks_are_used_by_several_threads(kind):
    """Each thread forks one cache again and again, and generates from it what one thread alone does."""
    make = {
        "pruned": lambda config: PrunedCache(config, keep=16, every=4, page_size=4),
        "iterative": lambda config: IterativeCache(config, memory_size=16, chunk_size=8, every=3, page_size=4),
        "quest": lambda config: kvcompress.QuestCache(config, token_budget=16, page_size=4),
        "streaming": lambda config: kvcompress.StreamingCache(config, window_size=12, num_sink_tokens=2),
        "dmc": lambda config: kvcompress.DMCCache(config, page_size=4),
    }[kind]
    model = deciding_model() if kind == "dmc" else tiny_model()
    attach(model)
    prompt = random_ids(40)
    cache = prefill(model, prompt, make(model.config))
    questions = [torch.cat([prompt, random_ids(3, seed=n)], 1) for n in range(4)]

    def answer(question, held):
        out = model.generate(question, past_key_values=held, max_new_tokens=9, do_sample=False)
        return out[0, question.shape[1] :].tolist()

    want = [answer(question, cache.fork()) for question in questions]
    wrong, start = [], threading.Barrier(4)

    def work(first):
        start.wait()
        for n in range(6):
            number = (first + n) % 4
            try:
                if (found := answer(questions[number], cache.fork())) != want[number]:
                    wrong.append((number, found))
            except Exception as error:
                wrong.append((number, repr(error)))
                return

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert [answer(question, cache.fork()) for question in questions] == want
