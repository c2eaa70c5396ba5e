"""The cases of `python -m benchmarks.card`. The most valuable cases come first, because a card may be available for
only a few minutes.

The seconds are estimates for one H100 with sixteen host cores. Once a case is done, its recorded seconds are used
instead.
"""

from benchmarks.card.case import Case

HERE = "benchmarks.card"
# For cases with deterministic=true. The variable is set for the whole process, because torch reads it at the first
# matrix product, which an earlier run of the case may compute.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
CASES = (
    Case("card and link", 20, f"{HERE}.link:rates"),
    Case("8B streamed", 110, f"{HERE}.whole:streamed", environment=DETERMINISTIC),
    Case("1.24B beside other loops", 120, f"{HERE}.beside:loops"),
    Case("1.7B beside RoundPipe and TrainStream", 230, f"{HERE}.peers:streamed"),
    Case("1.24B compiled, and other losses", 110, f"{HERE}.beside:variants"),
    Case("masters of 4B", 60, f"{HERE}.whole:masters"),
    Case("idle card and reads", 80, f"{HERE}.idle:loops"),
    Case("8B under a cap", 120, f"{HERE}.whole:capped"),
    Case("LoRA of 8B", 70, f"{HERE}.whole:lora"),
    Case("GPT-2 XL under 12 GiB", 50, f"{HERE}.whole:xl"),
    Case("one run twice", 20, f"{HERE}.whole:twice", environment=DETERMINISTIC),
    Case("races between streams", 40, f"{HERE}.races:streamed_step", environment={"TORCH_CUDA_SANITIZER": "1"}),
    Case("kernels", 80, f"{HERE}.kernels:swapped"),
    Case("8B resident", 80, f"{HERE}.whole:resident"),
    Case("TF32 beside fp32", 60, f"{HERE}.beside:tf32"),
    Case("QLoRA of 8B", 100, f"{HERE}.whole:qlora"),
)
