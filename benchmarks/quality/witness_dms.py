"""A real model retrofitted with DMS on two CPU cores: decisions fitted to KVzip's scores, then trained by distillation.

    python benchmarks/quality/witness_dms.py --out FOLDER [--quick] [--json FILE]

SmolLM2-135M-Instruct. Text: the books to tune by (parts/books.py), in pieces of a row; every second row is half a
piece, the words of KVzip's second reading, and that half once more, so that what is far away is needed.
FOLDER/fitted2, FOLDER/fitted4: DMS whose decisions are said by the token itself, in the neuron of the keys that costs
least without it, one ridge regression per layer (kvcompress.dmc.fit), for 2 and for 4 tokens an entry. FOLDER: trained
from the first, the weights of attention alone, the loss being the KL divergence to the model as it was, the ratio going
from 2 to 4; checkpoints are models on the way. FOLDER/far: trained on from there, on rows twice as long, at 4.
A run that was cut goes on from its newest checkpoint. --json: the fit, and the curves of training: the target and the
measured ratio, and the KL divergence in nats a token, each the mean of five steps.

    python benchmarks/quality/witness.py --converted FOLDER/fitted2 FOLDER/fitted4 FOLDER FOLDER/far --question later

measures what they then know of texts that they were not made with, beside caches of the model as it is.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import TrainingArguments

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import load, parse_arguments, parser, print_table, write_json
from benchmarks.quality.parts.books import books_of, text_of
from kvcompress import KVzip, dmc
from kvcompress.dmc.costs import said_again
from kvcompress.retrofit import RetrofitTrainer
from kvcompress.retrofit.data import collate
from kvcompress.support.checks import need


@dataclass(frozen=True)
class Sizes:
    """fitted: texts of the fit. length: tokens of a row. rows, accumulation: of a step. ramp, solidify: steps with the
    ratio rising, and at the target with the learning rate falling. far: steps of rows twice as long, half as many.
    save: steps between checkpoints. window: dms_window.
    """

    fitted: int = 44
    length: int = 1024
    rows: int = 2
    accumulation: int = 2
    ramp: int = 150
    solidify: int = 100
    far: int = 250
    save: int = 50
    window: int = 64
    first_ratio: float = 2.0
    ratio: float = 4.0
    learning_rate: float = 2e-4


SIZES = {
    "full": Sizes(),
    "quick": Sizes(fitted=6, length=512, rows=1, accumulation=1, ramp=5, solidify=5, far=5, save=10),
    "tiny": Sizes(fitted=6, length=128, rows=1, accumulation=1, ramp=5, solidify=5, far=5, save=10, window=8),
}
FIT = "fit.json"  # in the folder: what the fit was, once it is done
LOGGED = 5  # steps of a point of the curve


def pieces(tokenizer: Any, books: Sequence[str], length: int, seed: int) -> list[list[int]]:
    """All books as ids in pieces of one length, shuffled."""
    found = []
    for text in books:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found += [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    random.Random(seed).shuffle(found)
    return found


def said_twice(tokenizer: Any, piece: Sequence[int], length: int) -> list[int]:
    """Half a piece, what asks for it again, and that half; a row of the length."""
    row = said_again(KVzip().with_tokenizer(tokenizer), torch.tensor(piece), length).tolist()
    return row + list(piece[length // 2 :])[: length - len(row)]


def fitted(model: Any, tokenizer: Any, books: Sequence[str], out: Path, sizes: Sizes) -> dict[str, Any]:
    """Writes fitted<ratio>; what it did."""
    begin, every = time.time(), pieces(tokenizer, books, sizes.length, seed=1)
    again = said_twice(tokenizer, every[-2], sizes.length)
    costs = dmc.neuron_costs(model, torch.tensor([again, every[-1]]), mode="dms")
    neuron = int(costs.argmin())
    config = dmc.DMCConfig(mode="dms", dms_window=sizes.window, dms_decides="own", neuron=neuron, shift=0.0)
    texts = (torch.tensor(piece) for piece in every[: sizes.fitted])
    found = dmc.fit(model, config, texts, KVzip(mass=True).with_tokenizer(tokenizer), ratio=sizes.first_ratio)
    for ratio in (sizes.ratio, sizes.first_ratio):
        found.set_ratio(model, ratio)
        model.save_pretrained(out / f"fitted{ratio:g}")
        tokenizer.save_pretrained(out / f"fitted{ratio:g}")
    mean = sum(map(sum, found.r2)) / sum(map(len, found.r2))
    return {"neuron": neuron, "neuron_nats": float(costs[neuron]), "last_neuron_nats": float(costs[-1]),
            "r2_mean": mean, "r2": found.r2, "seconds": time.time() - begin}  # fmt: skip


def trained(teacher: Any, tokenizer: Any, books: Sequence[str], out: Path, sizes: Sizes) -> list[dict[str, Any]]:
    """Trains what was fitted, or goes on; the curve."""
    recipe = dmc.DMCRecipe(
        target_ratio=sizes.ratio, start_ratio=sizes.first_ratio, anneal_steps=0, ramp_steps=sizes.ramp,
        solidify_steps=sizes.solidify, warmup_steps=10,
    )  # fmt: skip
    first = out / f"fitted{sizes.first_ratio:g}"
    return stage("trained", teacher, tokenizer, books, first, out, sizes, recipe, seed=0)


def far(teacher: Any, tokenizer: Any, books: Sequence[str], out: Path, sizes: Sizes) -> list[dict[str, Any]]:
    """Trains what was trained on rows twice as long, of which a step has as many tokens; the curve."""
    recipe = dmc.DMCRecipe(
        target_ratio=sizes.ratio, start_ratio=sizes.ratio, anneal_steps=0, ramp_steps=0, solidify_steps=sizes.far,
        warmup_steps=10,
    )  # fmt: skip
    longer = replace(sizes, length=2 * sizes.length, rows=max(sizes.rows // 2, 1))
    return stage("far", teacher, tokenizer, books, out, out / "far", longer, recipe, seed=2)


def stage(
    name: str, teacher: Any, tokenizer: Any, books: Sequence[str], first: Path, out: Path, sizes: Sizes,
    recipe: dmc.DMCRecipe, seed: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Trains the model of a folder into another, or goes on there. seed: of the order of the rows."""
    model = kvcompress.from_pretrained(first, dtype=torch.float32)
    for weight_name, weight in model.named_parameters():
        weight.requires_grad_(".self_attn." in weight_name)
    rows = [
        said_twice(tokenizer, piece, sizes.length) if number % 2 else list(piece)
        for number, piece in enumerate(pieces(tokenizer, books, sizes.length, seed))
    ]
    args = TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=sizes.rows, gradient_accumulation_steps=sizes.accumulation,
        learning_rate=sizes.learning_rate, weight_decay=0.0, adam_beta2=0.95, max_grad_norm=1.0, bf16=True,
        use_cpu=True, save_steps=sizes.save, save_total_limit=2, logging_steps=LOGGED, report_to="none", seed=0,
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = RetrofitTrainer(
        model, args, recipe, teacher=teacher, distillation=1.0, tokenizer=tokenizer, data_collator=collate,
        train_dataset=datasets.Dataset.from_dict({"input_ids": rows}),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=any(out.glob("checkpoint-*")) or None)
    trainer.save_model(str(out))
    tokenizer.save_pretrained(out)
    tokens = sizes.rows * sizes.accumulation * sizes.length
    return [
        {"name": f"{name}/{line['step']}", "tokens": tokens * line["step"], "target_ratio": line["target_ratio"],
         "ratio": line["ratio_hard"], "kl_nats": line["distillation_loss"]}
        for line in trainer.state.log_history if "distillation_loss" in line
    ]  # fmt: skip


