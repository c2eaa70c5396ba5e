"""Renders a conversation to text for training, and finds the characters that are learned. `chat.py` calls this module,
and `chat_tokens.py` then tokenizes the text.

An answer begins after its generation prompt, which is the rendering of the earlier messages followed by the header of
an answer. (`ChatTemplate._asked_otherwise` handles templates that render existing answers without this prompt.) The
answer ends where the rendering of the messages up to this answer ends. If this rendering ends with text that later
messages would replace, such as an end-of-text token, the answer ends after the control tokens that follow its content.
`chat_tokens.py` then leaves out whitespace after the token that ends the answer. If the template marks the assistant's
text with `{% generation %}`, only the marked text of the learned answers is learned.

If the template renders an answer or its context differently once later messages follow, the answer gets a separate row.
To find parts of the conversation that the template drops, each row is rendered again with other values in the messages
and tools (`chat_parts.py`). Templates may come from untrusted sources; transformers renders them in jinja's sandbox.
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
# The date that templates print as today's, so that the tokens of a corpus do not depend on the day.
TODAY = date(2024, 7, 26)
_THOUGHT = re.compile(r"</?think(?:ing)?>")
_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

Span = tuple[int, int]


class Rendered(NamedTuple):
    """A row: the rendered text of a conversation, and the spans of its characters that are learned.

    Args:
        answers: number of learned answers.
        written: positions at which an answer begins with text of the template, such as an empty thought, rather than
            with text of its message. Empty if `spans` are the marked spans of the full conversation, because `render`
            then does not determine these positions.
    """

    text: str
    spans: list[Span]
    answers: int
    written: tuple[int, ...] = ()


@dataclass
class RenderedPrefix:
    """A rendered text and the spans of the answers that are learned in it. The text becomes a row if it has at least
    one such answer.

    Args:
        text: the rendering of the first `count` messages, unless `asked` is True.
        tags: the spans of `text` that the template marks with `{% generation %}`.
        asked: True: the text is the generation prompt of the last answer, followed by this answer. This is the case if
            the template renders the context of an existing answer differently than in the generation prompt.
        spans: message index of a learned answer -> the span of the answer in `text`.
    """

    text: str
    tags: list[Span]
    count: int
    asked: bool = False
    spans: dict[int, Span] = field(default_factory=dict)


class ChatTemplate:
    """A chat template, and the control tokens of the tokenizer that will encode the rendered text.

    Args:
        tokenizer: provides the special tokens, and the template if `source` is None.
        source: the text of the template; None: the tokenizer's own template.
        named: the name of `source` in messages; empty: "the chat template of" the tokenizer.

    Raises:
        Refused: `source` is None and the tokenizer has no template, or several without a default; the tokenizer is not
            fast, so it does not map tokens to characters; or the template calls `strftime_now` with anything but a
            constant text.
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
        self.roles: set[str] = set()  # roles on which the rendered text is known to depend
        self.remarks: Counter[str] = Counter()  # message for the log -> how often it applied
        if "strftime_now(" in self.source:
            raise Refused(
                f"data=chat: {self.name} inserts today's date in a way that cannot be pinned, so the tokens would "
                "change from day to day. Type data.template=<a file> with a copy of the template that has a fixed date."
            )

    @property
    def further_rows(self) -> str:
        """Returns the log message about the tokens of additional rows, that is, of all rows of a conversation except
        its longest."""
        return (
            f"tokens in additional rows of conversations, because {self.name} renders an answer or its context "
            "differently once later messages follow"
        )

    def in_text(self, text: str, by_assistant: bool) -> str | None:
        """Returns the first control token in a text, or None. Control tokens are the special tokens, and those added
        tokens that occur in the template and are not whitespace. In a text of the assistant (`by_assistant`), only
        special tokens are searched for, because answers may contain other control tokens, such as <think>."""
        match = (self.special if by_assistant else self.control).search(text)
        return match and match[0]

    def render(
        self, messages: Messages, tools: list | None = None, answers: Sequence[int] | None = None
    ) -> list[Rendered]:
        """Renders a conversation to one row, or to several rows if the template renders an answer or its context
        differently once later messages follow. In its row, an answer follows the text of its generation prompt, as at
        inference; only the header may differ. This is not checked if all answers are learned, the template marks them
        completely, and later messages do not change them.

        Args:
            answers: the indices of the messages that are learned answers; None: all answers.

        Raises:
            BadRecord: the template raises an error for the conversation, drops a part of it, leaves a part of a learned
                answer outside of the marked text, ignores a role, renders tool-call arguments as a quoted string, or
                renders the context of an existing answer differently than in the generation prompt.
            Refused: the template is not valid Jinja.
        """
        everyone = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        answers = everyone if answers is None else answers
        messages, text, tags = self._spelled(messages, tools)
        full = RenderedPrefix(text, tags, len(messages))
        spans = [span for span in tags if span[0] < span[1]]
        is_whole = self.tagged and answers == everyone and not _unsaid(messages, answers, text, spans)
        continues = is_whole and all(self._continues(messages, tools, i, text) for i in answers[:-1])
        if continues and not self._missing(messages, tools, full, answers):
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

    def _rows(
        self, messages: Messages, tools: list | None, answers: Sequence[int], full: RenderedPrefix
    ) -> list[RenderedPrefix]:
        """Returns the rows of a conversation, the row with the most messages first.

        Args:
            full: the rendering of the full conversation. It is one of the rows if it contains the last learned answer
                in the form in which the model would generate it.
        """
        rows = [full]
        for i in reversed(answers):
            own = self._own_row(messages, tools, i, full)
            start, stop = own.spans[i]
            row = next((row for row in rows if row.text.startswith(own.text)), None)
            if row is None:  # the template may add text after the last message, such as an end-of-text token
                begins = any(row.text.startswith(own.text[: start + 1]) for row in rows)
                end = self._end(messages, tools, i, own.text) if begins else len(own.text)
                row = next((row for row in rows if row.text.startswith(own.text[:end])), own)
                stop = stop if row is own else end
            row.spans[i] = start, stop
            rows = [row for row in [*rows, *([own] if row is own else [])] if row.spans]
        return rows

    def _rendered(self, messages: Messages, row: RenderedPrefix) -> Rendered:
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

    def _own_row(self, messages: Messages, tools: list | None, i: int, full: RenderedPrefix) -> RenderedPrefix:
        """Returns a row that ends with answer `i`, with the span of this answer. The text of the row is the rendering
        of the messages up to and including this answer, unless `_asked_otherwise` changes the text."""
        if i + 1 == full.count:
            text, tags = full.text, full.tags
        else:
            text, tags = self.rendering(messages[: i + 1], tools)
        prompt = self.rendering(messages[:i], tools, True)[0]
        row = RenderedPrefix(text, tags, i + 1)
        if text.startswith(prompt):
            row.spans[i] = len(prompt), len(text)
            return row
        return self._asked_otherwise(messages, tools, i, prompt, row)

    def _asked_otherwise(
        self, messages: Messages, tools: list | None, i: int, prompt: str, row: RenderedPrefix
    ) -> RenderedPrefix:
        """Completes and returns the row of answer `i`, whose rendering does not begin with the answer's generation
        prompt. If only the header differs, for example because the generation prompt opens a thought, the answer begins
        where the rendering and the prompt first differ. If the context differs, too, the text of the row becomes the
        generation prompt followed by the answer, as at inference.

        Args:
            prompt: the generation prompt.
            row: the rendering of the messages up to and including answer `i`; changed in place.

        Raises:
            BadRecord: the context differs, and the header of the prompt does not occur before the answer.
        """
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
        """Returns the position at which answer `i`, the last answer of a text, ends: after the first run of control
        tokens that follows the content, reasoning and calls of the answer, or at the end of the text if no control
        token follows."""
        other = self.rendering(Replaced(messages[: i + 1], tools, of=i).messages, tools)[0]
        end = self.ends.search(text, len(text) - _alike_at_end(text, other))
        return end.end() if end else len(text)

    def _continues(self, messages: Messages, tools: list | None, i: int, text: str) -> bool:
        """Returns whether later messages change neither answer `i` nor its context: the text of the conversation begins
        with the rendering of the messages up to answer `i`, cut at the end of its last generation block. Also returns
        True if the template raises an error for these messages alone."""
        try:
            own, tags = self.rendering(messages[: i + 1], tools)
        except BadRecord:
            return True
        return text.startswith(own[: max((stop for _, stop in tags), default=0)])

    def _before(self, text: str, at: int) -> int:
        """Returns the position `at`, or the start of the control token that contains this position."""
        return next((token.start() for token in self.control.finditer(text) if token.start() < at < token.end()), at)

    def _spelled(self, messages: Messages, tools: list | None) -> tuple[Messages, str, list[Span]]:
        """Returns the conversation with the arguments of calls in the form that the template supports, the rendered
        text, and the spans that the template marks. Arguments are objects, or JSON text if the template raises an error
        for objects or renders objects in Python's syntax.

        Raises:
            BadRecord: the template raises an error for both forms, or renders arguments as a quoted string.
        """
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
        """Returns a copy of the conversation with replaced values, and the rendering of the copy. The original
        arguments of a call could also be quoted in a message, but the replaced arguments occur only in the call. So if
        the rendering of the copy contains the replaced arguments, the template renders the call. If the template raises
        an error for the replaced values, returns `messages` and `text`.

        Args:
            text: the rendering of `messages`.
        """
        other = Replaced(messages, tools)
        try:
            return other.messages, self.rendering(other.messages, other.tools)[0]
        except BadRecord:  # the template accepts certain values only
            return messages, text

    def _missing(
        self, messages: Messages, tools: list | None, row: RenderedPrefix, answers: Collection[int]
    ) -> MessagePart | None:
        """Returns the first part of the conversation that is missing from a row, or None. A part is present if a
        rendering in which all parts are replaced contains its replacement, or if replacing this part alone changes the
        text or the marked spans. The reasoning of messages that are not in `answers` may be missing.

        Args:
            answers: indices of the messages that are learned answers of this row.

        Raises:
            BadRecord: a part of a learned answer is in the text, but outside of the marked spans.
        """
        messages = messages[: row.count]
        other = Replaced(messages, tools)
        try:
            text, tags = self._shown(other, row)
        except BadRecord:  # the template accepts certain values only
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

    def _shown(self, other: Replaced, row: RenderedPrefix) -> tuple[str, list[Span]]:
        """Returns the rendering of a conversation with replaced values, and the marked spans. A row with `asked` begins
        with the generation prompt of the last answer. For such a row, the rendering of this prompt is appended to the
        result, so a part that only the prompt contains counts as present."""
        text, tags = self.rendering(other.messages, other.tools)
        if row.asked:
            text += self.rendering(other.messages[:-1], other.tools, True)[0]
        return text, tags

    def _is_same(self, other: Replaced, messages: Messages, tools: list | None, row: RenderedPrefix) -> bool:
        """Returns whether `_shown` gives the same text and spans for a conversation with replaced values as for the
        original. Returns False if the template raises an error."""
        try:
            return self._shown(other, row) == self._shown(Replaced(messages, tools, only=-1), row)
        except BadRecord:
            return False

    def _check_roles(self, messages: Messages, tools: list | None, text: str) -> None:
        """Raises BadRecord if the rendered text does not depend on the role of a message. Messages with blank content
        are not checked, nor are the roles in `self.roles`."""
        for i, message in enumerate(messages):
            role = message["role"]
            if role in self.roles or not message["content"].strip():
                continue
            swapped = message | {"role": "assistant" if role == "user" else "user"}
            others = [*messages[:i], swapped, *messages[i + 1 :]]
            try:  # also without tools: with tools, a template may render the first message identically for every role
                is_same = self.rendering(others, tools)[0] == text
                is_same = is_same and self.rendering(others)[0] == self.rendering(messages)[0]
            except BadRecord:  # the template rejects the other role, so it distinguishes roles
                is_same = False
            if is_same:
                raise BadRecord(f"{self.name} ignores the role of message {i + 1} ({role})")
            self.roles.add(role)

    def rendering(self, messages: Messages, tools: list | None = None, asks: bool = False) -> tuple[str, list[Span]]:
        """Returns the rendered text and the spans that the template marks.

        Args:
            asks: append the generation prompt, and return no spans.

        Raises:
            BadRecord: the template raises an error for this conversation.
            Refused: the template is not valid Jinja.
        """
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
        except Exception as error:  # a template may raise anything
            raise BadRecord(
                f"{self.name} rejects the conversation ({' '.join(str(error).split()) or type(error).__name__})"
            ) from None
        return texts[0], spans[0] if spans else []


