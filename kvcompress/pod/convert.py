"""Turning a model into one whose layers share distant keys: no parameter changes, the attention does."""

from __future__ import annotations

from torch import Tensor, nn

from ..hf.convert import install, installed
from ..retrofit.passes import check_layers
from .config import PoDConfig
from .method import PoDMethod
from .plan import PoDPlan


def convert(model: nn.Module, config: PoDConfig | PoDPlan) -> PoDMethod:
    """Converts an attached or plain model to PoD, or to a baseline of it, in place, and attaches it.

    config: a PoDConfig or a PoDPlan. No parameter is added or changed; a model needs training afterwards to get used to
    it. Layers that see all tokens are converted, others stay as they are. model.config.kvcompress says what was done,
    so that save_pretrained, from_pretrained and kvcompress.attach bring the converted model back.
    Returns the model's method (see state).
    Raises ValueError for a model that cannot be attached or converted, with the reason: converted already, a lead table
    that does not fit it, layers that read the keys of others.
    Source: PoD, section 2.
    """
    if not isinstance(config, (PoDConfig, PoDPlan)):
        raise TypeError(f"config must be a PoDConfig or a PoDPlan, got {type(config).__name__}")
    method = PoDMethod(config if isinstance(config, PoDConfig) else PoDConfig.of(config))
    return install(model, method, check_layers, made_for=config)


def state(model: nn.Module) -> PoDMethod:
    """What convert made of an attached model: config, and the gates of the last forward pass.

    Raises ValueError if the model is not attached or was not converted to PoD.
    """
    return installed(model, PoDMethod, "kvcompress.pod.convert(model, config)")


def mean_gates(model: nn.Module) -> list[float | None]:
    """Probability of near tokens in each layer in the last forward pass without a cache, mean over batch, heads and
    tokens; None for layers in which every head leads itself. Tokens that see none but near ones count as 1.

    model: converted and attached. Raises ValueError as state does.
    """
    found = state(model)
    gates: list[Tensor | None] = [found.last_gates.get(layer) for layer in range(len(found.config.lead))]
    return [None if gate is None else float(gate.nanmean()) for gate in gates]
