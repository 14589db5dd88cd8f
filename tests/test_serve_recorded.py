"""Passes in which all requests decode, recorded: on the CPU a tape of operations stands for the CUDA graph."""

import pytest
import torch
from helpers import tiny_model
from tape import recorder
from test_serve_batching import CACHES, LENGTHS, NEW, alone, greedy, model_of, prompts_of, served

from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from kvcompress.caches import graphs, paged
from kvcompress.ops.softmax import Softmax
from kvcompress.serve import batching
from kvcompress.serve.recorded import Recordings
from kvcompress.serve.requests import Requests
from kvcompress.serve.slots import Slots, sizes_to_record

RECORDED = (
    "dense", "pruned", "pruned, heads share", "pruned, layers share", "quantized", "dmc", "dmc, in 8 bits",
    "dmc with a window",
)  # fmt: skip


@pytest.fixture
def tapes(monkeypatch):
    """What recordings there are, and how often each size was done op by op, recorded and replayed."""
    slots, done = [], []
    made, recorded, opened, step = Slots.__init__, recorder(lambda: changed()), Recordings._open, Recordings.step

    def changed():
        store = slots[-1].store
        tensors = [x for memory in slots[-1]._memory for x in memory.values()]
        return [*tensors, store.refs, store.free_pages, store.free_count, *store.arrays.values()]

    monkeypatch.setattr(Slots, "__init__", lambda self, *args: (slots.append(self), made(self, *args))[1])
    monkeypatch.setattr(Recordings, "_open", lambda self, *args: (done.append("opened"), opened(self, *args))[1])
    monkeypatch.setattr(Recordings, "step", lambda self, *args: (done.append("step"), step(self, *args))[1])
    monkeypatch.setattr(graphs, "record", lambda *args: (done.append("recorded"), recorded(*args))[1])
    return done


def all_alone(model, cache, prompts, news):
    return [alone(model, cache, prompt, new) for prompt, new in zip(prompts, news, strict=True)]


@pytest.mark.parametrize("name", RECORDED)
def test_requests_get_the_tokens_of_generate_alone(tapes, name):
    """Seven requests of which four may decode at once; sizes are 1, 2 and 4, so that three have padding beside them."""
    cache, dmc = CACHES[name]
    model, prompts, news = model_of(dmc), prompts_of(LENGTHS), [4 * n for n in NEW]
    given = {"pages": 600, "requests": 4, "batch_tokens": 48, "cuda_graphs": True}
    found, metrics, in_use = served(model, cache, prompts, news, **given)
    assert found == all_alone(model, cache, prompts, news)
    assert metrics["peak_running"] == 4 and metrics["pages"] == 599 and in_use == 0
    assert tapes.count("recorded") >= 2
    assert tapes.count("opened") <= 4 + tapes.count("recorded") < tapes.count("step") / 2  # most are replayed


@pytest.mark.parametrize(("name", "pages", "swap"), [("dense", 160, "1MiB"), ("dense", 160, 0), ("dmc", 60, "1MiB")])
def test_who_gives_pages_up_goes_on(tapes, monkeypatch, name, pages, swap):
    monkeypatch.setattr(Requests, "coming_pages", lambda *_: 0)  # as if there were room
    cache, dmc = CACHES[name]
    model, prompts, news = model_of(dmc), prompts_of((30, 30, 30, 30)), [60] * 4
    given = {"pages": pages, "requests": 4, "batch_tokens": 48, "cuda_graphs": True, "swap": swap}
    found, metrics, in_use = served(model, cache, prompts, news, **given)
    assert found == all_alone(model, cache, prompts, news)
    assert metrics["preempted"] > 0 and in_use == 0 and "recorded" in tapes


def test_what_grows_is_recorded_anew(tapes):
    """Tables of pages grow with the longest request, and those of rotation at 256 positions."""
    model = tiny_model(max_position_embeddings=1024)
    prompts, news = prompts_of((236, 9)), [80, 120]
    given = {"pages": 800, "requests": 2, "batch_tokens": 256, "cuda_graphs": True, "page_size": 4}
    found, *_ = served(model, "dense", prompts, news, **given)
    assert found == all_alone(model, "dense", prompts, news)
    assert 3 <= tapes.count("recorded") <= 8


