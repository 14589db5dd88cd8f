"""Prompts that begin alike under vLLM: fewer tokens are read, none is another, and no page is lost."""

import pytest
from conftest import alone
from helpers import deciding_model, tiny_gates_folder, tiny_model
from test_vllm_serving import example
from vllm import SamplingParams

from kvcompress.serve.order import Order

CACHES = ["dense", "dmc", "streaming,window_size=60", "quantized,dtype=int8", "quantized,dtype=k8v4"]
GATED = f"gated,gates={tiny_gates_folder()},threshold=0,window=6,num_sink_tokens=2"


def emptied(served):
    """Nothing is held once prefixes are dropped."""
    requests = served.engine.requests
    assert requests.pages_in_use() == 0 and served.scheduler.kv_cache_manager.usage == 0
    served.llm.reset_prefix_cache()
    assert requests.store.count_free() == requests.store.pages
    assert len(requests.prefixes) == len(requests.prompts.offered) == 0


def alike(prompts, begin=120):
    """Prompts of which all but two begin with the same tokens."""
    return [prompts[0][:begin] + prompts[i][: 20 + 7 * i] for i in range(6)] + prompts[6:]


def generate_thrice(served, given, new, wanted):
    """Each prompt is remembered, a fork is kept where it ended, and nothing but what is behind it is read."""
    requests, found = served.engine.requests, []
    for _ in range(3):
        before = requests.prompts.hits
        assert served.generate(given, new)[0] == wanted
        found.append(requests.prompts.hits - before)
    block = requests.prefixes.block
    assert 0 < found[0] < found[1] < found[2] == sum((len(prompt) - 1) // block * block for prompt in given)


@pytest.mark.parametrize("cache", CACHES)
def test_prompts_that_begin_alike_get_the_tokens_of_generate_alone(serve, folders, prompts, cache):
    served, given = serve(folders["dmc" if cache == "dmc" else "plain"], cache), alike(prompts)
    new = [3 + 5 * i % 17 for i in range(len(given))]
    generate_thrice(served, given, new, alone(example(cache), cache, given, new))
    emptied(served)


@pytest.mark.parametrize(
    "cache", ["pruned,pruner=snapkv,keep=40,window=20", "pruned,pruner=h2o,keep=1/3,every=8,budget=adakv"]
)
def test_what_pruned_prompts_begin_with_lies_in_pages_whole_until_they_are_read(serve, folders, prompts, cache):
    served, given = serve(folders["plain"], cache), alike(prompts)
    new = [3 + 5 * i % 17 for i in range(len(given))]
    wanted, requests, found = alone(example(cache), cache, given, new), served.engine.requests, []
    for _ in range(3):
        before = requests.prompts.hits
        assert served.generate(given, new)[0] == wanted
        found.append(requests.prompts.hits - before)
    block, last = requests.prefixes.block, requests.last
    assert 0 < found[0] < found[1] < found[2] == sum((len(prompt) - last) // block * block for prompt in given)
    emptied(served)


@pytest.mark.parametrize("given", [{}, {"enable_prefix_caching": False}])
def test_pruned_prompts_that_no_step_has_room_for_come_in_parts(serve, folders, prompts, given):
    cache = "pruned,pruner=snapkv,keep=40,window=20"
    served = serve(folders["plain"], cache, enable_chunked_prefill=True, max_num_batched_tokens=128, **given)
    long = [(prompts[i] * 9)[: 130 + 60 * i] for i in range(4)] + alike(prompts)
    new = [3 + 5 * i % 17 for i in range(len(long))]
    assert served.engine.requests.most == 97
    assert served.generate(long, new)[0] == alone(example(cache), cache, long, new)
    assert (served.engine.requests.prompts.hits > 0) is (not given)
    emptied(served)


def test_pruned_prompts_share_while_memory_is_short(serve, folders, prompts):
    cache = "pruned,pruner=snapkv,keep=40,window=20"
    served, given = serve(folders["plain"], cache, blocks=14), alike(prompts) * 3
    found, reasons = served.generate(given, 40)
    assert set(reasons) == {"length"} and served.engine.requests.prompts.hits > 0
    assert found == alone(example(cache), cache, given[: len(given) // 3], 40) * 3
    emptied(served)


@pytest.mark.parametrize("cache", ["dense", "dmc", "quantized,dtype=int8"])
def test_a_conversation_goes_on_from_the_cache_of_its_last_answer(serve, folders, prompts, cache):
    served = serve(folders["dmc" if cache == "dmc" else "plain"], cache)
    first, second, known = prompts[0][:75], prompts[1][:90], 0
    for _ in range(3):
        before, given = served.engine.requests.prompts.hits, [first, second]
        found, _ = served.generate(given, 9)
        assert found == alone(example(cache), cache, given, 9)
        assert served.engine.requests.prompts.hits - before == known
        known = len(first) + len(second) + 16  # of an answer of 9 tokens the last was not read
        first, second = first + found[0] + prompts[2][:5], second + found[1] + prompts[3][:70]
    emptied(served)


def test_conversations_that_memory_does_not_hold_are_seldom_read_anew(serve, folders, prompts, monkeypatch):
    """Those that it holds go on first."""
    served = serve(folders["plain"], "dense", blocks=18)
    engine, params = (
        served.llm.llm_engine,
        SamplingParams(temperature=0, max_tokens=6, detokenize=False, ignore_eos=True),
    )

    def read(turns=6):
        """The share of all tokens sent that was read."""
        hits, sent = served.engine.requests.prompts.hits, 0
        said, found = [prompt[:60] for prompt in prompts[:5]], [[] for _ in range(5)]
        for i, prompt in enumerate(said):
            engine.add_request(f"{i}-0", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                i = int(output.request_id.split("-")[0])
                if not output.finished:
                    continue
                found[i].append((said[i], list(output.outputs[0].token_ids)))
                sent += len(said[i])
                said[i] = said[i] + found[i][-1][1] + prompts[len(found[i])][:7]
                if len(found[i]) < turns:
                    engine.add_request(f"{i}-{len(found[i])}", {"prompt_token_ids": said[i]}, params)
        for turns in found:
            given = [prompt for prompt, _ in turns]
            assert [answer for _, answer in turns] == alone(example("dense"), "dense", given, 6)
        served.llm.reset_prefix_cache()
        return 1 - (served.engine.requests.prompts.hits - hits) / sent

    few = read()
    assert few < 0.3
    monkeypatch.setattr(Order, "of", lambda self, waiting: list(waiting))  # as they came
    assert few < read() / 2
    emptied(served)


@pytest.mark.parametrize(
    ("cache", "settings"),
    [("dmc", {"window": 4}), ("dmc", {"mode": "dms", "dms_window": 5}), (GATED, None)],
    ids=["dmc with a window", "dms", "gated"],
)
def test_caches_whose_models_decide_what_stays(serve, tmp_path, cache, settings):
    model = tiny_model() if settings is None else deciding_model(dmc=settings, head_dim=32, eos_token_id=None)
    model.save_pretrained(tmp_path)
    given = alike([[(7 * i * i + 3 * i * n) % 97 for i in range(1, n)] for n in (90, 33, 150, 60, 45, 39, 70)], 80)
    served = serve(tmp_path, cache, max_num_batched_tokens=48)
    generate_thrice(served, given, 12, alone(model, cache, given, 12))
    emptied(served)


def test_an_aborted_request_leaves_what_others_share(serve, folders, prompts):
    served, given = serve(folders["plain"], "dense"), alike(prompts)[:6]
    engine, found = served.llm.llm_engine, {}
    params = SamplingParams(temperature=0, max_tokens=9, detokenize=False, ignore_eos=True)
    for i, prompt in enumerate(given):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    for step in range(100):
        if step in (1, 3, 4):  # one that is read, one that waits for it, one that has forked
            engine.abort_request([str(step - 1)])
        for output in engine.step():
            found[output.request_id.split("-")[0]] = list(output.outputs[0].token_ids)
        if not engine.has_unfinished_requests():
            break
    stay = [i for i in range(6) if i not in (0, 2, 3)]
    assert [found[str(i)] for i in stay] == alone(example("dense"), "dense", [given[i] for i in stay], 9)
    assert served.engine.requests.prompts.hits > 0
    emptied(served)


def test_who_asks_for_a_border_in_a_step_that_passes_it_changes_nothing(serve, folders, prompts):
    served, given = serve(folders["plain"], "dense", max_num_batched_tokens=512), alike(prompts)
    found, reasons = served.generate(given, 9)
    assert set(reasons) == {"length"} and found == alone(example("dense"), "dense", given, 9)
    assert served.engine.preempted == 0 and served.engine.requests.prompts.hits > 0
    emptied(served)


@pytest.mark.parametrize(("cache", "blocks"), [("dense", 18), ("dmc", 8)])
def test_prefixes_give_way_to_requests_and_no_token_is_lost(serve, folders, prompts, cache, blocks):
    dmc = cache == "dmc"
    served = serve(folders["dmc" if dmc else "plain"], cache, blocks=blocks, ratio=100 if dmc else None)
    served.engine.requests.coming_pages = lambda prompts: 0  # as if there were room
    served.engine.bounds.note = lambda *_: None
    given = [prompt[:90] for prompt in alike(prompts, 64)]
    found, reasons = served.generate(given, 150)
    assert set(reasons) == {"length"} and served.engine.preempted > 0 and served.engine.requests.prompts.hits > 0
    assert found == alone(example(cache), cache, given, 150)
    emptied(served)


def test_the_longest_request_finds_all_memory_though_prefixes_hold_it(serve, folders, prompts):
    served, prompt = serve(folders["plain"], "dense", blocks=17), (prompts[0] * 8)[:508]
    given = [prompts[1][:100], prompts[2][:100], prompt]
    wanted = alone(example("dense"), "dense", given[:2], 4)
    assert [served.generate(given[:2], 4)[0] for _ in range(2)] == [wanted] * 2  # the second time ends are kept
    assert served.engine.requests.kept > 0
    assert served.generate(given[2:], 4)[0] == alone(example("dense"), "dense", given[2:], 4)
    emptied(served)


def test_windows_of_prefixes_are_counted_as_blocks(serve, folders, prompts):
    cache = "streaming,window_size=60"
    served, given = serve(folders["plain"], cache, blocks=17), alike(prompts)
    prefixes, bounds = served.engine.requests.prefixes, served.engine.bounds
    heads = served.engine.heads
    assert bounds.beside == 2 * heads and served.engine.requests.pages == 16 * heads
    wanted = alone(example(cache), cache, given, 9)
    assert [served.generate(given, 9)[0] for _ in range(2)] == [wanted] * 2 and 0 < len(prefixes) <= 8
    assert served.engine.requests.prompts.hits > 0
    emptied(served)


def test_salts_and_prompt_logprobs_keep_requests_apart(serve, folders, prompts):
    served, prompt = serve(folders["plain"], "dense"), prompts[0][:100]
    wanted = alone(example("dense"), "dense", [prompt], 4)[0]
    for salt, logprobs, there in (
        (None, None, 0),
        (None, None, 0),  # its end is kept
        ("mine", None, 0),
        ("mine", None, 0),
        (None, 1, 0),
        (None, None, 96),
        ("mine", None, 96),
    ):
        before = served.engine.requests.prompts.hits
        given = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
        params = SamplingParams(
            temperature=0, max_tokens=4, detokenize=False, ignore_eos=True, prompt_logprobs=logprobs
        )
        (output,) = served.llm.generate([given], params, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == wanted
        assert served.engine.requests.prompts.hits - before == there
        assert logprobs is None or len(output.prompt_logprobs) == 100
    emptied(served)


@pytest.mark.parametrize(
    "given", [{"enable_prefix_caching": False}, {"enable_chunked_prefill": False}, {"prefixes": 0}]
)
def test_it_is_turned_off_as_in_vllm_or_by_name(serve, folders, prompts, given):
    served = serve(folders["plain"], "dense", max_num_batched_tokens=512, **given)
    assert served.generate(prompts[:1] * 3, 4)[0] == alone(example("dense"), "dense", prompts[:1], 4) * 3
    assert served.engine.requests.prompts.hits == served.engine.requests.kept == 0


def test_caches_whose_prompts_come_in_one_pass_share_nothing_and_say_so_where_it_is_asked(serve, folders, prompts):
    cache = "pruned,pruner=observedattention,keep=40"
    served = serve(folders["plain"], cache)
    assert served.generate(prompts[:1] * 3, 4)[0] == alone(example(cache), cache, prompts[:1], 4) * 3
    assert served.engine.requests.prompts.hits == 0
    with pytest.raises(ValueError, match="prefixes must be 0 where a prompt must come in one pass, got 4"):
        serve(folders["plain"], cache, prefixes=4)
    with pytest.raises(ValueError, match="enable_chunked_prefill must be True with prefixes = 4"):
        serve(folders["plain"], "dense", prefixes=4, max_num_batched_tokens=512, enable_chunked_prefill=False)
