"""What the language knows and the runtime does not is refused by name, by the stage that refuses it."""

from __future__ import annotations

import pytest
from msgspec import field
from msgspec.structs import replace

from kvir.lowering import spec
from kvir.lowering.executable import EXECUTED, unexecuted
from kvir.lowering.pipeline import lower
from kvir.policy_ir import Policy, PolicyError
from kvir.policy_ir.nodes import Node, Recent, Rule, Windows
from support.models import made


class TopK(Node, frozen=True, tag="top_k_of_the_future"):
    tokens: int


class Tuned(Rule, frozen=True):
    moment: str | None = None
    extra: dict[str, int] = field(default_factory=dict)


class Shared(Policy, frozen=True):
    budget: int = 0


def policy(*rules: Rule) -> Policy:
    return Policy(kvir=1, name="p", rules=rules)


KEEP = (Recent(tokens=8),)
CASES: dict[str, tuple[Policy, list[tuple[str, str]]]] = {
    "term": (
        policy(Rule(keep=(*KEEP, TopK(tokens=4)))),  # type: ignore[arg-type]
        [("top_k_of_the_future", "$.rules[0].keep[1]")],
    ),
    "field of a rule": (
        policy(Rule(keep=KEEP), Tuned(keep=KEEP, moment="x")),
        [("moment", "$.rules[1].moment")],
    ),
    "mutable default": (policy(Tuned(keep=KEEP, extra={"a": 1})), [("extra", "$.rules[0].extra")]),
    "field of a policy": (Shared(kvir=1, name="p", budget=5), [("budget", "$.budget")]),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_by_name(name: str) -> None:
    given, found = CASES[name]
    assert list(unexecuted(given)) == found
    with pytest.raises(PolicyError) as caught:
        lower(given, made(2, 2), dtype="bfloat16")
    assert [d.code for d in caught.value.report if d.severity == "error"] == ["KV310"]
    assert f"the runtime cannot execute `{found[0][0]}` yet (refused by `budget`)" in str(caught.value)


def test_fields_at_their_default_are_no_obstacle() -> None:
    given = Shared(kvir=1, name="p", rules=(Tuned(keep=KEEP),))
    assert list(unexecuted(given)) == []
    assert lower(given, made(2, 2), dtype="bfloat16").policy == given


def test_every_known_field_exists() -> None:
    for struct, fields in EXECUTED.items():
        assert fields <= set(struct.__struct_fields__), struct
    assert {Policy, Rule, Windows} < set(EXECUTED)


def test_a_plan_with_such_a_policy_is_unsound() -> None:
    plan = lower(policy(Rule(keep=KEEP)), made(2, 2), dtype="bfloat16")
    verified = replace(plan.budgeted.bound.verified, policy=CASES["term"][0])
    stage = replace(plan.budgeted, bound=replace(plan.budgeted.bound, verified=verified))
    assert any("top_k_of_the_future" in rule for rule in spec.broken(stage))
