"""The environment tool, as far as it can be tried without installing 11 GB."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import env

HOLD = """
import sys, time
from pathlib import Path
from tools.env import exclusive
with exclusive(Path(sys.argv[1]), "busy", lambda text: print(text, flush=True)):
    print("in", time.monotonic(), flush=True)
    time.sleep(float(sys.argv[2]))
    print("out", time.monotonic(), flush=True)
"""


def test_the_key_follows_what_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = env.key()
    assert before == env.key()
    assert re.fullmatch(r"py3\.\d+-[0-9a-f]{16}", before)
    monkeypatch.setattr(env.platform, "python_version", lambda: "3.99.0")
    assert env.key() != before
    monkeypatch.undo()
    pins = tmp_path / "constraints.txt"
    pins.write_text(env.CONSTRAINTS.read_text() + "something==1\n")
    monkeypatch.setattr(env, "CONSTRAINTS", pins)
    assert env.key() != before


def test_every_declared_requirement_is_pinned() -> None:
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in env.CONSTRAINTS.read_text().splitlines()
        if line
    }
    names = {re.split(r"[\[<>=~! ]", requirement)[0].lower() for requirement in env.requirements()}
    assert {"sglang", "msgspec", "setuptools", "pytest"} <= names
    assert names <= pinned


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVIR_HOME", str(tmp_path))
    assert env.kvir_home() == tmp_path
    monkeypatch.delenv("KVIR_HOME")
    assert env.kvir_home() == Path.home() / ".cache" / "kvir"


def test_two_processes_take_turns(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", HOLD, str(lock), "1"], stdout=subprocess.PIPE, text=True, cwd=env.ROOT
        )
        for _ in range(2)
    )
    outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    spans = sorted(
        tuple(float(line.split()[1]) for line in output.splitlines() if line[:3] in ("in ", "out"))
        for output in outputs
    )
    assert spans[0][1] <= spans[1][0]
    assert sum("busy; waiting for it" in output for output in outputs) == 1


def test_a_killed_holder_frees_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock), "600"], stdout=subprocess.PIPE, text=True, cwd=env.ROOT
    )
    assert holder.stdout is not None
    assert holder.stdout.readline().startswith("in ")
    holder.kill()
    holder.wait()
    holder.stdout.close()
    started = time.monotonic()
    with env.exclusive(lock, "busy", lambda _: None):
        assert time.monotonic() - started < 30


def test_an_unfinished_environment_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What an interrupted run left behind goes; without the disk space nothing is begun."""
    shared = tmp_path / "envs" / "key"
    (shared / "lib").mkdir(parents=True)
    monkeypatch.setattr(env, "NEED_BYTES", 1 << 60)
    with pytest.raises(env.EnvError, match=r"GB free and the environment needs .* KVIR_HOME"):
        env.make_shared(shared)
    assert not shared.exists()


def test_a_whole_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / env.MARKER).write_text("\n".join([*env.requirements(), "something-else"]))
    env.make_shared(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [env.MARKER]


def test_a_new_requirement_is_added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / env.MARKER).write_text("something-else\n")
    commands: list[list[str]] = []
    monkeypatch.setattr(env, "run", lambda command, what: commands.append([str(word) for word in command]))
    env.make_shared(tmp_path)
    assert commands[0][-len(env.requirements()) - 1 :] == sorted([*env.requirements(), "something-else"])
    assert env.shared_current(tmp_path)


def test_a_failing_command_is_named() -> None:
    with pytest.raises(env.EnvError, match=r"trying failed with exit code 3.* -c"):
        env.run([sys.executable, "-c", "import sys; sys.exit(3)"], "trying")


def test_an_old_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env.sys, "version_info", (3, 10, 0))
    with pytest.raises(env.EnvError, match=r"needs Python 3\.11 or newer"):
        env.check_python()
