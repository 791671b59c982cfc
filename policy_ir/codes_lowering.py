"""KV2xx to KV6xx: what is wrong with a policy on a model, a device or a server."""

from __future__ import annotations

from kvir.policy_ir.codes import Code

LOWERING: dict[str, Code] = {
    "KV200": Code(
        "the model config cannot be read",
        "config.json is missing, is not JSON, or is not an object.",
        "Layers, heads and windows are read from it.",
        "kvir check chat.ir --model ./empty-folder",
        "kvir check chat.ir --model ./llama",
    ),
    "KV201": Code(
        "unknown model family",
        "The `model_type` of the model's config.json is none that kvir knows.",
        "kvir must know which layers have a KV cache and which windows are the model's own.",
        "kvir check chat.ir --model ./my-new-architecture",
        "kvir check chat.ir --model ./llama",
    ),
    "KV202": Code(
        "the model cannot be planned",
        "The config lacks a figure, contradicts itself, or describes a kind of attention that has no"
        " per-head KV cache.",
        "Every later figure would be a guess.",
        "kvir check chat.ir --model ./deepseek-v3",
        "kvir check chat.ir --model ./llama",
    ),
    "KV203": Code(
        "no such KV head",
        "A rule selects a KV head that the model does not have.",
        "Heads are KV heads, numbered from 0; query heads share them.",
        "heads: 8..11       # of a model with 8 KV heads",
        "heads: 4..7",
    ),
    "KV204": Code(
        "no such layer",
        "A rule selects a layer that the model does not have.",
        "Layers are numbered from 0 and count every layer of the model.",
        "layers: 30         # of a model with 30 layers",
        "layers: 29",
    ),
    "KV205": Code(
        "the policy is for another model",
        "A field of `model:` does not match the model that is served.",
        "Layers and heads of the rules would mean something else.",
        "model: {layers: 32}     # served: 30 layers",
        "model: {layers: 30}",
    ),
    "KV206": Code(
        "the policy was calibrated for another model",
        "`provenance.model` is not the fingerprint of the model that is served.",
        "Windows that were measured on one model say nothing about another.",
        "kvir check smollm2.ir --model ./llama",
        "kvir calibrate --model ./llama",
    ),
    "KV207": Code(
        "the windows table does not fit the model",
        "The table has another number of rows or columns than the model has layers with a KV cache and KV"
        " heads.",
        "Each window belongs to one unit.",
        "table: [[1024, full]]       # of a model with 30 layers",
        "table: [[1024, full], ...]  # 30 rows",
    ),
    "KV208": Code(
        "a rule has no effect",
        "Every unit that the rule covers is governed by later rules, or it covers none. A warning.",
        "Later rules override earlier ones; a general rule after a special one hides it.",
        "- {layers: 0..3, keep: all}\n- keep: [{recent: 64}]",
        "- keep: [{recent: 64}]\n- {layers: 0..3, keep: all}",
    ),
    "KV209": Code(
        "the budget table does not fit the model",
        "`per_layer` or `per_head` has another number of rows or columns than the model has layers with a KV"
        " cache and KV heads.",
        "Each figure belongs to one layer or unit.",
        "per_layer: [512, 256]       # of a model with 30 layers",
        "per_layer: [512, 256, ...]  # 30 figures",
    ),
    "KV301": Code(
        "decode keeps what prefill dropped",
        "For some unit the decode rule keeps rows that the prefill rule did not.",
        "A dropped row is gone.",
        "- {phase: prefill, keep: [{recent: 64}]}\n- {phase: decode, keep: all}",
        "- {phase: prefill, keep: all}\n- {phase: decode, keep: [{recent: 64}]}",
    ),
    "KV302": Code(
        "sinks in a layer with a window of its own",
        "A rule gives sinks to a layer whose model has a sliding window. A warning.",
        "The model was never trained to see rows outside that window, so the sinks are dropped.",
        "- keep: [{sink: 4}, {recent: 64}]          # layer 0 slides by itself",
        "- {layers: 5, keep: [{sink: 4}, {recent: 64}]}",
    ),
    "KV303": Code(
        "a selection in a layer with a window of its own",
        "A rule selects by score in a layer whose model has a sliding window. A warning.",
        "Rows leave such a layer by themselves, so it keeps its window and nothing is selected.",
        "- keep: [{recent: 32}, {top_k: {tokens: 512, by: attention}}]   # layer 0 slides by itself",
        "- {layers: 5, keep: [{recent: 32}, {top_k: {tokens: 512, by: attention}}]}",
    ),
    "KV304": Code(
        "a budget that the other terms fill",
        "With `counts: kept`, a figure of a table or a shared total is no larger than what the terms by"
        " position keep. A warning.",
        "Nothing is left to select in that unit: it keeps its sinks and its window.",
        "keep: [{recent: 32}, {top_k: {per_head: [[512, 16]], by: attention, counts: kept}}]",
        "keep: [{recent: 32}, {top_k: {per_head: [[512, 64]], by: attention, counts: kept}}]",
    ),
    "KV305": Code(
        "longer than the context",
        "A window or a budget is longer than the longest sequence that the model takes. A warning.",
        "It keeps everything, which is rarely what was meant.",
        "keep: [{sink: 4}, {recent: 200000}]   # of a model with 131,072 tokens of context",
        "keep: all",
    ),
    "KV306": Code(
        "too few rows to find a fact again",
        "Every head keeps at most a twentieth of the rows, and none keeps everything. A warning.",
        "On a small model no uniform method found a hidden number again at this share, whatever its score.",
        "- {keep: {top_k: {fraction: 0.05, by: attention}}}",
        "- {keep: {top_k: {fraction: 0.05, by: attention}}}\n- {layers: 7, heads: 2, keep: all}",
    ),
    "KV310": Code(
        "not executed yet",
        "The language says it and lowering plans it; the runtime of this version does not execute it. An"
        " error when a server starts, a warning of `kvir check --model`.",
        "A policy that is served must do what it says.",
        "keep: [{top_k: {tokens: 512, by: key_norm}}]",
        "keep: [{sink: 4}, {recent: 512}]",
    ),
    "KV311": Code(
        "a model that is not served yet",
        "The model has layers without a KV cache, which the runtime of this version does not serve. An error"
        " when a server starts, a warning of `kvir check --model`.",
        "Their recurrent state would have to be kept beside the pool.",
        "--model-path ./qwen3-next --kv-ir chat.ir",
        "kvir show chat.ir --model ./qwen3-next",
    ),
    "KV401": Code(
        "layers of different shape",
        "The model's attention layers differ in their number of heads or head size.",
        "All units share one pool of head-pages, which needs one shape.",
        "kvir check chat.ir --model ./model-with-two-head-sizes",
        "kvir check chat.ir --model ./llama",
    ),
    "KV402": Code(
        "page size",
        "The page size is not a power of two in the range that the kernels take.",
        "Rows are found by shift and mask.",
        "kvir lower chat.ir --page-tokens 12",
        "kvir lower chat.ir --page-tokens 16",
    ),
    "KV403": Code(
        "rows stored in another dtype",
        "`store` names a dtype that is not the cache's.",
        "All units share one pool of head-pages, which has one dtype.",
        "- {layers: 8..31, keep: all, store: fp8_e4m3}",
        "kvir lower chat.ir --dtype bfloat16",
    ),
    "KV501": Code(
        "no kernel",
        "No implementation of an operation can run this model on this device; the message says why for each.",
        "A server without that operation could not answer.",
        "kvir lower chat.ir --device cpu --model ./gpt-oss     # needs a feature that no CPU kernel has",
        "kvir lower chat.ir --device h200 --model ./gpt-oss",
    ),
    "KV502": Code(
        "unknown device",
        "There are no kernels for the device.",
        "The message lists the devices that have some.",
        "kvir lower chat.ir --device npu",
        "kvir lower chat.ir --device cpu",
    ),
    "KV503": Code(
        "kernels that are not built yet",
        "The plan needs kernels that this version of kvir knows as data only.",
        "`kvir show` and `kvir lower` plan with them; a server could not run them.",
        "--device cuda --kv-ir chat.ir --model-path ./gpt-oss",
        "--device cuda --kv-ir chat.ir --model-path ./llama",
    ),
    "KV601": Code(
        "not a plan",
        "The file cannot be read, is too large, or is not a plan, or stage of one, that kvir wrote.",
        "A damaged plan must not reach a server.",
        "kvir show notes.json",
        "kvir lower chat.ir --model ./llama -o plan.json",
    ),
    "KV602": Code(
        "a plan of another version",
        "The plan was written by another version of kvir.",
        "Plans are exact: their fields mean what they meant in the version that wrote them.",
        "--kv-ir plan.json     # written by an older kvir",
        "--kv-ir chat.ir       # lowered again at start",
    ),
    "KV604": Code(
        "a plan for another model",
        "The plan was lowered for a model with another fingerprint.",
        "Its layout has other layers, heads or windows.",
        "--model-path ./llama --kv-ir smollm2.json",
        "--model-path ./llama --kv-ir llama.json",
    ),
    "KV605": Code(
        "a plan that contradicts itself",
        "A rule that every plan obeys does not hold.",
        "The file was edited, or kvir has an error.",
        "edit plan.json by hand",
        "lower the policy again",
    ),
    "KV606": Code(
        "a plan for another server",
        "The plan was lowered for another dtype, device or page size.",
        "Bytes and kernels would be wrong.",
        "--page-size 32 --kv-ir plan16.json",
        "kvir lower chat.ir --page-tokens 32",
    ),
}
