import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from kvcompress import plots
from kvcompress.caches.track import ChunkReading, LayerReading, Track
from kvcompress.planner import Plan

IMDC = Plan((8, 10, 8, 6), (2, 4, 6, 8), (2, 4, 6, 8))
FIXED = Plan((8, 8, 8, 8), (8, 8, 8, 8), (8, 8, 8, 8))


def layer(positions, retention=(0.0,), attention=(0.0,), size=0):
    """One layer of an iteration; positions by KV head."""
    return LayerReading(
        tuple(torch.tensor(p, dtype=torch.int32) for p in positions),
        torch.tensor(retention),
        torch.tensor(attention),
        torch.full((len(attention),), float(size)),
    )


def sequence(iterations, L=2, Hkv=2, chunk=4, step=0.1):
    """Memory of 4 tokens: layer 0 keeps the newest, layer j also 1 of the first chunk. p and attention: i * step."""
    readings = []
    for i in range(iterations):
        newest = list(range(i * chunk, (i + 1) * chunk))
        kept = [newest if j == 0 or i == 0 else [0, *newest[1:]] for j in range(L)]
        readings.append(
            ChunkReading(i * chunk, chunk, tuple(
                layer([kept[j]] * Hkv, [i * step] * Hkv, [i * step + j / 100] * Hkv if i else [0.0] * Hkv, 4 * (i > 0))
                for j in range(L)
            ))
        )  # fmt: skip
    return readings


def test_what_was_read_prints_in_a_line():
    readings = sequence(3)
    assert repr(Track([readings, readings[:1]])) == "Track(chunks of each sequence: 3, 1; 2 layers)"
    assert repr(Track()) == "Track(chunks of each sequence: none; 0 layers)"
    assert repr(readings[2]) == "ChunkReading(4 tokens from 8 on, 2 layers)"
    assert repr(readings[2].layers[0]) == "LayerReading(tokens kept by KV head: [4, 4])"


def lines_of(axes):
    return {line.get_label(): (line.get_xdata(), line.get_ydata()) for line in axes.get_lines()}


def bars_of(axes):
    """label -> (left, width, bottom, height) of its bars."""
    return {
        group.get_label(): torch.tensor([(b.get_x(), b.get_width(), b.get_y(), b.get_height()) for b in group]).double()
        for group in axes.containers
    }


def legend_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_plan_stacks_memory_and_chunk_and_draws_the_keys_in_sight():
    axes = plots.plan(IMDC)
    bars = bars_of(axes)
    assert bars["memory $m_{i-1}$"][:, 3].tolist() == [0, 2, 4, 6]
    assert bars["chunk $c_i$"][:, 3].tolist() == [8, 10, 8, 6]
    assert bars["chunk $c_i$"][:, 2].tolist() == [0, 2, 4, 6]
    centres = bars["chunk $c_i$"][:, 0] + bars["chunk $c_i$"][:, 1] / 2
    torch.testing.assert_close(centres, torch.arange(4.0).double(), atol=1e-6, rtol=0)
    x, y = lines_of(axes)["keys in sight $K_i$"]
    assert list(x) == [0, 1, 2, 3] and list(y) == [8, 12, 12, 12]
    assert axes.get_xlabel() == "iteration"
    assert axes.get_ylabel() == "tokens (per layer and KV head)"
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 12
    assert sorted(legend_of(axes)) == ["chunk $c_i$", "keys in sight $K_i$", "memory $m_{i-1}$"]


def test_plan_shows_memory_that_cannot_be_filled():
    axes = plots.plan(Plan((8, 16, 12, 8, 3, 1), (4, 8, 12, 16, 20, 24), (4, 8, 12, 16, 19, 20)))
    assert list(lines_of(axes)["keys in sight $K_i$"][1]) == [8, 20, 20, 20, 19, 20]
    assert bars_of(axes)["memory $m_{i-1}$"][:, 3].tolist() == [0, 4, 8, 12, 16, 20]


