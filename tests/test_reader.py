"""read(...).ask(...), the pipeline and the chat: text in, text out, over one reading."""

import io
from pathlib import Path

import pytest
import torch
from helpers import tiny_model
from rich.console import Console
from transformers import pipeline

import kvcompress
import kvcompress.pipelines
from kvcompress import IterativeCache, PrunedCache, Reading, SnapKV, StreamingCache
from kvcompress.apps.chat import Chat, run_chat
from kvcompress.caches.spec import CacheSpec

FILLER = "def area(width, height):\n    return width * height\n\n"
TEXT = (
    FILLER * 4 + "# The pass key of iron-lake is 48213.\n" + FILLER * 6
    + "# The pass key of moss-star is 90467.\n" + FILLER * 4
)  # fmt: skip
QUESTIONS = ["\n# The pass key of iron-lake is ", "\n# The pass key of moss-star is "]
ANSWERS = ["48213", "90467"]


@pytest.fixture(scope="module")
def example():
    return kvcompress.load_example_model()


@pytest.fixture(scope="module")
def reading(example):
    return kvcompress.read(*example, TEXT)


def test_a_text_is_read_once_and_asked_often(reading, tmp_path, example):
    assert reading.cache.seen_lengths() == [len(TEXT)]
    assert reading.cache.compression_ratio() > 2
    held = reading.cache.nbytes()
    assert reading.ask(QUESTIONS, max_new_tokens=5) == ANSWERS
    assert reading.ask(QUESTIONS[0], max_new_tokens=5) == ANSWERS[0]
    assert reading.cache.nbytes() == held and reading.cache.get_seq_length() == len(TEXT)
    again = Reading.load(reading.save(tmp_path / "text.safetensors"), *example)
    assert again.ask(QUESTIONS[1], max_new_tokens=5) == ANSWERS[1]
    assert torch.equal(again.cache.read_ids, reading.cache.read_ids)


def test_each_question_can_have_several_answers_that_end_at_a_text(reading):
    found = reading.ask(QUESTIONS, num_beams=2, num_return_sequences=2, max_new_tokens=5)
    assert [best for best, _ in found] == ANSWERS and all(second not in ANSWERS for _, second in found)
    assert reading.ask(QUESTIONS[0], stop_strings=["2"]) == "482"


@pytest.mark.parametrize(
    "cache",
    ["quest,token_budget=256", CacheSpec("streaming", {"window_size": "2000"}), lambda c: PrunedCache(c, keep=1.0)],
    ids=["text", "spec", "cache"],
)
def test_any_cache_can_read(cache, example):
    model, tokenizer = example
    given = cache(model.config) if callable(cache) else cache
    assert kvcompress.read(model, tokenizer, TEXT, cache=given).ask(QUESTIONS[0], max_new_tokens=5) == ANSWERS[0]


def test_a_guide_says_what_will_be_asked(example):
    model, tokenizer = example
    memory = IterativeCache(model.config, memory_size=64, chunk_size=128)
    assert kvcompress.read(model, tokenizer, TEXT, cache=memory, guide=QUESTIONS[1]).ask(
        QUESTIONS[1], max_new_tokens=5
    ) == ANSWERS[1]  # fmt: skip


def test_a_converted_model_reads_with_its_own_cache():
    model, tokenizer = kvcompress.load_example_model(retrofit="dmc")
    found = kvcompress.read(model, tokenizer, TEXT)
    assert isinstance(found.cache, kvcompress.DMCCache) and found.ask(QUESTIONS[0], max_new_tokens=5) == ANSWERS[0]
    with pytest.raises(ValueError, match="keep must be None with a model converted to dmc"):
        kvcompress.read(model, tokenizer, TEXT, keep=0.5)


