"""The cases of `python -m benchmarks.card`, the most valuable first: a card may be there for minutes only.

The seconds are of one H100 with sixteen cores, estimated until a card has measured them.
"""

from benchmarks.card.case import Case

CASES = (
    Case("card and link", 20, "link:rates"),
    Case("8B streamed", 110, "whole:streamed"),
    Case("1.24B beside other loops", 100, "beside:loops"),
    Case("1.7B beside RoundPipe and TrainStream", 170, "peers:streamed"),
    Case("1.24B compiled, and other losses", 60, "beside:variants"),
    Case("masters of 4B", 70, "whole:masters"),
    Case("idle card and reads", 45, "idle:loops"),
    Case("8B under a cap", 45, "whole:capped"),
    Case("8B resident", 60, "whole:resident"),
    Case("LoRA of 8B", 150, "whole:lora"),
    Case("GPT-2 XL under 12 GiB", 60, "whole:xl"),
    Case("kernels", 70, "kernels:swapped"),
    Case("one run twice", 25, "whole:twice"),
    Case("races between streams", 40, "races:streamed_step", environment={"TORCH_CUDA_SANITIZER": "1"}),
    Case("TF32 beside fp32", 25, "beside:tf32"),
)


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)
