"""engine.py MODEL MODEL_WITHOUT_WEIGHTS PLAN BAD...: bad files through `Engine(kv_ir=...)`, then a good one.

Prints a line of JSON: the text of each KvirError, what was served, and the evidence.
"""

from __future__ import annotations

import json
import sys

import sglang as sgl

from kvir.sglang_ext.errors import KvirError

OPTIONS = {"device": "cpu", "dtype": "float32", "max_total_tokens": 1024, "chunked_prefill_size": 256}


def refusal(model: str, file: str) -> str:
    try:
        sgl.Engine(model_path=model, kv_ir=file, **OPTIONS)
    except KvirError as error:
        return str(error)
    raise AssertionError(f"{file} was accepted")


def main() -> None:
    model, no_weights, plan, *bad = sys.argv[1:]
    errors = [refusal(no_weights, file) for file in bad]
    engine = sgl.Engine(model_path=model, kv_ir=plan, **OPTIONS)
    try:
        prompt = [i * i % 251 for i in range(2000)]
        sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        answer = engine.generate(input_ids=prompt, sampling_params=sampling)
        state = engine.get_server_info()["internal_states"][0]["kvir"]
    finally:
        engine.shutdown()
    print(json.dumps({"errors": errors, "output_ids": answer["output_ids"], "kvir": state}))


if __name__ == "__main__":
    main()
