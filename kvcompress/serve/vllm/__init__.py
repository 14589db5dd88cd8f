"""A vLLM plugin (entry point group vllm.general_plugins): compressed caches for requests that vLLM schedules.

vLLM batches, schedules, samples and streams; pages of all KV heads, layers and requests lie in vLLM's own KV cache
memory. Nothing of vLLM is replaced for models that ask for no compressed cache.
"""

from __future__ import annotations


def register() -> None:
    """What the entry point names: vLLM calls it in each of its processes."""
    from .config import register_families

    register_families()


__all__ = ["register"]
