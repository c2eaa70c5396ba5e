"""Measures how gradient checkpointing, compiled blocks and the chunked loss change the time of a step.

python -m benchmarks.speed               # about a quarter of an hour on two cores

The results are ratios of two runs in the same round. The output layer and the loss are also measured without blocks.
"""

import argparse

from benchmarks.loops import shape
from benchmarks.runner import measure, medians, options_of, ratio, run_train, stored, write

CHECKPOINTING = ("none", "every_layer", "every_k", "sqrt", "selective", "offload", "offload_attention")
# Sequences of 16,384 tokens, for which attention takes most of the time
LONG = ("seq_len=16384", "model.architecture.n_positions=16384", "model.architecture.n_layer=2", "batch_size=1")
LONG += ("max_steps=3", "val_every=3", "val_sequences=1", "sample_tokens=0", "loss=chunked")
# name -> (model of benchmarks.loops, overrides)
ROWS = {
    **{f"checkpointing {c}": ("13.9M", [f"gradient_checkpointing={c}"]) for c in CHECKPOINTING},
    "eager": ("13.9M", []),
    "compiled": ("13.9M", ["compile=blocks"]),
    "eager every_layer": ("13.9M", ["gradient_checkpointing=every_layer"]),
    "compiled every_layer": ("13.9M", ["compile=blocks", "gradient_checkpointing=every_layer"]),
    "eager bf16": ("13.9M", ["precision=bf16"]),
    "compiled bf16": ("13.9M", ["precision=bf16", "compile=blocks"]),
    "long offload": ("13.9M", [*LONG, "gradient_checkpointing=offload"]),
    "long offload_attention": ("13.9M", [*LONG, "gradient_checkpointing=offload_attention"]),
    "tiny full": ("tiny", ["loss=full"]),
    "tiny chunked": ("tiny", ["loss=chunked"]),
    "50k full": ("tiny", ["loss=full", "model.architecture.vocab_size=50257"]),
    "50k chunked": ("tiny", ["loss=chunked", "loss.rows=128", "model.architecture.vocab_size=50257"]),
}
# (row, row that it is compared with, figure, limit for the ratio of the figures; "-": no limit)
LIMITS = (
    ("checkpointing every_layer", "checkpointing none", "seconds_per_step", "<= 1.40"),
    ("checkpointing sqrt", "checkpointing none", "seconds_per_step", "<= 1.40"),
    ("checkpointing sqrt", "checkpointing every_layer", "seconds_per_step", "no more"),
    ("checkpointing every_k", "checkpointing none", "seconds_per_step", "-"),
    ("checkpointing selective", "checkpointing none", "seconds_per_step", "-"),
    ("checkpointing offload", "checkpointing none", "seconds_per_step", "-"),
    ("compiled", "eager", "seconds_per_step", "-"),
    ("compiled every_layer", "eager every_layer", "seconds_per_step", "-"),
    ("compiled bf16", "eager bf16", "seconds_per_step", "-"),
    ("long offload_attention", "long offload", "seconds_per_step", "-"),
    ("tiny chunked", "tiny full", "seconds_per_step", "<= 1.10"),
    ("50k chunked", "50k full", "seconds_per_step", "<= 0.95"),
    ("50k chunked", "50k full", "activations", "-"),
)


def row(name: str) -> dict:
    model, typed = ROWS[name]
    keys = {line.split("=")[0] for line in typed}
    shipped = [line for line in shape(model) if line.split("=")[0] not in keys]
    summary = run_train([*shipped, "logger=none", *typed])
    return {"seconds_per_step": summary["seconds_per_step"]} | summary["peak_bytes_by_category"]


