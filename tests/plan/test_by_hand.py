"""Three recipes derived by hand: the tracer's highest bytes beside a formula of what every operator saves.

No term is fitted to a trace. What autograd keeps of an operator stands in torch's tools/autograd/derivatives.yaml, what
a block computes in transformers' source: a product keeps both factors, addmm its input, a sum nothing; silu its input,
tanh and rsqrt their results; a norm its input and two numbers per row, log_softmax its result, dropout on a card a mask
of one byte per element. A gradient is not there before backward makes it.

B sequences of T tokens, N = B x T; width H, inner width F, n heads and g key-value heads of D, L blocks, V tokens.
The peak of each recipe is elsewhere: at the loss, inside a block that is computed again, in the optimizer's step.
"""

from types import SimpleNamespace

from lowmem.plan.tracing.trace import trace

SCALARS = 64  # bytes: the loss, its sum and its mean, norms, counts of tokens


def highest(cfg):
    """Phase -> bytes of live tensors on a card."""
    phases = trace(cfg.resolved(), on_card=True).phases
    return {name: point.total for name, point in phases.items()}


def agree(found, derived):
    return abs(found - derived) <= SCALARS


def lines(architecture, s, *techniques):
    keys = [f"model.architecture.{key}={value}" for key, value in architecture.items()]
    return [*keys, f"batch_size={s.B}", f"seq_len={s.T}", *techniques]


# --- attention: what is kept beside queries, keys and values ---------------------------------------------------------


def attention_keeps(s, width):
    """Its result, in `width` bytes, and of each row the logarithm of the sum of its softmax, in fp32. Dropout's mask is
    drawn again from its seed; grouped heads are read by the kernel as they are, and not repeated."""
    return width * s.N * s.n * s.D + 4 * s.B * s.n * s.T


# --- GPT-2 in fp32, AdamW, dropout, nothing computed again: the peak is where the loss goes back ---------------------

GPT2 = SimpleNamespace(B=4, T=64, N=256, H=64, n=4, D=16, L=3, V=2000, positions=128)


def gpt2(config):
    s = GPT2
    architecture = {"n_embd": s.H, "n_layer": s.L, "n_head": s.n, "vocab_size": s.V, "n_positions": s.positions}
    architecture |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    return config(*lines(architecture, s, "precision=32", "optim=adamw"))


def gpt2_parameters(s):
    block = 12 * s.H**2 + 13 * s.H  # qkv 3, output 1, up 4, down 4; of biases 3, 1, 4, 1, and two norms of 2
    return (s.V + s.positions) * s.H + s.L * block + 2 * s.H  # the head is the embedding


def gpt2_block_keeps(s, mask):
    """Args: mask: bytes per element of dropout's."""
    hidden, rows = 4 * s.N * s.H, 4 * s.N
    attention = (
        hidden + 2 * rows,  # the norm's input, mean and deviation
        hidden,  # its result, for the product with qkv's matrix
        3 * hidden,  # qkv, of which the heads are views
        attention_keeps(s, 4),  # the result is also what the output's product keeps
        mask * s.N * s.H,  # dropout; the sum with what entered keeps nothing
    )
    mlp = (
        hidden + 2 * rows,
        hidden,
        # 0.5 a (1 + tanh(c (a + 0.04 a^3))), all 4 H wide:
        4 * hidden,  # a, of its power
        4 * hidden,  # tanh
        4 * hidden + 4 * hidden,  # 0.5 a and 1 + tanh, of their product
        4 * hidden,  # that product, for the one with the down matrix
        mask * s.N * s.H,
    )
    return sum(attention) + sum(mlp)


def gpt2_state(s):
    """Two moments in fp32, and of each tensor the number of steps."""
    return 8 * gpt2_parameters(s) + 4 * (12 * s.L + 4)


def gpt2_peak(s, mask=1):
    weights_and_state = 4 * gpt2_parameters(s) + gpt2_state(s)
    embedding = 8 * s.B * (s.T + 1) + 8 * s.T + mask * s.N * s.H  # tokens and positions (int64); dropout
    final = 2 * 4 * s.N * s.H + 2 * 4 * s.N  # the last norm's input and its numbers per row, and the head's input
    loss = 3 * 4 * s.N * s.V  # log_softmax's result, the gradient that reaches it, and that of the logits, made of both
    return weights_and_state + embedding + s.L * gpt2_block_keeps(s, mask) + final + loss


def test_traced_peak_of_gpt2_in_fp32_with_dropout_equals_the_formula(config):
    found = highest(gpt2(config))
    assert max(found, key=found.get) == "backward"
    assert agree(found["backward"], gpt2_peak(GPT2))
    assert not agree(found["backward"], gpt2_peak(GPT2, mask=4))  # wrong: a CPU's dropout keeps its noise in fp32


# --- Llama with grouped heads in bf16, masters on the host, every block computed again, chunked loss -----------------

LLAMA = SimpleNamespace(B=2, T=64, N=128, H=64, F=256, n=4, g=2, D=16, L=3, V=300, rows=32)


def llama(config, s, *techniques):
    architecture = {"vocab_size": s.V, "hidden_size": s.H, "intermediate_size": s.F, "num_hidden_layers": s.L}
    architecture |= {"num_attention_heads": s.n, "num_key_value_heads": s.g, "head_dim": s.D}
    architecture |= {"tie_word_embeddings": "false", "bos_token_id": "null", "eos_token_id": "null"}
    return config("model=llama-3.2-1b", "model.pretrained=false", *lines(architecture, s, *techniques))


