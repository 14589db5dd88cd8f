"""KVzip: a second reading that scores and leaves nothing behind."""

from dataclasses import replace

import oracle
import pytest
import torch
from helpers import attached, kind_model, left_padded, random_ids
from transformers import DynamicCache

import kvcompress
from kvcompress import AdaKV, GlobalTopK, IterativeCache, PrunedCache, RemoteGap, Uniform, prefill
from kvcompress.models.tokenizer import byte_tokenizer
from kvcompress.positions import RotaryTables
from kvcompress.pruners import ChunkKV, CriticalKV, KVzip

ASKED = KVzip(chunk=16, num_sink_tokens=3, lead_in=2, prompt=(5, 6), next_prompt=(7, 8, 9), suffix=(10,))


class Spy(KVzip):
    def scores(self, candidates, keep):
        scores = super().scores(candidates, keep)
        self.__dict__.setdefault("noted", {})[candidates.layer] = scores
        return scores


def spy(**changes):
    return Spy(**{**vars(ASKED), **changes})


def second_reading(model, ids, pruner):
    """float32 [L, Hkv, T] of ids [1, T], by plain attention: each part follows the dense cache, which forgets it."""
    base, T, text = model.model, ids.shape[1], ids[0].tolist()
    cache, queries, scores = DynamicCache(config=model.config), {}, torch.zeros(len(base.layers), 2, T)
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda _, args, out, i=i: queries.update({i: out}))
        for i, layer in enumerate(base.layers)
    ]
    model(ids, past_key_values=cache)
    for first in range(pruner.num_sink_tokens, T, pruner.chunk):
        end = min(first + pruner.chunk, T)
        if first == pruner.num_sink_tokens:
            asked = [*pruner.prompt]
        else:
            asked = [*pruner.next_prompt, *text[first - pruner.lead_in : first]]
        asked += [*pruner.suffix, *text[first:end]]
        n = len(asked)
        model(torch.tensor([asked]), past_key_values=cache)
        for i in range(len(base.layers)):
            q = queries[i].unflatten(-1, (-1, 16)).transpose(1, 2)
            places = torch.arange(T, T + n, dtype=torch.int32)[None]
            q = RotaryTables(base.rotary_emb).rotate(q, places, T + n, [T + n])[0]
            for h in range(2):
                k = cache.layers[i].keys[0, h]
                seen = torch.cat([k[: pruner.num_sink_tokens], k[first:end], k[T : T + n]])
                for head in (2 * h, 2 * h + 1):
                    for j in range(n):
                        weights = (seen[: len(seen) - n + j + 1] @ q[head, j] / 4).softmax(0)
                        own = weights[pruner.num_sink_tokens : pruner.num_sink_tokens + end - first]
                        scores[i, h, first:end] = torch.maximum(scores[i, h, first:end], own)
        cache.crop(-n)
    for hook in hooks:
        hook.remove()
    return scores


@torch.no_grad()
def test_scores_are_those_of_the_second_reading():
    model, ids, pruner = attached(), random_ids(46), spy()
    prefill(model, ids, PrunedCache(model.config, pruner, keep=20))
    expected = second_reading(model, ids[:, :-1], pruner)
    for layer, scores in pruner.noted.items():
        torch.testing.assert_close(scores[:, 3:], expected[layer, :, 3:], atol=1e-5, rtol=1e-4)


class MassSpy(Spy):
    def votes(self, candidates):
        if candidates.repeated is None and candidates.chunk_length:
            T, again = candidates.chunk_length, candidates.again(0, candidates.chunk_length, candidates.chunk_length)
            found = oracle.replay_scores(candidates.queries, again, candidates.keys, chunk=256, reduce="mean")
            self.__dict__.setdefault("shares", {})[candidates.layer] = found[0] * T
        return super().votes(candidates)