def test_plans_have_a_panel_each_and_one_scale():
    panels = plots.plan({"FM": FIXED, "IMDC": IMDC})
    assert [panel.get_title() for panel in panels] == ["FM", "IMDC"]
    assert panels[0].get_ylim() == panels[1].get_ylim() and panels[0].get_ylim()[1] > 16
    assert [panel.get_ylabel() != "" for panel in panels] == [True, False]
    assert len(plots.plan({str(k): IMDC for k in range(6)})) == 6
    assert len(plots.plan({"only": IMDC})) == 1


@pytest.mark.parametrize("n", [100, 101, 250, 977])
def test_long_plans_are_binned_and_their_area_stays_the_total(n):
    memory = tuple(range(1, n + 1))
    plan = Plan(tuple(2 * n - i for i in range(n)), memory, memory)
    axes = plots.plan(plan)
    bars = bars_of(axes)
    drawn = bars["memory $m_{i-1}$"], bars["chunk $c_i$"]
    assert len(drawn[0]) == len(drawn[1]) == 100
    for group, total in zip(drawn, (sum(memory[:-1]), sum(plan.chunks)), strict=True):
        assert (group[:, 1] * group[:, 3]).sum().item() == pytest.approx(total)
    torch.testing.assert_close(drawn[0][1:, 0], (drawn[0][:, 0] + drawn[0][:, 1])[:-1])  # no gap, no overlap
    assert len(lines_of(axes)["keys in sight $K_i$"][0]) == n
    assert axes.get_xlabel() == (
        "iteration" if n == 100 else f"iteration (each bar the mean of about {round(n / 100)})"
    )


def test_memory_attention_is_the_mean_over_heads_layers_and_sequences():
    short, long = sequence(3, step=0.2), sequence(4)
    axes = plots.memory_attention({"SnapKV": Track([long, short]), "TOVA": Track([long])})
    x, y = lines_of(axes)["SnapKV"]
    assert list(x) == [1, 2, 3]
    # layers add 0 and 0.01, memory has 4 keys; the last iteration is the longer sequence's alone
    assert list(y) == pytest.approx([(0.15 + 0.005) / 4, (0.3 + 0.005) / 4, (0.3 + 0.005) / 4])
    assert list(lines_of(axes)["TOVA"][1]) == pytest.approx([0.105 / 4, 0.205 / 4, 0.305 / 4])
    assert legend_of(axes) == ["SnapKV", "TOVA"]
    assert axes.get_xlabel() == "iteration"
    assert axes.get_ylabel() == "mean attention probability\nof a key in memory"


def test_heads_without_memory_do_not_count():
    first = ChunkReading(0, 4, (layer([[0], []], (0.0, 0.0), (0.0, 0.0)),))
    second = ChunkReading(4, 4, (LayerReading(first.layers[0].positions, torch.tensor([0.5, torch.nan]),
                                         torch.tensor([0.2, 0.0]), torch.tensor([4.0, 0.0])),))  # fmt: skip
    track = Track([[first, second]])
    assert plots.memory_attention(track).get_lines()[0].get_ydata() == pytest.approx([0.05])
    assert plots.retention(track).get_lines()[0].get_ydata() == pytest.approx([0.5])
    heights = bars_of(plots.memory_sources(track)).popitem()[1][:, 3]
    assert heights.tolist() == [1, 0]


def test_retention_leaves_out_the_first_iteration():
    axes = plots.retention(Track([sequence(4), sequence(4, step=0.3), []]))
    ((x, y),) = lines_of(axes).values()
    assert list(x) == [1, 2, 3] and list(y) == pytest.approx([0.2, 0.4, 0.6])
    assert axes.get_ylabel() == "retention ratio p" and axes.get_legend() is None
    assert axes.get_ylim()[0] == 0


def test_a_second_call_on_the_same_axes_widens_them():
    axes = plots.retention(Track([sequence(3)]))
    assert plots.retention(Track([sequence(3, step=0.4)]), axes=axes) is axes
    assert len(axes.get_lines()) == 2
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] >= 0.8


