"""Decisions and weights of tokens, from the neurons of queries and keys; the same in training and in a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from .config import DMCConfig


def decisions_of(
    config: DMCConfig, logits: Tensor, places: Tensor, *, layer: int = 0, noise: ops.Noise | None = None
) -> ops.Decisions:
    """logits: [B, Hkv, T], the keys' neuron. places: [B or 1, T], of each token in its document; used with a stride.
    noise: None = hard decisions; else relaxed ones, the noise that of this layer. Returns float32 [B, Hkv, T]."""
    kv_heads = logits.shape[1]
    if config.stride is not None:
        alpha = (places % config.stride != 0).float()[:, None].expand_as(logits).contiguous()
        return ops.Decisions(alpha, alpha, torch.where(alpha > 0, torch.inf, -torch.inf))
    logits = _shared(config, logits)
    found = ops.dmc_decisions(
        logits,
        shift=config.shift,
        temperature=config.temperature,
        scale=config.dms_scale if config.mode == "dms" else 1.0,
        margin=config.decision_margin if noise is None else 0.0,
        noise=None if noise is None else noise._replace(stream=layer * logits.shape[1]),
        hard=noise is None,
    )
    if logits.shape[1] == kv_heads:
        return found
    return ops.Decisions(*(x.repeat(1, kv_heads, 1) for x in found))


def weights_of(config: DMCConfig, logits: Tensor, kv_heads: int) -> Tensor:
    """How much each token weighs in the average of its entry, float32 [B, Hkv, T]. logits: [B, Hq, T], the queries'
    neuron."""
    if config.omega == "uniform" or config.mode == "dms":
        return torch.ones((logits.shape[0], kv_heads, logits.shape[2]), device=logits.device)
    logits = _shared(config, logits)
    heads = kv_heads if config.share_heads == "none" else 1
    omega = ops.dmc_importance(logits, heads, shift=config.shift, eps=config.omega_eps, reduce=config.gqa_omega)
    return omega if heads == kv_heads else omega.repeat(1, kv_heads, 1)


def _shared(config: DMCConfig, logits: Tensor) -> Tensor:
    """One logit per token and layer where heads share their decisions (DMC-HardC)."""
    if config.share_heads == "mean":
        return logits.float().mean(1, keepdim=True)
    return logits[:, :1] if config.share_heads == "head0" else logits
