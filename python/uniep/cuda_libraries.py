"""NCCL and NVRTC: the library uses the files that torch uses, so that a process has one of each."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import pathlib
import re

import torch

from uniep import library

_log = logging.getLogger("uniep")
_MAPS = pathlib.Path("/proc/self/maps")


def loaded(soname: str) -> str | None:
    """The file of a library that this process has loaded, by the beginning of its name; None where there is none."""
    if not _MAPS.exists():
        return None
    for line in _MAPS.read_text(errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and re.match(rf"{re.escape(soname)}(\.|$)", os.path.basename(fields[5])):
            return fields[5]
    return None


def nccl() -> str | None:
    """The NCCL that torch has loaded."""
    return loaded("libnccl.so.2")


def nvrtc() -> str | None:
    """The NVRTC of torch's major version of CUDA: one that is loaded, else that of the installed wheels."""
    if torch.version.cuda is None:
        return None
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    found = loaded(name)
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec and found is None else []:
        files = sorted(pathlib.Path(folder).glob(f"*/lib/{name}"))
        if files:
            return str(files[0])
    return found


@functools.cache
def use_torchs() -> None:
    """Tells the library of both, but for what UNIEP_LIBNCCL and UNIEP_LIBNVRTC name."""
    for name, file in (("nccl", nccl()), ("nvrtc", nvrtc())):
        if file is None or os.environ.get(f"UNIEP_LIB{name.upper()}"):
            continue
        try:
            library.check(library.load().uniep_use_library(name.encode(), os.fsencode(file)))
        except ValueError as error:  # another one is in use by now, and works
            _log.warning("%s", error)


def describe(name: str) -> str:
    """Version and file of "nccl" or "nvrtc", as a Group on a GPU will have it."""
    variable = f"UNIEP_LIB{name.upper()}"
    file = os.environ.get(variable) or {"nccl": nccl, "nvrtc": nvrtc}[name]()
    if file is None:
        return f"torch has none; found by its name, or by {variable}"
    return f"{_version(name, file)} ({file})"


def _version(name: str, file: str) -> str:
    try:
        opened = ctypes.CDLL(file)
        first, second = ctypes.c_int(), ctypes.c_int()
        if name == "nvrtc":
            opened.nvrtcVersion(ctypes.byref(first), ctypes.byref(second))
            return f"{first.value}.{second.value}"
        opened.ncclGetVersion(ctypes.byref(first))
    except (OSError, AttributeError) as error:
        return f"unknown: {error}"
    return f"{first.value // 10000}.{first.value // 100 % 100}.{first.value % 100}"
