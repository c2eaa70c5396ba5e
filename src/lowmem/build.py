"""Builds what a run trains: the data first, the weights last."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowmem import attention, checkpoint, model, vocabulary
from lowmem.adapter.freeze import freeze
from lowmem.adapter.lora import base_dtype, load
from lowmem.check import OPTIM_KEYS, check_vocabulary
from lowmem.data.loader import START, Position, Rows, Share, ValidationLoader, WindowLoader
from lowmem.data.opened import Openable, Wanted, openable
from lowmem.data.packing import Joined, rows, with_positions
from lowmem.data.tokens import Tokens, held_out, rows_of
from lowmem.generation import prompt_ids
from lowmem.instantiate import instantiate
from lowmem.model import Described
from lowmem.module import CausalLM, Placement, Update
from lowmem.optim.build import MakeOptimizer
from lowmem.report import sample
from lowmem.schema import Node
from lowmem.settle import Run
from lowmem.strategy.one_device import ONE_DEVICE, OneDevice
from lowmem.tiled_tokens import Tiles
from lowmem.trainable import digest_of_base

log = logging.getLogger(__name__)

BPE_VOCABULARY = 4096  # at most; never more than the model has


class Texts(NamedTuple):
    """The open data of a run. It depends neither on the batch size nor on a recipe, so that it is opened once."""

    described: Described  # the model whose tokens these are
    tokens: Tokens
    train: Rows
    val: dict[str, Rows]  # by name; the first is that by which a checkpoint is the best

    def steps_in(self, run: Run, ranks: OneDevice = ONE_DEVICE) -> int:
        """Returns how many optimizer steps run.epochs take. A batch size that is not known yet does not change them: a
        window has as many sequences as accumulation=effective_batch says."""
        return self.windows(run.sized(), ranks).windows_in(run.epochs)

    def windows(self, run: Run, ranks: OneDevice, start: Position = START) -> WindowLoader:
        """Returns what reads this rank's share of the training rows."""
        return self.train.loader(share_of(run, ranks), run.windows, run.seed, start)


class Data(NamedTuple):
    """This rank's share of what is trained on, in micro-batches, and the model that takes it."""

    described: Described
    tokens: Tokens
    train: WindowLoader
    val: list[ValidationLoader]
    prompts: list[Tensor]  # of the samples, (1, T) each


def share_of(run: Run, ranks: OneDevice) -> Share:
    return Share(run.batch_size, ranks.data_rank, ranks.data_size)


def open_texts(run: Run) -> Texts:
    """Describes the model and opens all files, in its own tokens or in those of a BPE that is trained on them."""
    described = model.describe(run)
    config, tokenizer, added = described.config, described.tokenizer, described.added
    (name, source), *others = _sources(run.data).items()
    bpe_size = min(BPE_VOCABULARY, config.vocab_size)
    wanted = Wanted(Path(run.cache_dir), run.seq_len, bpe_size, tokenizer, vocabulary.wanted(run))
    tokens, train, val = source.opened(wanted)
    if added is None:
        check_vocabulary(config.vocab_size, rows_of(tokens.tokenizer))
    if not run.model.pretrained and run.model.architecture is not None:
        # the export must name the end token of the tokenizer it is saved with
        config.bos_token_id = config.eos_token_id = tokens.tokenizer.eos_token_id
    sets = {name: val[""]} if others else val
    for name, other in others:
        split = held_out(other, wanted.cache_dir, tokens.tokenizer)
        sets[name] = rows(split, run.seq_len, other.packing, other.too_long, "val")
    return Texts(described, tokens, train, sets)


def data(
    run: Run, saved: checkpoint.Saved | None = None, ranks: OneDevice = ONE_DEVICE, texts: Texts | None = None
) -> Data:
    """The light part, in which whatever refuses a run does so. Args: ranks: that share the rows;
    texts: of this run, where they are open."""
    texts = texts or open_texts(run)
    train = texts.windows(run, ranks, saved.position if saved else START)
    share, limit = share_of(run, ranks), run.val_sequences
    val = [ValidationLoader(rows, share, limit, name) for name, rows in texts.val.items()]
    for one in val:
        _tell_cut(one)
    return Data(texts.described, texts.tokens, train, val, _prompts(run, texts.tokens, val[0]))


