"""The package without torch, its version and its library."""

import ctypes
import pathlib
import re
import subprocess
import sys

import pytest

import uniep

ROOT = pathlib.Path(__file__).resolve().parents[2]
NO_TORCH = "import sys; sys.modules['torch'] = None\n"


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    import os

    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


PYTHON_M_UNIEP = "import runpy; runpy.run_module('uniep', run_name='__main__')"


@pytest.mark.parametrize("shows", ["import uniep; uniep.show_config()", PYTHON_M_UNIEP])
def test_import_needs_no_torch(shows):
    done = run_python(NO_TORCH + shows)
    assert done.returncode == 0, done.stderr
    assert "not installed; Group, moe and the modules need it: pip install 'uniep[torch]'" in done.stdout
    assert "libuniep.so" in done.stdout


@pytest.mark.parametrize("name", ["Group", "moe", "Experts", "MoELayer", "place", "dispatch", "combine"])
def test_what_needs_torch_says_so(name):
    done = run_python(NO_TORCH + f"import uniep; uniep.{name}")
    assert done.returncode != 0
    assert f"ImportError: uniep.{name} needs torch, which is not installed" in done.stderr


def test_import_loads_neither_torch_nor_the_library():
    done = run_python("import sys, uniep; print('torch' in sys.modules, 'uniep.library' in sys.modules)")
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_version_is_the_headers():
    header = (ROOT / "include" / "uniep" / "version.h").read_text()
    assert uniep.__version__ == re.search(r'UNIEP_VERSION_STRING "(.*)"', header)[1]


def test_unknown_names():
    with pytest.raises(AttributeError, match="no attribute 'mo'"):
        uniep.mo  # noqa: B018
    assert set(uniep.__all__) <= set(dir(uniep))


def test_missing_library_is_named():
    code = "import uniep.library; uniep.library.load()"
    done = run_python(code, UNIEP_LIBRARY="/nowhere/libuniep.so")
    assert "ImportError: UNIEP_LIBRARY or the package's library can not be opened: /nowhere/libuniep.so" in done.stderr


def test_other_version_is_refused():
    code = "import uniep; uniep.__version__ = '0.0.9'; import uniep.library; uniep.library.load()"
    assert "is version 0.1.0; the package is 0.0.9" in run_python(code).stderr


def test_structures_are_the_headers():
    """Names and order of all fields, as the headers for C have them."""
    from uniep import library

    headers = "".join(header.read_text() for header in (ROOT / "include" / "uniep").glob("c_*.h"))
    text = re.sub(r"/\*.*?\*/", "", headers, flags=re.DOTALL)
    found = {}
    for body, name in re.findall(r"typedef struct uniep_\w+ \{(.*?)\} uniep_(\w+);", text, flags=re.DOTALL):
        fields = re.findall(r"(?:\(\*(\w+)\)\([^;]*\)|(\w+));", body)
        found["".join(part.title() for part in name.split("_"))] = [a or b for a, b in fields]
    ours = {
        name: [field for field, _ in value._fields_]
        for name, value in vars(library).items()
        if isinstance(value, type) and issubclass(value, ctypes.Structure) and hasattr(value, "_fields_")
    }
    assert {"Weights", "WeightGradients", "CallerMemory", "TunerOptions"} <= set(ours)
    for name, fields in ours.items():
        assert fields == found[name], name


def test_what_is_shown_of_frameworks_and_the_environment(monkeypatch):
    from uniep import show

    for name in ("UNIEP_CACHE_DIR", "NCCL_MAX_CTAS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    monkeypatch.setattr("importlib.metadata.version", {"torchtitan": "0.3.0", "megatron-core": "0.19.2"}.get)
    shown = show.describe()
    assert "megatron-core 0.19.2" in shown["adapters"] and "torchtitan 0.3.0" in shown["adapters"]
    assert shown["cache"] == "/scratch/uniep" and "NCCL_" not in shown["variables"]
    monkeypatch.setenv("UNIEP_CACHE_DIR", "/own")
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    shown = show.describe()
    assert shown["cache"] == "/own" and "NCCL_MAX_CTAS=8, " in shown["variables"]


def test_no_frameworks_are_installed(monkeypatch):
    import importlib.metadata

    from uniep import show

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    assert show.describe()["adapters"].startswith("none of megatron-core, transformer-engine")
