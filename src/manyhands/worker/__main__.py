"""`python -m manyhands.worker`: the same as `manyhands worker`."""

from manyhands.worker.command import main

main()
