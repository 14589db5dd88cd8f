"""The launchers' configurations that ship as examples mean what they say, to the launchers themselves."""

import os
import shlex
from pathlib import Path

import click
import pytest
import typer
from accelerate import ParallelismConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed import run as torchrun

from kvcompress.cli import app

FOLDER = Path(__file__).parents[1] / "examples" / "launch"
SIZES = {"ddp": (1, 8, None), "fsdp2": (1, 8, (1, 1)), "hsdp": (4, 32, (4, 8))}  # machines, processes, copies and parts


def check_command(parts):
    """Raises click's error for an option that `kvcompress` has not."""
    assert parts[:3] == ["kvcompress", "retrofit", "dmc"]
    command = typer.main.get_command(app)
    for name in parts[1:3]:
        command = command.commands[name]
    options = [part for part in parts[3:] if not part.startswith("#")]
    command.parse_args(click.Context(command), options)


@pytest.mark.parametrize("name", SIZES)
def test_accelerate_reads_its_configurations(name, monkeypatch):
    path = FOLDER / f"{name}.yaml"
    assert path in FOLDER.glob("*.yaml") and len(list(FOLDER.glob("*.yaml"))) == len(SIZES)
    machines, processes, sizes = SIZES[name]
    given = ["--config_file", str(path), "-m", "kvcompress", "retrofit", "dmc"]
    args = _validate_launch_command(launch_command_parser().parse_args(given))[0]
    assert (args.num_machines, args.num_processes) == (machines, processes)
    environment = prepare_multi_gpu_env(args)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert (os.environ.get("ACCELERATE_USE_FSDP") == "true") == (sizes is not None)
    if sizes is not None:
        plugin, parts = FullyShardedDataParallelPlugin(), ParallelismConfig()
        assert plugin.fsdp_version == 2 and not plugin.cpu_ram_efficient_loading
        assert "SHARDED" in str(plugin.state_dict_type) and plugin.auto_wrap_policy is not None
        assert (parts.dp_replicate_size, parts.dp_shard_size) == sizes
    comment = path.read_text().split("compute_environment")[0].replace("#", "").replace("\\\n", " ")
    line = next(line for line in comment.splitlines() if "accelerate launch" in line)
    words = shlex.split(line.replace("...", ""))
    launched = launch_command_parser().parse_args(words[2:])
    assert launched.module and launched.training_script == "kvcompress"
    check_command(["kvcompress", *launched.training_script_args])


def test_lines_of_torchrun_are_ones():
    text = (FOLDER / "README.md").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("torchrun")]
    assert len(lines) == 4
    for line in lines:
        args = torchrun.parse_args(shlex.split(line, comments=True)[1:])
        assert args.module and args.nproc_per_node in ("8", "2")
        check_command(["kvcompress", *args.training_script_args])
