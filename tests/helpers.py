"""Shared by the tests: tiny models, random rows, and cases in place of products."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvcompress import attach
from kvcompress.hf.attach import base_model, facts_of
from kvcompress.hf.method import Call
from kvcompress.hf.reading import plain_decoder
from kvcompress.pruners import Gates
from kvcompress.pruners.gate_forms import LinearGate
from kvcompress.retrofit.passes import whole_layers
from kvcompress.support.versions import numbers_of

full_products = False  # pytest's option --all
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASKED_RANGES = (  # settings of window_scores: CGE's two orders, TOVA's and H2O's ends, masks that leave nothing
    {"skip_last": 12, "mask_first": 4},
    {"skip_last": 12, "mask_last": 12},
    {"skip_last": 0, "mask_first": 70},
    {"skip_last": 0},
    {"skip_last": 5, "mask_first": 20, "mask_last": 20},
    {"skip_last": 9, "mask_last": 200},
)
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
ALTERNATING = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
PLAIN_ROTATION = {"rope_type": "default", "rope_theta": 10000.0}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "head_dim": 8,
}  # fmt: skip
KINDS = {  # families that differ in kind: fields of their configs
    "llama": {},
    "qwen3": {},
    "gemma3_text": {**ALTERNATING, "query_pre_attn_scalar": 16},
    "gemma2": {**ALTERNATING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "phi3": {"rope_parameters": {**PLAIN_ROTATION, "partial_rotary_factor": 0.5}},
    "glm": {},  # pairs of neighbours rotate, half of a head
    "gpt_neox": {"num_key_value_heads": 4},
    "gpt_oss": {**ALTERNATING, **EXPERTS, "rope_parameters": PLAIN_ROTATION},
    "mixtral": {**EXPERTS, "sliding_window": None},
}
DMC_MODES = {  # fields of DMCConfig
    "dmc": {},
    "window": {"window": 12},
    "window 2": {"window": 2, "neuron": 0, "share_heads": "mean"},
    "dms": {"mode": "dms", "dms_window": 5},
    "dms 0": {"mode": "dms", "dms_window": 0},
    "dms own": {"mode": "dms", "dms_window": 4, "dms_decides": "own"},
}
REFUSED_BATCHES = [  # what a converted model without a cache is given beside 4 tokens, and the error
    ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "several pieces"),
    ({"attention_mask": torch.ones(2, 4)}, r"attention_mask must be \[1, 4\]"),
    ({"position_ids": torch.arange(3)[None]}, r"position_ids must be \[1, 4\]"),
    ({"position_ids": torch.tensor([[-3, -2, -1, 0]])}, "must not be negative"),
    ({"attention_mask": torch.zeros(1, 4)}, "at least one token"),
    ({"output_attentions": True}, "output_attentions"),
]


def stays(keep: Any, budget: Any = None) -> dict[str, Any]:
    """What PrunedCache takes: how much stays, and how it is divided."""
    return {"keep": keep, "budget": budget}


def covering(*lists: Iterable[Any]) -> list[Any]:
    """Cases for parametrize, of one value of each list: every pair of values of two lists occurs in at least one case.

    Marks of values (pytest.param) are the case's. With pytest's option --all: the full product. To have the backend be
    one of the parameters: covering(..., BACKENDS) of backends.py, and parametrize(..., indirect=["backend"]).
    """
    parameters = [list(values) for values in lists]
    sizes = [range(len(values)) for values in parameters]
    chosen = list(itertools.product(*sizes)) if full_products or len(sizes) < 2 else _covering(sizes)
    return [_case([parameters[i][v] for i, v in enumerate(case)]) for case in chosen]


def turns(*lists: Iterable[Any]) -> list[Any]:
    """Cases of which every value of each list is in at least one: for lists that have nothing to do with each other.
    With pytest's option --all: the full product."""
    parameters = [list(values) for values in lists]
    if full_products:
        return covering(*parameters)
    return [_case([values[n % len(values)] for values in parameters]) for n in range(max(map(len, parameters)))]


def needs_transformers(*first: int) -> Any:
    """A mark: what an older transformers does not do. make test-versions has such."""
    here = numbers_of(transformers.__version__)
    wanted = ".".join(map(str, first))
    return pytest.mark.skipif(here is not None and here < first, reason=f"from transformers {wanted} on")