def _alike_at_end(text: str, other: str) -> int:
    """Returns the length of the common suffix of two texts."""
    return len(commonprefix([text[::-1], other[::-1]]))


def _statements(message: dict) -> list[str]:
    """Returns the content and the reasoning texts of a message, without blank texts."""
    return [text for name in ("content", *REASONING) if isinstance(text := message.get(name), str) and text.strip()]


def _unsaid(messages: Messages, answers: Iterable[int], text: str, spans: list[Span]) -> str | None:
    """If the learned text lacks a line of an answer, returns a description of the first such line, else None. A content
    or reasoning text that the learned text does not contain in full is compared line by line, because templates may
    move thoughts out of the content.

    Args:
        answers: indices of the answers to check.
        text: the rendered text of a row.
        spans: the spans that are learned.
    """
    learned = [text[start:stop] for start, stop in spans]
    for i in sorted(answers):
        for said in _statements(messages[i]):
            if not any(said.strip() in span for span in learned):
                lines = (line.strip() for line in _THOUGHT.sub("\n", said).splitlines())
                if missing := next((line for line in lines if not any(line in span for span in learned)), None):
                    return f"{missing!r:.40} of message {i + 1} (assistant)"
    return None


def _is_python(arguments: object, text: str) -> bool:
    """Returns whether a text contains the arguments of a call in the form in which Python prints a dict, for example
    with single quotation marks. Returns False if the arguments are not an object, or are empty."""
    return isinstance(arguments, dict) and bool(arguments) and str(arguments) in text


def _check_spelling(name: str, text: str, messages: Messages) -> None:
    """Raises BadRecord if a template renders tool-call arguments as a quoted string. Args: name: name of the template;
    text: the rendered messages."""
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
    """Returns a pattern that matches any of these tokens. Where several match, it matches the longest."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
