"""What holds for the sources as files: which folder includes which, and the lane of every test."""

import collections
import json
import pathlib
import re
import shutil
import subprocess

import pytest

from conftest import BUILD

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = {".h", ".cpp", ".cu", ".c"}
LANES = {("cpu",), ("compile",), ("performance",), ("gpu",), ("two_gpus",), ("gpu", "two_gpus")}
PUBLIC = "include/uniep"
Edges = dict[tuple[str, str], set[str]]


def drawn() -> tuple[list[str], set[tuple[str, str]]]:
    """The modules of docs/architecture.md in their order, and the arrows between them: (from, to)."""
    section = (ROOT / "docs/architecture.md").read_text().split("\n## Modules\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \|[^|]*\|([^|]*)\|$", section, re.MULTILINE)
    return [room for room, _ in rows], {
        (room, target) for room, cell in rows for target in re.findall(r"`([^`]+)`", cell)
    }


def room_of(path: pathlib.Path, rooms: list[str]) -> str:
    """The innermost room that a file below src/ or include/ is in."""
    name = path.relative_to(ROOT).as_posix().removeprefix("src/")
    return max((room for room in rooms if name.startswith(room + "/")), key=len, default="")


def included(source: pathlib.Path) -> list[pathlib.Path]:
    """The project's headers that a file includes."""
    found = []
    for name in re.findall(r'^\s*#\s*include\s*["<]([^">]+)[">]', source.read_text(), re.MULTILINE):
        found += [
            path for path in (ROOT / "src" / name, ROOT / "include" / name, source.parent / name) if path.exists()
        ][:1]
    return found


def real(rooms: list[str]) -> Edges:
    """The arrows that the files make: (from, to) -> the files that make it."""
    edges: Edges = collections.defaultdict(set)
    for folder in ("src", "include"):
        for source in sorted((ROOT / folder).rglob("*")):
            if source.suffix not in SOURCES:
                continue
            own = room_of(source, rooms)
            assert own, f"{source.relative_to(ROOT)} is in none of the modules of docs/architecture.md"
            for header in included(source):
                other = room_of(header, rooms)
                assert other, f"{source.relative_to(ROOT)} includes {header}, which is in no module"
                if other != own:
                    edges[own, other].add(f"{source.relative_to(ROOT)} includes {header.relative_to(ROOT)}")
    return edges


def test_arrows_are_those_that_are_drawn():
    rooms, arrows = drawn()
    edges = real(rooms)
    assert len(rooms) > 10 and len(edges) > 30
    everywhere = {edge for edge in edges if edge[1] == PUBLIC}
    missing = sorted(text for edge in edges.keys() - arrows - everywhere for text in edges[edge])
    assert not missing, "docs/architecture.md does not draw:\n" + "\n".join(missing)
    stale = sorted(arrows - edges.keys())
    assert not stale, f"docs/architecture.md draws what no file does: {stale}"


def test_arrows_point_down():
    rooms, _ = drawn()
    upward = {edge: sorted(files) for edge, files in real(rooms).items() if rooms.index(edge[1]) < rooms.index(edge[0])}
    assert not upward


def test_public_headers_and_examples_need_nothing_inside():
    for folder in (PUBLIC, "examples"):
        for source in (ROOT / folder).rglob("*"):
            inside = (
                [header for header in included(source) if "src" in header.parts] if source.suffix in SOURCES else []
            )
            assert not inside, f"{source} includes {inside}"


def test_the_header_of_all_includes_the_whole_public_interface():
    folder = ROOT / "include/uniep"
    whole = {path.name for path in included(folder / "uniep.h")}
    c = {path.name for path in folder.glob("c_*.h")}
    assert {path.name for path in folder.glob("*.h")} - c - {"export.h", "uniep.h"} == whole  # a macro of the others
    assert {path.name for path in included(folder / "c_api.h")} == c - {"c_api.h"}


def test_no_file_is_longer_than_600_lines():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    sources = [name for name in tracked if pathlib.Path(name).suffix in SOURCES | {".py", ".sh"}]
    assert len(sources) > 300
    long = [name for name in sources if (ROOT / name).exists() and len((ROOT / name).read_text().splitlines()) > 600]
    assert not long


MOST_ARGUMENTS = 5
MORE_ARGUMENTS = {
    "include/uniep/layer.h": {"forward", "backward"},  # the layer's main calls, whose last argument has a default
    "src/api/layer.cpp": {"forward", "backward"},
    "src/comm/nccl_library.h": {"(*all_reduce)"},  # NCCL's
}
# Not names of functions, but words that a list in parentheses may follow.
KEYWORDS = {"if", "for", "while", "switch", "return", "sizeof", "catch", "decltype", "alignas", "asm", "volatile"}
TYPE = r"(?:(?:const|unsigned|signed|typename|struct)\s+)*[A-Za-z_][\w:]*(?:\s*<.*>)?(?:::\w+)*(?:\s+const)?"
# Beside its type, as clang-format has it; the star of a product is not.
POINTER = r"(?:[*&]+|\.\.\.)?(?:\s*(?:const|__restrict\w*)\b)?"
NAME = r"(?:[A-Za-z_]\w*(?:\s*\[[^\]]*\])*|\(\s*[*&]\s*\w*\s*\)\s*[(\[].*[)\]])"
NAMED = re.compile(rf"(?:\[\[\w+\]\]\s*)?{TYPE}{POINTER}\s+{NAME}(?:\s*=.*)?", re.DOTALL)
UNNAMED = re.compile(TYPE + POINTER, re.DOTALL)