def and_others(first: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """All of them, of which those that are not first are left to make test-all."""
    first = list(first)
    return first + [pytest.param(name, marks=pytest.mark.release) for name in every if name not in first]


def _covering(sizes: list[range]) -> list[tuple[int, ...]]:
    """Greedily, without luck: a case begins with the first pair that is left, and takes, parameter by parameter, the
    value with most pairs that are left; of several the one that was taken least often."""
    if not all(sizes):
        return []
    columns = list(itertools.combinations(range(len(sizes)), 2))
    left = dict.fromkeys((i, a, j, b) for i, j in columns for a in sizes[i] for b in sizes[j])  # a set with an order
    taken: Counter[tuple[int, int]] = Counter()
    cases = []
    while left:
        i, a, j, b = next(iter(left))
        case = {i: a, j: b}
        for k in sorted(set(range(len(sizes))) - {i, j}, key=lambda k: -len(sizes[k])):
            gain = [sum(_pair(k, v, *other) in left for other in case.items()) for v in sizes[k]]
            case[k] = min(sizes[k], key=lambda v: (-gain[v], taken[k, v]))
        taken.update(case.items())
        for one, other in itertools.combinations(case.items(), 2):
            left.pop(_pair(*one, *other), None)
        cases.append(tuple(case[k] for k in range(len(sizes))))
    return cases


def _pair(i: int, a: int, j: int, b: int) -> tuple[int, int, int, int]:
    return (i, a, j, b) if i < j else (j, b, i, a)


def _case(values: list[Any]) -> Any:
    """The values as parametrize takes them, with the marks of all."""
    param = type(pytest.param())
    marks = [mark for value in values if isinstance(value, param) for mark in value.marks]
    plain = [value.values[0] if isinstance(value, param) else value for value in values]
    return pytest.param(*plain, marks=marks)


def tiny_model(family: str = "llama", seed: int = 0, **settings: object) -> PreTrainedModel:
    """A random model with large weights, so that its tokens depend on everything it sees."""
    torch.manual_seed(seed)
    config_class, model_class = FAMILIES[family]
    config = config_class(
        **{
            "vocab_size": 97,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "initializer_range": 0.2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
            **({"sliding_window": None} if family == "mistral" else {}),  # as its models have it today
            **settings,
        }
    )
    return model_class(config).eval()


def kind_model(kind: str, seed: int = 0, **settings: object) -> PreTrainedModel:
    """A random model of a family of KINDS, of four layers of which those that slide see 12 tokens."""
    torch.manual_seed(seed)
    fields = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**fields, **KINDS[kind], **settings})).eval()
    for name, parameter in model.named_parameters():  # norms that are not 1, sinks that matter
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter) + (name.endswith("sinks") and 0.5)
    return model


def tiny_gates(layers: int = 3, kv_heads: int = 2, numbers: int = 64, seed: int = 5) -> Gates:
    """Of tiny_model, random, so that heads and layers differ."""
    made = torch.Generator().manual_seed(seed)
    every = [torch.randn(kv_heads, numbers + 1, generator=made, device="cpu") for _ in range(layers)]
    return Gates(tuple(every), tuple(map(float, range(-8, 9))))


def weaker(gates: Gates, factor: float) -> Gates:
    """Linear ones that say less."""
    return replace(gates, layers=tuple(LinearGate(factor * x.weight, factor * x.bias) for x in gates.layers))


def random_gates(model: Any, seed: int = 5) -> Gates:
    """Of any model."""
    with plain_decoder(model) as (_, facts):
        layers = [facts[layer] for layer in whole_layers(facts) if facts[layer].reads is None]
        heads = base_model(model).config.get_text_config(decoder=True).num_attention_heads
        made = torch.Generator().manual_seed(seed)
        return Gates(tuple(torch.randn(x.kv_heads, heads * x.head_dim + 1, generator=made) for x in layers))


@functools.cache
def tiny_gates_folder() -> str:
    """Those in a folder that is there until the tests are over."""
    _kept.append(tempfile.TemporaryDirectory(prefix="gates"))
    return str(tiny_gates().save(Path(_kept[-1].name, "gates")))


_kept: list[tempfile.TemporaryDirectory[str]] = []


