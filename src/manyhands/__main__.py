"""`python -m manyhands`: the same as the `manyhands` command."""

from manyhands.cli.main import main

main()
