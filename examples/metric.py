"""A metric of your own: python train.py metric=examples.metric.accuracy

Any function of (model, tokenizer) -> {name: number} that Python can import from here. It is called at the end of every
evaluation, with the model in evaluation mode on its device and no gradients; what it draws at random changes nothing.
Its numbers go into metrics.csv, summary.json, the table and the loggers.
"""

TEXT = "for name in names:\n    print(name)\n"


def accuracy(model, tokenizer) -> dict[str, float]:
    """The share of a text's tokens that the model holds for the likeliest."""
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"].to(model.device)  # (1, T)
    guesses = model(input_ids=ids).logits[:, :-1].argmax(-1)  # of tokens 1 to T - 1
    return {"accuracy": (guesses == ids[:, 1:]).float().mean().item()}
