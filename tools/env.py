"""Make the Python environment of this checkout.  Standard library only.

    python3 tools/env.py            make what is missing, then stop
    python3 tools/env.py --where    print the folder of the shared environment

Two layers:

* `$KVIR_HOME/envs/<key>` (default `~/.cache/kvir`): every third-party package, about 11 GB and 4 minutes,
  made once per machine and shared by all checkouts.  What is needed is in `pyproject.toml`; the key is a hash
  of the Python version and of `tools/constraints.txt`, which pins the version of everything.
* `.venv` in the checkout: a small environment that sees the shared packages and has kvir itself installed in
  editable mode, so that the `kvir` command, its SGLang entry point and compiled kernels are its own.

Several processes may run this at once; one builds, the others wait.  An interrupted build starts again from
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
MARKER = ".complete"  # written last: the requirements that a shared environment was made for
STAMP = ".kvir"  # in .venv: what it was made for
KERNELS = ROOT / "kernels" / "cpu"
KERNELS_STAMP = ".kvir-kernels"  # in .venv: the sources that the compiled kernels were made from
NEED_BYTES = 16 << 30  # 11 GB of packages and the downloads on their way
STARTED = time.monotonic()


class EnvError(Exception):
    """Something the user has to put right; the text says what."""


def kvir_home() -> Path:
    """Where environments and models live: `$KVIR_HOME`, by default `~/.cache/kvir`."""
    return Path(os.environ.get("KVIR_HOME") or Path.home() / ".cache" / "kvir").expanduser().absolute()


@contextlib.contextmanager
def exclusive(lock: Path, waiting: str, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock between processes; says `waiting` if another has it.  Freed however the process ends."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"{waiting}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def step(text: str) -> None:
    print(f"env: [{time.monotonic() - STARTED:5.0f} s] {text}", file=sys.stderr, flush=True)


def run(command: Sequence[str | Path], what: str, **variables: str) -> None:
    """Run a command with its output shown; raises EnvError with the command when it fails."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | variables
    done = subprocess.run([str(word) for word in command], stdout=sys.stderr, env=environment)
    if done.returncode != 0:
        line = " ".join(str(word) for word in command)
        raise EnvError(f"{what} failed with exit code {done.returncode}, see above. Command: {line}")


def requirements() -> list[str]:
    """Every requirement that `pyproject.toml` declares, build requirements and all extras included."""
    import tomllib  # here, so that an older Python reaches the message of check_python

    with (ROOT / "pyproject.toml").open("rb") as stream:
        project = tomllib.load(stream)
    lists = [
        project["build-system"]["requires"],
        project["project"]["dependencies"],
        *project["project"]["optional-dependencies"].values(),
    ]
    return sorted({requirement for each in lists for requirement in each})


def key() -> str:
    """Name of the shared environment: equal for checkouts that can share it."""
    facts = {
        "python": platform.python_version(),
        "machine": f"{sys.platform}-{platform.machine()}",
        "constraints": CONSTRAINTS.read_text(),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return f"py{sys.version_info.major}.{sys.version_info.minor}-{digest[:16]}"


def site_packages(venv: Path) -> Path:
    return venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def check_python() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - this is the check itself
        raise EnvError(
            f"kvir needs Python 3.11 or newer, and {sys.executable} is {platform.python_version()}. "
            "Name another one: make PYTHON=python3.12"
        )
    try:
        import ensurepip
        import venv
    except ImportError as error:
        raise EnvError(
            f"{sys.executable} cannot make virtual environments ({error}). Install its venv module, "
            "for example the system package python3-venv"
        ) from error
    del ensurepip, venv


def installed(shared: Path) -> set[str] | None:
    """The requirements that a whole shared environment was made for; None if there is none."""
    try:
        return set((shared / MARKER).read_text().splitlines())
    except OSError:
        return None


def shared_current(shared: Path) -> bool:
    have = installed(shared)
    return have is not None and have.issuperset(requirements())


def make_shared(shared: Path) -> None:
    """Install every third-party package into `shared`.  Needs the lock held."""
    have = installed(shared)
    if have is None:
        _begin_shared(shared)
        have = set()
    elif shared_current(shared):
        return
    # Virtual environments cannot be moved: this one is built where it stays, and marked when it is whole.
    wanted = sorted(have.union(requirements()))
    pip = [shared / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "install", "--constraint", CONSTRAINTS, *wanted], "installing the packages")
    (shared / MARKER).write_text("\n".join(wanted) + "\n")
    step("shared environment ready")