def test_what_reading_cannot_do_is_named(example, reading, tmp_path):
    model, tokenizer = example
    streaming = StreamingCache(model.config)
    for error, given in (
        (
            r"keep must be None .* got keep=0.5 and cache='streaming': leave one .* \('pruned,keep=\.\.\.'\)",
            {"keep": 0.5, "cache": "streaming"},
        ),
        (r"how many stay is keep=0.25 \(0.75 was the share to remove\)", {"budget": 0.75}),
        ("cache must be a compressed one, got dense", {"cache": "dense"}),
        ("cache must be a kvcompress cache, or one as text, got int", {"cache": 3}),
        ("guide has no effect", {"cache": streaming, "guide": "x"}),
        (r'with Replay, .*: give cache="pruned,pruner=snapkv,keep=0.5", say', {"keep": 0.5, "guide": "x"}),
        ("memory_size is keep here, got memory_size=64", {"memory_size": 64}),
        (r"is keep = 1 - compression_ratio here: keep=0.25; got", {"compression_ratio": 0.75}),
        ("cache must be empty, got PrunedCache", {"cache": reading.cache}),
    ):
        with pytest.raises(ValueError, match=error):
            kvcompress.read(model, tokenizer, TEXT, **given)
    with pytest.raises(ValueError, match="text must not be empty"):
        kvcompress.read(model, tokenizer, "")
    with pytest.raises(ValueError, match="question must not be empty"):
        reading.ask("")
    with pytest.raises(ValueError, match="return_dict_in_generate must be False for ask, got True"):
        reading.ask(QUESTIONS[0], return_dict_in_generate=True)
    cache = kvcompress.prefill(
        model, tokenizer(TEXT, return_tensors="pt").input_ids, PrunedCache(model.config, keep=64)
    )
    with pytest.raises(ValueError, match=r"cache must be one that kvcompress.read has filled"):
        Reading.load(cache.save(tmp_path / "bare.safetensors"), model, tokenizer)


def test_the_pipeline_reads_each_prompt_through_a_new_cache(example):
    model, tokenizer = example
    generator = pipeline(
        "kvcompress-text-generation", model=model, tokenizer=tokenizer,
        cache="iterative,memory_size=128,chunk_size=256,pruner=snapkv,num_sink_tokens=4",
    )  # fmt: skip
    options = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    found = generator([TEXT + QUESTIONS[0]] * 2, guide=QUESTIONS[0], **options)
    assert [one[0]["generated_text"] for one in found] == [ANSWERS[0]] * 2
    made = []

    def new_cache(config):
        made.append(PrunedCache(config, keep=1.0))
        return made[-1]

    found = generator([TEXT + question for question in QUESTIONS], cache=new_cache, batch_size=2, **options)
    assert [one[0]["generated_text"] for one in found] == ANSWERS
    assert [cache.seen_lengths() for cache in made] == [[len(TEXT + QUESTIONS[0]) + 4] * 2]
    with pytest.raises(ValueError, match="cache must be a compressed one, got dense"):
        generator(TEXT, cache="dense", **options)


def test_a_conversation_goes_on_over_one_cache_and_in_another(example, tmp_path):
    file, console = tmp_path / "talk.safetensors", Console(file=io.StringIO(), width=200)
    lines = [
        TEXT + QUESTIONS[0],
        "/memory",
        f"/save {file}",
        "/reset",
        "/memory",
        f"/load {file}",
        "/help",
        "/nothing",
        "/load x",
    ]
    run_chat(
        model="example", cache="pruned,keep=1.0", max_new_tokens=5, device="cpu",
        lines=[*lines, "/save", "/quit", "never read"], console=console, prompt=False,
    )  # fmt: skip
    seen = len(TEXT + QUESTIONS[0]) + 4
    memory, saved, empty, after, loaded, unknown, *_, missing, nameless = [
        line for line in console.file.getvalue().splitlines() if not line.startswith(("  ", "/"))
    ]
    assert memory == f"PrunedCache: {seen} tokens seen" and saved == f"saved to {file}" and empty == "empty"
    assert after == "PrunedCache(empty)" and loaded.startswith(f"PrunedCache({seen} tokens seen")
    assert (
        sum(line.startswith("/help ") for line in console.file.getvalue().splitlines()) == 2
    )  # asked, and of /nothing
    assert nameless == "no file given: /save FILE"
    assert unknown == "no such command: /nothing" and missing == "path must be a file that save wrote, got x"

    model, tokenizer = example
    with kvcompress.attach(model):
        chat = Chat(model, tokenizer, CacheSpec.parse("pruned,keep=1.0"), 5)
        chat.load(file)
        assert chat.turn(QUESTIONS[1][1:]) == ANSWERS[1]
    assert chat.cache.seen_lengths() == [seen + 1 + len(QUESTIONS[1]) + 4]  # the last token of the first answer too


