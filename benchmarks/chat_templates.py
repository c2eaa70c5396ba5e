"""Compares the tokens that lowmem and TRL's SFTTrainer learn from 20 conversations with each of 13 chat templates.

python -m benchmarks.chat_templates          # a minute; needs pip install -e '.[trl]'
python -m benchmarks.chat_templates Qwen3    # only this template, printed and not saved

The templates are shipped with TRL, except ChatML, which is lowmem's. If the environment variable CHAT_TEMPLATES names a
folder, files in it such as `qwen3.jinja` take precedence over TRL's. For each template, the benchmark trains a small
BPE tokenizer and adds the template's special tokens, so it needs no tokenizer files of models. The conversations are in
`tests/support/conversations.py`.

A token that lowmem learns matches a token that TRL learns only if the tokens are equal and all earlier tokens in their
rows are equal too. Therefore a library may put all answers into one row, or each answer into a separate row after the
messages before it. TRL prepares each conversation in two ways:

- conversation: the full conversation with `assistant_only_loss=True`, for which TRL replaces most templates by its own
  versions with generation tags
- answers: each answer as the completion of the messages before it, with the model's own template

To find the parts of a conversation that a template drops, the benchmark replaces each part in turn by another text. A
part is dropped if its replacement leaves the renderings of all answers unchanged. This check does not use the training
code of either library.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from functools import cache, reduce
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from benchmarks.runner import ROOT, write
from lowmem.data.sources.bad_record import BadRecord
from lowmem.data.sources.chat import Chat
from lowmem.data.sources.chat_template import CHATML, CHATML_TOKENS, TODAY
from lowmem.system.errors import Refused

sys.path.append(str(ROOT / "tests" / "support"))

from conversations import CONVERSATIONS


class Template(NamedTuple):
    """A chat template and the added tokens of its tokenizer, separated by spaces."""

    file: str | None  # file name without .jinja; None: lowmem's ChatML
    special: str  # added tokens that decoding skips
    ordinary: str = ""  # added tokens that decoding does not skip
    bos: str | None = None
    eos: str = "<|im_end|>"
    strips: bool = False  # True: the special tokens also match the whitespace after them


QWEN = (
    "<|endoftext|> <|im_start|> <|im_end|>",
    "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>",
)
LLAMA = "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>"
LFM2 = (
    "<|startoftext|> <|endoftext|> <|im_start|> <|im_end|> <|tool_list_start|> <|tool_list_end|> <|tool_call_start|> "
    "<|tool_call_end|> <|tool_response_start|> <|tool_response_end|>"
)
TEMPLATES = {
    "Qwen3": Template("qwen3", *QWEN),
    "Qwen3.5-think": Template("qwen3_5_think", *QWEN),
    "Phi-3": Template(
        "phi3",
        "<s> <|endoftext|> <|system|> <|user|> <|assistant|> <|end|>",
        bos="<s>",
        eos="<|endoftext|>",
        strips=True,
    ),
    "DeepSeek-V3": Template(
        "deepseekv3",
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>",
        "<｜User｜> <｜Assistant｜> <think> </think> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
        "<｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> "
        "<｜tool▁output▁end｜>",
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
    ),
    "GLM-4.5": Template(
        "glm4moe",
        "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
        "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> "
        "</arg_value> /nothink",
        eos="<|endoftext|>",
    ),
    "gpt-oss": Template(
        "gptoss",
        "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> <|call|>",
        bos="<|startoftext|>",
        eos="<|return|>",
    ),
    "Llama-3": Template("llama3", LLAMA, bos="<|begin_of_text|>", eos="<|eot_id|>"),
    "Gemma": Template("gemma", "<pad> <eos> <bos> <start_of_turn> <end_of_turn>", bos="<bos>", eos="<end_of_turn>"),
    "ChatML": Template(None, " ".join(CHATML_TOKENS)),
    "LFM2": Template("lfm2_v2", LFM2, bos="<|startoftext|>"),
    "LFM2.5": Template("lfm2_2_5_v2", LFM2, "<think> </think>", bos="<|startoftext|>"),
    "Llama-3.2": Template("llama3_2", f"{LLAMA} <|eom_id|> <|python_tag|>", bos="<|begin_of_text|>", eos="<|eot_id|>"),
    "Qwen2.5": Template("qwen2_5", *QWEN),
}


OTHER = '{"other": "words"}'  # replacement text; JSON, because it also replaces arguments of tool calls


class Row(NamedTuple):
    """The token ids of a row, and for each token whether it is learned."""

    ids: list[int]
    learned: list[bool]

    def predictions(self) -> Iterator[tuple[bytes, int]]:
        """Yields, for each learned token, all tokens before it in the row, as bytes, and the learned token."""
        ids = np.array(self.ids, np.uint32)
        return ((ids[:i].tobytes(), token) for i, token in enumerate(self.ids) if self.learned[i])


def source(template: Template) -> str:
    """Returns a template's text."""
    if template.file is None:
        return CHATML
    import trl

    folders = [os.environ.get("CHAT_TEMPLATES"), Path(trl.__file__).parent / "chat_templates"]
    files = [Path(folder) / f"{template.file}.jinja" for folder in folders if folder]
    return next(file for file in files if file.exists()).read_text(encoding="utf-8")


