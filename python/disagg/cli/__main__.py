"""`python -m disagg.cli` is the command `disagg`."""

from disagg.cli import main

if __name__ == "__main__":
    main()
