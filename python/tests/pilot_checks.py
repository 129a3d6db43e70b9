"""What test_pilot.py starts: its large models in small, and comparisons of bits that differ."""

import dataclasses
import datetime
import functools
import gc
import json
import os
import shutil
import sys
import unittest.mock

import megatron_shim  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import MLATransformerConfig

from distributed_checks import run_checks
from megatron_graph_checks import capturing
from uniep import reserved_sms
from uniep.pilot import arms, bits, meeting, options, sizes, turns, world
from uniep.pilot import training as training_module
from uniep.pilot.meeting import meet
from uniep.pilot.parts import Output, Parts, _remove
from uniep.pilot.text import Text
from uniep.pilot.trace import traced
from uniep.pilot.training import Setting, Training, set_up_parallelism, what_it_is

SMALL = {"layers": 2, "hidden": 64, "intermediate": 32, "experts": 8, "topk": 2, "heads": 4, "vocabulary": 256}
CHANGES = {
    "qwen3-30b": {"num_query_groups": 2, "kv_channels": 16, "ffn_hidden_size": 64},
    "deepseek-v2-lite": {
        "ffn_hidden_size": 128,
        "moe_shared_expert_intermediate_size": 64,
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 24,
        "kv_channels": 16,
    },
}


def setting(name="tiny"):
    size = sizes.SIZES[name]
    if name in CHANGES:
        changes = {**size.changes, **CHANGES[name]}
        size = dataclasses.replace(size, **SMALL, sequence=32, batch=2, learning_rate=3e-3, changes=changes)
    return Setting(size, Text(bytes(range(256)) * 8, size.sequence, size.batch, 3), torch.device("cpu"), 5)


def check_large_models_in_small(rank, ranks):
    for name in CHANGES:
        *_, blocks = turns.take_turns(setting(name), arms.find(["stock", "uniep"], "auto")[0], 2, 0, 4, lambda _: None)
        stock, uniep = blocks[0], blocks[1]
        assert abs(stock.losses[0] - uniep.losses[0]) < 1e-3 * stock.losses[0], name
        assert stock.ends_with != uniep.ends_with
        assert uniep.losses[-1] < uniep.losses[0]
        assert bits.of_blocks(blocks)["uniep"].equal
        names = {span.name for span in uniep.timeline}
        assert ("MLP 1" in names) == (name == "deepseek-v2-lite") and "MoE 2" in names


class StandInForGraphs:
    """In the place of Megatron's helper: a graph runs what was captured again, as if it were being captured."""

    def __init__(self, model, config, seq_length, micro_batch_size, optimizers):
        assert config.cuda_graph_warmup_steps == arms.STEPS_BEFORE_GRAPHS and len(optimizers) == 1
        assert cuda_graphs.get_num_microbatches() == 1 and micro_batch_size * seq_length == 64
        self.layers, self.model, self.replays = model[0].module.decoder.layers, model[0], 0

    def create_cudagraphs(self):
        for layer in self.layers:
            layer.cuda_graphs, layer.cuda_graph_manual_hooks = [functools.partial(self.replay, layer)], []
            layer._get_te_cuda_graph_replay_args = lambda *given, **named: (given, named)  # asks for a mask

    def replay(self, layer, *given, **named):
        self.replays += 1
        with capturing():
            return layer._te_cuda_graph_capture(*given, **named)

    def cuda_graph_set_manual_hooks(self):
        for layer in self.layers:
            layer.setup_manual_hooks(self.model._make_forward_pre_hook)

    def delete_cuda_graphs(self):
        for layer in self.layers:
            layer.cuda_graphs = []


def check_shared_experts_are_beside_dispatch(rank, ranks):
    """In Megatron's arms, with CUDA graphs not: there they are inside a graph without."""
    stock, uniep = arms.find(["stock", "uniep"], "auto")[0]
    flex = stock._replace(changes={**stock.changes, "moe_token_dispatcher_type": "flex"})
    given = setting("deepseek-v2-lite")
    beside = ", shared experts beside dispatch and combine"
    assert what_it_is(given, stock, ranks) == stock.what + beside and what_it_is(given, flex, ranks).endswith(beside)
    for other, arm in (
        (given, uniep),
        (setting("qwen3-30b"), stock),
        (dataclasses.replace(given, cuda_graphs=True), stock),
    ):
        assert what_it_is(other, arm, ranks) == arm.what
    whole = SharedExpertMLP.get_output
    with unittest.mock.patch.object(SharedExpertMLP, "get_output", autospec=True, side_effect=whole) as joined:
        for arm, calls in ((stock, given.size.layers - given.size.dense_layers), (uniep, 0)):
            training = Training(given, arm)
            training.run(1)
            training.close()
            assert joined.call_count == calls, arm.name
            joined.reset_mock()
    old = ValueError("moe_shared_expert_overlap only works with alltoall token dispatcher.")
    build = MLATransformerConfig.__post_init__
    refused = []

    def refuse(config):
        if config.moe_shared_expert_overlap:
            refused.append(config)
            raise old
        build(config)

    with unittest.mock.patch.object(MLATransformerConfig, "__post_init__", refuse):
        assert what_it_is(given, flex, ranks) == flex.what and refused