LINES = (  # as SmolLM2, Qwen and others have it: a newline behind the end of a turn, which no model writes
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\0\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRIMMED = LINES.replace("m.content", "m.content | trim")


@pytest.mark.parametrize("template", [LINES, TRIMMED])
@pytest.mark.parametrize("ends", [0, [7, 0]])  # eos_token_id of a generation config, one or several
def test_a_conversation_is_what_its_template_makes_of_the_whole(example, template, ends, monkeypatch):
    model, tokenizer = example[0], kvcompress.load_example_model()[1]
    tokenizer.chat_template = template
    monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
    chat, said = Chat(model, tokenizer, CacheSpec("streaming", {}), 4), []
    answers = iter(["yes\0", "cut ", "\0", "no"])  # ended, cut off amid a line, nothing at all, cut off

    def scripted(model, ids, cache, **options):
        answer = tokenizer(next(answers), return_tensors="pt").input_ids
        seen.append(tokenizer.decode(ids[0]))
        return torch.cat([ids, answer], dim=1)

    seen = []
    monkeypatch.setattr("kvcompress.apps.chat.generate", scripted)
    for asked in ("one", "two", "three", "four"):
        said.append({"role": "user", "content": asked})
        answer = chat.turn(asked)
        whole = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        assert seen[-1] == (whole if template is LINES else whole.replace("cut\0", "cut \0"))
        said.append({"role": "assistant", "content": answer})


def test_what_is_no_text_is_named(example, reading):
    model, tokenizer = example
    with pytest.raises(TypeError, match="text must be a str, got Tensor"):
        kvcompress.read(model, tokenizer, torch.ones(1, 4, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"text must be a str, got PosixPath: give text.read_text\(\)"):
        kvcompress.read(model, tokenizer, Path("text.txt"))
    with pytest.raises(TypeError, match="guide must be a str or None, got list"):
        kvcompress.read(model, tokenizer, TEXT, guide=["a"])
    for question in (3, [3], None):
        with pytest.raises(TypeError, match="question must be a str, or a list of them, got "):
            reading.ask(question)
    for cache in (object(), PrunedCache(model.config, keep=8), kvcompress.SnapKV()):
        with pytest.raises(TypeError, match=r"cache must be text, a CacheSpec or a function of the config .*got "):
            pipeline("kvcompress-text-generation", model=model, tokenizer=tokenizer, cache=cache)
    with pytest.raises(TypeError, match="guide must be a str or None, got int"):
        pipeline("kvcompress-text-generation", model=model, tokenizer=tokenizer, guide=3)


def test_a_cache_of_other_arguments_or_another_model_says_what_differs_first(reading, tmp_path):
    path = reading.save(tmp_path / "text.safetensors")
    with pytest.raises(TypeError, match=r"path must be a str or a path, got LlamaForCausalLM: load_cache\(path, model"):
        kvcompress.load_cache(reading.model, path)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got PosixPath: load_cache\(path, model"):
        kvcompress.load_cache(path, path)
    other = tiny_model()
    with pytest.raises(ValueError, match=r"saved with config.num_hidden_layers = 4 \(here \d+\), hidden_size = 256 \("):
        kvcompress.load_cache(path, other)


def test_answers_that_go_beyond_the_trained_length_are_warned_of():
    model = tiny_model(max_position_embeddings=64)
    ids = torch.arange(1, 41)[None]
    with kvcompress.attach(model):
        cache = PrunedCache(model.config, SnapKV(window=4), keep=0.5)
        with pytest.warns(UserWarning, match=r"^positions reach 69 with PrunedCache, .* trained to 64") as warned:
            kvcompress.generate(model, ids, cache, max_new_tokens=30, min_new_tokens=30)
        assert warned[0].filename == __file__
        cache = StreamingCache(model.config, window_size=16)
        kvcompress.generate(model, ids, cache, max_new_tokens=30, min_new_tokens=30)


def test_questions_beyond_the_trained_length_are_warned_of(example):
    text = FILLER * 38  # of 2,048 tokens 1,976
    reading = kvcompress.read(*example, text, cache="quantized,dtype=int8")
    with pytest.warns(UserWarning, match="positions reach .* with QuantizedCache") as warned:
        reading.ask("# What is the pass key of iron-lake, and of all the others? " * 2, max_new_tokens=1)
    assert warned[0].filename == __file__
