"""Models with recurrent layers under vLLM, whose states lie beside the pages of attention layers."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from vllm import SamplingParams

from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from benchmarks.quality.parts.families_models import BASE

ROOT = Path(__file__).parents[2]
PROMPTS = [[(7 * i * i + 3 * i * n) % 128 for i in range(1, n)] for n in (90, 33, 150, 201, 17)]
NEW = [12, 30, 7, 18, 25]
PRUNED = "pruned,pruner=snapkv,window=16,keep=64"
STREAMING = "streaming,window_size=40,num_sink_tokens=4"
SIZES = {"conv_dim": 128, "block_dim": 128, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
MORE = {"granite": {"mamba_n_heads": 8}, "lfm2": SIZES | {"block_auto_adjust_ff_dim": False}}  # as vLLM's classes ask
# by transformers 5.23 and newer, where caches of recurrent layers are: that of make test
GENERATE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
import kvcompress
from kvcompress import CacheSpec
folder, cache, prompts, new = json.loads(sys.stdin.read())
model, found = AutoModelForCausalLM.from_pretrained(folder), []
with torch.no_grad(), kvcompress.attach(model):
    for prompt, n in zip(prompts, new, strict=True):
        ids = torch.tensor([prompt])
        given = {"cache": CacheSpec.parse(cache).make(model.config), "attention_mask": torch.ones_like(ids)}
        out = model.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False, **given)
        found.append(out[0, len(prompt) :].tolist())
print(json.dumps(found))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for field, value in {"hidden_size": 128, "head_dim": 32}.items():  # that vLLM has attention for
        monkeypatch.setitem(BASE, field, value)

    def make(name):
        configuration = CONFIGURATIONS[name]
        more = next((more for kind, more in MORE.items() if name.startswith(kind)), {})
        replace(configuration, settings=configuration.settings | more).model(seed=1).save_pretrained(tmp_path)
        return tmp_path

    return make


def generated(folder, cache, prompts, new):
    """What generate gives each prompt alone."""
    given = json.dumps([str(folder), cache, prompts, new])
    python = ROOT / ".venv" / "bin" / "python"
    done = subprocess.run([python, "-c", GENERATE], input=given, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# 10 seconds each: generate runs in a process of its own
@pytest.mark.parametrize("name", ["falcon_h1", "granitemoehybrid", "granitemoehybrid/rope", "lfm2"])
def test_tokens_are_those_of_generate_in_parts_and_together(serve, folder, name):
    model = folder(name)
    wanted = generated(model, "dense", PROMPTS, NEW)
    served = serve(model, "dense")  # parts of at most 128 tokens
    assert served.generate(PROMPTS * 2, NEW * 2)[0] == wanted * 2
    assert served.engine.requests.pages_in_use() == 0 and served.scheduler.kv_cache_manager.usage == 0
    assert len(served.engine.states._free) == served.config.scheduler_config.max_num_seqs


@pytest.mark.parametrize("cache", [PRUNED, STREAMING, PRUNED + ",every=8,dtype=int8"])
def test_tokens_of_compressed_caches_are_those_of_generate(serve, folder, cache):
    model = folder("falcon_h1")
    assert serve(model, cache).generate(PROMPTS, NEW)[0] == generated(model, cache, PROMPTS, NEW)


def test_who_gives_its_pages_up_begins_anew_with_no_state(serve, folder):
    model, short, new = folder("falcon_h1"), [prompt[:80] for prompt in PROMPTS * 2], [70] * 10
    wanted = generated(model, "dense", short, new)
    served = serve(model, "dense", blocks=18)
    served.engine.requests.coming_pages = lambda prompts: 0  # as if there were room
    assert served.generate(short, new)[0] == wanted
    assert served.engine.preempted > 0 and served.engine.requests.pages_in_use() == 0


def test_places_of_states_are_as_many_as_requests_may_run(serve, folder):
    served = serve(folder("falcon_h1"), "dense", max_num_seqs=2)
    engine, params = (
        served.llm.llm_engine,
        SamplingParams(temperature=0, max_tokens=9, detokenize=False, ignore_eos=True),
    )
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    engine.step()
    engine.abort_request(["0"])
    found = {}
    while engine.has_unfinished_requests():
        found |= {x.request_id: list(x.outputs[0].token_ids) for x in engine.step() if x.finished}
    alone = [served.generate([prompt], 9)[0][0] for prompt in PROMPTS[1:]]
    assert [found[str(i)] for i in range(1, len(PROMPTS))] == alone
    assert sorted(served.engine.states._free) == [1, 2]


@pytest.mark.parametrize(("name", "value"), [("prefixes", 4), ("swap", "1MiB")])
def test_what_would_need_states_to_be_kept_is_refused(serve, folder, name, value):
    message = f"{name} must be 0 or None for a model with recurrent layers, .* got {value!r}"
    with pytest.raises(ValueError, match=message):
        serve(folder("falcon_h1"), "dense", **{name: value})
