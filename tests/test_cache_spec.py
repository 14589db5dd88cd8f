"""Caches as text (kvcompress.CacheSpec): what is written is what Python would make; what is wrong is named."""

import inspect

import pytest
from helpers import tiny_gates, tiny_gates_folder, tiny_model
from transformers import AutoConfig, DynamicCache

import kvcompress
from kvcompress import AdaKV, CacheSpec, GlobalTopK, PyramidKV, RemoteGap, Uniform, pruners
from kvcompress.caches import PoolSettings
from kvcompress.caches.spec import BUDGETS, KINDS, PRUNERS, unasked
from kvcompress.heads import HeadProfile
from kvcompress.models import RETROFITTED
from kvcompress.models.tokenizer import byte_tokenizer
from kvcompress.profiles import BudgetProfile, Profiled
from kvcompress.pruners import (
    H2O,
    TOVA,
    CenterOfGravity,
    ChunkKV,
    CriticalKV,
    DuoAttention,
    ExpectedAttention,
    Gate,
    KVzip,
    Replay,
    SnapKV,
)

WRITTEN = [  # text, class, attributes of the cache
    ("dense", DynamicCache, {}),
    ("quantized,dtype=k8v4,page_size=4", kvcompress.QuantizedCache, {"pool_settings": PoolSettings(4, dtype="k8v4")}),
    ("pruned,keep=64,dtype=int8", kvcompress.PrunedCache, {"pool_settings": PoolSettings(dtype="int8")}),
    ("pruned,pruner=snapkv,keep=0.25", kvcompress.PrunedCache, {"pruner": SnapKV(), "keep": 0.25, "budget": Uniform()}),
    (
        " cache=pruned , keep=1024, window=64 ,pruner=snapkv,every=16",  # order and blanks mean nothing
        kvcompress.PrunedCache,
        {"pruner": SnapKV(window=64), "keep": 1024, "every": 16},
    ),
    (
        "pruned,pruner=chunkkv:snapkv:window=16,chunk=20,keep=1/4,budget=globaltopk",
        kvcompress.PrunedCache,
        {"pruner": ChunkKV(SnapKV(window=16), chunk=20), "keep": "1/4", "budget": GlobalTopK()},
    ),
    (
        "pruned,pruner=kvzip,chunk=64,prompt=12+7,keep=64",
        kvcompress.PrunedCache,
        {"pruner": KVzip(chunk=64, prompt=(12, 7))},
    ),
    (
        "pruned,pruner=criticalkv:chunkkv:chunk=4:expectedattention:use_value_norm=false,norm=l2,keep=64",
        kvcompress.PrunedCache,
        {"pruner": CriticalKV(ChunkKV(ExpectedAttention(use_value_norm=False), chunk=4), norm="l2")},
    ),
    ("pruned,keep=512MiB,page_size=32", kvcompress.PrunedCache, {"keep": "512MiB", "budget": GlobalTopK()}),
    ("pruned,pruner=tova,keep=1k,budget=adakv", kvcompress.PrunedCache, {"keep": 1024, "budget": AdaKV()}),
    (
        "pruned,pruner=h2o,recent_ratio=0.25,keep=64,budget=adakv:floor=0.3:pyramidkv:beta=10:window=8",
        kvcompress.PrunedCache,
        {"pruner": H2O(recent_ratio=0.25), "budget": AdaKV(PyramidKV(beta=10, window=8), floor=0.3)},
    ),
    (
        "pruned,pruner=centerofgravity,compressed_length=64,near_length=64,keep_head=false,every=16,positions=remotegap:gap=128:reading=to_query",
        kvcompress.PrunedCache,
        {"pruner": CenterOfGravity(64, 64, keep_head=False)},
    ),
    (
        "cache=iterative,memory_size=128,chunk_size=64,schedule=sqrt,dynamic=true,pruner=snapkv,window=16,initial_memory=none",
        kvcompress.IterativeCache,
        {"memory_size": 128, "chunk_size": 64, "schedule": "sqrt", "dynamic": True, "pruner": SnapKV(window=16)},
    ),
    ("iterative,memory_size=128,budget=pyramidkv", kvcompress.IterativeCache, {"budget": PyramidKV(window=32)}),
    (
        "pruned,pruner=snapkv,preset=kvpress,window=16,keep=64,budget=adakv:pyramidkv:preset=kvpress:window=16",
        kvcompress.PrunedCache,
        {
            "pruner": SnapKV.preset("kvpress", window=16),
            "budget": AdaKV(PyramidKV.preset("kvpress", window=16)),
        },
    ),
    (
        "pruned,pruner=criticalkv:norm=l2:tova:preset=kvpress,keep=64",
        kvcompress.PrunedCache,
        {"pruner": CriticalKV(TOVA.preset("kvpress"), norm="l2")},
    ),
    ("streaming,window_size=60,sink_distance=window", kvcompress.StreamingCache, {"window_size": 60}),
    ("streaming,window_size=1k,num_sink_tokens=0", kvcompress.StreamingCache, {"window_size": 1024}),
    (
        "pruned,pruner=replay,chunk=1k,keep=1k,chunk_size=2k",
        kvcompress.PrunedCache,
        {"pruner": Replay(chunk=1024), "chunk_size": 2048},
    ),
    ("quest,token_budget=128,dense_layers=0", kvcompress.QuestCache, {"token_budget": 128, "dense_layers": 0}),
    (
        "gated,gates=FOLDER,keep=25%,window=32,track=true",
        kvcompress.GatedCache,
        {"gates": tiny_gates(), "threshold": tiny_gates().threshold(0.25), "window": 32, "track": True},
    ),
    ("dmc,chunk_size=64,track=true", kvcompress.DMCCache, {"chunk_size": 64, "track": True}),
    ("pod,tau=0.7,pruner=snapkv,window=8,distant=600", kvcompress.PoDCache, {"tau": 0.7, "distant": 600}),
]
WRONG = [  # text, message
    ("gated,keep=0.5", r"gated needs gates, as in gated,gates=folder, got gated,keep=0.5"),
    ("gated,gates=FOLDER", r"gated needs keep, as in gated,gates=.*,keep=1/4: gates decide token by token"),
    ("iterative,keep=256", r"cache=iterative has no 'keep'; known are .*; its size is memory_size"),
    ("streaming,keep=256", r"cache=streaming has no 'keep'; known are .*; its size is window_size"),
    ("gated,gates=x,share=0.5", r"cache=gated has no 'share'; known are gates, keep, .*; share is keep here"),
    ("pruned,pruner=gate,keep=64", r"gate needs gates, as in gate:folder, got 'gate'"),
    (
        "fancy",
        r"cache must be one of dense, dmc, gated, iterative, pod, pruned, quantized, quest, streaming, got 'fancy'",
    ),
    ("snapkv", r"got 'snapkv': that is a pruner, as in pruned,pruner=snapkv$"),
    ("int8", r"got 'int8': that is a dtype, as in quantized,dtype=int8$"),
    ("k8v4", r"got 'k8v4': that is a dtype, as in quantized,dtype=k8v4$"),
    ("keep=3", r"cache must be one of dense, .* got none"),
    ("", r"cache must be one of dense, .* got ''"),
    ("prund,keep=3", r"cache must be one of .*, got 'prund': did you mean pruned\?$"),
    ("pruned,pruner=snapvk,keep=3", r"pruner must be one of .*, got 'snapvk': did you mean snapkv\?$"),
    ("pruned,pruner=SnapKVPress,keep=3", r"got 'SnapKVPress': did you mean snapkv\?$"),
    ("pruned,keep=3,bugdet=adakv", r"cache=pruned has no 'bugdet'; known are .*: did you mean budget\?$"),
    ("pruned,pruner=snap", r"pruner must be one of centerofgravity, .*snapkv.*, got 'snap'"),
    ("pruned,bugdet=3", r"cache=pruned has no 'bugdet'; known are pruner, budget, keep, every, .*those of a pruner"),
    (
        "pruned,pruner=tova,window=3",
        r"cache=pruned has no 'window'; known are .*; of pruner=tova: last, num_sink_tokens",
    ),
    ("quest,keep=1k", r"cache=quest has no 'keep'; known are .*; its size is token_budget"),
    ("pruned,target-cr=4", r"cache=pruned has no 'target-cr'; known are .*; target-cr is keep = 1 / target_cr here"),
    ("pruned,memory_size=9", r"; memory_size is keep here"),
    ("quest,pruner=snapkv", r"cache=quest has no 'pruner'; known are token_budget, page_size, "),
    ("dense,chunk_size=3", r"cache=dense has no 'chunk_size'; known are none"),
    ("pruned,budget=many", r"budget must be .*one of uniform, pyramidkv, adakv, .*got 'many'"),
    ("pruned,keep=many", r"keep must be tokens .*, the share that stays .* or bytes .*, got the text 'many'"),
    ("pruned,keep=3,budget=adakv:floor=x", r"floor must be a number, got 'x'"),
    ("pruned,budget=adakv:size=3", r"adakv has no 'size'; known are floor"),
    ("pruned,budget=adakv", r"keep must be given with Replay, got None: 0.25 \(the share that stays\), say, or 1024"),
    ("pruned,keep=2.0", r"keep as a share must be above 0 and at most 1, got 2.0; tokens are a whole number, 2"),
    ("pruned,budget=0.75", r"budget divides tokens .* how many stay is keep=0.25 \(0.75 was the share to remove\)"),
    ("pruned,budget=1024", r"how many stay is keep=1024; got '1024'"),
    ("pruned,budget=512MiB", r"how many stay is keep=512MiB; got"),
    ("pruned,budget=profiled:x.json:64", r"how many stay is keep=64, beside budget=profiled:x.json; got"),
    ("pruned,budget=adakv:floor=0.3:pyramidkv:0.9", r"keep=0.1 .*, beside budget=adakv:floor=0.3:pyramidkv; got"),
    ("iterative,memory_size=pyramidkv:64", r"memory_size must be no budget, got .*; budget=pyramidkv says how"),
    ("pruned,budget=globaltopk:0.75", r"globaltopk divides .* keep=0.25 \(.*\), or .*, beside budget=globaltopk; got"),
    ("pruned,keep=3,keep=4", r"keep must be given once, got '3' and '4'"),
    ("pruned,budget", r"cache must be written as kind,key=value,\.\.\., got 'budget'"),
    ("pruned,keep=3,pruner=criticalkv:kvzip:512", r"kvzip must be written as kvzip:field=value"),
    ("pruned,keep=3,positions=remotegap:gap=x:y", r"remotegap must be written as remotegap:field=value"),
    ("pruned,keep=3,positions=remotegap:size=3", r"remotegap has no 'size'; known are gap, reading"),
    (
        "iterative,memory_size=0.5",
        r"memory_size must be a number of tokens .*, got '0.5': the share that stays is keep=",
    ),
    ("quest,token_budget=many", r"token_budget must be a number of tokens \(1024, '1k'\), got 'many'$"),
    ("iterative,dynamic=1", r"dynamic must be true or false, got '1'"),
    ("iterative,schedule=cubic", r"schedule must be .* 'cubic'"),
    ("pruned,pruner=criticalkv:snap,keep=3", r"pruner must be one of centerofgravity, .*, got 'snap'"),
    ("pruned,pruner=criticalkv:snapkv:windw=3,keep=3", r"snapkv has no 'windw'; known are window, "),
    ("pruned,pruner=snapkv:window=3,window=4,keep=3", r"window must be given once, got 4 and '3' for snapkv"),
    ("pruned,pruner=tova:snapkv,keep=3", r"tova must be written as tova:field=value:\.\.\., got 'tova:snapkv'"),
    ("pruned,keep=3,budget=profiled", r"profiled needs profile, as in profiled:file.json, got 'profiled'"),
    ("pruned,pruner=duoattention", r"duoattention needs heads, as in duoattention:file.json, got"),
    ("pruned,pruner=snapkv,preset=paper,keep=3", r"preset must be one of official, kvpress, .*, got 'paper'"),
    ("pruned,pruner=replay,preset=kvpress,keep=3", r"pruned has no 'preset'; .* of pruner=replay: chunk, last"),
    ("pruned,keep=3,budget=adakv:preset=kvpress", r"adakv has no 'preset'; known are floor"),
    ("pruned,compression_ratio=0.5", r"known are pruner, budget, keep, .*; kvpress's compression_ratio is keep = 1 -"),
    ("pruned,pruner=snapkv,window_size=8,keep=3", r"of pruner=snapkv: .*; kvpress's window_size is window here"),
    ("pruned,keep=3,budget=pyramid", r"budget must be .*pyramidkv, adakv.*profiled.*, got 'pyramid'"),
    ("streaming,window_size=0", r"window_size must be at least 1, got 0"),
]


