"""Serve 8 long chats at once, in a memory too small for their full KV cache, and check every answer.

    make demo

Stock SGLang is started with `--kv-ir examples/headwise_smollm2.ir` and a pool of half of what full KV would
need.  Each chat hides a number in about 3,000 tokens of text and asks for it; all share a system prompt.  The
table comes from the server's own account of what it kept.  Exit code 1: a number was lost, or less memory was
saved than the plan promises.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI, OpenAIError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from evaluation import needles
from evaluation.models import model_path
from evaluation.needles import Needle
from evaluation.server import Launch, Server, ServerError, log_tail, serve

ROOT = Path(__file__).resolve().parent.parent
PLAN = ROOT / "examples" / "headwise_smollm2.ir"
LOG = ROOT / "out" / "demo" / "server.log"

CHATS = 8
HAYSTACK_TOKENS = 3_000
POOL_SHARE = 0.5  # of what full KV of all chats would need
MOST_RESIDENT_SHARE = 0.6  # of what full KV of the chats running at once would have needed
MIB = 1 << 20

STARTED = time.monotonic()
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def say(text: str) -> None:
    console.print(f"[dim]{time.monotonic() - STARTED:5.0f} s[/]  {text}")


@dataclass(frozen=True)
class Answer:
    needle: Needle
    request: str  # SGLang's id of the request
    text: str
    prompt_tokens: int
    cached_tokens: int
    seconds: float

    @property
    def found(self) -> bool:
        return self.needle.found_in(self.text)


@dataclass(frozen=True)
class Kept:
    """What the server kept of one request when it ended."""

    rows: int
    rows_full: int
    bytes_held: int
    bytes_full: int


@dataclass(frozen=True)
class Evidence:
    """The server's account: per request, and the peaks over all that ran at once."""

    requests: Mapping[str, Kept]
    pool_bytes: int
    peak_bytes: int
    peak_full_bytes: int  # what full KV of the requests running at that time would have needed


def read_evidence(server: Server) -> Evidence:
    rank: Mapping[str, Any] = server.info()["internal_states"][0]
    state = rank["kvir"]
    row_bytes = state["head_page_bytes"] // rank["page_size"]
    metrics = state["metrics"]
    return Evidence(
        requests={
            end["rid"]: Kept(
                end["bytes_held"] // row_bytes,
                end["bytes_full"] // row_bytes,
                end["bytes_held"],
                end["bytes_full"],
            )
            for end in state["finished"]
        },
        pool_bytes=metrics["kvir_pool_bytes"],
        peak_bytes=metrics["kvir_peak_covered_bytes"],
        peak_full_bytes=metrics["kvir_peak_full_kv_bytes"],
    )


def ask(client: OpenAI, needle: Needle) -> Answer:
    start = time.monotonic()
    reply = client.chat.completions.create(
        model="smollm2",
        messages=list(needle.messages),  # pyright: ignore[reportArgumentType] - plain role and content
        temperature=0,
        max_tokens=needles.ANSWER_TOKENS,
    )
    assert reply.usage is not None
    details = reply.usage.prompt_tokens_details
    return Answer(
        needle=needle,
        request=reply.id,
        text=(reply.choices[0].message.content or "").strip(),
        prompt_tokens=reply.usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details is not None else 0,
        seconds=time.monotonic() - start,
    )


