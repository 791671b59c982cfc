"""Four ways to give KV heads their rows while decoding, with as many rows on average.

hardkv       the paper: a head keeps the nucleus of its attention, up to one cap for all heads
fixed        every head the same number of rows (top-k)
calibrated   a floor and a cap of each head's own, in between the nucleus
own          each head a number of rows of its own (top-k)

Budgets of heads are those of `kvir calibrate hardkv`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from bench.parts.figures import Figures
from bench.parts.long_answers import ANSWER_TOKENS, PROMPT_TOKENS, Long
from bench.parts.paired import share
from kvir.calibration.hardkv.budgets import Unit, head_budgets, head_shares, limits
from kvir.calibration.polykv.result import interval
from kvir.lowering.load import plan_for_server

CALIBRATED = Path(__file__).parents[2] / "examples" / "polykv_smollm2_15.ir"
SINK, RECENT, EVERY, FLOOR = 4, 32, 128, 16
BY = "{attention: {window: 32}}"
BUDGETS = ((0.97, 512), (0.9, 256), (0.6, 256))  # mass and cap of the paper's form


@dataclass(frozen=True)
class Arms:
    """What is compared at one budget, by name."""

    full: Long
    of: Mapping[str, Long]


def compare(figures: Figures, mass: float, cap: int, model: Path, answer: Callable[[str, str], Long]) -> None:
    """`answer` serves a policy, given its name and its rules."""
    full = answer("full", "  - {keep: all}\n")
    label = f"quality_p{mass:g}_cap{cap}"
    hard = answer(f"hardkv-{mass}-{cap}", _rule(_nucleus(mass, FLOOR, cap)))
    # the prompt is kept whole by all of them, and a budget counts what is kept of the answer
    rows = round(hard.rows) - PROMPT_TOKENS
    fixed = answer(f"fixed-{rows}", _rule(_best(rows)))
    budgets = budgets_of(model, rows)
    calibrated = answer(f"calibrated-{mass}-{rows}", _rules(budgets, lambda n: _limits(mass, n)))
    own = answer(f"own-{rows}", _rules(budgets, _best))
    arms = Arms(full, {"hardkv": hard, "fixed": fixed, "calibrated": calibrated, "own": own})
    _say(figures, label, arms)


def _say(figures: Figures, label: str, arms: Arms) -> None:
    for name, one in {"full": arms.full, **arms.of}.items():
        figures.add(f"{label}_{name}_rows", f"{one.rows:.1f}")
        figures.add(f"{label}_{name}_loss", f"{fmean(one.losses):.4f}")
        figures.add(f"{label}_{name}_numbers", f"{share(one.found)}, digits {one.digits:.2f}")
    pairs = [(name, "full") for name in arms.of] + [(n, "fixed") for n in arms.of if n != "fixed"]
    for name, other in (*pairs, ("calibrated", "own")):
        against = arms.full if other == "full" else arms.of[other]
        mean, half = interval(arms.of[name].losses, against.losses)
        figures.add(f"{label}_{name}_over_{other}", f"{mean:+.4f} +- {half:.4f}")


def budgets_of(model: Path, mean: int) -> dict[Unit, int | None]:
    plan = plan_for_server(CALIBRATED, model, dtype="float32")
    source = plan.policy.provenance
    assert source is not None
    assert source.context is not None
    return head_budgets(head_shares(plan.budgeted, source.context), mean, ANSWER_TOKENS, RECENT)


# ---- rules -------------------------------------------------------------------------------------------------


def _nucleus(mass: float, floor: int, cap: int) -> str:
    return f"{{top_p: {{mass: {mass}, by: {BY}, of: {BY}, floor: {floor}, cap: {cap}}}}}"


def _limits(mass: float, rows: int) -> str:
    return _nucleus(mass, *limits(rows, RECENT))


def _best(rows: int) -> str:
    return f"{{top_k: {{tokens: {rows - RECENT}, by: {BY}}}}}"


def _rule(term: str, units: str = "") -> str:
    keep = f"keep: [{{sink: {SINK}}}, {{recent: {RECENT}}}, {term}]"
    return f"  - {{{units}{keep}, trigger: {{every: {EVERY}}}, region: generated}}\n"


def _rules(budgets: Mapping[Unit, int | None], term: Callable[[int], str]) -> str:
    return "".join(
        _rule(term(rows), f"layers: {layer}, heads: {head}, ")
        for (layer, head), rows in budgets.items()
        if rows is not None
    )


# ---- answers that are there --------------------------------------------------------------------------------


class Kept:
    """Answers by the text of their policy, in a folder: a comparison that was broken off goes on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, policy: str, make: Callable[[], Long]) -> Long:
        path = self._folder / f"{hashlib.sha256(policy.encode()).hexdigest()[:16]}.json"
        if path.exists():
            found = json.loads(path.read_text())
            return Long(tuple(found["losses"]), tuple(found["found"]), found["digits"], found["rows"])
        made = make()
        self._folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(made)))
        return made
