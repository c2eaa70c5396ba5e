"""Deliberately wrong variants that several tests use."""

from lowmem.training.module import CausalLM


def z_of_each_micro_batch(monkeypatch):
    """Makes the KTO loss of a micro-batch use a z that is computed from this micro-batch, instead of the z of the
    window."""
    right = CausalLM._run_micro_batch

    def wrong(self, micro_batch, weight, sums):
        (own,) = self.own_loss.callbacks()
        own.compute(self, [[micro_batch]])
        right(self, micro_batch, weight, sums)

    monkeypatch.setattr(CausalLM, "_run_micro_batch", wrong)
