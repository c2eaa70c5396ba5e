"""Deliberately wrong variants that several tests use."""

from lowmem.training.module import CausalLM


def z_of_each_micro_batch(monkeypatch):
    """Makes the KTO loss compute a separate z from the rows of each micro-batch, instead of one z per window."""
    right = CausalLM._run_micro_batch

    def wrong(self, micro_batch, weight, sums):
        (own,) = self.own_loss.callbacks()
        own.compute(self, [[micro_batch]])
        right(self, micro_batch, weight, sums)

    monkeypatch.setattr(CausalLM, "_run_micro_batch", wrong)
