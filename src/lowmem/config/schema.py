"""Declares the keys of conf/config.yaml (`Keys`) and conf/plan.yaml (`PlanKeys`): the type and range of each key, and
how an error message describes a valid value. `check.py` checks the composed config with `errors`, and `Run`
(`settle.py`) derives its attributes from `Keys`.

The yaml of a technique needs no entry here: its values show the types of its arguments, and `ARGUMENTS` adds ranges for
names that have the same meaning in all classes of `PACKAGES`. For classes of other packages, `check.py` checks the
names of arguments, and this module checks only the values of arguments that the yaml interpolates, such as ${lr}. This
module imports nothing heavy.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model

from lowmem.config import cards, drives
from lowmem.config.declarations import CHANGEABLE
from lowmem.config.spelling import keys_of, no_such_key
from lowmem.config.typed_lines import CONF, parsed
from lowmem.memory import cap
from lowmem.system.errors import Refused
from lowmem.system.units import steps_or_seconds


def _words(words: str, annotation: Any, **bounds: Any) -> Any:
    """Returns a type with its range and a description of valid values. Messages put 'give' before the description,
    unless the description begins with 'set' or 'leave'."""
    return Annotated[annotation, Field(description=words, **bounds)]


def _read_by(read: Callable[[Any], object]) -> AfterValidator:
    """Returns a validator that rejects a value if `read` raises Refused for it."""

    def check(value: Any) -> Any:
        try:
            read(value)
        except Refused as error:
            raise ValueError from error
        return value

    return AfterValidator(check)


def _size(plain: bool) -> AfterValidator:
    return _read_by(partial(cap.parse_bytes, plain=plain))


def _below(pattern: str) -> str:
    if pattern.startswith("/"):
        raise ValueError
    return pattern


_NO_FOLDER = re.compile(r"true|false|yes|no|on|off|[\d.]+ *[kmgt]i?b|\w+://.*", re.IGNORECASE)


def _folder(place: str) -> str:
    if _NO_FOLDER.fullmatch(place):
        raise ValueError
    return place


def _changeable(groups: str) -> str:
    if not {*groups.split(",")} <= {*CHANGEABLE}:
        raise ValueError
    return groups


def _never(_: object) -> None:
    raise ValueError


_steps_or_minutes = AfterValidator(lambda value: steps_or_seconds(value) and value)
SIZE = "a size such as 12GiB or 900MiB (GiB = 2**30 bytes)"
CARDS = "<cards>"  # placeholder for the names of all cards, in the order of `cards.nearest`

Switch = _words("true or false", bool)
Text = _words("a string", str, min_length=1)
Count = _words("a whole number of at least 1", int, ge=1)
Whole = _words("a whole number of at least 0", int, ge=0)
Seed = _words("a whole number from 0 to 4294967295", int, ge=0, lt=2**32)
Number = _words("a number", float, allow_inf_nan=False)
Positive = _words("a positive number", float, gt=0, allow_inf_nan=False)
Timeout = _words("a positive number of seconds, at most a week (604800)", float, gt=0, le=604800)
NotNegative = _words("a number of at least 0", float, ge=0, allow_inf_nan=False)
Share = _words("a number from 0 to 1", float, ge=0, le=1)
Decay = _words("a number of at least 0 and below 1", float, ge=0, lt=1)
Properties = _words("set its keys", dict[str, Any])
Places = _words("a list such as [a,b]", list)
Lr = _words("a positive learning rate, such as 2e-5 for a pretrained model", Positive)
Clip = _words("a positive number, or null to disable clipping", Positive | None)
BatchSize = _words("a whole number of at least 1, or auto", Count | Literal["auto"])
Limit = _words(f"{SIZE}, or null for no limit", Annotated[int | str, _size(plain=True)] | None)
Room = _words(f"{SIZE}, or null for the free memory of this machine", Annotated[str, _size(plain=False)] | None)
Gpu = _words(
    f"{SIZE}, null for the card of this machine, or a card: {CARDS}", Annotated[str, _read_by(cards.card)] | None
)
DriveSpace = _words(
    "a folder, a size such as 200GB or 180GiB, or null for none",
    Annotated[str, Field(min_length=1), _read_by(drives.size_of)] | None,
)
MayChange = _words(
    f"{', '.join(CHANGEABLE)}, or both as {','.join(CHANGEABLE)}, or null",
    Annotated[str, AfterValidator(_changeable)] | None,
)
Every = _words("a whole number of steps, at least 1, or minutes such as 30min", Annotated[int | str, _steps_or_minutes])
Device = _words("one of auto, cpu, cuda", Literal["auto", "cpu", "cuda"])
Dtype = Literal["float32", "bfloat16", "float16"]
Place = _words("a file or a folder", str, min_length=1)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Node(BaseModel):
    """A node with a `_target_`: the class or function to call, and its arguments. This schema accepts any arguments;
    the function `arguments` of this module returns the schema that checks them."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    target: Text = Field(alias="_target_")

    def plain(self) -> dict[str, Any]:
        """Returns the node as in its yaml, with `_target_`."""
        return self.model_dump(by_alias=True)

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of the node's class or function (with an optimizer also the key `embedding_bits`, which
        is lowmem's own). Keys that are fields of this schema or of a subclass are not included."""
        return {key: value for key, value in self.model_extra.items() if not key.startswith("_") and key != "declares"}


