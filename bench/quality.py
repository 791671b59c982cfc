"""What policies lose when SGLang serves them: loss after a prompt, and facts that are found again.

    make bench-quality                              what is missing of 25 % of the rows, over an hour
    python -m bench.quality 25 --only h2o plan      some policies
    python -m bench.quality 50 25 10 --minutes 30   go on for half an hour; run it again for the rest

Every policy gets a server and the same 96 requests of 1,024 tokens of SmolLM2 in text that no plan was
calibrated on: 32 go on for 128 given tokens (`loss`, nats a token); in 32 a number is hidden and the question
stands in the prompt (`aware`); in 32 the question comes after it, when rows are gone (`agnostic`).  A number
is found if every digit is the likeliest token.  Results are kept in `out/quality`, so a run goes on where
another stopped; differences are paired, prompt by prompt, with intervals of 95 %.

`polykv_gap_recovered` = (best single method - plan) / (best single method - full KV), in loss at 25 %.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import structs

from bench.parts.contenders import FULL, contender, names
from bench.parts.figures import Figures, say
from bench.parts.forced import ARGUMENTS, Forced, follow
from bench.polykv import AFTER_TOKENS, PROMPT_TOKENS, SEEN_PARAGRAPHS, TEXT, needles, recovered
from evaluation.models import model_path
from evaluation.server import Launch, ServerError, serve
from evaluation.watch import kvir_state
from kvir.calibration.harness import Harness
from kvir.calibration.polykv.result import interval
from kvir.calibration.samples import pieces, token_ids
from kvir.policy_ir import Policy, load, parse, print_policy

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "out/quality/served.jsonl"
SAMPLES = 32
AT_ONCE = 8
POOL_TOKENS = 24_576
# the plan of a share of the rows, per KV head (ours) and per layer (the paper's)
PLANS = {
    "plan": "examples/polykv_smollm2_{percent}.ir",
    "layers": "tests/data/policies/polykv_smollm2_layers_{percent}.ir",
}


@dataclass(frozen=True)
class Request:
    kind: str  # loss, aware or agnostic
    number: int
    prompt: tuple[int, ...]
    after: tuple[int, ...]
    counted: int  # of the last tokens of `after`

    @property
    def key(self) -> str:
        text = msgspec.json.encode((self.kind, self.number, self.prompt, self.after))
        return hashlib.sha256(text).hexdigest()[:16]


class Line(msgspec.Struct, frozen=True):
    """One request of one policy, in the file."""

    policy: str  # of its text, a digest
    request: str
    loss: float  # mean over the counted tokens
    found: bool  # all of them the likeliest
    resident: float  # head-pages that the request held at its end, of those of full KV


class Work:
    """The requests, and what is known of each policy."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        harness = Harness(model_path("smollm2"))
        self.facts = harness.facts
        ids = token_ids(harness, "\n".join(TEXT.read_text(encoding="utf-8").splitlines()[SEEN_PARAGRAPHS:]))
        found = [
            Request("loss", i, piece[:PROMPT_TOKENS], piece[PROMPT_TOKENS:], AFTER_TOKENS - 1)
            for i, piece in enumerate(pieces(harness, ids, PROMPT_TOKENS + AFTER_TOKENS, SAMPLES))
        ]
        for kind in ("aware", "agnostic"):
            made = needles(harness, ids, SAMPLES, aware=kind == "aware")
            found += [Request(kind, i, tuple(p), tuple(a), n) for i, (p, a, n) in enumerate(made)]
        self.requests = found

    def policy(self, name: str, percent: int) -> Policy:
        """Raises OSError if a plan was not made."""
        if name == FULL:
            return parse("kvir: 1\nname: full\nrules:\n  - keep: all\n")
        if name in PLANS:
            return load(ROOT / PLANS[name].format(percent=percent))
        return contender(name, self.facts, round(percent / 100 * PROMPT_TOKENS), PROMPT_TOKENS)

    def measure(self, policy: Policy) -> None:
        """Serve what is missing."""
        key, text = digest(policy), print_policy(policy)
        if result(self, policy) is not None:
            return
        left = self.requests
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "policy.ir").write_text(text)
            launch = Launch(
                model=model_path("smollm2"),
                kv_ir=folder / "policy.ir",
                dtype="bfloat16",
                max_total_tokens=POOL_TOKENS,
                max_running_requests=AT_ONCE,
                threads=self.threads,
                arguments=ARGUMENTS,
            )
            with serve(launch) as server, ThreadPoolExecutor(AT_ONCE) as pool:
                found = list(pool.map(lambda r: follow(server, r.prompt, r.after, folder), left))
                ends = {end["rid"]: end for end in kvir_state(server)["finished"]}
        keep(_line(key, r, f, ends[f.rid]) for r, f in zip(left, found, strict=True))


