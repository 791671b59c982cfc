"""Mutates and makes up policies, and checks that nothing crashes, hangs, or is refused without a reason.

    python -m bench.fuzz_language --count 200000 --seed 1

A text that is accepted must verify, print, format and read back equal, and lower for two models or say why
not; a text that is refused must say why, each time with a known code and a place inside the text.  One in
four is made from the types, the others are mutations of the examples.  The test suite runs a few thousand.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bench.random_policies import random_policy
from kvir.lowering import footprint, plan_file
from kvir.lowering.model_facts import facts_of
from kvir.lowering.pipeline import lower
from kvir.lowering.stages import ModelFacts
from kvir.lowering.verify import Verify
from kvir.policy_ir import Policy, PolicyError, Report, Source, parse, print_policy, read, render
from kvir.policy_ir.codes import codes
from kvir.policy_ir.format import format_text

EXAMPLES = Path(__file__).parents[1] / "examples"
MAX_SECONDS = 1.0
MADE_SHARE = 0.25  # of the texts, made from the types

CODES = frozenset(codes())
_SHAPE = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "hidden_size": 96}
# one model without windows of its own, one with
MODELS: tuple[ModelFacts, ...] = (
    facts_of({"model_type": "llama", "num_hidden_layers": 4, "max_position_embeddings": 4096, **_SHAPE}),
    facts_of({"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 64, **_SHAPE}),
)
LENGTHS = (1, 100, 5000)
_TEXT = """
all sink recent top_k top_p keep layers heads phase prefill decode windows table full null ~ true
false tokens fraction per_head per_layer ramp total by scope head layer model attention key_norm rkv
laprox sum score weight preset snapkv h2o trigger every over prefill_end overflow merge evict region
store positions none mass floor cap name kvir rules model arch provenance threshold 0 -1 1 64 1e9
1.5 .5 -.0 010 0x1F 1_000 1073741824 1073741825 99999999999999 0..3 3..0 0-3 ..4 7.. [] {} [[]] {a:}
&x *x !!int %YAML --- ... - ? : , [ ] { } | > # << @ ` ' " \\ ,
"""
WORDS = _TEXT.split()
CHARACTERS = [
    *"\t\n\r :-[]{},#&*!|>'\"%@`~?\\0",
    "\0",
    "\x1b",
    "\x85",
    "\u2028",
    "\ufeff",
    "\u202e",
    "é",
    "日",
    "😀",
]


@dataclass
class Outcome:
    """What a run found; `failures` hold the text and what went wrong with it."""

    accepted: int = 0
    refused: int = 0
    lowered: int = 0
    slowest_seconds: float = 0.0
    by_code: Counter[str] = field(default_factory=Counter[str])
    failures: list[tuple[bytes, str]] = field(default_factory=list[tuple[bytes, str]])


def run(count: int, seed: int) -> Outcome:
    """Check `count` mutated texts."""
    chance = random.Random(seed)
    seeds = [path.read_text(encoding="utf-8") for path in sorted(EXAMPLES.rglob("*.ir"))]
    outcome = Outcome()
    for _ in range(count):
        made = chance.random() < MADE_SHARE
        text = print_policy(random_policy(chance)).encode() if made else mutate(chance, seeds)
        begin = time.process_time()
        try:
            problem = check(text, outcome)
        except Exception as error:  # any exception is a finding here
            problem = f"{type(error).__name__}: {error}"
        seconds = time.process_time() - begin
        outcome.slowest_seconds = max(outcome.slowest_seconds, seconds)
        if seconds > MAX_SECONDS:
            problem = problem or f"took {seconds:.1f} s"
        if problem is not None:
            outcome.failures.append((text, problem))
    return outcome


def check(text: bytes, outcome: Outcome) -> str | None:
    """What is wrong with how the language treats one text."""
    policy, report, source = read(text, "fuzz.ir")
    shown = render.full(report) + render.concise(report) + render.as_json(report)
    if any(c in shown for c in "\x1b\0\x85\u202e"):
        return "a control character reached the output"
    outcome.by_code.update({d.code for d in report})
    if policy is None:
        outcome.refused += 1
        if not report.error_count:
            return "refused without a reason"
        for found in report:
            if found.code not in CODES:
                return f"unknown code {found.code}"
            if found.span is None or not 0 <= found.span.start <= found.span.end <= len(source.text) + 1:
                return f"{found.code} has no place in the text: {found.span}"
        return None
    outcome.accepted += 1
    if report.error_count:
        return "accepted with errors"
    Verify(report)(policy)
    outcome.by_code.update({d.code for d in report})
    if parse(print_policy(policy)) != policy:
        return "does not print"
    formatted = format_text(text)
    if parse(formatted) != policy or format_text(formatted) != formatted:
        return "does not format"
    return None if report.error_count else check_lowering(policy, outcome)


def check_lowering(policy: Policy, outcome: Outcome) -> str | None:
    """What is wrong with how a policy that makes sense by itself is lowered."""
    for model in MODELS:
        report = Report(Source("fuzz.ir", ""))
        try:
            plan = lower(policy, model, dtype="bfloat16", report=report)
        except PolicyError:
            if not report.error_count:
                return "not lowered, without a reason"
        else:
            outcome.lowered += 1
            if plan_file.decode(plan_file.encode(plan), report) != plan:
                return "the plan does not read back"
            for n in LENGTHS:
                least, most = footprint.done_pages(plan.layout, n + 50, n)
                if not 0 <= least <= most <= footprint.peak_pages(plan.layout, n + 50, n):
                    return f"bounds at {n} are {least}..{most}"
        if unknown := {d.code for d in report} - CODES:
            return f"unknown codes {unknown}"
        outcome.by_code.update({d.code for d in report})
    return None


# ---- mutations ---------------------------------------------------------------------------------------------


def mutate(chance: random.Random, seeds: list[str]) -> bytes:
    """One text, one to six mutations away from an example; now and then damaged as bytes."""
    text = chance.choice(seeds)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        text = chance.choice(MUTATIONS)(text, chance, seeds)
    data = text.encode("utf-8", "surrogatepass")
    if chance.random() < 0.05:
        at = chance.randrange(len(data) + 1)
        data = data[:at] + chance.randbytes(chance.choice((1, 2, 9))) + data[at + 1 :]
    return data


def _word(text: str, chance: random.Random, seeds: list[str]) -> str:
    """Replace a word, or put one in."""
    starts = [i for i in range(len(text)) if text[i].isalnum() and (i == 0 or not text[i - 1].isalnum())]
    at = chance.choice(starts or [0])
    end = at
    while end < len(text) and (text[end].isalnum() or text[end] == "_"):
        end += 1
    return text[:at] + chance.choice(WORDS) + text[chance.choice((at, end)) :]


def _character(text: str, chance: random.Random, seeds: list[str]) -> str:
    at = chance.randrange(len(text) + 1)
    return text[:at] + chance.choice(CHARACTERS) + text[at + chance.randrange(2) :]


def _cut(text: str, chance: random.Random, seeds: list[str]) -> str:
    at = chance.randrange(len(text) + 1)
    return text[:at] + text[at + chance.randrange(1, 30) :]


def _truncate(text: str, chance: random.Random, seeds: list[str]) -> str:
    return text[: chance.randrange(len(text) + 1)]


def _repeat(text: str, chance: random.Random, seeds: list[str]) -> str:
    """Repeat a piece, sometimes very often."""
    at = chance.randrange(len(text) + 1)
    piece = text[at : at + chance.randrange(1, 30)]
    return text[:at] + piece * chance.choice((2, 2, 3, 40, 1000)) + text[at:]


def _line(text: str, chance: random.Random, seeds: list[str]) -> str:
    """Drop, double, swap, move or indent a line."""
    lines = text.split("\n")
    i, j = chance.randrange(len(lines)), chance.randrange(len(lines))
    match chance.randrange(5):
        case 0:
            del lines[i]
        case 1:
            lines.insert(j, lines[i])
        case 2:
            lines[i], lines[j] = lines[j], lines[i]
        case 3:
            lines[i] = " " * chance.randrange(1, 5) + lines[i]
        case _:
            lines[i] = lines[i].removeprefix("  ")
    return "\n".join(lines)


def _splice(text: str, chance: random.Random, seeds: list[str]) -> str:
    """Put a piece of another example in."""
    other = chance.choice(seeds)
    begin, at = chance.randrange(len(other) + 1), chance.randrange(len(text) + 1)
    return text[:at] + other[begin : begin + chance.randrange(1, 200)] + text[at:]


def _nest(text: str, chance: random.Random, seeds: list[str]) -> str:
    at = chance.randrange(len(text) + 1)
    return text[:at] + chance.choice("[{-") * chance.choice((1, 3, 40, 5000)) + text[at:]


MUTATIONS = (*[_word] * 6, *[_line] * 3, _character, _cut, _truncate, _repeat, _splice, _nest)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    begin = time.monotonic()
    outcome = run(args.count, args.seed)
    rate = args.count / (time.monotonic() - begin)
    print(
        f"{outcome.accepted} accepted, {outcome.refused} refused, {outcome.lowered} plans, {rate:.0f} texts/s"
    )
    print(f"codes: {dict(sorted(outcome.by_code.items()))}")
    for text, problem in outcome.failures[:10]:
        print(f"--- {problem}\n{text[:2000]!r}")
    print(f"bench: fuzz_texts = {args.count}")
    print(f"bench: fuzz_plans = {outcome.lowered}")
    print(f"bench: fuzz_codes_reached = {len(outcome.by_code)}")
    print(f"bench: fuzz_slowest_s = {outcome.slowest_seconds:.2f}")
    print(f"bench: fuzz_failures = {len(outcome.failures)}")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
