"""FlashInfer's modules ahead of time: those that its wrappers call for, found again by its own rules."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

from kvir import cli
from kvir.kernels.flashinfer import modules
from kvir.kernels.flashinfer.modules import (
    ARCHITECTURES,
    BuiltModule,
    Modules,
    ModulesError,
    PrefillFacts,
    build,
    install,
    read,
)
from support.models import CONFIGS
from support.servers import SUPPORT

KEEPS_PROMPTS = (
    "kvir: 1\nname: late\nrules:\n  - {keep: {top_k: {tokens: 64, by: last_query}}, trigger: prefill_end}\n"
)
WINDOWS = "kvir: 1\nname: windows\nrules:\n  - keep: [{sink: 4}, {recent: 1024}]\n"
VERSION = metadata.version(modules.PACKAGE)


def python(tmp_path: Path, target: str, *arguments: str) -> str:
    """What a process that compiles for `target` prints; FlashInfer reads that once."""
    environment = dict(os.environ) | SUPPORT
    environment |= {
        "FLASHINFER_CUDA_ARCH_LIST": ARCHITECTURES[target],
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
    }
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("target", "cap"), [("sm_80", "0"), ("sm_90", "30")])
def test_they_are_what_its_wrappers_call_for(target: str, cap: str, tmp_path: Path) -> None:
    called, built = python(
        tmp_path, target, "-m", "support.flashinfer_recorded", target, "128", cap
    ).splitlines()
    assert built == called
    assert len(built.split()) == {"sm_80": 2, "sm_90": 3}[target]
    assert ("use_logits_cap_True" in built) == (cap != "0")


def made(folder: Path, target: str, version: str = VERSION) -> Path:
    """A folder as `build` leaves it, with one module that is no library."""
    file = folder / modules.FOLDER / "cascade/cascade.so"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"not a library")
    built = [BuiltModule("cascade", hashlib.sha256(b"not a library").hexdigest())]
    manifest = Modules(modules.FORMAT, target, version, built)
    (folder / modules.FOLDER / modules.MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return file


FINDS = """
import sys
from pathlib import Path
from kvir.kernels.flashinfer.modules import install
print(install(Path(sys.argv[1]), sys.argv[2]))
from flashinfer.jit import env
from flashinfer.jit.cascade import gen_cascade_module
print(gen_cascade_module().get_library_path())
"""


def test_flashinfer_finds_them(tmp_path: Path) -> None:
    file = made(tmp_path / "plan.sm_90", "sm_90")
    found = python(tmp_path, "sm_90", "-c", FINDS, str(tmp_path / "plan.sm_90"), "sm_90")
    assert found.splitlines() == ["None", str(file)]


def test_what_does_not_fit_is_not_used(tmp_path: Path) -> None:
    assert "does not exist" in str(install(tmp_path, "sm_90"))
    other = made(tmp_path / "other", "sm_80")
    assert f"is for sm_80 and FlashInfer {VERSION}, not sm_90" in str(install(tmp_path / "other", "sm_90"))
    made(tmp_path / "old", "sm_90", "0.1")
    assert f"and FlashInfer 0.1, not sm_90 and {VERSION}" in str(install(tmp_path / "old", "sm_90"))
    other.write_bytes(b"cut short")
    assert "cascade is not what modules.json says" in str(install(tmp_path / "other", "sm_80"))


def test_a_compiler_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, "sm_90")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(ModulesError, match=r"FlashInfer did not compile: .*nvcc"):
        build([PrefillFacts(128, "bfloat16")], "sm_90", tmp_path)
    assert [module.name for module in read(tmp_path / modules.FOLDER).modules] == ["cascade"]
    assert [each.name for each in tmp_path.iterdir()] == [modules.FOLDER]


def test_the_command_asks_for_them_where_the_plan_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[PrefillFacts] = []

    def refused(facts: list[PrefillFacts], _target: str, _folder: Path) -> Modules:
        asked.extend(facts)
        raise ModulesError("no compiler")

    monkeypatch.setattr(modules, "build", refused)
    for text in (WINDOWS, KEEPS_PROMPTS):
        (tmp_path / "policy.ir").write_text(text)
        command = ["build-kernels", str(tmp_path / "policy.ir"), "--model", str(CONFIGS / "llama-3.1-8b")]
        assert cli.main([*command, "--target", "sm_90"]) == 0
    assert asked == [PrefillFacts(128, "bfloat16")]
    assert "warning: no compiler; a server compiles them" in capsys.readouterr().err
