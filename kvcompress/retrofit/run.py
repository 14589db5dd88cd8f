"""A retrofit from start to end: model, data, trainer, files. What every method's command shares."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

from ..hf.attach import attach, base_model
from ..hf.config import cache_layers, decoder_config, recurs
from ..hf.method import saved_method
from ..models import EXAMPLE, EXAMPLE_NAME, load_example_model, shipped_retrofit
from ..support.files import naming
from ..support.names import check_name
from .card import CARD, keeps_own_card, measured_ratio, model_card
from .checkpoints import checkpoints, flush, flush_folder, read_json, step_of, write_whole
from .data import collate, example_rows, example_validation
from .fsdp import need_whole_loading, sharding, sum_gradients_in_float32
from .packing import Packing, Validation, need_validation
from .recipe import Recipe
from .report import use_lines
from .sources import DataSource
from .trainer import TRAINER_STATE, RetrofitTrainer, newest

_CHECKPOINTING: dict[str, Any] = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
PLAN, FIGURES = "run.json", "training.json"


@dataclass(frozen=True)
class RunSettings:
    """What is trained on what, and where it goes.

    model: "example" (the shipped model), "smollm2", a folder or a name of a transformers model. text, data: files of
    training text, and data sets as DataSource.parse takes them; () = the shipped model's own, for that model alone.
    streaming, shuffle_buffer, borders, validation: see Packing; of the shipped model's own data validation is a number
    of rows of text that it was never trained on. eval_steps: between evaluations, None = save_steps; there is one
    before the first step and one after the last. report_to: what else gets the log: tensorboard, wandb, ... out: folder
    for checkpoints, metrics.jsonl and the trained model. length: tokens of a row; rows: rows of a forward pass on one
    device; accumulation: passes of a step.
    learning_rate: AdamW's, betas 0.9 and 0.95, eps 1e-5, weight decay 0.1, gradients clipped to 1. distillation: share
    of the loss that is the distance to the teacher; 0 = none. teacher: folder or name; None = model as it was.
    bfloat16: autocast; with shards what FSDP2 computes in, gradients summed in float32. checkpointing: recompute
    activations in the backward pass. shards: ranks of a distributed run that a model's weights are cut over, by FSDP2:
    1 = every rank has them all; as many as there are; fewer: the others hold copies of the parts (HSDP). save_steps:
    between checkpoints, of which the last keep_checkpoints stay; None = all, each a usable model on the way. log_steps:
    between lines of metrics.
    Raises ValueError for a field out of range.
    """

    out: Path
    model: str = EXAMPLE_NAME
    text: tuple[Path, ...] = ()
    data: tuple[str, ...] = ()
    streaming: bool = False
    shuffle_buffer: int = 1000
    borders: bool = True
    validation: float = 0
    eval_steps: int | None = None
    report_to: tuple[str, ...] = ()
    length: int = 2048
    rows: int = 4
    accumulation: int = 1
    learning_rate: float = 3e-5
    weight_decay: float = 0.1
    distillation: float = 0.0
    teacher: str | None = None
    seed: int = 0
    device: str = "cpu"
    bfloat16: bool = True
    checkpointing: bool = False
    shards: int = 1
    save_steps: int = 500
    keep_checkpoints: int | None = 2
    log_steps: int = 10

    def __post_init__(self) -> None:
        for name in ("length", "rows", "accumulation", "shards", "save_steps", "log_steps"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {getattr(self, name)!r}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if self.eval_steps is not None and (not isinstance(self.eval_steps, int) or self.eval_steps < 1):
            raise ValueError(f"eval_steps must be an integer of at least 1, or None, got {self.eval_steps!r}")
        need_validation(self.validation, counted=self.streaming or not self.sources)
        if not self.sources and self.model != EXAMPLE_NAME and not _is_example(self.model):
            raise ValueError(f"text must be given for {self.model!r}: only the example model has data of its own")
        if self.ranks % self.shards:
            raise ValueError(f"shards must divide the {self.ranks} ranks of the run (WORLD_SIZE), got {self.shards}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device must be one that PyTorch finds here, got 'cuda'")

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """Of text and data; none = the shipped model's own."""
        return (*(DataSource(str(path)) for path in self.text), *map(DataSource.parse, self.data))

    @property
    def ranks(self) -> int:
        return int(os.environ.get("WORLD_SIZE", 1))


def _is_example(model: str) -> bool:
    """Whether a folder holds a model made of the shipped one: its vocabulary is bytes and it has its shape."""
    path = Path(model, "config.json")
    if not path.is_file():
        return False
    ours, theirs = json.loads((EXAMPLE / "config.json").read_text()), json.loads(path.read_text())
    return all(ours[name] == theirs.get(name) for name in ("vocab_size", "hidden_size", "num_hidden_layers"))


