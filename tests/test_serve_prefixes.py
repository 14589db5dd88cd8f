"""Prompts that begin alike: read once, forked for each, with the tokens of generate alone and no page lost."""

import random

import pytest
import torch
from helpers import deciding_model, tiny_gates_folder, tiny_model
from test_serve_batching import alone, greedy, model_of, prompts_of
from test_serve_requests import ROPES, requests_of, run

import kvcompress
from kvcompress.caches.pool import PagePool
from kvcompress.serve import batching
from kvcompress.serve.requests import Requests
from kvcompress.serve.served_pass import Part

CACHES = {
    "dense": ("dense", None),
    "streaming": ("streaming,window_size=12,num_sink_tokens=2", None),
    "quantized": ("quantized,dtype=k8v4", None),
    "gated": (f"gated,gates={tiny_gates_folder()},threshold=0,window=6,num_sink_tokens=2", None),
    "dmc": ("dmc", {}),
    "dmc with a window": ("dmc", {"window": 12}),
    "dms": ("dmc", {"mode": "dms", "dms_window": 5}),
}
PRUNED = {  # what lies in pages whole until a prompt has been read
    "pruned": "pruned,pruner=snapkv,window=4,keep=1/4",
    "pruned every 4": "pruned,pruner=tova,keep=12,every=4",
    "pruned by votes": "pruned,pruner=h2o,keep=1/2",
    "pruned by budgets": "pruned,pruner=keynorm,keep=1/3,budget=globaltopk",
    "pruned codes": "pruned,pruner=lagkv,lag=4,keep=1/3,dtype=int8",
}


def tree(leaves, seed=0):
    """Prompts each of which begins as an earlier one does, up to any token."""
    draw, found = random.Random(seed), []
    for _ in range(leaves):
        first = draw.choice(found)[: draw.randrange(60)] if found else []
        found.append(first + [draw.randrange(3, 97) for _ in range(draw.randrange(1, 40))])
    return found


def served(model, cache, prompts, news, cancelled=(), **settings):
    """(tokens of every request or its error, what metrics() says); no page must be left."""
    with batching(model, cache, **{"page_size": 8, "batch_tokens": 48, **settings}) as serving:
        manager = model.init_continuous_batching(generation_config=greedy(1))
        names = [
            manager.add_request(prompt, max_new_tokens=new, eos_token_id=-1)
            for prompt, new in zip(prompts, news, strict=True)
        ]
        for i in cancelled:
            manager.cancel_request(names[i])
        manager.start()
        results = {}
        while len(results) < len(names) - len(cancelled) and manager.is_running():
            result = manager.get_result(timeout=1)
            if result is not None:
                results[result.request_id] = result
        manager.stop()
        requests, metrics = serving.served, serving.metrics()
        assert requests.pages_in_use() == 0
        requests.drop_all()
        assert requests.store.count_free() == requests.store.pages and int(requests.prefixes.held.abs().sum()) == 0
        return [results[name].error or results[name].generated_tokens for name in names if name in results], metrics


@pytest.mark.parametrize("name", CACHES)
def test_a_tree_of_prompts_gets_the_tokens_of_generate_alone(name):
    cache, dmc = CACHES[name]
    model, prompts = model_of(dmc), tree(20)
    news = [1 + 3 * i % 8 for i in range(20)]
    wanted = [alone(model, cache, prompt, new) for prompt, new in zip(prompts, news, strict=True)]
    found, metrics = served(model, cache, prompts * 2, news * 2, pages=600, requests=4)  # again: where each ended
    assert metrics["prefix_tokens"] > 360 and metrics["preempted"] == 0
    assert found == wanted * 2
    plain, metrics = served(model, cache, prompts * 2, news * 2, pages=600, requests=4, prefixes=0)
    assert plain == found and metrics["prefix_tokens"] == metrics["prefix_pages"] == 0


@pytest.mark.parametrize("name", PRUNED)
def test_prompts_that_are_pruned_share_what_they_begin_with_until_then(name):
    model, prompts = tiny_model(), [prompt + [5, 6, 7] * 6 for prompt in tree(20)]
    news = [1 + 3 * i % 8 for i in range(20)]
    found, metrics = served(model, PRUNED[name], prompts * 2, news * 2, pages=600, requests=4, batch_tokens=128)
    assert metrics["prefix_tokens"] > 360 and metrics["preempted"] == 0
    if name != "pruned codes":  # earlier parts are seen as codes, of a whole prompt its numbers
        wanted = [alone(model, PRUNED[name], prompt, new) for prompt, new in zip(prompts, news, strict=True)]
        assert found == wanted * 2


