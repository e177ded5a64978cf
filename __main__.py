"""``python -m qtool`` is the command ``qtool``."""

from qtool.cli import main

if __name__ == "__main__":
    main()
