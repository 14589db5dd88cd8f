"""torch.compile of attached models: no break of the graph, no new graph per token, the uncompiled model's tokens."""

import copy
import pickle
import threading
from dataclasses import replace

import pytest
import torch
from helpers import attached, kind_model, random_ids, tiny_gates
from published_gates import hidden_gates_folder
from test_seam import multimodal_model
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache

import kvcompress
from kvcompress import (
    DMCCache,
    GatedCache,
    IterativeCache,
    PoDCache,
    PrunedCache,
    QuestCache,
    StreamingCache,
    attach,
    detach,
)
from kvcompress.hf.now import THREAD
from kvcompress.hf.seam import seam_of
from kvcompress.ops.opaque import held
from kvcompress.pruners import Gates

PROMPT, END = 24, 32
CACHES = {
    "iterative": lambda config: IterativeCache(config, memory_size=20, chunk_size=10, page_size=4, every=3),
    "pruned": lambda config: PrunedCache(config, keep=20),
    "gated": lambda config: GatedCache(config, tiny_gates(2), threshold=0.0, window=10),
    "streaming": lambda config: StreamingCache(config, num_sink_tokens=2, window_size=10),
    "quest": lambda config: QuestCache(config, page_size=4, token_budget=8),
}


@pytest.fixture(autouse=True)
def nothing_left():
    """No graph of another test, and no pass left behind."""
    torch._dynamo.reset()
    yield
    now = THREAD.now
    assert now.current is now.handle is now.outer is now.layer is None


def short_model(kind):
    windows = {} if kind == "qwen3" else {"layer_types": ["sliding_attention", "full_attention"]}
    model = kind_model(kind, num_hidden_layers=2, **windows)
    attach(model)
    return model


def compiled(model, backend="eager", fullgraph=True):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter, fullgraph=fullgraph), counter


@torch.no_grad()
def read(model, ids, cache, start=0, counter=None):
    """Logits of a prompt (what of it is still to be read) and of each token behind it, and graphs after each."""
    pieces = [ids[:, start:PROMPT], *(ids[:, t : t + 1] for t in range(PROMPT, END))]
    out, graphs = [], []
    for piece in pieces[bool(start == PROMPT) :]:
        out.append(model(input_ids=piece, past_key_values=cache).logits)
        graphs.append(counter.frame_count if counter else 0)
    return torch.cat(out, 1), graphs


def same(ours, plain):
    assert torch.equal(ours.argmax(-1), plain.argmax(-1))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def check(model, make, backend="eager"):
    run, counter = compiled(model, backend)
    ids = random_ids(END)
    for fresh in (False, True):
        cache, plain = make(model.config), make(model.config)
        logits, graphs = read(run, ids, cache, counter=counter)
        same(logits, read(model, ids, plain)[0])
        assert cache.stored_lengths() == plain.stored_lengths()
        assert (max(graphs) <= 3 and graphs[2] == graphs[-1]) if not fresh else graphs[0] == graphs[-1]


@pytest.mark.filterwarnings("ignore:a prompt of")
@pytest.mark.parametrize("name", CACHES)
def test_a_decoded_token_is_one_graph(name):
    check(attached(num_hidden_layers=2), CACHES[name], "aot_eager")


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt_oss"])
def test_a_decoded_token_of_other_families_is_one_graph(kind):
    """Norms before the rotation, windows, softcaps, sinks."""
    check(short_model(kind), CACHES["quest"])


@pytest.mark.parametrize(("method", "cache"), [("dmc", DMCCache), ("pod", PoDCache)])
def test_a_decoded_token_of_a_converted_model_is_one_graph(method, cache):
    model = kvcompress.load_example_model(retrofit=method)[0]
    attach(model)
    check(model, cache)


@torch.no_grad()
def test_gates_of_hidden_states_are_one_graph_once_attention_is_watched():  # 3 s: traced twice
    model, ids = attached(num_hidden_layers=1), random_ids(END)

    def make(config):
        gates = Gates.load(hidden_gates_folder())
        return GatedCache(config, replace(gates, layers=gates.layers[:1]), threshold=-1.0, window=10)

    run, _ = compiled(model, fullgraph=False)
    cache, plain = make(model.config), make(model.config)
    logits, _ = read(run, ids, cache)  # the first pass begins outside of graphs, and puts hooks on
    same(logits, read(model, ids, plain)[0])
    assert cache.stored_lengths() == plain.stored_lengths() and cache.kept_share() < 1
    torch._dynamo.reset()
    check(model, make)


@pytest.mark.release  # half a minute: it compiles C++; the graphs that it is given are the tests' above
def test_inductor_compiles_it():
    check(short_model("gemma3_text"), CACHES["quest"], "inductor")


def test_a_multimodal_model_decodes_in_one_graph():
    model, ids = multimodal_model(), random_ids(END)
    attach(model)
    run, counter = compiled(model)
    cache, plain = QuestCache(model.config), QuestCache(model.config)
    for x in (cache, plain):
        with torch.no_grad():
            model(input_ids=ids[:, :PROMPT], past_key_values=x)
    logits, graphs = read(run, ids, cache, PROMPT, counter)
    same(logits, read(model, ids, plain, PROMPT)[0])
    assert graphs[1] == graphs[-1]


def test_other_caches_and_none_compile_in_one_graph_while_attached():
    model, ids = attached(num_hidden_layers=1), random_ids(END)
    run, counter = compiled(model)
    logits, _ = read(run, ids, DynamicCache(config=model.config), counter=counter)
    same(read(run, ids, QuestCache(model.config))[0], logits)
    same(run(ids).logits, logits)  # with gradients
    detach(model)
    same(read(run, ids, DynamicCache(config=model.config))[0], logits)


