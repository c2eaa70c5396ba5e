"""Implements hydra/sweeper=optuna: searches for overrides by the figures of finished runs.

Hydra's own plug-in asks for optuna below 3, four years old; this one asks today's, and takes any figure of summary.json
as an objective. It stands in this package because Hydra looks for plug-ins nowhere else. optuna is imported when a
search begins: Hydra loads this file for every command.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Transformer
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from lowmem.report import folders
from lowmem.system.errors import Refused


class Optuna(Sweeper):
    """Searches with optuna.

    Args:
        minimize, maximize: figures of summary.json; `peak_bytes.device` is a nested one.
        trials: the number of runs.
        at_once: the number of runs that the launcher gets at a time.
        seed: of the sampler: the same seed and figures give the same search, so that it can be resumed.
    """

    def __init__(self, minimize: Sequence[str], maximize: Sequence[str], trials: int, at_once: int, seed: int) -> None:
        self.objectives = list(minimize) + list(maximize)
        self.directions = ["minimize"] * len(minimize) + ["maximize"] * len(maximize)
        self.trials, self.at_once, self.seed = trials, at_once, seed

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        if not self.objectives:
            raise Refused("hydra/sweeper=optuna: for what? Type hydra.sweeper.minimize=[val_loss].")
        parsed = OverridesParser.create(config_loader=self.hydra_context.config_loader).parse_overrides(arguments)
        space = {o.get_key_element(): _distribution(o) for o in parsed if o.is_sweep_override()}
        fixed = [f"{o.get_key_element()}={o.get_value_element_as_str()}" for o in parsed if not o.is_sweep_override()]
        if not space:
            raise Refused("hydra/sweeper=optuna: nothing to search. Type lr=interval(1e-4,1e-2) or precision=32,bf16.")
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        # A batch is asked for before any of it is told: with the constant liar its trials keep away from each other.
        sampler = optuna.samplers.TPESampler(seed=self.seed, constant_liar=True)
        study = optuna.create_study(directions=self.directions, sampler=sampler)
        known: dict[tuple, list[float]] = {}
        while len(study.trials) < self.trials:
            batch = [study.ask(space) for _ in range(min(self.at_once, self.trials - len(study.trials)))]
            new = {_key(trial): trial for trial in batch if _key(trial) not in known}
            typed = [[*fixed, *(f"{key}={value}" for key, value in trial.params.items())] for trial in new.values()]
            if typed:
                self.launcher.launch(typed, initial_job_idx=len(known))
            for number, key in enumerate(new, len(known)):
                known[key] = _values(folder / str(number), self.objectives)
            for trial in batch:
                values = known[_key(trial)]
                study.tell(trial, values or None, None if values else optuna.trial.TrialState.FAIL)
        self._report(study, folder, list(known))

    def _report(self, study, folder: Path, known: Sequence[tuple]) -> None:
        """Prints the best run, or the Pareto front of several objectives; search.json has all trials."""
        finished = [trial for trial in study.trials if trial.values]
        best = sorted({known.index(_key(trial)) for trial in (study.best_trials if finished else [])})
        trials = [
            {"job": known.index(_key(t)), "overrides": _plain(t.params), "values": t.values} for t in study.trials
        ]
        found = {"objectives": self.objectives, "best_jobs": best, "trials": trials}
        (folder / "search.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        what = "best is" if len(self.objectives) == 1 else "none is better in all of them than"
        print(f"\n{', '.join(self.objectives)}: {what} job {', '.join(map(str, best)) or '-'}")


def _distribution(override: Override):
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    if isinstance(value, RangeSweep | IntervalSweep):
        low, high = (value.start, value.stop) if isinstance(value, RangeSweep) else (value.start, value.end)
        whole = isinstance(low, int) and isinstance(high, int)
        steps = {"step": value.step} if isinstance(value, RangeSweep) else {"log": "log" in value.tags}
        if isinstance(value, RangeSweep):
            high -= value.step if whole else 0  # Hydra's range ends before its stop
        return (IntDistribution if whole else FloatDistribution)(low, high, **steps)
    return CategoricalDistribution(list(override.sweep_iterator(transformer=Transformer.encode)))


def _plain(typed: Mapping[str, object]) -> dict[str, object]:
    """Returns values without the quotes with which Hydra distinguishes the choice '32' from the number."""
    return {key: value.strip("'") if isinstance(value, str) else value for key, value in typed.items()}


def _key(trial) -> tuple:
    return tuple(sorted(trial.params.items()))


def _values(folder: Path, objectives: Sequence[str]) -> list[float]:
    """Returns the objectives of a run; none for a run that failed."""
    summary = folders.load(folder).summary if folder.is_dir() else None
    values = []
    for name in objectives if summary else ():
        value: object = summary
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if not isinstance(value, int | float):
            raise Refused(
                f"hydra/sweeper=optuna: {name} is no figure of {folder / 'summary.json'}. Give one of it, such as "
                "val_loss, tokens_per_second or peak_bytes.device."
            )
        values.append(float(value))
    return values
