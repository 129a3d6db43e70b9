"""Which files the library opens as NCCL and NVRTC."""

import logging
import shutil
import subprocess
import sys

import pytest
import torch

from uniep import cuda_libraries, library


@pytest.fixture
def wheels(scratch, monkeypatch):
    """A folder as pip makes it of NVIDIA's wheels; every file is a copy of the C library's mathematics."""
    for name in ("cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13"):
        file = scratch / "nvidia" / name
        file.parent.mkdir(parents=True)
        shutil.copy(cuda_libraries.loaded("libm.so.6"), file)
    (scratch / "nvidia" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(scratch))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.setattr(cuda_libraries, "_MAPS", scratch / "no_library_is_loaded")
    return scratch / "nvidia"


def test_a_loaded_library_is_found_by_its_name():
    assert cuda_libraries.loaded("libuniep.so") is None or library.path().exists()
    library.load()
    found = cuda_libraries.loaded("libuniep.so")
    assert found is not None
    assert library.path().resolve().samefile(found)
    assert cuda_libraries.loaded("libuniep_is_not_here.so") is None
    assert cuda_libraries.loaded("libuniep.s") is None


@pytest.mark.parametrize(
    ("cuda", "file"), [("12.8", "cuda_nvrtc/lib/libnvrtc.so.12"), ("13.0", "cu13/lib/libnvrtc.so.13")]
)
def test_nvrtc_is_that_of_torchs_cuda(wheels, monkeypatch, cuda, file):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert cuda_libraries.nvrtc() == str(wheels / file)
    assert f"unknown: {wheels / file}: undefined symbol: nvrtcVersion" in cuda_libraries.describe("nvrtc")
    assert str(wheels / file) in cuda_libraries.describe("nvrtc")


def test_without_cuda_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("UNIEP_LIBNVRTC", raising=False)
    assert cuda_libraries.nvrtc() is None
    assert "UNIEP_LIBNVRTC" in cuda_libraries.describe("nvrtc")


def test_the_library_is_told(monkeypatch, caplog):
    """Once a process; what the environment names is left alone, and what comes too late is a warning."""
    told = []

    class Library:
        def uniep_use_library(self, name, path):
            told.append((name, path))
            return 1 if path == b"/late" else 0

        def uniep_last_error(self):
            return b"path: '/late' for nvrtc, which is in use"

    monkeypatch.setattr(library, "load", Library)
    monkeypatch.setattr(cuda_libraries, "nccl", lambda: "/nccl")
    monkeypatch.setattr(cuda_libraries, "nvrtc", lambda: "/late")
    monkeypatch.delenv("UNIEP_LIBNCCL", raising=False)
    monkeypatch.delenv("UNIEP_LIBNVRTC", raising=False)
    use = cuda_libraries.use_torchs.__wrapped__
    with caplog.at_level(logging.WARNING, "uniep"):
        use()
    assert told == [(b"nccl", b"/nccl"), (b"nvrtc", b"/late")]
    assert "in use" in caplog.text
    told.clear()
    monkeypatch.setenv("UNIEP_LIBNCCL", "/other")
    monkeypatch.setenv("UNIEP_LIBNVRTC", "/other")
    use()
    assert told == []
    assert "/other" in cuda_libraries.describe("nccl")


def test_names_are_checked():
    """In a process of its own, since a choice is of the whole process."""
    code = (
        "from uniep import library\n"
        "uniep = library.load()\n"
        "library.check(uniep.uniep_use_library(b'nccl', b'/a'))\n"
        "library.check(uniep.uniep_use_library(b'nccl', b'/b'))\n"
        "try:\n    library.check(uniep.uniep_use_library(b'nvcc', b'/b'))\n"
        "except ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "library: 'nvcc'; legal are nccl and nvrtc" in done.stdout


def test_show_config_names_both(capsys):
    import uniep

    uniep.show_config()
    printed = capsys.readouterr().out
    assert "NCCL:" in printed
    assert "NVRTC:" in printed
    assert f"library:   {uniep.__version__} (" in printed
