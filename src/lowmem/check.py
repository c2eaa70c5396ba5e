"""Refuse a run that cannot work before anything heavy is built: every error at once, each a sentence.

The cheap questions come first (numbers, paths), before torch is imported; then those that import the classes a yaml
names. What only the data or the weights can tell is refused where they are read, with the same exception.
"""

import inspect
import math
from collections.abc import Iterator, Mapping

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from lowmem.errors import Refused
from lowmem.memory import limit
from lowmem.refusals import refused
from lowmem.units import steps_or_seconds

COUNTS = ("batch_size", "seq_len", "max_steps", "val_every", "val_sequences", "log_every")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")
# Under which name a model's config has the length of the longest sequence, if it has one.
POSITIONS = ("max_position_embeddings", "n_positions")
# Keys of conf/optim that are lowmem's, beside the arguments of the class that a yaml names.
OPTIM_KEYS = ("in_backward", "embedding_bits", "declares")


def check(cfg: DictConfig, choices: Mapping[str, str]) -> None:
    """Args: choices: group -> chosen yaml, to name the file an error comes from."""
    check_values(cfg)
    errors = [*_keys(cfg, choices)]
    errors = errors or [*refused(cfg), *_savers(cfg)]
    if errors:
        raise Refused("\n".join(errors))
    _device(cfg.device, cfg.memory.snapshot)


def check_values(cfg: DictConfig) -> None:
    """What the config alone can tell, within milliseconds."""
    missing = sorted(key for key in OmegaConf.missing_keys(cfg))
    errors = [f"{key} has no value: type {key}=<value>." for key in missing] or [*_numbers(cfg)]
    if errors:
        raise Refused("\n".join(errors))
    architecture = cfg.model.get("architecture") or {}
    if not isinstance(architecture, Mapping):
        raise Refused(f"model.architecture={architecture}: give its keys, such as model.architecture.n_layer=6.")
    check_positions(cfg, next((architecture[key] for key in POSITIONS if _is_count(architecture.get(key))), None))


def _numbers(cfg: DictConfig) -> Iterator[str]:
    for key in COUNTS:
        if key == "batch_size" and cfg[key] == "auto":
            continue
        if not _is_int(cfg[key]) or cfg[key] < 1:
            yield f"{key}={cfg[key]}: give a whole number of at least 1."
    try:
        steps_or_seconds(cfg.save_every)
    except ValueError:
        yield f"save_every={cfg.save_every}: give a whole number of steps of at least 1, or minutes, as in 30min."
    if cfg.checkpoint.keep not in ("last", "best") and not _is_count(cfg.checkpoint.keep):
        yield f"checkpoint.keep={cfg.checkpoint.keep}: give last, best, or how many of the newest are kept."
    if cfg.early_stop.patience is not None and not _is_count(cfg.early_stop.patience):
        yield f"early_stop.patience={cfg.early_stop.patience}: give a whole number of at least 1, or null: off."
    if cfg.on_nonfinite not in ("stop", "skip"):
        yield f"on_nonfinite={cfg.on_nonfinite}: give stop or skip."
    named = [key for key in ("resume", "evaluate", "export") if cfg[key] is not None]
    if len(named) > 1:
        yield f"{' and '.join(named)}: one command does one of them. Leave the others out."
    for key in ("seed", "sample_tokens"):
        if not _is_int(cfg[key]) or cfg[key] < 0:
            yield f"{key}={cfg[key]}: give a whole number of at least 0."
    if not _is_positive(cfg.lr):
        yield f"lr={cfg.lr}: give a positive step size, such as 2e-5 for a pretrained model."
    for key in ("clip", "clip_value"):
        if cfg[key] is not None and not _is_positive(cfg[key]):
            yield f"{key}={cfg[key]}: give a positive number, or {key}=null to switch it off."
    switches = ["optim.in_backward", "model.stable_embedding", "memory.snapshot"]
    if "master" in cfg:
        switches += ["master.early_step"] if "early_step" in cfg.master else []
        if not _is_int(cfg.master.skips_in_a_row) or cfg.master.skips_in_a_row < 1:
            yield f"master.skips_in_a_row={cfg.master.skips_in_a_row}: give a whole number of at least 1."
    for key in switches:
        if not isinstance(OmegaConf.select(cfg, key), bool):
            yield f"{key}={OmegaConf.select(cfg, key)}: give true or false."
    if cfg.optim.get("embedding_bits", 8) not in (8, 32):
        yield f"optim.embedding_bits={cfg.optim.embedding_bits}: the state of embeddings has 8 or 32 bits."
    try:
        limit.parse(cfg.memory.limit)
    except Refused as error:
        yield str(error)
    if cfg.plan not in ("check", "off", "auto"):
        try:
            limit.parse(cfg.plan, "plan", plain=False)
        except Refused as error:
            yield f"{error} Or one of check, auto, off."
    if cfg.export_dtype not in (None, *DTYPES):
        yield f"export_dtype={cfg.export_dtype}: give one of {', '.join(DTYPES)}, or null for that of the weights."
    if cfg.device not in DEVICES:
        yield f"device={cfg.device}: give one of {', '.join(DEVICES)}."