def test_memory_share_has_a_line_per_layer():
    axes = plots.memory_share(Track([sequence(3, L=3)]))
    lines = lines_of(axes)
    assert list(lines) == ["layer 0", "layer 1", "layer 2"] == legend_of(axes)
    for j in range(3):
        assert list(lines[f"layer {j}"][0]) == [1, 2]
        assert list(lines[f"layer {j}"][1]) == pytest.approx([0.1 + j / 100, 0.2 + j / 100])
    assert axes.get_ylabel() == "share of the chunk's\nattention on memory"


def test_many_layers_have_a_colour_bar_instead_of_a_legend():
    deep, shallow = plots.memory_share({"deep": Track([sequence(3, L=12)]), "shallow": Track([sequence(3)])})
    assert len(deep.get_lines()) == 12 and deep.get_legend() is None
    assert len({to_hex(line.get_color()) for line in deep.get_lines()}) == 12
    assert deep.figure.axes[-1].get_ylabel() == "layer"
    assert legend_of(shallow) == ["layer 0", "layer 1"]


def test_memory_sources_sum_to_one_and_stand_side_by_side():
    axes = plots.memory_sources({"a": Track([sequence(3)]), "b": Track([sequence(2)])})
    bars = bars_of(axes)
    # layer 1 of sequence(n) has 1 of 4 tokens from chunk 0, everything else is from the last chunk
    assert bars["a"][:, 3].tolist() == pytest.approx([0.125, 0, 0.875])
    assert bars["b"][:, 3].tolist() == pytest.approx([0.125, 0.875, 0])
    torch.testing.assert_close(bars["a"][:, 0] + bars["a"][:, 1], bars["b"][:, 0])
    assert legend_of(axes) == ["a", "b"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("chunk", "share of the final memory")


def test_memory_sources_of_a_batch_are_aligned_at_the_last_chunk():
    axes = plots.memory_sources(Track([sequence(3), sequence(2), []]))
    heights = bars_of(axes).popitem()[1][:, 3]
    assert heights.tolist() == pytest.approx([0.0625, 0.0625, 0.875])
    assert axes.get_xlabel() == "chunk of the longest sequence, all aligned at their last"


def test_many_sources_are_binned_and_their_area_stays_one():
    axes = plots.memory_sources({"a": Track([sequence(130)]), "b": Track([sequence(120)])})
    for bars in bars_of(axes).values():
        assert len(bars) == 50
        sizes = bars[:, 1] * 2 / 0.9  # two names share 90 % of a bin's width
        assert (sizes * bars[:, 3]).sum().item() == pytest.approx(1)
    assert axes.get_ylabel() == "share of the final memory per chunk"
    assert axes.get_xlabel() == "chunk (each bar the mean of about 3)"


def test_memory_map_is_normalised_before_the_last_chunk_is_dropped():
    axes = plots.memory_map(Track([sequence(2), sequence(4, L=3)]), 1)
    image = axes.get_images()[0]
    np.testing.assert_allclose(image.get_array(), [[0, 0, 0], [0.25, 0, 0], [0.25, 0, 0]])
    assert image.get_clim() == (0, 0.25)
    assert axes.get_ylim()[0] < axes.get_ylim()[1]  # layer 0 at the bottom
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("chunk (the last left out)", "layer")
    assert axes.figure.axes[-1].get_ylabel() == "share of the layer's final memory"


def test_memory_maps_share_one_scale_and_an_empty_layer_is_blank():
    half = ChunkReading(4, 4, (layer([[0, 1, 4, 5]]), layer([[]])))
    maps = plots.memory_map({"half": Track([[sequence(1, Hkv=1)[0], half]]), "quarter": Track([sequence(3)])})
    images = [axes.get_images()[0] for axes in maps]
    assert images[0].get_array().tolist() == [[0.5], [None]]
    assert [image.get_clim() for image in images] == [(0, 0.5)] * 2
    assert [axes.get_title() for axes in maps] == ["half", "quarter"]


def test_memory_map_of_a_recent_window_alone_is_all_zero():
    image = plots.memory_map(Track([sequence(3, L=1)])).get_images()[0]
    assert image.get_array().tolist() == [[0, 0]] and image.get_clim() == (0, 1)


def test_loss_is_averaged_over_windows():
    losses = torch.tensor([1.0, 3.0, 2.0, 4.0, torch.nan, 5.0])
    axes = plots.loss_over_position(losses, window=2)
    ((x, y),) = lines_of(axes).values()
    assert list(x) == [1.5, 3.5, 5.5]
    assert list(y) == pytest.approx([math.exp(2), math.exp(3), math.exp(5)])
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale()) == ("position (tokens)", "perplexity", "linear")

    axes = plots.loss_over_position({"IM": losses.half(), "dense": losses[:3]}, window=2, unit="bits")
    assert list(lines_of(axes)["IM"][1]) == pytest.approx([2 / math.log(2), 3 / math.log(2), 5 / math.log(2)])
    assert axes.get_ylabel() == "bits per token" and legend_of(axes) == ["IM", "dense"]


