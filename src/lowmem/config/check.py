"""Checks a run at its start, before anything heavy is built, and refuses a run that cannot work. Errors of these kinds
are reported together, one per line: keys without a value; wrong types, wrong ranges and unknown keys; classes that
cannot be imported and arguments that a class does not accept; refused combinations, callbacks and metric=. Of all other
errors, only the first one is reported.

    settled         first: checks values; in train.py and plan.py torch is not imported yet
    check_places    next, in train.py only: checks files and folders; torch is not imported yet
    check           at the start of `fit` and of a plan: checks combinations, and imports the classes that a yaml names

Errors that show only in the data or the weights raise `Refused` later, when the data or the weights are read.
"""

import inspect
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lowmem.config import schema, values
from lowmem.config.refusals import refused
from lowmem.config.settle import Config, Run
from lowmem.config.typed_lines import CONF
from lowmem.system import rank_environment
from lowmem.system.errors import Refused
from lowmem.system.scratch_file import PAGE, Drive, is_memory

# keys of a model's config that may contain the maximum sequence length
POSITIONS = ("max_position_embeddings", "n_positions")
ADAPTER_CONFIG = "adapter_config.json"  # file of PEFT in the folder of an adapter
OF_A_RUN = ("resume", "evaluate", "export", "generate")  # keys that name a trained run or model
TARGET = re.compile(r"_target_: *(lowmem(?:\.\w+)+)")  # a `_target_` of lowmem in a yaml
# lowmem's own keys of conf/optim. All other keys of an optimizer's yaml are arguments of its class.
OPTIM_KEYS = ("in_backward", "embedding_bits", "declares")


def settled(cfg: Config) -> Run:
    """Returns the checked run of a composed config. A `Run` is returned unchanged.

    Raises:
        Refused: an interpolation is invalid; keys have no value; values have a wrong type or range, or keys are
            unknown; or `check_values` refuses the run.
    """
    if isinstance(cfg, Run):
        return cfg
    try:
        errors = _errors(cfg)
    except OmegaConfBaseException as error:
        message = str(error).partition("\n")[0]
        errors = [f"{error.full_key}: {message}. Type a value, or ${{<key>}} with an existing key."]
    if errors:
        raise Refused("\n".join(errors))
    run = Run.from_draft(cfg)
    check_values(run)
    return run


def _errors(cfg: DictConfig) -> list[str]:
    missing = {key for key in cfg if OmegaConf.is_missing(cfg, key)}
    for key in cfg:  # raises if the key of an interpolation is missing; the error names the key that interpolates it
        key in missing or cfg[key]
    if missing := missing or OmegaConf.missing_keys(cfg):
        return [f"{key} has no value: type {key}=<value>." for key in sorted(missing)]

    def is_taken_over(path: Sequence[str]) -> bool:
        parent = OmegaConf.select(cfg, ".".join(path[:-1])) if len(path) > 1 else cfg
        return isinstance(parent, DictConfig) and path[-1] in parent and OmegaConf.is_interpolation(parent, path[-1])

    return schema.errors(OmegaConf.to_container(cfg, resolve=True), is_taken_over)


def check(run: Run, choices: Mapping[str, str]) -> None:
    """Checks a run that `settled` has returned: arguments of classes, combinations of techniques, callbacks, the metric
    and the device.

    Args:
        choices: group -> chosen yaml, to name the file in an error.

    Raises:
        Refused: the run cannot work.
    """
    errors = [*_keys(run, choices)]
    errors = errors or [*refused(run), *_savers(run), *_metric(run.metric)]
    if errors:
        raise Refused("\n".join(errors))
    _device(run.device, run.memory.snapshot)


