"""``python -m maieutic.slurm.step [--gpus A-B] -- COMMAND…``: become a command that sees a slice of the step's GPUs.

Steps that overlap (trainers and servers of one job on one node) all see the job's GPUs; the plan gives each its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence

from maieutic.slurm.errors import SlurmError

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def slice_gpus(spec: str, environment: MutableMapping[str, str]) -> None:
    """Leave only GPUs A to B (``A-B``, counted in what is visible now) visible. Raises :class:`SlurmError` when there are fewer."""
    first, _, last = spec.partition("-")
    low, high = int(first), int(last or first)
    given = [v for v in _VARIABLES if environment.get(v)]
    for variable in given:
        visible = environment[variable].split(",")
        if high >= len(visible):
            raise SlurmError(
                f"GPUs {spec} of this node were planned, but {variable} shows {len(visible)} ({environment[variable]}): "
                "GPUS_PER_NODE of the site settings is not what the job got"
            )
        environment[variable] = ",".join(visible[low : high + 1])
    if not given:  # a site that does not confine steps: all GPUs of the node are there
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(i) for i in range(low, high + 1))


def main(argv: Sequence[str]) -> None:
    """Never returns: the process becomes the command."""
    arguments = list(argv)
    if arguments[:1] == ["--gpus"]:
        try:
            slice_gpus(arguments[1], os.environ)
        except SlurmError as error:
            sys.exit(f"SlurmError: {error}")
        del arguments[:2]
    if arguments[:1] != ["--"] or len(arguments) < 2:
        sys.exit("usage: python -m maieutic.slurm.step [--gpus A-B] -- COMMAND…")
    sys.stdout.flush()
    try:
        os.execvp(arguments[1], arguments[1:])
    except OSError as error:
        sys.exit(
            f"SlurmError: {arguments[1]}: {error.strerror}: is PYTHON of the site settings there on every node?"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
