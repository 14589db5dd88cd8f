"""A real model retrofitted with DMS on two CPU cores: decisions fitted to KVzip's scores, then trained by distillation.

    python benchmarks/quality/witness_dms.py --out FOLDER [--quick]

SmolLM2-135M-Instruct. Text: the books to tune by (parts/books.py), in pieces of a row; every second row is half a
piece, the words of KVzip's second reading, and that half once more, so that what is far away is needed.
FOLDER/fitted2, FOLDER/fitted4: DMS whose decisions are said by the token itself, in the neuron of the keys that costs
least without it, one ridge regression per layer (kvcompress.dmc.fit), for 2 and for 4 tokens an entry. FOLDER: trained
from the first, the weights of attention alone, the loss being the KL divergence to the model as it was, the ratio going
from 2 to 4; checkpoints are models on the way.
A run that was cut goes on from its newest checkpoint. FOLDER/run.json holds settings, the fit and the curve.

    python benchmarks/quality/witness.py --converted FOLDER/fitted2 FOLDER/fitted4 FOLDER --question later

measures what they then know of texts that they were not made with, beside caches of the model as it is.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import TrainingArguments

sys.path.append(str(Path(__file__).resolve().parents[2]))
import kvcompress
from benchmarks.common import machine
from benchmarks.quality.parts.books import books_of
from kvcompress import KVzip, dmc
from kvcompress.framing import framing_of
from kvcompress.retrofit import RetrofitTrainer
from kvcompress.retrofit.data import collate


@dataclass(frozen=True)
class Sizes:
    """fitted: texts of the fit. length: tokens of a row. rows, accumulation: of a step. ramp, solidify: steps with the
    ratio rising, and at the target with the learning rate falling. save: steps between checkpoints. window: dms_window.
    """

    fitted: int = 44
    length: int = 1024
    rows: int = 2
    accumulation: int = 2
    ramp: int = 150
    solidify: int = 100
    save: int = 50
    window: int = 64
    first_ratio: float = 2.0
    ratio: float = 4.0
    learning_rate: float = 2e-4


SIZES = {"full": Sizes(), "quick": Sizes(fitted=6, length=512, rows=1, accumulation=1, ramp=2, solidify=2, save=2)}


def pieces(tokenizer: Any, length: int, seed: int) -> list[list[int]]:
    """All books as ids in pieces of one length, shuffled."""
    found = []
    for _, text, _ in books_of("tune"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found += [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    random.Random(seed).shuffle(found)
    return found


def said_again(tokenizer: Any, piece: Sequence[int], length: int) -> list[int]:
    """Half a piece, what asks for it again, and that half."""
    framing, pruner = framing_of(tokenizer, raw=False), KVzip().with_tokenizer(tokenizer)
    begin, asked = framing.begin, [*pruner.prompt, *pruner.suffix]
    half = list(piece[: (length - len(begin) - len(asked)) // 2])
    row = [*begin, *half, *asked, *half]
    return row + list(piece[len(half) :])[: length - len(row)]


def fitted(model: Any, tokenizer: Any, out: Path, sizes: Sizes) -> dict[str, Any]:
    begin, framing = time.time(), framing_of(tokenizer, raw=False)
    every = pieces(tokenizer, sizes.length, seed=1)
    costs = dmc.neuron_costs(model, torch.tensor([piece[:512] for piece in every[-2:]]))
    neuron = int(costs.argmin())
    print(f"neuron {neuron}: {costs[neuron]:+.4f} nats, the last one {costs[-1]:+.4f}", flush=True)
    config = dmc.DMCConfig(mode="dms", dms_window=sizes.window, dms_decides="own", neuron=neuron, shift=0.0)
    texts = (torch.tensor([*framing.begin, *piece]) for piece in every[: sizes.fitted])
    pruner = KVzip(mass=True).with_tokenizer(tokenizer)
    found = dmc.fit(model, config, texts, pruner, ratio=sizes.first_ratio)
    for ratio in (sizes.first_ratio, sizes.ratio):
        found.set_ratio(model, ratio)
        model.save_pretrained(out / f"fitted{ratio:g}")
        tokenizer.save_pretrained(out / f"fitted{ratio:g}")
    mean = sum(map(sum, found.r2)) / sum(map(len, found.r2))
    print(f"fitted in {time.time() - begin:.0f} s, R2 {mean:.3f}", flush=True)
    return {"neuron": neuron, "neuron_costs": costs.tolist(), "r2_mean": mean, "r2": found.r2}


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--out", type=Path, required=True)
    parse.add_argument("--quick", action="store_true", help="a few steps")
    choice = parse.parse_args()
    sizes, out = SIZES["quick" if choice.quick else "full"], choice.out
    out.mkdir(parents=True, exist_ok=True)
    log = out / "fit.json"
    if not log.is_file():
        plain, tokenizer = kvcompress.load_example_model("smollm2")
        log.write_text(json.dumps(fitted(plain, tokenizer, out, sizes)))
    teacher, tokenizer = kvcompress.load_example_model("smollm2")
    model = kvcompress.from_pretrained(out / f"fitted{sizes.first_ratio:g}", dtype=torch.float32)
    for name, weight in model.named_parameters():
        weight.requires_grad_(".self_attn." in name)
    rows = [
        said_again(tokenizer, piece, sizes.length) if number % 2 else list(piece)
        for number, piece in enumerate(pieces(tokenizer, sizes.length, seed=0))
    ]
    recipe = dmc.DMCRecipe(
        target_ratio=sizes.ratio, start_ratio=sizes.first_ratio, anneal_steps=0, ramp_steps=sizes.ramp,
        solidify_steps=sizes.solidify, warmup_steps=10,
    )  # fmt: skip
    args = TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=sizes.rows, gradient_accumulation_steps=sizes.accumulation,
        learning_rate=sizes.learning_rate, weight_decay=0.0, adam_beta2=0.95, max_grad_norm=1.0, bf16=True,
        use_cpu=True, save_steps=sizes.save, save_total_limit=2, logging_steps=5, report_to="none", seed=0,
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = RetrofitTrainer(
        model, args, recipe, teacher=teacher, distillation=1.0, tokenizer=tokenizer, data_collator=collate,
        train_dataset=datasets.Dataset.from_dict({"input_ids": rows}),
    )  # fmt: skip
    begin = time.time()
    trainer.train(resume_from_checkpoint=any(out.glob("checkpoint-*")) or None)
    trainer.save_model(str(out))
    tokenizer.save_pretrained(out)
    tokens = recipe.steps * sizes.rows * sizes.accumulation * sizes.length
    about = {"machine": machine(), "sizes": asdict(sizes), "tokens": tokens, "seconds": time.time() - begin}
    about |= {"fit": json.loads(log.read_text()), "curve": [x for x in trainer.state.log_history if "loss" in x]}
    (out / "run.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
