"""What the layers of a model are, by its config alone: learned by attaching to a model without weights. One of 8B
parameters takes a second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AutoModel

from ..ops.softmax import Softmax
from .attach import attach_to_learn, base_model, facts_of
from .config import decoder_config
from .facts import Facts
from .method import Pass
from .now import coming

_INPUTS = 64  # of a linear layer, to which it looks


@torch.inference_mode(False)
@torch.no_grad()
def facts_from(config: Any) -> tuple[Facts, Mapping[int, Softmax]]:
    """Of each layer that attends what kvcompress.attach learns of it, and how it makes probabilities, with sink logits
    by chance. Raises ValueError for a model that cannot be attached, with the reason."""
    config = decoder_config(config)
    config = type(config).from_dict(config.to_dict())  # as transformers reads it: engines change fields
    vars(config).pop("kvcompress", None)  # a conversion changes nothing here
    softcap = getattr(config, "attn_logit_softcapping", None)
    config.attn_logit_softcapping = None  # of which older versions of transformers know no more than the config says
    with _thin():
        model = _hollow(config)
        with attach_to_learn(model):
            noted = _Noted(facts_of(base_model(model)))
            with coming(noted):
                model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False)
    return noted.facts, {layer: found._replace(softcap=softcap) for layer, found in noted.softmax.items()}


class _Noted(Pass):
    """Notes the softmax of each layer."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.softmax: dict[int, Softmax] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        self.softmax[layer] = softmax
        return torch.zeros_like(queries)


def _hollow(config: Any) -> Any:
    """A decoder of this config, which it changes, with random weights that are views of a few numbers. Raises
    ValueError where transformers makes none. Each module's `place` is its name in the one around it."""
    config._attn_implementation_internal = None  # whatever runs the model elsewhere
    for name, value in vars(config).items():
        if "intermediate" in name and isinstance(value, int):  # of what stands between attention layers
            setattr(config, name, 8)
    try:
        with torch.device("meta"):
            model = AutoModel.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, AttributeError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(f"transformers cannot make a model of {type(config).__name__}: {reason}") from error
    chance = torch.Generator("cpu").manual_seed(0)
    for path, module in model.named_modules():
        module.place = path.rpartition(".")[2]
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(_view(weight.shape, chance), requires_grad=False)
                module._parameters[name]._is_hf_initialized = True
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.ones_like(buffer, device="cpu")
        if module._buffers:
            model._init_weights(module)  # frequencies
    return model.eval()


def _view(shape: torch.Size, chance: torch.Generator) -> Tensor:
    """Random numbers [*shape], of which there are not many."""
    if len(shape) < 2:
        return torch.rand(shape, generator=chance) + 0.5
    if len(shape) > 2:  # experts are alike: they must lie as their products want them
        return (torch.randn(shape[-2:], generator=chance) / 8).expand(shape)
    return (torch.randn(sum(shape), generator=chance) / 8).as_strided(shape, (1, 1))


class _Thin(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            x, weight, *bias = args
            args = x[..., :_INPUTS], weight[..., :_INPUTS], *bias
        return func(*args, **(kwargs or {}))


@contextmanager
def _thin() -> Iterator[None]:
    """Linear layers look at their first inputs alone, and what is made is float32 on the CPU, whatever the defaults."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), _Thin():
            yield
    finally:
        torch.set_default_dtype(dtype)
