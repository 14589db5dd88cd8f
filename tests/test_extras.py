"""Commands without the packages of an extra: which and how to get them is said before anything is done."""

import json
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvcompress
from kvcompress.cli import app
from kvcompress.support.extras import EXTRAS, need_packages

ROOT = Path(__file__).parents[1]
ANALYZE, FIGURE = ("--model", "./no/where", "--out", "out.json"), ("--figure", "figure.png")


def test_packages_are_those_of_the_extras():
    text = (ROOT / "pyproject.toml").read_text()
    for extra in {*EXTRAS.values()}:
        listed = re.findall(r'"([\w-]+)', re.search(rf"^{extra} = \[(.*)\](  #.*)?$", text, re.MULTILINE)[1])
        assert {name.replace("-", "_") for name in listed} == {name for name in EXTRAS if EXTRAS[name] == extra}


@pytest.mark.parametrize(
    ("hidden", "extra", "arguments"),
    [
        (("accelerate", "datasets"), "train", ("retrofit", "gqa", "--kv-heads", "1", "--out", "out")),
        (("accelerate",), "train", ("retrofit", "dmc", "--out", "out")),
        (("datasets",), "train", ("retrofit", "pod", "--out", "out", "--plan", "none.json")),
        *((("datasets",), "train", ("analyze", name, *ANALYZE)) for name in ("attention", "heads", "pod", "budget")),
        *((("matplotlib",), "plots", ("analyze", name, *ANALYZE, *FIGURE)) for name in ("attention", "pod")),
        (("matplotlib",), "plots", ("eval", "needle", "--model", "./no/where", *FIGURE)),
        (("vllm",), "vllm", ("serve", "--model", "./no/where")),
    ],
)  # fmt: skip
def test_a_command_names_what_it_lacks_before_it_starts(hidden, extra, arguments, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in hidden:
        monkeypatch.setitem(sys.modules, name, None)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.exception
    needed = f"needs {' and '.join(hidden)}, of the extra {extra}: pip install 'kvcompress[{extra}]'"
    assert needed in result.output and not list(tmp_path.iterdir())


def test_an_adapter_names_peft_before_its_base_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "peft", None)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "./no/where"}))
    with pytest.raises(ImportError, match=r"an adapter needs peft, of the extra train: pip install 'kvcompress\[train"):
        kvcompress.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("module", "hidden", "extra"),
    [("lm_eval", "lm_eval", "eval"), ("plots", "matplotlib", "plots")],
)
def test_a_module_names_what_it_lacks(module, hidden, extra, monkeypatch):
    name = f"kvcompress.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, hidden, None)
    with pytest.raises(ImportError, match=rf"{name} needs {hidden}, of the extra {extra}: pip install"):
        import_module(name)


def test_what_is_there_is_not_asked_for():
    need_packages("a test", "matplotlib", "datasets")


def test_a_figure_of_no_format_is_refused_before_anything_is_measured(tmp_path):
    arguments = ["eval", "needle", "--model", "./no/where", "--figure", str(tmp_path / "figure.xyz")]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert result.exit_code == 2 and "figure must end in one of" in result.output and "figure.xyz" in result.output