def without_text(source: str) -> str:
    """A C++ source with its comments and strings emptied; lines keep their numbers."""

    def blank(match: re.Match[str]) -> str:
        text = match.group(0)
        return ("" if text[0] == "/" else '""') + "\n" * text.count("\n")

    pattern = r'R"(\w*)\(.*?\)\1"|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\''
    return re.sub(pattern, blank, source, flags=re.DOTALL)


def arguments_of(inside: str) -> list[str]:
    """What stands between the commas that are in no brackets."""
    found, depth, current = [], 0, ""
    for i, letter in enumerate(inside):
        depth += (letter in "([{<") - (letter in ")]}" or (letter == ">" and inside[i - 1 : i] != "-"))
        if letter == "," and depth == 0:
            found.append(current.strip())
            current = ""
        else:
            current += letter
    return [*found, current.strip()]


def with_many_arguments(source: str) -> list[tuple[int, str, int]]:
    """(line, name, arguments) of each function that is declared with more than MOST_ARGUMENTS."""
    text, found = without_text(source), []
    for match in re.finditer(r"([~\w>\]]+|\boperator\s*\S+|\(\s*\*\s*\w+\s*\))\s*(?=\()", text):
        depth, begin = 1, match.end() + 1
        end = begin
        while end < len(text) and depth > 0:
            depth += (text[end] in "([{") - (text[end] in ")]}")
            end += 1
        arguments = arguments_of(text[begin : end - 1])
        if len(arguments) <= MOST_ARGUMENTS or match.group(1) in KEYWORDS:
            continue
        # Of a declaration each has a type and a name, of a pointer to a function maybe the type alone.
        typed = UNNAMED if match.group(1).endswith(")") else NAMED
        if sum(bool(typed.fullmatch(one) or NAMED.fullmatch(one)) for one in arguments) >= len(arguments) - 1:
            found.append((text.count("\n", 0, match.start()) + 1, match.group(1), len(arguments)))
    return found


def is_c_interface(source: pathlib.Path) -> bool:
    """C functions and their helpers: handles, arrays of arguments a rank and their count stay by position."""
    name = source.relative_to(ROOT).as_posix()
    return name.startswith(("include/uniep/c_", "src/api/c_"))


def test_more_than_five_arguments_are_a_struct():
    sources = [source for folder in ("src", "include") for source in (ROOT / folder).rglob("*")]
    seen, wrong = 0, []
    for source in sorted(source for source in sources if source.suffix in SOURCES):
        name = source.relative_to(ROOT).as_posix()
        for line, function, count in with_many_arguments(source.read_text()):
            if is_c_interface(source) or function in MORE_ARGUMENTS.get(name, set()):
                seen += 1
            else:
                wrong.append(f"{name}:{line} {function}: {count} arguments")
    assert seen > 10  # the exceptions, else the parser sees nothing
    assert not wrong


def test_the_parser_sees_functions_with_many_arguments():
    planted = {
        "void f(int a, int b, int c, int d, int e, int g);": ["f"],
        "auto Some::f(const T& a, std::map<int, int> b, T* c, Run&& d,\n  int e = 1, bool g = {}) {": ["f"],
        "void (*kernel)(const float*, float*, int64_t, int64_t, int64_t, Store);": ["(*kernel)"],
        "void f(int a, int b, int c, int d, int e);  // (int a, int b, int c, int d, int e, int g)": [],
        "f(a, b, {c, d}, e, g + h, sizeof(k)); g(x * 2, y, z, 1, 2, 3);": [],
        "struct S { S(Region& a, const std::vector<Store*>& b, double c, double d, bool e, int g) : a_(a) {} };": ["S"],
    }
    for source, names in planted.items():
        assert [name for _, name, _ in with_many_arguments(source)] == names, source


@pytest.mark.skipif(shutil.which("ctest") is None, reason="ctest is not installed")
def test_rows_are_padded_as_in_the_library():
    """By one number on each side."""
    (expected,) = re.findall(r"kRowAlignment = (\d+);", (ROOT / "src/model/row_table.h").read_text())
    sources = {path.name: path.read_text() for path in (ROOT / "python/uniep").rglob("*.py")}
    found = {name: re.findall(r"ROW_ALIGNMENT\w* *= *(\d+)", text) for name, text in sources.items()}
    assert {name: values for name, values in found.items() if values} == {"rows.py": [expected]}


def test_every_test_of_ctest_has_a_lane():
    listed = subprocess.run(
        ["ctest", "--test-dir", str(BUILD), "--show-only=json-v1"],
        capture_output=True,
        text=True,
        check=True,
    )
    tests = json.loads(listed.stdout)["tests"]
    assert len(tests) > 100
    for test in tests:
        labels = [one["value"] for one in test["properties"] if one["name"] == "LABELS"]
        assert labels and tuple(labels[0]) in LANES, test["name"]
