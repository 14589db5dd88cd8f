"""Training data: sources as they are written, packing, mixtures, streams, what is held out, resuming in the middle."""

import itertools
import json
import math

import pytest
import torch
from helpers import tiny_model
from test_retrofit import RECIPE, arguments
from transformers import TrainerCallback
from transformers.integrations import integration_utils
from typer.testing import CliRunner

from kvcompress import dmc, pod
from kvcompress.cli import app
from kvcompress.dmc import DMCRecipe
from kvcompress.models.tokenizer import byte_tokenizer
from kvcompress.pod import PoDConfig
from kvcompress.retrofit.data import collate
from kvcompress.retrofit.packing import Packing
from kvcompress.retrofit.run import RunSettings, load_data, train
from kvcompress.retrofit.sources import DataSource
from kvcompress.retrofit.trainer import RetrofitTrainer

TOKENIZER = byte_tokenizer()


def write(path, texts, column="text"):
    path.write_text("".join(json.dumps({column: text, "number": 1}) + "\n" for text in texts))
    return str(path)


def text_of(rows):
    return b"".join(bytes(row["input_ids"]) for row in rows)


# ---- sources ----


def test_a_source_is_read_as_it_is_written():
    source = DataSource.parse("a/b, config=c,split=train[:1%],column=body,weight=0.5,validation=test")
    assert source == DataSource("a/b", "c", "train[:1%]", "body", 0.5, "test")
    assert DataSource.parse(str(source)) == source and str(DataSource("x.jsonl")) == "x.jsonl"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begin with the name"),
        ("a,weight", "config=..., split=..., column=..., weight=..., validation=..., once each; got 'weight'"),
        ("a,share=1", "got 'share=1' in 'a,share=1'"),
        ("a,split=x,split=y", "got 'split=y'"),
        ("a,weight=much", "weight must be a number, got 'much'"),
        ("a,weight=-1", "weight must be positive, got -1.0 for a"),
        ("a,weight=nan", "weight must be positive"),
    ],
)
def test_what_is_no_source_is_refused(text, message):
    with pytest.raises(ValueError, match=message.replace("...", r"\.\.\.")):
        DataSource.parse(text)


@pytest.mark.parametrize("streaming", [False, True])
def test_errors_name_what_is_not_there(tmp_path, streaming):
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder / "train.jsonl", ["a", "b"])
    write(folder / "test.jsonl", ["c"])
    numbers = DataSource(str(folder), column="number")
    for source, message in (
        (DataSource(str(folder), split="dev"), r"got corpus \(split 'dev'\): .*'train', 'test'"),
        (DataSource(str(folder), config="en"), "got corpus .*'en' not found"),
        (DataSource(str(folder), column="body"), "column must be one of text, number, which corpus has, got 'body'"),
        (numbers, "column 'number' of corpus must hold text, got int"),
    ):
        with pytest.raises(ValueError, match=message):
            source.load(streaming=streaming)
    for name in (str(tmp_path / "none"), "none.jsonl", "./none", "a/b/c"):
        with pytest.raises(FileNotFoundError, match=f"a file, a folder or the name of a data set, got {name}"):
            DataSource(name).load(streaming=streaming)
    with pytest.raises(FileNotFoundError, match=r"a pattern of files that are there, got zzz\*\.jsonl"):
        DataSource("zzz*.jsonl").load(streaming=streaming)
    loaded = DataSource(str(folder), split="test").load(streaming=streaming)
    assert list(loaded) == [{"text": "c"}]
    assert sorted(x["text"] for x in DataSource(f"{folder}/*.jsonl").load(streaming=streaming)) == ["a", "b", "c"]


# ---- packing ----


@pytest.mark.parametrize("validation", [-1, float("nan"), float("inf"), 1.5])
def test_a_validation_that_is_no_number_of_documents_is_refused(validation):
    with pytest.raises(ValueError, match="validation must be a number of documents, or a share of them below 1"):
        Packing(4, validation=validation)
    with pytest.raises(ValueError, match=r"validation must be a number of documents, got 0\.5"):
        Packing(4, streaming=True, validation=0.5)


