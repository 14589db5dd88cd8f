"""A pipeline of transformers for text that is read through a compressed cache: "kvcompress-text-generation".

Importing this module registers it:

    import kvcompress.pipelines
    from transformers import pipeline

    generator = pipeline("kvcompress-text-generation", model=model, tokenizer=tokenizer, cache="pruned,keep=1/4")
    generator(["a text", "another"], max_new_tokens=50)
"""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, TextGenerationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

from .caches.base import CompressedCache
from .caches.spec import DENSE, CacheSpec
from .hf.argument import with_cache
from .hf.attach import attach, is_attached
from .pruners import Pruner
from .reading.prefilling import prefill
from .support.checks import need, need_text

TASK = "kvcompress-text-generation"


class CompressedTextGenerationPipeline(TextGenerationPipeline):
    """TextGenerationPipeline of transformers with a compressed cache for every call; the model is attached.

    Beside what that takes, when it is made or called: cache, as text ("pruned,pruner=snapkv,keep=1/4"), a CacheSpec,
    or a function of the config that makes a cache; a converted model's own, else IterativeCache, where it is None.
    guide: text of what is asked, one for all prompts of the call, which chooses what is kept; it is not read as part of
    them, so a question must stand in the prompt too. Each prompt, or batch of them, is read into a new cache.
    Raises ValueError for a cache that cannot be read, or is none of ours, TypeError for what is no cache or no text.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not is_attached(self.model):
            attach(self.model)

    def _sanitize_parameters(self, cache: Any = None, guide: str | None = None, **others: Any) -> Any:
        before, forward, after = super()._sanitize_parameters(**others)
        if cache is not None:
            if not (isinstance(cache, (str, CacheSpec)) or callable(cache)) or isinstance(cache, Pruner):
                hint = ", as lambda config: ..." if isinstance(cache, CompressedCache) else ""
                raise TypeError(
                    f"cache must be text, a CacheSpec or a function of the config that makes one{hint}, "
                    f"got {type(cache).__name__}"
                )
            forward["cache"] = CacheSpec.parse(cache) if isinstance(cache, str) else cache
        if guide is not None:
            need_text("guide", guide, "a str or None")
            forward["guide"] = guide
        return before, forward, after

    def _forward(
        self, model_inputs: Any, cache: Any = None, guide: str | None = None, **generation: Any
    ) -> Any:  # fmt: skip
        config = self.model.config
        if cache is None:
            cache = CacheSpec(CacheSpec.kind_of(config) or "iterative", {})
        if isinstance(cache, CacheSpec):
            need(cache.kind != DENSE, f"cache must be a compressed one, got {cache}")
            held = cache.make(config, self.tokenizer)
        else:
            held = cache(config)
        if not isinstance(held, CompressedCache):
            raise ValueError(f"cache must make a kvcompress cache, got {type(held).__name__}")
        ids, mask = model_inputs["input_ids"], model_inputs.get("attention_mask")
        options = with_cache(held, generation)
        tail = None
        if guide is not None:
            tail = self.tokenizer(guide, return_tensors="pt", add_special_tokens=False).input_ids[0].to(ids.device)
        prefill(self.model, ids, held, mask, guide=tail)
        return super()._forward(model_inputs, **options)


if TASK not in PIPELINE_REGISTRY.get_supported_tasks():
    PIPELINE_REGISTRY.register_pipeline(
        TASK, pipeline_class=CompressedTextGenerationPipeline, pt_model=AutoModelForCausalLM, type="text"
    )
