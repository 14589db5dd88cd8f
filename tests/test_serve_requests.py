"""The core of serving, without an engine: requests join, are read in any parts, decode together and leave."""

import random

import pytest
import torch
from helpers import deciding_model, random_ids, tiny_gates_folder, tiny_model

import kvcompress
from kvcompress import CacheSpec
from kvcompress.caches.formats import keys_and_values
from kvcompress.caches.pool import PagePool
from kvcompress.caches.store import PageStore, PoolSettings
from kvcompress.hf.attach import base_model, facts_of
from kvcompress.hf.method import KEYWORD, method_of
from kvcompress.serve.requests import Requests
from kvcompress.serve.served import cache_maker
from kvcompress.serve.served_pass import Part

CACHES = {
    "dense": ("dense", None),
    "streaming": ("streaming,window_size=12,num_sink_tokens=2", None),
    "gated": (f"gated,gates={tiny_gates_folder()},threshold=0,window=6,num_sink_tokens=2", None),
    "dmc": ("dmc", {}),
    "dms": ("dmc", {"mode": "dms", "dms_window": 5}),
}
ROPES = {
    "of one table": None,
    "that depends on length": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
}


def requests_of(model, cache, pages=200, page_size=8):
    decoder = base_model(model)
    make = cache_maker(CacheSpec.parse(cache), model.config, page_size)
    return Requests(decoder, facts_of(decoder), method_of(decoder), make, pages, torch.float32, torch.device("cpu"))


def run(model, served, parts, texts):
    """One pass; the greedy token after each request's last one."""
    tokens, ends = [], {}
    for name in served.decoding:
        tokens.append(texts[name][-1])
        ends[name] = len(tokens) - 1
    for part in parts:
        start = served.prompts.seen(part.request)
        tokens += texts[part.request][start : start + part.tokens]
        ends[part.request] = len(tokens) - 1
    positions = [len(texts[name]) - 1 for name in served.decoding]
    for part in parts:
        positions += range(served.prompts.seen(part.request), served.prompts.seen(part.request) + part.tokens)
    with torch.no_grad():
        given = {KEYWORD: served.begin(parts), "use_cache": False, "position_ids": torch.tensor([positions])}
        logits = model(torch.tensor([tokens]), **given).logits[0]
    served.end()
    return {name: int(logits[end].argmax()) for name, end in ends.items()}


def alone(model, cache, prompt, new):
    # like all caches here, and unlike a DynamicCache, it settles frequencies that depend on length by the prompt
    cache = "iterative,memory_size=512,chunk_size=512" if cache == "dense" else cache
    made = CacheSpec.parse(cache).make(model.config)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids, past_key_values=made, max_new_tokens=new, min_new_tokens=new, do_sample=False,
            attention_mask=torch.ones_like(ids),
        )  # fmt: skip
    return out[0].tolist()


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("name", CACHES)
def test_any_order_of_parts_joining_and_leaving_gives_the_tokens_of_each_alone(name, rope):
    cache, dmc = CACHES[name]
    settings = {} if ROPES[rope] is None else {"rope_parameters": ROPES[rope], "max_position_embeddings": 20}
    model = tiny_model(**settings) if dmc is None else deciding_model(dmc=dmc, **settings)
    draw = random.Random(7)
    prompts = {f"r{i}": [draw.randrange(3, 97) for _ in range(draw.choice((1, 5, 18, 33)))] for i in range(6)}
    new = {name: draw.randrange(1, 9) for name in prompts}
    with kvcompress.attach(model):
        served = requests_of(model, cache)
        texts, coming, reads, dropped = {x: list(p) for x, p in prompts.items()}, list(prompts), [], 0
        while coming or reads or served.decoding:
            served.settle()
            if served.decoding and draw.random() < 0.15:  # gives its pages up, and is read again
                victim = draw.choice(served.decoding)
                served.drop(victim)
                coming.append(victim)
                dropped += 1
                continue
            if coming and draw.random() < 0.5:
                reads.append(coming.pop(0))
            reads = [x for x in reads if x not in served.decoding]
            parts = []
            for x in reads:
                most = min(len(texts[x]) - served.prompts.seen(x), draw.randrange(1, 20))
                if most:
                    parts.append(Part(x, most, len(texts[x]), len(prompts[x])))
            if not parts and not served.decoding:
                continue
            seen = served.prompts.seen
            whole = [*served.decoding, *(p.request for p in parts if seen(p.request) + p.tokens == p.prompt)]
            found = run(model, served, parts, texts)
            for x in whole:
                texts[x].append(found[x])
                if len(texts[x]) == len(prompts[x]) + new[x]:
                    served.drop(x)
                    reads = [y for y in reads if y != x]
        served.settle()
        assert dropped > 0 and served.pages_in_use() == 0
        for x, prompt in prompts.items():
            assert texts[x] == alone(model, cache, prompt, new[x]), x


