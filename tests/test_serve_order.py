"""Who is let in next, and what gives way for it, where memory does not hold all that was read."""

import pytest
from helpers import tiny_model
from test_serve_batching import alone, greedy, prompts_of
from test_serve_prefixes import PRUNED, read, read_twice, with_prefixes
from test_serve_requests import requests_of, run
from transformers.generation.continuous_batching.requests import RequestState

import kvcompress
from kvcompress.serve import batching
from kvcompress.serve.batching import _Bookkeeping
from kvcompress.serve.order import PATIENCE, Order
from kvcompress.serve.scheduler import PageScheduler
from kvcompress.serve.served_pass import Part


def test_who_finds_most_comes_first_and_all_else_in_its_order():
    order = Order()
    assert order.of({"a": 0, "b": 32, "c": 8, "d": 32, "e": 0}) == ["b", "d", "c", "a", "e"]
    assert order.of({"e": 0, "d": 0, "c": 0, "a": 0, "f": 8}) == ["f", "a", "c", "d", "e"]  # as they came


def test_who_was_overtaken_often_comes_before_everybody():
    order = Order()
    order.of({"a": 0, "gone": 0, "b": 8})
    order.leave("gone")
    for i in range(PATIENCE):
        assert order.of({"a": 0, "b": 8, f"c{i}": 16}) == [f"c{i}", "b", "a"]
        order.let_in(f"c{i}")
    assert order.of({"a": 0, "b": 8, "c": 16}) == ["a", "b", "c"]
    order.let_in("a")  # nobody came before it
    order.let_in("unknown")
    assert order.of({"b": 8, "c": 16}) == ["b", "c"]


def turns_of(model, cache, conversations, turns, pages):
    """([conversation][turn] of (prompt, answer), tokens of prompts that were not read) of conversations that go on as
    soon as they are answered."""
    said, found = prompts_of((30,) * conversations), [[] for _ in range(conversations)]
    more = prompts_of((5,) * (conversations * turns), seed=1)
    with batching(model, cache, pages=pages, page_size=8, requests=8, batch_tokens=160) as serving:
        manager = model.init_continuous_batching(generation_config=greedy(4))
        of = {
            manager.add_request(prompt, max_new_tokens=4, eos_token_id=-1): i for i, prompt in enumerate(said)
        }  # before it starts: all come at once
        manager.start()
        while of:
            result = manager.get_result(timeout=60)
            i = of.pop(result.request_id)
            found[i].append((said[i], result.generated_tokens))
            said[i] = said[i] + result.generated_tokens + more[i * turns + len(found[i]) - 1]
            if len(found[i]) < turns:
                of[manager.add_request(said[i], max_new_tokens=4, eos_token_id=-1)] = i
        manager.stop()
        assert serving.served.pages_in_use() == 0
        return found, serving.metrics()["prefix_tokens"]


@pytest.mark.parametrize("cache", ["dense", PRUNED["pruned"]])
def test_conversations_that_memory_does_not_hold_get_the_tokens_of_generate_alone(cache):
    model = tiny_model()
    found, hits = turns_of(model, cache, 5, 6, pages=130)
    for turns in found:
        assert [answer for _, answer in turns] == [alone(model, cache, prompt, 4) for prompt, _ in turns]
    assert hits > 0


def having_read(model, prompts):
    """Requests of which a prefix of each prompt is kept."""
    served = with_prefixes(model, "dense", 9)
    for i, prompt in enumerate(prompts):
        read_twice(model, served, f"r{i}", prompt)
    return served


def kept_after_each_page(served):
    """Tokens of all prefixes, in the order of their prompts, whenever the next pages are freed."""
    kept = []
    while served.kept:
        assert served.make_free(served.free + served.needed + 1)
        by_prompt = {prefix.borders[0]: prefix.tokens for prefix in served.prefixes._kept}
        kept.append([by_prompt.get(border, 0) for border in served.firsts])
    return kept


def test_what_nobody_waits_for_gives_way_first_and_then_what_is_let_in_last():
    model, prompts = tiny_model(), prompts_of((17, 25, 33, 41))
    with kvcompress.attach(model):
        served = having_read(model, prompts)
        served.firsts = [served.prefixes.borders(prompt, b"0 ")[0] for prompt in prompts]
        for i in (0, 2, 3):
            served.prompts.note(f"w{i}", prompts[i], len(prompts[i]))
        assert served.prompts.ordered(["w0", "w2", "w3"]) == ["w3", "w2", "w0"]
        kept = kept_after_each_page(served)
        assert kept[:5] == [[16, 16, 32, 40], [16, 8, 32, 40], [16, 0, 32, 40], [8, 0, 32, 40], [0, 0, 32, 40]]
        assert kept[5:9] == [[0, 0, tokens, 40] for tokens in (24, 16, 8, 0)]


