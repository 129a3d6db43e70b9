"""What the experts of a layer compute, as the library takes it. Needs no torch."""

from __future__ import annotations

import ctypes
import functools
import typing

from uniep import library

_ACTIVATIONS = ("swiglu", "geglu_tanh", "geglu_erf", "relu2", "silu")  # UNIEP_ACTIVATION_...
NOT_GATED = ("relu2", "silu")
_ROUTER_WEIGHTS = ("activation", "output", "input")


class Numerics(typing.NamedTuple):
    """Fields of library.LayerConfig."""

    activation: int = 0
    router_weight: int = 0
    alpha: float = 0.0
    gate_limit: float = 0.0
    up_limit: float = 0.0
    up_offset: float = 0.0
    bias: int = 0

    @property
    def gated(self) -> bool:
        return _ACTIVATIONS[self.activation] not in NOT_GATED

    def options(self) -> str:
        """Those of `uniep run`, each with a blank before it, where they are not its own."""
        text = _ACTIVATIONS[self.activation]
        if self.alpha not in (0, 1) or self.gate_limit or self.up_limit or self.up_offset:
            names = ("alpha", "gate_limit", "up_limit", "up_offset")
            text += ":" + ",".join(f"{name}={getattr(self, name)!r}" for name in names)
        activation = "" if text == _ACTIVATIONS[0] else f" --activation {text}"
        weight = _ROUTER_WEIGHTS[self.router_weight]
        place = "" if weight == _ROUTER_WEIGHTS[0] else f" --router-weight {weight}"
        return activation + place + (" --bias" if self.bias else "")


PLAIN = Numerics()  # SwiGLU, weighted before w2


@functools.lru_cache(maxsize=64)
def read_numerics(activation: str, router_weight: str, bias: bool = False) -> Numerics:
    """The `activation` and `router_weight` of moe(), and whether there are biases; ValueError names what is wrong and
    what is legal."""
    if router_weight not in _ROUTER_WEIGHTS:
        raise ValueError(f"router_weight: {router_weight!r}; legal are {', '.join(_ROUTER_WEIGHTS)}")
    if not isinstance(activation, str):
        raise ValueError(f"activation: {activation!r}; must be a text, as swiglu")
    config = library.LayerConfig.make()
    library.check(library.load().uniep_set_activation(ctypes.byref(config), activation.encode()))
    return Numerics(
        config.activation,
        _ROUTER_WEIGHTS.index(router_weight),
        config.alpha,
        config.gate_limit,
        config.up_limit,
        config.up_offset,
        int(bias),
    )


def is_gated(activation: str) -> bool:
    """Whether w1 has gate and up rows. `activation` may be one that read_numerics() refuses."""
    return activation not in NOT_GATED
