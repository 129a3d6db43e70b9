"""Real text as the data: bytes are the tokens, so that no tokenizer is needed."""

from __future__ import annotations

import hashlib
import pathlib

import torch


class Text:
    """Sequences from a text, a function of (seed, step, replica) alone: so any step can be begun with.

    Raises:
        ValueError: the text is shorter than a sequence.
    """

    def __init__(self, text: bytes, sequence: int, batch: int, seed: int) -> None:
        if len(text) < sequence + 2:
            raise ValueError(f"--text: {len(text)} bytes; must be {sequence + 2} or more, a sequence and two bytes")
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._sequence, self._batch, self._seed = sequence, batch, seed

    @property
    def digest(self) -> str:
        """Hexadecimal digits that stand for the text."""
        return hashlib.sha256(self._plain()).hexdigest()

    def save(self, file: pathlib.Path) -> None:
        file.write_bytes(self._plain())

    def _plain(self) -> bytes:
        return self._bytes.to(torch.uint8).numpy().tobytes()

    def batch(self, step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels [B, S] int64."""
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + step) * 4099 + replica)
        last = len(self._bytes) - self._sequence - 1
        starts = torch.randint(last, (self._batch,), generator=generator).tolist()
        rows = torch.stack([self._bytes[start : start + self._sequence + 1] for start in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def read(file: str | None) -> tuple[bytes, str]:
    """A file's bytes, or the documentation of a clone, and what it is.

    Raises:
        ValueError: no file is given, and this is no clone.
    """
    if file is not None:
        return pathlib.Path(file).read_bytes(), file
    docs = pathlib.Path(__file__).resolve().parents[3] / "docs"
    pages = sorted(docs.glob("*.md"))
    if not pages:
        raise ValueError("--text: not given, and there is no documentation beside the package; name a file of text")
    return b"".join(page.read_bytes() for page in pages), "docs/*.md of the clone"
