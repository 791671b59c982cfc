"""Rows that the references keep of a real prompt are those that kvpress keeps, method by method."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from evaluation.models import model_path
from kvir.kernels.ref.score import score
from kvir.kernels.ref.score_needs import term_scores
from kvir.kernels.ref.select_offer import LayerState, candidate_rows, inside_rows
from kvir.kernels.ref.select_rule import select_rule
from kvir.policy_ir import load
from kvir.policy_ir.terms import TopK
from support.captured import LayerCapture, capture

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "kvpress"
METHODS = sorted(path.stem for path in GOLDEN.glob("*.ir"))
AGREEMENT = 0.999  # least share of kept rows that are the same
# Rows whose scores are closer than this are a tie: rounding a logit of 20 to float32 moves a weight by 2e-6.
TIE = 5e-6


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "smollm2.npz"))


@pytest.fixture(scope="module")
def layers(golden: dict[str, np.ndarray]) -> list[LayerCapture]:
    return capture(model_path("smollm2"), golden["input_ids"].tolist())


def test_every_method_of_the_file_is_tested(golden: dict[str, np.ndarray]) -> None:
    presses = json.loads((GOLDEN / "smollm2.json").read_text())["presses"]
    assert sorted(presses) == METHODS == sorted(set(golden) - {"input_ids"})
    assert len(METHODS) == 13


@pytest.mark.parametrize("method", METHODS)
def test_kept_rows_equal_kvpress(
    method: str, golden: dict[str, np.ndarray], layers: list[LayerCapture]
) -> None:
    kept, wanted = kept_rows(method, layers), unpacked(golden, method)
    same = int((kept & wanted).sum())
    print(f"kept_rows_equal_{method} = {same}/{int(wanted.sum())}")
    assert kept.sum() == wanted.sum()
    assert same >= AGREEMENT * wanted.sum()
    assert widest_gap(method, layers, kept, wanted) < TIE


def test_another_method_keeps_other_rows(golden: dict[str, np.ndarray], layers: list[LayerCapture]) -> None:
    """The measure sees a wrong method, and the tie check a row that is no tie."""
    kept, wanted = kept_rows("knorm", layers), unpacked(golden, "keydiff")
    assert (kept & wanted).sum() < 0.9 * wanted.sum()
    assert widest_gap("knorm", layers, kept, wanted) > 100 * TIE


def kept_rows(method: str, layers: list[LayerCapture]) -> np.ndarray:
    """bool [layers, KV heads, tokens]."""
    rule = load(GOLDEN / f"{method}.ir").rules[0]
    scores = [score for term in rule.keep for score in term_scores(term)]
    heads, tokens = layers[0].k.shape[1], layers[0].k.shape[0]
    states = [LayerState(layer.inputs(scores), tuple(range(heads))) for layer in layers]
    kept = np.zeros((len(layers), heads, tokens), dtype=bool)
    for (layer, head), rows in select_rule(rule, states, tokens).items():
        kept[layer, head, rows.numpy()] = True
    return kept


def widest_gap(method: str, layers: list[LayerCapture], kept: np.ndarray, wanted: np.ndarray) -> float:
    """The largest relative distance of scores among the rows on which two choices differ, rival by rival."""
    rule = load(GOLDEN / f"{method}.ir").rules[0]
    term = next((term for term in rule.keep if isinstance(term, TopK)), None)
    widest = 0.0
    for layer in layers:
        differ = torch.from_numpy(kept[layer.index] ^ wanted[layer.index])
        if not differ.any():
            continue
        assert term is not None, "rows that no score chose"
        tokens = differ.shape[1]
        inside = inside_rows(term, rule.keep)
        inputs = replace(
            layer.inputs([term.by]),
            candidates=candidate_rows(rule.keep, rule.region, tokens, tokens),
            budget_rows=int(wanted[layer.index, 0].sum()) - inside,
            inside_rows=inside,
        )
        scores = score(term.by, inputs).double()
        if term.tie == "layer":
            scores = scores.mean(dim=0, keepdim=True).expand_as(scores)
        shared = term.tie == "layer" or term.scope == "layer"
        for of_rivals in [scores[differ]] if shared else [s[d] for s, d in zip(scores, differ, strict=True)]:
            if len(of_rivals):
                gap = (of_rivals.max() - of_rivals.min()) / of_rivals.abs().max()
                widest = max(widest, float(gap))
    return widest


def unpacked(golden: dict[str, np.ndarray], method: str) -> np.ndarray:
    """bool [layers, KV heads, tokens]."""
    return np.unpackbits(golden[method], axis=-1)[..., : len(golden["input_ids"])].astype(bool)
