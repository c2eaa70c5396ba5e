"""Defines models of other projects, so that `published.py` can trace their memory. The models compute no useful values:
for example, the cosines and sines of RoPE are zeros.

Each block follows its project's source operator by operator, because the operators determine which tensors autograd
keeps. The memory depends on the dtypes of norms and RoPE, on whether grouped keys and values are repeated before or
after RoPE, on whether queries, keys and values are slices of one product (which stays in memory as long as any slice
does), and on whether attention computes (T, T) scores. The models are registered with transformers, so that the planner
can build them.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class DecoderConfig(PretrainedConfig):
    """Configures litgpt's GPT and torchtune's TransformerDecoder."""

    model_type = "published-decoder"

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 2048,
        num_hidden_layers: int = 22,
        num_attention_heads: int = 32,
        num_key_value_heads: int = 4,
        head_dim: int = 64,
        intermediate_size: int = 5632,
        rotary: int = 64,  # elements of a head that RoPE rotates
        norm: str = "rms",  # rms: RMSNorm that multiplies by its weight in 16 bits; wide-rms: in fp32; layer: LayerNorm
        gated: bool = True,  # True: SwiGLU; False: GELU
        parallel: bool = False,  # True: attention and MLP read the same hidden states
        one_product: bool = True,  # True: queries, keys and values are slices of one matrix product
        repeated: str = "after",  # keys and values of a group are repeated "before" or "after" RoPE
        rope_dtype: str = "bfloat16",
        qkv_bias: bool = False,
        bias: bool = False,
        tie_word_embeddings: bool = False,
        **more: object,
    ) -> None:
        names = [name for name in DecoderConfig.__init__.__annotations__ if name not in ("more", "return")]
        values = locals()
        for name in names:
            setattr(self, name, values[name])
        super().__init__(tie_word_embeddings=tie_word_embeddings, **more)


class RMSNorm(nn.Module):
    def __init__(self, size: int, wide: bool) -> None:
        super().__init__()
        self.weight, self.wide = nn.Parameter(torch.ones(size)), wide

    def forward(self, x: Tensor) -> Tensor:
        upcast = x.float()
        normed = upcast * torch.rsqrt((upcast * upcast).mean(-1, keepdim=True) + 1e-5)
        return (normed * self.weight.float()).to(x.dtype) if self.wide else normed.to(x.dtype) * self.weight


def norm(config: DecoderConfig) -> nn.Module:
    if config.norm == "layer":
        return nn.LayerNorm(config.hidden_size)
    return RMSNorm(config.hidden_size, wide=config.norm == "wide-rms")


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.sizes = [n * config.head_dim for n in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
        outputs = [sum(self.sizes)] if config.one_product else self.sizes
        bias = config.bias or config.qkv_bias
        self.inputs = nn.ModuleList(nn.Linear(config.hidden_size, size, bias=bias) for size in outputs)
        self.output = nn.Linear(self.sizes[0], config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns the output (B, T, H) for x (B, T, H) and cos, sin (T, rotary)."""
        products = [linear(x) for linear in self.inputs]
        slices = products[0].split(self.sizes, dim=-1) if self.config.one_product else products
        del products
        q, k, v = (heads.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2) for heads in slices)  # (B, n, T, D)
        del slices
        before = self.config.repeated == "before"
        if before:
            k, v = self._repeated(k), self._repeated(v)
        q, k = self._turned(q, cos, sin), self._turned(k, cos, sin)
        if not before:
            k, v = self._repeated(k), self._repeated(v)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _repeated(self, x: Tensor) -> Tensor:
        """Repeats keys or values (B, groups, T, D) to (B, heads, T, D). Returns `x` itself, without a copy, if each
        head has its own keys and values."""
        times = self.config.num_attention_heads // self.config.num_key_value_heads
        return x if times == 1 else x.repeat_interleave(times, dim=1)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n = self.config.rotary
        turning = x[..., :n].to(getattr(torch, self.config.rope_dtype))
        left, right = turning.chunk(2, dim=-1)
        turned = turning * cos + torch.cat((-right, left), dim=-1) * sin
        return torch.cat((turned.to(x.dtype), x[..., n:]), dim=-1)


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        sizes, self.gated = (config.hidden_size, config.intermediate_size), config.gated
        self.inputs = nn.ModuleList(nn.Linear(*sizes, bias=config.bias) for _ in range(2 if config.gated else 1))
        self.output = nn.Linear(*sizes[::-1], bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.output(F.silu(self.inputs[0](x)) * self.inputs[1](x))
        return self.output(F.gelu(self.inputs[0](x)))


class DecoderBlock(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.parallel = config.parallel
        self.norms = nn.ModuleDict({"attention": norm(config), "mlp": norm(config)})
        self.attention, self.mlp = Attention(config), MLP(config)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = hidden_states
        mixed = self.attention(self.norms["attention"](x), cos, sin)
        if self.parallel:
            return self.mlp(self.norms["mlp"](x)) + mixed + x
        x = mixed + x
        return self.mlp(self.norms["mlp"](x)) + x


class Decoder(PreTrainedModel):
    config_class = DecoderConfig
    _supports_sdpa = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(DecoderBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = norm(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, **_: object) -> CausalLMOutput:
        """Returns the logits (B, T, V) of input_ids (B, T)."""
        dtype = getattr(torch, self.config.rope_dtype)
        cos, sin = (torch.zeros(input_ids.shape[1], self.config.rotary, dtype=dtype) for _ in range(2))
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return CausalLMOutput(logits=self.head(self.norm(x)))


class BookConfig(PretrainedConfig):
    """Configures the GPT of the repository LLMs-from-scratch at each step of its text on training speed
    (ch05/10_llm-training-speed)."""

    model_type = "published-book"

    def __init__(
        self,
        vocab_size: int = 50257,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        positions: int = 1024,
        dropout: float = 0.1,
        mask: str | None = "kept",  # kept: a float buffer per block; made: made in each pass; None: torch's attention
        own: bool = True,  # True: LayerNorm and GELU in elementary operations; False: torch's modules
        tie_word_embeddings: bool = False,
        **more: object,
    ) -> None:
        self.vocab_size, self.hidden_size, self.positions = vocab_size, hidden_size, positions
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.dropout, self.mask, self.own = dropout, mask, own
        super().__init__(tie_word_embeddings=tie_word_embeddings, **more)


class OwnLayerNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return self.weight * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.bias


class OwnGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        factor = torch.tensor(math.sqrt(2 / math.pi))  # a 0-dimensional tensor, so the product stays in 16 bits
        return 0.5 * x * (1 + torch.tanh(factor * (x + 0.044715 * torch.pow(x, 3))))


class OwnAttention(nn.Module):
    """Computes attention from scores (B, heads, T, T), to which it applies a mask (in place), a scale, softmax and
    dropout, in this order."""

    def __init__(self, config: BookConfig) -> None:
        super().__init__()
        self.heads, self.p = config.num_attention_heads, config.dropout
        size = config.hidden_size
        self.inputs = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(3))
        self.output = nn.Linear(size, size)
        square = torch.ones(config.positions, config.positions)
        self.register_buffer("mask", square.triu(1) if config.mask == "kept" else None)

    def forward(self, x: Tensor) -> Tensor:
        k, q, v = (linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in self.inputs)
        scores = q @ k.transpose(2, 3)  # (B, heads, T, T)
        length = x.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1) if self.mask is None else self.mask.bool()
        scores.masked_fill_(future[:length, :length], -torch.inf)
        weights = torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1)
        weights = F.dropout(weights, self.p, self.training)
        return self.output((weights @ v).transpose(1, 2).flatten(2))


