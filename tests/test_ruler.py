"""RULER's tasks by their definitions: what is in a prompt, where, how often, and how an answer is scored."""

import json
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress.evaluate.fitting import TooShort, largest
from kvcompress.evaluate.ruler import registry as ruler
from kvcompress.evaluate.ruler.needles import DEPTHS, NOISE
from kvcompress.evaluate.ruler.task import string_match_all, string_match_part
from kvcompress.evaluate.texts import Library, Prose

NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")
KINDS = {
    "numbers": r"[1-9]\d{6}",
    "words": r"[a-z]+-[a-z]+",
    "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
}
# of synthetic.yaml: haystack, kinds of keys and values, keys, values of a key, keys that are asked
NIAH = {
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("text", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("text", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("text", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", None, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", None, 1, 1),
    "niah_multivalue": ("text", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("text", "words", "numbers", 4, 1, 4),
}
SOURCE = Library()


def tokens(text):
    return len(text) // 3  # any count that grows with a text


def samples(name, length=1500, count=3, seed=0, source=SOURCE, **files):
    return ruler.task_of(name, **files).samples(tokens, length, source, count, seed)


def test_there_are_thirteen():
    assert len(ruler.NAMES) == 13 and set(NIAH) <= set(ruler.NAMES)


@pytest.mark.parametrize("name", ruler.MADE)
def test_prompts_fill_the_length_and_are_drawn_by_the_seed(name):
    found, task = samples(name), ruler.MADE[name]
    assert found == samples(name) and len(set(found)) == 3 and found != samples(name, seed=1)
    for sample in found:
        assert 0.8 * 1500 < tokens(sample.prompt) + task.new_tokens <= 1500
    assert tokens(samples(name, 6000)[0].prompt) > 0.95 * 6000 - task.new_tokens
    with pytest.raises(ValueError, match=r"at least \d+ tokens .* got 150"):
        samples(name, 150)


@pytest.mark.parametrize("name", NIAH)
def test_a_haystack_has_the_needles_of_its_definition(name):
    haystack, keys, values, num_keys, num_values, num_queries = NIAH[name]
    for sample in samples(name):
        found = NEEDLE.findall(sample.context)
        assert {kind for kind, _, _ in found} == {values}
        assert all(re.fullmatch(KINDS[keys], key) and re.fullmatch(KINDS[values], x) for _, key, x in found)
        by_key = Counter(key for _, key, _ in found)
        assert set(by_key.values()) == {num_values}
        assert num_keys is None or len(by_key) == num_keys
        plural = num_values * num_queries > 1
        asked = re.search(r"magic \w+ for (.*) mentioned", sample.question)[1]
        queried = asked.replace(", and ", ", ").split(", ")
        assert len(queried) == num_queries and (", and " in asked) == (num_queries > 1)
        wanted = [x for key in queried for _, other, x in found if other == key]
        assert sorted(sample.answers) == sorted(wanted) and len(wanted) == num_values * num_queries
        kind = values if plural else values[:-1]
        verb, first = ("are", "Some") if plural else ("is", "A")
        assert sample.context.startswith(
            f"{first} special magic {kind} {verb} hidden within the following text. Make sure to memorize it. I will "
            f"quiz you about the {kind} afterwards.\n"
        )
        assert sample.question == (
            f"What {'are all' if plural else 'is'} the special magic {kind} for {asked} mentioned in the provided text?"
        )
        assert sample.prefix == f" The special magic {kind} for {asked} mentioned in the provided text {verb}"
        rest = [line for line in sample.context.split("\n")[1:-1] if not NEEDLE.fullmatch(line)]
        if haystack == "noise":
            assert set(rest) == {NOISE}
        elif haystack == "needle":
            assert not rest
        else:
            assert rest == SOURCE.text.split("\n")[: len(rest)]


def test_needles_in_a_text_lie_at_one_of_forty_depths():
    assert DEPTHS[:3] == [0, 3, 5] and DEPTHS[-1] == 100 and len(set(DEPTHS)) == 40
    depths = set()
    for sample in samples("niah_multikey_1", count=8):
        lines = sample.context.split("\n")[1:-1]
        places = [number for number, line in enumerate(lines) if NEEDLE.fullmatch(line)]
        count = len(lines) - len(places)
        for before, place in enumerate(places):
            assert place - before in {count * depth // 100 for depth in DEPTHS}
            depths.add((place - before) / count)
    assert min(depths) < 0.2 and max(depths) > 0.8


def test_prose_is_cut_into_sentences_and_begins_again(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("It was  night.\nNobody spoke! Why?\n")
    source = Prose([path])
    assert source.pieces(8) == ["It was night.", "Nobody spoke!", "Why?", "It was"]
    assert source.words() == ["night", "spoke", "was"]
    context = samples("niah_single_2", source=source)[0].context
    assert NEEDLE.sub("", context).replace("  ", " ").count("It was night. Nobody spoke! Why?") > 20
    with pytest.raises(FileNotFoundError, match="missing"):
        Prose([tmp_path / "missing"])


def test_a_chain_of_variables_can_be_followed():
    for sample in samples("vt"):
        example, asked = sample.context.split("Memorize and track the chain(s)")[1:]
        value = re.search(r"assigned the value (\d{5}) in the text above", sample.question)[1]
        assert sample.prefix.endswith(f", 5 variables are assigned the value {value}, they are: ")
        has = {}
        for line in asked.split("\n"):
            if found := re.fullmatch(r"VAR ([A-Z]{5}) = (?:VAR ([A-Z]{5}) ?|(\d{5}))", line):
                has[found[1]] = found[3] or has[found[2]]  # what it refers to was assigned before
            else:
                assert line in ("", NOISE) or line.startswith(" of variable assignment")
        assert tuple(has) == sample.answers and set(has.values()) == {value} and len(has) == 5
        shown = re.findall(r"^VAR ([A-Z]{3}) =", example, re.MULTILINE)
        assert len(shown) == 5 and example.rstrip().endswith("they are:  " + " ".join(shown))


@pytest.mark.parametrize(("length", "often", "example"), [(1500, (6, 1), (20, 3, 1)), (4096, (30, 3), (40, 10, 3))])
def test_common_words_come_as_often_as_defined(length, often, example):
    for sample in samples("cwe", length):
        shown, solved, asked = re.search(
            r"^Below is .*?\n(.*?)\nQuestion: .*? are: (.*?)\nBelow is .*?\n(.*)\n$", sample.context, re.DOTALL
        ).groups()
        words = [word for _, word in re.findall(r"(\d+)\. (\w+)", asked)]
        assert [int(number) for number, _ in re.findall(r"(\d+)\. (\w+)", asked)] == list(range(1, len(words) + 1))
        counts = Counter(words)
        assert {word for word, count in counts.items() if count == often[0]} == set(sample.answers)
        assert sorted(set(counts.values())) == sorted(often) and len(sample.answers) == 10
        few = Counter(re.findall(r"[a-z]+", shown))
        assert len(few) == example[0] and sorted(set(few.values())) == sorted(example[1:])
        assert set(re.findall(r"[a-z]+", solved)) == {word for word, n in few.items() if n == example[1]}


def test_coded_words_fall_off_as_their_rank_squared():
    for length in (300, 1500, 6000):
        sample = samples("fwe", length)[0]
        said = Counter(re.search(r"coded words\. (.*)\n", sample.context)[1].split())
        ranked = [word for word, _ in said.most_common(4)]
        assert ranked == ["...", *sample.answers]
        (first, *others), (last, beyond) = [said[word] for word in ranked], [n for _, n in said.most_common(5)][-2:]
        assert last > beyond
        assert all(abs(n - first / rank**2) <= 1 for rank, n in enumerate(others, 2))
        assert all(re.fullmatch("[a-z]{6}", word) for word in list(said) if word != "...")


def test_questions_are_answered_by_a_document_among_others(tmp_path):
    paragraphs = [
        {
            "context": f"The capital of land {n} is town {n}.",
            "qas": [
                {
                    "question": f"Capital of {n}?",
                    "is_impossible": n == 0,
                    "answers": [{"text": f"town {n}"}, {"text": "it"}],
                }
            ],
        }
        for n in range(40)
    ]
    squad, hotpot = tmp_path / "squad.json", tmp_path / "hotpot.json"
    squad.write_text(json.dumps({"data": [{"paragraphs": paragraphs[:20]}, {"paragraphs": paragraphs[20:]}]}))
    entry = {"question": "Who?", "answer": "Ada", "context": [["Ada", ["Ada ", "wrote."]], ["Bob", ["Bob slept."]]]}
    hotpot.write_text(json.dumps([entry, entry | {"answer": "Bob"}]))
    for length in (400, 2000):
        asked = samples("qa_1", length, squad=squad)
        assert [sample.question[-13:] for sample in asked] == [f"Capital of {n}?" for n in (1, 2, 3)]
        for n, sample in enumerate(asked, 1):
            numbers = [int(x) for x in re.findall(r"^Document (\d+):$", sample.context, re.MULTILINE)]
            assert numbers == list(range(1, len(numbers) + 1))
            assert f"The capital of land {n} is town {n}." in sample.context and sample.answers == (f"town {n}", "it")
    near = samples("qa_1", 200, count=1, squad=squad)[0].context
    assert {int(n) for n in re.findall(r"land (\d+)", near)} <= set(range(20))  # the same article's first
    text = samples("qa_2", 300, count=1, hotpotqa=hotpot)[0].context
    assert re.search(r"^Document [12]:\nBob\nBob slept\.$", text, re.MULTILINE)
    with pytest.raises(ValueError, match=r"squad must be a file, SQuAD.*qa_1"):
        ruler.task_of("qa_1")
    with pytest.raises(ValueError, match="limit must be at most the 2 questions"):
        samples("qa_2", 300, hotpotqa=hotpot)
    with pytest.raises(ValueError, match="form that read_squad reads"):
        samples("qa_1", squad=hotpot)
    with pytest.raises(ValueError, match=r"niah_single_1, .*got 'niah'"):
        ruler.task_of("niah")


def test_answers_are_scored_as_ruler_scores_them():
    assert string_match_all(" are 12, 34.\x00and so", ["12", "99", "AND"]) == pytest.approx(2 / 3)
    assert string_match_part("in Town 3", ["village", "town 3"]) == 1.0
    assert string_match_part("no", ["village"]) == 0.0
    assert ruler.MADE["vt"].score("ABC", ["abc", "xyz"]) == 0.5


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 30), st.integers(1, 6), st.integers(0, 4000), st.integers(1, 300))
def test_the_largest_that_fits_is_found_whatever_it_begins_with(base, per_unit, step, room, near):
    def counted(size):
        return base + per_unit * (size // step)

    least = step
    limit = counted(least) + room
    found = largest(counted, least, limit, near=near, most=5000)
    assert counted(found) <= limit and (found == 5000 or counted(found + 1) > limit)
    with pytest.raises(TooShort):
        largest(counted, least, counted(least) - 1, near=near)
