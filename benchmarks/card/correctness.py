"""Stage 2 tests that a card computes the same numbers as a CPU.

It compares the losses and weights of every technique and of mixed recipes with plain fp32 on the CPU. Bit for bit, it
compares master weights and offloaded boundaries whose copies overlap with computation with copies that are waited for,
and resumed runs with uninterrupted ones. The reference, the runs and the tolerances come from the tests (tests/).
"""

import os
from collections.abc import Mapping
from functools import partial

from benchmarks.card.case import Case, Here, Size, Stage
from benchmarks.techniques import CHOICES

STAGE = Stage(2, "correctness", __name__, seconds=450, together=6, gib=2)
COMPILED = ("optim=adamw4bit",)  # compiles a kernel per shape, so it is tested on one matrix
INDUCTOR = "gradient_checkpointing.backend=inductor"  # takes too long for the tests
MIXED = (  # recipes of the experiments, and other combinations that are usual on a card
    "precision=16-master optim=adamw8bit gradient_checkpointing=every_layer loss=chunked accumulation=fixed",
    "precision=bf16-master optim=adamw8bit gradient_checkpointing=offload loss=chunked accumulation=effective_batch",
    "precision=16 optim=adam8bit gradient_checkpointing=every_layer accumulation=fixed",
    "precision=bf16-sr optim=adafactor gradient_checkpointing=selective loss=chunked",
    "precision=32 optim=adafactor optim.in_backward=true gradient_checkpointing=offload",
    "precision=bf16 optim=lion8bit gradient_checkpointing=sqrt loss=chunked",
    "precision=bf16-true optim=muon gradient_checkpointing=every_k",
)
RESUMED = ("optim=adamw", "precision=bf16-sr", "precision=16-master", "precision=16", "optim=paged_adamw8bit")
MASTERS = ("16-master norm", "bf16-master norm", "bf16-master off")  # clipping decides when master weights step


def cases(size: Size) -> Mapping[str, Case]:
    few = None if size.whole else 1
    found = {f"masters, {way}: copies that overlap": Case(partial(masters, way=way), 90) for way in MASTERS[:few]}
    found["boundaries: copies that overlap"] = Case(boundaries, 150)
    techniques = [*MIXED, "precision=32", *(choice for choice in CHOICES if choice not in COMPILED)]
    found |= {recipe: Case(partial(oracle, recipe=recipe), 90) for recipe in techniques[:few]}
    found |= {f"{t}: stopped and resumed": Case(partial(resumed, technique=t), 120) for t in RESUMED[:few]}
    if size.whole:
        generated = partial(oracle, recipe="gradient_checkpointing=budget", more=(INDUCTOR,))
        found["gradient_checkpointing=budget: as shipped"] = Case(generated, 180)
        found |= {choice: Case(partial(matrix, optim=choice.split("=")[1]), 180) for choice in COMPILED}
    return found


def oracle(here: Here, recipe: str, more: tuple[str, ...] = ()) -> dict:
    """Trains four steps and returns how far updates and losses are from the oracle's, and the tolerances."""
    import parity
    from tolerances import EXACT, allowed, within

    techniques = recipe.split()
    cfg = here.config(*parity.overrides(*techniques), *more)
    off, most = parity.deviations(cfg, *techniques), allowed(*techniques, on_card=here.on_card)
    right = within(off, most)
    if here.on_card and recipe == "precision=tf32":  # a result as close as fp32's was computed in fp32, not in TF32
        right = right and not within(off[:2], EXACT)
    return {"off": off, "allowed": most, "right": right}


def matrix(here: Here, optim: str) -> dict:
    """Returns the error of torchao's quantized optimizer state on one matrix after 20 steps."""
    import parity
    from tolerances import LOW_BIT_STATE

    off = parity.off_on_one_matrix(here.config(f"optim={optim}", "lr=1e-2"))
    return {"off": [off], "allowed": [LOW_BIT_STATE[optim]], "right": off <= LOW_BIT_STATE[optim]}


