"""Plans of `kvir calibrate polykv` against every single method and full KV, by masks in transformers.

    python -m bench.polykv                    loss and needles of the plans in examples/, ten minutes
    python -m bench.polykv loss --plans a.ir b.ir --budget .15

Everything selects at the end of a prompt of 1,024 tokens.  `loss`: next-token loss of the 128 tokens after,
on paragraphs that no plan was calibrated on.  `needle`: a number hidden in such text, found if every digit is
the likeliest token; *aware*: the question stands in the prompt that is cut, *agnostic*: it comes after.  Loss
and needles of one prompt are measured on the same rows for all policies, so differences are paired.
`polykv_gap_recovered` = (best single method - plan) / (best single method - full KV) in loss.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from evaluation.models import model_path
from evaluation.needles import NEEDLE
from kvir.calibration.harness import Harness
from kvir.calibration.job import quiet
from kvir.calibration.polykv.deploy import Layer, Prompt, executed
from kvir.calibration.polykv.kept import Model
from kvir.calibration.polykv.methods import DEFAULT, find
from kvir.calibration.polykv.policy import single
from kvir.calibration.polykv.result import interval
from kvir.calibration.polykv.run import understand
from kvir.calibration.samples import pieces, token_ids
from kvir.policy_ir import load

ROOT = Path(__file__).resolve().parents[1]
PLANS = (ROOT / "examples/polykv_smollm2.ir", ROOT / "examples/polykv_layers_smollm2.ir")
TEXT = ROOT / "data/wikipedia_valid.txt"
SEEN_PARAGRAPHS = (
    63  # the first ones are those of data/wikitext2_head.txt, which the plans were calibrated on
)
PROMPT_TOKENS, AFTER_TOKENS = 1024, 128
ASK = (
    "\nQuestion: What is the secret access code of the vault?\nAnswer: The secret access code of the vault is"
)
RESAMPLES = 2000
FULL = "full"


class Bench:
    def __init__(self, plans: Sequence[Path], budget: float) -> None:
        quiet()
        self.harness = Harness(model_path("smollm2"))
        self.model: Model = understand(self.harness, PROMPT_TOKENS + 1024)
        rows = round(budget * PROMPT_TOKENS)
        methods = find(DEFAULT, sink_tokens=4, recent_tokens=32, per_head=False)
        policies = {m.name: single(m, self.harness.facts, rows, PROMPT_TOKENS) for m in methods}
        self.singles = tuple(policies)
        self.plans = tuple(path.stem.replace("_", "-") for path in plans)
        policies |= {name: load(path) for name, path in zip(self.plans, plans, strict=True)}
        self.policies: dict[str, dict[int, Layer]] = {
            name: executed(policy, self.harness.facts) for name, policy in policies.items()
        }
        paragraphs = TEXT.read_text(encoding="utf-8").splitlines()[SEEN_PARAGRAPHS:]
        self.ids = token_ids(self.harness, "\n".join(paragraphs))

    def prompt(self, ids: Sequence[int]) -> Prompt:
        return Prompt(self.harness, self.model, ids, self.policies)

    def names(self) -> tuple[str, ...]:
        return FULL, *self.policies


def loss(bench: Bench, count: int) -> None:
    """`count` prompts and what follows them."""
    losses: dict[str, list[float]] = {name: [] for name in bench.names()}
    kept = dict.fromkeys(bench.policies, 0.0)
    for ids in pieces(bench.harness, bench.ids, PROMPT_TOKENS + AFTER_TOKENS, count):
        prompt, after = bench.prompt(ids[:PROMPT_TOKENS]), ids[PROMPT_TOKENS:]
        for name, found in losses.items():
            hidden = prompt.hidden_after(None if name == FULL else name, after)
            found.append(bench.harness.loss(hidden, after, 0))
        for name in kept:
            kept[name] += prompt.kept_share(name) / count
    for name in bench.names():
        mean = sum(losses[name]) / count
        difference, half = interval(losses[name], losses[FULL])
        share = "" if name == FULL else f", {kept[name]:.1%} of the rows"
        print(f"{name:24} {mean:.4f}, {difference:+.4f} +- {half:.4f}{share}", flush=True)
        print(f"bench: loss_{key(name)} = {mean:.4f}")
    best = min(bench.singles, key=lambda name: sum(losses[name]))
    print(f"bench: best_single = {best}")
    for name in bench.plans:
        gap, low, high = recovered(losses[best], losses[name], losses[FULL])
        suffix = "" if name == bench.plans[0] else f"_{key(name)}"
        print(f"bench: polykv_gap_recovered{suffix} = {gap:.3f}")
        print(f"bench: polykv_gap_recovered{suffix}_interval = {low:.2f}..{high:.2f}")


def recovered(best: list[float], plan: list[float], full: list[float]) -> tuple[float, float, float]:
    """The share of the gap, and its 95 % interval over resampled prompts."""

    def share(rows: Sequence[int]) -> float:
        gap = sum(best[i] - full[i] for i in rows)
        return sum(best[i] - plan[i] for i in rows) / gap if gap > 0 else float("nan")

    rng, every = random.Random(0), range(len(full))
    found = sorted(share([rng.randrange(len(full)) for _ in every]) for _ in range(RESAMPLES))
    return share(every), found[int(0.025 * RESAMPLES)], found[int(0.975 * RESAMPLES)]


def needle(bench: Bench, count: int) -> None:
    """`count` numbers at spread depths, asked for in either way."""
    for mode in ("aware", "agnostic"):
        found = dict.fromkeys(bench.names(), 0)
        for prompt_ids, after, digits in needles(bench.harness, bench.ids, count, aware=mode == "aware"):
            prompt = bench.prompt(prompt_ids)
            for name in found:
                hidden = prompt.hidden_after(None if name == FULL else name, after)
                rows = range(len(after) - digits - 1, len(after) - 1)
                likeliest = bench.harness.logits(hidden, rows).argmax(-1).tolist()
                found[name] += likeliest == after[-digits:]
        for name, right in found.items():
            print(f"bench: needles_{mode}_{key(name)} = {right}/{count}", flush=True)


def needles(
    harness: Harness, ids: Sequence[int], count: int, *, aware: bool
) -> list[tuple[list[int], list[int], int]]:
    """(prompt, what follows, digits at its end).  The token before the first digit is read with the rows that
    were kept, too."""
    rng = random.Random(1)
    ask = token_ids(harness, ASK)
    room = (len(ids) - PROMPT_TOKENS) // max(1, count - 1)
    made: list[tuple[list[int], list[int], int]] = []
    for index in range(count):
        number = str(rng.randrange(10_000, 100_000))
        fact = token_ids(harness, "\n" + NEEDLE.format(number=number) + "\n")
        digits = token_ids(harness, f" {number}")
        hay = ids[index * room :][: PROMPT_TOKENS - len(fact) - (len(ask) if aware else 0)]
        at = round(len(hay) * (0.05 + 0.9 * index / max(1, count - 1)))
        text = [*hay[:at], *fact, *hay[at:]]
        if aware:
            made.append(([*text, *ask[:-1]], [ask[-1], *digits], len(digits)))
        else:
            made.append((text, [*ask, *digits], len(digits)))
    return made


def key(name: str) -> str:
    return name.replace("-", "_")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="loss, needle (both)")
    parser.add_argument(
        "--plans", nargs="+", type=Path, default=PLANS, help="the first is the one in question"
    )
    parser.add_argument("--budget", type=float, default=0.25, help="share of the rows for single methods")
    parser.add_argument("--samples", type=int, default=32, help="prompts of each part")
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    parts: dict[str, Callable[[Bench, int], None]] = {"loss": loss, "needle": needle}
    if unknown := [part for part in args.parts if part not in parts]:
        parser.error(f"no such part: {', '.join(unknown)}")
    if args.threads:
        torch.set_num_threads(args.threads)
    bench = Bench(args.plans, args.budget)
    for part in args.parts or parts:
        parts[part](bench, args.samples)


if __name__ == "__main__":
    main()
