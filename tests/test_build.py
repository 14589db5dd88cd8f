"""The extension file itself: what it needs from outside, and that it loads anywhere."""

import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from setuptools import Distribution

import kvcompress
from kvcompress import _C, public
from kvcompress.support import versions
from kvcompress.support.homes import hint_of
from kvcompress.support.kvpress_names import ELSEWHERE
from kvcompress.support.versions import NEEDED, check_serving, check_versions

LIBRARY = Path(_C.__file__)


def test_file_is_for_any_python_from_3_10_on():
    assert LIBRARY.name == "_C.abi3.so"


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_no_symbol_is_needed_but_the_stable_interface_and_the_c_libraries():
    printed = subprocess.run(["nm", "-D", "--undefined-only", LIBRARY], check=True, capture_output=True, text=True)
    needed = {}
    for line in printed.stdout.splitlines():
        kind, symbol = line.split()[-2:]
        needed[symbol] = kind
    allowed = re.compile(
        r"^(aoti_torch_|torch_|stableivalue)\w+$"  # libtorch's stable C interface
        r"|^(Py|_Py)\w+$"  # CPython's limited interface
        r"|@(GLIBC|GLIBCXX|CXXABI|GCC)_[\w.]+$"  # libc, libm, libstdc++, libgcc
        r"|^(_ITM_\w+|__gmon_start__|__cxa_finalize.*)$"  # optional hooks of the linker
    )
    foreign = sorted(symbol for symbol in needed if not allowed.search(symbol))
    assert not foreign
    # a CPU build of Torch has no such symbol: it may be asked for only weakly
    assert needed.get("aoti_torch_get_current_cuda_stream", "w") == "w"


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_only_libtorch_and_the_c_libraries_are_linked():
    printed = subprocess.run(["readelf", "-d", LIBRARY], check=True, capture_output=True, text=True)
    libraries = set(re.findall(r"NEEDED.*\[(.+?)\.so", printed.stdout))
    assert libraries <= {"libtorch", "libtorch_cpu", "libc", "libm", "libstdc++", "libgcc_s", "libpthread", "libdl",
                         "librt", "ld-linux-x86-64", "ld-linux-aarch64"}  # fmt: skip


