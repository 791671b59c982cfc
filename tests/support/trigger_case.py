"""Selections of decode steps, captured: the launches of a step are written down once, then replayed while
requests grow, select, change places and end.

Held rows are followed here by hand, row by row, with the reference for every selection.  Run as
`support.triton_cases` is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvir.kernels.catalog import decode_tile
from kvir.kernels.ops import FULL, Bounds, Cache
from kvir.kernels.ref.select_offer import LayerState, candidate_rows, offer
from kvir.kernels.ref.select_rule import choose
from kvir.kernels.score_ops import ScoreInputs
from kvir.policy_ir import parse
from kvir.policy_ir.rules import Rule
from support.capture import Launch, capturing, replay
from support.triton_cases import off, run

if TYPE_CHECKING:
    from kvir.kernels.triton.trigger import Chosen, Due

LAYERS, HEADS, GROUP, DIM, PAGE = 2, 2, 3, 64, 16
UNITS, QUERY_HEADS = LAYERS * HEADS, HEADS * GROUP
WINDOW, SCALE, MOST = 8, 0.3, 160  # tokens of a sequence at most
SPARE = 5
GOVERNED = {layer: tuple(range(HEADS)) for layer in range(LAYERS)}


@dataclass(frozen=True)
class Case:
    keep: str
    mass: float
    floor: int
    cap: int
    region: str = "generated"
    tail: bool = True  # the partial page stays where it is
    logit_cap: float = 0.0


CASES_BY_NAME = {
    "mass": Case("{sink: 2}, {recent: 16}, {top_p: {mass: 0.7, by: %s, floor: 4, cap: 24}}", 0.7, 4, 24),
    "all-mass": Case("{recent: 9}, {top_p: {mass: 1.0, by: %s, cap: 40}}", 1.0, 0, 40, "all", tail=False),
    "fixed": Case("{sink: 4}, {recent: 16}, {top_k: {tokens: 13, by: %s}}", 0.0, 13, 13, "all"),
    "capped-logits": Case(
        "{recent: 20}, {top_p: {mass: 0.5, by: %s, floor: 1, cap: 9}}", 0.5, 1, 9, "all", logit_cap=5.0
    ),
}  # fmt: skip


def rule_of(case: Case) -> Rule:
    keep = case.keep % f"{{attention: {{window: {WINDOW}}}}}"
    text = f"kvir: 1\nname: t\nrules:\n  - {{keep: [{keep}], trigger: {{every: 7}}, region: {case.region}}}\n"
    return parse(text).rules[0]


@dataclass
class Sequence:
    """One request: all it ever computes, and which of its rows each unit holds."""

    prompt: int
    row: int  # of req_to_token and of the ring
    pages: Tensor  # int32: logical pages
    spare: Tensor  # int32 [SPARE]: rows of the table
    q: Tensor = field(init=False)  # [MOST, LAYERS, QUERY_HEADS, DIM]
    k: Tensor = field(init=False)  # [MOST, LAYERS, HEADS, DIM]
    v: Tensor = field(init=False)
    tokens: int = field(init=False)
    held: list[Tensor] = field(init=False)  # of each unit: positions
    sink: Tensor = field(init=False)  # int32 [UNITS]: rows in compact head-pages
    dest: Tensor = field(init=False)  # int32 [UNITS, SPARE]: where a selection may put rows
    start: int = 0  # first token that is read through the logical pages, after a selection

    def __post_init__(self) -> None:
        self.q = torch.randn(MOST, LAYERS, QUERY_HEADS, DIM) * 2
        self.k, self.v = torch.randn(2, MOST, LAYERS, HEADS, DIM)
        self.tokens = self.prompt
        self.held = [torch.arange(self.prompt) for _ in range(UNITS)]
        self.sink = torch.zeros(UNITS, dtype=torch.int32)


class World:
    """Pool, table and requests; a step for three of them that was captured."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        from kvir.kernels.triton.decoder import Decoder, Sizes
        from kvir.kernels.triton.trigger import Nuclei, Trigger

        torch.manual_seed(5)
        self.case, self.rule, self.device = case, rule_of(case), device
        pages = 5 * MOST // PAGE
        head_pages = 2 * (pages + 5 * SPARE) * UNITS
        table = torch.full((pages + 5 * SPARE, UNITS), -1, dtype=torch.int32)
        shuffled = torch.randperm(head_pages).to(torch.int32)
        table[:pages] = shuffled[: pages * UNITS].view(pages, UNITS)
        self.free = shuffled[pages * UNITS :].tolist()
        self.cache = Cache(torch.randn(head_pages, 2, PAGE, DIM).to(device), table.to(device))
        plain = Bounds(
            torch.zeros(UNITS, dtype=torch.int32, device=device),
            torch.full((UNITS,), FULL, dtype=torch.int32, device=device),
        )
        sizes = Sizes(3, MOST // PAGE, SPARE, LAYERS, HEADS, QUERY_HEADS, DIM, PAGE)
        self.decoder = Decoder(sizes, decode_tile(DIM, GROUP, "float32"), plain, device)
        units = torch.ones(UNITS)
        nuclei = Nuclei(
            (units * WINDOW).int(), units.double() * case.mass, (units * case.floor).int(),
            (units * case.cap).int(),
        )  # fmt: skip
        self.trigger = Trigger(self.decoder, nuclei, ring_rows=6, candidates=MOST, dtype=torch.float32)
        self.req_to_token = torch.zeros(6, MOST, dtype=torch.int32, device=device)
        self.rows, self.lens, self.slots = torch.zeros(3, 3, dtype=torch.int64, device=device)
        self.q, self.out = torch.zeros(2, LAYERS, 3, QUERY_HEADS, DIM, device=device)
        self.k, self.v = torch.zeros(2, LAYERS, 3, HEADS, DIM, device=device)
        if device == "cpu":
            launches, self.facts = self.capture()
            self.replay = lambda: replay(launches)
        else:
            self.launch()  # compiles; without requests nothing is written
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.launch()
            self.replay = graph.replay

    def launch(self) -> None:
        """A step of decode."""
        from kvir.kernels.triton.ops import append

        self.decoder.plan(self.req_to_token, self.rows, self.lens)
        for layer in range(LAYERS):
            append(self.k[layer], self.v[layer], self.cache, self.slots, layer * HEADS)
            self.decoder.attend(layer, self.q[layer], self.cache, SCALE, self.case.logit_cap, self.out[layer])
            self.trigger.remember(layer, self.q[layer], self.rows, self.lens)
        self.trigger.select(self.cache, self.rows, SCALE, self.case.logit_cap)

    def capture(self) -> tuple[list[Launch], list[object]]:
        with capturing() as (launches, mode):
            self.launch()
        return launches, [launch.facts(mode.fresh) for launch in launches]

    def begin(self, prompt: int, row: int) -> Sequence:
        """A prompt is read: rows to the pool, its last queries to the ring."""
        pages = torch.arange((row - 1) * MOST // PAGE, row * MOST // PAGE, dtype=torch.int32)
        first = self.cache.table.shape[0] - row * SPARE
        one = Sequence(prompt, row, pages, torch.arange(first, first + SPARE, dtype=torch.int32))
        self.req_to_token[row] = (pages[:, None] * PAGE + torch.arange(PAGE, dtype=torch.int32)).flatten()
        self.cache.table[one.spare.long()] = -1
        for position in range(prompt):
            head_pages = self.cache.table[pages[position // PAGE].long()].long()
            rows = torch.stack([one.k[position].flatten(0, 1), one.v[position].flatten(0, 1)], dim=1)
            self.cache.kv[head_pages, :, position % PAGE] = rows.to(self.device)
        last = torch.arange(max(0, prompt - WINDOW), prompt)
        for layer in range(LAYERS):
            given = one.q[last, layer], torch.full_like(last, row), last + 1
            self.trigger.remember(layer, *(x.to(self.device) for x in given))
        return one

    def step(self, batch: list[Sequence | None], due: set[int]) -> float:
        """All requests of a batch go on by one token, some of them select; the error over what is allowed."""
        from kvir.kernels.triton.decoder import Placed

        for static in (self.rows, self.lens, self.slots):
            static.zero_()
        placed: list[Placed | None] = []
        for i, one in enumerate(batch):
            if one is None:
                placed.append(None)
                continue
            at = one.tokens
            one.tokens += 1
            one.held = [torch.cat([held, torch.tensor([at])]) for held in one.held]
            self.rows[i], self.lens[i] = one.row, one.tokens
            self.slots[i] = self.req_to_token[one.row, at]
            self.q[:, i], self.k[:, i], self.v[:, i] = one.q[at], one.k[at], one.v[at]
            recent = torch.full((UNITS,), one.tokens - one.start, dtype=torch.int32)
            placed.append(Placed(one.spare, one.sink, recent) if one.sink.any() else None)
        self.decoder.place(placed)
        self.trigger.place([self.due(one) if i in due else None for i, one in enumerate(batch)])
        self.replay()
        worst = max(self.attended(i, one) for i, one in enumerate(batch) if one is not None)
        for i, chosen in self.trigger.chosen().items():
            one = batch[i]
            assert one is not None
            worst = max(worst, self.settle(one, chosen))
        return worst

    def attended(self, i: int, one: Sequence) -> float:
        worst, outs = 0.0, self.out[:, i].cpu()
        for layer in range(LAYERS):
            inputs = one.q[one.tokens - 1, layer].view(HEADS, GROUP, DIM)
            for head in range(HEADS):
                held = one.held[layer * HEADS + head]
                logits = inputs[head] @ one.k[held, layer, head].T * SCALE
                if self.case.logit_cap:
                    logits = self.case.logit_cap * torch.tanh(logits / self.case.logit_cap)
                wanted = logits.softmax(-1) @ one.v[held, layer, head]
                worst = max(worst, off(outs[layer, head * GROUP : (head + 1) * GROUP], wanted))
        return worst

    def due(self, one: Sequence | None) -> Due:
        """As a runtime would ask: a head-page for every row that might stay, those that it has first."""
        from kvir.kernels.triton import trigger

        assert one is not None
        run = candidate_rows(self.rule.keep, self.rule.region, one.tokens, one.prompt)
        ends = torch.tensor([[int((held < at).sum()) for at in run] for held in one.held], dtype=torch.int32)
        table = self.cache.table.cpu()
        one.dest = torch.full((UNITS, SPARE), -1, dtype=torch.int32)
        for unit in range(UNITS):
            had = -(-int(one.sink[unit]) // PAGE)
            one.dest[unit, :had] = table[one.spare[:had].long(), unit]
            for i in range(had, SPARE):
                one.dest[unit, i] = self.free.pop()
        left = torch.full((UNITS,), one.tokens % PAGE if self.case.tail else 0, dtype=torch.int32)
        return trigger.Due(torch.ones(UNITS, dtype=torch.bool), ends, left, one.sink, one.dest)

    def settle(self, one: Sequence, chosen: Chosen) -> float:
        """What was chosen is what the reference chooses, and lies where it should."""
        counts, flags, worst = chosen.counts, chosen.kept, 0.0
        left = one.tokens % PAGE if self.case.tail else 0
        one.sink, one.start = counts.clone(), one.tokens - left
        for unit, held in enumerate(one.held):
            layer, head = divmod(unit, HEADS)
            kept = self.reference(one, layer, head)
            start, stop = candidate_rows(self.rule.keep, self.rule.region, one.tokens, one.prompt)
            inside = (held >= start) & (held < stop)
            stays = torch.zeros(len(held), dtype=torch.bool)
            stays[kept] = True
            assert stays[inside].tolist() == flags[unit, : int(inside.sum())].tolist()
            one.held[unit] = held[kept]
            moved = held[kept][held[kept] < one.start]
            assert len(moved) == int(counts[unit])
            count = -(-len(moved) // PAGE)
            dest = one.dest[unit]
            pages = self.cache.kv[dest[:count].long()].cpu()
            rows = pages.transpose(0, 1).flatten(1, 2)[:, : len(moved)]
            wanted = torch.stack([one.k[moved, layer, head], one.v[moved, layer, head]])
            worst = max(worst, off(rows, wanted))
            table = torch.where(torch.arange(SPARE) < count, dest, torch.tensor(-1, dtype=torch.int32))
            self.cache.table[one.spare.long(), unit] = table.to(self.device)
            self.free += [int(page) for page in dest[count:] if page >= 0]
        return worst

    def reference(self, one: Sequence, layer: int, head: int) -> Tensor:
        held, seen = one.held[layer * HEADS + head], torch.arange(max(0, one.tokens - WINDOW), one.tokens)
        inputs = ScoreInputs(
            k=one.k[held, layer, head][:, None],
            v=one.v[held, layer, head][:, None],
            candidates=(0, 0),
            scale=SCALE,
            logit_cap=self.case.logit_cap,
            layer=layer,
            first_head=head,
            q_obs=one.q[seen, layer, head * GROUP : (head + 1) * GROUP],
            q_positions=seen,
            positions=held,
        )
        state = LayerState(inputs, (head,))
        offered = offer(self.rule, [state], GOVERNED, one.prompt, one.tokens)
        return choose(self.rule, [offered], GOVERNED, one.prompt)[layer, head]


def replays_select(case: Case, device: str = "cpu") -> Callable[[], float]:
    def measured() -> float:
        world = World(case, device)
        one, two, three = world.begin(20, 1), world.begin(3, 2), world.begin(49, 3)
        worst = 0.0
        for number in range(1, 29):
            batch: list[Sequence | None] = [one, two, three]
            if number > 9:  # a place changes, then a request ends and padding takes its place
                batch = [three, one, two if number < 22 else None]
            due = {i for i, x in enumerate(batch) if x is not None and (x.tokens + 1 - x.prompt) % 7 == 0}
            due |= {1} if number in (12, 15) else set()
            worst = max(worst, world.step(batch, due))
        four = world.begin(30, 2)  # in the ended one's place, whose queries are still in the ring
        for number in range(1, 10):
            worst = max(worst, world.step([four, one, three], {0} if number in (4, 9) else set()))
        assert len({len(rows) for x in (one, two, three) for rows in x.held}) > 1
        assert device != "cpu" or world.capture()[1] == world.facts
        free = [*world.free, *world.cache.table[world.cache.table >= 0].tolist()]
        assert len(set(free)) == len(free)
        return worst

    return measured


CASES: dict[str, Callable[[], float]] = {
    f"replays-select-{name}": replays_select(case) for name, case in CASES_BY_NAME.items()
}

if __name__ == "__main__":
    json.dump(run(CASES), sys.stdout)
