"""Builds the data loaders and the model of a run. The loaders are built first, so that errors in the data are found
before the weights are loaded.

Several techniques replace the `forward` of a module, or register hooks on modules or tensors, inside and outside the
blocks. These are the techniques, in the order of a run; a later replacement wraps the earlier ones:

    while the model is built (`causal_lm`)
        adapter/stacks.py                       forward of fused experts, by another class: computes packed weights
        compile/blocks.py                       a block's forward: compiled
        gradient_checkpointing/policies.py      a block's forward: recomputed in backward; hooks around several blocks
        gradient_checkpointing/slices.py        forward of MLPs and norms, in slices of tokens; hooks on their weights
        model/auxiliary_loss.py                 hooks on the model of a mixture: labels in, auxiliary loss out
    when the model is sharded (`module`)
        strategy/parallel_styles.py             forward of layers whose matrices are sharded
        strategy/stages.py                      forward of modules of other stages; hooks on the first block
        strategy/pipeline.py                    forward of the model, without gradients: through all stages
        strategy/fsdp.py                        a hook on the model: reshards it after passes without gradients
    before the first step (`on_fit_start`, then `on_train_start` of the callbacks, then of the model)
        offload/edges.py                        forward of embedding and head: read host memory; hooks on looked-up rows
        offload/streamed.py                     hooks on blocks and their outputs' gradients: copy and free weights
        offload/master_weights.py               hooks on gradients: send them to the host; on modules: wait for weights
        report/expert_balance.py                hooks on the experts of a mixture: count the tokens of each expert
        optim/in_backward.py                    hooks on gradients: each updates its parameter
        strategy/ddp.py                         hooks on gradients, for one window
    during one forward or backward pass
        loss/head.py                            forward of head and body: the loss computes the logits; hooks on both
        model/packed_attention.py               hooks during a check of the model
        strategy/stages.py                      hooks that record the order in which a model calls its modules
        strategy/pipeline.py                    a hook on the hidden states of a stage: calls Lightning's hooks
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.pytorch import Callback
from torch import Tensor
from transformers import PreTrainedModel

from lowmem.config.check import OPTIM_KEYS, check_vocabulary
from lowmem.config.instantiate import instantiate
from lowmem.config.schema import Node
from lowmem.config.settle import Run
from lowmem.data.loader import START, Position, Rows, Share, ValidationLoader, WindowLoader
from lowmem.data.opening import Openable, RowSettings, openable, source_class
from lowmem.data.packing import Joined, with_positions
from lowmem.data.sources import framing
from lowmem.data.sources.source import OLDER
from lowmem.data.token_store import Tokens, held_out, rows_of
from lowmem.model import checks, loading, packed_attention, vocabulary
from lowmem.model.generation import prompt_ids
from lowmem.model.loading import Described
from lowmem.model.magnitude import WIDER, check_holds
from lowmem.model.trainable import digest, digest_of_base
from lowmem.offload.master_weights import MasterWeights
from lowmem.report import sample
from lowmem.saving import checkpoint, gguf
from lowmem.system.errors import Refused
from lowmem.techniques.adapter.freeze import freeze
from lowmem.techniques.adapter.lora import base_dtype, has_frozen, load, parameters_of
from lowmem.techniques.gradient_checkpointing.slices import Tiles
from lowmem.techniques.loss.cross_entropy import Loss, as_loss
from lowmem.techniques.optim.build import MakeOptimizer
from lowmem.techniques.strategy.contract import ONE_DEVICE, OneDevice
from lowmem.training.module import CausalLM, Placement, Update

log = logging.getLogger(__name__)

# names of the attributes in which modules store a dropout probability
DROPOUT = {"p", "attention_dropout", "dropout", "activation_dropout"}
# keys of a model's config that do not change the model's output
OF_NO_EFFECT = {"_name_or_path", "transformers_version", "dtype"}
FEW = 10  # with fewer validation documents, a single document changes an accuracy by more than 0.1
BPE_VOCABULARY = 4096  # maximum size of a BPE vocabulary that is trained on the data


class Texts(NamedTuple):
    """The tokenized data of a run. They do not depend on the batch size, so `fit` can open them before batch_size=auto
    is resolved, and convert epochs= to max_steps=."""

    described: Described  # the model's config and tokenizer, and the tokens that were added to the tokenizer
    tokens: Tokens
    train: Rows
    val: dict[str, Rows]  # name -> rows of a validation set; the loss on the first set selects the best checkpoint

    def steps_in(self, run: Run, ranks: OneDevice = ONE_DEVICE) -> int:
        """Returns the number of optimizer steps in `run.epochs` epochs. The number is known even before batch_size=auto
        is resolved, because it depends only on the effective batch size."""
        return self.windows(run.sized(), ranks).windows_in(run.epochs)

    def windows(self, run: Run, ranks: OneDevice, start: Position = START) -> WindowLoader:
        """Returns the loader of this rank's share of the training rows."""
        return self.train.loader(share_of(run, ranks), run.windows, run.seed, start)


