"""Whether the machine's driver serves the CUDA runtime that the extension was built with. Asking starts no CUDA."""

from __future__ import annotations

from .native import native


def cuda_versions() -> tuple[str | None, str | None]:
    """Of the runtime that is linked into the extension, and the newest that the driver serves; as "13.0", None where
    there is none."""
    numbers = (native.cuda_version(of_driver) for of_driver in (False, True))
    runtime, driver = (f"{number // 1000}.{number % 1000 // 10}" if number else None for number in numbers)
    return runtime, driver


def driver_fault() -> str | None:
    """Why the CUDA kernels cannot run with this driver, and what to do; None if they can, or if there is no driver."""
    return native.cuda_fault() or None


def check_driver() -> None:
    """Raises RuntimeError for a driver that is too old. Every op says the same once it has failed."""
    if (fault := driver_fault()) is not None:
        raise RuntimeError(fault)
