"""What policies lose when SGLang serves them: loss after a prompt, and facts that are found again.

    make bench-quality                              what is missing of 25 % of the rows, over an hour
    python -m bench.quality 25 --only h2o plan      some policies
    python -m bench.quality 50 25 10 --minutes 30   go on for half an hour; run it again for the rest

Every policy gets a server and the same 96 requests of 1,024 tokens of SmolLM2 in text that no plan was
calibrated on: 32 go on for 128 given tokens (`loss`, nats a token); in 32 a number is hidden and the question
stands in the prompt (`aware`); in 32 the question comes after it, when rows are gone (`agnostic`).  A number
is found if every digit is the likeliest token.  What each request gave is kept in `docs/quality.jsonl`, a
line for each policy by the digest of its text, so that nothing is served twice and anyone can do other
statistics; differences are paired, prompt by prompt, with intervals of 95 %.

`polykv_gap_recovered` = (best single method - plan) / (best single method - full KV), in loss at 25 %.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec import structs

from bench.parts import hidden
from bench.parts.contenders import FULL, contender, names
from bench.parts.figures import Figures, say
from bench.parts.forced import ARGUMENTS, Forced, follow
from bench.parts.hidden import PROMPT_TOKENS, Request
from bench.parts.paired import recovered, share
from evaluation.models import model_path
from evaluation.server import Launch, Server, ServerError, serve
from evaluation.watch import kvir_state
from kvir.calibration.harness import Harness
from kvir.calibration.polykv.result import interval
from kvir.policy_ir import Policy, load, parse, print_policy

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs/quality.jsonl"
SAMPLES = 32
AT_ONCE = 8
POOL_TOKENS = 65_536  # all prompts stay in the prefix cache
# the plan of a share of the rows, per KV head (ours) and per layer (the paper's)
PLANS = {
    "plan": "examples/polykv_smollm2_{percent}.ir",
    "layers": "tests/data/policies/polykv_smollm2_layers_{percent}.ir",
}


class Result(msgspec.Struct, frozen=True):
    """Of one policy, prompt by prompt."""

    policy: str  # its name and share of the rows, for readers of the file
    text: str  # digest of what it does
    asked: str  # digest of the requests
    losses: list[float]  # mean over the tokens that follow
    aware: list[bool]  # all digits were the likeliest
    agnostic: list[bool]
    resident: float  # head-pages that a request held at its end, of those of full KV: the mean of `loss`


class Work:
    """The requests, and what is known of each policy."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        harness = Harness(model_path("smollm2"))
        self.facts = harness.facts
        self.requests = hidden.requests(harness, SAMPLES)
        self.asked = hidden.digest(self.requests)

    def policy(self, name: str, percent: int) -> Policy:
        """Raises OSError if a plan was not made."""
        if name == FULL:
            return parse("kvir: 1\nname: full\nrules:\n  - keep: all\n")
        if name in PLANS:
            path = ROOT / PLANS[name].format(percent=percent)
            if not path.is_file():
                raise FileNotFoundError(f"{path}: no such plan")
            return load(path)
        return contender(name, self.facts, round(percent / 100 * PROMPT_TOKENS), PROMPT_TOKENS)

    def result(self, policy: Policy) -> Result | None:
        """What is known."""
        data = KEPT.read_bytes() if KEPT.exists() else b""
        known = msgspec.json.Decoder(Result).decode_lines(data)
        wanted = _digest(policy), self.asked
        return next((one for one in known if (one.text, one.asked) == wanted), None)

    def measure(self, policy: Policy, name: str) -> None:
        """Serve what is not known."""
        if self.result(policy) is not None:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "policy.ir"
            path.write_text(print_policy(policy))
            launch = Launch(
                model=model_path("smollm2"),
                kv_ir=path,
                max_total_tokens=POOL_TOKENS,
                max_running_requests=AT_ONCE,
                threads=self.threads,
                arguments=ARGUMENTS,
            )
            with serve(launch) as server:
                found, ends = _served(server, self.requests, Path(folder))
        of = {kind: [i for i, r in enumerate(self.requests) if r.kind == kind] for kind in hidden.KINDS}
        held = [_resident(ends[found[i].rid]) for i in of["loss"]]
        result = Result(
            policy=name,
            text=_digest(policy),
            asked=self.asked,
            losses=[_loss(self.requests[i], found[i]) for i in of["loss"]],
            aware=[_all_digits(self.requests[i], found[i]) for i in of["aware"]],
            agnostic=[_all_digits(self.requests[i], found[i]) for i in of["agnostic"]],
            resident=round(sum(held) / len(held), 5),
        )
        with KEPT.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")


