"""Adds the tokens that begin and end a document of text, and decides which tokens of a text record are learned. The
sources in `text_files.py` and `records.py` call this module; a conversation is framed by its chat template instead.

Documents are framed as the tokenizer's own call, `tokenizer(text)`, frames a text. A document begins with the tokens
that this call puts before a text, such as <s>; these tokens are not learned. The document ends with the tokens that the
call appends or, if the call appends none, with the end-of-text token. So training, samples, `generate=` and users of
the exported tokenizer get identical ids for the beginning and the text of a document. data.bos=true or false changes
the tokenizer itself, before the first text is encoded. Only data.bos=older frames documents differently (see `OLDER` in
source.py).

At inference the prompt is encoded without a completion, and training should use the same prompt ids. So the ids of
prompt and completion, encoded as one text, are used if they begin with the ids of the prompt. Otherwise the completion
is encoded after one of LEADS, and the ids of this lead are removed. With an empty lead, the completion may begin with
an unwanted space, because SentencePiece tokenizers put a space before every text."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tokenizers.processors import Sequence as Processors

from lowmem.data.sources.bad_record import BadRecord
from lowmem.data.sources.pieces import encode, ids_of, text_bytes
from lowmem.data.sources.source import OLDER, Encoded
from lowmem.system.errors import Refused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lowmem.data.sources.source import Source

log = logging.getLogger(__name__)

# test texts: documents are framed with the ids that the tokenizer's own call adds before and after one of these texts
MARKERS = ("a", "A", "1", ".")
MOST_MARKERS = 1000  # maximum number of vocabulary entries that are tried as test texts after MARKERS
# Texts that take the place of the prompt when a completion is encoded separately. They are tried in this order. After
# some of them, the tokenizer does not insert a space.
LEADS = ("", "\n", ".", "0", "a", "A")
SHOWN = 12  # maximum number of characters of a text that a message shows
PLAIN = "One  two,\n\tThree."  # test text that shows whether a tokenizer changes text


class Framing(NamedTuple):
    """The tokens that begin and end a document.

    Args:
        apart: True: prompt and completion are encoded separately, as in earlier versions of lowmem.
    """

    begin: list[int]
    end: list[int]
    apart: bool = False

    def document(self, ids: np.ndarray, size: int, begins: bool = True, ends: bool = True) -> Encoded:
        """Returns a document of text, or a part of a document.

        Args:
            size: bytes of the text.
            begins, ends: whether this part begins or ends the document.
        """
        before = self.begin if begins else []
        whole = _joined(before, ids, self.end if ends else [])
        return Encoded(whole, np.arange(len(whole)) >= len(before) if before else None, size, ends)

    def answered(self, prompt: np.ndarray, completion: np.ndarray, size: int) -> Encoded:
        """Returns a document in which the tokens of the completion and of the document's end are learned. Args: size:
        bytes of prompt and completion."""
        whole = _joined(self.begin, prompt, completion, self.end)
        return Encoded(whole, np.arange(len(whole)) >= len(self.begin) + len(prompt), size)


def framing_of(tokenizer: PreTrainedTokenizerBase, bos: bool | str = "auto") -> Framing:
    """Returns the tokens that begin and end documents. Args: tokenizer: a tokenizer after `dress`; bos: `data.bos`;
    only the value "older" changes the result, because `dress` has already applied the other values."""
    end_of_text = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if bos == OLDER:
        return Framing([], end_of_text, apart=True)
    begin, end = _own(tokenizer)
    return Framing(begin, end or end_of_text)


def _own(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Returns the ids that the tokenizer's own call puts before and after a text. Raises: Refused: the tokenizer cannot
    encode any of the test texts."""
    of_vocabulary = (tokenizer.decode([index]) for index in range(min(len(tokenizer), MOST_MARKERS)))
    for text in (word for words in (MARKERS, of_vocabulary) for word in words):
        plain, whole = (tokenizer(text, add_special_tokens=added)["input_ids"] for added in (False, True))
        starts = [i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain]
        if plain and len(starts) == 1:
            return whole[: starts[0]], whole[starts[0] + len(plain) :]
    raise Refused(f"data: {_name(tokenizer)} cannot encode plain text. Type tokenizer=<another folder or hub id>.")


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the input ids for a text that the model is to continue."""
    return [*_own(tokenizer)[0], *ids_of(tokenizer, [text])[0].tolist()]


def text_documents(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], framing: Framing) -> Iterator[Encoded]:
    """Yields the document of each text."""
    for text, ids in zip(texts, encode(tokenizer, texts), strict=True):
        yield framing.document(ids, text_bytes(text))


def answer_documents(
    tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Sequence[str]], framing: Framing
) -> Iterator[Encoded | BadRecord]:
    """Yields a document for each pair of prompt and completion, or a BadRecord with the reason why the pair cannot be
    used.

    Raises:
        Refused: there is no token that could end a document, because the tokenizer has no end-of-text token. (With
            data.bos=older this is not an error.)
    """
    if not (framing.end or framing.apart):
        raise Refused(
            f"data: {_name(tokenizer)} has no end-of-text token, so the model would never learn to stop. Set "
            '"eos_token" in its tokenizer_config.json, or type tokenizer=<a folder or hub id> of a tokenizer that has '
            "one."
        )
    prompts = encode(tokenizer, [prompt for prompt, _ in pairs])
    wholes = encode(tokenizer, [completion if framing.apart else prompt + completion for prompt, completion in pairs])
    for (prompt, completion), before, whole in zip(pairs, prompts, wholes, strict=True):
        size = text_bytes(prompt) + text_bytes(completion)
        ids = whole if framing.apart else _continuation(tokenizer, before, whole, prompt, completion)
        yield ids if isinstance(ids, BadRecord) else framing.answered(before, ids, size)


def _continuation(
    tokenizer: PreTrainedTokenizerBase, before: np.ndarray, whole: np.ndarray, prompt: str, completion: str
) -> np.ndarray | BadRecord:
    """Returns the ids of a completion. If `whole` begins with the ids of the prompt, the result is the rest of `whole`.
    Otherwise the ids of the prompt followed by the returned ids decode to prompt + completion, or to the same text as
    `whole`; if no lead gives such ids, returns a BadRecord.

    Args:
        before: ids of the prompt.
        whole: ids of prompt and completion as one text.
    """
    if len(whole) > len(before) and np.array_equal(whole[: len(before)], before):
        return whole[len(before) :]
    texts = prompt + completion, _decoded(tokenizer, whole)
    for lead in LEADS:  # `whole` does not begin with the ids of the prompt
        leading, both = ids_of(tokenizer, [lead, lead + completion])
        ids = both[len(leading) :]
        behind = len(ids) > 0 and np.array_equal(both[: len(leading)], leading)
        if behind and _decoded(tokenizer, np.concatenate([before, ids])) in texts:
            return ids
    return BadRecord(
        f"the tokenizer merges the end of the prompt ({prompt[-SHOWN:]!r}) and the beginning of the completion "
        f"({completion[:SHOWN]!r}) into one token, and encoding them separately changes the text; end the prompt with "
        "a complete word, and move white space between the two to the beginning of the completion"
    )


def dress(tokenizer: PreTrainedTokenizerBase, source: Source) -> None:
    """Sets the chat template (with its end-of-text token) and the begin-of-text token of a tokenizer as a source
    requires, before the first text is encoded.

    Raises:
        Refused: data.bos is true and the tokenizer has no begin-of-text token, or the tokenizer does not allow changing
            its begin-of-text token.
    """
    if source.chat:
        source.chat.dress(tokenizer)
    if isinstance(source.bos, bool):
        _begin_with_bos(tokenizer, source.bos)


def _begin_with_bos(tokenizer: PreTrainedTokenizerBase, wanted: bool) -> None:
    bos, (begin, end) = tokenizer.bos_token_id, _own(tokenizer)
    if wanted and bos is None:
        raise Refused(
            f"data.bos=true: {_name(tokenizer)} has no begin-of-text token. Type data.bos=auto, or set "
            '"bos_token" in its tokenizer_config.json.'
        )
    begin_now = begin if wanted and bos in begin else [bos, *begin] if wanted else []
    if begin_now == begin:
        return
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.post_processor = _post_processor(tokenizer, begin_now, end)
    else:
        tokenizer.add_bos_token = wanted
    if _own(tokenizer) != (begin_now, end):
        raise Refused(
            f"data.bos={str(wanted).lower()}: {_name(tokenizer)} does not allow changing its begin-of-text token. Type "
            "data.bos=auto, which keeps the tokenizer's default."
        )


def _post_processor(tokenizer: PreTrainedTokenizerBase, begin: list[int], end: list[int]) -> Processors:
    """Returns a post-processor that adds the tokens `begin` and `end` to a text. The post-processor is built from JSON,
    because names of tokens may contain colons, and in the text form of a template a colon separates a token from its
    type id."""
    backend = tokenizer.backend_tokenizer
    now = json.loads(backend.post_processor.__getstate__()) if backend.post_processor else {}
    kept = [one for one in now.get("processors", [now]) if one.get("type") == "ByteLevel"]  # ByteLevel adjusts offsets
    names = {index: backend.id_to_token(index) for index in (*begin, *end)}

    def around(sequence: str, kind: int) -> list[dict]:
        tokens = [[{"SpecialToken": {"id": names[index], "type_id": kind}} for index in ids] for ids in (begin, end)]
        return [*tokens[0], {"Sequence": {"id": sequence, "type_id": kind}}, *tokens[1]]

    template = {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {name: {"id": name, "ids": [index], "tokens": [name]} for index, name in names.items()},
    }
    made = Processors([])
    made.__setstate__(json.dumps({"type": "Sequence", "processors": [*kept, template]}).encode())
    return made


def tell(tokenizer: PreTrainedTokenizerBase) -> None:
    """Logs two facts that may surprise users: that the tokenizer has no end-of-text token, and that encoding and
    decoding change a text. Each is logged only if it is true of the tokenizer."""
    if not framing_of(tokenizer).end:
        log.info(
            f"data: {_name(tokenizer)} has no end-of-text token, so nothing separates documents and the model does not "
            'learn to stop. To change that, set "eos_token" in its tokenizer_config.json.'
        )
    if (decoded := _decoded(tokenizer, ids_of(tokenizer, [PLAIN])[0])) != PLAIN:
        log.info(
            f"data: {_name(tokenizer)} changes text: {PLAIN!r} becomes {decoded!r}. The model trains on, and "
            "generates, text changed in this way."
        )


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> str:
    return tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)


def _joined(*parts: Iterable[int]) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.uint32) for part in parts])


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return f"the tokenizer {tokenizer.name_or_path}".rstrip()
