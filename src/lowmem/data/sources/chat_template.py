"""Renders a chat template for training: the rows of a conversation, and which of their characters are learnt.

If the template marks the assistant's part with `{% generation %}`, that part is learnt. Otherwise an answer begins
behind the prompt that asks for it, which is the messages before it with the header of an answer, and ends with the
token behind its content. An answer that the template writes otherwise once more messages follow has a row of its own.
Each row is rendered once more with other values in the messages, which shows that every part of them is in it
(chat_parts.py). Templates are other people's code: transformers runs them in jinja's sandbox.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from posixpath import commonprefix
from typing import NamedTuple

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from lowmem.data.sources.bad_record import BadRecord
from lowmem.data.sources.chat_parts import REASONING, MessagePart, Messages, Replaced, functions, with_arguments
from lowmem.system.errors import Refused

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Templates that print today's date print this one: tokens of a corpus are the same on every day.
TODAY = date(2024, 7, 26)
_THOUGHT = re.compile(r"</?think(?:ing)?>")
_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

Span = tuple[int, int]


class Rendered(NamedTuple):
    """A row of a conversation as the template writes it, and the spans of its characters that are learnt.

    answers: the number of answers in them.
    written: the positions behind the header of an answer at which the template itself, and no message, goes on.
    """

    text: str
    spans: list[Span]
    answers: int
    written: tuple[int, ...] = ()


@dataclass
class Row:
    """A text that some answers are learnt from.

    Args:
        text: what the template writes of the first `count` messages.
        tags: the spans that the template itself marks.
        asked: the text begins as the prompt of its last answer, which the template writes otherwise with that answer.
        spans: of the answers that are learnt, by their indices.
    """

    text: str
    tags: list[Span]
    count: int
    asked: bool = False
    spans: dict[int, Span] = field(default_factory=dict)


class ChatTemplate:
    """A template together with the tokenizer that encodes its text.

    Args:
        tokenizer: brings the template, and makes the tokens.
        source: another template; named: a name for it in messages.

    Raises:
        Refused: no template; one that jinja cannot read; a tokenizer that does not say where its tokens are in the
            text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str | None = None, named: str = "") -> None:
        owner = f" of {tokenizer.name_or_path}" if tokenizer.name_or_path else ""
        self.name = named or f"the chat template{owner}"
        if not tokenizer.is_fast:
            raise Refused(
                f"data=chat: the tokenizer {tokenizer.name_or_path} has no fast version, and only fast tokenizers map "
                "tokens to characters. Choose a model whose tokenizer has a fast version (a tokenizer.json)."
            )
        self.source = _NOW.sub(lambda call: repr(TODAY.strftime(call[2])), source or _own(tokenizer))
        self.tagged = _TAG.search(self.source) is not None
        self.variables = tokenizer.special_tokens_map
        added = {token.content: (index, token) for index, token in tokenizer.added_tokens_decoder.items()}
        special = {text for text, (_, token) in added.items() if token.special}
        written = {text for text in added if text in self.source and not text.isspace()}
        self.controls = frozenset(added[text][0] for text in special | written)
        self.specials = frozenset(added[text][0] for text in special)
        self.special, self.control = _any_of(special), _any_of(special | written)
        self.ends = re.compile(f"(?:{self.control.pattern})+")
        self.roles: set[str] = set()  # those that are known to make a difference
        self.remarks: Counter[str] = Counter()  # what the log says, and how often
        if "strftime_now(" in self.source:
            raise Refused(
                f"data=chat: {self.name} inserts today's date in a way that cannot be pinned, so the tokens would "
                "change from day to day. Type data.template=<a file> with a copy of the template that has a fixed date."
            )

    @property
    def further_rows(self) -> str:
        """Returns what the log says of the tokens that several rows of a conversation have beyond its longest row."""
        return (
            f"tokens in additional rows of conversations, because {self.name} renders an answer or its context "
            "differently once later messages follow"
        )

    def in_text(self, text: str, by_assistant: bool) -> str | None:
        """Returns the first control token in a text. An assistant may write those that are not special, such as
        <think>."""
        match = (self.special if by_assistant else self.control).search(text)
        return match and match[0]

    def render(
        self, messages: Messages, tools: list | None = None, answers: Sequence[int] | None = None
    ) -> list[Rendered]:
        """Renders a conversation to one row, or to several where the template writes an answer, or what is before it,
        otherwise once more follows. Each row is what the model reads and writes when it gives the row's answers.

        Args:
            answers: the indices of those that are learnt; None: all.

        Raises:
            BadRecord: the template refuses the conversation, or leaves a part of it out.
        """
        everyone = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        answers = everyone if answers is None else answers
        messages, text, tags = self._spelled(messages, tools)
        full = Row(text, tags, len(messages))
        spans = [span for span in tags if span[0] < span[1]]
        is_whole = self.tagged and answers == everyone and not _unsaid(messages, answers, text, spans)
        if is_whole and not self._missing(messages, tools, full, answers):
            self._check_roles(messages, tools, text)
            return [Rendered(text, spans, len(answers))]
        rows = self._rows(messages, tools, answers, full)
        for row in rows:
            if part := self._missing(messages, tools, row, row.spans):
                raise BadRecord(
                    f"{part.named(messages)} is missing from the text that {self.name} renders; remove it from the "
                    "record, or type data.template=<a file> with a template that renders it"
                )
        self._check_roles(messages, tools, text)
        return [self._rendered(messages, row) for row in reversed(rows)]

    def _rows(self, messages: Messages, tools: list | None, answers: Sequence[int], full: Row) -> list[Row]:
        """Returns the rows of a conversation, the longest first. Args: full: all of it, taken if the last answer is in
        there as the model gives it."""
        rows = [full]
        for i in reversed(answers):
            own = self._own_row(messages, tools, i, full)
            start, stop = own.spans[i]
            row = next((row for row in rows if row.text.startswith(own.text)), None)
            if row is None:  # the template may write something behind the last message, such as the end of the text
                begins = any(row.text.startswith(own.text[: start + 1]) for row in rows)
                end = self._end(messages, tools, i, own.text) if begins else len(own.text)
                row = next((row for row in rows if row.text.startswith(own.text[:end])), own)
                stop = stop if row is own else end
            row.spans[i] = start, stop
            rows = [row for row in [*rows, *([own] if row is own else [])] if row.spans]
        return rows

    def _rendered(self, messages: Messages, row: Row) -> Rendered:
        spans = [row.spans[i] for i in sorted(row.spans)]
        written = [
            start
            for i, (start, _) in row.spans.items()
            if not any(row.text.startswith((said, said.strip()), start) for said in _statements(messages[i]))
        ]
        if self.tagged:
            spans = [(max(a, start), min(b, stop)) for start, stop in spans for a, b in row.tags]
        spans = [span for span in spans if span[0] < span[1]]
        if line := _unsaid(messages, [*row.spans], row.text, spans):
            raise BadRecord(f"{line} is missing from the text that {self.name} renders")
        return Rendered(row.text, spans, len(row.spans), tuple(sorted(written)))

    def _own_row(self, messages: Messages, tools: list | None, i: int, full: Row) -> Row:
        """Returns the row that ends with answer `i`."""
        if i + 1 == full.count:
            text, tags = full.text, full.tags
        else:
            text, tags = self.rendering(messages[: i + 1], tools)
        prompt = self.rendering(messages[:i], tools, True)[0]
        row = Row(text, tags, i + 1)
        if text.startswith(prompt):
            row.spans[i] = len(prompt), len(text)
            return row
        return self._asked_otherwise(messages, tools, i, prompt, row)

    def _asked_otherwise(self, messages: Messages, tools: list | None, i: int, prompt: str, row: Row) -> Row:
        """Returns the row of an answer that does not begin as the prompt does. Either the header, behind all parts of
        the prompt, goes on otherwise, as one that opens a thought, and the answer begins where both differ; or the
        template writes what is before otherwise, and the answer is put behind the prompt, as the model writes it."""
        text, other = row.text, self.rendering(Replaced(messages[: i + 1], tools, of=i).messages, tools)[0]
        others = Replaced(messages[:i], tools)
        header = len(prompt) - _alike_at_end(prompt, self.rendering(others.messages, others.tools, True)[0])
        same = self._before(text, len(commonprefix([prompt, text, other])))
        if same >= header:
            row.spans[i] = same, len(text)
            self.remarks[
                f"answers that do not continue the generation prompt of {self.name}: it ends with {prompt[same:]!r}, "
                "which is not rendered before existing answers"
            ] += 1
            return row
        asks, begin = prompt[header:], len(commonprefix([text, other]))
        at = text.rfind(asks, 0, begin) if asks else -1
        if at < 0:
            raise BadRecord(
                f"{self.name} renders the context of message {i + 1} (assistant) differently in the generation prompt, "
                "so the training text would not match inference; type data.template=<chatml or a file> for another "
                "template"
            )
        moved = len(prompt) - (at + len(asks))
        row.text, row.asked = prompt + text[at + len(asks) :], True
        row.tags = [(start + moved, stop + moved) for start, stop in row.tags]
        row.spans[i] = len(prompt), len(row.text)
        return row

    def _end(self, messages: Messages, tools: list | None, i: int, text: str) -> int:
        """Returns where answer `i`, the last of a text, ends: with the first control tokens behind its parts."""
        other = self.rendering(Replaced(messages[: i + 1], tools, of=i).messages, tools)[0]
        end = self.ends.search(text, len(text) - _alike_at_end(text, other))
        return end.end() if end else len(text)

    def _before(self, text: str, at: int) -> int:
        """Returns the position, or the beginning of the control token that it is inside of."""
        return next((token.start() for token in self.control.finditer(text) if token.start() < at < token.end()), at)

    def _spelled(self, messages: Messages, tools: list | None) -> tuple[Messages, str, list[Span]]:
        """Returns the conversation with the arguments of calls as the template needs them, and its rendering: objects;
        or texts of JSON, if it raises an error or writes an object as Python does."""
        if not any(True for message in messages for _ in functions(message)):
            return messages, *self.rendering(messages, tools)
        objects, texts = (with_arguments(messages, as_text) for as_text in (False, True))
        try:
            text, spans = self.rendering(objects, tools)
        except BadRecord as error:
            try:
                text, spans = self.rendering(texts, tools)
            except BadRecord:
                raise error from None
            objects = texts
        others, written = self._others(objects, tools, text)
        if any(_is_python(function.get("arguments"), written) for message in others for function in functions(message)):
            text, spans = self.rendering(texts, tools)
            objects = texts
            others, written = self._others(objects, tools, text)
        _check_spelling(self.name, written, others)
        return objects, text, spans

    def _others(self, messages: Messages, tools: list | None, text: str) -> tuple[Messages, str]:
        """Returns a conversation with other values and its rendering, in which nothing but a call looks like the call's
        arguments: a message may quote them. Args: text: the conversation's own rendering, taken if the template refuses
        other values."""
        other = Replaced(messages, tools)
        try:
            return other.messages, self.rendering(other.messages, other.tools)[0]
        except BadRecord:  # it wants one of certain values
            return messages, text

    def _missing(
        self, messages: Messages, tools: list | None, row: Row, answers: Collection[int]
    ) -> MessagePart | None:
        """Returns the first part of the conversation that is not in a row: a rendering with another value in place of
        all parts has each of these, or else one with another value in place of this part alone is the same. The
        reasoning of other answers than these may be missing.

        Raises:
            BadRecord: a part of one of the answers is in the text, but outside of what the template marks.
        """
        messages = messages[: row.count]
        other = Replaced(messages, tools)
        try:
            text, tags = self._shown(other, row)
        except BadRecord:  # it wants one of certain values
            text, tags = "", []
        found = {number: text.find(part.mark) for number, part in enumerate(other.parts)}
        for number, part in enumerate(other.parts):
            at = found[number]
            is_marked = part.message not in answers or any(start <= at < stop for start, stop in tags)
            if self.tagged and not row.asked and at >= 0 and not is_marked:
                raise BadRecord(
                    f"{part.named(messages)} is outside of the generation block of {self.name}, so it would not be in "
                    "the loss"
                )
        for number, part in enumerate(other.parts):
            is_needed = part.message in answers or not part.is_reasoning
            if found[number] < 0 and is_needed:
                alone = Replaced(messages, tools, only=number)
                if self._is_same(alone, messages, tools, row):
                    return part
        return None

    def _shown(self, other: Replaced, row: Row) -> tuple[str, list[Span]]:
        """Renders another conversation as that of a row."""
        text, tags = self.rendering(other.messages, other.tools)
        if row.asked:
            text += self.rendering(other.messages[:-1], other.tools, True)[0]
        return text, tags

    def _is_same(self, other: Replaced, messages: Messages, tools: list | None, row: Row) -> bool:
        """Returns whether another conversation is rendered to the same text."""
        try:
            return self._shown(other, row) == self._shown(Replaced(messages, tools, only=-1), row)
        except BadRecord:
            return False

    def _check_roles(self, messages: Messages, tools: list | None, text: str) -> None:
        """Refuses a role that makes no difference to the text. Each role is looked at once."""
        for i, message in enumerate(messages):
            role = message["role"]
            if role in self.roles or not message["content"].strip():
                continue
            swapped = message | {"role": "assistant" if role == "user" else "user"}
            others = [*messages[:i], swapped, *messages[i + 1 :]]
            try:  # with tools the template may have a place for the first message, whose role it knows
                is_same = self.rendering(others, tools)[0] == text
                is_same = is_same and self.rendering(others)[0] == self.rendering(messages)[0]
            except BadRecord:  # so it does make a difference
                is_same = False
            if is_same:
                raise BadRecord(f"{self.name} ignores the role of message {i + 1} ({role})")
            self.roles.add(role)

    def rendering(self, messages: Messages, tools: list | None = None, asks: bool = False) -> tuple[str, list[Span]]:
        """Returns the text and the template's own spans. Args: asks: append the header of an answer."""
        try:
            texts, spans = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self.source,
                return_assistant_tokens_mask=self.tagged and not asks,
                add_generation_prompt=asks,
                **self.variables,
            )
        except TemplateSyntaxError as error:
            raise Refused(
                f"data=chat: {self.name} is not valid Jinja (line {error.lineno}: {error}). Fix it."
            ) from None
        except Exception as error:  # other people's code may raise anything
            raise BadRecord(
                f"{self.name} rejects the conversation ({' '.join(str(error).split()) or type(error).__name__})"
            ) from None
        return texts[0], spans[0] if spans else []