Nodes = _words("a mapping of names to nodes, each with a _target_", dict[str, Node])


class Model(Section):
    name: Place
    pretrained: Switch
    trust_remote_code: Switch
    attention: Text
    lr: Lr
    seq_len: Count
    max_steps: Count
    architecture: _words("set its keys, such as model.architecture.n_layer=6", dict[str, Any] | None)
    added_tokens: _words("a list such as [<|im_start|>,<|im_end|>]", list[Text])


class Optim(Node):
    in_backward: Switch


class Memory(Section):
    limit: Limit
    snapshot: Switch


class Tile(Section):
    tokens: _words("a whole number of tokens, at least 1, or null to disable slicing", Count | None)


class Checkpoint(Section):
    keep: _words("last, best, or the number of newest checkpoints to keep", Literal["last", "best"] | Count)


class EarlyStop(Section):
    patience: _words("a whole number of at least 1, or null to disable early stopping", Count | None)
    watch: _words("val_loss or accuracy", Literal["val_loss", "accuracy"])


# argument of Lightning's Trainer that must not be typed as trainer.<argument> -> the key to type instead
SET_BY = {
    "accelerator": "device",
    "accumulate_grad_batches": "accumulation",
    "callbacks": "+callbacks.<name>._target_",
    "check_val_every_n_epoch": "val_every",
    "default_root_dir": "hydra.run.dir",
    "enable_checkpointing": "save_every",
    "gradient_clip_algorithm": "clip or clip_value",
    "gradient_clip_val": "clip or clip_value",
    "logger": "logger",
    "max_epochs": "max_steps",
    "max_steps": "max_steps",
    "min_epochs": "max_steps",
    "min_steps": "max_steps",
    "precision": "precision",
    "val_check_interval": "val_every",
}
Nothing = Annotated[Any, AfterValidator(_never)]
_Trainer = create_model(
    "_Trainer",
    __base__=Node,
    **{name: (_words(f"leave it out, and set {key} instead", Nothing), None) for name, key in SET_BY.items()},
)


class Trainer(_Trainer):
    plugins: Nodes


class Keys(Section):
    """Declares the keys of conf/config.yaml."""

    model: Model
    data: Node
    precision: Node
    adapter: Node
    optim: Optim
    scheduler: Node
    accumulation: Node
    gradient_checkpointing: Node
    compile: Node
    weights: Node
    strategy: Node
    loss: Node
    logger: Nodes
    lr: Lr
    batch_size: BatchSize
    seq_len: Count
    max_steps: Count
    epochs: _words("a whole number of at least 1, or null", Count | None)
    tokenizer: _words("a folder or a hub id, or null for the model's tokenizer", Place | None)
    clip: Clip
    clip_value: Clip
    seed: Seed
    deterministic: Switch
    freeze: _words("a list of patterns of parameter names, such as [transformer.wte.*], or null", list[Text] | None)
    on_nonfinite: _words("stop or skip", Literal["stop", "skip"])
    resume: _words("a run folder or a checkpoint, auto, or null", Place | None)
    evaluate: _words("a run folder, a checkpoint or an exported model, or null", Place | None)
    export: _words("a run folder or a checkpoint, or null", Place | None)
    generate: _words("a run folder, an exported model or an adapter, or null", Place | None)
    show: _words("the number of training sequences to print, or null", Count | None)
    prompt: _words("a string, or null", str | None)
    max_new_tokens: Count
    temperature: NotNegative
    device: Device
    devices: Count
    memory: Memory
    tile: Tile
    plan: _words(f"check, auto, off, {SIZE}, or a card: {CARDS}", Literal["check", "auto", "off"] | Gpu)
    may_change: MayChange
    val_every: Count
    val_sequences: Count
    save_every: Every
    checkpoint: Checkpoint
    early_stop: EarlyStop
    log_every: Count
    metric: _words("module.function, such as examples.metric.accuracy, or null", Text | None)
    sample_tokens: Whole
    sample_prompts: _words("a list such as [a,b], a file with one prompt per line, or null", Place | list | None)
    push: _words("a hub id such as name/model, or null", Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] | None)
    export_dtype: _words(f"one of {', '.join(get_args(Dtype))}, or null for the dtype of the weights", Dtype | None)
    export_format: _words("huggingface or gguf", Literal["huggingface", "gguf"])
    merge: Switch
    cache_dir: Place
    output_dir: _words("leave it out, and set hydra.run.dir instead", None)
    debug: Switch
    trainer: _words("set its keys: _target_, plugins and arguments of Lightning's Trainer", Trainer)
    callbacks: Nodes


