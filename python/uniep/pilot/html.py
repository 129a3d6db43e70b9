"""report.html: one file, nothing outside of it."""

from __future__ import annotations

import html
import typing
from collections.abc import Iterable, Sequence

from uniep.pilot.drawing import bars, curves
from uniep.pilot.summary import Report, all_bits, range_or_interval, words_of_kill
from uniep.pilot.watch import PATIENCE_S

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1b1f24; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #d0d7de; }
table { border-collapse: collapse; margin: .8em 0; } th, td { text-align: left; padding: .3em .8em .3em 0; }
th { border-bottom: 2px solid #d0d7de; } td { border-bottom: 1px solid #eaeef2; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.good { color: #1a7f37; } .bad { color: #cf222e; font-weight: 600; } .note { color: #57606a; }
pre { background: #f6f8fa; padding: .8em; overflow-x: auto; } svg { max-width: 100%; height: auto; }
"""


def _escape(value: typing.Any) -> str:
    return html.escape(str(value))


class _Number(str):
    """A cell that is set to the right."""


def _table(head: Sequence[str], rows: Iterable[Sequence[typing.Any]]) -> str:
    lines = ["<table><tr>" + "".join(f"<th>{_escape(one)}</th>" for one in head) + "</tr>"]
    for row in rows:
        cells = [
            f'<td class="number">{_escape(one)}</td>'
            if isinstance(one, _Number)
            else f"<td>{one if isinstance(one, _Markup) else _escape(one)}</td>"
            for one in row
        ]
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return "\n".join([*lines, "</table>"])


class _Markup(str):
    """HTML already."""


def _verdict(good: bool, words: str) -> _Markup:
    return _Markup(f'<span class="{"good" if good else "bad"}">{_escape(words)}</span>')


def _with_interval(one: Report) -> _Number:
    return _Number(f"{one['median']:.2f} ({range_or_interval(one)})")


def _or_unknown(value: float | None, form: str) -> _Number:
    return _Number("not measured" if value is None else format(value, form))


def _results(report: Report) -> list[str]:
    rows = []
    for one in report["table"]:
        beside = one["speed_beside_stock"]
        rows.append(
            [
                one["arm"],
                _with_interval(one["step_ms"]),
                _Number("not measured" if beside is None else f"{beside[0]:.2f} to {beside[1]:.2f}"),
                _with_interval(one["moe_ms"]),
                _Number(f"{one['tokens_per_second_a_rank']:.0f}"),
                _or_unknown(one["peak_mib"], ".0f"),
                _or_unknown(one["driver_mib"], ".0f"),
                _Number(f"{one['last_loss']:.4f}"),
                _or_unknown(one["rows_max_over_mean"], ".2f"),
            ]
        )
    head = ["arm", "step, ms", "speed beside stock, by turns", "in MoE layers, ms", "tokens/s a rank"]
    head += ["peak memory, MiB", "memory by the driver, MiB", "loss", "rows, max / mean"]
    steps = report["table"][0]["step_ms"]["steps"]
    events = "Time in MoE layers is from separate steps with hooks"
    if report["setting"]["device"] != "cpu":
        events += (
            ", between events on the GPU's stream: where the host launches more slowly than the GPU runs, waits for "
            "the host are in it, and it is no time of kernels"
        )
    return [
        "<h2>Results</h2>",
        _table(head, rows),
        f'<p class="note">Medians of {steps} steps, times of the slowest rank; in brackets the 95 % interval of the '
        "median by order statistics, which takes steps for independent; of fewer than six, their range. Arms "
        f"took turns. {events}. Memory by the driver is that of turns behind the first where there are several, and "
        "has in it what the process keeps of all arms: communicators, kernels, buffers of DeepEP and Hybrid-EP.</p>",
        _table(["arm", "what it is"], report["arms"].items()),
    ]


def _missing(report: Report) -> list[str]:
    parts = ["<h2>What is missing</h2>"]
    if report["missing_arms"]:
        parts.append(_table(["arm", "why"], report["missing_arms"].items()))
    else:
        parts.append("<p>No arm that was asked for.</p>")
    if report["missing_parts"]:
        parts.append(f"<p>Parts that did not run: {_escape('; '.join(report['missing_parts']))}.</p>")
    if report["failed_parts"]:
        parts.append(_table(["part that failed", "why"], report["failed_parts"].items()))
    setting = report["setting"]
    if setting["layers"] < setting["layers_of_the_model"]:
        parts.append(
            f"<p>The model ran with {setting['layers']} of its {setting['layers_of_the_model']} layers. Nothing is "
            "extrapolated to the whole.</p>"
        )
    if setting["device"] == "cpu":
        parts.append("<p>This ran on CPUs: its times say nothing about GPUs.</p>")
    return parts


def _bits(report: Report) -> list[str]:
    rows = [
        [arm, one["what"], one["compared"], _verdict(one["equal"], "equal" if one["equal"] else "differ"), one["bits"]]
        for arm, one in all_bits(report)
    ]
    parts = ["<h2>Bits</h2>", _table(["arm", "compared with itself", "what of it", "bits", "digits begin"], rows)]
    if report["setting"]["device"] != "cpu":
        parts.append(
            '<p class="note">Without deterministic mode the backward of attention adds in another order each time on '
            "GPUs, so nobody promises bits there.</p>"
        )
    if "repeatable" in report:
        parts.append(
            f'<p class="note">Other Schedules, restarts and batches: {report["repeatable"]["layers"]} layers.</p>'
        )
    if report.get("deterministic"):
        usual = {one["arm"]: one["step_ms"] for one in report.get("table", [])}
        rows = [
            [
                arm,
                _with_interval(one["step_ms"]),
                _Number(f"{one['step_ms']['median'] / usual[arm]['median']:.2f}" if arm in usual else "not measured"),
            ]
            for arm, one in report["deterministic"].items()
        ]
        parts += ["<h3>Megatron's deterministic mode</h3>", _table(["arm", "step, ms", "times the usual step"], rows)]
    return parts


def _kill(report: Report) -> list[str]:
    kill = report["kill"]
    rows = [
        [
            one["rank"],
            *(_Number("" if one[name] is None else f"{one[name]:.2f} s") for name in ("gone_seconds", "error_seconds")),
            one["kind"],
            one["words"],
        ]
        for one in kill["noticed"]
    ]
    note = (
        "The process is seen gone by a thread of the pilot's, which then asks UniEP for its error for up to "
        f"{PATIENCE_S:.0f} s."
    )
    if kill["several_clocks"]:
        note += " Ranks are on several hosts: seconds have the differences of their clocks in them."
    good = kill["resumed"] and kill["same_bits"] and not kill["silent"]
    return [
        "<h2>A rank is killed</h2>",
        f"<p>{_verdict(good, words_of_kill({**kill, 'noticed': []}))}.</p>",
        _table(["rank that noticed", "process seen gone after", "error after", "error", "words"], rows),
        f'<p class="note">{note}</p>',
    ]


def _curves(report: Report) -> list[str]:
    found = report["curves"]
    parts = ["<h2>Loss</h2>", curves(found["losses"])]
    apart = found["spread"]
    if apart is not None:
        text = (
            f"Of means over {apart['window']} steps UniEP is at most {apart['uniep']:.4f} from stock (mean "
            f"{apart['uniep_mean']:.4f}); stock from another seed at most {apart['seeds']:.4f} (mean "
            f"{apart['seeds_mean']:.4f}): {'inside' if apart['inside'] else 'outside'} the spread of two seeds."
        )
        parts.append(f"<p>{_verdict(apart['inside'], text)}</p>")
    return parts


def _timeline(report: Report) -> list[str]:
    note = "Rank 0, one step with hooks; all arms on one scale. Backward runs below forward."
    parts = ["<h2>A step</h2>", f'<p class="note">{note}</p>']
    end = max(span["end_ms"] for spans in report["timeline"].values() for span in spans)
    for arm, spans in report["timeline"].items():
        parts += [f"<h3>{_escape(arm)}</h3>", bars(spans, end)]
    return parts


def _stats(report: Report) -> list[str]:
    if not report["stats"]:
        return []
    rows = [[_Number("not known") if value is None else value for value in one.values()] for one in report["stats"]]
    shown = [[_Number(f"{one:.3f}") if isinstance(one, float) else one for one in row] for row in rows]
    return [
        "<h2>What UniEP's layers say of themselves</h2>",
        _table([name.replace("_", " ") for name in report["stats"][0]], shown),
        '<p class="note">uniep.stats() of rank 0, behind the traced steps.</p>',
    ]


def _preflight(report: Report) -> list[str]:
    found = report["preflight"]
    parts = ["<h2>Preflight</h2>", _table(["", ""], [*found["versions"].items(), *found["fused"].items()])]
    rows = [
        [one["save"], *(_Number(f"{one[name]:.1f}") for name in ("saved", "workspace", "symmetric"))]
        for one in found["memory_mib_a_layer"]
    ]
    parts += [
        "<h3>Memory of a layer in UniEP, MiB</h3>",
        _table(["save", "saved", "workspace", "symmetric"], rows),
        '<p class="note">What the library asks for, for routing of even probability, on the rank that needs most. '
        "Saved: each layer, from forward to backward. Workspace: while a call runs. Symmetric: once for all layers."
        "</p>",
        "<h3>Flags that must change</h3>",
    ]
    if found["flags"] is None:
        parts.append("<p>No --config was given; the pilot's own configuration needs no change.</p>")
    elif not found["flags"]:
        parts.append("<p>None.</p>")
    else:
        parts.append(f"<pre>{_escape(chr(10).join(found['flags']))}</pre>")
    return parts


def _reserved(report: Report) -> list[str]:
    rows = [
        [one["arm"], _with_interval(one["step_ms"]), _with_interval(one["moe_ms"])] for one in report["reserve_sms"]
    ]
    rows += [[arm, _verdict(False, "ended in a time-out"), why] for arm, why in report.get("timed_out", {}).items()]
    return [
        "<h2>SMs left to NCCL</h2>",
        _table(["arm", "step, ms", "in MoE layers, ms"], rows),
        '<p class="note">Beside the same overlapped reductions, in turns of their own; the first is "auto", which '
        "leaves as many as the collectives can take at the same time. With fewer a step can wait for ever.</p>",
    ]


_SECTIONS = {
    "table": _results,
    "reserve_sms": _reserved,
    "bits": _bits,
    "kill": _kill,
    "curves": _curves,
    "timeline": _timeline,
    "stats": _stats,
    "preflight": _preflight,
}


def page(report: Report) -> str:
    """The report as HTML; sections whose part did not run are left out, and named."""
    setting = report["setting"]
    variables = [f"{name}={value}" for name, value in setting["environment"].items()]
    title = f"UniEP pilot: {setting['model']}, {setting['ranks']} ranks on {setting['device']}"
    parts = [
        f"<h1>{_escape(title)}</h1>",
        f"<p>{_escape(report['when'])}: {setting['layers']} layers, {setting['tokens_a_rank_and_step']} tokens a rank "
        f"and step, Transformer Engine {'there' if setting['transformer_engine'] else 'not there'}, "
        f"{'attention and routers as CUDA graphs, ' if setting.get('cuda_graphs') else ''}text: "
        f"{_escape(setting['text'])}, seed {setting['seed']}.</p>",
        f"<pre>{_escape(' '.join([*variables, report['command']]))}</pre>",
    ]
    if setting.get("communicators"):
        told = "; ".join(f"{name}: {one['max_ctas']}" for name, one in setting["communicators"].items())
        parts.append(
            f"<p class=\"note\">CTAs at most of NCCL's collectives beside layers, in all arms, by Megatron's groups: "
            f"{told}. Other groups, expert parallelism's too, are NCCL's own choice.</p>"
        )
    if setting.get("high_priority_groups"):
        parts.append(
            '<p class="note">In streams of high priority, in all arms: the collectives of '
            f"{', '.join(setting['high_priority_groups'])}. UniEP's layers work on the SMs that they leave to these "
            "until one comes, if their schedule lends.</p>"
        )
    if not report.get("began_alike", True):
        words = "The arms did not begin with the same parameters: one says nothing about another."
        parts.append(f"<p>{_verdict(False, words)}</p>")
    if "table" not in report:
        parts += _missing(report)
    for name, section in _SECTIONS.items():
        if name in report:
            parts += section(report)
        if name == "table":
            parts += _missing(report)
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
