"""Run the benchmark: `python -m benchmarks.time_to_tau`."""

from benchmarks.time_to_tau.bench import Config, __doc__, main
from redraft.recipes.cli.run import run_recipe

run_recipe(main, Config, __doc__)