def holds_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def check_values(run: Run) -> None:
    """Checks combinations of values. `schema.py` has already checked their types and ranges.

    Raises:
        Refused: values contradict each other, a needed key is missing, or the package gguf is needed but not installed.
    """
    if len(works := [key for key in (*OF_A_RUN, "show") if getattr(run, key) is not None]) > 1:
        raise Refused(f"{' and '.join(works)}: one command can use only one of these keys. Leave the others out.")
    if run.push is not None and (run.evaluate is not None or run.generate is not None):
        raise Refused(
            f"push={run.push}: evaluate= and generate= write no model to upload. Type export=<a run> push={run.push}."
        )
    if run.push is not None and run.exports_adapter and Path(run.model.name).expanduser().is_dir():
        raise Refused(
            f"push={run.push}: this adapter needs its base model {run.model.name}, a folder that exists only on this "
            "machine. Type merge=true to upload the merged model."
        )
    if run.export_format == "gguf" and run.evaluate is None and find_spec("gguf") is None:
        raise Refused("export_format=gguf: the package gguf is not installed. Type pip install gguf.")
    if run.export_format == "gguf" and run.exports_adapter:
        raise Refused("export_format=gguf: an adapter alone is not a model for llama.cpp. Also type merge=true.")
    if run.generate is None and run.prompt is not None:
        raise Refused(f"prompt={run.prompt}: only generate= uses a prompt. Also type generate=<a run or model>.")
    if run.generate is not None and (run.prompt is None) == (run.sample_prompts is None):
        wrong = "a prompt is missing" if run.prompt is None else "prompt= and sample_prompts= are both set"
        raise Refused(
            f"generate={run.generate}: {wrong}. Type prompt='...', or sample_prompts=<a file with one prompt per line>."
        )
    if same := [place for place in _val_places(run.data.arguments) if _same(run.data.path, place)]:
        raise Refused(
            f"data.val_path={same[0]}: this is also data.path, so validation would run on training data. Type "
            "data.val_path=<another>, or null to hold out a share of data.path."
        )
    _check_data(run)
    architecture = run.model.architecture or {}
    positions = (architecture[key] for key in POSITIONS if _is_count(architecture.get(key)))
    check_positions(run.seq_len, next(positions, None))


def _check_data(run: Run) -> None:
    """Raises Refused for data settings that are known not to work before the source is opened."""
    data = run.data.arguments
    if (sources := data.get("parts")) is not None:
        values.checked_shares(sources, data.get("shares"))
    if data.get("streaming") is True and run.show is not None:
        raise Refused(
            f"show={run.show}: rows of a stream are packed while it is read, so show= cannot pick rows in advance. "
            "Type data.streaming=false."
        )
    trains_tokenizer = run.tokenizer is None and not run.model.pretrained and run.model.architecture is not None
    if data.get("streaming") is True and trains_tokenizer and run.evaluate is None and run.generate is None:
        raise Refused(
            "data.streaming=true: a tokenizer cannot be trained on a stream before training starts. Type tokenizer=<a "
            "folder or hub id>, or data.streaming=false."
        )


