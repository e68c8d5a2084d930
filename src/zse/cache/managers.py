"""Which cache manager a geometry of pages asks for."""

from zse.cache import contiguous, grouped
from zse.cache.groups import PageGeometry
from zse.cache.manager import CacheManager
from zse.cache.pages import HostPool, PageAllocator
from zse.cache.prefix import PrefixCache


def cache_manager(
    allocator: PageAllocator, prefix: PrefixCache | None, host: HostPool | None, geometry: PageGeometry
) -> CacheManager:
    """The CacheManager of a geometry. prefix: not looked at where sequences have runs of pages."""
    if geometry.run:
        return contiguous.ContiguousCacheManager(allocator, host, geometry)
    if geometry.windowed:
        return grouped.GroupedCacheManager(allocator, prefix, host, geometry)
    return CacheManager(allocator, prefix, host, geometry)
