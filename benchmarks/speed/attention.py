"""Flash attention, forward and forward + backward, against PyTorch's SDPA.

    python benchmarks/speed/attention.py [--quick] [--json FILE]

B 1, Hq 8, Hkv 8 (and 2). FLOPs: 4*D per visible (query, key) forward, 14*D forward + backward (SDPA does the same: the
logits anew, then four products). ceiling: our FLOP rate over that of a large matrix product in the same run, which is
PyTorch's own product: more than 1 means that our inner loops are faster than that product. The window rows give SDPA
the same boolean mask, the bias rows the same float mask; making the mask is not timed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.common import Row, alternate, gemm_rate, options, report, visible
from kvcompress import ops

SIZES = {"full": (7, 1), "quick": (3, 2), "tiny": (1, 64)}  # repetitions, and what lengths are divided by


def main() -> None:
    choice = options(__doc__)
    (repeats, part), rate = SIZES[choice.size], gemm_rate(choice.size)
    rows = []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for kind, T, D, Hkv in (
        ("causal", 4096, 64, 8), ("causal", 4096, 128, 8), ("causal", 4096, 128, 2),
        ("window", 8192, 64, 8), ("complement", 8192, 64, 8), ("bias", 4096, 64, 8),
    ):  # fmt: skip
        T //= part
        q = torch.randn(1, 8, T, D, requires_grad=True)
        k, v = (torch.randn(1, Hkv, T, D, requires_grad=True) for _ in range(2))
        grad = torch.randn(1, 8, T, D)
        masks = {"window": min(1024, T // 4), "sinks": 16} if kind in ("window", "complement") else {}
        if kind == "complement":
            masks["complement"] = True
        seen = visible(T, **masks) if masks or kind == "bias" else None
        bias = torch.randn(1, Hkv, T) if kind == "bias" else None
        pairs = T * (T + 1) // 2 if seen is None else int(seen.sum())
        mask = seen
        if bias is not None:
            own = torch.eye(T, dtype=torch.bool)
            mask = torch.where(own, 0.0, bias[:, :, None, :]).masked_fill(~seen, float("-inf"))

        def ours(q=q, k=k, v=v, masks=masks, bias=bias):
            return ops.attention(q, k, v, key_bias=bias, **masks)[0]

        def peer(q=q, k=k, v=v, mask=mask):
            return sdpa(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)

        def both(forward, grad=grad):
            forward().backward(grad)

        with torch.no_grad():
            forward = alternate(repeats, ours, peer)
        backward = alternate(repeats, lambda ours=ours: both(ours), lambda peer=peer: both(peer))
        name = f"float32/T{T}/D{D}/Hkv{Hkv}"
        for what, times, flops in (("forward", forward, 4), ("forward+backward", backward, 14)):
            done = flops * D * 8 * pairs
            note = f"{done / times[0] / 1e9:.0f} GFLOP/s; SDPA {done / times[1] / 1e9:.0f}"
            peer_name = {"causal": "SDPA, causal", "bias": "SDPA, float mask"}.get(kind, "SDPA, boolean mask")
            ceiling = done / times[0] / rate
            rows.append(Row(f"attention/{kind}/{what}/{name}", *times, peer_name, ceiling, None, note))
    report(rows, choice.json, gemm_flops=rate)


if __name__ == "__main__":
    main()