def check_places(run: Run) -> None:
    """Checks the files and folders that keys name, and keys of data= and weights=, before torch is imported. The code
    that uses these keys checks them again.

    Raises:
        Refused: a named run, file or folder does not exist; data.encoding or data.on_error has an unknown value;
            weights.drive is in host memory or not writable; keys of data= or weights= contradict each other; or
            data.rated contradicts loss=.
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
    if "rated" in data and data["rated"] != run.technique("loss").of_rated:
        raise Refused(f"data.rated={str(data['rated']).lower()}: loss= sets this key. Leave it out.")
    _check_texts("data", run.data.plain())
    for name, source in data.get("parts", {}).items():
        _check_texts(f"data.parts.{name}", source)
    if (path := run.adapter.arguments.get("path")) is not None and not _is_there(path):
        raise Refused(
            f"adapter.path={path}: there is no such folder. Type the folder of an adapter that peft or a run of lowmem "
            "has saved."
        )
    if run.drive_folder is not None:
        _check_drive(run.drive_folder)
    elif run.weights.arguments.get("drive_holds") == "all":
        raise Refused("weights.drive_holds=all: no drive is set. Also type weights.drive=<a folder on a drive>.")


def _check_drive(folder: str) -> None:
    """Raises Refused if the folder of weights.drive is in host memory, or if no file can be created in it. `plan/`
    checks the free space."""
    if is_memory(Path(folder).expanduser()):
        raise Refused(
            f"weights.drive={folder}: the files of this folder are in host memory (tmpfs), so the drive would save no "
            "memory. Type a folder on a drive."
        )
    try:
        file = Drive(Path(folder).expanduser()).file()
        file.grow(PAGE)
        file.close()
    except OSError as error:
        raise Refused(
            f"weights.drive={folder}: no file can be written there ({error.strerror or error}). Type a writable folder "
            "on a drive, or weights.drive=null weights.drive_holds=state to keep everything in host memory."
        ) from None


def _check_texts(section: str, data: Mapping) -> None:
    """Checks the files of a data source, the keys that select its fields, and its settings `encoding` and `on_error`.
    Hub ids are checked later, when the data are loaded, and sources outside lowmem are not checked.

    Args:
        section: key of the source, `data` or `data.parts.<name>`.
        data: the arguments of the source, and its `_target_`.

    Raises:
        Refused: see `check_places`.
    """
    if not data.get("_target_", "lowmem.").startswith("lowmem."):  # the mixture itself refuses a part without a class
        return
    for key, places in (("path", [data.get("path")]), ("val_path", _val_places(data))):
        for place in places:
            if place is not None and "revision" not in data and not _is_there(place):
                several = " Several paths need names, as in {news:a,wiki:b}." if place[0] in "{[" else ""
                raise Refused(f"{values.no_such(f'{section}.{key}', place)}{several}")
    if "completion" in data and "chosen" not in data:
        values.checked_fields(*(data.get(name) for name in ("field", "prompt", "completion", "messages")))
    template = data.get("template")
    if template not in (None, "chatml") and not _is_there(template):
        raise values.no_such(f"{section}.template", template)
    if "encoding" in data:
        values.check_utf8(data["encoding"])
    if "on_error" in data:
        values.checked_on_error(data["on_error"])


def no_such_run(key: str, place: str) -> Refused:
    return Refused(f"{key}={place}: there is no such run folder or checkpoint. Runs are under outputs/.")


def check_hub_id(key: str, name: str) -> None:
    """Raises Refused for a name that cannot be a hub id. The caller has checked that the name is not a folder on this
    machine."""
    if name.startswith(("/", "~", ".")) or name.count("/") > 1:
        raise Refused(f"{key}={name}: there is no such folder. Give one that exists, or a hub id such as gpt2.")


def _val_places(data: Mapping) -> list[str]:
    """Returns the validation paths: no path, one path, or one path per name."""
    val_path = data.get("val_path")
    return [] if val_path is None else [val_path] if isinstance(val_path, str) else list(val_path.values())


def _is_there(place: str) -> bool:
    try:
        Path(os.path.expanduser(place)).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):  # the code that reads the file reports why it cannot be read
        return True
    return True


def _same(path: str, other: str) -> bool:
    return Path(path).expanduser().absolute() == Path(other).expanduser().absolute()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _keys(run: Run, choices: Mapping[str, str]) -> Iterator[str]:
    """Yields a message for each `_target_` that cannot be imported, for each key that the class or function of a
    `_target_` does not accept, and for each value other than true or false of an argument whose default is a bool."""
    for path, node in targets(run.as_dict()):
        group = next((key for key in reversed(path) if key in choices), path[0])
        yaml = f"conf/{group}/{choices[group]}.yaml" if group in choices else ".".join(path)
        try:
            takes = inspect.signature(get_object(node["_target_"])).parameters
        except Exception as error:  # an import may raise anything, and the message shows the error
            why = str(error).splitlines()[-1]
            yield f"{yaml}: {node['_target_']} cannot be imported ({why}).{moved(node['_target_'])}"
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
                yield (
                    f"{yaml}: {node['_target_']} has no argument '{key}'. Its arguments are: "
                    f"{', '.join(names) or 'none'}."
                )


def moved(target: str) -> str:
    """Returns advice for a `_target_` that cannot be imported. If it begins with lowmem, and a `_target_` in conf/ ends
    in the same name, lowmem has moved the class or function, and the advice is to type the `_target_` in conf/.
    Otherwise the advice is an empty string."""
    *path, name = target.split(".")
    shipped = {known for file in CONF.rglob("*.yaml") for known in TARGET.findall(file.read_text(encoding="utf-8"))}
    same = [known for known in sorted(shipped) if path[:1] == ["lowmem"] and known.endswith(f".{name}")]
    if not same:
        return ""
    return f" It has moved: type {max(same, key=lambda known: len({*path} & {*known.split('.')}))}."


def _savers(run: Run) -> Iterator[str]:
    """Yields a message for each callback that would save its own checkpoints. Unlike `Checkpoints`, such a callback
    does not check that all weights are finite, and its files may have names that resume=<run folder> does not find."""
    from lightning.pytorch.callbacks import Checkpoint

    for path, node in targets({name: node.plain() for name, node in run.callbacks.items()}, ("callbacks",)):
        callback = get_object(node["_target_"])
        if isinstance(callback, type) and issubclass(callback, Checkpoint):
            yield (
                f"{'.'.join(path)}: {callback.__name__} saves without a check that all weights are finite, under names "
                "that resume=<run folder> does not find. Leave it out, and type save_every=30min checkpoint.keep=best "
                "instead."
            )


def _metric(name: str | None) -> Iterator[str]:
    if name is None:
        return
    # Hydra would print the error, in addition to raising it
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)
    try:
        is_function = callable(get_object(name))
        why = "this is not a function"
    except Exception as error:  # importing a module may raise anything
        is_function, why = False, str(error.__cause__ or error).partition("\n")[0]
    if not is_function:
        yield f"metric={name}: {why}. Type metric=<module>.<function> of a module beside train.py, or metric=null."


def targets(values: Mapping, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping]]:
    """Yields (path, node) for every node with a `_target_`."""
    if "_target_" in values:
        yield path, values
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from targets(value, (*path, str(key)))


def _device(device: str, snapshot: bool) -> None:
    import torch

    if snapshot and (device == "cpu" or not torch.cuda.is_available()):
        raise Refused(
            "memory.snapshot=true: only the CUDA allocator records a snapshot. Leave it out and look at memory.png, or "
            "type device=cuda."
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise Refused(
            f"device=cuda: this torch ({torch.__version__}) sees no CUDA device. "
            "Type device=cpu, or install a CUDA build of torch and check `nvidia-smi`."
        )
    ranks, cards = rank_environment.on_this_machine(), torch.cuda.device_count()
    if device != "cpu" and cards and ranks > cards:
        why = f"which has {cards} CUDA device{'s' * (cards > 1)}, and each rank needs one"
        if "LOCAL_WORLD_SIZE" not in os.environ:
            raise Refused(
                f"LOCAL_WORLD_SIZE is not set, so all {ranks} ranks are assumed to run on this machine, {why}. Start "
                "them with torchrun, or set LOCAL_WORLD_SIZE to the number of ranks on this machine."
            )
        raise Refused(
            f"devices={rank_environment.size()}: {ranks} of these ranks run on this machine, {why}. Type "
            f"devices={cards}, or device=cpu; to use several machines, start torchrun on each."
        )
    if device != "cpu" and cards and ranks > 1 and "LOCAL_RANK" not in os.environ:
        raise Refused(
            f"LOCAL_RANK is not set, so all {ranks} ranks on this machine would use its first CUDA device. Start them "
            "with torchrun, or set LOCAL_RANK to the device index of each rank."
        )


def check_positions(seq_len: int, positions: int | None) -> None:
    """Raises Refused if `seq_len` exceeds `positions`, the model's maximum sequence length (None if it is unknown)."""
    if positions is not None and seq_len > positions:
        raise Refused(
            f"seq_len={seq_len}: this model supports sequences of up to {positions} tokens. Type seq_len={positions} "
            "or less."
        )


def check_vocabulary(vocab_size: int, tokens: int) -> None:
    if tokens > vocab_size:
        raise Refused(
            f"The tokenizer has {tokens} tokens, but the model's vocabulary has only {vocab_size}. Type "
            f"model.architecture.vocab_size={tokens}, or choose the model that this tokenizer belongs to."
        )
