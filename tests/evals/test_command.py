"""`kvir eval` against two made-up servers, and against a tiny model under masks."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvir.cli import main
from kvir.evals.outcome import Scored, bootstrap, summarise
from support.tiny import tiny_model

Requests = list[Any]


@pytest.fixture
def servers() -> Iterator[Callable[[Callable[[str], str]], tuple[str, Requests]]]:
    """Starts a server that answers with a function of all that it was told; gives URL and requests."""
    running: list[ThreadingHTTPServer] = []

    def start(reply: Callable[[str], str]) -> tuple[str, Requests]:
        seen: Requests = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send({"data": [{"id": "made-up"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if "prompt" in body:
                    told, choice = body["prompt"], {"text": reply(body["prompt"])}
                    seen.append(body["prompt"])
                else:
                    told = "\n".join(message["content"] for message in body["messages"])
                    choice = {"message": {"content": reply(told)}}
                    seen.append(body["messages"])
                self._send({"choices": [choice], "usage": {"prompt_tokens": len(told)}})

            def _send(self, answer: dict[str, Any]) -> None:
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}", seen

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def everything(told: str) -> str:
    return " ".join(re.findall(r"is: (\d{5})", told))


def only_late_numbers(told: str) -> str:
    """What a window of the last half would still know."""
    return everything(told[len(told) // 2 :])


def test_two_servers_side_by_side(servers: Any, tmp_path: Path) -> None:
    good, _ = servers(everything)
    poor, _ = servers(only_late_numbers)
    output = tmp_path / "eval.json"
    options = ["--tasks", "passkey", "--lengths", "400,800", "--items", "10", "-o", str(output)]
    assert main(["eval", "--url", poor, "--baseline-url", good, *options]) == 0
    found = json.loads(output.read_text())
    total = found["rows"][-1]
    assert total["task"] == "all"
    assert total["baseline"]["mean"] == 1.0
    assert 0 < total["score"]["mean"] < 1
    assert total["difference"]["mean"] == pytest.approx(total["score"]["mean"] - 1)
    assert total["difference"]["low"] < total["difference"]["mean"] < total["difference"]["high"] < 0
    assert len(found["items"]) == 20
    assert found["evicted"] is None


def test_agnostic_means_that_the_context_is_read_before_the_question(servers: Any) -> None:
    url, seen = servers(everything)
    options = ["--tasks", "passkey", "--lengths", "400", "--items", "2", "--concurrency", "1", "--agnostic"]
    assert main(["eval", "--url", url, *options]) == 0
    assert [len(messages) for messages in seen] == [1, 3, 1, 3]
    for first, second in (seen[:2], seen[2:]):
        assert second[0] == first[0]
        assert "What is the special" not in first[0]["content"]
        assert "What is the special" in second[2]["content"]


def test_plain_prompts_are_texts_to_go_on_with(servers: Any, tmp_path: Path) -> None:
    url, seen = servers(everything)
    output = tmp_path / "eval.json"
    options = ["--tasks", "passkey", "--lengths", "400", "--items", "2", "--prompts", "plain"]
    assert main(["eval", "--url", url, *options, "-o", str(output)]) == 0
    assert all(text.split("Answer: ")[-1].startswith("The special magic number for") for text in seen)
    found = json.loads(output.read_text())
    assert found["settings"]["prompts"] == "plain"
    assert found["rows"][-1]["score"]["mean"] == 1.0


def test_a_model_without_a_chat_template_is_asked_in_plain_text(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "gemma3")
    output = tmp_path / "eval.json"
    options = ["--tasks", "passkey", "--lengths", "700", "--items", "1", "-o", str(output)]
    assert main(["eval", "--model", str(model), *options]) == 0
    found = json.loads(output.read_text())
    assert found["settings"]["prompts"] == "plain"
    assert "\n" not in found["items"][0]["answer"]


def test_a_local_model_under_masks_counts_what_was_evicted(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "llama")
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    plan = tmp_path / "plan.ir"
    plan.write_text("kvir: 1\nname: x\nrules:\n  - keep: [{sink: 4}, {recent: 96}]\n")
    output = tmp_path / "eval.json"
    words = ["eval", "--model", str(model), "--plan", str(plan), "--baseline-plan", "full"]
    options = ["--tasks", "passkey", "--lengths", "512", "--items", "1", "-o", str(output)]
    assert main([*words, *options]) == 0
    found = json.loads(output.read_text())
    (item,) = found["items"]
    assert item["prompt_tokens"] <= 512
    assert item["evicted_share"] == pytest.approx(1 - 100 / item["prompt_tokens"])
    assert found["evicted"]["score"]["items"] == 1
    assert item["answer"] != item["baseline_answer"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "multikey", "--url", "http://127.0.0.1:9"], "did you mean `multi-key`?"),
        (["--tasks", "single", "--url", "http://127.0.0.1:9"], "give a --text"),
        (["--tasks", "passkey"], "give the --url of a server"),
        (["--tasks", "passkey", "--url", "http://127.0.0.1:9"], "http://127.0.0.1:9"),
    ],
)
def test_what_is_wrong_is_explained(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "--lengths", "400", "--items", "1", *words]) == 2
    assert message in capsys.readouterr().err


def test_bootstrap_and_the_evicted_subset() -> None:
    def item(number: int, score: float, evicted: float | None) -> Scored:
        return Scored(
            task="t",
            tokens=8,
            number=number,
            prompt_tokens=8,
            evicted_share=evicted,
            references=("1",),
            answer="",
            score=score,
            baseline_answer="",
            baseline_score=1.0,
        )

    items = [item(i, float(i % 4 > 0), 0.5 if i % 2 else 0.0) for i in range(100)]
    rows, cut = summarise(items)
    assert rows[-1].score.mean == 0.75
    # the binomial interval is 0.75 +- 0.085
    assert 0.62 < rows[-1].score.low < 0.70 < 0.80 < rows[-1].score.high < 0.87
    assert rows[-1].ratio is not None
    assert rows[-1].ratio.mean == 0.75
    assert cut is not None
    assert (cut.score.items, cut.evicted_share, cut.score.mean) == (50, 0.5, 1.0)
    assert bootstrap(items, lambda some: 0.5).low == 0.5