class PlanKeys(Keys):
    """Declares the keys of conf/plan.yaml."""

    gpu: Gpu
    ram: Room
    drive: DriveSpace
    search: Switch
    longest: _words("seq_len, batch_size, model or null", Literal["seq_len", "batch_size", "model"] | None)
    node: Count
    rows: Count


# Packages of the shipped yamls. In other packages, names such as `path`, `target` or `alpha` may have a different
# meaning.
PACKAGES = ("lowmem", "torch", "torchao", "bitsandbytes", "lightning", "hydra_plugins")
# Types of arguments by name. Any other argument has the type of its value in the yaml (`_kind`), where an integer
# allows any integer of at least 1.
ARGUMENTS: dict[str, Any] = {
    "lr": Lr,
    "betas": _words(
        "two numbers of at least 0 and below 1, such as [0.9,0.95]",
        Annotated[list[Decay], Field(min_length=2, max_length=2)],
    ),
    "beta1": _words("a number of at least 0 and below 1, or null", Decay | None),
    "momentum": Decay,
    "eps": NotNegative,
    "weight_decay": NotNegative,
    "clip_threshold": Positive,
    "decay_rate": _words("a number of at most 0, such as -0.8", float, le=0, allow_inf_nan=False),
    "embedding_bits": _words("8 or 32, the bits of the optimizer state of embeddings", Literal[8, 32]),
    "relative_step": _words("false, since lr and scheduler set the learning rate", Literal[False]),
    "warmup_steps": Whole,
    "warmup": _words("a share of all steps from 0 to 1, such as 0.03, or null", Share | None),
    "total_steps": Count,
    "batch_size": BatchSize,
    "sizes": _words("the number of micro-batches by first epoch or step, such as {0:1,3:4}", dict[Whole, Count]),
    "fraction": Share,
    "r": Count,
    "alpha": Positive,
    "dropout": Decay,
    "target": _words(
        "all-linear, or a list of names of layers such as [q_proj,v_proj]", Literal["all-linear"] | list[Text]
    ),
    "experts": _words("lora, none or null", Literal["lora", "none"] | None),
    "path": Place,
    "pattern": _words(
        "a file pattern relative to the folder, such as **/*.md", Annotated[Text, AfterValidator(_below)]
    ),
    "val_fraction": _words("a share between 0 and 1, such as 0.05", float, gt=0, lt=1),
    "val_path": _words(
        "a file or a folder, several with names, such as {news:a,wiki:b}, or null",
        Place | Annotated[dict[Annotated[str, Field(pattern=r"^[\w.-]+$")], Place], Field(min_length=1)] | None,
    ),
    "packing": _words("joined, documents or padded", Literal["joined", "documents", "padded"]),
    "too_long": _words("cut, drop or refuse", Literal["cut", "drop", "refuse"]),
    "bos": _words("auto, true or false", bool | Literal["auto", "older"]),
    "timeout": Timeout,
    "offload": Switch,
    "whole_below": Whole,
    "schedule": _words("1f1b or gpipe", Literal["1f1b", "gpipe"]),
    "skip_bad": Switch,
    "rated": _words("leave it out, since loss= sets this key", bool),
    **dict.fromkeys(("subset", "val_split", "revision"), _words("a string, or null", Text | None)),
    "shares": _words("a positive number by source, such as {code: 3, notes: 1}, or null", dict[str, Positive] | None),
    "delimiter": _words(
        "one character, such as ';', or the word tab", Annotated[str, Field(pattern=r'^([^"\n\r]|tab)$')]
    ),
    "assistant": _words("all or last", Literal["all", "last"]),
    "template": _words("chatml, a file, or null for the tokenizer's own", Place | None),
    **dict.fromkeys(("field", "prompt", "completion", "messages"), _words("the name of a field, or null", Text | None)),
    "init_scale": Positive,
    "clip": Clip,
    "clip_value": Clip,
    "enabled": Switch,
    "early_step": Switch,
    "resident_blocks": Whole,
    "drive": _words("a folder on a drive, or null", Annotated[Place, AfterValidator(_folder)] | None),
    "save_dir": _words("a folder, or null", Place | None),
    **dict.fromkeys(("name", "group", "run_id"), _words("a string, or null", Text | None)),
    "tags": _words("a list such as [a,b], or null", list[str] | None),
    "offline": _words("true, false or null", bool | None),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), Share),
    "bos_token_id": _words("a whole number of at least 0, or null", Whole | None),
    "eos_token_id": _words("a whole number of at least 0, a list of them, or null", Whole | list[Whole] | None),
}
OF_VALUES = {bool: Switch, int: Count, float: Number, str: Text, list: Places}


