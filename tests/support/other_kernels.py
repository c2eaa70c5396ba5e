"""Runs the tests that have the mark `kernels` but not the mark `matrix`, once per setting of the math libraries. This
script is run by `make test-kernels`.

Processors have different kernels, which sum and round in different orders, so a bound that holds with one kernel may
fail with another. Four environment variables select other kernels or another order of sums: ATEN_CPU_CAPABILITY for
torch's operators, ONEDNN_MAX_CPU_ISA for 16-bit matmuls, MKL_CBWR for fp32 matmuls, and OMP_NUM_THREADS for all of
these operators. A setting sets one of the variables. OMP_NUM_THREADS is 1 in all settings of the other variables.
`--shard=2/9` runs every ninth setting, beginning with the second. Other arguments are passed to pytest.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tiers import shard

# (variable, value, flag of /proc/cpuinfo that the processor must have, or None)
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
SLEEPING = {"OMP_WAIT_POLICY": "passive"}  # on shared cores, tests take 30 times as long if waiting threads spin
ROW = "{:<36}{:>8}{:>8}{:>9}"


def units() -> set[str]:
    """Returns the words of /proc/cpuinfo, which include the processor's flags. If the file does not exist, returns an
    empty set."""
    file = Path("/proc/cpuinfo")
    return set(file.read_text().split()) if file.exists() else set()


def counts(output: str) -> tuple[int, int]:
    """Returns (number of passed tests, number of failures and errors), which are read from the end of pytest's
    output."""
    found = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", output[-200:])}
    return found.get("passed", 0), found.get("failed", 0) + found.get("error", 0)


def run(variable: str, value: str, arguments: list[str]) -> tuple[str, bool]:
    """Runs the tests with one setting. Returns (row of the table, True if all tests passed)."""
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
