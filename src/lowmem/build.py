"""Builds what a run trains: the data first, the weights last."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from lowmem import attention, checkpoint, model, vocabulary
from lowmem.adapter.freeze import freeze
from lowmem.adapter.lora import base_dtype, load
from lowmem.check import OPTIM_KEYS, check_vocabulary
from lowmem.data.loader import START, ValidationLoader, WindowLoader
from lowmem.data.opened import Openable, Opened, Wanted
from lowmem.data.packing import Joined, rows, with_positions
from lowmem.data.tokens import Tokens, held_out, rows_of
from lowmem.generation import prompt_ids
from lowmem.instantiate import instantiate
from lowmem.module import CausalLM
from lowmem.optim.build import MakeOptimizer
from lowmem.report import sample
from lowmem.schema import Node
from lowmem.settle import Run
from lowmem.strategy.one_device import OneDevice
from lowmem.tiled_tokens import Tiles
from lowmem.trained import digest_of_base

log = logging.getLogger(__name__)

BPE_VOCABULARY = 4096  # at most; never more than the model has


class Data(NamedTuple):
    """What is trained on, and the architecture that fits it."""

    tokens: Tokens
    train: WindowLoader
    val: list[ValidationLoader]  # the first is that by which a checkpoint is the best
    prompts: list[Tensor]  # of the samples, (1, T) each
    spec: dict  # run.model
    config: PretrainedConfig


def data(run: Run, saved: checkpoint.Saved | None = None, ranks: OneDevice | None = None) -> Data:
    """The light part, in which whatever refuses a run does so. Args: ranks: that share the rows; None: one has all."""
    ranks = ranks or OneDevice()
    windows = run.windows
    spec = run.model.model_dump()
    config = model.architecture(**spec)
    sources = _sources(run.data)
    (name, source), *others = sources.items()
    of = _opened(run, spec, config, source)
    start = saved.position if saved else START
    share = ranks.data_rank, ranks.data_size
    train = of.train.loader(run.batch_size, windows, run.seed, start, *share)
    sets = {name: of.val[""]} if others else of.val
    for name, other in others:
        split = held_out(other, Path(run.cache_dir), of.tokens.tokenizer)
        sets[name] = rows(split, run.seq_len, other.packing, other.too_long, "val")
    val = [ValidationLoader(rows, run.batch_size, run.val_sequences, name, *share) for name, rows in sets.items()]
    for one in val:
        _tell_cut(one)
    return Data(of.tokens, train, val, _prompts(run, of.tokens, val[0]), spec, config)


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
    """By the name of their validation set, where it has one: they have the training text in common."""
    sets = data.arguments.get("val_path")
    if sets is None or isinstance(sets, str):
        return {"": instantiate(data)}
    others = {name: [path, *(one for one in sets.values() if one != path)] for name, path in sets.items()}
    return {name: instantiate(data, val_path=paths) for name, paths in others.items()}


def _prompts(run: Run, tokens: Tokens, val: ValidationLoader) -> list[Tensor]:
    """(1, T) each: as they were given, which in a chat is what a user says, or how the validation split begins."""
    if not run.sample_tokens:
        return []
    if run.sample_prompts is None:
        return [sample.beginning(next(iter(val)))]
    given = sample.prompts(run.sample_prompts)
    return [prompt_ids(tokens.tokenizer, one, tokens.template is not None) for one in given]


def steps(run: Run, ranks: OneDevice | None = None) -> int:
    """That `epochs` passes over the data take. How many sequences a micro-batch has does not matter to it where that is
    not known yet: a window then has as many as accumulation=effective_batch says."""
    batch_size = 1 if run.batch_size == "auto" else run.batch_size
    with _unsaid():
        return data(run.knowing(batch_size=batch_size), ranks=ranks).train.windows_in(run.epochs)


@contextmanager
def _unsaid() -> Iterator[None]:
    """What there is to say of data is said where it is trained on: here it would be said a second time."""
    loggers = [log, logging.getLogger("lowmem.data")]
    before = [one.level for one in loggers]
    try:
        for one in loggers:
            one.setLevel(logging.WARNING)
        yield
    finally:
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)


def module(run: Run, of: Data, saved: checkpoint.Saved | None = None, ranks: OneDevice | None = None) -> CausalLM:
    """The heavy part."""
    whole = saved is not None and saved.base is None  # the checkpoint brings all weights
    made = causal_lm(run, of.spec | ({"pretrained": False} if whole else {}), of.config, model.check_causal, ranks)
    if made.ranks.builds and not saved and (path := run.adapter.arguments.get("path")):
        load(made.model, path)
    if (base := made.ranks.first(digest_of_base(made) if made.ranks.builds else None)) is not None:
        made.identity["base"] = base
    if of.tokens.template is not None:
        made.identity["template"] = of.tokens.template
    if saved:
        saved.check(made, of.tokens.tokenizer)
    made.ranks.divide(made)
    return made


def _opened(run: Run, spec: dict, config: PretrainedConfig, source: Openable) -> Opened:
    """The source in a published model's own tokens, or in those of a BPE trained on it."""
    tokenizer, added = model.tokenizer_of(run), vocabulary.wanted(run)
    if tokenizer and added:
        spec["added"] = vocabulary.add(tokenizer, added, config.vocab_size)
    bpe_size = min(BPE_VOCABULARY, config.vocab_size)
    of = source.opened(Wanted(Path(run.cache_dir), run.seq_len, bpe_size, tokenizer, added))
    if "added" not in spec:
        check_vocabulary(config.vocab_size, rows_of(of.tokens.tokenizer))
    if not spec["pretrained"] and spec["architecture"] is not None:
        # the export must name the end token of the tokenizer it is saved with
        config.bos_token_id = config.eos_token_id = of.tokens.tokenizer.eos_token_id
    return of


