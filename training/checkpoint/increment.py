"""The base of an increment: which full it is, and opening it to write against."""

import contextlib
import logging
from collections.abc import Iterator

from perdure.training.checkpoint import facts
from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.lineage import lineage
from perdure.training.checkpoint.reader import CheckpointReader, open_checkpoint
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound
from perdure.training.run_dir import CheckpointName, RunDir

logger = logging.getLogger(__name__)


def choose_base(run: RunDir) -> CheckpointName | None:
    """The newest full of the lineage that is not known to be damaged; None where there is none yet."""
    for name in lineage(run):
        if facts.trust(run, name) == "quarantined":
            continue
        with contextlib.suppress(CheckpointNotFound, CheckpointDamaged):  # deleted meanwhile, or no manifest any more
            if manifests.read(run.checkpoint(name)).base is None:
                return name
    return None


@contextlib.contextmanager
def opened_base(
    run: RunDir, run_id: str, name: CheckpointName, base: CheckpointName | None
) -> Iterator[CheckpointReader | None]:
    """The base, held while checkpoint `name` is written against it; None where it cannot be one, which is logged."""
    reader = None
    if base is not None:
        try:
            reader = _opened(run, run_id, name, base)
        except (CheckpointNotFound, CheckpointDamaged, OSError) as error:
            logger.warning("%s is written as a full: its base cannot be used: %s", name, error)
    with reader or contextlib.nullcontext():
        yield reader


def _opened(run: RunDir, run_id: str, name: CheckpointName, base: CheckpointName) -> CheckpointReader:
    reader = open_checkpoint(run.checkpoint(base))
    try:
        if reader.base is not None or reader.manifest.run != run_id or base.step >= name.step:
            raise CheckpointDamaged(f"{base} is no full of a lower step of run {run_id}", part="manifest")
        for rank in range(reader.ranks):
            reader.rank_entries(rank)
    except BaseException:
        reader.close()
        raise
    return reader
