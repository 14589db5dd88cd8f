"""Models by name: the small byte-level Llama that ships with the package, and SmolLM2 where it is installed."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..hf.guard import guard
from ..support.checks import need
from ..support.smollm2 import SMOLLM2, smollm2_folder
from .differences import unpack
from .tokenizer import byte_tokenizer

EXAMPLE_NAME = "example"
EXAMPLE = Path(__file__).parent / EXAMPLE_NAME
RETROFITTED = {  # the same model, trained on for a compressed cache: a config, and how the weights differ
    method: Path(__file__).parent / f"example_{method}" for method in ("dmc", "pod")
}
_WEIGHTS = "model.safetensors"


def load_example_model(
    name: str = EXAMPLE_NAME, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu",
    retrofit: str | None = None,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:  # fmt: skip
    """A model and its tokenizer, without network.

    name: "example", the shipped model (3 M parameters, trained to 2,048 bytes, one token per byte), or "smollm2",
    SmolLM2-135M-Instruct (8,192 tokens, a chat template), from packages installed beside this one; the first call makes
    transformers' files of theirs, in the user's cache folder. dtype: float32 (as it is not given; the command line
    takes smollm2 in bfloat16), bfloat16 or float16. retrofit: None, or
    of the example "dmc" or "pod": the model after `kvcompress retrofit dmc` or `pod`, to be attached like any converted
    model. Returns (model in eval mode, tokenizer). See README.md in models/example, example_dmc and example_pod.
    Raises ValueError for another name, dtype or retrofit, or a device that is not there; ImportError, with what to
    install, for smollm2 without its packages.
    """
    if name not in (EXAMPLE_NAME, SMOLLM2):
        raise ValueError(f"name must be one of {EXAMPLE_NAME}, {SMOLLM2}, got {name!r}")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be torch.float32, torch.bfloat16 or torch.float16, got {dtype!r}")
    kind = str(device).partition(":")[0]
    allowed = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    if kind not in allowed:
        raise ValueError(f"device must be one that PyTorch finds here ({', '.join(allowed)}), got {str(device)!r}")
    if retrofit is not None and retrofit not in RETROFITTED:
        raise ValueError(f"retrofit must be None or one of {', '.join(RETROFITTED)}, got {retrofit!r}")
    if name == SMOLLM2:
        need(retrofit is None, f"retrofit must be None for {SMOLLM2}, got {retrofit!r}")
        folder = smollm2_folder("name")
        model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        return model.to(device).eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)
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
