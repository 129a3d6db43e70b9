"""UNIEP_DISABLE=1: the plugins leave the framework's own layers where they are."""

from __future__ import annotations

import logging
import os

_NAME = "UNIEP_DISABLE"
_log = logging.getLogger("uniep")
_told: set[str] = set()


def is_disabled(what: str) -> bool:
    """Whether UNIEP_DISABLE is 1; the log then says once that `what` stays the framework's.

    Raises:
        ValueError: it is neither empty, 0 nor 1.
    """
    value = os.environ.get(_NAME, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{_NAME}: {value!r}; legal are 1, 0 and empty")
    if value == "1" and what not in _told:
        _told.add(what)
        _log.warning("%s=1: %s", _NAME, what)
    return value == "1"