def _alike_at_end(text: str, other: str) -> int:
    """Returns the number of characters at their ends that are the same."""
    return len(commonprefix([text[::-1], other[::-1]]))


def _statements(message: dict) -> list[str]:
    """Returns what a message says and thinks."""
    return [text for name in ("content", *REASONING) if isinstance(text := message.get(name), str) and text.strip()]


def _unsaid(messages: Messages, answers: Iterable[int], text: str, spans: list[Span]) -> str | None:
    """Returns words for a line of an answer that is not in what is learnt: templates cut thoughts out of a content.
    Args: text: of a row; spans: that are learnt."""
    learnt = [text[start:stop] for start, stop in spans]
    for i in sorted(answers):
        for said in _statements(messages[i]):
            if not any(said.strip() in span for span in learnt):
                lines = (line.strip() for line in _THOUGHT.sub("\n", said).splitlines())
                if missing := next((line for line in lines if not any(line in span for span in learnt)), None):
                    return f"{missing!r:.40} of message {i + 1} (assistant)"
    return None


def _is_python(arguments: object, text: str) -> bool:
    """Returns whether a text has an object as Python writes it, with other quotation marks than JSON has."""
    return isinstance(arguments, dict) and bool(arguments) and str(arguments) in text


def _check_spelling(name: str, text: str, messages: Messages) -> None:
    """Refuses arguments that a template writes as a text inside quotation marks. Args: name: of the template; text: its
    rendering."""
    for number, message in enumerate(messages, 1):
        for function in functions(message):
            arguments = function.get("arguments")
            if isinstance(arguments, str) and any(
                json.dumps(arguments, ensure_ascii=ascii) in text for ascii in (True, False)
            ):
                raise BadRecord(
                    f"message {number} ({message['role']}) has tool-call arguments that are not a JSON object, and "
                    f"{name} would render them as a quoted string"
                )


def _own(tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError:  # the tokenizer has no template, or several without a default
        raise Refused(
            f"data=chat: the tokenizer of {tokenizer.name_or_path} has no chat template (base models usually have "
            "none). Type data.template=chatml, which adds ChatML's two tokens, or data.template=<a Jinja file>."
        ) from None


def _any_of(tokens: Iterable[str]) -> re.Pattern:
    """Returns a pattern of these tokens, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