def attached(*args: object, **settings: object) -> PreTrainedModel:
    """tiny_model, attached."""
    model = tiny_model(*args, **settings)  # type: ignore[arg-type]
    attach(model)
    return model


def deciding_model(
    family: str = "llama", seed: int = 0, dmc: dict | None = None, **settings: object
) -> PreTrainedModel:
    """A tiny_model that counts as converted to DMC or DMS, some of whose decisions are 0 and some 1.

    dmc: fields of DMCConfig; the shift is 0 where it is not given, as random neurons are around 0.
    """
    from kvcompress.dmc.config import DMCConfig

    model = tiny_model(family, seed, **settings)
    model.config.kvcompress = DMCConfig(**{"shift": 0.0, **(dmc or {})}).to_dict()
    return model


def forward(model: PreTrainedModel, ids: Tensor, **given: object) -> Tensor:
    """Logits, without gradients."""
    with torch.no_grad():
        return model(ids, **given).logits


def logits_of(model: PreTrainedModel, ids: Tensor, cache: object) -> Tensor:
    return forward(model, ids, past_key_values=cache)


def call_of(model: PreTrainedModel, ids: Tensor) -> Call:
    """What an attached model hands to its method in a forward pass over these ids."""
    decoder = base_model(model)
    return Call(decoder, facts_of(decoder), "input_ids", ids, None, None)


def in_ranks(ranks: int, function: Callable[..., object], *given: object, timeout: float = 180) -> list[object]:
    """What a function of a test file returns in each of so many processes, joined by gloo; it is called with `given`.

    They are forked from one that has imported what takes long. Raises AssertionError where one fails, with its error.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvcompress.retrofit.trainer", "peft", "transformers.models.llama.modeling_llama"])
    with tempfile.TemporaryDirectory() as folder:
        running = [context.Process(target=_ranked, args=(folder, r, ranks, function, given)) for r in range(ranks)]
        for process in running:
            process.start()
        for process in running:
            process.join(timeout)
            if process.is_alive():
                process.kill()
        errors = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
        assert not errors and all(process.exitcode == 0 for process in running), "\n".join(errors) or "killed"
        return [torch.load(Path(folder, f"{r}.pt"), weights_only=False) for r in range(ranks)]


def _ranked(folder: str, rank: int, ranks: int, function: Callable[..., object], given: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    join(rank, ranks, Path(folder, "store"))
    try:
        torch.save(function(*given), Path(folder, f"{rank}.pt"))
        torch.distributed.barrier()  # who leaves first must not cut off the others
    except BaseException:
        Path(folder, f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
        os._exit(1)
    torch.distributed.destroy_process_group()


def join(rank: int, ranks: int, store: Path) -> None:
    """Makes this process one of so many, as torchrun does, by a file that they share."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": "localhost"})
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)


def random_ids(length: int, batch: int = 1, seed: int = 1) -> Tensor:
    """On the default device, the same numbers on each."""
    drawn = torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device())


