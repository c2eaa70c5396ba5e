"""Tests Adafactor for weights that are stored only in 16 bits. This Adafactor computes the step of transformers'
Adafactor piece by piece, with little temporary memory."""

import copy

import pytest
import torch
from torch import nn
from transformers import optimization

from lowmem.memory.ledger import Ledger
from lowmem.memory.tracker import StorageTracker
from lowmem.plan.tracing.shapes import OPERATORS, ShapeMode
from lowmem.step.gradients import AS_STORED, Reading
from lowmem.step.one_weight import Step
from lowmem.system import process
from lowmem.techniques.optim import adafactor
from lowmem.techniques.optim.adafactor import Adafactor
from new_process import in_a_new_process

pytestmark = pytest.mark.kernels
RULE = {"lr": 1e-2, "scale_parameter": False, "relative_step": False, "weight_decay": 0.1}
# fp32 weights from 0.5 to 1 are 2**-24 apart, and from 1 to 2 they are 2**-23 apart. Sums of squares in
# different orders have a relative difference of 1e-7, so a step of 1e-2 differs by 1e-9. In each of four steps this
# changes at most a few roundings, of the decay or of the update.
REORDERED = 8 * 2**-24
SMALL = 256  # elements of a piece
CLIPPED = Reading(unscale=1 / 64, limit=1.5, clip=0.7)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(adafactor, "CHUNK", SMALL)


def written(wide, narrow):
    narrow.copy_(wide)


def gradients(shape, dtype, steps=4):
    """Returns gradients whose rows have different magnitudes, as in an embedding."""
    draw = torch.Generator().manual_seed(1)
    scale = torch.rand(shape[0], generator=draw).pow(4).view(-1, *[1] * (len(shape) - 1)) + 1e-3
    return [(30 * scale * torch.randn(shape, generator=draw)).to(dtype) for _ in range(steps)]


def start(shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) * 2 - 1


def theirs(shape, gradients, reading=AS_STORED, held=torch.float32, **rule):
    """Returns the weight, rounded to `held` after each fp32 step of transformers, and the optimizer state."""
    narrow = start(shape).to(held)
    p = nn.Parameter(narrow.float())
    optimizer = optimization.Adafactor([p], **RULE | rule)
    for gradient in gradients:
        p.data, p.grad = narrow.float(), reading(gradient)
        optimizer.step()
        narrow = p.detach().to(held)
    return narrow, optimizer.state[p]


def ours(shape, gradients, reading=AS_STORED, held=torch.float32, **rule):
    p = nn.Parameter(torch.tensor(float("nan")).expand(shape))
    optimizer, narrow = Adafactor([p], **RULE | rule), start(shape).to(held)
    for gradient in gradients:
        optimizer.step_narrow(Step(gradient, optimizer.param_groups[0], p, reading, narrow), written)
    return narrow, optimizer.state[p]


def error(found, right):
    return (found - right).abs().max().item()


# One piece; several pieces, of which the last is shorter; rows longer than a piece; a vector of several pieces, and of
# one; stacks of matrices (experts) that are smaller and larger than a piece.
SHAPES = [(8, 32), (50, 40), (3, 300), (1000,), (5,), (40, 2, 5), (3, 30, 20), (2, 3, 20, 30)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("reading", "dtype", "rule"),
    [
        (AS_STORED, torch.float32, {}),
        (CLIPPED, torch.bfloat16, {}),
        (AS_STORED, torch.float16, {"weight_decay": 0.0, "clip_threshold": 0.5}),
        (AS_STORED, torch.float32, {"beta1": 0.9, "scale_parameter": True}),
    ],
    ids=["plain", "clipped", "no decay", "momentum"],
)
def test_adafactor_step_in_pieces_equals_the_step_of_transformers(shape, reading, dtype, rule):
    given = gradients(shape, dtype)
    (right, expected), (found, state) = theirs(shape, given, reading, **rule), ours(shape, given, reading, **rule)
    assert error(found, right) < REORDERED
    assert list(state) == list(expected)
    for key, value in expected.items():
        assert type(state[key]) is type(value)
        if isinstance(value, torch.Tensor):
            assert (state[key].shape, state[key].dtype) == (value.shape, value.dtype)
            torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-7)


def first_piece_alone(read, pieces, elements, rms=adafactor._rms):
    return rms(read, pieces[:1], elements / len(pieces))


@pytest.mark.parametrize("shape", [(50, 40), (1000,), (3, 30, 20)], ids=str)
def test_adafactor_with_the_rms_of_the_first_piece_differs_from_transformers(shape, monkeypatch):
    """In the deliberately wrong variant, the RMS of the update is computed from the first piece only."""
    given = gradients(shape, torch.float32)
    right, _ = theirs(shape, given)
    monkeypatch.setattr(adafactor, "_rms", first_piece_alone)
    assert error(ours(shape, given)[0], right) > 100 * REORDERED


@pytest.mark.parametrize("shape", [(50, 40), (1000,), (3, 30, 20)], ids=str)
def test_adafactor_step_of_16_bit_weights_equals_the_rounded_step_of_transformers(shape):
    given = gradients(shape, torch.bfloat16)
    right, found = (run(shape, given, held=torch.bfloat16)[0] for run in (theirs, ours))
    # sums in another order rarely change a rounding: 1e-7 of a step is 1e-6 of the spacing of bf16
    assert found.dtype == torch.bfloat16 and (found == right).float().mean() > 0.999
    assert (right != start(shape).bfloat16()).float().mean() > 0.5


