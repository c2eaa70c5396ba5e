"""Renders a chat template for training: the text, which of its characters are the assistant's, and its tokens.

If the template marks the assistant's part with `{% generation %}`, that part is learnt. Otherwise an answer is the
difference between the rendered conversation before it, with the header that asks for an answer, and the rendered
conversation with it. This holds only if each is a prefix of the full text, which is checked. Templates are other
people's code: transformers runs them in jinja's sandbox.
"""

import re
from collections.abc import Iterable
from datetime import date
from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from lowmem.data.sources.bad_record import BadRecord
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
_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

Messages = list[dict[str, Any]]
Span = tuple[int, int]


class Rendered(NamedTuple):
    """A conversation as the template writes it, and the spans of its characters that are learnt.

    answers: the number of answers in them; exact: they contain nothing else, not even a line end after an answer.
    """

    text: str
    spans: list[Span]
    answers: int
    exact: bool


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
                f"data=chat: the tokenizer {tokenizer.name_or_path} has no fast version, which alone says where its "
                "tokens stand in the text. Choose a model whose tokenizer has one (a tokenizer.json)."
            )
        self.source = _NOW.sub(lambda call: repr(TODAY.strftime(call[2])), source or _own(tokenizer))
        self.tagged = _TAG.search(self.source) is not None
        self.variables = tokenizer.special_tokens_map
        added = {token.content: (index, token) for index, token in tokenizer.added_tokens_decoder.items()}
        special = {text for text, (_, token) in added.items() if token.special}
        written = {text for text in added if text in self.source and not text.isspace()}
        self.controls = frozenset(added[text][0] for text in special | written)
        self.special, self.control = _any_of(special), _any_of(special | written)
        self.backend = _exact(tokenizer.backend_tokenizer)
        if "strftime_now(" in self.source:
            raise Refused(
                f"data=chat: {self.name} writes today's date in a way that cannot be held still, and the tokens would "
                "change from day to day. Type data.template=<a file> with a copy of it that names a date."
            )

    def in_text(self, text: str, by_assistant: bool) -> str | None:
        """Returns the first control token in a text. An assistant may write those that are not special, such as
        <think>."""
        match = (self.special if by_assistant else self.control).search(text)
        return match and match[0]

    def render(self, messages: Messages, tools: list | None = None, last: bool = False) -> Rendered:
        """Renders a conversation. Args: last: only the last answer is learnt.

        Raises:
            BadRecord: the template refuses the conversation, or writes the beginning of it in another way than in the
                full one.
        """
        text, spans = self._render(messages, tools)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"][-1 if last else 0 :]
        if not self.tagged:
            spans = [self._answer(messages, tools, i, text) for i in answers]
        elif last:
            beginning = self._beginning(messages, tools, answers[0], text)
            spans = [(max(start, beginning), stop) for start, stop in spans]
        return Rendered(text, [span for span in spans if span[0] < span[1]], len(answers), self.tagged)

    def _answer(self, messages: Messages, tools: list | None, i: int, conversation: str) -> Span:
        """Returns the span of answer `i`. Args: conversation: the rendered messages, all of them."""
        start = self._beginning(messages, tools, i, conversation)
        if i + 1 == len(messages):
            return start, len(conversation)
        with_answer = self._render(messages[: i + 1], tools)[0]
        if not conversation.startswith(with_answer) or len(with_answer) < start:
            raise BadRecord(self._otherwise(i + 1))
        return start, len(with_answer)

    def _beginning(self, messages: Messages, tools: list | None, i: int, conversation: str) -> int:
        """Returns the position where answer `i` begins: after the text that the model gets when it is asked for the
        answer."""
        prompt = self._render(messages[:i], tools, True)[0]
        if not conversation.startswith(prompt):
            raise BadRecord(self._otherwise(i))
        return len(prompt)

    def _otherwise(self, count: int) -> str:
        return (
            f"{self.name} writes the first {count} messages otherwise where more follow, as templates do that drop "
            "earlier thinking, so what the model is asked is not what it would learn from. data.assistant=last learns "
            "the last answer alone, and data.template=<chatml or a file> takes another template"
        )

    def _render(self, messages: Messages, tools: list | None = None, asks: bool = False) -> tuple[str, list[Span]]:
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
            raise Refused(f"data=chat: {self.name} cannot be read (line {error.lineno}: {error}). Mend it.") from None
        except Exception as error:  # other people's code may raise anything
            raise BadRecord(
                f"{self.name} does not take it ({' '.join(str(error).split()) or type(error).__name__})"
            ) from None
        return texts[0], spans[0] if spans else []

    def encode(self, texts: list[str]) -> list[Encoding]:
        return self.backend.encode_batch(texts, add_special_tokens=False)

    def learnt(self, rendered: Rendered, encoding: Encoding, ids: list[int]) -> list[Span]:
        """Returns the tokens of the learnt spans: those that are completely inside, and the control token that ends an
        answer.

        Raises:
            BadRecord: a token holds the end of a header and the beginning of an answer.
            Refused: a template with which the model would never learn to stop.
        """
        spans = [self._tokens(rendered, encoding, ids, *span) for span in rendered.spans]
        if sum(start < stop and ids[stop - 1] in self.controls for start, stop in spans) < rendered.answers:
            raise Refused(
                f"data=chat: {self.name} ends an answer with no token of its own, leaves that to the next message or "
                "has it outside of its generation tag: the model would never learn to stop. Type data.template=chatml, "
                "or data.template=<a file> with a template that does."
            )
        return spans

    def text_bytes(self, rendered: Rendered) -> int:
        """Returns the bytes of the text without its control tokens."""
        return len(self.control.sub("", rendered.text).encode())

    def _tokens(self, rendered: Rendered, encoding: Encoding, ids: list[int], start: int, end: int) -> Span:
        """Returns the tokens of a span of characters."""
        text = rendered.text
        begin, stop = _token_from(encoding, start, len(text)), _token_from(encoding, end, len(text))
        if begin < len(ids) and encoding.token_to_chars(begin)[0] < start:
            instead = (
                "Take the white space off the beginning of the answer"
                if text[start].isspace()
                else "Type data.template=<a file> with a copy of it whose header ends in no white space"
            )
            raise BadRecord(
                f"an answer begins with {text[start : start + 20]!r}, which the tokenizer joins to the header before "
                f"it, so its first token is half the template's. {instead}"
            )
        if stop < len(ids) and encoding.token_to_chars(stop)[0] < end and ids[stop] in self.controls:
            stop += 1  # some tokens include the white space after them
        if not rendered.exact:  # templates write white space after the token that ends an answer
            last = next((i for i in range(stop - 1, begin - 1, -1) if ids[i] in self.controls), stop - 1)
            stop = stop if text[encoding.token_to_chars(last)[1] : end].strip() else last + 1
        return begin, stop


def _own(tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError:  # the tokenizer has no template, or several without a default
        raise Refused(
            f"data=chat: the tokenizer of {tokenizer.name_or_path} has no chat template, as those of base models have "
            "none. Type data.template=chatml, which adds its two tokens, or data.template=<a jinja file>."
        ) from None


def _any_of(tokens: Iterable[str]) -> re.Pattern:
    """Returns a pattern of these tokens, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))


def _exact(backend: Tokenizer) -> Tokenizer:
    """Returns a copy of the tokenizer with true positions of its tokens: GPT-2's leaves the space before a word out of
    its position, and would hide a header's space."""
    copy = Tokenizer.from_str(backend.to_str())
    copy.post_processor = None
    copy.no_padding()
    copy.no_truncation()
    return copy


def _token_from(encoding: Encoding, at: int, length: int) -> int:
    """Returns the first token with a character from `at` on: a normaliser may have dropped some."""
    tokens = (encoding.char_to_token(char) for char in range(at, length))
    return next((token for token in tokens if token is not None), len(encoding))
