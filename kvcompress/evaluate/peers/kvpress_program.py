"""kvpress's presses on prompts given as tokens; run in a Python of kvpress's own, which has none of ours.

    python kvpress_program.py            what there is: one JSON line {"versions", "presses", "not_run"}
    python kvpress_program.py FOLDER     measures what FOLDER/request.json asks for

request.json: {"model": name or folder, "dtype", "device", "check": ids, "tasks": [{"samples": [...]}, ...], "runs":
[{"press", "task": number, "share": of the cache that stays}, ...]}. A sample is {"read": ids, "asked": [{"ids",
"new_tokens"}, ...], "turns": whether they follow each other in one cache}, or {"read": ids, "scored": [ids, ...]}:
texts that go on behind it, each of a copy of the cache. FOLDER/tokenizer is the model's tokenizer.

Prints one JSON line {"nats": of a token of `check`}, or {"refused": why}, and one for each run: {"setting",
"frees_memory", "seconds", "samples": [...]} or {"error"}. Of a sample: nbytes of the tokens that attention still sees,
first_seconds until the first token, and either {"written": ids of each answer, "token_seconds"} or {"scored": [{"nats":
of each token but a text's first, "greedy": the likeliest in its place}, ...]}. frees_memory: whether what goes leaves
the cache, which it does not where heads keep different numbers.

As kvpress's own pipeline does, a press reads the prompt whole, what follows stands at the positions behind it, and
answers are greedy. A press hides keys of single heads by writing a key over them that no query sees; its search for
one fails with as many queries as are asked here at once, so that attention leaves those keys out itself: what the
trick is for.
"""

import copy
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DynamicCache,
    RepetitionPenaltyLogitsProcessor,
)