def test_adafactor_alternating_steps_in_pieces_and_plain_steps_equals_transformers():
    shape, given = (50, 40), gradients((50, 40), torch.float32)
    right, _ = theirs(shape, given)
    p = nn.Parameter(start(shape))
    optimizer = Adafactor([p], **RULE)
    for number, gradient in enumerate(given):
        if number % 2:
            p.grad = gradient.clone()
            optimizer.step()
        else:
            optimizer.step_narrow(Step(gradient, optimizer.param_groups[0], p, AS_STORED, p.data), written)
        saved, optimizer = copy.deepcopy(optimizer.state_dict()), Adafactor([p], **RULE)
        optimizer.load_state_dict(saved)
    assert error(p.detach(), right) < REORDERED


def test_adafactor_steps_of_a_whole_fp32_weight_have_the_bits_of_transformers():
    shape, given = (50, 40), gradients((50, 40), torch.float32)
    p = nn.Parameter(start(shape))
    optimizer = Adafactor([p], **RULE)
    for gradient in given:
        p.grad = gradient.clone()
        optimizer.step()
    assert torch.equal(p.detach(), theirs(shape, given)[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adafactor_pieces_are_written_in_order(shape):
    p = nn.Parameter(torch.zeros(1).expand(shape))
    optimizer, narrow, seen = Adafactor([p], **RULE), start(shape).bfloat16(), []

    def noted(wide, here):
        first = len(seen)
        assert wide.dtype == torch.float32 and wide.shape == here.shape and wide.dim() == 1
        assert here.data_ptr() == narrow.view(-1)[first:].data_ptr()
        seen.extend(range(first, first + len(here)))

    optimizer.step_narrow(Step(narrow.clone(), optimizer.param_groups[0], p, AS_STORED, narrow), noted)
    assert seen == list(range(p.numel()))


def scratch(shape):
    """Returns the temporary memory of a second step in bytes. The first step creates the state."""
    p = nn.Parameter(torch.zeros(1).expand(shape))
    optimizer, narrow = Adafactor([p], **RULE), torch.ones(shape, dtype=torch.bfloat16)
    gradient = torch.ones_like(narrow)
    step = Step(gradient, optimizer.param_groups[0], p, CLIPPED, narrow)
    optimizer.step_narrow(step, written)
    ledger = Ledger()
    ledger.own("weights", lambda: [narrow, gradient])
    ledger.own("optimizer", lambda: [each for each in optimizer.state[p].values() if isinstance(each, torch.Tensor)])
    with StorageTracker(ledger.storages()) as tracker:
        before = tracker.now
        optimizer.step_narrow(step, written)
    return max(point.total for point in tracker.timeline()) - before


def bound(shape):
    """Returns a limit in bytes: two pieces in fp32, three fp32 numbers per row and per column, and one number per
    piece, for which torch allocates at least 64 bytes."""
    rows, columns = shape
    pieces = rows * columns / adafactor.CHUNK
    return 2 * 4 * adafactor.CHUNK + 3 * 4 * (rows + columns) + 64 * (pieces + 8)


@pytest.mark.parametrize("elements", [1 << 14, 1 << 16])
def test_temporary_memory_of_an_adafactor_step_is_two_fp32_pieces(elements, monkeypatch):
    monkeypatch.setattr(adafactor, "CHUNK", elements)
    shape = (2048, 256)
    assert 4 * elements < scratch(shape) <= bound(shape)
    monkeypatch.setattr(adafactor, "CHUNK", 1 << 19)  # in one piece
    allowed = bound(shape)
    monkeypatch.setattr(adafactor, "CHUNK", elements)
    assert scratch(shape) < allowed / 4


@pytest.mark.matrix
@in_a_new_process
def test_adafactor_step_raises_process_rss_by_less_than_a_quarter_of_the_fp32_weight(monkeypatch):
    """The tracker does not see fragmentation of the heap: pieces of 4 MiB that are allocated again and again, with
    small live tensors between them, can leave holes that add up to a full parameter in fp32."""
    monkeypatch.setattr(adafactor, "CHUNK", 1 << 20)
    shape = (16384, 2048)
    p = nn.Parameter(torch.zeros(1).expand(shape))
    optimizer, narrow = Adafactor([p], **RULE), torch.ones(shape, dtype=torch.bfloat16)
    gradient = torch.ones_like(narrow)
    process.trim()
    process.reset_peak_rss()
    before = process.rss_bytes()
    optimizer.step_narrow(Step(gradient, optimizer.param_groups[0], p, AS_STORED, narrow), written)
    assert process.peak_rss_bytes() - before < p.numel()  # 1 byte per element: a quarter of the fp32 weight


def test_adafactor_step_traced_with_fake_tensors_takes_at_most_250_000_operators_per_8_billion_parameters(monkeypatch):
    """The planner traces the step operator by operator, so the number of operators must be small."""
    monkeypatch.setattr(adafactor, "CHUNK", 1 << 22)
    shape = (20 * 1024, 4096)
    with ShapeMode() as shapes:
        p = nn.Parameter(torch.zeros(1).expand(shape))
        optimizer, narrow = Adafactor([p], **RULE), torch.ones(shape, dtype=torch.bfloat16)
        optimizer.step_narrow(Step(torch.ones_like(narrow), optimizer.param_groups[0], p, CLIPPED, narrow), written)
    assert optimizer.state[p]["exp_avg_sq_row"].shape == shape[:1]
    assert shapes.operators < OPERATORS * p.numel() / 8e9
