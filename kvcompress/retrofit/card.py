"""The model card of a retrofit: what was done to which model, with what, what came of it, and how to load it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor, nn

from ..caches.spec import CacheSpec
from ..hf.argument import CACHE
from ..hf.attach import base_model, facts_of
from ..hf.method import method_of
from ..hf.seam import evaluating
from ..reading.prefilling import prefill
from ..support.files import write_text
from .report import NAMES
from .sources import DataSource

LOG = logging.getLogger(__name__)
CARD = "README.md"
MARK = "<!-- written by kvcompress: without this line it is yours, and is not written over -->"


@torch.no_grad()
def measured_ratio(model: nn.Module, input_ids: Tensor) -> float | None:
    """Bytes of a dense cache over those of a converted model's own, after one text. input_ids: [1, T].

    None for a model that is not converted, whose cache is dense, and for weights that are divided over ranks.
    """
    decoder = base_model(model)
    kind = CacheSpec.kind_of(decoder.config)
    if kind is None or any(hasattr(p, "placements") for p in model.parameters()):
        return None
    facts, T = facts_of(decoder), input_ids.shape[1]
    with evaluating(model):
        cache: Any = CacheSpec(kind, {}).make(decoder.config)
        prefill(model, input_ids, cache, torch.ones_like(input_ids))  # a pad token is a token here
        decoder(input_ids[:, -1:], **{CACHE: cache})  # as prefill: a Trainer's autocast wraps the model around it
    sizes = [
        layer.kv_heads * (layer.head_dim + layer.value_dim) * min(T, layer.window or T)
        for layer in (facts[number] for number in facts)
        if layer.reads is None
    ]
    return sum(sizes) * next(model.parameters()).element_size() / cache.nbytes()


def model_card(model: nn.Module, figures: dict[str, Any]) -> ModelCard:
    """figures: what training.json holds."""
    settings, recipe, decoder = figures["settings"], figures["recipe"], base_model(model)
    steps, tokens, ratio = figures["steps"], figures["tokens"], figures["measured_ratio"]
    method = method_of(decoder)
    saved = dict(getattr(decoder.config, "kvcompress", None) or {})
    kind = "" if method is None else str(saved.get("mode") or saved["method"])
    title = "plain transformers model, KV heads averaged" if method is None else f"{method.title}, mode {kind}"
    names = [DataSource.parse(text).name for text in settings["data"]] + list(settings["text"])
    on_hub = [name for name in names if "/" in name and not Path(name).suffix]
    about = ModelCardData(
        base_model=settings["model"] if "/" in settings["model"] else None, datasets=on_hub or None,
        library_name="transformers", pipeline_tag="text-generation",
        tags=tags_of(model),
    )  # fmt: skip
    last: dict[str, Any] = (figures["last"] or [{}])[-1]
    lines = [
        f"- Method: {title}",
        f"- Base model: {settings['model']}",
        f"- Data: {'; '.join([*settings['data'], *settings['text']]) or 'what the example model was trained on'}",
        f"- Trained on {tokens:,} tokens in {steps:,} steps, rows of {settings['length']:,} tokens",
    ]
    if "target_ratio" in recipe:
        lines.append(f"- Target: {recipe['target_ratio']:g} tokens per cache entry")
    if "ratio_hard" in last:
        lines.append(f"- Reached in training: {last['ratio_hard']:.2f} tokens per cache entry, without noise")
    if ratio is not None:
        lines.append(
            f"- Measured: a dense cache takes {ratio:.2f} times the bytes of its own, after a text of "
            f"{settings['length']:,} tokens"
        )
    parts = [f"# {settings['out']}", "\n".join(lines)]
    if figures["validation"]:
        parts.append(_evaluation(figures["validation"]))
    parts.append(_use(settings["out"], method is not None))
    parts.append(
        f"## Settings\n\n```json\n{json.dumps({'settings': settings, 'recipe': recipe}, indent=1, default=str)}\n```"
    )
    body = "\n\n".join(parts)
    return ModelCard(f"---\n{about.to_yaml()}\n---\n{MARK}\n\n{body}\n")


def _use(name: str, converted: bool) -> str:
    how = "kvcompress.from_pretrained" if converted else "AutoModelForCausalLM.from_pretrained"
    imported = "import kvcompress" if converted else "from transformers import AutoModelForCausalLM"
    code = f'{imported}\n\nmodel = {how}("{name}")  # this folder, or its name on the Hub'
    if converted:
        code += "\nmodel.generate(input_ids, max_new_tokens=50)  # makes its cache by itself"
    return f"## Use\n\n```python\n{code}\n```"


def tags_of(model: nn.Module) -> list[str]:
    """What a card is found by."""
    saved = getattr(base_model(model).config, "kvcompress", None)
    return ["kvcompress", *([saved["method"]] if saved else [])]


def add_use(path: Path, model: nn.Module, name: str) -> None:
    """Adds to a card that transformers wrote how such a model is loaded: its own words would lose the cache."""
    converted = method_of(base_model(model)) is not None
    write_text(path, path.read_text(encoding="utf-8").rstrip() + f"\n\n{_use(name, converted)}\n")


def _evaluation(lines: list[dict[str, Any]]) -> str:
    """A table of the first and the last evaluation."""
    heads = " | ".join(f"step {line['step']:,}" for line in lines)
    rows = [f"| | {heads} |", "|---|" + "---|" * len(lines)]
    for name, words in NAMES.items():
        found = [line.get(f"eval_{name}") for line in lines]
        if any(value is not None for value in found):
            values = " | ".join("" if value is None else f"{value:.4g}" for value in found)
            rows.append(f"| {words} | {values} |")
    return "## On held-out text\n\n" + "\n".join(rows)


def keeps_own_card(folder: Path) -> bool:
    """Whether a folder's card is somebody's own, which stays; says so."""
    path = folder / CARD
    own = path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace")
    if own:
        LOG.warning("%s is not ours and stays as it is: the model has no new card", path)
    return own