@torch.no_grad()
def test_left_padding_is_read_as_uncompiled():
    model, ids, mask = attached(num_hidden_layers=2), random_ids(30, 2), torch.ones(2, 30, dtype=torch.long)
    mask[0, :7] = 0
    run, counter = compiled(model)
    caches = QuestCache(model.config), QuestCache(model.config)
    for t in range(6):
        given = {"input_ids": ids[:, t : t + 1] if t else ids, "attention_mask": mask}
        ours, plain = (
            x(past_key_values=cache, **given).logits[:, -1] for x, cache in zip((run, model), caches, strict=True)
        )
        same(ours, plain)
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
    assert counter.frame_count == 2


@pytest.mark.filterwarnings("ignore:a prompt of")
@pytest.mark.parametrize("part", ["model", "decoder", "layer"])
def test_what_is_compiled_generates(part):
    """prefill calls the decoder; of compiled layers the hooks are not."""
    model = attached(num_hidden_layers=2)
    ids, tokens = random_ids(30), []
    for of in (
        lambda model: (),
        {"model": lambda x: [x], "decoder": lambda x: [x.model], "layer": lambda x: x.model.layers}[part],
    ):
        one = copy.deepcopy(model)
        for module in of(one):
            module.compile(backend="eager")
        cache = IterativeCache(model.config, memory_size=12, chunk_size=8)
        tokens.append(kvcompress.generate(one, ids, cache, max_new_tokens=8, do_sample=False))
    assert torch.equal(*tokens)


REFUSED = [
    ({"input_ids": torch.tensor([[3], [4], [5]])}, ValueError, "batch size 3, but the cache holds 1"),
    ({"attention_mask": torch.full((1, PROMPT + 1), -1e9)}, ValueError, "must hold zeros and ones"),
    ({"use_cache": False}, ValueError, "use_cache must not be False"),
]


@torch.no_grad()
def test_errors_come_out_and_leave_nothing_behind():
    model, ids = attached(num_hidden_layers=1), random_ids(END)
    run, _ = compiled(model)
    cache, plain = QuestCache(model.config), QuestCache(model.config)
    for x in (cache, plain):
        model(ids[:, :PROMPT], past_key_values=x)
    for given, kind, message in REFUSED:
        with pytest.raises(kind, match=message):
            run(**{"input_ids": ids[:, :1], "past_key_values": cache} | given)
    same(read(run, ids, cache, PROMPT)[0], read(model, ids, plain, PROMPT)[0])


@torch.no_grad()
def test_what_ends_in_the_middle_is_known(monkeypatch):
    model, ids = attached(num_hidden_layers=2), random_ids(END)
    run, _ = compiled(model, "aot_eager")
    cache = QuestCache(model.config)
    plain, _ = read(run, ids, cache)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(cache.own[1]), "attend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(ids[:, :1], past_key_values=cache)
    assert THREAD.now.current is None
    with pytest.raises(RuntimeError, match="this cache is incomplete"):
        run(ids[:, :1], past_key_values=cache)
    cache.reset()
    same(read(run, ids, cache)[0], plain)
    model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="hidden states hold NaN"):
        run(input_ids=ids[:, :1], past_key_values=cache)


def test_gradients_are_refused_as_uncompiled():
    model, ids = attached(num_hidden_layers=1), random_ids(4)
    run, _ = compiled(model, fullgraph=False)
    with pytest.raises(RuntimeError, match="do not carry gradients"):
        run(ids, past_key_values=QuestCache(model.config))
    run, _ = compiled(model.requires_grad_(False))
    run(ids, past_key_values=QuestCache(model.config))


def test_threads_share_what_is_compiled():
    """Of one graph, that of a token at any place: where they take two, PyTorch (2.13) moves one to the front of a list
    that the other thread walks, which then finds none and compiles again."""
    model = attached(num_hidden_layers=2)
    run, counter = compiled(model)
    errors, ready = [], threading.Barrier(2)

    @torch.no_grad()
    def decode(seed, start):
        ids, logits = random_ids(END, seed=seed), []
        for decoder in (run, model):
            cache = QuestCache(model.config)
            model(input_ids=ids[:, :start], past_key_values=cache)
            tokens = [ids[:, t : t + 1] for t in range(start, END)]
            logits.append(torch.cat([decoder(input_ids=x, past_key_values=cache).logits for x in tokens], 1))
        same(*logits)

    def at_once(seed):
        try:
            ready.wait()
            decode(seed, PROMPT - 1)
        except BaseException as error:
            errors.append(error)

    decode(0, PROMPT)  # of its first token a graph for this place alone, then the one for any
    graphs = counter.frame_count
    threads = [threading.Thread(target=at_once, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and counter.frame_count == graphs == 2


def test_a_copy_has_a_handle_of_its_own():
    model = attached()
    cache = QuestCache(model.config)
    caches = [cache, cache.fork(), pickle.loads(pickle.dumps(cache))]
    assert all(held(x.handle) is x for x in caches)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        seam = seam_of(other.model)
        assert seam is not seam_of(model.model) and held(seam.handle) is seam and seam.decoder() is other.model


def test_ops_declare_what_they_do():
    for op in (torch.ops.kvcompress.begin_pass, torch.ops.kvcompress.attend_pass, torch.ops.kvcompress.end_pass):
        overload = op.default
        assert torch.Tag.cudagraph_unsafe in overload.tags
        assert [x.name for x in overload._schema.arguments if x.alias_info and x.alias_info.is_write] == ["cache"]