@cache
def tokenizer(template: Template) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE trained on the conversations and the template, with the template's added tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, show_progress=False, initial_alphabet=alphabet)
    texts = [json.dumps(one, ensure_ascii=False) for one in CONVERSATIONS.values()]
    bpe.train_from_iterator([*texts, source(template)], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=template.bos, eos_token=template.eos)
    special = [
        AddedToken(token, special=True, rstrip=template.strips, normalized=False) for token in template.special.split()
    ]
    made.add_tokens(special, special_tokens=True)
    made.add_tokens([AddedToken(token, normalized=False) for token in template.ordinary.split()])
    made.chat_template = source(template)
    return made


def lowmem_rows(template: Template, conversation: dict) -> list[Row] | str:
    """Returns lowmem's rows of a conversation, or the message with which lowmem refuses the conversation."""
    try:
        (made,) = Chat().encode(tokenizer(template), [conversation])
    except Refused as error:
        return str(error)
    if isinstance(made, BadRecord):
        return str(made)
    documents = made if isinstance(made, list) else [made]
    return [Row([*map(int, one.ids)], [*map(bool, one.learned)]) for one in documents]


def conversation_rows(template: Template, conversation: dict) -> list[Row] | str:
    """Returns a list with TRL's row of the full conversation, or TRL's error message. Only the assistant's text is
    learned."""
    return _prepared(template, [conversation], assistant_only_loss=True)


def answer_rows(template: Template, conversation: dict) -> list[Row] | str:
    """Returns TRL's rows, one per answer, or TRL's error message. The prompt of a row consists of the messages before
    the answer."""
    messages = conversation["messages"]
    places = _places(conversation)
    rest = {key: value for key, value in conversation.items() if key != "messages"}
    records = [{"prompt": messages[:i], "completion": messages[i : i + 1], **rest} for i in places]
    return _prepared(template, records)


WAYS = {"conversation": conversation_rows, "answers": answer_rows}


def _prepared(template: Template, records: list[dict], **settings: object) -> list[Row] | str:
    """Returns the rows of SFTTrainer's training data, or the error message. Records are passed as an `IterableDataset`,
    because a table would give the `arguments` of all tool calls the same keys."""
    from datasets import IterableDataset
    from trl import SFTConfig, SFTTrainer

    made = tokenizer(template)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    network = LlamaForCausalLM(LlamaConfig(vocab_size=len(made), **shape))
    try:
        with tempfile.TemporaryDirectory() as folder, patch.object(chat_template_utils, "datetime", _Today):
            how = {"max_length": None, "report_to": "none", "use_cpu": True, "bf16": False, "max_steps": 1}
            data = IterableDataset.from_generator(lambda: iter(records))
            trainer = SFTTrainer(
                network, SFTConfig(folder, **how, **settings), train_dataset=data, processing_class=made
            )
            return [Row(row["input_ids"], [label >= 0 for label in row["labels"]]) for row in trainer.train_dataset]
    except Exception as error:  # templates and TRL may raise anything
        return " ".join(f"{type(error).__name__}: {error}".split())


