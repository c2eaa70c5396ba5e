"""Runs the tests marked `kernels` once per setting of the libraries that compute: `make test-kernels`.

Each processor has kernels of its own, which add in another order and round elsewhere, so a bound that was measured with
one of them may fail with another. Four variables choose kernels of other processors, and one is changed at a time:
ATEN_CPU_CAPABILITY of torch's own operators, ONEDNN_MAX_CPU_ISA of products in 16 bits, MKL_CBWR of products in fp32,
OMP_NUM_THREADS of all. `--shard=2/9` runs every ninth setting, from the second on; other arguments are pytest's.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tiers import shard

# (variable, value, what /proc/cpuinfo calls the units that the value needs)
SETTINGS = (
    ("OMP_NUM_THREADS", "1", None),
    ("OMP_NUM_THREADS", "2", None),
    ("ATEN_CPU_CAPABILITY", "default", None),
    ("ATEN_CPU_CAPABILITY", "avx2", "avx2"),
    ("ATEN_CPU_CAPABILITY", "avx512", "avx512f"),
    ("ONEDNN_MAX_CPU_ISA", "AVX2", "avx2"),
    ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE", "avx512f"),
    ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", "avx512_bf16"),
    ("MKL_CBWR", "COMPATIBLE", None),
)
SLEEPING = {"OMP_WAIT_POLICY": "passive"}  # threads that wait by spinning take 30 times as long where cores are shared
ROW = "{:<36}{:>8}{:>8}{:>9}"


def units() -> set[str]:
    """Returns the flags of this processor; none where Linux does not list them."""
    file = Path("/proc/cpuinfo")
    return set(file.read_text().split()) if file.exists() else set()


def counts(output: str) -> tuple[int, int]:
    """Returns how many tests passed, and how many failed or met an error, by pytest's last line."""
    found = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", output[-200:])}
    return found.get("passed", 0), found.get("failed", 0) + found.get("error", 0)


def run(variable: str, value: str, arguments: list[str]) -> tuple[str, bool]:
    """Runs the tests with one setting. Returns: the row of the table, and whether all is green."""
    start, name = time.monotonic(), f"{variable}={value}"
    command = [sys.executable, "-m", "pytest", "-m", "kernels and not matrix", *arguments]
    changed = os.environ | SLEEPING | {"OMP_NUM_THREADS": "1", variable: value}
    tests = subprocess.run(command, env=changed, stdout=subprocess.PIPE, text=True, timeout=3600)
    green = tests.returncode == 0
    print(name if green else f"{tests.stdout}\n{name}: red", flush=True)
    return ROW.format(name, *counts(tests.stdout), int(time.monotonic() - start)), green


def main(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shard", type=shard, default=(1, 1))
    options, others = parser.parse_known_args(arguments)
    number, count = options.shard
    here, rows = units(), [(ROW.format("setting", "passed", "failed", "seconds"), True)]
    for variable, value, needed in SETTINGS[number - 1 :: count]:
        if needed is None or needed in here:
            rows.append(run(variable, value, others))
        else:
            rows.append((f"{variable}={value}: skipped, this processor has no {needed}", True))
    print(*(row for row, _ in rows), sep="\n")
    return 0 if all(green for _, green in rows) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
