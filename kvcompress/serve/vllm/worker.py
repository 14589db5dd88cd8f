"""vLLM's worker of a CPU, whose requests with a seed may have prompts that are read in parts."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker


class CompressedRunner(CPUModelRunner):
    """vLLM draws a token behind every part of a prompt and winds the request's generator back, which a CPU's cannot."""

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        generators, rows = self.input_batch.generators, self.input_batch.num_reqs
        away = {}
        for row in np.nonzero(self.discard_request_mask.np[:rows])[0].tolist():
            if row in generators:  # nothing is drawn from it
                away[row] = generators.pop(row)
        try:
            return super().sample_tokens(*args, **kwargs)
        finally:
            generators.update(away)


class CompressedWorker(CPUWorker):
    def init_device(self) -> None:
        super().init_device()
        if type(self.model_runner) is CPUModelRunner:
            self.model_runner.__class__ = CompressedRunner
