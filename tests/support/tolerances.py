"""Tolerances of the test suite, with their reasons. For most of them, a deliberately wrong variant in the tests must
exceed the tolerance."""

from pair_oracle import LOSSES

# fp64 sums in another order: 1e3 terms, each with a relative error of 1e-16, amplified by AdamW's division by sqrt(v)
FP64 = 1e-10
# fp32 sums in another order (a matrix product as a whole and in chunks of rows): error relative to the largest element
FP32_REORDERED = 1e-5
# bf16 has 8 significant bits: a rounding changes an element by 2**-9 = 0.002 of it on average, at most by 2**-8. A
# gradient goes through a chain of about ten roundings.
BF16 = 0.03
# Relative error after a few steps of AdamW: the fused and the looped implementation round in different orders, and a
# step divides by sqrt(v)
ADAMW_REORDERED = 3e-4
# A window's gradient in four micro-batches compared with its gradient in one micro-batch: norm of the difference
# divided by the norm of the gradient, over all parameters. fp32: sums over about 100 tokens in another order, about 10
# roundings of 2**-24 (measured: 3; allowed: 16). bf16: the gradient is rounded once in total and once per micro-batch.
# A kernel may also sum in another order for another shape; then an earlier product may round to the adjacent bf16
# number, an error of two roundings. Together that is four roundings of 2**-9 (measured: 1.4 with any kernel). Wrong
# variants: 0.05 if each micro-batch has its own z, 0.06 if one micro-batch has a tenth less weight.
WINDOW_IN_MICRO_BATCHES = {"fp32": 16 * 2**-24, "bf16": 4 * 2**-9}
# fp16 has 11 significant bits: 2**-12 = 0.00025 per rounding on average, in a chain of about ten roundings
FP16 = 0.004
# Smallest allowed share of a product's elements that equal the exact value rounded once to 16 bits. An fp32 sum has an
# error of about 1e-6 of its terms. It rounds to the wrong neighbor if the exact value is that close to the midpoint of
# two adjacent fp16 numbers, which are 5e-4 apart (measured share: at least 0.997, also with torch's kernels). If the
# sum is rounded twice, a quarter of the elements differ.
ROUNDED_ONCE = 0.99
# Allowed relative error of the total update after four steps, compared with the fp32 oracle: technique -> (error of
# matrices, error of vectors). AdamW divides each gradient by its magnitude, so a relative error in a small gradient
# matters as much as in a large gradient. The tolerance of two techniques together is the sum of their tolerances. The
# wrong variants of test_parity.py have errors of at least 0.3 on matrices (a short window with the weight of a full
# window, a dropped micro-batch), or of 3 on vectors (weight decay on norms).
EXACT = (ADAMW_REORDERED, ADAMW_REORDERED)
UPDATE = {
    # every product of the chain is rounded, by about 2**-12 in fp16 and 2**-9 in bf16
    "precision=16": (0.04, 0.04),
    "precision=bf16": (0.15, 0.15),
    # products also read rounded weights, but the masters, which the steps update, are fp32 (measured: 0.045, 0.074 in
    # fp16; 0.092, 0.166 in bf16)
    "precision=16-master": (0.06, 0.1),
    "precision=bf16-master": (0.15, 0.2),
    # a weight just below 1 is rounded by up to 2**-12 (fp16) or 2**-9 (bf16): with steps of 0.01, up to 0.02 or 0.2 of
    # a step
    "precision=16-true": (0.1, 0.1),
    "precision=bf16-true": (0.2, 0.25),
    # stochastic rounding has an error of up to a full spacing, rounding to nearest of up to half a spacing
    "precision=bf16-sr": (0.2, 0.6),
    # 8-bit state: one of 256 values per element, relative to the largest element of its block. The vectors are too
    # small for 8-bit state; their error comes from the matrices (measured: at most 0.0124, 0.0056). The wrong variant
    # that decays weights after the update: 0.023, 0.012.
    "optim=adam8bit": (0.015, 0.01),
    "optim=adamw8bit": (0.015, 0.01),
    "optim=paged_adamw8bit": (0.015, 0.01),
    # Lion updates by the sign of the momentum: an element whose momentum is near 0 may be wrong by twice the step
    "optim=lion8bit": (0.2, 0.2),
    # torch's iterations are in bf16, the oracle's in fp64
    "optim=muon": (0.05, 0.05),
    # torch.compile's partitioner decomposes operators; the decomposed operators round differently
    "compile.activation_memory_budget": (1e-3, 1e-3),
}
# Only on a card: the inputs of TF32 products have 10 mantissa bits, like fp16; the other operators compute in fp32
ON_CARD = {"precision=tf32": (0.04, 0.04)}
# Adafactor's eps is negligible, so its first update of a vector is the sign of the gradient times the step. If rounding
# changes the sign, the element has an error of twice the step. If gradients are normally distributed and have a
# relative error of FP16, a share of FP16 / pi of them has an unreliable sign: on average 0.6 of the vectors' 448
# elements, so one wrong sign must be allowed. (One element has a gradient of 2e-9, which is 1/128 000 of the RMS of the
# other elements. One order of roundings flips its sign, and the error after four steps is 0.073; another order does
# not, and the error is 0.002. AdamW, whose eps is 1e-8, has an error of 0.033.)
ONE_SIGN = 2 / 448**0.5
# Added to the tolerance of fp16 with an adapter. B of an adapter starts at zero, and so does the gradient of A: the
# rounded products have factors much smaller than the weights (measured errors of matrices in fp16: 0.043 with LoRA,
# 0.070 with a 4-bit base; in fp32, both are within EXACT)
LOW_RANK = 0.04
# The oracle computes a window's loss at the weights of the run. UPDATE already bounds the errors of the weights, and
# their effect on later losses varies: a large step of plain SGD or a wrong sign multiplies it. So the optimizer does
# not matter here, only the rounding of products. The error of the loss, a mean over tokens, may be this share of the
# error that UPDATE allows on matrices (measured: at most 1/390 with bf16, 1/920 with fp16, 1/810 in fp32). A dropped
# micro-batch gives an error of 0.27, and a loss that is summed in bf16 an error of 0.03; bf16-true is allowed 0.001.
OF_LOSS = 1 / 200
# Replaces OF_LOSS for a preference loss, which is not a mean over tokens. It depends on differences of sums over about
# ten tokens, times a beta of 2, and may be near zero although its rounding error is not (measured: at most 1/12 of the
# update's error with bf16, in IPO, which squares the difference; 1/100 in fp32). If chosen and rejected answers are
# exchanged, the loss is off by at least a fifth.
OF_PAIRS = 1 / 10
# Factor on the tolerance of vectors, for a preference loss in fp16. Its gradient is a difference of two gradients: if
# they cancel, their rounding errors remain. The tolerance of fp16 alone does not include that (measured on vectors:
# 0.051; fp16 alone allows 0.040).
DIFFERENCE = 1.5
# Relative errors with torch.compile: of a gradient if only its partitioner is used, and of a loss after several steps
# if code is generated
PARTITIONED, GENERATED = 1e-5, 1e-4
# torchao's 4-bit state: one of 16 values per element. Error of one matrix's total update after 20 steps (measured:
# 0.20). If every second gradient is replaced by zeros, the error is at least 0.4.
LOW_BIT_STATE = {"adamw4bit": 0.25}
# fp32 sums over a window's micro-batches compared with one sum over the large batch: error of the weights after plain
# SGD
SGD_FP32 = 1e-6