def loss_alone() -> dict[str, float]:
    """Measures the output layer and the loss without blocks, for 1024 tokens, a width of 192 and a vocabulary of 50257.

    Returns:
        Figures of the chunked loss, divided by the figures of the full loss: "time" (median), "bytes" (peak, without
        inputs, weights and the buffers in which gradients are accumulated), and "bytes_beside_the_gradient" (also
        without the gradient of the output layer that is returned to autograd).
    """
    import time
    from statistics import median
    from types import SimpleNamespace

    import torch
    from torch import nn

    from lowmem.data.loader import MicroBatch
    from lowmem.memory.ledger import Ledger
    from lowmem.memory.tracker import StorageTracker
    from lowmem.techniques.loss import cross_entropy as losses

    class Head(nn.Module):
        """A model without blocks: its hidden states are a parameter."""

        def __init__(self) -> None:
            super().__init__()
            self.head, self.config = nn.Linear(192, 50257, bias=False), SimpleNamespace()
            self.hidden = nn.Parameter(torch.randn(8, 128, 192))

        def get_output_embeddings(self) -> nn.Module:
            return self.head

        def base_model(self, **_) -> SimpleNamespace:
            return SimpleNamespace(last_hidden_state=self.hidden * 1.0)

        def forward(self, **_) -> SimpleNamespace:
            return SimpleNamespace(logits=self.head(self.base_model().last_hidden_state))

    model, labels = Head(), torch.randint(0, 50257, (8, 128))
    batch = MicroBatch(labels, labels)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    outside = [t for p in model.parameters() for t in (p, p.grad)] + [labels]
    ledger = Ledger()
    ledger.own("weights", lambda: outside, "host")
    kinds = {"full": losses.full, "chunked": losses.Chunked(128)}
    seconds, peak = {kind: [] for kind in kinds}, {}
    for _ in range(9):
        for kind, loss in kinds.items():
            start = time.perf_counter()
            loss(model, batch).backward()
            seconds[kind].append(time.perf_counter() - start)
    for kind, loss in kinds.items():
        with StorageTracker(ledger.storages()) as tracker:
            loss(model, batch).backward()
        peak[kind] = max(point.total for point in tracker.timeline())
    gradient = model.head.weight.nbytes  # both losses return this gradient to autograd
    times = median(b / a for a, b in zip(seconds["full"][1:], seconds["chunked"][1:], strict=True))
    return {
        "time": times,
        "bytes": peak["chunked"] / peak["full"],
        "bytes_beside_the_gradient": (peak["chunked"] - gradient) / (peak["full"] - gradient),
    }


def table(results: dict, alone: dict) -> str:
    lines = ["| row | against | figure | ratio | asked |", "|---|---|---|---|---|"]
    lines += [f"| {a} | {b} | {key} | {ratio(results, a, b, key):.2f} | {limit} |" for a, b, key, limit in LIMITS]
    lines += [
        f"| loss alone, 50k, chunked | full | seconds | {alone['time']:.2f} | <= 0.95 |",
        f"| loss alone, 50k, chunked | full | peak bytes | {alone['bytes']:.2f} | <= 0.25 |",
        f"| loss alone, 50k, chunked | full | peak bytes besides the head's gradient "
        f"| {alone['bytes_beside_the_gradient']:.2f} | - |",
    ]
    seconds, activations = medians(results, "seconds_per_step"), medians(results, "activations")
    lines += ["", "| row | seconds per step | activations at the peak, MiB |", "|---|---|---|"]
    # allocations of compiled code are not tracked on a CPU
    mib = {name: "-" if "compiled" in name else f"{size / 2**20:.1f}" for name, size in activations.items()}
    return "\n".join(lines + [f"| {name} | {seconds[name]:.3f} | {mib[name]} |" for name in results])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--add", nargs="*", choices=ROWS, help="measure these rows; keep the others")
    options = options_of(parser, lambda name: loss_alone() if name == "alone" else row(name))
    names = options.add or [*ROWS, "alone"]
    results = measure({name: ["-m", "benchmarks.speed", "--row", name] for name in names}, options.rounds)
    if options.add:
        before = stored("speed")
        results = before["rounds"] | {"alone": before["alone"]} | results
    alone = results.pop("alone")
    middle = sorted(alone, key=lambda figures: figures["time"])[len(alone) // 2]
    write("speed", {"rounds": results, "alone": alone}, table(results, middle))


if __name__ == "__main__":
    main()
