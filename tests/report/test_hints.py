"""A run says what to type next, and what a default may not be meant for."""

import pytest

from lowmem.report import hints

PUBLISHED = ("model=hf", "model.name=somewhere")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (("adapter=lora",), True),
        (("adapter=qlora", "model.lr=2e-5"), True),
        (("adapter=lora", "lr=2e-4"), False),
        ((), False),  # all weights: the model's lr is meant for them
        (("adapter=lora", "model.pretrained=false"), False),  # nobody knows what suits a random start
    ],
)
def test_an_adapter_with_the_step_size_of_all_weights_is_told(config, caplog, typed, told):
    with caplog.at_level("INFO", logger="lowmem"):
        hints.tell_lr(config(*PUBLISHED, *typed, base=()))
    assert ("with AdamW lr=2e-4" in caplog.text) == told
