"""``python -m eyas`` is the command ``eyas``."""

from eyas.cli import main

main()