def config_of(kind):
    return AutoConfig.from_pretrained(RETROFITTED[kind]) if kind in RETROFITTED else tiny_model().config


def in_folder(text):
    """With the folder of some gates, whose name is another in every process of a run."""
    return text.replace("FOLDER", tiny_gates_folder())


@pytest.mark.parametrize(("text", "made", "attributes"), WRITTEN)
def test_text_makes_what_python_makes(text, made, attributes):
    spec = CacheSpec.parse(in_folder(text))
    cache = spec.make(config_of(spec.kind))
    assert type(cache) is made
    assert {name: getattr(cache, name) for name in attributes} == attributes
    assert spec.make(config_of(spec.kind)) is not cache
    assert CacheSpec.parse(str(spec)) == spec


def test_every_kind_is_written_here():
    assert {CacheSpec.parse(in_folder(text)).kind for text, _, _ in WRITTEN} == set(KINDS)
    spec = CacheSpec.parse(next(text for text, _, _ in WRITTEN if "remotegap" in text))
    assert spec.make(config_of("pruned")).policy.gap == RemoteGap(gap=128, reading="to_query")


def test_what_a_pruner_asks_in_words_is_the_tokenizers():
    spec, config = CacheSpec.parse("pruned,pruner=chunkkv:kvzip,keep=64"), tiny_model().config
    assert spec.make(config).pruner.pruner.prompt == ()
    assert bytes(spec.make(config, byte_tokenizer()).pruner.pruner.suffix) == b"\n"


