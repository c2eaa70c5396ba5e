"""From the config to what is trained: the data first, the weights last."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from lowmem import attention, checkpoint, model, vocabulary
from lowmem.adapter.freeze import freeze
from lowmem.adapter.lora import base_dtype, load
from lowmem.check import OPTIM_KEYS, check_vocabulary
from lowmem.data.loader import START, ValidationLoader, WindowLoader
from lowmem.data.opened import Opened, Wanted, opened
from lowmem.data.packing import Joined, rows, with_positions
from lowmem.data.source import Source
from lowmem.data.tokens import Tokens, held_out, rows_of
from lowmem.generation import prompt_ids
from lowmem.instantiate import instantiate, plain
from lowmem.module import CausalLM
from lowmem.optim.build import MakeOptimizer
from lowmem.report import sample
from lowmem.settings import Settings
from lowmem.strategy.one_device import OneDevice
from lowmem.techniques import declared
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
    spec: dict  # cfg.model
    config: PretrainedConfig


def data(cfg: DictConfig, saved: checkpoint.Saved | None = None, ranks: OneDevice | None = None) -> Data:
    """The light part, in which whatever refuses a run does so. Args: ranks: that share the rows; None: one has all."""
    ranks = ranks or OneDevice()
    windows = Settings(cfg).windows
    spec = OmegaConf.to_container(cfg.model)
    config = model.architecture(**spec)
    sources = _sources(cfg.data)
    (name, source), *others = sources.items()
    of = _opened(cfg, spec, config, source)
    start = saved.position if saved else START
    loader = getattr(of.train, "loader", partial(WindowLoader, of.train))  # a stream has its own
    share = ranks.data_rank, ranks.data_size
    train = loader(cfg.batch_size, windows, cfg.seed, start, *share)
    sets = {name: of.val[""]} if others else of.val
    for name, other in others:
        split = held_out(other, Path(cfg.cache_dir), of.tokens.tokenizer)
        sets[name] = rows(split, cfg.seq_len, other.packing, other.too_long, "val")
    val = [ValidationLoader(rows, cfg.batch_size, cfg.val_sequences, name, *share) for name, rows in sets.items()]
    for one in val:
        _tell_cut(one)
    return Data(of.tokens, train, val, _prompts(cfg, of.tokens, val[0]), spec, config)


def _tell_cut(val: ValidationLoader) -> None:
    """The first rows hold other documents with every packing and length, and a loss on them is of other text."""
    every = len(val.sequences)
    if val.count < every and not isinstance(val.sequences, Joined):
        log.info(
            f"val_sequences={val.count}: an evaluation{f' of {val.name}' if val.name else ''} reads so many of "
            f"{every:,} rows, and which documents those hold depends on data.packing, data.too_long and seq_len. Type "
            f"val_sequences={every} where runs that differ in these are compared."
        )


def _sources(data: DictConfig) -> dict[str, Source]:
    """By the name of their validation set, where it has one: they have the training text in common."""
    given = data.get("val_path")
    if given is None or isinstance(given, str):
        return {"": instantiate(data)}
    sets = OmegaConf.to_container(given)
    others = {name: [path, *(one for one in sets.values() if one != path)] for name, path in sets.items()}
    node = OmegaConf.to_container(data)
    return {name: instantiate(OmegaConf.create(node | {"val_path": paths})) for name, paths in others.items()}


def _prompts(cfg: DictConfig, tokens: Tokens, val: ValidationLoader) -> list[Tensor]:
    """(1, T) each: as they were given, which in a chat is what a user says, or how the validation split begins."""
    if not cfg.sample_tokens:
        return []
    if cfg.sample_prompts is None:
        return [sample.beginning(next(iter(val)))]
    given = OmegaConf.to_container(OmegaConf.create({"prompts": cfg.sample_prompts}))["prompts"]
    return [prompt_ids(tokens.tokenizer, one, tokens.template is not None) for one in sample.prompts(given)]


def steps(cfg: DictConfig, ranks: OneDevice | None = None) -> int:
    """That `epochs` passes over the data take. How many sequences a micro-batch has does not matter to it where that is
    not known yet: a window then has as many as accumulation=effective_batch says."""
    batch_size = 1 if cfg.batch_size == "auto" else cfg.batch_size
    with _unsaid():
        return data(plain(OmegaConf.merge(cfg, {"batch_size": batch_size})), ranks=ranks).train.windows_in(cfg.epochs)


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


def module(
    cfg: DictConfig, of: Data, saved: checkpoint.Saved | None = None, ranks: OneDevice | None = None
) -> CausalLM:
    """The heavy part."""
    whole = saved is not None and saved.base is None  # the checkpoint brings all weights
    made = causal_lm(cfg, of.spec | ({"pretrained": False} if whole else {}), of.config, model.check_causal, ranks)
    if made.ranks.builds and not saved and cfg.adapter.get("path"):
        load(made.model, cfg.adapter.path)
    if (base := made.ranks.first(digest_of_base(made) if made.ranks.builds else None)) is not None:
        made.identity["base"] = base
    if of.tokens.template is not None:
        made.identity["template"] = of.tokens.template
    if saved:
        saved.check(made, of.tokens.tokenizer)
    made.ranks.divide(made)
    return made


def _opened(cfg: DictConfig, spec: dict, config: PretrainedConfig, source: Source) -> Opened:
    """The source in a published model's own tokens, or in those of a BPE trained on it."""
    tokenizer, added = model.tokenizer_of(cfg), vocabulary.wanted(cfg)
    if tokenizer and added:
        spec["added"] = vocabulary.add(tokenizer, added, config.vocab_size)
    bpe_size = min(BPE_VOCABULARY, config.vocab_size)
    of = opened(source, Wanted(Path(cfg.cache_dir), cfg.seq_len, bpe_size, tokenizer, added))
    if "added" not in spec:
        check_vocabulary(config.vocab_size, rows_of(of.tokens.tokenizer))
    if not spec["pretrained"] and spec["architecture"] is not None:
        # the export must name the end token of the tokenizer it is saved with
        config.bos_token_id = config.eos_token_id = of.tokens.tokenizer.eos_token_id
    return of


