"""Real SGLang servers on a tiny model.  Tests say which servers they use; `Fleet` keeps them coming."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from evaluation.oracle import Masks, Oracle
from evaluation.selection_oracle import SelectionOracle
from evaluation.server import Launch, Server
from evaluation.traffic import Traffic
from kvir.lowering import plan_file
from kvir.lowering.load import plan_for_server
from kvir.lowering.stages import ExecutionPlan
from kvir.sglang_ext import standin
from support import tiny_llama
from support.fleet import Fleet
from support.servers import SERVERS, policy

standin.install()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "servers(*names): the servers that a test asks the fleet for, in order"
    )


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """The server has its own threads; the oracle is small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.make(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def ids() -> list[int]:
    """The token stream that prompts are cut from."""
    return tiny_llama.token_stream(60_000)


@pytest.fixture(scope="session")
def plan_of(tiny_model: Path) -> Callable[[str], ExecutionPlan]:
    """Lowered test policies, by name."""
    return cache(lambda name: plan_for_server(policy(name), tiny_model, dtype="float32"))


@pytest.fixture(scope="session")
def oracle_of(tiny_model: Path, plan_of: Callable[[str], ExecutionPlan]) -> Callable[[str], Oracle]:
    def make(name: str) -> Oracle:
        plan = plan_of(name)
        return (
            SelectionOracle(tiny_model, plan)
            if plan.layout.compact
            else Oracle(tiny_model, Masks.of(plan.budgeted))
        )

    return cache(make)


def _server_names(items: Sequence[pytest.Item]) -> list[str]:
    names: list[str] = []
    for item in items:
        callspec = getattr(item, "callspec", None)
        asked = [callspec.params["server"]] if callspec and "server" in callspec.params else []
        for marker in item.iter_markers("servers"):
            asked += marker.args
        names += [name for name in asked if names[-1:] != [name]]
    return names


@pytest.fixture(scope="session")
def fleet(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,
    plan_of: Callable[[str], ExecutionPlan],
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")

    def launch_of(name: str) -> Launch:
        return SERVERS[name].launch(tiny_model, lambda policy_name: _plan_file(folder, plan_of(policy_name)))

    launches = {name: (lambda name=name: launch_of(name)) for name in SERVERS}
    fleet = Fleet(launches, _server_names(request.session.items), folder)
    try:
        yield fleet
    finally:
        fleet.close()


def _plan_file(folder: Path, plan: ExecutionPlan) -> Path:
    path = folder / f"{plan.policy.name}.json"
    plan_file.save(plan, path)
    return path


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, fleet: Fleet) -> Server:
    """The server named by the test's parameter."""
    return fleet.use(request.param)


@pytest.fixture
def traffic(server: Server, ids: list[int]) -> Traffic:
    """Requests to `server`, with an empty prefix cache before them."""
    server.flush_cache()
    return Traffic(server, ids)


@pytest.fixture
def oracle(request: pytest.FixtureRequest, oracle_of: Callable[[str], Oracle]) -> Oracle:
    """The masks of the policy that `server` runs."""
    return oracle_of(SERVERS[request.node.callspec.params["server"]].policy_name)
