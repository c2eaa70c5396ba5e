"""A corpus as token ids on disk, made once and memory-mapped ever after.

The cache is keyed by content: every file's bytes, the split and the tokenizer. It costs 2 or 4 bytes of disk per token
and no host memory but the pages that are being read.
"""

import codecs
import hashlib
import io
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import ByteLevelBPETokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lowmem.data.corpus import Corpus, cut, shown
from lowmem.errors import Refused

log = logging.getLogger(__name__)

FORMAT = 3  # raise it when what is written changes
END_OF_TEXT = "<|endoftext|>"
COUNTED_AT_ONCE = 1 << 20  # tokens: about 100 MB as Python's strings
# Bytes of a word that a BPE is trained on: every merge goes through the whole of every word that has it, so one of 2 MB
# takes minutes, and in pieces of 256 bytes 6 s. The longest of Python's standard library has 80.
LONGEST_WORD = 256


@dataclass(frozen=True)
class Tokens:
    """Token ids of both splits, documents joined and separated by the end-of-text token.

    `train` and `val` are memory-mapped (tokens,) arrays of unsigned integers; `val_documents` is (documents, 2): the
    tokens and the bytes of the validation text up to the end of each document.
    """

    train: np.ndarray
    val: np.ndarray
    val_documents: np.ndarray
    tokenizer: PreTrainedTokenizerBase

    def bits_per_byte(self, predicted: int) -> Callable[[float], float]:
        """nats per token -> bits per byte, of an evaluation that predicts tokens 1 .. `predicted` of `val`.

        Their bytes alone count: token 0 is never predicted. An end-of-text token costs nats and is no text.
        """
        text = self.val_bytes(predicted + 1) - self.val_bytes(1)
        return lambda nats: nats / np.log(2) * predicted / (text or float("nan"))

    def val_bytes(self, count: int) -> int:
        """Bytes of text of the first `count` tokens of `val`. Only the document that is cut there is looked at."""
        whole = int(np.searchsorted(self.val_documents[:, 0], count, side="right"))
        start, text = self.val_documents[whole - 1].tolist() if whole else (0, 0)
        pieces = (self.val[i : min(i + COUNTED_AT_ONCE, count)] for i in range(start, count, COUNTED_AT_ONCE))
        return text + sum(_text_bytes(self.tokenizer, piece) for piece in pieces)