def test_every_exported_pruner_has_a_name(tmp_path):
    path = HeadProfile(((1.0, 0.0),) * 3).save(tmp_path / "heads.json")
    files = {DuoAttention: f"heads={path}", Gate: f"gates={tiny_gates().save(tmp_path / 'gates')},keep=64"}
    exported = [getattr(pruners, name) for name in pruners.__all__]
    assert {x for x in exported if issubclass(x, pruners.Pruner) and not inspect.isabstract(x)} == set(PRUNERS.values())
    for name, made in PRUNERS.items():
        rest = files.get(made, "keep=64")  # DuoAttention brings a budget of its own
        assert type(CacheSpec.parse(f"pruned,pruner={name},{rest}").make(config_of("pruned")).pruner) is made


def test_fields_of_pruners_are_no_settings_of_caches():
    """Both stand side by side: a name must mean one thing."""
    caches = [kvcompress.PrunedCache, kvcompress.IterativeCache, kvcompress.PoDCache]
    for cache in caches:
        for pruner in PRUNERS.values():
            shared = inspect.signature(cache).parameters.keys() & inspect.signature(pruner).parameters.keys()
            assert shared <= {"pruner"}  # which is written after a colon


def test_a_profile_is_read_from_its_file(tmp_path):
    profile = BudgetProfile(((1.0, 3.0), (2.0, 2.0), (2.0, 2.0)))
    path = profile.save(tmp_path / "heads.json")
    for text in (f"profiled:profile={path}", f"profiled:{path}"):
        assert CacheSpec.parse(f"pruned,keep=64,budget={text}").make(config_of("pruned")).budget == Profiled(profile)
    heads = HeadProfile(((1.0, 0.0),) * 3)
    file = heads.save(tmp_path / "streams.json")
    cache = CacheSpec.parse(f"pruned,pruner=duoattention:{file},sparsity=0.25").make(config_of("pruned"))
    assert cache.pruner == DuoAttention(heads, 0.25)