@pytest.mark.parametrize("prefixes", [None, 0])
@pytest.mark.parametrize("name", [name for name in PRUNED if name != "pruned codes"])
def test_pruned_prompts_that_no_pass_has_room_for_are_read_in_parts(name, prefixes):
    model, prompts = tiny_model(), prompts_of((90, 61, 62, 150, 20, 130), seed=4)
    prompts += [prompts[0] + prompts[i] for i in (4, 1, 2)]
    news = (6, 9, 2, 5, 12, 7, 3, 8, 4)
    settings = {"pages": 400, "requests": 4, "batch_tokens": 64, "prefixes": prefixes}
    found, metrics = served(model, PRUNED[name], prompts, news, **settings)
    assert found == [alone(model, PRUNED[name], prompt, new) for prompt, new in zip(prompts, news, strict=True)]
    assert (metrics["prefix_tokens"] > 0) is (prefixes is None) and metrics["preempted"] == 0


def test_a_pruned_prompt_a_little_longer_than_a_pass_is_read():
    model, cache = tiny_model(), "pruned,pruner=snapkv,window=50,keep=1/2"
    prompts = prompts_of((62, 63, 70, 111), seed=4)  # a pass has room for 61, and the last 50 come in one
    found, _ = served(model, cache, prompts, (4,) * 4, pages=300, requests=4, batch_tokens=64)
    assert found == [alone(model, cache, prompt, 4) for prompt in prompts]


def test_long_pruned_prompts_get_on_where_pages_are_few():
    model, prompts = tiny_model(), prompts_of((90, 100, 150, 20, 130, 88), seed=4)
    found, _ = served(model, PRUNED["pruned"], prompts, (30,) * 6, pages=200, requests=4, batch_tokens=64)
    assert found == [alone(model, PRUNED["pruned"], prompt, 30) for prompt in prompts]


def test_a_pruned_prompt_shares_no_more_than_leaves_room_for_others():
    model, begin = tiny_model(), prompts_of((64,))[0]
    prompts = [begin + more for more in prompts_of((20, 21, 22, 23), seed=1)]
    for pages, shared in ((6 * 8 * 2, True), (6 * 8 * 2 - 1, False)):  # 6 rows of 8 pages, twice
        found, metrics = served(model, PRUNED["pruned"], prompts, (4,) * 4, pages=pages, requests=2, batch_tokens=128)
        assert found == [alone(model, PRUNED["pruned"], prompt, 4) for prompt in prompts]
        assert (metrics["prefix_tokens"] > 0) is shared


@pytest.mark.parametrize("name", ["dense", "quantized", "gated", "dmc", "dms"])
def test_a_conversation_goes_on_from_the_cache_of_its_last_answer(name):
    cache, dmc = CACHES[name]
    model, (tokens, *questions) = model_of(dmc), prompts_of((21, 5, 9, 3))
    known, turns = 0, []
    with batching(model, cache, pages=300, page_size=8, requests=4, batch_tokens=48) as serving:
        manager = model.init_continuous_batching(generation_config=greedy(7))
        manager.start()
        for question in questions:
            before = serving.metrics()["prefix_tokens"]
            manager.add_request(tokens, max_new_tokens=7, eos_token_id=-1)
            answer = manager.get_result(timeout=60).generated_tokens
            turns.append((tokens, answer))
            assert serving.metrics()["prefix_tokens"] - before == known
            known = len(tokens) + 6  # of an answer of 7 tokens the last was not read
            tokens = tokens + answer + question
        manager.stop()
    assert [answer for _, answer in turns] == [alone(model, cache, prompt, 7) for prompt, _ in turns]


@pytest.mark.parametrize("name", ["dense", "dmc"])
def test_who_came_back_from_swap_leaves_its_cache_to_its_next_turn(name):
    cache, dmc = CACHES[name]
    model, (a, b) = model_of(dmc), prompts_of((17, 22))
    texts = {"a": list(a), "b": list(b)}
    with kvcompress.attach(model):
        served = with_prefixes(model, cache, 16)
        served._outlives = True
        parts = [Part(request, len(text), len(text), len(text)) for request, text in texts.items()]
        for request, text in texts.items():
            assert not served.prompts.offer(request, list(text), len(text))
        for step in range(7):
            if step == 4:
                served.give_up("b")
            served.settle()
            if step == 4:
                assert served.swap.seen("b") == len(texts["b"]) - 1
                parts = [Part("b", 1, len(texts["b"]), len(b))]
            for request, token in run(model, served, parts, texts).items():
                texts[request].append(token)
            parts = []
        served.ends("b", texts["b"])
        served.drop("b")
        served.settle()
        assert texts["b"] == b + alone(model, cache, b, 7)
        assert not served.prompts.offer("next", [*texts["b"], 5, 6], len(texts["b"]) + 2)
        assert served.prompts.seen("next") == len(texts["b"]) - 1


