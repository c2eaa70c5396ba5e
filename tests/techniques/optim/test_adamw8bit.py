"""Tests AdamW with 8-bit state on the host: its error compared with the error of bitsandbytes, its fused pass, and its
two implementations (native code and torch operators)."""

import logging
import os

import bitsandbytes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from host_memory import linux
from lowmem.step import fp32_halves
from lowmem.step.gradients import AS_STORED, Reading
from lowmem.step.one_weight import Step
from lowmem.techniques.optim import adamw8bit, compiled
from lowmem.techniques.optim.adamw8bit import BLOCK, HostAdamW8bit

pytestmark = pytest.mark.kernels
KINDS = ("gaussian", "heavy tails", "scales", "sparse", "sparse rows", "constant", "constant in time")
RULE = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
needs_compiler = pytest.mark.skipif(compiled.library(adamw8bit.SOURCE) is None, reason="no C++ compiler")
WAYS = [pytest.param("native", marks=needs_compiler), "torch"]


@pytest.fixture
def way(request, monkeypatch):
    """Selects the implementation of a step: native code or torch operators."""
    if request.param == "torch":
        monkeypatch.setattr(adamw8bit, "library", lambda source: None)
    return request.param


def gradients(kind, n, steps):
    """Yields the gradient (n,) of each step."""
    draw = torch.Generator().manual_seed(1)
    scale = torch.exp(2 * torch.randn(n, generator=draw))  # about e**-6 to e**6 within a block
    still = torch.randn(n, generator=draw)
    for _ in range(steps):
        noise = torch.randn(n, generator=draw)
        yield (
            1e-3
            * {
                "gaussian": noise,
                "heavy tails": noise / torch.rand(n, generator=draw).clamp(min=1e-4),
                "scales": noise * scale,
                "sparse": noise * (torch.rand(n, generator=draw) < 0.02),
                "sparse rows": noise * (torch.rand(n // BLOCK, generator=draw) < 0.1).repeat_interleave(BLOCK),
                "constant": torch.ones(n),
                "constant in time": still,
            }[kind]
        )


def trained(make, kind, n=1 << 16, steps=20):
    p = nn.Parameter(torch.zeros(n))
    optimizer = make([p])
    for g in gradients(kind, n, steps):
        p.grad = g
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_host_adamw8bit_error_is_no_larger_than_the_error_of_bitsandbytes(kind, way):
    exact = trained(lambda p: torch.optim.AdamW(p, **RULE), kind)
    ours = trained(lambda p: HostAdamW8bit(p, **RULE), kind)
    theirs = trained(lambda p: bitsandbytes.optim.AdamW8bit(p, **RULE), kind)
    error, allowed = (((found - exact).norm() / exact.norm()).item() for found in (ours, theirs))
    assert error <= max(allowed, 1e-6), (error, allowed)  # 1e-6: for a constant gradient, both errors are fp32 rounding


def longest_step(steps=200):
    """Returns the largest change of an element in one step, in units of lr. The gradients of one element in a thousand
    are 1e6 times as large as the other gradients of its block."""
    torch.manual_seed(0)
    large = torch.where(torch.rand(1 << 16) < 1e-3, 1.0, 1e-6)
    p = nn.Parameter(torch.zeros(1 << 16))
    optimizer, longest = HostAdamW8bit([p], **RULE), 0.0
    for _ in range(steps):
        before = p.detach().clone()
        p.grad = torch.randn(1 << 16) * large
        optimizer.step()
        longest = max(longest, (p.detach() - before).abs().max().item() / RULE["lr"])
    return longest


# AdamW's steps are at most |m| / sqrt(v) <= (1 - 0.9) / sqrt((1 - 0.95) (1 - 0.9^2 / 0.95)) = 1.2 times lr.
# Rounding moments to 8-bit codes at most doubles this step.
LONGEST = 2.4


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_adamw8bit_steps_stay_below_2_4_lr_where_second_moments_are_tiny(way):
    assert longest_step() < LONGEST


@pytest.mark.wrong
def test_adamw8bit_with_second_moments_of_zero_takes_steps_of_over_100_lr(monkeypatch):
    """In the deliberately wrong variant, tiny second moments are stored as 0."""
    monkeypatch.setattr(adamw8bit, "library", lambda source: None)
    monkeypatch.setattr(adamw8bit, "LEAST", 0)
    assert longest_step(20) > 100


def stepped(n, dtype=torch.float32, rounded=None, reading=AS_STORED, steps=3, threads=2, scale=1.0, bits=8):
    """Returns (weights, state, weights rounded to the dtype `rounded`) after `steps` steps. The rounded weights are
    None if `rounded` is None. Gradients are multiplied by `scale` and then cast to `dtype`."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(n))
    out = None if rounded is None else torch.empty(n, dtype=rounded)
    optimizer, before = HostAdamW8bit([{"params": [p], "state_bits": bits}], lr=1e-2), torch.get_num_threads()
    torch.set_num_threads(threads)
    for _ in range(steps):
        gradient = (torch.randn(n) * 1e-3 * scale).to(dtype)
        optimizer.step_from(Step(gradient, optimizer.param_groups[0], p, reading, out))
    torch.set_num_threads(before)
    return p.detach(), optimizer.state[p], out


def same(one, other):
    return torch.equal(one[0], other[0]) and all(
        torch.equal(one[1][key], other[1][key]) for key in one[1] if torch.is_tensor(one[1][key])
    )


SIZES = (4096, 4097, 5000, BLOCK * 77 + 255)  # complete blocks, and incomplete last blocks


@needs_compiler
@pytest.mark.parametrize("n", SIZES)
def test_adamw8bit_step_has_equal_bits_with_one_and_two_threads(n):
    assert same(stepped(n, threads=1), stepped(n, threads=2))


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("n", [100, *SIZES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_adamw8bit_pass_has_the_bits_of_separate_unscaling_clipping_and_rounding(n, dtype, way):
    """The fused pass reads 16-bit gradients, unscales them, clips elements and norm, steps, and rounds the weights. The
    comparison makes a plain step and does the rest in separate operations."""
    reading = Reading(2.0**-10, 2e-3, 0.37)
    fused = stepped(n, dtype, dtype, reading, scale=1024)
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(n))
    optimizer = HostAdamW8bit([p], lr=1e-2)
    for _ in range(3):
        p.grad = (torch.randn(n) * 1e-3 * 1024).to(dtype).float() * 2.0**-10
        nn.utils.clip_grad_value_([p], 2e-3)
        p.grad *= 0.37
        optimizer.step()
    assert same(fused, (p.detach(), optimizer.state[p]))
    assert torch.equal(fused[2], AS_MASTERS[dtype](p.detach()))


def every_magnitude(dtype):
    """Returns fp32 numbers: all values of the 16-bit dtype (with subnormals, infinities and NaN), ties between
    neighbours, and numbers of other magnitudes, some of which overflow in fp16."""
    torch.manual_seed(0)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    ties = torch.cat([every[:-1] / 2 + every[1:] / 2, every * (1 + 2.0**-9)])
    wide = torch.cat([every, ties, torch.randn(1 << 16) * torch.exp(8 * torch.randn(1 << 16))])
    return torch.cat([wide, torch.tensor([65519.0, 65520.0, 2.0**-25, 2.0**-25 * 1.0001, -0.0, 3e38])])


def half_up(wide):
    """Rounds fp32 to bf16 as masters are rounded: to nearest, ties away from zero."""
    upper = (wide.numpy().view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)
    return torch.from_numpy(upper.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


AS_MASTERS = {torch.bfloat16: half_up, torch.float16: Tensor.half}


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("dtype", AS_MASTERS)
def test_adamw8bit_rounds_weights_to_16_bits_as_masters_are_rounded(dtype, way):
    wide = every_magnitude(dtype)
    p, out = nn.Parameter(wide.clone()), torch.empty(wide.numel(), dtype=dtype)
    optimizer = HostAdamW8bit([p], lr=0.0, weight_decay=0.0)
    optimizer.step_from(Step(torch.zeros(wide.numel(), dtype=dtype), optimizer.param_groups[0], p, narrow=out))
    finite, expected = ~wide.isnan(), AS_MASTERS[dtype](wide)
    assert torch.equal(out.view(torch.int16)[finite], expected.view(torch.int16)[finite])
    assert out[~finite].isnan().all()
    even = torch.equal(expected[finite], wide.to(dtype)[finite])
    assert even == (dtype == torch.float16)  # in bf16, rounding ties to even would give different bits


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("bits", [8, 32])
def test_adamw8bit_step_of_a_weight_with_an_fp32_copy_writes_the_updated_weight_without_rounding(way, bits):
    p, _, out = stepped(5000, rounded=torch.float32, bits=bits)
    assert torch.equal(out, p)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adamw8bit_step_from_16_bit_gradients_has_the_bits_of_fp32_gradients(dtype):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    sixteen, wide = (nn.Parameter(torch.zeros(every.numel())) for _ in range(2))
    for p, g in ((sixteen, every), (wide, every.float())):
        optimizer = HostAdamW8bit([p], lr=1.0)
        optimizer.step_from(Step(g, optimizer.param_groups[0], p))
    assert torch.equal(sixteen, wide)


@needs_compiler
@pytest.mark.parametrize("n", SIZES)
def test_adamw8bit_without_a_compiler_equals_the_native_step_within_rounding(n, monkeypatch, caplog):
    native = stepped(n, torch.bfloat16, torch.bfloat16, steps=1)
    compiled.library.cache_clear()
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with caplog.at_level(logging.INFO, logger="lowmem"):
        plain = stepped(n, torch.bfloat16, torch.bfloat16, steps=1)
    compiled.library.cache_clear()
    assert "no C++ compiler on the PATH" in caplog.text and "torch operators" in caplog.text
    # fused multiply-adds round once where operators round twice: 6e-8 of a weight of up to 5, and a number halfway
    # between two codes may get either code
    torch.testing.assert_close(native[0], plain[0], rtol=0, atol=1e-6)
    assert all((native[1][key].int() - plain[1][key].int()).abs().max() <= 1 for key in ("m", "u"))


@linux
def test_cpp_compiler_runs_in_a_separate_terminal_session(tmp_path):
    """Ctrl-C must not interrupt the compiler. A terminal signals all foreground processes of its session."""
    compiled._compile(["sh", "-c", f"cut -d' ' -f6 /proc/self/stat > {tmp_path}/session"])
    assert int((tmp_path / "session").read_text()) not in (0, os.getsid(0))


@needs_compiler
def test_cpp_compiler_failure_is_logged_and_returns_no_library(monkeypatch, caplog, tmp_path):
    source = tmp_path / "broken.cpp"
    source.write_text("this is not C++")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO, logger="lowmem"):
        found = compiled.library(source)
    assert found is None
    assert "failed (" in caplog.text and "broken" in caplog.text


@needs_compiler
def test_native_library_is_compiled_again_only_if_a_source_or_the_flags_change(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = next(filter(None, map(compiled.shutil.which, compiled.COMPILERS)))
    first = compiled._built(compiler, adamw8bit.SOURCE, compiled.FLAGS)
    monkeypatch.setattr(compiled, "_compile", None)  # a call raises TypeError
    assert compiled._built(compiler, adamw8bit.SOURCE, compiled.FLAGS) == first and first.is_file()
    with pytest.raises(TypeError):
        compiled._built(compiler, adamw8bit.SOURCE, [*compiled.FLAGS, "-ffp-contract=off"])
    for changed in ("adamw8bit.cpp", "half.hpp"):
        folder = tmp_path / changed
        folder.mkdir()
        for name in ("adamw8bit.cpp", "half.hpp"):
            text = adamw8bit.SOURCE.with_name(name).read_text()
            (folder / name).write_text(text + ("//\n" if name == changed else ""))
        with pytest.raises(TypeError):
            compiled._built(compiler, folder / "adamw8bit.cpp", compiled.FLAGS)


@needs_compiler
@pytest.mark.parametrize(
    "damage", [lambda content: content[:5000], lambda content: content + b"0"], ids=["truncated", "extended"]
)
def test_damaged_native_library_is_compiled_again(monkeypatch, tmp_path, damage):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = next(filter(None, map(compiled.shutil.which, compiled.COMPILERS)))
    built = compiled._built(compiler, adamw8bit.SOURCE, compiled.FLAGS)
    right = built.read_bytes()
    built.write_bytes(damage(right))
    assert compiled._built(compiler, adamw8bit.SOURCE, compiled.FLAGS).read_bytes() == right


@needs_compiler
def test_adamw8bit_refuses_weights_that_are_not_contiguous_fp32():
    for p in (nn.Parameter(torch.zeros(8192).bfloat16()), nn.Parameter(torch.zeros(128, 64).T)):
        p.grad = torch.zeros_like(p)
        with pytest.raises(ValueError, match="contiguous fp32"):
            HostAdamW8bit([p], lr=1e-3).step()


# --- weights in two halves -------------------------------------------------------------------------------------------


def in_halves(n, dtype, reading=AS_STORED, bits=8, scale=1.0, between=lambda rest: None):
    """Returns the result of `stepped` for weights that are stored in two 16-bit halves, with the halves joined. The
    parameter is a single NaN, expanded to n elements. `between(lower halves)` is called after each step."""
    torch.manual_seed(0)
    upper, rest = fp32_halves.halves(torch.randn(n))
    p = nn.Parameter(torch.full((1,), torch.nan, dtype=torch.bfloat16).expand(n))
    optimizer = HostAdamW8bit([{"params": [p], "state_bits": bits}], lr=1e-2)
    for _ in range(3):
        gradient = (torch.randn(n) * 1e-3 * scale).to(dtype)
        optimizer.step_from(Step(gradient, optimizer.param_groups[0], p, reading, upper), rest)
        between(rest)
    assert p.isnan().all() and p.untyped_storage().nbytes() == 2
    return fp32_halves.joined(upper, rest), optimizer.state[p], upper


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("n", [100, *SIZES])
@pytest.mark.parametrize("dtype", compiled.DTYPES)
def test_adamw8bit_on_split_weights_has_the_bits_of_fp32_weights(n, dtype, way):
    reading = Reading(2.0**-10, 2e-3, 0.37)
    for bits in (8, 32):
        whole = stepped(n, dtype, torch.bfloat16, reading, scale=1024, bits=bits)
        found = in_halves(n, dtype, reading, bits, scale=1024)
        assert same(found, whole) and torch.equal(found[2], whole[2])
        assert [v.dtype for v in found[1].values() if torch.is_tensor(v)] == [
            v.dtype for v in whole[1].values() if torch.is_tensor(v)
        ]


@pytest.mark.wrong
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_split_weights_without_their_lower_half_differ_from_fp32_weights(way):
    """The deliberately wrong variant zeroes the lower halves after each step, so only the upper 16 bits are kept."""
    whole = stepped(5000, torch.bfloat16, torch.bfloat16)
    assert not same(in_halves(5000, torch.bfloat16, between=Tensor.zero_), whole)


def unmoved(wide):
    """Returns True if a step of length zero leaves all bits of these split weights unchanged."""
    upper, rest = fp32_halves.halves(wide)
    p = nn.Parameter(wide)
    optimizer = HostAdamW8bit([p], lr=0.0, weight_decay=0.0)
    optimizer.step_from(Step(torch.zeros(wide.shape), optimizer.param_groups[0], p, narrow=upper), rest)
    return torch.equal(upper.view(torch.int16), half_up(wide).view(torch.int16)) and torch.equal(
        fp32_halves.joined(upper, rest).view(torch.int32), wide.view(torch.int32)
    )


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_adamw8bit_step_of_zero_length_leaves_split_weights_unchanged(way):
    wide = every_magnitude(torch.bfloat16)
    assert unmoved(wide[wide.isfinite()])


@pytest.mark.wrong
@needs_compiler
def test_deliberately_wrong_rounding_to_even_changes_split_weights_in_a_step_of_zero_length(monkeypatch, tmp_path):
    """The C++ code rounds ties to even instead of away from zero."""
    for name in ("adamw8bit.cpp", "half.hpp"):
        text = adamw8bit.SOURCE.with_name(name).read_text()
        (tmp_path / name).write_text(text.replace("(bits(x) + 0x8000u) >> 16", "BFloat16(x).upper"))
    monkeypatch.setattr(adamw8bit, "SOURCE", tmp_path / "adamw8bit.cpp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wide = every_magnitude(torch.bfloat16)
    assert compiled.library(adamw8bit.SOURCE) is not None and not unmoved(wide[wide.isfinite()])


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("tiny", [1e-33, 1e-36])  # 127**2 / m is finite for 1e-33, infinite for 1e-36
def test_adamw8bit_step_with_tiny_gradients_stores_zero_first_moments_and_leaves_the_weights_unchanged(way, tiny):
    """If the first moments were not stored as zero, codes would be computed from infinity at 1e-36, and the codes of
    zeros from NaN."""
    p = nn.Parameter(torch.ones(4096))
    optimizer, gradient = HostAdamW8bit([p], **RULE), torch.zeros(4096)
    gradient[::2] = tiny
    for _ in range(2):
        optimizer.step_from(Step(gradient, optimizer.param_groups[0], p))
    state = optimizer.state[p]
    assert not state["m"].any() and (state["u"] == adamw8bit.LEAST).all() and p.eq(1).all()
