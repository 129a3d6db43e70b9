"""The `schedule` and `save` of moe() as the library takes them."""

from __future__ import annotations

import functools
import typing

import torch

from uniep import reserved_sms


class Save(typing.NamedTuple):
    """What a layer keeps from forward to backward."""

    fields: str  # of both schedules
    keeps_z: bool
    sends_x: bool  # no rows are kept: backward dispatches x again


SAVES = {
    "keep": Save("", True, False),
    "redispatch": Save("save.xg=redispatch", True, True),
    "rows": Save("save.z=recompute", False, False),
    "recompute": Save("save.xg=redispatch,save.z=recompute", False, True),
}
Schedule = str | tuple[str, ...]


def with_save(schedule: str, save: str) -> str:
    """A schedule's text with the fields that belong to a way to save."""
    fields = SAVES[save].fields
    if not fields:
        return schedule
    return fields if schedule in ("", "auto") else f"{schedule},{fields}"


def text_or_pair(schedule: typing.Any, save: typing.Any) -> Schedule:
    """The schedule as encoded() and read() take it; ValueError where it or `save` is of a wrong type."""
    if not isinstance(save, str):
        raise ValueError(f"save: {save!r}; legal are {', '.join(SAVES)}")
    if isinstance(schedule, str):
        return schedule
    if not isinstance(schedule, (list, tuple)) or not all(isinstance(text, str) for text in schedule):
        raise ValueError(f"schedule: {schedule!r}; legal is a text, or two: of forward and of backward")
    return tuple(schedule)


@functools.lru_cache(maxsize=256)
def encoded(schedule: Schedule, save: str, reserve: int | None, lends: bool = False) -> tuple[bytes, bytes]:
    """read() for calls outside of graphs."""
    forward, backward = read(schedule, save, reserve, lends)
    return forward.encode(), backward.encode()


def read(schedule: Schedule, save: str, reserve: int | None, lends: bool = False) -> tuple[str, str]:
    """The texts of forward and backward, which leave or lend `reserve` SMs; ValueError where an argument is wrong."""
    if save not in SAVES:
        raise ValueError(f"save: {save!r}; legal are {', '.join(SAVES)}")
    texts = (schedule, schedule) if isinstance(schedule, str) else schedule
    if len(texts) != 2:
        raise ValueError(f"schedule: {schedule!r}; legal is a text, or two: of forward and of backward")
    texts = reserved_sms.leave(texts[0], reserve, lends), reserved_sms.leave(texts[1], reserve, lends)
    for text in texts:
        if save != "keep" and text.lstrip().startswith("{"):
            raise ValueError(f"schedule: JSON beside save={save!r}; legal are 'auto' and key=value,...")
    return with_save(texts[0], save), with_save(texts[1], save)


_DEPENDS = "illegal schedule: "  # how the library's messages begin that depend on the shape and the machine


def check_early(schedule: typing.Any, save: typing.Any) -> None:
    """For plugins, before there is a layer: ValueError for what calls of every shape and machine refuse."""
    from uniep.engine import Engine

    texts = read(text_or_pair(schedule, save), save, 0)
    if all(text == "auto" for text in texts):
        return
    engine = Engine(torch.device("cpu"), {"ranks": 1, "workers": 1, "timeout_seconds": 0})
    try:
        for direction, text in enumerate(texts):
            try:
                engine.resolve(engine.config(128, 128, 8, 2), direction, text.encode())
            except ValueError as error:
                if not str(error).startswith(_DEPENDS):
                    raise ValueError(f"schedule: {error}") from error
    finally:
        engine.close()
