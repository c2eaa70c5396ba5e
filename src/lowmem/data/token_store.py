"""Tokenizes a source once, stores the token ids on disk, and memory-maps them afterwards.

The cache key is a digest of the source's content (the bytes of every file, or the commit of a data set of the hub), of
the settings that change the tokens, and of the tokenizer. On disk, a split takes 2 or 4 bytes per token, 16 bytes per
document and, if some tokens are not in the loss, another bit per token. Only those pages of the memory-mapped files
that were read are in host memory. While the cache is written, only a few MB of text are in memory at a time (for data
sets that `datasets` reads, also a parquet row group).
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import ByteLevelBPETokenizer, Tokenizer, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lowmem.data.checked_folder import FolderContents, open_or_fill
from lowmem.data.sources.framing import dress, framing_of
from lowmem.data.sources.source import OLDER, Encoded, Source, SplitName
from lowmem.system.errors import Refused
from lowmem.system.units import quantity

log = logging.getLogger(__name__)

FORMAT = 5  # increase it when the format of stored data changes
END_OF_TEXT = "<|endoftext|>"
# maximum number of tokens whose bytes `val_bytes` counts at once; as Python strings they take about 100 MB
COUNTED_AT_ONCE = 1 << 20
# Maximum bytes of a word when a BPE is trained. Every merge scans all words that contain the merged pair, so a word of
# 2 MB takes minutes. Split into pieces of 256 bytes, the same word takes 6 s. The longest word in Python's standard
# library has 80 bytes.
LONGEST_WORD = 256
# A BPE is trained on at most about this many characters of text (see `_spread`). More text would hardly change the
# merges, but would take more memory for the table of words.
LEARNED_FROM = 1 << 27
LOOKED_AT = 10_000  # maximum number of distinct validation documents that are searched for in the training text


@dataclass(frozen=True)
class Split:
    """The tokens of a split: its concatenated documents, including the tokens that begin and end each document. The
    arrays are memory-mapped, or in memory for a stream.

    Args:
        ids: (tokens,) uint16 or uint32.
        ends: (documents,) int64: number of tokens from the start of the split to the end of each document.
        text_bytes: (documents,) int64: bytes of text from the start of the split to the end of each document.
        learned_bits: (ceil(tokens / 8),) uint8, a bit per token: 1 if the token is in the loss; None: every token is in
            the loss.
    """

    ids: np.ndarray
    ends: np.ndarray
    text_bytes: np.ndarray
    learned_bits: np.ndarray | None

    def learned(self, start: int, stop: int) -> np.ndarray:
        """Returns a (stop - start,) bool array for the tokens in [start, stop): True if the token is learned, that is,
        in the loss."""
        if self.learned_bits is None:
            return np.ones(stop - start, bool)
        byte = start // 8
        bits = np.unpackbits(self.learned_bits[byte : (stop + 7) // 8])
        return bits[start - 8 * byte : stop - 8 * byte].astype(bool)


NOTHING = Split(*(np.empty(0, dtype) for dtype in ("uint16", "int64", "int64")), None)


@dataclass(frozen=True)
class Tokens:
    """The tokens of both splits, and the tokenizer that encoded them.

    Args:
        template: digest of the chat template that rendered conversations; None for other data.
    """

    train: Split
    val: Split
    tokenizer: PreTrainedTokenizerBase
    template: str | None = None

    def val_bytes(self, count: int) -> int:
        """Returns the number of bytes of text in the first `count` tokens of `val`. For complete documents this number
        is stored; only the tokens of an incomplete last document are read."""
        complete = int(np.searchsorted(self.val.ends, count, side="right"))  # documents
        start, text = (int(ends[complete - 1]) if complete else 0 for ends in (self.val.ends, self.val.text_bytes))
        pieces = (self.val.ids[i : min(i + COUNTED_AT_ONCE, count)] for i in range(start, count, COUNTED_AT_ONCE))
        return text + sum(bytes_of(self.tokenizer, piece) for piece in pieces)


def tokenize(
    source: Source,
    cache_dir: Path,
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    special_tokens: Sequence[str] = (),
) -> Tokens:
    """Returns a source's tokens from the cache. If they are not in the cache, the source is tokenized first.

    Args:
        vocab_size: vocabulary size of the byte-level BPE that is trained on the training text if `tokenizer` is None.
        tokenizer: encodes the documents. First, `dress` changes its chat template and begin-of-text token as the source
            requires. None: train a BPE.
        special_tokens: special tokens of the trained BPE, besides the end-of-text token and the special tokens of the
            source's chat format.

    Raises:
        Refused: the data, the tokenizer or the cache cannot be used. For example, a file cannot be read, or it changed
            while it was being read; a record cannot be used and data.skip_bad is false; a split has no text; more than
            half of the compared validation documents are also training documents; or the cache cannot be written.
    """
    if tokenizer:
        dress(tokenizer, source)
    elif chat := source.chat:
        special_tokens = list(dict.fromkeys([*special_tokens, *chat.tokens]))
    bpe = [vocab_size, *special_tokens] if special_tokens else vocab_size
    made = _open_or_fill(
        lambda: cache_dir / _key(source, bpe, tokenizer),
        lambda draft: _write(draft, source, vocab_size, tokenizer, special_tokens),
    )
    train, val = (_split(made, split) for split in ("train", "val"))
    tokenizer = tokenizer or _bpe(made, source)
    return Tokens(train, val, tokenizer, template_digest(source, tokenizer))


def template_digest(source: Source, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Returns a digest of the chat template that renders a source's conversations, or None if the source has no
    conversations."""
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16] if source.chat else None