class Data(NamedTuple):
    """The loaders of this rank's micro-batches, and the description of the model."""

    described: Described
    tokens: Tokens
    train: WindowLoader
    val: list[ValidationLoader]
    prompts: list[Tensor]  # token ids of the prompts for samples, (1, T) each


def share_of(run: Run, ranks: OneDevice) -> Share:
    return Share(run.batch_size, ranks.data_rank, ranks.data_size)


def open_texts(run: Run) -> Texts:
    """Reads the model's config and tokenizer, adds the tokens that the run needs to the tokenizer, and opens the data.
    Stored data are tokenized now, unless their tokens are in the cache; a stream is tokenized while it is read. If the
    model has no tokenizer, a BPE tokenizer is trained on the data."""
    described = loading.describe(run)
    config, tokenizer, added = described.config, described.tokenizer, described.added
    (name, source), *others = _sources(run.data).items()
    size = loading.vocab_size(config)
    wanted = RowSettings(Path(run.cache_dir), run.seq_len, min(BPE_VOCABULARY, size), tokenizer, vocabulary.wanted(run))
    tokens, train, val = source.opened(wanted)
    if added is None:
        check_vocabulary(size, rows_of(tokens.tokenizer))
    if not run.model.pretrained and run.model.architecture is not None:
        # An export's config must agree with its tokenizer about the end token. The text configuration is `config`
        # itself, unless the model also has other parts, such as a vision tower.
        for part in (
            config,
            config.get_text_config(decoder=True),
        ):
            part.bos_token_id = part.eos_token_id = tokens.tokenizer.eos_token_id
    sets = {name: val[""]} if others else val
    for name, other in others:
        split = held_out(other, wanted.cache_dir, tokens.tokenizer)
        sets[name] = other.rows(split, run.seq_len, "val")
    if len(tokens.val.ids) and tokens.template is None:
        framing.tell(tokens.tokenizer)
    return Texts(described, tokens, train, sets)


def data(
    run: Run, saved: checkpoint.Saved | None = None, ranks: OneDevice = ONE_DEVICE, texts: Texts | None = None
) -> Data:
    """Builds the loaders, and tokenizes the prompts for samples.

    Args:
        run: the settings.
        saved: the checkpoint from which the work starts; None: no checkpoint.
        ranks: the strategy, which decides the share of the rows that a rank reads.
        texts: the run's data, if already open. If None, the data are opened here.
    """
    texts = texts or open_texts(run)
    train = texts.windows(run, ranks, saved.position if saved else START)
    share, limit = share_of(run, ranks), run.val_sequences
    val = [ValidationLoader(rows, share, limit, name) for name, rows in texts.val.items()]
    for loader in val if run.export is None else ():  # an export does not evaluate
        _tell_cut(loader)
        _tell_few(loader, run.data.arguments, texts.train)
    return Data(texts.described, texts.tokens, train, val, _prompts(run, texts.tokens, val[0]))


