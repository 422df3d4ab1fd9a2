"""``python -m hrm``."""

from hrm.cli import main

main()
