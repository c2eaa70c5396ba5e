"""Refuse a run that cannot work before anything heavy is built: every error at once, each a sentence.

The cheap questions come first (numbers, paths), before torch is imported; then those that import the classes a yaml
names. What only the data or the weights can tell is refused where they are read, with the same exception.
"""

import inspect
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from hydra.utils import get_object

from lowmem import launched
from lowmem.data import reading
from lowmem.errors import Refused
from lowmem.refusals import refused
from lowmem.settle import Run

# Under which name a model's config has the length of the longest sequence, if it has one.
POSITIONS = ("max_position_embeddings", "n_positions")
OF_A_RUN = ("resume", "evaluate", "export", "generate")  # what they name has been trained
# Keys of conf/optim that are lowmem's, beside the arguments of the class that a yaml names.
OPTIM_KEYS = ("in_backward", "embedding_bits", "declares")


def check(run: Run, choices: Mapping[str, str]) -> None:
    """Args: choices: group -> chosen yaml, to name the file an error comes from."""
    check_values(run)
    errors = [*_keys(run, choices)]
    errors = errors or [*refused(run), *_savers(run), *_metric(run.metric)]
    if errors:
        raise Refused("\n".join(errors))
    _device(run.device, run.memory.snapshot)


def check_values(run: Run) -> None:
    """What the values alone can tell, beside their types and ranges, within milliseconds."""
    if len(named := [key for key in (*OF_A_RUN, "show") if getattr(run, key) is not None]) > 1:
        raise Refused(f"{' and '.join(named)}: one command does one of them. Leave the others out.")
    if run.push is not None and (run.evaluate is not None or run.generate is not None):
        raise Refused(f"push={run.push}: this writes no model. Type export=<a run> push={run.push}.")
    if (run.generate is None) != (run.prompt is None):
        typed, other = ("generate", "prompt='...'") if run.prompt is None else ("prompt", "generate=<a run or model>")
        raise Refused(f"{typed}={getattr(run, typed)}: one goes on with the other. Type {other} beside it.")
    if same := [place for place in _val_places(run.data.arguments) if _same(run.data.path, place)]:
        raise Refused(
            f"data.val_path={same[0]}: this is data.path too, and validation would be of what was trained "
            "on. Type data.val_path=<another>, or null for a share of data.path."
        )
    _check_data(run)
    architecture = run.model.architecture or {}
    typed = (architecture[key] for key in POSITIONS if _is_count(architecture.get(key)))
    check_positions(run.seq_len, next(typed, None))


def _check_data(run: Run) -> None:
    """What a source would refuse when it is opened, and its keys tell."""
    data = run.data.arguments
    if (parts := data.get("parts")) is not None:
        reading.checked_shares(parts, data.get("shares"))
    if data.get("streaming") is True and run.show is not None:
        raise Refused(
            f"show={run.show}: the rows of a stream have no numbers, and are made while it is read. Type "
            "data.streaming=false."
        )
    trains_tokenizer = run.tokenizer is None and not run.model.pretrained and run.model.architecture is not None
    if data.get("streaming") is True and trains_tokenizer and run.evaluate is None and run.generate is None:
        raise Refused(
            "data.streaming=true: no tokenizer can be trained on what is not there yet. Type tokenizer=<a folder or "
            "hub id>, or data.streaming=false."
        )


def check_places(run: Run) -> None:
    """What only names can tell of what is to be read, told again where it is read: a wrong one need not wait for torch.

    Raises:
        Refused: no such run, text or encoding.
    """
    for key in OF_A_RUN:
        if (
            getattr(run, key) is not None
            and f"{key}={getattr(run, key)}" != "resume=auto"
            and not _is_there(getattr(run, key))
        ):
            raise no_such_run(key, getattr(run, key))
    if run.tokenizer is not None and not _is_there(run.tokenizer):
        check_hub_id("tokenizer", run.tokenizer)
    data = run.data.arguments
    _check_texts("data", data)
    for name, part in data.get("parts", {}).items():
        _check_texts(f"data.parts.{name}", part)
    if (path := run.adapter.arguments.get("path")) is not None and not _is_there(path):
        raise Refused(f"adapter.path={path}: there is no such folder. Give one that peft or a run wrote.")


def _check_texts(of: str, data: Mapping) -> None:
    """Args: of: the key of `data`. What may be on a hub is told of where it is looked for."""
    for key, places in (("path", [data.get("path")]), ("val_path", _val_places(data))):
        for place in places:
            if place is not None and "revision" not in data and not _is_there(place):
                several = " Several have names, as in {news:a,wiki:b}." if place[0] in "{[" else ""
                raise Refused(f"{reading.no_such(f'{of}.{key}', place)}{several}")
    reading.checked_fields(*(data.get(name) for name in ("field", "prompt", "completion", "messages")))
    template = data.get("template")
    if template not in (None, "chatml") and not _is_there(template):
        raise reading.no_such(f"{of}.template", template)
    if "encoding" in data:
        reading.checked_encoding(data["encoding"])
    if "on_error" in data:
        reading.checked_on_error(data["on_error"])


