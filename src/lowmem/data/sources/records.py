"""Turns records into documents. A `Reader` yields each record's fields and location, and an `Encoder` tokenizes the
fields. The sources of JSON lines, tables, data sets of the hub and preference data are `Records` with different readers
and encoders. (With data.streaming=true, the source is a `Stream`, which uses `Records`.)

Error messages name the file (or the data set and split) and the line or row of a record. With data.skip_bad=true,
records that cannot be used are left out and counted.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lowmem.config.values import checked_fields, shown
from lowmem.data.opening import StoredSource
from lowmem.data.packing import TooLong
from lowmem.data.sources.bad_record import BadRecord, checked, control, no_field
from lowmem.data.sources.framing import answer_documents, framing_of, text_documents
from lowmem.data.sources.pieces import batches, controls
from lowmem.data.sources.reading import ahead, digests
from lowmem.data.sources.source import REFUSE, ChatFormat, Encoded, Encoder, SplitName
from lowmem.data.sources.text_files import Files, find_files
from lowmem.system.errors import Refused
from lowmem.system.units import quantity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lowmem.data.loader import Rows
    from lowmem.data.token_store import Split

FIELDS = ("field", "prompt", "completion", "messages")  # the keys of conf/data that select the fields of a record
NAMED = 3  # maximum number of left-out records of a split that the log names
# bytes; a smaller record counts as this size in a batch, so the number of records in a batch is limited
SMALLEST = 512


class Record(NamedTuple):
    where: str  # such as "notes.jsonl, line 3"
    fields: dict | BadRecord  # BadRecord: the line or row is not a record
    # bytes of the line, or of the fields of a row. Equal lines or rows have equal identities, also in different files.
    # The length is used as the size of the record.
    identity: bytes = b""
    group: bytes = b""  # records of one group go to the same split; empty: `identity` takes its place


class Reader:
    """The base class of readers of records.

    Args:
        val_from_train: True: both splits come from the same records, of which a share of about `val_fraction` is held
            out for validation.
    """

    val_key: str  # override, in error messages, that gives separate validation records, such as "val_path=<a file>"
    held_out_are = "records"  # name, in error messages, of the items that are held out
    least = 1  # minimum number of different items that are held out, see `held_out`
    mend = "Fix it"  # advice, in error messages, about a record that cannot be used

    def __init__(self, val_from_train: bool, val_fraction: float) -> None:
        self.val_from_train, self.val_fraction = val_from_train, val_fraction

    def key(self) -> list:
        """Returns this reader's part of the cache key: values that JSON can represent, and that depend on the contents
        of the data and on the settings that change the records."""
        raise NotImplementedError

    def size(self, split: SplitName) -> int | None:
        """Returns the approximate number of bytes of a split; None: unknown."""
        raise NotImplementedError

    def all_records(self, split: SplitName) -> Iterator[Record]:
        """Yields, in order, the records from which `records` selects the records of a split. Each call starts again.

        Raises:
            Refused: a file or the data set cannot be read.
        """
        raise NotImplementedError

    def records(self, split: SplitName) -> Iterator[Record]:
        """Yields the records of a split."""
        for record in self.all_records(split):
            if not self.val_from_train or (place(record.group or record.identity) < self._held_out) == (split == "val"):
                yield record

    @cached_property
    def _held_out(self) -> float:
        groups = (record.group or record.identity for record in self.all_records("train"))
        return held_out(groups, self.val_fraction, self.least)


class FileReader(Reader):
    """The reader of records in files. Without data.val_path, some files are held out for validation or, if there is
    only one file, some of its records.

    Args:
        settings: settings that change the records, for the cache key.
        read: yields the records of a file.
    """

    val_key = "val_path=<a file or folder>"

    def __init__(
        self, files: Files, val_fraction: float, settings: list, read: Callable[[Path], Iterator[Record]]
    ) -> None:
        super().__init__(files.val_from_train, val_fraction)
        self.files, self.settings, self.read = files, settings, read

    def key(self) -> list:
        contents = [digests(files) for files in (self.files.train, self.files.val)]
        return [contents, *self.settings, self.val_fraction if self.val_from_train else None]

    def size(self, split: SplitName) -> int:
        share = {"train": 1 - self.val_fraction, "val": self.val_fraction}[split] if self.val_from_train else 1
        return round(share * sum(file.stat().st_size for file in getattr(self.files, split)))

    def all_records(self, split: SplitName) -> Iterator[Record]:
        for file in getattr(self.files, split):
            name = shown(file.relative_to(self.files.root) if file.is_relative_to(self.files.root) else file)
            for record in self.read(file):
                yield record._replace(where=f"{name}, {record.where}")


def identity(fields: dict) -> bytes:
    """Returns bytes that are equal for equal fields: the identity of a row (`Record.identity`)."""
    return str(fields).encode(errors="surrogatepass")


@dataclass(eq=False)
class Records(StoredSource):
    """A source that consists of a reader and an encoder.

    Args:
        name: name of the yaml in conf/data, such as jsonl; prefix of the cache folder's name.
        packing, too_long, bos: see `Source`.
        skip_bad: leave out records that cannot be used, and count them; otherwise the first such record is refused.
    """

    reader: Reader
    encoder: Encoder
    name: str
    packing: str = "documents"
    too_long: str = "cut"
    skip_bad: bool = False
    bos: bool | str = "auto"

    def __post_init__(self) -> None:
        self._bad: dict[str, list[str]] = {}  # split -> messages about the first records that were left out
        self._counts: dict[str, list[int]] = {}  # split -> [left out, all]
        self._told: dict[str, Counter[str]] = {}  # split -> remark of the encoder -> count
        self._repeats: dict[str, Counter[str]] = {}  # split -> advice -> number of records that repeat their prompt

    @property
    def chat(self) -> ChatFormat | None:
        return self.encoder.chat

    def key(self) -> list:
        return [self.reader.key(), self.encoder.key(), self.skip_bad]

    def size(self, split: SplitName) -> int | None:
        return self.reader.size(split)

    def texts(self) -> Iterator[str]:
        """Yields the training texts. Records without a usable text are left out, even if `skip_bad` is False."""
        for record in self.reader.records("train"):
            try:
                if not isinstance(record.fields, BadRecord) and (text := self.encoder.text(record.fields)):
                    yield text
            except BadRecord:
                pass

    def encoded(self, split: SplitName, tokenizer: PreTrainedTokenizerBase) -> Iterator[Encoded]:
        self.forget(split)
        yield from self.documents(self.reader.records(split), split, tokenizer)
        if self.reader.val_from_train and not self._counts[split][1]:
            raise Refused(
                f"data: the {'validation' if split == 'val' else 'training'} split is empty, because data.path has too "
                f"few distinct {self.reader.held_out_are}. Type data.{self.reader.val_key}, or give more data."
            )

    def rows(self, split: Split, seq_len: int, name: SplitName) -> Rows:
        """Makes the rows of a split.

        Raises:
            Refused: see `packing.rows`. If a document is too long, the message names the record of the document, unless
                documents cannot be matched with records, for example because some records were left out.
        """
        try:
            return self.make_rows(split, seq_len, name)
        except TooLong as error:
            documents, found = 0, ""
            for record in self.reader.records(name):
                count = 0 if isinstance(record.fields, BadRecord) else self.encoder.count(record.fields)
                found = record.where if documents <= error.document < documents + count else found
                documents += count
            if documents != len(split.ends):
                raise
            raise Refused(f"{error} The first one is {shown(found)}.") from None

    def make_rows(self, split: Split, seq_len: int, name: SplitName) -> Rows:
        return super().rows(split, seq_len, name)

    def forget(self, split: SplitName) -> None:
        """Resets the notes about the records of a split."""
        self._bad[split], self._counts[split] = [], [0, 0]
        self._told[split], self._repeats[split] = Counter(), Counter()

    def documents(
        self, records: Iterator[Record], split: SplitName, tokenizer: PreTrainedTokenizerBase
    ) -> Iterator[Encoded]:
        """Yields the documents of `records`, and counts the records that are left out. A second thread reads the next
        batch of records while the calling thread encodes a batch.

        Raises:
            Refused: without `skip_bad`, a record cannot be used; or the encoder refuses the tokenizer or its chat
                template.
        """
        for batch in ahead(batches(records, lambda record: max(len(record.identity), SMALLEST))):
            self._counts[split][1] += len(batch)
            usable = [record.fields for record in batch if not isinstance(record.fields, BadRecord)]
            encoded = iter(self.encoder.encode(tokenizer, usable))
            self._told[split] += self.encoder.remarks()
            for record in batch:
                document = record.fields if isinstance(record.fields, BadRecord) else next(encoded)
                if isinstance(document, BadRecord):
                    self._leave_out(split, record.where, document)
                else:
                    if mend := self.encoder.repeats_prompt(record.fields):
                        self._repeats[split][mend] += 1
                    yield from document if isinstance(document, list) else [document]

    def notes(self) -> list[str]:
        return self._told_by_encoder() + self._left_out() + self._repeated()

    def _told_by_encoder(self) -> list[str]:
        return [f"{split}: {what}: {n:,}." for split, counts in self._told.items() for what, n in counts.items()]

    def _repeated(self) -> list[str]:
        """Returns notes about splits in which more than half of the records repeat their prompt. (Fewer records are not
        worth a note: an answer may quote its prompt.)"""
        notes = []
        for split, repeats in self._repeats.items():
            bad, count = self._counts[split]
            if 2 * repeats.total() > count - bad:
                ((mend, _),) = repeats.most_common(1)
                notes.append(
                    f"data: the answer repeats the prompt in {repeats.total():,} of "
                    f"{quantity(count - bad, f'{split} record')}, so the model reads the prompt twice and learns to "
                    f"generate it. {mend}"
                )
        return notes

    def _left_out(self) -> list[str]:
        return [
            f"data.skip_bad=true: skipped {bad:,} of {quantity(count, f'{split} record')} "
            f"({'; '.join(self._bad[split])}{'; and others' * (bad > NAMED)})."
            for split, (bad, count) in self._counts.items()
            if bad
        ]

    def _leave_out(self, split: SplitName, where: str, bad: BadRecord) -> None:
        if not self.skip_bad:
            raise Refused(
                f"data: {shown(where)}: {shown(bad)}. {self.reader.mend}, or type data.skip_bad=true to skip and count "
                "such records."
            )
        self._counts[split][0] += 1
        if len(self._bad[split]) < NAMED:
            self._bad[split].append(f"{shown(where)}: {shown(bad)}")


def records(  # noqa: PLR0913
    reader: Reader,
    name: str,
    field: str | None = None,
    prompt: str | None = None,
    completion: str | None = None,
    messages: str | None = None,
    packing: str = "documents",
    too_long: str = "cut",
    skip_bad: bool = False,
    bos: bool | str = "auto",
    **chat: str | None,
) -> Records:
    """Returns the source with this reader, and with the encoder that the keys select (see `encoder`). Args: chat:
    further arguments of `Chat`."""
    fields = encoder(field, prompt, completion, messages, bos, **chat)
    return Records(reader, fields, name, packing, too_long, skip_bad, bos)


def records_of_files(  # noqa: PLR0913
    read: Callable[[Path], Iterator[Record]],
    settings: list,
    name: str,
    path: str,
    pattern: str,
    val_fraction: float,
    val_path: str | None = None,
    **how: str | bool | None,
) -> Records:
    """Returns the source of the records in a file or folder. From a folder, only the files that match `pattern` are
    read. `FileReader` describes which records are held out for validation.

    Args:
        read, settings: see `FileReader`.
        name: see `Records`.
        how: further arguments of `records`.
    """
    files = find_files(path, pattern, val_fraction, val_path)
    return records(FileReader(files, val_fraction, settings, read), name, **how)


class _Fields(Encoder):
    """The base class of encoders of text fields. Args: names: names of the text fields; bos: see `Source`."""

    def __init__(self, *names: str, bos: bool | str = "auto") -> None:
        self.names, self.bos = names, bos

    def key(self) -> list:
        return [type(self).__name__.lower(), *self.names, REFUSE]

    def texts(self, fields: dict) -> list[str]:
        """Returns the texts of the fields.

        Raises:
            BadRecord: a field is missing, or its value is not valid text.
        """
        raise NotImplementedError

    def documents(self, tokenizer: PreTrainedTokenizerBase, texts: list[list[str]]) -> Iterator[Encoded | BadRecord]:
        raise NotImplementedError

    def text(self, fields: dict) -> str:
        return "".join(self.texts(fields))

    def encode(self, tokenizer: PreTrainedTokenizerBase, batch: list[dict]) -> list[Encoded | BadRecord]:
        """Returns for each record its document, or a BadRecord if the record cannot be used."""
        tokens = controls(tokenizer)
        texts = [self._read(fields, tokens) for fields in batch]
        documents = self.documents(tokenizer, [good for good in texts if not isinstance(good, BadRecord)])
        return [bad if isinstance(bad, BadRecord) else next(documents) for bad in texts]

    def _read(self, fields: dict, tokens: Collection[str]) -> list[str] | BadRecord:
        """Returns the texts of a record, or a BadRecord if a text is missing, is not valid or contains a control
        token. Args: tokens: the control tokens."""
        try:
            texts = self.texts(fields)
        except BadRecord as bad:
            return bad
        for name, text in zip(self.names, texts, strict=True):
            if token := next((token for token in tokens if token in text), None):
                return control(f'field "{name}"', token)
        return texts


class Text(_Fields):
    """The encoder of a single text field. All of its text is learned."""

    def texts(self, fields: dict) -> list[str]:
        return [text_of(fields, *self.names)]

    def documents(self, tokenizer: PreTrainedTokenizerBase, texts: list[list[str]]) -> Iterator[Encoded]:
        return text_documents(tokenizer, [text for (text,) in texts], framing_of(tokenizer, self.bos))


class Completion(_Fields):
    """The encoder of a prompt and a completion. The completion and the tokens that end the document are learned."""

    def texts(self, fields: dict) -> list[str]:
        prompt, completion = self.names
        return [text_of(fields, prompt, empty=True), text_of(fields, completion)]

    def repeats_prompt(self, fields: dict) -> str | None:
        prompt, completion = self.names
        if not begins_with(fields[completion], fields[prompt]):
            return None
        if not fields[completion].startswith(fields[prompt]):  # other whitespace
            return f'Remove it from the field "{completion}".'
        return f'Remove it: jq -c \'."{prompt}" as $p | ."{completion}" |= ltrimstr($p)\' FILE > NEW.'

    def documents(self, tokenizer: PreTrainedTokenizerBase, texts: list[list[str]]) -> Iterator[Encoded | BadRecord]:
        return answer_documents(tokenizer, texts, framing_of(tokenizer, self.bos))


def encoder(
    field: str | None,
    prompt: str | None,
    completion: str | None,
    messages: str | None,
    bos: bool | str = "auto",
    **chat: str | None,
) -> Encoder:
    """Returns the encoder that the keys of a yaml select; without keys, the encoder of the field "text".

    Args:
        bos: see `Source`.
        chat: further arguments of `Chat`.

    Raises:
        Refused: keys of several encoders are typed; `prompt` is typed without `completion`, or vice versa; data.bos is
            true or false for conversations; or the file data.template cannot be read.
    """
    checked_fields(field, prompt, completion, messages)
    if messages:
        check_no_bos(bos)
        from lowmem.data.sources.chat import Chat  # chat templates are slow to import

        return Chat(messages, **chat)
    return Completion(prompt, completion, bos=bos) if prompt and completion else Text(field or "text", bos=bos)


def check_no_bos(bos: bool | str) -> None:
    """Raises Refused if data.bos is true or false, which conversations do not support."""
    if isinstance(bos, bool):
        raise Refused(
            f"data.bos={str(bos).lower()}: the chat template renders all tokens of a conversation, the first one, too. "
            "Leave out data.bos, or type data.template=<a file> with a template that renders the tokens you want."
        )


def text_of(fields: dict, name: str, empty: bool = False) -> str:
    """Returns the text of a field.

    Raises:
        BadRecord: the field is missing, or its value is not valid text (see `checked`).
    """
    if name not in fields:
        raise no_field(fields, name)
    return checked(fields[name], f'field "{name}"', empty)


def begins_with(text: str, prompt: str) -> bool:
    """Returns whether a text begins with a prompt. Each run of whitespace counts as one space, and whitespace around
    the text and the prompt is ignored. Returns False if the prompt is blank."""
    words = " ".join(prompt.split())
    return bool(words) and " ".join(text.split()).startswith(words)


def held_out(records: Iterable[bytes], val_fraction: float, least: int = 1) -> float:
    """Returns the threshold for `place`: records with a smaller hash are held out for validation. The threshold is
    `val_fraction`, unless fewer than `least` different records would be held out. Then the threshold is raised so that
    `least` different records are held out, or half of all different records if that is less, but at least one. Args:
    records: the identities (or groups) of all records."""
    lowest: list[float] = []  # the smallest hashes (`place`) of different records, ascending
    for record in records:
        number = place(record)
        if number not in lowest:
            lowest = sorted([*lowest, number])[: 2 * least]
        if lowest[least - 1 :] and lowest[least - 1] < val_fraction:
            return val_fraction
    last = lowest[max(1, min(least, len(lowest) // 2)) - 1] if lowest else 1.0
    return max(val_fraction, float(np.nextafter(last, 1.0)))


def place(record: bytes) -> float:
    """Returns a stable hash of a record, from 0 to 1. A record is held out if its hash is below the threshold from
    `held_out`. So adding data does not move a record to the other split, unless the threshold changes. Args: record:
    the record's identity or group."""
    return int.from_bytes(hashlib.sha256(record).digest()[:8], "big") / 2**64
