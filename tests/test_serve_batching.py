"""transformers' continuous batching over compressed caches: the tokens of generate alone, whoever comes and goes."""

import subprocess
import sys

import pytest
import torch
from helpers import deciding_model, tiny_gates_folder, tiny_model
from published_gates import hidden_gates_folder
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

import kvcompress
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from kvcompress import CacheSpec
from kvcompress.hf.attach import is_attached
from kvcompress.serve import batching
from kvcompress.serve.memory import free_nbytes, free_node_nbytes
from kvcompress.serve.requests import Requests

DENSE, STREAMING = "dense", "streaming,window_size=12,num_sink_tokens=2"
PRUNED = "pruned,pruner=snapkv,window=4,kernel_size=3,keep=12"
WHOLE = "pruned,pruner=observedattention,keep=12"
CACHES = {
    "dense": (DENSE, None),
    "streaming": (STREAMING, None),
    "streaming at distance": (STREAMING + ",sink_distance=window", None),
    "streaming, in 4 bits": (STREAMING + ",dtype=k8v4", None),
    "pruned": (PRUNED, None),
    "pruned every 4": (PRUNED + ",every=4", None),
    "pruned, heads share": (PRUNED.replace("keep=12", "keep=12,budget=adakv"), None),
    "pruned, layers share": (PRUNED.replace("keep=12", "keep=12,budget=globaltopk"), None),
    "quantized": ("quantized,dtype=k8v4", None),
    "pruned, in 8 bits": (PRUNED + ",dtype=int8,every=4", None),
    "pruned by running scores": ("pruned,pruner=h2o,keep=12,every=3", None),
    "gated": (f"gated,gates={tiny_gates_folder()},threshold=0,window=6,num_sink_tokens=2", None),
    "pruned by gates": (f"pruned,pruner=gate:{tiny_gates_folder()},last=4,keep=12,every=3", None),
    "gated by hidden states": (f"gated,gates={hidden_gates_folder()},threshold=-1,window=6,num_sink_tokens=2", None),
    "pruned by hidden states": (f"pruned,pruner=gate:{hidden_gates_folder()},last=4,keep=12,every=3", None),
    "dmc": ("dmc", {}),
    "dmc, in 8 bits": ("dmc,dtype=int8", {}),
    "dmc with a window": ("dmc", {"window": 12}),
    "dms": ("dmc", {"mode": "dms", "dms_window": 5}),
}
LENGTHS, NEW = (23, 9, 40, 31, 17, 1, 28), (7, 9, 5, 8, 1, 6, 9)


def model_of(dmc):
    return tiny_model() if dmc is None else deciding_model(dmc=dmc)


def greedy(new):
    return GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)


def prompts_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]


