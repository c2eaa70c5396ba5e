"""A continuation drawn from the model at the end of the run: one look says whether it learnt anything."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from transformers import PreTrainedTokenizerBase

from lowmem.model import positions

PROMPT = "def "


class Sample(Callback):
    """Draws `tokens` tokens after "def " where the model stands, before Lightning moves it to the host."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: int, seed: int) -> None:
        self.tokenizer, self.tokens, self.seed = tokenizer, tokens, seed
        self.text: str | None = None

    @torch.no_grad()
    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if not self.tokens:
            return
        prompt = self.tokenizer(PROMPT, return_tensors="pt")["input_ids"].to(module.device)  # (1, T)
        module.model.eval()
        room = (positions(module.model.config) or prompt.shape[1] + self.tokens) - prompt.shape[1]
        with torch.random.fork_rng(), trainer.precision_plugin.forward_context():
            torch.manual_seed(self.seed)
            ids = module.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=min(self.tokens, room),
                do_sample=True,
                temperature=0.8,
                pad_token_id=self.tokenizer.eos_token_id,
            )
        module.model.train()
        text = self.tokenizer.decode(ids[0], skip_special_tokens=True).expandtabs()
        # a young model draws any byte, also those that a terminal obeys
        self.text = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
