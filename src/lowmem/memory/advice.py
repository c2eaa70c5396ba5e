"""What to try when memory runs out: existing overrides, in the order of the README's table."""

from collections.abc import Mapping

from lowmem.units import GIB

# group -> the choices that save memory, in the order of the README's table; the first is what is advised
SAVERS = {
    "precision": ("bf16", "16", "bf16-true", "bf16-sr", "16-true", "16-master", "bf16-master"),
    "optim": (
        *("adam8bit", "adamw8bit", "paged_adamw8bit", "paged_adamw32bit", "adamw_fp8", "adamw4bit"),
        *("lion8bit", "muon", "adafactor", "sgd"),
    ),
    "accumulation": ("fixed", "effective_batch", "by_epoch", "by_step"),
    "gradient_checkpointing": ("every_layer", "every_k", "sqrt", "selective", "budget", "offload"),
    "loss": ("chunked",),
}


def out_of_memory(
    held: Mapping[str, int], choices: Mapping[str, str], batch_size: int, seq_len: int, planned: str | None = None
) -> str:
    """Args: held: bytes by category at the peak; choices: group -> what the run used; planned: what the plan says."""
    lines = ["Out of memory. Held at the peak, by category:"]
    lines += [f"  {category:<12}{size / GIB:8.3f} GiB" for category, size in held.items()]
    lines += [planned] if planned else []
    lines += ["Try, one after the other:", *(f"  {line}" for line in advice(choices, batch_size, seq_len))]
    return "\n".join(lines)


def advice(choices: Mapping[str, str], batch_size: int, seq_len: int) -> list[str]:
    """Overrides that this run does not use yet."""
    tries = []
    for group, savers in SAVERS.items():
        if group == "accumulation":  # a smaller micro-batch, the same update
            if batch_size > 1 and choices.get(group) == "effective_batch":
                tries.append(f"batch_size={batch_size // 2}")
            elif batch_size > 1:
                tries.append(f"batch_size={batch_size // 2} accumulation=fixed accumulation.batches=2")
        elif choices.get(group) not in savers:
            tries.append(f"{group}={savers[0]}")
    return [*tries, f"seq_len={max(1, seq_len // 2)}"]
