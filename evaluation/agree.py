"""Does a server say what the policy means?  Serve a real model in float32 and compare with the oracle.

    python -m evaluation.agree examples/headwise_smollm2.ir
    python -m evaluation.agree examples/*.ir --requests 40 --longest 3000

For every policy: a server, random traffic over shared prefixes (chunked prefill, prefix hits, continuous
batching, a pool that holds only part of it), then every answer teacher-forced under the policy's masks.  Exit
code 1 if one differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from evaluation import needles
from evaluation.models import MODELS, model_path
from evaluation.oracle import Agreement, Masks, Oracle, check
from evaluation.server import Launch, ServerError, serve
from evaluation.traffic import Storm, Traffic
from kvir.lowering.load import plan_for_server

CHUNK_TOKENS = 512
MOST_NEW_TOKENS = 48


def token_stream(model: Path) -> list[int]:
    """All of the text, as the model's tokens."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    return [i for text in needles.paragraphs() for i in tokenizer.encode(text, add_special_tokens=False)]


def agree(policy: Path, model: Path, options: argparse.Namespace, ids: list[int]) -> Agreement:
    """Serve random traffic under a policy and compare every answer with the oracle."""
    launch = Launch(
        model=model,
        kv_ir=policy,
        max_total_tokens=options.pool_tokens or 4 * options.longest,
        chunked_prefill_tokens=CHUNK_TOKENS,
        threads=options.threads,
        environment={"KVIR_DEBUG": "1"},
    )
    storm = Storm(
        requests=options.requests,
        seed=options.seed,
        longest_tokens=options.longest,
        most_new_tokens=MOST_NEW_TOKENS,
    )
    started = time.monotonic()
    with serve(launch) as server:
        served = storm.run(Traffic(server, ids))
    hits = sum(answer.cached_tokens for answer in served)
    prompts = sum(len(answer.prompt_ids) for answer in served)
    print(
        f"{policy.name}: {len(served)} requests served in {time.monotonic() - started:.0f} s, "
        f"{prompts:,} prompt tokens, {hits:,} from the prefix cache; asking the oracle",
        flush=True,
    )
    budgeted = plan_for_server(str(policy), model, dtype="float32").budgeted
    return check(Oracle(model, Masks.of(budgeted)), served)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare what is served under policies with the oracle.")
    parser.add_argument("policies", nargs="+", type=Path, help="policy files")
    parser.add_argument("--model", default="smollm2", help=f"{', '.join(MODELS)} or a folder (%(default)s)")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--longest", type=int, default=1_500, help="longest prompt, about, in tokens")
    parser.add_argument("--pool-tokens", type=int, help="--max-total-tokens of the server (4 x longest)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = model_path(options.model) if options.model in MODELS else Path(options.model)
    ids = token_stream(model)
    failed = 0
    for policy in options.policies:
        try:
            agreement = agree(policy, model, options, ids)
        except ServerError as error:
            print(f"{policy.name}: {error}")
            failed += 1
            continue
        print(f"{policy.name}: {'ok' if agreement.ok else 'DIFFERS'}: {agreement}", flush=True)
        failed += not agreement.ok
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
