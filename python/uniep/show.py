"""show_config(): versions and files of everything that takes part."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import sys

import uniep
from uniep import library


def show_config() -> None:
    """Prints versions and files of the package, the library, torch, CUDA, NCCL and the GPUs, what a Group would be, the
    versions of frameworks with an adapter, the cache's folder, and the variables UNIEP_... and NCCL_... that are set.

    Needs neither torch nor a GPU.
    """
    for name, text in describe().items():
        print(f"{name + ':':<11}{text}")


def describe() -> dict[str, str]:
    """What show_config() prints, by name."""
    lines = {"uniep": f"{uniep.__version__} ({', '.join(uniep.__path__)})", "library": _library()}
    lines["python"] = f"{platform.python_version()} ({sys.executable})"
    if importlib.util.find_spec("torch") is None:
        lines["torch"] = "not installed; Group, moe and the modules need it: pip install 'uniep[torch]'"
    else:
        lines |= _torch()
    return lines | {"adapters": _frameworks(), "cache": cache_folder(), "variables": _variables()}


_FRAMEWORKS = ("megatron-core", "transformer-engine", "torchtitan", "transformers")


def _frameworks() -> str:
    found = []
    for name in _FRAMEWORKS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:  # or a source tree on PYTHONPATH, whose version is unknown
            continue
    return ", ".join(found) or f"none of {', '.join(_FRAMEWORKS)} is installed"


def cache_folder() -> str:
    """Where compiled kernels and tuned schedules are kept."""
    named, shared = os.environ.get("UNIEP_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME", "")
    if named is not None:
        return named or "nowhere, since UNIEP_CACHE_DIR is empty"
    return str((pathlib.Path(shared) if shared.startswith("/") else pathlib.Path.home() / ".cache") / "uniep")


def _variables() -> str:
    found = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(("UNIEP_", "NCCL_"))]
    return ", ".join(found) or "none of UNIEP_... and NCCL_... is set"


def _library() -> str:
    try:
        loaded = library.load()
    except ImportError as error:
        return f"missing: {error}"
    return f"{loaded.uniep_version_string().decode()} ({library.path()})"


def _torch() -> dict[str, str]:
    import torch

    from uniep import cuda_libraries

    lines = {"torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"}
    lines |= {"NCCL": cuda_libraries.describe("nccl"), "NVRTC": cuda_libraries.describe("nvrtc")}
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        return lines | {"GPUs": "none", "engine": "cpu", "transport": "native alone, torch with more ranks"}
    names = [torch.cuda.get_device_name(gpu) for gpu in range(gpus)]
    lines["GPUs"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    hopper = all(torch.cuda.get_device_capability(gpu)[0] == 9 for gpu in range(gpus))
    lines["engine"] = "cuda" if hopper else "cpu; CUDA tensors need Hopper GPUs (compute capability 9.0)"
    lines["transport"] = (
        "native on one host, torch between hosts" if hopper else "on CPUs: native alone, torch with more ranks"
    )
    return lines
