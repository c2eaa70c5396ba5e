"""Collects the wheels that a GPU machine without a network needs, and checks that none is missing.

    python -m benchmarks.card.luggage                        # into .wheels, for Python 3.12 on the GPU machine
    python -m benchmarks.card.luggage --check python3.12     # also installs them in a temporary folder and imports them
    python -m benchmarks.card.luggage .wheels311 --python 3.11 --check python

The image of the GPU machine has the packages of `IMAGE`. Each requirement of a wheel must be met by another wheel or by
the image. The folder is sent together with the files that git tracks, so `LIMIT` applies to the sum of their sizes. The
exit code is 1 after any failure, such as a missing requirement, a sum above `LIMIT`, or a failed import.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 40_000_000  # bytes of the folder and of all tracked files
WHEELS = {
    "hydra-core": "1.3.8",
    "omegaconf": "2.3.1",  # Hydra 1.3 asks for < 2.4
    "antlr4-python3-runtime": "4.9.3",  # published as source only, so its wheel is built
    "pydantic": "2.14.4",
    "pydantic-core": "2.50.5",  # this pydantic requires exactly this version
    "annotated-types": "0.8.0",
    "typing-inspection": "0.4.5",
    "typing-extensions": "4.16.0",  # pydantic asks for >= 4.16; the image's version is not known
    "torchao": "0.18.0",
    "bitsandbytes": "0.50.2",  # repacked, from 43 MB to 4 MB
    "trl": "1.16.0",
    "datasets": "5.2.0",
    "dill": "0.4.1",
    "multiprocess": "0.70.19",
    "liger-kernel": "0.8.5",
    "roundpipe": "0.1.1",
    "beartype": "0.23.1",
    "trainstream": "0.4.1",
    "nvidia-ml-py": "13.615.71",  # torch reads the card's clock with it
}
BUILT = ("antlr4-python3-runtime",)
# package -> module, if the names differ in more than "-" and "_"
MODULES = {"hydra-core": "hydra", "antlr4-python3-runtime": "antlr4", "nvidia-ml-py": "pynvml"}
NEED_CUDA = ("roundpipe", "trainstream")  # their import raises an error without a card
# Package of the image -> its version; None: the version is not known.
IMAGE: dict[str, str | None] = {
    "torch": "2.11.0",
    "triton": "3.6.0",
    "transformers": "5.17.0",
    "tokenizers": "0.23.2",
    "safetensors": "0.8.0",
    "accelerate": "1.15.0",
    "huggingface-hub": "1.33.0",
    "numpy": "2.5.2",
    **dict.fromkeys(("filelock", "fsspec", "httpx", "jinja2", "lightning", "matplotlib", "ninja", "packaging")),
    **dict.fromkeys(("pandas", "peft", "psutil", "py-cpuinfo", "pyarrow", "pyyaml", "requests", "tqdm", "xxhash")),
}
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 24, 17)] + ["manylinux2014_x86_64"]
IMPORTS = """
import importlib, importlib.util, pkgutil, socket, sys
from pathlib import Path
import torch

def refuse(*_):
    raise OSError("there is no network in this check")
socket.socket.connect = refuse
target, need_cuda, names = sys.argv[1], sys.argv[2].split(","), sys.argv[3].split(",")
for name in names:
    if name in need_cuda and not torch.cuda.is_available():
        file = importlib.util.find_spec(name).origin
        print(f"{name}: found, but not imported, because there is no CUDA here.")
    else:
        file = importlib.import_module(name).__file__
    if Path(target).resolve() not in Path(file).resolve().parents:
        sys.exit(f"{name} was imported from {file}, not from the wheels.")
from trl import SFTConfig, SFTTrainer
import benchmarks.card
for module in pkgutil.iter_modules(benchmarks.card.__path__):
    importlib.import_module(f"benchmarks.card.{module.name}")
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        refuse_others(folder)
        fetch(folder, options.python)
        for wheel in folder.glob("bitsandbytes-*.whl"):
            repack(wheel, options.cuda)
        total = size(folder)
        missing = list(missing_requirements(folder, options.python))
        if missing:
            raise SystemExit("These requirements are in neither the folder nor the image: " + "; ".join(missing) + ".")
        print(f"{folder}: {len(WHEELS)} wheels. With the tracked files it has {total / 1e6:.1f} MB.")
        if options.check:
            check(folder, options.check)
            print(f"All of them can be imported by {options.check} without a network.")
        else:
            print("Imports were not checked: type --check <a Python of this version that has the image's packages>.")
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"{' '.join(error.cmd[1:4])} failed: {(error.stderr or error.stdout).strip()[-1500:]}"
        ) from None
    to = "$PWD/.cache/luggage"
    print(f"python3 -m pip install --no-index --no-deps --target {to} {folder}/*.whl && export PYTHONPATH={to}")
    return 0


# --- the wheels ---------------------------------------------------------------------------------------------------


def named(wheel: Path) -> tuple[str, str]:
    """Returns (name, version) from the file name of a wheel."""
    name, version, *_ = parse_wheel_filename(wheel.name)
    return name, str(version)


def refuse_others(folder: Path) -> None:
    """Raises SystemExit if the folder contains a wheel that is not in WHEELS, because pip would install that wheel
    too."""
    for wheel in folder.glob("*.whl"):
        name, version = named(wheel)
        if WHEELS.get(name) != version:
            raise SystemExit(f"{wheel} is not in the list of wheels. Delete it, or name another folder.")


