"""The tolerances of the test suite, with their reasons. Each test with a tolerance has a wrong variant that must exceed
it."""

from pair_oracle import LOSSES

# fp64 sums in another order: 1e3 terms of relative error 1e-16 each, amplified by AdamW's division by sqrt(v)
FP64 = 1e-10
# A matrix product as a whole or in chunks of rows: fp32 sums in another order, relative to the largest element
FP32_REORDERED = 1e-5
# bf16 has 8 significant bits, so a rounding error is 2**-9 = 0.002 of an element; a gradient has a chain of about ten
# roundings
BF16 = 0.03
# Fused and looped AdamW round in different orders, and a step divides by sqrt(v): relative error after a few steps
ADAMW_REORDERED = 3e-4
# The gradient of a window in four micro-batches against its gradient in one micro-batch: norm of the difference
# relative to the norm, of all parameters together. fp32: sums over about 100 tokens in another order, 10 roundings of
# 2**-24 (measured: 3). bf16: the gradient is rounded once in total and once per micro-batch, and if the kernel for
# another shape sums in another order, an earlier product may round to the adjacent bf16 number, an error of two
# roundings; together four roundings of 2**-9 (measured: 1.4 with any kernel). Wrong variants: z of each micro-batch
# 0.05, a micro-batch that counts a tenth less 0.06.
WINDOW_IN_MICRO_BATCHES = {"fp32": 16 * 2**-24, "bf16": 4 * 2**-9}
# fp16 has 11 significant bits: 2**-12 = 0.00025 per rounding, in a chain of about ten roundings
FP16 = 0.004
# Share of a product's elements that equal the exact value rounded once to 16 bits. An fp32 sum has an error of about
# 1e-6 of its terms, and rounds to the wrong neighbour if the exact value is that close to the middle of two adjacent
# fp16 numbers, which are 5e-4 apart (measured: 0.997 and more, as with torch's kernels). If the sum is rounded twice, a
# quarter of the elements differ.
ROUNDED_ONCE = 0.99
# Allowed relative error of the total update after four steps, (of matrices, of vectors), against the fp32 oracle. AdamW
# divides each gradient by its magnitude, so rounding errors of small gradients count as much as errors of large
# gradients. The tolerance of two techniques together is the sum of their tolerances. The wrong variants of
# test_parity.py have errors of 0.3 and more on matrices (a short window divided by the tokens of a full window, a
# dropped micro-batch), or 3 on vectors (decay of norms).
EXACT = (ADAMW_REORDERED, ADAMW_REORDERED)
UPDATE = {
    # roundings of 2**-12 and 2**-9 in every product of the chain
    "precision=16": (0.04, 0.04),
    "precision=bf16": (0.15, 0.15),
    # the weights are also rounded for every product, but the updated masters are not (measured: 0.045, 0.074 in fp16;
    # 0.092, 0.166 in bf16)
    "precision=16-master": (0.06, 0.1),
    "precision=bf16-master": (0.15, 0.2),
    # weights near 1 are rounded by up to 2**-12 or 2**-9, with steps of 0.01: up to 0.02 or 0.2 of a step
    "precision=16-true": (0.1, 0.1),
    "precision=bf16-true": (0.2, 0.25),
    # stochastic rounding has an error of up to a full spacing, rounding to nearest of up to half a spacing
    "precision=bf16-sr": (0.2, 0.6),
    # 8-bit state: one of 256 values per element, relative to the largest element of its block. Vectors are too small
    # for 8-bit state; their error comes from the matrices (measured: at most 0.0124, 0.0056; decay after the update:
    # 0.023, 0.012)
    "optim=adam8bit": (0.015, 0.01),
    "optim=adamw8bit": (0.015, 0.01),
    "optim=paged_adamw8bit": (0.015, 0.01),
    # Lion uses the sign: an element whose momentum is near 0 may be wrong by twice the step
    "optim=lion8bit": (0.2, 0.2),
    # torch's iterations are in bf16, the oracle's in fp64
    "optim=muon": (0.05, 0.05),
    # torch.compile's partitioner decomposes operators, which then round differently
    "compile.activation_memory_budget": (1e-3, 1e-3),
}
# Only on a card: TF32 has 10 mantissa bits in every product, like fp16; all other operators are fp32
ON_CARD = {"precision=tf32": (0.04, 0.04)}
# Adafactor's eps is negligible, so its first update of a vector is the sign of the gradient. If rounding changes the
# sign, the element has an error of twice the step. With a relative error of FP16, the share FP16 / pi of normally
# distributed elements has an unreliable sign: 0.6 of the vectors' 448 elements, so one wrong sign must be allowed. (One
# element has a gradient of 2e-9, a 128 000th of the RMS of the others. One order of roundings flips its sign, an error
# of 0.073 after four steps, and another order does not, 0.002; AdamW, with its eps of 1e-8, then has 0.033.)
ONE_SIGN = 2 / 448**0.5
# B of an adapter starts at zero, so the gradient of A also starts at zero: the rounded products have factors much
# smaller than the weights (measured in addition to fp16: 0.043 with LoRA, 0.070 with a 4-bit base; in fp32 both are
# exact)
LOW_RANK = 0.04
# A window's loss is compared at the weights of the run, because UPDATE already bounds the errors of the weights, and
# their effect on later losses varies: a large step of plain SGD or a wrong sign multiplies it. So only the rounding of
# products matters here, not the optimizer. Its effect on a mean over tokens may be this share of its effect on the
# update of matrices (measured: at most a 390th with bf16, a 920th with fp16, an 810th in fp32). A dropped micro-batch
# gives 0.27, and a loss that is summed in bf16 gives 0.03; bf16 weights are allowed 0.001.
OF_LOSS = 1 / 200
# A loss of pairs is not a mean over tokens. It is a function of the difference of two sums over ten tokens each, times
# a beta of 2, and may be near zero although its rounding error is not (measured: at most a 12th of the effect of bf16
# on the update, with IPO's square, and a 100th in fp32; with exchanged answers the loss is off by a fifth and more).
OF_PAIRS = 1 / 10
# Factor for the gradient of a loss of pairs, a difference of two gradients. If the gradients cancel, their rounding
# errors remain, which the tolerance of fp16 does not include (measured on vectors: 0.051, allowed 0.040).
DIFFERENCE = 1.5
# Relative errors: of one gradient with torch.compile's partitioner, and of a loss after four steps with generated code
PARTITIONED, GENERATED = 1e-5, 1e-4
# torchao's 4-bit state on one matrix after 20 steps: 16 values per element (measured: 0.20). Dropping every second
# gradient gives 0.4 and more.
LOW_BIT_STATE = {"adamw4bit": 0.25}
# fp32 sums of a window's micro-batches against one sum of the large batch, measured in weights after plain SGD
SGD_FP32 = 1e-6


PAIRS = {f"loss={name}" for name in LOSSES}


def allowed(*techniques, on_card=False):
    """Returns the tolerances of a combination of techniques: (update of matrices, of vectors, loss of a window)."""
    known = UPDATE | (ON_CARD if on_card else {})
    if "weights=streamed" in techniques and not any(one.startswith("precision=") for one in techniques):
        techniques += ("precision=bf16-master",)  # streaming needs masters, and does not change bits itself
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