def test_a_source_tree_without_the_extension_says_what_to_do(tmp_path):
    source = Path(kvcompress.__file__).parent
    # an editable install would find the extension of its own tree for this one
    without_editable = "import sys; sys.meta_path = [x for x in sys.meta_path if 'editable' not in x.__module__]; "
    shutil.copytree(source, tmp_path / "kvcompress", ignore=shutil.ignore_patterns("*.so", "*.safetensors"))
    tried = subprocess.run(
        [sys.executable, "-c", without_editable + "from kvcompress import read"],
        cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    last = tried.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: kvcompress was imported from") and str(tmp_path) in last
    assert "not built" in last and "pip install --no-build-isolation -e ." in last

    (tmp_path / "kvcompress" / LIBRARY.name).write_bytes(b"no library")
    tried = subprocess.run(tried.args, cwd=tmp_path, capture_output=True, text=True)
    assert "not built" not in tried.stderr and LIBRARY.name in tried.stderr.strip().splitlines()[-1]


def of_setup(name, monkeypatch):
    """A name of setup.py, which builds nothing."""
    with monkeypatch.context() as patch:
        patch.setattr("setuptools.setup", lambda **options: None)
        return runpy.run_path(str(Path(__file__).parents[1] / "setup.py"))[name]


def test_a_build_leaves_who_has_loaded_the_file_before_alone(tmp_path, monkeypatch):
    new, loaded = tmp_path / "new.so", tmp_path / "_C.abi3.so"
    new.write_bytes(b"new")
    loaded.write_bytes(b"old")
    with loaded.open("rb") as held:
        (tmp_path / "_C.abi3.so.new").write_bytes(b"ha")  # of a copy that was cut off, later than the new library
        command = of_setup("BuildNative", monkeypatch)(Distribution())
        seen = []
        monkeypatch.setattr(os, "replace", lambda a, b: (seen.append(loaded.read_bytes()), os.rename(a, b)))
        assert command.copy_file(str(new), str(loaded))[0] == str(loaded)
        assert held.read() == b"old"
    assert seen == [b"old"] and loaded.read_bytes() == b"new"  # whole at any time
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_C.abi3.so", "new.so"]


@pytest.mark.parametrize(("torch_has", "stops"), [("13.0", True), ("12.1", False), (None, False)])
def test_a_toolkit_of_another_major_version_than_torchs_stops_the_build(torch_has, stops, tmp_path, monkeypatch):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(torch.version, "cuda", torch_has)
    check_cuda = of_setup("check_cuda", monkeypatch)
    with pytest.raises(SystemExit, match=r"nvcc in .* is of CUDA 12, .* CUDA 13\.0") if stops else nullcontext():
        check_cuda(tmp_path)


KNOWN = "sm_80 sm_90 sm_100 sm_103 sm_120"


def nvcc_that_knows(known, tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\n[ $1 = --list-gpu-code ] && printf '%s\\n' {known}\n")
    nvcc.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(("known", "newer"), [(KNOWN, 2), ("sm_80 sm_90 sm_100a", 0)])
def test_blackwell_has_machine_code_where_nvcc_knows_it_and_ptx_elsewhere(known, newer, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    targets = of_setup("targets_of", monkeypatch)(nvcc_that_knows(known, tmp_path))
    assert {"arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90"} < set(targets)
    assert [target for target in targets if "code=compute_" in target] == ["arch=compute_90,code=compute_90"]
    blackwell = ["arch=compute_100,code=sm_100", "arch=compute_120,code=sm_120"]
    assert [target for target in targets if target in blackwell] == blackwell[:newer]


def test_a_list_of_architectures_is_all_that_is_compiled_for(tmp_path, monkeypatch):
    home, targets_of = nvcc_that_knows(KNOWN, tmp_path), of_setup("targets_of", monkeypatch)
    for wish in ("8.0;12.0+PTX", "8.0 12.0+PTX"):
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wish)
        found = [target.split("code=")[1] for target in targets_of(home)]
        assert found == ["sm_80", "sm_120", "compute_120"]
    for wish in ("7.5", "9", "11.0", "Hopper", "9.0+ptx"):
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wish)
        with pytest.raises(SystemExit, match=f"TORCH_CUDA_ARCH_LIST must be .*, got '{re.escape(wish)}'"):
            targets_of(home)


def test_imports_without_a_gpu_in_a_fresh_process():
    code = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''; import kvcompress; print(kvcompress.ops.simd())"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert printed.stdout.strip() in ("portable", "avx2", "avx512", "avx512_bf16")


def start(**environment: str) -> subprocess.CompletedProcess[str]:
    code = "import kvcompress; print(kvcompress.ops.simd())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment)


def test_kvc_simd_chooses_the_inner_loops_of_a_process():
    assert start(KVC_SIMD="portable").stdout.strip() == "portable"


def test_kvc_simd_with_another_name_is_refused():
    assert "KVC_SIMD must name inner loops" in start(KVC_SIMD="sse9").stderr


def test_an_unknown_table_is_refused():
    with pytest.raises(RuntimeError, match="no such table"):
        kvcompress.ops.simd("sse9")


def test_a_tensor_of_another_device_is_refused():
    with pytest.raises(ValueError, match="cos must be on meta, got cpu"):
        kvcompress.ops.rope(torch.empty(1, 1, 2, 16, device="meta"), torch.ones(2, 8), torch.ones(2, 8))


def test_help_waits_for_no_library():
    code = (
        "import sys; from kvcompress.cli import app; print(*{'torch', 'transformers', 'numpy'} & set(sys.modules), '-')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "-\n"


@pytest.mark.parametrize(
    ("package", "found", "needed", "bounds"),
    [
        ("transformers", "4.57.6", "5.5 or newer, and older than 5.25,", ">=5.5,<5.25"),
        ("transformers", "5.4.0", "5.5 or newer, and older than 5.25,", ">=5.5,<5.25"),
        ("transformers", "5.25.0", "5.5 or newer, and older than 5.25,", ">=5.5,<5.25"),
        ("torch", "2.9.1+cpu", "2.11 or newer", ">=2.11"),
    ],
)
def test_a_package_of_another_version_is_named_when_kvcompress_is_imported(package, found, needed, bounds):
    code = (
        "import importlib.metadata as metadata; version = metadata.version\n"
        f"metadata.version = lambda name: {found!r} if name == {package!r} else version(name)\nimport kvcompress"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    said = f"ImportError: {package} must be {needed} for kvcompress, got {found}: pip install '{package}{bounds}'"
    assert done.stderr.splitlines()[-1] == said


def test_versions_are_those_that_the_package_asks_for(monkeypatch):
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    for package, (oldest, before) in NEEDED.items():
        end = "" if before is None else ",<{}.{}".format(*before)
        assert f'"{package}>={oldest[0]}.{oldest[1]}{end}"' in project
    taken = {"torch": "2.100.0"}, {"torch": "3.0"}, {"transformers": "5.5.0.dev0"}, {"transformers": "5.24.9"}, {}
    for found in taken:
        monkeypatch.setattr(versions, "version", lambda name, found=found: found.get(name, "unknown"))
        check_versions()


def test_serving_names_the_version_that_its_batching_is_of():
    check_serving("5.18.0")
    check_serving("5.24.0.dev0")
    said = r"transformers must be 5\.18 or newer for kvcompress\.serve, got 5\.17\.0$"
    with pytest.raises(ImportError, match=said):
        check_serving("5.17.0")


def test_no_module_hides_a_public_name():
    folder = Path(kvcompress.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert not modules & {*kvcompress.__all__}
    assert {*dir(kvcompress)} == {*kvcompress.__all__, "__all__", "__doc__", "__version__"}
    with pytest.raises(AttributeError, match=r"module 'kvcompress' has no attribute 'nothing'$"):
        _ = kvcompress.nothing


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("H2O", "H2O is in kvcompress.pruners: from kvcompress.pruners import H2O"),
        ("measure_heads", "measure_heads is in kvcompress.analysis: from kvcompress.analysis import measure_heads"),
        ("SnapKVPress", "SnapKVPress of kvpress is SnapKV here: from kvcompress import SnapKV"),
        ("KnormPress", "KnormPress of kvpress is KeyNorm here: from kvcompress.pruners import KeyNorm"),
        ("KvZip", "KvZip is KVzip here: from kvcompress import KVzip"),
        (
            "KVPressTextGenerationPipeline",
            "KVPressTextGenerationPipeline is kvpress's; docs/kvpress.md says what does its work here",
        ),
        ("ComposedPress", "ComposedPress is kvpress's; docs/kvpress.md says what does its work here"),
        ("SomePress", "SomePress has no counterpart here; docs/kvpress.md lists the presses that have one"),
    ],
)
def test_a_name_that_is_elsewhere_is_said_to_be_there(name, said):
    with pytest.raises(AttributeError, match=f"^{re.escape(said)}$"):
        getattr(kvcompress, name)
    with pytest.raises(ImportError, match=f"^{re.escape(said)}$"):
        exec(f"from kvcompress import {name}")
    assert not hasattr(kvcompress, name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("SnapKVPress", "SnapKVPress of kvpress is SnapKV here: from kvcompress import SnapKV"),
        ("AdaKVPress", "AdaKVPress of kvpress is AdaKV here: from kvcompress import AdaKV"),
        ("Profiled", "Profiled is in kvcompress.profiles: from kvcompress.profiles import Profiled"),
        ("SomePress", "SomePress has no counterpart here; docs/kvpress.md lists the presses that have one"),
    ],
)
@pytest.mark.parametrize("module", ["budgets", "caches", "pruners"])
def test_a_name_that_a_module_has_not_is_said_to_be_elsewhere(module, name, said):
    with pytest.raises(AttributeError, match=f"^{re.escape(said)}$"):
        getattr(getattr(kvcompress, module), name)
    with pytest.raises(ImportError, match=f"^{re.escape(said)}$"):
        exec(f"from kvcompress.{module} import {name}")
    with pytest.raises(ImportError, match=rf"^cannot import name 'nothing' from 'kvcompress.{module}' "):
        exec(f"from kvcompress.{module} import nothing")


def test_of_the_presses_in_the_tables_all_are_said_to_be_here():
    """And of those alone."""
    path = Path(__file__).parents[1] / "docs/kvpress.md"
    rows = [line.split("|")[1] for line in path.read_text().splitlines() if line.startswith("| `")]
    pressed = {name for row in rows for name in re.findall(r"\w+Press\b", row)}
    said = {name: hint_of(name) for name in pressed}
    assert len(pressed) > 20 and not [name for name in pressed if "no counterpart" in said[name]]
    elsewhere = {name for name in pressed if "docs/kvpress.md says" in said[name]}
    assert elsewhere == set(ELSEWHERE)


def test_a_name_that_is_nowhere_is_not_there_as_in_any_module():
    with pytest.raises(ImportError, match=r"^cannot import name 'nothing' from 'kvcompress' "):
        exec("from kvcompress import nothing")


def test_every_module_says_which_names_it_has():
    for module in public.MODULES:
        found = importlib.import_module(f"kvcompress.{module}")
        assert all(hasattr(found, name) for name in found.__all__)
