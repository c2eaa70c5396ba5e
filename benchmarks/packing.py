"""Tests whether packed documents affect each other, for every family of causal language models of transformers. The
results of a family must be exact, or the family must be refused.

python -m benchmarks.packing          # some minutes on one core
python -m benchmarks.packing gemma2   # only this family, printed and not saved

Models are small, as in `architectures.py`, in fp32 and without dropout. Some documents are longer than the sliding
windows of attention. Logits and gradients of packed rows, and of padded rows without a mask, are compared with the
results for a separate row per document. An error is the largest absolute difference, divided by the largest absolute
value among the results for separate rows. `exact` and `refused` are decisions of the check that a run makes before it
trains; if the errors of packed rows contradict the decision, the verdict is `wrong`. It is also `wrong` if the decision
is `exact` but the small model lacks a kind of block that the family has. Families that are not causal are refused.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.architectures import (
    IMPOSSIBLE,
    VOCABULARY,
    _answer,
    _prepare,
    all_kinds,
    build_module,
    configured,
    shrunk,
)
from benchmarks.runner import write
from lowmem.data.loader import IGNORED, MicroBatch
from lowmem.model import packed_attention
from lowmem.model.checks import check_causal
from lowmem.model.document_attention import BY_DOCUMENT, MASKED
from lowmem.system.errors import Refused
from lowmem.techniques.loss.cross_entropy import full

LENGTHS = (11, 2, 17, 10)  # lengths of the documents of a row, in tokens
ROWS = 2
EXACT = 1e-5  # largest accepted relative error; fp32 sums in another order differ by less
# family -> why it cannot train on rows of these lengths; part of the verdict
NOT_MEASURED = {"reformer": "it trains only rows of whole chunks, and documents have other lengths"}
COLUMNS = ("verdict", "attention", "logits", "gradients", "padded logits", "padded gradients")


def packed(documents: list[Tensor]) -> MicroBatch:
    ids = torch.cat(documents).view(ROWS, -1)
    places = torch.cat([torch.arange(len(document)) for document in documents]).view(ROWS, -1)
    return MicroBatch(ids, torch.cat([_labels(document) for document in documents]).view(ROWS, -1), places)


def padded(documents: list[Tensor]) -> MicroBatch:
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    labels = [_labels(document) for document in documents]
    return MicroBatch(ids, torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED))


def _labels(document: Tensor) -> Tensor:
    return torch.cat([document[1:], torch.tensor([IGNORED])])


def computed(model: PreTrainedModel, batches: list[MicroBatch]) -> tuple[Tensor, Tensor]:
    """Returns the logits (n, V) at the n positions with a label, and a vector with the gradients of all parameters,
    summed over the batches."""
    model.zero_grad()
    logits = []
    for batch in batches:
        full(model, batch).backward()
        with torch.no_grad():
            logits.append(model(**batch.inputs, use_cache=False).logits[batch.labels != IGNORED])
    return torch.cat(logits), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def off(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def measured(architecture: dict) -> dict[str, str | float]:
    model = build_module(configured(architecture, "data.packing=documents"))[0].model
    check_causal(model)
    model.eval()
    draw = torch.Generator().manual_seed(0)
    documents = [torch.randint(4, VOCABULARY - 1, (length,), generator=draw) for length in LENGTHS * ROWS]
    with packed_attention.own_mask(model):
        right = computed(model, [padded([document]) for document in documents])
        alone = computed(model, [padded(documents)])  # padded rows have no mask of documents, as in a run
    row = packed(documents)
    try:
        packed_attention.verify(model, row.input_ids)
        apart = True
    except Refused:
        apart = False
    errors = [off(a, b) for a, b in zip((*computed(model, [row]), *alone), right * 2, strict=True)]
    verdict = "exact" if apart else "refused"
    if apart and max(errors[:2]) > EXACT:
        verdict = "wrong: taken"
    if not apart and max(errors[:2]) < EXACT:
        verdict = "wrong: refused"
    if verdict == "exact" and (kinds := all_kinds(architecture)).startswith("wrong"):
        verdict = kinds
    taken = packed_attention.attention_taken(model)
    taken = {BY_DOCUMENT: "sdpa, by document", MASKED: "sdpa, mask"}.get(taken, taken)
    return dict(zip(COLUMNS, (verdict, taken, *errors), strict=True))


def family(model_type: str) -> dict[str, str | float]:
    """Returns a dict that maps the name of a column to its cell. If the family could not be measured, there is only the
    column "verdict", which says why."""
    if model_type in IMPOSSIBLE:
        return {"verdict": f"not built: {IMPOSSIBLE[model_type]}"}
    if model_type in NOT_MEASURED:
        return {"verdict": f"not measured: {NOT_MEASURED[model_type]}"}
    try:
        architecture = shrunk(model_type)
    except Exception as error:
        return {"verdict": f"not built: {type(error).__name__}"}
    answer = _answer(measured, architecture)
    return {"verdict": answer} if isinstance(answer, str) else answer


def table(families: Mapping[str, Mapping]) -> str:
    """Returns the counts of verdicts, a table with one row per measured family, and the verdicts of the other
    families."""
    counts = Counter(row["verdict"].split(":")[0] for row in families.values())
    lines = [", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()) + ".", ""]
    lines += ["| family | " + " | ".join(COLUMNS) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    lines += [f"| {name} | " + " | ".join(_cells(row)) + " |" for name, row in families.items() if len(row) > 1]
    return "\n".join([*lines, "", *(f"- {name}: {row['verdict']}" for name, row in families.items() if len(row) == 1)])


def _cells(row: Mapping) -> Iterator[str]:
    return (value if isinstance(value, str) else f"{value:.0e}" for value in row.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    names = parser.parse_args().families
    _prepare()
    families = {}
    for name in names or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        families[name] = family(name)
        print(f"{name:<28}{families[name]['verdict'][:80]}", flush=True)
    if names:
        print(table(families))
        return
    write("packing", {"families": families}, table(families))


if __name__ == "__main__":
    main()
