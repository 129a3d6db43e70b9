"""Which arms the pilot has, and in what order they run."""

import dataclasses
import importlib.util

import pytest

if importlib.util.find_spec("megatron") is None:  # test_megatron.py fails then where it has to be there
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from megatron.core.transformer.transformer_config import TransformerConfig

from uniep import reserved_sms
from uniep.pilot import arms, options, parts


def test_missing_arms_are_named():
    found, missing = arms.find(["stock", "deepep"], "auto")
    assert [arm.name for arm in found] == ["stock"] and missing == {"deepep": "needs GPUs, and torch finds none"}


def test_other_dispatchers_are_as_fast_as_megatron_has_them(monkeypatch):
    monkeypatch.setattr(arms, "_why_not", lambda _: None)
    assert [arm.plainer for arm in arms.find(["deepep", "hybridep"], "auto")[0]] == [None, None]
    monkeypatch.setattr(arms, "has_transformer_engine", lambda: True)
    deepep, hybridep = arms.find(["deepep", "hybridep"], "auto")[0]
    assert deepep.experimental and not deepep.plainer.experimental and deepep.changes == deepep.plainer.changes
    assert hybridep.changes["moe_permute_fusion_into_hybridep"] and not hybridep.experimental
    assert "moe_permute_fusion_into_hybridep" not in hybridep.plainer.changes
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert {*deepep.changes, *hybridep.changes} <= fields


def test_reserved_sms_are_arms():
    arm = arms.find(["uniep"], "fusion=pairs,comm.reserve_sms=24")[0][0]
    assert arm.reserve_sms == "auto"
    other = arms.with_reserved_sms(arm, 8)
    assert (other.name, other.schedule, other.reserve_sms) == ("uniep, reserve_sms=8", "fusion=pairs", 8)
    other = arms.with_reserved_sms(arm._replace(schedule="auto"), 0)
    assert (other.schedule, other.reserve_sms) == ("auto", 0)


def test_reserved_sms_are_idle_in_an_arm_of_their_own(monkeypatch):
    """Where all collectives have high priority, and the schedule leaves it open."""
    arm = arms.find(["uniep"], "auto")[0][0]
    monkeypatch.setattr(reserved_sms, "most_ctas", lambda _: 8)
    monkeypatch.setattr(reserved_sms, "goes_first", lambda group: group != "ordinary")

    def together(beside, given=arm, counts=(8, 16, 24)):
        return [[one.name for one in row] for row in parts.arms_with_reserved_sms(given, list(counts), beside)]

    few = ["uniep, reserve_sms=8"]
    names = ["uniep", "uniep, reserve_sms=16", "uniep, reserve_sms=24"]
    assert together(["a", "b"]) == [["uniep", "uniep, comm.lend_sms=off", *names[1:]], few]
    assert together(["a", "ordinary"]) == [names, few]
    for text in ("queue=static", "comm.lend_sms=on", "comm.reserve_sms = 24", ' {"fusion": "pairs"}'):
        assert together(["a", "b"], arm._replace(schedule=text)) == [names, few]
    assert together([], counts=(8,)) == [["uniep", *few]]
    assert arms.with_idle_sms(arm).schedule == "comm.lend_sms=off"
    assert arms.with_idle_sms(arm._replace(schedule="fusion=pairs")).schedule == "fusion=pairs,comm.lend_sms=off"


def test_numbers_of_reserved_sms_where_there_are_several_gpus(monkeypatch):
    assert options.parse(["--cpu"]).reserve_sms == options.parse([]).reserve_sms == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert options.parse([]).reserve_sms == [0, 8, 16]
    assert options.parse(["--reserve-sms", "4"]).reserve_sms == [4]
    assert options.parse(["--reserve-sms", ""]).reserve_sms == options.parse(["--cpu"]).reserve_sms == []
