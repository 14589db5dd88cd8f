"""lm-eval's model `kvcompress`: the model of `hf` with room for everything, and what decoding over the cache gives."""

import functools
import json
import random

import pytest
import torch
from helpers import tiny_model
from lm_eval import simple_evaluate
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import kvcompress
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from kvcompress.lm_eval import CompressedLM
from kvcompress.models.tokenizer import byte_tokenizer

LENGTH = 160  # max_length: some contexts are longer
WORDS = ("cat", "dog", "house", "tree", "blue")
ROOM = [  # caches with room for everything
    "dense",
    "pruned,keep=512",
    "pruned,keep=512,every=3,chunk_size=32",
    "iterative,memory_size=512",
    "streaming,window_size=512",
    "quest,token_budget=512,dense_layers=0",
]
SMALL = [  # family or retrofit, cache that drops much (None: a converted model's own)
    ("llama", "pruned,pruner=snapkv,window=8,keep=0.25"),
    ("llama", "pruned,pruner=streamingllm,keep=12,budget=adakv,every=2"),
    ("llama", "pruned,pruner=tova,keep=16,positions=contiguous,chunk_size=16"),
    ("llama", "iterative,memory_size=16,chunk_size=8,pruner=snapkv,window=4"),
    ("llama", "streaming,window_size=7,num_sink_tokens=2"),
    ("llama", "quest,token_budget=12,page_size=4,dense_layers=0"),
    ("qwen3_next", "pruned,pruner=keynorm,keep=12"),  # layers that recur
    ("gpt2", "pruned,pruner=snapkv,window=4,keep=12"),  # positions that are learned
    ("gpt_oss/sliding", "pruned,pruner=snapkv,window=4,keep=12"),
    ("dmc", None),
    ("pod", "pod,tau=0.5"),
]


def text(words, seed=0):
    drawn = random.Random(seed * 1000 + words)
    return " ".join(drawn.choice(WORDS) for _ in range(words))


def settings_of(cache):
    return {} if cache is None else dict(part.split("=", 1) for part in f"cache={cache}".split(","))


def compressed(model, cache, batch_size=4, max_length=LENGTH):
    return CompressedLM(
        model, tokenizer=byte_tokenizer(), batch_size=batch_size, max_length=max_length, **settings_of(cache)
    )


def asked(kind, *arguments):
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


LOGLIKELIHOOD = asked(
    "loglikelihood",
    *((context, end) for context in (text(5), text(40), "", "a", text(9)) for end in (" cat", " blue house", "x")),
)
ROLLING = asked("loglikelihood_rolling", *((text(n),) for n in (1, 10, 70)))
GENERATE = asked(
    "generate_until", *((text(n), {"until": ["b", "\n"], "max_gen_toks": 10}) for n in (3, 12, 40))
)  # fmt: skip


@pytest.fixture(scope="module")
def plain():
    lm = HFLM(tiny_model(vocab_size=256), tokenizer=byte_tokenizer(), batch_size=1, max_length=LENGTH)
    return {kind: getattr(lm, kind)(given, disable_tqdm=True) for kind, given in (
        ("loglikelihood", LOGLIKELIHOOD), ("loglikelihood_rolling", ROLLING), ("generate_until", GENERATE),
    )}  # fmt: skip


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("cache", ROOM)
def test_with_room_for_everything_it_is_hf(cache, batch_size, plain):
    lm = compressed(tiny_model(vocab_size=256), cache, batch_size)
    found, wanted = lm.loglikelihood(LOGLIKELIHOOD, disable_tqdm=True), plain["loglikelihood"]
    assert [x[0] for x in found] == pytest.approx([x[0] for x in wanted], abs=1e-4)
    assert [x[1] for x in found] == [x[1] for x in wanted]
    assert lm.generate_until(GENERATE, disable_tqdm=True) == plain["generate_until"]
    if cache != "dense":
        assert lm.get_model_info()["cache_tokens_kept"] == 1.0
    if "quest" in cache or cache == "pruned,keep=512":
        with pytest.raises(ValueError, match=r"loglikelihood_rolling would measure no compression: give .*chunk_size"):
            lm.loglikelihood_rolling(ROLLING, disable_tqdm=True)
    else:
        rolled = lm.loglikelihood_rolling(ROLLING, disable_tqdm=True)
        assert rolled == pytest.approx(plain["loglikelihood_rolling"], abs=1e-3)


def model_of(name):
    if name in ("dmc", "pod"):
        return kvcompress.load_example_model(retrofit=name)[0]
    return tiny_model(vocab_size=256) if name == "llama" else CONFIGURATIONS[name].model()


