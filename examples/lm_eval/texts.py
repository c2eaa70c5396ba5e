"""The functions of lowmem_bits_per_byte.yaml: they read the texts and score each one with its end-of-text token.

`evaluate=` predicts the end-of-text token behind each text, and divides by the bytes of the texts alone. Plain tasks of
lm-evaluation-harness leave this token out.
"""

from datasets import load_dataset
from transformers import AutoTokenizer


def dataset(texts: str, pretrained: str, **_: object) -> dict:
    """Returns the documents. Args: texts: a .jsonl file with `text` in each line, of --metadata; pretrained: the folder
    of the model, of --model_args."""
    end = AutoTokenizer.from_pretrained(pretrained).eos_token or ""
    read = load_dataset("json", data_files=texts, split="train").select_columns("text")
    return {"test": read.add_column("end", [end] * len(read))}


def target(document: dict) -> str:
    return document["text"] + document["end"]


def process_results(document: dict, results: list[float]) -> dict:
    return {"bits_per_byte": (results[0], len(document["text"].encode()))}
