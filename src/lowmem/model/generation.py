"""Generates text from prompts: for the samples of a run, and for `generate=`.

Each forward pass has a single prompt. The key-value cache of a prompt takes at most 2 x layers x width x length x bytes
per element, where width is the number of key-value heads times the size of a head, and length is the number of tokens
in prompt and continuation. This is less than the activations that training without activation checkpointing stores for
a sequence of this length.
"""

from collections.abc import Callable
from dataclasses import dataclass
from posixpath import commonprefix
from typing import NamedTuple

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lowmem.data.sources import framing
from lowmem.model.loading import positions
from lowmem.system.errors import Refused

# contents of messages; the format of a chat template is derived from their rendered text
QUESTION, ANSWER, NEXT = "a question", "an answer", "the next question"
Prompt = str | list[dict]  # text, or the messages of a conversation


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, chat: bool) -> Tensor:
    """Returns the token ids of a prompt, (1, T) int64 with T >= 1.

    Args:
        tokenizer: encodes a plain text as in training, and messages with its chat template.
        prompt: a text, or messages.
        chat: True: treat a text as a user's message; False: continue a text as it is.

    Raises:
        Refused: the prompt needs a chat template (messages, or a text with `chat`) and the tokenizer has none, or the
            template rejects the messages.
    """
    if isinstance(prompt, str) and not chat:
        ids = framing.prompt_ids(tokenizer, prompt)
    else:
        if tokenizer.chat_template is None:
            raise Refused(
                "prompt, sample_prompts: a prompt has messages, but this model's tokenizer has no chat template. Give "
                "plain text."
            )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        except (TemplateError, ValueError) as error:
            raise Refused(
                f"prompt, sample_prompts: the tokenizer's chat template rejects {prompt} ({error}). Give messages in "
                "the form that the template expects, or plain text."
            ) from None
    # with an empty prompt, generation starts after an end token (0 if the tokenizer has none), like a new document
    return torch.tensor([ids or [tokenizer.eos_token_id or 0]])


def end_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> list[int]:
    """Returns the ids of the tokens that end a generated text: the end tokens of the model and of the tokenizer, the
    token that training appends to a text, and the end-of-turn token of the chat template."""
    own = model.generation_config.eos_token_id
    ends = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id, end_of_turn(tokenizer)}
    return sorted({*ends, *framing.framing_of(tokenizer).end[:1]} - {None})


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the id of the first added token, such as <|im_end|>, that the chat template writes after an answer, or
    None if there is no such token."""
    if tokenizer.chat_template is None:
        return None
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    try:
        behind = tokenizer.apply_chat_template(messages, tokenize=False).rpartition(ANSWER)[2]
    except (TemplateError, ValueError):
        return None
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
    return next((token for token in ids if token in tokenizer.added_tokens_decoder), None)


class UserTurn(NamedTuple):
    """The text that a chat template writes before and after a user's message."""

    header: str
    footer: str


def user_turn(tokenizer: PreTrainedTokenizerBase) -> UserTurn | None:
    """Returns the text that the chat template writes around a user's message, or None if that text cannot be
    derived."""
    roles = zip(("user", "assistant", "user"), (QUESTION, ANSWER, NEXT), strict=True)
    messages = [{"role": role, "content": content} for role, content in roles]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, ValueError):
        return None
    before, _, rest = text.partition(QUESTION)
    after, _, rest = rest.partition(ANSWER)
    between, _, end = rest.partition(NEXT)
    header = commonprefix([before[::-1], between[::-1]])[::-1]  # common suffix of the text before both user messages
    footer = commonprefix([after, end])
    return UserTurn(header, footer) if header and footer else None


@dataclass(frozen=True)
class TextGenerator:
    """Continues prompts with a model, which must be in evaluation mode.

    Args:
        model, tokenizer: objects of transformers.
        device: the device that computes; None: the device of the weights.
        synced: True: other processes have shards of the model. All processes must then call `continuation` together,
            and each process computes forward passes until all have finished their texts.
        stopped: called after each token; returns True to end the text.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device | None = None
    synced: bool = False
    stopped: Callable[[], bool] = lambda: False

    @torch.no_grad()
    def continuation(self, ids: Tensor, tokens: int, temperature: float = 0.0) -> str:
        """Returns the continuation of a prompt, up to an end token. The continuation is empty if the prompt already
        reaches the model's maximum sequence length.

        Args:
            ids: (1, T), token ids of the prompt, on the host.
            tokens: maximum number of new tokens; also limited by the model's maximum sequence length.
            temperature: sampling temperature; 0 for greedy decoding.
        """
        model, tokenizer = self.model, self.tokenizer
        length = min(ids.shape[1] + tokens, positions(model.config) or ids.shape[1] + tokens)
        how = GenerationConfig(
            max_length=length,
            do_sample=temperature > 0,
            temperature=temperature or 1.0,
            top_p=1.0,  # top_p and top_k override the model's generation_config.json
            top_k=50,
            use_cache=True,
            pad_token_id=tokenizer.eos_token_id,
            eos_token_id=end_tokens(tokenizer, model) or None,
        )
        if ids.shape[1] >= length:
            return ""
        on_device = ids.to(self.device or model.device)
        written = model.generate(
            on_device,
            attention_mask=torch.ones_like(on_device),
            generation_config=how,
            stopping_criteria=[lambda *_, **__: self.stopped()],
            synced_gpus=self.synced,
        )
        before, text = (tokenizer.decode(row, skip_special_tokens=True) for row in (ids[0], written[0]))
        # decode the prompt and the new tokens together, because a tokenizer may drop the space before a first token
        return text.removeprefix(before)


def printable(text: str) -> str:
    """Returns a text in which tabs are expanded, and all other unprintable characters except line feeds are replaced by
    U+FFFD. An untrained model may generate any byte."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs())
