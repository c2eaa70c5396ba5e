"""Compares the traced peak memory of three recipes with formulas of the tensors that every operator saves.

No term of a formula is fitted to a trace. The tensors that autograd saves for an operator are listed in torch's
tools/autograd/derivatives.yaml, and the source of transformers shows the operators of a block. A product saves both
factors; addmm and silu save their input; tanh, rsqrt and log_softmax save their result; a norm saves its input and two
numbers per row; dropout on a card saves a mask of one byte per element; a sum saves nothing. A gradient exists only
once backward has computed it.

Notation: B sequences of T tokens, N = B x T; width H, inner width F, n heads and g key-value heads of width D, L
blocks, a vocabulary of V tokens. The peaks of the three recipes are in different places: at the loss, inside a block
that is recomputed, and in the optimizer step.
"""

from types import SimpleNamespace

from lowmem.plan.tracing.trace import trace

SCALARS = 64  # bytes: the loss, its sum and its mean, norms, counts of tokens


def highest(cfg):
    """Returns a dict that maps each phase to the peak bytes of live tensors on a card."""
    phases = trace(cfg.resolved(), on_card=True).phases
    return {name: point.total for name, point in phases.items()}


def agree(found, derived):
    return abs(found - derived) <= SCALARS


def lines(architecture, s, *techniques):
    keys = [f"model.architecture.{key}={value}" for key, value in architecture.items()]
    return [*keys, f"batch_size={s.B}", f"seq_len={s.T}", *techniques]


# --- attention: saved tensors other than queries, keys and values ----------------------------------------------------


def attention_keeps(s, width):
    """Returns the bytes of the result, with `width` bytes per element, and of one fp32 number per row (the logarithm of
    the sum in softmax). Backward draws the dropout mask again from its seed, and the kernel does not copy keys and
    values for grouped heads."""
    return width * s.N * s.n * s.D + 4 * s.B * s.n * s.T


# --- GPT-2 in fp32, AdamW, dropout, no recomputation: the peak is at the backward pass of the loss -------------------

GPT2 = SimpleNamespace(B=4, T=64, N=256, H=64, n=4, D=16, L=3, V=2000, positions=128)


def gpt2(config):
    s = GPT2
    architecture = {"n_embd": s.H, "n_layer": s.L, "n_head": s.n, "vocab_size": s.V, "n_positions": s.positions}
    architecture |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    return config(*lines(architecture, s, "precision=32", "optim=adamw"))


def gpt2_parameters(s):
    block = 12 * s.H**2 + 13 * s.H  # matrices: qkv 3, output 1, up 4, down 4; biases 3, 1, 4, 1; two norms of 2
    return (s.V + s.positions) * s.H + s.L * block + 2 * s.H  # the head is the embedding


def gpt2_block_keeps(s, mask):
    """Returns the bytes that a block saves for backward. Args: mask: bytes per element of a dropout mask."""
    hidden, rows = 4 * s.N * s.H, 4 * s.N
    attention = (
        hidden + 2 * rows,  # the norm's input, mean and deviation
        hidden,  # its result, for the product with qkv's matrix
        3 * hidden,  # qkv; the heads are views of it
        attention_keeps(s, 4),  # its result is also saved for the output projection
        mask * s.N * s.H,  # dropout; the residual sum saves nothing
    )
    mlp = (
        hidden + 2 * rows,
        hidden,
        # 0.5 a (1 + tanh(c (a + 0.04 a^3))), all 4 H wide:
        4 * hidden,  # a, for the power
        4 * hidden,  # tanh
        4 * hidden + 4 * hidden,  # 0.5 a and 1 + tanh, for their product
        4 * hidden,  # that product, for the matmul with the down matrix
        mask * s.N * s.H,
    )
    return sum(attention) + sum(mlp)


def gpt2_state(s):
    """Returns the bytes of two fp32 moments per parameter, and of a step count per tensor."""
    return 8 * gpt2_parameters(s) + 4 * (12 * s.L + 4)