def load_teacher(settings: RunSettings) -> PreTrainedModel | None:
    """What distillation learns from, attached if it is a converted model; None without distillation."""
    if not settings.distillation:
        return None
    name = settings.teacher or settings.model
    teacher = (
        load_example_model()[0] if name == EXAMPLE_NAME else pretrained(AutoModelForCausalLM, name, argument="teacher")
    )
    if saved_method(base_model(teacher)) is not None:
        attach(teacher)
    return teacher


def load(settings: RunSettings) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model to train, in float32 (autocast computes in bfloat16), and its tokenizer."""
    need_whole_loading()
    if settings.model == EXAMPLE_NAME:
        return load_example_model()
    model = pretrained(AutoModelForCausalLM, settings.model, dtype=torch.float32)
    config = decoder_config(model.config)
    reach, rope = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None) or {}
    if reach is not None and settings.length > reach and rope.get("rope_type", "default") == "default":
        raise ValueError(f"length must be at most the {reach:,} positions of {settings.model}, got {settings.length:,}")
    if settings.sources and settings.borders and recurs(cache_layers(config)):
        raise ValueError(
            f"borders must be off for {settings.model}: its recurrent layers would carry a state from one "
            "document of a row to the next"
        )
    return model, pretrained(AutoTokenizer, settings.model) if settings.sources else load_example_model()[1]


def load_data(settings: RunSettings, tokenizer: PreTrainedTokenizerBase) -> tuple[Any, Validation | None]:
    """Training rows, and held-out ones. Raises ValueError and FileNotFoundError as DataSource and Packing do."""
    if not settings.sources:
        in_step = settings.rows * settings.accumulation * settings.ranks
        rows = example_rows(settings.length, in_step, settings.seed)
        count = int(settings.validation)
        return rows, example_validation(settings.length, count) if count else None
    packing = Packing(
        settings.length, settings.borders, settings.streaming, settings.shuffle_buffer, settings.validation,
        settings.seed,
    )  # fmt: skip
    return packing.rows(settings.sources, tokenizer)


def pretrained(kind: Any, name: str, *, argument: str = "model", **options: Any) -> Any:
    """kind.from_pretrained(name). FileNotFoundError for what is meant as a folder and is none, which is not looked for
    on the Hub; ValueError for what cannot be loaded."""
    path = Path(name)
    of_run = len(path.parts) == 2 and Path(path.parts[0], PLAN).is_file()  # a checkpoint that is gone
    try:
        located = check_name(argument, f"./{name}" if of_run else name)
    except ConnectionError as error:
        raise ValueError(str(error)) from None
    if kind is AutoModelForCausalLM and (shipped := shipped_retrofit(path)) is not None:
        dtype = options.get("dtype", torch.float32)
        return load_example_model(retrofit=shipped, dtype=torch.bfloat16 if dtype == "auto" else dtype)[0]
    try:
        return kind.from_pretrained(located, **options)
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), "")
        what = "come with a tokenizer" if kind is AutoTokenizer else "be the name or folder of a transformers model"
        raise ValueError(f"{argument} must {what}, got {name!r}: {reason}") from None


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    settings: RunSettings,
    *,
    resume: bool = False,
) -> dict[str, Any]:
    """Trains a converted, attached model and saves it, its tokenizer and training.json in settings.out.

    resume: go on from the newest whole checkpoint in settings.out. Returns what training.json holds: settings, recipe,
    steps, tokens, the last logged figures, evaluations, and how many times the cache is smaller than a dense one.
    Raises FileNotFoundError if there is no checkpoint to resume from, and as RetrofitTrainer.train does.
    """
    out, last = settings.out, None
    plan = _plan(recipe, settings) | {"method": getattr(base_model(model).config, "kvcompress", None) or {}}
    if resume:
        last = newest(out)
        _check_same(out / PLAN, plan)
        if step_of(last) >= recipe.steps and (out / FIGURES).is_file():
            raise ValueError(
                f"resume needs a run that is not over, got {last} of {recipe.steps} steps, the trained model"
            )
    elif found := checkpoints(out):
        raise ValueError(f"out must hold no checkpoint of another run, got {found[-1]}: resume it or take a new folder")
    elif int(os.environ.get("RANK", 0)) == 0:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / PLAN, json.dumps(plan, indent=1).encode() + b"\n")
    args = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=settings.rows,
        per_device_eval_batch_size=settings.rows,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        adam_beta2=0.95,
        adam_epsilon=1e-5,
        max_grad_norm=1.0,
        max_steps=recipe.steps,
        bf16=settings.bfloat16,
        use_cpu=settings.device == "cpu",
        save_steps=settings.save_steps,
        save_total_limit=settings.keep_checkpoints,
        logging_steps=settings.log_steps,
        report_to=list(settings.report_to) or "none",
        seed=settings.seed,
        data_seed=settings.seed,
        remove_unused_columns=False,
        # each rank takes batches of its own: their shapes differ
        accelerator_config={"dispatch_batches": False},
        dataloader_pin_memory=settings.device == "cuda",
        **_CHECKPOINTING if settings.checkpointing else {},
        **sharding(settings.shards, settings.ranks),
    )
    sum_gradients_in_float32(args)
    with args.main_process_first(desc="tokenising"):  # others find its work in the cache of datasets
        data, validation = load_data(settings, tokenizer)
    if validation is not None:
        args.set_evaluate("steps", settings.eval_steps or settings.save_steps, batch_size=settings.rows, delay=0)
        args.eval_on_start = last is None
    use_cache = model.config.use_cache  # the trainer switches it off for good
    trainer = RetrofitTrainer(
        model, args, recipe, teacher=load_teacher(settings), distillation=settings.distillation, train_dataset=data,
        data_collator=collate, tokenizer=tokenizer, validation=validation,
    )  # fmt: skip
    use_lines(trainer)
    if last is not None and step_of(last) >= recipe.steps:  # stopped between its end and the writing of the model
        trainer.load_trained(last)
        history = read_json(last / TRAINER_STATE, "log_history")["log_history"]
    else:
        trainer.train(resume_from_checkpoint=last)
        history = trainer.state.log_history
    evaluated = [line for line in history if "eval_loss" in line]
    if validation is not None and (not evaluated or evaluated[-1]["step"] != recipe.steps):
        evaluated.append({"step": recipe.steps} | trainer.evaluate())
    tokens = recipe.steps * settings.accumulation * settings.rows * settings.length * args.world_size
    figures = {part: plan[part] for part in ("settings", "recipe")} | {
        "steps": recipe.steps,
        "tokens": tokens,
        "last": [line for line in history if "loss" in line][-1:],
        "validation": evaluated[:1] + evaluated[1:][-1:],  # the first, and the last
        "measured_ratio": None,
    }
    model.config.use_cache = use_cache
    weights = trainer.gathered()
    if trainer.is_world_process_zero():
        text = torch.tensor([next(iter(data if validation is None else validation.rows))["input_ids"]])
        figures["measured_ratio"] = measured_ratio(model, text.to(args.device))
        card = model_card(model, figures)
        save(model, tokenizer, out, figures, card, weights)
    trainer.accelerator.wait_for_everyone()
    return figures


def _named(model: str | None) -> str | None:
    return model if model is None or not Path(model).is_dir() else Path(model).name


def _plan(recipe: Recipe, settings: RunSettings) -> dict[str, Any]:
    """What is run, with names but without folders: the file goes where the model goes."""
    names: dict[str, Any] = {"out": settings.out.name, "model": _named(settings.model)}
    names |= {"teacher": _named(settings.teacher), "text": [path.name for path in settings.text]}
    names["data"] = [str(replace(source, name=source.shown)) for source in map(DataSource.parse, settings.data)]
    steps = {"kind": type(recipe).__name__} | asdict(recipe)  # type: ignore[call-overload]
    return {"settings": asdict(settings) | names, "recipe": steps}


def _check_same(path: Path, plan: dict[str, Any]) -> None:
    """Raises ValueError if the run that is to go on was another one, or if its plan cannot be read."""
    before, now = read_json(path, "settings", "recipe"), json.loads(json.dumps(plan))
    # of rows and accumulation the trainer wants the same product, over all ranks
    free = (
        "out",
        "device",
        "rows",
        "accumulation",
        "shards",
        "save_steps",
        "keep_checkpoints",
        "log_steps",
        "report_to",
    )
    for part in ("method", "recipe", "settings"):
        for name, value in now[part].items() if part in before else ():  # runs of before had no method in it
            if (part != "settings" or name not in free) and before[part].get(name) != value:
                raise ValueError(
                    f"{name} must be {before[part].get(name)!r} as in the run that is resumed, got {value!r}"
                )


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    figures: dict[str, Any],
    card: ModelCard,
    weights: dict[str, Any] | None = None,
) -> None:
    """Written beside what is there and then renamed, training.json last: where that is, all of it is. A README.md that
    is not ours stays.

    weights: the state_dict of a model that is cut up over ranks.
    """
    fresh = out / "new"
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        with naming(out):
            model.save_pretrained(fresh, state_dict=weights)
            tokenizer.save_pretrained(fresh)
            if not keeps_own_card(out):
                card.save(fresh / CARD)
            flush(fresh)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    (out / FIGURES).unlink(missing_ok=True)
    for path in fresh.iterdir():
        path.replace(out / path.name)
    fresh.rmdir()
    flush_folder(out)
    write_whole(out / FIGURES, json.dumps(figures, indent=1, default=str).encode() + b"\n")
