"""A transformers model whose attention calls are handed to the caller.  No model is known by name: everything
comes through transformers' attention interface and the facts that lowering reads from `config.json`."""

from __future__ import annotations

import copy
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvir.calibration.attend import attend
from kvir.calibration.candidates import FULL, Candidate
from kvir.calibration.interface import AttentionCall
from kvir.lowering.families import CHUNKED
from kvir.lowering.model_facts import load_model
from kvir.lowering.stages import AttentionLayer

Attention = Callable[[AttentionCall], Tensor]  # [T, Hq, Dv] for a layer whose history may be cut

LOSS_CHUNK = 256
HEAD_BYTES = 1 << 20  # of each weights file, read to tell one checkpoint from another

_names = itertools.count()


class CalibrationError(Exception):
    """The model or the data cannot be calibrated; the text says what to do."""


class Harness:
    """A model in `dtype`; attention is computed in float32 where its inputs are."""

    def __init__(self, folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        """Raises PolicyError for a config that kvir cannot plan for, CalibrationError for attention that
        has no windows to choose."""
        self.facts = load_model(folder)
        if CHUNKED in self.facts.needs:
            raise CalibrationError(f"{folder}: chunked attention has no windows to calibrate")
        self.layers: dict[int, AttentionLayer] = {layer.layer_id: layer for layer in self.facts.layers}
        name = f"kvir_calibration_{next(_names)}"
        # an unknown name makes transformers pass no mask: causality and native windows are ours
        ALL_ATTENTION_FUNCTIONS.register(name, self._attend)
        self.implementation = name
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=name)
        self.model.eval().requires_grad_(False).to(device)  # gradients, where any, are of the caller's gates
        self.device = device
        self.weights = _weights_digest(folder)
        self._local = threading.local()
        self.modules: dict[int, Any] = {}  # layer_id -> attention module, known after a forward pass

    @property
    def configurable(self) -> tuple[AttentionLayer, ...]:
        """Layers that see the whole history: the ones a calibration may cut, in execution order."""
        return tuple(layer for layer in self.facts.layers if layer.native_window_tokens is None)

    def hidden(self, ids: Sequence[int], attention: Attention) -> Tensor:
        """The last hidden state [T, hidden] of one sequence."""
        with self._calls_go_to(attention):
            given = torch.tensor([list(ids)], device=self.device)
            return self.model.base_model(input_ids=given, use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def loss(self, hidden: Tensor, ids: Sequence[int], start: int) -> float:
        """Mean next-token loss in nats over the predictions of `ids[start + 1:]`.

        A chunk of logits at a time: those of a whole sequence are never held.
        """
        total = 0.0
        target = torch.tensor(list(ids), device=self.device)
        for begin in range(start, len(ids) - 1, LOSS_CHUNK):
            end = min(begin + LOSS_CHUNK, len(ids) - 1)
            logits = self.logits(hidden, range(begin, end))
            total += float(cross_entropy(logits, target[begin + 1 : end + 1], reduction="sum"))
        return total / (len(ids) - 1 - start)

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """float32 [rows, vocabulary]: the model's own forward turns hidden states [T, hidden] into logits, so
        that caps and scales on them apply."""
        from transformers.modeling_outputs import MoeModelOutputWithPast

        output: Any = hidden[None]
        ids = torch.zeros(output.shape[:2], dtype=torch.int64, device=self.device)
        with _replaced_forward(self.model.base_model, MoeModelOutputWithPast(last_hidden_state=output)):
            kept = torch.tensor(list(rows), device=self.device)
            return self.model(input_ids=ids, logits_to_keep=kept, use_cache=False).logits[0].float()

    @torch.no_grad()
    def read(self, ids: Sequence[int], attention: Attention) -> object:
        """Run a prompt and return the model's cache of it, for `hidden_after`."""
        with self._calls_go_to(attention):
            given = torch.tensor([list(ids)], device=self.device)
            return self.model.base_model(input_ids=given, use_cache=True).past_key_values

    @torch.no_grad()
    def hidden_after(self, cache: object, ids: Sequence[int], attention: Attention) -> Tensor:
        """The last hidden state [T, hidden] of what follows a prompt; its cache stays as it is."""
        with self._calls_go_to(attention):
            given = torch.tensor([list(ids)], device=self.device)
            past = copy.deepcopy(cache)
            output = self.model.base_model(input_ids=given, past_key_values=past, use_cache=True)
            return output.last_hidden_state[0]

    def prefix_ids(self) -> list[int]:
        """What the tokenizer puts before a text, such as `<bos>`."""
        marked, plain = self.tokenizer("a").input_ids, self.tokenizer("a", add_special_tokens=False).input_ids
        return list(marked[: marked.index(plain[0])])

    @contextmanager
    def stock_attention(self) -> Iterator[None]:
        """The model's own attention, masks included, for the length of a `with` block."""
        # every model has it, and it alone applies whatever a family adds, such as caps on logits
        self.model.set_attn_implementation("eager")
        try:
            yield
        finally:
            self.model.set_attn_implementation(self.implementation)

    @contextmanager
    def _calls_go_to(self, attention: Attention) -> Iterator[None]:
        before = getattr(self._local, "attention", None)
        self._local.attention = attention
        try:
            yield
        finally:
            self._local.attention = before

    def calls_go_to(self, attention: Attention) -> Any:
        """Who answers the attention calls of this thread, for the length of a `with` block."""
        return self._calls_go_to(attention)

    def _attend(
        self,
        module: Any,
        query: Tensor,  # [1, Hq, T, D]
        key: Tensor,  # [1, Hkv, N, D]
        value: Tensor,  # [1, Hkv, N, Dv]
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if query.shape[0] != 1 or attention_mask is not None:
            raise CalibrationError("calibration runs one unpadded sequence at a time")
        layer = self.layers.get(module.layer_idx)
        if layer is None or layer.kv_heads != key.shape[1] or layer.query_heads != query.shape[1]:
            raise CalibrationError(f"layer {module.layer_idx} is not what config.json says")
        self.modules[module.layer_idx] = module
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        call = AttentionCall(module.layer_idx, query[0], key[0], value[0], scale, softcap, s_aux)
        native = layer.native_window_tokens
        if native is not None:
            return attend(call, [Candidate(native)] * layer.kv_heads)[None], None
        return self._local.attention(call)[None].contiguous(), None


def keep_everything(call: AttentionCall) -> Tensor:
    """The identity policy, as an `Attention`."""
    return attend(call, [FULL] * call.key.shape[0])


@contextmanager
def _replaced_forward(module: Any, output: object) -> Iterator[None]:
    module.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del module.forward  # the class's own shows again


def _weights_digest(folder: Path) -> str:
    """Tells checkpoints apart without reading them whole: name, size and first MiB of each weights file."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".gguf")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(HEAD_BYTES))
    return digest.hexdigest()
