"""What a part of the pilot has measured so far, in a file, so that a run that was cut goes on behind it."""

from __future__ import annotations

import json
import os
import pathlib
import typing

import torch.distributed as dist

Entry = dict[str, typing.Any]


class Kept:
    """Entries that an earlier run with the same key has written, and those of this one.

    Args:
        file: is written by rank 0. None: nothing is known and nothing kept.
        key: what entries depend on. Where the file has another one, it is begun anew.
    """

    def __init__(self, file: pathlib.Path | None, key: Entry) -> None:
        self.file, self.key = file, json.loads(json.dumps(key))
        found: list[list[Entry]] = [[]]
        if file is None:
            self.entries = found[0]
            return
        if dist.get_rank() == 0 and file.exists():
            saved = json.loads(file.read_text())
            if saved["key"] == self.key:
                found = [saved["entries"]]
        dist.broadcast_object_list(found)
        self.entries = found[0]

    def add(self, entry: Entry) -> None:
        """Writes it before anything else is measured."""
        self.entries.append(entry)
        if self.file is None or dist.get_rank() != 0:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps({"key": self.key, "entries": self.entries}))
        os.replace(new, self.file)
