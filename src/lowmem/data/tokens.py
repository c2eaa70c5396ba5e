"""A corpus as token ids on disk, made once and memory-mapped ever after.

The cache is keyed by content: every file's bytes, the split and the tokenizer. It costs 2 or 4 bytes of disk per token
and no host memory but the pages that are being read.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lowmem.data.corpus import Corpus
from lowmem.data.trigram import trigram_bits_per_byte
from lowmem.errors import Refused

log = logging.getLogger(__name__)

FORMAT = 1  # raise it when what is written changes
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Tokens:
    """Token ids of both splits, documents joined and separated by the end-of-text token.

    `train` and `val` are memory-mapped (tokens,) arrays of unsigned integers; `val_bytes` is the size of the
    validation text; `trigram_bits_per_byte` what a byte-trigram model of the training text needs for it.
    """

    train: np.ndarray
    val: np.ndarray
    val_bytes: int
    trigram_bits_per_byte: float
    tokenizer: PreTrainedTokenizerBase

    def bits_per_byte(self, nats_per_token: float) -> float:
        return nats_per_token / np.log(2) * len(self.val) / self.val_bytes


def tokenize(
    corpus: Corpus, cache_dir: Path, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> Tokens:
    """Read a corpus's tokens from the cache, or make them.

    Args:
        vocab_size: of the byte-level BPE that is trained on the training files when `tokenizer` is None.
        tokenizer: the pretrained model's own.
    """
    folder = cache_dir / _key(corpus, vocab_size, tokenizer)
    if not (folder / "meta.json").exists():
        _write(folder, corpus, vocab_size, tokenizer)
    meta = json.loads((folder / "meta.json").read_text())
    return Tokens(
        train=np.memmap(folder / "train.bin", dtype=meta["dtype"], mode="r"),
        val=np.memmap(folder / "val.bin", dtype=meta["dtype"], mode="r"),
        val_bytes=meta["val_bytes"],
        trigram_bits_per_byte=meta["trigram_bits_per_byte"],
        tokenizer=tokenizer or _load_bpe(folder / "tokenizer.json"),
    )


def _key(corpus: Corpus, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
    what = vocab_size if tokenizer is None else sorted(tokenizer.get_vocab().items())
    key = hashlib.sha256(json.dumps([FORMAT, what]).encode())
    for split, files in (("train", corpus.train), ("val", corpus.val)):
        for file in files:
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            key.update(f"{split} {digest}\n".encode())
    return f"{corpus.name}-{key.hexdigest()[:16]}"


def _write(folder: Path, corpus: Corpus, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Fill a folder beside its final name, then rename: a second job or a Ctrl-C never sees half a cache."""
    log.info(
        "Tokenizing %s: %d files for training, %d for validation",
        corpus.root,
        len(corpus.train),
        len(corpus.val),
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder.parent))
    try:
        if tokenizer is None:
            _train_bpe(corpus.train, vocab_size, draft / "tokenizer.json")
            tokenizer = _load_bpe(draft / "tokenizer.json")
        dtype = "uint16" if len(tokenizer) <= 2**16 else "uint32"
        _write_split(draft / "train.bin", corpus.train, tokenizer, dtype)
        val_bytes = _write_split(draft / "val.bin", corpus.val, tokenizer, dtype)
        trigram = trigram_bits_per_byte(_contents(corpus.train), _contents(corpus.val))
        meta = {"dtype": dtype, "val_bytes": val_bytes, "trigram_bits_per_byte": trigram}
        (draft / "meta.json").write_text(json.dumps(meta))
        try:
            os.replace(draft, folder)
        except OSError:
            if not (folder / "meta.json").exists():  # otherwise another job was faster, with the same bytes
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _train_bpe(files: list[Path], vocab_size: int, target: Path) -> None:
    bpe = ByteLevelBPETokenizer()
    texts = (text for _, text in _texts(files))
    bpe.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
    bpe.save(str(target))


def _load_bpe(file: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False)


def _write_split(target: Path, files: list[Path], tokenizer: PreTrainedTokenizerBase, dtype: str) -> int:
    """Append each file's ids and an end-of-text token. Returns the bytes of text."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    total_bytes = total_tokens = 0
    with target.open("wb") as out:
        for batch in _batches(_texts(files)):
            for ids in _encode(tokenizer, [text for _, text in batch]):
                np.asarray(ids + end, dtype=dtype).tofile(out)
                total_tokens += len(ids)
            total_bytes += sum(size for size, _ in batch)
    if not total_tokens:
        raise Refused(f"data: the {target.stem} files hold no text ({len(files)} files). Give files that do.")
    return total_bytes


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Iterator[list[int]]:
    if tokenizer.is_fast:  # all cores, and no offsets that nobody reads
        encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return (encoding.ids for encoding in encoded)
    return iter(tokenizer(texts, add_special_tokens=False)["input_ids"])


def _texts(files: Iterable[Path]) -> Iterator[tuple[int, str]]:
    """(size in bytes, text) of every file that is not empty."""
    for raw in _contents(files):
        if raw:
            yield len(raw), raw.decode("utf-8", errors="replace")


def _contents(files: Iterable[Path]) -> Iterator[bytes]:
    return (file.read_bytes() for file in files)


def _batches(texts: Iterable[tuple[int, str]], size: int = 4 << 20) -> Iterator[list[tuple[int, str]]]:
    """Groups of texts of about `size` bytes: enough to keep every core busy, little enough to stay in memory."""
    batch: list[tuple[int, str]] = []
    for item in texts:
        batch.append(item)
        if sum(n for n, _ in batch) >= size:
            yield batch
            batch = []
    if batch:
        yield batch
