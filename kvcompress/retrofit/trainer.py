"""Continued pre-training on transformers' Trainer."""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from ..hf.adapters import carry_conversion
from ..support.files import naming
from . import checkpoints, fsdp, sharded
from .callback import PROGRESS, RetrofitCallback
from .card import CARD, add_use, tags_of
from .distillation import distance
from .figures import Figures, MetricsFile, rounded
from .packing import Validation
from .ranks import place_among_ranks, summed
from .recipe import Recipe

LOG = logging.getLogger(__name__)
TRAINER_STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"
SEQUENCES = "sequences of a step"


class RetrofitTrainer(Trainer):
    """Trains a converted model by a recipe: RetrofitCallback, its loss, its learning rate, and whole checkpoints.

    recipe: what to do at each step; args.max_steps is set to its steps, the learning rate follows it. teacher: a model
    of the same vocabulary, usually the original one; None = no distillation. distillation: share of the loss that is
    the KL divergence to the teacher, per token, the rest being the language model's; 0 to 1. tokenizer: goes into
    checkpoints, each of which is a model of its own. validation: held-out rows, in place of eval_dataset: evaluations
    then log bits per byte besides, and what the recipe measures, over all their tokens.
    The loss is a mean over all tokens of a step that have a label, whatever passes and ranks they are in.
    model, args, kwargs: as transformers.Trainer. Figures of the recipe are logged, as means over passes and ranks, and
    written with lists to metrics.jsonl in the output folder. A checkpoint is there with all its files or not at all;
    train with resume_from_checkpoint=True takes the newest whole one, says so, and goes on as the run would have, on
    another number of ranks too (but for a stream of several files), with FSDP2 or without.
    FSDP is that of args and of accelerate's launcher, on CPUs too; with FSDP2 each rank writes its parts of a
    checkpoint, which from_pretrained loads as it does others.
    Raises ValueError for a teacher without distillation or the reverse, or a share out of range, and for context,
    sequence and tensor parallelism.
    """

    def __init__(
        self,
        model: PreTrainedModel | nn.Module,
        args: TrainingArguments,
        recipe: Recipe,
        *,
        teacher: PreTrainedModel | None = None,
        distillation: float = 0.0,
        tokenizer: PreTrainedTokenizerBase | None = None,
        validation: Validation | None = None,
        **kwargs: Any,
    ) -> None:
        if not 0 <= distillation <= 1:
            raise ValueError(f"distillation must be between 0 and 1, got {distillation}")
        if (teacher is None) != (distillation == 0):
            raise ValueError(f"teacher and distillation must be given together, got distillation {distillation}")
        args.max_steps = recipe.steps
        fsdp.need_whole_rows(args)
        carry_conversion(model)
        if validation is not None:
            kwargs["eval_dataset"] = validation.rows
        super().__init__(model, args, **kwargs)
        self.recipe, self.teacher, self.distillation = recipe, teacher, distillation
        self.validation, self._held_out = validation, Figures(())
        if teacher is not None:
            teacher.requires_grad_(False).eval().to(args.device)
        self.tokenizer = tokenizer
        self.metrics_file, self.retrofit = MetricsFile(), RetrofitCallback(recipe)
        self.add_callback(self.retrofit)
        self.add_callback(self.metrics_file)
        self._staging: Path | None = None  # while a checkpoint is written

    def create_accelerator_and_postprocess(self) -> None:
        with fsdp.on_cpus_too(self.args):
            super().create_accelerator_and_postprocess()

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        scheduler = getattr(self, "lr_scheduler", None)
        if scheduler is None:
            chosen = optimizer or self.optimizer
            assert chosen is not None
            self.lr_scheduler = scheduler = LambdaLR(chosen, self.recipe.learning_rate)
        return scheduler

    # ---- the loss ----

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if not model.training:
            outputs = model(**inputs)
            self._measure(model, outputs.loss, inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss
        more: dict[str, Tensor] = {}
        if self.teacher is None:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        elif self.distillation == 1:  # the model's own loss has no part in it
            outputs = model(**{name: x for name, x in inputs.items() if name != "labels"})
            loss, nats = self._distance(outputs.logits, inputs, num_items_in_batch)
            more = {"lm_loss": nats, "distillation_loss": loss}
        else:
            own, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            far, _ = self._distance(outputs.logits, inputs, num_items_in_batch)
            more = {"lm_loss": own, "distillation_loss": far}
            loss = (1 - self.distillation) * own + self.distillation * far
        passes = self.current_gradient_accumulation_steps
        loss = self.retrofit.add_loss(model, loss, num_items_in_batch, passes, **more)
        return (loss, outputs) if return_outputs else loss

    def _distance(
        self, logits: Tensor, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None
    ) -> tuple[Tensor, Tensor]:
        """KL divergence from the teacher's next-token distributions, and the loss of the labels, over the tokens that
        have one: their means, or this pass's part of the step's as compute_loss gives the model's own."""
        assert self.teacher is not None
        with torch.no_grad():
            given = {name: x for name, x in inputs.items() if name != "labels"}
            wanted = self.teacher(**given, use_cache=False).logits
        found = distance(logits, wanted, inputs["labels"])
        tokens = found.tokens if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        mean = num_items_in_batch is None or not self.args.average_tokens_across_devices
        share = (1 if mean else self.accelerator.num_processes) / tokens.clamp(min=1)  # a pass may have no label at all
        return found.divergence * share, found.nats * share

    # ---- evaluation ----

    def _measure(self, model: nn.Module, loss: Tensor, inputs: dict[str, Any]) -> None:
        tokens = (inputs["labels"][:, 1:] != -100).sum()
        self._held_out.note({"nats": loss * tokens, "predicted": tokens} | self.recipe.measured(model))

    def evaluation_loop(
        self, dataloader: Any, description: str, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> Any:
        """As transformers does, with the mean over all tokens as the loss, and the recipe's figures. Where ranks do not
        divide the rows, some count twice."""
        self._held_out = Figures(())
        output = super().evaluation_loop(dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        found = self._held_out.take(self.args.device)
        loss = found.pop("nats") / found.pop("predicted")
        metrics = {"loss": loss}
        if self.validation is not None and dataloader.dataset is self.validation.rows:
            metrics["bits_per_byte"] = loss * self.validation.tokens / self.validation.nbytes / math.log(2)
        metrics |= {name: x for name, x in self.recipe.summary(found).items() if not isinstance(x, list)}
        output.metrics.update({f"{metric_key_prefix}_{name}": rounded(value) for name, value in metrics.items()})
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            found = self.retrofit.take_figures(self.args)
            self.metrics_file.latest = {name: x for name, x in found.items() if isinstance(x, list)}
            logs = logs | {name: x for name, x in found.items() if not isinstance(x, list)}
        super().log(logs, start_time)

    # ---- checkpoints ----

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As transformers does, but aside; then at once under its name."""
        out, step = Path(self._get_output_dir(trial)), self.state.global_step
        self._make_room(out)
        try:
            with naming(out / f"checkpoint-{step}"):
                self._write_checkpoint(model, trial, out, step)
        except BaseException:
            if self.args.should_save:
                shutil.rmtree(out / checkpoints.STAGING, ignore_errors=True)
            raise

    def _write_checkpoint(self, model: nn.Module, trial: Any, out: Path, step: int) -> None:
        self._staging = out / checkpoints.STAGING
        staged = self._staging / f"checkpoint-{step}"
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._staging = None
        self.retrofit.save(staged, self.model, writes=self.args.should_save)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            if self.state.best_model_checkpoint == str(staged):
                self.state.best_model_checkpoint = str(out / staged.name)
                self.state.save_to_json(str(staged / TRAINER_STATE))
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(staged)
            sealed = checkpoints.seal(staged, out, step=step, run=self._division())
            checkpoints.rotate(out, self.args.save_total_limit, sealed, also=[self.state.best_model_checkpoint])
        self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A folder that from_pretrained loads, of one file where nothing is larger than those may be; collective."""
        assert self.model is not None
        folder, writes = Path(output_dir or self.args.output_dir or "."), self.args.should_save
        if not sharded.is_sharded(self.model):
            super().save_model(output_dir, _internal_call)
        elif _internal_call and isinstance(self.model, PreTrainedModel):
            sharded.save_weights(self.model, folder, writes=writes)
        else:
            state = self.gathered()
            if writes:
                self._save(str(folder), state_dict=state)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        **others: Any,
    ) -> None:
        """As Trainer's, which push_to_hub calls, and how the model is loaded, under tags of ours."""
        own = [tags] if isinstance(tags, str) else tags or []
        super().create_model_card(language, license, [*own, *tags_of(self._plain_model())], model_name, **others)
        if self.is_world_process_zero():
            name = self.hub_model_id or str(self.args.output_dir)
            add_use(Path(self.args.output_dir, CARD), self._plain_model(), name)

    def _plain_model(self) -> nn.Module:
        model: nn.Module = self.accelerator.unwrap_model(self.model)
        return model

    def gathered(self) -> dict[str, Any] | None:
        """The whole state_dict that save_pretrained is to write, on rank 0, where ranks hold parts; collective. None
        where each of them holds the model."""
        assert self.model is not None
        if not sharded.is_sharded(self.model):
            return None
        return sharded.gathered(self.model, trained_alone=not isinstance(self.model, PreTrainedModel))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.model is not None and self.lr_scheduler is not None
        if not sharded.is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        sharded.save_optimizer(self.model, self._own_optimizer(), Path(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER))

    def _own_optimizer(self) -> torch.optim.Optimizer:
        """Without what accelerate wraps it in."""
        found = getattr(self.optimizer, "optimizer", self.optimizer)
        assert isinstance(found, torch.optim.Optimizer)
        return found

    def _make_room(self, out: Path) -> None:
        """An empty folder to write in. Raises OSError on every rank if the disk of one that saves has no room."""
        error = None
        if self.args.should_save:
            checkpoints.begin(out)
            try:
                checkpoints.need_space(out, self._nbytes())
            except OSError as found:
                error = found
        full = summed(torch.tensor(float(error is not None), device=self.args.device))
        if error is not None:
            raise error
        if bool(full):
            raise OSError(f"a checkpoint was not written: another rank has no room for it in {out}")

    def _nbytes(self) -> int:
        """Of a checkpoint: weights (of an adapter those that are trained) and what the optimizer keeps of them."""
        assert self.model is not None and self.optimizer is not None
        every = isinstance(self.accelerator.unwrap_model(self.model), PreTrainedModel)
        kept = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        kept += [p for p in self.model.parameters() if every or p.requires_grad]
        return sum(x.numel() * x.element_size() for x in kept) + 2**20

    def _division(self) -> dict[str, int]:
        """How many processes there are, and on what it depends which tokens a step has."""
        args, ranks = self.args, place_among_ranks()[1]
        sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks
        return {"ranks": ranks, SEQUENCES: sequences}

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As transformers.Trainer does. resume_from_checkpoint: True = the newest whole one in the output folder.

        Raises FileNotFoundError where there is none, or where one lacks a file that the run needs to go on as it was;
        ValueError for one that is cut off, or of a run with other steps; both name the file.
        """
        found: Path | None = None
        if resume_from_checkpoint is True:
            found = newest(Path(self.args.output_dir or "."))
        elif resume_from_checkpoint:
            found = Path(resume_from_checkpoint)
        if found is not None:
            self._check_resumable(found)
            if self.is_fsdp_enabled and not isinstance(self.model, PreTrainedModel):
                super()._load_from_checkpoint(str(found))  # an adapter, before it is cut up
        self.retrofit.folder = found
        return super().train(None if found is None else str(found), *args, **kwargs)

    def _check_resumable(self, folder: Path) -> None:
        marker, division = checkpoints.read_marker(folder), self._division()
        checkpoints.need_state(folder, marker, PROGRESS)
        checkpoints.read_json(folder / PROGRESS)
        before, now = marker["run"].get(SEQUENCES), division[SEQUENCES]
        if before != now:
            raise ValueError(f"{SEQUENCES} must be {before}, as {folder} was trained, got {now}")
        ranks, shards = marker["run"].get("ranks"), getattr(self.train_dataset, "num_shards", 1)
        if isinstance(self.train_dataset, IterableDataset) and shards > 1 and ranks != division["ranks"]:
            raise ValueError(
                f"processes must be {ranks}, as {folder} was trained, got {division['ranks']}: each reads files of its "
                f"own of the {shards} that are streamed, in another order on another number of them"
            )
        state = checkpoints.read_json(folder / TRAINER_STATE, "global_step", "log_history")
        if state["global_step"] != marker["step"]:
            wrong = folder / TRAINER_STATE
            raise ValueError(f"{wrong} must have global_step {marker['step']}, got {state['global_step']!r}")

    def load_trained(self, folder: Path) -> None:
        """Gives the model what the checkpoint behind the last step holds, instead of training it."""
        self._check_resumable(folder)
        self._load_from_checkpoint(str(folder))
        assert self.model is not None
        self.recipe.begin_step(self.model, self.recipe.steps, self.args.gradient_accumulation_steps)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder, found = Path(resume_from_checkpoint), model or self.model
        assert found is not None
        with checkpoints.naming_the_file(folder, *checkpoints.WEIGHTS):
            if not isinstance(self.model, PreTrainedModel) and sharded.is_sharded(found):
                return  # train has loaded it
            if sharded.is_sharded(found) or sharded.has_parts(folder):
                sharded.load_weights(found, folder)
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        assert self.model is not None
        tied = set(getattr(self.model, "_keys_to_ignore_on_save", None) or ())
        tied |= set(getattr(self.model, "all_tied_weights_keys", None) or ())
        missing = [name for name in load_result.missing_keys if name not in tied]
        if missing or load_result.unexpected_keys:
            raise ValueError(
                f"it lacks {missing[:3]} and has {load_result.unexpected_keys[:3]}, which the model has not"
            )
        # what is left is tied: saved once, under another name
        if isinstance(self.model, PreTrainedModel):
            self.model.tie_weights()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.model is not None and self.lr_scheduler is not None
        folder, optimizer = Path(checkpoint), self._own_optimizer()
        with checkpoints.naming_the_file(folder, *checkpoints.OPTIMIZER):
            if (folder / sharded.OPTIMIZER).is_dir():
                sharded.load_optimizer(self.model, optimizer, folder)
            elif sharded.is_sharded(self.model):
                state = torch.load(folder / f"{sharded.OPTIMIZER}.pt", map_location="cpu", weights_only=True)
                sharded.load_whole_optimizer(optimizer, state)
            else:
                super()._load_optimizer_and_scheduler(checkpoint)
                return
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """On another number of ranks each begins anew: what a method draws depends on the step, dropout does not."""
        if checkpoint is None:
            return
        folder, (rank, ranks) = Path(checkpoint), place_among_ranks()
        if checkpoints.random_files(ranks) <= {path.name for path in folder.glob(f"{checkpoints.RANDOM[0]}*")}:
            with checkpoints.naming_the_file(folder, *checkpoints.RANDOM):
                super()._load_rng_state(checkpoint)
        else:
            set_seed(self.args.seed + checkpoints.step_of(folder) * ranks + rank)


def newest(out: Path) -> Path:
    """The newest checkpoint of a run that is whole; says which, and what is wrong with newer ones.

    Raises FileNotFoundError where there is none.
    """
    found, faults = checkpoints.newest_whole(out)
    if found is None:
        what = f"{out}: {'; '.join(faults)}" if faults else str(out)
        raise FileNotFoundError(f"out must hold a checkpoint to resume from, got {what}")
    for fault in faults:
        LOG.warning("a newer checkpoint is not whole and is left out: %s", fault)
    LOG.warning("resuming from %s", found)
    return found
