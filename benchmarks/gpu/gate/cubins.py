"""csrc/cuda/*.cu as they are in the built extension, else compiled as setup.py does, and what cuobjdump says of them.
Needs nvcc, but no GPU."""

from __future__ import annotations

import ast
import atexit
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .launches import plain_name
from .sass import Facts, facts

ROOT = Path(__file__).parents[3]
BUILD = ROOT / "build" / "gpu_static"
RESERVED = {"sm_90": 1024}  # the driver's share of a block's memory, which cuobjdump counts in kernels that use any


@dataclass(frozen=True)
class Kernel:
    """registers: of a thread. shared: static bytes. bound: most threads of a block."""

    name: str
    file: str
    registers: int
    shared: int
    bound: int
    facts: Facts


@cache
def nvcc() -> Path | None:
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    found = [Path(home) / "bin" / "nvcc" for home in homes if home]
    on_path = shutil.which("nvcc")
    return next((path for path in found if path.exists()), Path(on_path) if on_path else None)


def toolkit_headers() -> list[Path]:
    """Folders that may hold cuda_occupancy.h: nvcc says where its toolkit is."""
    said = subprocess.run([str(nvcc()), "--dryrun", "-c", "x.cu"], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.*)$", said, re.MULTILINE)
    return [Path(top[1]) / "include"] if top else []


def _setting(name: str) -> list[str]:
    """A list that setup.py is given by one literal, read from it so that there is no second one to go stale."""
    for statement in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == name:
            return ast.literal_eval(statement.value)
    raise RuntimeError(f"setup.py no longer defines {name} by a literal")


def shipped_for(device: str) -> str:
    """The target among those of setup.py whose code that device runs: the newest of its major version up to its own."""
    targets = [arch.partition("+")[0].replace(".", "") for arch in _setting("CUDA_ARCHS")]
    own = int(device.removeprefix("sm_"))
    fitting = [int(target) for target in targets if int(target) // 10 == own // 10 and int(target) <= own]
    if not fitting:
        raise RuntimeError(f"setup.py builds no code for {device}, only for {', '.join(targets)}")
    return f"sm_{max(fitting)}"


@cache
def _version() -> bytes:
    return subprocess.run([str(nvcc()), "--version"], capture_output=True, check=True).stdout


def release() -> str:
    """Of nvcc: what it compiles to may change with the next one."""
    found = re.search(rb"V([0-9.]+)", _version())
    return found[1].decode() if found else "unknown"


def _sources(path: Path, found: dict[Path, bytes]) -> dict[Path, bytes]:
    """The file and, by their quoted names, those of ours that it includes."""
    if path not in found:
        found[path] = path.read_bytes()
        for name in re.findall(rb'^#include "(.+?)"', found[path], re.MULTILINE):
            beside, above = path.parent / name.decode(), ROOT / "csrc" / name.decode()
            _sources((beside if beside.exists() else above).resolve(), found)
    return found


@cache
def shipped(target: str) -> dict[Path, Path]:
    """Cubins of all sources in the extension beside this file, where that is newer than they; nothing where it is not,
    or holds no code for the target. The linker has put them one after the other, as setup.py sorts its sources."""
    extension, sources = ROOT / "kvcompress" / "_C.abi3.so", sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    written = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()] + [ROOT / "setup.py"]
    if not extension.exists() or extension.stat().st_mtime < max(path.stat().st_mtime for path in written):
        return {}
    BUILD.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=BUILD))
    command = [_tool("cuobjdump"), "-xelf", target, str(extension)]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    found = sorted(folder.glob(f"*.{target}.cubin"), key=lambda path: int(path.name.split(".")[-3]))
    atexit.register(shutil.rmtree, folder, True)
    return dict(zip(sources, found, strict=True)) if len(found) == len(sources) else {}


def compiled(source: Path, target: str) -> Path:
    """The cubin: that of the extension, or made unless the same content was compiled before."""
    if source.resolve() in (there := shipped(target)):
        return there[source.resolve()]
    flags = [*_setting("CUDA_FLAGS"), f"-arch={target}", "-I", str(ROOT / "csrc")]
    content = [_version(), " ".join(flags).encode(), *_sources(source.resolve(), {}).values()]
    key = hashlib.sha256(b"\0".join(content)).hexdigest()[:16]
    cubin = BUILD / f"{source.stem}.{target}.{key}.cubin"
    if not cubin.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        for old in BUILD.glob(f"{source.stem}.{target}.*.cubin"):
            old.unlink(missing_ok=True)
        fresh = cubin.with_suffix(f".{os.getpid()}")
        command = [str(nvcc()), "-cubin", *flags, "-o", str(fresh), str(source)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
        fresh.replace(cubin)
    return cubin


def _tool(name: str) -> str:
    """A tool of the wheels nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm, or of the toolkit."""
    for folder in [*(Path(path) / "nvidia" for path in sys.path), *([nvcc().parent.parent] if nvcc() else [])]:
        found = sorted(folder.glob(f"*/bin/{name}")) + sorted(folder.glob(f"bin/{name}"))
        if found:
            return str(found[-1])
    on_path = shutil.which(name)
    if on_path is None:
        raise RuntimeError(f"{name} was not found: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    return on_path


def _dump(cubin: Path, option: str) -> str:
    path = os.pathsep.join([str(Path(_tool("nvdisasm")).parent), os.environ.get("PATH", "")])
    command = [_tool("cuobjdump"), option, str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PATH": path}).stdout


def _demangled(names: Iterable[str]) -> dict[str, str]:
    names = list(names)
    found = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return dict(zip(names, map(plain_name, found.splitlines()), strict=True))


def kernels_of(source: Path, target: str) -> Iterator[Kernel]:
    cubin = compiled(source, target)
    usage = re.findall(r"Function (\S+):\n\s+REG:(\d+).* SHARED:(\d+)", _dump(cubin, "-res-usage"))
    sections = re.split(r"^\.nv\.info\.", _dump(cubin, "-elf"), flags=re.MULTILINE)[1:]
    bounds = {}
    for section in sections:
        bound = re.search(r"EIATTR_MAX_THREADS\s+Format:\s+EIFMT_SVAL\s+Value:\s+0x([0-9a-f]+)", section)
        bounds[section.split()[0]] = int(bound[1], 16) if bound else 1024
    parts = re.split(r"^\s+Function : ", _dump(cubin, "-sass"), flags=re.MULTILINE)[1:]
    listings = dict(part.split("\n", 1) for part in parts)
    names = _demangled(name for name, _, _ in usage)
    for name, registers, shared in usage:
        static = max(0, int(shared) - RESERVED.get(target, 0))
        yield Kernel(names[name], source.stem, int(registers), static, bounds[name], facts(listings[name]))


@cache
def all_kernels(sources: tuple[Path, ...], target: str, jobs: int) -> list[Kernel]:
    """The kernels of these files. RuntimeError if two bear one name: launches are told apart by names alone."""
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda source: compiled(source, target), sources))
    kernels = [kernel for source in sources for kernel in kernels_of(source, target)]
    files: dict[str, str] = {}
    for kernel in kernels:
        if kernel.name in files:
            raise RuntimeError(f"{kernel.name} is in {files[kernel.name]}.cu and in {kernel.file}.cu: rename one")
        files[kernel.name] = kernel.file
    return kernels
