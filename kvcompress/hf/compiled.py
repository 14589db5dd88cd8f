"""The seam under torch.compile: a pass of a cache is a few ops that the compiler takes as they are.

Hooks and attention function are traced, and the cache is not: begin_pass, attend_pass and end_pass find it by its
handle when the compiled code runs, and the pass in what they have noted of their thread.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops.opaque import held, opaque_op
from .argument import cache_of
from .attending import attend, begun, hidden_of, wants_gradient
from .encoders import STATES
from .indexing import IndexTicket
from .method import KEYWORD, PassCache, method_of
from .now import THREAD


def before(decoder: Any, seam: Any, given: dict[str, Any]) -> bool:
    """Begins a pass; False for one that is rare, or to be refused: it is begun uncompiled. given: the arguments."""
    now, cache = THREAD.now, cache_of(given)
    if now.probe is not None or now.coming is not None or KEYWORD in given:
        return False
    if not isinstance(cache, PassCache):
        if method_of(decoder) is not None:
            return False
        now.over()
        return True
    name = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
    tokens, mask, at = given.get(name), given.get("attention_mask"), given.get("position_ids")
    if tokens is None or not all(isinstance(x, Tensor) for x in (tokens, mask, at) if x is not None):
        return False
    if cache.rereads or wants_gradient(decoder, given):
        return False
    if seam.facts.crosses and (given.get(STATES) is None or any(x is cache for x in given.values())):
        return False
    if cache.wants_entering and not seam.watches:  # hooks are put on outside of graphs
        return False
    refused = bool(given.get("output_attentions"))
    now.handle, now.layer = cache.handle, None
    _BEGIN(cache.handle, seam.handle, name, tokens, mask, at, given.get("use_cache"), refused)
    return True


def attention(
    layer: int | None, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], entering: Any
) -> Tensor:
    """As attending.attend, of the pass that runs."""
    names = ("scaling", "softcap", "s_aux")
    scaling, softcap, sinks = (options.get(name) for name in names)
    dropout = float(options.get("dropout") or 0)
    ticket = options.get("indices")
    index = (None, None, None) if ticket is None else (ticket.queries, ticket.keys, ticket.weights)
    given = THREAD.now.handle, query, key, value, layer, scaling, softcap, sinks, dropout, entering
    out: Tensor = _ATTEND(*given, *index)
    return out


def after(output: Any) -> None:
    """Ends the pass, if one is ours."""
    now = THREAD.now
    if now.handle is not None:
        _END(now.handle, hidden_of(output))
    now.over()


# ---- what runs in their place ----


def _begin(
    cache: Tensor, seam: Tensor, name: str, tokens: Tensor, mask: Tensor | None, at: Tensor | None,
    use_cache: bool | None, output_attentions: bool,
) -> None:  # fmt: skip
    now, attached = THREAD.now, held(seam)
    now.current = None  # of a pass that an error ended
    given: dict[str, Any] = {name: tokens, "attention_mask": mask, "position_ids": at}
    given |= {"use_cache": use_cache, "output_attentions": output_attentions}
    _, now.current = begun(attached.decoder(), attached.facts, held(cache), given)


def _attend(
    cache: Tensor, query: Tensor, key: Tensor, value: Tensor, layer: int | None, scaling: float | None,
    softcap: float | None, sinks: Tensor | None, dropout: float, entering: Tensor | None,
    index_queries: Tensor | None, index_keys: Tensor | None, index_weights: Tensor | None,
) -> Tensor:  # fmt: skip
    now = THREAD.now
    options: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "s_aux": sinks, "dropout": dropout}
    if index_queries is not None and index_keys is not None and index_weights is not None:
        options["indices"] = ticket = IndexTicket(layer, index_keys)
        ticket.queries, ticket.weights = index_queries, index_weights
    assert now.current is not None
    try:
        return attend(now.current, layer, query, key, value, options, entering)
    except BaseException:
        now.over()  # compiled code runs no hook behind an error
        raise


def _end(cache: Tensor, hidden: Tensor | None) -> None:
    now = THREAD.now
    current, now.current = now.current, None
    held(cache).end(current, hidden)


def _nothing(*args: Any) -> None:
    pass


_BEGIN = opaque_op(
    "begin_pass(Tensor(a!) cache, Tensor seam, str name, Tensor tokens, Tensor? attention_mask, Tensor? position_ids, "
    "bool? use_cache, bool output_attentions) -> ()",
    _begin, _nothing,
)  # fmt: skip
_ATTEND = opaque_op(
    "attend_pass(Tensor(a!) cache, Tensor query, Tensor key, Tensor value, int? layer, float? scaling, float? softcap, "
    "Tensor? sinks, float dropout, Tensor? entering, Tensor? index_queries, Tensor? index_keys, "
    "Tensor? index_weights) -> Tensor",
    _attend,
    lambda cache, query, key, value, *_: value.new_empty(
        (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    ),
)
_END = opaque_op("end_pass(Tensor(a!) cache, Tensor? hidden) -> ()", _end, _nothing)
