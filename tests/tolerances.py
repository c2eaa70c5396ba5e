"""Every tolerance of the suite, each with its reason. A test that uses one has a wrong variant that must exceed it."""

# fp64 sums in another order: 1e3 terms of relative error 1e-16 each, amplified by AdamW's division by sqrt(v)
FP64 = 1e-10
# The same product in one matrix and in chunks of rows: fp32 sums in another order, relative to the largest element
FP32_REORDERED = 1e-5
# bf16 carries 8 bits: a rounding is 2**-9 = 0.002 of an element; the gradient is a chain of some ten of them
BF16 = 0.03
# Fused and looped AdamW round in another order, and a step of AdamW divides by sqrt(v): relative, after a few steps
ADAMW_REORDERED = 3e-4
# fp16 carries 11 bits: 2**-12 = 0.00025 per rounding, the same chain
FP16 = 0.004
# Adding noise of these sizes is not wrong; forgetting a factor of two or a tensor is: wrong variants land above 0.05