def check_deterministic_mode_is_the_engines_too(rank, ranks):
    """From before attention is built to the end of the training, whether it ends well or not."""
    variable = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    given = dataclasses.replace(setting(), deterministic=True)
    arm = arms.find(["uniep"], "auto")[0][0]
    seen = []

    class Seen(GPTModel):
        def __init__(self, *arguments, **options):
            seen.append(os.environ.get(variable))
            super().__init__(*arguments, **options)

    class Refused(GPTModel):
        def __init__(self, *_arguments, **_options):
            seen.append(os.environ.get(variable))
            raise OSError("no room")

    for user, value in ((None, None), ("1", "1")):
        with (
            unittest.mock.patch.object(world, "_engine_as_given", user),
            unittest.mock.patch.object(training_module, "GPTModel", Seen),
        ):
            training = Training(given, arm)
            training.run(1)
            assert seen[-1] == os.environ.get(variable) == "0"
            training.close()
            assert os.environ.get(variable) == value
            training_module.GPTModel = Refused
            parts = some_parts(Parts, ["--parts", "bits"], [])  # meetings of "deterministic" are another check's
            parts.run()
            assert parts.report["failed_parts"] == {"bits": "OSError: no room"}
            assert seen[-1] == "0" and os.environ.get(variable) == value
    world.set_deterministic(False)


def check_cuda_graphs(rank, ranks):
    """All arms train the same with graphs of attention and routers as without."""
    with (
        unittest.mock.patch.object(cuda_graphs, "TECudaGraphHelper", StandInForGraphs),
        unittest.mock.patch.object(training_module, "_may_overlap_shared_experts", lambda *_: False),  # other bits
    ):
        for name in CHANGES:
            plain = setting(name)
            for arm in arms.find(["stock", "uniep"], "auto")[0]:
                digests = []
                for given in (plain, dataclasses.replace(plain, cuda_graphs=True)):
                    training = Training(given, arm)
                    training.run(4)
                    digests.append(training.digest())
                    replays = training.graphs.replays if given.cuda_graphs else 0
                    assert replays == (2 * given.size.layers if given.cuda_graphs else 0)
                    with traced(training) as trace:
                        training.step()
                    ended = [span.lane for span in trace.spans() if span.name.startswith("MoE")]
                    assert ended.count("backward") == given.size.layers - given.size.dense_layers, (
                        given.cuda_graphs,
                        ended,
                    )
                    training.close()
                assert digests[0] == digests[1], (name, arm.name)


def check_bits_that_differ_are_seen(rank, ranks):
    """A weight of an expert that differs in one bit, on one rank."""
    arm = arms.find(["uniep"], "auto")[0][0]
    given = setting()
    digests = []
    for nudge in (False, True):
        training = Training(given, arm)
        if nudge and rank == ranks - 1:
            weight = next(one for name, one in training.model.named_parameters() if ".local_experts." in name)
            weight.data.view(torch.int16).view(-1)[0] ^= 1
        digests.append(training.digest())
        training.close()
    assert digests[0] != digests[1]
    block = turns.run_block(given, arm, 0, 0, 2)
    other = dataclasses.replace(block, turn=1, ends_with=digests[0])
    assert bits.of_blocks([block, block])["uniep"].equal
    assert not bits.of_blocks([block, other])["uniep"].equal
    assert not bits.of_blocks([block, dataclasses.replace(block, losses=[1.0])])["uniep"].equal


def check_arms_must_begin_alike(rank, ranks):
    arm = arms.find(["uniep"], "auto")[0][0]
    one = setting()
    other = dataclasses.replace(one, seed=6)
    assert turns.run_block(one, arm, 0, 0, 1).begins_with != turns.run_block(other, arm, 0, 0, 1).begins_with


def live_bytes():
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def check_memory_is_given_back(rank, ranks):
    """The next arm needs it."""
    given = setting()
    for arm in arms.find(["stock", "uniep"], "auto")[0]:
        before = live_bytes()
        training = Training(given, arm)
        training.run(2)
        with traced(training) as trace:
            training.step()
            trace.spans()
        whole = live_bytes() - before
        training.close()
        assert live_bytes() - before < 0.05 * whole, (arm.name, before, whole, live_bytes())
    bits.of_other_batches(given, arm)
    assert live_bytes() - before < 0.05 * whole


def some_parts(kind, words, written):
    size = setting().size
    sizes.SIZES["small"] = size
    given = options.parse(["--cpu", "--model", "small", "--steps", "1", "--turns", "1", "--warm", "0", *words])
    report = {"missing_parts": [], "failed_parts": {}}
    output = Output(lambda report: written.append(json.loads(json.dumps(report))), lambda _: None)
    return kind(given, setting(), arms.find(["stock", "uniep"], "auto")[0], report, output)


class Broken(Parts):
    def run_turns(self):
        raise OSError("no room")

    def run_deterministic(self):
        if dist.get_rank() == 0:
            raise OSError("no room on one")
        raise KeyboardInterrupt  # as one that still is in a collective


