"""What a retrofit of a large model costs: operations, bytes and communication, counted; nothing here is measured.

    python benchmarks/scale.py      prints the tables of docs/scale.md

Every figure follows from the shapes below and from the assumptions of Machine: docs/scale.md says where they are weak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

STEP_TOKENS = 1024 * 4096  # of an optimizer step, in every row: DMC's paper
PAPER_STEPS = 20_250  # of a retrofit to ratio 4
RANKS = (8, 64, 1024)
GB, TERA = 1e9, 1e12


@dataclass(frozen=True)
class Machine:
    """A node of GPUs. rate: FLOP/s of bfloat16 products; reached: share of it that a training step's products reach.
    memory: bytes of a GPU. bandwidth: bytes per second of that. inside: bytes per second that a GPU receives from its
    node; outside: from other nodes, by a card of its own."""

    name: str = "H100 SXM"
    gpus: int = 8
    rate: float = 989e12
    reached: float = 0.5
    memory: float = 80e9
    bandwidth: float = 3.35e12
    inside: float = 450e9  # NVLink: 900 GB/s of both directions
    outside: float = 50e9  # InfiniBand: 400 Gb/s


@dataclass(frozen=True)
class Shape:
    """A decoder with gated feed-forward layers and an output layer of its own. experts: of a layer; 0 = one dense feed-
    forward layer. active: experts of a token. head_norms: norms of queries and keys (Qwen3)."""

    name: str
    layers: int
    hidden: int
    inner: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int = 0
    active: int = 0
    head_norms: bool = False

    @property
    def attention(self) -> int:
        """Weights of a layer's four projections."""
        return 2 * self.hidden * self.head_dim * (self.query_heads + self.kv_heads)

    @property
    def expert(self) -> int:
        return 3 * self.hidden * self.inner

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.head_norms else 0)
        return self.attention + self.expert * max(self.experts, 1) + self.hidden * self.experts + norms

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def multiplied(self) -> int:
        """Weights that a token is multiplied by."""
        own = self.expert * self.active + self.hidden * self.experts if self.experts else self.expert
        return self.layers * (self.attention + own) + self.vocabulary * self.hidden

    def forward_flops(self, tokens: int) -> float:
        """Per token, in rows of so many: two for each weight, and causal attention."""
        return 2 * self.multiplied + 2 * self.layers * self.query_heads * self.head_dim * tokens

    def cache_nbytes(self, tokens: int) -> int:
        """A dense cache of one sequence, in bfloat16."""
        return 4 * self.layers * self.kv_heads * self.head_dim * tokens


SHAPES = (
    Shape("Llama 3.1 8B", 32, 4096, 14336, 32, 8, 128, 128256),
    Shape("Llama 3.1 70B", 80, 8192, 28672, 64, 8, 128, 128256),
    Shape("Qwen3 30B-A3B", 48, 2048, 768, 32, 4, 128, 151936, experts=128, active=8, head_norms=True),
)


