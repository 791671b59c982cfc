"""Starting: bad input ends before the model is loaded, with one clear error and exit code 2; a kvir that is
not wholly bound refuses to serve.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import sglang

from evaluation.server import free_port
from kvir.lowering import plan_file
from kvir.lowering.load import plan_for_server
from support.servers import policy

HERE = Path(__file__).parent
ENGINE = HERE / "programs/engine.py"
UNBOUND = HERE / "programs/unbound.py"
WRONG_KERNEL = HERE / "programs/wrong_kernel.py"
# the console script of SGLang's environment, run by this interpreter
SGLANG = Path(sglang.__file__).parents[4] / "bin/sglang"
COMMANDS = {"launch_server": ["-m", "sglang.launch_server"], "sglang serve": [str(SGLANG), "serve"]}


@dataclass(frozen=True)
class Case:
    """A file given as --kv-ir (None: it does not exist), other arguments, and what the error must say."""

    text: str | None
    says: tuple[str, ...]
    arguments: tuple[str, ...] = ()


CASES: Mapping[str, Case] = {
    "other model": Case(
        "kvir: 1\nname: other\nmodel: {arch: llama, layers: 30}\nrules: [{keep: all}]\n",
        ("bad.ir:3:", "30", "help:"),
    ),
    "unknown field": Case(
        "kvir: 1\nname: unknown\nrules:\n  - {kep: all}\n", ("bad.ir:4:6", "`kep`", "keep", "help:")
    ),
    "head out of range": Case(
        "kvir: 1\nname: range\nrules:\n  - {heads: 7, keep: [{recent: 64}]}\n",
        ("bad.ir:4:", "7", "2 KV heads", "help:"),
    ),
    "speculative decoding": Case(
        "kvir: 1\nname: fine\nrules: [{keep: all}]\n",
        ("--speculative-algorithm", "help:"),
        ("--speculative-algorithm", "NGRAM"),
    ),
    "missing file": Case(None, ("bad.ir", "no such file")),
}
RUNS = [("launch_server", name) for name in CASES]
RUNS += [("sglang serve", name) for name in ("unknown field", "speculative decoding")]


@pytest.fixture(scope="module")
def no_weights(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that cannot be loaded: whoever gets that far fails otherwise than with code 2."""
    folder = tmp_path_factory.mktemp("no-weights")
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture(scope="module")
def ended(
    no_weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[tuple[str, str], subprocess.CompletedProcess[str]]:
    """Every run of RUNS, two at a time: each is ten seconds of imports."""

    def run(command: str, name: str) -> subprocess.CompletedProcess[str]:
        file = tmp_path_factory.mktemp("bad") / "bad.ir"
        text = CASES[name].text
        if text is not None:
            file.write_text(text)
        words = [*COMMANDS[command], "--model-path", str(no_weights), "--device", "cpu"]
        words += ["--port", str(free_port()), "--kv-ir", str(file), *CASES[name].arguments]
        return program(words)

    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda run_of: run(*run_of), RUNS)
        return dict(zip(RUNS, results, strict=True))


def program(words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | variables
    # no waiting for dumps of a GPU after a failure
    environment |= {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=300, env=environment
    )


@pytest.mark.parametrize(("command", "name"), RUNS, ids=[f"{c}-{n}" for c, n in RUNS])
def test_bad_input_ends_before_the_model_is_loaded(
    command: str, name: str, ended: Mapping[tuple[str, str], subprocess.CompletedProcess[str]]
) -> None:
    done = ended[command, name]
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    errors = re.findall(r"^error.*$", done.stderr, re.MULTILINE)
    assert len(errors) == 1, done.stderr
    for part in CASES[name].says:
        assert part in done.stderr, (part, done.stderr)


def test_engine(tiny_model: Path, tmp_path: Path, no_weights: Path) -> None:
    """`Engine(kv_ir=...)` serves the same tokens from a policy and from the plan lowered from it, and raises
    KvirError for what the command line would end with.
    """
    plan = plan_for_server(policy("tight"), tiny_model, dtype="float32")
    plan_file.save(plan, tmp_path / "plan.json")
    tampered = json.loads((tmp_path / "plan.json").read_text())
    tampered["buckets"]["kernels"]["layout"]["classes"][0]["window_pages"] += 1
    (tmp_path / "tampered.json").write_text(json.dumps(tampered))
    (tmp_path / "bad.ir").write_text(CASES["unknown field"].text or "")
    bad = [tmp_path / name for name in ("tampered.json", "bad.ir", "missing.ir")]
    done = program(
        [str(ENGINE), str(tiny_model), str(no_weights), str(tmp_path / "plan.json"), *map(str, bad)]
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    tampered_error, field_error, missing_error = result["errors"]
    assert "KV605" in tampered_error
    assert "`kep`" in field_error
    assert "no such file" in missing_error
    assert len(result["output_ids"]) == 24
    assert result["kvir"]["fingerprint"] == plan.fingerprint
    assert result["kvir"]["finished"][-1]["head_pages_held"] > 0


def said_by(start: Path, model: Path, **variables: str) -> str:
    """Of a server program that must end before it is ready, all output."""
    words = [str(start), "--model-path", str(model), "--device", "cpu", "--port", str(free_port())]
    words += ["--kv-ir", str(policy("tight")), "--max-total-tokens", "1024"]
    done = program(words, **variables)
    said = done.stderr + done.stdout
    assert done.returncode != 0
    assert "The server is fired up" not in said
    return said


def test_a_hook_that_did_not_bind_stops_the_server(tiny_model: Path) -> None:
    """The plugin loads, one hook is lost, and nobody else would notice: windows would simply never slide."""
    target = "managers.schedule_batch.ScheduleBatch.maybe_evict_swa"
    said = said_by(UNBOUND, tiny_model, LOST_HOOK=target)
    assert f"kvir: refusing to serve: hook on {target} is not bound" in said


def test_a_wrong_kernel_stops_the_server(tiny_model: Path) -> None:
    said = said_by(WRONG_KERNEL, tiny_model)
    assert "kvir: refusing to serve: kernels 'cpu' on cpu: append wrote other rows; decode differs by" in said