class LibraryAttention(nn.Module):
    def __init__(self, config: BookConfig) -> None:
        super().__init__()
        self.heads, self.p = config.num_attention_heads, config.dropout
        self.inputs = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, heads, T, D)
        dropout = self.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class BookBlock(nn.Module):
    def __init__(self, config: BookConfig) -> None:
        super().__init__()
        size, self.p = config.hidden_size, config.dropout
        normed = OwnLayerNorm if config.own else nn.LayerNorm
        self.norms = nn.ModuleList(normed(size) for _ in range(2))
        self.attention = LibraryAttention(config) if config.mask is None else OwnAttention(config)
        gelu = OwnGELU() if config.own else nn.GELU(approximate="tanh")
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), gelu, nn.Linear(4 * size, size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states
        for normed, layer in zip(self.norms, (self.attention, self.mlp), strict=True):
            x = F.dropout(layer(normed(x)), self.p, self.training) + x
        return x


class Book(PreTrainedModel):
    config_class = BookConfig
    _supports_sdpa = True

    def __init__(self, config: BookConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.positions, config.hidden_size)
        self.blocks = nn.ModuleList(BookBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = (OwnLayerNorm if config.own else nn.LayerNorm)(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, **_: object) -> CausalLMOutput:
        """Returns the logits (B, T, V) of input_ids (B, T)."""
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return CausalLMOutput(logits=self.head(self.norm(x)))


for config, model in ((DecoderConfig, Decoder), (BookConfig, Book)):
    AutoConfig.register(config.model_type, config)
    AutoModelForCausalLM.register(config, model)