def test_windows_are_as_equal_as_can_be():
    axes = plots.loss_over_position(torch.arange(10.0).requires_grad_(), window=4, unit="bits")
    ((x, y),) = lines_of(axes).values()
    assert list(x) == [3, 8] and list(y) == pytest.approx([2 / math.log(2), 7 / math.log(2)])


def test_positions_over_more_than_two_decades_are_logarithmic():
    assert plots.loss_over_position(torch.ones(1000), window=10).get_xscale() == "log"
    assert plots.loss_over_position(torch.ones(1000), window=100).get_xscale() == "linear"


def test_recall_map_has_depth_zero_at_the_top_and_numbers_in_its_cells():
    recall = [[1, 0.2, math.nan], [0, 0.6, 0.4]]
    axes = plots.recall_map(recall, lengths=[8192, 16384, 32768], depths=[0, 50])
    image = axes.get_images()[0]
    np.testing.assert_array_equal(image.get_array().filled(math.nan), recall)
    assert image.get_clim() == (0, 1)
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert texts == {(0, 0): "1", (1, 0): "0.2", (0, 1): "0", (1, 1): "0.6", (2, 1): "0.4"}
    assert [t.get_text() for t in axes.get_xticklabels()] == ["8,192", "16,384", "32,768"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["0", "50"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("length of the prompt (tokens)", "depth of the needle (%)")


@pytest.mark.parametrize("kind", [torch.tensor, lambda x: np.flipud(np.array(x)), lambda x: torch.tensor(x).bfloat16()])
def test_recall_may_be_any_array(kind):
    axes = plots.recall_map(kind([[0.0, 0.5], [0.0, 0.5]]), [10, 20], [0, 100])
    assert axes.get_images()[0].get_array().tolist() == [[0, 0.5]] * 2


def test_a_large_recall_map_has_no_numbers_and_few_ticks():
    axes = plots.recall_map(torch.rand(40, 50), range(1, 51), range(40))
    assert not axes.texts
    assert len(axes.get_xticks()) <= 16 and len(axes.get_yticks()) <= 16


def test_given_axes_are_drawn_into():
    grid = Figure().subplots(2, 2)
    track = Track([sequence(3)])
    assert plots.retention(track, axes=grid[0, 0]) is grid[0, 0]
    assert plots.memory_map(track, axes=grid[0, 1]) is grid[0, 1]
    assert plots.plan({"FM": FIXED, "IMDC": IMDC}, axes=grid[1]) == list(grid[1])
    assert all(axes.get_ylabel() for axes in grid.flat)


EMPTY = [Track(), Track([[], []])]


@pytest.mark.parametrize("draw", [plots.memory_attention, plots.memory_share, plots.retention, plots.memory_sources])
@pytest.mark.parametrize("track", EMPTY)
def test_an_empty_track_is_refused(draw, track):
    with pytest.raises(ValueError, match=r"^tracks must have at least \d iterations?, got 0$"):
        draw(track)
    with pytest.raises(ValueError, match=r"^tracks\['empty'\] must have at least \d iterations?, got 0$"):
        draw({"full": Track([sequence(3)]), "empty": track})


@pytest.mark.parametrize("draw", [plots.memory_attention, plots.memory_share, plots.retention, plots.memory_map])
def test_one_iteration_has_nothing_to_show(draw):
    with pytest.raises(ValueError, match=r"^tracks must have at least 2 iterations( in sequence 0)?, got 1$"):
        draw(Track([sequence(1)]))


@pytest.mark.parametrize("number", [-1, 2])
def test_a_sequence_out_of_range_is_refused(number):
    with pytest.raises(ValueError, match=f"^sequence must be 0 to 1 in tracks, got {number}$"):
        plots.memory_map(Track([sequence(3), sequence(3)]), number)
    with pytest.raises(ValueError, match="tracks must have at least one sequence, got 0"):
        plots.memory_map(Track(), number)


@pytest.mark.parametrize("draw", [plots.memory_attention, plots.memory_share, plots.retention])
def test_readings_that_do_not_fit_together_are_refused(draw):
    with pytest.raises(ValueError, match="same layers and KV heads in every iteration, sequence 0 has not"):
        draw(Track([[*sequence(2), *sequence(2, L=3)]]))
    with pytest.raises(ValueError, match=r"same layers and KV heads in every sequence, got \[\(2, 2\), \(2, 1\)\]"):
        draw(Track([sequence(2), sequence(2, Hkv=1)]))
    flat = ChunkReading(0, 4, (LayerReading((torch.arange(4),), *[torch.ones(1, 1)] * 3),))
    with pytest.raises(ValueError, match=r"must hold tensors \[Hkv\], sequence 0 has shape \(1, 1\)"):
        draw(Track([[flat, flat]]))


@pytest.mark.parametrize("draw", [plots.memory_sources, plots.memory_map])
def test_positions_of_a_wrong_shape_and_an_empty_memory_are_refused(draw):
    readings = sequence(3)
    flat = ChunkReading(8, 4, (layer([[[8, 9]]]),))
    with pytest.raises(ValueError, match=r"tracks must hold positions \[tokens\]"):
        draw(Track([[*readings[:2], flat]]))
    with pytest.raises(ValueError, match="tracks must have a token in the final memory of sequence 0, got 0"):
        draw(Track([[*readings[:2], ChunkReading(8, 4, (layer([[], []]),))]]))


def test_numbers_that_are_nan_everywhere_are_refused():
    blank = ChunkReading(0, 4, (layer([[0]], [torch.nan], [torch.nan]),))
    for draw in (plots.memory_attention, plots.memory_share, plots.retention):
        with pytest.raises(ValueError, match="tracks must hold a number after the first iteration, got NaN everywhere"):
            draw(Track([[blank, blank]]))
    with pytest.raises(ValueError, match="losses must hold a number, got NaN everywhere"):
        plots.loss_over_position(torch.full((5,), torch.nan))
    with pytest.raises(ValueError, match="recall must hold a number, got NaN everywhere"):
        plots.recall_map([[math.nan]], [1], [0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.plan(Plan((), (), ())), "plans must have at least one iteration, got 0"),
        (lambda: plots.plan({}), "plans must have at least one entry, got an empty dict"),
        (lambda: plots.plan({"a": IMDC, "b": IMDC}, axes=[plots.plan(IMDC)]), "axes must be 2 Axes, .* got 1"),
        (lambda: plots.loss_over_position(torch.ones(2, 3)), r"losses must be \[T - 1\] .* got shape \(2, 3\)"),
        (lambda: plots.loss_over_position({"a": torch.ones(0)}), r"losses\['a'\] must be .* got shape \(0,\)"),
        (lambda: plots.loss_over_position(torch.ones(3), window=0), "window must be at least 1, got 0"),
        (lambda: plots.loss_over_position(torch.ones(3), unit="nats"), "unit must be one of .*, bits, got 'nats'"),
        (lambda: plots.recall_map([[1, 0]], [1], [0]), r"recall must have shape \(1, 1\), got \(1, 2\)"),
        (lambda: plots.recall_map([[1, 0], [1]], [1], [0]), r"recall must be numbers \[depths, lengths\]"),
        (lambda: plots.recall_map([[1.5]], [1], [0]), "recall must be 0 to 1, got 1.5"),
        (lambda: plots.recall_map([[1]], [1], [101]), r"depths must be 0 to 100, got \[101\]"),
        (lambda: plots.recall_map([[1, 1]], [2, 1], [0]), r"lengths must increase, got \[2, 1\]"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.plan([IMDC]), "plans must be a Plan or a dict of them, got list"),
        (lambda: plots.retention({"a": IMDC}), r"tracks\['a'\] must be a Track, got Plan"),
        (lambda: plots.retention(Track([sequence(2)]), axes=1), "axes must be a matplotlib Axes, got int"),
        (lambda: plots.plan(IMDC, axes=1), "axes must be a matplotlib Axes or several, got int"),
    ],
)
def test_a_wrong_type_is_named(call, message):
    with pytest.raises(TypeError, match=f"^{message}$"):
        call()


@pytest.mark.parametrize("suffix", ["png", "PDF", "svg"])
def test_save_writes_the_format_of_the_suffix(tmp_path, suffix):
    path = tmp_path / f"figure.{suffix}"
    path.write_text("old")
    assert plots.save(plots.plan({"FM": FIXED, "IMDC": IMDC}), str(path)) == path
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"%PDF-", b"<?xml")


