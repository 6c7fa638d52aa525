"""``python -m maieutic`` is the ``maieutic`` command."""

from maieutic.cli import app

if __name__ == "__main__":
    app()
