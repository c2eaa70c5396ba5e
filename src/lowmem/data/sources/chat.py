"""Makes documents from conversations: for `data=chat`, for other data with data.messages, and for preference data with
lists of messages. The model learns the assistant's answers, and where each answer ends.

A conversation is a list of messages, `{"role": ..., "content": ...}`. A chat template renders a conversation to one
text, or to several texts if it renders an answer or its context differently once later messages follow. Only tokens of
the learned answers, including the token that ends each answer, count in the loss (`chat_template.py`,
`chat_tokens.py`). Templates do not report some mistakes, such as a message without a role, a conversation without an
answer to learn, or a control token in a text. Records are therefore checked before they are rendered; a record with
such a mistake becomes a `BadRecord`.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import transformers
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from lowmem.config.values import shown
from lowmem.data.sources.bad_record import BadRecord, checked, control, kind, names_of, no_field
from lowmem.data.sources.chat_parts import CALLS, KNOWN, Messages, is_blank, read_json, with_schemas
from lowmem.data.sources.chat_template import CHATML, CHATML_TOKENS, TODAY, ChatTemplate, Rendered
from lowmem.data.sources.chat_tokens import ChatTokens
from lowmem.data.sources.source import REFUSE, Encoded, Encoder
from lowmem.system.errors import Refused

VERSION = 4  # increase it when the rendering of conversations changes
ROLES = ("system", "developer", "user", "assistant", "tool")
BLANK = "empty answers of the assistant, kept as context and not in the loss"
BESIDE = {"system", "system_prompt", "system_message", "instruction", "functions"}  # fields with text of a prompt
SYSTEM = ("system", "developer")  # roles of instructions, allowed once and at the beginning


class Chat(Encoder):
    """The encoder of conversations.

    Args:
        messages: the field with the messages.
        assistant: which answers are learned, all or last.
        template: chatml, or a file with a template; None: the tokenizer's own template.

    Raises:
        Refused: the template file cannot be read.
    """

    def __init__(
        self,
        messages: str = "messages",
        assistant: Literal["all", "last"] = "all",
        template: str | None = None,
    ) -> None:
        self.messages, self.assistant = messages, assistant
        self.source = CHATML if template == "chatml" else template and _read(template)
        self.named = f"data.template={shown(template)}" if template else ""
        self.chat = self
        # special tokens for a tokenizer that is trained on the conversations. Such a tokenizer has no template, so
        # `dress` sets ChatML if no template is typed.
        self.tokens = CHATML_TOKENS if self.source in (None, CHATML) else ()
        self.counts: Counter[str] = Counter()
        self.tokenizer: PreTrainedTokenizerBase | None = None  # the argument of the last call of `dress`
        self.opened: tuple[PreTrainedTokenizerBase, ChatTokens] | None = None

    def key(self) -> list:
        """Returns this encoder's part of the cache key. The tokenizer's own template is in the tokenizer's part."""
        how = [self.messages, self.assistant, REFUSE, REFUSE]
        return ["chat", VERSION, *how, self.source, str(TODAY), transformers.__version__]

    def text(self, fields: dict) -> str:
        """Returns the contents of the messages without markup, because a BPE that is trained on text with markup would
        learn the markup as words."""
        return checked("\n".join(message["content"] for message in messages_of(fields, self.messages)), "a message")

    def dress(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Sets the tokenizer's template, which is saved with the tokenizer, to the typed template. Without a typed
        template, a tokenizer that has ChatML's two tokens but no template gets ChatML, for example a tokenizer that was
        trained on conversations. With ChatML, <|im_end|> becomes the end-of-text token."""
        self.tokenizer = tokenizer
        source = self.source
        if not (source or tokenizer.chat_template) and {*CHATML_TOKENS} <= tokenizer.get_vocab().keys():
            source = CHATML
        if source:
            tokenizer.chat_template = source
        if source == CHATML:
            tokenizer.eos_token = CHATML_TOKENS[1]  # generation stops at this token

    def encode(
        self, tokenizer: PreTrainedTokenizerBase, batch: list[dict]
    ) -> list[Encoded | list[Encoded] | BadRecord]:
        tokens = self._opened(tokenizer)
        rendered = [self._rendered(tokens.template, fields) for fields in batch]
        rows = [row for rows in rendered if not isinstance(rows, BadRecord) for row in rows]
        encodings = iter(tokens.encode(rows))
        return [
            rows if isinstance(rows, BadRecord) else self._encoded(tokens, rows, list(islice(encodings, len(rows))))
            for rows in rendered
        ]

    def remarks(self) -> Counter[str]:
        remarks = self.counts + (self.opened[1].template.remarks if self.opened else Counter())
        self.counts.clear()
        if self.opened:
            self.opened[1].template.remarks.clear()
        return remarks

    def count(self, fields: dict) -> int:
        if self.tokenizer is None:
            return 0
        rows = self._rendered(self._opened(self.tokenizer).template, fields)
        return 0 if isinstance(rows, BadRecord) else len(rows)

    def _opened(self, tokenizer: PreTrainedTokenizerBase) -> ChatTokens:
        if self.opened is None or self.opened[0] is not tokenizer:
            template = ChatTemplate(tokenizer, self.source, self.named)
            self.opened = tokenizer, ChatTokens(template, tokenizer)
        return self.opened[1]

    def _rendered(self, template: ChatTemplate, fields: dict) -> list[Rendered] | BadRecord:
        try:
            messages, tools = messages_of(fields, self.messages), _tools(fields)
            answers = _answers(messages, self.assistant == "last")
            _check_weights(messages)
            _check_texts(template, messages, tools)
            rows = template.render(messages, tools, answers)
        except BadRecord as error:
            return error
        except RecursionError:
            return BadRecord("the record is nested too deeply")
        self._count(template, messages)
        for name in BESIDE & fields.keys() - {self.messages}:
            if fields[name]:
                self.counts[f'records with a field "{name}" beside their messages, which is not read'] += 1
        return rows

    def _count(self, template: ChatTemplate, messages: Messages) -> None:
        """Counts, for the log, empty answers and unknown fields whose names do not occur in the template."""
        for message in messages:
            if message["role"] == "assistant" and is_blank(message):
                self.counts[BLANK] += 1
            for name in message.keys() - KNOWN:
                if name not in template.source:
                    self.counts[f'messages with a field "{shown(name)}" that {template.name} does not render'] += 1

    def _encoded(
        self, tokens: ChatTokens, rows: list[Rendered], encodings: list[Encoding]
    ) -> Encoded | list[Encoded] | BadRecord:
        try:
            encoded = [tokens.document(*each) for each in zip(rows, encodings, strict=True)]
        except BadRecord as error:
            return error
        if len(encoded) == 1:
            return encoded[0]
        sizes = [len(row.ids) for row in encoded]
        self.counts[tokens.template.further_rows] += sum(sizes) - max(sizes)
        return encoded


def messages_of(fields: dict, name: str) -> Messages:
    """Returns the messages of a record, as copies whose content is text.

    Args:
        name: name of the field with the messages.

    Raises:
        BadRecord: the field is missing, or the messages are invalid.
    """
    if name not in fields:
        raise no_field(fields, name)
    value = read_json(fields[name])
    if not isinstance(value, list) or not value:
        is_empty = isinstance(value, list)
        raise BadRecord(
            f'field "{name}" must be a list of messages, but is {"an empty list" if is_empty else kind(value)}'
        )
    messages = [_message(number, message) for number, message in enumerate(value, 1)]
    _check_order(messages)
    return messages


def _message(number: int, value: object) -> dict[str, Any]:
    """Returns a copy of a message without null fields. The content of the copy is text; it is empty for an answer
    without content.

    Args:
        number: number of the message in messages to the user, from 1.

    Raises:
        BadRecord: the message is invalid.
    """
    where = f"message {number}"
    if not isinstance(value, dict):
        raise BadRecord(f"{where} must be an object with role and content, but is {kind(value)}")
    message = {key: field for key, field in value.items() if field is not None}
    if "role" not in message:
        raise BadRecord(f"{where} has no role (fields: {names_of(message)})")
    role = message["role"]
    if role not in ROLES:
        raise BadRecord(f"{where} has the unknown role {role!r:.40} (known: {', '.join(ROLES)})")
    is_answer = role == "assistant" and ("content" in value or any(message.get(name) for name in CALLS))
    if "content" not in message and not is_answer:
        raise BadRecord(f"{where} ({role}) has no content (fields: {names_of(message)})")
    message["content"] = _content(f"{where} ({role})", message.get("content", ""))
    _check_calls(f"{where} ({role})", message)
    return message


def _check_calls(where: str, message: dict) -> None:
    """Raises BadRecord if the tool calls are not a list, or if a call does not name a function."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise BadRecord(f"the tool_calls of {where} must be a list of calls, but are {kind(calls)}")
    titled = {f"call {number}": call for number, call in enumerate(calls, 1)}
    if "function_call" in message:
        titled["function_call"] = message["function_call"]
    for title, call in titled.items():
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not (isinstance(name, str) and name.strip()):
            raise BadRecord(f"{title} of {where} must be an object with the name of a function")


def _answers(messages: Messages, last: bool) -> list[int]:
    """Returns the indices of the answers that are learned. Blank answers are left out.

    Raises:
        BadRecord: all answers that would be learned are blank.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"][-1 if last else 0 :]
    learned = [i for i in answers if not is_blank(messages[i])]
    if not learned:
        raise BadRecord(
            f"message {answers[-1] + 1} is an empty answer of the assistant, so there is nothing to train on"
        )
    return learned


def _content(where: str, content: object) -> str:
    """Returns the content of a message as text. A list of texts and text parts is joined."""
    if isinstance(content, list):
        texts = [
            piece.get("text") if isinstance(piece, dict) and piece.get("type") == "text" else piece for piece in content
        ]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else content
    if not isinstance(content, str):
        raise BadRecord(f"the content of {where} must be text, but is {kind(content)}")
    return content


def _check_order(messages: Messages) -> None:
    roles = [message["role"] for message in messages]
    system = [number for number, role in enumerate(roles, 1) if role in SYSTEM]
    if len(system) > 1:
        raise BadRecord(
            f"messages {system[0]} and {system[1]} are both system messages, but only the first message may be one"
        )
    if system and system != [1]:
        raise BadRecord(f"message {system[0]} is a system message, but only the first message may be one")
    if "assistant" not in roles:
        raise BadRecord("the conversation has no message of the assistant, so there is nothing to train on")


def _check_weights(messages: Messages) -> None:
    """Raises BadRecord for an answer with a `weight` other than 1, because weights are not supported."""
    for number, message in enumerate(messages, 1):
        if message["role"] == "assistant" and message.get("weight", 1) != 1:
            raise BadRecord(
                f"message {number} has the weight {message['weight']!r:.20}, but weights of messages are not "
                "supported; remove them (data.assistant=last trains on the last answer only)"
            )


def _check_texts(template: ChatTemplate, messages: Messages, tools: list | None) -> None:
    """Checks all strings of the messages and tools, except roles. A string must not contain a null character, an
    unpaired surrogate or a control token (in a message of the assistant: a special token, see
    `ChatTemplate.in_text`). With a control token, the text of a user could end the user's message and begin a message
    of the assistant.

    Raises:
        BadRecord: a string fails these checks.
    """
    for number, message in enumerate([*messages, {"role": "", "tools": tools}], 1):
        where = f"message {number} ({message['role']})" if message["role"] else 'field "tools"'
        for text in _strings([value for key, value in message.items() if key != "role"]):
            checked(text, where, empty=True)
            if token := template.in_text(text, message["role"] == "assistant"):
                raise control(where, token)


def _strings(value: object) -> Iterator[str]:
    """Yields every string in a JSON value, including names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings([*value, *value.values()])
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _tools(fields: dict) -> list | None:
    tools = read_json(fields.get("tools"))
    if not (tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))):
        found = "a list of other values" if isinstance(tools, list) else kind(tools)
        raise BadRecord(f'field "tools" must be a list of objects, but is {found}')
    return with_schemas(tools) if tools else None


def _read(template: str) -> str:
    """Returns the content of a template file."""
    try:
        return Path(template).expanduser().read_text(encoding="utf-8-sig")  # drops a byte order mark
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Refused(
            f"data.template={template}: {reason.lower()}. Type data.template=chatml, a file with a Jinja template, or "
            "null for the tokenizer's own template."
        ) from None