def held_out(source: Source, cache_dir: Path, tokenizer: PreTrainedTokenizerBase) -> Split:
    """Returns the validation split of a source without tokenizing its training split. If `data.val_path` names several
    sets, all sets except the first are read with this function. Args: tokenizer: the tokenizer that encoded the first
    set."""
    made = _open_or_fill(
        lambda: cache_dir / f"{_key(source, 0, tokenizer)}-val",
        lambda draft: _write(draft, source, 0, tokenizer, (), ("val",)),
    )
    return _split(made, "val")


def _open_or_fill(place: Callable[[], Path], write: Callable[[Path], dict]) -> FolderContents:
    """Opens the cache folder of a source. A folder that is missing or damaged is filled first.

    Args:
        place: returns the folder, whose name contains the cache key. The name changes if the content of the source
            changes. Called before and after `write`, to detect changes in between.
        write: writes the files into an empty folder, and returns the metadata.

    Raises:
        Refused: the content of the source changed in between, the folder cannot be read or written, or `write` raises
            Refused.
    """
    folder = place()

    def fill(draft: Path) -> dict:
        meta = write(draft)
        if place() != folder:
            raise Refused(
                "data: a file changed while it was being read. Run the command again once nothing writes to the file."
            )
        return meta

    try:
        made = open_or_fill(folder, fill)
    except OSError as error:
        raise Refused(
            f"cache_dir={folder.parent}: cannot write or read the tokens there "
            f"({error.strerror or 'the disk is full'}). Free some space, or type cache_dir=<a folder of yours with "
            "enough space>."
        ) from error
    for note in made.meta.get("notes", ()):
        log.info(note)
    return made


def _split(made: FolderContents, split: SplitName) -> Split:
    ids, ends, text = (made.files[f"{split}{name}.bin"] for name in ("", "_ends", "_text_bytes"))
    bits = made.files.get(f"{split}_learnt.bin")
    return Split(ids.view(made.meta["dtype"]), ends.view("int64"), text.view("int64"), bits)


def _bpe(made: FolderContents, source: Source) -> PreTrainedTokenizerFast:
    return _as_bpe({"tokenizer_object": Tokenizer.from_buffer(made.files["tokenizer.json"].tobytes())}, source)


def _key(source: Source, bpe: int | list, tokenizer: PreTrainedTokenizerBase | None) -> str:
    older = source.bos == OLDER
    tokens_of = bpe if tokenizer is None else _identity(tokenizer, older)
    key = [FORMAT, tokens_of, source.key(), *[OLDER] * older]
    return f"{source.name}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"


def _identity(tokenizer: PreTrainedTokenizerBase, older: bool) -> list:
    """Returns the values that identify a tokenizer in a cache key. For a fast tokenizer they include the complete
    tokenizer.json, because two tokenizers with the same vocabulary may split words differently. Args: older: True: the
    source has data.bos=older. Then the tokens that the tokenizer's own call adds do not frame the documents, so the
    result does not include them."""
    around = [] if older else framing_of(tokenizer)[:2]
    how = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    return [how, tokenizer.eos_token_id, getattr(tokenizer, "chat_template", None), *around]


