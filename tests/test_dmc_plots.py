"""Figures of converted models: what stands in them is what was decided."""

import json
import math
import re
from html.parser import HTMLParser
from io import StringIO
from itertools import pairwise

import pytest
import torch
from helpers import deciding_model, random_ids
from matplotlib.colors import to_rgb
from rich.console import Console

from kvcompress import DMCCache, attach, plots, prefill
from kvcompress.dmc.statistics import as_decisions, decision_over_position, ratio_over_length
from kvcompress.plots.segmentation import FILLS, INK


def decisions(L=3, B=2, Hkv=2, T=50, seed=0):
    made = torch.rand(L, B, Hkv, T, generator=torch.Generator().manual_seed(seed)) < 0.7
    made[..., 0] = False
    return made


@pytest.fixture(scope="module")
def tracked():
    """A cache of 2 texts of 40 tokens, and the model that read them."""
    model = deciding_model()
    attach(model)
    cache = DMCCache(model.config, page_size=4, track=True)
    with torch.no_grad():
        model(random_ids(40, 2), past_key_values=cache)
    return cache


# ---- statistics ----


def test_ratios_over_length_are_those_of_the_entries():
    made = decisions()
    over = ratio_over_length(made, [1, 7, 50])
    for number, n in enumerate((1, 7, 50)):
        entries = [[sum(int(not made[layer, b, h, t]) for b in range(2) for t in range(n)) for h in range(2)]
                   for layer in range(3)]  # fmt: skip
        assert over.total[number] == pytest.approx(2 * 6 * n / sum(map(sum, entries)))
        assert over.mean[number] == pytest.approx(sum(2 * n / x for row in entries for x in row) / 6)
    assert over.total[0] == over.mean[0] == 1


def test_the_mean_over_heads_grows_on_where_the_ratio_of_totals_rests():
    made = torch.ones(1, 1, 2, 4096)
    made[0, 0, 0, ::2] = 0  # one head opens every second entry, the other none
    over = ratio_over_length(made, [512, 4096])
    assert over.total[1] < 4 and over.total[1] - over.total[0] < 0.1
    assert over.mean[1] > 7 * over.mean[0]


def test_a_first_token_opens_an_entry_whatever_it_decided():
    assert ratio_over_length(torch.ones(1, 1, 1, 8)).total.tolist() == list(range(1, 9))
    assert decision_over_position(torch.ones(2, 1, 1, 3)).tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    "wrong",
    [torch.full((1, 1, 1, 4), 0.5), torch.full((1, 1, 1, 4), math.nan), torch.zeros(1, 1, 4), torch.zeros(1, 1, 1, 0),
     [torch.zeros(1, 1, 4), torch.zeros(1, 1, 5)]],
    ids=["soft", "nan", "3 dimensions", "empty", "layers that differ"],
)  # fmt: skip
@pytest.mark.parametrize("draw", [plots.ratio_over_length, plots.decision_over_position])
def test_what_are_no_decisions_is_refused(draw, wrong):
    with pytest.raises(ValueError, match="decisions must be"):
        draw(wrong)


# ---- figures ----


def test_head_ratios_have_the_highest_on_top():
    axes = plots.head_ratios([[2.0, 8.0, 4.0], [1.0, 1.5, 1.25]])
    (image,) = axes.get_images()
    assert image.get_array().tolist() == [[8.0, 1.5], [4.0, 1.25], [2.0, 1.0]]
    assert image.origin == "upper"
    assert [text.get_text() for text in axes.texts] == ["8", "1.5", "4", "1.25", "2", "1"]
    assert axes.get_xlabel() == "layer"


def test_panels_of_head_ratios_have_one_scale():
    found = plots.head_ratios({"2x": [[2.0, 1.0]], "4x": torch.tensor([[4.0, 16.0]])})
    assert [panel.get_title() for panel in found] == ["2x", "4x"]
    assert {(panel.get_images()[0].norm.vmin, panel.get_images()[0].norm.vmax) for panel in found} == {(1, 16)}


