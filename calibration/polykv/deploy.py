"""Policies executed as masks: a prompt is read once, then every policy goes on from it by itself.

The rows that stay are those of the reference selection (`kernels/ref/select_rule.py`) for the rules as they
stand in the policy, which the plan that is written and the methods that it is compared with share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvir.calibration.harness import Harness, keep_everything
from kvir.calibration.interface import AttentionCall
from kvir.calibration.memo import Memo
from kvir.calibration.polykv.kept import Model
from kvir.calibration.polykv.result import Point
from kvir.calibration.polykv.visible import after_selection, attend_after, in_window
from kvir.kernels.ref.score_needs import term_scores
from kvir.kernels.ref.select_rule import LayerState, select_rule
from kvir.lowering.resolve import governing
from kvir.lowering.stages import ModelFacts
from kvir.policy_ir import Policy, print_policy
from kvir.policy_ir.nodes import All, Recent, Rule, Sink, TopK
from kvir.policy_ir.rules import PrefillEnd

Heads = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """What the units of one layer do at a prompt's end and after it; heads that are not named keep all."""

    selections: tuple[tuple[Rule, Heads], ...]
    windows: tuple[tuple[int, int, Heads], ...]  # sink tokens, recent tokens


def executed(policy: Policy, facts: ModelFacts) -> dict[int, Layer]:
    """layer_id -> what happens in it; layers with a window of the model's own are left out.

    Raises ValueError for a policy that drops rows anywhere but at a prompt's end, or windows before it.
    """
    prefill, decode = governing(policy, facts, "prefill"), governing(policy, facts, "decode")
    found: dict[int, Layer] = {}
    for layer, before, after in zip(facts.layers, prefill, decode, strict=True):
        if layer.native_window_tokens is not None:
            continue
        selections: dict[int, list[int]] = {}
        windows: dict[tuple[int, int], list[int]] = {}
        for head, (first, second) in enumerate(zip(before, after, strict=True)):
            if _keeps_all(policy, first):
                if not _keeps_all(policy, second):
                    windows.setdefault(_window(policy.rules[second]), []).append(head)
            else:
                if not _at_the_end(policy.rules[first]) or not (
                    second == first or _keeps_all(policy, second)
                ):
                    raise ValueError(f"rules[{first}] does more than a selection at the prompt's end")
                selections.setdefault(first, []).append(head)
        found[layer.layer_id] = Layer(
            tuple((policy.rules[r], tuple(heads)) for r, heads in selections.items()),
            tuple((*window, tuple(heads)) for window, heads in windows.items()),
        )
    return found


def _keeps_all(policy: Policy, rule: int) -> bool:
    if rule == -1:
        raise ValueError("a windows table drops rows before a prompt's end")
    return rule < 0 or any(isinstance(term, All) for term in policy.rules[rule].keep)


def _at_the_end(rule: Rule) -> bool:
    terms = [term for term in rule.keep if not isinstance(term, Sink | Recent)]
    one_layer = all(isinstance(t, TopK) and t.scope != "model" and t.tie != "model" for t in terms)
    return bool(terms) and one_layer and rule.trigger in ((), (PrefillEnd(),)) and rule.region == "all"


def _window(rule: Rule) -> tuple[int, int]:
    if not all(isinstance(term, Sink | Recent) for term in rule.keep):
        raise ValueError("a selection during decode")
    sink = max((t.tokens for t in rule.keep if isinstance(t, Sink)), default=0)
    return sink, max((t.tokens for t in rule.keep if isinstance(t, Recent)), default=0)


class Prompt:
    """A prompt that was read with full histories, and the rows of it that each policy keeps."""

    def __init__(
        self,
        harness: Harness,
        model: Model,
        ids: Sequence[int],
        policies: Mapping[str, Mapping[int, Layer]],
    ) -> None:
        self._harness, self._model, self._policies = harness, model, policies
        self.tokens = len(ids)
        self._kept: dict[tuple[str, int], Tensor] = {}  # bool [Hkv, P]
        with torch.device(harness.device):
            self._cache = harness.read(ids, self._read)

    def hidden_after(self, name: str | None, ids: Sequence[int]) -> Tensor:
        """The last hidden state [T, hidden] of what follows under a policy; None keeps everything."""

        def attention(call: AttentionCall) -> Tensor:
            if name is None:
                return keep_everything(call)
            return attend_after(call, self.tokens, self._visible(name, call))

        with torch.device(self._harness.device):
            return self._harness.hidden_after(self._cache, ids, attention)

    def kept_share(self, name: str) -> float:
        """Of the prompt's rows in the layers that a policy may cut, window and all."""
        taken = total = 0.0
        for layer_id, layer in self._policies[name].items():
            kept = self._kept[name, layer_id].float().sum(-1)
            for sink, recent, heads in layer.windows:
                kept[list(heads)] = min(self.tokens, sink + recent)
            taken, total = taken + float(kept.sum()), total + len(kept) * self.tokens
        return taken / total

    @torch.no_grad()
    def _read(self, call: AttentionCall) -> Tensor:
        rules = [rule for p in self._policies.values() for rule, _ in p[call.layer_id].selections]
        scores = [score for rule in rules for term in rule.keep for score in term_scores(term)]
        inputs = self._model.inputs(call, self.tokens, dict.fromkeys(scores))
        for name, policy in self._policies.items():
            kept = torch.ones(call.key.shape[0], self.tokens, dtype=torch.bool)
            for rule, heads in policy[call.layer_id].selections:
                for (_, head), rows in select_rule(rule, [LayerState(inputs, heads)], self.tokens).items():
                    kept[head] = False
                    kept[head, rows] = True
            self._kept[name, call.layer_id] = kept
        return keep_everything(call)

    def _visible(self, name: str, call: AttentionCall) -> Tensor:
        """bool [Hkv, T, N]."""
        rows = call.key.shape[1]
        positions = torch.arange(self.tokens, rows)
        seen = after_selection(self._kept[name, call.layer_id], positions, rows)
        for sink, recent, heads in self._policies[name][call.layer_id].windows:
            seen[list(heads)] = in_window(sink, recent, positions, rows)
        return seen


def losses(
    harness: Harness,
    model: Model,
    checks: Sequence[tuple[int, ...]],
    prompt_tokens: int,
    policies: dict[str, Policy],
    memo: Memo,
    step: Callable[[], None],
) -> list[Point]:
    """Held-out loss of what follows each prompt: with full histories, then under each policy."""
    layers = {name: executed(one, harness.facts) for name, one in policies.items()}
    texts = [print_policy(one) for one in policies.values()]

    def one(ids: tuple[int, ...]) -> list[list[float]]:
        prompt, after = Prompt(harness, model, ids[:prompt_tokens], layers), ids[prompt_tokens:]
        found = [harness.loss(prompt.hidden_after(name, after), after, 0) for name in (None, *layers)]
        return [found, [1.0, *(prompt.kept_share(name) for name in layers)]]

    measured: list[list[float]] = []
    shares: list[list[float]] = []
    for number, ids in enumerate(checks):
        of_sample, kept = memo.get(["held out", number, texts], lambda ids=ids: one(ids))
        measured.append(of_sample)
        shares.append(kept)
        step()
    return [
        Point(
            name=name,
            kept_share=sum(kept[i] for kept in shares) / len(shares),
            losses=tuple(of_sample[i] for of_sample in measured),
        )
        for i, name in enumerate(("full KV", *layers))
    ]
