"""Rows that methods keep, rotation tables, and policies executed as masks after a prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvir.calibration.harness import Harness, keep_everything
from kvir.calibration.interface import AttentionCall
from kvir.calibration.polykv.deploy import Prompt, executed
from kvir.calibration.polykv.kept import Model, kept_rows
from kvir.calibration.polykv.methods import TERMS, find
from kvir.calibration.polykv.policy import single
from kvir.calibration.polykv.rope import find_ropes
from kvir.calibration.polykv.run import understand
from kvir.calibration.samples import asked_in_prompt, retrieval_samples, token_ids
from kvir.kernels.ref.score_rope import unrotate
from kvir.kernels.ref.select_rule import LayerState, select_rule
from kvir.policy_ir import parse
from support.tiny import TEXT

Folder = Callable[[str], Path]
PROMPT, AFTER = 150, 20


@pytest.fixture(scope="module")
def harness(model_folder: Folder) -> Harness:
    return Harness(model_folder("gemma2"))  # a sliding layer, capped logits, a norm after the projection


@pytest.fixture(scope="module")
def model(harness: Harness) -> Model:
    return understand(harness, PROMPT + 600)


@pytest.fixture(scope="module")
def ids(harness: Harness) -> list[int]:
    return token_ids(harness, TEXT)[: PROMPT + AFTER]


def calls_of(harness: Harness, ids: list[int]) -> dict[int, AttentionCall]:
    """layer_id -> the call of a pass with full histories."""
    calls: dict[int, AttentionCall] = {}

    def attention(call: AttentionCall) -> Tensor:
        calls[call.layer_id] = call
        return keep_everything(call)

    harness.hidden(ids, attention)
    return calls


@pytest.mark.parametrize("per_head", [False, True], ids=["layer", "head"])
@pytest.mark.parametrize("name", [name for name, term in TERMS.items() if term is not None])
def test_rows_are_those_of_the_rule(
    name: str, per_head: bool, harness: Harness, model: Model, ids: list[int]
) -> None:
    """One scoring for all budgets chooses what the reference chooses for each rule by itself."""
    (method,) = find([name], sink_tokens=3, recent_tokens=5, per_head=per_head)
    assert method.term is not None
    budgets = [8, 11, 40, 90, 149]
    for layer_id, call in calls_of(harness, ids[:PROMPT]).items():
        inputs = model.inputs(call, PROMPT, [method.term.by])
        masks = kept_rows(method, inputs, budgets)
        for budget, mask in zip(budgets, masks, strict=True):
            chosen = select_rule(method.rule(budget, PROMPT), [LayerState(inputs, (0, 1))], PROMPT)
            for head in range(2):
                assert mask[head].nonzero()[:, 0].tolist() == chosen[model.index[layer_id], head].tolist()
            assert float(mask.sum()) == 2 * budget
            assert bool(mask[:, :3].all())
            assert bool(mask[:, -5:].all())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt-oss", "qwen3-next"])
def test_rotation_is_found(family: str, model_folder: Folder) -> None:
    """Undoing it at any position gives back what the projection and its norm made."""
    harness = Harness(model_folder(family))
    ropes = find_ropes(harness, 700)
    assert set(ropes) == {layer.layer_id for layer in harness.configurable}
    assert all(rope.cos.shape[0] == 700 for rope in ropes.values())
    seen: dict[int, Tensor] = {}
    hooks: list[Any] = []
    for layer_id, module in harness.modules.items():

        def projected(module: Any, args: Any, result: Tensor, layer_id: int = layer_id) -> None:
            seen[layer_id] = result.detach()[0]

        last = getattr(module, "k_norm", None) or module.k_proj
        hooks.append(last.register_forward_hook(projected))
    calls = calls_of(harness, list(range(3, 60)))
    for hook in hooks:
        hook.remove()
    for layer_id, call in calls.items():
        key = call.key.transpose(0, 1)  # [T, Hkv, D]
        plain = unrotate(key, ropes[layer_id], torch.arange(key.shape[0]))
        made = seen[layer_id]
        if made.shape[0] == key.shape[1]:  # heads first
            made = made.transpose(0, 1)
        torch.testing.assert_close(plain.flatten(1), made.flatten(1), atol=1e-4, rtol=1e-4)


def by_hand(harness: Harness, ids: list[int], kept: dict[int, Tensor]) -> Tensor:
    """The last hidden state of a whole pass in which queries after the prompt see `kept` [Hkv, P] of it."""

    def attention(call: AttentionCall) -> Tensor:
        heads, tokens, size = call.query.shape
        out = torch.empty(tokens, heads, size)
        for head in range(heads):
            rows = kept[call.layer_id][head // call.group]
            for t in range(tokens):
                keys = [j for j in range(t + 1) if t < PROMPT or j >= PROMPT or rows[j]]
                logits = call.key[head // call.group, keys] @ call.query[head, t] * call.scale
                if call.softcap:
                    logits = call.softcap * torch.tanh(logits / call.softcap)
                out[t, head] = logits.softmax(0) @ call.value[head // call.group, keys]
        return out

    return harness.hidden(ids, attention)


POLICY = parse(
    """
