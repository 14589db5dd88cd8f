"""Does what the probe learned give what the dense model gives? Compared layer by layer, on a few tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..ops.softmax import Softmax
from .argument import CACHE
from .encoders import beside_encoder, silent_encoder
from .facts import Facts
from .indexing import attend_chosen
from .method import KEYWORD, Pass
from .now import THREAD, NotedCache
from .seam import evaluating

TOKENS = 48


class WholePass(Pass):
    """Every layer attends to all tokens that its window or chunk shows; what the model goes on with is the dense
    model's, so that each layer is compared on the very numbers that it had there: over 30 layers the roundings of 16
    bits add up to more than a wrong rotation may cost. dense: by layer, [B, T, Hq, value dim]."""

    chooses = True

    def __init__(self, facts: Facts, dense: dict[int, Tensor]) -> None:
        self.facts, self.dense = facts, dense
        self.out: dict[int, Tensor] = {}
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # rotated keys and values of layers that others read

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        facts, T = self.facts[layer], queries.shape[2]
        q = facts.query_rotary.rotate(queries, None, T, [T] * queries.shape[0])
        if facts.reads is None:
            self._held[layer] = facts.key_rotary.rotate(keys, None, T, [T] * keys.shape[0]), values
        k, v = self._held[layer if facts.reads is None else facts.reads]
        if self.index is not None:  # B = 1
            index = self.index.rotated(facts, None, T, [T])
            asked, top = (index.queries[0], index.weights[0], index.keys[0, 0]), index.indexer.top
            parts = [attend_chosen(q[0], k[0], v[0], [T] * k.shape[1], asked, top, softmax)[None]]
        else:
            size = facts.chunk or T
            parts = [
                ops.attention(q[:, :, a : a + size], k[:, :, a : a + size], v[:, :, a : a + size], window=facts.window,
                              **softmax.options)[0]
                for a in range(0, T, size)
            ]  # fmt: skip
        self.out[layer] = torch.cat(parts, 2)[..., : facts.value_dim].transpose(1, 2)
        return facts.padded(self.dense[layer].transpose(1, 2))


@torch.inference_mode(False)
@torch.no_grad()
def verify_layers(decoder: Any, facts: Facts) -> None:
    """Raises RuntimeError that names the first layer whose attention differs from the dense model's."""
    weight = next(p for p in decoder.parameters() if p.is_floating_point())
    tolerance = 1e-4 if weight.dtype == torch.float32 else 5e-2
    size = decoder.config.vocab_size
    device = "cpu" if weight.device.type == "meta" else weight.device
    ids = (torch.arange(TOKENS, device=device) * 31 + 7) % size
    dense: dict[int, Tensor] = {}

    def watch(layer: int, out: Tensor) -> None:
        dense[layer] = out

    def given(*, keeps: bool) -> dict[str, Any]:
        cache = {CACHE: NotedCache(decoder.config, keeps=keeps)}
        return beside_encoder(cache) | silent_encoder(decoder, ids, 1) if facts.crosses else cache

    ours = WholePass(facts, dense)
    with evaluating(decoder), torch.autocast(torch.device(device).type, enabled=False):
        try:
            THREAD.now.watcher = watch
            decoder(input_ids=ids[None], use_cache=True, **given(keeps=True))
        finally:
            THREAD.now.watcher = THREAD.now.layer = None
        decoder(input_ids=ids[None], use_cache=True, **given(keeps=False), **{KEYWORD: ours})
    for layer in sorted(ours.out):
        want, out = dense[layer].float(), ours.out[layer].float()
        error = float((out - want).abs().max() / want.abs().max().clamp_min(1e-20))
        if not error <= tolerance:
            raise RuntimeError(
                f"layer {layer} of {type(decoder).__name__} attends otherwise than the dense model: {error:.2g} of the "
                f"largest number, {tolerance:.2g} are allowed; please report this model"
            )