@pytest.mark.parametrize("swap", [0, "1MiB"], ids=["read again", "swapped"])
@pytest.mark.parametrize("name", ["dense", "dmc", "dms"])
def test_few_pages_make_prefixes_give_way_and_lose_no_token(name, swap, monkeypatch):
    monkeypatch.setattr(Requests, "coming_pages", lambda self, prompts: 0)  # as if there were room
    cache, dmc = CACHES[name]
    model, begin = model_of(dmc), prompts_of((24,))[0]
    prompts = [begin + more for more in prompts_of((6, 5, 7, 4, 6, 9), seed=1)] + prompts_of((30, 33), seed=2)
    news = (24, 20, 26, 24, 18, 9, 20, 22)
    pages = {"dense": 60, "dms": 40}.get(name, 40)
    found, metrics = served(model, cache, prompts, news, pages=pages, requests=5, swap=swap)
    assert metrics["prefix_tokens"] > 0 and metrics["preempted"] > 0
    assert (metrics["swapped"] > 0) == bool(swap)
    assert found == [alone(model, cache, prompt, new) for prompt, new in zip(prompts, news, strict=True)]


def test_all_pages_are_there_for_a_prompt_that_shares_none():
    """Though prefixes held most of them, and its own a part."""
    model, cache = tiny_model(), "dense"
    first, second, third = [*prompts_of((40, 40)), prompts_of((70,), seed=5)[0]]
    prompts = [first, first, second, second, third, third, third[:64] + first]  # each one's end is kept the second time
    news, rows = (2, 2, 2, 2, 2, 2, 8), 6
    found, metrics = served(model, cache, prompts, news, pages=rows * 14, requests=1)
    assert found == [alone(model, cache, prompt, new) for prompt, new in zip(prompts, news, strict=True)]
    assert metrics["preempted"] == 0 and metrics["prefix_tokens"] >= 64


@pytest.mark.parametrize(
    ("settings", "pages"), [({}, 48), ({"mode": "dms", "dms_window": 5}, 45 + 5)], ids=["dmc", "dms"]
)
def test_a_request_that_is_alone_finds_all_pages_though_it_has_forked_a_prefix(settings, pages):
    """What copying leaves to the prefix alone would else be nobody's."""
    model, begin = deciding_model(dmc=settings), prompts_of((48,))[0]
    prompts, news = [[*begin, 5], [*begin, 6], [*begin, 7, 8, 9, 10, 11, 12, 13]], (2, 2, 60)
    plain, _ = served(model, "dmc", prompts, news, pages=pages, requests=1, prefixes=0)
    found, metrics = served(model, "dmc", prompts, news, pages=pages, requests=1)
    assert found == plain and len(found[2]) == 60 and metrics["prefix_tokens"] > 0


def test_a_cancelled_request_leaves_what_others_share():
    model, begin = tiny_model(), prompts_of((40,))[0]
    prompts = [begin + more for more in prompts_of((5, 6, 7, 8), seed=1)]
    found, metrics = served(model, "dense", prompts, (6, 6, 6, 6), cancelled=(1,), pages=300, requests=4)
    assert metrics["prefix_tokens"] >= 40
    assert found == [alone(model, "dense", prompts[i], 6) for i in (0, 2, 3)]


def test_several_answers_to_a_prompt_read_it_once():
    model, prompt = tiny_model(), prompts_of((33,))[0]
    config = greedy(5)
    config.num_return_sequences = 3
    with batching(model, "dense", pages=300, page_size=8) as serving:
        results = model.generate_batch([prompt], generation_config=config)
        assert serving.metrics()["prefix_tokens"] >= 32
    wanted = alone(model, "dense", prompt, 5)
    assert len(results) == 3 and all(x.generated_tokens == wanted for x in results.values())


def read(model, served, name, tokens, given=None):
    """Reads a prompt, in as few parts as borders allow; the token that follows it."""
    served.settle()
    given = len(tokens) if given is None else given
    assert not served.prompts.offer(name, tokens, given)
    served.start(name, len(tokens))
    while (left := served.prompts.coming(name, len(tokens))) > 0:
        found = run(model, served, [Part(name, left, len(tokens), given)], {name: tokens})
    served.settle()
    served.drop(name)
    served.settle()
    return found[name]