def ask_all(server: Server, questions: Sequence[Needle]) -> list[Answer]:
    """All chats at once through the OpenAI interface; each answer is shown when it comes."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=1800, max_retries=0)
    answers: dict[int, Answer] = {}
    pool = ThreadPoolExecutor(len(questions))
    try:
        jobs = {pool.submit(ask, client, question): index for index, question in enumerate(questions)}
        for job in as_completed(jobs):
            index, answer = jobs[job], job.result()
            answers[index] = answer
            verdict = "[green]found[/]" if answer.found else "[red]lost[/]"
            text = textwrap.shorten(answer.text, 70, placeholder=" ...") or "(nothing)"
            say(f"chat {index + 1}: hidden {answer.needle.number}, {verdict}: {escape(text)}")
    finally:
        # An interrupted demo does not wait for its answers: the caller stops the server, which ends them.
        pool.shutdown(wait=False, cancel_futures=True)
    return [answers[index] for index in range(len(questions))]


def table(answers: Sequence[Answer], evidence: Evidence) -> Table:
    shown = Table(title="What the server kept", title_justify="left", title_style="bold")
    for name in ("chat", "prompt", "from cache", "hidden at", "number", "answer"):
        shown.add_column(name, justify="left" if name in ("number", "answer") else "right")
    for name in ("rows kept", "of", "resident MiB", "full KV MiB", "share"):
        shown.add_column(name, justify="right")
    for index, answer in enumerate(answers, start=1):
        kept = evidence.requests[answer.request]
        shown.add_row(
            str(index),
            f"{answer.prompt_tokens:,}",
            f"{answer.cached_tokens:,}",
            f"{answer.needle.depth:.0%}",
            answer.needle.number,
            "[green]found[/]" if answer.found else "[red]lost[/]",
            f"{kept.rows:,}",
            f"{kept.rows_full:,}",
            f"{kept.bytes_held / MIB:.1f}",
            f"{kept.bytes_full / MIB:.1f}",
            f"{kept.bytes_held / kept.bytes_full:.0%}",
        )
    shown.caption = (
        f"All at once, at the peak: {evidence.peak_bytes / MIB:.1f} MiB resident; full KV of the same "
        f"requests: {evidence.peak_full_bytes / MIB:.1f} MiB; the pool: {evidence.pool_bytes / MIB:.1f} MiB."
    )
    shown.caption_justify = "left"
    return shown


def run() -> int:
    say("loading the tokenizer")
    from transformers import AutoTokenizer

    model = model_path("smollm2", say)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    say(f"hiding a number in each of {CHATS} texts of {HAYSTACK_TOKENS:,} tokens")
    questions = needles.make(tokenizer, CHATS, HAYSTACK_TOKENS)
    prompts = [needles.prompt_ids(tokenizer, question) for question in questions]
    launch = Launch(
        model=model,
        kv_ir=PLAN,
        dtype="bfloat16",
        max_total_tokens=int(POOL_SHARE * CHATS * (max(map(len, prompts)) + needles.ANSWER_TOKENS)),
        max_running_requests=CHATS,
        threads=int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))),
        arguments=("--enable-cache-report",),
    )
    LOG.parent.mkdir(parents=True, exist_ok=True)
    say(f"starting SGLang, which takes about half a minute; its log is {LOG.relative_to(ROOT)}")
    console.print("        " + shlex.join(["python", *launch.command(0)[1:]]), style="dim", soft_wrap=True)
    with serve(launch, log=LOG) as server:
        shared = needles.shared_prefix(prompts)
        say(f"ready; putting the shared system prompt, {len(shared)} tokens, into the prefix cache")
        server.generate(shared, 1)
        say(f"sending {CHATS} chats at once")
        answers = ask_all(server, questions)
        evidence = read_evidence(server)
        say("stopping the server")
    console.print(table(answers, evidence))
    return verdict(answers, evidence)


def verdict(answers: Sequence[Answer], evidence: Evidence) -> int:
    """The last line, and the exit code."""
    found = sum(answer.found for answer in answers)
    hits = sum(answer.cached_tokens > 0 for answer in answers)
    saved = evidence.peak_bytes < MOST_RESIDENT_SHARE * evidence.peak_full_bytes
    if not saved:
        console.print(f"resident memory is not below {MOST_RESIDENT_SHARE:.0%} of full KV")
    resident, full = evidence.peak_bytes / MIB, evidence.peak_full_bytes / MIB
    print(
        f"demo: {found}/{len(answers)} found, resident {resident:.1f} MiB, full KV {full:.1f} MiB, "
        f"prefix hits {hits}",
        flush=True,
    )
    return 0 if found == len(answers) and saved else 1


def main() -> None:
    # An ended demo must end its server too: turn the signal into an exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: stopped"))
    try:
        sys.exit(run())
    except ServerError as error:
        sys.exit(f"demo: {error}")
    except OpenAIError as error:
        sys.exit(f"demo: a chat failed: {error}\n{log_tail(LOG)}")
    except KeyboardInterrupt:
        sys.exit("demo: interrupted")


if __name__ == "__main__":
    main()
