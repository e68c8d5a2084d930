"""What each tenant asked for and got, for /metrics: totals since the server's start, of a bounded number of tenants."""

from typing import NamedTuple

# Tenants with figures of their own; names that come later, by new key files, are counted together.
MAX_TENANTS = 256
OTHERS = "(others)"  # no key file can name a tenant so


class Usage:
    """Of one tenant. refused: by the full queue (503); limited: by its quota (429)."""

    __slots__ = ("cached_tokens", "completion_tokens", "limited", "prompt_tokens", "refused", "requests")

    def __init__(self) -> None:
        self.requests = self.refused = self.limited = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0


class Metric(NamedTuple):
    """A field of Usage in /metrics."""

    name: str
    field: str
    help: str


METRICS = (
    Metric(
        "zse_tenant_requests_total", "requests", "Requests of a tenant, by the name of its keys, that were answered."
    ),
    Metric("zse_tenant_requests_refused_total", "refused", "Of those, the ones that the full queue refused (503)."),
    Metric("zse_tenant_requests_limited_total", "limited", "Of those, the ones beyond the quota (429)."),
    Metric("zse_tenant_prompt_tokens_total", "prompt_tokens", "Tokens of a tenant's prompts."),
    Metric(
        "zse_tenant_cached_prompt_tokens_total", "cached_tokens", "Of those, the ones that were in the prefix cache."
    ),
    Metric("zse_tenant_completion_tokens_total", "completion_tokens", "Tokens of a tenant's answers."),
)


class Tenants:
    """Usage by tenant, as each is first seen."""

    def __init__(self, most: int = MAX_TENANTS):
        self._most = most
        self.by_name: dict[str, Usage] = {}

    def usage(self, tenant: str) -> Usage | None:
        """None for "", which is nobody's key."""
        found = self.by_name.get(tenant)
        if found is None and tenant:
            name = tenant if len(self.by_name) < self._most else OTHERS
            found = self.by_name.setdefault(name, Usage())
        return found

    def answered(self, tenant: str, status: int) -> None:
        """An answer to a request of the tenant ended, 0: the client left before it began."""
        usage = self.usage(tenant)
        if usage is not None:
            usage.requests += 1
            usage.refused += status == 503
            usage.limited += status == 429
