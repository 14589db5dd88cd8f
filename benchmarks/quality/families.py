"""Every decoder family of transformers, tiny and random, through caches that hold everything: equal to the dense model?

    python benchmarks/quality/families.py [--quick] [--json FILE] [names ...]

Rows family/<configuration>: right (true, false, null = refused, or no answer to compare with), worst (largest
difference relative to the largest logit), reason. Names choose configurations, with * for any letters: 'qwen*'.
"""

from __future__ import annotations

import sys
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import transformers

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.common import parse_arguments, parser, print_table, write_json
from benchmarks.quality.parts.families_checks import Result, check
from benchmarks.quality.parts.families_configurations import CONFIGURATIONS, QUICK
from benchmarks.quality.parts.families_images import check_images

SIZES = {"full": list(CONFIGURATIONS), "quick": QUICK, "tiny": ["llama", "gemma3_text/sliding"]}
OUTCOMES = ("right", "refused", "wrong", "no answer")


def show(results: list[Result]) -> None:
    lines = []
    for result in results:
        worst = "" if result.worst is None else f"{result.worst:.0e}"
        said = "; ".join([result.reason, *result.notes] if result.reason else result.notes)
        lines.append((result.name, result.outcome, worst, said if len(said) <= 300 else said[:299] + "…"))
    counts = Counter(result.outcome for result in results)
    title = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
    print_table(title, ("configuration", "outcome", "worst", "reason"), lines,
                left=("configuration", "outcome", "reason"))  # fmt: skip


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("names", nargs="*", help="configurations; all of them if none is given")
    choice = parse_arguments(arguments)
    names = SIZES[choice.size]
    if choice.names:
        names = [name for name in CONFIGURATIONS if any(fnmatchcase(name, given) for given in choice.names)]
        if not names:
            arguments.error(f"no configuration is called {' or '.join(choice.names)}")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    results: list[Result] = []
    for name in names:
        one = CONFIGURATIONS[name]
        results.append(check_images(one) if one.images else check(one))
        print(f"{len(results)}/{len(names)} {name}: {results[-1].outcome}", file=sys.stderr, flush=True)
    show(results)
    if choice.json is not None:
        write_json(choice.json, [result.row() for result in results])
    return 1 if any(result.outcome == "wrong" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