@pytest.mark.parametrize("given", [5, 25])
@pytest.mark.parametrize("name", CACHES)
def test_what_is_read_again_keeps_the_frequencies_of_its_prompt(name, given):
    cache, dmc = CACHES[name]
    settings = {"rope_parameters": ROPES["that depends on length"], "max_position_embeddings": 20}
    model = tiny_model(**settings) if dmc is None else deciding_model(dmc=dmc, **settings)
    with kvcompress.attach(model):
        wanted = alone(model, cache, list(range(3, 3 + given)), 40 - given)
        served, texts = requests_of(model, cache), {"a": wanted[:30]}
        parts = [Part("a", 30, 30, given)]  # in one part, longer than the prompt was
        while len(texts["a"]) < 40:
            served.settle()
            texts["a"].append(run(model, served, parts, texts)["a"])
            parts = []
        assert texts["a"] == wanted


def test_a_part_never_takes_more_pages_than_were_foreseen():
    for _, (cache, dmc) in CACHES.items():
        model = tiny_model() if dmc is None else deciding_model(dmc=dmc)
        with kvcompress.attach(model):
            served, texts = requests_of(model, cache), {"a": list(range(3, 63))}
            for tokens in (1, 7, 30, 22):
                part = Part("a", tokens, 60, 60)
                served.settle()
                before, bound = served.pages_in_use(), served.part_pages(part)
                assert served.most_tokens(part, bound) == tokens
                assert not bound or served.most_tokens(part, bound - 1) < tokens
                run(model, served, [part], texts)
                assert served.pages_in_use() - before <= bound


@pytest.mark.parametrize("name", ["dense", "dmc", "dms"])
def test_who_comes_back_takes_what_it_gave_up_and_its_next_token(name):
    """Else it waits for pages that it does not need, or fails though all are free."""
    cache, dmc = CACHES[name]
    model = tiny_model() if dmc is None else deciding_model(dmc=dmc)
    with kvcompress.attach(model):
        served, texts = requests_of(model, cache), {"a": list(range(3, 20)), "b": list(range(30, 52))}
        parts = [Part(name, len(text), len(text), len(text)) for name, text in texts.items()]
        for _ in range(5):
            served.settle()
            for request, token in run(model, served, parts, texts).items():
                texts[request].append(token)
            parts = []
        before = served.pages_in_use()
        served.give_up("b")
        served.settle()
        back, length = served.swap.pages("b"), len(texts["b"])
        beside = served.bounds.beside
        assert back + beside == before - served.pages_in_use() > beside
        full = sum(bound % 8 == 0 for out in served.swap._kept["b"].pools for bound in out.lengths.tolist())
        assert served.part_pages(Part("b", 1, length, 22)) == back + full + beside
        texts["b"].append(run(model, served, [Part("b", 1, length, 22)], texts)["b"])
        assert texts["b"] == alone(model, cache, texts["b"][:22], 6)


