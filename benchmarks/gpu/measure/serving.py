"""Many requests at once: seconds until all have their answers, beside transformers' own continuous batching.

serving/<cache>/<how>/R<requests>/P<prompt>/N<new>    eager: passes op by op. graphs: those in which all requests
                     decode are recorded (cuda_graphs). The model is that of models.py. The peer: the same of the
                     model as it is, which records by its own choice
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM

from benchmarks.common import Row
from benchmarks.gpu.measure.models import SIZES, attempt, model_of
from benchmarks.gpu.measure.turns import device, on_gpu, seconds
from kvcompress.dmc import DMCConfig
from kvcompress.serve import batching

WORKLOADS = {"full": ((32, 1024, 128),), "quick": ((16, 512, 64),), "tiny": ((3, 40, 6),)}  # requests, prompt, new
CACHES = {
    "dense": "dense",
    "int8": "quantized,dtype=int8",
    "snapkv4": "pruned,pruner=snapkv,keep=0.25",
    "dmc": "dmc",
}


def answered(
    model: LlamaForCausalLM, prompts: list[list[int]], new: int, config: ContinuousBatchingConfig | None = None
) -> float:
    """Seconds, the second time: what is made once, and recorded, is there then."""
    asked = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=asked, continuous_batching_config=config)
    manager.start()

    def run() -> None:
        for ids in prompts:
            manager.add_request(ids, max_new_tokens=new, eos_token_id=-1)
        left = len(prompts)
        while left and manager.is_running():
            found = manager.get_result(timeout=1)
            if found is not None and len(found.generated_tokens) != new:
                raise RuntimeError(found.error or f"{len(found.generated_tokens)} tokens")
            left -= found is not None
        if left:
            raise RuntimeError(f"{left} answers did not come")

    try:
        run()
        return seconds(run)
    finally:
        manager.stop(block=True)


def ours(model: LlamaForCausalLM, kind: str, graphs: bool, prompts: list[list[int]], new: int) -> float:
    model.config.kvcompress = DMCConfig(shift=0.0).to_dict() if kind == "dmc" else None
    memory = "16GiB" if on_gpu() else "64MiB"
    with batching(model, CACHES[kind], memory=memory, requests=len(prompts), cuda_graphs=graphs):
        return answered(model, prompts, new)


def serving_rows(size: str) -> Iterator[Row]:
    chosen = SIZES[size]
    for requests, prompt, new in WORKLOADS[size]:
        model = model_of(chosen, prompt + new)
        prompts = torch.randint(0, chosen.vocabulary, (requests, prompt), device="cpu").tolist()
        failures: list[str] = []
        # theirs takes what memory is free, which a CPU fills with zeros
        config = None if on_gpu() else ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
        peer = attempt(partial(answered, model, prompts, new, config), "transformers", failures)
        where = f"R{requests}/P{prompt}/N{new}"
        for kind in CACHES:
            for how in ("eager", "graphs") if on_gpu() else ("eager",):
                took = attempt(partial(ours, model, kind, how == "graphs", prompts, new), f"{kind}, {how}", failures)
                if took is not None:
                    note = f"{requests * new / took:,.0f} tokens/s written on {device()}"
                    yield Row(f"serving/{kind}/{how}/{where}", took, peer, "transformers", note=note)
        if failures:
            yield Row(f"serving/failed/{where}", 0.0, note="; ".join(failures))
