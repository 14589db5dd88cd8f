"""Whether a number added to a stored key's logits brings back what was dropped: attention matching's mass correction.

    python benchmarks/quality/bias.py [--quick] [--json FILE] [--split tune|report] [--texts N]

KVzip(mass=True) with GlobalTopK cuts passages of 1,000 tokens (witness.py's) to 1/16 and 1/32. What stays gets less
attention in all than the whole text did; a bias on its logits can give that back. The passage is read once more behind
itself, as KVzip does; biases are fitted to the attention of its queries, so that the sum over what stays is the sum
over all (squared relative errors, weighed by the squared share of attention that the passage gets there, of 500 queries
of a KV head; Adam, 50 steps of 0.1, squared biases times `ridge` beside), from -4 to 6:

none      the cache as it is
head      one bias for all keys of a KV head, solved for, from -2 to 6
key       one for each key, by ridge

Measured as in witness.py, by attention of the dense model with biases on what stays and minus infinity on what does
not: what a cache that held them would compute. over none: differences of the same passages.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import load, parse_arguments, parser, print_table, write_json
from benchmarks.quality.parts.books import SPLITS
from benchmarks.quality.parts.measures import sizes_of, tidy
from benchmarks.quality.witness import METHODS, books_and_origins, spec_of
from kvcompress.evaluate.measure import Mean
from kvcompress.evaluate.prose import Prose, passage
from kvcompress.evaluate.reading import Following, Reader
from kvcompress.hf.argument import CACHE
from kvcompress.pruners import KVzip
from kvcompress.reading.framing import framing_of

NAME = "biased"
QUERIES, STEPS, RATE = 500, 50, 0.1
Biases = dict[int, Tensor]  # [Hkv, T] by layer


@dataclass(frozen=True)
class Sizes:
    length: int = 1000
    texts: int = 8
    scored: int = 96
    shares: tuple[float, ...] = (1 / 16, 1 / 32)
    ridges: tuple[float, ...] = (1.0, 10.0)


SIZES = {
    "full": Sizes(),
    "quick": Sizes(texts=1, shares=(1 / 16,), ridges=(10.0,)),
    "tiny": Sizes(length=1200, texts=2, scored=16, shares=(1 / 8,), ridges=(10.0,)),
}


class Biased:
    """Attention of a plain model that adds `biases` to the logits of its first keys, and notes queries and keys of the
    first row in `seen`, if that is there."""

    def __init__(self) -> None:
        self.biases: Biases | None = None
        self.seen: dict[int, tuple[Tensor, Tensor]] | None = None

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **others: Any
    ) -> tuple[Tensor, None]:
        groups, S, T = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
        if self.seen is not None:
            self.seen[module.layer_idx] = query[0], key[0]
        added = torch.zeros(query.shape[1], S, T)
        if self.biases is not None:
            own = self.biases[module.layer_idx]
            added[:, :, : own.shape[1]] = own.repeat_interleave(groups, 0)[:, None]
        added = added.masked_fill(~torch.ones(S, T, dtype=torch.bool).tril(T - S), -torch.inf)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, added[None].to(query.dtype), scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None


@torch.no_grad()
def followed(model: Any, cache: DynamicCache, texts: Sequence[Following]) -> list[tuple[float, bool]]:
    """(nats of what is wanted, whether each of it is the likeliest) of each, behind a copy of the cache."""
    found = []
    for text in texts:
        ids = torch.tensor([list(text.ids)])
        logits = model(ids[:, :-1], **{CACHE: copy.deepcopy(cache)}).logits[0].float()
        begin, end = text.wanted[0]
        part, wanted = logits[begin - 1 : end - 1], ids[0, begin:end]
        nats = torch.nn.functional.cross_entropy(part, wanted, reduction="sum")
        found.append((float(nats), bool((part.argmax(-1) == wanted).all())))
    return found


def of_head(shares: Tensor, context: Tensor) -> float:
    """The logarithm of the number by which shares [n, keys] are to be multiplied. context: [n]."""
    sums, weights = shares.sum(1), context**2
    return float(((weights * sums).sum() / (weights * sums**2).sum()).log().clamp(-2, 6))


def of_keys(shares: Tensor, context: Tensor, ridge: float) -> Tensor:
    """The same for each key."""
    weights = context**2 / (context**2).sum()
    with torch.enable_grad():
        biases = torch.zeros(shares.shape[1], requires_grad=True)
        optimizer = torch.optim.Adam([biases], lr=RATE)
        for _ in range(STEPS):
            loss = (weights * (shares @ biases.exp() - 1) ** 2).sum() + ridge * (biases**2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return biases.detach().clamp(-4, 6)


def biases_of(
    seen: dict[int, tuple[Tensor, Tensor]], kept: Any, length: int, words: int, ridges: Sequence[float]
) -> dict[str, Biases]:
    """By name. seen: queries and keys of the passage, `words` tokens that ask for it, and the passage again."""
    found: dict[str, Biases] = {name: {} for name in ("none", "head", *(f"key, {x:g}" for x in ridges))}
    for layer, (queries, keys) in seen.items():
        heads, groups, scale = len(keys), len(queries) // len(keys), keys.shape[-1] ** -0.5
        for own in found.values():
            own[layer] = torch.full((heads, length), -torch.inf)
        for head in range(heads):
            places = kept[layer][0][head]
            places = places[places < length]
            drawn = torch.Generator().manual_seed(head)
            again = queries[head * groups : (head + 1) * groups, length + words :].float()
            S = again.shape[1]
            picked = torch.randperm(groups * S, generator=drawn)[:QUERIES]
            asked = again.flatten(0, 1)[picked]
            to_text = scale * asked @ keys[head, :length].float().T
            behind = scale * asked @ keys[head, length:].float().T
            ends = (picked % S + words)[:, None]
            behind = behind.masked_fill(torch.arange(behind.shape[1]) > ends, -torch.inf)
            whole = to_text.logsumexp(1)
            context = (whole - torch.logaddexp(whole, behind.logsumexp(1))).exp()
            shares = (to_text[:, places] - whole[:, None]).exp()
            found["none"][layer][head, places] = 0.0
            found["head"][layer][head, places] = of_head(shares, context)
            for ridge in ridges:
                found[f"key, {ridge:g}"][layer][head, places] = of_keys(shares, context, ridge)
    return found


def scores_of(texts: Sequence[Following], found: Sequence[tuple[float, bool]]) -> dict[str, float]:
    said = [(text.kind, right) for text, (_, right) in zip(texts, found, strict=True)]
    numbers = [right for kind, right in said if kind == "number"]
    sentences = [right for kind, right in said if kind == "sentence"]
    bits = found[0][0] / math.log(2) / (len(texts[0].ids) - 1)
    return {"bits": bits, "numbers": sum(numbers) / len(numbers), "sentence": sum(sentences) / len(sentences)}


@torch.no_grad()
def measured(reader: Reader, plain: Any, biased: Biased, read: Any, sizes: Sizes) -> dict[tuple[str, float], Any]:
    """Scores by name and share; of the dense model at a share of 1."""
    framing = framing_of(reader.tokenizer, raw=False)
    prose = Prose("later", sizes.length, (read,), framing)
    texts = [text for text in prose.followings(0) if text.kind != "turn"]
    asks = KVzip().with_tokenizer(reader.tokenizer)
    words = [*asks.prompt, *asks.suffix]
    ids, biased.seen = read.context, {}
    plain(torch.tensor([ids + words + ids]), logits_to_keep=1)
    seen, biased.seen = biased.seen, None
    cache = DynamicCache(config=plain.config)
    plain(torch.tensor([ids]), logits_to_keep=1, **{CACHE: cache})
    found = {("dense", 1.0): scores_of(texts, followed(plain, cache, texts))}
    for share in sizes.shares:
        spec = reader.spec.sized(round(share * len(ids)))
        kept = Reader(reader.model, reader.tokenizer, spec).read(ids).kept_positions()  # type: ignore[attr-defined]
        for name, own in biases_of(seen, kept, len(ids), len(words), sizes.ridges).items():
            biased.biases = own
            found[name, share] = scores_of(texts, followed(plain, cache, texts))
        biased.biases = None
    return found


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--split", choices=SPLITS, default="report", help="of the books (default: report)")
    parse.add_argument("--texts", type=int, help="passages (default: 8)")
    choice = parse_arguments(parse)
    sizes = sizes_of(choice, SIZES)
    books, origins = books_and_origins(choice)
    name = "example" if choice.size == "tiny" else "smollm2"
    (model, tokenizer), (plain, _) = load(name, "cpu"), load(name, "cpu")
    biased = Biased()
    AttentionInterface.register(NAME, biased)
    AttentionMaskInterface.register(NAME, lambda *args, **options: None)
    plain.set_attn_implementation(NAME)
    framing, spec = framing_of(tokenizer, raw=False), spec_of(METHODS["KVzip with mass, GlobalTopK"])
    samples: dict[tuple[str, float], list[dict[str, float]]] = {}
    with kvcompress.attach(model):
        for text in range(sizes.texts):
            begin = time.process_time()
            read = passage(framing, books, sizes.length, text, sizes.scored)
            for key, scores in measured(Reader(model, tokenizer, spec), plain, biased, read, sizes).items():
                samples.setdefault(key, []).append(scores)
            print(f"passage {text} ({read.book}): {time.process_time() - begin:.1f} s", file=sys.stderr)
    rows, lines = [], []
    for (method, share), own in samples.items():
        row: dict[str, Any] = {"name": f"bias/{choice.split}/{method}/keep{share:g}", "method": method, "share": share}
        base = samples["none", share] if method != "dense" else own
        for field in own[0]:
            scores = tuple(x[field] for x in own)
            over = Mean(tuple(x - y[field] for x, y in zip(scores, base, strict=True)))
            row |= {field: Mean(scores).value, f"{field}_samples": list(scores), f"{field}_over_none": over.value,
                    f"{field}_over_none_se": over.error}  # fmt: skip
        lost = Mean(tuple(x["bits"] - y["bits"] for x, y in zip(own, samples["dense", 1.0], strict=True)))
        row["bits_over_dense"] = lost.value
        rows.append(row)
        error = row["bits_over_none_se"] or 0.0
        lines.append((method, f"{share:g}", f"{lost.value:+.3f}", f"{row['bits_over_none']:+.3f} +-{error:.3f}",
                      f"{row['numbers']:.3f}", f"{row['sentence']:.3f}"))  # fmt: skip
    print_table(f"{sizes.length:,} tokens, {sizes.texts} passages",
                ("bias", "keeps", "+bits", "over none", "numbers", "sentence"), lines, left=("bias",))  # fmt: skip
    if choice.json is not None:
        write_json(choice.json, tidy(rows), model=name, dtype=str(model.dtype), split=choice.split, books=origins)


if __name__ == "__main__":
    main()
