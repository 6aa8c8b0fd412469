"""`python -m guardbit`: the same as the command `guardbit`."""

from guardbit.cli import app

app(prog_name="guardbit")
