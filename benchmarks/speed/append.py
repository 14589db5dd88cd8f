"""Appending one token to every row of a layer, and forking a layer, against what a dense cache does.

    python benchmarks/speed/append.py [--quick] [--json FILE]

Shape of one layer of Llama-3-8B: Hkv 8, D 128, bfloat16. The peer of an append is torch.cat, as transformers'
DynamicCache grows; that of a fork is a copy of the keys and values. Bytes: what must move, new tokens in and out once.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.common import Row, alternate, options, report
from kvcompress.caches import PoolSettings
from kvcompress.caches.formats import keys_and_values
from kvcompress.caches.pool import PagePool

HKV, D, DTYPE = 8, 128, torch.bfloat16
SIZES = {  # repetitions, of a fork too, and lengths
    "full": (101, 9, (1024, 32768)),
    "quick": (31, 9, (1024, 32768)),
    "tiny": (1, 1, (64,)),
}


def main() -> None:
    choice = options(__doc__)
    repeats, forks, lengths = SIZES[choice.size]
    rows = []
    for B in (1, 8):
        for T in lengths:
            prompt, token = (torch.randn(B, HKV, length, D).to(DTYPE) for length in (T, 1))
            pool = PagePool(B * HKV, keys_and_values(D, DTYPE), torch.device("cpu"), PoolSettings())
            pool.append((prompt, prompt))
            pool.reserve([2 * repeats] * B * HKV)

            def append(pool=pool, token=token):
                pool.append((token, token))

            def cat(prompt=prompt, token=token):
                return [torch.cat([prompt, token], 2) for _ in "kv"]

            name = f"{str(DTYPE).removeprefix('torch.')}/B{B}/T{T}/Hkv{HKV}/D{D}"
            ours, peer = alternate(repeats, append, cat)
            rows.append(Row(f"append/{name}", ours, peer, "torch.cat", bytes=4 * token.nbytes))
            ours, peer = alternate(forks, pool.fork, lambda prompt=prompt: [prompt.clone() for _ in "kv"])
            rows.append(Row(f"fork/{name}", ours, peer, "copies", bytes=2 * pool.block_table.nbytes))
    report(rows, choice.json)


if __name__ == "__main__":
    main()