def masters(here: Here, way: str) -> dict:
    """Compares master weights whose copies overlap and use few small slots, bit for bit, with three other runs.

    These are a run with the usual slots, a run that waits for every copy, and a naive loop that keeps two full models.
    """
    import two_models
    from made_up import SlowLane

    deterministic()
    precision, clip = way.split()
    cfg = two_models.configured(here.config, precision, "adamw8bit", clip, "fixed", "linear", "loss=chunked")

    def lane():
        import torch

        from lowmem.system.copy_lanes import CardLane

        return CardLane(torch.device("cuda")) if here.on_card else SlowLane()

    overlapping = two_models.ours(cfg, lane())
    found = {
        "as with the run's own slots": two_models.equal(overlapping, two_models.ours(cfg)),
        "as with copies that are waited for": two_models.equal(overlapping, two_models.ours(cfg, InTurn(lane()))),
        "as the naive loop": two_models.equal(overlapping, two_models.naive(cfg)),
    }
    return {"same bits": found, "right": all(found.values())}


class InTurn:
    """A lane that waits for every copy, so that nothing overlaps."""

    def __init__(self, lane) -> None:
        self.lane = lane
        self.staging = lane.staging

    def mark(self):
        mark = self.lane.mark()
        mark.synchronize()
        return mark

    def copy(self, to, source, after):
        landed = self.lane.copy(to, source, after)
        landed.synchronize()
        return landed

    def hold(self, until) -> None:
        until.synchronize()
        self.lane.hold(until)


RUN = ("max_steps=4", "save_every=2", "val_sequences=4", "scheduler=constant", "log_every=1", "plan=off")


def boundaries(here: Here) -> dict:
    """Compares offloaded boundaries, bit for bit and with dropout, with boundaries that stay on the card.

    On a card they are also compared with copies in the computation's own stream, which cannot overlap with it.
    """
    import torch

    from lowmem.techniques.gradient_checkpointing import boundary
    from same import last, same

    deterministic()

    def final_weights(folder: str, checkpointing: str) -> dict:
        here.train(*here.size.bits, *RUN, f"gradient_checkpointing={checkpointing}", folder=folder)
        return last(here.folder / folder)["state_dict"]

    resident, overlapping = final_weights("resident", "every_layer"), final_weights("overlapping", "offload")
    if here.on_card:
        boundary._stream = torch.cuda.current_stream  # makes the copies in the computation's own stream
    in_turn = final_weights("in turn", "offload")
    found = {
        "as boundaries that stay": same(overlapping, resident),
        "as copies in the computation's own stream": same(overlapping, in_turn),
    }
    return {"same bits": found, "right": all(found.values())}


def resumed(here: Here, technique: str) -> dict:
    """Compares a run of four steps, bit for bit, with two steps, a checkpoint and two more."""
    from same import last, same

    deterministic()
    here.config(technique)
    typed = [*here.size.bits, *RUN, technique]
    here.train(*typed, folder="whole")
    here.train(*typed, "max_steps=2", folder="part")
    here.train(f"resume={here.folder / 'part'}", *typed, folder="again")
    one, other = last(here.folder / "whole"), last(here.folder / "again")
    found = {key: same(one[key], other[key]) for key in one}
    return {"same bits": found, "right": all(found.values())}


def deterministic() -> None:
    """Makes torch use deterministic algorithms.

    By default attention's backward pass adds in the order in which its blocks end. With `warn_only` it warns and still
    does so (aten/src/ATen/native/transformers/cuda/attention_backward.cu).
    """
    import torch

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)


def says(results: Mapping[str, dict]) -> str:
    wrong = [name for name, one in results.items() if not one["right"]]
    return f"{len(results) - len(wrong)} of {len(results)} right" + (f"; not {'; '.join(wrong)}" if wrong else "")


def table(results: Mapping[str, dict]) -> str:
    lines = ["| case | off by (matrices, vectors, losses), or the same bits | allowed | right |", "|---|---|---|---|"]
    for name, one in results.items():
        if "off" in one:
            off, most = (", ".join(f"{value:.1e}" for value in one[key]) for key in ("off", "allowed"))
        else:
            off, most = (
                "; ".join(f"{what}: {'yes' if is_so else 'NO'}" for what, is_so in one["same bits"].items()),
                "-",
            )
        lines.append(f"| {name} | {off} | {most} | {'yes' if one['right'] else 'NO'} |")
    return "\n".join(lines)
