"""What attention functions of ours give: the answer of the probe, or of the pass that runs in this thread."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import compiled
from .attending import attend
from .method import KEYWORD, Pass
from .now import THREAD
from .probe import unheard


def answer(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
) -> tuple[int | None, Tensor | None]:
    """(layer, [B, T, Hq, value dim]) of un-rotated queries and keys as the family has them; None in place of a tensor
    where no pass is ours. options: what the family hands to its attention function; a Pass is taken out of them."""
    keyword: Pass | None = options.pop(KEYWORD, None)  # checkpoints run again when now is another pass, or none
    now = THREAD.now
    layer, now.layer = now.layer, None
    entered, now.entered = now.entered, None
    entering = entered[1] if entered is not None and entered[0] is module else None
    # to keys of an encoder, which are not ours
    if layer is None and not getattr(module, "is_causal", True) and (now.probe is None or now.probe.crosses):
        return None, None if now.probe is None else unheard(query, value)
    if layer is None:
        layer = getattr(module, "layer_idx", None)
    if now.probe is not None:
        now.probe.arrives = keyword is not None
        return layer, now.probe.arrived(layer, module, query, key, value, mask, options)
    if now.handle is not None and torch.compiler.is_dynamo_compiling():
        return layer, compiled.attention(layer, query, key, value, options, entering)
    current = keyword or now.current
    return layer, None if current is None else attend(current, layer, query, key, value, options, entering)
