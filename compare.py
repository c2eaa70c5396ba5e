"""Runs side by side: python compare.py multirun/2026-01-31/12-00-00

Any number of folders, each a run or with runs below it. Prints the table, and writes comparison.csv and
comparison.html, one page that opens without a network.
"""

from lowmem.report.compare.compare import main

if __name__ == "__main__":
    main()