def gpt2_peak(s, mask=1):
    weights_and_state = 4 * gpt2_parameters(s) + gpt2_state(s)
    embedding = 8 * s.B * (s.T + 1) + 8 * s.T + mask * s.N * s.H  # tokens and positions (int64); dropout
    final = 2 * 4 * s.N * s.H + 2 * 4 * s.N  # the last norm's input and its numbers per row, and the head's input
    loss = 3 * 4 * s.N * s.V  # log_softmax's result, its gradient, and the gradient of the logits
    return weights_and_state + embedding + s.L * gpt2_block_keeps(s, mask) + final + loss


def test_traced_peak_of_gpt2_in_fp32_with_dropout_equals_the_hand_derived_formula(config):
    found = highest(gpt2(config))
    assert max(found, key=found.get) == "backward"
    assert agree(found["backward"], gpt2_peak(GPT2))
    assert not agree(found["backward"], gpt2_peak(GPT2, mask=4))  # wrong: an fp32 mask, as on a CPU


# --- Llama with grouped heads in bf16, masters on the host, every block recomputed, chunked loss ---------------------

LLAMA = SimpleNamespace(B=2, T=64, N=128, H=64, F=256, n=4, g=2, D=16, L=3, V=300, rows=32)


def llama(config, s, *techniques):
    architecture = {"vocab_size": s.V, "hidden_size": s.H, "intermediate_size": s.F, "num_hidden_layers": s.L}
    architecture |= {"num_attention_heads": s.n, "num_key_value_heads": s.g, "head_dim": s.D}
    architecture |= {"tie_word_embeddings": "false", "bos_token_id": "null", "eos_token_id": "null"}
    return config("model=llama-3.2-1b", "model.pretrained=false", *lines(architecture, s, *techniques))


def llama_matrices(s):
    """Returns (rows, columns) of each matrix of a block."""
    heads, groups = (s.n * s.D, s.H), (s.g * s.D, s.H)
    return [heads, groups, groups, heads[::-1], (s.F, s.H), (s.F, s.H), (s.H, s.F)]