def no_such_run(key: str, place: str) -> Refused:
    return Refused(f"{key}={place}: there is no such run folder or checkpoint. Runs are under outputs/.")


def check_hub_id(key: str, name: str) -> None:
    """Raises: Refused: what is not on this machine, and no hub has it."""
    if name.startswith(("/", "~", ".")) or name.count("/") > 1:
        raise Refused(f"{key}={name}: there is no such folder. Give one that exists, or a hub id such as gpt2.")


def _val_places(data: Mapping) -> list[str]:
    """One, or one for each name."""
    given = data.get("val_path")
    return [] if given is None else [given] if isinstance(given, str) else list(given.values())


def _is_there(place: str) -> bool:
    try:
        Path(os.path.expanduser(place)).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):  # whoever reads it says why it cannot
        return True
    return True


def _same(one: str, other: str) -> bool:
    return Path(one).expanduser().absolute() == Path(other).expanduser().absolute()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _keys(run: Run, choices: Mapping[str, str]) -> Iterator[str]:
    """Keys that the class or function a yaml names does not take."""
    for path, node in targets(run.as_dict()):
        group = next((part for part in reversed(path) if part in choices), path[0])
        yaml = f"conf/{group}/{choices[group]}.yaml" if group in choices else ".".join(path)
        try:
            takes = inspect.signature(get_object(node["_target_"])).parameters
        except Exception as error:  # whatever importing it raises is the user's to know
            yield f"{yaml}: {node['_target_']} cannot be imported ({str(error).splitlines()[-1]})."
            continue
        switches = [name for name, p in takes.items() if name in node and isinstance(p.default, bool)]
        for key in (key for key in switches if not isinstance(node[key], bool)):
            yield f"{'.'.join(path)}.{key}={node[key]}: give true or false."
        if any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            continue
        names = [p.name for p in takes.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for key in node:
            ours = OPTIM_KEYS if group == "optim" else ("declares",)
            if not key.startswith("_") and key not in names and key not in ours:
                yield f"{yaml}: {node['_target_']} takes no '{key}'. It takes {', '.join(names) or 'nothing'}."


def _savers(run: Run) -> Iterator[str]:
    """Callbacks that would save checkpoints of their own: inside windows, unverified, and never deleted."""
    from lightning.pytorch.callbacks import Checkpoint

    for path, node in targets({name: node.plain() for name, node in run.callbacks.items()}, ("callbacks",)):
        one = get_object(node["_target_"])
        if isinstance(one, type) and issubclass(one, Checkpoint):
            yield (
                f"{'.'.join(path)}: {one.__name__} saves inside accumulation windows, which no run can go on from. "
                "Leave it out: save_every=30min and checkpoint.keep=best do what it is for."
            )


def _metric(name: str | None) -> Iterator[str]:
    if name is None:
        return
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # it prints besides what it raises
    try:
        found = callable(get_object(name))
        why = "it is no function"
    except Exception as error:  # whatever the module does when it is imported
        found, why = False, str(error.__cause__ or error).partition("\n")[0]
    if not found:
        yield f"metric={name}: {why}. Type metric=<module>.<function> of a module beside train.py, or metric=null."


def targets(values: Mapping, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping]]:
    """(path, node) of every node with a `_target_`."""
    if "_target_" in values:
        yield path, values
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from targets(value, (*path, str(key)))


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
    ranks, cards = launched.on_this_machine(), torch.cuda.device_count()
    if device != "cpu" and cards and ranks > cards:
        why = f"which has {cards} CUDA device{'s' * (cards > 1)}, and each takes one"
        if "LOCAL_WORLD_SIZE" not in os.environ:
            raise Refused(
                f"LOCAL_WORLD_SIZE is not set: all {ranks} ranks would be on this machine, {why}. Start them with "
                "torchrun, or set LOCAL_WORLD_SIZE to how many are here."
            )
        raise Refused(
            f"devices={launched.size()}: {ranks} of these ranks are on this machine, {why}. Type devices={cards}, or "
            "device=cpu; ranks of several machines are started with torchrun on each."
        )
    if device != "cpu" and cards and ranks > 1 and "LOCAL_RANK" not in os.environ:
        raise Refused(
            f"LOCAL_RANK is not set, and all {ranks} ranks of this machine would take its first CUDA device. Start "
            "them with torchrun, or set LOCAL_RANK to the number of each one's device."
        )


def check_positions(seq_len: int, positions: int | None) -> None:
    """Args: positions: of the model; None: as many as one likes."""
    if positions is not None and seq_len > positions:
        raise Refused(f"seq_len={seq_len}: this model has {positions} positions. Type seq_len={positions} or less.")


def check_vocabulary(vocab_size: int, tokens: int) -> None:
    if tokens > vocab_size:
        raise Refused(
            f"The tokenizer has {tokens} tokens and the model's vocabulary {vocab_size}. "
            f"Type model.architecture.vocab_size={tokens}, or choose a model whose tokenizer this is."
        )
