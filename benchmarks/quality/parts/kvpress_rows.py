"""kvpress's presses on the tasks of quality.py; run by peers.py in a Python of kvpress's own, which has none of ours.

    python kvpress_rows.py FOLDER

FOLDER/model is the model with its tokenizer, FOLDER/tasks.json what to measure: {"tasks": [{"name", "prompts",
"following", "places": of the answers in what follows, "answers", "sizes"}], "parts": [n, ...], "dtype"}. Prints one
JSON line for {"versions"}, for the dense cache and for each press and part: {"press", "part", "setting", "tasks":
{name: {"samples", "right", "kept", "layers"}}, "seconds"} or {"press", "part", "error"}, and one of what was left out.
samples: nats of what follows, or none; right: of each question; kept: tokens of all rows that attention still sees,
over all prompts; freed: whether what goes leaves the cache, which it does not where heads keep different numbers.
As kvpress's own pipeline does, a press reads the prompt whole, and what follows stands at the positions behind it. It
hides keys of single heads by writing a key over them that no query sees; its search for one fails with as many queries
as are asked here at once, so that attention leaves those keys out itself: what the trick is for.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache

EXACT = "exact"
NOT_RUN = {  # of kvpress.__all__: everything else that it calls a press is measured below
    "ThinKPress": "removes channels of keys, at most half of a cache, not tokens",
    "SimLayerKVPress": "has no size: whole layers keep all or sinks and 1,024 recent tokens",
    "DuoAttentionPress": "reads head patterns of named models, or a data set, from the network",
    "QFilterPress": "needs filters of named models from the network",
    "ExpectedAttentionStatsPress": "needs statistics of named models from the network",
    "KVzapPress": "needs a network trained for a named model",
    "FastKVzipPress": "needs gates trained for a named model",
    "LUKVPress": "needs budget curves of named models from the network",
    "RestoreKVPress": "needs embeddings trained for a named model",
    "FinchPress": "is told the question",
    "KVComposePress(structured=False)": "leaves its second reading in the cache",
    "DMSPress": "has no size: a threshold of scores decides",
    "CAMPress": "compresses while decoding",
    "DecodingPress": "compresses while decoding",
    "CompressionRatioDecodingPress": "compresses while decoding",
    "PrefillDecodingPress": "compresses while decoding",
    "ChunkPress": "wraps another press for long prompts",
    "KeyRerotationPress": "wraps another press and moves positions",
    "PerLayerCompressionPress": "wraps another press with ratios that the user gives",
    "ComposedPress": "wraps other presses",
}


def presses(kvpress: Any) -> dict[str, Callable[[float], Any]]:
    """By name, of the share to remove; in kvpress's own settings and, where it combines presses, its own evaluation's
    combinations and AdaKV over what is best alone."""
    k = kvpress
    alone = {
        name.removesuffix("Press"): getattr(k, name)
        for name in (
            "SnapKVPress", "PyramidKVPress", "TOVAPress", "ObservedAttentionPress", "ExpectedAttentionPress",
            "KnormPress", "KeyDiffPress", "LagKVPress", "LeverageScorePress", "NonCausalAttnPress", "CompactorPress",
            "CURPress", "CapPress", "StreamingLLMPress", "RandomPress", "KVzipPress", "KVgradPress", "KVComposePress",
        )
    }  # fmt: skip

    def expected(ratio: float, **settings: Any) -> Any:
        return k.ExpectedAttentionPress(compression_ratio=ratio, **settings)

    return {name: lambda ratio, press=press: press(compression_ratio=ratio) for name, press in alone.items()} | {
        "KVzip/plus": lambda ratio: k.KVzipPress(ratio, kvzip_plus_normalization=True),
        "KVzip/layerwise": lambda ratio: k.KVzipPress(ratio, layerwise=True),
        "AdaKV(SnapKV)": lambda ratio: k.AdaKVPress(k.SnapKVPress(ratio)),
        "AdaKV(ExpectedAttention)": lambda ratio: k.AdaKVPress(expected(ratio, epsilon=1e-2)),
        "AdaKV(KeyDiff)": lambda ratio: k.AdaKVPress(k.KeyDiffPress(ratio)),
        "AdaKV(LeverageScore)": lambda ratio: k.AdaKVPress(k.LeverageScorePress(ratio)),
        "AdaKV(Compactor)": lambda ratio: k.AdaKVPress(k.CompactorPress(ratio)),
        "CriticalKV(SnapKV)": lambda ratio: k.CriticalKVPress(k.SnapKVPress(ratio)),
        "CriticalKV(ExpectedAttention)": lambda ratio: k.CriticalKVPress(expected(ratio, use_vnorm=False)),
        "CriticalAdaKV(SnapKV)": lambda ratio: k.CriticalAdaKVPress(k.SnapKVPress(ratio)),
        "CriticalAdaKV(ExpectedAttention)": lambda ratio: k.CriticalAdaKVPress(expected(ratio, use_vnorm=False)),
        "ChunkKV(SnapKV)": lambda ratio: k.ChunkKVPress(k.SnapKVPress(ratio)),
        "EntropyGatedChunkKV(SnapKV)": lambda ratio: k.EntropyGatedChunkKVPress(k.SnapKVPress(ratio)),
        "Block(KeyDiff)": lambda ratio: k.BlockPress(k.KeyDiffPress(ratio)),
        "Merging(SnapKV)": lambda ratio: k.MergingPress(k.SnapKVPress(ratio)),
    }


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **others: Any
) -> tuple[Tensor, None]:
    """Causal attention over what the layer's cache holds, however many layers hold something else, without the keys
    that module.masked_key_indices (batch, KV heads, places) hides from what follows a prompt."""
    S, T = query.shape[2], key.shape[2]
    mask = None
    if S == T:
        module.masked_key_indices = None  # another prompt
    else:
        mask = torch.ones(S, T, dtype=torch.bool).tril(T - S)
        hidden = getattr(module, "masked_key_indices", None)
        if hidden is not None:
            batch, heads, places = (index.to(key.device) for index in hidden)
            seen = torch.ones(*key.shape[:2], T, dtype=torch.bool)
            seen[batch, heads, places] = False
            mask = (mask & seen[:, :, None]).repeat_interleave(query.shape[1] // key.shape[1], 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def set_attention(model: Any, name: str) -> None:
    model.config._attn_implementation = name


def layers_of(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


@torch.no_grad()
def read(model: Any, prompt: list[int], press: Any) -> tuple[DynamicCache, int, bool]:
    """(the cache after a prompt, tokens of all rows that attention sees in it, whether the others are gone)."""
    cache = DynamicCache(config=model.config)
    torch.manual_seed(0)
    for module in layers_of(model):
        module.masked_key_indices = None
    ids = torch.tensor([prompt])
    if press is None:
        model.model(input_ids=ids, past_key_values=cache)
    else:
        # the one press that reads the weights of the prompt's own attention
        set_attention(model, "eager" if type(press).__name__ == "ObservedAttentionPress" else EXACT)
        with press(model):
            model.model(input_ids=ids, past_key_values=cache)
        set_attention(model, EXACT)
    hidden = [getattr(module, "masked_key_indices", None) for module in layers_of(model)]
    gone = sum(len(places) for _, _, places in filter(None, hidden))
    held = sum(layer.keys.shape[1] * layer.keys.shape[2] for layer in cache.layers)
    return cache, held - gone, gone == 0


@torch.no_grad()
def measure(model: Any, task: dict[str, Any], press: Any) -> dict[str, Any]:
    """One task, prompt by prompt, as parts/tasks.py measures it; press: None for the dense cache."""
    nats, right, kept, freed = [], [], 0, True
    for row, prompt in enumerate(task["prompts"]):
        cache, seen, gone = read(model, prompt, press)
        kept, freed = kept + seen, freed and gone
        ids = torch.tensor([task["following"][row]])
        places = torch.arange(ids.shape[1])[None] + len(prompt)
        logits = model(input_ids=ids, position_ids=places, past_key_values=cache).logits[0].float()
        if task["answers"]:
            asked = zip(task["places"][row], task["answers"][row], strict=True)
            right.append([logits[at - 1 : at - 1 + len(it)].argmax(-1).tolist() == it for at, it in asked])
        else:
            nats.append(torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum").item())
    return {"nats": nats, "right": right, "kept": kept, "freed": freed}


def rows(model: Any, plan: dict[str, Any], kvpress: Any) -> Iterator[dict[str, Any]]:
    def row(name: str, part: int, make: Callable[[], Any]) -> dict[str, Any]:
        begin = time.perf_counter()
        try:
            press = make()
            of = {task["name"]: measure(model, task, press) for task in plan["tasks"]}
        except Exception as error:  # a press that does not run is a row that says so
            set_attention(model, EXACT)
            return {"press": name, "part": part, "error": f"{type(error).__name__}: {error}"}
        values = [number for task in of.values() for number in task["nats"]]
        if not all(map(math.isfinite, values)):
            return {"press": name, "part": part, "error": "nats that are no numbers"}
        return {"press": name, "part": part, "setting": repr(press), "tasks": of,
                "seconds": time.perf_counter() - begin}  # fmt: skip

    yield row("dense", 1, lambda: None)
    for part in plan["parts"]:
        for name, press in presses(kvpress).items():
            if not plan["presses"] or name in plan["presses"]:
                yield row(name, part, lambda press=press, part=part: press(1 - 1 / part))


def main(folder: Path) -> None:
    from importlib.metadata import version

    import kvpress
    import transformers

    plan = json.loads((folder / "tasks.json").read_text())
    AttentionInterface.register(EXACT, attend)
    dtype = getattr(torch, plan["dtype"])
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype, attn_implementation=EXACT).eval()
    known = {"versions": {"kvpress": version("kvpress"), "transformers": transformers.__version__}}
    print(
        json.dumps(
            known | {"not_run": {name: NOT_RUN[name] for name in NOT_RUN if hasattr(kvpress, name.partition("(")[0])}}
        )
    )
    for found in rows(model, plan, kvpress):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
