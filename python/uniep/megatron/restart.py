"""What Megatron's --inprocess-restart needs of UniEP: an Abort of nvidia-resiliency-ext that ends its groups."""

from __future__ import annotations

import importlib
import typing

import uniep


def abort_hook() -> typing.Any:
    """An `inprocess.abort.Abort` for `inprocess.Compose(...)`: called in any thread with a state, it calls
    uniep.abort() and gives the state back.

    Raises:
        ImportError: nvidia-resiliency-ext is not installed.
    """
    base: typing.Any = importlib.import_module("nvidia_resiliency_ext.inprocess").abort.Abort

    class AbortUniEP(base):  # type: ignore[misc]
        def __call__(self, state: typing.Any) -> typing.Any:
            uniep.abort()
            return state

    return AbortUniEP()
