"""Builds kvcompress._C, one abi3 file: C11 kernels, C++20 bindings on PyTorch's stable ABI, CUDA kernels where nvcc is.

Environment: KVC_CUDA=auto|1|0 (CUDA kernels if nvcc is there | required | never), CUDA_HOME, TORCH_CUDA_ARCH_LIST (as
PyTorch's extensions have it, "8.0;9.0+PTX"; without it all that a wheel needs), MAX_JOBS, KVC_STRICT=1 (warnings are
errors, as in the tests), KVC_NATIVE=0 (kvcompress/_C.abi3.so is there already: nothing is compiled).
"""

import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

OLDEST_TORCH = (2, 11)
TORCH_TARGET = "0x{:02x}{:02x}{:012x}".format(*OLDEST_TORCH, 0)
STRICT = os.environ.get("KVC_STRICT") == "1"  # a compiler of tomorrow may warn of more
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", *(["-Werror"] if STRICT else [])]
C_FLAGS = ["-std=c11", "-O3", "-fvisibility=hidden", *WARNINGS, "-Wconversion", "-Wsign-conversion"]
CXX_FLAGS = ["-std=c++20", "-O2", "-fvisibility=hidden", *WARNINGS]
# One file per instruction set; which of them runs is decided at run time, so that a wheel works on every CPU.
SIMD_FLAGS = {
    "simd_avx2.c": ["-mavx2", "-mfma", "-mf16c"],
    "simd_avx512.c": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"],
}
CUDA_FLAGS = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
CUDA_FLAGS += ["-Werror", "all-warnings"] if STRICT else []
# Machine code, and PTX that the driver of any newer device compiles: that of compute_90, as PTX of compute_120 would
# serve no device of 10.x and 11.x. Blackwell (10.0, 12.0) where nvcc knows it.
CUDA_ARCHS = ["8.0", "9.0+PTX"]
NEWER_CUDA_ARCHS = ["10.0", "12.0"]


def find_cuda():
    """Root of the CUDA toolkit, or None."""
    wish = os.environ.get("KVC_CUDA", "auto")
    if wish not in ("auto", "0", "1"):
        raise SystemExit(f"KVC_CUDA must be auto, 0 or 1, got {wish!r}")
    if wish == "0":
        return None
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parent.parent, "/usr/local/cuda"]
    for home in homes:
        # the header too: an nvcc in PATH may be a wrapper that lives elsewhere
        if home and (Path(home) / "bin/nvcc").exists() and (Path(home) / "include/cuda_runtime.h").exists():
            return Path(home)
    if wish == "1":
        raise SystemExit("KVC_CUDA=1 but no nvcc was found in CUDA_HOME, PATH or /usr/local/cuda")
    return None