def causal_lm(
    run: Run,
    spec: dict,
    config: PretrainedConfig,
    check: Callable[[PreTrainedModel], None] = lambda _: None,
    ranks: OneDevice | None = None,
) -> CausalLM:
    """Args: spec: run.model as a plain dict; config: its architecture; check: called with the model as it was loaded,
    where it holds numbers."""
    held, ranks = getattr(torch, run.loaded_in), ranks or OneDevice()
    spec = spec if ranks.builds else spec | {"pretrained": False}
    with ranks.building():
        network = model.build(config, base_dtype(run.adapter.arguments.get("path")) or held, **spec)
        if ranks.builds:
            check(network)
        if with_positions(run.data.arguments):
            attention.share_mask(network)
        choose_trained(run, network)
        for p in network.parameters():
            p.data = p.data if p.requires_grad else p.data.to(held)
    if "added" in spec:
        vocabulary.check_trained(network, spec["added"])
    instantiate(run.gradient_checkpointing)(network)
    tiles = Tiles(network, run.tile.tokens) if run.tile.tokens else None
    weights = instantiate(run.weights)(network, head_in_tiles=run.any("head_in_tiles"))
    schedule, skips = instantiate(run.scheduler), run.on_nonfinite == "skip"
    loss = instantiate(run.loss)
    return CausalLM(network, loss, optimizer(run), schedule, run.clip, run.clip_value, skips, weights, tiles, ranks)


def choose_trained(run: Run, network: PreTrainedModel) -> None:
    """All of its weights, some, or those of an adapter that is put into it."""
    instantiate(run.adapter)(network)
    freeze(network, run.freeze or [])


def optimizer(run: Run) -> MakeOptimizer:
    """The group's yaml is the library's class and its arguments, and beside them those that are ours."""
    node = run.optim.plain()
    ours = {key: node[key] for key in ("embedding_bits",) if key in node}
    return MakeOptimizer(instantiate({key: value for key, value in node.items() if key not in OPTIM_KEYS}), **ours)
