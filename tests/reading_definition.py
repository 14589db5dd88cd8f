"""imdc.md, sections 6 to 9, written out for one sequence of a tiny Llama with loops over layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from kvcompress.pruners import SnapKV, StreamingLLM

# memory of each layer after iteration i, from the retention ratios of all iterations before [i][L]
Sizes = Callable[[int, list[list[Fraction]]], list[int]]


@dataclass
class Reading:
    """logits: after the last token. kept [n][L][Hkv]: places in the prompt of what memory holds after an iteration.
    memory_attention [n][L]: float [Hkv], mean share of the chunk's attention on memory. ratios [n][L]: eq 2."""

    logits: Tensor | None = None
    kept: list[list[list[list[int]]]] = field(default_factory=list)
    memory_attention: list[list[Tensor]] = field(default_factory=list)
    ratios: list[list[Fraction]] = field(default_factory=list)


@torch.no_grad()
def plain_reading(
    model, ids: Tensor, chunks: list[int], sizes: Sizes, pruner: SnapKV | StreamingLLM, *, append: bool = False
) -> Reading:
    """Reads all but the last token of ids [1, T] in these chunks, then the last one over the memory."""
    base, prompt, L = model.model, ids[0, :-1], len(model.model.layers)
    memory: list[tuple[Tensor, Tensor, Tensor] | None] = [None] * L  # keys, values, places in the prompt [Hkv, e]
    out, start = Reading(), 0

    def forward(tokens: Tensor, layer_sizes: list[int] | None) -> Tensor:
        kept, shares, ratios = [], [], []
        h = base.embed_tokens(tokens)[None]
        for j, layer in enumerate(base.layers):
            attention, x = layer.self_attn, layer.input_layernorm(h)
            q, k, v = (p(x).unflatten(-1, (-1, 16)).transpose(1, 2)
                       for p in (attention.q_proj, attention.k_proj, attention.v_proj))  # fmt: skip
            places, e, S = torch.arange(start, start + len(tokens)).expand(2, -1), 0, len(tokens)
            if memory[j] is not None:
                e = memory[j][2].shape[1]
                k, v = torch.cat([memory[j][0], k], 2), torch.cat([memory[j][1], v], 2)
                places = torch.cat([memory[j][2], places], 1)
            T = e + S
            cos, sin = base.rotary_emb(x, torch.arange(T)[None])
            qr, _ = apply_rotary_pos_emb(q, q, cos[:, -S:], sin[:, -S:])
            kr, _ = apply_rotary_pos_emb(k, k, cos, sin)
            logits = qr @ repeat_kv(kr, 2).transpose(2, 3) / 4
            hidden = torch.ones(S, T, dtype=torch.bool).triu(T - S + 1)
            attended = logits.masked_fill(hidden, float("-inf")).softmax(-1)
            h = h + attention.o_proj((attended @ repeat_kv(v, 2)).transpose(1, 2).flatten(2))
            h = h + layer.mlp(layer.post_attention_layernorm(h))
            if layer_sizes is not None:
                indices = choose(attended, e, S, layer_sizes[j], places) if layer_sizes[j] < T else None
                if indices is not None:
                    at = indices[None, :, :, None].expand(-1, -1, -1, 16)
                    k, v, places = k.gather(2, at), v.gather(2, at), places.gather(1, indices)
                kept.append(places.tolist())
                shares.append(attended[0, :, :, :e].sum(-1).reshape(2, 2 * S).mean(1))
                ratios.append(Fraction(int((places < start).sum()), max(places.numel(), 1)))
                memory[j] = (k, v, places)
        if layer_sizes is not None:
            out.kept.append(kept)
            out.memory_attention.append(shares)
            out.ratios.append(ratios)
        return model.lm_head(base.norm(h))[:, -1]

    def choose(attended: Tensor, e: int, S: int, size: int, places: Tensor) -> Tensor:
        T = e + S
        if append:
            if size <= e:
                return torch.arange(e).expand(2, -1)
            new = best(attended, T, S, size - e, places, first=e)
            return torch.cat([torch.arange(e).expand(2, -1), new], 1)
        return best(attended, T, S, size, places)

    def best(attended: Tensor, T: int, S: int, size: int, places: Tensor, first: int = 0) -> Tensor:
        """Of places first..T-1 those that stay."""
        n = min(pruner.num_sink_tokens, T)
        there = int((places[:, :n] == torch.arange(n)).all(0).long().cumprod(0).sum())  # of the prompt's own first
        sinks = min(there, size) if first == 0 else 0
        if isinstance(pruner, StreamingLLM) or size == sinks:
            return torch.tensor([[*range(sinks), *range(T - size + sinks, T)]] * 2)
        W = min(pruner.window, S, size - sinks)
        votes = attended[0, :, -W:, : T - W].reshape(2, 2 * W, T - W).mean(1)
        score = torch.nn.functional.avg_pool1d(votes, 5, 1, 2)
        score[:, :sinks] = float("inf")
        score[:, :first] = float("-inf")
        chosen = score.topk(size - W).indices
        return torch.cat([chosen, torch.arange(T - W, T).expand(2, -1)], 1).sort().values

    for i, count in enumerate(chunks):
        forward(prompt[start : start + count], sizes(i, out.ratios))
        start += count
    out.logits = forward(ids[0, -1:], None)
    return out
