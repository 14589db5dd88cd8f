"""The layer of DMC: each token opens an entry of its row or is merged into the newest one."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..caches.passes import CachePass
from ..hf.facts import LayerFacts
from ..ops.softmax import Softmax
from .gates import weights_of
from .layer import DecidingLayer, hiding, left_aligned


class DMCLayer(DecidingLayer):
    """Rows of entries, each the average of one or more tokens; the newest one's sums are kept in float32."""

    tail: ops.Tail  # once the pool is open

    def open_pool(self, rows: int, head_dim: int, like: Tensor, rope_lengths: list[int]) -> None:
        super().open_pool(rows, head_dim, like, rope_lengths)
        self.tail = ops.Tail.empty(rows, head_dim, window=self.config.window, device=like.device)

    # ---- attention ----

    def attend_token(self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        pool, tail, places, config = self.opened, self.tail, self.places, self.config
        neuron = self.neuron
        assert neuron is not None
        rotary = step.facts[self.index].key_rotary
        cos, sin, offsets = rotary.joint_tables(max(self.next) + 1, self.rope_lengths, keys.device)
        alpha = self._decide(step, queries, keys) if self.decides_apart else None
        omega = self._weights(queries, keys) if not config.decides_alone or config.omega == "uniform" else None

        def write(table: ops.PageTable) -> Tensor:
            return ops.dmc_step_(
                queries, keys, values, pool.k_pages, pool.v_pages, table, tail, places, neuron=neuron,
                offsets=offsets, alpha=alpha, omega=omega, cos=cos, sin=sin, window=config.window, shift=config.shift,
                margin=config.decision_margin, omega_shift=config.shift, eps=config.omega_eps, reduce=config.gqa_omega,
                **pool.scales, **softmax.options,
            )[0]  # fmt: skip

        out = pool.step(write, known=False)
        if alpha is not None:
            self.note(alpha, step)
        return out

    def attend_many(
        self, step: CachePass, queries: Tensor, keys: Tensor, values: Tensor, alpha: Tensor, softmax: Softmax
    ) -> Tensor:
        """Attention over the chunk's own partial averages and over entries that were closed before it.

        A token's partial average is hidden from later ones where the next token merges into it, and so is the newest
        entry where the first token does.
        """
        pool, places, S = self.opened, self.places, keys.shape[2]
        omega, counts = self._weights(queries, keys), step.on(keys.device)
        k, v, gates, weights = left_aligned(step, keys, values, alpha, omega)
        mean_k, mean_v = self._averages(k, v, gates, weights)
        first = places + torch.arange(S, dtype=torch.int32, device=places.device)
        rotated_k = self.keys_at(step, mean_k, first)
        q = self.queries_at(step, queries, self.positions(step))
        lengths = counts.flatten() if step.padded else None
        out = ops.attention(q, rotated_k, mean_v, key_bias=hiding(gates), lengths=lengths, **softmax.options)

        here = torch.arange(S, device=places.device) < counts
        opens = ((gates < 0.5) & here[:, None]).sum(-1, dtype=torch.int32).flatten()
        merges = ((gates[..., 0] > 0.5) & here[:, :1]).flatten().to(torch.int32)
        if max(pool.bounds) > 0:
            out = ops.merge_states(out, self._decode(q, pool.lengths - merges, None, softmax.rest, causal=False))
        opened, rewrites = torch.stack([opens, merges]).tolist()
        self._append(step, keys, values, alpha, omega, opened, [bool(row) for row in rewrites], known=True)
        return out[0]

    def _weights(self, queries: Tensor, keys: Tensor) -> Tensor:
        """float32 [B, Hkv, S], omega: how much each token weighs in the average of its entry."""
        return weights_of(self.config, queries[..., self.neuron], keys.shape[1])

    def _averages(self, k: Tensor, v: Tensor, alpha: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
        """Partial averages that the chunk's tokens see of their entries, un-rotated, what was there included."""
        tail, neuron, window = self.tail, self.neuron, self.config.window
        B, Hkv, S, D = k.shape
        if window is None:
            initial = (tail.keys.view(B, Hkv, D), tail.values.view(B, Hkv, D), tail.weights.view(B, Hkv))
            return ops.dmc_accumulate(k, v, alpha, omega, neuron=neuron, initial=initial)[:2]
        if window == 1:
            return ops.dmc_accumulate(k, v, alpha, omega, neuron=neuron, window=1)[:2]
        # tokens of the window once more, before the chunk; one joins the one before it where there is one
        ages = torch.arange(window - 1, 0, -1, device=k.device)
        age, count = ages[None], tail.counts[:, None]
        held = (age <= count)[..., None]
        place = ((count - age) % window)[..., None].long()
        before_k, before_v = (
            torch.where(held, x.gather(1, place.expand(-1, -1, D)), 0).to(k.dtype).view(B, Hkv, -1, D)
            for x in (tail.keys, tail.values)
        )
        before_weight = torch.where(held[..., 0], tail.weights.gather(1, place[..., 0]), 1).view(B, Hkv, -1)
        before_alpha = (age < count.clamp(max=window - 1)).float().view(B, Hkv, -1)
        out = ops.dmc_accumulate(
            torch.cat([before_k, k], 2),
            torch.cat([before_v, v], 2),
            torch.cat([before_alpha, alpha], 2),
            torch.cat([before_weight, omega], 2),
            neuron=neuron,
            window=window,
        )
        return out[0][:, :, window - 1 :], out[1][:, :, window - 1 :]

    def _append(
        self, step: CachePass, keys: Tensor, values: Tensor, alpha: Tensor, omega: Tensor, opened: list[int],
        rewrites: list[bool] | None, *, known: bool,
    ) -> None:  # fmt: skip
        """Stores new tokens. opened, rewrites, known: as PagePool.extend takes them."""
        pool, tail, rotary = self.opened, self.tail, step.facts[self.index].key_rotary
        cos, sin, offsets = rotary.joint_tables(self.bound(step), self.rope_lengths, keys.device)
        positions = self.positions(step)
        if offsets is not None:
            positions = positions + offsets
        new = None
        if step.padded:
            new = torch.tensor(self._per_row(step.counts), dtype=torch.int32, device=keys.device)

        def write(table: ops.PageTable) -> None:
            ops.dmc_append_(
                pool.k_pages, pool.v_pages, table, tail, keys, values, alpha, omega, cos=cos, sin=sin,
                positions=positions, counts=new, neuron=self.neuron, window=self.config.window, **pool.scales,
            )  # fmt: skip

        pool.extend(write, opened, rewrites=rewrites, known=known)

    @property
    def repeats(self) -> bool:
        return not self.track and self.config.decides_alone

    def held_tensors(self, facts: LayerFacts) -> tuple[Tensor, ...]:
        return *super().held_tensors(facts), self.places, *self.state()

    def step_rows(self) -> dict[str, Tensor]:
        return super().step_rows() | {"places": self.places} | self.tail._asdict()

    def place_rows(self, rows: dict[str, Tensor], *, borrowed: int | None = None) -> None:
        super().place_rows(rows, borrowed=borrowed)
        self.places, self.tail = rows["places"], ops.Tail(*(rows[name] for name in ops.Tail._fields))

    # ---- state ----

    def kept_of(self, alpha: Tensor) -> Tensor:
        return ~alpha  # those that open an entry

    def state(self) -> tuple[Tensor, ...]:
        return () if self.pool is None else self.tail
