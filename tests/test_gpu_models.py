"""Whole models on a GPU: every cache gives the tokens that it gives on the CPU, in eager steps and in recorded ones."""

import pytest
import torch
from helpers import DMC_MODES, attached, deciding_model, forward, left_padded, random_ids, tiny_gates_folder, tiny_model
from test_graphs import CASES, assert_replays_what_the_step_does
from test_serve_batching import CACHES, LENGTHS, greedy, model_of, prompts_of

import kvcompress
from kvcompress import CacheSpec, dmc
from kvcompress.demo import make_task
from kvcompress.serve import batching

SNAPKV = "pruned,pruner=snapkv,window=32"
SPECS = {  # caches of the shipped model, and which of its versions they are for
    "dense": ("quest,dense_layers=99", None),
    "snapkv": (f"{SNAPKV},keep=200", None),
    "adakv": (f"{SNAPKV},keep=200,budget=adakv", None),
    "tova": ("pruned,pruner=tova,keep=200,every=8", None),
    "h2o": ("pruned,pruner=h2o,keep=200,every=8", None),
    "kvzip": ("pruned,pruner=kvzip,keep=0.25,budget=globaltopk", None),
    "replay": ("pruned,pruner=replay,keep=0.25,budget=globaltopk", None),
    "cge": ("pruned,pruner=centerofgravity,keep=200", None),
    "rgl": (f"{SNAPKV},keep=200,positions=remotegap:gap=64", None),
    "iterative": ("iterative,memory_size=192,chunk_size=128,schedule=sqrt,dynamic=true", None),
    "streaming": ("streaming,window_size=252,num_sink_tokens=4", None),
    "quest": ("quest,token_budget=256,dense_layers=1", None),
    "dmc": ("dmc", "dmc"),
    "pod": ("pod", "pod"),
}
TOKENS, NEW = 700, 24


def generated(device, name, dtype=torch.float32):
    """Tokens after a text, and the logits of the last of it."""
    spec, retrofit = SPECS[name]
    model = kvcompress.load_example_model(dtype=dtype, device=device, retrofit=retrofit)[0]
    task = make_task(TOKENS, 0.4, 7, device)
    cache = CacheSpec.parse(spec).make(model.config)
    with kvcompress.attach(model), torch.device(device), torch.no_grad():
        out = kvcompress.generate(model, task.ids, cache, max_new_tokens=NEW, do_sample=False)
        logits = model(out[:, -1:], past_key_values=cache).logits
    return out[0, TOKENS:].tolist(), logits.float().cpu(), cache.stored_lengths()


@pytest.mark.parametrize("name", SPECS)
def test_tokens_of_the_shipped_model_are_those_of_the_cpu(gpu, name):
    tokens, logits, lengths = generated(gpu, name)
    expected, theirs, held = generated("cpu", name)
    assert tokens == expected and lengths == held
    torch.testing.assert_close(logits, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["dense", "iterative", "streaming", "dmc", "pod"])
def test_bfloat16_answers_as_on_the_cpu(gpu, name):
    """Roundings differ, so that the first tokens are compared alone: the answer to the question at the text's end, by
    caches that find it."""
    assert generated(gpu, name, torch.bfloat16)[0][:5] == generated("cpu", name, torch.bfloat16)[0][:5]


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_step_computes_what_the_step_does(gpu, name):
    make, cache_of = CASES[name]
    with torch.device("cpu"):
        model = make()
        ids = torch.cat([random_ids(30, seed=1), random_ids(30, seed=2)])
    model, ids = model.to(gpu), ids.to(gpu)
    cache = cache_of(model.config)
    kvcompress.prefill(model, ids, cache)
    assert_replays_what_the_step_does(name, model, cache, 1e-4)


BATCHES = {
    "snapkv": ("pruned,pruner=snapkv,window=4,kernel_size=3,keep=12", None),
    "iterative": ("iterative,memory_size=12,chunk_size=8", None),
    "streaming": ("streaming,window_size=12,num_sink_tokens=2", None),
    "gated": ("gated,gates=GATES,threshold=0,window=6,num_sink_tokens=2", None),
    **{name: ("dmc", fields) for name, fields in DMC_MODES.items() if name in ("dmc", "window", "dms")},
}


def made_batch(name):
    """The model of a batch, and what makes its cache."""
    spec, fields = BATCHES[name]
    model = tiny_model() if fields is None else deciding_model(dmc=fields)
    return model, lambda model: CacheSpec.parse(spec.replace("GATES", tiny_gates_folder())).make(model.config)


@pytest.mark.parametrize("name", BATCHES)
def test_padded_batches_are_those_of_the_cpu(gpu, name):
    with torch.device("cpu"):
        prompts = [random_ids(n, seed=n) for n in (37, 5, 20)]
        ids, mask = left_padded(prompts)
        model, cache_of = made_batch(name)

    def logits(device):
        cache = cache_of(model)
        with kvcompress.attach(model.to(device)), torch.device(device), torch.no_grad():
            found = [model(ids.to(device), attention_mask=mask.to(device), past_key_values=cache).logits[:, -1:]]
            for i in range(20):
                new = torch.full((3, 1), 5 + i, device=device)
                seen = torch.cat([mask, torch.ones(3, i + 1, dtype=mask.dtype, device="cpu")], 1).to(device)
                found.append(model(new, attention_mask=seen, past_key_values=cache).logits)
        return torch.cat(found, 1).cpu(), cache.stored_lengths()

    (found, held), (expected, theirs) = logits(gpu), logits("cpu")
    assert held == theirs
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", ["dmc", "window", "dms"])
def test_losses_and_gradients_of_training_are_those_of_the_cpu(gpu, mode):
    def trained(device):
        with torch.device("cpu"):
            torch.manual_seed(0)
            model = attached()
            dmc.convert(model, dmc.DMCConfig(**DMC_MODES[mode]), anneal=False)
            ids = random_ids(70, batch=2)
        model = model.to(device).train()
        forward_loss = model(ids.to(device), labels=ids.to(device)).loss
        forward_loss.backward()
        return [forward_loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]

    for found, expected in zip(trained(gpu), trained("cpu"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_saved_cache_is_loaded_on_another_device(gpu, tmp_path):
    with torch.device("cpu"):
        model, ids = attached(), random_ids(40)
    cache = CacheSpec.parse(BATCHES["snapkv"][0]).make(model.config)
    kvcompress.prefill(model, ids.cpu(), cache)
    new = ids[:, -1:]
    cache.save(tmp_path / "cache")
    expected = forward(model, new, past_key_values=cache)
    there = kvcompress.load_cache(tmp_path / "cache", model.to(gpu))
    torch.testing.assert_close(forward(model, new.to(gpu), past_key_values=there).cpu(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["dense", "pruned", "quantized", "dmc"])
def test_recorded_passes_of_requests_give_the_tokens_of_the_cpu(gpu, name):
    """Seven requests of which four may decode at once: they come and go, and sizes of the batch change."""
    cache, fields = CACHES[name]
    prompts, found = prompts_of(LENGTHS), {}
    for device in (gpu, "cpu"):
        with torch.device("cpu"):
            model = model_of(fields)
        given = {"pages": 600, "page_size": 8, "requests": 4, "batch_tokens": 48, "cuda_graphs": device == gpu}
        with batching(model.to(device), cache, **given) as serving:
            results = model.generate_batch(prompts, generation_config=greedy(40))
            assert [x.error for x in results.values()] == [None] * len(prompts)
            found[device] = [x.generated_tokens for x in results.values()]
            if device == gpu:
                assert serving.processor.recorded.recordings.count >= 2
    assert found[gpu] == found["cpu"]
