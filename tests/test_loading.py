"""Converted models that are saved and loaded: by one line, or with an error; never as the plain model in silence."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from helpers import KINDS, forward, kind_model, random_ids, tiny_model
from peft import LoraConfig, PeftModel, get_peft_model
from test_dmc_training import converted
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

import kvcompress
from kvcompress import dmc, pod
from kvcompress.apps import write_text
from kvcompress.hf.attach import is_attached
from kvcompress.hf.plain import use_plain_attention
from kvcompress.models import RETROFITTED
from kvcompress.support import names

LEAD = ((0, 0), (0, 1), (0, 1))


def model_of(method):
    if method == "dmc":
        return converted()
    model = tiny_model()
    pod.convert(model, pod.PoDConfig(LEAD, 2, 6))
    return model


methods = pytest.mark.parametrize("method", ["dmc", "pod"])


@methods
def test_one_line_loads_and_attaches(method, tmp_path):
    model, ids = model_of(method), random_ids(40, 2)
    model.save_pretrained(tmp_path)
    again = kvcompress.from_pretrained(tmp_path, dtype=torch.float32)
    assert is_attached(again) and not again.training and torch.equal(forward(again, ids), forward(model, ids))
    again.save_pretrained(tmp_path / "again")  # what was loaded is guarded as what was converted
    assert json.loads((tmp_path / "again" / "config.json").read_text())["attn_implementation"] == "kvcompress"
    plain = tiny_model()
    plain.save_pretrained(tmp_path / "plain")
    assert is_attached(kvcompress.from_pretrained(tmp_path / "plain"))
    assert "attn_implementation" not in json.loads((tmp_path / "plain" / "config.json").read_text())


@pytest.mark.parametrize("first", ["kvcompress", "transformers", "transformers.modeling_utils"])
def test_transformers_loads_it_whichever_is_imported_first(first, tmp_path):
    """Takes 4 seconds: a process that imports transformers anew."""
    model_of("dmc").save_pretrained(tmp_path)
    program = f"""
import {first}, kvcompress
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
import sys, torch
try:
    model(torch.arange(5)[None])
except RuntimeError as error:
    assert "call kvcompress.attach(model)" in str(error)
else:
    raise AssertionError
assert not any(type(finder).__module__.startswith("kvcompress") for finder in sys.meta_path)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("mode", ["dmc", "dms"])
@pytest.mark.parametrize("kind", KINDS)
def test_neurons_that_have_not_learned_yet_hide_no_rotation(kind, mode):
    model, ids = kind_model(kind), random_ids(40, 2)
    dmc.convert(model, dmc.DMCConfig(mode=mode), anneal=False)
    expected = forward(model, ids)
    kvcompress.detach(model)
    kvcompress.attach(model)  # learns the layers anew, of whose queries and keys a coordinate is 0
    assert torch.equal(forward(model, ids), expected)


@methods
def test_a_converted_model_that_is_not_attached_raises(method, tmp_path):
    model, ids = model_of(method), random_ids(20)
    model.save_pretrained(tmp_path)
    for load in (
        lambda: AutoModelForCausalLM.from_pretrained(tmp_path),
        lambda: LlamaForCausalLM.from_pretrained(tmp_path),
        lambda: AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).eval(),
    ):
        again = load()
        for call in (lambda m: m(ids), lambda m: m.generate(ids, max_new_tokens=2), lambda m: copy.deepcopy(m)(ids)):
            with pytest.raises(RuntimeError, match=r"not attached: call kvcompress\.attach"):
                call(again)
        with kvcompress.attach(again):
            forward(again, ids)
        with pytest.raises(RuntimeError, match="not attached"):
            again(ids)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert forward(plain, ids).isfinite().all()


def test_plain_attention_of_another_model_leaves_the_guard(tmp_path):
    """What `retrofit gqa` trains with is an implementation of another name."""
    model_of("dmc").save_pretrained(tmp_path)
    plain = tiny_model()
    use_plain_attention(plain)
    assert forward(plain, random_ids(8)).isfinite().all()
    with pytest.raises(RuntimeError, match="not attached"):
        AutoModelForCausalLM.from_pretrained(tmp_path)(random_ids(8))


def test_the_shipped_models_keep_the_guard_when_they_are_saved(tmp_path):
    model, _ = kvcompress.load_example_model(retrofit="dmc")
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="not attached"):
        AutoModelForCausalLM.from_pretrained(tmp_path)(random_ids(8))


