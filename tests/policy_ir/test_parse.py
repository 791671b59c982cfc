"""Reading: spans of every part, hostile text, and files that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvir.policy_ir import Parsed, PolicyError, load, parse, read, read_file, yaml_tree
from kvir.policy_ir.source import Mapping, Position, Sequence, Tree
from kvir.policy_ir.yaml_tree import MAX_TEXT_BYTES
from support.effort import effort
from support.fresh import run_python

HEAD = "kvir: 1\nname: case\n"

TEXT = """kvir: 1
name: long chat   # é
model: {arch: llama, layers: 32}
rules:
  - keep: [{sink: 4}, {recent: {tokens: 1024}}]
  - {layers: 0..3, keep: all}
  - layers: [13..18, "20"]
    heads: 2
    keep: {recent: 64}
windows: {sink: 4, table: [[1024, full], [3, 4]]}
"""


def codes(parsed: Parsed) -> list[str]:
    return [d.code for d in parsed.report]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("$.kvir", "1"),
        ("$.name", "long chat"),
        ("$.model.layers", "32"),
        ("$.model", "{arch: llama, layers: 32}"),
        ("$.rules[0].keep[0]", "{sink: 4}"),
        ("$.rules[0].keep[0].tokens", "4"),
        ("$.rules[0].keep[1].tokens", "1024"),
        ("$.rules[1].keep[0]", "all"),
        ("$.rules[1].layers", "0..3"),
        ("$.rules[1].layers[0]", "0..3"),
        ("$.rules[1].layers[0].first", "0"),
        ("$.rules[1].layers[0].last", "3"),
        ("$.rules[2].layers[0].last", "18"),
        ("$.rules[2].layers[1]", '"20"'),
        ("$.rules[2].layers[1].first", "20"),
        ("$.rules[2].heads[0].last", "2"),
        ("$.rules[2].keep[0]", "{recent: 64}"),
        ("$.rules[2].keep[0].tokens", "64"),
        ("$.rules[1]", "{layers: 0..3, keep: all}"),
        ("$.windows.table[0]", "[1024, full]"),
        ("$.windows.table[0][1]", "full"),
        # left out: the part around it
        ("$.rules[1].phase", "{layers: 0..3, keep: all}"),
        ("$.provenance.model", TEXT.rstrip("\n")),
    ],
)
def test_every_part_of_a_policy_has_its_place(path: str, text: str) -> None:
    parsed = read(TEXT)
    assert parsed.policy is not None
    span = parsed.source.span(path)
    assert TEXT[span.start : span.end] == text


def test_keys_have_places_too() -> None:
    source = read(TEXT).source
    span = source.key_span("$.rules[2].heads")
    assert TEXT[span.start : span.end] == "heads"
    assert source.position(span.start) == Position(8, 5)


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_lines_count_the_same_under_every_line_break(newline: str) -> None:
    text = TEXT.replace("\n", newline)
    parsed = read(text)
    assert parsed.policy == parse(TEXT)
    span = parsed.source.span("$.windows.table[1][1]")
    assert parsed.source.position(span.start) == Position(10, 46)
    assert parsed.source.line(10) == TEXT.splitlines()[9]


def test_without_libyaml_texts_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [p.read_text() for p in (Path(__file__).parents[2] / "examples").rglob("*.ir")] + [TEXT]
    fast = [(read(t).policy, _places(read(t).source.root)) for t in texts]
    monkeypatch.setattr(yaml_tree, "_LOADER", yaml.SafeLoader)
    slow = [(read(t).policy, _places(read(t).source.root)) for t in texts]
    assert slow == fast
    assert codes(read("kvir: [1")) == ["KV006"]


def _places(node: Tree | None) -> list[tuple[int, int]]:
    """The spans of a tree, outer parts first."""
    match node:
        case Sequence(items=items):
            return [(node.start, node.end)] + [place for item in items for place in _places(item)]
        case Mapping(entries=entries):
            parts = [part for entry in entries for part in entry]
            return [(node.start, node.end)] + [place for part in parts for place in _places(part)]
        case None:
            return []
        case _:
            return [(node.start, node.end)]


# ---- hostile text ------------------------------------------------------------------------------------------

HOSTILE = {
    "random bytes": (bytes(range(256)) * 4, "KV003"),
    "only NUL": (b"\0" * 100, "KV005"),
    "UTF-16": ((HEAD).encode("utf-16"), "KV003"),
    "an open quote": (HEAD + 'model: {arch: "', "KV006"),
    "100,000 brackets": ("[" * 100_000, "KV011"),
    "100,000 dashes": ("- " * 100_000, "KV011"),
    "100,000 braces": ("{a: " * 100_000, "KV011"),
    "a billion laughs": (
        "a: &a [x,x]\nb: &b [*a,*a,*a]\nc: &c [*b,*b,*b]\nkvir: 1\nname: x\n",
        "KV009",
    ),
    "a merge key": (HEAD + "model: {<<: {arch: x}}", "KV020"),
    "a long number": (HEAD + f"rules: [{{keep: {{recent: {'9' * 500_000}}}}}]", "KV023"),
    "a long float": (
        HEAD + f"provenance: {{tool: t, version: v, threshold: 1{'0' * 500_000}.5}}",
        "KV023",
    ),
    "a long range": (HEAD + f"rules: [{{layers: {'9' * 100_000}..1, keep: all}}]", "KV027"),
    "a long key": (HEAD + f"{'k' * 900}: 1", "KV020"),
    "a long word": (HEAD + f"rules: [{{keep: {'k' * 500_000}}}]", "KV025"),
    "50,000 keys": (HEAD + "".join(f"k{i}: 1\n" for i in range(50_000)), "KV020"),
    "60,000 equal keys": (HEAD + "name: x\n" * 60_000, "KV024"),
    "200,000 wrong terms": (HEAD + f"rules: [{{keep: [{'x,' * 200_000}]}}]", "KV025"),
    "a constructor": (HEAD + "rules: !!python/object/apply:os.system [ls]", "KV010"),
    "a bool as a number": (HEAD + "rules: [{keep: {recent: true}}]", "KV022"),
    "a date": ("kvir: 1\nname: 2024-01-01\nmodel: 3", "KV022"),
}


@pytest.mark.parametrize(("text", "code"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_text_is_refused(text: str | bytes, code: str) -> None:
    parsed, units = effort(lambda: read(text))
    assert parsed.policy is None
    assert code in codes(parsed)
    assert all(d.span is not None and 0 <= d.span.start <= d.span.end for d in parsed.report)
    assert units < 200  # about two seconds


def test_text_over_the_limit_is_refused_unread() -> None:
    parsed = read(HEAD + "#" * MAX_TEXT_BYTES)
    assert codes(parsed) == ["KV002"]
    assert read(HEAD + "#" * (MAX_TEXT_BYTES - len(HEAD))).policy is not None


def test_findings_are_capped_but_counted() -> None:
    report = read(HEAD + f"rules: [{', '.join('{keep: x}' for _ in range(1000))}]").report
    assert (len(report), report.error_count, report.omitted) == (200, 1000, 800)


# 200 layers of 128 heads; and what takes longest to read of all texts of the largest size
TABLES = {"large model": ([131072] * 128, 200), "tallest": ([9], 124_000)}


@pytest.mark.parametrize(("row", "rows"), TABLES.values(), ids=TABLES.keys())
def test_a_large_table_reads_fast(row: list[int], rows: int) -> None:
    text = HEAD + f"windows: {{table: [{','.join([str(row).replace(' ', '')] * rows)}]}}"
    assert len(text) < MAX_TEXT_BYTES
    policy, units = effort(lambda: parse(text))
    assert policy.windows is not None
    assert units < 200  # about two seconds; 80 is usual


# ---- files -------------------------------------------------------------------------------------------------


def test_files_are_read_by_path(tmp_path: Path) -> None:
    path = tmp_path / "a.ir"
    path.write_text(HEAD)
    assert load(path).name == "case"
    assert load(str(path)) == parse(HEAD)


@pytest.mark.parametrize("name", ["missing.ir", ".", "nul\0byte.ir"])
def test_a_file_that_cannot_be_read_is_a_finding(tmp_path: Path, name: str) -> None:
    parsed = read_file(f"{tmp_path}/{name}")
    assert codes(parsed) == ["KV001"]
    with pytest.raises(PolicyError, match="cannot be read"):
        load(f"{tmp_path}/{name}")


def test_import_is_cheap_and_needs_no_torch() -> None:
    code = (
        "import sys; from support.effort import effort;"
        "_, units = effort(lambda: __import__('kvir.policy_ir'));"
        "assert not {'torch', 'rich', 'numpy', 'sglang'} & set(sys.modules), sys.modules; print(units)"
    )
    assert min(float(run_python(code)) for _ in range(3)) < 10  # about 0.1 s; 5 is usual