def alone(model, cache, prompt, new):
    """What model.generate gives."""
    made = None if cache.startswith("dense") else CacheSpec.parse(cache).make(model.config)
    with kvcompress.attach(model) as attached, torch.no_grad():
        ids = torch.tensor([prompt])
        out = attached.generate(
            ids, past_key_values=made, min_new_tokens=new, max_new_tokens=new, do_sample=False,
            attention_mask=torch.ones_like(ids),
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def served(model, cache, prompts, news, **settings):
    """(tokens of every request or its error, what metrics() says, pages in use at the end)."""
    with batching(model, cache, **{"page_size": 8, **settings}) as serving:
        manager = model.init_continuous_batching(generation_config=greedy(1))
        names = [
            manager.add_request(prompt, max_new_tokens=new, eos_token_id=-1)
            for prompt, new in zip(prompts, news, strict=True)
        ]
        manager.start()
        results = {}
        while len(results) < len(names) and manager.is_running():
            result = manager.get_result(timeout=1)
            if result is not None:
                results[result.request_id] = result
        manager.stop()
        found = [results[name].error or results[name].generated_tokens for name in names]
        return found, serving.metrics(), serving.served.pages_in_use()


@pytest.mark.parametrize("name", CACHES)
def test_requests_get_the_tokens_of_generate_alone(name):
    cache, dmc = CACHES[name]
    model, prompts = model_of(dmc), prompts_of(LENGTHS)
    found, metrics, in_use = served(model, cache, prompts, NEW, pages=400, requests=4, batch_tokens=48)
    assert found == [alone(model, cache, prompt, new) for prompt, new in zip(prompts, NEW, strict=True)]
    assert metrics["peak_running"] > 1 and metrics["preempted"] == 0 and in_use == 0


@pytest.mark.parametrize(
    ("family", "name"),
    [("falcon/new", "dense"), ("bloom", "pruned every 4"), ("mpt/alibi", "dense"), ("gpt_neo", "pruned")],
)
def test_families_whose_heads_hand_no_keywords_to_their_decoder_are_served(family, name):
    model, cache, prompts = CONFIGURATIONS[family].model(), CACHES[name][0], prompts_of(LENGTHS)
    found, *_ = served(model, cache, prompts, NEW, pages=400, requests=4, batch_tokens=48)
    assert found == [alone(model, cache, prompt, new) for prompt, new in zip(prompts, NEW, strict=True)]


@pytest.mark.parametrize("swap", [0, "1MiB"], ids=["read again", "swapped"])
@pytest.mark.parametrize(
    "name",
    ["dense", "pruned", "pruned every 4", "pruned, in 8 bits", "pruned by running scores", "gated", "dmc", "dms"],
)
def test_requests_that_gave_their_pages_up_lose_no_token(name, swap, monkeypatch):
    monkeypatch.setattr(Requests, "coming_pages", lambda self, prompts: 0)  # as if there were room
    cache, dmc = CACHES[name]
    model, prompts, news = model_of(dmc), prompts_of((24, 23, 24, 22, 24)), (24, 20, 26, 24, 18)
    pages = {"dense": 52, "dms": 40}.get(name, 36)
    found, metrics, in_use = served(model, cache, prompts, news, pages=pages, requests=5, batch_tokens=48, swap=swap)
    assert found == [alone(model, cache, prompt, new) for prompt, new in zip(prompts, news, strict=True)]
    assert in_use == 0 and metrics["pages_in_use"] == 0
    if "every" not in cache:  # which needs no more pages than its budget
        assert metrics["preempted"] > 0
    assert metrics["swapped"] == (metrics["preempted"] if swap else 0)


@pytest.mark.parametrize("name", ["dense", "pruned", "dmc"])
def test_who_comes_in_finds_its_pages_until_the_end(name):
    cache, dmc = CACHES[name]
    model, prompts, news = model_of(dmc), prompts_of((24, 23, 24, 22, 24)), (24, 20, 26, 24, 18)
    found, metrics, in_use = served(model, cache, prompts, news, pages=52, requests=5, batch_tokens=48)
    assert found == [alone(model, cache, prompt, new) for prompt, new in zip(prompts, news, strict=True)]
    assert metrics["preempted"] == 0 and in_use == 0


def test_generate_batch_takes_it_and_has_its_own_back_afterwards():
    model, prompts = tiny_model(), prompts_of((12, 20))
    before = model.init_continuous_batching
    config = ContinuousBatchingConfig(max_batch_tokens=16)
    with batching(model, DENSE, pages=100):
        with pytest.raises(RuntimeError, match="served already"):
            batching(model, DENSE, pages=100)
        results = model.generate_batch(prompts, generation_config=greedy(5), continuous_batching_config=config)
    assert [x.generated_tokens for x in results.values()] == [alone(model, DENSE, prompt, 5) for prompt in prompts]
    assert model.init_continuous_batching == before and not is_attached(model)
    assert type(model.init_continuous_batching(generation_config=greedy(1))) is ContinuousBatchingManager


@pytest.mark.parametrize(
    ("said", "models"),
    [({}, {}), ({"max_length": 30}, {}), ({}, {"max_length": 25}), ({"max_length": 30}, {"max_new_tokens": 4})],
)
def test_without_max_new_tokens_an_answer_is_as_long_as_that_of_generate(said, models):
    model, prompts = tiny_model(max_position_embeddings=36), prompts_of((12, 20))
    model.generation_config.update(**models, eos_token_id=None)
    config = GenerationConfig(**said, do_sample=False, pad_token_id=0)
    expected = [model.generate(torch.tensor([x]), generation_config=config)[0, len(x) :].tolist() for x in prompts]
    with batching(model, DENSE, pages=100):
        results = model.generate_batch(prompts, generation_config=config)
    assert [x.generated_tokens for x in results.values()] == expected


PLAIN = """
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, eos_token_id=None)).eval()

def written():
    results = model.generate_batch(
        [[5, 6, 7, 8], list(range(3, 30))],
        generation_config=GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            return_logprobs=True, num_blocks=32, page_size=16, max_batch_tokens=64))
    return sorted((name, x.generated_tokens, x.logprobs) for name, x in results.items())

before = written()
import kvcompress
from kvcompress.serve import batching

assert written() == before, "imported"
with batching(model, "dense", pages=50, page_size=16, requests=4, batch_tokens=64):
    model.generate_batch([[5, 6, 7]], generation_config=GenerationConfig(max_new_tokens=2, eos_token_id=-1))
assert written() == before, "closed"
assert all(len(logprobs) == 6 for _, _, logprobs in before)
"""


def test_without_a_compressed_cache_generate_batch_is_transformers_bit_for_bit():
    """In a process that had not imported kvcompress before."""
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_several_answers_to_a_prompt_are_requests_of_their_own():
    model, prompt = tiny_model(), prompts_of((12,))[0]
    config = greedy(5)
    config.num_return_sequences = 3
    with batching(model, PRUNED, pages=100):
        results = model.generate_batch([prompt], generation_config=config)
    wanted = alone(model, PRUNED, prompt, 5)
    assert len(results) == 3 and all(x.generated_tokens == wanted for x in results.values())


def test_closing_stops_managers_and_leaves_none_for_later():
    model, prompts = tiny_model(), prompts_of((12, 9))
    config = ContinuousBatchingConfig(num_blocks=32, page_size=16, max_batch_tokens=64)  # not all memory there is
    plain = model.generate_batch(prompts, generation_config=greedy(4), continuous_batching_config=config)
    with batching(model, PRUNED, pages=200, page_size=8, requests=4, batch_tokens=64):
        model.generate_batch(prompts, generation_config=greedy(4), persistent_manager=True)
    again = model.generate_batch(prompts, generation_config=greedy(4), continuous_batching_config=config)
    assert [x.generated_tokens for x in again.values()] == [x.generated_tokens for x in plain.values()]
    with batching(model, PRUNED, pages=200, page_size=8, requests=4, batch_tokens=64):
        manager = model.init_continuous_batching(generation_config=greedy(1))
        manager.add_request(prompts[0], max_new_tokens=300, streaming=True, eos_token_id=-1)
        manager.start()
        assert manager.get_result(timeout=60).error is None
    assert not manager.is_running() and not is_attached(model)
    with pytest.raises(RuntimeError, match="Batching is closed"):
        manager.start()


def test_a_model_that_was_cast_since_is_named():
    model = tiny_model()
    with batching(model, DENSE, pages=100):
        model.to(torch.bfloat16)
        with pytest.raises(ValueError, match=r"model must be of torch\.float32, as when batching"):
            model.init_continuous_batching(generation_config=greedy(1))


def test_a_cancelled_request_gives_its_pages_back():
    model, prompts = tiny_model(), prompts_of((20, 24))
    with batching(model, DENSE, pages=400, page_size=8, requests=4, batch_tokens=64) as serving:
        manager = model.init_continuous_batching(generation_config=greedy(1))
        first = manager.add_request(prompts[0], max_new_tokens=400, streaming=True, eos_token_id=-1)
        manager.start()
        assert manager.get_result(timeout=60).request_id == first
        manager.cancel_request(first)
        second = manager.add_request(prompts[1], max_new_tokens=5, eos_token_id=-1)
        result = None
        while result is None or result.request_id != second:
            result = manager.get_result(timeout=60)
        manager.stop()
        assert result.generated_tokens == alone(model, DENSE, prompts[1], 5)
        assert serving.served.pages_in_use() == 0 and serving.metrics()["running"] == 0


def test_what_cannot_be_served_is_refused():
    model = tiny_model()
    for cache, message in (
        (
            "iterative,memory_size=32",
            "one of dense, dmc, gated, pruned, quantized, streaming to be served, got 'iterative'",
        ),
        ("quest", "got 'quest'"),
        (PRUNED + ",page_size=16", "page_size must not be given"),
        (PRUNED + ",chunk_size=16", "chunk_size must not be given for a cache that is served, got 16"),
        (PRUNED + ",positions=contiguous", "positions must be 'original'"),
        (PRUNED + ",later=keep", "later must be 'compress' for a cache that is served, got 'keep'"),
        ("pruned,pruner=kvzip,keep=0.5", "as KVzip does"),
        ("quantized,dtype=none+2*int8", "dtype must be one for all layers of a cache that is served, got"),
        ("dmc", "not converted"),
    ):
        with pytest.raises(ValueError, match=message):
            batching(model, cache, pages=100)
        assert not is_attached(model), cache


def test_memory_in_bytes_is_as_many_pages():
    model, page = tiny_model(), 2 * 8 * 16 * 4  # keys and values, slots, head dim, float32
    for memory in (100 * page, 101 * page - 1, f"{100 * page}B"):
        with batching(model, DENSE, memory=memory, page_size=8) as serving:
            assert serving.pages == 100 and serving.metrics()["pages"] == 100
            assert serving.metrics()["page_nbytes"] == page
    found, metrics, in_use = served(model, PRUNED, prompts_of(LENGTHS), NEW, memory="1MiB", requests=4, batch_tokens=48)
    assert metrics["pages"] == (1 << 20) // page and in_use == 0
    assert found == [alone(model, PRUNED, prompt, new) for prompt, new in zip(prompts_of(LENGTHS), NEW, strict=True)]


def test_memory_bounds_windows_too():
    model, prompts = tiny_model(), prompts_of((20, 24, 9, 31, 17, 12))
    with batching(model, STREAMING, pages=1000) as serving:
        window = serving.served.bounds.beside * serving.served.bounds.page_nbytes
    found, metrics, in_use = served(model, STREAMING, prompts, [6] * 6, memory=2 * window, requests=6, batch_tokens=64)
    assert found == [alone(model, STREAMING, prompt, 6) for prompt in prompts]
    assert metrics["peak_running"] == 2 and in_use == 0
    found, _, in_use = served(model, STREAMING, prompts[:2], [6] * 2, memory=window - 1, requests=6, batch_tokens=64)
    assert all("pages for its prompt of" in error for error in found) and in_use == 0


def test_neither_pages_nor_memory_is_half_of_what_is_free(monkeypatch):
    model, page = tiny_model(), 2 * 8 * 16 * 4
    monkeypatch.setattr(sys.modules["kvcompress.serve.batching"], "free_nbytes", lambda device: 60 * page)
    with batching(model, DENSE, page_size=8) as serving:
        assert serving.pages == 30
    with batching(model, STREAMING, page_size=8) as serving:  # whose windows count as pages of 16
        assert serving.pages == 15


def test_what_is_free_is_within_the_limit_of_a_container(monkeypatch, tmp_path):
    whole = free_nbytes(torch.device("cpu"))
    assert 1 << 20 < whole < 1 << 50
    monkeypatch.setattr("kvcompress.serve.memory._CGROUP", tmp_path)
    for most, free in (("300", 200), ("50", 0)):
        (tmp_path / "memory.max").write_text(f"{most}\n")
        (tmp_path / "memory.current").write_text("100\n")
        assert free_nbytes(torch.device("cpu")) == free
    (tmp_path / "memory.max").write_text("max\n")
    assert free_nbytes(torch.device("cpu")) > 1 << 20


def test_what_is_free_is_that_of_the_fullest_node(monkeypatch, tmp_path):
    assert 1 << 20 < free_node_nbytes() < 1 << 50
    monkeypatch.setattr("kvcompress.serve.memory._NODES", tmp_path)
    for node, (total, free, cached) in enumerate(((9, 5, 1), (9, 3, 1), (0, 0, 0))):
        (tmp_path / f"node{node}").mkdir()
        named = {"MemTotal": total, "MemFree": free, "Active(anon)": 7, "Inactive(file)": cached}
        text = "".join(f"Node {node} {name}: {number} kB\n" for name, number in named.items())
        (tmp_path / f"node{node}" / "meminfo").write_text(text)
    assert free_node_nbytes() == 4 << 10


def test_settings_are_refused_by_name():
    model = tiny_model()
    for settings, message in (
        ({"pages": 9, "memory": 9}, "pages must not be given beside memory, got 9 and 9"),
        ({"memory": "8GB?"}, r"memory must be bytes, such as 8GiB \(units: .*\), got the text '8GB\?'"),
        ({"memory": 0}, "memory must be at least 1, got 0"),
        ({"memory": 1.5}, "memory must be an integer, got 1.5"),
        ({"memory": 100}, "memory must be at least a page, 8192 bytes, got 100"),
        ({"memory": "900TiB"}, r"memory must be at most .*, which are free in the machine's memory, got 900\.0 TiB"),
        ({"pages": 0}, "pages must be an integer of at least 1, got 0"),
        ({"pages": 9, "requests": 0}, "requests must be at least 1, got 0"),
        ({"pages": 9, "batch_tokens": 8}, "batch_tokens must be at least 64, got 8"),
        ({"pages": 9, "keep": 0.5}, r"keep is in the cache's text \('pruned,keep=1/4'\) here, got keep=0.5"),
    ):
        with pytest.raises(ValueError, match=message):
            batching(model, DENSE, **settings)
        assert not is_attached(model)
    for wrong in ({"pagse": 9}, {"batch_token": 64}):
        with pytest.raises(TypeError, match=r"batching has no .*: did you mean"):
            batching(model, DENSE, **wrong)
    with pytest.raises(TypeError, match=r"cache must be text, such as .*, got PrunedCache"):
        batching(model, kvcompress.PrunedCache(model.config, keep=0.5), pages=9)
    with batching(model, DENSE, pages=9, batch_tokens="1k") as serving:
        assert serving.batch_tokens == 1024
    with batching(model, DENSE, pages=9), pytest.raises(ValueError, match="num_blocks must be None"):
        model.init_continuous_batching(continuous_batching_config=ContinuousBatchingConfig(num_blocks=4))
    converted = deciding_model()
    with pytest.raises(ValueError, match=r"needs kvcompress\.DMCCache"):
        batching(converted, DENSE, pages=9)
