"""Tests that private names of other packages still do what lowmem needs. If a new version changes such a name, the
message of the failing test states the feature that breaks. Further tests check that only torch_private.py and
lightning_private.py use private names of other packages."""

import ast
import re
import threading
import warnings
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

import networks
from conftest import ROOT
from lowmem.system import lightning_private, torch_private

SOURCE = ROOT / "src" / "lowmem"
INTERNALS = [SOURCE / "system" / name for name in ("torch_private.py", "lightning_private.py")]


def breaks(what):
    return f"torch or transformers changed what this leans on: {what}"


class Seen(torch_private.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_sees_the_matmuls_of_forward_and_backward():
    x = torch.ones(2, 2, requires_grad=True)
    with Seen() as seen:
        (x @ x).sum().backward()
    message = breaks("the memory meter, plans and gradient_checkpointing=selective")
    assert seen.functions.count(torch.ops.aten.mm.default) == 3, message
    assert all(isinstance(func, torch_private.OpOverload) for func in seen.functions), message


def test_unexpected_tensors_of_weight_files_are_found_even_if_transformers_ignores_them():
    model = networks.network("gpt2")
    tensors = {name: tensor.to("meta") for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    tensors |= {name: torch.empty(1, device="meta") for name in ("transformer.h.0.attn.bias", "mtp.fc.weight")}
    how = {"config": model.config, "state_dict": tensors, "device_map": "meta", "output_loading_info": True}
    with torch_private.all_unexpected() as found:
        _, info = type(model).from_pretrained(None, **how)
    message = breaks("telling which weights of a model's files are not used")
    assert found == {"transformer.h.0.attn.bias", "mtp.fc.weight"}, message
    assert set(info["unexpected_keys"]) == {"mtp.fc.weight"}, message


def test_dispatch_modes_of_a_thread_can_be_entered_in_another_thread():
    found = []

    def look(modes):
        with modes():
            found.append((torch.ones(1), torch.empty(1).device.type))
        found.append((torch.ones(1), torch.empty(1).device.type))

    def in_thread(*modes):
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            thread = threading.Thread(target=look, args=(torch_private.modes_of_this_thread(),))
        thread.start()
        thread.join()
        return [found.pop(-2), found.pop()]

    message, seen = breaks("weights.order=by_layer"), Seen()
    in_thread(seen)
    assert seen.functions.count(torch.ops.aten.empty.memory_format) == 1, message
    assert [device for _, device in in_thread(torch.device("meta"))] == ["meta", "cpu"], message
    fake, real = (tensor for tensor, _ in in_thread(torch_private.LeanFakeTensorMode(), Seen()))
    assert isinstance(fake, torch_private.FakeTensor) and type(real) is torch.Tensor, message


def test_fake_tensors_have_a_storage_without_memory():
    with torch_private.LeanFakeTensorMode():
        huge = torch.empty(1 << 40)
    message = breaks("every plan")
    assert huge.untyped_storage().nbytes() == 4 << 40 and huge.device.type == "cpu", message


def test_lean_fake_tensor_equals_torchs_fake_tensor():
    with torch_private.LeanFakeTensorMode() as mode:
        theirs = torch.empty(3, 4)
    made = mode.holding(torch.empty(3, 4, device="meta"))
    message = breaks("every plan")
    assert type(made) is type(theirs) is torch_private.FakeTensor and made.device == theirs.device, message
    assert made.__dict__ == theirs.__dict__, message
    keys = [str(torch._C._dispatch_keys(tensor)) for tensor in (made, theirs)]
    assert keys[0] == keys[1], message


def test_fake_process_group_runs_collectives():
    message = breaks("plans of several devices")

    dist.init_process_group("fake", store=torch_private.FakeStore(), rank=3, world_size=8)
    try:
        with Seen() as seen:
            dist.all_reduce(torch.ones(4))
        assert [func.namespace for func in seen.functions if "allreduce" in str(func)] == ["c10d"], message
        with torch_private.LeanFakeTensorMode(), torch_private.unset_fake_temporarily():
            assert type(torch.ones(1)) is torch.Tensor, message
        assert torch_private.group_of(dist.group.WORLD) is dist.group.WORLD, message
        assert torch_private.group_of(dist.group.WORLD.group_name) is dist.group.WORLD, message
    finally:
        dist.destroy_process_group()


def test_timeout_of_a_process_group_can_be_set(group_of_one):
    torch_private.set_timeout(group_of_one, timedelta(seconds=7))
    limit = group_of_one._get_backend(torch.device("cpu")).options._timeout
    assert limit == timedelta(seconds=7), breaks("the time limit of tensor parallelism")


def test_wait_tensor_returns_its_input_storage(group_of_one):
    with Seen() as seen:
        funcol.wait_tensor(funcol.all_reduce(torch.ones(2), "sum", group_of_one))
    tensor = torch.ones(2)
    came = torch_private.WAITS(tensor)
    message = breaks("plans of tensor_parallel, which would hold twice what is gathered")
    assert torch_private.WAITS in seen.functions and came.data_ptr() == tensor.data_ptr(), message


def test_ddp_buckets_are_rebuilt_once_and_unreduced_parameters_are_detected(group_of_one):
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    ddp = nn.parallel.DistributedDataParallel(Summed(layers), gradient_as_bucket_view=True)
    places = []
    for _ in range(3):
        ddp(torch.ones(2), 2).backward()
        places.append([p.grad.data_ptr() for p in layers.parameters()])
        torch_private.check_reduced(ddp)
        torch_private.rebuild_buckets(ddp)
    assert places[0] != places[1] == places[2], breaks("gradients of ddp, which would be there twice for a moment")
    ddp(torch.ones(2), 1).backward()
    with pytest.raises(RuntimeError, match="finished reduction"):
        torch_private.check_reduced(ddp)


class Summed(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x, count):
        return sum(layer(x).sum() for layer in self.layers[:count])


def test_reduce_scatter_is_a_dispatched_operator(group_of_one):
    with Seen() as seen:
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2))
    assert torch_private.ADDS_IN_PARTS in seen.functions, breaks("plans of fsdp over gloo, which adds a copy")


