"""What gates cost: prompts and decoded tokens of a model with them, over the same without.

    python benchmarks/speed/gates.py [--quick] [--json FILE] [--model NAME]

SmolLM2-135M in bfloat16 and random gates of its sizes (what they say costs nothing). Two caches: GatedCache with a
window of 64, and PrunedCache with Gate and every=64; each against itself with gates that answer without looking, so
that the same tokens stay. Prompts of 1,000 and 4,000 tokens; 32 decoded tokens behind them. bytes: of all gates, which
a token has to read beside the model's own weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import Row, alternate, load, parse_arguments, parser, report
from kvcompress import Gate, GatedCache, GlobalTopK, PrunedCache
from kvcompress.hf.attach import base_model, facts_of
from kvcompress.pruners import Gates

SIZES = {"full": (7, (1000, 4000), 32), "quick": (3, (1000,), 8), "tiny": (1, (80,), 2)}


class Unasked(Gates):
    """Gates that answer without looking: every other token of a head is worth something."""

    def says(self, number: int, seen: Tensor) -> Tensor:
        B, _, S, _ = seen.shape
        answer = torch.ones(B, self.layers[number].heads, S, device=seen.device)
        answer[..., ::2] = -1
        return answer


class Asked(Gates):
    """Gates that look, and answer the same."""

    def says(self, number: int, seen: Tensor) -> Tensor:
        said = super().says(number, seen)
        answer = torch.ones_like(said)
        answer[..., ::2] = -1
        return answer


def gates_of(model: Any, kind: type[Gates]) -> Gates:
    facts = facts_of(base_model(model))
    made = torch.Generator().manual_seed(0)
    heads = base_model(model).config.num_attention_heads
    return kind(
        tuple(torch.randn(x.kv_heads, heads * x.head_dim + 1, generator=made) for x in facts.values()), (-1.0, 1.0)
    )


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--model", help="a Hugging Face model by name or folder (default: smollm2, example with --tiny)")
    choice = parse_arguments(parse)
    repeats, lengths, new = SIZES[choice.size]
    model, _ = load(choice.model or ("example" if choice.size == "tiny" else "smollm2"), "cpu")
    rows = []
    with kvcompress.attach(model), torch.inference_mode():
        caches: dict[str, Callable[[Gates], Any]] = {
            "gated": lambda gates: GatedCache(model.config, gates, threshold=0.0, window=64),
            "budget": lambda gates: PrunedCache(model.config, Gate(gates), GlobalTopK(), keep=0.5, every=64),
        }
        gates = [gates_of(model, kind) for kind in (Asked, Unasked)]
        nbytes = sum(x.nbytes for layer in gates[0].layers for x in layer.tensors().values())
        for length in lengths:
            torch.manual_seed(0)
            ids = torch.randint(model.config.vocab_size, (1, length + 1))
            for name, make in caches.items():

                def read(own: Gates, make: Callable[[Gates], Any] = make, ids: Tensor = ids) -> Any:
                    return kvcompress.prefill(model, ids, make(own))

                found = alternate(repeats, *(lambda own=own: read(own) for own in gates))  # type: ignore[misc]
                rows.append(Row(f"gates/{name}/prompt/T{length}", *found, "without", None, nbytes))
                held = [read(own) for own in gates]

                def write(number: int, held: list[Any] = held, ids: Tensor = ids) -> None:
                    cache = held[number].fork()
                    for _ in range(new):
                        model(ids[:, :1], past_key_values=cache)

                found = alternate(repeats, lambda: write(0), lambda: write(1))
                rows.append(Row(f"gates/{name}/{new}_tokens/T{length}", *found, "without", None, nbytes))
    report(rows, choice.json)


if __name__ == "__main__":
    main()