def read_twice(model, served, name, tokens):
    """The first reading is remembered, the second keeps a fork where it ended, a third would find it."""
    for time in ("first", "second"):
        read(model, served, f"{name} {time}", tokens)


def with_prefixes(model, cache, most, pages=200):
    served = requests_of(model, cache, pages)
    served.prefixes.most = most
    return served


@pytest.mark.parametrize("name", CACHES)
def test_what_is_counted_is_what_is_held(name):
    cache, dmc = CACHES[name]
    model = model_of(dmc)
    with kvcompress.attach(model):
        served = with_prefixes(model, cache, 16)
        for i, tokens in enumerate(prompt for prompt in tree(8, seed=3) for _ in range(2)):
            read(model, served, f"r{i}", tokens)
            named = [pages for prefix in served.prefixes._kept for pages in prefix.named()]
            unique = torch.cat(named).unique().numel() if named else 0
            windows = served.bounds.beside * len(served.prefixes)
            assert unique == served.store.pages - served.store.count_free()
            assert served.kept == unique + windows and served.used == 0
        assert len(served.prefixes) >= 8
        beside = sum(
            layer.nbytes() - (0 if getattr(layer, "pool", None) is None else layer.pool.nbytes())
            for prefix in served.prefixes._kept for layer in prefix.cache.own
        )  # fmt: skip
        tables = sum(
            pool.nbytes() - pool.pages_in_use() * pool.store.page_nbytes()
            for prefix in served.prefixes._kept for pool in prefix.pools
        )  # fmt: skip
        assert served.prefixes.nbytes_beside() == beside + tables
        assert served.drop_prefixes() and served.kept == 0 and served.store.count_free() == served.store.pages


def test_the_one_that_was_asked_for_longest_ago_goes_first():
    model, prompts = tiny_model(), prompts_of((17, 18, 19, 20))
    with kvcompress.attach(model):
        served = with_prefixes(model, "dense", 3)
        for i in (0, 1, 2):
            read_twice(model, served, f"r{i}", prompts[i])
        hits = served.prompts.hits
        read(model, served, "again", prompts[0])
        assert served.prompts.hits == hits + 16
        read_twice(model, served, "r3", prompts[3])  # in the place of that of prompt 1
        for i, there in ((1, 0), (0, 16), (2, 16), (3, 16)):
            served.prompts.offer(f"ask{i}", prompts[i], 16)
            assert served.prompts.seen(f"ask{i}") == there, i


def test_prefixes_go_only_where_that_is_enough():
    model, prompts = tiny_model(), prompts_of((17, 17))
    with kvcompress.attach(model):
        served = with_prefixes(model, "dense", 9, pages=30)
        for i in (0, 1):
            read_twice(model, served, f"r{i}", prompts[i])
        assert (served.free, served.kept) == (6, 24)
        assert not served.make_free(31) and served.kept == 24
        served.prompts.offer("again", prompts[0], 17)
        assert not served.make_free(19, "again") and served.kept == 24  # its own stays
        assert served.make_free(18, "again") and (served.kept, served.prompts.seen("again")) == (12, 16)
        assert served.make_free(30) and (served.kept, served.prompts.seen("again")) == (0, 0)


@pytest.mark.parametrize("cache", ["dense", "quantized,dtype=int8", PRUNED["pruned"], PRUNED["pruned by votes"]])
def test_a_prefix_gives_up_its_end_first_where_nothing_else_is_known_of_that(cache):
    model, prompt = tiny_model(), prompts_of((50,))[0]
    with kvcompress.attach(model):
        served = with_prefixes(model, cache, 9, pages=60)
        read_twice(model, served, "r", prompt)
        whole = (50 - served.last) // 8 * 8
        assert served.kept == 6 * whole // 8
        served.prompts.offer("next", prompt, 50)
        for blocks in (1, 2):
            assert served.prompts.seen("next") == whole
            assert served.make_free(60 - served.kept + 6 * blocks - 5)
            whole = 0 if "h2o" in cache else whole - 8 * blocks
            assert served.prompts.seen("next") == whole and served.kept == 6 * whole // 8
            if not whole:
                return
        served.drop("next")
        token = read(model, served, "again", prompt)
    assert [token] == alone(model, cache, prompt, 1)


