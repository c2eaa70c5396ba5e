"""Fine-tune a causal language model: python train.py precision=16 optim=adam8bit

`python train.py --help` lists all groups, choices and keys; conf/config.yaml has their defaults.
"""

import hydra
from omegaconf import DictConfig

from lowmem.command import cli
from lowmem.config.typed_lines import CONF


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(cfg: DictConfig) -> float:
    return cli.run(cfg)


if __name__ == "__main__":
    cli.start(main)
