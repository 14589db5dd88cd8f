"""What the plugin makes of vLLM's configuration on its CUDA platform, which pretends to be there."""

import json
import os
import subprocess
import sys
import types

PRETENDS = """
import json, sys, types
sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")  # of the builds for GPUs
import vllm.platforms
from vllm.platforms import cuda
from vllm.platforms.interface import DeviceCapability

class Pretended(cuda.CudaPlatformBase):
    get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    has_device_capability = classmethod(lambda cls, capability, device_id=0: True)
    get_device_name = classmethod(lambda cls, device_id=0: "a GPU")
    get_device_total_memory = classmethod(lambda cls, device_id=0: 80 << 30)
    num_compute_units = classmethod(lambda cls, device_id=0: 132)

vllm.platforms._current_platform = Pretended()
import vllm.config.vllm
vllm.config.vllm.HAS_TRITON = True  # by which vLLM takes its V2 model runner
import pickle
from vllm import EngineArgs
from vllm.model_executor.models import registry
from kvcompress.serve.vllm import register

registry._run_in_subprocess = lambda asked: asked()
register()
folder, asked = sys.argv[1], json.loads(sys.argv[2])
given = {"additional_config": {"kvcompress": asked}} if asked else {}
made = EngineArgs(model=folder, skip_tokenizer_init=True, max_model_len=512, **given).create_engine_config()
made = pickle.loads(pickle.dumps(made))  # as another process gets it
print(json.dumps({
    "graphs": made.compilation_config.cudagraph_mode.name, "v2": made.use_v2_model_runner,
    "worker": made.parallel_config.worker_cls, "architectures": made.model_config.architectures,
    "asynchronous": made.scheduler_config.async_scheduling, "settings": made.additional_config,
}))
"""


def configured(folder, asked, **environment):
    done = subprocess.run(
        [sys.executable, "-c", PRETENDS, str(folder), json.dumps(asked)], capture_output=True, text=True,
        env=os.environ | environment,
    )  # fmt: skip
    return types.SimpleNamespace(**json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else done.stderr


def test_a_compressed_cache_takes_what_it_needs(folders):
    """In a process of its own, as it changes vLLM's platform."""
    for graphs in (False, True):
        made = configured(folders["plain"], {"cache": "dense", "cuda_graphs": graphs})
        assert made.graphs == "NONE" and not made.v2 and not made.asynchronous
        assert made.worker == "vllm.v1.worker.gpu_worker.Worker" and made.architectures == [
            "CompressedLlamaForCausalLM"
        ]
        assert made.settings["kvcompress"]["cuda_graphs"] is graphs


def test_without_one_vllm_is_as_it_was(folders):
    made = configured(folders["plain"], None)
    assert made.graphs == "FULL_AND_PIECEWISE" and made.v2 and made.asynchronous
    assert made.architectures == ["LlamaForCausalLM"]


def test_the_v2_model_runner_is_refused_where_it_is_asked_for(folders):
    printed = configured(folders["plain"], {"cache": "dense"}, VLLM_USE_V2_MODEL_RUNNER="1")
    assert "VLLM_USE_V2_MODEL_RUNNER must be unset or 0 with a compressed cache, got 1" in printed
