"""Tokenizes rendered rows of conversations, finds the tokens that are learned, and checks that each answer ends with a
control token.

A tokenizer may merge the end of a header and the beginning of an answer into one token, which then belongs only in part
to the answer. If the answer begins with text of the template, such as an empty thought (`Rendered.written`), the header
is encoded separately, as at inference. If the answer begins with other text, or if the separate encoding would change
the decoded text, the record becomes a `BadRecord`.
"""

from functools import cached_property
from itertools import pairwise

import numpy as np
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from lowmem.data.sources.bad_record import BadRecord
from lowmem.data.sources.chat_template import ChatTemplate, Rendered, Span
from lowmem.data.sources.source import Encoded
from lowmem.system.errors import Refused


class ChatTokens:
    """Tokenizes the rows that `template` renders. Args: tokenizer: the tokenizer with which `template` was created."""

    def __init__(self, template: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> None:
        self.template, self.backend = template, _exact(tokenizer.backend_tokenizer)

    def encode(self, rows: list[Rendered]) -> list[Encoding]:
        encodings = self._encode([row.text for row in rows])
        return [self._divided(row, encoding) for row, encoding in zip(rows, encodings, strict=True)]

    def document(self, rendered: Rendered, encoding: Encoding) -> Encoded:
        """Returns the document of a row.

        Raises:
            BadRecord: no token is learned, or one token contains the end of a header and the beginning of an answer.
            Refused: an answer does not end with a token of `stops`, so the model would never learn to stop.
        """
        ids = np.array(encoding.ids, np.uint32)
        learned = np.zeros(len(ids), bool)
        for start, stop in self._learned(rendered, encoding, encoding.ids):
            learned[start:stop] = True
        if not learned.any():
            raise BadRecord(f"{self.template.name} renders no token of the assistant, so there is nothing to train on")
        text_bytes = len(self.template.control.sub("", rendered.text).encode())  # control tokens do not count as text
        return Encoded(ids, learned, text_bytes)

    def _encode(self, texts: list[str]) -> list[Encoding]:
        return self.backend.encode_batch(texts, add_special_tokens=False)

    def _divided(self, row: Rendered, encoding: Encoding) -> Encoding:
        """Returns the encoding of a row. If a token merges the end of a header with the template text at the beginning
        of an answer (`Rendered.written`), the header is encoded separately, unless this would change the decoded
        text."""
        cuts = [start for start in row.written if _joins(encoding, start, len(row.text))]
        if not cuts:
            return encoding
        parts = self._encode([row.text[a:b] for a, b in pairwise([0, *cuts, len(row.text)])])
        divided = Encoding.merge(parts, growing_offsets=True)
        texts = [self.backend.decode(each.ids, skip_special_tokens=False) for each in (encoding, divided)]
        is_right = texts[0] == texts[1] and encoding.offsets[-1] == divided.offsets[-1]
        return divided if is_right else encoding

    def _learned(self, rendered: Rendered, encoding: Encoding, ids: list[int]) -> list[Span]:
        """Returns the spans of learned tokens, which include the control tokens that end the answers.

        Raises:
            BadRecord: one token contains the end of a header and the beginning of an answer.
            Refused: an answer does not end with a token of `stops`, so the model would never learn to stop.
        """
        spans = [self._tokens(rendered, encoding, ids, *span) for span in rendered.spans]
        if sum(start < stop and ids[stop - 1] in self.stops for start, stop in spans) < rendered.answers:
            how = (
                "puts the token that ends an answer outside of its generation block"
                if self.template.tagged
                else "does not end every answer with a token (in GLM-4.5, for example, the header of the next message "
                "ends an answer, and nothing follows the last one)"
            )
            raise Refused(
                f"data=chat: {self.template.name} {how}, so the model would never learn to stop. Type "
                "data.template=chatml, or data.template=<a file> with a copy of the template that ends every answer "
                "with its token."
            )
        return spans

    @cached_property
    def stops(self) -> frozenset[int]:
        """Returns the ids of the tokens that may end an answer: all special tokens, and the control token with which
        the template ends an answer without tool calls, even if this token is not special. (Other control tokens, such
        as </tool_call>, do not end an answer.)"""
        plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            ids = self._encode([self.template.rendering(plain)[0].rstrip()])[0].ids
        except BadRecord:
            ids = []
        return self.template.specials | (self.template.controls & {*ids[-1:]})

    def _tokens(self, rendered: Rendered, encoding: Encoding, ids: list[int], start: int, end: int) -> Span:
        """Returns the span of tokens for a span of characters. It includes the control token that ends the answer, but
        not the whitespace after this token.

        Raises:
            BadRecord: a token contains characters on both sides of `start`.
        """
        text = rendered.text
        begin, stop = _token_from(encoding, start, len(text)), _token_from(encoding, end, len(text))
        if _joins(encoding, start, len(text)):
            instead = (
                "remove the white space at the beginning of the answer"
                if text[start].isspace() and start not in rendered.written
                else "type data.template=<a file> with a copy of the template whose header ends in no white space"
            )
            raise BadRecord(
                f"an answer begins with {text[start : start + 20]!r}, which the tokenizer merges with the end of the "
                f"header into one token, so the loss would include a part of the template; {instead}"
            )
        if stop < len(ids) and encoding.token_to_chars(stop)[0] < end and ids[stop] in self.template.controls:
            stop += 1  # a control token that includes the following whitespace (rstrip) may extend past `end`
        # templates write whitespace after the token that ends an answer, sometimes inside the generation block
        last = next((i for i in range(stop - 1, begin - 1, -1) if ids[i] in self.stops), stop - 1)
        return begin, stop if text[encoding.token_to_chars(last)[1] : end].strip() else last + 1


def _exact(backend: Tokenizer) -> Tokenizer:
    """Returns a copy of the tokenizer without post-processor, padding and truncation. Without a post-processor, the
    offsets of a token include all of its characters. GPT-2's post-processor excludes the space before a word, so a
    token that begins with the last space of a header would not be detected."""
    copy = Tokenizer.from_str(backend.to_str())
    copy.post_processor = None
    copy.no_padding()
    copy.no_truncation()
    return copy


def _joins(encoding: Encoding, at: int, length: int) -> bool:
    """Returns whether one token contains the character at a position and characters before it."""
    token = _token_from(encoding, at, length)
    return token < len(encoding) and encoding.token_to_chars(token)[0] < at


def _token_from(encoding: Encoding, at: int, length: int) -> int:
    """Returns the index of the first token with a character at or after `at`, or the number of tokens if there is none.
    (A normalizer may have dropped the character at `at`.)"""
    tokens = (encoding.char_to_token(char) for char in range(at, length))
    return next((token for token in tokens if token is not None), len(encoding))
