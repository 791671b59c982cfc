"""All tests, in two runs side by side: those that start servers, and the others.

    python tools/run_tests.py [arguments of pytest]

Either run keeps about one core busy.  The output of the servers' tests follows that of the others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVERS = "tests/serve"


def main() -> int:
    started = time.monotonic()
    pytest = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    # more threads than idle cores make small matrices many times slower
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as output:
        command = [*pytest, SERVERS]
        servers = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            others = subprocess.run([*pytest, f"--ignore={SERVERS}", "tests"], cwd=ROOT, env=environment)
            while servers.poll() is None:
                minutes = (time.monotonic() - started) / 60
                print(f"tests of servers are under way, {minutes:.0f} minutes so far", flush=True)
                try:
                    servers.wait(60)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if servers.poll() is None:
                servers.send_signal(signal.SIGINT)  # pytest stops what it has started
                servers.wait()
            output.seek(0)
            sys.stdout.flush()
            sys.stdout.buffer.write(output.read())
            sys.stdout.flush()
    print(f"tests took {(time.monotonic() - started) / 60:.1f} minutes", flush=True)
    return others.returncode or servers.returncode


if __name__ == "__main__":
    sys.exit(main())
