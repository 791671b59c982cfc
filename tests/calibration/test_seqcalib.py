"""SeqCalib against brute force: window for window, on random models of several families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvir.calibration.candidates import FULL, Candidate, Codebook, codebook
from kvir.calibration.harness import Harness
from kvir.calibration.memo import Memo
from kvir.calibration.replay import replay
from kvir.calibration.residual import error_curves
from kvir.calibration.samples import Sample, pieces, query_positions, token_ids
from kvir.calibration.seqcalib import at_least, matrix, select
from support.tiny import TEXT

CONTEXT = 96
CODES = codebook((8, 16, 32), (0, 2), CONTEXT)
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt-oss", "qwen3-next")
Folder = Callable[[str], Path]


def nothing() -> None:
    pass


def samples_of(harness: Harness) -> list[Sample]:
    positions = query_positions(CONTEXT, 0.5, 3)
    return [Sample(ids, positions) for ids in pieces(harness, token_ids(harness, TEXT), CONTEXT, 2)]


class Brute:
    """The same model with attention written out over N x N masks, and every layer's outputs kept."""

    def __init__(self, folder: Path, native: dict[int, int | None]) -> None:
        ALL_ATTENTION_FUNCTIONS.register("kvir_brute", self._attend)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="kvir_brute"
        ).eval()
        self.native = native
        self.kept: dict[tuple[int, int], Candidate] = {}
        self.outputs: dict[int, Tensor] = {}  # layer -> [T, Hq, Dv]

    @torch.no_grad()
    def run(self, ids: tuple[int, ...]) -> dict[int, Tensor]:
        self.outputs = {}
        self.model(torch.tensor([list(ids)]), use_cache=False)
        return self.outputs

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        assert attention_mask is None
        layer, tokens, group = module.layer_idx, query.shape[2], query.shape[1] // key.shape[1]
        i, j = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
        made: list[Tensor] = []
        for head in range(query.shape[1]):
            native = self.native[layer]
            kept = self.kept.get((layer, head // group), FULL) if native is None else Candidate(native)
            seen = j <= i
            if kept.recent_tokens is not None:
                seen = seen & ((i - j < kept.recent_tokens) | (j < kept.sink_tokens))
            logits = query[0, head] @ key[0, head // group].T * scaling
            if softcap:
                logits = torch.tanh(logits / softcap) * softcap
            logits = logits.masked_fill(~seen, -torch.inf)
            if s_aux is not None:
                logits = torch.cat([logits, s_aux[head].expand(tokens, 1)], -1)
            made.append(logits.softmax(-1)[:, :tokens] @ value[0, head // group])
        out = torch.stack(made, 1)
        self.outputs[layer] = out
        return out[None], None


def brute_force(harness: Harness, folder: Path, samples: list[Sample], codes: Codebook, tau: float) -> Any:
    brute = Brute(folder, {i: layer.native_window_tokens for i, layer in harness.layers.items()})
    choices, scores = [], []
    for layer in harness.configurable:
        group = layer.query_heads // layer.kv_heads
        table = torch.zeros(len(codes), layer.kv_heads)
        full = [brute.run(s.ids)[layer.layer_id] for s in samples]
        for k, code in enumerate(codes):
            for head in range(layer.kv_heads):
                brute.kept[layer.layer_id, head] = code
            for s, reference in zip(samples, full, strict=True):
                rows = list(s.positions)
                out = brute.run(s.ids)[layer.layer_id]
                cosines = torch.cosine_similarity(out[rows], reference[rows], dim=-1)  # [Q, Hq]
                table[k] += cosines.view(-1, layer.kv_heads, group).mean((0, 2)) / len(samples)
        row = []
        for head in range(layer.kv_heads):
            found = [k for k in range(len(codes)) if table[k, head] >= tau or k == len(codes) - 1]
            row.append(found[0])
            brute.kept[layer.layer_id, head] = codes[found[0]]
        choices.append(tuple(row))
        scores.append(table)
    return tuple(choices), torch.stack(scores)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_brute_force_window_for_window(family: str, model_folder: Folder) -> None:
    folder = model_folder(family)
    harness = Harness(folder)
    samples = samples_of(harness)
    assert replay(harness, samples[0].ids) > 0.99999
    full = matrix(harness, samples, CODES, at_least(2.0), Memo(None, {}), nothing)
    values = torch.tensor(full.scores)[:, :-1].flatten()
    for tau in values.quantile(torch.tensor([0.4, 0.8])).tolist():
        found = matrix(harness, samples, CODES, at_least(tau), Memo(None, {}), nothing)
        choices, scores = brute_force(harness, folder, samples, CODES, tau)
        torch.testing.assert_close(torch.tensor(found.scores), scores, atol=2e-5, rtol=0)
        assert found.choices == choices
        assert len({k for row in choices for k in row}) > 1, "the case says nothing if all heads are equal"


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-next"])
def test_error_curves_are_what_a_head_changes_in_the_residual_stream(
    family: str, model_folder: Folder
) -> None:
    folder = model_folder(family)
    harness = Harness(folder)
    samples = samples_of(harness)[:1]
    found = error_curves(harness, samples, CODES, Memo(None, {}), nothing, retrieval_weight=0.0)
    brute = Brute(folder, {i: layer.native_window_tokens for i, layer in harness.layers.items()})
    rows = list(samples[0].positions)
    layer = harness.configurable[-1]
    block = brute.model.base_model.layers[layer.layer_id]
    added = block.post_attention_layernorm if family == "gemma3" else block.self_attn
    seen: dict[str, Tensor] = {}

    def keep_added(module: Any, args: Any, result: Any) -> None:
        seen["added"] = (result[0] if isinstance(result, tuple) else result)[0, rows]

    def keep_stream(module: Any, args: Any, kwargs: Any) -> None:
        seen["stream"] = (args[0] if args else kwargs["hidden_states"])[0, rows]

    added.register_forward_hook(keep_added)
    block.register_forward_pre_hook(keep_stream, with_kwargs=True)
    brute.run(samples[0].ids)
    full = seen["added"]
    for k, code in enumerate(CODES):
        for head in range(layer.kv_heads):
            brute.kept = {(layer.layer_id, head): code}
            brute.run(samples[0].ids)
            wanted = ((seen["added"] - full).norm(dim=-1) / seen["stream"].norm(dim=-1)).mean()
            assert found[-1][k][head] == pytest.approx(float(wanted), rel=2e-3, abs=1e-6)


def test_an_interrupted_calibration_goes_on_from_the_last_finished_layer(
    model_folder: Folder, tmp_path: Path
) -> None:
    harness = Harness(model_folder("llama"))
    samples = samples_of(harness)
    whole = matrix(harness, samples, CODES, at_least(0.95), Memo(None, {}), nothing)
    path, steps = tmp_path / "memo", 0

    def interrupt() -> None:
        nonlocal steps
        steps += 1
        if steps == 4:  # in the second layer
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        matrix(harness, samples, CODES, at_least(0.95), Memo(path, {}), interrupt)
    memo = Memo(path, {})
    assert len(memo) == 1
    assert matrix(harness, samples, CODES, at_least(0.95), memo, nothing) == whole
    assert len(Memo(path, {})) == 3
    assert len(Memo(path, {"another": "input"})) == 0
    # all is known: no pass through the model is needed
    harness.model = None
    assert matrix(harness, samples, CODES, at_least(0.95), Memo(path, {}), nothing) == whole


def test_the_budget_selector() -> None:
    points = [(0.98, 0.40), (0.99, 0.62), (0.99, 0.60), (0.99, 0.60), (0.999, 0.9)]
    assert select(points, 1.0) == 4
    assert select(points, 0.7) == 2
    assert select(points, 0.5) == 0
    assert select(points, 0.1) is None