def llama_weights(s):
    """Returns the bytes of all weights in bf16, with an untied head, and of RoPE's fp32 frequencies, which the model
    stores twice."""
    block = sum(rows * columns for rows, columns in llama_matrices(s)) + 2 * s.H
    return 2 * (2 * s.V * s.H + s.L * block + s.H) + 2 * 4 * (s.D // 2)


def llama_norm_keeps(s):
    """Returns the bytes that a norm saves: its input in fp32, the reciprocal deviation of each row, their product in
    bf16, and the weighted product."""
    return 4 * s.N * s.H + 4 * s.N + 2 * s.N * s.H + 2 * s.N * s.H


def llama_whole_pass(s):
    """Returns the bytes that are on the card between forward and backward of the last block: weights, the inputs of all
    blocks, and RoPE's tables. Masters, optimizer state and gradients are on the host."""
    boundaries = s.L * 2 * s.N * s.H
    rope = 2 * 2 * s.T * s.D + 8 * s.T  # cosines and sines; the positions
    return llama_weights(s) + boundaries + rope


def llama_block_keeps(s, groups):
    return (
        llama_norm_keeps(s)
        + 2 * s.N * (s.n + 2 * groups) * s.D  # queries and keys after RoPE, which saves only its tables; values
        + attention_keeps(s, 2)
        + llama_norm_keeps(s)
        + 4 * 2 * s.N * s.F  # gate, silu(gate), up, and their product for the matmul with the down matrix
    )


def llama_backward_peak(s, groups=None):
    """Returns the peak bytes in backward: in the last block, while all block inputs are in memory. The gradient of the
    gated product and the gradients of its two factors exist (3 F wide in all), and the product itself has been freed
    (1 F)."""
    arriving = 2 * s.N * s.H  # the gradient of the block's output
    inside = llama_block_keeps(s, s.g if groups is None else groups)
    return llama_whole_pass(s) + inside + arriving + (3 - 1) * 2 * s.N * s.F


def llama_forward_peak(s):
    """Returns the peak bytes in forward: in a chunk of the loss, after the last norm, whose result is the head's
    input."""
    labels = 2 * 8 * s.N  # int64: a copy of all labels in one row, and the indices of the labels that count
    gradients = 2 * s.N * s.H + 4 * s.V * s.H  # of the head's input in bf16, and of the head in fp32
    # logits; their gradient, which replaces log_softmax's result; the gradient in bf16
    chunk = (4 + 4 + 2) * s.rows * s.V
    product = 2 * s.V * s.H  # the chunk's part of the head's gradient
    entering = (2 * s.H + 8) * s.rows  # hidden states and labels of the chunk
    return llama_whole_pass(s) + llama_norm_keeps(s) + labels + gradients + chunk + entering + product


MASTERS = ("precision=bf16-master", "gradient_checkpointing=every_layer", "loss=chunked", f"loss.rows={LLAMA.rows}")


def test_traced_peak_of_checkpointed_llama_in_16_bits_equals_the_hand_derived_formula(config):
    found = highest(llama(config, LLAMA, *MASTERS))
    assert max(found, key=found.get) == "backward"
    assert agree(found["forward"], llama_forward_peak(LLAMA))
    assert agree(found["backward"], llama_backward_peak(LLAMA))
    assert not agree(found["backward"], llama_backward_peak(LLAMA, groups=LLAMA.n))  # wrong: keys and values copied


# --- Llama in bf16 rounded at random, Adafactor: the peak is in the step ---------------------------------------------

FEW = SimpleNamespace(B=1, T=4, N=4, H=64, F=128, n=4, g=2, D=16, L=3, V=300)


def rounding(n):
    """Returns the peak bytes of stochastic rounding for n elements, in addition to weight and state: 12 bytes per
    element for the updated weight in fp32, the noise and their sum, and 7 for isfinite, which torch computes as (x ==
    x) * (abs(x) != inf) with all parts in memory. The update before the rounding needs only 16 bytes per element:
    weight and gradient in fp32, and the new update next to the square of the gradient."""
    return (4 + 4 + 4) * n + (1 + 4 + 1 + 1) * n


def llama_shapes(s):
    """Returns the shapes of all weights in the order of their updates: matrices, embedding and head, norms."""
    return [*s.L * llama_matrices(s), (s.V, s.H), (s.V, s.H), *(2 * s.L + 1) * [(s.H,)]]


def adafactor_state(s):
    """Returns the bytes of Adafactor's fp32 state: one number per row and per column of a matrix or per element of a
    norm, and one RMS per weight."""
    return sum(4 * sum(shape) + 4 for shape in llama_shapes(s))


def adafactor_step(s, scratch=rounding):
    """Returns (bytes of gradients, bytes of scratch) at the peak. The gradient of a parameter is freed when the
    parameter is updated."""
    sizes = [shape[0] * shape[-1] if len(shape) == 2 else shape[0] for shape in llama_shapes(s)]
    return max(((2 * sum(sizes[number:]), scratch(size)) for number, size in enumerate(sizes, start=1)), key=sum)


def adafactor_peak(s, scratch=rounding):
    return llama_weights(s) + 8 * s.B * (s.T + 1) + adafactor_state(s) + sum(adafactor_step(s, scratch))


def test_traced_peak_of_adafactor_with_stochastic_rounding_equals_the_hand_derived_formula(config):
    found = highest(llama(config, FEW, "precision=bf16-sr", "optim=adafactor"))
    assert max(found, key=found.get) == "step"
    assert agree(found["step"], adafactor_peak(FEW))
    assert not agree(found["step"], adafactor_peak(FEW, lambda n: 16 * n))  # wrong: the update without its rounding