def test_empty_texts_of_a_stream_are_not_held_out(tmp_path):
    file = write(tmp_path / "a.jsonl", ["", None, "abcdefgh", "abcdefgh", "ijklmnop", "qrstuvwxyz"])
    rows, held = Packing(4, streaming=True, validation=2).rows([DataSource(file)], TOKENIZER)
    assert text_of(held.rows) == b"abcdefgh\0ijklmno"
    assert next(iter(rows))["input_ids"] == list(b"qrst")


def test_rows_know_where_their_documents_begin(tmp_path):
    source = DataSource(write(tmp_path / "a.jsonl", ["abc", "", "defghijk", "l"]))
    rows, held = Packing(4).rows([source], TOKENIZER)
    assert held is None and text_of(rows) == b"abc\0defghijk\0l\0"[:12]
    assert rows["documents"] == [[4], [4], [4]]
    rows, _ = Packing(5).rows([source], TOKENIZER)
    assert rows["documents"] == [[4, 1], [5], [3, 2]]
    batch = collate(list(rows))
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0], [0, 1, 2, 3, 4], [0, 1, 2, 0, 1]]
    hidden = batch["labels"] == -100
    assert torch.equal(hidden, batch["position_ids"] == 0)
    assert torch.equal(batch["labels"][~hidden], batch["input_ids"][~hidden])
    assert Packing(5, borders=False).rows([source], TOKENIZER)[0].column_names == ["input_ids"]


@pytest.mark.parametrize("method", ["plain", "dmc", "dms", "pod"])
def test_no_document_of_a_row_sees_another(tmp_path, method):
    texts = ["a first document of some length", "two", "and the third one, which is longer than both of them"]
    rows, _ = Packing(48).rows([DataSource(write(tmp_path / "a.jsonl", texts))], TOKENIZER)
    model = tiny_model(vocab_size=256).eval()
    if method == "pod":
        pod.convert(model, PoDConfig([[0, 0], [0, 0], [2, 2]], sinks=1, recent=4))
    elif method != "plain":
        dmc.convert(model, dmc.DMCConfig(shift=0.0, mode=method, dms_window=4), anneal=False)
    batch = collate([rows[0]])
    assert rows[0]["documents"] == [32, 4, 12]
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        parts = batch["input_ids"].split(rows[0]["documents"], 1)
        alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in parts], 1)
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


def test_tokenising_is_done_once(tmp_path, monkeypatch):
    source = DataSource(write(tmp_path / "a.jsonl", ["some text"] * 9))
    first, _ = Packing(7).rows([source], TOKENIZER)
    calls = []
    monkeypatch.setattr(type(TOKENIZER), "__call__", lambda *_, **__: calls.append(1) or 1 / 0)
    again, _ = Packing(7).rows([source], TOKENIZER)
    assert text_of(again) == text_of(first) and not calls
    other, _ = Packing(5).rows([source], TOKENIZER)  # rows of another length, of the same tokens
    assert len(other) == 18 and not calls


# ---- mixtures and streams ----


@pytest.mark.parametrize("streaming", [False, True])
def test_weights_are_shares_of_the_tokens(tmp_path, streaming):
    long = write(tmp_path / "long.jsonl", ["a" * 49] * 30)
    short = write(tmp_path / "short.jsonl", ["b" * 4] * 300, column="body")
    sources = [DataSource(long, weight=3.0), DataSource(short, column="body", weight=1.0)]
    rows, _ = Packing(10, streaming=streaming, seed=1).rows(sources, TOKENIZER)
    drawn = text_of(itertools.islice(rows, 400))
    share = (drawn.count(b"a") / 49 * 50) / len(drawn)
    assert share == pytest.approx(0.75, abs=0.07)
    again, _ = Packing(10, streaming=streaming, seed=1).rows(sources, TOKENIZER)
    assert text_of(itertools.islice(again, 400)) == drawn
    with pytest.raises(ValueError, match=r"all sources or for none, got none for long\.jsonl"):
        Packing(10).rows([DataSource(long), sources[1]], TOKENIZER)
    with pytest.raises(ValueError, match="each of several sources that are streamed"):
        Packing(10, streaming=True).rows([DataSource(long), DataSource(long)], TOKENIZER)


