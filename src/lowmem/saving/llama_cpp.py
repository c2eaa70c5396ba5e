"""Compares what llama.cpp computes with a GGUF file with what transformers computes with the folder it was made from.

llama.cpp runs in a process of its own, since an error in native code ends its process. Both models are in host memory,
the one of transformers in fp32.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem.system.errors import Refused

# words, numbers, code, several scripts and whitespace, which tokenizers split in different ways
TEXT = "In 1984, the cost rose by 12.5%: it wasn't news.\n\ndef f(x):\n    return x ** 2  # naïve\n\tДа, 東京!  Ok"
TOP = 20  # the largest log-probabilities of a position, which are compared
# llama.cpp rounds the inputs of products with 16-bit weights to 16 bits, and reads GELU from a table in fp16. How much
# that changes depends on the model, so the tolerance is this many times what 16-bit products change in transformers.
FACTOR = 2.0

Top = list[tuple[int, float]]  # (token, its log-probability)


def is_installed() -> bool:
    return find_spec("xllamacpp") is not None


def compare(file: Path, folder: Path) -> None:
    """Compares the tokens of TEXT, and the log-probabilities of the next token at each of its positions.

    Raises:
        Refused: the tokens are others, or the log-probabilities differ by more than rounding.
    """
    ids = AutoTokenizer.from_pretrained(folder)(TEXT).input_ids
    exact, rounded = _log_probabilities(folder, ids)
    asked = {"file": str(file), "prompts": [*(ids[: end + 1] for end in range(len(ids))), TEXT], "top": TOP}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Refused(f"export_format=gguf: llama.cpp cannot open the file ({done.stderr.strip()[-300:]}).")
    *answers, of_text = json.loads(done.stdout.splitlines()[-1])
    if of_text["tokens"] != len(ids):
        raise Refused(
            f"export_format=gguf: llama.cpp splits a text into {of_text['tokens']} tokens, and this tokenizer into "
            f"{len(ids)}. Leave it out, and convert model/ with llama.cpp's own converter."
        )
    places = torch.tensor([[place, token] for place, one in enumerate(answers) for token, _ in one["top"]]).T
    theirs = torch.tensor([value for one in answers for _, value in one["top"]], dtype=torch.float64)
    off = (theirs - exact[*places]).abs().mean().item()
    tolerance = FACTOR * (rounded[*places] - exact[*places]).abs().mean().item()
    if not off <= tolerance:
        raise Refused(
            f"export_format=gguf: log-probabilities of llama.cpp are {off:.2g} from those of transformers in the mean, "
            f"and rounding explains {tolerance:.2g}. Leave it out, and convert model/ with llama.cpp's own converter."
        )


@torch.no_grad()
def _log_probabilities(folder: Path, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities of the next token, (T, vocabulary) each: computed in fp32, and in 16 bits."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    exact = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map="meta").dtype
    for dtype in (torch.bfloat16,) if stored == torch.bfloat16 else (torch.float16, torch.bfloat16):
        rounded = model.to(dtype)(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        if rounded.isfinite().all():  # fp16 overflows in some models
            break
    return exact, rounded


# The server of llama.cpp listens at a free port of 127.0.0.1, and is asked in its own process.
_CHILD = """
import json, sys
import xllamacpp as llama
asked = json.load(sys.stdin)
params = llama.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = asked["file"], 512, 1, False
params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server, answers = llama.Server(params), []
for prompt in asked["prompts"]:
    said = server.handle_completions({"prompt": prompt, "n_predict": 1, "n_probs": asked["top"], "temperature": 0.0})
    logprobs = said["choices"][0]["logprobs"]  # None after the first bytes of a character
    top = logprobs["content"][0]["top_logprobs"] if logprobs else ()
    answers.append({"tokens": said["usage"]["prompt_tokens"], "top": [(one["id"], one["logprob"]) for one in top]})
print(json.dumps(answers))
"""