def test_transformers_alone_refuses_a_converted_model(tmp_path):
    converted().save_pretrained(tmp_path)
    script = (
        "import sys, transformers\n"
        "for load in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):\n"
        "    try:\n"
        "        load.from_pretrained(sys.argv[1])\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
        "assert 'kvcompress' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('attn_implementation="kvcompress"` is not supported') == 2


def test_the_decoder_of_a_multimodal_model_is_guarded(tmp_path):
    from transformers import AutoModelForImageTextToText, Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "layer_types": ["full_attention"] * 2, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=96)
    model = Gemma3ForConditionalGeneration(config).eval()
    pod.convert(model, pod.PoDConfig(((0, 0), (0, 0)), 2, 6))
    model.save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert again.config.vision_config._attn_implementation != "kvcompress"
    with pytest.raises(RuntimeError, match="not attached"):
        again(random_ids(8))
    kvcompress.attach(again)
    assert torch.equal(forward(again, random_ids(8)), forward(model, random_ids(8)))


# ---- generation ----


@methods
def test_generate_makes_the_methods_cache_by_itself(method):
    model, ids = model_of(method), random_ids(30, 2)
    cache = (model.model.config.kvcompress["method"] == "dmc" and kvcompress.DMCCache) or kvcompress.PoDCache
    settings = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, past_key_values=cache(model.config), **settings)
    found = model.generate(ids, return_dict_in_generate=True, **settings)
    assert torch.equal(found.sequences, expected) and type(found.past_key_values) is cache
    assert torch.equal(model.generate(ids, num_beams=2, **settings)[:, :30], ids)
    assert torch.equal(model.generate(ids, use_cache=False, **settings), expected)
    with pytest.raises(ValueError, match="cache_implementation must be None"):
        model.generate(ids, cache_implementation="static", **settings)
    twin = copy.deepcopy(model)
    assert torch.equal(twin.generate(ids, **settings), expected)
    kvcompress.detach(model)
    assert "_prepare_cache_for_generation" not in vars(model)


def test_generate_of_an_attached_plain_model_is_as_it_was():
    model, ids = tiny_model(), random_ids(20)
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    with kvcompress.attach(model):
        found = model.generate(ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
        assert torch.equal(found.sequences, expected) and type(found.past_key_values) is DynamicCache


# ---- adapters ----


@methods
def test_an_adapter_says_how_its_base_was_converted(method, tmp_path):
    base, ids = tiny_model(), random_ids(40, 2)
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        LoraConfig(target_modules=["q_proj", "k_proj"], r=4, task_type="CAUSAL_LM"),
    )
    if method == "dmc":
        dmc.convert(model, dmc.DMCConfig(shift=0.0))
        dmc.set_neuron_scale(model, 0.0)
    else:
        pod.convert(model, pod.PoDConfig(LEAD, 2, 6))
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora_B" in name:
                x.normal_(std=0.1)
    model.eval()
    copy.deepcopy(model).save_pretrained(tmp_path / "adapter")
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert saved["kvcompress"] == model.base_model.model.config.kvcompress
    again = kvcompress.from_pretrained(tmp_path / "adapter")
    assert torch.equal(forward(again, ids), forward(model, ids))
    assert torch.equal(again.generate(input_ids=ids, max_new_tokens=4), model.generate(input_ids=ids, max_new_tokens=4))
    with pytest.warns(UserWarning, match="kvcompress"):  # PEFT alone ignores what it does not know, and says so
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    other = converted(shift=3.0)
    other.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="base must be converted by"):
        kvcompress.from_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("retrofit", ["dmc", "pod"])
def test_the_folder_of_a_shipped_retrofit_loads(retrofit):
    """Its weights are a difference to the example model's."""
    model, same = kvcompress.from_pretrained(RETROFITTED[retrofit]), kvcompress.load_example_model(retrofit=retrofit)[0]
    assert model.dtype == torch.bfloat16
    for ours, theirs in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(torch.bfloat16))


def test_a_name_that_is_no_folder_asks_the_hub_once_or_not_at_all(tmp_path, monkeypatch):
    asked = []

    def no_network(url, **options):
        asked.append(url)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(names, "get_hf_file_metadata", no_network)
    for name in ("./none", "../none", "none/", "~/none", str(tmp_path / "none"), "a/b/c", "", "two words"):
        with pytest.raises(
            FileNotFoundError, match=r"name must be a folder or a name on the Hub, got .*no such folder"
        ):
            kvcompress.from_pretrained(name)
    assert asked == []
    with pytest.raises(ConnectionError, match=r"got 'some-one/some-model': .* cannot be reached: Name or service not"):
        kvcompress.from_pretrained("some-one/some-model")
    assert len(asked) == 1 and asked[0].endswith("/some-one/some-model/resolve/main/config.json")
    with pytest.raises(ValueError, match="model must be a folder or a name on the Hub, got 'some-one/some-model'"):
        write_text.load("some-one/some-model", "cpu")
    assert len(asked) == 2


def test_a_name_that_was_loaded_before_does_not_need_the_hub(tmp_path, monkeypatch):
    def unasked(url, **options):
        raise AssertionError(url)

    monkeypatch.setattr(names, "get_hf_file_metadata", unasked)
    folder = tmp_path / "models--some-one--some-model"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    names.check_name("model", "some-one/some-model", cache_dir=tmp_path)