EXACT = "exact"
DENSE = "dense"
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
    that module.masked_key_indices (batch, KV heads, places) hides from what follows a prompt. Raises ValueError for
    layers that compute anything else."""
    S, T = query.shape[2], key.shape[2]
    window = others.get("sliding_window")
    if window is not None and T > window:
        raise ValueError(f"a sliding window of {window} tokens, which presses know nothing of")
    for name in ("softcap", "s_aux"):
        if others.get(name) is not None:
            raise ValueError(f"attention with {name}, which is not measured here")
    mask = None
    if S == T:
        module.masked_key_indices = None  # another prompt
    else:
        mask = torch.ones(S, T, dtype=torch.bool, device=key.device).tril(T - S)
        hidden = getattr(module, "masked_key_indices", None)
        if hidden is not None:
            batch, heads, places = (index.to(key.device) for index in hidden)
            seen = torch.ones(*key.shape[:2], T, dtype=torch.bool, device=key.device)
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
    """(the cache after a prompt, bytes of what attention sees in it, whether the rest is gone)."""
    cache = DynamicCache()
    torch.manual_seed(0)
    for module in layers_of(model):
        module.masked_key_indices = None
    ids = torch.tensor([prompt], device=model.device)
    if press is None:
        model.model(input_ids=ids, past_key_values=cache)
    else:
        # the one press that reads the weights of the prompt's own attention
        set_attention(model, "eager" if type(press).__name__ == "ObservedAttentionPress" else EXACT)
        with press(model):
            model.model(input_ids=ids, past_key_values=cache)
        set_attention(model, EXACT)
    nbytes, freed = 0, True
    for module, layer in zip(layers_of(model), cache.layers, strict=True):
        hidden = getattr(module, "masked_key_indices", None)
        gone = 0 if hidden is None else len(hidden[2])
        entries = layer.keys.shape[1] * layer.keys.shape[2]
        nbytes += (layer.keys.nbytes + layer.values.nbytes) * (entries - gone) // entries
        freed = freed and gone == 0
    return cache, nbytes, freed


def forward(model: Any, ids: list[int], position: int, cache: DynamicCache, **options: Any) -> Tensor:
    """Logits [tokens, vocabulary]."""
    places = torch.arange(position, position + len(ids), device=model.device)[None]
    coming = torch.tensor([ids], device=model.device)
    return model(input_ids=coming, position_ids=places, past_key_values=cache, **options).logits[0].float()


def ends_of(model: Any) -> list[int | None]:
    """Tokens that end an answer."""
    ends = model.generation_config.eos_token_id
    return ends if isinstance(ends, list) else [ends]


def write(model: Any, cache: DynamicCache, said: list[int], new: int, count: int) -> tuple[list[int], list[float]]:
    """(ids that follow what was said, greedily; when each was there). new: of the last that the cache has not read."""
    options, ends = model.generation_config, ends_of(model)
    penalty = None
    if options.repetition_penalty not in (None, 1.0):  # as `generate` has it
        penalty = RepetitionPenaltyLogitsProcessor(options.repetition_penalty)
    ids, times = list(said), []
    for _ in range(count):
        logits = forward(model, ids[-new:], len(ids) - new, cache, logits_to_keep=1)[-1:]
        if penalty is not None:
            logits = penalty(torch.tensor([ids], device=model.device), logits)
        ids.append(int(logits.argmax()))
        times.append(time.perf_counter())
        new = 1
        if ids[-1] in ends:
            break
    return ids[len(said) :], times


@torch.no_grad()
def measure(model: Any, sample: dict[str, Any], press: Any) -> tuple[dict[str, Any], bool]:
    """(what there is to say of a sample, whether what goes leaves the cache). press: None for the dense cache."""
    begin = time.perf_counter()
    cache, nbytes, freed = read(model, sample["read"], press)
    reading, position = time.perf_counter() - begin, len(sample["read"])
    if "scored" in sample:
        scored, first = [], 0.0
        for number, text in enumerate(sample["scored"]):
            own, parts = cache if number + 1 == len(sample["scored"]) else copy.deepcopy(cache), []
            begin = begin if first else time.perf_counter() - reading  # a copy's time is not the reading's
            for begin_at, end in ((0, 1), (1, len(text) - 1)):  # the first token alone: when it was there
                if begin_at < end:
                    parts.append(forward(model, text[begin_at:end], position + begin_at, own))
                first = first or time.perf_counter() - begin
            logits, wanted = torch.cat(parts), torch.tensor(text[1:], device=model.device)
            nats = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
            if not bool(nats.isfinite().all()):
                raise ValueError("nats that are no numbers")
            scored.append({"nats": nats.tolist(), "greedy": logits.argmax(-1).tolist()})
        return {"nbytes": nbytes, "first_seconds": first, "scored": scored}, freed
    said, known, written, firsts, tokens = list(sample["read"]), position, [], [], []
    for number, asked in enumerate(sample["asked"]):
        last = sample["turns"] or number + 1 == len(sample["asked"])
        conversation, started = said + asked["ids"], time.perf_counter()
        own = cache if last else copy.deepcopy(cache)
        ids, times = write(model, own, conversation, len(conversation) - known, asked["new_tokens"])
        written.append(ids)
        firsts.append(times[0] - started)
        tokens += [(times[-1] - times[0]) / (len(times) - 1)] if len(times) > 1 else []
        if sample["turns"]:
            ended = ids[-1] in ends_of(model)  # by a token that no cache has read: the next turn brings it, if need be
            said = conversation + (ids[:-1] if ended else ids)
            known = len(said) - (not ended)
    per_token = sum(tokens) / len(tokens) if tokens else None
    return {
        "nbytes": nbytes,
        "first_seconds": reading + firsts[0],
        "token_seconds": per_token,
        "written": written,
    }, freed


def answers(model: Any, request: dict[str, Any], known: dict[str, Callable[[float], Any]]) -> Iterator[dict[str, Any]]:
    for run in request["runs"]:
        begin = time.perf_counter()
        try:
            press = None if run["press"] == DENSE else known[run["press"]](1 - run["share"])
            found = [measure(model, sample, press) for sample in request["tasks"][run["task"]]["samples"]]
        except Exception as error:  # a press that does not run is an answer that says so
            set_attention(model, EXACT)
            yield {"error": f"{type(error).__name__}: {error}"}
            continue
        yield {"setting": repr(press), "frees_memory": all(freed for _, freed in found),
               "seconds": time.perf_counter() - begin, "samples": [sample for sample, _ in found]}  # fmt: skip


def load(folder: Path, request: dict[str, Any]) -> Any:
    """The model, with attention as above. Raises ValueError for one whose layers kvpress does not find."""
    AttentionInterface.register(EXACT, attend)
    dtype = getattr(torch, request["dtype"])
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=dtype, attn_implementation=EXACT).eval()
    try:
        layers_of(model)
    except AttributeError:
        raise ValueError(f"kvpress hooks model.model.layers[...].self_attn, {type(model).__name__} has none") from None
    model.name_or_path = model.config.name_or_path = str(folder / "tokenizer")  # where presses look for it
    return model.to(request["device"])


@torch.no_grad()
def nats_of(model: Any, ids: list[int]) -> float:
    """Of a token, in one pass: tells whether this is the model that the other side has."""
    logits = forward(model, ids[:-1], 0, DynamicCache())
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:], device=model.device)))


def main(arguments: list[str]) -> None:
    # libraries print what they like: what this program says has a way of its own
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(line: dict[str, Any]) -> None:
        own.write(json.dumps(line) + "\n")
        own.flush()

    from importlib.metadata import version

    import kvpress

    known = presses(kvpress)
    if not arguments:
        not_run = {name: NOT_RUN[name] for name in NOT_RUN if hasattr(kvpress, name.partition("(")[0])}
        versions = {"kvpress": version("kvpress"), "transformers": transformers.__version__}
        say({"versions": versions, "presses": list(known), "not_run": not_run})
        return
    folder = Path(arguments[0])
    request = json.loads((folder / "request.json").read_text())
    try:
        model = load(folder, request)
        say({"nats": nats_of(model, request["check"])})
    except Exception as error:  # which model this transformers takes is not known before
        say({"refused": f"{type(error).__name__}: {error}"})
        return
    for answer in answers(model, request, known):
        say(answer)


if __name__ == "__main__":
    main(sys.argv[1:])
