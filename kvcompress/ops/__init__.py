"""Every native op as a Python function: shapes, dtypes, errors. The only package that touches torch.ops.

Dims: B sequences, Hq query heads, Hkv key-value heads, G = Hq/Hkv, S queries, T keys, D head dim, W observation window,
R rows (one row = one KV head of one sequence, r = b*Hkv + h), P page size. Tensors are float32, bfloat16 or float16 on
the CPU or CUDA; scores, LSE and rotation tables are float32, indices and lengths int32. All arguments of a call are on
one device. Queries and keys may have any strides as long as the last dimension is contiguous. `rope`,
`attention`, `pod_attention`, `merge_states`, and of DMC all but `dmc_append_` and `dmc_step_` are differentiable; a
backward pass that reaches another op raises NotImplementedError.
The tests' `oracle` has the same functions in plain PyTorch.
"""

from .attention import attention
from .decode import decode
from .decode_shared import decode_shared
from .dmc_accumulate import MAX_DMC_WINDOW, dmc_accumulate
from .dmc_append import Tail, dmc_append_
from .dmc_gates import IMPORTANCES, Decisions, Noise, dmc_decisions, dmc_importance, dmc_mask
from .dmc_step import dmc_step_
from .merge import merge_states
from .native import MAX_HEAD_DIM, simd
from .paged_step import paged_step_
from .pages import PageTable, append_tokens_, compact_pages_, truncate_rows_
from .planner import SCHEDULES, divide_memory, plan
from .pod_attention import pod_attention
from .pod_step import Lead, PodStep, pod_step_
from .quantize import dequantize, quantize
from .quest_step import QuestStep, quest_step_
from .ring_step import ring_step_
from .rope import rope
from .score import POOLINGS, REDUCTIONS, window_scores
from .select import select_topk
from .similarity import layer_similarity

__all__ = [
    "IMPORTANCES",
    "MAX_DMC_WINDOW",
    "MAX_HEAD_DIM",
    "POOLINGS",
    "REDUCTIONS",
    "SCHEDULES",
    "Decisions",
    "Lead",
    "Noise",
    "PageTable",
    "PodStep",
    "QuestStep",
    "Tail",
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
    "ring_step_",
    "rope",
    "select_topk",
    "simd",
    "truncate_rows_",
    "window_scores",
]