def _write(
    draft: Path,
    source: Source,
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase | None,
    special_tokens: Sequence[str],
    splits: Sequence[SplitName] = ("val", "train"),
) -> dict:
    """Fills a folder with a source's tokens, and returns the metadata: the dtype of the ids, and the source's notes for
    the log. If `tokenizer` is None, first trains a BPE and writes it to the folder."""
    log.info("Tokenizing data=%s", source.name)
    if tokenizer is None:
        texts = _spread(source.texts(), source.size("train"))
        train_bpe(texts, vocab_size, draft / "tokenizer.json", special_tokens)
        tokenizer = load_bpe(draft / "tokenizer.json", source)
    dtype = "uint16" if rows_of(tokenizer) <= 2**16 else "uint32"
    twice = Twice()
    seen = {"val": twice.held_out, "train": twice.trained_on}
    for split in splits:  # validation first, because `Twice` searches the training documents for validation documents
        _write_split(draft, split, source, tokenizer, dtype, seen[split])
    twice.check()
    return {"dtype": dtype, "notes": source.notes()}


def rows_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the number of embedding rows that a tokenizer's ids need: the largest id + 1, since ids may have gaps."""
    return max(tokenizer.get_vocab().values(), default=0) + 1


def _spread(texts: Iterable[str], size: int | None) -> Iterator[str]:
    """Yields the texts on which a BPE is trained: every n-th text, until they have LEARNED_FROM characters. Args: size:
    bytes of all texts, from which n is computed; None: unknown, n = 1."""
    every, taken = max(1, -(-(size or 0) // LEARNED_FROM)), 0
    for number, text in enumerate(texts):
        if number % every == 0 and taken < LEARNED_FROM:
            taken += len(text)
            yield text


def train_tokenizer(
    source: Source, cache_dir: Path, vocab_size: int, special_tokens: Sequence[str]
) -> PreTrainedTokenizerFast:
    """Returns a BPE tokenizer that is trained on a source, from the cache if it was trained before. `Mix` and `Random`
    use this function. (For a `StoredSource`, `tokenize` stores the trained tokenizer together with the tokens.)"""
    chat = source.chat
    special_tokens = list(dict.fromkeys([*special_tokens, *(chat.tokens if chat else ())]))

    def train(draft: Path) -> dict:
        texts = _spread(source.texts(), source.size("train"))
        train_bpe(texts, vocab_size, draft / "tokenizer.json", special_tokens)
        return {}

    return _bpe(_open_or_fill(lambda: cache_dir / _key(source, [vocab_size, *special_tokens], None), train), source)


def train_bpe(texts: Iterable[str], vocab_size: int, target: Path, special_tokens: Sequence[str] = ()) -> None:
    """Trains a byte-level BPE and writes it to `target`. Long words are split during this training, but not when the
    tokenizer encodes text."""
    bpe = ByteLevelBPETokenizer()
    words, special = bpe.pre_tokenizer, [END_OF_TEXT, *special_tokens]
    bpe.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(length=LONGEST_WORD)])
    bpe.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=special, show_progress=False)
    bpe.pre_tokenizer = words
    target.write_text(bpe.to_str(pretty=True), encoding="utf-8")


def load_bpe(file: Path, source: Source | None = None) -> PreTrainedTokenizerFast:
    return _as_bpe({"tokenizer_file": str(file)}, source)


