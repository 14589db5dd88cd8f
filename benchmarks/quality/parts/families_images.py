"""Images in the prompts of families that place them on three axes (M-RoPE): prompts, and the same checks as of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import kvcompress
from benchmarks.quality.parts.families_checks import OTHERS, TOLERANCE, Result, Run, compare, difference
from benchmarks.quality.parts.families_models import IMAGE, IMAGE_START, Configuration

GRIDS = ([1, 8, 4], [1, 4, 6])  # patches of the two images, in time, height and width
TOKENS = (8, 6)  # that they become
NEW_TOKENS = 8


def picture(number: int) -> list[int]:
    return [IMAGE_START, *[IMAGE] * TOKENS[number]]


def images(*numbers: int) -> dict[str, Tensor]:
    """What a processor makes of these images, in the order of their tokens."""
    draw = torch.Generator().manual_seed(7)
    every = [torch.randn(t * h * w, 3 * 2 * 4 * 4, generator=draw) for t, h, w in GRIDS]
    return {
        "pixel_values": torch.cat([every[n] for n in numbers]),
        "image_grid_thw": torch.tensor([GRIDS[n] for n in numbers]),
    }


def text(count: int, seed: int) -> list[int]:
    return torch.randint(3, IMAGE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def inputs(prompts: list[list[int]], *numbers: int) -> dict[str, Tensor]:
    """A left-padded batch with these images, as a processor gives it."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == IMAGE).int(), **images(*numbers)}


def one_prompt() -> dict[str, Tensor]:
    """Two images between texts, 30 tokens."""
    return inputs([[*text(4, 1), *picture(0), *text(3, 2), *picture(1), *text(7, 3)]], 0, 1)


def two_prompts() -> dict[str, Tensor]:
    """Padded, with an image each."""
    return inputs([[*text(9, 4), *picture(0), *text(8, 5)], [*text(2, 6), *picture(1), *text(5, 7)]], 0, 1)


def even_prompts() -> dict[str, Tensor]:
    """Of one length, 30 tokens, with an image each at another place."""
    return inputs([[*text(4, 1), *picture(0), *text(17, 2)], [*text(12, 3), *picture(1), *text(11, 4)]], 0, 1)


PROMPTS = {"one": one_prompt, "padded": two_prompts, "even": even_prompts}


def conversation(model: Any, cache: Any, prompt: dict[str, Tensor]) -> Tensor:
    """Logits of a prompt, six tokens one by one, and four in one call."""
    logits = [model(**prompt, past_key_values=cache, use_cache=True).logits[prompt["attention_mask"] == 1]]
    ids = torch.tensor([text(10, 20 + b) for b in range(len(prompt["input_ids"]))])
    mask, seen = prompt["attention_mask"], prompt["attention_mask"].sum(1, keepdim=True)
    for part in ids.split([1] * 6 + [4], 1):
        at = seen + torch.arange(part.shape[1]) + model.model.rope_deltas  # text behind an image
        mask, seen = torch.cat([mask, torch.ones_like(part)], 1), seen + part.shape[1]
        given = {"attention_mask": mask, "position_ids": at.expand(3, -1, -1)}
        logits.append(model(input_ids=part, past_key_values=cache, use_cache=True, **given).logits.flatten(0, 1))
    return torch.cat(logits)


@torch.no_grad()
def check_images(configuration: Configuration) -> Result:
    """As check does with text: a conversation and generated tokens, through every cache that a model's forward pass
    fills by itself."""
    result, model = Result(configuration.name), configuration.model()
    how: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}

    def said(prompt: dict[str, Tensor], cache: Any) -> tuple[Tensor, Tensor]:
        return conversation(model, cache, prompt), model.generate(**prompt, **how)

    dense = {name: said(make(), DynamicCache(config=model.config)) for name, make in PROMPTS.items()}

    def runs(make_cache: Callable[[Any], Any]) -> Iterator[Run]:
        for name, make in PROMPTS.items():

            def logits(name: str = name, make: Any = make) -> float:
                return difference(conversation(model, make_cache(model.config), make()), dense[name][0])

            def tokens(name: str = name, make: Any = make) -> float:
                ours = model.generate(**make(), past_key_values=make_cache(model.config), **how)
                return 0.0 if torch.equal(ours, dense[name][1]) else float("inf")

            yield f"{name}, images", logits, TOLERANCE
            yield f"{name}, greedy tokens behind images", tokens, TOLERANCE

    with kvcompress.attach(model):
        for name, make in OTHERS.items():
            compare(result, name, list(runs(make)))
    if result.failures:
        result.outcome, result.reason = "wrong", "; ".join(result.failures)
    return result