def left_padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts [1, n] of different length as one batch and its attention mask."""
    longest = max(prompt.shape[1] for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for b, prompt in enumerate(prompts):
        ids[b, longest - prompt.shape[1] :] = prompt[0]
        mask[b, longest - prompt.shape[1] :] = 1
    return ids, mask


def assert_padding_changes_nothing(model: PreTrainedModel) -> None:
    """Sequences of a batch without a cache, padded on either side, have the logits that each has alone."""
    prompts = [random_ids(n, seed=n) for n in (37, 5, 1, 20)]
    ids, mask = left_padded(prompts)
    left = forward(model, ids, attention_mask=mask)
    assert forward(model, ids.flip(1), attention_mask=mask.flip(1)).isfinite().all()  # all padded on the right at once
    for b, prompt in enumerate(prompts):
        n = prompt.shape[1]
        alone = forward(model, prompt)
        torch.testing.assert_close(left[b, -n:], alone[0], rtol=1e-4, atol=1e-4)
        padded = torch.zeros(2, 37, dtype=torch.long)
        padded[0, :n] = prompt[0]
        padded[1] = 5
        given = torch.stack([torch.arange(37) < n, torch.ones(37, dtype=torch.bool)])
        torch.testing.assert_close(forward(model, padded, attention_mask=given)[0, :n], alone[0], rtol=1e-4, atol=1e-4)


def assert_packed_documents_are_apart(model: PreTrainedModel) -> None:
    """Documents of one row, told apart by position_ids, have the logits that each has alone."""
    documents = [random_ids(n, seed=n) for n in (9, 1, 110, 70, 25)]  # in groups of their lengths
    packed = torch.cat(documents, 1)
    places = torch.cat([torch.arange(x.shape[1]) for x in documents])[None]
    together, begin = forward(model, packed, position_ids=places), 0
    for document in documents:
        n = document.shape[1]
        torch.testing.assert_close(together[:, begin : begin + n], forward(model, document), rtol=1e-4, atol=1e-4)
        begin += n
    assert not torch.allclose(together, forward(model, packed))


def paged(k: Tensor, v: Tensor, page_size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [R, T, D] as pages in random order: k_pages, v_pages, block_table. Free pages hold NaN."""
    R, T, D = k.shape
    blocks = -(-T // page_size)
    total = R * blocks + 3
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed), device="cpu")[: R * blocks]
    table = order.to(k.device, torch.int32).reshape(R, blocks)
    pages = []
    for x in (k, v):
        padded = x.new_full((R, blocks * page_size, D), float("nan"))
        padded[:, :T] = x
        out = x.new_full((total, page_size, D), float("nan"))
        out[table.flatten().long()] = padded.reshape(R * blocks, page_size, D)
        pages.append(out)
    return pages[0], pages[1], table


def shared_table(
    seed: int, rows: int, page_size: int, longest: int, spare: int, shortest: int = 0
) -> tuple[Tensor, ...]:
    """A random page table (the fields of ops.PageTable): rows that share pages; spare pages are free. On the default
    device, made on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (rows,), generator=generator, device="cpu")
    blocks = -(-longest // page_size) + 3
    total = rows * blocks + spare
    order = torch.randperm(total, generator=generator, device="cpu").tolist()
    table = torch.full((rows, blocks), -7, dtype=torch.int32, device="cpu")
    refs = torch.zeros(total, dtype=torch.int32, device="cpu")
    for r, length in enumerate(lengths.tolist()):
        parent = int(torch.randint(0, rows, (1,), generator=generator, device="cpu"))
        for block in range(-(-length // page_size)):
            inherits = parent < r and block * page_size < int(lengths[parent]) and block < 2
            table[r, block] = table[parent, block] if inherits else order.pop()
            refs[table[r, block]] += 1
    free_pages = torch.full((total,), -9, dtype=torch.int32, device="cpu")
    free = order[:spare]
    # what is neither used nor spare counts as used by another table
    for page in order[spare:]:
        refs[page] = 1
    free_pages[: len(free)] = torch.tensor(free, dtype=torch.int32, device="cpu")
    count = torch.tensor([len(free), 0], dtype=torch.int32, device="cpu")
    device = torch.get_default_device()
    return tuple(x.to(device) for x in (table, lengths.to(refs), refs, free_pages, count))


def rows_of(array: Tensor, table: tuple[Tensor, ...]) -> list[Tensor]:
    """The slots of each row."""
    P = array.shape[1]
    return [
        array[block_row[: -(-length // P)].long()].flatten(0, 1)[:length]
        for block_row, length in zip(table[0], table[1].tolist(), strict=True)
    ]


def check_table(table: tuple[Tensor, ...], page_size: int, others: Tensor) -> None:
    """Every page is free or named as often as refs says (others: refs of other tables), and no page is free twice."""
    block_table, lengths, refs, free_pages, free_count = (x.cpu() for x in table)
    named = others.cpu().clone()
    for r, length in enumerate(lengths.tolist()):
        for page in block_table[r, : -(-length // page_size)].tolist():
            named[page] += 1
    assert torch.equal(refs, named)
    free = free_pages[: int(free_count[0])].tolist()
    assert sorted(free) == (refs == 0).nonzero().flatten().tolist()


def others_of(table: tuple[Tensor, ...], page_size: int) -> Tensor:
    """References that are not this table's own."""
    block_table, lengths, refs, *_ = (x.cpu() for x in table)
    own = torch.zeros_like(refs)
    for r, length in enumerate(lengths.tolist()):
        for page in block_table[r, : -(-length // page_size)].tolist():
            own[page] += 1
    return (refs - own).to(table[2].device)
