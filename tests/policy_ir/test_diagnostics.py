"""Reports: their three forms, and that every code is explained and shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvir.policy_ir import Diagnostic, Label, PolicyError, Report, Source, Span, parse, read, render
from kvir.policy_ir.codes import as_markdown, codes, explain

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"\bKV[0-9]{3}\b")
# shown by tests: a file that is not there, a text of a megabyte, a thousand rules
WITHOUT_GOLDEN = {"KV001", "KV002", "KV109"}


def test_json_has_lines_and_columns() -> None:
    report = read("kvir: 1\nnmae: x\n", "a.ir").report
    (found,) = json.loads(render.as_json(report))
    assert found == {
        "code": "KV020",
        "severity": "error",
        "message": "unknown field `nmae`",
        "note": "not a field of the policy",
        "file": "a.ir",
        "line": 2,
        "column": 1,
        "end_line": 2,
        "end_column": 5,
        "labels": [],
        "help": ["did you mean `name`?"],
    }


def test_carets_stand_under_wide_characters() -> None:
    lines = render.full(read("kvir: 1\nmodel: {arch: 日本, layers: x}\nname: n\n").report).splitlines()
    shown, caret = lines[3], lines[4]
    # the two wide characters take four columns
    assert caret.index("^") == shown.index("x}") + 2


def test_long_lines_are_cut_around_the_caret() -> None:
    table = ", ".join(["[1024, full]"] * 400)
    text = f"kvir: 1\nname: x\nwindows: {{table: [{table}, [oops], {table}]}}\n"
    lines = render.full(read(text).report).splitlines()
    assert max(len(line) for line in lines) < 125
    shown, caret = lines[3], lines[4]
    assert shown[caret.index("^") :].startswith("oops")


def test_color_changes_only_escape_codes() -> None:
    report = read("kvir: 1\nnmae: x\n").report
    colored = render.full(report, color=True)
    assert "\x1b[1;31m" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == render.full(report)


def test_a_hostile_name_cannot_reach_the_terminal() -> None:
    report = read("kvir: 1\n\x1b[31m: 2\n", "a\x1b[2J.ir").report
    text = render.full(report) + render.concise(report)
    assert "\x1b" not in text
    assert "\N{REPLACEMENT CHARACTER}" in text


def test_findings_without_a_place_and_warnings_are_printed() -> None:
    report = Report(Source("a.ir", "kvir: 1\nname: x\n"))
    here = (Label(Span(0, 4), "here too"),)
    report.warning("KV106", "two things", Span(8, 12), labels=here, help="do less")
    report.error("KV401", "no place", None, help=("first", "second"))
    assert render.full(report) == (
        "error[KV401]: no place\n"
        " --> a.ir\n"
        "  = help: first\n"
        "  = help: second\n"
        "\n"
        "warning[KV106]: two things\n"
        " --> a.ir:2:1\n"
        "  |\n"
        "1 | kvir: 1\n"
        "  | ---- here too\n"
        "2 | name: x\n"
        "  | ^^^^\n"
        "  |\n"
        "  = help: do less\n"
        "\n"
        "a.ir: 1 error, 1 warning\n"
    )
    with pytest.raises(PolicyError):
        report.raise_if_errors()


def test_the_same_finding_counts_once() -> None:
    report = Report(Source("a", "x"))
    for _ in range(2):
        report.add(Diagnostic(code="KV001", message="m", span=None))
    assert (len(report), report.error_count) == (1, 1)


def test_errors_raise_with_the_whole_text() -> None:
    with pytest.raises(PolicyError) as caught:
        parse("kvir: x\nnmae: y\n", "chat.ir")
    assert str(caught.value).startswith("error[KV022]: expected a whole number")
    assert "chat.ir: 2 errors" in str(caught.value)


# ---- codes -------------------------------------------------------------------------------------------------


def test_every_code_that_is_used_is_explained() -> None:
    folders = ("policy_ir", "lowering", "kernels", "sglang_ext")
    sources = [p for folder in folders for p in (ROOT / folder).rglob("*.py")]
    used = {c for p in sources for c in re.findall(r'"(KV[0-9]{3})"', p.read_text())}
    assert used - set(codes()) == set(), "explain them in policy_ir/codes_*.py"


def test_every_language_code_has_a_golden_case() -> None:
    shown = {c for p in (ROOT / "tests" / "golden").glob("*.md") for c in NAMED.findall(p.read_text())}
    wanted = {c for c in codes() if c < "KV2"} - WITHOUT_GOLDEN
    assert wanted - shown == set()


def test_a_thousand_rules_are_too_many() -> None:
    from kvir.lowering.verify import Verify

    parsed = read("kvir: 1\nname: x\nrules:\n" + "  - keep: all\n" * 5000)
    assert parsed.policy is not None
    Verify(parsed.report)(parsed.policy)
    assert [d.code for d in parsed.report] == ["KV109"]


@pytest.mark.parametrize("name", codes())
def test_every_code_has_its_four_texts(name: str) -> None:
    code = codes()[name]
    for text in (code.title, code.what, code.why, code.example, code.instead):
        assert text.strip() == text
        assert text
    assert explain(name.lower()).startswith(f"{name}: {code.title}\n")


def test_an_unknown_code_is_answered_with_a_near_one() -> None:
    with pytest.raises(KeyError, match="KV020"):
        explain("KV0200")


def test_the_page_of_codes_is_current() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    assert page == as_markdown(), "run: python -m kvir.policy_ir.codes > docs/errors.md"
