"""Reads preference data (`data=preference`): pairs of a chosen and a rejected answer, or single rated answers.

The record of a pair has the fields `prompt`, `chosen` and `rejected`. The record of a rated answer has `label`, and
either `prompt` and `completion`, or `messages`, of which the last message is the answer. The answers of a data set are
either all texts or all lists of messages; the first record with an answer decides which of the two kinds is read. Lists
of messages in `chosen` and `rejected` may begin with the messages of the prompt, as in many data sets of the hub.

A record becomes two documents of the token store (`data/pairs.py`): the prompt with the chosen (or desirable) answer,
and the prompt with the rejected (or undesirable) answer. Only answers are learned. For a single rated answer, an empty
document takes the place of the other answer. Texts are encoded like a prompt and a completion of `data=jsonl`, and
messages like a conversation of `data=chat`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from posixpath import commonprefix
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from lowmem.config.values import no_such, shown
from lowmem.data import pairs, rated
from lowmem.data.sources.bad_record import BadRecord, kind, no_field
from lowmem.data.sources.chat_parts import is_blank, read_json
from lowmem.data.sources.jsonl import lines
from lowmem.data.sources.reading import UTF_8
from lowmem.data.sources.records import (
    Completion,
    FileReader,
    Reader,
    Record,
    Records,
    begins_with,
    check_no_bos,
    identity,
)
from lowmem.data.sources.source import Encoded, Encoder, SplitName
from lowmem.data.sources.tables import TOOLS, has_column, parquet_rows
from lowmem.data.sources.text_files import find_files
from lowmem.data.token_store import Split
from lowmem.system.errors import Refused
from lowmem.system.units import quantity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lowmem.data.sources.chat import Chat

HUB_ID = re.compile(r"\w[\w.-]*/[\w-][\w.-]*")
FILES = "**/*.jsonl"  # default pattern for the files of a folder
FILE = re.compile(r"\.(jsonl|ndjson|json|parquet|csv|txt)$")
BEFORE_WHITE_SPACE = re.compile(r"(?s).*(?=\s)")  # the text up to the last whitespace, so that no word is divided


NOTHING = Encoded([], np.zeros(0, bool), 0)  # the empty document in place of a missing answer


class Fields(NamedTuple):
    """The names of a record's fields. Args: prompt: the field of the prompt; None: for texts, the common beginning of
    both answers is the prompt; for messages, all messages before the answer are the prompt."""

    prompt: str | None
    chosen: str
    rejected: str
    completion: str
    messages: str
    label: str

    def checked(self) -> Fields:
        """Returns the names unchanged. Raises Refused if a name other than `prompt` is None, or if two fields have the
        same name."""
        for key, name in self._asdict().items():
            if name is None and key != "prompt":
                raise Refused(f"data.{key}=null: type data.{key}=<a field>. Records may lack this field.")
            if other := next((k for k, n in self._asdict().items() if n == name and n and k != key), None):
                raise Refused(
                    f"data.{key}={name}: data.{other} names this field, too. Type a different field for each."
                )
        return self

    def rates(self, fields: dict) -> bool:
        """Returns whether a record contains a single rated answer instead of a pair: neither answer of a pair is set,
        and at least one field of a rated answer exists."""
        return all(fields.get(name) is None for name in (self.chosen, self.rejected)) and any(
            name in fields for name in (self.completion, self.messages, self.label)
        )

    def answered(self, fields: dict) -> str | None:
        """Returns the name of the first of the fields `chosen`, `messages` and `completion` that contains an answer
        (text, a message or messages), or None if the record has no answer."""
        names = self.chosen, self.messages, self.completion
        return next((name for name in names if isinstance(fields.get(name), str | list | dict)), None)


class Preference(Records):
    """The source of preference pairs and rated answers.

    Args:
        path: a file, a folder, or the id of a hub data set.
        prompt, chosen, rejected, completion, messages, label: see `Fields`.
        assistant: which answers of conversations are learned: last or all.
        template: chat template of conversations, see `Chat`.
        subset, split, val_split: names within a hub data set.
        revision: branch, tag or commit of a hub data set.
        packing: padded or documents, see `data/pairs.py`.
        too_long: what to do with pairs and answers that are longer than a row: cut, drop or refuse.
        bos: see `Source`.
        rated: True: make rows of rated answers (`data/rated.py`) instead of pairs.

    Raises:
        Refused: a key does not apply to `path`, or a key or path is invalid.
    """

    def __init__(  # noqa: PLR0913
        self,
        path: str,
        pattern: str = FILES,
        prompt: str | None = "prompt",
        chosen: str = "chosen",
        rejected: str = "rejected",
        completion: str = "completion",
        messages: str = "messages",
        label: str = "label",
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
        rated: bool = False,
        bos: bool | str = "auto",
    ) -> None:
        self.rated, fields = rated, Fields(prompt, chosen, rejected, completion, messages, label).checked()
        if is_hub_id(path):
            typed = {"val_path": val_path is not None, "pattern": pattern != FILES}
            _check_unused(typed, path, "a data set of the hub (there is no such file)", "Correct data.path, or leave")
            from lowmem.data.sources.hub import Table  # `datasets` is slow to import

            reader = Table(path, subset, {"train": split, "val": val_split}, val_fraction, revision)
        else:
            of_hub = {"subset": subset, "val_split": val_split, "revision": revision}
            typed = {key: value is not None for key, value in of_hub.items()} | {"split": split != "train"}
            _check_unused(typed, path, "a local file or folder", "Leave")
            files = find_files(path, pattern, val_fraction, val_path)
            reader = FileReader(files, val_fraction, [UTF_8], lambda file: _records(file, fields))
        encoder = AnswerEncoder(fields, assistant, template, lambda: _first_record(reader, fields), bos)
        # loss=kto also scores each prompt with a mismatched answer, so each split needs at least two different prompts
        by_prompt = ByPrompt(reader, fields, least=2 if rated else 1)
        super().__init__(by_prompt, encoder, "preference", packing, too_long, skip_bad, bos)

    @classmethod
    def rows_class(cls, data: Mapping) -> type[pairs.AnswerRows]:
        return (rated if data.get("rated") else pairs).rows_class(data["packing"])

    def make_rows(self, split: Split, seq_len: int, name: SplitName) -> pairs.AnswerRows:
        return (rated if self.rated else pairs).rows(split, seq_len, self.packing, self.too_long, name)


class ByPrompt(Reader):
    """Wraps a reader so that all records with the same prompt are in the same split. Several records may share a prompt
    (ranked answers make several pairs); without this class, one of these records could be in training and another in
    validation. Records of texts without a prompt are held out one by one. Args: least: minimum number of different
    prompts that are held out, see `records.held_out`."""

    held_out_are = "prompts"

    def __init__(self, reader: Reader, fields: Fields, least: int) -> None:
        super().__init__(reader.val_from_train, reader.val_fraction)
        self.reader, self.fields, self.val_key, self.least = reader, fields, reader.val_key, least

    @property
    def mend(self) -> str:
        return self.reader.mend

    def key(self) -> list:
        return [*self.reader.key(), "by prompt"] + [self.least] * (self.least > 1)

    def size(self, split: SplitName) -> int | None:
        return self.reader.size(split)

    def all_records(self, split: SplitName) -> Iterator[Record]:
        for record in self.reader.all_records(split):
            if isinstance(record.fields, dict):
                answer = _listed(record.fields.get(self.fields.answered(record.fields)))
                asked = record.fields.get(self.fields.prompt) or (answer[:-1] if isinstance(answer, list) else None)
                record = record._replace(group=identity({"": asked}) if asked else b"")
            yield record


def _check_unused(typed: Mapping[str, bool], path: str, what: str, instead: str) -> None:
    """Raises Refused if a key was typed that does not apply to this path. Args: typed: key that does not apply -> True
    if the key was typed; what: description of the path; instead: the beginning of the advice."""
    for key, is_typed in typed.items():
        if is_typed:
            raise Refused(
                f"data.{key}=: this key does not apply to data.path={shown(path)}, {what}. {instead} out data.{key}."
            )


def is_hub_id(path: str) -> bool:
    """Returns whether a path is the id of a data set of the hub.

    Raises:
        Refused: the path does not exist, and is not the id of a data set: it has another form, or ends with the
            extension of a file.
    """
    # os.path.exists returns False for a name that is too long, and does not raise an error
    if not path.strip() or os.path.exists(os.path.expanduser(path)):
        return False
    if HUB_ID.fullmatch(path) is None or FILE.search(path):
        raise no_such("data.path", path)
    return True


def _records(file: Path, fields: Fields) -> Iterator[Record]:
    if file.suffix != ".parquet":
        return lines(file)
    needed = [fields.label] if has_column(file, fields.label) else [fields.chosen, fields.rejected]
    return parquet_rows(file, needed, [name for name in (*fields, TOOLS) if name and name not in needed])


def _first_record(reader: Reader, fields: Fields) -> dict:
    """Returns the fields of the first record that has an answer, or an empty dict if no record has an answer."""
    usable = (record.fields for record in reader.all_records("train") if isinstance(record.fields, dict))
    return next((values for values in usable if fields.answered(values)), {})


class AnswerEncoder(Encoder):
    """The encoder of records with two answers or a single rated answer. It makes two documents of each record: first
    the prompt with the chosen or desirable answer, then the prompt with the rejected or undesirable answer. If a record
    has a single rated answer, the other document is empty.

    Args:
        names: names of the record's fields.
        first: returns the fields of the first record that has an answer, or an empty dict.
        assistant, template, bos: see `Preference`.
    """

    def __init__(
        self,
        names: Fields,
        assistant: Literal["last", "all"],
        template: str | None,
        first: Callable[[], dict],
        bos: bool | str = "auto",
    ) -> None:
        self.fields, self.names, self.prompt = names, (names.chosen, names.rejected), names.prompt
        self.assistant, self.template, self.first, self.bos = assistant, template, first, bos

    @cached_property
    def chats(self) -> dict[str, Chat]:
        """Returns a mapping from the name of each field with conversations to the encoder of these conversations. The
        mapping is empty if the answers are texts. The first access reads records up to the first record with an
        answer.

        Raises:
            Refused: the answers are conversations, and data.bos is true or false or the template file cannot be read.
        """
        first, names = self.first(), (*self.names, self.fields.completion)
        if isinstance(_listed(first.get(self.fields.answered(first))), str) and self.fields.answered(first) in names:
            return {}
        check_no_bos(self.bos)
        from lowmem.data.sources.chat import Chat  # chat templates are slow to import

        return {name: Chat(name, self.assistant, self.template) for name in (*names, self.fields.messages)}

    @property
    def chat(self) -> Chat | None:
        return self.chats[self.fields.chosen] if self.chats else None

    def key(self) -> list:
        return ["preference", self.prompt, self.fields.label, *(each.key() for each in self._encoders.values())]

    def text(self, fields: dict) -> str:
        return "\n".join(self._encoders[name].text(side) for name, side in self._sides(fields).items())

    def encode(self, tokenizer: PreTrainedTokenizerBase, batch: list[dict]) -> list[list[Encoded] | BadRecord]:
        found = [self._sides_or_reason(fields) for fields in batch]
        usable = [sides for sides in found if not isinstance(sides, BadRecord)]
        encoded = {
            name: iter(encoder.encode(tokenizer, [sides[name] for sides in usable if name in sides]))
            for name, encoder in self._encoders.items()
        }
        return [
            sides if isinstance(sides, BadRecord) else self._pair(fields, {name: next(encoded[name]) for name in sides})
            for fields, sides in zip(batch, found, strict=True)
        ]

    def count(self, fields: dict) -> int:
        return 2

    def remarks(self) -> Counter[str]:
        return sum((encoder.remarks() for encoder in self._encoders.values()), Counter())

    def repeats_prompt(self, fields: dict) -> str | None:
        if self.chats or self.prompt is None:  # `_continued` merges repeated messages
            return None
        names = (self.fields.completion,) if self.fields.rates(fields) else self.names
        repeating = [name for name in names if begins_with(fields[name], fields[self.prompt])]
        if len(repeating) == 2:
            return "Type data.prompt=null, which takes the common beginning of both answers as the prompt."
        return self._encoders[repeating[0]].repeats_prompt(fields) if repeating else None

    @property
    def _encoders(self) -> Mapping[str, Encoder]:
        return self.chats or {
            name: Completion(self.prompt or "prompt", name, bos=self.bos)
            for name in (*self.names, self.fields.completion)
        }

    def _pair(self, fields: dict, answers: dict[str, Encoded | list[Encoded] | BadRecord]) -> list[Encoded] | BadRecord:
        """Returns both documents of a record, or a BadRecord with the reason why the record cannot be used. Args:
        answers: field name -> result of the encoder of this field."""
        for name, answer in answers.items():
            if isinstance(answer, list):
                return BadRecord(
                    f'"{name}" would take {quantity(len(answer), "row")}, because the template renders answers '
                    "differently once later messages follow, but each side of a pair has one row; data.assistant=last "
                    "trains on the last answer only"
                )
            if isinstance(answer, BadRecord):
                is_named = not self.chats or f'"{name}"' in str(answer)
                return answer if is_named else BadRecord(f'field "{name}": {answer}')
        first, *second = answers.values()
        if not second:
            return [first, NOTHING] if fields[self.fields.label] else [NOTHING, first]
        if np.array_equal(first.ids, second[0].ids):
            return BadRecord(f'"{self.names[0]}" and "{self.names[1]}" are identical, so neither is preferred')
        return [first, *second]

    def _sides_or_reason(self, fields: dict) -> dict[str, dict] | BadRecord:
        try:
            return self._sides(fields)
        except BadRecord as bad:
            return bad

    def _sides(self, fields: dict) -> dict[str, dict]:
        """Returns a dict that maps the name of each field with an answer to the record for this field's encoder.

        Raises:
            BadRecord: a field is missing, a rating is invalid, or the texts or messages of the record do not fit
                together.
        """
        names = self.names
        if self.fields.rates(fields):
            messages = self.chats and fields.get(self.fields.messages) is not None
            names = (self.fields.messages if messages else self.fields.completion,)
            self._check_rating(fields)
        for name in names:
            if name not in fields:
                raise no_field(fields, name)
        return self._conversations(fields, names) if self.chats else self._texts(fields, names)

    def _check_rating(self, fields: dict) -> None:
        if (name := self.fields.label) not in fields:
            raise no_field(fields, name)
        # tables may contain 1.0 instead of 1
        if not isinstance(fields[name], int | float) or fields[name] not in (0, 1):
            raise BadRecord(f'field "{name}" must be true or false, but is {kind(fields[name])}')
        if self.prompt is None and not self.chats:
            raise BadRecord(
                "the record has a single rated answer, but data.prompt=null leaves it without a prompt; type "
                "data.prompt=<a field>"
            )

    def _texts(self, fields: dict, names: Sequence[str]) -> dict[str, dict]:
        if self.prompt in fields:
            return dict.fromkeys(names, fields)
        if self.prompt is not None:
            null = "; data.prompt=null takes the common beginning of both answers as the prompt" if names[1:] else ""
            raise BadRecord(f'field "{self.prompt}" is missing{null}')
        answers = [fields[name] for name in names]
        if not all(isinstance(answer, str) for answer in answers):
            raise BadRecord(
                f'"{names[0]}" and "{names[1]}" must be text, but are {kind(answers[0])} and {kind(answers[1])}'
            )
        shared = BEFORE_WHITE_SPACE.match(commonprefix(answers))
        begin = shared.end() if shared else 0
        return {name: {"prompt": text[:begin], name: text[begin:]} for name, text in zip(names, answers, strict=True)}

    def _conversations(self, fields: dict, names: Sequence[str]) -> dict[str, dict]:
        both = {name: self._continued(fields.get(self.prompt), name, fields[name]) for name in names}
        self._check_ends(both)
        before = [messages[:-1] for messages in both.values() if isinstance(messages, list)]
        if self.assistant == "last" and before[1:] and before[0] != before[1]:
            raise BadRecord(
                f'"{names[0]}" and "{names[1]}" differ before their last messages, but only the last messages would be '
                "in the loss; data.assistant=all trains on all answers"
            )
        tools = {TOOLS: fields[TOOLS]} if TOOLS in fields else {}
        return {name: {name: messages} | tools for name, messages in both.items()}

    def _continued(self, prompt: object, name: str, answer: object) -> object:
        """Returns the messages of a prompt followed by the messages of an answer. If the answer already contains the
        prompt, or begins with the last messages of the prompt, these messages are not repeated. Without a prompt,
        returns only the answer. An answer that does not consist of messages is returned unchanged; the encoder of
        the field then returns a BadRecord.

        Args:
            name: name of the field with the answer.

        Raises:
            BadRecord: the prompt ends with a user message, and the answer begins with a different user message.
        """
        prompt, messages = _listed(prompt), _listed(answer)
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not (isinstance(prompt, list) and isinstance(messages, list)):
            return messages
        asked, said = [_content_of(message) for message in prompt], [_content_of(message) for message in messages]
        if any(said[at : at + len(asked)] == asked for at in range(len(said) - len(asked) + 1)):
            return messages
        if next((role for role in map(_role, messages) if role in ("user", "assistant")), None) == "user":
            for count in range(min(len(asked), len(said)), 0, -1):
                if asked[-count:] == said[:count]:
                    return [*prompt, *messages[count:]]
            if _role(prompt[-1]) == "user":
                raise BadRecord(
                    f'"{name}" begins with a user message that differs from "{self.prompt}"; data.prompt=null ignores '
                    f'"{self.prompt}" and reads only the messages'
                )
        return [*prompt, *messages]

    def _check_ends(self, both: Mapping[str, object]) -> None:
        """Checks that each conversation ends with an answer of the assistant. If data.prompt names a field, a message
        with a role other than assistant and tool must come before the answer. With data.assistant=all, the last answer
        must not be empty. A value that is not a list is checked later, by the encoder of the field.

        Args:
            both: name of a field -> the conversation in this field.

        Raises:
            BadRecord: a conversation fails these checks.
        """
        for name, messages in both.items():
            roles = [_role(message) for message in messages] if isinstance(messages, list) else []
            if self.prompt and roles and all(role in ("assistant", "tool") for role in roles):
                raise BadRecord(f'"{name}" begins with an answer, and "{self.prompt}" gives no message before it')
            if roles and roles[-1] not in ("assistant", None):
                raise BadRecord(f'"{name}" must end with a message of the assistant')
            if self.assistant == "all" and roles[-1:] == ["assistant"] and is_blank(messages[-1]):
                raise BadRecord(f'"{name}" ends with an empty answer of the assistant')


def _listed(value: object) -> object:
    """Returns a list of messages without their null fields, which tables add. A single message becomes a list, and JSON
    text with a message or a list of messages is parsed. Any other value is returned unchanged."""
    read = read_json(value)
    messages = [read] if isinstance(read, dict) else read
    is_text = isinstance(value, str) and not (isinstance(messages, list) and messages and all(map(_role, messages)))
    if is_text or not isinstance(messages, list):
        return value
    return [
        {key: field for key, field in message.items() if field is not None} if isinstance(message, dict) else message
        for message in messages
    ]


def _content_of(message: object) -> object:
    """Returns the role, the content and the tool calls of a message, for comparisons. Whitespace is normalized; other
    fields are ignored."""
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        content = "".join(map(str, (part["text"] for part in content)))
    return (
        message.get("role"),
        " ".join(content.split()) if isinstance(content, str) else content,
        message.get("tool_calls"),
    )


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None
