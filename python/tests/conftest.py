"""Test set-up: the package of this source tree, and the command line where it is built."""

import os
import pathlib
import shutil

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("UNIEP_BUILD", ROOT / "build" / "release"))


@pytest.fixture(scope="session")
def command() -> str:
    """The program `uniep` of the build."""
    found = BUILD / "uniep"
    if not found.exists():
        pytest.skip(f"{found} is not built")
    return str(found)


@pytest.fixture
def scratch(tmp_path: pathlib.Path):
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)
