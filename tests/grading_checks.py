"""Checks that misbehave, for the grader's workers to import."""

import os
import time


def echo(answer: str, gold: str) -> bool:
    """Right if equal as text."""
    return answer == gold


def misbehave(answer: str, gold: str) -> bool:
    """Do what the answer says; otherwise compare as text."""
    if answer == "hang":
        time.sleep(3600)
    if answer == "die":
        os._exit(7)
    if answer == "raise":
        raise RuntimeError("no idea")
    if answer == "chat":
        print("not part of the protocol", flush=True)
    return answer == gold


def torch_loaded(answer: str, gold: str) -> bool:
    """Right if this process has imported torch."""
    import sys

    return "torch" in sys.modules
