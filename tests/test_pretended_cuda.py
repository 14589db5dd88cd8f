"""Every cache on tensors that say that they are on a GPU: no call mixes devices, logits are the CPU's, and a decoded
token for which pages are there does not wait for the device."""

import pretended_cuda
import pytest
import torch
from helpers import deciding_model, random_ids, tiny_gates_folder, tiny_model
from pretended_cuda import PretendedCuda, moved
from published_gates import hidden_gates_folder

import kvcompress
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS
from benchmarks.quality.parts.families_images import even_prompts, one_prompt
from kvcompress import CacheSpec, pod, prefill
from kvcompress.hf.attach import base_model, facts_of
from kvcompress.hf.method import method_of
from kvcompress.hf.now import coming
from kvcompress.pod import PoDConfig
from kvcompress.serve.recorded import Recordings
from kvcompress.serve.requests import Requests
from kvcompress.serve.served import cache_maker
from kvcompress.serve.served_pass import Part

SPECS = {
    "dense": "pruned,pruner=snapkv,keep=1.0",
    "snapkv": "pruned,pruner=snapkv,window=8,keep=0.25",
    "adakv": "pruned,pruner=snapkv,window=8,keep=0.25,budget=adakv",
    "replay": "pruned,pruner=replay,keep=0.25,budget=globaltopk",
    "kvzip": "pruned,pruner=kvzip,keep=0.25,budget=globaltopk",
    "h2o": "pruned,pruner=h2o,keep=24,every=4",
    "rgl": "pruned,pruner=snapkv,window=8,keep=0.25,positions=remotegap:gap=64",
    "iterative": "iterative,memory_size=24,chunk_size=16,page_size=4",
    "int8": "quantized,dtype=int8",
    "k8v4": "pruned,pruner=kvzip,keep=0.5,budget=globaltopk,dtype=k8v4",
    "iterative, int8": "iterative,memory_size=24,chunk_size=16,page_size=4,dtype=int8",
    "streaming": "streaming,window_size=24",
    "streaming, k8v4": "streaming,window_size=24,sink_distance=window,dtype=k8v4",
    "quest": "quest,token_budget=32,dense_layers=1,page_size=8",
    "quest, int8": "quest,token_budget=32,dense_layers=1,page_size=8,dtype=int8",
    "gated": "gated,gates=FOLDER,keep=0.5,window=8",
    "gated by hidden states": "gated,gates=HIDDEN,threshold=-1,window=8",
    "pruned by hidden states": "pruned,pruner=gate:HIDDEN,keep=16",
    "gated, int8": "gated,gates=FOLDER,keep=0.5,window=8,dtype=int8",
    "dmc": "dmc",
    "dmc, int8": "dmc,dtype=int8",
    "pod, int8": "pod,dtype=int8",
    "pod, k8v4": "pod,dtype=k8v4,reuse=false",
}
T, NEW = 64, 6
COMPRESSES = {"h2o"}  # while decoding, and asks then


def sharing_model():
    model = tiny_model()
    pod.convert(model, PoDConfig(((0, 0), (0, 0), (0, 2)), 2, 6))
    return model


@pytest.fixture(scope="module")
def models():
    """By device and what they are converted to, attached: a second that all caches share."""
    found = {}
    for name, make in (("dense", tiny_model), ("dmc", deciding_model), ("pod", sharing_model)):
        found["cpu", name] = make()
        with PretendedCuda():
            found["cuda", name] = moved(make())
            kvcompress.attach(found["cuda", name])
        kvcompress.attach(found["cpu", name])
    yield found
    for model in found.values():
        kvcompress.detach(model)


def decoded(model, spec, device):
    """Logits after a prompt and after each of some tokens; what waited in each of these."""
    ids, logits, waits = random_ids(T + NEW).to(device), [], []
    spec = spec.replace("FOLDER", tiny_gates_folder()).replace("HIDDEN", hidden_gates_folder("fast"))
    cache = CacheSpec.parse(spec).make(model.config)
    with torch.inference_mode():
        prefill(model, ids[:, : T - 1], cache)
        for t in range(T - 1, T + NEW):
            pretended_cuda.waits.clear()
            logits.append(model(ids[:, t : t + 1], past_key_values=cache).logits)
            waits.append(list(pretended_cuda.waits))
    return torch.cat([x.cpu() for x in logits], 1), waits


@pytest.mark.parametrize("name", SPECS)
def test_no_call_mixes_devices_and_a_decoded_token_does_not_wait(models, name):
    kind = name.split(",")[0] if name.startswith(("dmc", "pod")) else "dense"
    expected, _ = decoded(models["cpu", kind], SPECS[name], "cpu")
    with PretendedCuda():
        found, waits = decoded(models["cuda", kind], SPECS[name], "cuda")
    torch.testing.assert_close(found, expected)
    if name not in COMPRESSES:
        assert sum(not names for names in waits) >= NEW - 2, waits  # the others take pages
        assert {x for names in waits for x in names} <= {"tolist", "tensor", "repeat_interleave"}


@pytest.mark.parametrize("name", ["snapkv", "replay", "rgl", "iterative", "streaming", "quest"])
def test_positions_that_keys_hold_are_on_the_device(name):
    with kvcompress.attach(CONFIGURATIONS["bloom"].model()) as model:
        expected, _ = decoded(model, SPECS[name], "cpu")
    with PretendedCuda(), kvcompress.attach(moved(CONFIGURATIONS["bloom"].model())) as model:
        found, waits = decoded(model, SPECS[name], "cuda")
    torch.testing.assert_close(found, expected)
    assert sum(not names for names in waits) >= NEW - 2, waits


