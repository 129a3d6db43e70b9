"""trace(): a timeline of calls as a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from uniep.group import Group


@contextlib.contextmanager
def trace(path: str | os.PathLike[str], group: Group | None = None) -> Iterator[None]:
    """Writes when every tile of the layers in a `with` block ran, forward and backward, in compiled graphs too.

        with uniep.trace("layer.json"):
            layer(x).sum().backward()

    Not collective: each process that traces writes its own file, with its own rank. A traced call waits for the device.

    Args:
        path: of the file, for Perfetto, chrome://tracing and `uniep trace`; "{rank}" in it becomes the rank. Written
            at the end of the block, also after an exception.
        group: None is Group().

    Raises:
        ValueError: the group is closed, or is traced already.
        OSError: the file can not be written.
    """
    own = Group() if group is None else group
    own.engine.begin_trace()
    try:
        yield
    finally:
        own.engine.end_trace(os.fspath(path).replace("{rank}", str(own.rank)))