PAIRS = {f"loss={name}" for name in LOSSES}


def allowed(*techniques, on_card=False):
    """Returns the tolerances of a combination of techniques: (update of matrices, update of vectors, loss of a
    window)."""
    known = UPDATE | (ON_CARD if on_card else {})
    if "weights=streamed" in techniques and not any(one.startswith("precision=") for one in techniques):
        techniques += ("precision=bf16-master",)  # parity.WITH adds bf16-master; streaming itself changes no bits
    each = [known.get(technique, EXACT) for technique in techniques]
    matrices, vectors = (sum(parts) for parts in zip(*each, strict=True))
    if {"precision=16", "optim=adafactor"} <= {*techniques}:
        vectors = max(vectors, ONE_SIGN)
    if "precision=16" in techniques and any(
        technique.startswith("adapter=") for technique in {*techniques} - {"adapter=none"}
    ):
        matrices += LOW_RANK
    rounded = [known.get(technique, EXACT)[0] for technique in techniques if not technique.startswith("optim=")]
    of_pairs = any(technique in PAIRS for technique in techniques)
    if of_pairs and "precision=16" in techniques:
        vectors *= DIFFERENCE
    return matrices, vectors, (OF_PAIRS if of_pairs else OF_LOSS) * max([EXACT[0], *rounded])


def within(found, most):
    return all(one <= other for one, other in zip(found, most, strict=True))