def tokenize(
    corpus: Corpus, cache_dir: Path, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> Tokens:
    """Read a corpus's tokens from the cache, or make them.

    Args:
        vocab_size: of the byte-level BPE that is trained on the training files when `tokenizer` is None.
        tokenizer: the pretrained model's own.

    Raises:
        Refused: a file that cannot be read or is no text; no text at all; no room for the tokens.
    """
    folder = cache_dir / _key(corpus, vocab_size, tokenizer)
    if not (folder / "meta.json").exists():
        try:
            _write(folder, corpus, vocab_size, tokenizer)
        except OSError as error:
            raise Refused(
                f"cache_dir={cache_dir}: the tokens of this text cannot be written there "
                f"({error.strerror or 'the disk is full'}). Make room, or type cache_dir=<a folder that has some>."
            ) from error
    meta = json.loads((folder / "meta.json").read_text())
    return Tokens(
        train=np.memmap(folder / "train.bin", dtype=meta["dtype"], mode="r"),
        val=np.memmap(folder / "val.bin", dtype=meta["dtype"], mode="r"),
        val_documents=np.load(folder / "val_documents.npy"),
        tokenizer=tokenizer or _load_bpe(folder / "tokenizer.json"),
    )


def _key(corpus: Corpus, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
    what = vocab_size if tokenizer is None else sorted(tokenizer.get_vocab().items())
    how = [corpus.encoding, corpus.on_error, corpus.tail]
    key = hashlib.sha256(json.dumps([FORMAT, what, how]).encode())
    for split, files in (("train", corpus.train), ("val", corpus.val)):
        for file in files:
            with _readable(file), file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            key.update(f"{split} {digest}\n".encode())
    return f"{corpus.name}-{key.hexdigest()[:16]}"


def _write(folder: Path, corpus: Corpus, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Fill a folder beside its final name, then rename: a second job or a Ctrl-C never sees half a cache."""
    log.info(
        "Tokenizing %s: %d files for training, %d for validation",
        shown(corpus.root),
        len(corpus.train),
        len(corpus.val),
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder.parent))
    try:
        if tokenizer is None:
            _train_bpe(_texts(corpus, "train"), vocab_size, draft / "tokenizer.json")
            tokenizer = _load_bpe(draft / "tokenizer.json")
        dtype = "uint16" if len(tokenizer) <= 2**16 else "uint32"
        _write_split(draft / "train.bin", corpus, tokenizer, dtype)
        _save(draft / "val_documents.npy", _write_split(draft / "val.bin", corpus, tokenizer, dtype))
        (draft / "meta.json").write_text(json.dumps({"dtype": dtype}))
        try:
            os.replace(draft, folder)
        except OSError:
            if not (folder / "meta.json").exists():  # otherwise another job was faster, with the same bytes
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _train_bpe(texts: Iterable[str], vocab_size: int, target: Path) -> None:
    """Only its training sees long words in pieces; what it encodes it sees whole."""
    bpe = ByteLevelBPETokenizer()
    words = bpe.pre_tokenizer
    bpe.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(length=LONGEST_WORD)])
    bpe.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
    bpe.pre_tokenizer = words
    target.write_text(bpe.to_str(pretty=True))


def _load_bpe(file: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False)


def _write_split(target: Path, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, dtype: str) -> np.ndarray:
    """Append each file's ids and an end-of-text token. Returns (documents, 2): tokens and bytes up to each end."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    documents = []
    with target.open("wb") as out:
        for batch in _batches(_texts(corpus, target.stem)):
            ids_of_each = _encode(tokenizer, batch)
            for text, ids in zip(batch, ids_of_each, strict=True):
                out.write(np.asarray(ids + end, dtype=dtype).tobytes())
                documents.append((len(ids) + len(end), len(text.encode())))
    files = len(getattr(corpus, target.stem))
    if not any(tokens > len(end) for tokens, _ in documents):
        raise Refused(f"data: the {target.stem} files hold no text ({files} files). Give files that do.")
    if corpus.on_error == "skip" and len(documents) < files:
        log.info(f"data.on_error=skip: {files - len(documents)} of {files} {target.stem} files are left out.")
    return np.cumsum(documents, axis=0)


def _save(target: Path, array: np.ndarray) -> None:
    """Where numpy writes to a file itself, what a full disk did not take is missing without a word."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    target.write_bytes(buffer.getvalue())


def _text_bytes(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> int:
    """Of the text that the tokens stand for. Byte-level ones may begin and end inside a character; of others, one that
    is cut does not count."""
    if not (tokenizer.is_fast and "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)):
        text = tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
        return len(text.rstrip("\N{REPLACEMENT CHARACTER}").encode())
    times = np.bincount(ids)
    different = np.flatnonzero(times)
    added = tokenizer.get_added_vocab()  # written as they are; every other token has one character for each byte
    tokens = tokenizer.convert_ids_to_tokens(different.tolist())
    return int(times[different] @ [len(token.encode() if token in added else token) for token in tokens])


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Iterator[list[int]]:
    if tokenizer.is_fast:  # all cores, and no offsets that nobody reads
        encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return (encoding.ids for encoding in encoded)
    return iter(tokenizer(texts, add_special_tokens=False)["input_ids"])


def _texts(corpus: Corpus, split: str) -> Iterator[str]:
    """Of every file of `train` or `val` that is not empty."""
    for file in getattr(corpus, split):
        text = _decoded(file, corpus.encoding, corpus.on_error)
        if text and corpus.tail is not None:
            text = cut(text, corpus.tail)[("train", "val").index(split)]
        if text:
            yield text


def _decoded(file: Path, encoding: str, on_error: str) -> str | None:
    """None: not text, and to be skipped."""
    with _readable(file):
        raw = file.read_bytes()
    try:
        text = raw.decode(encoding)
        if "\0" not in text:
            text.encode()  # which half of a surrogate pair, as some encodings give, does not do
            return text
        reason = "it has zero bytes, as binary files have"
    except UnicodeError as error:
        reason = f"see byte {getattr(error, 'start', 0):,}"
    if on_error == "skip":
        return None
    if on_error == "replace":
        text = raw.decode(encoding, errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
        return text.encode(errors="replace").decode()
    raise Refused(
        f"data: {shown(file)} is no text in {encoding} ({reason}). {_likely(raw)}"
        "data.on_error=skip leaves such files out, data.on_error=replace puts U+FFFD where there is no character."
    )


def _likely(raw: bytes) -> str:
    """What else the bytes of a file may be."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "Type data.encoding=utf-16, as which it begins; "
    return "" if b"\0" in raw else "Type data.encoding=latin-1, if that is what it is; "


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """The text is the user's: that it cannot be read is no fault of the cache."""
    try:
        yield
    except OSError as error:
        raise Refused(
            f"data: {shown(file)} cannot be read ({(error.strerror or str(error)).lower()}). "
            "Make it readable, or type a data.pattern that leaves it out."
        ) from None


def _batches(texts: Iterable[str], size: int = 4 << 20) -> Iterator[list[str]]:
    """Groups of texts of about `size` characters: enough to keep every core busy, little enough to stay in memory."""
    batch: list[str] = []
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text)
        if held >= size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