def test_a_cache_gives_what_it_decided(tracked):
    by_layer = [tracked.decisions(layer) for layer in range(3)]
    ratios = torch.tensor(tracked.compression_ratios(), dtype=torch.float64)
    entries = (~as_decisions(by_layer)).double().sum((1, 3))
    torch.testing.assert_close(2 * 40 / entries, ratios)
    drawn = torch.tensor(plots.head_ratios(tracked).get_images()[0].get_array().tolist(), dtype=torch.float64)
    torch.testing.assert_close(drawn, ratios.sort(1, descending=True).values.T)
    axes = plots.ratio_over_length(tracked)
    total, mean = (line.get_ydata()[-1] for line in axes.get_lines())
    assert total == pytest.approx(tracked.compression_ratio())
    assert mean == pytest.approx(float(ratios.mean()))
    assert list(axes.get_lines()[0].get_xdata()) == [1, 2, 4, 8, 16, 32, 40]
    line = plots.decision_over_position(tracked, window=10).get_lines()[0]
    assert len(line.get_xdata()) == 4 and line.get_xdata()[0] == 4.5
    assert line.get_ydata()[1] == pytest.approx(float(torch.stack(by_layer)[..., 10:20].float().mean()))


def test_lines_are_named_and_of_two_kinds():
    axes = plots.ratio_over_length({"2x": decisions(), "4x": decisions(seed=1)}, lengths=[10, 50])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "2x, all entries", "2x, mean over heads", "4x, all entries", "4x, mean over heads",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="lengths must be 1 to 50, got 51"):
        plots.ratio_over_length(decisions(), lengths=[51])


def test_caches_that_do_not_say_it_are_refused():
    dms = deciding_model(dmc={"mode": "dms", "dms_window": 5})
    attach(dms)
    cache = DMCCache(dms.config, track=True)
    prefill(dms, random_ids(20), cache)
    with pytest.raises(ValueError, match="must be of a model converted to DMC, got mode 'dms'"):
        plots.ratio_over_length(cache)
    assert plots.decision_over_position(cache).get_ylim() == (0, 1)
    model = deciding_model()
    attach(model)
    cache = DMCCache(model.config)
    prefill(model, random_ids(20), cache)
    with pytest.raises(ValueError, match="track=True"):
        plots.ratio_over_length({"mine": cache})
    with pytest.raises(TypeError, match="must be a tensor, a list of them or a DMCCache, got str"):
        plots.decision_over_position("decisions")


@pytest.mark.parametrize("wrong", [[2.0, 3.0], [[0.5]], [[math.nan]], [[]], "ratios"])
def test_what_are_no_ratios_is_refused(wrong):
    with pytest.raises(ValueError, match="ratios must be"):
        plots.head_ratios(wrong)


def run_of(ratios):
    return [{"step": 10 * k, "ratio_hard": r, "ratio_layers": [[r, 2 * r], [1.0, 1.0]]} for k, r in enumerate(ratios)]


def test_training_has_a_panel_for_each_ratio(tmp_path):
    lines = [{"step": 0, "loss": 3.0}, *run_of([1.0, 1.5, 2.1, 3.0, 4.2])]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = plots.ratios_over_training(path, at=[1.5, 2.0, 4.0])
    assert [panel.get_title() for panel in found] == [
        "ratio 1.50 (step 10)", "ratio 2.10 (step 20)", "ratio 4.20 (step 40)",
    ]  # fmt: skip
    bars = [[bar.get_height() for bar in panel.patches] for panel in found]
    assert bars == [[pytest.approx((1 / r + 1 / (2 * r)) / 2), 1.0] for r in (1.5, 2.1, 4.2)]
    assert len(plots.ratios_over_training(lines)) == 4  # the first beyond 1, 1.8, 2.6, 3.4, 4.2
    assert len(plots.ratios_over_training(run_of([1.0] * 20))) == 1
    assert len(plots.ratios_over_training(run_of([1 + k / 10 for k in range(40)]))) == 8


def test_runs_that_do_not_say_it_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at must be ratios that were reached, at most 2, got 4"):
        plots.ratios_over_training(run_of([1.0, 2.0]), at=[4.0])
    with pytest.raises(ValueError, match="metrics must have lines with step, ratio_hard, ratio_layers, got none"):
        plots.ratios_over_training([{"step": 1, "loss": 2.0}])
    with pytest.raises(ValueError, match="ratio_hard must be a number"):
        plots.ratios_over_training(run_of([math.nan]))
    with pytest.raises(ValueError, match=r"ratio_layers must be \[L, Hkv\]"):
        plots.ratios_over_training([{"step": 1, "ratio_hard": 2.0, "ratio_layers": [2.0]}])
    with pytest.raises(FileNotFoundError):
        plots.ratios_over_training(tmp_path / "nowhere.jsonl")