def _tell_cut(val: ValidationLoader) -> None:
    """If an evaluation reads only the first rows of a set, logs that data.packing, data.too_long and seq_len decide
    which documents are in these rows. Logs nothing for `Joined` rows."""
    every = len(val.sequences)
    if val.count < every and not isinstance(val.sequences, Joined):
        log.info(
            f"val_sequences={val.count}: each evaluation{f' of {val.name}' if val.name else ''} reads the first "
            f"{val.count} of {every:,} rows, and data.packing, data.too_long and seq_len decide which documents are in "
            f"these rows. Type val_sequences={every} to compare runs that differ in these keys."
        )


def _tell_few(val: ValidationLoader, data: Mapping, train: Rows) -> None:
    """If a validation set is too small for meaningful results, logs how to make it larger. Logs nothing if `data`, the
    arguments of the source, lacks the key `val_fraction`."""
    units = val.sequences.counted
    count = val.sequences.report.get("documents", len(val.sequences))
    if count >= FEW or "val_fraction" not in data:
        return
    if data.get("streaming"):
        instead = "Type a larger data.val_rows="
    elif data.get("val_path") or data.get("val_split"):
        instead = "Add more validation data"
    else:
        total = count + train.report.get("documents", len(train))
        share = min(0.5, max(2 * data["val_fraction"], math.ceil(100 * FEW / total) / 100))
        other = "val_path=<a file or folder>" if "val_path" in data else "val_split=<another split>"
        instead = f"Type data.val_fraction={share:.2g} for more, or data.{other}"
    own = f"{count} {units if count > 1 else units[:-1]}"
    log.info(
        f"validation{f' of {val.name}' * bool(val.name)} has only {own}, so its results are mostly noise. {instead}."
    )


def _sources(data: Node) -> dict[str, Openable]:
    """Returns a dict that maps the name of each validation set to the source that reads the training text and this set.
    All sources read the same training text, because each leaves out the files of all validation sets. If data.val_path
    is not a mapping of names to paths, there is a single set with the name ""."""
    sets = data.arguments.get("val_path")
    if sets is None or isinstance(sets, str):
        return {"": _source(data)}
    others = {name: [path, *(other for other in sets.values() if other != path)] for name, path in sets.items()}
    return {name: _source(data, val_path=paths) for name, paths in others.items()}


def _source(data: Node, **more: object) -> Openable:
    return openable(instantiate(data, **more), f"data._target_={data.target}")


def _prompts(run: Run, tokens: Tokens, val: ValidationLoader) -> list[Tensor]:
    """Returns the token ids of the prompts for samples, (1, T) each. The prompts come from sample_prompts=, where a
    text becomes a user's message if the data are chats. Without sample_prompts=, the only prompt is the beginning of
    the first validation set. Returns an empty list with sample_tokens=0."""
    if not run.sample_tokens:
        return []
    if run.sample_prompts is None:
        return [sample.beginning(next(iter(val)))]
    prompts = sample.prompts(run.sample_prompts)
    return [prompt_ids(tokens.tokenizer, prompt, tokens.template is not None) for prompt in prompts]