@torch.no_grad()
def test_masses_are_the_mean_of_a_replayed_reading_over_an_even_share():
    model, ids = attached(), random_ids(46)
    pruner = MassSpy(**{**vars(ASKED), "mass": True})
    prefill(model, ids, PrunedCache(model.config, pruner, keep=20))
    expected = second_reading(model, ids[:, :-1], pruner)
    assert len(pruner.shares) == 3
    for layer, scores in pruner.noted.items():
        wanted = (expected[layer] * pruner.shares[layer])[:, 3:]
        torch.testing.assert_close(scores[:, 3:], wanted, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("chunk_size", [None, 20])
def test_with_masses_too_what_nobody_reads_again_stays_and_batches_change_nothing(chunk_size):
    model, prompts = attached(), [random_ids(n, seed=n) for n in (57, 23, 3)]
    ids, mask = left_padded(prompts)
    pruner = replace(ASKED, mass=True)

    def cache():
        return PrunedCache(model.config, pruner, GlobalTopK(), keep=12, chunk_size=chunk_size)

    together = prefill(model, ids, cache(), mask)
    for b, prompt in enumerate(prompts):
        alone = prefill(model, prompt, cache())
        assert [layer[b] for layer in together.stored_lengths()] == [layer[0] for layer in alone.stored_lengths()]
    spy = Spy(**vars(pruner))
    read = prefill(model, prompts[0], PrunedCache(model.config, spy, keep=12))
    out = model.generate(torch.cat([prompts[0], prompts[1]], 1), past_key_values=read, max_new_tokens=4)
    prefill(model, torch.cat([out, prompts[2]], 1), read)
    noted = spy.noted[0]
    read_again = noted[:, 3:12].max(), noted[:, -3:].max()
    assert noted.shape[1] == 12 + 1 + 23 + 3 + 3 and float(noted[:, 12:-3].min()) > max(map(float, read_again))


@pytest.mark.parametrize("budget", [Uniform(), AdaKV(), GlobalTopK()], ids=["Uniform", "AdaKV", "GlobalTopK"])
def test_the_best_scores_stay_and_the_second_reading_does_not(budget):
    model, ids, pruner = attached(), random_ids(46), spy()
    cache = prefill(model, ids, PrunedCache(model.config, pruner, budget, keep=12, page_size=4))
    lengths = torch.tensor([layer[0] for layer in cache.stored_lengths()])
    assert cache.get_seq_length() == 45 and int(lengths.sum()) == 6 * 12
    scores = torch.stack([pruner.noted[i] for i in range(3)])
    scores[:, :, :3] = 2
    if isinstance(budget, GlobalTopK):
        least = scores.flatten().topk(72)[0][-1]
        assert torch.equal(lengths, (scores >= least).sum(-1))
    elif isinstance(budget, AdaKV):
        least = scores.flatten(1).topk(24)[0][:, -1]
        assert torch.equal(lengths, (scores >= least[:, None, None]).sum(-1))
    # keys that stay, and the bytes of no others
    layer = cache.layers[1]
    best = scores[1, 0].topk(int(lengths[1, 0]))[1].sort()[0]
    dense = PrunedCache(model.config, KVzip(), keep=100)
    prefill(model, ids, dense)
    held, whole = (x.layers[1].pool.gather(n)[0][0] for x, n in ((cache, int(lengths[1].max())), (dense, 45)))
    torch.testing.assert_close(held[: len(best)], whole[best])
    assert layer.pool.pages_in_use() == sum(-(-int(n) // 4) for n in lengths[1])
    assert cache.reserved_nbytes() <= cache.nbytes() + 4 * 4096


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gemma2", "gpt_oss"])
def test_a_budget_that_holds_everything_changes_nothing(kind):
    model = kind_model(kind)
    kvcompress.attach(model)
    ids = random_ids(41)
    cache = prefill(model, ids, PrunedCache(model.config, ASKED, keep=64))
    plain = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False), plain)


@pytest.mark.parametrize("chunk_size", [None, 20])
@pytest.mark.parametrize("budget", [AdaKV(), GlobalTopK()], ids=["AdaKV", "GlobalTopK"])
def test_batches_and_padding_change_nothing(budget, chunk_size):
    model, prompts = attached(), [random_ids(n, seed=n) for n in (57, 23, 3, 40)]
    ids, mask = left_padded(prompts)

    def cache():
        return PrunedCache(model.config, ASKED, budget, keep=12, chunk_size=chunk_size)

    together = prefill(model, ids, cache(), mask)
    for b, prompt in enumerate(prompts):
        alone = prefill(model, prompt, cache())
        own = [layer[b] for layer in together.stored_lengths()]
        assert own == [layer[0] for layer in alone.stored_lengths()]
        if sum(map(sum, own)) > 6 * 12:
            assert chunk_size is not None or prompt.shape[1] < 14
    out = kvcompress.generate(model, ids, cache(), mask, max_new_tokens=4, do_sample=False)
    for b, prompt in enumerate(prompts):
        alone = kvcompress.generate(model, prompt, cache(), max_new_tokens=4, do_sample=False)
        assert torch.equal(out[b, -4:], alone[0, -4:])


def test_questions_are_kept_whole_and_further_turns_are_read_twice():
    model, pruner = attached(), spy()
    ids, question, more = random_ids(46), random_ids(6, seed=1), random_ids(30, seed=2)
    cache = prefill(model, ids, PrunedCache(model.config, pruner, keep=12))
    fork = cache.fork()
    asked = torch.cat([ids, question], 1)
    out = model.generate(asked, past_key_values=fork, max_new_tokens=20, do_sample=False)
    assert fork.stored_lengths() == [[[12 + 1 + 6 + 19] * 2]] * 3
    prefill(model, torch.cat([out, more], 1), fork)
    assert fork.stored_lengths() == [[[12] * 2]] * 3
    noted = fork.pruner.noted[0]
    assert noted.shape[1] == 12 + 26 + 30
    assert bool((noted[:, 12:38] == 1).all())  # nobody has read them again
    assert bool((noted[:, :12] < 1).any()) and bool((noted[:, 38:] < 1).all())
    assert cache.stored_lengths() == [[[12, 12]]] * 3


@pytest.mark.parametrize("pruner", [ChunkKV(ASKED, chunk=4), CriticalKV(ASKED)], ids=["ChunkKV", "CriticalKV"])
def test_pruners_that_ask_it_read_twice_too(pruner):
    model, ids = attached(), random_ids(46)
    cache = prefill(model, ids, PrunedCache(model.config, pruner, AdaKV(), keep=12))
    assert sum(map(sum, (row for layer in cache.stored_lengths() for row in layer))) == 6 * 12


def test_words_are_those_of_the_paper():
    tokenizer = byte_tokenizer()
    pruner = KVzip(chunk=3, num_sink_tokens=1).with_tokenizer(tokenizer)
    parts = pruner.reread(torch.tensor([*b"abcdefg"]), torch.zeros(0, dtype=torch.int64), True)
    assert [(part.first, part.end) for part in parts] == [(1, 4), (4, 7)]
    assert bytes(parts[0].tokens.tolist()) == b"\n\nRepeat the previous context exactly.\nbcd"
    start = b"\n\nRepeat the part of the previous context exactly, starting with "
    assert bytes(parts[1].tokens.tolist()) == start + b"abcd\nefg"
    tokenizer.chat_template = "{% for m in messages %}<u>{{ m['content'] }}</u>{% endfor %}<a>"
    assert bytes(pruner.with_tokenizer(tokenizer).suffix) == b"</u><a>"
    assert ChunkKV(pruner).with_tokenizer(tokenizer).pruner.suffix == tuple(b"</u><a>")


def test_what_follows_needs_no_positions_for_a_second_reading():
    model, ids = attached(max_position_embeddings=64), random_ids(50)
    cache = prefill(model, ids[:, :20], PrunedCache(model.config, KVzip(), keep=12))
    with torch.no_grad():
        model(ids[:, 19:], past_key_values=cache)  # 50 in sight, of which nothing is read again
    assert cache.get_seq_length() == 50


def test_what_cannot_be_read_twice_is_refused():
    model, ids = attached(max_position_embeddings=64), random_ids(50)
    with pytest.raises(ValueError, match=r"must be read by kvcompress\.prefill or generate with KVzip"):
        model.generate(ids, past_key_values=PrunedCache(model.config, KVzip(), keep=12), max_new_tokens=2)
    cache = PrunedCache(model.config, KVzip(), keep=12)
    with pytest.raises(ValueError, match="KVzip asks queries again at 57 positions behind the 49"):
        prefill(model, ids, cache)
    with pytest.raises(ValueError, match="every must be None with KVzip"):
        PrunedCache(model.config, KVzip(), keep=12, every=4)
    with pytest.raises(ValueError, match="positions must be 'original' with KVzip"):
        PrunedCache(model.config, KVzip(), keep=12, positions=RemoteGap())
    with pytest.raises(ValueError, match="pruner must not be KVzip"):
        IterativeCache(model.config, pruner=KVzip(), memory_size=12, chunk_size=20)
    with pytest.raises(ValueError, match="prompt must be token ids as integers, got 'Repeat'"):
        KVzip(prompt="Repeat")
    with pytest.raises(ValueError, match="mass must be True or False, got 1"):
        KVzip(mass=1)
    with pytest.raises(ValueError, match="guide has no effect with the pruner KVzip"):
        prefill(model, random_ids(20), PrunedCache(model.config, KVzip(), keep=12), guide=torch.tensor([4]))
