"""What pushes a model to compress: the one-sided loss on the compression ratio, and DMC-C's on heads that differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..retrofit.passes import REENTRANT
from ..retrofit.ranks import place_among_ranks, summed
from .convert import state


class LastDecisions(NamedTuple):
    """Decisions of a model's last forward pass, float32 [L, B, Hkv, T], L its converted layers. alpha: relaxed. hard: 0
    or 1, noise included (with alpha's gradient). bare: 0 or 1 without noise, as a cache would decide. valid: bool
    [B, T], tokens that are no padding; None = all."""

    alpha: Tensor
    hard: Tensor
    bare: Tensor
    valid: Tensor | None

    def mean(self, of: Tensor) -> Tensor:
        """Mean over tokens, [L, B, Hkv], 0 where a sequence has none."""
        if self.valid is None:
            return of.mean(-1)
        valid = self.valid[None, :, None].to(of.dtype)
        return (of * valid).sum(-1) / valid.sum(-1).clamp(min=1)

    def counts(self) -> Tensor:
        """Tokens of each sequence, float32 [B]."""
        if self.valid is None:
            B, T = self.alpha.shape[1], self.alpha.shape[3]
            return torch.full((B,), float(T), device=self.alpha.device)
        return self.valid.sum(1).float()

    def present(self) -> Tensor:
        """float32 [B]: 1 for a sequence that has tokens, 0 for one of padding alone."""
        return (self.counts() > 0).float()


def last_decisions(model: nn.Module) -> LastDecisions:
    """Of the last forward pass without a cache of a converted model.

    Raises RuntimeError if there was none, if a converted layer has not decided in it, or if gradient checkpointing has
    cut the decisions off from the weights.
    """
    found = state(model)
    last = found.last
    if last is None or last.config.neuron_scale > 0:
        raise RuntimeError("no decisions were made yet: call the converted model without a cache first")
    missing = [layer for layer in found.layers if layer not in last.alpha]
    if missing:
        raise RuntimeError(
            f"no decisions were made in layer {', '.join(map(str, missing))} in the last forward pass: it stopped "
            "before its end, or what wraps the model hands its layers copies of the pass"
        )
    last.asked = True
    if last.noise is not None and last.detached:
        raise RuntimeError(f"the decisions have no gradient: {REENTRANT}")
    alpha, hard, bare = (
        torch.stack([of[layer] for layer in found.layers]) for of in (last.alpha, last.hard, last.bare)
    )
    return LastDecisions(alpha, hard, bare, None if last.documents is None else last.documents.valid)


@dataclass(frozen=True)
class CompressionLoss:
    """What is added to the language model's loss.

    weight: of the loss on the ratio. of: "soft" (relaxed decisions) or "hard" (thresholded ones with the relaxed ones'
    gradient; released code). hinge: over what the mean is taken that must reach 1 - 1/target: "global" (layers, heads,
    tokens of a step), "sequence" (mean of the hinges of each; released code) or "layer" (local prior). equal_weight:
    of DMC-C, which wants equal decisions in all heads of a layer; 0 = off. equal_centre: "mean" of the heads, or their
    "sum" as printed. equal_per: "token" or "head" (means over time). All means are over all ranks of a distributed run;
    sequences of padding alone count nowhere.
    Raises ValueError for a field out of range. Source: DMC, eq 10, 11 and 13.
    """

    weight: float = 1.0
    of: str = "soft"
    hinge: str = "global"
    equal_weight: float = 0.0
    equal_centre: str = "mean"
    equal_per: str = "token"

    def __post_init__(self) -> None:
        for name, choices in (
            ("of", ("soft", "hard")),
            ("hinge", ("global", "sequence", "layer")),
            ("equal_centre", ("mean", "sum")),
            ("equal_per", ("token", "head")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in ("weight", "equal_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")

    def __call__(self, decisions: LastDecisions, target_ratio: float, reached: Tensor | None = None) -> Tensor:
        """decisions: of the forward pass, on every rank. target_ratio: tokens per entry, at least 1. Returns a float32
        scalar: 0 with zero gradient where the target is reached (and equal_weight is 0).

        reached: float32 [L], the share that a whole step merged, by layer: says where the target is reached, in place
        of these decisions, and the loss is linear in them, so that a step has the mean of its passes' losses however it
        is divided; None = these decisions are the step's. A hinge of each sequence asks for neither.
        """
        if not target_ratio >= 1:
            raise ValueError(f"target_ratio must be at least 1, got {target_ratio}")
        loss = self.weight * self._ratio(decisions, 1 - 1 / target_ratio, reached)
        if self.equal_weight:
            loss = loss + self.equal_weight * self._equal(decisions)
        return loss

    def merged(self, decisions: LastDecisions) -> tuple[Tensor, Tensor]:
        """[L] tokens of a forward pass that merge, mean over heads, and how many tokens there are, on this rank."""
        counts = decisions.counts()
        return (decisions.mean(self._of(decisions)) * counts[:, None]).mean(2).sum(1), counts.sum()

    def _of(self, decisions: LastDecisions) -> Tensor:
        return decisions.alpha if self.of == "soft" else decisions.hard

    def _ratio(self, decisions: LastDecisions, share: float, reached: Tensor | None) -> Tensor:
        if self.hinge == "sequence":
            hinges = (share - decisions.mean(self._of(decisions)).mean((0, 2))).relu()  # [B]
            return _over_ranks((hinges * decisions.present()).sum(), decisions.present().sum())
        totals, tokens = self.merged(decisions)
        missing = share - _over_ranks(totals, tokens)  # [L]
        if self.hinge == "global":
            missing = missing.mean()
        if reached is None:
            return missing.relu().mean()  # relu: no gradient at the target itself
        reached = reached.to(missing.device)
        return torch.where((reached.mean() if self.hinge == "global" else reached) < share, missing, 0.0).mean()

    def _equal(self, decisions: LastDecisions) -> Tensor:
        L, B, H, T = decisions.alpha.shape
        x = decisions.alpha
        centre = x.mean(2, keepdim=True) if self.equal_centre == "mean" else x.sum(2, keepdim=True)
        if self.equal_per == "head":
            apart = (decisions.mean(x) - decisions.mean(centre)).abs()  # [L, B, H], 0 for a sequence without tokens
            return _over_ranks(apart.sum(), decisions.present().sum() * L * H)
        total = (decisions.mean((x - centre).abs()) * decisions.counts()[:, None]).sum()
        return _over_ranks(total, decisions.counts().sum() * L * H)


def _over_ranks(total: Tensor, count: Tensor) -> Tensor:
    """total / count, each summed over the ranks of a distributed run. Each rank's gradient is its share times the
    number of ranks, because distributed training averages gradients."""
    ranks = place_among_ranks()[1]
    if ranks == 1:
        return total / count.clamp(min=1)
    everywhere = summed(torch.cat([total.detach().reshape(-1), count[None]]))
    joined, count = everywhere[:-1].reshape(total.shape), everywhere[-1].clamp(min=1)
    local = total * (ranks / count)
    return joined / count + (local - local.detach())


class MergedTokens(NamedTuple):
    """How many tokens merge, sums over the sequences of forward passes, or means of such sums. soft, hard: [L, Hkv],
    relaxed decisions as in the loss, and those that a cache would take, without noise. tokens: of one head."""

    soft: Tensor
    hard: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, decisions: LastDecisions) -> MergedTokens:
        counts = decisions.counts()
        soft, hard = ((decisions.mean(x.detach()) * counts[:, None]).sum(1) for x in (decisions.alpha, decisions.bare))
        return cls(soft, hard, counts.sum())

    def ratios(self) -> dict[str, float | list[list[float]]]:
        """Tokens per entry: "soft" and "hard" over all, "layers" hard, [L][Hkv]."""
        tokens = self.tokens.clamp(min=1)
        soft, hard = self.soft / tokens, self.hard / tokens
        least = float(1 / tokens)
        found: dict[str, float | list[list[float]]] = {
            name: float(1 / (1 - x.mean()).clamp(min=least)) for name, x in (("soft", soft), ("hard", hard))
        }
        found["layers"] = (1 / (1 - hard).clamp(min=least)).tolist()
        return found


def compression_ratios(decisions: LastDecisions) -> dict[str, float | list[list[float]]]:
    """Tokens per entry over all: "soft" as in the loss, "hard" as a cache would decide, without noise (a head whose
    probabilities hover at 0.4 trains at 1.67 and infers at 1); "layers": hard, [L][Hkv]. Of this rank.

    decisions: what last_decisions returns. A first token never merges; here it counts with its own decision, as in the
    loss.
    """
    return MergedTokens.of(decisions).ratios()
