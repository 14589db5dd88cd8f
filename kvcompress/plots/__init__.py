"""Figures of a reading: what was planned, what memory received and kept, and what it is worth; of a model converted to
DMC: where it compresses; of a plan for PoD: which layers attend alike and share keys; of
a measured model: what its attention is like; of gates: how well they say what they were fitted to.

measured is what kvcompress.analysis.attention returns. Each function draws into axes, or into a new figure where axes
is None (no display, no pyplot state), and returns the Axes. plan, memory_share, memory_map and head_ratios have one
panel per name: given a dict they take as many Axes and return a list of them, in the dict's order; ratios_over_training
has one per ratio. Iterations, chunks and layers count from 0. axes.figure is the figure, save writes it. segments_html
and segments_text give text, coloured by cache entries. In a notebook, `axes.figure` as a cell's last line shows it
after `%matplotlib inline`.
"""

# ruff: noqa: E402  who has no matplotlib is told so before it is imported

from ..support.extras import need_packages

need_packages("kvcompress.plots", "matplotlib")

from .attention import attention_gravity, attention_neighbours, attention_sparsity
from .dmc import decision_over_position, head_ratios, ratio_over_length, ratios_over_training
from .files import save
from .gates import gates_fit
from .plans import plan
from .pod import (
    agreement_curve,
    attention_sets,
    block_map,
    memory_curve,
    saved_over_length,
    similarity_heatmap,
)
from .quality import loss_over_position, recall_map
from .readings import memory_attention, memory_share, retention
from .segmentation import Segment, print_segments, segments, segments_html, segments_text
from .sources import memory_map, memory_sources

__all__ = [
    "Segment",
    "agreement_curve",
    "attention_gravity",
    "attention_neighbours",
    "attention_sets",
    "attention_sparsity",
    "block_map",
    "decision_over_position",
    "gates_fit",
    "head_ratios",
    "loss_over_position",
    "memory_attention",
    "memory_curve",
    "memory_map",
    "memory_share",
    "memory_sources",
    "plan",
    "print_segments",
    "ratio_over_length",
    "ratios_over_training",
    "recall_map",
    "retention",
    "save",
    "saved_over_length",
    "segments",
    "segments_html",
    "segments_text",
    "similarity_heatmap",
]
