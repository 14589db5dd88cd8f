"""Tiny models that read images by positions on three axes (M-RoPE), and prompts with images in them."""

from __future__ import annotations

from typing import Any

import torch
from helpers import left_padded
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from benchmarks.quality.parts.families_models import BASE, VOCABULARY, enlarge

IMAGE, VIDEO, START = 120, 121, 122
PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2}
NARROW = {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 32}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 1},
    "qwen2_5_vl": {"depth": 1, "window_size": 16, "fullatt_block_indexes": [0], "tokens_per_second": 2, **NARROW},
    "qwen3_vl": {"depth": 2, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64, **NARROW},
}
GRIDS = ([1, 8, 4], [1, 4, 6])  # patches of the images: 8 and 6 tokens
TOKENS = [8, 6]


def vision_model(kind: str) -> Any:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = {**BASE, "rope_parameters": rope | ({"mrope_interleaved": True} if kind == "qwen3_vl" else {})}
    config = CONFIG_MAPPING[kind](
        text_config=text if kind == "qwen3_vl" else {name: x for name, x in text.items() if name != "head_dim"},
        vision_config=PATCHES | VISION[kind], image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START,
        pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.generation_config.eos_token_id = None
    enlarge(model)
    return model


def picture(number: int) -> list[int]:
    return [START, *[IMAGE] * TOKENS[number]]


def images(*numbers: int) -> dict[str, Tensor]:
    """What a processor makes of these images, in the order of their tokens."""
    draw = torch.Generator().manual_seed(7)
    every = [torch.randn(h * w * t, 3 * 2 * 16, generator=draw) for t, h, w in GRIDS]
    return {
        "pixel_values": torch.cat([every[n] for n in numbers]),
        "image_grid_thw": torch.tensor([GRIDS[n] for n in numbers]),
    }


def text(count: int, seed: int) -> list[int]:
    return torch.randint(3, 119, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def one_prompt() -> dict[str, Tensor]:
    """Two images between texts, 30 tokens."""
    return inputs([[*text(4, 1), *picture(0), *text(3, 2), *picture(1), *text(7, 3)]], 0, 1)


def two_prompts() -> dict[str, Tensor]:
    """Padded, with an image each."""
    return inputs([[*text(9, 4), *picture(0), *text(8, 5)], [*text(2, 6), *picture(1), *text(5, 7)]], 0, 1)


def even_prompts() -> dict[str, Tensor]:
    """Of one length, 30 tokens, with an image each at another place."""
    return inputs([[*text(4, 1), *picture(0), *text(17, 2)], [*text(12, 3), *picture(1), *text(11, 4)]], 0, 1)


def inputs(prompts: list[list[int]], *numbers: int) -> dict[str, Tensor]:
    ids, mask = left_padded([torch.tensor([prompt]) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == IMAGE).int(), **images(*numbers)}


assert VOCABULARY > START