def _tell_cut(val: ValidationLoader) -> None:
    """The first rows hold other documents with every packing and length, and a loss on them is of other text."""
    every = len(val.sequences)
    if val.count < every and not isinstance(val.sequences, Joined):
        log.info(
            f"val_sequences={val.count}: an evaluation{f' of {val.name}' if val.name else ''} reads so many of "
            f"{every:,} rows, and which documents those hold depends on data.packing, data.too_long and seq_len. Type "
            f"val_sequences={every} where runs that differ in these are compared."
        )


def _sources(data: Node) -> dict[str, Openable]:
    """Opens a source for each validation set, by its name; they have the training text in common."""
    sets = data.arguments.get("val_path")
    if sets is None or isinstance(sets, str):
        return {"": _source(data)}
    others = {name: [path, *(one for one in sets.values() if one != path)] for name, path in sets.items()}
    return {name: _source(data, val_path=paths) for name, paths in others.items()}


def _source(data: Node, **more: object) -> Openable:
    return openable(instantiate(data, **more), f"data._target_={data.target}")


def _prompts(run: Run, tokens: Tokens, val: ValidationLoader) -> list[Tensor]:
    """(1, T) each: as they were given, which in a chat is what a user says, or how the validation split begins."""
    if not run.sample_tokens:
        return []
    if run.sample_prompts is None:
        return [sample.beginning(next(iter(val)))]
    given = sample.prompts(run.sample_prompts)
    return [prompt_ids(tokens.tokenizer, one, tokens.template is not None) for one in given]


def module(run: Run, of: Data, saved: checkpoint.Saved | None = None, ranks: OneDevice = ONE_DEVICE) -> CausalLM:
    """The heavy part."""
    whole = saved is not None and saved.base is None  # the checkpoint brings all weights
    made = causal_lm(run, of.described.at_random if whole else of.described, model.check_causal, ranks)
    if made.ranks.builds and not saved and (path := run.adapter.arguments.get("path")):
        load(made.model, path)
    if (base := made.ranks.broadcast(digest_of_base(made) if made.ranks.builds else None)) is not None:
        made.identity["base"] = base
    if of.tokens.template is not None:
        made.identity["template"] = of.tokens.template
    if saved:
        saved.check(made, of.tokens.tokenizer)
    made.ranks.shard(made)
    return made


def causal_lm(
    run: Run,
    described: Described,
    check: Callable[[PreTrainedModel], None] = lambda _: None,
    ranks: OneDevice = ONE_DEVICE,
) -> CausalLM:
    """Args: check: called with the model as it was loaded, where it holds numbers."""
    held = getattr(torch, run.loaded_in)
    described = described if ranks.builds else described.at_random
    with ranks.building():
        network = model.load(described, base_dtype(run.adapter.arguments.get("path")) or held)
        if ranks.builds:
            check(network)
        if with_positions(run.data.arguments):
            attention.share_mask(network)
        choose_trained(run, network)
        for p in network.parameters():
            p.data = p.data if p.requires_grad else p.data.to(held)
    if described.added is not None:
        vocabulary.check_trained(network, described.added)
    instantiate(run.gradient_checkpointing)(network)
    tiles = Tiles(network, run.tile.tokens) if run.tile.tokens else None
    weights = instantiate(run.weights)(network, head_in_tiles=run.any("head_in_tiles"))
    skips = run.on_nonfinite == "skip"
    update = Update(optimizer(run), instantiate(run.scheduler), run.clip, run.clip_value, skips_faults=skips)
    return CausalLM(network, instantiate(run.loss), update, Placement(weights, tiles, ranks))


def choose_trained(run: Run, network: PreTrainedModel) -> None:
    """All of its weights, some, or those of an adapter that is put into it."""
    instantiate(run.adapter)(network)
    freeze(network, run.freeze or [])


def optimizer(run: Run) -> MakeOptimizer:
    """The group's yaml is the library's class and its arguments, and beside them those that are ours."""
    node = run.optim.plain()
    ours = {key: node[key] for key in ("embedding_bits",) if key in node}
    return MakeOptimizer(instantiate({key: value for key, value in node.items() if key not in OPTIM_KEYS}), **ours)
