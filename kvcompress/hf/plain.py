"""Our attention kernel under a plain transformers model, by the registry that transformers has for such."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .. import ops

NAME = "kvcompress-plain"
REFUSED = "attention kvcompress is for whole rows without padding, packing, cache or sliding window"


def plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of whole rows. query: [B, Hq, T, D], key, value: [B, Hkv, T, D]. Returns ([B, T, Hq, D], None).

    Raises ValueError for masks, packed rows, earlier keys and a sliding window shorter than the rows.
    """
    T = query.shape[2]
    window = kwargs.get("sliding_window")
    packed = position_ids is not None and not torch.equal(
        position_ids, torch.arange(T, device=position_ids.device).expand_as(position_ids)
    )
    if attention_mask is not None or packed or key.shape[2] != T or (window is not None and window < T):
        raise ValueError(REFUSED)
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast rotation has left float32
    return ops.attention(query, key, value, scale=scaling)[0].transpose(1, 2), None


def no_mask(*, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True, **kwargs: Any) -> None:
    """What transformers makes masks with; here there are none. Raises ValueError where one would be needed."""
    if not allow_is_causal_skip or (attention_mask is not None and not bool(attention_mask.all())):
        raise ValueError(REFUSED)


def use_plain_attention(model: PreTrainedModel) -> None:
    """Trains a plain model through the kernel that converted ones use; for rows without padding.

    Not saved with the model.
    """
    ALL_ATTENTION_FUNCTIONS.register(NAME, plain_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, no_mask)
    model.set_attn_implementation(NAME)
