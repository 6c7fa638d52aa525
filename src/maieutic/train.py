"""``accelerate launch [--config_file recipes/accelerate/X.yaml] -m maieutic.train RECIPE [key=value …] [--resume auto|PATH]``.

``maieutic train`` is the same in one process. Exit codes: 0 finished, 2 the recipe (or its data or models) cannot be used,
85 / 143 / 130 stopped by SIGUSR1 / SIGTERM / Ctrl-C with a checkpoint, 1 anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from maieutic.errors import MaieuticError, RecipeError
from maieutic.training.signals import StopSignals


def parse(argv: Sequence[str]) -> tuple[str, list[str], str | None]:
    """Recipe, overrides, and where to resume from (``--resume X`` and ``resume=X`` mean the same)."""
    parser = argparse.ArgumentParser(prog="maieutic train", description="Train a tutor as a recipe says.")
    parser.add_argument("recipe", help="a file, or the name of a shipped recipe such as smollm2/dppo")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as training.max_steps=10")
    parser.add_argument(
        "--resume", metavar="auto|PATH", help="newest checkpoint of the run's folder, or this one"
    )
    # Options may stand between the overrides.
    given = parser.parse_intermixed_args(argv)
    overrides, resume = [], given.resume
    for text in given.overrides:
        key, _, value = text.partition("=")
        if key != "resume":
            overrides.append(text)
        elif resume not in (None, value):
            raise RecipeError(f"resume is given twice: {resume!r} and {value!r}")
        else:
            resume = value
    if resume == "":
        raise RecipeError("resume= names no checkpoint: write resume=auto, or the path of a checkpoint")
    return given.recipe, overrides, resume


def _train(argv: Sequence[str], signals: StopSignals) -> None:
    from maieutic.recipe import load_recipe

    name, overrides, resume = parse(argv)
    recipe = load_recipe(name, overrides)
    from maieutic.training.loop import run

    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # a log takes no control characters
    run(recipe, resume, signals=signals)


def main(argv: Sequence[str] | None = None, *, signals: StopSignals | None = None) -> int:
    """Run the command; returns the exit code. Errors of this package are one message, others keep their traceback.

    ``signals``: handlers that the caller has set already.
    """
    rank = int(os.environ.get("RANK", "0"))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the tokenizers' threads and a fork do not mix
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("maieutic")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if signals is not None:
            _train(arguments, signals)
        else:
            with StopSignals() as own:  # before the slow imports, so that a signal meanwhile is not lost
                _train(arguments, own)
    except MaieuticError as error:
        prefix = f"rank {rank}: " if rank else ""
        print(f"{prefix}{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        logger.removeHandler(handler)
    return 0


def leave(code: int) -> NoReturn:
    """Exit the process. Ranks of a process group leave without the interpreter's clean-up.

    All of ours is done by then, and torch's can wait for ever or abort: freeing the last reference to a gloo group joins a
    thread that waits for the interpreter lock, which the freeing thread holds; and a gloo thread that frees the tensors of its
    last collective once the interpreter is ending is unwound out of a destructor, which is std::terminate (exit code 134).
    """
    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        sys.exit(code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # a closed pipe must not change the exit code
                stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
