"""The disk tier of an engine, as its configuration has it."""

from typing import Any

from zse.cache.files import PageFiles
from zse.engine import divided_files, fingerprints, offload, rank_files
from zse.engine.disk_writes import DiskWriter


def open_disk_tier(engine: Any, config: Any, source: Any, quantize: str | None, ranks: Any = None) -> None:
    """Give an Engine, whose model comes from `source`, the tier of a ResolvedConfig with cache_disk; of several ranks (zse.engine.ranks)
    each has files, and rank 0 the tier, or one for each rank that has pages of its own. Raises ConfigError, GroupError."""
    fingerprint, mover = fingerprints.fingerprint_of(engine, config, source, quantize), engine.runner.pages
    if ranks is None:
        files = PageFiles(config.cache_disk, fingerprint, config.cache_disk_size, config.page_size)
        engine.use("disk", offload.DiskTier(engine, mover, files))
        return
    files, others = rank_files.open_files(ranks, config, fingerprint, mover.page_nbytes)
    if not ranks.leads:
        ranks.store = rank_files.RankStore(files, mover, ranks)
    elif config.page_pools > 1:
        engine.use("disk", divided_files.DividedDisk(engine, mover, files, ranks, others))
    else:
        writer = DiskWriter()
        far = rank_files.RankFiles(files, mover, ranks, others, writer)
        engine.use("disk", offload.DiskTier(engine, mover, files, far, writer))