def test_tensor_creation_and_comparison_are_dispatched_operators():
    with Seen() as seen:
        torch.equal(torch.tensor([1]), torch.tensor([1]))
        torch.allclose(torch.tensor([1]), torch.tensor([1]))
    assert {*torch_private.COMPARES} <= {*seen.functions}, breaks("plans of a pipeline")
    assert any(func in torch_private.MAKES_OF_NUMBERS for func in seen.functions), breaks("plans of several devices")


def test_device_query_is_a_dispatched_operator():
    class Counted(torch_private.LeanFakeTensorMode):
        asked = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.asked += func is torch_private.ASKS_FOR_DEVICE
            return super().__torch_dispatch__(func, types, args, kwargs or {})

    with Counted() as mode:
        torch.ones(2, requires_grad=True).sum().backward()
    assert mode.asked, breaks("the time of a plan: that it is answered at once")


def test_storage_key_is_equal_for_views_of_a_storage_and_differs_between_storages():
    with torch_private.LeanFakeTensorMode():
        a, b = torch.empty(4), torch.empty(4)
    for one, other in ((a, b), (torch.empty(4), torch.empty(4))):
        key = torch_private.storage_key(one)
        message = breaks("bytes in memory.csv: a storage would count twice or not at all")
        assert key == torch_private.storage_key(one[1:]) == torch_private.storage_key(one.untyped_storage()), message
        assert key != torch_private.storage_key(other), message


def test_tree_functions_visit_nested_leaves():
    nested = {"a": [torch.ones(1), 2], "b": (torch.zeros(1),)}
    message = breaks("the memory meter and plans")
    assert [type(leaf) for leaf in torch_private.tree_leaves(nested)] == [torch.Tensor, int, torch.Tensor], message
    assert torch_private.tree_map_only(torch.Tensor, lambda t: t.item(), nested) == {"a": [1.0, 2], "b": (0.0,)}, (
        message
    )


def test_quantized_optimizer_state_exposes_its_inner_tensors():
    from torchao.optim.subclass_8bit import OptimState8bit

    state = OptimState8bit.zeros((4, 256), True, 256, "cpu")
    message = breaks("bytes of 8-bit optimizer states")
    assert torch_private.is_traceable_wrapper_subclass(state) and state.__tensor_flatten__()[0], message
    assert not torch_private.is_traceable_wrapper_subclass(torch.ones(1)), message