class _Today(datetime):
    """A `datetime` whose `now()` is midnight of the date that lowmem passes to templates."""

    @classmethod
    def now(cls, tz: object = None) -> datetime:
        return datetime(TODAY.year, TODAY.month, TODAY.day)


REASONS = {
    "=": "the same tokens are learned behind the same tokens",
    "n": "TRL also learns the white space that a template writes after the token that ends an answer. Generation stops "
    "at that token, so lowmem leaves the white space out",
    "h": "TRL also learns the end of the prompt: the header of the answer, or the `<think>` that the template writes "
    "when it asks for an answer",
    "e": "the sides learn other end tokens behind an answer that is not the last. Generation stops at lowmem's",
    "o": "TRL also learns an empty turn of the assistant, which lowmem reads and does not learn",
    "c": "TRL writes an answer or the tokens before it otherwise: its own version of the template keeps thinking "
    "blocks that the model's own drops, or leaves out reasoning, or TRL learns from where prompt and row part. "
    "lowmem's tokens before each answer are the prompt that the model gets, and the template writes this answer",
    "j": "TRL leaves the arguments of calls as the record spells them, a text of JSON or an object, and fails or "
    "encodes a text twice where the template wants the other one. lowmem learns what TRL learns from that other one",
    "l": "lowmem refuses, because the template leaves out a part of the conversation. TRL trains without that part",
    "s": "lowmem refuses, because the template writes no token that ends an answer. TRL learns no end, or has its own "
    "version of the template",
    "w": "lowmem refuses, because the tokenizer joins the beginning of an answer to the header before it. TRL learns "
    "the answer without that beginning",
    "-": "both refuse",
    "t": "TRL fails or has no version of the template, and lowmem learns each answer as the template writes it behind "
    "the prompt",
    "x": "lowmem refuses for another reason, and TRL trains",
    "!": "lowmem trains without a part that the template leaves out",
    "?": "the sides learn different tokens, for another reason",
}
UNEXPLAINED = "x!?"


class Piece(NamedTuple):
    """Adjacent tokens that only one library learns, at positions [start, stop) of a row.

    They are part of the learned span [begin, end), which has index `number` in `spans` of this library's rows.
    """

    row: Row
    start: int
    stop: int
    begin: int
    end: int
    number: int


