"""What calls raise, beside ValueError (a wrong argument), TimeoutError (a peer that does not come) and torch's own
OutOfMemoryError."""

from __future__ import annotations


class Unsupported(NotImplementedError):
    """Legal, but this build, engine or machine can not do it."""


class CapacityError(RuntimeError):
    """A fixed capacity was too small. Nothing was dropped; the message says what is needed.

    All ranks get it. With the native transport of several ranks each gets it where its host comes to see it: from the
    call, or from a later one or synchronize(). All ranks then call group.recover().
    """


class DeviceError(RuntimeError):
    """A call of CUDA, NVRTC or NCCL failed."""
