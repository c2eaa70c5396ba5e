"""Opens exported folders with transformers 4. test_transformers_4.py runs this script in a separate environment.

For each folder, writes `theirs.pt` with the model's logits for the ids in `ids.pt`, and the tokenizer's tokens for
TEXT.
"""

import sys
from pathlib import Path

TEXT = "the cat <turn> sat"

if __name__ == "__main__":
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, __version__

    assert __version__.startswith("4."), __version__
    for folder in map(Path, sys.argv[1:]):
        ids = torch.load(folder / "ids.pt")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        with torch.no_grad():
            logits = model(ids).logits
        tokens = AutoTokenizer.from_pretrained(folder)(TEXT).input_ids
        torch.save({"logits": logits, "tokens": tokens}, folder / "theirs.pt")
