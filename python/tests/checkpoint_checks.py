"""What distributed_checks.py runs too: checkpoint_state() of wrapped models, of optimizers and of what it refuses."""

import contextlib
import copy
import importlib.util
import os
import pathlib
import pickle
import shutil
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint_files
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict
from torch.distributed.tensor import DTensor

import uniep
from distributed_checks import same_bits, value_error

DDP = torch.nn.parallel.DistributedDataParallel
FLAT = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)


class IntSteps(torch.optim.Optimizer):
    """Momentum, and a step that is a number, as many optimizers outside PyTorch have it."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    own = self.state[one]
                    own["step"] = own.get("step", 0) + 1
                    own["sums"] = own.get("sums", 0) + one.grad
                    one -= group["lr"] * own["sums"] / own["step"]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def made(ranks, kind="plain", **options):
    """A model with a layer of experts that differ by rank, in a wrapper or in several."""
    options = {"group": uniep.Group(), **options}
    layer = uniep.MoELayer(hidden=32, intermediate=16, num_experts=4 * ranks, topk=2, **options)
    if kind == "checkpointed":
        layer = checkpoint_wrapper(layer)
    if kind == "compiled":
        layer = torch.compile(layer, backend="eager")
    model = torch.nn.Sequential(torch.nn.Linear(32, 32, dtype=torch.bfloat16), layer)
    if kind in ("ddp", "checkpointed"):
        DDP._set_params_and_buffers_to_ignore_for_model(model, list(uniep.expert_parameters(model)))
        model = DDP(model)
    return torch.compile(model, backend="eager") if kind == "ddp" else model


def stepped(model, make_optimizer, steps):
    optimizer = make_optimizer(model.parameters())
    for _ in range(steps):
        for one in model.parameters():
            one.grad = torch.randn(one.shape).to(one.dtype)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def kept_of(model, optimizer):
    """Experts and what the optimizer keeps of them: clones, in the order of parameters."""
    found = []
    for one in uniep.expert_parameters(model).values():
        state = optimizer.state[one].items()
        clones = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state}
        found.append({"value": one.detach().clone(), **clones})
    return found


@contextlib.contextmanager
def folder_of_all(name):
    """A folder for the checkpoints of all ranks, which is removed."""
    folder = pathlib.Path(tempfile.gettempdir()) / f"uniep_{name}_{os.getppid()}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a folder that has a checkpoint already
        yield folder
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


def resumed(make, make_optimizer, steps=1, options=None, model_state=lambda model: None):
    """What kept_of() gives before a checkpoint, and after it is loaded into another model."""

    def states(model, optimizer):
        kept = state_dict.get_optimizer_state_dict(model, optimizer, options=options)
        own = uniep.checkpoint_state(model, model_state(model))
        return kept, {"model": own, "optimizer": uniep.checkpoint_state(model, kept)}

    with folder_of_all("resumed") as folder:
        torch.manual_seed(dist.get_rank())
        model = make()
        optimizer = stepped(model, make_optimizer, steps)
        before = kept_of(model, optimizer)
        checkpoint_files.save(states(model, optimizer)[1], checkpoint_id=folder)
        model = make()
        optimizer = stepped(model, make_optimizer, 0)
        kept, state = states(model, optimizer)
        checkpoint_files.load(state, checkpoint_id=folder)
        state_dict.set_optimizer_state_dict(model, optimizer, kept, options=options)
        return before, kept_of(model, optimizer)


def assert_resumed(before, after, dtype=None):
    """In `dtype` where the optimizer's load_state_dict() rounds to that."""
    assert len(before) == len(after) > 1
    for own, other in zip(after, before, strict=True):
        assert own.keys() == other.keys()
        for key, value in other.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                value = value if dtype is None else value.to(dtype)
                assert same_bits(own[key], value), key
            elif key != "RMS":  # of Adafactor, which computes it anew in each step
                assert own[key] == value, (key, own[key], value)


def check_checkpoints_of_wrapped_models(rank, ranks):
    for kind in ("plain", "ddp", "compiled", "checkpointed"):
        for options in (None, FLAT):
            assert_resumed(*resumed(lambda kind=kind: made(ranks, kind), adamw, options=options))
    model = made(ranks, "ddp")
    state = uniep.checkpoint_state(model, state_dict.get_model_state_dict(model))
    assert isinstance(state["1.experts.down_proj"], DTensor) == (ranks > 1)
    assert_resumed(*resumed(lambda: made(ranks, "ddp"), adamw, model_state=state_dict.get_model_state_dict))


def check_checkpoints_of_a_layer_in_two_places(rank, ranks):
    layer = uniep.Experts(num_experts=4 * ranks, hidden=32, intermediate=16)
    state = uniep.checkpoint_state(torch.nn.ModuleList([layer, layer]))
    assert [tuple(one.shape) for one in state.values()] == 2 * [(4 * ranks, 32, 32), (4 * ranks, 32, 16)]