def check_a_part_that_fails_on_all_ranks_is_named(rank, ranks):
    written = []
    parts = some_parts(Broken, ["--parts", "turns,curves", "--curve-steps", "2"], written)
    parts.arms.reverse()
    parts.run()
    assert parts.report["failed_parts"] == {"turns": "OSError: no room"} and parts.report["missing_parts"] == []
    assert list(parts.report["curves"]["losses"]) == ["uniep", "stock", "stock, another seed"]
    assert parts.report["curves"]["spread"] is not None
    over = "it did not come to its end"
    waiting = [[f"turns: {over}", f"curves: {over}"], [f"curves: {over}"], []]
    assert [one["missing_parts"] for one in written] == waiting
    meeting._LIMIT = datetime.timedelta(seconds=1)
    parts = some_parts(Broken, ["--parts", "deterministic,curves"], written)
    kind = None
    try:
        parts.run()
    except BaseException as error:
        kind = type(error)
    assert kind == (OSError if rank == 0 else KeyboardInterrupt)
    assert f"deterministic: {over}" in written[-1]["missing_parts"]
    meeting._LIMIT = datetime.timedelta(seconds=60)
    meet("the end of this check")


class WithFolder(Parts):
    def run_bits(self):
        file = self._shared_folder() / f"host{dist.get_rank()}"
        file.touch()
        dist.barrier()


def check_checkpoints_are_removed_on_each_host(rank, ranks):
    """Of which each rank is one here, as far as it knows."""
    removed = []
    with (
        unittest.mock.patch.dict(os.environ, LOCAL_RANK="0"),
        unittest.mock.patch.object(shutil, "rmtree", lambda folder, **_: removed.append(folder)),
    ):
        parts = some_parts(WithFolder, ["--parts", "bits"], [])
        parts.run()
        assert removed == [parts.folder] and parts.report["failed_parts"] == {}
    with unittest.mock.patch.dict(os.environ, LOCAL_RANK=str(rank)):
        dist.barrier()
        _remove(parts.folder)
        dist.barrier()
    assert not parts.folder.exists()


def check_an_arm_that_does_not_run_is_left_out(rank, ranks):
    written = []
    parts = some_parts(Parts, ["--parts", "turns", "--turns", "2"], written)
    flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}
    absent = arms.Arm("deepep", "DeepEP, which is not here", flex)
    plainer = arms.Arm("hybridep", "a plainer one", parts.arms[0].changes)
    parts.arms[1:1] = [absent._replace(plainer=absent), absent._replace(name="hybridep", plainer=plainer)]
    parts.report |= {"missing_arms": {}, "arms": {}}
    parts.run()
    assert [arm.name for arm in parts.arms] == ["stock", "hybridep", "uniep"]
    assert [row["arm"] for row in parts.report["table"]] == ["stock", "hybridep", "uniep"]
    assert parts.report["arms"] == {"hybridep": "a plainer one"}
    steps = [one["table"][0]["step_ms"]["steps"] for one in written if "table" in one]
    assert steps[0] < steps[-1], steps  # what the first turn found was kept before the second
    assert parts.report["missing_arms"]["deepep"].startswith("its first step failed: "), parts.report["missing_arms"]
    assert parts.report["failed_parts"] == {} and parts.report["missing_parts"] == []


def check_a_model_with_more_layers_comes_next(rank, ranks):
    given = setting()
    for layers in (1, given.size.layers + 1):
        size = dataclasses.replace(given.size, layers=layers)
        training = Training(dataclasses.replace(given, size=size), arms.find(["uniep"], "auto")[0][0])
        training.run(1)
        training.close()


def check_few_reserved_sms_come_last(rank, ranks):
    """And the report is there before each of them."""
    written, ran = [], []

    def take_turns(_setting, given, *_rest):
        ran.append([arm.name for arm in given])
        if ran[-1] == ["uniep, reserve_sms=8"]:
            raise TimeoutError("waited")
        return iter([[]])

    was = turns.take_turns, reserved_sms.most_ctas
    turns.take_turns, reserved_sms.most_ctas = take_turns, lambda _: 5
    try:
        parts = some_parts(Parts, ["--parts", "preflight", "--reserve-sms", "0,8,4,16"], written)
        parts.options.parts = []
        parts.run()
    finally:
        turns.take_turns, reserved_sms.most_ctas = was
    name = "uniep, reserve_sms="
    assert ran == [
        ["uniep", "uniep, comm.lend_sms=off", f"{name}16"],
        [f"{name}0"],
        [f"{name}8"],
    ]  # and no more behind a time-out
    over = [one["missing_parts"][-1] for one in written[1:-1]]
    assert over == [f"{', '.join(one)} of reserve_sms: it did not come to its end" for one in ran]
    assert parts.report["failed_parts"] == {} and parts.report["missing_parts"] == []
    assert parts.report["timed_out"] == {f"{name}8": "waited"}


def set_up():
    set_up_parallelism(torch.distributed.get_world_size())


if __name__ == "__main__":
    sys.exit(run_checks(globals(), set_up))
