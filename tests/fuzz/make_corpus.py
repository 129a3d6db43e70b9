#!/usr/bin/env python3
"""Writes the seed corpus of the fuzz targets: tests/fuzz/make_corpus.py, from any folder."""

import json
import pathlib
import struct

CORPUS = pathlib.Path(__file__).parent / "corpus"


def write(target, name, data):
    path = CORPUS / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)


def npy(header, data=b"", major=1, minor=0, length=None):
    text = header.encode() + b"\n"
    size = struct.pack("<H" if major == 1 else "<I", len(text) if length is None else length)
    return b"\x93NUMPY" + bytes([major, minor]) + size + text + data


def npy_header(dtype, shape, fortran="False"):
    return f"{{'descr': '{dtype}', 'fortran_order': {fortran}, 'shape': {shape}, }}"


def write_npy():
    ids = struct.pack("<6i", 0, 3, -1, 2, 1, 0)
    write("npy", "int32", npy(npy_header("<i4", "(3, 2)"), ids))
    write("npy", "int64", npy(npy_header("<i8", "(1, 2)"), struct.pack("<2q", 7, -1)))
    write("npy", "float32", npy(npy_header("<f4", "(3,)"), struct.pack("<3f", 0.5, -1.0, 3e38)))
    write("npy", "scalar", npy(npy_header("<f4", "()"), struct.pack("<f", 1.0)))
    write("npy", "empty", npy(npy_header("<i4", "(0, 8)")))
    write("npy", "version_2", npy(npy_header("<i4", "(3, 2)"), ids, major=2))
    write("npy", "version_3", npy(npy_header("<i4", "(6,)"), ids, major=3))
    write("npy", "other_order_of_keys", npy('{"shape":(2,3),"fortran_order":False,"descr":"<i4"}', ids))
    write("npy", "fortran_order", npy(npy_header("<i4", "(3, 2)", "True"), ids))
    write("npy", "big_endian", npy(npy_header(">i4", "(3, 2)"), ids))
    write("npy", "structured", npy("{'descr': [('x', '<i4')], 'fortran_order': False, 'shape': (6,)}", ids))
    write("npy", "truncated", npy(npy_header("<i4", "(3, 3)"), ids))
    write("npy", "left_over", npy(npy_header("<i4", "(5,)"), ids))
    write("npy", "overflow", npy(npy_header("<i4", "(4294967296, 4294967296, 0)")))
    write("npy", "long_header", npy(npy_header("<i4", "(6,)"), ids, major=2, length=0xFFFFFFFF))


def safetensors(header, data=b""):
    text = header if isinstance(header, str) else json.dumps(header, separators=(",", ":"))
    return struct.pack("<Q", len(text)) + text.encode() + data


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_safetensors():
    data = bytes(range(64))
    write("safetensors", "bf16", safetensors({"x": tensor("BF16", [4, 8], 0, 64)}, data))
    write("safetensors", "several", safetensors({
        "probs": tensor("F32", [2, 2], 0, 16), "x": tensor("BF16", [2, 4], 16, 32),
        "ids": tensor("I64", [2], 32, 48), "small": tensor("I32", [4], 48, 64)}, data))
    write("safetensors", "metadata", safetensors({
        "__metadata__": {"format": "pt", "step": "12"}, "w1": tensor("F32", [16], 0, 64)}, data))
    write("safetensors", "empty_tensor", safetensors({
        "a": tensor("F32", [0, 3], 0, 0), "b": tensor("U8", [64], 0, 64)}, data))
    write("safetensors", "scalar", safetensors({"loss": tensor("F32", [], 0, 4)}, data[:4]))
    write("safetensors", "unknown_dtype", safetensors({"q": tensor("F4", [128], 0, 64)}, data))
    write("safetensors", "no_tensor", safetensors({}))
    write("safetensors", "hole", safetensors({"a": tensor("U8", [8], 8, 16)}, data[:16]))
    write("safetensors", "overlap", safetensors({
        "a": tensor("U8", [16], 0, 16), "b": tensor("U8", [16], 8, 24)}, data[:24]))
    write("safetensors", "overflow", safetensors({"a": tensor("F64", [2**62, 2**62], 0, 8)}, data[:8]))
    write("safetensors", "key_twice", safetensors(
        '{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', data[:1]))
    write("safetensors", "escaped_name", safetensors(
        '{"\\u00e9\\n\\"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', data[:1]))
    write("safetensors", "nested", safetensors('{"a":{"shape":[[1]]}}'))
    write("safetensors", "long_header", struct.pack("<Q", 2**63) + b"{}")


