"""What attention to a key is worth in each KV head: said by KVzip, measured by training."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import KINDS, attached, kind_model, random_ids, tiny_model
from typer.testing import CliRunner

import kvcompress
from kvcompress import CacheSpec, GlobalTopK, PrunedCache, analysis, prefill
from kvcompress.analysis import scores as fitting
from kvcompress.analysis.scores import measure_scores
from kvcompress.cli import app
from kvcompress.hf.reading import plain_decoder, read
from kvcompress.pruners import CriticalKV, KVzip, ScoreProfile
from kvcompress.retrofit.passes import whole_layers

ASKED = KVzip(chunk=64, num_sink_tokens=3, lead_in=2, prompt=(5, 6), next_prompt=(7, 8, 9), suffix=(10,), mass=True)
PLAIN = (1.0, 1.0, 0.0)  # KVzip with mass
VARIED = ScoreProfile(
    tuple(tuple((1 + 0.1 * layer, 0.5 - 0.2 * head, layer - head / 2) for head in range(2)) for layer in range(3))
)


def alike(*head):
    return ScoreProfile(((head,) * 2,) * 3)


def held(model, ids, pruner, keep=1.0):
    """[L][B * Hkv, T]: the scores that a cache holds."""
    cache = PrunedCache(model.config, pruner, keep=keep, later="keep")
    with torch.no_grad():
        prefill(model, ids, cache)
    return [layer.chooser.held.scores[:, : ids.shape[1] - 1] for layer in cache.compressing]


def test_a_head_weighs_the_most_and_the_mean():
    model, ids = attached(), random_ids(150)
    most = held(model, ids, replace(ASKED, mass=False))
    both = held(model, ids, ASKED)
    weighed = held(model, ids, replace(ASKED, profile=VARIED))
    for layer, (a, b, found) in enumerate(zip(most, both, weighed, strict=True)):
        a, mean = a[:, 3:], (b / a)[:, 3:]
        for head, (of_most, of_mean, factor) in enumerate(VARIED.heads[layer]):
            wanted = a[head] ** of_most * mean[head] ** of_mean * torch.tensor(factor).exp()
            torch.testing.assert_close(found[head, 3:], wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("head", "plain"), [(PLAIN, ASKED), ((1.0, 0.0, 0.0), replace(ASKED, mass=False))])
def test_powers_of_one_are_kvzip_as_it_is(head, plain):
    model, ids = attached(), random_ids(46)
    found = held(model, ids, replace(ASKED, profile=alike(*head)))
    for one, wanted in zip(found, held(model, ids, plain), strict=True):
        torch.testing.assert_close(one[:, 3:], wanted[:, 3:], rtol=1e-4, atol=0)


def test_sequences_of_a_batch_are_scored_as_alone():
    model, ids, pruner = attached(), random_ids(46, batch=3), replace(ASKED, profile=VARIED)
    together = held(model, ids, pruner)
    for b in range(3):
        for every, own in zip(together, held(model, ids[b : b + 1], pruner), strict=True):
            torch.testing.assert_close(every[2 * b : 2 * b + 2], own, rtol=1e-4, atol=1e-7)


def test_a_factor_gives_a_layer_more_of_the_budget():
    model, ids = attached(), random_ids(120)
    rows = tuple(((1.0, 1.0, 9.0 if layer == 1 else 0.0),) * 2 for layer in range(3))
    cache = PrunedCache(model.config, replace(ASKED, profile=ScoreProfile(rows)), GlobalTopK(), keep=0.25)
    with torch.no_grad():
        prefill(model, ids, cache)
    lengths = [sum(layer[0]) for layer in cache.stored_lengths()]
    assert lengths[1] == max(lengths) > 2 * max(lengths[0], lengths[2])


def test_a_profile_is_saved_and_loaded_whole(tmp_path):
    path = VARIED.save(tmp_path / "scores.json")
    assert ScoreProfile.load(path) == VARIED
    text = f"pruned,pruner=kvzip,mass=true,profile={path},keep=0.25,budget=globaltopk"
    cache = CacheSpec.parse(text).make(tiny_model().config)
    assert cache.pruner == KVzip(mass=True, profile=VARIED)
    nested = CacheSpec.parse(f"pruned,pruner=criticalkv:kvzip:mass=true:{path},keep=0.25")
    assert nested.make(tiny_model().config).pruner == CriticalKV(KVzip(mass=True, profile=VARIED))


def test_a_cache_with_a_profile_is_saved_and_goes_on(tmp_path):
    model, ids = attached(), random_ids(60)
    cache = PrunedCache(model.config, replace(ASKED, profile=VARIED), GlobalTopK(), keep=0.5, later="keep")
    with torch.no_grad():
        prefill(model, ids, cache)
        cache.save(tmp_path / "cache")
        again = kvcompress.load_cache(tmp_path / "cache", model)
        assert again.pruner == cache.pruner
        for one in (cache, again):
            one.compress(keep=0.25)
        assert again.stored_lengths() == cache.stored_lengths()


@pytest.mark.parametrize(
    ("heads", "error"),
    [
        ((), "heads must be a list of heads for each layer"),
        (((),), "heads must be a list of heads for each layer"),
        ((((1.0, 1.0),),), "heads must be three numbers"),
        ((((1.0, float("nan"), 0.0),),), "two powers and the logarithm of a factor"),
        ((((1.0, True, 0.0),),), "heads must be three numbers"),
        ((((1.0, 2e3, 0.0),),), "-1000 to 1000"),
    ],
)
def test_a_profile_of_other_numbers_is_refused(heads, error):
    with pytest.raises(ValueError, match=error):
        ScoreProfile(heads)


def test_a_profile_is_of_its_model(tmp_path):
    model, other = attached(), ScoreProfile(VARIED.heads[:2], "of a model of two layers")
    for pruner in (replace(ASKED, profile=other), CriticalKV(replace(ASKED, profile=other))):
        with pytest.raises(ValueError, match=r"profile must be of this model: .*of a model of two layers"):
            prefill(model, random_ids(46), PrunedCache(model.config, pruner, keep=0.5))
    with pytest.raises(ValueError, match="mass must be True with a profile"):
        KVzip(profile=VARIED)
    with pytest.raises(ValueError, match=r"got str: ScoreProfile\.load reads it"):
        KVzip(mass=True, profile="scores.json")
    (tmp_path / "other.json").write_text('{"format": "kvcompress score profile 1", "heads": [], "more": 1}')
    with pytest.raises(ValueError, match="must have the fields heads, measured"):
        ScoreProfile.load(tmp_path / "other.json")


def test_the_profile_of_smollm2_is_of_its_shape():
    path = Path(__file__).parents[1] / "examples" / "smollm2_scores.json"
    ScoreProfile.load(path).check_rows([3] * 30)


# ---- measured ----


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_tokens_behind_a_context_see_it_as_in_one_pass_but_for_what_is_hidden(kind):
    model = kind_model(kind).eval()
    ids = random_ids(60)[0]
    with plain_decoder(model) as (decoder, facts):
        passed = fitting._ContextPass(facts)
        read(decoder, ids[:40], passed)
        whole = read(decoder, ids, fitting._ContextPass(facts))
        found = fitting._behind(decoder, facts, passed.read, ids[40:], {})
        torch.testing.assert_close(found, whole[:, 40:], atol=2e-5, rtol=1e-4)
        biases = {layer: torch.zeros(passed.read[layer].keys.shape[1], 40) for layer in whole_layers(facts)}
        for bias in biases.values():
            bias[:, 5:30] = -60.0
        hidden = fitting._behind(decoder, facts, passed.read, ids[40:], biases)
        for layer in biases:  # what is hidden may be anything
            for x in passed.read[layer]:
                x[:, :, 5:30] = x[:, :, 5:30].flip(2)
        again = fitting._behind(decoder, facts, passed.read, ids[40:], biases)
    torch.testing.assert_close(again, hidden, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(hidden, found, atol=1e-3)


def test_a_soft_cut_hides_what_a_hard_one_drops():
    scores = torch.randn(3, 2, 36, generator=torch.Generator().manual_seed(3))
    bias = fitting._cut(scores, 4, 0.25, 1e-3)
    stays = bias > -1.0
    assert bias.shape == (3, 2, 40) and stays[..., :4].all() and abs(int(stays.sum()) - 60) <= 1
    assert scores[stays[..., 4:]].min() > scores[~stays[..., 4:]].max()
    assert (bias[~stays] == fitting._HIDDEN).any() and bias.max() <= 0


def test_what_is_measured_is_of_every_head_and_the_model_is_left_as_it_was():
    model = tiny_model(vocab_size=256, max_position_embeddings=1024).eval()
    texts = [random_ids(400, seed=j)[0] for j in range(2)]
    told = []
    options = {"continuation": 40, "steps": 5, "report": lambda *x: told.append(x)}
    before = {name: p.clone() for name, p in model.named_parameters()}
    profile = measure_scores(model, texts, ASKED, **options)
    profile.check_rows([2, 2, 2])
    assert [x[0] for x in told] == [*range(5)] and all(min(lost) > 0 and min(whole) > 0 for _, lost, whole in told)
    assert told[0][1] != told[2][1]  # of the same text
    assert (
        profile != alike(*PLAIN)
        and "5 steps, lr 0.02, 2 texts of 400 tokens, chunk 64, cut to 0.25+0.25+0.125, seed 0" in profile.measured
    )
    assert all(abs(x - y) < 1.0 for row in profile.heads for head in row for x, y in zip(head[:2], PLAIN, strict=False))
    for name, p in model.named_parameters():
        assert p.requires_grad and p.grad is None and torch.equal(p, before[name])
    assert measure_scores(model, texts, replace(ASKED, mass=False), **options) == profile


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_counted_among_those_that_compress(kind):
    """A profile of each family is learned and taken, whichever layers see a window alone."""
    model = kind_model(kind, max_position_embeddings=1024)
    pruner = replace(ASKED, prompt=(5,), next_prompt=(6,), suffix=())
    profile = measure_scores(model, [random_ids(400)[0] % 97], pruner, continuation=40, steps=2)
    heads = [facts.kv_heads for facts in layers_of(model) if not facts.is_local]
    profile.check_rows(heads)
    rows = [((1.0, 1.0, float(9 * (i == len(heads) - 1))),) * n for i, n in enumerate(heads)]
    kvcompress.attach(model)
    cache = PrunedCache(model.config, replace(pruner, profile=ScoreProfile(tuple(rows))), GlobalTopK(), keep=0.25)
    with torch.no_grad():
        prefill(model, random_ids(120) % 97, cache)
    lengths = [max(layer[0]) for layer in cache.stored_lengths() if layer is not None]
    assert lengths[-1] > max(lengths[:-1])


def layers_of(model):
    with plain_decoder(model) as (_, facts):
        return [facts[layer] for layer in sorted(facts)]


def test_a_head_whose_scores_are_all_alike_keeps_sane_powers():
    model = tiny_model(vocab_size=256, max_position_embeddings=1024).eval()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[:32] = 0
    profile = measure_scores(model, [random_ids(400)[0]], ASKED, continuation=40, steps=20)
    assert all(abs(x) < 30 for row in profile.heads for head in row for x in head)


def test_a_model_in_16_bits_is_measured_and_one_of_other_logits_is_not():
    model = tiny_model(vocab_size=256, max_position_embeddings=1024).eval()
    options = {"samples": [random_ids(400)[0]], "pruner": ASKED, "continuation": 40, "steps": 1}
    measure_scores(model.bfloat16(), **options).check_rows([2, 2, 2])
    own = type(model).forward

    class Other(type(model)):
        def forward(self, *args, **given):
            out = own(self, *args, **given)
            out.logits = out.logits / 4
            return out

    model.__class__ = Other
    with pytest.raises(ValueError, match="Other makes other logits of it"):
        measure_scores(model, **options)


def test_it_is_learned_in_inference_mode_and_gives_back_what_it_took_after_an_error():
    model = tiny_model(vocab_size=256, max_position_embeddings=1024).train()

    def stop(*_):
        raise KeyboardInterrupt

    with torch.inference_mode(), pytest.raises(KeyboardInterrupt):
        measure_scores(model, [random_ids(400)[0]], ASKED, continuation=40, steps=2, report=stop)
    assert model.training and all(p.requires_grad for p in model.parameters())


def test_training_lowers_what_a_cut_costs():
    """In a model where one head of each layer is of no use at all, its keys lose their places."""
    model = tiny_model(vocab_size=256, max_position_embeddings=1024).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:, :32] = 0  # the two query heads of KV head 0
            layer.self_attn.o_proj.weight[:, 32:] *= 8
    texts = [random_ids(400, seed=j)[0] for j in range(3)]
    profile = measure_scores(model, texts, ASKED, continuation=40, steps=60, lr=0.1)
    kvcompress.attach(model)

    def lengths(pruner):
        cache = PrunedCache(model.config, pruner, GlobalTopK(), keep=0.25)
        with torch.no_grad():
            prefill(model, random_ids(200, seed=9), cache)
        return torch.tensor([layer[0] for layer in cache.stored_lengths()]).sum(0)

    plain, learned = lengths(ASKED), lengths(replace(ASKED, profile=profile))
    assert learned[0] < plain[0] and learned[1] > plain[1]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"samples": []}, "samples must hold at least one"),
        ({"samples": [random_ids(120)[0]]}, r"samples\[0\] must have at least \d+ tokens, got 120"),
        ({"samples": [random_ids(520)[0]], "continuation": 300}, "must leave 300 of the model's 512 positions"),
        ({"pruner": kvcompress.Replay()}, "pruner must be a KVzip, got Replay"),
        ({"keep": ()}, "keep must have at least one share"),
        ({"keep": (1.5,)}, "keep must be"),
        ({"steps": 0}, "steps must be"),
        ({"lr": 0.0}, "lr must be"),
        ({"continuation": 1}, "continuation must be"),
    ],
)
def test_what_cannot_be_measured_is_refused(given, error):
    options = {"samples": [random_ids(500)[0]], "pruner": ASKED, "steps": 1} | given
    with pytest.raises(ValueError, match=error):
        measure_scores(tiny_model(vocab_size=256), **options)


def test_the_command_writes_a_profile_that_a_cache_takes(tmp_path):
    """Reads 2 texts twice: 4 s."""
    path = tmp_path / "scores.json"
    options = ["--samples", "2", "--length", "500", "--chunk", "128", "--steps", "3"]
    out = CliRunner().invoke(app, ["analyze", "scores", "--out", str(path), *options])
    assert out.exit_code == 0, out.output
    assert "Nats a token that a soft cut loses, last 3 steps" in out.output and "KV head" in out.output
    profile = ScoreProfile.load(path)
    assert len(profile.heads) == 4 and "3 steps" in profile.measured
    assert analysis.measure_scores is measure_scores
    out = CliRunner().invoke(app, ["analyze", "scores", "--out", str(path), "--keep", "1/4,few"])
    assert out.exit_code == 2 and "keep must be shares such as 1/4,1/8" in out.output.replace("\n", " ")
    out = CliRunner().invoke(app, ["analyze", "scores", "--out", str(path), "--length", "4000"])
    assert out.exit_code == 2 and "length must be at most" in out.output.replace("\n", " ")