def test_save_takes_a_figure_and_one_axes(tmp_path):
    axes = plots.plan(IMDC)
    for number, drawn in enumerate((axes, axes.figure, [axes])):
        assert plots.save(drawn, tmp_path / f"{number}.svg").stat().st_size > 0
    inner = Figure().subfigures(1, 2)[0].subplots()
    assert plots.save(plots.plan(IMDC, axes=inner), tmp_path / "inner.svg").stat().st_size > 0
    with pytest.raises(ValueError, match="drawn must be of one figure, got 2"):
        plots.save([axes, plots.plan(IMDC)], tmp_path / "two.png")


def test_a_save_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    axes = plots.plan(IMDC)
    for name in ("figure.docx", "figure"):
        with pytest.raises(ValueError, match=rf"path must end in one of .*\.pdf, .*\.png, .* got '.*{name}'"):
            plots.save(axes, tmp_path / name)
    assert not list(tmp_path.iterdir())

    old = tmp_path / "figure.png"
    old.write_text("old")

    def full(self, path, **settings):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(OSError, match="no space left"):
        plots.save(axes, old)
    assert list(tmp_path.iterdir()) == [old] and old.read_text() == "old"


def test_matplotlib_is_optional_and_pyplot_is_never_needed(tmp_path):
    code = """
import sys, kvcompress
assert "matplotlib" not in sys.modules
sys.modules["matplotlib"] = None
try:
    import kvcompress.plots
except ImportError as error:
    print(error)
del sys.modules["matplotlib"]
import kvcompress.plots, matplotlib

def settings():  # asking for the backend would import pyplot
    return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}

before = settings()
plan = kvcompress.plan(64, chunk_size=8, memory_size=8)
kvcompress.plots.save(kvcompress.plots.plan({"a": plan, "b": plan}), sys.argv[1])
print("matplotlib.pyplot" in sys.modules, before == settings())
"""
    command = [sys.executable, "-c", code, tmp_path / "plan.png"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True)
    assert printed.stdout.splitlines() == [
        "kvcompress.plots needs matplotlib, of the extra plots: pip install 'kvcompress[plots]'",
        "False True",
    ]
