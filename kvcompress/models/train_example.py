"""Trains the small byte-level Llama that ships with the package.

    python -m kvcompress.models.train_example --minutes 110 --out example
    python -m kvcompress.models.train_example --minutes 70 --resume example --tasks 0.65 --out witness

Phase 1 teaches copying (permutation walks and repeated segments at length 128) until the loss on the second copy of a
random segment falls under 0.5; phase 2 mixes source text with recall tasks at growing length up to 2,048, half of the
steps shorter than that (a model trained at the full length alone forgets how to recall over short distances). --tasks
makes so many of the sequences from 1,024 on RULER's tasks (task_mixture.py). Runs on CPU or CUDA, under bfloat16
autocast. Wall time decides the schedule, so that the run ends when it was told to; figures are printed and written to
training.json beside the weights.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .task_mixture import TaskMixture, weighted_loss
from .text import fact, held_out_text, plant, question, random_name, random_pass_key, training_text
from .tokenizer import byte_tokenizer

TRAINED_LENGTH = 2048
TOKENS_PER_STEP = 8192
LEARNING_RATE = 1.5e-3
# (longest sequences, share of the time at which the next length begins)
LENGTHS = ((256, 0.28), (512, 0.46), (1024, 0.66), (TRAINED_LENGTH, 1.0))
TASK_LENGTHS = {512: 0.1, 1024: 0.4, TRAINED_LENGTH: 0.5}  # of sequences, where some are tasks
_SYMBOLS = np.frombuffer(b"0123456789abcdefghijklmnopqrstuvwxyz", dtype=np.uint8)


def example_config() -> LlamaConfig:
    """3.0 M parameters: 4 layers, width 256, 4 query heads on 2 KV heads of 64."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=TRAINED_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attention_bias=True,
        initializer_range=0.06,  # with the default 0.02 copying does not appear in the tokens that a CPU can afford
        bos_token_id=0,
        eos_token_id=0,
    )