@dataclass(frozen=True)
class Plan:
    """How a step is divided: weights, gradients and optimizer over `shards` ranks (FSDP2; fewer than ranks: HSDP, a
    copy for each group), rows of `tokens` tokens, recomputed activations. products in bfloat16, sums of gradients and
    the optimizer in float32."""

    shape: Shape
    ranks: int
    shards: int
    tokens: int = 4096
    machine: Machine = Machine()

    @property
    def rows(self) -> int:
        """Of a forward pass on a rank: 8,192 tokens or one row, fewer where a step has no more."""
        return max(1, min(8192, STEP_TOKENS // self.ranks) // self.tokens)

    @property
    def passes(self) -> int:
        return max(1, STEP_TOKENS // (self.ranks * self.rows * self.tokens))

    # ---- memory of a rank, in bytes ----

    def memory(self) -> dict[str, float]:
        """By term. gathered: two layers, one at work and one on its way, and the embedding or output layer. kept: each
        layer's input. layer: what one layer's backward pass needs. logits: in bfloat16 and float32, and their
        gradient."""
        shape, tokens = self.shape, self.rows * self.tokens
        share = shape.parameters / self.shards
        widths = 6 * shape.hidden + 4 * shape.head_dim * (shape.query_heads + shape.kv_heads)
        widths += 4 * shape.inner * max(shape.active, 1)
        return {
            "weights": 4 * share,
            "gradients": 4 * share,
            "Adam": 8 * share,
            "gathered": 2 * (2 * shape.layer + shape.vocabulary * shape.hidden),
            "kept": 2 * shape.layers * tokens * shape.hidden,
            "layer": 2 * tokens * widths,
            "logits": 10 * tokens * shape.vocabulary,
        }

    # ---- seconds of a forward and backward pass ----

    def compute(self) -> float:
        """Forward, forward again for what was not kept, and a backward pass of twice that."""
        flops = 4 * self.shape.forward_flops(self.tokens) * self.rows * self.tokens
        return flops / (self.machine.rate * self.machine.reached)

    def dmc(self) -> float:
        """What DMC adds: averages of keys and values are read and written, forward twice and backward once (which reads
        them and their gradients), at the memory's bandwidth."""
        entries = 2 * 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim * self.rows * self.tokens
        return 8 * entries / self.machine.bandwidth

    def sent(self) -> dict[str, float]:
        """Bytes that a rank receives in a pass: weights in bfloat16 for the forward and the backward pass, gradients in
        float32; with copies, the sums of the gradients over them."""
        kept = (self.shards - 1) / self.shards
        copies = self.ranks // self.shards
        return {
            "weights": 2 * 2 * self.shape.parameters * kept,
            "gradients": 4 * self.shape.parameters * kept,
            "copies": 2 * 4 * self.shape.parameters / self.shards * (copies - 1) / copies,
        }

    def communication(self) -> float:
        """A node's cards together receive what its ranks lack, once; each rank gets all of it inside the node."""
        machine, sent = self.machine, self.sent()
        nodes = math.ceil(self.shards / machine.gpus)
        sharded = sent["weights"] + sent["gradients"]
        inside = sharded / machine.inside
        outside = (sharded * (nodes - 1) / nodes / machine.gpus if nodes > 1 else 0.0) / machine.outside
        return max(inside, outside) + sent["copies"] / machine.outside

    def seconds(self) -> float:
        """Of a pass, what is sent being hidden behind products and the reverse."""
        return max(self.compute() + self.dmc(), self.communication())

    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.ranks * self.rows * self.tokens / self.seconds()

    def days(self) -> float:
        return PAPER_STEPS * STEP_TOKENS / self.tokens_per_second() / 86400


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shapes_table() -> str:
    rows = []
    for shape in SHAPES:
        flops = [3 * shape.forward_flops(tokens) / 1e9 for tokens in (4096, 32768)]
        caches = [shape.cache_nbytes(32768) / GB / ratio for ratio in (1, 4)]
        rows.append(
            [shape.name, f"{shape.parameters / 1e9:.2f} B", f"{shape.multiplied / 1e9:.2f} B"]
            + [f"{x:.1f}" for x in flops]
            + [f"{x:.2f} GB" for x in caches]
        )
    heads = ["model", "parameters", "multiplied", "GFLOP a token, 4K", "32K", "cache, 32K", "at ratio 4"]
    return table(heads, rows)


MEMORY = {  # columns of the table: what Plan.memory counts
    "state": ("weights", "gradients", "Adam"),
    "layers": ("gathered", "kept", "layer"),
    "logits": ("logits",),
}


def memory_table() -> str:
    rows = []
    for shape in SHAPES:
        for ranks, tokens in ((8, 4096), (64, 4096), (64, 32768)):
            plan = Plan(shape, ranks, ranks, tokens)
            found = plan.memory()
            total = sum(found.values())
            shown = [sum(found[name] for name in names) for names in MEMORY.values()]
            rows.append(
                [shape.name, str(ranks), f"{plan.rows} x {tokens:,}"]
                + [f"{x / GB:.1f}" for x in (*shown, total)]
                + ["yes" if total < 0.9 * Machine.memory else "no"]
            )
    heads = ["model", "ranks", "rows", *MEMORY, "GB", "fits"]
    return table(heads, rows)


def throughput_table() -> str:
    rows = []
    for shape in SHAPES:
        for plan in (Plan(shape, ranks, ranks) for ranks in RANKS):
            fits = sum(plan.memory().values()) < 0.9 * Machine.memory
            products, sent = plan.compute() + plan.dmc(), plan.communication()
            rows.append(
                [shape.name, str(plan.ranks), f"{plan.passes} x {plan.rows}", f"{plan.compute():.2f}", f"{sent:.2f}"]
                + ([f"{plan.tokens_per_second() / plan.ranks:,.0f}", f"{plan.days():,.1f}"] if fits else ["", ""])
                + [("products" if products >= sent else "links") if fits else "memory"]
            )
    heads = ["model", "ranks", "passes x rows", "products s", "links s", "tokens/s a GPU", "days", "bound by"]
    return table(heads, rows)


TABLES = {"models": shapes_table, "memory": memory_table, "throughput": throughput_table}

if __name__ == "__main__":
    print("\n\n".join(f"{name}\n\n{make()}" for name, make in TABLES.items()))