def module(
    run: Run,
    data: Data,
    saved: checkpoint.Saved | None = None,
    ranks: OneDevice = ONE_DEVICE,
    trains: bool = False,
) -> CausalLM:
    """Loads the model and, if the strategy divides it, shards it over the ranks. All ranks must call this function. The
    weights in the checkpoint are loaded later (`training.py`).

    Args:
        run: the settings.
        data: the loaders and the description of the model.
        saved: the checkpoint from which the work starts; None: no checkpoint.
        ranks: the strategy.
        trains: True if the model is trained, not evaluated or exported. Then, with weights.drive= and a checkpoint that
            contains all weights, the weights may be created in 16 bits.

    Raises:
        Refused: the weights, the adapter, the tokenizer or the checkpoint do not match the settings; the loss does not
            match the data; the model is not causal, or a weight overflows fp16; or the model cannot be converted to
            GGUF.
    """
    complete = saved is not None and saved.base is None  # the checkpoint contains all weights
    described = data.described.at_random if complete else data.described
    # 16 bits suffice, because the checkpoint replaces all weights, and contains the full masters or both halves.
    built = causal_lm(run, described, partial(_check, run), ranks, in_16_bits=complete and trains)
    path = run.adapter.arguments.get("path")
    # a checkpoint has only the trainable parameters of the adapter
    if built.ranks.builds and path and (not saved or has_frozen(built.model)):
        load(built.model, path)
    of_base = digest_of_base(built, built.ranks.sent_as) if built.ranks.builds else None
    if (base := built.ranks.broadcast(of_base)) is not None:
        built.identity["base"] = base
    if built.own_loss.compares:
        own = _start(run, built, base) if built.ranks.builds and not saved else None
        built.identity["start"] = saved.start if saved else built.ranks.broadcast(own)
    if data.tokens.template is not None:
        built.identity["template"] = data.tokens.template
    if OLDER not in run.begins.values():
        built.identity["begin"] = str(framing.framing_of(data.tokens.tokenizer).begin)
    if saved:
        saved.check(built, data.tokens.tokenizer)
    if run.export_format == "gguf" and run.evaluate is None:
        gguf.check(built.model.config, data.tokens.tokenizer)
    built.ranks.shard(built)
    return built


def _check(run: Run, network: PreTrainedModel) -> None:
    """Raises Refused if the loaded model is not causal, or if a weight overflows fp16 and the run computes or exports
    in fp16."""
    if run.multiplies_in == "float16":
        check_holds(network, torch.float16, WIDER)
    elif run.export_dtype == "float16" and (run.merge or not run.adapter_class.freezes_base):
        check_holds(network, torch.float16, "Type export_dtype=bfloat16 instead of export_dtype=float16.")
    checks.check_causal(network)


def _start(run: Run, built: CausalLM, base: str | None) -> str:
    """Returns a digest of the initial model's weights and config, for the cache key of reference log-probabilities. A
    new adapter does not change the model's outputs, so the digest leaves it out. Runs that differ only in their new
    adapters therefore share cached log-probabilities."""
    begins_with_zeros = run.adapter_class.freezes_base and not run.adapter.arguments.get("path")
    weights = base if begins_with_zeros else digest(built.model.state_dict(), built.ranks.sent_as)
    settings = {key: value for key, value in built.model.config.to_dict().items() if key not in OF_NO_EFFECT}
    return sha256(json.dumps([weights, settings], sort_keys=True, default=str).encode()).hexdigest()


