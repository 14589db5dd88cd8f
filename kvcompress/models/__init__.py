"""The small byte-level Llama that ships with the package."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..hf.guard import guard
from .differences import unpack
from .tokenizer import byte_tokenizer

EXAMPLE = Path(__file__).parent / "example"
RETROFITTED = {  # the same model, trained on for a compressed cache: a config, and how the weights differ
    method: Path(__file__).parent / f"example_{method}" for method in ("dmc", "pod")
}
_WEIGHTS = "model.safetensors"


def load_example_model(
    dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", *, retrofit: str | None = None
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The shipped model (3 M parameters, trained to 2,048 bytes) and its tokenizer (one token per byte); no network.

    dtype: float32, bfloat16 or float16. retrofit: None, or "dmc" or "pod": the model after `kvcompress retrofit
    dmc` or `pod`, to be attached like any converted model. Returns (model in eval mode, tokenizer). See README.md in
    models/example, example_dmc and example_pod.
    Raises ValueError for another dtype or retrofit, or a device that is not there.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be torch.float32, torch.bfloat16 or torch.float16, got {dtype!r}")
    kind = str(device).partition(":")[0]
    allowed = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    if kind not in allowed:
        raise ValueError(f"device must be one that PyTorch finds here ({', '.join(allowed)}), got {str(device)!r}")
    if retrofit is not None and retrofit not in RETROFITTED:
        raise ValueError(f"retrofit must be None or one of {', '.join(RETROFITTED)}, got {retrofit!r}")
    if retrofit is None:
        model = LlamaForCausalLM.from_pretrained(EXAMPLE, dtype=dtype, local_files_only=True)
    else:
        folder = RETROFITTED[retrofit]
        model = LlamaForCausalLM.from_pretrained(
            None, config=LlamaConfig.from_pretrained(folder), state_dict=retrofitted_weights(retrofit), dtype=dtype
        )
        model.name_or_path = model.config.name_or_path = str(folder)
        model.generation_config = GenerationConfig.from_pretrained(folder)
        guard(model, model.model)
    return model.to(device).eval(), byte_tokenizer()


def retrofitted_weights(retrofit: str) -> dict[str, Tensor]:
    """The weights of a retrofitted example model, bfloat16. retrofit: "dmc" or "pod"."""
    return unpack(load_file(EXAMPLE / _WEIGHTS), (RETROFITTED[retrofit] / "model.differences").read_bytes())


def shipped_retrofit(folder: str | Path) -> str | None:
    """Which retrofitted example model's folder it is, whose weights only load_example_model puts together; None for
    others."""
    return next((name for name, own in RETROFITTED.items() if Path(folder).absolute() == own.absolute()), None)
