"""Reads pairs of answers, of which people prefer one: a record has `prompt`, `chosen` and `rejected`.

All three are texts, or all are lists of messages. Messages may hold the prompt themselves, in both answers, as those of
many data sets of the hub do. A pair becomes two documents of the token store, the prompt with each answer
(`data/pairs.py`), in which the last answer is learnt: texts are encoded as `data=jsonl` encodes prompt and completion,
messages as `data=chat` does. Whether records hold texts or messages is asked of the first one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from posixpath import commonprefix
from typing import TYPE_CHECKING, Literal

import numpy as np

from lowmem.config.values import no_such
from lowmem.data import pairs
from lowmem.data.sources.bad_record import BadRecord, kind, no_field
from lowmem.data.sources.jsonl import lines
from lowmem.data.sources.reading import UTF_8
from lowmem.data.sources.records import Completion, FileReader, Reader, Record, Records, identity
from lowmem.data.sources.source import Encoded, Encoder, SplitName
from lowmem.data.sources.tables import TOOLS, parquet_rows
from lowmem.data.sources.text_files import find_files
from lowmem.data.token_store import Split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lowmem.data.sources.chat import Chat

HUB_ID = re.compile(r"\w[\w.-]*/[\w-][\w.-]*")
FILE = re.compile(r"\.(jsonl|ndjson|json|parquet|csv|txt)$")
BEFORE_WHITE_SPACE = re.compile(r"(?s).*(?=\s)")  # so that no word is divided


class Preference(Records):
    """The source of pairs.

    Args:
        path: a file, a folder or the id of a data set of the hub.
        prompt: the field; None for texts: what both answers begin with.
        assistant: which answers of conversations are learnt: the last, or all.
        template: of conversations, see `Chat`.
        subset, split, val_split, revision: of a data set of the hub.
        packing, too_long: padded or documents, see `data/pairs.py`.
    """

    def __init__(
        self,
        path: str,
        pattern: str = "**/*.jsonl",
        prompt: str | None = "prompt",
        chosen: str = "chosen",
        rejected: str = "rejected",
        assistant: Literal["last", "all"] = "last",
        template: str | None = None,
        val_fraction: float = 0.05,
        val_path: str | Sequence[str] | None = None,
        subset: str | None = None,
        split: str = "train",
        val_split: str | None = None,
        revision: str | None = None,
        packing: str = "padded",
        too_long: str = "drop",
        skip_bad: bool = False,
    ) -> None:
        if is_hub_id(path):
            from lowmem.data.sources.hub import Table  # `datasets` is slow to import

            reader = Table(path, subset, {"train": split, "val": val_split}, val_fraction, revision)
        else:
            fields = [chosen, rejected], [*filter(None, [prompt]), TOOLS]
            files = find_files(path, pattern, val_fraction, val_path)
            reader = FileReader(files, val_fraction, [UTF_8], lambda file: _records(file, *fields))
        encoder = Answers(prompt, (chosen, rejected), assistant, template, lambda: _first_record(reader, chosen))
        super().__init__(ByPrompt(reader, prompt, chosen), encoder, "preference", packing, too_long, skip_bad)

    @classmethod
    def example(cls, data: Mapping, batch_size: int, seq_len: int) -> pairs.PairBatch:
        return pairs.example(data, batch_size, seq_len)

    def rows(self, split: Split, seq_len: int, name: SplitName) -> pairs.PairRows:
        return pairs.rows(split, seq_len, self.packing, self.too_long, name)


class ByPrompt(Reader):
    """The reader of another one's records that holds out prompts in place of records: answers to a prompt that were
    ranked make several pairs, and some would else be both trained on and validated with."""

    def __init__(self, reader: Reader, prompt: str | None, chosen: str) -> None:
        super().__init__(reader.alone, reader.val_fraction)
        self.reader, self.fields, self.val_key = reader, (prompt, chosen), reader.val_key

    def key(self) -> list:
        return [*self.reader.key(), "by prompt"]

    def size(self, split: SplitName) -> int | None:
        return self.reader.size(split)

    def all_records(self, split: SplitName) -> Iterator[Record]:
        prompt, chosen = self.fields
        for record in self.reader.all_records(split):
            if isinstance(record.fields, dict):
                answer = record.fields.get(chosen)
                asked = record.fields.get(prompt) or (answer[:-1] if isinstance(answer, list) else None)
                record = record._replace(identity=identity({"": asked}) if asked else record.identity)
            yield record


def is_hub_id(path: str) -> bool:
    """Returns whether a path names a data set of the hub. Raises: Refused: it names nothing."""
    if not path.strip() or os.path.exists(os.path.expanduser(path)):  # False for a name that is too long
        return False
    if HUB_ID.fullmatch(path) is None or FILE.search(path):
        raise no_such("data.path", path)
    return True


def _records(file: Path, fields: Sequence[str], optional: Sequence[str]) -> Iterator[Record]:
    return parquet_rows(file, fields, optional) if file.suffix == ".parquet" else lines(file)


def _first_record(reader: Reader, chosen: str) -> dict:
    """Returns the fields of the first record that has an answer; there may be none."""
    usable = (record.fields for record in reader.all_records("train") if isinstance(record.fields, dict))
    return next((fields for fields in usable if isinstance(fields.get(chosen), str | list | dict)), {})


class Answers(Encoder):
    """The encoder of pairs: it makes two documents of a record. Args: names: of the answers' fields, the better
    one first; first: returns the first record; the others are those of `Preference`."""

    def __init__(
        self,
        prompt: str | None,
        names: tuple[str, str],
        assistant: Literal["last", "all"],
        template: str | None,
        first: Callable[[], dict],
    ) -> None:
        self.prompt, self.names = prompt, names
        self.assistant, self.template, self.first = assistant, template, first

    @cached_property
    def chats(self) -> list[Chat]:
        """Returns the encoder of each answer's conversation; empty if records hold texts."""
        if isinstance(self.first().get(self.names[0]), str):
            return []
        from lowmem.data.sources.chat import Chat  # templates are slow to import

        return [Chat(name, self.assistant, self.template) for name in self.names]

    @property
    def chat(self) -> Chat | None:
        return self.chats[0] if self.chats else None

    def key(self) -> list:
        encoders = [encoder.key() for encoder in self.chats or self._completions]
        return ["preference", self.prompt, *encoders]

    def text(self, fields: dict) -> str:
        encoders = self.chats or self._completions
        return "\n".join(encoder.text(side) for encoder, side in zip(encoders, self._sides(fields), strict=True))

    def encode(self, tokenizer: PreTrainedTokenizerBase, batch: list[dict]) -> list[list[Encoded] | BadRecord]:
        sides = [self._sides_or_reason(fields) for fields in batch]
        usable = [both for both in sides if not isinstance(both, BadRecord)]
        encoders = self.chats or self._completions
        encoded = [
            iter(encoder.encode(tokenizer, [both[number] for both in usable]))
            for number, encoder in enumerate(encoders)
        ]
        return [both if isinstance(both, BadRecord) else self._pair(*map(next, encoded)) for both in sides]

    @property
    def _completions(self) -> list[Completion]:
        return [Completion(self.prompt or "prompt", name) for name in self.names]

    def _pair(self, *answers: Encoded | BadRecord) -> list[Encoded] | BadRecord:
        for name, answer in zip(self.names, answers, strict=True):
            if isinstance(answer, BadRecord):
                is_named = not self.chats or f'"{name}"' in str(answer)
                return answer if is_named else BadRecord(f'in field "{name}" {answer}')
        if np.array_equal(answers[0].ids, answers[1].ids):
            return BadRecord(f'"{self.names[0]}" and "{self.names[1]}" are the same, so none can be preferred')
        return list(answers)

    def _sides_or_reason(self, fields: dict) -> tuple[dict, dict] | BadRecord:
        try:
            return self._sides(fields)
        except BadRecord as bad:
            return bad

    def _sides(self, fields: dict) -> tuple[dict, dict]:
        """Returns the record of each answer, as its encoder reads it. Raises: BadRecord: a field is missing, or texts
        and messages are mixed."""
        for name in self.names:
            if name not in fields:
                raise no_field(fields, name)
        return self._conversations(fields) if self.chats else self._texts(fields)

    def _texts(self, fields: dict) -> tuple[dict, dict]:
        if self.prompt in fields:
            return fields, fields
        if self.prompt is not None:
            raise BadRecord(f'there is no field "{self.prompt}"; data.prompt=null takes what both answers begin with')
        answers = [fields[name] for name in self.names]
        if not all(isinstance(answer, str) for answer in answers):
            raise BadRecord(f'"{self.names[0]}" and "{self.names[1]}" are {kind(answers[0])} and {kind(answers[1])}')
        shared = BEFORE_WHITE_SPACE.match(commonprefix(answers))
        begin = shared.end() if shared else 0
        return tuple(
            {"prompt": text[:begin], name: text[begin:]} for name, text in zip(self.names, answers, strict=True)
        )

    def _conversations(self, fields: dict) -> tuple[dict, dict]:
        prompt = fields.get(self.prompt)
        both = [_continued(prompt, fields[name]) for name in self.names]
        self._check_ends(both)
        before = [messages[:-1] for messages in both if isinstance(messages, list)]
        if self.assistant == "last" and before[1:] and before[0] != before[1]:
            raise BadRecord(
                f'"{self.names[0]}" and "{self.names[1]}" differ before their last messages, and only these would be '
                "learnt: data.assistant=all learns all answers"
            )
        tools = {TOOLS: fields[TOOLS]} if TOOLS in fields else {}
        return tuple({name: messages} | tools for name, messages in zip(self.names, both, strict=True))

    def _check_ends(self, both: Sequence[object]) -> None:
        """Refuses conversations that lack their prompt, or end with a message of another than the assistant."""
        for name, messages in zip(self.names, both, strict=True):
            roles = [_role(message) for message in messages] if isinstance(messages, list) else []
            if self.prompt and roles and all(role in ("assistant", "tool") for role in roles):
                raise BadRecord(f'"{name}" begins with its answer, and there is no "{self.prompt}" before it')
            if roles and roles[-1] not in ("assistant", None):
                raise BadRecord(f'"{name}" does not end with an answer of the assistant')


def _continued(prompt: object, answer: object) -> object:
    """Returns the messages of a prompt and its answer. An answer that is no list is returned as it is, to be refused by
    its encoder."""
    prompt, messages = _listed(prompt), _listed(answer)
    if not isinstance(messages, list):
        return messages
    if isinstance(prompt, str) and "user" not in map(_role, messages):
        return [{"role": "user", "content": prompt}, *messages]
    if isinstance(prompt, list) and messages[: len(prompt)] != prompt:
        return [*prompt, *messages]
    return messages


def _listed(value: object) -> object:
    """Returns messages without fields that are null, of which a table's column may have more than another; a single one
    as a list of it. Other values are returned as they are."""
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list):
        return messages
    return [
        {key: field for key, field in message.items() if field is not None} if isinstance(message, dict) else message
        for message in messages
    ]


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None
