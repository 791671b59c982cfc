"""`python -m kvir` is the `kvir` command."""

from kvir.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
