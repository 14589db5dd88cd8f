"""Pruning models of other shapes, random weights: how far are the next tokens' probabilities from the dense cache's?

    python benchmarks/quality/shapes.py [--quick] [--json FILE] [shapes ...]

Random models know nothing to recall, so that only this can be asked of them: the Kullback-Leibler divergence of the
probabilities over a dense cache from those over a pruned one, nats per token, in the text that follows a prompt. Heads
of a random model attend by chance, each to other places; a trained model's often to the same few.
Shapes: GQA as the example model's, one KV head for all (mqa), as many as query heads (mha), deep and narrow, a norm of
queries and keys (qwen3), sliding layers and softcapped logits (gemma2), sinks (gpt_oss); weights are drawn so that
attention is sharp. Prompts of 1,024 bytes of held-out source, 1/4 and 1/16 of their tokens stay, pages of 8.

Rows shapes/<shape>/<method>/keep<share>: divergence, its standard error over prompts, of_random: over Random's of the
same shape and share.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import parse_arguments, parser, print_table, write_json
from benchmarks.quality.parts.measures import tidy
from benchmarks.quality.parts.tasks import Writer, standard_error
from kvcompress import AdaKV, GlobalTopK, KeyDiff, KVzip, PrunedCache, Replay, SnapKV
from kvcompress.models.tokenizer import byte_tokenizer
from kvcompress.pruners import H2O, ExpectedAttention, Random, StreamingLLM

SHARP = 0.12  # standard deviation of weights
SLIDING = {"sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"] * 2}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("llama", {}),
    "mqa": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32}),
    "mha": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32}),
    "deep": ("llama", {"num_hidden_layers": 12, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {**SLIDING, "query_pre_attn_scalar": 64}),
    "gpt_oss": ("gpt_oss", {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": PLAIN}),
}  # fmt: skip
Make = Callable[[Any, float], PrunedCache]
METHODS: dict[str, Make] = {
    "Replay, GlobalTopK": lambda config, keep: PrunedCache(config, Replay(), GlobalTopK(), keep=keep, page_size=8),
    "KVzip, GlobalTopK": lambda config, keep: PrunedCache(config, KVzip(), GlobalTopK(), keep=keep, page_size=8),
    "KeyDiff, GlobalTopK": lambda config, keep: PrunedCache(config, KeyDiff(), GlobalTopK(), keep=keep, page_size=8),
    "Replay": lambda config, keep: PrunedCache(config, Replay(), keep=keep, page_size=8),
    "SnapKV, AdaKV": lambda config, keep: PrunedCache(config, SnapKV(), AdaKV(), keep=keep, page_size=8),
    "SnapKV": lambda config, keep: PrunedCache(config, SnapKV(), keep=keep, page_size=8),
    "H2O": lambda config, keep: PrunedCache(config, H2O(), keep=keep, page_size=8),
    "ExpectedAttention": lambda config, keep: PrunedCache(config, ExpectedAttention(), keep=keep, page_size=8),
    "StreamingLLM": lambda config, keep: PrunedCache(config, StreamingLLM(), keep=keep, page_size=8),
    "Random": lambda config, keep: PrunedCache(config, Random(), keep=keep, page_size=8),
}


@dataclass(frozen=True)
class Sizes:
    shapes: tuple[str, ...] = tuple(SHAPES)
    length: int = 1024
    scored: int = 128
    texts: int = 6
    parts: tuple[int, ...] = (4, 16)


SIZES = {
    "full": Sizes(),
    "quick": Sizes(shapes=("gqa", "mha"), texts=2, length=512, parts=(4,)),
    "tiny": Sizes(shapes=("gemma2",), texts=2, length=128, scored=16, parts=(4,)),
}


def model_of(shape: str) -> PreTrainedModel:
    torch.manual_seed(0)
    family, changes = SHAPES[shape]
    fields = {
        "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
        "initializer_range": SHARP, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**fields | changes)).eval()


@torch.no_grad()
def predicted(model: PreTrainedModel, cache: Any, prompt: Tensor, following: Tensor) -> Tensor:
    """float32 [scored, vocabulary]: logarithms of probabilities, teacher forced, over what the cache keeps of it."""
    if isinstance(cache, PrunedCache):
        kvcompress.prefill(model, torch.cat([prompt, following[:, :1]], 1), cache)
    else:
        model(prompt, past_key_values=cache)
    return model(following, past_key_values=cache).logits[0].float().log_softmax(-1)


def run(sizes: Sizes) -> list[dict[str, Any]]:
    pieces = torch.tensor(Writer(byte_tokenizer()).source(sizes.texts, sizes.length + sizes.scored))[:, None]
    rows = []
    for shape in sizes.shapes:
        model = model_of(shape)
        texts = [piece.split([sizes.length, sizes.scored], 1) for piece in pieces]
        dense = [predicted(model, DynamicCache(config=model.config), *text) for text in texts]
        with kvcompress.attach(model):
            for part in sizes.parts:
                made = [row_of(model, shape, name, part, texts, dense) for name in METHODS]
                rows += [row | {"of_random": row["divergence"] / made[-1]["divergence"]} for row in made]
        print(shape, file=sys.stderr, flush=True)
    return tidy(rows)


def row_of(model: PreTrainedModel, shape: str, method: str, part: int, texts: list[Any], dense: list[Tensor]
           ) -> dict[str, Any]:  # fmt: skip
    divergences = []
    for text, exact in zip(texts, dense, strict=True):
        found = predicted(model, METHODS[method](model.config, 1 / part), *text)
        divergences.append((exact.exp() * (exact - found)).sum(-1).mean().item())
    return {
        "name": f"shapes/{shape}/{method}/keep{1 / part:g}", "shape": shape, "method": method, "part": part,
        "divergence": statistics.mean(divergences), "divergence_se": standard_error(divergences),
    }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    for part in dict.fromkeys(row["part"] for row in rows):
        by = {(row["shape"], row["method"]): row for row in rows if row["part"] == part}
        lines = [(name, *(f"{by[shape, name]['of_random']:.2f}" for shape in shapes)) for name in METHODS]
        print_table(f"1/{part} of the tokens: divergence over Random's", ("method", *shapes), lines, left=("method",))


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("shapes", nargs="*", choices=[*SHAPES, []], help="these alone")
    choice = parse_arguments(parse)
    sizes = SIZES[choice.size]
    if choice.shapes:
        sizes = Sizes(tuple(choice.shapes), sizes.length, sizes.scored, sizes.texts, sizes.parts)
    rows = run(sizes)
    show(rows)
    if choice.json is not None:
        write_json(choice.json, rows)


if __name__ == "__main__":
    main()
