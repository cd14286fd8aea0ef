"""The run's store, by really doing what a run does: put, get, conditional put, list, multipart, delete of a probe object.

The probe lies under the run's own prefix and has the same name and content each time, so nothing piles up where the key may
not delete."""

import contextlib
import socket
import tempfile
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

import msgspec

from perdure.deployments.checks.finding import Finding, Subject, clock, fail, failed, ok, skip, skip_all, warn
from perdure.training.amounts import counted
from perdure.training.errors import ConfigError, ObjectNotFound, StoreConflict, StoreError
from perdure.training.run_dir import RunDir
from perdure.training.storage.store import ObjectStore, open_store
from perdure.training.travel.fence import remote_run_info

_STEPS = ("store get", "store conditional put", "store list", "store multipart", "store unfinished", "store delete")
_PART_MIB = 5
_MAX_SKEW_SECS = 300.0
"""S3 refuses requests that are a quarter of an hour off."""
_LONG = b"perdure doctor " * ((_PART_MIB << 20) // 15 + 1000)


def check_store(subject: Subject) -> Iterator[Finding]:
    """Every right that a run needs, each by a real request."""
    config = subject.config
    if config is None or not config.store_url:
        why = "no RUN.toml was named" if config is None else "the run has no store: no copies are made"
        yield skip("store", why)
        return
    try:
        store = open_store(config.store_url, msgspec.structs.replace(config.store, part_mib=_PART_MIB))
    except ConfigError as error:
        yield failed("store", error)
        return
    probe = _Probe(store)
    try:
        yield from probe.put()
    except StoreError as error:
        yield failed("store put", error)
        yield from skip_all(_STEPS, "the probe could not be put")
    else:
        yield from probe.rest()
    yield _clock(store)
    yield _owner(store, config.run.name)


class _Probe:
    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.key = f"doctor/probe-{socket.gethostname()}"
        self.long_key = f"doctor/parts-{socket.gethostname()}"
        self.made: list[str] = []

    def put(self) -> Iterator[Finding]:
        self.store.put(self.key, b"perdure doctor")
        self.made.append(self.key)
        yield ok("store put", f"{self.store.url} takes objects")

    def rest(self) -> Iterator[Finding]:
        """Each step on its own: one right that is missing does not hide another."""
        steps = (self.get, self.conditional_put, self.list, self.multipart, self.unfinished, self.delete)
        for name, step in zip(_STEPS, steps, strict=True):
            try:
                yield step()
            except StoreError as error:
                yield failed(name, error)

    def get(self) -> Finding:
        if self.store.get(self.key, limit=1000) != b"perdure doctor":
            return fail("store get", f"{self.key} comes back with other bytes", "use another store: this one loses data")
        return ok("store get", "what was put comes back")

    def conditional_put(self) -> Finding:
        """Fencing between two machines stands on this."""
        name = "store conditional put"
        won = self.store.put(self.key, b"perdure doctor, put twice", if_absent=True)
        if won or self.store.get(self.key, limit=1000) != b"perdure doctor":
            text = "If-None-Match is ignored: an existing object was overwritten, so two machines could go on with one run"
            return fail(name, text, "use a server that honours it (AWS, SeaweedFS, MinIO, Ceph, R2 do)")
        return ok(name, "an existing object is left alone")

    def list(self) -> Finding:
        if self.key not in [info.key for info in self.store.list("doctor/")]:
            return fail("store list", f"{self.key} is not listed after it was put", "use a store with consistent listings")
        return ok("store list", "the probe is listed")

    def multipart(self) -> Finding:
        """Through a folder of our own: the store reads a file."""
        with tempfile.TemporaryDirectory(prefix="perdure-doctor-") as folder:
            path = Path(folder, "probe")
            path.write_bytes(_LONG)
            self.store.put_file(self.long_key, path)
        self.made.append(self.long_key)
        at = len(_LONG) - 1000
        if self.store.size(self.long_key) != len(_LONG) or self.store.get_range(self.long_key, at, 1000) != _LONG[at:]:
            return fail("store multipart", f"{self.long_key} comes back with other bytes", "use another store")
        return ok("store multipart", "large files in parts, read back by range")

    def unfinished(self) -> Finding:
        name = "store unfinished"
        try:
            old = [upload for upload in self.store.list_uploads("") if upload.age_secs > 7 * 86400]
        except StoreError as error:
            fix = "allow s3:ListBucketMultipartUploads and s3:ListMultipartUploadParts (docs/stores.md)"
            return warn(name, f"a killed upload starts again from its first part: {error}", fix)
        if old:
            fix = "add a lifecycle rule AbortIncompleteMultipartUpload to the bucket"
            return warn(name, f"begun over a week ago, never finished, costing money: {counted(len(old), 'upload')}", fix)
        return ok(name, "no old unfinished uploads")

    def delete(self) -> Finding:
        try:
            self.store.delete(self.made)
        except StoreError as error:
            text = f"the key may not delete: prune and archive cannot free room in the store; {', '.join(self.made)} stay"
            fix = "allow s3:DeleteObject where that is wanted (docs/stores.md), else leave it so"
            return warn("store delete", text if not error.retryable else str(error), fix)
        _drop_folders(self.store)
        left = [key for key in self.made if self.store.size(key) is not None]
        if left:
            return warn("store delete", f"{', '.join(left)} is still there after its deletion", "see the store's settings")
        return ok("store delete", "the probe is gone again")


def _drop_folders(store: ObjectStore) -> None:
    """A store that is a folder shall look as before; what is not empty stays."""
    root = getattr(store, "root", None)
    if isinstance(root, Path):
        with contextlib.suppress(OSError):
            (root / "doctor").rmdir()
            root.rmdir()


def _clock(store: ObjectStore) -> Finding:
    """By the Date of an answer; a folder has this machine's clock."""
    raw = getattr(store, "raw", None)
    if raw is None:
        return skip("store clock", "a folder has no clock of its own")
    from botocore.exceptions import ClientError

    date, began = "", time.time()
    try:
        date = raw("list_objects_v2", "", Prefix="", MaxKeys=1)["ResponseMetadata"]["HTTPHeaders"].get("date", "")
    except StoreError as error:
        return skip("store clock", f"no answer: {error}")
    except ClientError as error:  # a refusal has a date as well
        date = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    now = (began + time.time()) / 2
    with contextlib.suppress(ValueError, TypeError):
        return clock("store clock", "the store", now - parsedate_to_datetime(date).timestamp() - 0.5, _MAX_SKEW_SECS)
    return skip("store clock", "its answers have no date")


def _owner(store: ObjectStore, name: str) -> Finding:
    try:
        held = remote_run_info(store)
    except ObjectNotFound:
        return ok("store owner", "no run is in it yet")
    except StoreConflict as error:
        return failed("store owner", error)
    except StoreError as error:
        return skip("store owner", f"its {RunDir.RUN_KEY} cannot be read: {error}")
    if held.name != name:
        fix = "give this run a store.url of its own, or set run.name to go on with that one"
        return fail("store owner", f"{store.url} holds run {held.name!r}, not {name!r}", fix)
    return ok("store owner", f"holds this run, {held.id}")