@pytest.mark.parametrize("family", ["cohere2/sliding", "glm"])
def test_a_step_copies_nothing_from_the_host(family):
    """The order in which a family pairs coordinates is on the device; windows ask nothing either."""
    with kvcompress.attach(CONFIGURATIONS[family].model()) as model:
        expected, _ = decoded(model, SPECS["snapkv"], "cpu")
    with PretendedCuda(), kvcompress.attach(moved(CONFIGURATIONS[family].model())) as model:
        found, waits = decoded(model, SPECS["snapkv"], "cuda")
    torch.testing.assert_close(found, expected)
    # the family's own, by a number of the host's
    assert sum(set(names) <= {"repeat_interleave"} for names in waits) >= NEW - 2, waits


IMAGES = {
    "snapkv": "pruned,pruner=snapkv,window=8,keep=0.5",
    "replay": "pruned,pruner=replay,keep=0.5,budget=globaltopk",
    "keydiff": "pruned,pruner=keydiff,keep=0.5",
    "quest": "quest,token_budget=32,dense_layers=1,page_size=8",
}


@pytest.mark.parametrize("prompt", [one_prompt, even_prompts])
@pytest.mark.parametrize("name", IMAGES)
def test_images_stand_on_the_device_where_they_stand_on_the_host(name, prompt):
    def read(device):
        model, given = CONFIGURATIONS["qwen2_vl/images"].model(), prompt()
        del given["pixel_values"]
        at, _ = model.model.get_rope_index(**given)
        decoder, ids, at = (
            base_model(moved(model) if device == "cuda" else model),
            given["input_ids"].to(device),
            at.to(device),
        )
        cache = CacheSpec.parse(IMAGES[name]).make(model.config)
        with torch.inference_mode(), kvcompress.attach(decoder):
            out, waits = [decoder(ids, position_ids=at, past_key_values=cache)[0]], []
            for i in range(NEW):
                pretended_cuda.waits.clear()
                next_ = (at.amax((0, 2)) + 1 + i)[None, :, None].expand(3, -1, -1)
                out.append(decoder(ids[:, :1], position_ids=next_, past_key_values=cache)[0])
                waits.append(list(pretended_cuda.waits))
        return torch.cat([x.cpu() for x in out], 1), waits

    expected, _ = read("cpu")
    with PretendedCuda():
        found, waits = read("cuda")
    torch.testing.assert_close(found, expected)
    if prompt is one_prompt:  # else several ops make their tensors
        assert sum(not names for names in waits) >= NEW - 2, waits


@pytest.mark.parametrize(
    ("name", "cache"), [("dense", "dense"), ("dense", SPECS["snapkv"] + ",dtype=k8v4"), ("dmc", "dmc")]
)
def test_requests_that_decode_together_do_not_wait(models, name, cache):
    """Passes that a GPU may record: their rows have places of their own, and padding beside them."""

    def decoded(device):
        model, waits, logits = models[device, name], [], []
        requests = served_requests(model, cache, torch.device(device))
        recordings = Recordings(model, requests.slots, torch.device(device), lambda size: run(size))

        def run(size):
            given = {"past_key_values": requests.slots.caches[size], "use_cache": True}
            current.turn = -1
            with coming(current):
                return model(ids[:size], position_ids=places[:size], **given).logits[:, -1]

        recordings._padded = lambda size: (requests.slots.settle_padding(), run(size))[1]
        lengths = (30, 17, 45)
        current = requests.begin([Part(str(length), length, length, length) for length in lengths])
        with coming(current), torch.inference_mode():
            places = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
            model(random_ids(sum(lengths)).to(device), position_ids=places, use_cache=False)
        requests.end()
        for t in range(NEW):
            ids = random_ids(4, seed=t).view(4, 1).to(device)
            places = torch.tensor([[30 + t], [17 + t], [45 + t], [0]], device=device)
            pretended_cuda.waits.clear()
            requests.settle()
            current = requests.begin([])
            recordings._warm.clear()  # op by op: this is no graph
            with torch.inference_mode():
                logits.append(recordings.step(current)[:3])
            requests.end()
            waits.append(list(pretended_cuda.waits))
        return torch.stack([x.cpu() for x in logits]), waits

    expected, _ = decoded("cpu")
    with PretendedCuda():
        found, waits = decoded("cuda")
    torch.testing.assert_close(found, expected)
    assert sum(not names for names in waits) >= NEW - 2, waits  # the others take pages


def served_requests(model, cache, device):
    decoder = base_model(model)
    facts, spec = facts_of(decoder), CacheSpec.parse(cache)
    make = cache_maker(spec, model.config, 16)
    return Requests(decoder, facts, method_of(decoder), make, 400, torch.float32, device, recorded=[2, 4])


def test_what_a_gpu_would_refuse_or_wait_for_is_seen():
    with PretendedCuda():
        there, here = torch.arange(3.0, device="cuda"), torch.ones(3)
        assert there.device == torch.device("cuda:0") and (there + 1).is_cuda and not here.is_cuda
        for mix in (lambda: there + here, lambda: torch.cat([there, here]), lambda: here[there.long()]):
            with pytest.raises(AssertionError, match=r"of tensors on cuda:0 and on the CPU"):
                mix()
        asked = [
            there.tolist, there.cpu, there.nonzero, lambda: int(there[0]), lambda: there[there > 1],
            lambda: here.to(there.device), lambda: torch.tensor([1, 2], device="cuda"), lambda: here.copy_(there),
        ]  # fmt: skip
        for ask in asked:
            pretended_cuda.waits.clear()
            ask()
            assert pretended_cuda.waits, ask
        pretended_cuda.waits.clear()
        assert there.add_(1) is there and (there * 2)[1:].sum().shape == ()
        assert not pretended_cuda.waits
