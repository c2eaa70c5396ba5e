"""Generates samples: at each evaluation, the model continues fixed prompts, so that users see whether the model learns.

Each prompt is continued twice: with greedy decoding and with sampling. A prompt and its continuation together are at
most as long as a training sequence, so samples do not need longer sequences than training.
"""

import json
import textwrap
from collections.abc import Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import Tensor

from lowmem.data.loader import IGNORED, MicroBatch
from lowmem.data.sources.bad_record import BadRecord
from lowmem.data.sources.jsonl import numbered, value_of
from lowmem.data.sources.text_files import RECORDS
from lowmem.data.token_store import Tokens
from lowmem.model.generation import Prompt, TextGenerator, printable, user_turn
from lowmem.report.end_of_evaluation import EndOfEvaluation
from lowmem.system.errors import Refused

TEMPERATURE = 0.8
# Length in tokens of a prompt that is taken from plain text. All tokens of plain text have labels, so the labels do not
# show where a prompt ends.
BEGINNING = 8
EXAMPLE = 40  # maximum number of characters of a prompt in a printed command
DOCUMENTS, LONGEST = 8, 2048  # numbers of documents per split and of tokens per document to search for a prompt
COLUMNS = ("step", "prompt", "greedy", "sampled")


class Samples(Callback):
    """A callback that generates samples at the end of each evaluation, and writes them to a file and to the loggers.

    Args:
        prompts: token ids of each prompt, (1, T).
        tokens: maximum new tokens of each continuation; 0 disables samples.
        length: maximum tokens of prompt and continuation together. The continuation has at most half of these tokens.
            A prompt that is too long loses its beginning.
        file: a JSON lines file, to which a line is appended for each prompt and evaluation.
        at_end: the context of computations at the end of an evaluation.
    """

    def __init__(
        self, prompts: Sequence[Tensor], tokens: int, length: int, file: Path, at_end: EndOfEvaluation
    ) -> None:
        self.tokens, self.file, self.at_end = min(tokens, length // 2), file, at_end
        self.prompts = [ids[:, -(length - self.tokens) :] for ids in prompts]
        self.text: str | None = None  # the first prompt with its latest sampled continuation

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.sanity_checking or not self.tokens or self.at_end.stopped():
            return
        with self.at_end.computing(trainer, module):
            rows = self._rows(module, trainer.global_step)
        if self.at_end.stopped():
            return
        self.text = rows[0]["prompt"] + rows[0]["sampled"]
        with self.file.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        send(rows, trainer.loggers, trainer.global_step)

    def _rows(self, module: LightningModule, step: int) -> list[dict[str, object]]:
        at_end, tokenizer = self.at_end, self.at_end.tokenizer
        writer = TextGenerator(module.model, tokenizer, module.device, module.ranks.divides, at_end.stopped)
        texts = {}

        def write(number: int, temperature: float) -> None:
            texts[number, temperature] = writer.continuation(self.prompts[number], self.tokens, temperature)

        each = list(product(range(len(self.prompts)), (0.0, TEMPERATURE)))
        # each continuation starts with this seed, and so does not depend on the other prompts
        module.run_at_once([partial(write, *one) for one in each], at_end.seed)
        rows = []
        for number, ids in enumerate(self.prompts):
            prompt = tokenizer.decode(ids[0], skip_special_tokens=True)
            shown = map(printable, (prompt, texts[number, 0.0], texts[number, TEMPERATURE]))
            rows.append(dict(zip(COLUMNS, (step, *shown), strict=True)))
        return rows


def send(rows: Sequence[dict[str, object]], loggers: Sequence[Logger], step: int) -> None:
    """Sends samples to the loggers that can show texts. W&B gets a new table for each evaluation, because it would
    upload all rows of a growing table again."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            texts = (f"{row['prompt']}**{row['greedy']}**\n\n*drawn:* {row['sampled']}" for row in rows)
            logger.experiment.add_text("samples", "\n\n---\n\n".join(texts), step)
        elif hasattr(logger, "log_table"):
            logger.log_table("samples", [*COLUMNS], [[row[column] for column in COLUMNS] for row in rows], step=step)


def prompts(setting: list | str) -> list[Prompt]:
    """Returns the prompts of `sample_prompts`. The `setting` is a list of prompts, or the path of a file with one
    prompt per line. Each line of a .jsonl or .ndjson file is a JSON string, or an object with the field `prompt` or
    `messages`.

    Raises:
        Refused: the file cannot be read, an entry is not a prompt, or there are no entries.
    """
    listed = setting if isinstance(setting, list) else _read(Path(setting).expanduser())
    for number, prompt in enumerate(listed, start=1):
        if not (_is_text(prompt) or _is_messages(prompt)):
            raise Refused(
                f"sample_prompts: entry {number} is not a prompt ({json.dumps(prompt)[:60]}). Give texts, or a .jsonl "
                'file with {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]} in each line.'
            )
    if not listed:
        raise Refused(f"sample_prompts={setting}: there are no prompts. Type, for example, sample_prompts=[a,b].")
    return listed


def _is_text(prompt: object) -> bool:
    return isinstance(prompt, str) and prompt != ""


def _is_messages(prompt: object) -> bool:
    each = prompt if isinstance(prompt, list) else [None]
    return bool(each) and all(isinstance(message, dict) and _is_text(message.get("content")) for message in each)


def _read(file: Path) -> list:
    """Returns the prompts of a file, one per line. A .jsonl or .ndjson file is split into lines in the same way as the
    files of data=."""
    try:
        if file.suffix.lower() in RECORDS:
            return [_of_json(line, number, file) for number, line in numbered(file)]
        lines = file.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it is not valid UTF-8"
        raise Refused(
            f"sample_prompts={file}: the file cannot be read ({why}). Give another file, or a list such as [a,b]."
        ) from None
    return [line.removesuffix("\r") for line in lines if line.strip()]


def _of_json(line: bytes, number: int, file: Path) -> object:
    record = value_of(line)
    if isinstance(record, BadRecord):
        raise Refused(f"sample_prompts: {file.name}, line {number}: {record}. Fix this line.")
    return record.get("prompt", record.get("messages")) if isinstance(record, dict) else record


def example(tokens: Tokens) -> str:
    """Returns a short prompt for a printed command, in one line: the beginning of the first user message of a
    conversation, or of a text. Validation documents are searched first, then training documents; returns "Hello" if the
    first DOCUMENTS documents of both splits contain no text."""
    for split in (tokens.val, tokens.train):
        for start, stop in pairwise([0, *split.ends[:DOCUMENTS].tolist()]):
            stop = min(stop, start + LONGEST)
            if words := _first_words(_prompt_in(split.ids[start:stop].tolist(), split.learned(start, stop), tokens)):
                return words
    return "Hello"  # none of these documents contains text


def _prompt_in(ids: list[int], learned: np.ndarray, tokens: Tokens) -> str:
    """Returns the first user message of a document. If the document has no user message, returns the text before the
    first learned token. If the first token is learned, or no token is, returns the full text."""
    tokenizer = tokens.tokenizer
    if tokens.template is not None and (turn := user_turn(tokenizer)):
        _, header, rest = tokenizer.decode(ids, skip_special_tokens=False).partition(turn.header)
        message, footer, _ = rest.partition(turn.footer)
        if header and footer:
            return message
    answer = int(learned.argmax()) if len(learned) else 0  # an empty document stands for a missing answer
    return tokenizer.decode(ids[:answer] if answer else ids, skip_special_tokens=True)


def _first_words(text: str) -> str:
    """Returns the first words of a text, at most EXAMPLE characters, without surrounding quotes, which the shell would
    remove."""
    plain = " ".join(printable(text).replace("\N{REPLACEMENT CHARACTER}", " ").split()).strip("'\" ")
    return textwrap.shorten(plain, EXAMPLE, placeholder="").rstrip("'\" ") or plain[:EXAMPLE]


def beginning(micro_batch: MicroBatch) -> Tensor:
    """Returns the token ids of a prompt, (1, T), from the first row of a micro-batch: the tokens before the first
    learned token. Returns the first BEGINNING tokens if the row has no learned token, or if its second token is
    learned, as in plain text."""
    learned = int((micro_batch.labels[0] != IGNORED).int().argmax())
    return micro_batch.input_ids[:1, : learned + 1 if learned else BEGINNING]