def test_open_checkpoint_recomputes_code_run_between_its_start_and_end():
    saved, repeated, x = [], [], torch.ones(3, requires_grad=True)

    def again():
        repeated.append(True)
        return x.exp()

    def save(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        opened = torch_private.open_checkpoint(again)
        next(opened)
        y = x.exp()
        next(opened, None)
    message = breaks("gradient_checkpointing=every_k and sqrt")
    assert not sum(t.numel() for t in saved) and not repeated, message  # torch 2.11 saves an empty tensor
    y.sum().backward()
    assert repeated == [True] and torch.equal(x.grad, x.detach().exp()), message


def test_operator_schema_states_mutation_and_aliasing():
    aten, message = torch.ops.aten, breaks("gradient_checkpointing=selective and the times of plans")
    assert not torch_private.schema(aten.mul.Tensor).is_mutable and torch_private.schema(aten.mul_.Tensor).is_mutable, (
        message
    )
    (written,) = [a.name for a in torch_private.schema(aten.mul_.Tensor).arguments if a.is_write]
    (view,) = torch_private.schema(aten.view.default).returns
    assert written == "self" and view.alias_info is not None and not view.alias_info.is_write, message


def test_attention_on_a_cpu_is_one_of_the_listed_attention_operators():
    q = torch.ones(1, 1, 4, 8, requires_grad=True)
    with Seen() as seen:
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    message = breaks("gradient_checkpointing=selective would not keep attention, precision=16 not widen it")
    assert {torch_private.ATTENTION_ON_CPU, torch_private.ATTENTION_BACKWARD_ON_CPU} <= {*seen.functions}, message
    assert torch_private.ATTENTION_ON_CPU in torch_private.ATTENTION and len({*torch_private.ATTENTION}) == 4, message


@pytest.mark.parametrize("name", ["FLASH", "EFFICIENT", "CUDNN", "MATH"])
def test_cuda_attention_operators_have_shapes_and_gradients_without_a_card(name):
    of_each = {
        "FLASH": lambda *qkv: torch_private.ATTENTION_FLASH(*qkv, 0.1, True),
        "EFFICIENT": lambda *qkv: torch_private.ATTENTION_EFFICIENT(*qkv, None, True, 0.1, True),
        "CUDNN": lambda *qkv: torch_private.ATTENTION_CUDNN(*qkv, None, True, 0.1, True),
        "MATH": lambda *qkv: torch_private.ATTENTION_MATH.decompose(*qkv, None, 0.1, True),
    }
    message = breaks("plans for cards: what attention saves there")
    with torch_private.FakeTensorMode(), Seen() as seen:
        q, k, v = (torch.empty(2, 4, 64, 16, requires_grad=True) for _ in range(3))
        out = of_each[name](q, k, v)[0]
        assert type(out.grad_fn).__name__.startswith("ScaledDotProduct") == (name != "MATH"), message
        out.sum().backward()
    assert q.grad.shape == k.grad.shape == v.grad.shape == (2, 4, 64, 16), message
    assert bool({*torch_private.ATTENTION_BACKWARD} & {*seen.functions}) == (name != "MATH"), message


def test_reading_a_number_from_a_tensor_is_a_dispatched_operator():
    with Seen() as seen:
        assert bool(torch.ones(()) > 0)
    assert torch_private.READ_A_NUMBER in seen.functions, breaks("plans of what asks whether gradients are finite")


def test_grouped_matmul_of_fake_tensors_has_the_shape_of_the_product():
    a, b = torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(2, 16, 8, dtype=torch.bfloat16)
    ends = torch.tensor([1, 4], dtype=torch.int32)
    with torch_private.LeanFakeTensorMode() as fake:
        out = torch_private.GROUPED_PRODUCTS(*map(fake.from_tensor, (a, b)), offs=fake.from_tensor(ends))
    assert out.shape == (4, 8), breaks("plans of mixtures of experts")


def test_nonzero_and_split_are_dispatched_operators():
    with Seen() as seen:
        rows, columns = torch.where(torch.eye(3) > 0)
        parts = torch.arange(5).split([2, 3])
    assert [len(one) for one in (rows, columns, *parts)] == [3, 3, 2, 3]
    message = breaks("plans of mixtures whose experts are called one by one")
    assert torch_private.NONZERO in seen.functions and torch_private.SPLIT in seen.functions, message


def test_function_is_compiled_for_20_values_if_the_recompile_limit_is_raised_in_a_context():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda x, n: x * n, backend=backend, dynamic=False, fullgraph=True)
    before = torch._dynamo.config.recompile_limit
    for n in range(20):
        with torch_private.allow_graphs(64):
            compiled(torch.ones(2), n)
    assert before == torch._dynamo.config.recompile_limit < 20
    assert len(graphs) == 20, breaks("compiled blocks with many shapes")