def release_of(cuda):
    """(major, minor) of a toolkit's nvcc; (0, 0) where it does not say so."""
    found = subprocess.run([str(cuda / "bin" / "nvcc"), "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", found)
    return (int(release[1]), int(release[2])) if release else (0, 0)


def targets_of(cuda):
    """What a toolkit's nvcc is asked to compile for."""
    command = [str(cuda / "bin" / "nvcc"), "--list-gpu-code"]
    known = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    wished = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    newer = [arch for arch in NEWER_CUDA_ARCHS if f"sm_{arch.replace('.', '')}" in known]
    targets = []
    for arch in wished or CUDA_ARCHS + newer:
        found = re.fullmatch(r"(\d+)\.(\d)(\+PTX)?", arch)
        number = found and found[1] + found[2]
        if not found or int(number) < 80 or f"sm_{number}" not in known:
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST must be of 8.0 or newer, of which nvcc knows {known}, got {arch!r}")
        targets.append(f"arch=compute_{number},code=sm_{number}")
        targets += [f"arch=compute_{number},code=compute_{number}"] if found[3] else []
    return targets


def check_cuda(cuda):
    """Stops if nvcc is of another major version than the CUDA that this PyTorch was built for, if for any."""
    import torch

    major, _ = release_of(cuda)
    if torch.version.cuda and major and str(major) != torch.version.cuda.split(".")[0]:
        raise SystemExit(
            f"nvcc in {cuda} is of CUDA {major}, but this PyTorch is built for CUDA {torch.version.cuda}: set "
            "CUDA_HOME to a toolkit of that major version, install a PyTorch for yours, or set KVC_CUDA=0"
        )


class BuildNative(build_ext):
    def copy_file(self, infile, outfile, *args, **options):
        """Into the source tree, under another name first: a process that starts meanwhile loads the old file or the new
        one, never a part of it, and one that runs keeps what it has loaded."""
        fresh = f"{outfile}.new"
        Path(fresh).unlink(missing_ok=True)  # of a copy that was cut off: distutils would take it for up to date
        _, copied = super().copy_file(infile, fresh, *args, **options)
        os.replace(fresh, outfile)
        return outfile, copied

    def build_extension(self, ext):
        from torch.utils.cpp_extension import include_paths, library_paths

        cuda = find_cuda()
        # Torch's headers as system headers: our warnings are about our code
        torch_includes = [option for path in include_paths() for option in ("-isystem", path)]
        ext.include_dirs.append("csrc")
        ext.library_dirs += library_paths()
        ext.define_macros += [("TORCH_TARGET_VERSION", TORCH_TARGET), ("Py_LIMITED_API", "0x030A0000")]
        # torch_cpu holds the registration symbols; keep it although no symbol of ours names it directly
        ext.extra_link_args += ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-Wl,--as-needed", "-Wl,-s"]
        if cuda:
            check_cuda(cuda)
            packed = ["--compress-mode=size"] if release_of(cuda) >= (12, 8) else []  # a quarter of the file
            targets = [option for target in targets_of(cuda) for option in ("-gencode", target)]
            ext.define_macros += [("KVC_WITH_CUDA", "1"), ("USE_CUDA", "1")]
            ext.include_dirs.append(str(cuda / "include"))
            ext.library_dirs.append(str(cuda / "lib64"))
            ext.extra_link_args += ["-lcudart_static", "-lrt", "-lpthread", "-ldl"]
            ext.extra_link_args += ["-Wl,--exclude-libs,libcudart_static.a"]
        else:
            ext.sources = [source for source in ext.sources if not source.endswith(".cu")]
        if platform.machine() not in ("x86_64", "AMD64"):
            SIMD_FLAGS.clear()  # the files are empty there

        compiler = self.compiler
        compiler.src_extensions.append(".cu")
        compile_one = compiler._compile

        def compile_by_language(obj, src, extension, cc_args, extra_args, pp_opts):
            if src.endswith(".cu"):
                includes = [option for option in pp_opts if option.startswith("-I")]
                self.spawn(
                    [str(cuda / "bin" / "nvcc"), "-c", src, "-o", obj, *CUDA_FLAGS, *packed, *targets, *includes]
                )
            elif src.endswith(".c"):
                flags = [*C_FLAGS, *SIMD_FLAGS.get(Path(src).name, [])]
                compile_one(obj, src, extension, cc_args, [*extra_args, *flags], pp_opts)
            else:
                compile_one(obj, src, extension, cc_args, [*extra_args, *torch_includes, *CXX_FLAGS], pp_opts)

        def compile_all(sources, output_dir=None, macros=None, include_dirs=None, debug=0, extra_preargs=None,
                        extra_postargs=None, depends=None):  # fmt: skip
            _, objects, extra, pp_opts, build = compiler._setup_compile(
                output_dir, macros, include_dirs, sources, depends, extra_postargs
            )
            cc_args = compiler._get_cc_args(pp_opts, debug, extra_preargs)
            # .cu files take longest: start them first
            order = sorted(objects, key=lambda obj: not build[obj][0].endswith(".cu"))
            with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
                jobs = [pool.submit(compile_by_language, obj, *build[obj], cc_args, extra, pp_opts) for obj in order]
                for job in jobs:
                    job.result()
            return objects

        compiler.compile = compile_all
        super().build_extension(ext)


NATIVE = Extension(
    "kvcompress._C",
    py_limited_api=True,
    language="c++",
    sources=sorted(glob("csrc/*.c") + glob("csrc/torch/*.c*") + glob("csrc/cuda/*.cu")),
    depends=sorted(glob("csrc/**/*.h", recursive=True) + glob("csrc/**/*.cuh", recursive=True)),
)

setup(
    ext_modules=[] if os.environ.get("KVC_NATIVE") == "0" else [NATIVE],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