def test_pages_that_do_not_suffice_are_refused_before_anything_has_begun():
    model = tiny_model()
    with kvcompress.attach(model):
        served, texts = requests_of(model, "dense", pages=8), {"a": list(range(3, 11))}
        served.settle()
        run(model, served, [Part("a", 8, 8, 8)], texts)  # a full page in each of six rows
        served.settle()
        assert served.step_pages() == 6 and served.free == 2
        with pytest.raises(RuntimeError, match="pages = 8 are too few for the coming tokens of 1 requests"):
            served.begin([])
        served.drop("a")
        served.settle()
        assert served.pages_in_use() == 0


def test_pools_join_over_one_store_alone():
    slots, device = keys_and_values(4, torch.float32), torch.device("cpu")
    store = PageStore(slots, device, PoolSettings(4, 8, "error"))
    pools = [PagePool(rows, slots, device, store=store) for rows in (2, 1)]
    tokens = [torch.arange(rows * 6 * 4.0).view(1, rows, 6, 4) + rows for rows in (2, 1)]
    for pool, x in zip(pools, tokens, strict=True):
        pool.append((x, -x), [3] * x.shape[1])
    pools[0].join_rows(pools[1])
    keys, values = pools[0].gather(3)
    assert torch.equal(keys, torch.cat([x[0, :, -3:] for x in tokens])) and torch.equal(values, -keys)
    assert pools[0].counts == [3, 3, 3] and len(pools[1].lengths) == 0 and store.count_free() == 5
    del pools[1]
    assert store.count_free() == 5
    with pytest.raises(ValueError, match="same store"):
        pools[0].join_rows(PagePool(1, slots, device))
    with pytest.raises(ValueError, match="slots must be"):
        PagePool(1, keys_and_values(8, torch.float32), device, store=store)


@pytest.mark.parametrize(
    "make",
    [
        lambda config: kvcompress.QuestCache(config, page_size=4, token_budget=16),
        lambda config: kvcompress.IterativeCache(config, memory_size=8, chunk_size=8),
    ],
    ids=["quest", "iterative"],
)
def test_sequences_that_cannot_join_are_refused_and_nothing_changes(make):
    model = tiny_model("llama")
    with kvcompress.attach(model):
        one, two = (kvcompress.prefill(model, random_ids(12, seed=seed), make(model.config)) for seed in (1, 2))
    held = one.stored_lengths(), two.stored_lengths()
    with pytest.raises(ValueError, match=r"sequences of .*Cache cannot join others: layer \d"):
        one.join(two)
    assert (one.stored_lengths(), two.stored_lengths()) == held and one.batch_size == 1


@pytest.mark.parametrize(("tokens", "keep"), [(40, 8), (100, 32)])
def test_pages_that_are_counted_for_one_budget_over_all_layers_are_enough(tokens, keep):
    model, cache, prompt = tiny_model(), f"pruned,keep={keep}", random_ids(tokens)[0].tolist()
    with kvcompress.attach(model):
        pages = requests_of(model, cache, 4000, 4).bounds.expected(tokens)
        served = requests_of(model, cache, pages, 4)
        out = run(model, served, [Part("a", tokens, tokens, tokens)], {"a": prompt})
        served.settle()
        assert served.decoding == ["a"] and out == {"a": alone(model, cache + ",page_size=4", prompt, 1)[-1]}


@pytest.mark.parametrize("spec", ["pruned,keep=100", "pruned,pruner=keydiff,keep=100,budget=globaltopk"])
def test_layers_that_share_a_budget_need_no_more_pages_than_a_prompt_is_let_in_with(monkeypatch, spec):
    """Twelve layers, so that what those before are to lose would take pages if it waited."""
    model, failed, end = tiny_model(num_hidden_layers=12), [], Requests.end

    def noted(self):
        failed.extend(self._pass.failed.values())
        end(self)

    monkeypatch.setattr(Requests, "end", noted)
    prompt = random_ids(220)[0].tolist()
    with kvcompress.attach(model):
        pages = requests_of(model, spec, 10**5, 4).bounds.expected(220)
        run(model, requests_of(model, spec, pages, 4), [Part("a", 220, 220, 220)], {"a": prompt})
    assert not failed