def llama_matrices(s):
    """(rows, columns) of a block's."""
    heads, groups = (s.n * s.D, s.H), (s.g * s.D, s.H)
    return [heads, groups, groups, heads[::-1], (s.F, s.H), (s.F, s.H), (s.H, s.F)]


def llama_weights(s):
    """In bf16; the head is a matrix of its own. RoPE keeps its frequencies twice, in fp32."""
    block = sum(rows * columns for rows, columns in llama_matrices(s)) + 2 * s.H
    return 2 * (2 * s.V * s.H + s.L * block + s.H) + 2 * 4 * (s.D // 2)


def llama_norm_keeps(s):
    """Its input in fp32 and the reciprocal deviation of each row; their product in bf16, and that weighted."""
    return 4 * s.N * s.H + 4 * s.N + 2 * s.N * s.H + 2 * s.N * s.H


def llama_whole_pass(s):
    """Returns what is in memory from the first block to the last. Masters, state and gradients are on the host."""
    boundaries = s.L * 2 * s.N * s.H
    rope = 2 * 2 * s.T * s.D + 8 * s.T  # cosines and sines; the positions
    return llama_weights(s) + boundaries + rope


def llama_block_keeps(s, groups):
    return (
        llama_norm_keeps(s)
        + 2 * s.N * (s.n + 2 * groups) * s.D  # queries and keys behind RoPE, which keeps its tables alone; values
        + attention_keeps(s, 2)
        + llama_norm_keeps(s)
        + 4 * 2 * s.N * s.F  # gate, silu(gate), up, and their product for the one with the down matrix
    )


def llama_backward_peak(s, groups=None):
    """In the last block, while every boundary is still there: the gradient of the gated product has just become the
    gradients of both its factors (3 F wide in all), and the product itself has been used (1 F)."""
    arriving = 2 * s.N * s.H  # the gradient of what the block returned
    inside = llama_block_keeps(s, s.g if groups is None else groups)
    return llama_whole_pass(s) + inside + arriving + (3 - 1) * 2 * s.N * s.F


def llama_forward_peak(s):
    """In a chunk of the loss, behind the last norm, whose result is what the head reads."""
    labels = 2 * 8 * s.N  # in one row: a copy, of int64; and the numbers of those that count
    gradients = 2 * s.N * s.H + 4 * s.V * s.H  # of the head's input; of the head, summed in fp32
    chunk = (4 + 4 + 2) * s.rows * s.V  # logits; their gradient, in the place of log_softmax's result; that in bf16
    product = 2 * s.V * s.H  # the chunk's part of the head's gradient
    entering = (2 * s.H + 8) * s.rows  # of the chunk: hidden states and labels
    return llama_whole_pass(s) + llama_norm_keeps(s) + labels + gradients + chunk + entering + product


MASTERS = ("precision=bf16-master", "gradient_checkpointing=every_layer", "loss=chunked", f"loss.rows={LLAMA.rows}")


def test_traced_peak_of_checkpointed_llama_in_16_bits_equals_the_formula(config):
    found = highest(llama(config, LLAMA, *MASTERS))
    assert max(found, key=found.get) == "backward"
    assert agree(found["forward"], llama_forward_peak(LLAMA))
    assert agree(found["backward"], llama_backward_peak(LLAMA))
    assert not agree(found["backward"], llama_backward_peak(LLAMA, groups=LLAMA.n))  # wrong: keys and values repeated


# --- Llama in bf16 rounded at random, Adafactor: the peak is in the step ---------------------------------------------

FEW = SimpleNamespace(B=1, T=4, N=4, H=64, F=128, n=4, g=2, D=16, L=3, V=300)


def rounding(n):
    """Returns the bytes for n elements, on top of weight and state: the stepped weight in fp32, noise, their sum; then
    isfinite, in torch (x == x) * (abs(x) != inf), whose parts live until the product exists. The step before needs
    16 bytes: weight and gradient in fp32, and the new update beside the gradient's square."""
    return (4 + 4 + 4) * n + (1 + 4 + 1 + 1) * n


def llama_shapes(s):
    """In the order in which they are stepped: matrices, embedding and head, norms."""
    return [*s.L * llama_matrices(s), (s.V, s.H), (s.V, s.H), *(2 * s.L + 1) * [(s.H,)]]


def adafactor_state(s):
    """Of rows and of columns, or of a norm's elements; an RMS."""
    return sum(4 * sum(shape) + 4 for shape in llama_shapes(s))


def adafactor_step(s, scratch=rounding):
    """Returns (gradients, scratch) at the peak: every other gradient waits until its parameter is stepped."""
    sizes = [shape[0] * shape[-1] if len(shape) == 2 else shape[0] for shape in llama_shapes(s)]
    return max(((2 * sum(sizes[number:]), scratch(size)) for number, size in enumerate(sizes, start=1)), key=sum)


def adafactor_peak(s, scratch=rounding):
    return llama_weights(s) + 8 * s.B * (s.T + 1) + adafactor_state(s) + sum(adafactor_step(s, scratch))


def test_traced_peak_of_adafactor_with_stochastic_rounding_equals_the_formula(config):
    found = highest(llama(config, FEW, "precision=bf16-sr", "optim=adafactor"))
    assert max(found, key=found.get) == "step"
    assert agree(found["step"], adafactor_peak(FEW))
    assert not agree(found["step"], adafactor_peak(FEW, lambda n: 16 * n))  # wrong: the step without its rounding
