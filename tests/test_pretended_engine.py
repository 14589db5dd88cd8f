"""What vLLM's attention layers ask of an engine, on tensors that say that they are on a GPU: results are the CPU's, no
call mixes devices, and a step in which all requests decode does not wait for the device."""

from types import SimpleNamespace

import pretended_cuda
import pytest
import torch
from helpers import deciding_model, tiny_gates_folder, tiny_model
from pretended_cuda import Pretended, PretendedCuda

from kvcompress.ops.softmax import Softmax
from kvcompress.serve.vllm.engine import Engine, Row
from kvcompress.serve.vllm.settings import Settings

PROMPTS, NEW, BLOCKS = {"a": 19, "b": 33, "c": 7}, 6, 40
CACHES = {
    "dense": tiny_model,
    "quantized,dtype=k8v4": tiny_model,
    "pruned,pruner=snapkv,window=4,keep=12": tiny_model,
    "dmc": deciding_model,
    "streaming,window_size=12,num_sink_tokens=2": tiny_model,
    "gated,gates=FOLDER,threshold=0,window=6,num_sink_tokens=2": tiny_model,
}
RECORDED = [cache for cache, make in CACHES.items() if not cache.startswith(("streaming", "gated"))]


def attended(config, cache, device, graphs):
    """Results of all layers in prompts and in steps, and what waited in each of those."""
    generator, results, waits = torch.Generator().manual_seed(0), [], []

    def there(x):
        return Pretended(x) if device == "cuda" else x

    with torch.device(device):  # so vLLM makes its models
        settings = Settings(cache.replace("FOLDER", tiny_gates_folder()), cuda_graphs=graphs)
        engine = Engine(settings, config, torch.float32, 16)
    engine.recorded_most = 4 if graphs else 0
    nbytes = engine.page_nbytes * engine.counted * BLOCKS
    engine.open(there(torch.zeros(nbytes, dtype=torch.uint8)), BLOCKS)
    engine.known = {
        name: SimpleNamespace(
            num_prompt_tokens=tokens, num_tokens=tokens, num_output_tokens=0, max_tokens=NEW, prompt_embeds=None,
            skip_reading_prefix_cache=True,
        )
        for name, tokens in PROMPTS.items()
    }  # fmt: skip
    for tokens in (PROMPTS, *[dict.fromkeys(PROMPTS, 1)] * NEW):
        pretended_cuda.waits.clear()
        rows, total = [], 0
        engine.start_step()
        for block, (name, count) in enumerate(tokens.items()):
            engine.grant(name, count)
            engine.named(name, block)
            rows.append(Row(block, total, count))
            total += count
        assert engine.begin(rows)
        most = total
        if (current := engine.recorded) is not None:
            most, slots = current.size, engine.requests.slots
            current.together, *_ = slots.step(most, current.place)
            current.decoding = most
            slots.settle_padding()
        found = []
        with torch.inference_mode():
            for layer, facts in engine.facts.items():
                heads = (facts.query_heads, facts.kv_heads, facts.kv_heads)
                q, k, v = (there(torch.randn(most, n, facts.head_dim, generator=generator)) for n in heads)
                out = torch.empty_like(q)
                engine.attend(layer, q, k, v, Softmax(facts.head_dim**-0.5), out)
                found.append(out)
        waits.append(list(pretended_cuda.waits))
        assert engine.recorded is None and not engine.failed  # the last layer has ended it
        results += [out.cpu()[:total] for out in found]
    return results, waits[1:]


@pytest.mark.parametrize(("cache", "graphs"), [*((x, False) for x in CACHES), *((x, True) for x in RECORDED)])
def test_layers_give_what_they_give_on_the_cpu_and_steps_do_not_wait(cache, graphs):
    config = CACHES[cache]().config
    expected, _ = attended(config, cache, "cpu", graphs)
    with PretendedCuda():
        found, waits = attended(config, cache, "cuda", graphs)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other)
    assert sum(not names for names in waits) >= NEW - 1, waits  # the first learns what prompts have left
