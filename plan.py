"""Predict which recipes fit on a card: python plan.py model=gpt2-xl gpu=12GiB ram=32GiB

Accepts every override of train.py, and the keys of conf/plan.yaml, such as gpu, ram and search.
"""

import hydra
from omegaconf import DictConfig

from lowmem.command import cli
from lowmem.config.typed_lines import CONF


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="plan")
def main(cfg: DictConfig) -> None:
    cli.plan(cfg)


if __name__ == "__main__":
    cli.start(main, config="plan")
