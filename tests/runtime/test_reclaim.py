"""What is given up first: rows inside a prefix, then leaves of the tree, and last the windows at the ends of
prompts and before branches, which are what makes a shared prefix findable again.
"""

from __future__ import annotations

from kvir.lowering.pipeline import lower
from kvir.lowering.stages import ExecutionPlan
from kvir.policy_ir.parse import parse
from support.models import made
from support.prefix_tree import P, Request
from support.simulator import Simulation

WINDOW_TOKENS, CHUNK_TOKENS, SYSTEM_TOKENS = 64, 64, 200
WINDOW_PAGES = 4


def plan() -> ExecutionPlan:
    text = f"kvir: 1\nname: test\nrules: [{{keep: [{{sink: 4}}, {{recent: {WINDOW_TOKENS}}}]}}]\n"
    return lower(parse(text), made(layers=2, kv_heads=2), dtype="float32", device="cpu")


def serve(simulation: Simulation, tokens: list[int]) -> int:
    """Run one request alone; returns the tokens it found in the cache."""
    request = Request(rid="", tokens=list(tokens), new_tokens=4)
    simulation.run([request])
    return request.cached_tokens


def test_the_third_user_of_a_system_prompt_finds_it() -> None:
    """The first has slid past it, the second computes it again and keeps the windows before the branch."""
    simulation = Simulation(plan(), 4096, chunk_tokens=CHUNK_TOKENS)
    system = list(range(SYSTEM_TOKENS))
    found = [serve(simulation, system + [10_000 + 100 * user + i for i in range(150)]) for user in range(6)]
    assert found[2:] == [SYSTEM_TOKENS // P * P] * 4
    assert found[0] == 0


def test_ends_of_prompts_outlive_what_lies_inside() -> None:
    """Demand is raised page by page: as long as anything else idle is left, no tail goes."""
    simulation = Simulation(plan(), 4096, chunk_tokens=CHUNK_TOKENS)
    res = simulation.allocator.residency
    prompt = list(range(600))
    assert serve(simulation, prompt) == 0
    path = simulation.tree.walk(prompt)
    pages = [node.page for node in path]
    tail = pages[len(prompt) // P - WINDOW_PAGES : len(prompt) // P]
    inside = [page for page in pages[1:] if page not in tail]
    for page in pages[-1:]:
        assert res.alive[page].all()
    alive = [page for page in inside if res.alive[page].any()]
    assert alive
    for _ in range(len(alive)):
        for node in path:  # the tree's own eviction would take leaf by leaf; here only windows are asked for
            node.locks += 1
        assert res.reclaimer.make_room(res.pool.free + 1, None)
        assert res.alive[tail].all()
        for node in path:
            node.locks -= 1
    assert serve(simulation, prompt + [7, 8, 9] * 20) >= len(prompt) // P * P


def test_a_shared_prefix_survives_other_traffic() -> None:
    """A pool much smaller than what passes through it: later users still find the system prompt."""
    simulation = Simulation(plan(), 512, chunk_tokens=CHUNK_TOKENS)
    system = list(range(SYSTEM_TOKENS))
    for user in range(3):
        serve(simulation, system + [10_000 + 100 * user + i for i in range(40)])
    for other in range(3):
        serve(simulation, [50_000 + 1000 * other + i for i in range(900)])
        found = serve(simulation, system + [90_000 + 100 * other + i for i in range(40)])
        assert found == SYSTEM_TOKENS // P * P
    assert simulation.allocator.residency.counters["tombstoned"] > 0