@torch.no_grad()
def decoded(lm, context, continuation):
    """(log-likelihood, whether greedy) of tokens that are decoded one by one after the context was read."""
    ids, cache = torch.tensor([context + continuation]), lm.spec.make(lm.model.config)
    kvcompress.prefill(lm.model, ids[:, : len(context)], cache)
    total, greedy = 0.0, True
    for place, token in enumerate(continuation, len(context)):
        chances = lm.model(ids[:, place - 1 : place], past_key_values=cache).logits[0, -1].log_softmax(-1)
        total, greedy = total + float(chances[token]), greedy and int(chances.argmax()) == token
    return total, greedy


@pytest.mark.parametrize(("name", "cache"), SMALL)
@torch.no_grad()
def test_a_continuation_is_scored_as_if_decoded_after_its_context_was_read(name, cache):
    model = model_of(name)
    draw, requests = torch.Generator().manual_seed(3), []
    # what recurs reads no chunks of several lengths; PoD has 256 near tokens
    lengths = {"qwen3_next": (48, 48, 48), "pod": (361, 330, 48)}.get(name, (61, 30, 48))
    lm = compressed(model, cache, max_length=512)
    for length in lengths:
        context = torch.randint(3, 97, (length,), generator=draw).tolist()
        for count in (1, 6, 4):
            requests.append((("", ""), context, torch.randint(3, 97, (count,), generator=draw).tolist()))
    # one that greedy decoding gives
    whole = kvcompress.generate(
        model, torch.tensor([requests[-1][1]]), lm.spec.make(model.config), max_new_tokens=3, do_sample=False
    )
    requests.append((("", ""), requests[-1][1], whole[0, lengths[-1] :].tolist()))
    found = lm._loglikelihood_tokens(requests, disable_tqdm=True)
    wanted = [decoded(lm, context, continuation) for _, context, continuation in requests]
    assert [x[0] for x in found] == pytest.approx([x[0] for x in wanted], abs=2e-3)
    assert [x[1] for x in found] == [x[1] for x in wanted]
    assert found[-1][1]
    dense = model(torch.tensor([requests[1][1] + requests[1][2]])).logits[0, -7:-1].log_softmax(-1)
    dense = float(dense.gather(-1, torch.tensor(requests[1][2])[:, None]).sum())
    if name not in ("dmc", "pod"):  # a converted model without a cache decides as with one
        assert abs(found[1][0] - dense) > 0.01
    if name != "pod" and "quest" not in str(lm.spec):  # those keep all values
        assert lm.get_model_info()["cache_tokens_kept"] < 0.9


@torch.no_grad()
def test_a_text_is_scored_chunk_by_chunk_over_the_memory():
    lm, chunk = compressed(tiny_model(vocab_size=256), "iterative,memory_size=16,chunk_size=16", max_length=400), 16
    requests = asked("loglikelihood_rolling", *((text(n),) for n in (20, 60)))
    wanted = []
    for request in requests:
        ids = torch.tensor([[lm.prefix_token_id, *lm.tok_encode(request.args[0])]])
        total, last = 0.0, ids.shape[1] - 1
        sizes = lm.spec.make(lm.model.config).plan_prompt(last).chunks
        for end, size in zip(torch.tensor(sizes).cumsum(0).tolist(), sizes, strict=True):
            cache = lm.spec.make(lm.model.config)
            head = torch.cat([ids[:, : end - size], ids[:, :1]], 1)
            kvcompress.prefill(lm.model, head, cache, torch.ones_like(head))
            logits = lm.model(ids[:, end - size : end], past_key_values=cache).logits[0].log_softmax(-1)
            total += float(logits.gather(-1, ids[0, end - size + 1 : end + 1, None]).sum())
        assert max(sizes) <= chunk < last
        wanted.append(total)
    assert lm.loglikelihood_rolling(requests, disable_tqdm=True) == pytest.approx(wanted, abs=1e-2)