def repeated(segment: bytes, length: int) -> bytes:
    return (segment * (length // len(segment) + 1))[:length]


class Mixture:
    """Draws training sequences; phase 1 is mostly copying, phase 2 text and recall."""

    def __init__(self, text: bytes, rng: np.random.Generator, tasks: float = 0.0) -> None:
        self.text, self.rng, self.share = text, rng, tasks
        self.tasks = TaskMixture(rng) if tasks else None

    def source(self, length: int) -> bytes:
        start = self.rng.integers(0, len(self.text) - length)
        return self.text[start : start + length]

    def walk(self, length: int) -> bytes:
        """Follows a random permutation of 4 to 12 symbols, with 15% of random jumps."""
        symbols = _SYMBOLS[self.rng.permutation(36)[: self.rng.integers(4, 13)]]
        follow = self.rng.permutation(len(symbols))
        jump, noise = self.rng.random(length) < 0.15, self.rng.integers(0, len(symbols), size=length)
        state = np.zeros(length, dtype=np.int64)
        for t in range(1, length):
            state[t] = noise[t] if jump[t] else follow[state[t - 1]]
        return symbols[state].tobytes()

    def symbol_repeat(self, length: int) -> bytes:
        symbols = _SYMBOLS[self.rng.permutation(36)[: self.rng.integers(4, 13)]]
        size = int(self.rng.integers(8, length // 2 + 1))
        return repeated(symbols[self.rng.integers(0, len(symbols), size=size)].tobytes(), length)

    def byte_repeat(self, length: int) -> bytes:
        size = int(self.rng.integers(16, length // 2))
        return repeated(self.rng.integers(33, 127, size=size, dtype=np.uint8).tobytes(), length)

    def facts(self, count: int) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        while len(found) < count:
            found[random_name(self.rng)] = random_pass_key(self.rng)
        return found

    def dense_recall(self, length: int) -> bytes:
        """Facts one after another, then the same facts again in random order for as long as there is room."""
        facts = self.facts(int(self.rng.integers(2, max(3, min(length // 110, 100)))))
        items = list(facts.items())
        out = b"".join(fact(*item) for item in items)
        while len(out) < length:
            out += fact(*items[self.rng.integers(len(items))])
        return out[:length]

    def planted(self, length: int) -> bytes:
        """Facts at random places of a source text, asked for at its end."""
        facts = self.facts(int(self.rng.integers(1, 2 + length // 256)))
        tail = b"".join(fact(*item) for item in facts.items())
        body = length - 2 * len(tail)
        text = self.source(body)
        cuts = sorted(int(cut) for cut in self.rng.integers(0, body, size=len(facts)))
        out, previous = b"", 0
        for item, cut in zip(facts.items(), cuts, strict=True):
            out += text[previous:cut] + fact(*item)
            previous = cut
        return out + text[previous:] + tail

    def sequence(self, phase: int, length: int) -> bytes:
        draw: tuple[tuple[float, Callable[[int], bytes]], ...]
        if phase == 1:
            draw = ((0.15, self.source), (0.65, self.walk), (0.20, self.symbol_repeat))
        else:
            draw = ((0.40, self.source), (0.22, self.dense_recall), (0.08, self.byte_repeat), (0.30, self.planted))
        choice = self.rng.choice(len(draw), p=[share for share, _ in draw])
        return draw[choice][1](length)

    def batch(self, phase: int, count: int, length: int) -> torch.Tensor:
        rows = [np.frombuffer(self.sequence(phase, length), dtype=np.uint8) for _ in range(count)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def weighted_batch(self, phase: int, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids [count, length], what each counts in the loss, alike)."""
        rows = []
        for _ in range(count):
            row = self.sequence(phase, length)
            if self.tasks is not None and length >= 1024 and self.rng.random() < self.share:
                rows.append(self.tasks.sequence(length, row))
            else:
                rows.append((np.frombuffer(row, dtype=np.uint8), np.ones(length, np.float32)))
        ids, weights = (np.stack(x) for x in zip(*rows, strict=True))
        return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(weights)


@torch.no_grad()
def copy_loss(model: torch.nn.Module, device: str) -> float:
    """Nats per byte on the second copy of random segments of 60 symbols."""
    segment = _SYMBOLS[np.random.default_rng(5).integers(0, 36, size=(16, 60))].astype(np.int64)
    ids = torch.from_numpy(np.concatenate([segment, segment], axis=1)).to(device)
    logits = model(ids).logits[:, 60:-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 61:].flatten()).item()


@torch.no_grad()
def bits_per_byte(model: torch.nn.Module, length: int, device: str, count: int = 64) -> float:
    """On held-out text, in windows of `length` spread evenly over it."""
    text = np.frombuffer(held_out_text(), dtype=np.uint8)
    starts = np.linspace(0, len(text) - length, count).astype(np.int64)
    losses = []
    for start in starts:
        ids = torch.from_numpy(text[start : start + length].astype(np.int64))[None].to(device)
        losses.append(model(ids, labels=ids).loss.item())
    return float(np.mean(losses)) / math.log(2)


@torch.no_grad()
def recall(model: torch.nn.Module, length: int, device: str, trials: int = 100) -> float:
    """Share of planted five-digit facts that greedy decoding gets right; depths are spread evenly over the text."""
    text, rng, right = held_out_text(), np.random.default_rng(1), 0
    for trial in range(trials):
        name, pass_key = random_name(rng), random_pass_key(rng)
        asked = question(name) + pass_key
        body = length - len(fact(name, pass_key)) - len(asked)
        start = rng.integers(0, len(text) - body)
        planted = plant(text[start : start + body], fact(name, pass_key), (trial + 0.5) / trials)
        ids = torch.tensor(list(planted + asked), device=device)[None]
        best = model(ids).logits[0, -6:-1].argmax(-1)  # teacher forced; all five right = greedy decoding is right
        right += int(bool((best == ids[0, -5:]).all()))
    return right / trials


def save(model: LlamaForCausalLM, out: Path, figures: dict) -> None:
    """Weights in bfloat16; written beside the old ones and then renamed, so that a broken run leaves them whole."""
    fresh = out.with_name(out.name + ".new")
    state = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(state)
    copy.save_pretrained(fresh)
    byte_tokenizer().save_pretrained(fresh)  # for those who load the folder by themselves, as vLLM does
    (fresh / "training.json").write_text(json.dumps(figures, indent=1) + "\n")
    out.mkdir(parents=True, exist_ok=True)
    for path in fresh.iterdir():
        path.replace(out / path.name)
    fresh.rmdir()


def draw_length(rng: np.random.Generator, done: float, tasks: bool = False) -> int:
    """The longest length of this stage for half of the steps, one of the shorter ones for the other half; with tasks
    those of TASK_LENGTHS."""
    if tasks:
        return int(rng.choice(list(TASK_LENGTHS), p=list(TASK_LENGTHS.values())))
    number = next(i for i, (_, until) in enumerate(LENGTHS) if done <= until)
    return LENGTHS[number if number == 0 or rng.random() < 0.5 else rng.integers(number)][0]


def train(
    minutes: float,
    out: Path,
    *,
    resume: Path | None,
    seed: int,
    device: str,
    compiled: bool,
    autocast: bool,
    peak_rate: float,
    tasks: float = 0.0,
) -> dict:
    """Trains for that many minutes and leaves weights and figures in `out`; returns the figures."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = (
        LlamaForCausalLM.from_pretrained(resume, dtype=torch.float32) if resume else LlamaForCausalLM(example_config())
    )
    model.to(device).train()
    run = torch.compile(model, dynamic=False) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    mixture = Mixture(training_text(rng), rng, tasks)
    phase, step, tokens, smooth, begin = (2 if resume else 1), 0, 0, None, time.monotonic()
    earlier = {"resumed_from": json.loads((resume / "training.json").read_text())} if resume else {}
    figures: dict = {}
    while (done := (time.monotonic() - begin) / (60 * minutes)) < 1:
        length = 128 if phase == 1 else draw_length(rng, 1.0 if resume else done, tasks > 0)
        count = (2048 if phase == 1 else TOKENS_PER_STEP) // length
        rate = peak_rate * min(1.0, (step + 1) / 50) * min(1.0, max(0.02, (1 - done) / 0.45))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, weights = (x.to(device) for x in mixture.weighted_batch(phase, count, length))
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            logits = run(input_ids=ids).logits
        loss = weighted_loss(logits, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + count * length
        smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
        if phase == 1 and step % 100 == 0:
            copied = copy_loss(model, device)
            print(f"{done * minutes:.1f} min, step {step}, loss {smooth:.3f}, copy loss {copied:.3f}", flush=True)
            if copied < 0.5:
                phase = 2
        elif phase == 2 and step % 250 == 0:
            model.eval()
            longest = next(length for length, until in LENGTHS if (1.0 if resume else done) <= until)
            figures = {
                "minutes": round(done * minutes, 1),
                "steps": step,
                "tokens": tokens,
                "seed": seed,
                "length": longest,
                "loss": round(smooth, 4),
                "bits_per_byte": round(bits_per_byte(model, longest, device, 16), 4),
                "recall": {str(n): recall(model, n, device, 20) for n, _ in LENGTHS if n <= longest},
            }
            model.train()
            print(json.dumps(figures), flush=True)
            save(model, out, figures)
    model.eval()
    figures |= earlier | {
        "minutes": round(minutes, 1),
        "steps": step,
        "tokens": tokens,
        "seed": seed,
        "loss": round(smooth or 0, 4),
    }
    save(model, out, figures)
    shipped = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).to(device).eval()
    figures["bits_per_byte"] = round(bits_per_byte(shipped, TRAINED_LENGTH, device), 4)
    figures["recall"] = {str(length): recall(shipped, length, device) for length, _ in LENGTHS}
    save(model, out, figures)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True, help="wall time of the run")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and figures")
    parser.add_argument("--resume", type=Path, help="go on from the weights in this folder, at full length")
    parser.add_argument("--tasks", type=float, default=0.0, help="share of the sequences from 1,024 on: RULER's tasks")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help="at its highest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    parser.add_argument("--float32", action="store_true", help="no bfloat16 autocast")
    options = parser.parse_args()
    figures = train(
        options.minutes,
        options.out,
        resume=options.resume,
        seed=options.seed,
        device=options.device,
        compiled=not options.no_compile,
        autocast=not options.float32,
        peak_rate=options.learning_rate,
        tasks=options.tasks,
    )
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