def _as_bpe(stored_in: dict, source: Source | None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(**stored_in, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False)
    if source:
        dress(tokenizer, source)
    return tokenizer


def _write_split(
    draft: Path,
    split: SplitName,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    dtype: str,
    document: Callable[[bytes], None],
) -> None:
    """Writes the files of a split: the ids of all documents, the ends of documents in tokens and in bytes of text, and
    the learned bits (unless all tokens are learned).

    Args:
        document: called for each document, with the digest of its ids.

    Raises:
        Refused: the split has no text, or `Source.encoded` raises Refused.
    """
    digest, text = _digest(), 0
    with ExitStack() as stack:
        into = {
            name: stack.enter_context((draft / f"{split}{name}.bin").open("wb"))
            for name in ("", "_ends", "_text_bytes")
        }
        learned = stack.enter_context(_Bits(draft / f"{split}_learnt.bin"))
        for encoded in _with_progress(source.encoded(split, tokenizer), f"Tokenizing, {split}", source.size(split)):
            raw = np.asarray(encoded.ids, dtype).tobytes()
            into[""].write(raw)
            learned.add(encoded.learned, len(encoded.ids))
            digest.update(raw)
            text += encoded.text_bytes
            if encoded.ends:
                into["_ends"].write(np.int64(learned.count).tobytes())
                into["_text_bytes"].write(np.int64(text).tobytes())
                document(digest.digest())
                digest = _digest()
    if not text:
        raise Refused(" ".join([f"data: the {split} files contain no text. Give files that do.", *source.notes()]))


def _digest():
    return hashlib.blake2b(digest_size=8)


NO_TOKENS = _digest().digest()  # digest of the empty document in place of a missing answer (`preference.py`)


def _with_progress(documents: Iterable[Encoded], title: str, size: int | None) -> Iterator[Encoded]:
    """Yields the documents unchanged. In a terminal, a progress bar appears after 2 s. Args: size: bytes of text; None:
    unknown."""
    with tqdm(total=size, desc=title, unit="B", unit_scale=True, disable=None, leave=False, delay=2) as bar:
        for document in documents:
            yield document
            bar.update(document.text_bytes)


class _Bits:
    """Writes a file with a bit for each token: 1 if the token is learned. If all tokens are learned, the file is
    deleted at the end."""

    def __init__(self, file: Path) -> None:
        self.file, self.count, self.every = file, 0, True
        self.waiting = np.empty(0, bool)  # bits that do not fill a byte yet

    def __enter__(self) -> "_Bits":
        self.out = self.file.open("wb")
        return self

    def add(self, learned: np.ndarray | None, tokens: int) -> None:
        if learned is None:
            learned = np.ones(tokens, bool)
        self.count, self.every = self.count + tokens, self.every and bool(learned.all())
        bits = np.concatenate([self.waiting, learned])
        full_bytes = len(bits) // 8 * 8
        self.out.write(np.packbits(bits[:full_bytes]).tobytes())
        self.waiting = bits[full_bytes:]

    def __exit__(self, *_: object) -> None:
        with self.out:
            self.out.write(np.packbits(self.waiting).tobytes())
        if self.every:
            self.file.unlink()


class Twice:
    """Finds validation documents that are also training documents: such documents cannot measure generalization. The
    first LOOKED_AT distinct validation documents are compared with all training documents, by the digests of their ids.
    `check` raises Refused if more than half of the compared validation documents are also training documents."""

    def __init__(self) -> None:
        self.looked_for: set[bytes] = set()
        self.repeated: set[bytes] = set()

    def held_out(self, document: bytes) -> None:
        if document != NO_TOKENS and len(self.looked_for) < LOOKED_AT:
            self.looked_for.add(document)

    def trained_on(self, document: bytes) -> None:
        if document in self.looked_for:
            self.repeated.add(document)

    def check(self) -> None:
        if 2 * len(self.repeated) > len(self.looked_for):
            raise Refused(
                f"data: the training data contains {len(self.repeated):,} of "
                f"{quantity(len(self.looked_for), 'distinct validation document')}, so validation would leak training "
                "data. Remove the duplicates, or type data.val_path=<other text>."
            )


def bytes_of(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> int:
    """Returns the number of bytes of the text of these tokens. With a byte-level tokenizer, the text may begin and end
    inside a character, and every byte counts. With other tokenizers, an incomplete character at the end does not
    count."""
    if not byte_level(tokenizer):
        text = tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
        return len(text.rstrip("\N{REPLACEMENT CHARACTER}").encode())
    times = np.bincount(ids)
    different = np.flatnonzero(times)
    added = tokenizer.get_added_vocab()  # plain text; in all other tokens each character represents one byte
    tokens = tokenizer.convert_ids_to_tokens(different.tolist())
    return int(times[different] @ [len(token.encode() if token in added else token) for token in tokens])


def byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether each token decodes to the same bytes in every context."""
    return tokenizer.is_fast and "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
