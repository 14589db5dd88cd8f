"""The distance to a teacher's next tokens, forward and backward, against the same written as PyTorch's operations.

    python benchmarks/speed/distillation.py [--quick] [--json FILE]

Logits of 2 rows of 1,024 tokens in bfloat16, vocabularies of SmolLM2 and of Llama 3; all tokens have labels. The peer
is kl_div of float32 log-softmaxes, as a Trainer's compute_loss would have it. Bytes: both logits read, the gradient
written.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.common import Row, alternate, options, read_bandwidth, report
from kvcompress.retrofit.distillation import distance

SIZES = {"full": (5, 1024, (49152, 128256)), "quick": (3, 1024, (49152,)), "tiny": (1, 8, (64,))}


def main() -> None:
    choice = options(__doc__)
    repeats, length, vocabularies = SIZES[choice.size]
    bandwidth, rows = read_bandwidth(choice.size), []
    for V in vocabularies:
        torch.manual_seed(0)
        made = 3 * torch.randn(2, length, V)
        logits, teacher = made.bfloat16().requires_grad_(True), (made + 0.3 * torch.randn_like(made)).bfloat16()
        labels = torch.randint(V, (2, length))
        del made

        def ours(logits: Tensor = logits, teacher: Tensor = teacher, labels: Tensor = labels) -> None:
            logits.grad = None
            distance(logits, teacher, labels).divergence.backward()

        def peer(logits: Tensor = logits, teacher: Tensor = teacher) -> None:
            logits.grad = None
            own, theirs = (x[:, :-1].float().log_softmax(-1) for x in (logits, teacher))
            functional.kl_div(own, theirs, log_target=True, reduction="sum").backward()

        found = alternate(repeats, ours, peer)
        nbytes = 3 * logits.nbytes
        rows.append(
            Row(f"distillation/T{2 * length}/V{V}", *found, "kl_div", nbytes / bandwidth / found[0], nbytes)
        )  # fmt: skip
    report(rows, choice.json)


if __name__ == "__main__":
    main()
