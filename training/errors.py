"""What Perdure raises. Each class carries the exit code of the command and, where one exists, what to do next."""

from perdure.training.redact import redact


class PerdureError(Exception):
    """Base of all our errors: one sentence with what, which path or value, and what to do; without the secrets in it."""

    exit_code = 1
    hint = ""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(redact(message))
        self.hint = redact(hint) or self.hint

    def in_one_line(self) -> str:
        """What happened, and what to do in brackets."""
        return f"{self} ({self.hint})" if self.hint else str(self)


class ConfigError(PerdureError, ValueError):
    """A setting is unknown, of the wrong type, impossible, or differs from the checkpoint's."""

    exit_code = 2


class RunBusy(PerdureError):
    """Another process holds this run."""

    exit_code = 3
    hint = "wait for it, or end it with `perdure stop RUN`"


class CheckpointNotFound(PerdureError, FileNotFoundError):
    """No such run, or no such checkpoint in it."""

    exit_code = 4


class CheckpointDamaged(PerdureError):
    """Stored bytes are not what was written. `part` is "manifest", "index", "pack" or the path of a tensor."""

    exit_code = 5

    def __init__(self, message: str, *, part: str = "", hint: str = "") -> None:
        super().__init__(message, hint)
        self.part = part


class StoreError(PerdureError, OSError):
    """The store could not be reached or refused the request. `retryable`: another try may help."""

    exit_code = 6

    def __init__(self, message: str, *, retryable: bool = True, hint: str = "") -> None:
        super().__init__(message, hint)
        self.retryable = retryable


class ObjectNotFound(StoreError, FileNotFoundError):
    """The store has no object of this key."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


class ObjectTooLarge(StoreError):
    """An object has more bytes than anything that belongs under its key."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


class NeedsThaw(StoreError):
    """A copy lies in a storage class that has to be thawed before it is read."""

    exit_code = 12
    hint = "ask for it with --thaw, then the same command goes on"

    def __init__(self, message: str, hint: str = "", *, checkpoint: str = "", place: str = "") -> None:
        super().__init__(message, retryable=False, hint=hint)
        self.checkpoint, self.place = checkpoint, place


class StoreConflict(StoreError):
    """A conditional write lost, or the store belongs to another run."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, retryable=False, hint=hint)


class TrainingFailed(PerdureError):
    """Training ended with a failure that another try would only repeat."""

    exit_code = 7


class NonFinite(PerdureError, ArithmeticError):
    """A loss or weight is NaN or infinite; such a state is never saved."""

    exit_code = 7


class DiskFull(PerdureError, OSError):
    """No room (bytes or inodes) for the next checkpoint; what exists was kept."""

    exit_code = 8


class NotReplicated(PerdureError):
    """The run is complete, but not everything is in the store yet; running it again only pushes."""

    exit_code = 9


class DrillFailed(PerdureError):
    """The rehearsal of a recovery did not come out as it must."""

    exit_code = 11


class Stopped(PerdureError):
    """Stopped before the last step, with its checkpoint saved; the same command goes on."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: schedulers requeue on it