def causal_lm(
    run: Run,
    described: Described,
    check: Callable[[PreTrainedModel], None] = lambda _: None,
    ranks: OneDevice = ONE_DEVICE,
    in_16_bits: bool = False,
) -> CausalLM:
    """Builds the model with its techniques, in this order: loaded weights (with rows for added tokens), attention that
    separates packed documents, adapter and frozen weights, compiled blocks, activation checkpointing, slices of tokens,
    streamed weights.

    Args:
        run: the settings.
        described: the model's config, its tokenizer and added tokens.
        check: called with the loaded model on ranks that load weights.
        ranks: the strategy.
        in_16_bits: True: a checkpoint will replace the weights, so with weights.drive= they may be created in 16 bits
            (`loading.read_in`).

    Raises:
        Refused: the loss does not match the data; or loading, `check` or a technique refuses the model.
    """
    loss = _loss(run)
    dtype = loading.read_in(run, described, in_16_bits)
    described = described if ranks.builds else described.at_random
    sends = ranks.builds and ranks.widens and not ranks.in_numbers
    stored = loading.stored_narrower(run, described, dtype) if sends else None
    folder = run.adapter.arguments.get("path")
    with ranks.building():
        read = stored or base_dtype(folder) or dtype
        network = loading.load(described, read, run.adapter_class.while_loading(folder))
        if stored is not None and any(buffer.dtype == stored for buffer in network.buffers()):
            # Load again in `dtype`, because buffers that the model computes, such as Gemma's embedding scale, were
            # rounded.
            network, stored = loading.load(described, dtype), None
        if stored is not None:
            ranks.widen(stored, dtype)
            dtype = stored
        if ranks.builds:
            check(network)
        if loss.compares:
            without_dropout(network)
        if with_positions(run.data.arguments):
            packed_attention.separate(network, compiled=run.compiles_blocks)
        choose_trained(run, network)
        # Without fp32 masters, the frozen matrices of an adapter keep their dtype. With fp32 masters, they get the
        # dtype of the base weights.
        kept = set() if run.keeps_masters else {p for _, p in parameters_of(network)}
        for p in {*network.parameters()} - kept:
            p.data = p.data if p.requires_grad else p.data.to(dtype)
    if described.added is not None:
        vocabulary.check_trained(network, described.added)
    instantiate(run.compile)(network)
    instantiate(run.gradient_checkpointing)(network)
    tiles = Tiles(network, run.tile.tokens) if run.tile.tokens else None
    order = {"order": run.order if run.accumulates else "by_micro_batch"} if run.streams else {}
    weights = instantiate(run.weights)(network, head_in_tiles=run.loss_class.head_in_tiles, **order)
    bounds = {"clip": run.clip, "clip_value": run.clip_value}
    skips = run.on_nonfinite == "skip"
    update = Update(optimizer(run), instantiate(run.scheduler), **bounds, skips_faults=skips, early=run.early)
    at_once = run.windows.largest if run.by_layer and run.windows is not None else 1
    return CausalLM(network, loss, update, Placement(weights, tiles, ranks, at_once))


def callbacks(run: Run) -> list[Callback]:
    """Returns `MasterWeights`, if the optimizer runs on the host, and the callbacks of the key callbacks=."""
    return [*([MasterWeights()] if run.masters else []), *map(instantiate, run.callbacks.values())]


def _loss(run: Run) -> Loss:
    """Creates the loss. Raises Refused if the loss and the data do not match, such as loss=dpo for plain text."""
    loss, data = as_loss(instantiate(run.loss)), run.data
    makes = type(source_class(data.target).rows_class(data.arguments).example(1, 1))
    if not (issubclass(makes, loss.needs) and makes.UNIT == loss.needs.UNIT):
        raise Refused(
            f"loss._target_={run.loss.target}: this loss averages over {loss.needs.UNIT} and needs a "
            f"{loss.needs.__name__}, but data._target_={data.target} produces a {makes.__name__}. Type another loss= "
            "or data=: loss=full, chunked or tiled for texts; loss=dpo, ipo, orpo, simpo or kto for data=preference."
        )
    return loss


def without_dropout(network: PreTrainedModel) -> None:
    """Sets the dropout probability of the model's own layers to 0. An adapter, which is added later, keeps its dropout.
    Reference log-probabilities are computed without dropout, so dropout during training would only add noise to the
    comparison."""
    for module in network.modules():
        for name in DROPOUT & vars(module).keys():
            if isinstance(getattr(module, name), float):
                setattr(module, name, 0.0)


def choose_trained(run: Run, network: PreTrainedModel) -> None:
    """Adds the adapter, if any, and freezes the weights that are not trained."""
    instantiate(run.adapter)(network)
    freeze(network, run.freeze or [])


def optimizer(run: Run) -> MakeOptimizer:
    """Returns a factory of the optimizer. The keys of its yaml that lowmem itself defines are not passed to the
    optimizer's class; all other keys are arguments of this class."""
    node = run.optim.plain()
    ours = {key: node[key] for key in ("embedding_bits",) if key in node}
    return MakeOptimizer(instantiate({key: value for key, value in node.items() if key not in OPTIM_KEYS}), **ours)
