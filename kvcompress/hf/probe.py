"""What the layers of a decoder of any family are, learned from one forward pass over eight tokens.

Its batch is the same tokens again and again, whose rows get other cosines and sines: an identity, a quarter turn (which
shows the partner of each coordinate), quarter turns with signs that spell the column of the table and the call of the
rotary embedding, last the family's own. What arrives at the attention function tells the rest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..positions import NormedTables, RotaryTables, Unrotated, parts
from .alibi import AlibiTables
from .facts import Facts, LayerFacts
from .indexing import Indexer, IndexTicket

TOKENS, BITS, CALL_BITS = 8, 10, 4  # tokens, bits of a column of cosines, bits of a call of a rotary embedding
ROWS = 3 + BITS + CALL_BITS
_FAR = 1 << 17  # a position beyond every window
# what attention functions are given that changes nothing here, or that we do
KNOWN = {
    "dropout", "scaling", "is_causal", "sliding_window", "softcap", "s_aux", "position_ids", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict", "output_router_logits", "input_ids", "alibi_slopes",
}  # fmt: skip


_OWN_MASK = (
    "its layers use the mask of their attention themselves: they attend by code of their own, or change what is seen, "
    "and nothing can be put in its place"
)


class MaskTicket:
    """Stands for the mask of a layer while the probe runs. sees: transformers' mask function. indexed: whether indexers
    look at it, which hide from their scores what it hides."""

    ndim = 4

    def __init__(self, sees: Any, *, indexed: bool = False) -> None:
        self._sees = sees
        if indexed:
            self.dtype = None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_OWN_MASK)

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(_OWN_MASK)

    def __getitem__(self, index: Any) -> MaskTicket:
        return self

    def to(self, *args: Any, **kwargs: Any) -> MaskTicket:
        return self

    def _first(self, query: int) -> int:
        """The first key that a query sees."""
        with torch.device("cpu"):  # transformers' functions make tensors too
            zero, places = torch.zeros((), dtype=torch.long), torch.arange(query + 2)
            seen = torch.as_tensor(self._sees(zero, zero, places[query], places)).expand(query + 2)
        if seen[query + 1]:
            raise ValueError("its queries see tokens that follow them, and a cache holds none of those")
        return int(seen.nonzero()[0])

    def reach(self) -> tuple[int | None, int | None]:
        """(window, chunk) that a query sees; None = no end. A chunk ends behind its query sooner than a window."""
        first = self._first(_FAR)
        if first == 0:
            return None, None
        if self._first(_FAR + 1) == first + 1:
            return _FAR - first + 1, None
        return None, first - self._first(first - 1)


class Probe:
    """What one forward pass brings. rotary() and arrived() are called by the seam's hooks, facts() afterwards."""

    def __init__(self, trained_length: int) -> None:
        self.arrives = False  # whether the family hands keywords down to its attention
        self.crosses = False  # whether its layers attend to an encoder besides
        # where frequencies that depend on length are those of short texts
        step = max(1, min(5, (trained_length - 8) // TOKENS))
        self.positions = min(7, max(trained_length // 8, 1)) + step * torch.arange(TOKENS, device="cpu")
        self._sources: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], tuple[int, ...]]] = []
        self._norms: list[tuple[nn.Module, Tensor]] = []  # of a head, behind the rotation, since the last attention
        self._seen: list[tuple[Any, ...]] = []
        self._updated: list[int] = []  # layers that handed keys to the cache

    def rotary(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], at: Tensor, out: Any) -> Any:
        """What a call of a rotary embedding gives in this pass. args, kwargs: those behind x and position_ids."""
        cos, sin = (x.clone() for x in parts(out))
        column = torch.arange(cos.shape[-1], device=cos.device)
        spelt = [column] * BITS + [torch.full_like(column, len(self._sources))] * CALL_BITS
        bits = [*range(BITS), *range(CALL_BITS)]
        signs = [1 - 2 * ((number >> bit) & 1) for number, bit in zip(spelt, bits, strict=True)]
        for row, sign in enumerate([torch.zeros_like(column), torch.ones_like(column), *signs]):
            cos[..., row, :, :], sin[..., row, :, :] = float(row == 0), sign.to(sin.dtype)
        rest = {name: x for name, x in kwargs.items() if not isinstance(x, Tensor)}
        self._sources.append((module, args, rest, tuple(at.shape[:-2])))
        return like(out, cos, sin)

    def normed(self, module: nn.Module, x: Any, out: Any) -> None:
        """A norm has run; one whose input is rotated follows the rotation."""
        if isinstance(x, Tensor) and isinstance(out, Tensor) and x.shape[0] == ROWS and not torch.equal(x[0], x[1]):
            self._norms.append((module, out))

    def updated(self, layer: int) -> None:
        """A layer handed keys to the cache."""
        self._updated.append(layer)

    def arrived(
        self, layer: int | None, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        """An attention function was called; returns what it gives in this pass."""
        self._seen.append((layer, module, q, k, v, mask, kwargs, self._norms))
        self._norms = []
        return unheard(q, v)

    @property
    def attending(self) -> list[nn.Module]:
        """The modules whose attention it was, each once."""
        return list({id(module): module for _, module, *_ in self._seen}.values())

    def facts(self, tolerance: float) -> Facts:
        """Raises ValueError, naming the layer, for what a cache of ours cannot do."""
        found, owners = Facts(), dict[int, int]()
        shared: dict[Any, RotaryTables] = {}
        if not self._updated:
            raise ValueError("no layer of it hands keys to a cache: there is nothing to compress")
        for index, module, q, k, v, mask, kwargs, norms in self._seen:
            if not isinstance(index, int):
                raise ValueError(f"{type(module).__name__} attends without saying which layer it is")
            ticket = kwargs.pop("indices", None)
            odd = [name for name, x in kwargs.items() if name not in KNOWN and x is not None and x is not False]
            if odd:
                raise ValueError(f"layer {index} attends by {', '.join(odd)}, which no compressed cache knows")
            if index in found:
                raise ValueError(f"layer {index} attends more than once to the keys that it hands to the cache")
            if mask is not None and not isinstance(mask, MaskTicket):
                raise ValueError(f"layer {index} makes a mask of its own")
            # beside an encoder some say so of all that attends, whose masks are causal all the same
            told = self.crosses and mask is not None and index in self._updated
            if not told and not getattr(module, "is_causal", True):
                raise ValueError(
                    f"layer {index} is not causal: tokens see what follows them, which a cache has not yet"
                )
            try:
                biased = kwargs.get("alibi_slopes")
                alibi = None if biased is None else AlibiTables(biased() / kwargs["scaling"])
                found[index] = self._layer(index, q, k, v, mask, owners, shared, norms, tolerance, alibi, ticket)
            except ValueError as error:
                raise ValueError(f"layer {index}: {error}") from None
            owners.setdefault(id(k), index)
        own_code = sorted(set(self._updated) - set(found))
        if own_code:
            raise ValueError(
                f"layer {own_code[0]} attends by code of its own, which never asks transformers' AttentionInterface: "
                "nothing can be put in its place"
            )
        for facts in list(found.values()):
            if facts.reads is not None:
                read = found[facts.reads]
                found[facts.reads] = replace(read, readers=(*read.readers, facts.index))
        return found

    def _layer(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, mask: Any, owners: dict[int, int],
        shared: dict[Any, RotaryTables], norms: list[tuple[nn.Module, Tensor]], tolerance: float,
        alibi: AlibiTables | None, ticket: IndexTicket | None,
    ) -> LayerFacts:  # fmt: skip
        window, chunk = (None, None) if mask is None else mask.reach()
        turns = [_Turns(x) for x in (q, k)]
        if not turns[0].alike(turns[1]):
            raise ValueError("its queries rotate by other pairs of coordinates than its keys")
        if ticket is not None and (window is not None or chunk is not None or id(k) in owners):
            raise ValueError("its indexer chooses from a window, or from the keys of another layer")
        order: Tensor | None = None
        q_table: RotaryTables = Unrotated()
        k_table = q_table
        if turns[0].pairs:
            order = turns[0].order
            key = (turns[0].call, tuple(turns[0].columns))
            if key not in shared:
                module, arguments, keywords, axes = self._sources[turns[0].call]
                columns = torch.tensor(turns[0].columns, device="cpu")
                shared[key] = RotaryTables(module, columns, arguments=arguments, keywords=keywords, axes=axes)
            q_table, k_table = (self._normed(shared[key], x, norms) for x in (q, k))
        if alibi is not None:
            if turns[0].pairs:
                raise ValueError("its queries and keys rotate, and biases depend on their positions besides")
            q_table = k_table = alibi
        facts = LayerFacts(
            index, q.shape[1], k.shape[1], q.shape[3], v.shape[3], q_table, k_table, order, window, chunk,
            owners.get(id(k)), rotates=bool(turns[0].pairs) or alibi is not None, normed=type(k_table) is NormedTables,
            indexer=None if ticket is None else self._indexer(ticket, turns[0]),
        )  # fmt: skip
        at = self.positions.to(q.device, torch.int32)[None]
        rotated = [(facts.framed(q), q_table), (facts.framed(k), k_table)] if alibi is None else []
        if ticket is not None and (indexer := facts.indexer) is not None and indexer.rotates:
            rotated += [(indexer.framed(x), k_table) for x in (ticket.queries, ticket.keys[:, None])]
        for x, table in rotated:
            ours, own = table.rotate(x[:1], at, int(at.max()) + 1, [int(at.max()) + 1]), x[-1:]
            # `not <` so that NaN is no answer
            if not (ours.float() - own.float()).norm() <= tolerance * own.float().norm():
                raise ValueError("no rotation of pairs of coordinates explains its queries or keys")
        return facts

    @staticmethod
    def _indexer(ticket: IndexTicket, own: _Turns) -> Indexer:
        """own: how the queries and keys of the same layer turn."""
        turns = _Turns(ticket.queries)
        same = (turns.call, turns.columns) == (own.call, own.columns)
        if not turns.alike(_Turns(ticket.keys[:, None])) or (turns.pairs and not same):
            raise ValueError("its indexer rotates by other frequencies than its attention")
        return Indexer(ticket.top, turns.order, bool(turns.pairs))

    @staticmethod
    def _normed(tables: RotaryTables, x: Tensor, norms: list[tuple[nn.Module, Tensor]]) -> RotaryTables:
        for norm, out in norms:
            if not any(True for _ in norm.parameters()):
                continue  # it weighs all coordinates alike
            for y in (out, out.transpose(1, 2) if out.ndim == 4 else out):
                if y.shape == x.shape and torch.equal(y, x):
                    return NormedTables(tables, norm)
        return tables


class _Turns:
    """How the queries or keys x [ROWS, H, TOKENS, D] of a layer turn.

    pairs: (first, second) coordinates, of which out[first] = x[first] cos - x[second] sin. columns: of the table, of
    each pair. call: which call of a rotary embedding. A neuron that DMC has zeroed is 0 in every row: where it is a
    second, its first is 0 after a quarter turn, and what is known of the pair is known from the second.
    """

    def __init__(self, x: Tensor) -> None:
        self.size = x.shape[3]
        x = x.float().transpose(1, 2).flatten(1, 2)  # [rows, tokens * heads, D]
        still, quarter = x[0], x[1]
        size = still.norm(dim=0).clamp_min(1e-20)
        turns = (quarter - still).norm(dim=0) > 0.05 * size
        partner = ((quarter / quarter.norm(dim=0).clamp_min(1e-20)).T @ (still / size)).abs().argmax(1)
        sign = (quarter * still[:, partner]).sum(0)
        bits = ((x[2:-1] * quarter).sum(1) < 0).long()  # [BITS + CALL_BITS, D]
        column = torch.stack([bits[b] << b for b in range(BITS)]).sum(0)
        told = turns & (quarter != 0).any(0)
        call = torch.stack([bits[BITS + b] << b for b in range(CALL_BITS)]).sum(0)[told].unique()
        found = {int(d): (int(partner[d]), int(column[d])) for d in (told & (sign < 0)).nonzero()}
        by_second = {int(partner[d]): (int(d), int(column[d])) for d in (told & (sign > 0)).nonzero()}
        self.guessed = {d for d in by_second if turns[d] and not told[d]}  # columns that may be the second's
        found |= {d: by_second[d] for d in self.guessed}
        firsts = sorted(found)
        self.pairs = [(d, found[d][0]) for d in firsts]
        self.columns = [found[d][1] for d in firsts]
        self.call = int(call[0]) if len(call) else -1
        seconds = [second for _, second in self.pairs]
        whole = set(firsts) | set(seconds) == set(turns.nonzero().flatten().tolist())
        if turns.any() and (len(call) != 1 or len(set(seconds)) != len(firsts) or not whole):
            raise ValueError("no rotation of pairs of coordinates explains its queries or keys")
        rest = [d for d in range(self.size) if not turns[d]]
        self._order = [*firsts, *seconds, *rest]

    @property
    def order(self) -> Tensor | None:
        return None if self._order == list(range(self.size)) else torch.tensor(self._order, device="cpu")

    def alike(self, other: _Turns) -> bool:
        guessed = self.guessed | other.guessed
        columns = zip(self.pairs, self.columns, other.columns, strict=False)
        same = all(a == b or pair[0] in guessed for pair, a, b in columns)
        return (self.pairs, self.call) == (other.pairs, other.call) and same


def unheard(q: Tensor, v: Tensor) -> Tensor:
    """What attention gives while the probe runs: nothing, so that the rows of the batch stay alike."""
    return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])


def like(out: Any, cos: Tensor, sin: Tensor) -> Any:
    """cos and sin as a rotary embedding returned them."""
    return torch.complex(cos, sin) if isinstance(out, Tensor) else (cos.to(out[0].dtype), sin.to(out[0].dtype))
