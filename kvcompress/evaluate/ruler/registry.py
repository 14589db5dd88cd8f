"""The tasks by their names, with the settings of RULER's synthetic.yaml."""

from __future__ import annotations

from pathlib import Path

from .documents import Documents, read_hotpotqa, read_squad
from .needles import Needles
from .task import Task
from .variables import Variables
from .words import CommonWords, FrequentWords

MADE: dict[str, Task] = {  # of nothing but words and a text
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("text"),
    "niah_single_3": Needles("text", values="uuids"),
    "niah_multikey_1": Needles("text", num_keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("text", num_values=4),
    "niah_multiquery": Needles("text", num_queries=4),
    "vt": Variables(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
}
READ = {  # from files: the option that names one, and who reads it
    "qa_1": ("squad", read_squad, "SQuAD's dev-v2.0.json"),
    "qa_2": ("hotpotqa", read_hotpotqa, "HotpotQA's hotpot_dev_distractor_v1.json"),
}
NAMES = (*MADE, *READ)


def task_of(name: str, **files: Path | None) -> Task:
    """files: squad and hotpotqa, where there are. Raises ValueError for an unknown name, and for a task whose file is
    not given."""
    if name in MADE:
        return MADE[name]
    if name not in READ:
        raise ValueError(f"tasks must be among {', '.join(NAMES)}, got {name!r}")
    option, read, what = READ[name]
    path = files.get(option)
    if path is None:
        raise ValueError(f"{option} must be a file, {what}, for {name}, got none")
    return Documents(path, read)
