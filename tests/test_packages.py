"""The wheel: what it holds, that index servers take it, and the first ten minutes with it in a fresh environment."""

import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import torch

from tools.wheel import ROOT, built_wheel

# newest versions that manylinux_2_34 has (PEP 600, auditwheel's policy)
MANYLINUX_2_34 = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built_wheel(tmp_path_factory.mktemp("wheel"))


def test_wheel_is_whole_small_and_for_any_python_from_3_10_on(wheel):
    assert re.fullmatch(r"kvcompress-[\d.]+-cp310-abi3-linux_\w+\.whl", wheel.name)
    has_cuda = torch._C._dispatch_has_kernel_for_dispatch_key("kvcompress::rope", "CUDA")
    assert wheel.stat().st_size < (30e6 if has_cuda else 13e6)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        found = Parser().parsestr(archive.read(metadata).decode())
    shipped = {str(path.relative_to(ROOT)) for path in (ROOT / "kvcompress").rglob("*") if path.is_file()}
    assert names == {name for name in shipped if "__pycache__" not in name}
    assert {"train", "eval", "plots", "docs"} <= set(found.get_all("Provides-Extra"))
    assert {"LICENSE", "THIRD_PARTY.md"} == set(found.get_all("License-File"))
    for field in ("Summary", "Author", "Keywords", "License-Expression", "Requires-Python", "Classifier"):
        assert found[field], field


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_extension_asks_no_symbol_that_manylinux_2_34_lacks():
    printed = subprocess.run(
        ["readelf", "--version-info", ROOT / "kvcompress/_C.abi3.so"], check=True, capture_output=True, text=True
    ).stdout
    needed = re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", printed)
    assert needed
    for name, version in needed:
        assert tuple(map(int, version.split("."))) <= MANYLINUX_2_34[name], f"{name}_{version}"


@pytest.mark.release  # half a minute
def test_first_ten_minutes(wheel):
    """A fresh environment from the wheel, README in order, info, generate, needle, save and load, a notebook."""
    script = [sys.executable, str(ROOT / "tools/first_ten_minutes.py"), "--wheel", str(wheel)]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_sources_of_every_build_are_in_the_source_package():
    """MANIFEST.in names what setup.py compiles and includes; setuptools adds the package itself."""
    manifest = (ROOT / "MANIFEST.in").read_text()
    endings = {path.suffix for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    line = next(line for line in manifest.splitlines() if line.startswith("recursive-include csrc"))
    assert endings <= {pattern.lstrip("*") for pattern in line.split()[2:]}
    assert Path(ROOT / "THIRD_PARTY.md").is_file()
