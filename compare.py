"""Compare runs: python compare.py multirun/2026-01-31/12-00-00

The arguments are run folders, or folders that contain runs. Prints a table, and writes comparison.csv and
comparison.html. The page is one file and needs no network.
"""

from lowmem.report.compare.compare import main

if __name__ == "__main__":
    main()