def causal_lm(
    cfg: DictConfig,
    spec: dict,
    config: PretrainedConfig,
    check: Callable[[PreTrainedModel], None] = lambda _: None,
    ranks: OneDevice | None = None,
) -> CausalLM:
    """Args: spec: cfg.model as a plain dict; config: its architecture; check: called with the model as it was loaded,
    where it holds numbers."""
    held, ranks = getattr(torch, Settings(cfg).loaded_in), ranks or OneDevice()
    spec = spec if ranks.builds else spec | {"pretrained": False}
    with ranks.building():
        network = model.build(config, base_dtype(cfg.adapter.get("path")) or held, **spec)
        if ranks.builds:
            check(network)
        if with_positions(cfg.data):
            attention.share_mask(network)
        choose_trained(cfg, network)
        for p in network.parameters():
            p.data = p.data if p.requires_grad else p.data.to(held)
    if "added" in spec:
        vocabulary.check_trained(network, spec["added"])
    instantiate(cfg.gradient_checkpointing)(network)
    tiles = Tiles(network, cfg.tile.tokens) if cfg.tile.tokens else None
    weights = instantiate(cfg.weights)(network, head_in_tiles=declared(cfg, "loss").head_in_tiles)
    schedule, skips = instantiate(cfg.scheduler), cfg.on_nonfinite == "skip"
    loss = instantiate(cfg.loss)
    return CausalLM(network, loss, optimizer(cfg), schedule, cfg.clip, cfg.clip_value, skips, weights, tiles, ranks)


def choose_trained(cfg: DictConfig, network: PreTrainedModel) -> None:
    """All of its weights, some, or those of an adapter that is put into it."""
    instantiate(cfg.adapter)(network)
    freeze(network, cfg.freeze or [])


def optimizer(cfg: DictConfig) -> MakeOptimizer:
    """The group's yaml is the library's class and its arguments, and beside them those that are ours."""
    ours = {key: cfg.optim[key] for key in ("embedding_bits",) if key in cfg.optim}
    theirs = {key: value for key, value in cfg.optim.items() if key not in OPTIM_KEYS}
    return MakeOptimizer(instantiate(OmegaConf.create(theirs)), **ours)