def test_sources_without_weights_are_as_large_as_they_are(tmp_path):
    sources = [DataSource(write(tmp_path / f"{x}.jsonl", [x * 9] * n)) for x, n in (("a", 3), ("b", 1))]
    assert text_of(Packing(10).rows(sources, TOKENIZER)[0]) == b"aaaaaaaaa\0" * 3 + b"bbbbbbbbb\0"


def test_a_stream_begins_again_and_is_drawn_from_a_buffer(tmp_path):
    texts = [f"{i:09d}" for i in range(20)]
    source = DataSource(write(tmp_path / "a.jsonl", texts))
    rows, _ = Packing(10, streaming=True, buffer=1).rows([source], TOKENIZER)
    assert text_of(itertools.islice(rows, 41)).decode().split("\0")[:-1] == [*texts, *texts, texts[0]]
    drawn = text_of(itertools.islice(Packing(10, streaming=True, buffer=5).rows([source], TOKENIZER)[0], 20))
    assert sorted(drawn.decode().split("\0")[1:]) != drawn.decode().split("\0")[1:]
    assert sorted(drawn.decode().split("\0")[:-1]) == texts
    with pytest.raises(ValueError, match=r"at least the 999 tokens of a row .* got 200 in a\.jsonl"):
        Packing(999, streaming=True).rows([source], TOKENIZER)
    with pytest.raises(ValueError, match=r"got none in the first 1,000 records of b\.jsonl"):
        Packing(9, streaming=True).rows([DataSource(write(tmp_path / "b.jsonl", ["", ""]))], TOKENIZER)


# ---- what is held out ----


@pytest.mark.parametrize(("streaming", "validation"), [(False, 4), (False, 0.2), (True, 4)])
def test_held_out_documents_are_not_trained_on(tmp_path, streaming, validation):
    texts = [f"{i:04d}é" for i in range(20)]
    source = DataSource(write(tmp_path / "a.jsonl", texts))
    rows, held = Packing(7, streaming=streaming, validation=validation).rows([source], TOKENIZER)
    trained = set(text_of(itertools.islice(rows, 16)).decode().split("\0")) - {""}
    kept = set(text_of(held.rows).decode().split("\0")) - {""}
    assert len(kept) == 4 and trained | kept == set(texts) and not trained & kept
    assert (held.tokens, held.nbytes) == (24, 24)
    whole, held = Packing(7).rows([DataSource(source.name, validation="train")], TOKENIZER)
    assert len(whole) == len(held.rows) == 20
    with pytest.raises(ValueError, match=r"leave documents to train on, got 20 of 20 in a\.jsonl"):
        Packing(7, validation=20).rows([source], TOKENIZER)


def test_bits_per_byte_are_those_of_all_predicted_tokens(tmp_path):
    texts = ["a document", "b", "the third document of these"] * 3
    source = DataSource(write(tmp_path / "a.jsonl", texts), validation="train")
    rows, held = Packing(16).rows([source], TOKENIZER)
    model = tiny_model(vocab_size=256)
    dmc.convert(model, dmc.DMCConfig(shift=1.0), anneal=False)
    settings = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 4}
    run = RetrofitTrainer(
        model, arguments(tmp_path / "run", **settings), DMCRecipe(anneal_steps=0, ramp_steps=1, solidify_steps=0),
        train_dataset=rows, data_collator=collate, validation=held,
    )  # fmt: skip
    found = run.evaluate()
    nats, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            for part in torch.tensor([row["input_ids"]]).split(row["documents"], 1):
                if part.shape[1] > 1:
                    lines = model(part, use_cache=False).logits[0, :-1].log_softmax(-1)
                    nats -= float(lines.gather(1, part[0, 1:, None]).sum())
                    count += part.shape[1] - 1
    assert found["eval_loss"] == pytest.approx(nats / count, rel=1e-4)
    assert found["eval_bits_per_byte"] == pytest.approx(nats / count / math.log(2), rel=1e-4)  # tokens are bytes
    assert found["eval_ratio_hard"] >= 1


