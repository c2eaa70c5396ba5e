"""Loading a folder: its file stays resident where its tensors are copied into another dtype."""

import pytest
import torch

from lowmem.model.loading import describe, load
from lowmem.plan.prediction import predict
from lowmem.plan.target import Target


@pytest.mark.parametrize(("saved", "counted"), [("bfloat16", True), ("float32", False)])
def test_a_file_that_is_copied_is_counted_while_it_is_loaded(config, tmp_path, saved, counted):
    cfg = config("precision=32").resolved()
    network = load(describe(cfg), getattr(torch, saved))
    network.save_pretrained(tmp_path / "model")
    file = (tmp_path / "model" / "model.safetensors").stat().st_size
    drawn = predict(cfg, Target(on_card=False))
    cfg = cfg.knowing(model={"pretrained": True, "name": str(tmp_path / "model")})
    loaded = predict(cfg, Target(on_card=False))
    assert (drawn.mapped, loaded.mapped) == (0, file if counted else 0)
    growths = [one.phases["load"].host - one.host_categories["libraries"] for one in (drawn, loaded)]
    assert growths[1] - growths[0] == loaded.mapped
    assert loaded.host_need(None) <= loaded.host_peak  # the system takes a file's pages back before it runs out
