"""The pilot as a user runs it on a laptop, its report, and its parts that need no ranks."""

import html.parser
import importlib.util
import inspect
import json
import os
import pathlib
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
import torch

if importlib.util.find_spec("megatron") is None:  # test_megatron.py fails then where it has to be there
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from megatron.core import parallel_state

from ranks import HERE, run_ranks
from uniep import peers, reserved_sms
from uniep.pilot import (
    drawing,
    kept,
    kill,
    options,
    parts,
    preflight,
    sizes,
    summary,
    text,
    training,
    turns,
    watch,
    world,
)
from uniep.pilot.fingerprint import fingerprint
from uniep.pilot.html import page

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run_pilot(words, folder, ranks=2, expected=0):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'python'}:{os.environ.get('PYTHONPATH', '')}"}
    line = [sys.executable]
    if ranks > 1:
        line += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(port)]
    else:  # without torchrun's own seconds
        environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [*line, "-m", "uniep.pilot", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    as_expected = done.returncode == expected if ranks == 1 else (done.returncode == 0) == (expected == 0)
    assert as_expected, done.stdout[-8000:]  # torchrun has a status of its own
    return done.stdout


class Page(html.parser.HTMLParser):
    """Every tag is closed, and nothing is fetched from anywhere."""

    VOID = {"meta"}

    def __init__(self, content):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(content)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            assert name not in ("src", "href", "srcset", "data", "xlink:href"), (tag, name, value)
        assert tag not in ("script", "link", "iframe", "img", "object")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The first command of docs/pilot.md, with the flags of a job that need a change."""
    folder = tmp_path_factory.mktemp("pilot")
    command = re.search(r"^    torchrun (.*--cpu.*)$", (ROOT / "docs" / "pilot.md").read_text(), re.MULTILINE)[1]
    words = shlex.split(command)
    assert words[:4] == ["--nproc-per-node", "2", "-m", "uniep.pilot"]
    flags = folder / "flags.sh"
    flags.write_text(
        "--swiglu --disable-bias-linear --bf16 \\\n --overlap-moe-expert-parallel-comm --fp8-format hybrid \\\n"
    )
    output = run_pilot([*words[4:], "--config", str(flags), "--reserve-sms", "8"], folder)
    return output, json.loads((folder / "pilot" / "report.json").read_text()), folder / "pilot" / "report.html"


def test_every_part_is_in_the_report(run):
    output, report, _ = run
    assert report["missing_parts"] == [] and report["failed_parts"] == {}
    assert list(report["missing_arms"]) == ["deepep", "hybridep"]
    assert all("needs GPUs" in why for why in report["missing_arms"].values())
    assert [row["arm"] for row in report["table"]] == ["stock", "uniep"]
    for row in report["table"]:
        assert row["step_ms"]["low"] <= row["step_ms"]["median"] <= row["step_ms"]["high"]
        assert row["step_ms"]["steps"] == report["setting"]["timed_steps_an_arm"]
        assert row["moe_ms"]["median"] > 0
        assert row["peak_mib"] is None  # torch counts a CPU's memory nowhere
        assert 1.0 <= row["rows_max_over_mean"] <= 2.0
    assert "missing: deepep" in output
    assert [row["arm"] for row in report["reserve_sms"]] == ["uniep", "uniep, reserve_sms=8"]


def test_bits_and_losses(run):
    _, report, _ = run
    assert [one["what"] for one in report["bits"]["uniep"]] == ["the same again"]
    assert report["repeatable"]["layers"] == 2 and report["began_alike"]
    what = [one["what"].split(":")[0] for one in report["repeatable"]["bits"]]
    assert what == [
        "another Schedule",
        "a restart from the checkpoint of step 3",
        "another batch on the other ranks",
    ]
    assert all(one["equal"] for arm, one in summary.all_bits(report) if arm.startswith("uniep"))
    assert set(report["deterministic"]) == {"stock", "uniep"}
    losses = report["curves"]["losses"]
    assert list(losses) == ["stock", "uniep", "stock, another seed"]
    assert losses["stock"] != losses["uniep"]  # else it were the same layer twice
    assert all(one[-1] < 0.8 * one[0] for one in losses.values())


def test_the_killed_rank_is_noticed_and_the_job_resumes(run):
    _, report, _ = run
    kill = report["kill"]
    assert kill["killed_rank"] == 1 and kill["silent"] == []
    (noticed,) = kill["noticed"]
    assert noticed["rank"] == 0 and 0 <= noticed["error_seconds"] < 60
    assert noticed["gone_seconds"] is None  # the main thread had the error of gloo
    assert not kill["several_clocks"]
    assert re.search(r"[Cc]onnection|peer", noticed["words"]), noticed
    assert kill["resumed"] and kill["same_bits"]


def test_preflight(run):
    _, report, _ = run
    found = report["preflight"]
    assert found["flags"] == [
        "-fp8 = 'hybrid'",
        "+fp8 = None",
        "-overlap_moe_expert_parallel_comm = True",
        "+overlap_moe_expert_parallel_comm = False",
    ]
    assert found["fused"]["transport"].startswith("torch: ")
    needs = {one["save"]: one for one in found["memory_mib_a_layer"]}
    assert needs["keep"]["saved"] > needs["redispatch"]["saved"] > needs["recompute"]["saved"] == 0
    assert found["versions"]["Transformer Engine"] and found["versions"]["Megatron-core"]


LINE = "--swiglu --disable-bias-linear --bf16 "


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        (LINE, []),
        (LINE + "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1", []),
        (LINE + "--tensor-model-parallel-size 2", ["expert_tensor_parallel_size"]),
        (LINE + "--expert-tensor-parallel-num-weight-shards 2", ["expert_gtp_weight_remat_size"]),
        (LINE + "--te-precision-config-file recipe.yaml", ["quant_recipe"]),
        ("--squared-relu --disable-bias-linear --bf16", []),
        ("--quick-geglu --disable-bias-linear --bf16 --glu-linear-offset 1 --activation-func-clamp-value 7", []),
        ("--disable-bias-linear --bf16", ["activation_func"]),
        (
            '{"params_dtype": "bfloat16", "activation_func": "squared_relu", "expert_tensor_parallel_size": 2}',
            ["expert_tensor_parallel_size"],
        ),
    ],
)
def test_flags_of_a_command_line(line, changes, tmp_path):
    (tmp_path / "flags").write_text(line)
    found = preflight.difference(preflight.read_flags(tmp_path / "flags"))
    assert [one[1:].split(" ")[0] for one in found[::2]] == changes


def test_a_run_that_was_cut_goes_on_behind_its_turns_and_curves(scratch):
    words = shlex.split("--model tiny --cpu --arms stock,uniep --parts turns,curves --steps 2 --warm 0")
    words += ["--curve-steps", "3", "--resume"]
    run_pilot([*words, "--turns", "1"], scratch, ranks=1)
    folder = scratch / "pilot"
    first = {part: json.loads((folder / f"{part}.json").read_text())["entries"] for part in ("turns", "curves")}
    assert [(one["arm"], one["turn"]) for one in first["turns"]] == [("stock", 0), ("uniep", 0)]
    # Cut within its second turn and behind its first curve.
    curves = json.loads((folder / "curves.json").read_text())
    (folder / "curves.json").write_text(json.dumps({**curves, "entries": curves["entries"][:1]}))
    output = run_pilot([*words, "--turns", "2"], scratch, ranks=1)
    assert "turns: 2 are an earlier run's" in output and "curves: 1 are an earlier run's" in output
    again = {part: json.loads((folder / f"{part}.json").read_text())["entries"] for part in ("turns", "curves")}
    assert again["turns"][:2] == first["turns"] and [one["turn"] for one in again["turns"]] == [0, 0, 1, 1]
    assert again["curves"] == first["curves"]
    report = json.loads((folder / "report.json").read_text())
    assert report["of_earlier_runs"] == {"turns": 2, "curves": 1} and report["began_alike"]
    assert [row["step_ms"]["steps"] for row in report["table"]] == [4, 4] and report["timeline"]["uniep"]


def test_what_a_run_kept_is_for_runs_like_it(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "dist", types.SimpleNamespace(get_rank=lambda: 0, broadcast_object_list=lambda _: None))
    kept.Kept(tmp_path / "new" / "turns.json", {"steps": 2}).add({"arm": "stock"})
    assert kept.Kept(tmp_path / "new" / "turns.json", {"steps": 2}).entries == [{"arm": "stock"}]
    assert kept.Kept(tmp_path / "new" / "turns.json", {"steps": 3}).entries == []
    assert kept.Kept(None, {}).entries == []


def test_the_page_is_one_valid_file(run):
    _, report, file = run
    content = file.read_text()
    page = Page(content)
    assert not re.search(r"https?://|url\(|@import", content)
    assert page.tags.count("svg") == 1 + len(report["timeline"])
    titles = " ".join(page.texts)
    for title in ("Results", "What is missing", "Bits", "A rank is killed", "Loss", "A step", "Preflight"):
        assert title in titles
    assert "its times say nothing about GPUs" in titles
    assert {"polyline", "rect"} <= set(page.tags)


def test_a_timeline_has_every_part_of_a_step(run):
    _, report, _ = run
    for spans in report["timeline"].values():
        names = {(span["name"], span["lane"]) for span in spans}
        for part in ("attention 1", "MoE 1", "attention 2", "MoE 2"):
            assert {(part, "forward"), (part, "backward")} <= names
        assert {("optimizer", "update"), ("gradients' sums", "update")} <= names
        assert all(0 <= span["begin_ms"] <= span["end_ms"] for span in spans)


def test_layers_say_what_they_do(run):
    _, report, _ = run
    assert [(one["layer"], one["direction"]) for one in report["stats"]] == [
        ("layer 1", "forward"),
        ("layer 2", "forward"),
        ("layer 2", "backward"),
        ("layer 1", "backward"),
    ]
    assert all(one["ms"] > 0 and one["calls"] == 3 for one in report["stats"])
    assert all(one["rows_max_over_mean"] >= 1 for one in report["stats"])
    assert any(one["rows"] > 0 for one in report["stats"])  # the router may send a batch to one rank


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "gpt"], "--model: gpt; legal are tiny"),
        (["--arms", "stock,theirs"], "--arms: theirs; legal are stock"),
        (["--arms", "uniep,uniep"], "--arms: uniep,uniep; each may be there once"),
        (["--arms", "stock"], "--parts: bits and kill need the arm uniep"),
        (["--reserve-sms", "eight"], "--reserve-sms: eight; must be numbers with commas"),
        (["--steps", "0"], "--steps: 0; must be 1 or more"),
        (["--cuda-graphs"], "--cuda-graphs: needs GPUs and Transformer Engine"),
        (["--bit-steps", "3"], "--bit-steps: 3; must be 4 or more"),
        (["--text", "/nowhere"], "--text: /nowhere; must be a file that can be read: No such file or directory"),
        (["--config", "/"], "--config: /; must be a file that can be read: Is a directory"),
        (["--deterministic-steps", "0"], "--deterministic-steps: 0; must be 1 or more"),
    ],
)
def test_mistakes_are_named(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        options.parse(["--cpu", *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_what_can_not_be_had_ends_before_anything_runs(scratch):
    (scratch / "short").write_text("too short")
    output = run_pilot(["--cpu", "--text", "short"], scratch, ranks=1, expected=2)
    assert "uniep.pilot: --text: 9 bytes; must be 66 or more" in output
    assert not (scratch / "pilot").exists()
    words = ["--cpu", "--schedule", "nonsense=1", "--parts", "turns", "--turns", "1", "--steps", "1", "--warm", "0"]
    output = run_pilot(words, scratch, ranks=1, expected=2)
    assert "uniep.pilot: --schedule: nonsense=1; " in output and not (scratch / "pilot").exists()


def test_uniep_disable_is_refused(scratch, monkeypatch):
    monkeypatch.setenv("UNIEP_DISABLE", "1")
    output = run_pilot(["--cpu"], scratch, ranks=1, expected=2)
    assert "UNIEP_DISABLE: 1; the arm uniep would be Megatron-core's own layer" in output


def test_small_models_and_bits_that_differ():
    assert "12 checks passed on 2 ranks" in run_ranks(2, HERE / "pilot_checks.py")


def equality(equal):
    return {"what": "the same again", "compared": "", "equal": equal, "bits": ""}


def test_on_gpus_bits_are_judged_in_deterministic_mode():
    good, bad = equality(True), equality(False)
    report = {"setting": {"device": "cuda"}, "failed_parts": {}, "bits": {"stock": [bad], "uniep": [bad]}}
    report["repeatable"] = {"bits": [good], "layers": 1}
    assert summary.passed(report)
    assert not summary.passed(report | {"repeatable": {"bits": [bad], "layers": 1}})
    assert not summary.passed(report | {"deterministic": {"uniep": {"bits": bad}}})
    assert summary.passed(report | {"deterministic": {"stock": {"bits": bad}}})
    assert not summary.passed(report | {"setting": {"device": "cpu"}})
    assert not summary.passed(report | {"failed_parts": {"kill": "why"}})
    assert not summary.passed(report | {"began_alike": False})


def test_the_job_that_is_killed_trains_on_what_the_pilot_has_read(tmp_path, monkeypatch):
    file, jobs = tmp_path / "text", []
    file.write_bytes(bytes(range(256)))
    data = text.Text(text.read(str(file))[0], 8, 2, seed=1)
    file.write_bytes(b"other words" * 20)  # as somebody may who edits it meanwhile
    own = object.__new__(parts.Parts)
    own.options = types.SimpleNamespace(model="tiny", text=str(file), seed=1, schedule="auto", cpu=True, bit_steps=4)
    own.setting, own.repeatable = types.SimpleNamespace(text=data), types.SimpleNamespace(size=sizes.SIZES["tiny"])
    own.folder, own.uninterrupted, own.report, own.tell = tmp_path, (None, [], ""), {}, print
    monkeypatch.setattr(parts.dist, "get_rank", lambda: 0)
    outcome = kill.Outcome(1, 3, 2, [], [], 4, True, True, "", "")
    monkeypatch.setattr(parts.kill, "kill_and_resume", lambda job, *_: jobs.append(job) or outcome)
    own.run_kill()
    again = text.Text(text.read(jobs[0].text)[0], 8, 2, seed=1)
    assert again.digest == data.digest != text.Text(file.read_bytes(), 8, 2, seed=1).digest
    assert all(torch.equal(*pair) for pair in zip(again.batch(0, 0), data.batch(0, 0), strict=True))


def test_other_bits_behind_a_kill_say_which():
    found = {"killed_rank": 1, "killed_in_step": 4, "checkpoint_of_step": 3, "steps": 4, "noticed": [], "silent": []}
    words = kill.apart([([1.5], "a" * 64), ([1.5], "a" * 64), ([1.25], "b" * 64)])
    told = summary.words_of_kill(found | {"resumed": True, "same_bits": False, "words": words})
    assert told.endswith(
        "with OTHER BITS than without the kill (without it: losses 1.5, aaaaaaaaaaaa; "
        "rank 0: losses 1.5, aaaaaaaaaaaa; rank 1: losses 1.25, bbbbbbbbbbbb)"
    )
    assert summary.words_of_kill(found | {"resumed": True, "same_bits": True, "words": ""}).endswith("without the kill")


def test_a_page_of_a_report_that_was_cut(run):
    report = run[1]
    whole = {"setting", "when", "command", "arms", "missing_arms", "missing_parts", "failed_parts"}
    for some in ((), ("preflight",), ("bits", "repeatable"), ("kill",), ("table", "preflight")):
        cut = {name: value for name, value in report.items() if name in whole | set(some)}
        cut |= {"missing_parts": ["turns: it did not come to its end"], "failed_parts": {"curves": "OSError: <no>"}}
        texts = " ".join(Page(page(cut)).texts)
        assert "turns: it did not come to its end" in texts and "OSError: <no>" in texts
        summary.words(cut)


def test_memory_that_the_process_keeps_is_no_single_arms():
    """The arm that runs first makes communicators; all have them from the second turn on."""
    used = {("stock", 0): 900.0, ("uniep", 0): 500.0, ("uniep", 1): 700.0, ("stock", 1): 690.0, ("stock", 2): 695.0}
    blocks = [
        turns.Block(arm, turn, False, [1.0], [2.0], "", "", [0.5], 1.0, mib, {}, [], [])
        for (arm, turn), mib in used.items()
    ]
    found = {row["arm"]: row["driver_mib"] for row in summary.table(blocks, sizes.SIZES["tiny"], 2)}
    assert found == {"stock": 695.0, "uniep": 700.0}
    assert summary.table(blocks[:1], sizes.SIZES["tiny"], 2)[0]["driver_mib"] == 900.0


def test_few_values_have_a_range_and_no_interval():
    six = turns.interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])._asdict()
    assert summary.range_or_interval(six) == "1.00 to 6.00"
    assert summary.range_or_interval(turns.interval([1.0, 2.0, 3.0, 4.0, 5.0])._asdict()) == "range 1.00 to 5.00"


def test_on_gpus_the_page_says_that_hosts_are_in_the_time_of_layers(run):
    report = run[1]
    on_gpus = report | {"setting": report["setting"] | {"device": "cuda"}}
    assert "waits for the host are in it" in page(on_gpus) and "waits for the host" not in page(report)


def fake_group(peer, synchronize):
    own = peers.own_process()
    processes = [own, own._replace(pid=peer)]
    return types.SimpleNamespace(
        transport="native", size=2, rank=0, processes=processes, synchronize=synchronize, process_group=None
    )


@pytest.mark.parametrize("how", ["error", "later", "silent", "stuck", "stopped"])
def test_a_dead_peer_is_noticed_while_the_main_thread_waits(how, monkeypatch):
    monkeypatch.setattr(watch, "PATIENCE_S", 0.5)
    peer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    stuck = threading.Event()

    asked = []

    def synchronize():
        asked.append(how)
        if how == "error" or (how == "later" and len(asked) == 3):
            raise TimeoutError("group: rank 1 ended")
        if how == "stuck":
            stuck.wait(60)

    noticed = []

    def tell(seen):
        noticed.append((seen, time.time()))

    other = fake_group(os.getpid(), synchronize)
    ended = threading.Event()
    thread = watch.watch(lambda: [other, fake_group(peer.pid, synchronize)], tell, ended)
    killed_at = None
    try:
        thread.join(0.3)
        assert thread.is_alive() and not noticed
        if how == "stopped":
            ended.set()
    finally:
        killed_at = time.time()
        peer.kill()
        peer.wait()
        thread.join(20)
        stuck.set()
    assert not thread.is_alive()
    if how == "stopped":
        assert not noticed
        return
    ((seen, told_at),) = noticed
    assert seen.words.startswith("gone: rank 1 (process ")
    assert isinstance(seen.error, TimeoutError) if how in ("error", "later") else seen.error is None
    assert killed_at <= seen.at <= told_at - (watch.PATIENCE_S if how in ("stuck", "silent") else 0)
    assert (len(asked) > 3) if how == "silent" else (len(asked) == {"error": 1, "later": 3, "stuck": 1}[how])


def test_seconds_of_who_noticed(run):
    """Before the pilot's own patience with UniEP's error, which is no time of UniEP's."""
    gone = {"gone_at": 10.5, "kind": "no error", "words": "gone: rank 1", "ended_at": 16.0, "last_words": ""}
    left = {0: gone, 2: gone | {"error_at": 12.0}}
    noticed = [kill._noticed(kill.Ended(rank, 1, content), 10.0) for rank, content in left.items()]
    assert [(one["gone_seconds"], one["error_seconds"]) for one in noticed] == [(0.5, None), (0.5, 2.0)]
    assert kill.Ended(0, 1, gone).has_noticed
    told = run[1]["kill"] | {"noticed": noticed, "several_clocks": True}
    words = summary.words_of_kill(told)
    assert "rank 0: process seen gone after 0.50 s by the pilot, no error: gone: rank 1" in words
    assert "rank 2: process seen gone after 0.50 s by the pilot, no error after 2.00 s" in words
    shown = page(run[1] | {"kill": told})
    assert "differences of their clocks" in shown and "differences of their clocks" not in page(run[1])


def test_a_rank_that_nccls_watchdog_ends_has_noticed(tmp_path):
    log = tmp_path / "log"
    log.write_text("hello\n[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)\nmore\n")
    ended = kill.Ended(0, -6, {"ended_at": 12.0, "last_words": kill._last_words(log)})
    assert ended.has_noticed and not kill.Ended(0, None, {}).has_noticed and not kill.Ended(0, 0, {}).has_noticed
    found = kill._noticed(ended, 10.0)
    assert (found["error_seconds"], found["kind"], found["gone_seconds"]) == (2.0, "signal 6", None)
    assert "WorkNCCL(SeqNum=3)" in found["words"]
    assert "not over after" in kill._words([kill.Ended(1, None, {"last_words": ""})])


def test_fingerprints():
    values = torch.randn(1001).bfloat16()
    values[3], values[700] = 1, 2  # two that differ, to be swapped
    number = int(fingerprint(values))
    assert number == int(fingerprint(values.clone())) == int(fingerprint(torch.cat([values, values])[1001:]))
    other = values.clone()
    other.view(torch.int16)[777] ^= 1
    swapped = values.clone()
    swapped[[3, 700]] = swapped[[700, 3]]
    numbers = {number, *(int(fingerprint(one)) for one in (other, swapped, values[:-1], values.float()))}
    assert len(numbers) == 5
    assert int(fingerprint(torch.zeros(0))) == 0


def test_fingerprints_in_parts(monkeypatch):
    values = torch.randn(4096)
    number = int(fingerprint(values))
    monkeypatch.setattr(sys.modules["uniep.pilot.fingerprint"], "_CHUNK", 100)
    assert int(fingerprint(values)) == number


def test_the_environment_of_a_run(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("NCCL", "NVTE", "UNIEP", "CU"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("UNIEP_LIBRARY", "somewhere")
    world.prepare_environment()
    assert world.environment() == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "NCCL_ALGO": "Ring",
    }


def test_collectives_beside_layers_alone_are_bounded(monkeypatch):
    """Of the arms' all-to-alls each takes what NCCL gives it."""
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    told, first = [], []

    def initialize(*_sizes, nccl_communicator_config_path, high_priority_stream_groups, **_options):
        path = nccl_communicator_config_path
        told.append(path and json.loads(pathlib.Path(path).read_text()))
        first.append(high_priority_stream_groups)

    monkeypatch.setattr(parallel_state, "initialize_model_parallel", initialize)
    training.set_up_parallelism(2)
    monkeypatch.setenv("NCCL_MAX_CTAS", "4")
    training.set_up_parallelism(2)
    monkeypatch.delenv("NCCL_MAX_CTAS")
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    training.set_up_parallelism(2)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    training.set_up_parallelism(2, bounded=False)
    names = ["dp", "dp_cp", "ep_dp", "pp"]
    assert told == [{name: {"max_ctas": 8} for name in names}, None, None, None]
    assert first == [names, names, [], []]
    source = inspect.getsource(parallel_state)
    assert all(f'get_nccl_options("{name}", ' in source for name in ("ep", *told[0]))
    if torch.distributed.is_nccl_available():
        assert parallel_state.get_nccl_options("ep", told[0]) is None
        for name in first[0]:
            parallel_state.overwrite_nccl_comm_cfgs(told[0], name, ("is_high_priority_stream", True))
        made = types.SimpleNamespace(options=parallel_state.get_nccl_options("dp_cp", told[0]))
        group = types.SimpleNamespace(_get_backend=lambda _: made)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda _: 2)
        monkeypatch.setattr(torch.distributed, "get_backend_config", lambda _: "cuda:nccl")
        assert reserved_sms.most_ctas(group) == 8 and reserved_sms.goes_first(group)


def test_a_missing_yaml_is_named(monkeypatch):
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="PyYAML: not installed"):
        world.communicators(bounded=True)


