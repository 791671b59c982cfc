"""`kvir trace`: what each KV head of the running requests holds, from time to time, and a picture of it.

A trace is a file of JSON lines: first what the server is, then one line per look with its time in seconds
and, for every running request, the logical pages of its tokens and the head-pages of each unit.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvir.lowering.layout import PAGE_TOKENS
from kvir.lowering.plan_file import write_atomically


class TraceError(Exception):
    """No server, or nothing to see."""


class Header(msgspec.Struct, frozen=True):
    """The server."""

    plan: str
    kv_heads: int
    units: int


class Request(msgspec.Struct, frozen=True):
    """One running request at one moment."""

    rid: str
    pages: int  # logical pages of its tokens
    by_unit: tuple[int, ...]  # head-pages that it holds, shared ones included


class Look(msgspec.Struct, frozen=True):
    seconds: float
    running: tuple[Request, ...]


class Trace(msgspec.Struct, frozen=True):
    header: Header
    looks: tuple[Look, ...]


def run(args: argparse.Namespace) -> None:
    """The command.

    Raises:
        TraceError: see `record`; or a file that is no trace, or nothing to write.
        OSError: of a file.
    """
    if args.output is None and args.picture is None:
        raise TraceError("nothing to write: give -o JSONL, --picture PNG or both")
    if args.file is not None:
        try:
            trace = load(Path(args.file).read_bytes())
        except ValueError as error:
            raise TraceError(f"{args.file}: not what `kvir trace` wrote: {error}") from None
    else:
        trace = record(args.url, every_s=args.every, for_s=args.seconds, say=_say)
        print(file=sys.stderr)
    if args.output is not None:
        save(trace, Path(args.output))
    if args.picture is not None:
        draw(trace, Path(args.picture))


def _say(text: str) -> None:
    print(f"\r{text:60}", end="", file=sys.stderr, flush=True)


def record(url: str, *, every_s: float, for_s: float | None, say: Callable[[str], None]) -> Trace:
    """Look until the time is over, Ctrl-C, or, without `for_s`, until requests came and went.

    Raises:
        TraceError: no server there, or one without kvir.
    """
    started, looks, header, seen = time.monotonic(), list[Look](), None, False
    try:
        while for_s is None or time.monotonic() - started < for_s:
            state = _state(url)
            header = Header(state["plan"], state["kv_heads"], state["units"])
            running = tuple(Request(r["rid"], r["pages"], tuple(r["by_unit"])) for r in state["running"])
            looks.append(Look(round(time.monotonic() - started, 3), running))
            say(f"{len(looks)} looks, {len(running)} requests")
            if for_s is None and seen and not running:
                break
            seen |= bool(running)
            time.sleep(every_s)
    except KeyboardInterrupt:
        pass
    if header is None or not any(look.running for look in looks):
        raise TraceError("no request ran meanwhile: nothing to trace")
    return Trace(header, tuple(looks))


def _state(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/server_info", timeout=60) as answer:
            info = json.load(answer)
        return info["internal_states"][0]["kvir"]
    except OSError as error:
        raise TraceError(f"{url}: {error}") from None
    except (KeyError, IndexError, ValueError):
        raise TraceError(f"{url} is no SGLang server with --kv-ir") from None


def save(trace: Trace, path: Path) -> None:
    lines = (trace.header, *trace.looks)
    write_atomically(path, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def load(data: bytes) -> Trace:
    """Raises ValueError for what is no trace."""
    first, *rest = data.splitlines() or [b""]
    looks = tuple(msgspec.json.decode(line, type=Look) for line in rest)
    return Trace(msgspec.json.decode(first, type=Header), looks)


def draw(trace: Trace, path: Path) -> None:
    """Of the request that was seen longest: rows of every unit over time, and of all beside full KV."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    seconds, pages, units = longest(trace)
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(11, 7), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    drawn = top.pcolormesh(
        seconds,
        range(len(units[0]) + 1),
        [row[:-1] for row in zip(*_rows(units), strict=True)],
        cmap="viridis",
    )
    figure.colorbar(drawn, ax=top, label="rows")
    heads = trace.header.kv_heads
    layers = trace.header.units // heads
    step = max(1, layers // 10)
    top.set_yticks(
        [layer * heads for layer in range(0, layers, step)], [str(i) for i in range(0, layers, step)]
    )
    top.set(ylabel="layer, KV heads within", title=f"{trace.header.plan}: rows of each KV head")
    bottom.plot(seconds, [PAGE_TOKENS * count for count in pages], color="0.5", label="full KV")
    for values, label in (
        ([max(look) for look in _rows(units)], "longest head"),
        ([sum(look) / len(look) for look in _rows(units)], "mean over heads"),
        ([min(look) for look in _rows(units)], "shortest head"),
    ):
        bottom.plot(seconds, values, label=label)
    bottom.set(xlabel="seconds", ylabel="rows")
    bottom.legend(loc="upper left", fontsize="small")
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix.lstrip(".") or "png", dpi=120, metadata={"Software": None})
    pyplot.close(figure)
    write_atomically(path, image.getvalue())


def longest(trace: Trace) -> tuple[list[float], list[int], list[tuple[int, ...]]]:
    """Seconds, logical pages and head-pages by unit of the request that was seen at most looks."""
    seen: dict[str, int] = {}
    for _, request in _requests(trace):
        seen[request.rid] = seen.get(request.rid, 0) + 1
    rid = max(seen, key=lambda r: seen[r])
    mine = [(s, r) for s, r in _requests(trace) if r.rid == rid]
    return [s for s, _ in mine], [r.pages for _, r in mine], [r.by_unit for _, r in mine]


def _requests(trace: Trace) -> Iterator[tuple[float, Request]]:
    for look in trace.looks:
        for request in look.running:
            yield look.seconds, request


def _rows(units: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[PAGE_TOKENS * pages for pages in look] for look in units]
