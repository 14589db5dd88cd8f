"""Steps of vLLM's in which all requests decode, recorded: a tape of operations stands for the CUDA graph."""

from dataclasses import replace

import pytest
from conftest import alone
from tape import recorder
from test_vllm_serving import PROMPTS, PRUNED, example
from vllm.model_executor.layers.attention import Attention

from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from benchmarks.quality.parts.families_models import BASE
from kvcompress.caches import graphs
from kvcompress.serve.slots import Slots


@pytest.fixture
def recorded(serve, folders, monkeypatch):
    """An engine that records; the attention op of vLLM's, which a tape would take for one operation, is not used."""
    slots = []

    def changed():
        store = slots[-1].store
        tensors = [x for memory in slots[-1]._memory for x in memory.values()]
        return [*tensors, slots[-1]._advanced, store.refs, store.free_pages, store.free_count, *store.arrays.values()]

    made = Slots.__init__
    monkeypatch.setattr(Slots, "__init__", lambda self, *args: (slots.append(self), made(self, *args))[1])
    monkeypatch.setattr(graphs, "record", recorder(changed))

    def make(cache, folder=None, **given):
        folder = folder or folders["dmc" if cache.startswith("dmc") else "plain"]
        served = serve(folder, cache, cuda_graphs=True, **given)
        layers = served.config.compilation_config.static_forward_context.values()
        for layer in layers:
            layer.use_direct_call = True
        assert sum(isinstance(layer, Attention) for layer in layers) > 0
        return served

    return make


def recordings(served):
    model = served.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    return model._recorded.recordings


@pytest.mark.parametrize("cache", ["dense", "dmc", PRUNED, "quantized,dtype=k8v4"])
def test_tokens_are_those_of_generate_alone(recorded, prompts, cache):
    """Requests come and leave at different times, so that the batch's size, and their order, change."""
    new = [30 + 5 * i % 17 for i in range(len(prompts))]
    served = recorded(cache, max_num_seqs=6)
    found, reasons = served.generate(prompts, new)
    assert set(reasons) == {"length"}
    assert found == alone(example(cache), cache, prompts, new)
    assert served.engine.requests.pages_in_use() == 0 and served.engine.decoding == []
    served.engine.requests.drop_prefixes()
    assert served.engine.requests.store.refs.sum() == 1  # padding's page
    made = recordings(served)
    assert 1 <= made.count <= 8 and made._warm


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("gemma3_text/sliding", "dense"), ("gpt_oss/sliding", PRUNED), ("llama4_text/chunked", "dense"),
        ("opt", PRUNED), ("glm", "dense"),
    ],
)  # fmt: skip
def test_kinds_of_layers_give_the_tokens_of_transformers(recorded, tmp_path, monkeypatch, name, cache):
    """Windows, sinks, chunks, learned positions, and transformers' own code in vLLM."""
    for field, value in {"hidden_size": 128, "head_dim": 32}.items():  # that vLLM has attention for
        monkeypatch.setitem(BASE, field, value)
    more = {"num_experts_per_tok": 1, "floor_scale": 10**6}  # vLLM tunes no temperature here
    model = replace(CONFIGURATIONS[name], settings=CONFIGURATIONS[name].settings | more).model(seed=1)
    model.save_pretrained(tmp_path)
    prompts, new = [*PROMPTS, PROMPTS[0][:20]], [30, 12, 25, 40]
    wanted = alone(model, cache, prompts, new)  # first: vLLM changes classes of transformers that it runs itself
    served = recorded(cache, tmp_path, max_num_seqs=3)
    assert served.generate(prompts, new)[0] == wanted
    assert recordings(served).count and served.engine.requests.pages_in_use() == 0


@pytest.mark.parametrize("swap", ["1GiB", 0])
def test_who_gives_pages_up_goes_on(recorded, prompts, swap):
    served = recorded("dense", blocks=19, swap=swap)
    served.engine.requests.coming_pages = lambda prompts: 0  # as if there were room
    short = [prompt[:80] for prompt in prompts]
    found, _ = served.generate(short, 70)
    assert served.engine.preempted > 0 and recordings(served).count
    assert found == alone(example("dense"), "dense", short, 70)
    assert served.engine.requests.pages_in_use() == 0


def test_what_cannot_be_recorded_is_refused(recorded, serve, folders, monkeypatch):
    with pytest.raises(NotImplementedError, match="passes of many requests cannot be recorded"):
        recorded("streaming,window_size=60")
    with pytest.raises(ValueError, match=r"cudagraph_mode must be NONE .* cuda_graphs = True"):
        serve(folders["plain"], "dense", compilation_config={"cudagraph_mode": "FULL"})
    with pytest.raises(ValueError, match="block_size must be at least 2"):
        recorded("dense", block_size=1)
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
    with pytest.raises(NotImplementedError, match="frequencies that follow the length"):
        recorded("dense", hf_overrides=dynamic)
    with pytest.raises(ValueError, match="enable_lora must be False with cuda_graphs = True, got True"):
        recorded("dense", enable_lora=True)
    with pytest.raises(ValueError, match="cuda_graphs must be True or False, got 1"):
        serve(folders["plain"], "dense", cuda_graphs=1)
    monkeypatch.setattr(graphs, "record", graphs._RECORD)
    with pytest.raises(ValueError, match="model must be on a CUDA device, got cpu"):
        serve(folders["plain"], "dense", cuda_graphs=True)