def _begin_shared(shared: Path) -> None:
    shared.parent.mkdir(parents=True, exist_ok=True)
    if shared.exists():
        step("removing an unfinished environment")
        shutil.rmtree(shared)
    free = shutil.disk_usage(shared.parent).free
    if free < NEED_BYTES:
        raise EnvError(
            f"{shared.parent} has {free / 1e9:.1f} GB free and the environment needs "
            f"{NEED_BYTES / 1e9:.0f} GB. Free some, or set KVIR_HOME to a folder on a larger disk"
        )
    step(f"installing SGLang, PyTorch and the tools into {shared}")
    step("this happens once per machine: about 4 minutes and 11 GB")
    run([sys.executable, "-m", "venv", shared], "making the shared environment")


def stamp(shared: Path) -> str:
    """What `.venv` depends on; when it changes, `.venv` is made again."""
    project = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    facts = {"root": str(ROOT), "shared": str(shared), "python": sys.base_prefix, "project": project}
    return json.dumps(facts)


def checkout_current(venv: Path, shared: Path) -> bool:
    try:
        return (venv / STAMP).read_text() == stamp(shared)
    except OSError:
        return False


def _base_of(venv: Path) -> str | None:
    """The Python installation that `.venv` was made from, as far as its stamp says."""
    try:
        return json.loads((venv / STAMP).read_text())["python"]
    except (OSError, ValueError, KeyError):
        return None


def make_checkout(venv: Path, shared: Path) -> None:
    """The environment of this checkout: the shared packages, and kvir editable.  Needs the lock held."""
    if checkout_current(venv, shared):
        return
    step(f"making {venv}")
    if not (venv / "bin" / "python").exists() or _base_of(venv) != sys.base_prefix:
        shutil.rmtree(venv, ignore_errors=True)
    run([sys.executable, "-m", "venv", "--without-pip", venv], "making .venv")
    # addsitedir and not a bare path: some packages bring .pth files of their own.
    line = f"import site; site.addsitedir({str(site_packages(shared))!r})\n"
    (site_packages(venv) / "kvir_shared_packages.pth").write_text(line)
    # Plain programs that other tools look for next to the interpreter.
    for name in ("ruff", "ninja"):
        if (shared / "bin" / name).exists():
            (venv / "bin" / name).unlink(missing_ok=True)
            (venv / "bin" / name).symlink_to(shared / "bin" / name)
    pip = [venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    # No compiler for setup.py, which would go on without: `make_kernels` builds them, or says why not.
    run([*pip, "install", *offline, "--editable", ROOT], "installing kvir", CXX="false")
    (venv / STAMP).write_text(stamp(shared))


def kernels_stamp() -> str:
    digest = hashlib.sha256()
    for path in sorted([*KERNELS.glob("*.cpp"), *KERNELS.glob("*.h"), KERNELS / "build.py"]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{sysconfig.get_config_var('EXT_SUFFIX')} {digest.hexdigest()}"


def kernels_current(venv: Path) -> bool:
    built = KERNELS / f"_ops{sysconfig.get_config_var('EXT_SUFFIX')}"
    try:
        return built.exists() and (venv / KERNELS_STAMP).read_text() == kernels_stamp()
    except OSError:
        return False


def make_kernels(venv: Path) -> None:
    """Compile the CPU kernels if their sources changed.  Needs the lock held."""
    if kernels_current(venv):
        return
    step("compiling the CPU kernels (about 30 seconds)")
    sources = kernels_stamp()  # before, so that a change while compiling is not missed
    run([venv / "bin" / "python", KERNELS / "build.py"], "compiling the CPU kernels")
    (venv / KERNELS_STAMP).write_text(sources)
    step("checkout ready")


def make() -> Path:
    """Make what is missing and return the interpreter of this checkout."""
    shared, venv = kvir_home() / "envs" / key(), ROOT / ".venv"
    if not (shared_current(shared) and checkout_current(venv, shared) and kernels_current(venv)):
        with exclusive(shared.parent / f"{shared.name}.lock", f"another process is preparing {shared}", step):
            make_shared(shared)
            make_checkout(venv, shared)
            make_kernels(venv)
    return venv / "bin" / "python"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the Python environment of this checkout.")
    parser.add_argument("--where", action="store_true", help="print the folder of the shared environment")
    try:
        where = parser.parse_args().where
        check_python()
        if where:
            print(kvir_home() / "envs" / key())
        else:
            make()
    except EnvError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("env: interrupted; the next run starts the unfinished part again")


if __name__ == "__main__":
    main()
