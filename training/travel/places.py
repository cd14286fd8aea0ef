"""The places a run's copies go to besides its directory: the store and the tiers of its run.toml, opened."""

from dataclasses import dataclass

from perdure.training.checkpoint import facts
from perdure.training.config import RunConfig
from perdure.training.storage.store import ObjectStore, open_store
from perdure.training.tier_settings import StoreSection, TierSection
from perdure.training.travel.copies import Stored


@dataclass(frozen=True, kw_only=True)
class Remote:
    """One place, opened; nobody is contacted yet."""

    word: str
    """`store`, or the name of the tier."""
    store: ObjectStore
    section: StoreSection

    @property
    def copies(self) -> Stored:
        """To look at what is there."""
        return Stored(self.store, self.word)


@dataclass(frozen=True, kw_only=True)
class Tier(Remote):
    section: TierSection


def tiers_of(config: RunConfig) -> list[Tier]:
    """As the run.toml has them."""
    return [
        Tier(word=name, store=open_store(config.tier_urls[name], section), section=section)
        for name, section in config.tiers.items()
    ]


def remotes_of(config: RunConfig) -> list[Remote]:
    """In the order in which they are read: tiers that are folders, the store, the other tiers."""
    tiers = tiers_of(config)
    near: list[Remote] = [tier for tier in tiers if tier.store.url.startswith("file:")]
    if config.store_url:
        near.append(Remote(word=facts.STORE, store=open_store(config.store_url, config.store), section=config.store))
    return [*near, *(tier for tier in tiers if tier not in near)]


def reading_order(config: RunConfig) -> list[Stored]:
    """The places of a run besides its directory, in the order in which they are read."""
    return [remote.copies for remote in remotes_of(config)]