# ---- runs ----


def run_settings(tmp_path, **more):
    path = tmp_path / "corpus.jsonl"
    if not path.is_file():
        write(path, [f"document {i} of a corpus, {i * i} " * (1 + i % 3) for i in range(40)])
    given = {"out": tmp_path / "run", "data": (f"{path},weight=1",), "length": 32, "rows": 2, "bfloat16": False}
    return RunSettings(**given | {"save_steps": 5, "log_steps": 1, "learning_rate": 3e-3} | more)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_resumes_at_its_place_in_the_data(tmp_path, streaming):
    settings = run_settings(tmp_path, streaming=streaming, shuffle_buffer=8, validation=4, keep_checkpoints=None)

    def trained(resume):
        model = tiny_model(vocab_size=256)
        dmc.convert(model, dmc.DMCConfig(shift=1.0))
        found = train(model, TOKENIZER, RECIPE, settings, resume=resume)
        return [x.clone() for x in model.parameters()], found

    whole, figures = trained(False)
    for name in ("checkpoint-10", "model.safetensors", "training.json"):
        path = settings.out / name
        path.rename(settings.out / f"gone-{name}")
    again, resumed = trained(True)
    for x, y in zip(whole, again, strict=True):
        assert torch.equal(x, y)
    first, last = figures["validation"]
    assert (first["step"], last["step"]) == (0, 10) and last["eval_bits_per_byte"] < first["eval_bits_per_byte"]
    assert resumed["validation"][-1]["eval_bits_per_byte"] == last["eval_bits_per_byte"]
    lines = [json.loads(line) for line in (settings.out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 5, 10]


def test_the_command_takes_data_sets_and_reports(tmp_path, monkeypatch):
    reported = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            reported.append(logs)

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Reporter)
    path = write(tmp_path / "a.jsonl", [f"words and words, {i} and {i * i}. " * 8 for i in range(40)])
    done = CliRunner().invoke(
        app,
        ["retrofit", "gqa", "--out", str(tmp_path / "out"), "--kv-heads", "1", "--steps", "2", "--rows", "2",
         "--length", "128", "--data", f"{path},weight=1", "--streaming", "--validation", "2",
         "--report-to", "tensorboard", "--float32"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert any("eval_bits_per_byte" in logs for logs in reported)
    figures = json.loads((tmp_path / "out" / "training.json").read_text())
    assert figures["settings"]["data"] == ["a.jsonl,weight=1.0"]
    assert [x["step"] for x in figures["validation"]] == [0, 2]


def test_settings_of_data_are_checked(tmp_path):
    for more, message in (
        ({"validation": 0.5, "streaming": True}, r"validation must be a number of documents, got 0\.5"),
        ({"validation": 1.5}, r"or a share of them below 1, got 1\.5"),
        ({"validation": -1}, "validation must be"),
        ({"eval_steps": 0}, "eval_steps must be an integer of at least 1"),
        ({"data": ("x,weight=0",)}, "weight must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            run_settings(tmp_path, **more)
    with pytest.raises(ValueError, match=r"validation must be 1 to .* for the example model, got 100000"):
        load_data(run_settings(tmp_path, data=(), length=128, validation=100000), TOKENIZER)
    assert load_data(run_settings(tmp_path, data=(), length=128, validation=2), TOKENIZER)[1].tokens == 256