@pytest.mark.parametrize("cache", [SMALL[0][1], SMALL[3][1], SMALL[5][1]])
def test_generation_goes_on_over_the_cache_until_a_stop_string(cache):
    lm = compressed(tiny_model(vocab_size=256), cache)
    found = lm.generate_until(GENERATE, disable_tqdm=True)
    for answer, request in zip(found, GENERATE, strict=True):
        ids = torch.tensor([lm.tok_encode(request.args[0])[-(LENGTH - 10) :]])
        own = lm.spec.make(lm.model.config)
        out = kvcompress.generate(lm.model, ids, own, max_new_tokens=10, do_sample=False, eos_token_id=0)
        whole = lm.tok_decode(out[0, ids.shape[1] :].tolist())
        assert answer == whole.split("b")[0].split("\n")[0]
        assert len(own.stored_lengths()) == 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and two tasks with their data, all of it on disk."""
    path = tmp_path_factory.mktemp("lm_eval")
    tiny_model(vocab_size=256).save_pretrained(path / "model")
    byte_tokenizer().save_pretrained(path / "model")
    choose = [{"text": text(30, n), "ends": [" cat", " dog", " tree"], "answer": n % 3} for n in range(4)]
    common = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{text}}"}
    for task, rows, fields in (
        ("choose", choose, {"output_type": "multiple_choice", "doc_to_choice": "ends", "doc_to_target": "answer"}),
        ("read", [{"text": text(40, n)} for n in range(3)], {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        }),
    ):  # fmt: skip
        (path / f"{task}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        files = {"data_files": {"test": str(path / f"{task}.jsonl")}, "cache_dir": str(path / "cache")}
        (path / f"{task}.yaml").write_text(json.dumps({"task": task, **common, "dataset_kwargs": files, **fields}))
    return path


def test_tasks_with_local_files(folder):
    """From names to results: the model class by its name, its arguments as a string."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    given = {
        "tasks": ["choose", "read"],
        "task_manager": manager,
        "device": "cpu",
        "batch_size": 2,
        "log_samples": True,
    }
    place = f"pretrained={folder / 'model'},max_length=200"
    plain = simple_evaluate(model="hf", model_args=place, **given)
    dense = simple_evaluate(model="kvcompress", model_args=f"{place},cache=dense", **given)
    small = simple_evaluate(
        model="kvcompress", model_args=f"{place},cache=iterative,memory_size=32,chunk_size=16,pruner=tova", **given
    )
    scores = [
        [answer[0] for sample in run["samples"]["choose"] for answer in sample["filtered_resps"]]
        for run in (plain, dense, small)
    ]
    assert scores[1] == pytest.approx([float(x) for x in scores[0]], abs=1e-4)
    assert scores[2] != pytest.approx(scores[0], abs=1e-2)
    bits = [run["results"]["read"]["bits_per_byte,none"] for run in (plain, dense, small)]
    assert bits[1] == pytest.approx(bits[0], abs=1e-5)
    assert abs(bits[2] - bits[0]) > 1e-3
    assert small["config"]["cache"] == "iterative,memory_size=32,chunk_size=16,pruner=tova"
    assert small["config"]["cache_tokens_kept"] < 0.3


def test_the_command(folder, monkeypatch, capsys):
    arguments = f"pretrained={folder / 'model'},max_length=200,cache=pruned,pruner=snapkv,window=8,keep=0.25"
    monkeypatch.setattr("sys.argv", [
        "lm_eval", "--model", "kvcompress", "--model_args", arguments, "--tasks", str(folder / "choose.yaml"),
        "--device", "cpu", "--batch_size", "2",
    ])  # fmt: skip
    # without the thousands of tasks that come with it, which take a while to find
    monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False))
    cli_evaluate()
    assert "|choose|" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"cache must be one of dense, dmc, .* for LlamaForCausalLM, which is not converted, got none"),
        ({"cache": "pruned", "bugdet": 3}, r"no 'bugdet'; known are pruner, budget, keep.*of the model itself: .*dty"),
        ({"cache": "pruned", "keep": 1.5}, r"keep as a share must be above 0 and at most 1, got 1.5"),
        ({"cache": "pruned", "budget": 0.75}, r"how many stay is keep=0.25 \(0.75 was the share to remove\)"),
        ({"cache": "dmc"}, r"config.kvcompress must be that of a model converted to DMC or DMS, got none"),
    ],
)
def test_what_is_wrong_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        CompressedLM(tiny_model(vocab_size=256), tokenizer=byte_tokenizer(), **given)


def test_a_continuation_longer_than_the_window():
    lm = compressed(tiny_model(vocab_size=256), "pruned,keep=8", max_length=4)
    with pytest.raises(ValueError, match=r"max_length must be at least the 5 tokens of a continuation, got 4"):
        lm._loglikelihood_tokens([(("", ""), [5], [1, 2, 3, 4, 5])], disable_tqdm=True)


def test_a_converted_model_has_its_own_cache():
    lm = CompressedLM(kvcompress.load_example_model(retrofit="dmc")[0], tokenizer=byte_tokenizer(), chunk_size=64)
    assert str(lm.spec) == "dmc,chunk_size=64"
    with pytest.raises(ValueError, match=r"needs kvcompress\.DMCCache"):
        compressed(lm.model, "pruned,keep=8").loglikelihood(LOGLIKELIHOOD[:1], disable_tqdm=True)