def _line(key: str, request: Request, forced: Forced, end: Mapping[str, int]) -> Line:
    counted = forced.logprobs[-request.counted :]
    likeliest = forced.likeliest[-request.counted :]
    held = end["head_pages_held"] + end["compact_head_pages"]
    return Line(
        policy=key,
        request=request.key,
        loss=-sum(counted) / len(counted),
        found=likeliest == request.after[-request.counted :],
        resident=held / end["head_pages_full"],
    )


def digest(policy: Policy) -> str:
    """Of what it does: the name does not count."""
    return hashlib.sha256(print_policy(structs.replace(policy, name="")).encode()).hexdigest()[:16]


def keep(found: Iterable[Line]) -> None:
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    with KEPT.open("ab") as file:
        file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in found))


@dataclass(frozen=True)
class Result:
    """Of one policy, prompt by prompt."""

    losses: list[float]
    aware: list[bool]
    agnostic: list[bool]
    resident: float


def result(work: Work, policy: Policy) -> Result | None:
    """None if something is missing."""
    key = digest(policy)
    data = KEPT.read_bytes() if KEPT.exists() else b""
    known = {
        line.request: line for line in msgspec.json.Decoder(Line).decode_lines(data) if line.policy == key
    }
    if any(request.key not in known for request in work.requests):
        return None
    of: dict[str, list[Line]] = {}
    for request in work.requests:
        of.setdefault(request.kind, []).append(known[request.key])
    return Result(
        [line.loss for line in of["loss"]],
        [line.found for line in of["aware"]],
        [line.found for line in of["agnostic"]],
        sum(line.resident for line in of["loss"]) / len(of["loss"]),
    )


def report(work: Work, percent: int, figures: Figures) -> None:
    """A row for every policy that was measured, best loss first."""
    found: dict[str, Result] = {}
    for name in (FULL, *PLANS, *names()):
        with contextlib.suppress(OSError):
            if (measured := result(work, work.policy(name, percent))) is not None:
                found[name] = measured
    if FULL not in found:
        return
    full = found[FULL]
    print(f"| {percent} % | resident | loss over full KV | aware | agnostic |\n|---|---|---|---|---|")
    for name, one in sorted(found.items(), key=lambda pair: sum(pair[1].losses)):
        mean, half = interval(one.losses, full.losses)
        rows = [_share(one.aware), _share(one.agnostic)]
        print(f"| {name} | {one.resident:.1%} | {mean:+.3f} +- {half:.3f} | {rows[0]} | {rows[1]} |")
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


def _share(found: Sequence[bool]) -> str:
    """A share with Wilson's interval."""
    n, p, z = len(found), sum(found) / len(found), 1.96
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    return f"{p:.2f} [{max(0, middle - half):.2f}, {min(1, middle + half):.2f}]"


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
                work.measure(work.policy(name, percent))
                say(f"{name} at {percent} %")
            except (OSError, ServerError) as error:
                say(f"{name} at {percent} %: {error}")
        report(work, percent, figures)
    figures.show()


if __name__ == "__main__":
    main()
