"""What a Group tells of itself: errors so far, and the memory that it holds."""

import pytest
import torch

import uniep
from layers import make_layer, run_moe


def test_check_and_synchronize_after_calls_that_went_well_or_were_refused():
    with uniep.Group(workers=2) as group:
        group.check()
        layer = make_layer([16])
        run_moe(layer, 0, layer.local(0, 1), group=group)
        group.check()
        with pytest.raises(uniep.CapacityError):
            run_moe(layer, 0, layer.local(0, 1), group=group, capacity=(128, 16))
        group.check()  # the call itself has told, and nothing is left of it
        group.synchronize()
    with pytest.raises(ValueError, match="group: closed"):
        group.check()


@pytest.mark.parametrize(("status", "kind"), [(3, uniep.CapacityError), (4, TimeoutError)])
def test_check_raises_what_the_library_knows_of(status, kind, monkeypatch):
    """Calls that fail behind the host's back are of GPUs; here the library is told to say so."""
    with uniep.Group(workers=2) as group:
        monkeypatch.setattr(group.engine._library, "uniep_group_check", lambda handle: status)
        with pytest.raises(kind):
            group.check()


def test_memory():
    with uniep.Group(workers=2) as group:
        assert group.memory() == (0, 0)
        sizes = []
        for tokens in (16, 64, 16):
            layer = make_layer([tokens])
            run_moe(layer, 0, layer.local(0, 1), group=group)
            sizes.append(group.memory().symmetric)
        slots = 64 * 2 * (64 * 2 + 4)  # T K rows of H in bf16, and a dprob each
        assert 0 < sizes[0] < slots <= sizes[1] < 2 * slots
        assert sizes[2] == sizes[1]
        kept = torch.empty(1 << 20)
        assert group.memory() == (sizes[1], 0)
        del kept