def write_schedule():
    fields = {
        "fusion": "pairs", "dispatch.transport": "push", "dispatch.dedup": "off", "comm.where": "sms",
        "comm.dispatch_sms": 1, "comm.combine_sms": 1, "comm.reduce_sms": 1, "comm.chunk_bytes": 1024,
        "comm.stages": 2, "comm.reserve_sms": 0, "order.experts_per_wave": 2, "order.interleave": "phased",
        "order.source_rotation": "off", "order.raster": 4, "queue": "dynamic", "tile.m": 64, "tile.n": 128,
        "tile.k": 32, "tile.stages": 3, "tile.cluster": 1, "tile.pipeline": "pingpong",
        "combine.transport": "staged", "combine.column_chunks": 2, "backward.wgrad": "after",
        "save.xg": "redispatch"}
    stages = ["fc1", "fc2", "dgrad_fc2", "dgrad_fc1", "wgrad_fc2", "wgrad_fc1"]
    write("schedule", "auto", "auto")
    write("schedule", "one_field", "fusion=layer")
    write("schedule", "text", ",".join(f"{name}={value}" for name, value in fields.items()))
    write("schedule", "json", json.dumps(fields))
    write("schedule", "json_layout", json.dumps({"fusion": "none", "dispatch.dedup": True, "tile.n": 256}, indent=2))
    write("schedule", "stage_tiles", ",".join(f"tile.{stage}.{field}" for stage, field in zip(
        stages, ["m=64", "n=128", "k=128", "stages=8", "cluster=2", "pipeline=cooperative"])))
    write("schedule", "stage_tiles_json", json.dumps({f"tile.{stage}.n": 64 for stage in stages}))
    write("schedule", "illegal_whole", "comm.where=sms,comm.dispatch_sms=1000,order.experts_per_wave=500")
    write("schedule", "given_twice", "queue=static,queue=dynamic")
    write("schedule", "unknown_field", "tile.q=1")
    write("schedule", "out_of_range", "order.raster=99999999999999999999")
    write("schedule", "nested_json", '{"tile": {"m": 64}}')
    write("schedule", "json_numbers", '{"tile.m": -1, "tile.n": 1e400, "tile.k": null}')


def write_trace():
    def name(what, pid, tid, text):
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": text}}

    def tile(stage, pid, tid, begin, length):
        return {"ph": "X", "cat": stage, "name": stage + " e0 m0 n0", "pid": pid, "tid": tid, "ts": begin, "dur": length,
                "args": {"expert": 0, "m": 0, "n": 0}}

    events = [name("process_name", 1, 0, "rank 0"), name("thread_name", 1, 1, "worker 0 copy"),
              name("thread_name", 1, 2, "worker 0 compute"), name("process_name", 2, 0, "rank 1"),
              {"ph": "i", "s": "g", "name": "forward", "pid": 1, "tid": 0, "ts": 0.0},
              tile("dispatch", 1, 1, 1.5, 10.25), tile("wait", 1, 2, 0, 11), tile("fc1", 1, 2, 12, 40),
              tile("fc2", 2, 3, 60.125, 0.001), tile("reduce", 2, 3, 61, 0)]
    said = {"engine": "cuda", "device": "NVIDIA H200", "gpus": "2", "compute_units": "132", "workers": "132",
            "tokens": "64,32", "routing": "zipf:1.2", "seed": "1", "activation": "swiglu:alpha=1.702,limit=7",
            "router_weight": "activation", "bias": "no", "combine_groups": "0", "wgrad": "fp32", "state": "paused",
            "shape": "64,32,8,2", "schedule": "fusion=layer,queue=static"}
    mark = events[4]
    begun = [events[:4] + [{**mark, "args": args}] + events[5:] for args in (
        said, {**said, "tokens": ",".join(["65536"] * 70)}, {"shape": "64,32,8,2", "schedule": "fusion=none"})]
    backward = [{**mark, "name": "backward", "ts": 50.0, "args": {**said, "routing": "file"}}]
    write("trace", "call", json.dumps({"traceEvents": begun[0]}))
    write("trace", "two_calls", json.dumps({"traceEvents": begun[0] + backward}))
    told = [name("thread_name", 2, 3, "worker 0 compute"), *begun[0]]  # all lanes are workers'
    write("trace", "numbers", json.dumps({"traceEvents": told}))
    write("trace", "equal_marks", json.dumps({"traceEvents": [*told, begun[0][4]]}))
    write("trace", "many_ranks", json.dumps({"traceEvents": begun[1]}))
    write("trace", "old_call", json.dumps({"traceEvents": begun[2]}))
    write("trace", "run", json.dumps({"displayTimeUnit": "ms", "otherData": {"title": "E 8 K 2"}, "traceEvents": events}))
    write("trace", "list", json.dumps([tile("dgrad_fc1", 1, 1, 0, 1e6), tile("unknown", 1, 1, 5, 1e-3)]))
    write("trace", "markup", json.dumps([name("thread_name", 1, 1, "<a href=\"x\">&amp;\u0000</a>"),
                                         tile("<b>", 1, 1, 0, 1)]))
    write("trace", "no_slice", json.dumps({"traceEvents": events[:5]}))
    write("trace", "no_events", json.dumps({"otherData": {"title": 3}}))
    write("trace", "negative_duration", json.dumps([tile("fc1", 1, 1, 0, -1)]))
    write("trace", "huge_times", json.dumps([tile("fc1", 1, 1, 1e300, 1e300), tile("fc2", 1, 2, -1e300, 0)]))
    write("trace", "far", json.dumps([tile("fc1", 1, 1, 1e18, 0)]))
    write("trace", "last", json.dumps([tile("fc1", 1, 1, 4e15, 0)]))
    write("trace", "opposite", json.dumps([tile("fc1", 1, 1, -1.7e308, 1.7e308), tile("fc1", 1, 1, 1.7e308, 1.7e308)]))
    write("trace", "short", json.dumps([tile("fc1", 1, 1, 0, 5e-324)]))
    write("trace", "ids", json.dumps([tile("fc1", -2**63, 2**63 - 1, 0, 1)]))