def test_figures_are_saved(tmp_path):
    for name, drawn in (
        ("map", plots.head_ratios([[2.0, 3.0]])),
        ("length", plots.ratio_over_length(decisions())),
        ("position", plots.decision_over_position(decisions())),
        ("training", plots.ratios_over_training(run_of([1.0, 2.0]))),
    ):
        assert plots.save(drawn, tmp_path / f"{name}.png").stat().st_size > 3000


# ---- coloured text ----

TEXT = "if a < b & c:\n\treturn '<span>'\0"


class Spans(HTMLParser):
    """The (style, text) of each span, and every tag that is opened."""

    def __init__(self):
        super().__init__()
        self.spans, self.tags, self.inside = [], [], False

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "span":
            self.inside = True
            self.spans.append([dict(attributes), ""])

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "span"

    def handle_data(self, data):
        if self.inside:
            self.spans[-1][1] += data


def spans_of(page):
    parser = Spans()
    parser.feed(page)
    return parser


def choices(seed=0):
    made = (torch.rand(len(TEXT), generator=torch.Generator().manual_seed(seed)) < 0.6).int()
    made[0] = 0
    return made


@pytest.mark.parametrize("seed", range(5))
def test_there_are_as_many_segments_as_zero_decisions(seed):
    made = choices(seed)
    zeros = int((made == 0).sum())
    found = plots.segments(list(TEXT), made)
    assert len(found) == zeros and "".join(segment.text for segment in found) == TEXT
    assert [segment.first for segment in found] == (made == 0).nonzero().flatten().tolist()
    assert sum(segment.tokens for segment in found) == len(TEXT)
    page = spans_of(plots.segments_html(list(TEXT), made, title="layer 0 <b>"))
    assert len(page.spans) == zeros
    assert "".join(text for _, text in page.spans) == TEXT.replace("\n", "\u21b5\n").replace("\0", "\u2400")
    assert page.tags == ["figure", "figcaption", "pre"] + ["span"] * zeros  # nothing of the text is a tag
    fills = [re.search("background:(#[0-9a-f]{6})", attributes["style"])[1] for attributes, _ in page.spans]
    assert all(a != b for a, b in pairwise(fills))
    shown = plots.segments_text(list(TEXT), made)
    assert len(shown.spans) == zeros and len({span.style for span in shown.spans[:2]}) == min(zeros, 2)


def test_a_first_token_opens_a_segment_and_no_text_has_none():
    assert plots.segments(["a", "b"], [1, 1]) == [plots.Segment("ab", 0, 2)]
    assert plots.segments([], []) == [] and "span" not in plots.segments_html([], [])


def test_segments_of_a_cache_are_its_entries(tracked):
    ids = random_ids(40, 2)[1].tolist()
    for layer in range(3):
        for head in range(2):
            found = plots.segments([f"{token} " for token in ids], tracked.decisions(layer)[1, head])
            assert len(found) == tracked.layers[layer].stored_lengths()[1][head]


def test_colours_can_be_read():
    def luminance(color):
        parts = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgb(color)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    for fill in FILLS:
        assert (luminance(fill) + 0.05) / (luminance(INK) + 0.05) > 7  # WCAG's AAA


def test_a_terminal_shows_the_text():
    out = StringIO()
    plots.print_segments(["ab", "[red]", "c"], [0, 1, 0], title="head 1", console=Console(file=out, width=20))
    assert out.getvalue() == "head 1\nab[red]c\n"


@pytest.mark.parametrize("wrong", [[0, 1], [[0, 1, 0]], [0, 0.5, 1], [0, math.nan, 1], ["a", "b", "c"]])
def test_what_are_no_decisions_of_these_pieces_is_refused(wrong):
    with pytest.raises(ValueError, match="decisions must be"):
        plots.segments(["a", "b", "c"], wrong)
