"""Window scores (SnapKV) against the plain PyTorch formula; selection and compaction as a share of scoring.

    python benchmarks/score.py [--quick] [--json FILE]

Shape of one layer of Llama-3-8B: Hq 32, Hkv 8, D 128, W 64. Work: 2*Hq*W*T*D FLOP and as many exponentials as logits
(Hq*W*T); the ceiling is the GEMM rate measured in the same run. The peer is what a user would write: matmul, mask, fp32
softmax, mean, avg_pool1d; it holds [Hq, W, T] floats (256 MiB at T = 32,768), ours one KV head's (32 MiB).
"""

from __future__ import annotations

import torch
from common import Row, alternate, gemm_rate, options, report

from kvcompress import ops

HQ, HKV, D, W, KEPT = 32, 8, 128, 64, 2048


def plain(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    T = keys.shape[2]
    grouped = queries.reshape(1, HKV, HQ // HKV * W, D)
    logits = (grouped @ keys.transpose(2, 3) * D**-0.5).view(1, HKV, HQ // HKV, W, T)
    hidden = torch.ones(W, T, dtype=torch.bool).triu(T - W + 1)
    attention = logits.masked_fill(hidden, float("-inf")).softmax(-1, dtype=torch.float32)
    votes = attention[..., : T - W].mean(dim=(2, 3))
    return torch.nn.functional.avg_pool1d(votes, 5, 1, 2)


def main() -> None:
    choice = options(__doc__)
    rate = gemm_rate()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for T in (32768,) if choice.quick else (4096, 8192, 32768):
            queries, keys = torch.randn(1, HQ, W, D).to(dtype), torch.randn(1, HKV, T, D).to(dtype)
            torch.testing.assert_close(
                ops.window_scores(queries, keys), plain(queries, keys).float(), atol=1e-3, rtol=0.1
            )
            ours, peer = alternate(
                3 if choice.quick else 9, lambda q=queries, k=keys: ops.window_scores(q, k),
                lambda q=queries, k=keys: plain(q, k),
            )  # fmt: skip
            name = f"score/{str(dtype).removeprefix('torch.')}/T{T}/Hq{HQ}/Hkv{HKV}/D{D}/W{W}"
            share = 2 * HQ * W * T * D / ours / rate
            rows.append(Row(name, ours, peer, "matmul, mask, softmax, mean, avg_pool1d", share, keys.nbytes))

            scores = ops.window_scores(queries, keys)[0]
            buffers = [keys[0].clone() for _ in range(2)]

            def choose(scores=scores, buffers=buffers):
                indices = ops.select_topk(scores, KEPT)
                for buffer in buffers:
                    ops.compact_rows_(buffer, indices)

            chosen = alternate(5 if choice.quick else 15, choose)[0]
            note = f"{chosen / ours:.1%} of scoring; K and V"
            rows.append(Row(name.replace("score", "select+compact", 1) + f"/k{KEPT}", chosen, note=note))
    report(rows, choice.json, gemm_flop=rate)


if __name__ == "__main__":
    main()