def write_calibration():
    layer = {"shape": {"hidden": 512, "intermediate": 256, "experts": 16, "topk": 2}, "ranks": 1, "tokens": 256,
             "direction": "forward", "state": "sustained", "schedule": "auto", "held_out": False, "ms": [0.1, 0.2]}
    whole = {"format": "uniep calibration", "version": 1, "device": "GPU", "compute_units": 132, "layers": [layer],
             "dropped": ["a layer: why"]}
    write("calibration", "one_layer", json.dumps(whole))
    write("calibration", "later_version", json.dumps({**whole, "version": 2}))
    write("calibration", "no_time", json.dumps({**whole, "layers": [{**layer, "ms": []}]}))
    write("calibration", "many_slots", json.dumps({**whole, "layers": [{**layer, "tokens": 65536, "ranks": 8}]}))
    write("calibration", "truncated", json.dumps(whole)[:200])
    write("calibration", "deep", "[" * 4000)


def write_tuned():
    seeds = CORPUS / "tuned"
    # two_entries is what `uniep tune --ranks 2 --workers 2 --shape 64,32,8,2 --tokens 64 --export FILE` wrote.
    write("tuned", "empty", json.dumps({"format": 2, "schedules": []}))
    write("tuned", "truncated", (seeds / "two_entries").read_text()[:700])
    write("tuned", "later_format", json.dumps({"format": 3, "schedules": []}))


def write_tuner():
    def text(value):
        return struct.pack("<I", len(value)) + value

    def result(base, schedule, verdict, *ratios):
        return text(base) + text(schedule) + struct.pack(f"<BI{len(ratios)}f", verdict, len(ratios), *ratios)

    head = struct.pack("<IQi", 1, 0x0123456789ABCDEF, 3)
    slot = struct.pack("<I", 2) + result(b"fusion=layer", b"fusion=pairs", 1, 0.5, 1.25) + result(b"", b"x", 4)
    whole = head + slot + struct.pack("<I", 0)
    write("tuner", "results", whole)
    write("tuner", "truncated", whole[:-5])
    write("tuner", "left_over", whole + b"x")
    write("tuner", "later_format", struct.pack("<I", 2) + whole[4:])
    write("tuner", "many", head + struct.pack("<I", 2**32 - 1) + slot)
    write("tuner", "long_text", head + struct.pack("<II", 1, 2**31) + slot)
    write("tuner", "ratio", head + struct.pack("<I", 1) + result(b"a", b"b", 1, float("nan")))
    write("tuner", "verdict", head + struct.pack("<I", 1) + result(b"a", b"b", 5))
    lines = [("untried", "fusion=pairs", ""), ("failed", "order.raster=2", "rank 1 waits"), ("wrong", "", "a\tb")]
    journal = "".join("\t".join(line) + "\n" for line in lines)
    write("tuner", "journal", journal)
    write("tuner", "journal_torn", "in the running\tx\n" + journal[:-6])
    write("tuner", "journal_other", "\n\nbest\ta\tb\nslower\t\t")


def write_machine():
    machine = json.loads((CORPUS.parent.parent.parent / "machines" / "h200.json").read_text())

    def shorten(value):  # below the longest input of scripts/fuzz.sh
        if isinstance(value, dict):
            return {key: "x" if key == "from" else shorten(one) for key, one in value.items()}
        return [shorten(one) for one in value] if isinstance(value, list) else value

    machine = shorten(machine)
    machine["links"][0]["rates"] = machine["links"][0]["rates"][:1]
    text = json.dumps(machine, separators=(",", ":"))
    write("machine", "whole", text)
    write("machine", "truncated", text[:1000])
    write("machine", "tomorrow", text.replace('"version":1', '"version":2'))
    write("machine", "negative", text.replace('"value":132', '"value":-132'))
    write("machine", "huge", text.replace('"value":132', '"value":1e400'))
    write("machine", "unknown_stage", text.replace('"reduce"', '"lunch"'))
    write("machine", "twice", '{"name":"a",' + text[1:])
    write("machine", "deep", "[" * 4000)
    deep = "[" * 4000 + "]" * 4000
    write("machine", "deep_format", f'{{"format":{deep},"version":2}}')
    write("machine", "deep_unknown", f'{{"format":"uniep machine","version":2,"x":{deep},"y":1,"z":2,"name":3}}')


if __name__ == "__main__":
    write_machine()
    write_npy()
    write_safetensors()
    write_schedule()
    write_trace()
    write_calibration()
    write_tuned()
    write_tuner()
