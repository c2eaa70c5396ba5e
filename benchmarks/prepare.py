"""Measures the speed and the resident memory of tokenizing files of 1 and 3 GB.

python -m benchmarks.prepare                     # half an hour on two cores, 8 GB of disk
python -m benchmarks.prepare --sizes 64 192      # MB

The text consists of random paragraphs of the standard library, in a text file or in a file of JSON lines. The tokenizer
is the BPE of 4096 tokens that `data=stdlib` trains. For each row of the table, a separate process uses all cores to
read, hash, tokenize and pack a file and to write its tokens. The last column is the median time that a step waits for
its accumulation window of 8 x 1024 tokens. Windows are read in the random order of an epoch, while the file of tokens
is in the system's page cache.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.runner import measure, medians, options_of, write

KINDS = ("text", "jsonl")
VOCABULARY = 4096
MB = 10**6
AT_ONCE = 2000  # paragraphs per write


def make(kind: str, size: int, file: Path) -> None:
    """Writes a file of about `size` bytes. Args: kind: one of KINDS."""
    from lowmem.data.sources.text_files import stdlib

    source = "".join(stdlib(0.05).texts())
    paragraphs = [text for text in source.split("\n\n") if text.strip()]
    draw = random.Random(0)
    with file.open("w") as out:
        while out.tell() < size:
            chosen = draw.choices(paragraphs, k=AT_ONCE)
            if kind == "text":
                out.write("\n\n".join(chosen) + "\n\n")
            else:  # a record has four paragraphs, about 600 bytes
                records = ("\n\n".join(chosen[i : i + 4]) for i in range(0, AT_ONCE, 4))
                out.writelines(json.dumps({"text": text}) + "\n" for text in records)


def prepare(kind: str, size: int) -> dict:
    """Writes a file, then tokenizes and packs it. The times and `growth_bytes` are for the second part; `growth_bytes`
    is the peak resident memory minus the resident memory at the beginning of this part."""
    from lowmem.data import packing, token_store
    from lowmem.data.sources import jsonl, text_files
    from lowmem.system.process import peak_rss_bytes, reset_peak_rss, rss_bytes

    folder = Path(os.environ["ROW_FOLDER"])
    file = folder / f"made.{kind}"
    make(kind, size, file)
    bpe = folder / "tokenizer.json"
    token_store.train_bpe(text_files.stdlib(0.05).texts(), VOCABULARY, bpe)
    tokenizer = token_store.load_bpe(bpe)
    tokenizer.backend_tokenizer.encode_batch_fast(["a text for every core"] * 64)
    opened = {"text": text_files.text, "jsonl": jsonl.jsonl}[kind](path=str(file), pattern="*", val_fraction=0.01)

    reset_peak_rss()
    before, start, cpu = rss_bytes(), time.perf_counter(), time.process_time()
    store = token_store.tokenize(opened, folder / "cache", VOCABULARY, tokenizer)
    rows = packing.rows(store.train, 1024, {"text": "joined", "jsonl": "documents"}[kind], "cut", "train")
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    growth = peak_rss_bytes() - before
    count = len(store.train.ids) + len(store.val.ids)
    return {
        "bytes": file.stat().st_size,
        "tokens": count,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "tokens_per_second": count / seconds,
        "growth_bytes": growth,
        "window_seconds": waited(rows),
    }


def waited(rows) -> float:
    """Returns the median seconds that a step waits for its accumulation window, over 100 windows."""
    from lowmem.config.accumulation import fixed
    from lowmem.data.loader import Share, WindowLoader

    windows, seconds = iter(WindowLoader(rows, Share(8), fixed(1), 0)), []
    for _ in range(100):
        start = time.perf_counter()
        next(windows)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1000, 3000], help="MB")
    parser.add_argument("--rounds", type=int, default=1)
    options = options_of(parser, lambda kind, size: prepare(kind, int(size) * MB))
    rows = {
        f"{kind}, {size} MB": ["-m", "benchmarks.prepare", "--row", kind, str(size)]
        for kind in KINDS
        for size in options.sizes
    }
    results = measure(rows, options.rounds)
    keys = ("bytes", "tokens", "seconds", "cpu_seconds", "tokens_per_second", "growth_bytes", "window_seconds")
    figures = {name: {key: medians(results, key)[name] for key in keys} for name in rows}
    lines = [
        f"| {name} | {row['tokens'] / 1e6:,.0f} M | {row['seconds']:,.0f} | {row['tokens_per_second'] / 1e6:.2f} M "
        f"| {row['growth_bytes'] / MB:,.0f} | {row['window_seconds'] * 1e3:.1f} |"
        for name, row in figures.items()
    ]
    head = ["| file | tokens | s | tokens/s | grown by, MB | ms a window |", "|---|---:|---:|---:|---:|---:|"]
    write("prepare", {"rounds": results, "medians": figures}, "\n".join(head + lines))


if __name__ == "__main__":
    sys.exit(main())
