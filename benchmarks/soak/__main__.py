"""Run the benchmark: `python -m benchmarks.soak`."""

from benchmarks.soak.soak import Config, __doc__, main
from redraft.recipes.cli.run import run_recipe

run_recipe(main, Config, __doc__)