def test_every_budget_has_a_name(tmp_path):
    path = BudgetProfile(((1.0, 3.0), (2.0, 2.0), (2.0, 2.0))).save(tmp_path / "shares.json")
    for name, made in BUDGETS.items():
        text = f"{name}:{path}" if made is Profiled else name
        assert type(CacheSpec.parse(f"pruned,keep=64,budget={text}").make(config_of("pruned")).budget) is made


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_what_is_wrong_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        CacheSpec.parse(in_folder(text)).make(config_of("pruned"))


def test_settings_that_another_parser_has_read():
    given = {"pruner": "snapkv", "window": 64, "keep": 0.25, "every": None}
    assert CacheSpec.of("pruned", given) == CacheSpec.parse("pruned,pruner=snapkv,window=64,keep=0.25,every=none")
    assert CacheSpec.of("iterative", {"dynamic": True}) == CacheSpec.parse("iterative,dynamic=true")
    with pytest.raises(ValueError, match=r"budget must be text, a number, a boolean or None, got list"):
        CacheSpec.of("pruned", {"budget": [1]})


@pytest.mark.parametrize("kind", ["dmc", "pod", None])
def test_the_kind_that_a_converted_model_needs(kind):
    assert CacheSpec.kind_of(config_of(kind)) == kind


