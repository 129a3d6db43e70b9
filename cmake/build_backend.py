"""scikit-build-core's build back-end, with copies of two header libraries in source distributions.

Where {fmt} and nlohmann/json are not installed, a build takes these copies (cmake/third_party.cmake). They are those of
the machine that makes the source distribution, lie in third_party/ while it is made, and are never committed.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from scikit_build_core import build as _build
from scikit_build_core.build import (  # noqa: F401
    build_editable,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_HEADERS = {"fmt": "format.h", "nlohmann": "json.hpp"}


def _find(folder: str, header: str) -> pathlib.Path:
    given = os.environ.get("CPLUS_INCLUDE_PATH", "").split(os.pathsep)
    for place in [*given, "/usr/local/include", "/usr/include", "/opt/homebrew/include"]:
        found = pathlib.Path(place) / folder
        if place and (found / header).exists():
            return found
    raise FileNotFoundError(
        f"{folder}/{header}: not in CPLUS_INCLUDE_PATH, /usr/local/include or /usr/include; a source distribution holds "
        "a copy of it (on Debian: scripts/setup.sh installs it)"
    )


@contextmanager
def _copies() -> Iterator[None]:
    place = _ROOT / "third_party"
    if place.exists():  # this is a source distribution already
        yield
        return
    try:
        for folder, header in _HEADERS.items():
            shutil.copytree(_find(folder, header), place / "include" / folder)
        shutil.copy(_ROOT / "cmake" / "third_party_licenses.txt", place / "LICENSES.txt")
        yield
    finally:
        shutil.rmtree(place, ignore_errors=True)


def build_sdist(sdist_directory: str, config_settings: dict[str, list[str] | str] | None = None) -> str:
    with _copies():
        return _build.build_sdist(sdist_directory, config_settings)