def errors(values: Mapping[str, Any], is_taken_over: Callable[[Sequence[str]], bool]) -> list[str]:
    """Returns a message for every wrong or missing value and for every unknown key. Messages about values that
    interpolations copy are left out if any other value has a message.

    Args:
        values: the resolved config.
        is_taken_over: returns True for the path of a key whose value comes from an interpolation.
    """
    sentences = [*_sentences(PlanKeys if "gpu" in values else Keys, values)]
    for path, node in _nodes(values):
        sentences += _sentences(arguments(_identity(node)), node, path)
    # report a wrong value under the key that was typed, and not under the keys to which interpolations copy it
    typed = [sentence for path, sentence in sentences if not is_taken_over(path)]
    return list(dict.fromkeys(typed or [sentence for _, sentence in sentences]))


@cache
def arguments(identity: str) -> type[BaseModel]:
    """Returns the schema of a node whose `_target_` is `identity`, or of an architecture whose `model_type` is
    `identity`. If no yaml of conf/ contains `identity`, the schema is empty. For classes outside PACKAGES, the schema
    contains only arguments that the yaml interpolates, such as ${lr}. An argument of this schema is required if every
    yaml with this `_target_` sets it."""
    contents = (parsed(text) for text in _texts() if identity in text)
    nodes = [node for content in contents for _, node in _nodes(content) if _identity(node) == identity]
    values = {key: value for node in reversed(nodes) for key, value in node.items()}
    is_class = "." in identity  # an architecture has defaults for all of its keys
    needed = set.intersection(*map(set, nodes)) if nodes and is_class else set()
    if is_class and identity.partition(".")[0] not in PACKAGES:
        return _schema({key: value for key, value in values.items() if str(value).startswith("${")}, needed)
    return _schema({**dict.fromkeys(ARGUMENTS, ...), **values} if nodes else {}, needed)


@cache
def _texts() -> tuple[str, ...]:
    """Returns the text of every yaml of conf/. Cached, because `arguments` searches all files for each `_target_`."""
    return tuple(file.read_text(encoding="utf-8") for file in sorted(CONF.rglob("*.yaml")))


def _schema(values: Mapping[str, object], needed: Collection[str] = ()) -> type[BaseModel]:
    """Returns a schema for keys with these values, in which the keys `needed` are required."""
    fields = {  # pydantic forbids field names that begin with `_`
        f"argument_{number}": (_kind(key, value), Field(... if key in needed else None, alias=key))
        for number, (key, value) in enumerate(values.items())
    }
    return create_model("Arguments", __config__=ConfigDict(extra="allow", strict=True), **fields)


