"""Compares llama.cpp, which reads a GGUF file, with transformers, which reads the original folder: their tokens and
their log-probabilities. `gguf.py` calls `compare`.

llama.cpp runs in a separate process, because a crash in native code would end this process. Both models are in host
memory. transformers computes in fp32 first, and then in 16 bits, which measures the effect of rounding.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lowmem.system.errors import Refused

# words, numbers, code, several scripts and whitespace, which tokenizers split differently
TEXT = "In 1984, the cost rose by 12.5%: it wasn't news.\n\ndef f(x):\n    return x ** 2  # naïve\n\tДа, 東京!  Ok"
TOP = 20  # at each position, the log-probabilities of this many tokens are compared: llama.cpp's most likely ones
# Log-probabilities differ because of rounding: llama.cpp rounds the inputs of matmuls with 16-bit weights to 16 bits,
# and reads GELU from a table in fp16. The size of the rounding error depends on the model. So the tolerance is FACTOR
# times the mean difference between an fp32 model and a 16-bit model in transformers.
FACTOR = 2.0
CONTEXT = 512  # context length of llama.cpp, in tokens
PARTS = 6  # number of prefixes of TEXT whose tokenization by llama.cpp is checked
SAME = 1e-3  # nats: largest allowed difference between results of llama.cpp for a prefix as a text and as token ids


def is_installed() -> bool:
    return find_spec("xllamacpp") is not None


def compare(file: Path, folder: Path) -> None:
    """Compares the tokens of PARTS prefixes of a text (see `_tokenized`), and the log-probabilities of the next token
    at each position of the text.

    Tokens are compared indirectly: llama.cpp reads each prefix as a text, and as the token ids that transformers gives.
    Both inputs must give the same number of tokens, and log-probabilities of the next token that differ by at most
    SAME.

    Args:
        file: the GGUF file.
        folder: the folder from which the file was converted.

    Raises:
        Refused: llama.cpp cannot open the file, tokenizes a prefix differently from transformers, or computes
            log-probabilities that differ by more than rounding explains.
    """
    texts, tokens = _tokenized(folder)
    ids = tokens[-1]
    exact, rounded = _log_probabilities(folder, ids)
    prompts = [*(ids[: end + 1] for end in range(len(ids))), *tokens, *texts]
    asked = json.dumps({"file": str(file), "prompts": prompts, "top": TOP, "context": CONTEXT})
    done = subprocess.run([sys.executable, "-c", _CHILD], input=asked, capture_output=True, text=True)
    if done.returncode:
        errors = [line.partition(" E ")[2] for line in done.stderr.splitlines() if " E " in line]
        raise Refused(f"llama.cpp cannot compute with the file ({errors[0].strip() if errors else done.returncode}).")
    answers = json.loads(done.stdout.splitlines()[-1])
    of_tokens, of_texts = answers[len(ids) : -len(texts)], answers[-len(texts) :]
    for text, one, other in zip(texts, of_tokens, of_texts, strict=True):
        if one["tokens"] != other["tokens"] or _apart(one, other) > SAME:
            raise Refused(f"llama.cpp splits this text into other tokens: {text[-40:]!r}.")
    places = torch.tensor([[place, token] for place, one in enumerate(answers[: len(ids)]) for token, _ in one["top"]])
    theirs = torch.tensor([value for one in answers[: len(ids)] for _, value in one["top"]], dtype=torch.float64)
    off = (theirs - exact[*places.T]).abs().mean().item()
    tolerance = FACTOR * (rounded[*places.T] - exact[*places.T]).abs().mean().item()
    if not off <= tolerance:
        raise Refused(
            f"log-probabilities of llama.cpp differ from those of transformers by {off:.2g} in the mean, and rounding "
            f"explains {tolerance:.2g}."
        )


def _tokenized(folder: Path) -> tuple[list[str], list[list[int]]]:
    """Returns PARTS prefixes of a text, the last of which is the full text, and the token ids of each prefix. The text
    is TEXT with the tokenizer's end token, shortened until its tokens fit CONTEXT and the model's context."""
    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    text = TEXT + (tokenizer.eos_token or "")  # also check a special token, which must not be split
    while len(tokenizer(text).input_ids) > min(CONTEXT, config.max_position_embeddings):
        text = text[: len(text) // 2]
    texts = [text[: len(text) * part // PARTS] for part in range(1, PARTS + 1)]
    return texts, [tokenizer(one).input_ids for one in texts]


def _apart(one: dict, other: dict) -> float:
    """Returns the largest difference between the log-probabilities of tokens that are in both results; 0 if no token is
    in both. A result of llama.cpp has no tokens if the next token is an incomplete character."""
    theirs = dict(other["top"])
    return max((abs(value - theirs[token]) for token, value in one["top"] if token in theirs), default=0.0)


@torch.no_grad()
def _log_probabilities(folder: Path, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns two (T, vocabulary) tensors in float64: the log-probabilities of the next token, computed in fp32 and in
    16 bits."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    exact = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    stored_in_bf16 = AutoConfig.from_pretrained(folder).dtype == torch.bfloat16
    for dtype in (torch.bfloat16,) if stored_in_bf16 else (torch.float16, torch.bfloat16):
        rounded = model.to(dtype)(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        if rounded.isfinite().all():
            break
        # Some models overflow in fp16. Their weights may have overflowed, too, so load them again.
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return exact, rounded


# The child process starts llama.cpp's server, which listens on a free port of 127.0.0.1, and sends it the prompts.
_CHILD = """
import json, sys
import xllamacpp as llama
asked = json.load(sys.stdin)
params = llama.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = asked["file"], asked["context"], 1, False
params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server, answers = llama.Server(params), []
for prompt in asked["prompts"]:
    said = server.handle_completions({"prompt": prompt, "n_predict": 1, "n_probs": asked["top"], "temperature": 0.0})
    logprobs = said["choices"][0]["logprobs"]  # None if the token is an incomplete character
    top = logprobs["content"][0]["top_logprobs"] if logprobs else ()
    answers.append({"tokens": said["usage"]["prompt_tokens"], "top": [(one["id"], one["logprob"]) for one in top]})
print(json.dumps(answers))
"""
