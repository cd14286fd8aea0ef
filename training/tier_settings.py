"""[store] and [tiers.NAME] of run.toml: where copies go beside the run directory, and which checkpoints go to a tier."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from perdure.training.errors import ConfigError
from perdure.training.retention_settings import RetentionSection, wrong_retention
from perdure.training.store_settings import NEED_THAW, StoreSettings, s3_url, wrong_store

RESERVED = ("local", "store")
"""Names of the two places that are no tier."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")


class StoreSection(StoreSettings, frozen=True, kw_only=True):
    url: str = ""
    """`file:///dir`, a folder relative to run.toml, or `s3://bucket/prefix`; holds exactly one run. Empty: no copies."""
    retention: RetentionSection = RetentionSection()
    """Which copies stay there; nothing set keeps all."""


class TierSection(StoreSection, frozen=True, kw_only=True):
    """Which checkpoints go there adds up; nothing set: all that are kept."""

    every: int = 0
    """Those whose step is a multiple of this."""
    milestones: bool = False
    """Those that are pinned."""
    best: int = 0
    """The best so many by `retention.best` of the tier."""

    @property
    def takes_all(self) -> bool:
        return not (self.every or self.milestones or self.best)


def wrong_places(store: StoreSection, tiers: Mapping[str, TierSection]) -> Iterator[tuple[str, str]]:
    """Each setting of the places for copies that cannot be, with what to do."""
    yield from _wrong_place(store, "store")
    if store.storage_class in NEED_THAW:
        yield (
            f"store.storage_class = {store.storage_class!r} has to be thawed for hours before a run can go on from it",
            "make that place a tier: [tiers.NAME]",
        )
    for name, tier in tiers.items():
        if not _NAME.fullmatch(name) or name in RESERVED:
            yield f"tiers.{name} cannot be a tier's name", "use small letters, digits, _ and -; not local, not store"
        if not tier.url:
            yield f"tiers.{name}.url is missing", "name a folder, or s3://bucket/prefix"
        for key in ("every", "best"):
            if getattr(tier, key) < 0:
                yield f"tiers.{name}.{key} = {getattr(tier, key)} is negative", "use 0 to leave it out"
        yield from _wrong_place(tier, f"tiers.{name}")


def _wrong_place(section: StoreSection, key: str) -> Iterator[tuple[str, str]]:
    yield from wrong_store(section, section.url, key)
    yield from wrong_retention(section.retention, f"{key}.retention")
    if any(ord(character) < 32 for character in section.url):
        yield f"{key}.url = {section.url!r} holds a control character", "write a plain path"


def absolute_url(url: str, base: Path, key: str) -> str:
    """The one spelling of a place's URL; folders are relative to `base`. Raises ConfigError."""
    if not url:
        return ""
    if url != url.strip():
        raise ConfigError(f"{key} {url!r} begins or ends with a space", "leave it out")
    parts = urlsplit(url)
    if parts.scheme == "s3":
        bucket = re.fullmatch(r"[A-Za-z0-9._-]{1,255}", parts.netloc)
        if not bucket or "?" in url or "#" in url or ".." in parts.path.split("/"):
            hint = "a bucket's name is of letters, digits, dots, dashes; a prefix has no #, no ? and no .."
            raise ConfigError(f"{key} {url!r} is not s3://bucket/prefix", hint)
        return s3_url(parts.netloc, unquote(parts.path))
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ConfigError(f"{key} {url!r} is not file:///absolute/folder", "write three slashes after file:")
        if "?" in url or "#" in url:
            raise ConfigError(
                f"{key} {url!r} is cut off at # or ?", "write %23 for #, %3F for ?, or the folder without file://"
            )
        return Path(unquote(parts.path)).as_uri()
    if "://" in url:
        raise ConfigError(f"{key} {url!r} has an unknown scheme", "use file:///folder or s3://bucket/prefix")
    return Path(base, url).resolve().as_uri()


def keep_apart(run_dir: Path, places: Mapping[str, tuple[str, str]], where: str) -> None:
    """A copy inside the run directory would be lost with it, a place inside another taken for its copies.

    `places`: key -> endpoint and URL."""
    placed = [("the run directory", ("", run_dir.as_uri())), *((key, place) for key, place in places.items() if place[1])]
    for number, (key, (endpoint, url)) in enumerate(placed):
        for other, (where_else, there) in placed[:number]:
            inside = f"{url}/".startswith(f"{there}/") or f"{there}/".startswith(f"{url}/")
            if inside and (endpoint == where_else or url.startswith("file:")):
                raise ConfigError(
                    f"{where}: {key} {_shown(url)} and {other} {_shown(there)} lie in one another", "name a folder elsewhere"
                )


def _shown(url: str) -> str:
    return unquote(urlsplit(url).path) if url.startswith("file:") else url
