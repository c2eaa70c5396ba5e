"""Tolerances of the test suite, with their reasons. For most tolerances, a test checks that a deliberately wrong
variant exceeds the tolerance."""

from pair_oracle import LOSSES

# fp64 sums in another order: 1e3 terms, each with a relative error of 1e-16, amplified by AdamW's division by sqrt(v)
FP64 = 1e-10
# fp32 sums in another order (a matrix product as a whole and in chunks of rows): error relative to the largest element
FP32_REORDERED = 1e-5
# bf16 has 8 significant bits: a rounding has a relative error of about 2**-9 = 0.002 on average, and of at most 2**-8.
# A gradient goes through a chain of about ten roundings.
BF16 = 0.03
# Relative error after a few steps of AdamW: the fused and the looped implementation compute in different orders, and
# the division by sqrt(v) amplifies the difference
ADAMW_REORDERED = 3e-4
# The gradient of a window of four micro-batches, compared with the gradient of the same rows in one micro-batch: norm
# of the difference divided by the norm of the gradient, over all parameters. fp32: sums over about 100 tokens in
# another order, about 10 roundings of 2**-24 (measured: 3 of them; allowed: 16). bf16: the gradient is rounded once in
# total and once per micro-batch. A kernel may also sum in another order for another shape; then an earlier product may
# round to the adjacent bf16 number, an error of two roundings. Together, these are four roundings of 2**-9 (measured:
# at most 1.4 of them with any kernel). Errors of wrong variants: 0.05 if each micro-batch has its own z, and 0.06 if
# the weight of one micro-batch is smaller by a tenth.
WINDOW_IN_MICRO_BATCHES = {"fp32": 16 * 2**-24, "bf16": 4 * 2**-9}
# fp16 has 11 significant bits: 2**-12 = 0.00025 per rounding on average, in a chain of about ten roundings
FP16 = 0.004
# Smallest allowed share of the elements of a matrix product that equal the exact value rounded once to 16 bits. An fp32
# sum has an error of about 1e-6 of its terms. The sum rounds to the wrong fp16 number only if the exact value is that
# close to the midpoint of two adjacent fp16 numbers, whose distance is 5e-4 (measured share: at least 0.997, also with
# torch's kernels). If sums are rounded twice, a quarter of the elements differ.
ROUNDED_ONCE = 0.99
# Allowed relative error of the total update after four steps, compared with the fp32 oracle: technique -> (error of
# matrices, error of vectors). AdamW divides each gradient by its magnitude, so a relative error matters as much in a
# small gradient as in a large gradient. The tolerance of two techniques together is the sum of their tolerances. The
# wrong variants of test_parity.py have errors of at least 0.3 on matrices (a short window with the weight of a full
# window, a dropped micro-batch), or of 3 on vectors (weight decay on norms).
EXACT = (ADAMW_REORDERED, ADAMW_REORDERED)
UPDATE = {
    # every matrix product of the chain is rounded, by about 2**-12 in fp16 and 2**-9 in bf16
    "precision=16": (0.04, 0.04),
    "precision=bf16": (0.15, 0.15),
    # matrix products also read rounded weights, but the masters, which the steps update, are fp32 (measured on matrices
    # and on vectors: 0.045 and 0.074 in fp16, 0.092 and 0.166 in bf16)
    "precision=16-master": (0.06, 0.1),
    "precision=bf16-master": (0.15, 0.2),
    # a weight just below 1 is rounded by up to 2**-12 (fp16) or 2**-9 (bf16): with steps of 0.01, up to 0.02 or 0.2 of
    # a step
    "precision=16-true": (0.1, 0.1),
    "precision=bf16-true": (0.2, 0.25),
    # stochastic rounding has an error of up to the distance of two adjacent numbers, rounding to nearest of up to half
    # this distance
    "precision=bf16-sr": (0.2, 0.6),
    # 8-bit state: one of 256 values per element, relative to the largest element of its block. The vectors are too
    # small for 8-bit state; their errors result from the errors of the matrices (measured: at most 0.0124 on matrices,
    # 0.0056 on vectors). The wrong variant that decays weights after the update has errors of 0.023 and 0.012.
    "optim=adam8bit": (0.015, 0.01),
    "optim=adamw8bit": (0.015, 0.01),
    "optim=paged_adamw8bit": (0.015, 0.01),
    # Lion updates by the sign of the momentum, so the update of an element whose momentum is near 0 may be wrong by
    # twice the step
    "optim=lion8bit": (0.2, 0.2),
    # torch's iterations are in bf16, the oracle's in fp64
    "optim=muon": (0.05, 0.05),
    # torch.compile's partitioner decomposes operators; the decomposed operators round differently
    "compile.activation_memory_budget": (1e-3, 1e-3),
}
# Only on a card, where the inputs of TF32 products have 10 mantissa bits, like fp16. The other operators compute in
# fp32.
ON_CARD = {"precision=tf32": (0.04, 0.04)}
# Adafactor's eps is negligible, so its first update of a vector is the step times the sign of each gradient. If
# rounding changes the sign, the update of the element is wrong by twice the step. If gradients are normally distributed
# and have a relative error of FP16, a share of FP16 / pi of them has an unreliable sign: on average 0.6 of the vectors'
# 448 elements, so one wrong sign must be allowed. (One element has a gradient of 2e-9, which is 1/128 000 of the RMS of
# the other elements. With one order of roundings, its sign changes, and the error after four steps is 0.073. With
# another order, its sign does not change, and the error is 0.002. With AdamW, whose eps is 1e-8, the error is 0.033.)
ONE_SIGN = 2 / 448**0.5
# Added to the tolerance of matrices in fp16 with an adapter. At the start, B and the gradient of A are zero, so the
# factors of the rounded products are much smaller than the weights (measured errors of matrices in fp16: 0.043 with
# LoRA, 0.070 with a 4-bit base; in fp32, both errors are within EXACT)
LOW_RANK = 0.04
# Tolerance of a window's loss, as a share of the tolerance of matrices. The oracle computes the loss with the weights
# of the run. UPDATE already bounds the errors of the weights, and the effect of these errors on later losses varies: a
# large step of plain SGD or a wrong sign multiplies the effect. Therefore the tolerance depends on the rounding of
# products, not on the optimizer. The loss is a mean over tokens, so its error is much smaller than the errors of
# gradients (measured shares: at most 1/390 with bf16, 1/920 with fp16, 1/810 in fp32). A dropped micro-batch causes an
# error of 0.27, and a loss that is summed in bf16 causes an error of 0.03. The tolerance of bf16-true, for example, is
# 0.001.
OF_LOSS = 1 / 200
# Replaces OF_LOSS for a preference loss, which is not a mean over tokens. Such a loss depends on differences of sums
# over about ten tokens, times a beta of 2, and may be near zero although its rounding error is not (measured: at most
# 1/12 of the update's error with bf16, in IPO, which squares the difference; 1/100 in fp32). If chosen and rejected
# answers are exchanged, the loss is off by at least a fifth.
OF_PAIRS = 1 / 10
# Multiplies the tolerance of vectors for a preference loss in fp16. The gradient of such a loss is a difference of two
# gradients. If these cancel, their rounding errors remain, which the tolerance of fp16 alone does not include (measured
# on vectors: 0.051; fp16 alone allows 0.040).
DIFFERENCE = 1.5
# Relative errors with torch.compile: PARTITIONED of a gradient if only the partitioner is used, GENERATED of a loss
# after several steps if code is generated
PARTITIONED, GENERATED = 1e-5, 1e-4
# Relative error of one matrix's total update after 20 steps with torchao's 4-bit state, which has one of 16 values per
# element (measured: 0.20). If every second gradient is replaced by zeros, the error is at least 0.4.
LOW_BIT_STATE = {"adamw4bit": 0.25}
# Error of the weights after plain SGD if a window's gradient is summed in fp32 over micro-batches, compared with one
# sum over the large batch
SGD_FP32 = 1e-6


PAIRS = {f"loss={name}" for name in LOSSES}


def allowed(*techniques, on_card=False):
    """Returns the tolerances of a combination of techniques: (update of matrices, update of vectors, loss of a
    window)."""
    known = UPDATE | (ON_CARD if on_card else {})
    if "weights=streamed" in techniques and not any(one.startswith("precision=") for one in techniques):
        techniques += ("precision=bf16-master",)  # parity.WITH adds bf16-master; streaming changes no bits
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