def test_a_size_is_set_and_what_divides_it_stays():
    for text, sized in (
        ("pruned,pruner=h2o,page_size=8", "pruned,pruner=h2o,page_size=8,keep=96"),
        ("pruned,keep=0.25", "pruned,keep=96"),
        (
            "pruned,keep=1024,budget=adakv:floor=0.3:pyramidkv:beta=10",
            "pruned,keep=96,budget=adakv:floor=0.3:pyramidkv:beta=10",
        ),
        ("iterative,memory_size=64,budget=pyramidkv", "iterative,memory_size=96,budget=pyramidkv"),
        ("streaming", "streaming,window_size=96"),
    ):
        spec = CacheSpec.parse(text)
        assert str(spec.sized(96)) == sized and spec.size_key is not None
    for kind in ("dense", "quest", "dmc", "pod"):
        assert CacheSpec(kind, {}).size_key is None
    with pytest.raises(ValueError, match=r"size to set .*got quest"):
        CacheSpec.parse("quest").sized(96)


def test_what_is_taken_unasked_fits_the_model():
    config = tiny_model(max_position_embeddings=8192).config
    assert str(unasked(config, 8192 - 256)) == "pruned,keep=1024"
    assert str(unasked(config, 8192 - 256, later="keep")) == "pruned,keep=1024,later=keep"
    assert str(unasked(config, 8192 - 255)) == str(unasked(config)) == "iterative,memory_size=4096"
    assert str(unasked(tiny_model(max_position_embeddings=2048).config)) == "iterative"
    assert str(unasked(config_of("dmc"), 10)) == "dmc"