def test_prompts_that_begin_alike_share_pages(tapes):
    model, common = tiny_model(), prompts_of((40,), seed=5)[0]
    prompts = [common + rest for rest in prompts_of((3, 9, 5, 12, 7, 4), seed=6)]
    given = {"pages": 400, "requests": 3, "batch_tokens": 48, "cuda_graphs": True, "prefixes": 4}
    found, metrics, _ = served(model, "dense", prompts, [20] * 6, **given)
    assert found == all_alone(model, "dense", prompts, [20] * 6)
    assert metrics["prefix_tokens"] > 0 and "recorded" in tapes


@pytest.mark.parametrize(
    ("family", "cache"),
    [
        ("gpt2", "dense"), ("qwen3", "pruned"), ("gemma3_text/sliding", "pruned"), ("gpt_oss/sliding", "quantized"),
        ("gemma2/softcap", "dense"), ("gemma2", "dense"),
    ],
)  # fmt: skip
def test_families_whose_step_is_another(tapes, family, cache):
    """Learned positions, norms before the rotation, softcap, sinks; windows that are full, or fill meanwhile."""
    model, prompts, cache = CONFIGURATIONS[family].model(), prompts_of(LENGTHS), CACHES[cache][0]
    model.config.pad_token_id = None  # else GPT-2 looks for it among the ids, unless a GPU records
    found, *_ = served(model, cache, prompts, [14] * 7, pages=600, requests=4, batch_tokens=48, cuda_graphs=True)
    assert found == all_alone(model, cache, prompts, [14] * 7) and "recorded" in tapes


def test_padding_takes_one_page_and_requests_find_all_others(tapes):
    model = tiny_model()
    with batching(model, "dense", pages=100, page_size=4, requests=5, cuda_graphs=True) as serving:
        store = serving.served.store
        assert serving.pages == 99 and serving.served.slots.sizes == [1, 2, 4, 5]
        assert int(store.refs.sum()) == 1 and serving.served.pages_in_use() == 0
        serving.served.settle()
        assert serving.served.free == 99
        slots = serving.served.slots
        slots.settle_padding()
        assert int(store.refs.sum()) == 1


def test_sizes_are_few():
    assert sizes_to_record(1) == [1] and sizes_to_record(3) == [1, 2, 3]
    assert sizes_to_record(20) == [1, 2, 4, 8, 16, 20] and len(sizes_to_record(256)) == 35


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("llama/longrope/beyond", "frequencies that follow the length"),
        ("llama/dynamic", "frequencies that follow the length"),
        ("dbrx", "the model asks the device in each step"),
    ],
)
def test_models_whose_step_cannot_be_recorded_are_refused(tapes, family, message):
    with pytest.raises(NotImplementedError, match=message):
        batching(CONFIGURATIONS[family].model(), pages=600, cuda_graphs=True)


def test_a_model_that_gives_all_logits_is_served(tapes):
    model, prompts = CONFIGURATIONS["video_llama_3/multimodal"].model(), prompts_of((23, 9))
    found, *_ = served(model, "dense", prompts, [9, 9], pages=900, requests=3, batch_tokens=64, cuda_graphs=True)
    assert found == all_alone(model, "dense", prompts, [9, 9]) and "recorded" in tapes


def one_after_another(model, prompts, between):
    """Answers of a manager that is idle before each of its requests, when between(i) is called."""
    answers = []
    with batching(model, "dense", pages=400, page_size=8, requests=1, prefixes=0, cuda_graphs=True):
        manager = model.init_continuous_batching(generation_config=greedy(1))
        manager.start()
        for i, prompt in enumerate(prompts):
            between(i)
            manager.add_request(prompt, max_new_tokens=12, eos_token_id=-1)
            result = None
            while result is None and manager.is_running():
                result = manager.get_result(timeout=1)
            answers.append(result.error or result.generated_tokens)
        manager.stop()
    return answers


