"""Where Megatron's experts have what UniEP runs with: so that a replacement is seen, and not passed by."""

from __future__ import annotations

import typing

import torch


class _Linear(typing.NamedTuple):
    """A module of the experts, as it was when the layer was built."""

    holder: dict[str, typing.Any]
    name: str
    module: torch.nn.Module
    kind: type


class _Weight(typing.NamedTuple):
    """A parameter: where Megatron's module has it, and UniEP's."""

    holder: dict[str, typing.Any]
    name: str
    key: str


class Parts:
    """The linear layers of Megatron's experts, and their parameters.

    Args:
        experts: SequentialMLP or TEGroupedMLP.
        own: the same parameters, as UniEP's module registers them.
    """

    def __init__(self, experts: torch.nn.Module, own: dict[str, typing.Any]) -> None:
        self._experts, self._kind = experts, type(experts)
        local: typing.Any = getattr(experts, "local_experts", None)
        children = [] if local is None else list(local._modules.items())
        self._linears = [_Linear(local._modules, name, one, type(one)) for name, one in children]
        for parent in [one for _, one in children] or [experts]:
            for name in ("linear_fc1", "linear_fc2"):
                linear = parent._modules[name]
                self._linears.append(_Linear(parent._modules, name, linear, type(linear)))
        self._own = own
        self.take_parameters()

    def take_parameters(self) -> None:
        """Those of the same modules as they are now."""
        places: dict[int, tuple[dict[str, typing.Any], str]] = {}
        for one in self._linears:
            held = one.module._parameters
            places |= {id(parameter): (held, name) for name, parameter in held.items()}
        self._weights = [_Weight(*places[id(one)], key) for key, one in self._own.items() if id(one) in places]

    def check_whole(self, now: object) -> None:
        """Raises ValueError where a layer has another module in the place of its experts."""
        if now is not self._experts:
            self._refuse("the whole module", now)

    def check(self) -> None:
        """Raises ValueError where something was replaced. Takes 0.1 us for each."""
        if type(self._experts) is not self._kind:
            self._refuse("the whole module", self._experts)
        for holder, name, module, kind in self._linears:
            if holder.get(name) is not module or type(module) is not kind:
                self._refuse(name, holder.get(name))
        for holder, name, key in self._weights:
            if holder.get(name) is not self._own[key]:
                self._refuse(name, holder.get(name))

    def _refuse(self, name: str, now: object) -> typing.NoReturn:
        raise ValueError(
            f"experts: {name} is not what it was when the layer was built, but another {type(now).__name__}, which "
            "UniEP would pass by; replace or wrap parts of experts with UNIEP_DISABLE=1 alone"
        )
