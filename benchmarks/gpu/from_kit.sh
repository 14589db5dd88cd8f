#!/bin/bash
# On a machine with a GPU, PyTorch and pytest, but without network: puts what build/gpu-kit has (make gpu-kit, on a
# machine with nvcc and network) in place and runs a command.
#
#     bash benchmarks/gpu/from_kit.sh python3 benchmarks/gpu/gpu_check.py --budget 540 --json FILE
set -e
cd "$(dirname "$0")/../.."
cp build/gpu-kit/_C.abi3.so kvcompress/
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
python3 -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --target "$packages" build/gpu-kit/*.whl
PYTHONPATH="$packages:$PWD" "$@"