def test_of_those_that_are_asked_for_as_often_the_longest_gives_way():
    model, prompts = tiny_model(), prompts_of((17, 33, 25))
    with kvcompress.attach(model):
        served = having_read(model, prompts)
        for turn in range(3):
            for i, prompt in enumerate(prompts):
                read(model, served, f"{turn} {i}", prompt)
        served.firsts = [served.prefixes.borders(prompt, b"0 ")[0] for prompt in prompts]
        kept = kept_after_each_page(served)
        assert kept[:4] == [[16, 24, 24], [16, 16, 24], [16, 16, 16], [16, 16, 8]] and kept[-1] == [0, 0, 0]


def test_a_pruned_prompt_waits_for_the_one_that_is_read_before_prefixes_give_way():
    """What is held of that comes back when it is pruned."""
    model, (kept, first) = tiny_model(), prompts_of((49, 60))
    with kvcompress.attach(model):
        served = with_prefixes(model, PRUNED["pruned"], 9, pages=70)
        read_twice(model, served, "kept", kept)
        served.prompts.offer("first", first, 60)
        served.start("first", 60)
        run(model, served, [Part("first", 32, 60, 60)], {"first": first})
        served.settle()
        assert served.kept > 0 and served.free < 6 * 5 <= served.free + served.kept
        assert not served.make_free(6 * 5, "second") and served.make_free(6 * 5, "first")


def test_what_a_pruned_prompt_began_with_stays_for_its_next_turn_while_it_is_answered():
    model, prompt = tiny_model(), prompts_of((49,))[0]
    with kvcompress.attach(model):
        served = with_prefixes(model, PRUNED["pruned"], 9, pages=70)
        read_twice(model, served, "kept", prompt)
        served.settle()
        held = served.kept
        served.prompts.offer("now", prompt, 49)
        run(model, served, [Part("now", 49 - served.start("now", 49), 49, 49)], {"now": prompt})
        served.settle()
        assert served.decoding == ["now"] and served.kept == held > 0
        assert not served.make_free(served.free + 1, "another") and served.kept == held
        assert served.make_free(served.free + 1) and served.kept < held  # but for tokens of those who decode
        held = served.kept
        served.drop("now")
        served.settle()
        assert served.make_free(served.free + 1, "another") and served.kept < held


def test_a_name_that_comes_again_finds_what_its_own_prompt_begins_with():
    model, prompts = tiny_model(), prompts_of((17, 17))
    with kvcompress.attach(model):
        served = having_read(model, prompts)
        for prompt in prompts:
            served.prompts.offer("again", prompt, 17)
            own = served.prompts.found("again")
            assert own.borders == served.prefixes.borders(prompt, b"0 ")
            served.drop("again")
        assert not served.prefixes._found  # nothing is held of who has left


def test_a_prefix_goes_as_late_as_the_first_who_finds_it():
    model, prompts = tiny_model(), prompts_of((17, 17))
    with kvcompress.attach(model):
        served = having_read(model, prompts)
        for name, i in (("a", 0), ("b", 1), ("c", 0)):
            served.prompts.note(name, prompts[i], 17)
        assert served.prompts.ordered(["a", "b", "c"]) == ["a", "b", "c"]
        assert served.make_free(served.free + 1) and (served.prompts.seen("a"), served.prompts.seen("b")) == (16, 8)


def test_who_gave_its_pages_up_before_it_wrote_stays_in_front():
    model, prompts = tiny_model(), prompts_of((20,) * 4)
    with kvcompress.attach(model):
        served = requests_of(model, "dense", 200)
        scheduler = PageScheduler(_Bookkeeping(served, 24), served, 2, print, print)
        for i, prompt in enumerate(prompts):
            scheduler.add_waiting_request(RequestState(request_id=f"r{i}", initial_tokens=prompt, max_new_tokens=4))
        scheduler.schedule_batch(24, 0)
        assert [*scheduler.active_requests] == ["r0", "r1"]
        scheduler._give_up(scheduler.active_requests["r1"])
        scheduler._order()
        assert [*scheduler.waiting_requests_order] == ["r1", "r2", "r3"]