def _served(
    server: Server, requests: Sequence[Request], folder: Path
) -> tuple[list[Forced], Mapping[str, Mapping[str, int]]]:
    """In the order of the requests; and how each ended.  The others begin as the agnostic do."""
    found: dict[int, Forced] = {}
    ends: dict[str, Mapping[str, int]] = {}

    def one(index: int) -> None:
        found[index] = follow(server, requests[index].prompt, requests[index].after, folder)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for first in (True, False):
            list(pool.map(one, (i for i, r in enumerate(requests) if (r.kind == "agnostic") == first)))
            ends |= {end["rid"]: end for end in kvir_state(server)["finished"]}
    return [found[i] for i in range(len(requests))], ends


def _loss(request: Request, forced: Forced) -> float:
    return round(forced.loss(request.counted), 6)


def _all_digits(request: Request, forced: Forced) -> bool:
    return all(forced.right(request.after, request.counted))


def _resident(end: Mapping[str, int]) -> float:
    return end["head_pages_held"] / end["head_pages_full"]


def _digest(policy: Policy) -> str:
    """Of what it does: the name does not count."""
    return hashlib.sha256(print_policy(structs.replace(policy, name="")).encode()).hexdigest()[:16]


def report(work: Work, percent: int, figures: Figures) -> None:
    """A row for every policy that was measured, best loss first."""
    found: dict[str, Result] = {}
    for name in (FULL, *PLANS, *names()):
        with contextlib.suppress(OSError):
            if (measured := work.result(work.policy(name, percent))) is not None:
                found[name] = measured
    if FULL not in found:
        return
    full = found[FULL]
    print(f"| {percent} % | resident | loss over full KV | aware | agnostic |\n|---|---|---|---|---|")
    for name, one in sorted(found.items(), key=lambda pair: sum(pair[1].losses)):
        mean, half = interval(one.losses, full.losses)
        needles = f"{share(one.aware)} | {share(one.agnostic)}"
        print(f"| {name} | {one.resident:.1%} | {mean:+.3f} +- {half:.3f} | {needles} |")
        figures.add(f"served_{percent}_{name}_loss_over_full", f"{mean:.4f}")
        figures.add(
            f"served_{percent}_{name}_needles", f"{sum(one.aware)} and {sum(one.agnostic)} of {SAMPLES}"
        )
    singles = [name for name in names() if name in found]
    if len(singles) < len(names()) or "plan" not in found:
        return
    best = min(singles, key=lambda name: sum(found[name].losses))
    for name in PLANS:
        if name in found:
            gap, low, high = recovered(found[best].losses, found[name].losses, full.losses)
            word = "polykv_gap_recovered" + ("" if name == "plan" else f"_{name}")
            word += "" if percent == 25 else f"_at_{percent}"
            figures.add(word, f"{gap:.3f} [{low:.2f}, {high:.2f}] over {best}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("percents", nargs="*", type=int, help="shares of the rows (25)")
    parser.add_argument(
        "--only", nargs="+", metavar="POLICY", help=f"of {', '.join((FULL, *PLANS, *names()))}"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no policy after that")
    parser.add_argument("--threads", type=int, default=2, help="OpenMP threads of the server: idle cores (2)")
    options = parser.parse_args()
    deadline, figures, work = time.monotonic() + 60 * options.minutes, Figures(), Work(options.threads)
    for percent in options.percents or [25]:
        for name in options.only or (FULL, *PLANS, *names()):
            if time.monotonic() > deadline:
                break
            try:
                work.measure(work.policy(name, percent), f"{name} {percent} %")
                say(f"{name} at {percent} %")
            except (OSError, ServerError) as error:
                say(f"{name} at {percent} %: {error}")
        report(work, percent, figures)
    figures.show()


if __name__ == "__main__":
    main()
