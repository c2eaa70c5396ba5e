"""Tests the wheels that are uploaded to a machine with a card: repacking, the limit of their size, and missing
requirements."""

from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import pytest
from benchmarks.card import luggage

pytestmark = pytest.mark.docs
LIBRARIES = [f"bitsandbytes/libbitsandbytes_{of}.so" for of in ("cpu", "cuda124", "cuda130", "rocm70", "xpu2026")]


def made_wheel(folder: Path, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()) -> Path:
    """Writes a small wheel, and returns its path."""
    info = f"{name}-{version}.dist-info"
    lines = [f"Requires-Dist: {line}" for line in requires]
    files = files | {
        f"{info}/METADATA": "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        file: urlsafe_b64encode(sha256(text.encode()).digest()).rstrip(b"=").decode() for file, text in files.items()
    }
    record = [f"{file},sha256={digests[file]},{len(text.encode())}" for file, text in files.items()]
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,", ""]))
    return wheel


@pytest.fixture
def bitsandbytes(tmp_path: Path) -> Path:
    files = {library: library * 50 for library in LIBRARIES} | {"bitsandbytes/__init__.py": "x = 1\n"}
    return made_wheel(tmp_path, "bitsandbytes", "0.50.2", files)


def test_repacked_wheel_keeps_only_the_cpu_library_and_the_requested_cuda_library(bitsandbytes: Path):
    before = bitsandbytes.stat().st_size
    luggage.repack(bitsandbytes, "cuda130")
    assert bitsandbytes.stat().st_size < before
    with ZipFile(bitsandbytes) as archive:
        names = archive.namelist()
        record = archive.read("bitsandbytes-0.50.2.dist-info/RECORD").decode().splitlines()
    assert [name for name in names if name.endswith(".so")] == [LIBRARIES[0], LIBRARIES[2]]
    assert sorted(line.split(",")[0] for line in record) == sorted(names)


def test_repacked_wheel_is_installed_by_pip(bitsandbytes: Path, tmp_path: Path):
    luggage.repack(bitsandbytes, "cuda130")
    target = tmp_path / "target"
    luggage._pip("install", "--no-index", "--no-deps", "--target", str(target), str(bitsandbytes))
    assert sorted(file.name for file in (target / "bitsandbytes").glob("*.so")) == [
        "libbitsandbytes_cpu.so",
        "libbitsandbytes_cuda130.so",
    ]


def test_second_repacking_of_a_wheel_changes_no_byte(bitsandbytes: Path):
    luggage.repack(bitsandbytes, "cuda130")
    once = bitsandbytes.read_bytes()
    luggage.repack(bitsandbytes, "cuda130")
    assert bitsandbytes.read_bytes() == once


def test_repacking_refuses_a_cuda_that_the_wheel_lacks_and_leaves_the_wheel_unchanged(bitsandbytes: Path):
    before = bitsandbytes.read_bytes()
    with pytest.raises(SystemExit, match="has no libbitsandbytes_cuda999"):
        luggage.repack(bitsandbytes, "cuda999")
    assert [file.name for file in bitsandbytes.parent.iterdir()] == [bitsandbytes.name]
    assert bitsandbytes.read_bytes() == before


def test_size_of_the_upload_counts_wheels_and_tracked_files_and_is_refused_above_the_limit(tmp_path: Path):
    tracked = luggage.size(tmp_path)
    (tmp_path / "a-1-py3-none-any.whl").write_bytes(b"x" * 1000)
    assert luggage.size(tmp_path) == tracked + 1000
    with pytest.raises(SystemExit, match="above the limit"):
        luggage.size(tmp_path, limit=tracked + 999)


def test_missing_requirements_lists_packages_that_wheels_and_image_lack_or_have_in_unsuitable_versions(tmp_path: Path):
    needs = (
        "b>=2",
        "there",
        "old>=5",
        "un_known>=9",
        "lost",
        'windows; sys_platform == "win32"',
        'more; extra == "all"',
    )
    made_wheel(tmp_path, "a", "1.0", {"a.py": ""}, needs)
    made_wheel(tmp_path, "b", "1.0", {"b.py": ""}, ('backport; python_version < "3.12"',))
    image = {"there": "1.0", "old": "4.9", "un-known": None}
    assert list(luggage.missing_requirements(tmp_path, "3.12", image)) == [
        "a needs b>=2 and gets 1.0",
        "a needs old>=5 and gets 4.9",
        "a needs lost",
    ]
    assert 'b needs backport; python_version < "3.12"' in luggage.missing_requirements(tmp_path, "3.11", image)


def test_wheel_of_a_version_that_is_not_in_the_list_of_uploaded_wheels_is_refused(tmp_path: Path):
    made_wheel(tmp_path, "hydra_core", luggage.WHEELS["hydra-core"], {"hydra.py": ""})
    luggage.refuse_others(tmp_path)
    made_wheel(tmp_path, "hydra_core", "1.0", {"hydra.py": ""})
    with pytest.raises(SystemExit, match=r"hydra_core-1\.0.*is not in the list"):
        luggage.refuse_others(tmp_path)
