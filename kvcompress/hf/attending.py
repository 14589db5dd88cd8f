"""A pass of a cache of ours: what is checked before it begins, what each layer's attention gets, and its end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.softmax import Softmax
from .facts import Facts
from .indexing import Index, IndexTicket
from .method import Call, Pass, PassCache, method_of


def begun(
    decoder: Any, facts: Facts, cache: PassCache, given: dict[str, Any], shifted: Tensor | None = None
) -> tuple[Call, Pass]:
    """A pass over a cache. given: the decoder's arguments. shifted: see Call. Raises, before anything is stored, for
    what it cannot do."""
    if (method := method_of(decoder)) is not None:
        method.check_cache(cache)
    call = checked_call(decoder, facts, given)
    call.shifted = shifted
    if wants_gradient(decoder, given):
        raise RuntimeError("compressed caches do not carry gradients: use torch.no_grad(), or train without a cache")
    if given.get("use_cache") is False:
        raise ValueError("use_cache must not be False with a compressed cache: what it is given is stored")
    return call, cache.begin(call)


def checked_call(decoder: Any, facts: Facts, given: dict[str, Any]) -> Call:
    """What a decoder was given, for a pass of ours. Raises for what no pass can do, before anything is stored."""
    name = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
    tokens, mask, at = (given.get(key) for key in (name, "attention_mask", "position_ids"))
    if tokens is None:
        raise ValueError("input_ids or inputs_embeds must be given, got neither")
    for key, x in ((name, tokens), ("attention_mask", mask), ("position_ids", at)):
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{key} must be a torch.Tensor, got {type(x).__name__}")
    if given.get("output_attentions"):
        raise ValueError("output_attentions must be False: kvcompress never forms attention weights")
    axes = None
    if at is not None and at.ndim == 3:  # M-RoPE: one row of positions for each axis of an image
        rows = at[1:] if at.shape[0] == 4 else at  # of four the first counts tokens
        # a decoded token is text, and on a GPU does not wait for the device
        one = rows.shape[-1] == 1 and rows.device.type != "cpu"
        at, axes = (rows[0], None) if one or not bool((rows != rows[:1]).any()) else (None, rows)
    return Call(decoder, facts, name, tokens, mask, at, axes)


def wants_gradient(decoder: Any, given: dict[str, Any]) -> bool:
    """Whether a backward pass could follow."""
    if not torch.is_grad_enabled():
        return False
    embeds = given.get("inputs_embeds")
    return (embeds is not None and embeds.requires_grad) or any(p.requires_grad for p in decoder.parameters())


def attend(
    current: Pass, layer: int | None, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any],
    entering: Any = None,
) -> Tensor:  # fmt: skip
    """[B, T, Hq, value dim], of un-rotated queries and keys as the family has them. options: what the family hands to
    its attention function beside them. entering: [B, T, n], what its attention module was called with, if that is
    known."""
    if layer is None or layer not in current.facts:
        raise ValueError(
            f"layer {layer} is not one that attach saw: one attention module serves several layers of this family, "
            "which only a cache tells apart; use it with a compressed cache"
        )
    if query.dtype == torch.float64:
        raise ValueError("model must be of float32, bfloat16 or float16 where kvcompress attends, got torch.float64")
    if options.get("dropout"):
        raise ValueError(f"attention_dropout must be 0 where kvcompress attends, got {options['dropout']}")
    if current.wants_entering:
        if not isinstance(entering, Tensor) or entering.ndim != 3 or entering.shape[:2] != query[:, 0, :, 0].shape:
            raise RuntimeError(
                f"hidden states that enter attention must be known for these gates, and those of layer {layer} are "
                "not: code that was compiled before knows of none (torch.compiler.reset()), and some families hand "
                "them over by another way; gates of queries need none (kvcompress fit gates)"
            )
        current.entering = entering[:, None]
    facts = current.facts[layer]
    ticket, indexer, current.index = options.get("indices"), facts.indexer, None
    if indexer is not None:
        if not current.chooses:
            raise ValueError(
                f"layer {layer} chooses tokens by an indexer: a PrunedCache, QuantizedCache or StreamingCache goes by "
                "that, and nothing else"
            )
        if isinstance(ticket, IndexTicket):
            queries, keys = indexer.framed(ticket.queries), indexer.framed(ticket.keys[:, None])
            current.index = Index(indexer, queries, keys, ticket.weights)
    scale, sinks = options.get("scaling"), options.get("s_aux")
    softmax = Softmax(
        query.shape[3] ** -0.5 if scale is None else scale,
        options.get("softcap"),
        None if sinks is None else sinks.float().reshape(-1),
    )
    if query.dtype != value.dtype or key.dtype != value.dtype:  # under autocast a norm may have left float32
        query, key = query.to(value.dtype), key.to(value.dtype)
    out = current.attend(layer, facts.framed(query), facts.framed(key, keys=True), facts.padded(value), softmax)
    return out[..., : facts.value_dim].transpose(1, 2).contiguous()


def hidden_of(output: Any) -> Tensor | None:
    """[B, T, hidden size] of what a decoder returned; None where it does not say."""
    return getattr(output, "last_hidden_state", output[0] if isinstance(output, tuple) else None)
