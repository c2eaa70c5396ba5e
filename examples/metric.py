"""An example of a custom metric: python train.py metric=examples.metric.accuracy

A metric is an importable function (model, tokenizer) -> {name: number}. lowmem calls it at the end of every evaluation,
with the model in evaluation mode, on its device and without gradients. Random numbers that it draws do not affect the
training. The results are written to metrics.csv, summary.json, the table and the loggers.
"""

TEXT = "for name in names:\n    print(name)\n"


def accuracy(model, tokenizer) -> dict[str, float]:
    """Returns the share of tokens in TEXT for which the model's most likely token is correct."""
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"].to(model.device)  # (1, T)
    guesses = model(input_ids=ids).logits[:, :-1].argmax(-1)  # predictions of tokens 1 to T - 1
    return {"accuracy": (guesses == ids[:, 1:]).float().mean().item()}