def spans(rows: Sequence[Row]) -> list[tuple[Row, int, int]]:
    """Returns (row, begin, end) for every maximal run of learned tokens, which has positions [begin, end) of the
    row."""
    found = []
    for row in rows:
        edges = np.flatnonzero(np.diff([False, *row.learned, False]))
        found += [(row, int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]
    return found


def unmatched(rows: Sequence[Row], others: Sequence[Row]) -> Iterator[Piece]:
    """Yields the learned tokens of `rows` that `others` learns less often after the same earlier tokens, or not at
    all."""
    left = Counter(prediction for row in others for prediction in row.predictions())
    alone = set()
    for r, row in enumerate(rows):
        places = (i for i, learned in enumerate(row.learned) if learned)
        for i, prediction in zip(places, row.predictions(), strict=True):
            alone |= set() if left[prediction] > 0 else {(r, i)}
            left[prediction] -= 1
    places = {id(row): r for r, row in enumerate(rows)}
    for number, (row, begin, end) in enumerate(spans(rows)):
        missing = [(places[id(row)], i) in alone for i in range(begin, end)]
        for start, stop in np.flatnonzero(np.diff([False, *missing, False])).reshape(-1, 2):
            yield Piece(row, begin + int(start), begin + int(stop), begin, end, number)


class Answer(NamedTuple):
    """The tokens of an answer's generation prompt, and of the rendering that ends with the answer."""

    prompt: list[int]
    rendering: list[int]

    @property
    def begins(self) -> tuple[int, int]:
        """Returns the two positions at which the answer may begin: the end of the prompt, and the first position at
        which the rendering differs from the prompt (the end of the prompt if they do not differ)."""
        same = zip(self.prompt, self.rendering, strict=False)
        return len(self.prompt), next((i for i, (one, other) in enumerate(same) if one != other), len(self.prompt))

    @property
    def written(self) -> str:
        return ",".join(map(str, self.rendering))


def of_trl(piece: Piece, rows: Sequence[Row], answers: Sequence[Answer], made: PreTrainedTokenizerFast) -> str:
    """Returns the key of REASONS for a piece that only TRL learns. Args: rows: lowmem's rows."""
    ids, start = piece.row.ids, piece.start
    known = [row for row in rows if row.ids[:start] == ids[:start] and len(row.ids) > start]
    only_ends = not {*ids[start : piece.stop]} - made.added_tokens_decoder.keys()
    if any(row.learned[start] and row.ids[start] != ids[start] for row in known):  # of_lowmem explains the token
        return "e" if only_ends else "c"
    if not known or piece[1:3] == piece[3:5]:
        return "c"
    if start == piece.begin:
        return "h" if any(answer.prompt[: piece.stop] == ids[: piece.stop] for answer in answers) else "?"
    if piece.stop < piece.end or ids[start - 1] not in made.added_tokens_decoder:
        return "?"
    return "e" if only_ends else "?" if made.decode(ids[start : piece.stop]).strip() else "n"


def of_lowmem(piece: Piece, answers: Sequence[Answer], made: PreTrainedTokenizerFast) -> str:
    """Returns the key of REASONS for a piece that only lowmem learns."""
    ids = piece.row.ids
    answer = ",".join(map(str, ids[piece.begin : piece.end]))
    right = any(
        piece.begin in a.begins and a.prompt[: piece.begin] == ids[: piece.begin] and answer in a.written
        for a in answers
    )
    if not right or piece.stop < piece.end:
        return "?"
    return "e" if piece.stop == piece.start + 1 and ids[piece.start] in made.added_tokens_decoder else "c"


class Marked(NamedTuple):
    """The result of comparing the two libraries on one conversation with one template.

    marks: keys of REASONS, one character each; told: descriptions of refusals and differences.
    """

    marks: str
    told: list[str]


class Case(NamedTuple):
    """A conversation, a template, and the data for comparing lowmem's rows with TRL's.

    rows: lowmem's rows, or the message of its refusal; lost: paths of the parts that the template drops; answers: all
    answers, once for each spelling of the conversation's tool calls.
    """

    template: Template
    conversation: dict
    rows: list[Row] | str
    lost: list[str]
    answers: list[Answer]

    def compared(self, theirs: list[Row] | str) -> Marked:
        """Compares lowmem's rows with TRL's. Args: theirs: TRL's rows, or its error message."""
        lost = [f"left out: {part}" for part in self.lost]
        if isinstance(self.rows, str):
            told = [f"lowmem: {self.rows}", *lost]
            return Marked("-", [*told, f"TRL: {theirs}"]) if isinstance(theirs, str) else Marked(self._refusal(), told)
        marks = "!" if lost else ""
        failed, theirs = (theirs, []) if isinstance(theirs, str) else ("", theirs)
        made, said, found = tokenizer(self.template), _assistants(self.conversation), {}
        spoken = [bool(message["content"] or message.get("tool_calls")) for message in said]
        if len(spans(self.rows)) != sum(spoken):
            found["lowmem does not learn each answer once"] = "?"
        for piece in unmatched(theirs, self.rows):
            empty = len(spans(theirs)) == len(said) and not spoken[piece.number]
            kind = "o" if empty else of_trl(piece, self.rows, self.answers, made)
            found[f"TRL alone ({kind}): {_text(piece, made)}"] = kind
        for piece in unmatched(self.rows, theirs):
            kind = of_lowmem(piece, self.answers, made)
            found[f"lowmem alone ({kind}): {_text(piece, made)}"] = kind
        if failed:  # TRL has no rows, so the loop above has checked every answer of lowmem
            return Marked(marks + "?" * ("?" in found.values()) + "t", [*lost, f"TRL: {failed}"])
        return Marked(marks + "".join(sorted(set(found.values()))) or "=", [*lost, *found])

    def _refusal(self) -> str:
        if self.lost:
            return "l"
        ends = tuple(self.template.special.split())
        texts = _renderings(self.template, self.conversation)
        if not all(text.rstrip().endswith(ends) for text in texts):
            return "s"
        backend = tokenizer(self.template).backend_tokenizer
        for text, prompt in zip(texts, _prompts(self.template, self.conversation), strict=True):
            begin, encoded = len(prompt), backend.encode(text, add_special_tokens=False)
            if text.startswith(prompt) and any(start < begin < end for start, end in encoded.offsets):
                return "w"
        return "x"


def _text(piece: Piece, made: PreTrainedTokenizerFast) -> str:
    ids, start = piece.row.ids, piece.start
    return f"{made.decode(ids[start : piece.stop])!r} after {made.decode(ids[max(0, start - 6) : start])!r}"


def parts(conversation: dict) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yields (path to the part, replacement text) for each part of a conversation that a rendering must contain."""
    for i, message in enumerate(conversation["messages"]):
        for key in ("content", "reasoning_content", "thinking"):
            if message.get(key, "").strip():
                yield ("messages", i, key), OTHER
        _, tag, after = message["content"].partition("</think>")
        if tag:
            yield ("messages", i, "content"), f"<think>\n{OTHER}\n{tag}{after}"
        for n, call in enumerate(message.get("tool_calls", ())):
            function = ("messages", i, "tool_calls", n, "function")
            yield (*function, "name"), OTHER
            arguments = call["function"]["arguments"]
            keys = [(key,) for key in arguments] if isinstance(arguments, dict) else [()]
            yield from (((*function, "arguments", *key), OTHER) for key in keys)
    yield from ((("tools", n, "function", "name"), OTHER) for n in range(len(conversation.get("tools", ()))))


def replaced(conversation: dict, path: tuple[str | int, ...], text: str) -> dict:
    """Returns a copy of a conversation with `text` at `path`."""
    copy = deepcopy(conversation)
    node = reduce(lambda node, key: node[key], path[:-1], copy)
    node[path[-1]] = text
    return copy


def spellings(conversation: dict) -> list[dict]:
    """Returns the conversation as recorded, a copy with the arguments of all tool calls as objects, and a copy with the
    arguments as JSON text. A copy that equals the recorded conversation is left out."""
    copies = [deepcopy(conversation) for _ in range(2)]
    for copy, spell in zip(copies, (_as_object, _as_text), strict=True):
        for call in (call for message in copy["messages"] for call in message.get("tool_calls", ())):
            call["function"]["arguments"] = spell(call["function"]["arguments"])
    return [conversation, *(copy for copy in copies if copy != conversation)]


def _as_object(arguments: str | dict) -> dict:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _as_text(arguments: str | dict) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def left_out(template: Template, conversation: dict) -> list[str]:
    """Returns the paths of the parts whose replacement changes no answer's rendering. Uses the first spelling
    for which the template renders all answers; returns [] without such a spelling."""
    for one in spellings(conversation):
        before = _renderings(template, one)
        if all(before):
            lost = (path for path, other in parts(one) if _renderings(template, replaced(one, path, other)) == before)
            return [".".join(map(str, path)) for path in lost]
    return []


def _renderings(template: Template, conversation: dict) -> list[str]:
    """Returns for each answer the rendering of all messages up to and including this answer, or "" if the template
    raises an error."""
    return [_rendered(template, conversation, i + 1) for i in _places(conversation)]


def _prompts(template: Template, conversation: dict) -> list[str]:
    """Returns the generation prompt of each answer, or "" if the template raises an error."""
    return [_rendered(template, conversation, i, add_generation_prompt=True) for i in _places(conversation)]


def _places(conversation: dict) -> list[int]:
    return [i for i, message in enumerate(conversation["messages"]) if message["role"] == "assistant"]


def _assistants(conversation: dict) -> list[dict]:
    return [conversation["messages"][i] for i in _places(conversation)]


def _rendered(template: Template, conversation: dict, count: int, **how: bool) -> str:
    messages, tools = conversation["messages"][:count], conversation.get("tools")
    try:
        with patch.object(chat_template_utils, "datetime", _Today):
            return tokenizer(template).apply_chat_template(messages, tools, tokenize=False, **how)
    except Exception:  # templates may raise anything
        return ""


def case_of(template: Template, conversation: dict) -> Case:
    """Returns the `Case` of a conversation. transformers' `apply_chat_template` renders its prompts and answers."""
    made, answers = tokenizer(template), []
    for one in spellings(conversation):
        for texts in zip(_prompts(template, one), _renderings(template, one), strict=True):
            answers.append(Answer(*(made(text, add_special_tokens=False).input_ids for text in texts)))
    rows = lowmem_rows(template, conversation)
    return Case(template, conversation, rows, left_out(template, conversation), answers)


def measured(template: Template) -> dict[str, dict[str, Marked]]:
    """Returns a dict that maps the title of each conversation to a dict from each key of WAYS to a comparison. This is
    the comparison of the conversation as recorded, unless that comparison has a mark "t", "c" or "?" while the
    comparison of another of the conversation's `spellings` has none of these marks and no "-". Then it is the other
    comparison, with the additional mark "j"."""
    results = {}
    for title, conversation in CONVERSATIONS.items():
        case, results[title] = case_of(template, conversation), {}
        for way, prepare in WAYS.items():
            recorded, *others = (case.compared(prepare(template, one)) for one in spellings(conversation))
            spelled = next((one for one in others if not set(one.marks) & set("-tc?")), recorded)
            is_better = spelled is not recorded and set(recorded.marks) & set("tc?")
            results[title][way] = spelled._replace(marks="j" + spelled.marks) if is_better else recorded
    return results


def table(results: Mapping[str, Mapping[str, Mapping[str, Marked]]]) -> str:
    """Returns Markdown: a table of the marks by conversation and template, the meanings of the marks, and all
    refusals."""
    titles = next(iter(results.values()))
    lines = [
        "Each cell has two marks: TRL with `assistant_only_loss=True`, and TRL with each answer as a completion.",
        "",
        "| conversation | " + " | ".join(results) + " |",
        "|---" * (1 + len(results)) + "|",
    ]
    for title in titles:
        cells = (" ".join(one.marks for one in of_one[title].values()) for of_one in results.values())
        lines.append(f"| {title} | " + " | ".join(f"`{cell}`" for cell in cells) + " |")
    cells = [one for of_one in results.values() for ways in of_one.values() for one in ways.values()]
    counts = Counter(mark for one in cells for mark in one.marks)
    lines += ["", f"Marks in these {len(cells)} comparisons; a comparison may have several:", ""]
    lines += ["| mark | comparisons | meaning |", "|---|---|---|"]
    lines += [f"| `{mark}` | {counts[mark]} | {meaning} |" for mark, meaning in REASONS.items() if counts[mark]]
    return "\n".join([*lines, "", *_refusals(results)])


def _refusals(results: Mapping[str, Mapping[str, Mapping[str, Marked]]]) -> Iterator[str]:
    """Yields the lines of a heading and of a list. The list has, for each refusal message, the number of refused
    conversations per template."""
    refused: dict[str, Counter] = defaultdict(Counter)
    for name, of_one in results.items():
        for ways in of_one.values():
            told = [line for one in ways.values() for line in one.told]
            for line in dict.fromkeys(line for line in told if line.startswith(("lowmem: ", "TRL: "))):
                refused[line][name] += 1
    yield "The refusals, with the conversations by template:"
    yield ""
    for line, names in sorted(refused.items()):
        yield f"- {line} ({', '.join(f'{name} {count}' for name, count in names.items())})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("templates", nargs="*", metavar="template", help=", ".join(TEMPLATES))
    names = parser.parse_args().templates
    if find_spec("trl") is None:
        print("TRL is not installed: pip install -e '.[trl]'")
        return
    results = {}
    for name in names or TEMPLATES:
        results[name] = measured(TEMPLATES[name])
        print(name, " ".join(one.marks for ways in results[name].values() for one in ways.values()), flush=True)
    if names:
        print(json.dumps(results, indent=2, ensure_ascii=False))
        print(table(results))
        return
    rows = {
        name: {title: {way: one._asdict() for way, one in ways.items()} for title, ways in of_one.items()}
        for name, of_one in results.items()
    }
    write("chat_templates", {"trl": version("trl"), "templates": rows}, f"TRL {version('trl')}.\n\n{table(results)}")


if __name__ == "__main__":
    main()
