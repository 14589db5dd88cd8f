"""States of vLLM's recurrent layers: beside the pages, in a place for each request that runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.ops.ssu_dispatch import initialize_mamba_ssu_backend
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec

from ...support.units import size

logger = init_logger("vllm.kvcompress")


@dataclass
class _Groups:
    """As vLLM's kernels of recurrent layers ask for them."""

    kv_cache_groups: list[KVCacheGroupSpec]


class States:
    """vLLM knows of no cache of these layers: their states are here, and what they ask in a step is told by `told`.

    layers: by their names. nbytes: of a request's states, which count as pages. A request that begins has no state yet:
    whatever lies in its place is nobody's. Place 0 is for rows that are no request's.
    """

    def __init__(self, layers: Mapping[str, MambaBase], vllm_config: VllmConfig) -> None:
        self._config = vllm_config
        self._kinds: dict[tuple[Any, MambaSpec], list[str]] = {}
        self._builders: list[tuple[AttentionMetadataBuilder[Any], list[str]]] = []
        most, self.nbytes = vllm_config.scheduler_config.max_num_seqs, 0
        for name, layer in layers.items():
            spec = layer.get_kv_cache_spec(vllm_config)
            assert isinstance(spec, MambaSpec)
            self._kinds.setdefault((layer.get_attn_backend(), spec), []).append(name)
            layer.bind_kv_cache(torch.empty(most + 1, 1, 1, spec.page_size_bytes, dtype=torch.int8))
            layer.get_kv_cache_spec = _no_spec
            self.nbytes += spec.page_size_bytes
        self._free, self._places = list(range(most, 0, -1)), dict[str, int]()
        logger.info("Recurrent states: %s of the KV cache for each request", size(self.nbytes))

    def open(self, device: torch.device) -> None:
        """Before the first step."""
        groups = _Groups([KVCacheGroupSpec(names, spec) for (_, spec), names in self._kinds.items()])
        initialize_mamba_ssu_backend(self._config.mamba_config, groups)
        self._builders = [
            (backend.get_builder_cls()(spec, names, self._config, device), names)
            for (backend, spec), names in self._kinds.items()
        ]

    def take(self, request: str) -> None:
        """The request runs from now on."""
        self._places[request] = self._free.pop()

    def drop(self, request: str) -> None:
        """Its states are gone; one that has none is no error."""
        if request in self._places:
            self._free.append(self._places.pop(request))

    def told(self, step: CommonAttentionMetadata, requests: Sequence[str | None]) -> dict[str, Any]:
        """What each layer asks of a step, whose rows are those of these requests (None: of none)."""
        places = torch.tensor([[self._places.get(name or "", 0)] for name in requests], dtype=torch.int32)
        step = step.replace(block_table_tensor=places.to(step.query_start_loc.device))
        made = [(builder.build(0, step), names) for builder, names in self._builders]
        return {name: metadata for metadata, names in made for name in names}


def _no_spec(vllm_config: VllmConfig) -> None:
    """Of a layer that wants no cache of vLLM's."""
