"""Figures of PoD: what stands in them is what was planned and measured."""

import pytest
import torch
from matplotlib.colors import to_hex

from kvcompress import plots
from kvcompress.pod.plan import PoDPlan, lead_table
from kvcompress.pod.similarity import Agreement

SIMILARITY = torch.tensor(
    [[[1, 0.9, 0.2], [0.9, 1, 0.6], [0.2, 0.6, 1]], [[1, 0.1, 0.1], [0.1, 1, 0.8], [0.1, 0.8, 1]]]
)
SIMILARITY = SIMILARITY.double()
PLAN = PoDPlan(
    lead=lead_table(SIMILARITY, 0.5), sinks=4, recent=12, query_heads=4, head_dim=8, similarity=SIMILARITY, delta=0.5
)


def outlines_of(axes):
    return [(box.get_x(), box.get_y(), box.get_width(), box.get_height()) for box in axes.patches]


def test_similarity_is_drawn_with_the_blocks_of_each_head():
    found = plots.similarity_heatmap(PLAN)
    assert [panel.get_title() for panel in found] == ["KV head 0", "KV head 1"]
    for panel, sim in zip(found, SIMILARITY, strict=True):
        image = panel.images[0]
        assert torch.equal(torch.tensor(image.get_array()), sim)
        assert image.origin == "lower" and image.get_clim() == (0, 1)
    assert outlines_of(found[0]) == [(-0.5, -0.5, 2, 2), (1.5, 1.5, 1, 1)]
    assert outlines_of(found[1]) == [(-0.5, -0.5, 1, 1), (0.5, 0.5, 2, 2)]


def test_similarity_without_a_plan_shows_blocks_of_a_given_delta_alone():
    assert not any(panel.patches for panel in plots.similarity_heatmap(SIMILARITY))
    assert len(outlines_of(plots.similarity_heatmap(SIMILARITY, delta=0.95)[0])) == 3
    (mean,) = plots.similarity_heatmap(PLAN, mean=True)
    torch.testing.assert_close(torch.tensor(mean.images[0].get_array()), SIMILARITY.mean(0))
    assert not mean.patches
    with pytest.raises(ValueError, match=r"similarity must be \[Hkv, L, L\]"):
        plots.similarity_heatmap(SIMILARITY[0])
    bare = PoDPlan(lead=PLAN.lead, sinks=4, recent=12, query_heads=4, head_dim=8)
    with pytest.raises(ValueError, match="of a plan that holds it"):
        plots.similarity_heatmap(bare)


def test_blocks_differ_in_colour_and_leads_are_marked():
    axes = plots.block_map(PLAN)
    cells = axes.images[0].get_array()
    assert cells[:, 0].tolist() == [0, 0, 1] and cells[:, 1].tolist() == [0, 1, 1]
    (marks,) = axes.get_lines()
    assert sorted(zip(marks.get_xdata(), marks.get_ydata(), strict=True)) == [(0, 0), (0, 2), (1, 0), (1, 1)]
    assert axes.get_title() == "phi = 0.33: 2 of 6 follow"
    assert len({to_hex(axes.images[0].cmap(k)) for k in range(4)}) == 4
    assert plots.block_map([[0], [0]]).images[0].get_array().tolist() == [[0], [0]]
    with pytest.raises(ValueError, match=r"lead\[1\]\[0\]"):
        plots.block_map([[0], [3]])


def test_sets_of_a_query_are_sinks_and_neighbours_against_the_rest():
    """The 7 tokens of the paper's figure with 1 sink and 2 recent ones."""
    shown = plots.attention_sets(7, sinks=1, recent=2).images[0].get_array().tolist()
    assert shown[6] == [1, 2, 2, 2, 2, 1, 1] and shown[2] == [1, 1, 1, 0, 0, 0, 0] and shown[3][1] == 2
    for i, row in enumerate(shown):
        assert row.count(2) == max(0, i + 1 - 3) and row.count(0) == 6 - i
    with pytest.raises(ValueError, match="recent must be at least 1, got 0"):
        plots.attention_sets(7, sinks=1, recent=0)


def test_agreement_is_drawn_in_percent_and_in_order():
    measured = Agreement((64, 16), (0.8, 0.5), (0.1, 0.2), 3)
    axes = plots.agreement_curve(measured)
    line = axes.get_lines()[0]
    assert list(line.get_xdata()) == [16, 64] and list(line.get_ydata()) == [50, 80]
    assert axes.get_xscale() == "log" and axes.containers[0].has_yerr
    alone = plots.agreement_curve({"a": Agreement((4,), (1.0,), (float("nan"),), 1)})
    assert not alone.containers[0].has_yerr and alone.get_legend() is not None
    with pytest.raises(TypeError, match=r"measured\['a'\] must be a Agreement|measured\['a'\] must be"):
        plots.agreement_curve({"a": 3})


def test_savings_are_those_of_the_formula():
    axes = plots.saved_over_length({"half": PLAN}, lengths=[8, 16, 64, 1 << 20])
    line, limit = axes.get_lines()
    assert list(line.get_ydata()) == pytest.approx([100 * PLAN.saved(n) for n in (8, 16, 64, 1 << 20)])
    assert line.get_ydata()[0] == 0 and line.get_ydata()[-1] < limit.get_ydata()[0] == pytest.approx(100 / 6)
    with pytest.raises(ValueError, match=r"lengths\[0\] must be at least 1"):
        plots.saved_over_length(PLAN, lengths=[0])


def test_memory_is_that_of_the_formula_and_of_what_was_measured():
    axes = plots.memory_curve(PLAN, dtype=torch.float32, lengths=[16, 160], measured={160: PLAN.nbytes(160)})
    dense, ours, measured = axes.get_lines()[:3]
    assert list(dense.get_ydata()) == pytest.approx([PLAN.dense_nbytes(n, torch.float32) / 2**20 for n in (16, 160)])
    assert ours.get_ydata()[0] == dense.get_ydata()[0]
    assert ours.get_ydata()[1] == pytest.approx(PLAN.nbytes(160, torch.float32) / 2**20)
    assert list(measured.get_ydata()) == pytest.approx([PLAN.nbytes(160) / 2**20])
    assert axes.get_ylabel() == "cache, MiB"
    large = PoDPlan(lead=[[0] * 8] * 32, sinks=16, recent=4080, query_heads=32, head_dim=128)
    assert plots.memory_curve(large).get_ylabel() == "cache, GiB"