def run(out: Path, size: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    sizes, name = SIZES[size], "example" if size == "tiny" else "smollm2"
    if size == "tiny":  # this repository's own pages, which need no package
        books = [text_of(sorted((Path(__file__).resolve().parents[2] / "docs").glob("*.md")))]
    else:
        books = [text for _, text, _ in books_of("tune")]
    if not (out / FIT).is_file():
        model, tokenizer = load(name, "cpu")
        found = fitted(model, tokenizer, books, out, sizes)
        (out / FIT).write_text(json.dumps({"sizes": asdict(sizes), **found}) + "\n")
    teacher, tokenizer = load(name, "cpu")
    found = json.loads((out / FIT).read_text())
    need(found.pop("sizes") == asdict(sizes), f"out must be a folder of a run of the same sizes, got {out}")
    rows: list[dict[str, Any]] = [{"name": "fitted", **found}]
    rows += trained(teacher, tokenizer, books, out, sizes)
    rows += far(teacher, tokenizer, books, out, sizes)
    return rows, {"model": name, "sizes": asdict(sizes)}


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--out", type=Path, help="folder for the models (default: none stays)")
    choice = parse_arguments(parse)
    with tempfile.TemporaryDirectory() as temporary:
        out = choice.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        rows, about = run(out, choice.size)
    first, curve = rows[0], rows[1:]
    title = f"R2 {first['r2_mean']:.3f}, neuron {first['neuron']}, fitted in {first['seconds']:.0f} s"
    lines = [[f"{row[x]:,.4g}" for x in ("tokens", "target_ratio", "ratio", "kl_nats")] for row in curve]
    print_table(title, ("tokens", "target", "ratio", "KL, nats"), lines)
    if choice.json is not None:
        write_json(choice.json, rows, **about)


if __name__ == "__main__":
    main()
