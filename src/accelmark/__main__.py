"""``python -m accelmark``: the command line where its script is not installed."""

from accelmark.cli import main

if __name__ == "__main__":
    main()
