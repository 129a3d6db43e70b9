"""What the ranks of a group tell each other of a tuner's measurements, by torch.distributed."""

from __future__ import annotations

import typing

import torch
import torch.distributed as dist

from uniep import peers

if typing.TYPE_CHECKING:
    from uniep.group import Group

_WHAT = "what the ranks measured"
_CHUNK = 8192  # bytes that go at once; longer messages wait for a second exchange
_HEAD = 8  # bytes of the length


class _OnItsWay(typing.NamedTuple):
    own: bytes
    ranks: list[torch.Tensor]
    work: typing.Any  # None: ordered by the stream


class Exchange:
    """give() hands bytes to all ranks and does not wait for them; take() does. Collective, in the same order."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._given: dict[int, _OnItsWay] = {}

    def give(self, number: int, own: bytes) -> None:
        group = self._group
        on_host = bytearray(_CHUNK)
        on_host[:_HEAD] = len(own).to_bytes(_HEAD, "little")
        first = own[: _CHUNK - _HEAD]
        on_host[_HEAD : _HEAD + len(first)] = first
        backends = str(dist.get_backend_config(group.process_group))  # such as cuda:nccl
        by_nccl = "nccl" in backends and "cpu:" not in backends
        tensor = torch.frombuffer(on_host, dtype=torch.uint8)
        tensor = tensor.to(group.device) if by_nccl else tensor
        ranks = [torch.empty_like(tensor) for _ in range(group.size)]
        with peers.waiting(group, _WHAT):
            # NCCL's kernel must not run beside a layer that waits for peers: the stream's next calls come behind it.
            work = dist.all_gather(ranks, tensor, group=group.process_group, async_op=not by_nccl)
        self._given[number] = _OnItsWay(own, ranks, work)

    def take(self, number: int) -> list[bytes]:
        given = self._given.pop(number)
        with peers.waiting(self._group, _WHAT):
            if given.work is not None:
                given.work.wait()
            found = [bytes(tensor.cpu().numpy()) for tensor in given.ranks]
        lengths = [int.from_bytes(one[:_HEAD], "little") for one in found]
        if max(lengths) > _CHUNK - _HEAD:
            return peers.gather_objects(self._group, given.own, _WHAT)
        return [one[_HEAD : _HEAD + length] for one, length in zip(found, lengths, strict=True)]
