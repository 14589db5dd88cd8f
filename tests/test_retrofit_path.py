"""The whole way, each part a process of its own: training under torchrun with FSDP2, then answers and an evaluation."""

import json
import os
import subprocess
import sys

import safetensors.torch

from kvcompress.retrofit import checkpoints

USE = """
import json, sys
import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
import kvcompress.lm_eval

folder, tasks = sys.argv[1:]
model = kvcompress.from_pretrained(folder)
prompt = torch.arange(32, 96)[None]
cache = kvcompress.DMCCache(model.config)
answers = [
    kvcompress.generate(model, prompt, cache, max_new_tokens=8, do_sample=False),
    model.generate(prompt, max_new_tokens=8, do_sample=False),
]
found = simple_evaluate(
    model="kvcompress", model_args=f"pretrained={folder},max_length=200", tasks=["choose"], device="cpu", batch_size=2,
    task_manager=TaskManager(include_path=tasks, include_defaults=False),
)
print(json.dumps({
    "same": torch.equal(*answers), "tokens": answers[0].shape[1], "ratio": cache.compression_ratio(),
    "accuracy": found["results"]["choose"]["acc,none"], "cache": found["config"]["cache"],
}))
"""


def python(*arguments):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_from_torchrun_to_an_evaluation(tmp_path):
    out = tmp_path / "small"
    python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "kvcompress", "retrofit", "dmc",
        "--out", out, "--shards", 2, "--target-ratio", 2, "--anneal-steps", 1, "--ramp-steps", 2, "--solidify-steps", 1,
        "--length", 128, "--rows", 1, "--save-steps", 4,
    )  # fmt: skip
    assert checkpoints.read_marker(out / "checkpoint-4")["run"] == {"ranks": 2, "sequences of a step": 2}
    assert len(list(out.glob("checkpoint-4/shard-*.safetensors"))) == 2
    assert "kvcompress" in json.loads((out / "config.json").read_text())
    whole = safetensors.torch.load_file(out / "model.safetensors")
    assert "lm_head.weight" not in whole  # it is the embedding
    assert whole["model.layers.0.self_attn.k_proj.weight"].shape == (128, 256)

    rows = [{"text": "a cat and a", "ends": [" cat", " dog"], "answer": n % 2} for n in range(4)]
    (tmp_path / "choose.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"data_files": {"test": str(tmp_path / "choose.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    (tmp_path / "choose.yaml").write_text(json.dumps({
        "task": "choose", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test",
        "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "ends", "doc_to_target": "answer",
    }))  # fmt: skip
    found = json.loads(python("-c", USE, out, tmp_path).splitlines()[-1])
    assert found["same"] and found["tokens"] == 64 + 8 and found["ratio"] >= 1
    assert found["accuracy"] == 0.5 and found["cache"] == "dmc"