def _is_count(value: object) -> bool:
    return _is_int(value) and value > 0


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _keys(cfg: DictConfig, choices: Mapping[str, str]) -> Iterator[str]:
    """Keys that the class or function a yaml names does not take."""
    for path, node in targets(cfg):
        group = next((part for part in reversed(path) if part in choices), path[0])
        yaml = f"conf/{group}/{choices[group]}.yaml" if group in choices else ".".join(path)
        try:
            takes = inspect.signature(get_object(node["_target_"])).parameters.values()
        except Exception as error:  # whatever importing it raises is the user's to know
            yield f"{yaml}: {node['_target_']} cannot be imported ({str(error).splitlines()[-1]})."
            continue
        if any(p.kind is p.VAR_KEYWORD for p in takes):
            continue
        names = [p.name for p in takes if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for key in node:
            ours = OPTIM_KEYS if group == "optim" else ("declares",)
            if not key.startswith("_") and key not in names and key not in ours:
                yield f"{yaml}: {node['_target_']} takes no '{key}'. It takes {', '.join(names)}."


def _savers(cfg: DictConfig) -> Iterator[str]:
    """Callbacks that would save checkpoints of their own: inside windows, unverified, and never deleted."""
    from lightning.pytorch.callbacks import Checkpoint

    for path, node in targets(cfg.callbacks, ("callbacks",)):
        one = get_object(node["_target_"])
        if isinstance(one, type) and issubclass(one, Checkpoint):
            yield (
                f"{'.'.join(path)}: {one.__name__} saves inside accumulation windows, which no run can go on from. "
                "Leave it out: save_every=30min and checkpoint.keep=best do what it is for."
            )


def targets(cfg: DictConfig, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], DictConfig]]:
    """(path, node) of every node with a `_target_`."""
    if "_target_" in cfg:
        yield path, cfg
    for key in cfg:
        if isinstance(cfg[key], DictConfig):
            yield from targets(cfg[key], (*path, str(key)))


def _device(device: str, snapshot: bool) -> None:
    import torch

    if snapshot and (device == "cpu" or not torch.cuda.is_available()):
        raise Refused(
            "memory.snapshot=true: only CUDA's allocator keeps one. Leave it out, and look at memory.png, or type "
            "device=cuda."
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise Refused(
            f"device=cuda: this torch ({torch.__version__}) sees no CUDA device. "
            "Type device=cpu, or install a CUDA build of torch and check `nvidia-smi`."
        )


def check_positions(cfg: DictConfig, positions: int | None) -> None:
    """Args: positions: of the model; None: as many as one likes."""
    if positions is not None and cfg.seq_len > positions:
        raise Refused(f"seq_len={cfg.seq_len}: this model has {positions} positions. Type seq_len={positions} or less.")


def check_vocabulary(vocab_size: int, tokens: int) -> None:
    if tokens > vocab_size:
        raise Refused(
            f"The tokenizer has {tokens} tokens and the model's vocabulary {vocab_size}. "
            f"Type model.architecture.vocab_size={tokens}, or choose a model whose tokenizer this is."
        )
