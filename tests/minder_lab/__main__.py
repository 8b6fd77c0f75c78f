"""python -m tests.minder_lab VERB, see `verbs`."""

from tests.minder_lab.verbs import main

main()