def test_weights_that_are_replaced_are_recorded_anew(tapes):
    prompts, other = prompts_of((20, 21)), tiny_model(seed=1)
    model, first = tiny_model(), tiny_model()
    found = one_after_another(
        model, prompts, lambda i: model.load_state_dict(other.state_dict(), assign=True) if i else None
    )
    assert found == [alone(first, "dense", prompts[0], 12), alone(other, "dense", prompts[1], 12)]
    assert tapes.count("recorded") == 2


def test_a_step_that_fails_while_it_is_recorded_is_not_replayed(tapes, monkeypatch):
    own, whole = paged.ops.paged_step_, graphs.record

    def record(*args):
        fail = tapes.count("recorded") == 0
        monkeypatch.setattr(paged.ops, "paged_step_", (lambda *_, **__: failing()) if fail else own)
        return whole(*args)

    def failing():
        monkeypatch.setattr(paged.ops, "paged_step_", own)
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(graphs, "record", record)
    model, prompts = tiny_model(), prompts_of((20, 21))
    found = one_after_another(model, prompts, lambda i: None)
    assert found == ["injected", alone(model, "dense", prompts[1], 12)] and tapes.count("recorded") == 2


def test_a_model_of_windows_alone_is_refused(tapes):
    with pytest.raises(NotImplementedError, match="all of whose layers see windows"):
        batching(CONFIGURATIONS["mistral/sliding"].model(), pages=600, cuda_graphs=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("streaming", "layer 0 of StreamingCache .* keeps more of a request than pages"),
        ("gated", "layer 0 of GatedCache .* keeps more of a request than pages"),
        ("dms", "layer 0 of DMCCache .* keeps more of a request than pages"),
        ("pruned every 4", "layer 0 of PrunedCache .* keeps more of a request than pages"),
        ("gated by hidden states", "looks at hidden states"),
    ],
)
def test_what_cannot_be_recorded_is_refused(tapes, name, message):
    cache, dmc = CACHES[name]
    model = model_of(dmc)
    with pytest.raises(NotImplementedError, match=message):
        batching(model, cache, pages=600, cuda_graphs=True)
    with batching(model, cache, pages=600):  # the model is as it was
        pass


def test_settings_that_cannot_be_are_named(tapes, monkeypatch):
    model = tiny_model()
    with pytest.raises(ValueError, match="page_size must be at least 2 with cuda_graphs, got 1"):
        batching(model, pages=600, page_size=1, cuda_graphs=True)
    with pytest.raises(RuntimeError, match="max_pages = 3 is too few"):
        batching(model, pages=3, cuda_graphs=True)
    monkeypatch.setattr(graphs, "record", graphs._RECORD)
    with pytest.raises(ValueError, match="model must be on a CUDA device, got cpu"):
        batching(model, pages=600, cuda_graphs=True)


@torch.no_grad()
def test_what_was_placed_outlives_its_place(tapes):
    """Whoever let go of a cache late would else give up pages that another's rows name."""

    def filled(requests, seed):
        cache, generator = requests.new_cache(), torch.Generator().manual_seed(seed)
        step = cache.open(requests.facts, [9], 9)
        for index, facts in requests.facts.items():
            heads = (facts.query_heads, facts.kv_heads, facts.kv_heads)
            given = [torch.randn(1, n, 9, facts.size, generator=generator) for n in heads]
            step.attend(index, *given, Softmax(1.0))
        cache.end(step, None)
        return cache

    with batching(tiny_model(), "dense", pages=600, page_size=4, requests=2, cuda_graphs=True) as serving:
        requests = serving.served
        first, second = filled(requests, 0), filled(requests, 1)
        layers = [*first.own, *second.own]
        held = [layer.opened.gather(9) for layer in layers]
        for cache in (first, second):
            requests.slots.place(cache)
        for layer, expected in zip(layers, held, strict=True):
            torch.testing.assert_close(layer.opened.gather(9), expected, rtol=0, atol=0)
        pages = sum(3 * len(layer.opened.bounds) for layer in second.own)
        del first, cache, layer, layers
        requests.store.count_free()
        assert int((requests.store.refs > 0).sum()) == pages + 1  # padding's