def fetch(folder: Path, python: str) -> None:
    """Downloads or builds the wheels that the folder lacks. Args: python: version of the GPU machine's Python, such as
    3.12."""
    here = {named(wheel)[0] for wheel in folder.glob("*.whl")}
    lacking = [f"{name}=={version}" for name, version in WHEELS.items() if name not in here | set(BUILT)]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    target = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
    if lacking:
        _pip("download", "--no-deps", "--dest", str(folder), *target, *lacking)
    for name in set(BUILT) - here:
        _pip("wheel", "--no-deps", "--wheel-dir", str(folder), f"{name}=={WHEELS[name]}")


def repack(wheel: Path, cuda: str) -> None:
    """Removes from a bitsandbytes wheel all libraries except one for CPUs and one for CUDA, and removes from RECORD the
    lines of the removed libraries.

    Args: cuda: name of the CUDA library to keep, such as cuda130. Raises: SystemExit: the wheel lacks one of the two
    libraries.
    """
    kept = {f"libbitsandbytes_{of}.so" for of in ("cpu", cuda)}
    smaller = wheel.with_suffix(".smaller")
    with ZipFile(wheel) as old, ZipFile(smaller, "w", ZIP_DEFLATED) as new:
        libraries = {name for name in old.namelist() if Path(name).match("bitsandbytes/libbitsandbytes_*.so")}
        if absent := kept - {Path(name).name for name in libraries}:
            smaller.unlink()
            raise SystemExit(f"{wheel.name} has no {', '.join(sorted(absent))}. Type another --cuda.")
        dropped = {name for name in libraries if Path(name).name not in kept}
        for entry in old.infolist():
            if entry.filename not in dropped:
                data = old.read(entry)
                if entry.filename.endswith(".dist-info/RECORD"):
                    lines = data.decode().splitlines(keepends=True)
                    data = "".join(line for line in lines if line.split(",")[0] not in dropped).encode()
                new.writestr(entry, data, ZIP_DEFLATED)
    smaller.replace(wheel)


# --- what is checked ----------------------------------------------------------------------------------------------


def size(folder: Path, limit: int = LIMIT) -> int:
    """Returns the bytes of the folder plus the bytes of the tracked files. Raises: SystemExit: the sum is above the
    limit."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    tracked = sum((ROOT / name).stat().st_size for name in listed.split("\0") if (ROOT / name).is_file())
    wheels = sum(wheel.stat().st_size for wheel in folder.iterdir())
    if tracked + wheels > limit:
        raise SystemExit(
            f"The wheels ({wheels / 1e6:.1f} MB) and the tracked files ({tracked / 1e6:.1f} MB) are above the limit of "
            f"{limit / 1e6:.0f} MB. Leave a wheel out of WHEELS in benchmarks/card/luggage.py."
        )
    return tracked + wheels


def missing_requirements(folder: Path, python: str, image: Mapping[str, str | None] = IMAGE) -> Iterator[str]:
    """Yields a message for each requirement of a wheel that neither the folder nor the image meets. Requirements of
    extras are skipped. A package of the image with an unknown version meets any requirement."""
    wheels = sorted(folder.glob("*.whl"))
    there = {**image, **dict(map(named, wheels))}
    for wheel in wheels:
        for needed in requirements(wheel, python):
            name = canonicalize_name(needed.name)
            version = there.get(name)
            if name not in there:
                yield f"{named(wheel)[0]} needs {needed}"
            elif version is not None and not needed.specifier.contains(version, prereleases=True):
                yield f"{named(wheel)[0]} needs {needed} and gets {version}"


def requirements(wheel: Path, python: str) -> list[Requirement]:
    """Returns the requirements in a wheel's METADATA that apply on Linux without extras. Args: python: version of the
    GPU machine's Python, such as 3.12."""
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(name).decode())
    machine = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "extra": ""}
    found = [Requirement(line) for line in headers.get_all("Requires-Dist", [])]
    return [needed for needed in found if needed.marker is None or needed.marker.evaluate(machine)]


def check(folder: Path, python: str) -> None:
    """Installs the wheels in a temporary folder, and imports them and all modules of benchmarks.card.

    Without CUDA, the packages of `NEED_CUDA` are located but not imported. Args: python: command of an interpreter with
    the image's packages.
    """
    with tempfile.TemporaryDirectory() as target:
        wheels = [str(wheel) for wheel in sorted(folder.glob("*.whl"))]
        _run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", target, *wheels)
        paths = [target, *(str(ROOT / part) for part in ("src", "tests/support", "tests", "."))]
        names = [MODULES.get(name, name.replace("-", "_")) for name in WHEELS]
        words = ["-c", IMPORTS, target, ",".join(NEED_CUDA), ",".join(names)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        print(_run(python, *words, env=environment), end="")


def _pip(*words: str) -> None:
    _run(sys.executable, "-m", "pip", "-q", *words)


def _run(*words: str, **more: object) -> str:
    return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True, **more).stdout


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.card.luggage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path(".wheels"))
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="Python of the card machine")
    parser.add_argument("--cuda", default="cuda130", help="the CUDA library of bitsandbytes to keep")
    parser.add_argument("--check", metavar="PYTHON", help="an interpreter that has the image's packages")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