def test_layers():
    assert sizes.of_model("qwen3-30b", 4).layers == 4
    with pytest.raises(ValueError, match="--layers: 1; deepseek-v2-lite has 27, and at least 2"):
        sizes.of_model("deepseek-v2-lite", 1)
    with pytest.raises(ValueError, match="--bit-layers: 28; "):
        sizes.of_model("deepseek-v2-lite", 28, "--bit-layers")


def test_text_is_a_function_of_seed_step_and_replica():
    data = text.Text(bytes(range(256)) * 20, 32, 2, 7)
    tokens, labels = data.batch(3, 1)
    assert tokens.shape == (2, 32) and (tokens[:, 1:] == labels[:, :-1]).all()
    assert (data.batch(3, 1)[0] == tokens).all()
    assert not (data.batch(4, 1)[0] == tokens).all() and not (data.batch(3, 0)[0] == tokens).all()


def test_a_package_without_a_version_is_here(tmp_path, monkeypatch):
    assert preflight.versions()["DeepEP and Hybrid-EP"] == "not installed"
    (tmp_path / "deep_ep.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert preflight.versions()["DeepEP and Hybrid-EP"] == "here, without a version"


def test_drawings_escape_names():
    Page(drawing.curves({"<a>": [1.0, 2.0], "b": [2.0]}))
    Page(drawing.bars([{"name": "<a>", "lane": "forward", "begin_ms": 0.0, "end_ms": 1.0}], 2.0))
