"""Every tolerance of the suite, each with its reason. A test that uses one has a wrong variant that must exceed it."""

from pair_oracle import LOSSES

# fp64 sums in another order: 1e3 terms of relative error 1e-16 each, amplified by AdamW's division by sqrt(v)
FP64 = 1e-10
# The same product in one matrix and in chunks of rows: fp32 sums in another order, relative to the largest element
FP32_REORDERED = 1e-5
# bf16 carries 8 bits: a rounding is 2**-9 = 0.002 of an element; the gradient is a chain of some ten of them
BF16 = 0.03
# Fused and looped AdamW round in another order, and a step of AdamW divides by sqrt(v): relative, after a few steps
ADAMW_REORDERED = 3e-4
# The gradient of a window in four micro-batches against that of the same window in one: norm of the difference over the
# norm, of all parameters together. fp32: sums over some 100 tokens in another order, 10 roundings of 2**-24 (measured:
# 3). bf16: the gradient is rounded once as a whole and once per micro-batch, and where the kernel for another shape
# adds in another order, a product before it becomes its neighbour in bf16, two roundings away; together four roundings
# of 2**-9 (measured: 1.4 with any kernel). Wrong variants: z of each micro-batch 0.05, a micro-batch that counts a
# tenth less 0.06.
WINDOW_IN_MICRO_BATCHES = {"fp32": 16 * 2**-24, "bf16": 4 * 2**-9}
# fp16 carries 11 bits: 2**-12 = 0.00025 per rounding, the same chain
FP16 = 0.004
# Share of a product's elements that are the exact ones, rounded once to 16 bits. A sum in fp32 is off by some 1e-6 of
# its terms and becomes the neighbour where it lies that near to the middle between two of fp16's numbers, 5e-4 apart
# (measured: 0.997 and more, as torch's own); rounded twice, a quarter of the elements differ
ROUNDED_ONCE = 0.99
# What a technique may add to the relative error of the total update after four steps, (of matrices, of vectors),
# against the fp32 oracle. AdamW divides each gradient by its own size, so that the rounding of small gradients counts
# as much as that of large ones. Two techniques together may have the sum of both. The wrong variants of test_parity.py
# are at 0.3 and more on matrices (a short window divided by the full one's tokens, a micro-batch dropped), or at 3 on
# vectors (decay of norms).
EXACT = (ADAMW_REORDERED, ADAMW_REORDERED)
UPDATE = {
    # roundings of 2**-12 and 2**-9 in every product of the chain
    "precision=16": (0.04, 0.04),
    "precision=bf16": (0.15, 0.15),
    # the weights, too, are rounded for every product, but not where they are stepped (measured: 0.045, 0.074 in fp16;
    # 0.092, 0.166 in bf16)
    "precision=16-master": (0.06, 0.1),
    "precision=bf16-master": (0.15, 0.2),
    # and weights of 1 are 2**-11 or 2**-8 apart, with steps of 0.01: a rounding is up to 0.02 or 0.2 of a step
    "precision=16-true": (0.1, 0.1),
    "precision=bf16-true": (0.2, 0.25),
    # a random rounding is off by up to a whole spacing, where the nearest is off by half of one
    "precision=bf16-sr": (0.2, 0.6),
    # 8-bit state: one of 256 values per element, relative to the largest of its block; vectors are too small for it and
    # follow the matrices through the model (measured: at most 0.0124, 0.0056; a decay after the update: 0.023, 0.012)
    "optim=adam8bit": (0.015, 0.01),
    "optim=adamw8bit": (0.015, 0.01),
    "optim=paged_adamw8bit": (0.015, 0.01),
    # Lion takes the sign: an element whose momentum is near 0 is right or wrong by twice the step
    "optim=lion8bit": (0.2, 0.2),
    # torch's iterations are in bf16, the oracle's in fp64
    "optim=muon": (0.05, 0.05),
    # torch.compile's partitioner decomposes operators into others that round differently
    "compile.activation_memory_budget": (1e-3, 1e-3),
}
# On a card alone: TF32 has fp16's 10 bits of mantissa in every product, and is fp32 elsewhere
ON_CARD = {"precision=tf32": (0.04, 0.04)}
# Adafactor has no eps that counts: its first step of a vector is the sign of the gradient, and where a rounding decides
# the sign, the element is off by twice the step. A gradient that is off by FP16 leaves FP16 / pi of normal elements
# without a sign of their own, 0.6 of the vectors' 448; so no less than one can be asked for. (One has a gradient of
# 2e-9, a 128 000th of the others' RMS. Roundings in one order turn it, which is 0.073 after four steps, in another not,
# which is 0.002; AdamW, with its eps of 1e-8, is then at 0.033.)
ONE_SIGN = 2 / 448**0.5
# B of an adapter begins at zero, and so does the gradient of A: the products whose rounding counts have factors much
# smaller than the weights (measured beside fp16's products: 0.043 with LoRA, 0.070 beside a base in 4 bits; both
# of the same network in fp32 are exact)
LOW_RANK = 0.04
# A window's loss is compared at the weights with which the run read it, for an update's error is told above, and how
# much of it the next losses show is not constant: a large step of plain SGD multiplies it, and so does a sign. So the
# optimizer does not count here. What is left is the products' rounding, of which a mean over tokens shows this share
# of what it does to the update of matrices (measured: at most a 390th with bf16, a 920th with fp16, an 810th in fp32);
# a micro-batch left out is at 0.27, a loss that is summed in bf16 at 0.03, of 0.001 that bf16 weights may be off by.
OF_LOSS = 1 / 200
# A loss of pairs is not a mean over tokens: it is a function of a difference of two sums over ten tokens each, times a
# beta of 2, and may be near zero where the rounding is not (measured: at most a 12th of what bf16 does to the update
# with IPO's square, a 100th in fp32; with the answers exchanged the loss is off by a fifth and more).
OF_PAIRS = 1 / 10
# Its gradient is a difference of two answers' gradients: where these cancel their roundings stay, which fp16's
# tolerance of a sum does not know (measured: vectors at 0.051 of 0.040).
DIFFERENCE = 1.5
# One gradient through torch.compile's partitioner, relative; and a loss after four steps through generated code
PARTITIONED, GENERATED = 1e-5, 1e-4
# torchao's state on one matrix after 20 steps: 4 bits are 16 values per element (measured 0.20); losing every second
# gradient is at 0.4 and more
LOW_BIT_STATE = {"adamw4bit": 0.25}
# fp32 sums of a window's micro-batches against one sum of the big batch, as weights after plain SGD
SGD_FP32 = 1e-6
# Adding noise of these sizes is not wrong; forgetting a factor of two or a tensor is: wrong variants land above 0.05


PAIRS = {f"loss={name}" for name in LOSSES}


def allowed(*techniques, on_card=False):
    """Returns how far these may be off together: (update of matrices, of vectors, loss of a window)."""
    known = UPDATE | (ON_CARD if on_card else {})
    if "weights=streamed" in techniques and not any(one.startswith("precision=") for one in techniques):
        techniques += ("precision=bf16-master",)  # with which it is run: it changes no bit itself
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
