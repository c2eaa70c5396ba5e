"""Everything that only a card can show, from one command: python -m benchmarks.card"""
