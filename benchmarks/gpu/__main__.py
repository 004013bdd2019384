"""Run the check: `python -m benchmarks.gpu`."""

from benchmarks.gpu.check import Config, __doc__, main
from redraft.recipes.cli.run import run_recipe

run_recipe(main, Config, __doc__)
