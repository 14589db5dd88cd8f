"""The ops of kvcompress.ops in plain PyTorch, in any dtype, written to be read: the oracle of the tests."""

from .attention import attention, visible
from .decode import decode, decode_shared, merge_states
from .dmc_accumulate import dmc_accumulate
from .dmc_append import dmc_append_
from .dmc_gates import dmc_decisions, dmc_importance, dmc_mask
from .dmc_step import dmc_step_
from .paged_step import paged_step_
from .pages import append_tokens_, compact_pages_, truncate_rows_
from .planner import divide_memory, plan
from .pod_attention import pod_attention
from .pod_step import pod_step_
from .quantize import dequantize, quantize
from .quest_step import quest_step_
from .replay import replay_scores
from .ring_step import ring_step_
from .rope import rope
from .score import window_scores
from .select import select_topk
from .similarity import layer_similarity

__all__ = [
    "append_tokens_",
    "attention",
    "compact_pages_",
    "decode",
    "decode_shared",
    "dequantize",
    "divide_memory",
    "dmc_accumulate",
    "dmc_append_",
    "dmc_decisions",
    "dmc_importance",
    "dmc_mask",
    "dmc_step_",
    "layer_similarity",
    "merge_states",
    "paged_step_",
    "plan",
    "pod_attention",
    "pod_step_",
    "quantize",
    "quest_step_",
    "replay_scores",
    "ring_step_",
    "rope",
    "select_topk",
    "truncate_rows_",
    "visible",
    "window_scores",
]
