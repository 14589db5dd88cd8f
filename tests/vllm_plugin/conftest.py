"""Engines of vLLM in this process. Run by make test-vllm, in an environment of its own."""

import os

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.model_executor.models import registry
from vllm.plugins import load_general_plugins

import kvcompress
from kvcompress import CacheSpec
from kvcompress.models.text import held_out_text
from kvcompress.serve.vllm import register
from kvcompress.serve.vllm.engine import ENGINES

registry._run_in_subprocess = lambda asked: asked()  # it looks at classes: another process would import vLLM for it
load_general_plugins()
register()  # also where the package is not installed, and its entry point not known

PARTS = {"max_num_batched_tokens": 128}
WHOLE = {"max_num_batched_tokens": 512, "enable_chunked_prefill": False}


class Served:
    """vLLM over a folder with a model. cache: what is asked of the plugin; None = nothing."""

    def __init__(self, folder, cache, blocks=60, ratio=None, prefixes=None, swap=None, cuda_graphs=None, **given):
        asked = {} if cache is None else {"cache": cache}
        asked |= {} if ratio is None else {"ratio": ratio}
        asked |= {} if prefixes is None else {"prefixes": prefixes}
        asked |= {} if swap is None else {"swap": swap}
        asked |= {} if cuda_graphs is None else {"cuda_graphs": cuda_graphs}
        if "enable_chunked_prefill" not in given:
            given = (WHOLE if cache is not None and cache.startswith("pruned") else PARTS) | given
        given = {"max_num_seqs": 32, "block_size": 32} | given  # small blocks, of which a few requests need many
        self.llm = LLM(
            str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=512,
            num_gpu_blocks_override=blocks, kv_cache_memory_bytes=1 << 28, disable_log_stats=True,
            additional_config={"kvcompress": asked} if asked else {}, **given,
        )  # fmt: skip
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler, self.config = core.scheduler, self.llm.llm_engine.vllm_config
        self.engine = ENGINES.get(self.config.instance_id)

    def generate(self, prompts, new):
        params = [
            SamplingParams(temperature=0, max_tokens=n, detokenize=False, ignore_eos=True)
            for n in (new if isinstance(new, list) else [new] * len(prompts))
        ]
        outputs = self.llm.generate([{"prompt_token_ids": x} for x in prompts], params, use_tqdm=False)
        return [list(x.outputs[0].token_ids) for x in outputs], [x.outputs[0].finish_reason for x in outputs]

    def close(self):
        self.llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def serve():
    opened = []

    def make(*args, **kwargs):
        opened.append(Served(*args, **kwargs))
        return opened[-1]

    yield make
    for served in opened:
        served.close()


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The shipped model, plain and retrofitted, as folders with weights."""
    made = {}
    for name, retrofit in (("plain", None), ("dmc", "dmc")):
        model, _ = kvcompress.load_example_model(retrofit=retrofit)
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name])
    return made


@pytest.fixture(scope="session")
def prompts():
    text = held_out_text()
    return [list(text[i * 600 : i * 600 + 150 + 53 * i % 200]) for i in range(8)]


@torch.no_grad()
def alone(model, cache, prompts, new):
    """What generate gives each prompt alone."""
    found = []
    with kvcompress.attach(model):
        for i, prompt in enumerate(prompts):
            n, ids = new[i] if isinstance(new, list) else new, torch.tensor([prompt])
            out = model.generate(
                ids, past_key_values=CacheSpec.parse(cache).make(model.config), max_new_tokens=n, min_new_tokens=n,
                do_sample=False, attention_mask=torch.ones_like(ids),
            )  # fmt: skip
            found.append(out[0, len(prompt) :].tolist())
    return found