def check_optimizers_with_numbers(rank, ranks):
    before, after = resumed(lambda: made(ranks), IntSteps, steps=7)
    assert before[0]["step"] == 7
    assert_resumed(before, after)
    assert_resumed(*resumed(lambda: made(ranks), IntSteps, steps=7, options=FLAT))
    if importlib.util.find_spec("transformers") is not None and ranks < 4:
        from transformers.optimization import Adafactor

        before, after = resumed(lambda: made(ranks), Adafactor, steps=7)
        assert before[0]["step"] == 7
        assert_resumed(before, after, torch.bfloat16)


def check_what_is_loaded_is_in_the_state_that_was_given(rank, ranks):
    model = made(ranks)
    optimizer = stepped(model, IntSteps, 3)
    kept = state_dict.get_optimizer_state_dict(model, optimizer)
    before = copy.deepcopy(kept["state"]["1.experts.down_proj"])
    with folder_of_all("given") as folder:
        checkpoint_files.save(uniep.checkpoint_state(model, kept), checkpoint_id=folder)
        own = kept["state"]["1.experts.down_proj"]
        own["step"] = 0
        own["sums"].zero_()
        kept["param_groups"][0]["lr"] = 5.0
        state = uniep.checkpoint_state(model, kept)
        checkpoint_files.load(state, checkpoint_id=folder)
    assert kept["state"]["1.experts.down_proj"] is own and type(own) is dict and own["step"] == 3
    assert type(own["sums"]) is torch.Tensor and same_bits(own["sums"], before["sums"])
    assert kept["param_groups"][0]["lr"] == 0.1
    assert type(copy.deepcopy(state["param_groups"])) is list
    again = pickle.loads(pickle.dumps({"param_groups": state["param_groups"], "step": state["state"]["0.bias"]}))
    assert type(again["step"]) is dict and again["step"]["step"] == 3


def check_fp32_copies_for_an_optimizer(rank, ranks):
    """As docs/pytorch_reference.md has it for grad_dtype=torch.float32: the copies are a module, and are resumed as
    one."""
    if not hasattr(torch.Tensor, "grad_dtype"):
        return
    assert_resumed(*resumed(lambda: copy.deepcopy(made(ranks, grad_dtype=torch.float32)).float(), adamw))


def check_states_that_are_refused(rank, ranks):
    model, other = made(ranks), torch.nn.Linear(2, 2)
    optimizer = stepped(model, adamw, 1)
    kept = state_dict.get_optimizer_state_dict(model, optimizer)
    dense = adamw(model[0].parameters())
    uniep.checkpoint_state(model, state_dict.get_optimizer_state_dict(model, dense))
    momentum_of_none = torch.optim.SGD(model.parameters())
    uniep.checkpoint_state(model, state_dict.get_optimizer_state_dict(model, momentum_of_none))
    both = uniep.checkpoint_state(model, {"model": model.state_dict(), "optimizer": kept, "epoch": 3})
    assert isinstance(both["optimizer"]["state"]["1.experts.down_proj"]["exp_avg"], DTensor) == (ranks > 1)
    model[1].experts.down_proj.requires_grad_(False)
    without = {key: value for key, value in model.state_dict().items() if "down_proj" not in key}
    uniep.checkpoint_state(model, without)
    model[1].experts.down_proj.requires_grad_(True)
    lists = {"state": {"1.experts.down_proj": {"sums": [torch.zeros(4, 2)]}}, "param_groups": []}
    clash = torch.nn.ModuleDict({"module": model[1].experts})
    clash.register_parameter("down_proj", torch.nn.Parameter(torch.zeros(2)))
    flattened = state_dict.get_optimizer_state_dict(model, optimizer, options=FLAT)
    renamed = {key.replace("1.experts", "layer"): value for key, value in flattened.items()}
    for module, state, text in (
        (
            model,
            optimizer.state_dict(),
            "state: an optimizer's of 0, no parameter of module; must be what state_dict()",
        ),
        (model[1], kept, "state: an optimizer's of '0.weight', no parameter of module; must be"),
        (model, renamed, "state: an optimizer's of 'state.layer.gate_up_proj.step', no parameter of module; must"),
        (model, without, "state: has '0.weight' first and no '1.experts.down_proj'; must be what state_dict()"),
        (model, other.state_dict(), "state: has 'weight' first and no '1.experts.gate_up_proj'; must be"),
        (model, {"model": without, "optimizer": kept}, "state: has '0.weight' first and no '1.experts.down_proj'"),
        (model, {}, "state: has None first and no '1.experts.gate_up_proj'; must be"),
        (model, lists, "state: '1.experts.down_proj' has a list of tensors; must be tensors in dicts alone"),
        (clash, None, "module: two parameters are 'down_proj' but for parts of wrappers, one of experts; must"),
    ):
        with value_error(text) if ranks > 1 else contextlib.nullcontext():
            uniep.checkpoint_state(module, state)
