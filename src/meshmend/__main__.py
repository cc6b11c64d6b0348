"""`python -m meshmend` is the command line."""

from meshmend.cli import main

main()
