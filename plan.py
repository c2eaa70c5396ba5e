"""Say what fits before anyone waits: python plan.py model=gpt2-xl gpu=12GiB ram=32GiB

Any override of train.py works beside gpu, ram, search and devices; conf/plan.yaml says what they mean.
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
