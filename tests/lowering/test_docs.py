"""What documents show is what commands print; their Python runs; adding a score is what they say it is."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHOWN = re.compile(r"```text\n\$ kvir (.*?)\n(.*?)```", re.DOTALL)
PAGES = ("planner.md", "checking.md")


def blocks(page: str) -> list[tuple[str, str]]:
    """(command, what the page shows for it) of every block of a page that begins with a command."""
    return SHOWN.findall((DOCS / page).read_text(encoding="utf-8"))


def python(arguments: list[str], folder: Path = ROOT) -> str:
    """What a Python process prints in a terminal of 80 columns, without spaces at ends of lines."""
    paths = f"{folder / 'src'}:{folder}"
    env = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 2), done.stderr
    return "\n".join(line.rstrip() for line in (done.stdout + done.stderr).splitlines()).rstrip() + "\n"


CASES = [(page, i) for page in PAGES for i in range(len(blocks(page)))]


@pytest.mark.parametrize(("page", "index"), CASES, ids=[f"{p} {i}" for p, i in CASES])
def test_pages_show_what_commands_print(page: str, index: int, pytestconfig: pytest.Config) -> None:
    command, shown = blocks(page)[index]
    printed = python(["-m", "kvir", *shlex.split(command)])
    assert max(map(len, printed.splitlines())) <= 80
    if pytestconfig.getoption("--update-golden") and printed != shown:
        text = (DOCS / page).read_text(encoding="utf-8")
        new = text.replace(f"$ kvir {command}\n{shown}```", f"$ kvir {command}\n{printed}```")
        (DOCS / page).write_text(new, encoding="utf-8")
    else:
        assert printed == shown


def test_the_pages_have_commands() -> None:
    assert [len(blocks(page)) for page in PAGES] == [4, 4]


def test_ten_mistakes_are_the_ones_on_the_page() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "checking.md").read_text(), re.DOTALL)
    assert text == (ROOT / "tests/data/policies/ten_mistakes.ir").read_text()


def test_the_python_of_the_planner_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "planner.md").read_text(), re.DOTALL)
    calls = re.findall(r"^(footprint.*?)\s+# (\d+)$", code, re.MULTILINE)
    assert calls
    for call, claimed in calls:
        assert python(["-c", f"{code}\nprint({call})"]) == f"{claimed}\n"


# ---- adding a score ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with the changes of docs/adding_a_score.md."""
    folder = tmp_path_factory.mktemp("score")
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.cpp", "*.h")
    linked = [link.readlink().name for link in (ROOT / "src/kvir").iterdir() if link.is_symlink()]
    for name in (*linked, "src", "examples", "tests/data/configs"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    page = (DOCS / "adding_a_score.md").read_text(encoding="utf-8")
    for diff in re.findall(r"```diff\n(.*?)```", page, re.DOTALL):
        apply(diff, folder)
    (folder / "typo.ir").write_text(
        "kvir: 1\nname: typo\nrules:\n  - keep: {top_k: {tokens: 5, by: valuenorm}}\n"
    )
    return folder


def apply(diff: str, folder: Path) -> None:
    """Apply a diff whose hunks are found by their context, which must be there once."""
    for part in re.split(r"^--- .*\n", diff, flags=re.MULTILINE)[1:]:
        name, _, hunks = part.partition("\n")
        path = folder / name.removeprefix("+++ b/")
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for hunk in re.split(r"^@@ .*\n", hunks, flags=re.MULTILINE)[1:]:
            lines = [line or " " for line in hunk.removesuffix("\n").split("\n")]
            before = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
            after = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
            assert not before or text.count(before) == 1, f"{path.name}: not there once:\n{before}"
            text = text.replace(before, after) if before else after
        path.write_text(text, encoding="utf-8")


def test_a_score_takes_three_places(extended: Path) -> None:
    page = (DOCS / "adding_a_score.md").read_text(encoding="utf-8")
    changed = {path.split("/")[0] for path in re.findall(r"^\+\+\+ b/(.*)$", page, re.MULTILINE)}
    assert changed == {"policy_ir", "kernels", "examples"}
    for command, shown in blocks("adding_a_score.md"):
        assert python(["-m", "kvir", *shlex.split(command)], extended) == shown
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert python(["-c", f"import kvir.policy_ir as m; print(m.__file__)\n{code}"], extended).startswith(
        str(extended)
    )


def test_the_new_score_is_everywhere(extended: Path) -> None:
    schema = python(["-m", "kvir", "schema"], extended)
    assert '"value_norm"' in schema
    assert "|v_j|: rows of large values stay." in schema
    assert "| `norm` | `l1` or `l2` | `l2` |" in python(["-m", "kvir.policy_ir.reference"], extended)
    example = "examples/methods/value_norm.ir"
    assert python(["-m", "kvir", "fmt", "--check", example], extended) == "\n"
    assert "by: value_norm" in python(["-m", "kvir", "print", example], extended)