kvir: 1
name: mixed
rules:
  - {keep: [{sink: 2}, {recent: 6}, {top_k: {fraction: 0.3, by: h2o, counts: kept}}], trigger: prefill_end}
  - {layers: 2, heads: 1, keep: [{recent: 4}, {top_k: {tokens: 9, by: key_diff}}], trigger: prefill_end}
  - {layers: 1, heads: 0, keep: all}
""".replace("by: h2o", "by: {accumulated: {normalise: visible}}")
)


def test_a_policy_as_masks_is_the_policy_by_hand(harness: Harness, model: Model, ids: list[int]) -> None:
    calls = calls_of(harness, ids[:PROMPT])
    kept: dict[int, Tensor] = {}
    for layer_id, call in calls.items():
        kept[layer_id] = torch.ones(2, PROMPT, dtype=torch.bool)
        for rule, heads in executed(POLICY, harness.facts)[layer_id].selections:
            scores = [term.by for term in rule.keep if hasattr(term, "by")]  # type: ignore[union-attr]
            inputs = model.inputs(call, PROMPT, scores)
            for (_, head), rows in select_rule(rule, [LayerState(inputs, heads)], PROMPT).items():
                kept[layer_id][head] = False
                kept[layer_id][head, rows] = True
    assert [kept[1][0].sum(), kept[1][1].sum(), kept[2][0].sum(), kept[2][1].sum()] == [150, 45, 45, 13]
    prompt = Prompt(harness, model, ids[:PROMPT], {"mixed": executed(POLICY, harness.facts)})
    found = prompt.hidden_after("mixed", ids[PROMPT:])
    torch.testing.assert_close(found, by_hand(harness, ids, kept)[PROMPT:], atol=2e-5, rtol=1e-4)
    assert prompt.kept_share("mixed") == pytest.approx((150 + 45 + 45 + 13) / 600)
    full = prompt.hidden_after(None, ids[PROMPT:])
    torch.testing.assert_close(full, harness.hidden(ids, keep_everything)[PROMPT:], atol=2e-5, rtol=1e-4)
    assert not torch.allclose(full, found, atol=1e-2)


def test_windows_after_the_prompt_slide(harness: Harness, model: Model, ids: list[int]) -> None:
    (method,) = find(["streaming"], sink_tokens=2, recent_tokens=0, per_head=True)
    policy = single(method, harness.facts, 12, PROMPT)
    prompt = Prompt(harness, model, ids[:PROMPT], {"w": executed(policy, harness.facts)})
    found = prompt.hidden_after("w", ids[PROMPT:])

    def attention(call: AttentionCall) -> Tensor:
        queries, keys = torch.arange(len(ids))[:, None], torch.arange(len(ids))
        seen = (keys <= queries) & ((keys < 2) | (keys > queries - 10) | (queries < PROMPT))
        key, value = (x.repeat_interleave(call.group, 0) for x in (call.key, call.value))
        logits = call.query @ key.transpose(1, 2) * call.scale
        if call.softcap:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        return (logits.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(0, 1)

    torch.testing.assert_close(found, harness.hidden(ids, attention)[PROMPT:], atol=2e-5, rtol=1e-4)
    assert prompt.kept_share("w") == pytest.approx(12 / PROMPT)


@pytest.mark.parametrize(
    "rule",
    [
        "{keep: {recent: 9}}",
        "{keep: {top_k: {tokens: 9, by: laprox, scope: model}}}",
        "{keep: {top_k: {tokens: 9, by: attention}}, trigger: {every: 8}}",
        "{keep: {top_k: {tokens: 9, by: attention}}, region: generated}",
    ],
)
def test_other_policies_are_refused(rule: str, harness: Harness) -> None:
    with pytest.raises(ValueError, match=r"prompt's end|decode"):
        executed(parse(f"kvir: 1\nname: x\nrules: [{rule}]"), harness.facts)


def test_retrieval_is_asked_in_the_prompt_or_after_it(harness: Harness) -> None:
    ids = token_ids(harness, TEXT * 3)
    (after,) = retrieval_samples(harness, ids, 1200, 1)
    inside = asked_in_prompt(after)
    words = harness.tokenizer.decode(after.ids[after.prompt_tokens :])
    assert words.startswith("\nQuestion:")
    assert words.count("Question:") == 6
    assert after.positions[0] > after.prompt_tokens
    before = harness.tokenizer.decode(inside.ids[: inside.prompt_tokens])
    assert before.count("Question:") == 6
    assert "Answer: The number is" in before[-30:]
    number = harness.tokenizer.decode(inside.ids[inside.prompt_tokens - 1 :])
    assert number.strip().isdigit()
    assert inside.positions == tuple(
        range(inside.prompt_tokens, inside.prompt_tokens + len(inside.positions))
    )
    assert len(inside.ids) == inside.positions[-1] + 1