@pytest.mark.parametrize("name", ["dense", "dmc"])
def test_a_prefix_that_requests_have_forked_stays(name):
    """Else a few pages of its own would cost the next request all of it."""
    cache, dmc = CACHES[name]
    model, (first, second) = model_of(dmc), prompts_of((30, 31))
    with kvcompress.attach(model):
        served = with_prefixes(model, cache, 9)
        for i, prompt in enumerate((second, first)):
            read_twice(model, served, f"r{i}", prompt)
        served.settle()
        for request, prompt in (("user", second), ("other", first)):
            served.prompts.offer(request, prompt, len(prompt))
            assert served.start(request, len(prompt)) == 24
        served.drop("other")
        served.settle()
        assert served.make_free(served.free + served.kept) and len(served.prefixes) == 1
        served.prompts.offer("again", second, 31)
        assert served.prompts.seen("again") == 24
        served.drop("user")
        served.settle()
        assert served.make_free(served.pages) and len(served.prefixes) == 0


def test_forks_are_kept_where_prompts_part_and_where_they_end():
    model, begin = tiny_model(), prompts_of((24,))[0]
    one, two, three = (begin + more for more in prompts_of((9, 9, 9), seed=1))
    longer, longest = (one + more for more in prompts_of((8, 16), seed=2))
    with kvcompress.attach(model):
        served = with_prefixes(model, "dense", 9)

        def there(prompt):
            """Tokens that need not be read."""
            hits, name = served.prompts.hits, f"r{len(served.prefixes._begun)} {served.prompts.hits}"
            read(model, served, name, prompt)
            return served.prompts.hits - hits

        assert [there(x) for x in (one, one, one)] == [0, 0, 32]  # where one ended
        assert [there(x) for x in (two, three)] == [0, 24]  # where they part
        assert [there(x) for x in (two, two)] == [24, 32]  # where one ended
        served.drop_prefixes()
        assert [there(x) for x in (one, two, three)] == [0, 24, 24]  # again
        assert [there(x) for x in (longer, longer)] == [32, 40]  # the first that goes on where one ended: at its end
        assert [there(x) for x in (longest, longest, longest)] == [32, 32, 48]  # the next: as any other


def test_who_comes_while_another_reads_what_both_begin_with_waits_for_it():
    model, begin = tiny_model(), prompts_of((24,))[0]
    one, two = (begin + more for more in prompts_of((9, 9), seed=1))
    with kvcompress.attach(model):
        served = with_prefixes(model, "dense", 9)
        served.settle()
        served.prompts.offer("one", one, 33)
        served.start("one", 33)
        assert served.prompts.coming("one", 33) == 33  # as none before: in one part
        assert served.prompts.offer("two", two, 33) and served.prompts.coming("one", 33) == 24
        run(model, served, [Part("one", 24, 33, 33)], {"one": one})
        assert not served.prompts.offer("two", two, 33) and served.prompts.seen("two") == 24
        served.drop("one")
        assert not served.prompts.offer("two", two, 33) and served.prompts.seen("two") == 24


@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_that_depend_on_length_are_shared_by_prompts_of_one_length(rope):
    settings = {} if ROPES[rope] is None else {"rope_parameters": ROPES[rope], "max_position_embeddings": 20}
    model, begin = tiny_model(**settings), prompts_of((24,))[0]
    with kvcompress.attach(model):
        served = with_prefixes(model, "dense", 9)
        read_twice(model, served, "a", [*begin, 5, 6])
        for tokens, there in (([*begin, 5, 6], 24), ([*begin, 9, 8, 7], 24 if ROPES[rope] is None else 0)):
            served.prompts.offer(f"b{len(tokens)}", tokens, len(tokens))
            assert served.prompts.seen(f"b{len(tokens)}") == there
        served.prompts.offer("salted", [*begin, 5, 6], 26, "another adapter")
        assert served.prompts.seen("salted") == 0


def test_a_pool_whose_last_pages_are_shared_sets_their_copies_aside():
    """Else a step would find too few pages."""
    model = deciding_model()
    with kvcompress.attach(model):
        served = with_prefixes(model, "dmc", 9)
        read_twice(model, served, "a", prompts_of((20,))[0])
        prefix = next(iter(served.prefixes._kept))
        copies = sum(int(pool.copies(known=False).sum()) for pool in prefix.pools)
        assert copies == sum(len(pool.bounds) for pool in prefix.pools) > 0
        free, _ = PagePool.learn(served.store, prefix.pools)
        assert free == served.store.free_at_least
        assert sum(int(pool.copies(known=False).sum()) for pool in prefix.pools) == 0  # nobody else is there now


def test_settings_are_refused_by_name():
    for cache, prefixes, message in (
        ("dense", -1, "prefixes must be an integer of at least 0, got -1"),
        ("dense", True, "prefixes must be an integer of at least 0, got True"),
        (
            "pruned,pruner=observedattention,keep=12",
            4,
            "prefixes must be 0 where a prompt must come in one pass, got 4",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            batching(tiny_model(), cache, pages=100, prefixes=prefixes)
