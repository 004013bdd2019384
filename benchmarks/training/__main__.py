"""Run the benchmark: `python -m benchmarks.training`."""

from benchmarks.training.bench import Config, __doc__, main
from redraft.recipes.cli.run import run_recipe

run_recipe(main, Config, __doc__)
