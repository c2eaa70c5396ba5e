"""Training loops for RoundPipe 0.1.1 and TrainStream 0.4.1, as short as the examples of these projects.

RoundPipe's preset for Qwen3 is written for transformers 4 and raises a TypeError with transformers 5. Therefore
`layers_of` lists the layers, as RoundPipe requires for a model without a preset. RoundPipe's loss, in chunks of 4,096
tokens, is compiled; TrainStream's loss is not.

Both loops get the network in bf16 on the host, the rows of each step, and a watch that times the steps. They return the
`traits` of the method. The page shows them next to the traits of lowmem.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.card.blocks import Blocks

ADAMW = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Step(NamedTuple):
    """All rows of an optimizer step, on the host."""

    ids: Tensor  # (B, T)
    labels: Tensor  # (B, T): position t holds the token that follows input t


def traits(state: str, stale: bool, streams: bool) -> dict[str, bool | str]:
    """Returns the traits of a method for the page.

    Args:
        state: precision of the optimizer state.
        stale: True if a step computes with weights that lack the update of the previous step.
        streams: True if the card does not hold all weights.
    """
    return {
        "masters": "fp32 on the host",
        "optimizer state": f"{state} on the host",
        "weights one step old": stale,
        "weights streamed": streams,
    }


# --- RoundPipe ----------------------------------------------------------------------------------------------------


class Start(nn.Module):
    """The first layer. Returns the embeddings (B, T, H), cos and sin of the rotary position embedding, and the
    labels."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.embedding, self.rotary = network.model.embed_tokens, network.model.rotary_emb

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        hidden = self.embedding(ids)
        return hidden, *self.rotary(hidden, torch.arange(ids.shape[1], device=ids.device)[None]), labels


class Block(nn.Module):
    """A transformer block. It is called without an attention mask, so scaled dot-product attention is causal."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, cos, sin, labels = state
        return self.block(hidden, position_embeddings=(cos, sin)), cos, sin, labels


class End(nn.Module):
    """The last layer. Returns the mean cross entropy of a micro-batch, computed by RoundPipe's chunked loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = network.model.norm, network.lm_head

    def forward(self, state: tuple[Tensor, ...]) -> Tensor:
        from roundpipe.models.function import ChunkedCompileLinearForCausalLMLoss as chunked_loss

        hidden, _, _, labels = state
        return chunked_loss(self.norm(hidden), self.head, labels, shift_labels=labels)


def layers_of(network: nn.Module) -> nn.Sequential:
    return nn.Sequential(Start(network), *map(Block, network.model.layers), End(network))


def roundpipe(network: nn.Module, steps: list[Step], watch: Blocks, is_async: bool = True) -> dict:
    from roundpipe import RoundPipe, RoundPipeRunConfig
    from roundpipe.optim import Adam

    parts = 2  # micro-batches; RoundPipe's default on one card
    config = RoundPipeRunConfig(num_microbatch=parts)
    model = RoundPipe(layers_of(network), optim_dtype=torch.float32, name="peer", model_run_config=config)
    optimizer = Adam(model.optim_parameters(), **ADAMW, decoupled_weight_decay=True)

    def step() -> None:  # RoundPipe's thread calls this
        optimizer.step()
        optimizer.zero_grad()

    for ids, labels in steps:
        watch.begin()
        watch.add(model.forward_backward(input_args=(ids, labels), loss_fn=lambda loss, _: loss / parts))
        model.step(step, is_async=is_async)
        watch.end()
    return traits("32 bits", stale=is_async, streams=True)


# --- TrainStream --------------------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    """A network that computes its loss in `forward`, so that hooks of the root module also cover the loss."""

    def __init__(self, network: nn.Module, chunked_cross_entropy: Callable) -> None:
        super().__init__()
        self.model, self.loss = network, chunked_cross_entropy

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        return self.loss(hidden, self.model.lm_head.weight, labels, num_items=labels.numel())


def trainstream(network: nn.Module, steps: list[Step], watch: Blocks) -> dict:
    from trainstream import chunked_cross_entropy, memory_report  # the first import compiles its extension
    from trainstream.integrations.huggingface import wrap_hf

    network.gradient_checkpointing_enable({"use_reentrant": False})
    model = WithLoss(network, chunked_cross_entropy)
    # offload=True: otherwise TrainStream may choose a fused AdamW on the card, with state in bf16
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    model, optimizer = wrap_hf(model, optimizer, device="cuda", offload=True, moment_dtype="float32")
    for ids, labels in steps:
        watch.begin()
        loss = model(ids.to("cuda", non_blocking=True), labels.to("cuda", non_blocking=True))
        loss.backward()
        watch.add(loss)
        optimizer.step()
        optimizer.zero_grad()
        watch.end()
    report = memory_report(model)
    streams = bool(report.get("params", {}).get("paged_blocks"))
    return traits("32 bits", stale=False, streams=streams) | {"its log": "; ".join(report["events"])}