def test_compilation_of_a_branch_on_a_value_raises_one_of_the_compilation_errors():
    torch.compiler.reset()
    branches = torch.compile(lambda x: x if x.sum() > 0 else -x, backend="eager", fullgraph=True)
    with pytest.raises(torch_private.compilation_errors()):
        branches(torch.ones(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x):
        return ((x @ self.weight).sigmoid() @ self.weight).sigmoid()


@pytest.mark.parametrize(("fraction", "kept"), [(0.0, 1), (1.0, 3)])
def test_compiled_block_stores_1_activation_with_memory_budget_0_and_3_with_memory_budget_1(fraction, kept):
    torch.compiler.reset()
    block = Block()
    block.compile(backend="aot_eager_decomp_partition")
    with torch_private.within_budget(fraction):
        out = block(torch.ones(512, 8, requires_grad=True))
    activations = [t for t in out.grad_fn.saved_tensors if t.numel() == 512 * 8]
    assert len(activations) == kept, breaks("compile.activation_memory_budget")
    assert torch_private.has_memory_budget()


def test_replaced_torch_kernels_are_restored_after_the_context():
    x = torch.ones(2)
    with (
        warnings.catch_warnings(action="ignore"),
        torch_private.replaced_kernels() as ours,
    ):  # torch warns once per process
        ours.impl("neg", lambda t: t + 41.0, "CPU")
        within = torch.neg(x)
    message = breaks("precision=16 on a CPU without its products: the next job of a sweep would have ours")
    assert within.tolist() == [42.0, 42.0] and torch.neg(x).tolist() == [-1.0, -1.0], message


def test_kernels_of_cuda_autocast_are_registered_in_torch():
    found = [torch_private.has_kernel(name, "AutocastCUDA") for name in ("layer_norm", "exp", "relu")]
    assert found == [True, True, False], breaks("plans of precision=16 and bf16 for a card")


def test_in_backward_is_true_only_during_a_backward_pass():
    x, seen = torch.ones(1, requires_grad=True), []
    x.register_hook(lambda _: seen.append(torch_private.in_backward()))
    x.sum().backward()
    assert seen == [True] and not torch_private.in_backward(), breaks(
        "weights=streamed: weights come when they are needed"
    )


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_torch_reports_whether_the_cpu_has_16_bit_matmul_units(name):
    asked = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    message = breaks("16-bit precisions on this CPU: a product would take 10 to 100 times as long")
    assert asked is not None or not torch.backends.mkldnn.is_available(), message
    assert torch_private.cpu_multiplies_in(name) == (asked is None or asked()), message
    assert torch_private.cpu_multiplies_in("a dtype of which torch says nothing")


def test_tensors_count_as_real_ends_the_tracing_mode_of_transformers():
    from transformers.utils import import_utils

    with torch_private.LeanFakeTensorMode():
        x = torch.empty(1)
        before = import_utils.is_tracing(x)
        with torch_private.tensors_count_as_real():
            within = import_utils.is_tracing(x)
    assert (before, within) == (True, False), breaks("plans: each would count a mask of (B, 1, T, T)")


# --- no other file uses private names ---------------------------------------------------------------------------------

PUBLIC_ALL_THE_SAME = {
    "_version": "a tensor's count of changes in place: torch's notes on autograd",
    "_record_memory_history": "torch's notes on CUDA memory",
    "_dump_snapshot": "torch's notes on CUDA memory",
    "_asdict": "of a named tuple: Python's own",
    "_replace": "of a named tuple: Python's own",
    "torch.utils._pytree": "a logger's name",
}


def is_private(name):
    """Returns True if a part of a dotted name begins with an underscore and does not end with two underscores."""
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def own_names(trees):
    """Returns the names of the methods that the modules define and of the attributes that they set."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    bodies = [part for node in nodes if isinstance(node, ast.ClassDef) for part in node.body]
    methods = {part.name for part in bodies if isinstance(part, ast.FunctionDef)}
    return methods | {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def private_of_others(tree, own):
    """Yields the private names of other packages that a module uses as attributes, in imports, or in strings with
    dotted names. Args: own: names of attributes that are lowmem's own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node.attr
        elif isinstance(node, ast.Import):
            yield from filter(is_private, (alias.name for alias in node.names))
        elif isinstance(node, ast.ImportFrom) and not node.module.startswith(("lowmem", "__future__")):
            yield from filter(is_private, (node.module, *(alias.name for alias in node.names)))
        elif isinstance(node, ast.Constant) and re.fullmatch(r"(torch|lightning|transformers)[.\w]+", str(node.value)):
            yield from filter(is_private, [node.value])


def found(files):
    trees = {file: ast.parse(file.read_text()) for file in files}
    own = own_names(trees.values())
    return {(file.name, name) for file, tree in trees.items() for name in private_of_others(tree, own)}


def test_only_two_source_files_use_private_names_of_other_packages():
    others = [file for file in SOURCE.rglob("*.py") if file not in INTERNALS]
    touched = found(others)
    assert {(file, name) for file, name in touched if name not in PUBLIC_ALL_THE_SAME} == set()
    assert {name for _, name in touched} == PUBLIC_ALL_THE_SAME.keys()  # every exception is used


@pytest.mark.wrong
def test_check_of_private_names_finds_every_kind_of_use(tmp_path):
    lines = (
        "import torch._dynamo",
        "from torch._ops import OpOverload",
        "from torch.utils.checkpoint import _checkpoint",
        "tensor.untyped_storage()._cdata",
        "patch('transformers.utils._hidden.thing')",
        "self._ours = self._theirs + self.__dict__",
    )
    (tmp_path / "a.py").write_text("\n".join(lines))
    seen = {name for _, name in found([tmp_path / "a.py"])}
    assert seen == {
        *("torch._dynamo", "torch._ops", "_checkpoint", "_cdata", "transformers.utils._hidden.thing", "_theirs")
    }


def test_lightning_calls_on_before_optimizer_step_of_callbacks_and_module():
    called = []

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            called.append(optimizer)

    class Module(LightningModule):
        def on_before_optimizer_step(self, optimizer):
            called.append(optimizer)

    trainer = Trainer(callbacks=[Watch()], logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(Module())
    lightning_private.call_before_optimizer_step(trainer, "an optimizer")
    message = "Lightning changed what this leans on: callbacks that look at gradients before they are clipped"
    assert called == ["an optimizer"] * 2, message


def test_transformers_reports_the_attention_implementation_in_use():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=8)
    taken = [
        torch_private.attention_taken(GPT2LMHeadModel._from_config(config, attn_implementation=name))
        for name in ("sdpa", "eager")
    ]
    assert taken == ["sdpa", "eager"], breaks("data.packing=documents")


def test_transformers_numbers_a_single_document_only_if_boundaries_count_as_real():
    """If boundaries do not count as real, transformers returns None for a batch in which each row is a single
    document."""
    from transformers import masking_utils

    places = torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]])
    message = breaks("every plan of data.packing=documents")
    theirs = masking_utils.find_packed_sequence_indices(places)
    assert theirs.tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]], message
    assert masking_utils.find_packed_sequence_indices(places[1:]) is None, message
    with torch_private.boundaries_count_as_real():
        assert torch.equal(masking_utils.find_packed_sequence_indices(places), theirs), message
        assert masking_utils.find_packed_sequence_indices(places[1:]) is not None, message


def test_every_name_exported_by_torch_private_is_used_elsewhere():
    elsewhere = "".join(file.read_text() for file in SOURCE.rglob("*.py") if file not in INTERNALS)
    assert {name for name in torch_private.__all__ if not re.search(rf"\b{name}\b", elsewhere)} == set()