def _kind(key: str, default: object) -> Any:
    """Returns the type of an argument: from its name if ARGUMENTS lists the name, or else from its value in the yaml.
    An unlisted argument whose value is ${<key>} has the type of this key; an unlisted argument whose value is null or
    ??? may have any type. A boolean key of Hydra, such as `_partial_`, must keep its value."""
    if key in ARGUMENTS:
        return _or_null(ARGUMENTS[key]) if default is None else ARGUMENTS[key]
    if isinstance(default, bool) and key.startswith("_"):
        return _words(f"{default}, as in its yaml".lower(), Literal[default])
    if isinstance(default, str) and (reference := re.fullmatch(r"\?\?\?|\$\{([\w.]+)\}", default)):
        return Keys.__annotations__.get(reference[1], Any)
    if isinstance(default, dict):
        return _words("set its keys", _schema(default))
    return OF_VALUES.get(type(default), Any)


def _or_null(kind: Any) -> Any:
    """Returns the given type, extended by null if necessary. Used for arguments that are null in the yaml."""
    words = next(constraint.description for constraint in kind.__metadata__ if getattr(constraint, "description", None))
    return kind if words.endswith("null") else _words(f"{words}, or null", kind | None)


def _nodes(values: Mapping, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict]]:
    """Yields (path, node) for every node with a `_target_` or a `model_type`."""
    if isinstance(_identity(values), str):
        yield path, values
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _nodes(value, (*path, str(key)))


def _identity(node: Mapping) -> object:
    return node.get("_target_", node.get("model_type"))


def _sentences(schema: type[BaseModel], values: Mapping, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple, str]]:
    """Yields (path, sentence) for each error of the `values`: a wrong or missing value, or an unknown key. The path
    begins with `above`, the path of `values` in the config."""
    try:
        schema.model_validate(values)
    except ValidationError as refusal:
        wordings = dict(_wordings(schema))
        for error in refusal.errors(include_url=False, include_context=False, include_input=False):
            yield _sentence(error["type"], error["loc"], values, wordings, above)


def _sentence(
    kind: str, place: tuple, values: Mapping, wordings: Mapping[tuple, str], above: tuple[str, ...]
) -> tuple[tuple, str]:
    """Converts an error of pydantic to (path, sentence).

    Args:
        kind: pydantic's type of the error.
        place: pydantic's location of the error, which may end in the name of a member of a union.
        values: the values that pydantic has checked.
        wordings: path of a field -> description of valid values (`_wordings`).
        above: the path of `values` in the config.
    """
    if kind == "missing":
        key = ".".join(map(str, above + place))
        return above + place, f"{key} has no value: type {key}=<value>."
    if kind == "extra_forbidden":
        line = f"{'.'.join(place)}={_shown(_at(values, place))}"
        others = {key for key in keys_of(values) if not f"{key}.".startswith(f"{'.'.join(place)}.")}
        return place, no_such_key(line, others)
    words = path = None
    for end in range(1, len(place) + 1):
        if (wording := wordings.get(place[:end], wordings.get((*place[: end - 1], "*")))) is not None:
            words, path = wording, place[:end]
    value = _shown(_at(values, path))
    words = words.replace(CARDS, ", ".join(cards.nearest(value)))
    asks = words if words.startswith(("set ", "leave ")) else f"give {words}"
    return above + path, f"{'.'.join(above + path)}={value}: {asks}."


def _wordings(schema: type[BaseModel]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields (path of a field, description of valid values); `*` stands for any key."""
    if "__pydantic_extra__" in schema.__annotations__:
        yield ("*",), "a _target_ and its arguments"
    for name, field in schema.model_fields.items():
        path, kind = (field.alias or name,), field.annotation
        kinds = get_args(kind) or (kind,)
        sections = [member for member in kinds if isinstance(member, type) and issubclass(member, BaseModel)]
        names = [subfield.alias or key for section in sections for key, subfield in section.model_fields.items()]
        yield path, field.description or f"set its keys: {', '.join(names)}"
        if get_origin(kind) is dict and sections:
            path += ("*",)
            yield path, "a _target_ and its arguments"
        yield from ((path + below, words) for section in sections for below, words in _wordings(section))


def _at(values: Mapping, path: tuple[str, ...]) -> object:
    for key in path:
        values = values[key]
    return values


def _shown(value: object) -> str:
    """Returns a value for a message: null, true and false as in a yaml, other values as Python prints them, without
    single quotes."""
    spelled = {None: "null", True: "true", False: "false"}
    return spelled[value] if value is None or isinstance(value, bool) else str(value).replace("'", "")
